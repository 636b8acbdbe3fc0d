"""A report as files: Markdown, CSV, LaTeX, figures and one HTML page."""

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pfedhn.errors import UserError, closest, printable
from pfedhn.experiments.directory import plain
from pfedhn.experiments.spec import Experiment, flat_fields
from pfedhn.report import findings as of_studies
from pfedhn.report import measures_table, pairs, tables
from pfedhn.report import verdict as of_verdicts
from pfedhn.report.entries import Average, Entry, Report, column_text, counted, display_name, on_common_steps, summarize
from pfedhn.report.figures import figures_of, style, to_png, to_svg
from pfedhn.report.findings import Finding
from pfedhn.settings import to_toml
from pfedhn.storage.schema import Result
from pfedhn.system.files import make_folder, write_atomically

FORMATS = ("md", "csv", "tex", "png", "svg", "html")


def _shown(value: Any) -> Any:
    """Every word on the page: control characters as escapes. What the template itself wrote stays."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # titles and labels are a person's own words
    finalize=_shown,
    trim_blocks=True,
    undefined=StrictUndefined,
)


def to_html(reports: Sequence[Report], average: Average = "clients", findings: Sequence[Finding] = ()) -> str:
    """One page that holds everything, the findings of studies first: it opens offline, and asks nothing of anybody."""
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text()
    return TEMPLATES.get_template("page.html").render(
        findings=findings,
        sections=[_section(report, average) for report in reports],
        specs=[(experiment.name, spec_text(experiment)) for report in reports for experiment in report.experiments],
        commands=[command for report in reports for command in tables.commands(report)],
        versions=versions(reports),
        style=Markup((folder / "page.css").read_text()),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        # The only script that a browser runs here: whatever words a file holds, they stay words.
        digest=_base64(hashlib.sha256(script.encode()).digest()),
        data=Markup(_json(chart_data(reports, average))),  # noqa: S704 - every < is escaped
    )


COSTS = ("steps", "up", "down", "time")


def _section(report: Report, average: Average) -> dict[str, Any]:
    """What the template shows of a report."""
    finished = replace(report, entries=[entry for entry in report.entries if entry.results])
    begun = {entry.label for entry in report.entries if entry.has_begun or entry.running or entry.diverged}
    unstarted = [display_name(label) for label in report.labels if label not in begun]
    standing = [tables.unfinished(report), f"Not run yet: {', '.join(unstarted)}." if unstarted else ""]
    lines = tables.displayed(tables.details(finished, average))
    if len(finished.columns) > 1:
        results, note = tables.displayed(tables.grid(finished, average)), tables.caption(finished, average)
        cost = lines
    else:
        results, note = _columns(lines, lambda name: name not in COSTS), tables.details_caption(finished, average)
        cost = _columns(lines, lambda name: name in ("method", *COSTS))
    return {
        "title": report.title,
        "verdicts": [
            {
                "name": of_verdicts.data_text(verdict),
                "sentences": of_verdicts.to_text(verdict),
                "note": of_verdicts.note(verdict),
            }
            for verdict in of_verdicts.verdicts(report)
        ],
        "sentence": tables.sentence(report) if report.columns else "",
        "is_finished": bool(finished.entries),  # at least in part
        "is_loss": not report.has_accuracy,
        "results": results,
        "note": note,
        "standing": " ".join(filter(None, standing)),
        "cost": cost,
        "differences": differing_settings(report.entries),
        "columns": [
            {
                "name": column_text(column),
                "measures": measures_table.measures_table(report, column),
                "measures_note": measures_table.caption(report, column),
                "pairs": pairs.pairs(report, column, average),
                "note": pairs.caption(column, report.has_folds),
            }
            for column in report.columns
        ],
    }


def _columns(lines: Sequence[Sequence[str]], is_kept: Callable[[str], bool]) -> list[list[str]]:
    """Some columns of a table, chosen by their heading."""
    kept = [place for place, name in enumerate(lines[0]) if is_kept(name)]
    return [[line[place] for place in kept] for line in lines]


def spec_text(experiment: Experiment) -> str:
    """An experiment as a file that `pfedhn run` takes."""
    return to_toml(plain(asdict(experiment)))


def _json(value: Any) -> str:
    """JSON that stands inside a page: nothing in it can end the element that holds it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def best_cells(lines: Sequence[Sequence[str]], is_loss: bool = False) -> set[tuple[int, int]]:
    """The places (row, column) of the best numbers in a table of methods: accuracies, most; losses, least.

    Each data set and number of clients has its own best. None is best if some number comes from a single seed, and so
    has no deviation beside it.
    """
    found = set()
    measures = ("over clients", "over samples", "accuracy", "log loss", "test loss", "squared error", "RMSE")
    apart = [place for place, name in enumerate(lines[0]) if name in ("data set", "clients")]
    for place, name in enumerate(lines[0]):
        if name not in measures and not re.search(r", \d+ clients$", name):
            continue
        groups: dict[tuple[str, ...], dict[int, float]] = {}
        singles = set()
        for row, line in enumerate(lines[1:]):
            if number := re.match(r"(-?\d+(?:\.\d+)?)( ±)?", line[place]):
                group = tuple(line[other] for other in apart)
                groups.setdefault(group, {})[row] = float(number[1])
                if number[2] is None:
                    singles.add(group)
        for group, numbers in groups.items():
            if len(numbers) > 1 and group not in singles:
                best = (min if is_loss or name == "log loss" else max)(numbers.values())
                found |= {(row, place) for row, number in numbers.items() if number == best}
    return found


