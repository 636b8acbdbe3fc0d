"""Data sets by name and from your own files: `pfedhn.datasets`."""

from pfedhn.data.catalogue import DATASETS, Dataset, cache_path, cache_state, get, load
from pfedhn.data.files import read_federation
from pfedhn.data.folders import Folders, from_folders
from pfedhn.data.hugging_face import from_hugging_face
from pfedhn.data.labels import Task
from pfedhn.data.originals import Source
from pfedhn.data.tables import Table, from_table

__all__ = [
    "DATASETS",
    "Dataset",
    "Folders",
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
    "read_federation",
]
