"""Data sets by name, and a person's own: the public face of `pfedhn.data`."""

from pfedhn.data.catalogue import DATASETS, Dataset, Source, cache_path, cache_state, get, load
from pfedhn.data.files import Table, from_folders, from_table

__all__ = [
    "DATASETS",
    "Dataset",
    "Source",
    "Table",
    "cache_path",
    "cache_state",
    "from_folders",
    "from_table",
    "get",
    "load",
]
