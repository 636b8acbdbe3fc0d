"""What `pfedhn.train` chooses for a table if it is left out, against an experiment file of the same table."""

from pathlib import Path

import numpy
import pytest
import torch

import pfedhn
from pfedhn.data.files import read_federation
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import UserError
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.grid import from_toml
from pfedhn.runs import tables, train


class Planned(Exception):
    """Raised in the place of training."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    random, path = numpy.random.default_rng(0), tmp_path / "visits.csv"
    rows = [f"c{i % 30:02},{x:.3f},{x + random.normal():.3f}" for i, x in enumerate(random.normal(size=6_000))]
    path.write_text("\n".join(["clinic,dose,score", *rows]))
    return path


def planned(monkeypatch: pytest.MonkeyPatch, *arguments: object, **named: object) -> Simulation:
    found: list[Simulation] = []

    def noted(simulation: Simulation, *rest: object, **more: object) -> None:
        found.append(simulation)
        raise Planned

    monkeypatch.setattr(train, "execute", noted)
    with pytest.raises(Planned):
        pfedhn.train(*arguments, progress=False, **named)  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize("method", tables.TABLE_METHODS)
def test_a_table_without_a_model_is_trained_as_by_an_experiment_file(
    method: str, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = table.with_name("mine.toml")
    file.write_text(f'dataset = "visits.csv"\ncolumns = {{client = "clinic", label = "score"}}\nmethod = "{method}"')
    (run, *_) = from_toml(file).runs()
    expected = build_simulation(run, Options())
    federation = read_federation(table, "clinic", "score")
    found = planned(monkeypatch, method, federation, device="cpu")
    assert found.schedule == expected.schedule
    assert found.algorithm == expected.algorithm
    assert found.models.keys() == expected.models.keys() == {"wide-32"}
    assert torch.equal(federation.x, expected.federation.x)


def test_what_is_given_is_kept_and_other_federations_need_a_model(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, method = read_federation(table, "clinic", "score"), pfedhn.FedAvg(local_steps=3)
    found = planned(monkeypatch, method, federation, steps=70, evaluate_every=7)
    assert (found.schedule.steps, found.schedule.evaluate_every, found.schedule.patience) == (70, 7, None)
    assert (found.schedule.select, found.algorithm) == ("loss", method)
    usual = planned(monkeypatch, "fedavg", federation, "linear").schedule
    assert (usual.steps, usual.evaluate_every, usual.select, usual.patience) == (5_000, 30, "metric", None)
    plain = pfedhn.Federation.from_clients([(numpy.zeros((9, 2)), numpy.arange(9) % 2)] * 3)
    with pytest.raises(UserError, match="model is left out, and only a federation of a table has a usual one"):
        pfedhn.train("fedavg", plain)
