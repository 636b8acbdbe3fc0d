"""Tables of a report: for a terminal, Markdown, CSV and LaTeX."""

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pfedhn.errors import printable
from pfedhn.experiments.spec import Cell
from pfedhn.report.entries import (
    Average,
    Column,
    Cost,
    Entry,
    Report,
    Summary,
    column_text,
    compare,
    display_name,
    loss_digits,
    summarize,
)
from pfedhn.report.pairs import caption as pairs_caption
from pfedhn.report.pairs import pairs


def number_text(value: Summary | None, digits: int = 2) -> str:
    if value is None:
        return ""
    spread = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}"


def accuracy_text(entry: Entry, average: Average = "clients") -> str:
    """Mean and deviation, and where seeds are missing, or it is one alone, how many there are and how many diverged."""
    value = entry.test(average)
    if value is None:
        return entry.diverged_text
    is_less = value.num_seeds == 1 or value.num_seeds != entry.num_planned
    note = f" ({', '.join(filter(None, [entry.seeds_text, entry.diverged_text]))})" if is_less else ""
    return number_text(value, 2 if entry.has_accuracy else loss_digits([entry])) + note


def bytes_text(value: Summary | None) -> str:
    if value is None:
        return ""
    size, units = value.mean, ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 99.5 or units[0] == "B" else f"{size:.1f} {units[0]}"


def seconds_text(value: Summary | None) -> str:
    if value is None:
        return ""
    seconds = value.mean
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def steps_text(entry: Entry) -> str:
    """A run that starts from another counts the steps of both."""
    own = summarize(result.steps for result in entry.results.values())
    if own is None:
        return ""
    return f"{entry.steps_before:,} + {own.mean:,.0f}" if entry.steps_before else f"{own.mean:,.0f}"


def grid(report: Report, average: Average = "clients", columns: Sequence[Column] | None = None) -> list[list[str]]:
    """A line per method, a column per data set and number of clients; under ours the published number, if there is one.

    Args:
        report: What is shown.
        average: Over clients or over samples.
        columns: Only these, and the methods that have a cell there.
    """
    columns = report.columns if columns is None else columns
    lines = [["method", *map(column_text, columns)]]
    for label in report.labels:
        entries = [report.entry(label, column) for column in columns]
        if any(entries):
            texts = ["" if entry is None else "\n".join(_with_published(entry, average)) for entry in entries]
            lines.append([label, *texts])
    return lines


def _with_published(entry: Entry, average: Average) -> list[str]:
    lines = [accuracy_text(entry, average)]
    if entry.published is not None:
        mean, deviation = entry.published
        difference = entry.difference(average)
        lines.append(f"paper {mean:.2f} ± {deviation:.2f}")
        lines.append("" if difference is None else f"{difference:+.2f}")
    return lines


def details(report: Report, average: Average = "clients", column: Column | None = None) -> list[list[str]]:
    """A line per cell: both averages, what was published, how many seeds, and what it cost.

    Args:
        report: What is shown.
        average: Over clients or over samples, of the difference from what was published.
        column: Only the cells of one, beside a grid that says what was published.
    """
    extra: list[tuple[str, Callable[[Entry], str]]] = []
    if column is None and len({dataset for dataset, _ in report.columns}) > 1:
        extra.append(("data set", lambda entry: entry.column[0]))
    if column is None and len({clients for _, clients in report.columns}) > 1:
        extra.append(("clients", lambda entry: str(entry.column[1])))
    numbers: list[tuple[str, Callable[[Entry], str]]] = [
        ("over clients", lambda entry: number_text(entry.test("clients"))),
        ("over samples", lambda entry: number_text(entry.test("samples"))),
    ]
    if not report.has_accuracy:
        digits = loss_digits(report.entries)
        numbers = [
            ("squared error" if report.is_squared else "test loss", lambda entry: number_text(entry.test(), digits)),
            ("over clients", lambda entry: number_text(entry.loss_over_clients(), digits)),
        ]
    if report.is_squared:
        finer = min(4, digits + 1)
        numbers.insert(0, ("RMSE", lambda entry: number_text(entry.root(), finer)))
    if report.has_published and len(report.columns) == 1 and column is None:  # else the grid has them
        numbers += [
            ("paper", lambda entry: "" if entry.published is None else "{:.2f} ± {:.2f}".format(*entry.published)),
            ("difference", lambda entry: _signed(entry.difference(average))),
        ]
    diverged: list[tuple[str, Callable[[Entry], str]]] = []
    if any(entry.diverged for entry in report.entries):
        diverged.append(("diverged", lambda entry: str(len(entry.diverged) or "")))
    fields: list[tuple[str, Callable[[Entry], str]]] = [
        ("method", lambda entry: entry.label),
        *extra,
        *numbers,
        ("seeds", lambda entry: entry.seeds_text.removesuffix(" seeds").removesuffix(" seed")),
        *diverged,
        ("steps", steps_text),
        ("up", lambda entry: bytes_text(entry.total("bytes_up"))),
        ("down", lambda entry: bytes_text(entry.total("bytes_down"))),
        ("time", lambda entry: seconds_text(entry.total("seconds"))),
    ]
    # Beside a grid, which has a place for every cell, only what was asked for.
    entries = [entry for entry in report.entries if entry.num_planned or len(report.columns) == 1]
    if column is not None:
        entries = [entry for entry in entries if entry.column == column]
    return [[name for name, _ in fields], *([show(entry) for _, show in fields] for entry in entries)]


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def caption(report: Report, average: Average | None = None) -> str:
    """What the numbers are, and where they were made."""
    over = f", averaged over {average}" if average and report.has_accuracy else ""
    text = (
        f"{report.measure.capitalize()}{over}, at the round chosen on validation; mean ± standard deviation over seeds."
    )
    if report.is_squared:
        text += " RMSE is its root, in the unit of the labels."
    if not report.has_accuracy:
        text += " Every test example counts once; over clients: the mean of the clients' own, whatever their size."
    singles = [entry.label for entry in report.entries if len(entry.results) == 1]
    if singles:
        text += " A number without ± comes from a single seed."
    left_out = dict.fromkeys(entry.label for entry in report.entries for one in entry.results.values() if one.adapted)
    if left_out:
        named = ", ".join(map(display_name, left_out))
        text += f" Where the clients' own steps made validation worse, they are left out (in runs of {named})."
    places = sorted({entry.hardware for entry in report.entries if entry.hardware})
    return text + (f" Hardware: {'; '.join(places)}." if places else " No run is finished yet.")


