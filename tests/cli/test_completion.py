"""What the shell offers, from a cache that follows the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pfedhn.algorithms import ALGORITHMS
from pfedhn.cli import completion
from pfedhn.paper.experiments import EXPERIMENTS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "cache"))


def test_names_are_those_of_the_package() -> None:
    Path("table.toml").write_text("")
    wanted = [name for name in EXPERIMENTS if name.startswith("table")]
    assert completion.experiments("table") == [*wanted, "table2", "table.toml"]
    assert completion.datasets_and_experiments("mn") == ["mnist"]
    assert completion.assignments("method=fedre") == ["method=fedrep"]
    assert completion.assignments("pfedhn.embedding_d") == ["pfedhn.embedding_dim="]
    assert completion.assignments("clien") == ["clients="]
    assert completion.assignments("clients=") == []


def test_the_cache_is_used_and_made_anew_when_the_package_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert completion.names("methods") == list(ALGORITHMS)
    file = Path("cache/completion.json")
    table = json.loads(file.read_text())
    file.write_text(json.dumps({**table, "methods": ["cached"]}))
    assert completion.names("methods") == ["cached"]
    monkeypatch.setattr(completion, "_state", lambda: "changed")
    assert completion.names("methods") == list(ALGORITHMS)
    file.write_text("{")
    assert completion.names("methods") == list(ALGORITHMS)


def test_run_directories_are_found() -> None:
    for path in ("runs/mine/experiment.toml", "runs/mine/pfedhn-seed0/spec.toml", "runs/other/notes.txt"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("")
    assert completion.run_directories("runs/") == ["runs/mine", "runs/mine/pfedhn-seed0"]
    assert completion.run_directories("runs/o") == ["runs/other/"]


def test_completion_comes_without_pytorch() -> None:
    completion.names("experiments")
    code = (
        "import sys; from pfedhn.cli.app import app\n"
        "try: app(prog_name='pfedhn')\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules), 'PyTorch was imported'"
    )
    words = {"_PFEDHN_COMPLETE": "complete_bash", "COMP_WORDS": "pfedhn run dem", "COMP_CWORD": "2"}
    environment = {**os.environ, **words, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["demo"]), done.stderr
