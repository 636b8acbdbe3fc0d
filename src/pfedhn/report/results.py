"""Finished runs as lines of a JSONL file: small enough to keep beside the source, whole enough for every table.

A file has, for each of its experiments, one line with the experiment and one for each finished run: what `result.json`
says, less each client's validation score, and the learning curve. Curves are rounded to 4 digits, accuracies to 6.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pfedhn.errors import UserError
from pfedhn.experiments.directory import Directory, read_result
from pfedhn.experiments.grid import from_table
from pfedhn.experiments.spec import Cell, Experiment, cell_names, find_run
from pfedhn.files import make_folder, one_at_a_time, read_bytes, read_text, reading, write_atomically
from pfedhn.settings import build

SPLITS = ("validation", "test")
WHOLE = (
    "cell",
    "settings",
    "loss",
)  # never rounded: settings are what they are, and by the loss one sees the same bits again


@dataclass(frozen=True)
class Runs:
    """An experiment and what is known of its runs, by their names."""

    experiment: Experiment
    planned: frozenset[str]
    results: Mapping[str, Mapping[str, Any]]  # of those that have finished
    metrics: Mapping[str, Sequence[Mapping[str, Any]]]  # of those that have begun


class LineError(ValueError):
    """What is wrong with a line."""


def read(path: Path) -> list[Runs]:
    """The runs of a directory that `pfedhn run` made, of a JSONL file, or of a folder of such files."""
    with reading(path):
        is_file = path.is_file()
    if is_file:
        return read_file(path)
    if (path / "experiment.toml").exists():
        return [read_directory(path)]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        inside = sorted(file.parent for file in path.glob("*/experiment.toml"))
        hint = f"; give {' or '.join(map(str, inside[:3]))}" if inside else ""
        raise UserError(f"{path} holds no experiment and no .jsonl file of results{hint}.")
    return [runs for file in files for runs in read_file(file)]


def read_directory(path: Path) -> Runs:
    experiment, planned = Directory(path).read()
    results, metrics = {}, {}
    for name in planned:
        if (result := read_result(path / name)) is not None:
            results[name] = result
        if records := _read_metrics(path / name / "metrics.jsonl"):
            metrics[name] = records
    return Runs(experiment, frozenset(planned), results, metrics)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run so far; the last line of one that was killed may be half written."""
    records: list[dict[str, Any]] = []
    if path.exists():
        for line in read_text(path).splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
    return records


def read_file(path: Path) -> list[Runs]:
    """The experiments of a JSONL file, each with its runs; a run that has two lines counts as it finished last."""
    experiments: dict[str, Experiment] = {}
    lines: list[tuple[int, dict[str, Any]]] = []
    for number, text in enumerate(read_bytes(path).split(b"\n"), 1):
        with _naming(path, number):
            if not text.strip():
                continue
            line = _parse(text)
            if line["kind"] == "run":
                lines.append((number, line))
                continue
            experiment = _experiment(line)
            if experiments.setdefault(experiment.name, experiment) != experiment:
                raise LineError(f"it says otherwise than an earlier line what {experiment.name!r} is")
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in experiments}
    for number, line in lines:
        with _naming(path, number):
            _check_run(line, experiments)
            runs = found[line["experiment"]]
            runs[line["name"]] = _later(runs.get(line["name"]), line)
    return [_runs_of(experiment, found[name].values()) for name, experiment in experiments.items()]


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except LineError as error:
        raise UserError(f"{path}, line {number}: {error}; mend or remove the line.") from None