def to_terminal(report: Report, average: Average = "clients") -> Group:
    """Tables for a terminal: the grid where there is much to compare, then the details of every column with a run."""
    parts: list[Any] = []
    if len(report.columns) > 1 or report.has_published:
        title: str | None = report.title
        for dataset in dict.fromkeys(dataset for dataset, _ in report.columns):  # more would not fit side by side
            columns = [column for column in report.columns if column[0] == dataset]
            parts.append(rich_table(grid(report, average, columns), title))
            title = None
        parts.append(Text(caption(report, average), style="dim"))
        for column in report.columns:
            if any(entry.curves for entry in report.in_column(column)):
                parts += ["", rich_table(details(report, average, column), column_text(column))]
    else:
        title = f"{report.title} ({column_text(report.columns[0])})" if report.columns else report.title
        parts.append(rich_table(details(report, average), title))
        parts.append(Text(caption(report), style="dim"))
    if standing := unfinished(report):
        parts.append(Text(standing, style="dim"))
    return Group(*parts)


def rich_table(lines: Sequence[Sequence[str]], title: str | None) -> Table:
    """A table for a terminal: its heading, then a line for each row."""
    heading = None if title is None else escape(title)
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(lines[0]):
        # Where a terminal is narrow, steps may break once ("5,000 + 1,000"), and a method before its settings
        # ("pfedhn lr=0.01"): all else is read worse in two parts.
        is_whole = name in ("up", "down", "time", "seeds", "over clients", "over samples")
        is_whole |= number == 0 and not any(" " in line[0] for line in lines)
        table.add_column(escape(name), justify="left" if number == 0 else "right", no_wrap=is_whole, overflow="fold")
    for line in lines[1:]:
        table.add_row(*(escape(cell).replace(" + ", " +\N{NO-BREAK SPACE}") for cell in line))
    return table


