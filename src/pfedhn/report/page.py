"""A report as files: Markdown, CSV, LaTeX, figures and one HTML page."""

import base64
import csv
import html
import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
import numpy
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from pfedhn.errors import UserError
from pfedhn.files import write_atomically
from pfedhn.experiments.spec import Cell, Experiment, dataset_name, distinctions, pretraining_cell
from pfedhn.experiments.build import cell_algorithm
from pfedhn.report.results import Runs, read

from pfedhn.errors import closest
from pfedhn.report.tables import caption, commands, details, grid, sentence, to_csv, to_latex, to_markdown
from pfedhn.report.figures import pictures_of
from pfedhn.report.entries import Average, Report

FORMATS = ("md", "csv", "tex", "png", "html")


def to_html(reports: Sequence[Report], pictures: Mapping[str, bytes], average: Average = "clients") -> str:
    """One page that holds everything, pictures too."""
    parts = []
    for report in reports:
        parts.append(f"<h1>{html.escape(report.title)}</h1>")
        if said := sentence(report) if report.columns else "":
            parts.append(f"<p class=said>{html.escape(said)}</p>")
        if len(report.columns) > 1:
            parts += [_html_table(grid(report, average)), f"<p>{html.escape(caption(report, average))}</p>"]
        parts += [_html_table(details(report, average)), f"<p>{html.escape(caption(report))}</p>"]
    for name, content in pictures.items():
        data = base64.b64encode(content).decode()
        parts.append(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">')
    if again := [command for report in reports for command in commands(report)]:
        listed = html.escape("\n".join(again))
        parts.append(f"<details><summary>The command for each run</summary><pre>{listed}</pre></details>")
    return HTML_PAGE.format(title=html.escape("; ".join(report.title for report in reports)), body="\n".join(parts))


HTML_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.4rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
th:first-child, td:first-child {{ text-align: left }}
thead th {{ border-bottom: 2px solid #222 }}
img {{ max-width: 100%; display: block; margin: 1.5rem 0 }}
pre {{ overflow-x: auto; background: #f6f6f6; padding: .8rem }}
.said {{ font-size: 1.1rem }}
.tables {{ overflow-x: auto }}
</style>
{body}
</html>
"""


def _html_table(lines: Sequence[Sequence[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        inner = "".join(f"<{tag}>{html.escape(cell).replace(chr(10), '<br>')}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "\n".join(row(line, "td") for line in lines[1:])
    return f"<div class=tables><table><thead>{row(lines[0], 'th')}</thead><tbody>{body}</tbody></table></div>"


def check_formats(names: Iterable[str]) -> None:
    for name in names:
        if name not in FORMATS:
            raise UserError(f"there is no format {name!r}; {closest(name, FORMATS)}")


def write(
    reports: Sequence[Report], out: Path, formats: Sequence[str] = FORMATS, average: Average = "clients"
) -> list[Path]:
    """Write the report in the formats asked for; returns the files."""
    check_formats(formats)
    if not reports:
        raise UserError("there is nothing to report; name a directory that `pfedhn run` made.")
    pictures = pictures_of(reports, average) if {"png", "html"} & set(formats) else {}
    files: dict[str, bytes] = {}
    if "md" in formats:
        files["report.md"] = to_markdown(reports, average).encode()
    if "csv" in formats:
        files["report.csv"] = to_csv(reports).encode()
    if "tex" in formats:
        files["report.tex"] = to_latex(reports, average).encode()
    if "png" in formats:
        files |= pictures
    if "html" in formats:
        files["report.html"] = to_html(reports, pictures, average).encode()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]
