"""A report as files: Markdown, CSV, LaTeX, figures and one HTML page."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pfedhn.errors import UserError, closest, printable
from pfedhn.files import make_folder, write_atomically
from pfedhn.report.entries import Average, Report
from pfedhn.report.figures import figures_of
from pfedhn.report.findings import Finding, pngs, svgs
from pfedhn.report.findings import to_markdown as finding_to_markdown
from pfedhn.report.pairs import caption as pairs_caption
from pfedhn.report.pairs import pairs
from pfedhn.report.tables import caption, commands, details, grid, sentence, to_csv, to_latex, to_markdown

FORMATS = ("md", "csv", "tex", "png", "html")


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


def to_html(
    reports: Sequence[Report],
    figures: Mapping[str, bytes],
    average: Average = "clients",
    findings: Sequence[Finding] = (),
) -> str:
    """One page that holds everything, the figures too.

    Args:
        reports: what is reported, in this order.
        figures: PNG images by name.
        average: which accuracy is compared.
        findings: what studies show, before everything else.
    """
    sections: list[dict[str, Any]] = [
        {"title": finding.title, "sentence": finding.sentence, "tables": finding.tables, "figures": _encoded(finding)}
        for finding in findings
    ]
    sections += [
        {
            "figures": {},
            "title": report.title,
            "sentence": sentence(report) if report.columns else "",
            "tables": [
                *([(grid(report, average), caption(report, average))] if len(report.columns) > 1 else []),
                (details(report, average), caption(report)),
                *((lines, pairs_caption(c)) for c in report.columns if (lines := pairs(report, c, average))),
            ],
        }
        for report in reports
    ]
    return TEMPLATES.get_template("page.html").render(
        sections=sections,
        figures={name: base64.b64encode(content).decode() for name, content in figures.items()},
        commands=[command for report in reports for command in commands(report)],
    )


def _encoded(finding: Finding) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in pngs(finding).items()}


def check_formats(names: Iterable[str]) -> None:
    """Refuse a format that there is not."""
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
    """Write the report in the formats asked for.

    Args:
        reports: what is reported.
        out: the folder for the files; it is made if it is not there.
        formats: some of `FORMATS`.
        average: which accuracy is compared and drawn.
        findings: what studies show of the same runs.

    Returns:
        The files that were written.
    """
    check_formats(formats)
    if not reports:
        raise UserError("there is nothing to report; name a directory that `pfedhn run` made.")
    figures = figures_of(reports, average) if {"png", "html"} & set(formats) else {}
    files: dict[str, bytes] = {}
    if "md" in formats:
        sections = [finding_to_markdown(finding) for finding in findings]
        files["report.md"] = "\n".join([*sections, to_markdown(reports, average)]).encode()
    if "csv" in formats:
        files["report.csv"] = to_csv(reports).encode()
    if "tex" in formats:
        files["report.tex"] = to_latex(reports, average).encode()
    if "png" in formats:
        files |= figures
        for finding in findings:
            files |= pngs(finding) | svgs(finding)
    if "html" in formats:
        files["report.html"] = to_html(reports, figures, average, findings).encode()
    make_folder(out)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]