def _parse(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        raise LineError("it is no JSON") from None
    if not isinstance(line, dict) or line.get("kind") not in ("experiment", "run"):
        raise LineError('it is neither of kind "experiment" nor of kind "run"')
    return line


def _experiment(line: Mapping[str, Any]) -> Experiment:
    if "cells" not in line:
        raise LineError("'cells' is missing")
    try:
        return from_table({key: value for key, value in line.items() if key != "kind"}, "")
    except (KeyError, TypeError, ValueError) as error:
        raise LineError(str(error).removesuffix(".")) from None


RUN_FIELDS: dict[str, type | tuple[type, ...]] = {
    "experiment": str,
    "name": str,
    "cell": dict,
    "settings": dict,
    "steps": int,
    "bytes_up": int,
    "bytes_down": int,
    "seconds": (int, float),
    "validation": dict,
    "test": dict,
    "partition_sha256": str,
    "command": str,
    "environment": dict,
    "curve": dict,
}
"""What every table and picture relies on."""


def _check_run(line: Mapping[str, Any], experiments: Mapping[str, Experiment]) -> None:
    for name, kind in RUN_FIELDS.items():
        if not isinstance(line.get(name), kind):
            raise LineError(f"{name!r} is missing or of the wrong kind")
    experiment = experiments.get(line["experiment"])
    if experiment is None:
        raise LineError(f"no line says what the experiment {line['experiment']!r} is")
    try:
        cell, _ = find_run(experiment, line["name"])
        stored = build(Cell, line["cell"], line["name"])
    except (UserError, ValueError) as error:
        raise LineError(str(error).removesuffix(".")) from None
    if stored != cell:
        raise LineError(f"{line['name']} has other settings ({_differences(stored, cell)}) than its experiment")
    test, curve = line["test"], line["curve"]
    parts = [test.get("clients"), test.get("client_rows")]
    if not {"loss", *_measures(test)} <= set(test) or not _are_lists_of_one_length(parts):
        raise LineError("'test' is not whole")
    measures = _measures(test)
    by_split = [curve[split] if isinstance(curve.get(split), dict) else {} for split in SPLITS]
    columns = [split.get(name) for split in by_split for name in measures]
    if not _are_lists_of_one_length([curve.get("step"), *columns]):
        raise LineError("'curve' is not whole")
    if not {"device", "threads"} <= set(line["environment"]):
        raise LineError("'environment' is not whole")


def _measures(scores: Mapping[str, Any]) -> tuple[str, ...]:
    """What a curve shows; a task without accuracy has the loss alone."""
    return ("client_mean", "sample_mean") if "client_mean" in scores else ("loss",)


def _are_lists_of_one_length(values: Sequence[Any]) -> bool:
    return all(isinstance(part, list) for part in values) and len({len(part) for part in values}) == 1


def _differences(cell: Cell, other: Cell) -> str:
    mine, theirs = asdict(cell), asdict(other)
    return ", ".join(f"{name} = {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name])


def _runs_of(experiment: Experiment, lines: Iterable[Mapping[str, Any]]) -> Runs:
    """Every run of the experiment counts as planned: a table shows what has not been run."""
    results = {line["name"]: {key: value for key, value in line.items() if key != "curve"} for line in lines}
    metrics = {line["name"]: _records(line["curve"]) for line in lines}
    return Runs(experiment, frozenset([*experiment.runs(), *results]), results, metrics)


def _records(curve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A curve as the lines of metrics.jsonl."""
    return [
        {"step": step, **{split: {name: values[number] for name, values in curve[split].items()} for split in SPLITS}}
        for number, step in enumerate(curve["step"])
    ]


def to_line(result: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept of a finished run."""
    validation = {key: value for key, value in result["validation"].items() if key not in ("clients", "client_rows")}
    curve: dict[str, Any] = {"step": [record["step"] for record in metrics]}
    for split in SPLITS:
        names = _measures(result[split])
        curve[split] = {name: [_rounded(record[split][name], 4) for record in metrics] for name in names}
    kept = {key: value for key, value in result.items() if key not in ("kind", "curve")}
    return {"kind": "run", **_rounded({**kept, "validation": validation}, 6), "curve": curve}


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: part if key in WHOLE else _rounded(part, digits) for key, part in value.items()}
    return [_rounded(part, digits) for part in value] if isinstance(value, list | tuple) else value


def _later(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Of two lines of a run, the one that finished last: so files can be put together in any order."""
    return other if one is None or _finished(one) <= _finished(other) else one


def _finished(line: Mapping[str, Any]) -> str:
    return str(line["environment"].get("finished", ""))


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
    kept: dict[str, tuple[Experiment, dict[str, dict[str, Any]]]] = {}
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
        json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n"
        for _, (experiment, lines) in sorted(kept.items())
        for line in [{"kind": "experiment", **asdict(experiment)}, *_in_order(experiment, lines)]
    ).encode()
    if not file.exists() or read_bytes(file) != content:
        write_atomically(file, content)
    replaced = sum(after[key] != line for key, line in before.items())
    return Exported(len(after) - len(before), replaced, len(after))


def _lines(runs: Runs) -> dict[str, dict[str, Any]]:
    return {name: to_line(result, runs.metrics.get(name, [])) for name, result in runs.results.items()}


def _check_before_writing(experiment: Experiment, lines: Mapping[str, dict[str, Any]]) -> None:
    """Nothing is written that could not be read again."""
    for name, line in lines.items():
        try:
            _check_run(line, {experiment.name: experiment})
        except LineError as error:
            raise UserError(f"the result of {name} cannot be kept: {error}; run it again with this version.") from None


def _in_order(experiment: Experiment, lines: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """As the experiment names its cells, then by seed."""
    seeds = sorted({_seed(name) for name in lines})
    ordered = replace(experiment, seeds=tuple(seeds)).runs()
    return [lines[name] for name in ordered if name in lines]


def _seed(name: str) -> int:
    found = re.search(r"-seed(-?\d+)$", name)
    assert found is not None, f"{name} is no name of a run"
    return int(found[1])


def _one_for_both(
    file: Path,
    stored: Experiment,
    stored_lines: Mapping[str, Any],
    given: Experiment,
    given_lines: Mapping[str, Any],
) -> Experiment:
    """The given experiment, but with the stored one's cells that have runs: a cell is as it was run.

    A cell of which both have runs, with other settings, is refused.
    """
    named = dict(zip(cell_names(given.cells), given.cells, strict=True))
    named |= {name.rpartition("-seed")[0]: find_run(stored, name)[0] for name in stored_lines}
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
    theirs = {name: find_run(owner, name)[0] for name in names}
    seeds = tuple({_seed(name) for name in theirs})
    mine = {name: cell for name, (cell, _) in replace(experiment, seeds=seeds).runs().items()}
    return [name for name, cell in theirs.items() if mine.get(name) != cell]
