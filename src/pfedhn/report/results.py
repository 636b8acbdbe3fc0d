"""Finished runs as lines of a JSONL file: small enough to keep beside the source, whole enough for every table.

A file has, for each of its experiments, one line with the experiment and one for each finished run: what `result.json`
says, less each client's validation score and the folders in its command, and the learning curve. Curves are rounded to
4 digits, accuracies to 6.
What a study computed from a run is a line of its own, "analysis".
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

from pfedhn.errors import RunError, UserError
from pfedhn.experiments.analysis import Analysis, identity, read_analysis
from pfedhn.experiments.directory import Directory, check_place
from pfedhn.experiments.grid import from_table
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, cell_names
from pfedhn.settings import build
from pfedhn.storage.directory import DIVERGED, Spec, read_history, read_result, read_spec
from pfedhn.storage.files import digest
from pfedhn.storage.schema import Curve, Moment, Result, SchemaError, Scores, from_json, to_json
from pfedhn.system.files import LOCK, is_claimed, make_folder, one_at_a_time, read_bytes, reading, write_atomically

WHOLE = ("cell", "settings", "loss")
"""Never rounded: settings are what they are, and by the loss one sees the same bits again."""


@dataclass(frozen=True)
class Runs:
    """An experiment and what is known of its runs, by their names."""

    experiment: Experiment
    planned: Sequence[RunSpec]
    results: Mapping[str, Result]  # of those that have finished
    curves: Mapping[str, Curve]  # of those that have begun
    analyses: Mapping[str, Analysis] = field(default_factory=dict)  # of those from which a study computed something
    histories: Mapping[str, Sequence[Moment]] = field(default_factory=dict)  # every evaluation, of directories alone
    client_names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of runs whose clients have names
    losses: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the names of loss functions, of directories
    running: frozenset[str] = frozenset()  # those that a process is at work on
    diverged: frozenset[str] = frozenset()  # those that ended so, of directories


class LineError(ValueError):
    """What is wrong with a line."""


def read(path: Path) -> list[Runs]:
    """The runs of a directory of an experiment or of one run, of a JSONL file, or of a folder of such files."""
    with reading(path):
        is_file = path.is_file()
    if is_file:
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
    """What lies in the directory of an experiment."""
    experiment, planned = Directory(path).read()
    results, curves, analyses, histories, client_names, losses = {}, {}, {}, {}, {}, {}
    running, diverged = set(), set()
    for run in planned:
        if (result := read_result(path / run.name)) is not None:
            check_place(path / run.name, run, result)
            results[run.name] = result
            if (analysis := read_analysis(path / run.name, result)) is not None:
                analyses[run.name] = analysis
        elif _is_running(path / run.name):
            running.add(run.name)
        elif _has_diverged(path / run.name):
            diverged.add(run.name)
        if history := read_history(path / run.name):
            curves[run.name], histories[run.name] = Curve.of(history), history
            with suppress(UserError):  # a result vouches for itself; without its spec it only has no names
                spec = read_spec(path / run.name)
                if spec is not None:
                    losses[run.name] = _losses(spec)
                if spec is not None and spec.data.client_names is not None:
                    client_names[run.name] = spec.data.client_names
    known = Runs(experiment, planned, results, curves, analyses, histories, client_names, losses)
    return replace(known, running=frozenset(running), diverged=frozenset(diverged))


def _losses(spec: Spec) -> list[str]:
    return [network.loss.name for network in spec.networks.values()]


def _is_running(folder: Path) -> bool:
    """Whether a process is at work on a run; of a folder that only can be read, nobody can tell."""
    return os.access(folder / LOCK, os.W_OK) and is_claimed(folder)


def _has_diverged(folder: Path) -> bool:
    return (folder / DIVERGED).exists()


def read_run(path: Path) -> Runs:
    """A single run, as an experiment that has no other."""
    spec = read_spec(path)
    assert spec is not None
    name = path.resolve().name
    experiment = Experiment(name, (_cell_of(spec),), (spec.seed,))
    (run,) = experiment.runs()
    result, history = read_result(path, spec), read_history(path)
    known = {} if result is None else {run.name: replace(result, name=run.name, experiment=name, cell=asdict(run.cell))}
    curves, histories = ({run.name: Curve.of(history)}, {run.name: history}) if history else ({}, {})
    names = {} if spec.data.client_names is None else {run.name: spec.data.client_names}
    running = frozenset({run.name} if result is None and _is_running(path) else ())
    diverged = frozenset({run.name} if result is None and not running and _has_diverged(path) else ())
    return Runs(experiment, [run], known, curves, {}, histories, names, {run.name: _losses(spec)}, running, diverged)


def _cell_of(spec: Spec) -> Cell:
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
    """The experiments of a JSONL file, each with its runs; a run that has two lines counts as it finished last."""
    experiments: dict[str, Experiment] = {}
    announced: dict[str, int] = {}  # how many runs the lines of experiments say there are; files may be put together
    lines: list[tuple[int, dict[str, Any]]] = []
    for number, text in enumerate(read_bytes(path).split(b"\n"), 1):
        with _naming(path, number):
            if not text.strip():
                continue
            line = _parse(text)
            if line["kind"] != "experiment":
                lines.append((number, line))
                continue
            experiment = _experiment(line)
            announced[experiment.name] = announced.get(experiment.name, 0) + _announced(line)
            if experiments.setdefault(experiment.name, experiment) != experiment:
                raise LineError(f"it says otherwise than an earlier line what {experiment.name!r} is")
    found: dict[str, dict[str, Line]] = {name: {} for name in experiments}
    for number, table in sorted(lines, key=lambda line: line[1]["kind"] == "analysis"):  # what it is of comes first
        with _naming(path, number):
            if table["kind"] == "analysis":
                _attach(table, found)
                continue
            run = _line(table)
            _check(run, experiments)
            runs = found[run.result.experiment]
            runs[run.result.name] = _later(runs.get(run.result.name), run)
    present = Counter(table["experiment"] for _, table in lines)
    for name, count in announced.items():
        if present[name] < count:
            raise RunError(
                f"{path} has lost lines: of {count} runs of {name!r} it has {present[name]}; make it again with "
                '--export, or, if they were taken out, take "runs" and "sha256" out of the line of the experiment.'
            )
    return [_runs_of(experiment, found[name]) for name, experiment in experiments.items()]


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except LineError as error:
        raise UserError(f"{path}, line {number}: {error}; fix or remove the line.") from None


def _parse(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise LineError("it is not JSON") from None
    if not isinstance(line, dict) or line.get("kind") not in ("experiment", "run", "analysis"):
        raise LineError('it is neither of kind "experiment" nor of kind "run" nor of kind "analysis"')
    stored = line.pop("sha256", None)  # earlier versions wrote none
    if stored is not None and stored != digest(line):
        raise LineError("it was changed after it was written")
    return line


def _announced(line: Mapping[str, Any]) -> int:
    """How many runs follow; earlier versions did not say."""
    number = line.get("runs", 0)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise LineError(f"'runs' is {number!r}, which is no number of runs")
    return number


def _experiment(line: Mapping[str, Any]) -> Experiment:
    if "cells" not in line:
        raise LineError("'cells' is missing")
    try:
        return from_table({key: value for key, value in line.items() if key not in ("kind", "runs")}, "")
    except UserError as error:
        raise LineError(str(error).removesuffix(".")) from None


class Line(NamedTuple):
    """What is kept of a finished run."""

    result: Result
    curve: Curve
    analysis: Analysis | None = None


@dataclass(frozen=True)
class _Curve:
    curve: Curve


def _line(table: Mapping[str, Any]) -> Line:
    try:
        return Line(from_json(Result, table).without_harmful_adaptation(), from_json(_Curve, table).curve)
    except SchemaError as error:
        raise LineError(str(error)) from None


def _attach(table: Mapping[str, Any], found: Mapping[str, dict[str, Line]]) -> None:
    """Put what was computed from a run beside it; of two runs of one name, it belongs to one."""
    try:
        analysis = from_json(Analysis, table)
    except SchemaError as error:
        raise LineError(str(error)) from None
    line = found.get(str(table.get("experiment")), {}).get(analysis.run)
    if line is None:
        raise LineError(f"no line has the run {analysis.run!r} that it was computed from")
    if analysis.made_from == identity(line.result):
        found[line.result.experiment][analysis.run] = line._replace(analysis=analysis)


def _check(line: Line, experiments: Mapping[str, Experiment]) -> None:
    """A run must be of its experiment, with the settings that this has, and its numbers must be possible."""
    result = line.result
    experiment = experiments.get(result.experiment)
    if experiment is None:
        raise LineError(f"no line says what the experiment {result.experiment!r} is")
    try:
        run = experiment.find(result.name)
        stored = build(Cell, result.cell, result.name)
    except UserError as error:
        raise LineError(str(error).removesuffix(".")) from None
    if stored != run.cell:
        raise LineError(f"{result.name} has other settings ({_differences(stored, run.cell)}) than its experiment")
    if result.seed != run.seed:
        raise LineError(f"{result.name} has the seed {result.seed}")
    _check_numbers(line, is_accuracy=bool(run.cell.partition))


def _check_numbers(line: Line, is_accuracy: bool) -> None:
    """Refuse what no run can have found.

    Args:
        line: A run.
        is_accuracy: Whether its metric is one; that of a run by `pfedhn.train` may be anything.
    """
    result, curve = line.result, line.curve
    counts = {name: getattr(result, name) for name in ("chosen_step", "steps", "rounds", "bytes_down", "bytes_up")}
    for cost in [] if result.pretrain is None else [result.pretrain]:
        counts |= {f"pretrain.{name}": getattr(cost, name) for name in ("steps", "bytes_down", "bytes_up", "seconds")}
    for name, value in {**counts, "seconds": result.seconds, **result.unused_examples}.items():
        if not 0 <= value < math.inf:
            raise LineError(f"{name!r} is {value}, which cannot be")
    if list(curve.step) != sorted(set(curve.step)) or (curve.step and curve.step[0] < 0):
        raise LineError("the steps of its curve do not rise")
    if result.chosen_step > result.steps or (curve.step and result.chosen_step not in curve.step):
        raise LineError(f"'chosen_step' is {result.chosen_step}, which its curve does not have")
    for split in ("validation", "test"):
        scores, measures = getattr(result, split), getattr(curve, split)
        _check_scores(split, scores, is_accuracy)
        accuracies = [*(measures.client_mean or ()), *(measures.sample_mean or ())]
        if is_accuracy and not all(0 <= value <= 1 or math.isnan(value) for value in accuracies):
            raise LineError(f"an accuracy of its {split} curve is not between 0 and 1")


def _check_scores(split: str, scores: Scores, is_accuracy: bool) -> None:
    means = [mean for mean in (scores.client_mean, scores.sample_mean) if mean is not None]
    if scores.examples < 0 or any(number < 0 for number in scores.client_examples or ()):
        raise LineError(f"{split}: a number of examples is below 0")
    if is_accuracy and not all(0 <= mean <= 1 or (math.isnan(mean) and not scores.examples) for mean in means):
        raise LineError(f"{split}: an accuracy is not between 0 and 1")
    if scores.clients is None or scores.client_examples is None or scores.client_mean is None:
        return
    pairs = [(value, number) for value, number in zip(scores.clients, scores.client_examples, strict=True) if number]
    if is_accuracy and not all(0 <= value <= number for value, number in pairs):
        raise LineError(f"{split}: a client has more correct examples than examples")
    if scores.examples != sum(scores.client_examples):
        raise LineError(f"{split}: 'examples' is not the sum of the clients'")
    if pairs:
        over_clients = statistics.fmean(value / number for value, number in pairs)
        over_samples = sum(value for value, _ in pairs) / scores.examples
        both = (scores.client_mean, over_clients), (scores.sample_mean, over_samples)
        if not all(_is_near(mean, made) for mean, made in both):
            raise LineError(f"{split}: the means are not those of the clients")


def _is_near(mean: float | None, made: float) -> bool:
    """Lines hold six digits."""
    return mean is not None and (abs(mean - made) <= 2e-6 * max(1.0, abs(made)) or (mean != mean and made != made))


def _differences(cell: Cell, other: Cell) -> str:
    mine, theirs = asdict(cell), asdict(other)
    return ", ".join(f"{name} = {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name])


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
    first, last = (one, other) if _finished(one) <= _finished(other) else (other, one)
    is_same_run = identity(first.result) == identity(last.result)
    return last._replace(analysis=first.analysis) if is_same_run and last.analysis is None else last


def _finished(line: Line) -> str:
    return line.result.environment.finished or ""


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
    make_folder(file.parent)
    with one_at_a_time(file.parent):
        return _export(paths, file)


def _export(paths: Iterable[Path], file: Path) -> Exported:
    kept: dict[str, tuple[Experiment, dict[str, Line]]] = {}
    for runs in read_file(file) if file.exists() else []:
        kept[runs.experiment.name] = runs.experiment, _lines(runs)
    before = {(name, run): line for name, (_, lines) in kept.items() for run, line in lines.items()}
    for runs in (runs for path in paths for runs in read(path)):
        experiment, lines = kept.get(runs.experiment.name, (runs.experiment, {}))
        fresh = _lines(runs)
        _check_before_writing(runs.experiment, fresh)
        experiment = _one_for_both(file, experiment, lines, runs.experiment, fresh)
        kept[experiment.name] = experiment, lines | {name: _later(lines.get(name), fresh[name]) for name in fresh}
    after = {(name, run): line for name, (_, lines) in kept.items() for run, line in lines.items()}
    content = "".join(
        _text(line)
        for _, (experiment, lines) in sorted(kept.items())
        for line in [
            {"kind": "experiment", **asdict(experiment), "runs": len(lines)},
            *_in_order(experiment, lines),
        ]
    ).encode()
    if not file.exists() or read_bytes(file) != content:
        write_atomically(file, content)
    # By their texts: NaN, the score of nobody, is equal to nothing.
    replaced = sum(_texts(after[key]) != _texts(line) for key, line in before.items())
    return Exported(len(after) - len(before), replaced, len(after))


def _texts(line: Line) -> list[str]:
    return list(map(_text, to_lines(line)))


def to_lines(line: Line) -> list[dict[str, Any]]:
    """A finished run as JSON, and what was computed from it."""
    lines = [to_line(line.result, line.curve)]
    if line.analysis is not None:
        lines.append({"kind": "analysis", "experiment": line.result.experiment, **to_json(line.analysis)})
    return lines


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps({**line, "sha256": digest(line)}, separators=(",", ":"), ensure_ascii=False) + "\n"


def _lines(runs: Runs) -> dict[str, Line]:
    """The finished runs as they will stand in a file: rounded, so that what is read equals what was written."""
    return {
        name: _line(to_line(result, runs.curves.get(name, Curve.of([]))))._replace(analysis=runs.analyses.get(name))
        for name, result in runs.results.items()
    }


def _check_before_writing(experiment: Experiment, lines: Mapping[str, Line]) -> None:
    """Nothing is written that could not be read again."""
    for name, line in lines.items():
        try:
            _check(line, {experiment.name: experiment})
        except LineError as error:
            raise UserError(f"the result of {name} cannot be kept: {error}; run it again with this version.") from None


def _in_order(experiment: Experiment, lines: Mapping[str, Line]) -> list[dict[str, Any]]:
    """As the experiment names its cells, then by seed."""
    seeds = sorted({line.result.seed for line in lines.values()})
    named = [lines[run.name] for run in experiment.runs(seeds) if run.name in lines]
    return [text for line in named for text in to_lines(line)]


def _one_for_both(
    file: Path,
    stored: Experiment,
    stored_lines: Mapping[str, Line],
    given: Experiment,
    given_lines: Mapping[str, Line],
) -> Experiment:
    """The given experiment, but with the stored one's cells that have runs: a cell is as it was run.

    A cell of which both have runs, with other settings, is refused.
    """
    named = dict(zip(cell_names(given.cells), given.cells, strict=True))
    named |= {run.cell_name: run.cell for run in map(stored.find, stored_lines)}
    both = replace(given, cells=tuple(named.values()))
    misfits = _misfits(both, given, given_lines) + _misfits(both, stored, stored_lines)
    if misfits:
        raise UserError(
            f"{file} holds runs of other settings of {given.name!r} (such as {misfits[0]}); remove their lines, or "
            "give another file."
        )
    return both


def _misfits(experiment: Experiment, owner: Experiment, names: Iterable[str]) -> list[str]:
    """The runs of `owner` that `experiment` does not have, or has with other settings."""
    theirs = list(map(owner.find, names))
    mine = {run.name: run for run in experiment.runs(list({run.seed for run in theirs}))}
    return [run.name for run in theirs if mine.get(run.name) != run]
