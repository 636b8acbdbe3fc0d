"""Where a result was made: the commit is that of the source it was made with, or is not said."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pfedhn.system import environment as module
from pfedhn.system.environment import commit, environment


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module lies in a repository that has one commit without it."""
    monkeypatch.delenv("PFEDHN_COMMIT", raising=False)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "environment.py"))
    (tmp_path / "environment.py").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "first")
    commit.cache_clear()
    yield tmp_path
    commit.cache_clear()


def git(folder: Path, *words: str) -> str:
    person = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    return subprocess.run(
        ["git", "-C", str(folder), *person, *words], check=True, capture_output=True, text=True
    ).stdout


def test_the_commit_is_that_of_the_source_and_says_what_was_changed_since(repository: Path) -> None:
    git(repository, "add", "environment.py")
    git(repository, "commit", "--quiet", "--message", "second")
    head = git(repository, "rev-parse", "HEAD").strip()
    assert commit() == head
    (repository / "environment.py").write_text("changed")
    commit.cache_clear()
    assert commit() == f"{head}+changes"


def test_an_installed_copy_in_somebodys_repository_has_no_commit(repository: Path) -> None:
    assert commit() is None


def test_the_variable_says_it(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDHN_COMMIT", "abc")
    assert commit() == "abc"
    assert environment("cpu").commit == "abc"