def differing_settings(entries: Sequence[Entry]) -> list[list[str]]:
    """A table of every setting in which the runs shown differ: a line per setting, a column per cell; or nothing.

    A setting that only some methods have counts if these differ in it.
    """
    known = [entry for entry in entries if entry.has_begun]
    values = []
    for entry in known:
        result = next(iter(entry.results.values()), None)  # it names defaults too
        values.append(flat_fields(entry.cell) | (dict(result.settings) if result else {}))
    names = [name for name in dict.fromkeys(name for part in values for name in part) if name != "method"]
    differing = [name for name in names if len({repr(part[name]) for part in values if name in part}) > 1]
    if not differing:
        return []
    is_one_column = len({entry.column for entry in known}) == 1
    texts = [display_name(e.label) + ("" if is_one_column else f", {column_text(e.column)}") for e in known]
    return [["setting", *texts], *([name, *(_value(part.get(name)) for part in values)] for name in differing)]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def versions(reports: Sequence[Report]) -> list[str]:
    """With what the runs were made, a line for each kind."""
    places = [result.environment for report in reports for e in report.entries for result in e.results.values()]
    lines = [
        f"{place.device}, {counted(place.threads, 'thread')}, {place.precision}: pfedhn {place.pfedhn}"
        + (f" ({place.commit})" if place.commit else "")
        + f", Python {place.python}, PyTorch {place.torch}, NumPy {place.numpy}"
        + (f", CUDA {place.cuda}" if place.cuda else "")
        for place in places
    ]
    return list(dict.fromkeys(lines))


def chart_data(reports: Sequence[Report], average: Average = "clients") -> list[list[dict[str, Any]]]:
    """What the charts draw: for each report and column, the curves of its cells and what every client has."""
    return [
        [_column(replace(report, entries=report.in_column(column)), average) for column in report.columns]
        for report in reports
    ]


def _column(report: Report, average: Average) -> dict[str, Any]:
    entries = report.entries
    results = [result for entry in entries for result in entry.results.values()]
    described = {result.partition_sha256: result.clients for result in results if result.clients is not None}
    holds = {
        split: [[[int(label), count] for label, count in held.items()] for held in clients.classes]
        for split, clients in described.items()
        if clients.classes is not None
    }
    for entry in entries:
        holds |= _held_in_all_folds(entry, holds)
    names = [entry.client_names for entry in entries] + [clients.names for clients in described.values()]
    class_names = next((clients.class_names for clients in described.values() if clients.class_names), None)
    labels = [label for rows in holds.values() for held in rows for label, _ in held]
    return {
        "name": printable(column_text(report.columns[0])),
        "isAccuracy": report.has_accuracy,
        "isSquared": report.is_squared,
        "series": [_series(entry, entries, average) for entry in entries if entry.has_begun],
        "names": _words(next(filter(None, names), None)),
        "classNames": _words(class_names),
        "numClasses": max(len(class_names or ()), max(labels, default=-1) + 1),
        "holds": holds,
    }


