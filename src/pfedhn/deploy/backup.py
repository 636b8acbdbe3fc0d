"""Copies of a federation's folder, made while its server or party runs."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from pfedhn.errors import UserError
from pfedhn.system.files import LOCK, is_empty, make_folder, reading, writing

OF_THE_MOMENT = ("-wal", "-shm", ".part", LOCK, "status.json")  # endings of files that a copy does not need


def back_up(folder: Path, copy: Path) -> int:
    """Copy a folder, its databases as they are at one moment; the number of files."""
    if not is_empty(copy):
        raise UserError(f"{copy} is not empty; give a new folder for the backup.")
    make_folder(copy, mode=0o700)
    count = 0
    with reading(folder), writing(copy):
        # Databases last: a key or an invitation that they name is in the copy then.
        for file in sorted(folder.rglob("*"), key=lambda file: (file.suffix == ".db", file)):
            place = copy / file.relative_to(folder)
            if file.is_dir():
                make_folder(place, mode=0o700)
            elif not file.name.endswith(OF_THE_MOMENT):
                place.touch(mode=0o600)
                if file.suffix == ".db":
                    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(place)) as target:
                        source.backup(target)
                else:
                    shutil.copyfile(file, place)
                count += 1
    return count
