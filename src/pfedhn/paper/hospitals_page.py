"""The parts of docs/hospitals.md that are made from the stored runs: tables, sentences, figures."""

import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pfedhn.paper import hospitals_privacy
from pfedhn.paper.hospitals import NAME
from pfedhn.paper.pages import shown_figure
from pfedhn.report.findings import Finding, svgs
from pfedhn.report.results import Runs, read_file
from pfedhn.report.study import findings
from pfedhn.report.tables import markdown_table

RESULTS = Path(__file__).resolve().parents[3] / "results"


@cache
def stored(name: str = NAME) -> tuple[Runs, Finding]:
    """The stored runs of a study, and what they show."""
    (runs,) = read_file(RESULTS / f"{name}.jsonl")
    (finding,) = findings([runs])
    return runs, finding


def table(number: int, name: str = NAME) -> str:
    """A table of a finding, with its caption."""
    lines, caption = stored(name)[1].tables[number]
    return f"{markdown_table(lines)}\n\n{caption}"


def figure(name: str) -> str:
    finding = stored()[1]
    return shown_figure(finding.stem(name), ALTERNATIVES[name])


ALTERNATIVES = {
    "calibration": "Predicted against observed risk, in ten bins, for both data sets",
    "map": "The intercept that each hospital's embedding generates, against the hospital's outcome rate",
}


def origin(study: str = NAME) -> str:
    """The command, seeds, device, versions and time of the stored runs."""
    results = list(stored(study)[0].results.values())
    places = {(one.environment.device, one.environment.torch) for one in results}
    where = "; ".join(f"{device}, torch {version}" for device, version in sorted(places))
    seeds = ", ".join(map(str, sorted({one.seed for one in results})))
    minutes = sum(one.seconds for one in results) / 60
    (name,) = {shlex.split(one.command)[2] for one in results}
    return (
        f"`pfedhn run {name} --data-dir FOLDER`, seeds {seeds}, {where}; training took {minutes:.1f} minutes of a core "
        f"for {len(results)} runs."
    )


PARTS: dict[str, Callable[[], str]] = {
    "result": lambda: stored()[1].sentence,
    "stroke": lambda: table(0),
    "heart": lambda: table(1),
    "new": lambda: table(2),
    "calibration": lambda: figure("calibration"),
    "map": lambda: figure("map"),
    "privacy": lambda: f"{stored(hospitals_privacy.NAME)[1].sentence}\n\n{table(0, hospitals_privacy.NAME)}",
    "origin": lambda: f"{origin()}\n\n{origin(hospitals_privacy.NAME)}",
}


def figures() -> dict[str, bytes]:
    """The figures of the page by file name, for light and dark pages."""
    finding = stored()[1]
    return {name: content for is_dark in (False, True) for name, content in svgs(finding, is_dark).items()}