def to_markdown(reports: Sequence[Report], average: Average = "clients") -> str:
    parts = []
    for report in reports:
        parts.append(f"## {_markdown(report.title)}")
        if len(report.columns) > 1:
            parts += [markdown_table(grid(report, average)), _markdown(caption(report, average))]
        parts += [markdown_table(details(report, average)), _markdown(caption(report))]
        for column in report.columns:
            if table := pairs(report, column, average):
                parts += [markdown_table(table), _markdown(pairs_caption(column))]
        if again := commands(report):
            lines = [" ".join(printable(command).split("\n")) for command in again]
            fence = "`" * max(3, *(len(run) + 1 for line in lines for run in re.findall("`+", line) or [""]))
            parts += ["Each run again:", "\n".join([f"{fence}sh", *lines, fence])]
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    """Words of a person or of a stranger's file as words: no HTML, no links, no images, on one line."""
    text = html.escape(" ".join(printable(text).split("\n")), quote=False)
    return re.sub(r"([\\`\[\]|])", r"\\\1", text)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table for Markdown: its heading, then a line for each row."""

    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join("<br>".join(map(_markdown, cell.split("\n"))) for cell in cells) + " |"

    rule = "|" + "|".join("---" if number == 0 else "---:" for number in range(len(lines[0]))) + "|"
    return "\n".join([row(lines[0]), rule, *map(row, lines[1:])])


def commands(report: Report) -> list[str]:
    return [result.command for entry in report.entries for result in entry.results.values() if result.command]


def to_csv(reports: Sequence[Report]) -> str:
    """A line per cell, all numbers unrounded."""
    lines = [numbers(entry) for report in reports for entry in report.entries]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(numbers(Entry("", Cell(), {}, {}, 0))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def numbers(entry: Entry) -> dict[str, Any]:
    """A cell as a line of a table for programs; what is not known is None."""
    found: dict[str, Any] = {
        "method": entry.label,
        "dataset": entry.column[0],
        "clients": entry.column[1],
        "seeds": len(entry.results),
        "planned_seeds": entry.num_planned,
        "diverged_seeds": len(entry.diverged),
    }
    averages: tuple[Average, ...] = ("clients", "samples")
    measured = {f"over_{average}": entry.test(average) if entry.has_accuracy else None for average in averages}
    measured["loss"] = summarize(result.test.loss for result in entry.results.values())
    for name, value in measured.items():
        found |= {f"{name}_mean": value and value.mean, f"{name}_deviation": value and value.deviation}
    found["published_mean"], found["published_deviation"] = entry.published or (None, None)
    for average in averages:
        found[f"difference_over_{average}"] = entry.difference(average) if entry.has_accuracy else None
    costs: tuple[Cost, ...] = ("steps", "bytes_up", "bytes_down", "seconds")
    for cost in costs:
        total = entry.total(cost)
        found[cost] = total and total.mean
    return found | {"hardware": entry.hardware}


def to_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Every number for scripts: for each report its cells, and of each seed every client's accuracy by name."""
    return [
        {"title": report.title, "cells": [numbers(entry) | {"runs": _runs(entry)} for entry in report.entries]}
        for report in reports
    ]


def _runs(entry: Entry) -> list[dict[str, Any]]:
    return [
        {
            "seed": seed,
            "name": result.name,
            "chosen_step": result.chosen_step,
            "over_clients": result.test.client_mean,
            "over_samples": result.test.sample_mean,
            "loss": result.test.loss,
            "settings": result.settings,
            "client_names": entry.client_names and list(entry.client_names),
            "client_accuracy": [None if v != v else v / 100 for v in entry.client_accuracy(seed).tolist()]
            if entry.has_accuracy
            else None,
            "command": result.command,
        }
        for seed, result in entry.results.items()
    ]


def to_latex(reports: Sequence[Report], average: Average = "clients") -> str:
    """For each report a table of accuracies and one of what they cost; needs \\usepackage{booktabs}."""
    return "\n".join(make(report, average) for report in reports for make in (_latex_grid, _latex_details))


def _latex_grid(report: Report, average: Average) -> str:
    names = list(dict.fromkeys(dataset for dataset, _ in report.columns))
    spans = [[column for column in report.columns if column[0] == name] for name in names]
    columns = [column for span in spans for column in span]
    rows = [
        ["", *(rf"\multicolumn{{{len(span)}}}{{c}}{{{_latex(span[0][0])}}}" for span in spans)],
        ["Clients", *(str(clients) for _, clients in columns)],
    ]
    num_heading_rows = len(rows)
    for label in report.labels:
        entries = [report.entry(label, column) for column in columns]
        rows.append([_latex(display_name(label)), *(_latex_accuracy(entry, average) for entry in entries)])
        if any(entry is not None and entry.published for entry in entries):
            rows.append([r"\quad published", *map(_latex_published, entries)])
        if any(entry is not None and entry.difference(average) is not None for entry in entries):
            differences = [None if entry is None else entry.difference(average) for entry in entries]
            rows.append([r"\quad difference", *("" if d is None else f"${d:+.2f}$" for d in differences)])
    heading = f"{_latex(report.title)}. {_latex(caption(report, average))}"
    return _latex_table(heading, "c" * len(columns), rows, num_heading_rows)


def _latex_details(report: Report, average: Average) -> str:
    first, *lines = details(report, average)
    lines = [[display_name(line[0]), *line[1:]] for line in lines]
    rows = [[_latex(cell) for cell in line] for line in [first, *lines]]
    heading = f"{_latex(report.title)}: both averages, and the cost of a run. {_latex(caption(report))}"
    return _latex_table(heading, "r" * (len(first) - 1), rows, 1)


