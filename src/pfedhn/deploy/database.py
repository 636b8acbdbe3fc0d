"""The database of a server's folder: one file of SQLite, which other programs can read while the server runs."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pfedhn.errors import RunError, first_line
from pfedhn.system.files import make_folder, writing

DATABASE = "federation.db"
VERSION = 1  # of the tables, in the file's user_version
SECONDS_TO_WAIT = 30.0  # for another process that writes
MAX_LOG = 64 << 20  # bytes to which the log of recent changes is cut

TABLES = """
create table plan (digest text not null);
create table checkpoints (number integer primary key, after integer not null, record text not null);
create table tensors (checkpoint integer not null, name text not null, content blob not null,
                      primary key (checkpoint, name)) without rowid;
create table journal (number integer primary key, kind text not null, party text, record text not null,
                      message blob not null, digest text not null);
"""
"""A checkpoint is the state after the journal's record `after`; its tensors are in safetensors, one for each name. A
record of the journal is JSON, and for an accepted update the party's signed message as it came."""


class Database:
    """A server's database, for the threads of a process.

    Args:
        folder: Has the file, which is made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder, mode=0o700)
        self.path = folder / DATABASE
        self._lock = threading.RLock()
        with writing(self.path):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        with self._said():
            self._connection = sqlite3.connect(
                self.path, SECONDS_TO_WAIT, isolation_level=None, check_same_thread=False
            )
            self._connection.text_factory = _text
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")  # a record outlasts a power cut
            self._connection.execute(f"pragma journal_size_limit = {MAX_LOG}")
        with self.changing() as cursor:
            version = cursor.execute("pragma user_version").fetchone()[0]
            if version == 0:
                for statement in filter(str.strip, TABLES.split(";")):
                    cursor.execute(statement)
                cursor.execute(f"pragma user_version = {VERSION}")
            elif version != VERSION:
                raise RunError(f"{self.path} was made by another version of pfedhn; use that, or give another folder.")

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Cursor]:
        """All changes of the block, on the disk when it ends, or none of them."""
        with self._lock, self._said(), closing(self._connection.cursor()) as cursor:
            cursor.execute("begin immediate")
            try:
                yield cursor
            except BaseException:
                cursor.execute("rollback")
                raise
            cursor.execute("commit")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Cursor]:
        """What the database holds, at one moment."""
        with self._lock, self._said(), closing(self._connection.cursor()) as cursor:
            cursor.execute("begin")
            try:
                yield cursor
            finally:
                cursor.execute("rollback")

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Turn SQLite's errors into a sentence that names the file and the way out."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            way_out = "restore the folder from a backup"
            if isinstance(error, sqlite3.OperationalError):
                way_out = "make room, make it writable, or end the program that holds it; the same command resumes"
            raise RunError(f"{self.path}: {first_line(error)}; {way_out}.") from error


def _text(content: bytes) -> str:
    """Text of the database; damage in it is found by its digest."""
    return content.decode(errors="replace")
