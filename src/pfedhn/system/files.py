"""A person's files: written whole or not at all, by one process at a time; errors say what to do."""

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pfedhn.errors import RunError, UserError, first_line, short

LOCK = ".lock"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system
ANOTHER_PLACE = "give a place that can be written (--out for a folder; --export, --save or --plot for a file)"


def cache_folder() -> Path:
    """The folder of decoded data sets and compiled kernels: PFEDHN_CACHE, or ~/.cache/pfedhn."""
    return given_path(os.environ.get("PFEDHN_CACHE") or Path.home() / ".cache" / "pfedhn")


def given_path(path: str | Path, is_resolved: bool = False) -> Path:
    """A path as a person writes it, with ~ for a home; a resolved one is absolute."""
    if hasattr(path, "to_csv"):
        raise UserError(
            f"a {type(path).__name__} is no path; save it with to_csv('table.csv', index=False), and give 'table.csv'."
        )
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise UserError(f"{short(path)} is no path; give one without null characters.")
    try:
        expanded = Path(path).expanduser()
        return expanded.resolve() if is_resolved else expanded
    except (RuntimeError, OSError) as error:  # ~nobody; links that lead in a circle
        raise UserError(f"{path} leads nowhere ({first_line(error)}); give another path.") from None


def write_atomically(
    path: Path, content: bytes, way_out: str = ANOTHER_PLACE, mode: int = 0o666, is_lasting: bool = True
) -> None:
    """Write the whole new file or leave the old one, whenever the power goes.

    The content goes to a new file beside it first, whose name nobody can guess. Neither there nor at the path itself
    is a link followed: it is refused, or replaced.

    Args:
        path: The file.
        content: All of its content.
        way_out: What a person can do if the system refuses.
        mode: Who may read and write it, before the process's mask; 0o600 for a secret.
        is_lasting: Whether to wait for the disk, which takes long. Else a power cut may leave a truncated file.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with writing(path, way_out):
        try:
            with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                if is_lasting:
                    os.fsync(file.fileno())
            os.replace(scratch, path)
            if is_lasting:
                keep_names(path.parent)
        finally:
            with suppress(OSError):  # it became the file itself, or was never made
                scratch.unlink()


def keep_names(folder: Path) -> None:
    """Let what was made or renamed in a folder outlast a power cut, if the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def append(path: Path, text: str, mode: int = 0o666) -> None:
    """Add lines to a file, made with this mode if it is new; only after `flush` do they outlast a power cut."""
    with writing(path), open(path, "a", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text)


def flush(path: Path) -> None:
    """Wait until the lines that were added to a file are on the disk, which takes long."""
    with writing(path), path.open("ab") as file:
        os.fsync(file.fileno())


def make_folder(path: Path, way_out: str = ANOTHER_PLACE, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless it exists; with a mode of 0o700 only its owner can look into it."""
    with writing(path, way_out):
        path.mkdir(mode, parents=True, exist_ok=True)


def is_empty(folder: Path) -> bool:
    """Whether a folder is empty or does not exist; what another process is about to write does not count yet."""
    with writing(folder):
        return not folder.exists() or all(file.match(".*.part") or file.name == LOCK for file in folder.iterdir())


def read_text(path: Path) -> str:
    return read_bytes(path).decode()


def read_bytes(path: Path) -> bytes:
    with reading(path):
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for, a device read forever
            raise UserError(f"{path} is not a regular file; give a file.")
        return path.read_bytes()


@contextmanager
def writing(path: Path, way_out: str = ANOTHER_PLACE) -> Iterator[None]:
    """Turn the system's errors inside the block into a sentence that names the path and the way out."""
    try:
        yield
    except OSError as error:
        way_out = "make room, and the same command resumes" if error.errno in NO_ROOM else way_out
        raise RunError(f"{path}: {_reason(error)}; {way_out}.") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """As `writing`, for a file or folder that is only read."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be read ({_reason(error)}); make it readable, or give another.") from error


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process changes a file of this folder; the lock ends with its process.

    The folder itself is locked, so that nothing is left in it.
    """
    from filelock import FileLock, lock_descriptor  # here: the help of the command line needs no lock

    if os.name == "nt":  # where no folder can be locked, but the file of a lock goes with it
        with FileLock(folder / LOCK):
            yield
        return
    with writing(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            lock_descriptor(handle)
        yield
    finally:
        os.close(handle)


@contextmanager
def claimed(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the folder of a run, or refuse after some seconds of waiting; the lock ends with its process.

    Half-written files of a process that was killed are removed.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=seconds)
    with writing(folder):
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"{folder} is being run by another process; wait for it or stop it.") from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        for left in folder.glob(".*.part"):
            left.unlink(missing_ok=True)
    try:
        yield
    finally:
        lock.release()


def is_claimed(folder: Path) -> bool:
    """Whether a process holds the folder of a run, as `claimed` does."""
    try:
        with claimed(folder, 0.0):
            return False
    except UserError:
        return True


def write_trouble(folder: Path) -> str | None:
    """Why nothing can be written to a folder, which need not exist; None if it can."""
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return _reason(error)
