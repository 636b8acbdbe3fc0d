"""A method of a user's own file in an experiment: `method = "mine.py:FedProx"`."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pfedhn
from pfedhn.cli.app import app
from pfedhn.errors import UserError
from pfedhn.experiments.build import cell_algorithm, check
from pfedhn.experiments.grid import from_toml, grids_from_toml, select, with_assignments
from pfedhn.report.entries import collect

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-method.md"
GRID = """
method = ["fedavg", "mine.py:FedProx"]
clients = 5
batch_size = 16
steps = 10
seeds = [0]
split = [0.5, 0.25, 0.25]

[methods.FedProx]
local_steps = 2
strength = [0.1, 1.0]

[tune.FedProx]
local_lr = [0.1, 0.01]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment file beside the tutorial's FedProx."""
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(next(block for block in blocks if "class FedProx" in block))
    (tmp_path / "mine.toml").write_text(GRID)
    return tmp_path / "mine.toml"


def test_cells_name_the_class_and_its_settings(file: Path) -> None:
    experiment = from_toml(file)
    check(experiment)
    names = [run.cell_name for run in experiment.runs([0])]
    assert names == ["fedavg-digits-5", "FedProx-digits-5-strength=0.1", "FedProx-digits-5-strength=1.0"]
    assert repr(cell_algorithm(experiment.cells[2])).startswith("FedProx(local_lr=0.01, local_steps=2,")
    assert len(select(experiment, ["method=FedProx"], None)) == 2
    changed = with_assignments(experiment, {"FedProx.strength": 0.5})
    assert [cell.settings.get("strength") for cell in changed.cells] == [None, 0.5]
    assert grids_from_toml(file) == {f"{file.with_name('mine.py')}:FedProx": {"local_lr": (0.1, 0.01)}}


def test_it_runs_resumes_loads_and_is_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--jobs", "1", "--device", "cpu"])
        assert done.exit_code == 0, done.output
        return done.output

    assert "FedProx strength=1.0" in invoke("run", str(file), "--out", str(file.parent / "out"))
    monkeypatch.chdir(file.parent)
    assert "3 of 3 runs are finished already" in invoke("run", "--resume", "out")
    run = pfedhn.load("out/FedProx-digits-5-strength=1.0-seed0")
    assert type(run.plan.algorithm).__name__ == "FedProx"
    assert run.personal_model(0) is not None
    (report,) = collect([file.parent / "out"])
    assert report.labels == ["fedavg", "FedProx strength=0.1", "FedProx strength=1.0"]
    words = ["--set", "method=mine.py:FedProx", "--set", "FedProx.strength=0.5", "--set", "steps=5"]
    assert "FedProx" in invoke("run", "demo", *words, "--seeds", "0", "--out", "demo")
    assert invoke("tune", "mine.toml", "--only", "method=FedProx,strength=1.0").count(" chosen") == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none.py:FedProx", "there is no file .*none.py"),
        ("mine.py:FedProxy", "mine.py has no function or class 'FedProxy'"),
        ("mine.py:subtract", "mine.py:subtract is not a method; give a class that inherits from a method such as"),
        ("more.py:Loose", r"more.py:Loose is not a frozen dataclass; write @dataclass\(frozen=True\) above the class"),
        ("more.py:Bare", "more.py:Bare does not define num_batches, train; see the protocol"),
        ("more.py:Needy", "more.py:Needy: the setting 'strength' has no default; give it one"),
        ("fedfancy", "there is no method 'fedfancy'"),
    ],
)
def test_refuses(name: str, sentence: str, file: Path) -> None:
    (file.parent / "more.py").write_text(
        "from dataclasses import dataclass\nimport pfedhn\nfrom pfedhn.algorithm import Algorithm\n"
        "class Loose(pfedhn.FedAvg):\n    strength: float = 0.1\n"
        "@dataclass(frozen=True)\nclass Bare(Algorithm):\n    strength: float = 0.1\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Needy(pfedhn.FedAvg):\n    strength: float\n"
    )
    file.write_text(f'method = "{name}"\n')
    with pytest.raises(UserError, match=sentence):
        from_toml(file)


def test_checks_settings(file: Path) -> None:
    file.write_text('method = "mine.py:FedProx"\nsettings = {strenght = 1.0}\n')
    with pytest.raises(UserError, match="FedProx has no field 'strenght'; did you mean 'strength'"):
        check(from_toml(file))
