"""Finished runs as lines of a JSONL file: small enough to keep beside the source, whole enough for every table.

A file has a line for each experiment and for each finished run: what `result.json` says, less each client's validation
score and the folders in its command, and the learning curve. Curves are rounded to 4 digits, accuracies to 6. What a
study computed from a run is another line, "analysis".
"""

import json
import math
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from pfedhn.errors import RunError, UserError
from pfedhn.experiments.analysis import Analysis, identity, read_analysis
from pfedhn.experiments.directory import Directory, check_place
from pfedhn.experiments.grid import from_table
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, cell_names
from pfedhn.settings import build
from pfedhn.storage.directory import DIVERGED, StoredSpec, read_history, read_result, read_spec
from pfedhn.storage.files import digest
from pfedhn.storage.schema import Curve, Moment, Result, SchemaError, Scores, Yardstick, from_json, to_json
from pfedhn.system.files import LOCK, is_claimed, make_folder, one_at_a_time, read_bytes, reading, write_atomically

WHOLE = ("cell", "settings", "loss")
"""Never rounded: settings are what they are, and by the loss one sees the same bits again."""


@dataclass(frozen=True)
class Runs:
    """An experiment and what is known of its runs, by their names."""

    experiment: Experiment
    planned: Sequence[RunSpec]
    results: Mapping[str, Result]  # of finished runs
    curves: Mapping[str, Curve]  # of runs that have begun
    analyses: Mapping[str, Analysis] = field(default_factory=dict)  # of runs from which a study computed something
    # Only directories have what follows.
    histories: Mapping[str, Sequence[Moment]] = field(default_factory=dict)  # every evaluation
    client_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    losses: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the names of loss functions
    running: frozenset[str] = frozenset()  # runs that a process is at work on
    diverged: frozenset[str] = frozenset()
    yardsticks: Mapping[str, tuple[Yardstick, ...]] = field(default_factory=dict)  # by the split's checksum

    def joined(self, other: "Runs") -> "Runs":
        """Add runs of the same experiment from another place; of a run in both places, this one's files count."""
        results = {**other.results, **self.results}
        # A run that one directory has finished counts as finished, whatever became of it in another.
        running = (self.running | other.running) - results.keys()
        return Runs(
            self.experiment,
            list({run.name: run for run in (*self.planned, *other.planned)}.values()),
            results,
            {**other.curves, **self.curves},
            {**other.analyses, **self.analyses},
            {**other.histories, **self.histories},
            {**other.client_names, **self.client_names},
            {**other.losses, **self.losses},
            running,
            (self.diverged | other.diverged) - results.keys() - running,
            {**other.yardsticks, **self.yardsticks},
        )


def read(path: Path) -> list[Runs]:
    """The runs of a directory of an experiment or of one run, of a JSONL file, or of a folder of such files."""
    with reading(path):
        if not path.exists():
            raise UserError(f"there is no file or folder {path}; give a directory that `pfedhn run` made.")
        is_file = path.is_file()
    if is_file:
        if path.suffix.lower() != ".jsonl":
            made = Path("runs") / path.stem
            hint = f", such as {made}" if path.suffix == ".toml" and made.is_dir() else ""
            raise UserError(f"{path} holds no results; give the directory that `pfedhn run` made{hint}.")
        return read_file(path)
    if (path / "spec.toml").exists():
        return [read_run(path)]
    if Directory(path).is_experiment:
        return [read_experiment(path)]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        inside = sorted(file.parent for name in ("experiment", "spec") for file in path.glob(f"*/{name}.toml"))
        hint = f"; give {' or '.join(map(str, inside[:3]))}" if inside else ""
        raise UserError(f"{path} holds no experiment, no run and no .jsonl file of results{hint}.")
    return [runs for file in files for runs in read_file(file)]


def read_experiment(path: Path) -> Runs:
    """Read the directory of an experiment."""
    experiment, planned = Directory(path).read()
    found: list[tuple[RunSpec, Path, Result | None, StoredSpec | None]] = []
    for run in planned:
        folder, spec = path / run.name, None
        if (result := read_result(folder)) is not None:
            check_place(folder, run, result)
        with suppress(UserError):  # a result vouches for itself; a run without a spec only has no names
            spec = read_spec(folder)
        found.append((run, folder, result, spec))
    return _read_folders(experiment, found)


def read_run(path: Path) -> Runs:
    """Read a single run, as an experiment that has no other."""
    spec = read_spec(path)
    assert spec is not None
    experiment = Experiment(path.resolve().name, (_cell_of(spec),), (spec.seed,))
    (run,) = experiment.runs()
    if (result := read_result(path, spec)) is not None:
        result = replace(result, name=run.name, experiment=experiment.name, cell=asdict(run.cell))
    return _read_folders(experiment, [(run, path, result, spec)])


