"""The stored results of Table 1, read as runs of today's experiments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas

from pfedhn.algorithms import ALGORITHMS
from pfedhn.errors import UserError
from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.spec import Cell, Experiment, RunSpec
from pfedhn.paper.experiments import EXPERIMENTS
from pfedhn.report.entries import Report, to_reports
from pfedhn.report.results import Runs, read_file
from pfedhn.storage.identity import settings_of
from pfedhn.storage.schema import Curve, Result

TABLES = ("table1-cifar10", "table1-cifar100", "table1-omniglot", "table1-mnist")
SEEDS = EXPERIMENTS[TABLES[0]].seeds
STRONGER = {  # our rows, and the row of the paper that each makes stronger
    "pfedhn-plus": "pfedhn",
    "pfedhn-plus-pc": "pfedhn-pc",
    "pfedhn-plus-ft": "pfedhn",
    "pfedhn-plus-pc-ft": "pfedhn-pc",
    "pfedhn-shared": "pfedhn",
}
SAME_TRAINING = ("pfedhn-plus-ft", "pfedhn-plus-pc-ft")  # as pfedhn-plus and pfedhn-plus-pc, then fine-tuned


def read_results(folder: Path) -> list[Report]:
    """A report for each table, with what the folder holds of it."""
    stored = [runs for file in sorted(folder.glob("*.jsonl")) for runs in read_file(file)]
    found = []
    for runs in (_of_today(name, stored) for name in TABLES):
        found += to_reports([replace(runs, diverged=_diverged(folder, runs.experiment))])
    return found


def _diverged(folder: Path, experiment: Experiment) -> frozenset[str]:
    """The runs that diverged with the settings that the experiment has now; they have a line and no result."""
    found = set()
    for file in sorted((folder / "checks").glob("*-diverged.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["experiment"] != experiment.name or line["seed"] not in SEEDS:
                continue
            for cell in experiment.cells:
                is_of = (cell.method, cell.clients) == (line["method"], line["clients"])
                if is_of and not _are_other_defaults(cell, line["settings"]):
                    found.add(experiment.run_of(cell, line["seed"]).name)
    return frozenset(found)


def _of_today(name: str, stored: Sequence[Runs]) -> Runs:
    """The stored runs of an experiment, all of the settings that it has now."""
    experiment = EXPERIMENTS[name]
    planned = {run.name: run for run in experiment.runs()}
    results: dict[str, Result] = {}
    curves: dict[str, Curve] = {}
    for runs in stored:
        if runs.experiment.name != name:
            continue
        for run, result in runs.results.items():
            planned[run], then = experiment.find(run), runs.experiment.find(run)
            if _without_settings(planned[run]) != _without_settings(then) or _are_other_defaults(
                planned[run].cell, result.settings
            ):
                raise UserError(f"the stored run {run} has other settings than {name!r} has now; run it again.")
            results[run], curves[run] = result, runs.curves[run]
    for run, (result, curve) in _before_fine_tuning(experiment, results, curves).items():
        planned[run], results[run], curves[run] = experiment.find(run), result, curve
    return Runs(experiment, list(planned.values()), results, curves)


def _without_settings(run: RunSpec) -> RunSpec:
    """What else there is to a run; of settings, those that the method had count, whoever set them."""
    return replace(run, cell=replace(run.cell, settings={}))


def _before_fine_tuning(
    experiment: Experiment, results: Mapping[str, Result], curves: Mapping[str, Curve]
) -> dict[str, tuple[Result, Curve]]:
    """What a row has by the runs of its fine-tuned form, which train alike, with seeds that it was not run with."""
    known = {(result.cell["method"], result.cell["clients"], result.seed) for result in results.values()}
    found = {}
    for name, result in results.items():
        method, clients = ALGORITHMS[result.cell["method"]].rates_from, result.cell["clients"]
        if method not in STRONGER or (method, clients, result.seed) in known or result.unadapted is None:
            continue
        (cell,) = (cell for cell in experiment.cells if (cell.method, cell.clients) == (method, clients))
        run, before = experiment.run_of(cell, result.seed), {**result.settings, "adaptation_steps": 0}
        assert not _are_other_defaults(cell, before), run.name
        served: dict[str, Any] = {"validation": result.unadapted.validation, "test": result.unadapted.test}
        served |= {"unadapted": None, "adapted": None}
        found[run.name] = (
            replace(result, name=run.name, cell=asdict(run.cell), settings=before, **served),
            curves[name],
        )
    return found


def _are_other_defaults(cell: Cell, settings: Mapping[str, Any]) -> bool:
    """Whether the method would now run with other settings.

    What is none follows from the federation; what a run was not asked for did not exist when it was made.
    """
    today = {name: value for name, value in settings_of(cell_algorithm(cell)).items() if value is not None}
    return any(settings[name] != value for name, value in today.items() if name in settings)


def table_of_runs(folder: Path) -> str:
    """Every stored run as a line of CSV."""
    lines = [
        csv_line(runs.experiment.name, result)
        for file in sorted(folder.glob("*.jsonl"))
        for runs in read_file(file)
        for result in runs.results.values()
    ]
    table: str = pandas.DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n")
    return table


def csv_line(experiment: str, result: Result) -> dict[str, Any]:
    return {
        "experiment": experiment,
        **{name: result.cell[name] for name in ("method", "dataset", "clients")},
        "seed": result.seed,
        "test_over_clients": result.test.client_mean,
        "test_over_examples": result.test.sample_mean,
        "validation_over_examples": result.validation.sample_mean,
        "test_loss": result.test.loss,
        **{name: getattr(result, name) for name in ("chosen_step", "steps", "bytes_up", "bytes_down")},
        "seconds": round(result.seconds, 1),
        **{name: getattr(result.environment, name) for name in ("device", "precision", "torch", "commit", "finished")},
        "settings": json.dumps(result.settings, sort_keys=True),
        "command": result.command,
    }
