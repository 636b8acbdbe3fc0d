"""Yardsticks and detailed scores: against scikit-learn and hand computation, and stored where a result finds them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

import pfedhn
from pfedhn.cli.app import app
from pfedhn.data.federation import Federation
from pfedhn.data.reading import Column, Reading, TableReading
from pfedhn.experiments import yardsticks as stored
from pfedhn.experiments.yardsticks import FILE, read_yardsticks
from pfedhn.report.entries import collect
from pfedhn.report.measures_table import measures_table
from pfedhn.report.results import Runs, export, read
from pfedhn.report.tables import to_markdown
from pfedhn.runs import yardsticks as fits
from pfedhn.runs.yardsticks import Table, yardsticks
from pfedhn.storage.schema import Result, Yardstick, from_json, to_json

NUM_CLIENTS, ROWS, FEATURES = 8, 60, 3
SLOPES = numpy.array([1.0, -1.0, 0.5])


def made(
    num_classes: int | None = 2,
    split: tuple[float, float, float] = (0.7, 0.15, 0.15),
    spread: float = 2.0,
    seed: int = 0,
) -> Federation:
    """A table whose clients share their slopes and differ in their intercepts."""
    draw = numpy.random.default_rng(seed)
    clients: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    for client in range(NUM_CLIENTS):
        x = draw.normal(5, 2, size=(ROWS, FEATURES)).astype(numpy.float32)
        score = (x - 5) @ SLOPES / 2 + spread * (client % 2 - 0.5) + draw.logistic(size=ROWS) / 2
        y = score.astype(numpy.float32)
        if num_classes is not None:
            edges = numpy.quantile(score, numpy.linspace(0, 1, num_classes + 1)[1:-1]) if num_classes > 2 else [0]
            y = numpy.digitize(score, edges)
        clients[f"site {client}"] = (x, y)
    names = None if num_classes is None else tuple(map(str, range(num_classes)))
    federation = Federation.from_clients(clients, split=split, seed=seed, class_names=names)
    columns = tuple(Column(f"x{number}") for number in range(FEATURES))
    return replace(federation, reading=Reading(TableReading("site", "y", columns)))


def by_name(federation: Federation) -> dict[str, Yardstick]:
    return {one.name: one for one in yardsticks(federation, seed=0)}


@pytest.mark.parametrize("num_classes", [2, 3, None])
def test_pooled_linear_models_are_scikit_learns(num_classes: int | None) -> None:
    table, penalty = Table.of(made(num_classes)), fits.PENALTIES[0]
    scaler = StandardScaler()
    x, y = scaler.fit_transform(table.x["train"]), table.y["train"]
    assert numpy.allclose(x, table.x["train"])  # scaled already
    if num_classes is None:
        theirs = Ridge(alpha=penalty).fit(x, y).predict(table.x["test"])
        ours = next(fits._ridges(table, numpy.inf))["test"]
    else:
        theirs = LogisticRegression(C=0.1, tol=1e-8, max_iter=1000).fit(x, y).predict_proba(table.x["test"])
        ours = fits._predicted(table, fits._logistic(x, y, 0.1), table.x)["test"]
    assert numpy.allclose(ours, theirs, atol=1e-3)


def test_a_ridge_with_the_clients_is_one_with_columns_for_them() -> None:
    table, of_clients, penalty = Table.of(made(None)), 3.0, fits.PENALTIES[0]

    def named(split: str) -> Any:
        return fits._with_clients(table, split, (penalty / of_clients) ** 0.5)

    theirs = Ridge(alpha=penalty).fit(named("train"), table.y["train"]).predict(named("test"))
    assert numpy.allclose(next(fits._ridges(table, of_clients))["test"], theirs)


def test_own_ridges_are_scikit_learns() -> None:
    table = Table.of(made(None)).first(1)
    theirs = {
        penalty: Ridge(alpha=penalty).fit(table.x["train"], table.y["train"]).predict(table.x["test"])
        for penalty in fits.PENALTIES
    }
    assert any(numpy.allclose(fits.own_ridge(table, 0)["test"], one) for one in theirs.values())


def test_the_base_rate_is_that_of_the_client_and_a_little_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "BASE_WEIGHTS", (10.0,))
    federation = made()
    train, test = (
        [federation.y[federation.splits[split].of(client)].numpy() for client in range(NUM_CLIENTS)]
        for split in ("train", "test")
    )
    pooled = numpy.concatenate(train).mean()
    losses = []
    for own, labels in zip(train, test, strict=True):
        rate = (own.sum() + 10 * pooled) / (len(own) + 10)
        losses += [-numpy.log(rate if label else 1 - rate) for label in labels]
    assert fits.CLASSES[0].fitted(Table.of(federation), 0).detailed.examples["log_loss"] == pytest.approx(
        numpy.mean(losses)
    )


@pytest.mark.slow
def test_an_own_intercept_helps_where_clients_differ_in_it() -> None:
    for num_classes, measure in ((2, "log_loss"), (None, "rmse")):
        losses = {name: one.detailed.examples[measure] for name, one in by_name(made(num_classes)).items()}
        assert losses["pooled-linear-client"] < 0.95 * losses["pooled-linear"]
        assert losses["pooled-boosting-client"] < losses["pooled-linear"]


@pytest.mark.slow
def test_test_labels_and_rows_of_no_split_change_no_fit() -> None:
    for num_classes in (2, None):
        federation = made(num_classes)
        others = federation.y.clone()
        places = torch.cat([federation.splits["test"].of(client) for client in range(NUM_CLIENTS)])
        others[places] = others[places].flip(0) if num_classes is None else 1 - others[places]
        tables = [Table.of(federation), Table.of(replace(federation, y=others))]
        assert not numpy.array_equal(tables[0].y["test"], tables[1].y["test"])
        for kind in fits.NUMBERS if num_classes is None else fits.CLASSES:
            first, second = (kind.predict(table, 0)["test"] for table in tables)
            assert numpy.array_equal(first, second), kind.name


def test_a_class_that_a_client_lacks_has_its_base_rate_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "STRENGTHS", (0.1,))
    federation = made(3)
    first = federation.splits["train"].of(0)
    y = federation.y.clone()
    y[first] = y[first].clamp(max=1)  # no example of class 2
    table = Table.of(replace(federation, y=y))
    base, found = (fit(table, 0)["test"] for fit in (fits.own_base_rate, fits.own_logistic))
    own = table.owned[0]["test"]
    assert numpy.allclose(found[own, 2], base[own, 2])
    assert not numpy.allclose(found[own, 1], base[own, 1])
    assert numpy.allclose(found.sum(1), 1)


def test_numbers_are_scored_in_the_units_of_their_column() -> None:
    plain = made(None)
    assert plain.reading is not None
    assert plain.reading.table is not None
    scaled = replace(
        plain,
        y=(plain.y - 2) / 10,
        reading=replace(plain.reading, table=replace(plain.reading.table, target=(2.0, 10.0))),
    )
    first, second = (fits.NUMBERS[0].fitted(Table.of(one), 0) for one in (plain, scaled))
    assert second.detailed.examples["rmse"] == pytest.approx(first.detailed.examples["rmse"], rel=1e-4)
    assert second.validation_loss == pytest.approx(first.validation_loss, rel=1e-4)


def test_without_a_table_there_are_no_yardsticks() -> None:
    assert yardsticks(replace(made(), reading=None), 0) == ()


@pytest.mark.parametrize("num_classes", [2, None])
def test_without_validation_rows_the_usual_settings_are_taken(num_classes: int | None) -> None:
    federation = made(num_classes, split=(0.8, 0.0, 0.2))
    table = Table.of(federation)
    for kind in (fits.CLASSES if num_classes else fits.NUMBERS)[:-1]:
        found = kind.fitted(table, 0)
        assert found.validation_loss is None
        assert len(found.detailed.client_loss) == NUM_CLIENTS
    assert numpy.array_equal(fits.pooled_ridge(table, 0)["test"], next(fits._ridges(table, numpy.inf))["test"])


# Detailed scores of runs


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_detailed_scores_are_of_the_models_that_clients_use(method: str) -> None:
    federation = made(3)
    run = pfedhn.train(method, federation, partial(pfedhn.TabularMLP, FEATURES, 4, 3), steps=8, progress=False)
    assert run.result is not None
    detailed, test = run.result.detailed, run.result.test
    assert detailed is not None
    assert detailed.examples["accuracy"] == pytest.approx(test.sample_mean)
    assert detailed.clients["accuracy"] == pytest.approx(test.client_mean)
    assert detailed.examples["log_loss"] == pytest.approx(test.loss, rel=1e-5)
    assert detailed.validation_loss == pytest.approx(run.result.validation.loss, rel=1e-5)
    assert from_json(Result, json.loads(json.dumps(to_json(run.result)))) == run.result


def test_detailed_scores_of_numbers_are_in_the_units_of_their_column() -> None:
    federation = made(None)
    assert federation.reading is not None
    table = replace(federation.reading.table, target=(50.0, 10.0))
    federation = replace(federation, reading=replace(federation.reading, table=table))
    run = pfedhn.train("local", federation, partial(pfedhn.TabularMLP, FEATURES, 4, 1), steps=8, progress=False)
    assert run.result is not None
    assert run.result.detailed is not None
    assert run.result.detailed.examples["rmse"] == pytest.approx(run.result.test.loss**0.5, rel=1e-5)
    assert run.result.detailed.validation_loss == pytest.approx(run.result.validation.loss, rel=1e-5)


def test_a_run_that_is_not_on_a_table_has_no_detailed_scores() -> None:
    federation = replace(made(), reading=None)
    run = pfedhn.train("local", federation, partial(pfedhn.TabularMLP, FEATURES, 4, 2), steps=8, progress=False)
    assert run.result is not None
    assert run.result.detailed is None


# In an experiment


def experiment_on(folder: Path) -> str:
    """The file of an experiment on a table, and the table."""
    federation = made()
    lines = ["site,x0,x1,x2,y"]
    for client in range(NUM_CLIENTS):
        for split in federation.splits.values():
            for number in split.of(client).tolist():
                values = [f"{value:.4f}" for value in federation.x[number].tolist()]
                lines.append(",".join([f"site {client}", *values, "ill" if federation.y[number] else "well"]))
    (folder / "sites.csv").write_text("\n".join(lines))
    text = f"""
    dataset = "{folder / "sites.csv"}"
    columns = {{client = "site", label = "y"}}
    method = ["local", "fedavg"]
    model = "linear"
    steps = 16
    evaluate_every = 8
    settings = {{local_steps = 2}}
    seeds = [0, 1]
    """
    (folder / "sites.toml").write_text(text)
    return str(folder / "sites.toml")


def check_reports(folder: Path, runs: Runs) -> None:
    """Measures are in the report, for people and programs, also in that of an exported file."""
    file = folder / "kept.jsonl"
    for _ in range(2):
        export([folder / "runs"], file)
    (again,) = read(file)
    assert set(again.yardsticks) == set(runs.yardsticks)
    for source in (folder / "runs", file):
        (report,) = collect([source])
        table = measures_table(report, report.columns[0])
        assert table[0] == [
            "method",
            "over clients",
            "over samples",
            "AUC",
            "log loss",
            "Brier",
            "calibration",
            "balanced",
            "F1",
        ]
        assert [line[0] for line in table[1:3]] == ["Local", "FedAvg"]
        assert table[3][0] == "each client's base rate"
        assert table[-1][0] == "pooled boosted trees with the client *"
        losses = [runs.yardsticks[rows][0].detailed.examples["log_loss"] for rows in runs.yardsticks]
        assert table[3][4] == f"{numpy.mean(losses):.3f}"
        assert "pooled boosted trees" in to_markdown([report])
    shown = json.loads(CliRunner().invoke(app, ["report", str(folder / "runs"), "--json"]).output)["reports"][0]
    assert [one["seeds"] for one in shown["yardsticks"]] == [[0]] * 5 + [[1]] * 5
    cell = shown["cells"][0]
    assert cell["auc_over_samples_mean"] == pytest.approx(
        numpy.mean([run["detailed"]["examples"]["auc"] for run in cell["runs"]])
    )


@pytest.mark.slow
def test_yardsticks_are_fitted_once_for_each_split_and_found_by_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", experiment_on(tmp_path), "--out", str(tmp_path / "runs"), "--jobs", "1"]
    assert CliRunner().invoke(app, [*command, "--no-yardsticks"]).exit_code == 0
    assert read_yardsticks(tmp_path / "runs") == ()
    asked: list[int] = []

    def stopped_at_first(federation: Federation, seed: int) -> tuple[Yardstick, ...]:
        asked.append(seed)
        if asked == [0, 1]:
            raise KeyboardInterrupt
        return yardsticks(federation, seed)

    monkeypatch.setattr(stored, "yardsticks", stopped_at_first)
    stopped, *others = (CliRunner().invoke(app, command) for _ in range(3))
    assert stopped.exit_code == 130
    assert "the runs are finished" in stopped.output
    assert [result.exit_code for result in others] == [0, 0]
    assert asked == [0, 1, 1]  # what was fitted before Ctrl-C is kept
    (runs,) = read(tmp_path / "runs")
    assert set(runs.yardsticks) == {result.rows for result in runs.results.values()}
    assert len(runs.yardsticks) == 2  # seeds, and all methods have the rows of a seed in common
    result = runs.results["local-sites-8-seed0"]
    mine, sizes = runs.yardsticks[result.rows], result.test.client_examples
    assert [one.name for one in mine] == [kind.name for kind in fits.CLASSES]
    assert sizes is not None
    assert numpy.dot(mine[0].detailed.client_loss, sizes) == pytest.approx(
        mine[0].detailed.examples["log_loss"] * sum(sizes)
    )
    check_reports(tmp_path, runs)
    file = tmp_path / "runs" / FILE
    file.write_bytes(file.read_bytes()[:-20])  # damage is no reason not to show results
    (runs,) = read(tmp_path / "runs")
    assert not runs.yardsticks


def test_yardsticks_of_other_rows_are_not_a_runs() -> None:
    one = stored.OfSplit("partition", "data", 0, ())
    result = Mock(partition_sha256="partition", digests={"data": "data"})
    assert one.fits(result)
    assert one.fits(Mock(partition_sha256="partition", digests=None))
    assert not one.fits(Mock(partition_sha256="other", digests={"data": "data"}))
    assert not one.fits(Mock(partition_sha256="partition", digests={"data": "other"}))