def _read_folders(
    experiment: Experiment, found: Iterable[tuple[RunSpec, Path, Result | None, StoredSpec | None]]
) -> Runs:
    planned, running, diverged = [], set(), set()
    results, curves, analyses, histories, client_names, losses = {}, {}, {}, {}, {}, {}
    for run, folder, result, spec in found:
        planned.append(run)
        if result is not None:
            results[run.name] = result
            if (analysis := read_analysis(folder, result)) is not None:
                analyses[run.name] = analysis
        elif os.access(folder / LOCK, os.W_OK) and is_claimed(folder):  # else nobody can tell
            running.add(run.name)
        elif (folder / DIVERGED).exists():
            diverged.add(run.name)
        if history := read_history(folder):
            curves[run.name], histories[run.name] = Curve.of(history), history
        if spec is not None:
            losses[run.name] = [network.loss.name for network in spec.networks.values()]
            if spec.data.client_names is not None:
                client_names[run.name] = spec.data.client_names
    return Runs(
        experiment, planned, results, curves, analyses, histories, client_names, losses,
        frozenset(running), frozenset(diverged),
    )  # fmt: skip


def _cell_of(spec: StoredSpec) -> Cell:
    """The cell of an experiment's run; of any other, one that says as much as the run's directory does."""
    if spec.cell is not None:
        return replace(build(Cell, spec.cell, spec.name), pretrain=None)  # the run it started from is not here
    schedule = asdict(spec.schedule)
    return Cell(
        method=re.split(r"[:.]", spec.method.name)[-1],
        dataset=spec.data.name or "own-data",
        clients=spec.data.clients,
        partition={},
        model=", ".join(spec.networks),
        upload=spec.upload.name,
        download=spec.download.name,
        settings=spec.method.settings,
        **schedule,
    )


def read_file(path: Path) -> list[Runs]:
    """Read the experiments of a JSONL file, each with its runs; of a run's lines, the one that finished last counts."""
    experiments: dict[str, Experiment] = {}
    found: dict[str, dict[str, Line]] = {}
    announced: Counter[str] = Counter()  # how many runs the experiments' lines announce; files may be put together
    present: Counter[str] = Counter()
    for number, text in enumerate(read_bytes(path).split(b"\n"), 1):
        if not text.strip():
            continue
        with _naming(path, number):
            table = _parse(text)
            if table["kind"] == "analysis":
                _attach(table, found)
            elif table["kind"] == "run":
                line = _line(table)
                _check(line, experiments)
                runs = found[line.result.experiment]
                runs[line.result.name] = _later(runs.get(line.result.name), line)
                present[line.result.experiment] += 1
            else:
                experiment, num_runs = _experiment(table), from_json(_Announced, table).runs
                if experiments.setdefault(experiment.name, experiment) != experiment:
                    raise SchemaError(f"it contradicts an earlier line about the experiment {experiment.name!r}")
                found.setdefault(experiment.name, {})
                announced[experiment.name] += num_runs
    for name, count in announced.items():
        if present[name] < count:
            raise RunError(
                f"{path} has lost lines: of {count} runs of {name!r} it has {present[name]}; make it again with "
                '--export, or, if they were taken out, take "runs" and "sha256" out of the line of the experiment.'
            )
    return [_runs_of(experiment, found[name]) for name, experiment in experiments.items()]


def _experiment(table: Mapping[str, Any]) -> Experiment:
    if "cells" not in table:
        raise SchemaError("'cells' is missing")
    return from_table({key: value for key, value in table.items() if key not in ("kind", "runs")}, "")


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    """Add the file and the line to an error."""
    try:
        yield
    except UserError as error:
        reason = str(error).removesuffix(".")
        raise UserError(f"{path}, line {number}: {reason}; fix or remove the line.") from None


