"""Hospitals: the cells are those of a file, new hospitals are read as in training, and the page is what was stored."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

from pfedhn.cli.app import app
from pfedhn.data.cells import Columns
from pfedhn.data.columns import encoded_like, new_clients
from pfedhn.data.silos import SILOS
from pfedhn.errors import UserError
from pfedhn.experiments import preflight, tables
from pfedhn.experiments.spec import Cell
from pfedhn.paper import hospital_numbers as numbers
from pfedhn.paper import hospitals, hospitals_privacy
from pfedhn.privacy import Privacy
from pfedhn.report.results import read_file
from pfedhn.report.study import findings
from pfedhn.runs.yardsticks import Table

ROOT = Path(__file__).parents[2]


def columns_of(dataset: str, sizes: list[int]) -> Columns:
    """A table of a natural federation with hospitals of these sizes, as far as defaults look at it."""
    hospital = numpy.repeat(numpy.arange(len(sizes)).astype(str), sizes).astype(object)
    columns = Columns(Path(dataset))
    columns.update({SILOS[dataset].client: hospital, SILOS[dataset].label: numpy.full(len(hospital), "a", object)})
    return columns


def test_the_cells_without_data_are_those_that_a_file_gets_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"stroke": [49, 20, 3], "heart": [9]}  # too small to train
    monkeypatch.setattr(
        tables, "read_table", lambda name, data_dir: columns_of(name, [*hospitals.SIZES[name], *more[name]])
    )
    assert hospitals.cells(Path("there")) == hospitals.STUDY.cells
    assert {cell.method for cell in hospitals.STUDY.cells} == set(tables.TABLE_METHODS)
    monkeypatch.setattr(tables, "read_table", lambda name, data_dir: columns_of(name, [90, 80, 70]))
    cells = hospitals.STUDY.experiment(data_dir=Path("there")).cells  # the whole trial has other hospitals
    assert {(cell.clients, cell.evaluate_every, cell.steps) for cell in cells} == {(3, 25, 2_000)}


def test_missing_files_are_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "hospitals", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "stroke is not here" in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())

    def find(name: str, data_dir: Path | None) -> None:
        if name == "stroke":
            raise UserError("stroke is not here; get it.")

    monkeypatch.setattr(preflight, "find_silo_files", find)
    with pytest.raises(UserError, match=r"get it; or leave it out with --only dataset=heart\.$"):
        preflight.build_each_cell(hospitals.STUDY.experiment().runs([0]), preflight.Options())


def finished(clients: int, **changes: Any) -> Any:
    """What a study is given, without a run."""
    cell = replace(Cell(dataset=hospitals.MADE_UP, clients=clients), **changes)
    return SimpleNamespace(cell=cell, seed=0, federation=numbers.made_up(clients, 0))


def test_new_hospitals_are_read_as_those_that_trained() -> None:
    """Sent through the way of new ones, a hospital that trained gets the very inputs and split that it has."""
    federation, columns = finished(6).federation, numbers.made_up_columns(6)
    table = federation.reading.table
    x, y = encoded_like(columns, table), columns["outcome"] == "dead or dependent"
    owned = {name: columns["hospital"] == name for name in federation.names}
    again, _ = new_clients(
        {name: (x[own], y[own].astype(int)) for name, own in owned.items()}, (0.7, 0.15, 0.15), 0, table
    )
    assert torch.equal(again.x, federation.x)
    assert torch.equal(again.y, federation.y)
    for split, part in federation.splits.items():
        for client in range(federation.num_clients):
            assert torch.equal(again.splits[split].of(client), part.of(client))


def test_new_hospitals_are_small_and_did_not_train() -> None:
    given = finished(12)
    new = numbers.new_hospitals(given)
    assert new is not None
    sizes = sum(part.size for part in new.splits.values())
    assert new.num_clients == 4
    assert int(sizes.min()) >= numbers.LEAST
    assert int(sizes.max()) <= numbers.MOST
    assert not set(new.names) & set(given.federation.names)
    assert new.x.shape[1:] == given.federation.x.shape[1:]
    assert numbers.new_hospitals(finished(4)) is None


def test_an_own_intercept_is_the_best_one() -> None:
    new = numbers.new_hospitals(finished(12))
    assert new is not None
    table = Table.of(new)
    logits = {split: numpy.zeros(len(y)) for split, y in table.y.items()}
    chances = numbers.own_intercepts(table, logits, 2.0)["test"][:, 1]
    for client, own in enumerate(table.owned):
        chance, y = chances[own["test"]][0], table.y["train"][own["train"]]
        penalty = numpy.log(chance / (1 - chance)) / 2.0  # the slope of half the squared intercept / strength
        assert y.sum() - chance * len(y) == pytest.approx(penalty, abs=1e-6), client
    assert numbers.own_intercepts(table, logits, 0.0)["test"] == pytest.approx(0.5)


def test_the_finding_is_drawn_from_the_stored_numbers() -> None:
    (runs,) = read_file(ROOT / "results" / "hospitals.jsonl")
    (finding,) = findings([runs])
    assert finding.sentence.startswith("Stroke trial, 48 hospitals: ")
    assert "111 new hospitals" in finding.sentence
    stroke, heart, new = (lines for lines, _ in finding.tables)
    assert [line[0] for line in stroke[1:7]] == [line[0] for line in heart[1:7]]
    assert {line[-1] for line in stroke[1:]} == {"3"}
    assert [line[0].removesuffix(" *") for line in new[-4:]] == list(numbers.YARDSTICKS)
    assert "Local" not in [line[0] for line in new]
    assert list(finding.figures) == ["map", "calibration"]
    patients = sum(hospitals.summed(values, "model")["patients"].sum() for values in calibrated(runs))
    assert patients == sum(result.test.examples for result in runs.results.values())


def calibrated(runs: Any) -> list[Any]:
    return [{0: analysis.values} for analysis in runs.analyses.values()]


@pytest.mark.slow
def test_figures_draw() -> None:
    (runs,) = read_file(ROOT / "results" / "hospitals.jsonl")
    (finding,) = findings([runs])
    for draw in finding.figures.values():
        draw().draw_without_rendering()


def test_private_cells_spend_their_budget_in_all_rounds() -> None:
    for cell in hospitals_privacy.STUDY.cells:
        if cell.privacy:
            privacy = Privacy(**cell.privacy)
            assert cell.batch_size > max(hospitals.SIZES["stroke"])
            assert privacy.num_rounds(privacy.cost(35, 35, 1)) == hospitals_privacy.ROUNDS
            assert cell.steps == hospitals_privacy.ROUNDS * cell.clients == hospitals_privacy.ROUNDS * 48
            assert cell.cohort_size == cell.clients
    (runs,) = read_file(ROOT / "results" / "hospitals-privacy.jsonl")
    assert runs.experiment.cells == hospitals_privacy.STUDY.cells
    assert len(runs.results) == 3 * len(hospitals_privacy.STUDY.cells)