def _words(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else list(map(printable, names))


def _series(entry: Entry, entries: Sequence[Entry], average: Average) -> dict[str, Any]:
    color, dash = style(entry, entries)
    return {
        "label": printable(display_name(entry.label)),
        "color": color if isinstance(color, str) and re.fullmatch(r"#[0-9a-fA-F]{3,8}|\w+", color) else "gray",
        "dashed": dash not in ("-", "solid"),
        "numSeeds": len(entry.curves),
        "sendsNothing": entry.sends_nothing,
        "curves": {"score": _spread(entry.all_curves(average)), "loss": _spread(_losses(entry))},
        "chosen": {
            "score": _mean(entry.scores(average).values()),
            "loss": _mean(result.validation.loss for result in entry.results.values()),
        },
        "bytesPerStep": _per_step(entry, lambda result: result.bytes_up + result.bytes_down),
        "roundsPerStep": _per_step(entry, lambda result: result.rounds),
        "clients": _of_all_folds(entry)
        | {
            str(seed): {
                "score": [_plain(value) for value in entry.client_scores(seed).tolist()],
                "examples": list(result.test.client_examples or ()),
                "split": result.partition_sha256,
            }
            for seed, result in entry.results.items()
        },
        "maps": {
            str(seed): {"places": [list(place) for place in found.map], "variance": found.map_variance or 0.0}
            for seed, result in entry.results.items()
            if (found := result.clients) is not None and found.map is not None
        },
    }


ALL_FOLDS = "all folds"


def _of_all_folds(entry: Entry) -> dict[str, Any]:
    """What clients score on the test examples of all folds together; empty without cross-validation."""
    if entry.cell.folds is None or len(entry.results) < 2:
        return {}
    examples = [result.test.client_examples for result in entry.results.values()]
    scores = entry.pooled_scores(entry.results).tolist()
    sums = [sum(counts) for counts in zip(*(part or () for part in examples), strict=True)]
    return {ALL_FOLDS: {"score": list(map(_plain, scores)), "examples": sums, "split": ALL_FOLDS}}


def _held_in_all_folds(entry: Entry, holds: Mapping[str, list[list[list[int]]]]) -> dict[str, list[list[list[int]]]]:
    """The classes of all of each client's examples; empty unless every fold was run once."""
    folds, splits = entry.cell.folds, [result.partition_sha256 for result in entry.results.values()]
    if folds is None or sorted(seed % folds for seed in entry.results) != list(range(folds)):
        return {}
    if not all(split in holds for split in splits):
        return {}
    found = []
    for client in zip(*(holds[split] for split in splits), strict=True):
        counts = Counter[int]()
        for held in client:
            counts.update(dict(held))
        # Every example is for training in all folds but two.
        found.append([[label, count // (folds - 2)] for label, count in sorted(counts.items())])
    return {ALL_FOLDS: found}


def _losses(entry: Entry) -> list[dict[int, float]]:
    """The validation loss, which only a run's own directory has."""
    found = [
        {entry.steps_before + moment.step: moment.validation.loss for moment in history if moment.validation.examples}
        for history in entry.histories.values()
    ]
    return [curve for curve in found if curve and all(map(math.isfinite, curve.values()))]


def _spread(curves: Sequence[Mapping[int, float]]) -> dict[str, Any] | None:
    """The mean over seeds at the steps that all of them have, the lowest and the highest."""
    if not curves:
        return None
    steps, values = on_common_steps(curves)
    rows = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return {"step": steps, **{name: [round(float(v), 4) for v in row] for name, row in rows.items()}}


def _mean(values: Iterable[float]) -> float | None:
    found = summarize(values)
    return None if found is None else _plain(found.mean)


def _per_step(entry: Entry, count: Callable[[Result], float]) -> float | None:
    parts = [count(result) / result.steps for result in entry.results.values() if result.steps]
    return sum(parts) / len(parts) if parts else None


def _plain(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _light_and_dark(finding: Finding) -> dict[str, tuple[str, str]]:
    """Every figure for a light and for a dark screen."""
    light, dark = of_studies.pngs(finding), of_studies.pngs(finding, is_dark=True)
    return {name: (_base64(light[name]), _base64(dark[name])) for name in light}


TEMPLATES.globals |= {"best_cells": best_cells, "light_and_dark": _light_and_dark}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def check_formats(names: Iterable[str]) -> None:
    for name in names:
        if name not in FORMATS:
            raise UserError(f"there is no format {name!r}; {closest(name, FORMATS)}")


def write(
    reports: Sequence[Report],
    out: Path,
    formats: Sequence[str] = FORMATS,
    average: Average = "clients",
    findings: Sequence[Finding] = (),
) -> list[Path]:
    """Write the report, and what studies found in the same runs, and return the files that were written."""
    check_formats(formats)
    if not reports:
        raise UserError("there is nothing to report; name a directory that `pfedhn run` made.")
    files: dict[str, bytes] = {}
    if "md" in formats:
        sections = [of_studies.to_markdown(finding) for finding in findings]
        files["report.md"] = "\n".join([*sections, tables.to_markdown(reports, average)]).encode()
    if "csv" in formats:
        files["report.csv"] = tables.to_csv(reports).encode()
    if "tex" in formats:
        files["report.tex"] = tables.to_latex(reports, average).encode()
    for name, save, of_finding in (("png", to_png, of_studies.pngs), ("svg", to_svg, of_studies.svgs)):
        if name in formats:
            files |= {f"{stem}.{name}": save(figure) for stem, figure in figures_of(reports, average).items()}
            for finding in findings:
                files |= of_finding(finding)
    if "html" in formats:
        files["report.html"] = to_html(reports, average, findings).encode()
    make_folder(out)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]