def _parse(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise SchemaError("it is not JSON") from None
    if not isinstance(line, dict) or line.get("kind") not in ("experiment", "run", "analysis"):
        raise SchemaError('it is neither of kind "experiment" nor of kind "run" nor of kind "analysis"')
    stored = line.pop("sha256", None)  # earlier versions wrote none
    if stored is not None and stored != digest(line):
        raise SchemaError("it was changed after it was written")
    return line


@dataclass(frozen=True)
class _Announced:
    runs: int = 0  # earlier versions did not say


@dataclass(frozen=True)
class _Curve:
    curve: Curve


class Line(NamedTuple):
    """What is kept of a finished run."""

    result: Result
    curve: Curve
    analysis: Analysis | None = None


def _line(table: Mapping[str, Any]) -> Line:
    return Line(from_json(Result, table).without_harmful_adaptation(), from_json(_Curve, table).curve)


def _attach(table: Mapping[str, Any], found: Mapping[str, dict[str, Line]]) -> None:
    """Put an analysis beside its run, unless the run was made again since."""
    analysis = from_json(Analysis, table)
    line = found.get(str(table.get("experiment")), {}).get(analysis.run)
    if line is None:
        raise SchemaError(f"no line has the run {analysis.run!r} that it was computed from")
    if analysis.made_from == identity(line.result):
        found[line.result.experiment][analysis.run] = line._replace(analysis=analysis)


def _check(line: Line, experiments: Mapping[str, Experiment]) -> None:
    """Refuse a run that is not of its experiment, has other settings, or holds impossible numbers."""
    result = line.result
    experiment = experiments.get(result.experiment)
    if experiment is None:
        raise SchemaError(f"no earlier line says what the experiment {result.experiment!r} is")
    run = experiment.find(result.name)
    stored = build(Cell, result.cell, result.name)
    if stored != run.cell:
        mine, theirs = asdict(stored), asdict(run.cell)
        different = [f"{name} = {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]
        raise SchemaError(f"{result.name} has other settings ({', '.join(different)}) than its experiment")
    if result.seed != run.seed:
        raise SchemaError(f"{result.name} has the seed {result.seed}")
    _check_numbers(line, is_accuracy=bool(run.cell.partition))


def _check_numbers(line: Line, is_accuracy: bool) -> None:
    """Refuse what no run can have found; unlike an accuracy, the metric of a run by `pfedhn.train` may be anything."""
    result, curve = line.result, line.curve
    names = ("chosen_step", "steps", "rounds", "bytes_down", "bytes_up", "seconds")
    parts = [part for part in (result, result.pretrain) if part is not None]
    counts = [(name, getattr(part, name, 0)) for part in parts for name in names]
    for name, value in [*counts, *result.unused_examples.items()]:
        if not 0 <= value < math.inf:
            raise SchemaError(f"{name!r} is {value}, which cannot be")
    if list(curve.step) != sorted(set(curve.step)) or (curve.step and curve.step[0] < 0):
        raise SchemaError("the steps of its curve do not rise")
    if result.chosen_step > result.steps or (curve.step and result.chosen_step not in curve.step):
        raise SchemaError(f"'chosen_step' is {result.chosen_step}, which its curve does not have")
    for split in ("validation", "test"):
        scores, measures = getattr(result, split), getattr(curve, split)
        _check_scores(split, scores, is_accuracy)
        accuracies = [*(measures.client_mean or ()), *(measures.sample_mean or ())]
        if is_accuracy and not all(0 <= value <= 1 or math.isnan(value) for value in accuracies):
            raise SchemaError(f"an accuracy of its {split} curve is not between 0 and 1")


def _check_scores(split: str, scores: Scores, is_accuracy: bool) -> None:
    means = [mean for mean in (scores.client_mean, scores.sample_mean) if mean is not None]
    if scores.examples < 0 or any(number < 0 for number in scores.client_examples or ()):
        raise SchemaError(f"{split}: a number of examples is below 0")
    if is_accuracy and not all(0 <= mean <= 1 or (math.isnan(mean) and not scores.examples) for mean in means):
        raise SchemaError(f"{split}: an accuracy is not between 0 and 1")
    if scores.clients is None or scores.client_examples is None or not means:
        return
    pairs = [(value, number) for value, number in zip(scores.clients, scores.client_examples, strict=True) if number]
    if is_accuracy and not all(0 <= value <= number for value, number in pairs):
        raise SchemaError(f"{split}: a client has more correct examples than examples")
    if scores.examples != sum(scores.client_examples):
        raise SchemaError(f"{split}: 'examples' is not the sum of the clients'")
    if pairs:
        made = [
            statistics.fmean(value / number for value, number in pairs),
            sum(value for value, _ in pairs) / scores.examples,
        ]
        if not numpy.allclose(means, made, rtol=2e-6, atol=2e-6, equal_nan=True):  # lines hold six digits
            raise SchemaError(f"{split}: the means are not those of the clients")


def _runs_of(experiment: Experiment, lines: Mapping[str, Line]) -> Runs:
    """Every run of the experiment counts as planned: a table shows what has not been run."""
    planned = {run.name: run for run in [*experiment.runs(), *map(experiment.find, lines)]}
    return Runs(
        experiment,
        list(planned.values()),
        {name: line.result for name, line in lines.items()},
        {name: line.curve for name, line in lines.items()},
        {name: line.analysis for name, line in lines.items() if line.analysis is not None},
    )


def to_line(result: Result, curve: Curve) -> dict[str, Any]:
    """What is kept of a finished run, as JSON."""
    validation = replace(result.validation, clients=None, client_examples=None)
    result = replace(result, validation=validation, history=None, command=without_folders(result.command))
    kept = _rounded(to_json(result), 6)  # its curve is rounded
    return {"kind": "run", **kept, "curve": _rounded(to_json(curve), 4, whole=())}


def without_folders(command: str) -> str:
    """A command as others can use it: a file is called by its name, wherever it was on the machine that ran it."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in shlex.split(command))


def _rounded(value: Any, digits: int, whole: Sequence[str] = WHOLE) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: part if key in whole else _rounded(part, digits, whole) for key, part in value.items()}
    return [_rounded(part, digits, whole) for part in value] if isinstance(value, list) else value


def _later(one: Line | None, other: Line) -> Line:
    """The line of a run that finished last, so that files can be put together in any order."""
    if one is None:
        return other
    first, last = sorted((one, other), key=lambda line: line.result.environment.finished or "")
    is_same_run = identity(first.result) == identity(last.result)
    return last._replace(analysis=first.analysis) if is_same_run and last.analysis is None else last


class Exported(NamedTuple):
    """How many runs of a file are new, made again, and in it altogether."""

    new: int
    replaced: int
    total: int


def export(paths: Iterable[Path], file: Path) -> Exported:
    """Put the finished runs of directories into a JSONL file; what it holds of other runs stays.

    Runs may still be going on. The file is written whole or not at all, and the same call again changes nothing.
    Calls at the same time wait for each other.
    """
    found = [runs for path in paths for runs in read(path)]
    make_folder(file.parent)
    with one_at_a_time(file.parent):
        kept: dict[str, tuple[Experiment, dict[str, Line]]] = {}
        for runs in read_file(file) if file.exists() else []:
            kept[runs.experiment.name] = runs.experiment, _lines(runs)
        before = _texts(kept)
        for runs in found:
            fresh = _lines(runs)
            stored, lines = kept.get(runs.experiment.name, (runs.experiment, {}))
            experiment = _one_for_both(file, stored, lines, runs.experiment, fresh)
            kept[experiment.name] = experiment, lines | {name: _later(lines.get(name), fresh[name]) for name in fresh}
        after = _texts(kept)
        parts = []
        for name, (experiment, lines) in sorted(kept.items()):
            parts.append(_text({"kind": "experiment", **asdict(experiment), "runs": len(lines)}))
            seeds = sorted({line.result.seed for line in lines.values()})
            parts += [after[name, run.name] for run in experiment.runs(seeds) if run.name in lines]
        content = "".join(parts).encode()
        if not file.exists() or read_bytes(file) != content:
            write_atomically(file, content)
        # Texts are compared, since NaN, the score of a split without examples, is equal to nothing.
        replaced = sum(after[key] != text for key, text in before.items())
        return Exported(len(after) - len(before), replaced, len(after))


def _texts(kept: Mapping[str, tuple[Experiment, Mapping[str, Line]]]) -> dict[tuple[str, str], str]:
    """What stands in a file of each run, and of what was computed from it, by the names of experiment and run."""
    found = {}
    for experiment, (_, lines) in kept.items():
        for name, line in lines.items():
            found[experiment, name] = _text(to_line(line.result, line.curve))
            if line.analysis is not None:
                found[experiment, name] += _text(
                    {"kind": "analysis", "experiment": line.result.experiment, **to_json(line.analysis)}
                )
    return found


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps({**line, "sha256": digest(line)}, separators=(",", ":"), ensure_ascii=False) + "\n"


def _lines(runs: Runs) -> dict[str, Line]:
    """The finished runs as a file holds them: rounded and checked, so that what is written can be read again."""
    found = {}
    for name, result in runs.results.items():
        line = _line(to_line(result, runs.curves.get(name, Curve.of([]))))
        try:
            _check(line, {runs.experiment.name: runs.experiment})
        except UserError as error:
            reason = str(error).removesuffix(".")
            raise UserError(f"the result of {name} cannot be kept: {reason}; run it again with this version.") from None
        found[name] = line._replace(analysis=runs.analyses.get(name))
    return found


def _one_for_both(
    file: Path, stored: Experiment, stored_lines: Iterable[str], given: Experiment, given_lines: Iterable[str]
) -> Experiment:
    """The given experiment, but with the stored one's cells that have runs: a cell is as it was run.

    A cell of which both have runs, with other settings, is refused.
    """
    named = dict(zip(cell_names(given.cells), given.cells, strict=True))
    named |= {run.cell_name: run.cell for run in map(stored.find, stored_lines)}
    both = replace(given, cells=tuple(named.values()))
    theirs = [*map(given.find, given_lines), *map(stored.find, stored_lines)]
    mine = {run.name: run for run in both.runs(list({run.seed for run in theirs}))}
    if misfits := [run.name for run in theirs if mine.get(run.name) != run]:
        raise UserError(
            f"{file} holds runs of other settings of {given.name!r} (such as {misfits[0]}); remove their lines, or "
            "give another file."
        )
    return both
