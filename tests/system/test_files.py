"""Files are written whole or not at all, locked against other processes, and trouble with them is one sentence."""

import errno
import multiprocessing
import os
import stat
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from pfedhn.errors import RunError, UserError
from pfedhn.system.files import (
    claimed,
    is_empty,
    make_folder,
    one_at_a_time,
    read_text,
    write_atomically,
    write_trouble,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for content in (b"one", b"two"):
        write_atomically(file, content)
        assert file.read_bytes() == content
        assert names(tmp_path) == {"a.txt"}


def test_a_file_can_be_read_by_whom_the_person_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.txt", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "a.txt", b"old")

    def fail(handle: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((RunError, KeyboardInterrupt)):
        write_atomically(tmp_path / "a.txt", b"new")
    assert names(tmp_path) == {"a.txt"}
    assert (tmp_path / "a.txt").read_bytes() == b"old"


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one at the name itself nor one that somebody has put where the new content goes first."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "a.txt").symlink_to(victim)
    write_atomically(tmp_path / "a.txt", b"new")
    assert not (tmp_path / "a.txt").is_symlink()
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".a.txt.guessed.part").symlink_to(victim)
    with pytest.raises(RunError, match="file exists"):
        write_atomically(tmp_path / "a.txt", b"newer")
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "a.txt").read_bytes() == b"new"


def test_trouble_is_a_sentence_that_names_the_path_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    place = "give a place that can be written"
    with pytest.raises(RunError, match=f"^{tmp_path}/file/a.txt: not a directory; {place} .*[.]$"):
        write_atomically(tmp_path / "file" / "a.txt", b"")
    with pytest.raises(RunError, match=f"^{tmp_path}/file/folder: not a directory; {place} .*[.]$"):
        make_folder(tmp_path / "file" / "folder")
    with pytest.raises(RunError, match=f"^{tmp_path}/file: not a directory; {place} .*[.]$"):
        is_empty(tmp_path / "file")
    with pytest.raises(RunError, match=r"cannot be read \(is a directory\); make it readable, or give another\.$"):
        read_text(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r": no space left on device; make room, and the same command resumes\.$"):
        write_atomically(tmp_path / "a.txt", b"", "give another place")


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert write_trouble(tmp_path / "file" / "folder") == "not a directory"
    assert write_trouble(tmp_path / "new" / "folder") is None
    assert names(tmp_path) == {"file"}


def test_what_a_killed_process_left_is_removed_with_the_next_claim(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.safetensors.0123.part").write_bytes(b"half")
    (tmp_path / "checkpoint.json").write_bytes(b"whole")
    with claimed(tmp_path, 0):
        pass
    assert names(tmp_path) == {"checkpoint.json", ".lock"}


def add_one(folder: Path) -> None:
    for _ in range(50):
        with one_at_a_time(folder):
            number = int((folder / "number").read_text())
            write_atomically(folder / "number", str(number + 1).encode())


def test_processes_change_a_folder_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=add_one, args=(tmp_path,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "number").read_text() == "150"
    assert names(tmp_path) == {"number"}


def hold(pipe: Connection, folder: Path) -> None:
    with claimed(folder, 0):
        pipe.send("held")
        pipe.recv()


def test_a_claim_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=hold, args=(theirs, tmp_path))
    worker.start()
    assert ours.recv() == "held"
    with pytest.raises(UserError, match="is being run by another process"), claimed(tmp_path, 0.1):
        pass
    worker.kill()
    worker.join()
    with claimed(tmp_path, 0):
        pass


def test_what_another_process_is_about_to_write_does_not_fill_a_folder(tmp_path: Path) -> None:
    """Of two commands started at once, the second may look while the first has not finished its first file."""
    (tmp_path / ".experiment.toml.0123456789abcdef.part").write_text("half")
    assert is_empty(tmp_path)
    (tmp_path / "thesis.part").write_text("half")
    assert not is_empty(tmp_path)
