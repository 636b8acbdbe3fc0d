"""The commands of Table 1, as a person gives them, on small made data sets laid out as the Hub lays them out."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import allow_parts, encoded, images, write_table
from typer.testing import CliRunner

from pfedhn.algorithms.find import build_algorithm
from pfedhn.algorithms.pfedhn_shared import PFedHNShared
from pfedhn.cli import app as cli
from pfedhn.combinators import innermost
from pfedhn.data.catalogue import DATASETS
from pfedhn.experiments import directory as directory_module
from pfedhn.paper.experiments import BEYOND_THE_PAPER, CIFAR10, EXPERIMENTS

ROWS_OF_A_CLASS = {"train": 30, "test": 10}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directory_module, "num_cores", lambda: 1)
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "cache"))
    allow_parts(monkeypatch)


def write_whole(folder: Path, name: str) -> None:
    """As many classes as the real one has, few pictures of each."""
    source = DATASETS[name]
    for split, rows in ROWS_OF_A_CLASS.items():
        labels = numpy.arange(source.num_classes).repeat(rows)
        columns = {
            source.image: [encoded(picture) for picture in images(name, len(labels), seed=len(split))],
            source.label: labels.tolist(),
        }
        if source.coarse:
            columns[source.coarse] = (labels // 5).tolist()
        write_table(folder / name / f"{split}-00000-of-00001.parquet", columns)


def run(experiment: str, only: str, *more: str) -> dict[str, dict]:  # type: ignore[type-arg]
    arguments = ["run", experiment, "--only", only, "--seeds", "0", "--data-dir", "data", "--out", "runs", *more]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    files = Path("runs").glob("*/result.json")
    return {file.parent.name: json.loads(file.read_text()) for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist"])
def test_a_cell_of_the_table_by_its_command(name: str) -> None:
    write_whole(Path("data"), name)
    (result,) = run(f"table1-{name}", "method=pfedhn,clients=10", "--set", "steps=3", "--set", "local_steps=2").values()
    classes = 2 if name != "cifar100" else 10
    train = ROWS_OF_A_CLASS["train"] * DATASETS[name].num_classes
    assert result["steps"] == 3
    assert result["settings"]["embedding_dim"] == 3
    assert result["cell"]["partition"] == {"rule": "by_classes", "classes_per_client": classes}
    assert sum(result["test"]["client_examples"]) <= ROWS_OF_A_CLASS["test"] * DATASETS[name].num_classes
    assert sum(result["unused_examples"].values()) < train / 4
    assert "--only method=pfedhn,clients=10 --seeds 0" in result["command"]


@pytest.mark.slow
def test_all_methods_of_a_column() -> None:
    write_whole(Path("data"), "cifar10")
    methods = {*CIFAR10, *BEYOND_THE_PAPER}
    settings = ["steps=10", *(f"{method}.local_steps=1" for method in methods - {"pfedme"})]
    settings += ["pfedme.outer_steps=1"]
    results = run("table1-cifar10", "clients=10", *(word for text in settings for word in ("--set", text)))
    assert {result["cell"]["method"] for result in results.values()} == methods
    assert results["lg-fedavg-cifar10-10-seed0"]["pretrain"]["name"] == "fedavg-cifar10-10-seed0"
    assert results["local-cifar10-10-seed0"]["bytes_up"] == 0
    assert len({result["partition_sha256"] for result in results.values()}) == 1


def test_budgets_are_the_papers() -> None:
    for name in ("table1-cifar10", "table1-cifar100", "table1-omniglot"):
        cells = EXPERIMENTS[name].cells
        assert {cell.method for cell in cells} == set(CIFAR10) | set(BEYOND_THE_PAPER)
        for cell in cells:
            expected = {"local": 40 * cell.clients, "lg-fedavg": 1_000}.get(cell.method, 5_000)
            often = 10 if (cell.method, cell.clients) == ("local", 10) else 30  # Local: after every round
            assert (cell.steps, cell.evaluate_every, cell.batch_size) == (expected, often, 64)
            assert cell.pretrain == ("fedavg" if cell.method == "lg-fedavg" else None)
    of_mnist = {"fedavg", "per-fedavg", "pfedme", "pfedhn"}
    assert {cell.method for cell in EXPERIMENTS["table1-mnist"].cells} == of_mnist | set(BEYOND_THE_PAPER)


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        ("table1-cifar10", (("last",), 0.1, 13, 3)),
        ("table1-mnist", ((), 1.0, 64, 1)),
        ("table1-cifar100", ((), 1.0, 64, 1)),
        ("table1-omniglot", ((), 1.0, 64, 1)),
    ],
)
def test_pfedhn_shared_is_as_it_was_chosen_for_each_data_set(experiment: str, expected: tuple[Any, ...]) -> None:
    cells = [cell for cell in EXPERIMENTS[experiment].cells if cell.method == "pfedhn-shared"]
    (cell,) = (cell for cell in cells if cell.clients == 50)
    found = innermost(build_algorithm(cell.method, cell.settings).for_clients(50))
    assert isinstance(found, PFedHNShared)
    assert (found.fixed_layers, found.embeddings.scale, found.embeddings.dim, found.num_hidden) == expected
