"""Files that are written whole or not at all, and one writer at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Either the whole new file or the old one, whenever the power goes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # two processes may write the same file
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None:
            error.filename, error.filename2 = str(path), None  # the name that the person gave
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process changes a file of this folder; the system lets go however a process ends."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