def _latex_table(heading: str, columns: str, rows: Sequence[Sequence[str]], num_heading_rows: int) -> str:
    lines = [" & ".join(row) + r" \\" for row in rows]
    lines.insert(num_heading_rows, r"\midrule")
    return "\n".join(
        [
            *(r"\begin{table}", r"\centering", rf"\caption{{{heading}}}", rf"\begin{{tabular}}{{l{columns}}}"),
            *(r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""),
        ]
    )


def _latex_accuracy(entry: Entry | None, average: Average) -> str:
    """The number of seeds beside it where it is not what was planned, as in every other format."""
    if entry is None or (value := entry.test(average)) is None:
        return ""
    return _latex_number(value) + accuracy_text(entry, average).removeprefix(number_text(value))


def _latex_published(entry: Entry | None) -> str:
    return "" if entry is None or entry.published is None else "${:.2f} \\pm {:.2f}$".format(*entry.published)


def _latex_number(value: Summary) -> str:
    spread = "" if value.deviation is None else rf" \pm {value.deviation:.2f}"
    return f"${value.mean:.2f}{spread}$"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    text = " ".join(printable(text).split("\n"))
    return "".join(special.get(letter, "\\" + letter if letter in "&%$#_{}" else letter) for letter in text)


HYPERNETWORKS = ("pfedhn", "pfedhn-plus")  # the sentence is about the first that is there


def sentence(report: Report) -> str:
    """What a comparison with a hypernetwork shows in the first column; empty where its numbers cannot say it."""
    column = report.columns[0]
    alone, shared = (report.entry(method, column) for method in ("local", "fedavg"))
    candidates = [(report.entry(method, column), display_name(method)) for method in HYPERNETWORKS]
    # Of runs that are not finished, or have no test examples, there is no number.
    found = [(entry, name) for entry, name in candidates if entry is not None and entry.test() is not None]
    if not found:
        return ""
    ours, name = found[0]
    named = [(ours, name), (alone, "a model trained alone"), (shared, "FedAvg's one shared model")]
    measured = [(entry, whose) for entry, whose in named if entry is not None and entry.test() is not None]
    parts = [f"{_measured_text(entry)} with {whose}" for entry, whose in measured]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    where = f"with {column_text(column)}, " if len(report.columns) > 1 else ""
    numbers_of_seeds = {len(entry.results) for entry, _ in measured}
    luck = f"one seed, {ours.num_test_examples:,} test examples: " if numbers_of_seeds == {1} else ""
    text = f"{where}{luck}{_subject(ours)} is {listed}"
    counts = None if alone is None or alone not in [entry for entry, _ in measured] else compare(ours, alone)
    if counts is not None:
        whose = f" ({counts.num_seeds} seeds together)" * (counts.num_seeds > 1)
        text += (
            f"; of {counts.total} clients{whose}, {counts.better} do better with {name} than alone, "
            f"{counts.same} the same and {counts.worse} worse"
        )
    warning = " A single seed cannot rank methods." if 1 in numbers_of_seeds and len(measured) > 1 else ""
    return f"{text[0].upper()}{text[1:]}.{warning}"


def _measured_text(entry: Entry) -> str:
    value = entry.root() if entry.is_squared and not entry.has_accuracy else entry.test()
    assert value is not None
    return f"{value.mean:.1f} %" if entry.has_accuracy else f"{value.mean:.4g}"


def _subject(entry: Entry) -> str:
    if entry.has_accuracy:
        return "on average, a client's own test accuracy"
    return "the root mean squared error on test examples" if entry.is_squared else "the mean loss on test examples"


MAX_NAMED = 6  # runs in a sentence


def unfinished(report: Report) -> str:
    """Which runs are going on, which diverged, and which have begun but stand still; empty if there are none."""
    running = [_progress(entry, seed) for entry in report.entries for seed in sorted(entry.running)]
    diverged = [_which(entry, seed) for entry in report.entries for seed in sorted(entry.diverged)]
    halted = [
        _progress(entry, seed)
        for entry in report.entries
        for seed in sorted(entry.curves.keys() - entry.results.keys() - entry.running - entry.diverged)
    ]
    parts = [f"Running now: {_some(running)}."] if running else []
    if diverged:
        parts.append(
            f"Diverged, so without a score: {_some(diverged)}; diverged.txt in a run's folder says in which round."
        )
    if halted:
        parts.append(
            f"Begun, but stopped before the end: {_some(halted)}; started again, they continue or say what failed."
        )
    return " ".join(parts)


def _progress(entry: Entry, seed: int) -> str:
    steps = entry.curves[seed].step if seed in entry.curves else ()
    return f"{_which(entry, seed)} (step {max(steps, default=0):,} of {entry.cell.steps:,})"


def _which(entry: Entry, seed: int) -> str:
    return display_name(entry.label) + (f", seed {seed}" if entry.num_planned > 1 else "")


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return "; ".join(names[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
