"""Data sets by name and from your own files: `pfedhn.datasets`."""

from pfedhn.data.catalogue import DATASETS, Dataset, cache_path, cache_state, get, load
from pfedhn.data.files import read_federation
from pfedhn.data.folders import Folders, from_folders
from pfedhn.data.hugging_face import from_hugging_face
from pfedhn.data.labels import Task
from pfedhn.data.originals import Source
from pfedhn.data.silo_catalogue import SILOS, Silo
from pfedhn.data.silos import load_silo
from pfedhn.data.tables import Table, from_table

__all__ = [
    "DATASETS",
    "Dataset",
    "Folders",
    "SILOS",
    "Silo",
    "Source",
    "Table",
    "Task",
    "cache_path",
    "cache_state",
    "from_folders",
    "from_hugging_face",
    "from_table",
    "get",
    "load",
    "load_silo",
    "read_federation",
]
