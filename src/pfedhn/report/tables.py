"""Tables of a report: for a terminal, Markdown, CSV and LaTeX."""

import html
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pfedhn.errors import printable
from pfedhn.report.entries import (
    Average,
    Column,
    CostKind,
    Entry,
    Report,
    Summary,
    column_text,
    compare,
    display_name,
    loss_digits,
    summarize,
)
from pfedhn.report.gains import Measure
from pfedhn.report.measures_table import caption as measures_caption
from pfedhn.report.measures_table import measure_numbers, measures_table, yardstick_numbers
from pfedhn.report.pairs import caption as pairs_caption
from pfedhn.report.pairs import pairs
from pfedhn.report.verdict import data_text, note, to_text, verdicts
from pfedhn.storage.schema import to_json as detailed_to_json


def number_text(value: Summary | None, digits: int = 2) -> str:
    if value is None:
        return ""
    spread = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}"


def accuracy_text(entry: Entry, average: Average = "clients") -> str:
    """Mean and deviation, and how many seeds there are and diverged if some are missing or there is only one."""
    value = entry.test(average)
    if value is None:
        return entry.diverged_text
    text = number_text(value, 2 if entry.has_accuracy else loss_digits([entry]))
    if 1 < value.num_seeds == entry.num_planned:
        return text
    return f"{text} ({', '.join(filter(None, [entry.seeds_text, entry.diverged_text]))})"


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

    With `columns`, only these, and the methods that have a cell there.
    """
    columns = report.columns if columns is None else columns
    lines = [["method", *map(column_text, columns)]]
    for label in report.labels:
        entries = [report.entry(label, column) for column in columns]
        if any(entries):
            lines.append([label, *(_with_published(entry, average) for entry in entries)])
    return lines


def _with_published(entry: Entry | None, average: Average) -> str:
    if entry is None:
        return ""
    if entry.published is None:
        return accuracy_text(entry, average)
    return f"{accuracy_text(entry, average)}\npaper {_published(entry)}\n{_difference(entry, average)}"


def _published(entry: Entry) -> str:
    return "" if entry.published is None else "{:.2f} ± {:.2f}".format(*entry.published)


def _difference(entry: Entry, average: Average) -> str:
    difference = entry.difference(average)
    return "" if difference is None else f"{difference:+.2f}"


def details(report: Report, average: Average = "clients", column: Column | None = None) -> list[list[str]]:
    """A line per cell: both averages, what was published and how far ours is from it, how many seeds, and the cost.

    With `column`, only its cells, beside a grid that has the published numbers.
    """
    fields: dict[str, Callable[[Entry], str]] = {"method": lambda entry: entry.label}
    if column is None and len({dataset for dataset, _ in report.columns}) > 1:
        fields["data set"] = lambda entry: entry.column[0]
    if column is None and len({clients for _, clients in report.columns}) > 1:
        fields["clients"] = lambda entry: str(entry.column[1])
    if judged_by_loss(report):
        fields["log loss"] = lambda entry: number_text(summarize(one.test.loss for one in entry.results.values()), 3)
        fields["accuracy"] = lambda entry: number_text(entry.test(average))
    elif report.has_accuracy:
        fields["over clients"] = lambda entry: number_text(entry.test("clients"))
        fields["over samples"] = lambda entry: number_text(entry.test("samples"))
    else:
        digits = loss_digits(report.entries)
        if report.is_squared:
            fields["RMSE"] = lambda entry: number_text(entry.root(), min(4, digits + 1))
        measure = "squared error" if report.is_squared else "test loss"
        fields[measure] = lambda entry: number_text(entry.test(), digits)
        fields["over clients"] = lambda entry: number_text(entry.loss_over_clients(), digits)
    if report.has_published and len(report.columns) == 1 and column is None:  # else the grid has them
        fields["paper"] = _published
        fields["difference"] = lambda entry: _difference(entry, average)
    fields["seeds"] = lambda entry: entry.seeds_text.removesuffix(" seeds").removesuffix(" seed")
    if any(entry.diverged for entry in report.entries):
        fields["diverged"] = lambda entry: str(len(entry.diverged) or "")
    fields["steps"] = steps_text
    fields["up"] = lambda entry: bytes_text(entry.total("bytes_up"))
    fields["down"] = lambda entry: bytes_text(entry.total("bytes_down"))
    fields["time"] = lambda entry: seconds_text(entry.total("seconds"))
    # Beside a grid, which has a place for every cell, only what was asked for.
    entries = [entry for entry in report.entries if entry.num_planned or len(report.columns) == 1]
    if column is not None:
        entries = [entry for entry in entries if entry.column == column]
    return [list(fields), *([show(entry) for show in fields.values()] for entry in entries)]


def judged_by_loss(report: Report) -> bool:
    """Whether methods that have an accuracy are compared by their log loss, as those of a table of classes are."""
    finished = [entry for entry in report.entries if entry.results]
    return report.has_accuracy and bool(finished) and Measure.of(finished).name == "log loss"


def details_caption(report: Report, average: Average = "clients") -> str:
    """What the numbers of `details` are: either both averages of accuracy, or one beside the log loss."""
    return caption(report, average if judged_by_loss(report) else None)


def caption(report: Report, average: Average | None = None) -> str:
    """What the numbers are, and where they were made."""
    over = f", averaged over {average}" if average and report.has_accuracy else ""
    text = (
        f"{report.measure.capitalize()}{over}, at the round chosen on validation{_chosen_by(report)}; "
        f"mean ± standard deviation over seeds.{_folds_text(report)}"
    )
    if judged_by_loss(report):
        text += " Log loss is the mean over test examples, lower is better; the verdict compares it."
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


def _chosen_by(report: Report) -> str:
    """What chose the round of the methods, if that is not what they are measured by."""
    by = {entry.cell.select for entry in report.entries}
    if not report.has_accuracy or by == {"metric"}:
        return ""
    return " by its loss" if by == {"loss"} else " (by the loss with select=loss, else by accuracy)"


def _folds_text(report: Report) -> str:
    """What the seeds of a cross-validation are; empty without one."""
    text = ""
    for folds in dict.fromkeys(entry.cell.folds for entry in report.entries):
        if folds is None:
            continue
        seeds = [seed for entry in report.entries if entry.cell.folds == folds for seed in entry.results]
        run = len({seed % folds for seed in seeds})
        tested = "together they test every example once" if run == folds else f"{run} of {folds} folds are finished"
        text += f" This is {folds}-fold cross-validation: each seed is a fold, and {tested}."
    return text


def to_terminal(report: Report, average: Average = "clients") -> Group:
    """Tables for a terminal: the grid if there is much to compare, then the details of every column with a run."""
    parts: list[Any] = []
    if len(report.columns) > 1 or report.has_published:
        for dataset in dict.fromkeys(dataset for dataset, _ in report.columns):  # more would not fit side by side
            columns = [column for column in report.columns if column[0] == dataset]
            parts.append(rich_table(grid(report, average, columns), None if parts else report.title))
        parts.append(Text(caption(report, average), style="dim"))
        for column in report.columns:
            if any(entry.curves for entry in report.in_column(column)):
                parts += ["", rich_table(details(report, average, column), column_text(column))]
    else:
        title = " ".join([report.title, *(f"({column_text(column)})" for column in report.columns)])
        parts += [rich_table(details(report, average), title), Text(details_caption(report, average), style="dim")]
    for column in report.columns:
        if table := measures_table(report, column):
            parts += ["", rich_table(table, "Measures"), Text(measures_caption(report, column), style="dim")]
    if standing := unfinished(report):
        parts.append(Text(standing, style="dim"))
    return Group(*parts)


def rich_table(lines: Sequence[Sequence[str]], title: str | None) -> Table:
    """A table for a terminal: its heading, then a line for each row."""
    heading = None if title is None else escape(title)
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(lines[0]):
        # On a narrow terminal, steps may break once ("5,000 + 1,000"), and a method before its settings
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
        found = verdicts(report)
        for verdict in found:
            heading = "Verdict" if len(found) == 1 else f"Verdict: {_markdown(data_text(verdict))}"
            parts += [f"### {heading}", "\n".join(f"- {_markdown(text)}" for text in to_text(verdict)), note(verdict)]
        if len(report.columns) > 1:
            parts += [markdown_table(grid(report, average)), _markdown(caption(report, average))]
        parts += [markdown_table(details(report, average)), _markdown(details_caption(report, average))]
        for column in report.columns:
            if table := measures_table(report, column):
                parts += [markdown_table(table), _markdown(measures_caption(report, column))]
            if table := pairs(report, column, average):
                parts += [markdown_table(table), _markdown(pairs_caption(column, report.has_folds))]
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
    cells = [numbers(entry) for report in reports for entry in report.entries]
    return str(pandas.DataFrame(cells).to_csv(index=False, lineterminator="\n"))


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
    costs: tuple[CostKind, ...] = ("steps", "bytes_up", "bytes_down", "seconds")
    totals = {cost: entry.total(cost) for cost in costs}
    found |= {name: total and total.mean for name, total in totals.items()}
    return found | {"hardware": entry.hardware} | measure_numbers(entry)


def to_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Every number for scripts: for each report its cells, and of each seed every client's accuracy by name."""
    return [
        {
            "title": report.title,
            "cells": [numbers(entry) | _pooled(entry) | {"runs": _runs(entry)} for entry in report.entries],
            "yardsticks": yardstick_numbers(report),
        }
        for report in reports
    ]


def _pooled(entry: Entry) -> dict[str, Any]:
    """The number of folds, and each client's accuracy (or loss) over the test examples of all of them."""
    folds = entry.cell.folds
    if folds is None or not entry.results:
        return {} if folds is None else {"folds": folds}
    scores, name = (
        entry.pooled_scores(entry.results).tolist(),
        "client_accuracy" if entry.has_accuracy else "client_loss",
    )
    return {"folds": folds, name: [None if v != v else v / 100 if entry.has_accuracy else v for v in scores]}


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
            "client_accuracy": [None if v != v else v / 100 for v in entry.client_scores(seed).tolist()]
            if entry.has_accuracy
            else None,
            "detailed": result.detailed and detailed_to_json(result.detailed),
            "command": result.command,
        }
        for seed, result in entry.results.items()
    ]


def to_latex(reports: Sequence[Report], average: Average = "clients") -> str:
    """For each report a table of accuracies and one of what they cost; needs \\usepackage{booktabs}."""
    return "\n".join(make(report, average) for report in reports for make in (_latex_grid, _latex_details))


def _latex_grid(report: Report, average: Average) -> str:
    names = list(dict.fromkeys(dataset for dataset, _ in report.columns))
    columns = sorted(report.columns, key=lambda column: names.index(column[0]))
    spans = {name: sum(dataset == name for dataset, _ in columns) for name in names}
    rows = [
        ["", *(rf"\multicolumn{{{span}}}{{c}}{{{_latex(name)}}}" for name, span in spans.items())],
        ["Clients", *(str(clients) for _, clients in columns)],
    ]
    for label, *cells in grid(report, average, columns)[1:]:
        parts = [[*cell.split("\n"), "", ""] for cell in cells]
        rows.append([_latex(display_name(label)), *(_math(part[0]) for part in parts)])
        for place, name in ((1, "published"), (2, "difference")):
            if any(part[place] for part in parts):
                rows.append([rf"\quad {name}", *(_math(part[place].removeprefix("paper ")) for part in parts)])
    heading = f"{_latex(report.title)}. {_latex(caption(report, average))}"
    return _latex_table(heading, "c" * len(columns), rows, num_heading_rows=2)


def _math(text: str) -> str:
    """A text whose number and deviation stand in math mode."""
    number = re.match(r"[+-]?[\d.]+( ± [\d.]+)?", text)
    return text if number is None else "$" + number[0].replace("±", r"\pm") + "$" + text[number.end() :]


def _latex_details(report: Report, average: Average) -> str:
    heading, *lines = details(report, average)
    rows = [[_latex(cell) for cell in line] for line in [heading, *displayed(lines)]]
    text = f"{_latex(report.title)}: scores, and the cost of a run. {_latex(details_caption(report, average))}"
    return _latex_table(text, "r" * (len(heading) - 1), rows, num_heading_rows=1)


def displayed(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Lines of methods, each named as its paper writes it."""
    return [[display_name(label), *cells] for label, *cells in lines]


def _latex_table(heading: str, columns: str, rows: Sequence[Sequence[str]], num_heading_rows: int) -> str:
    lines = [" & ".join(row) + r" \\" for row in rows]
    lines.insert(num_heading_rows, r"\midrule")
    return "\n".join(
        [
            *(r"\begin{table}", r"\centering", rf"\caption{{{heading}}}", rf"\begin{{tabular}}{{l{columns}}}"),
            *(r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""),
        ]
    )


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    text = " ".join(printable(text).split("\n"))
    return "".join(special.get(letter, "\\" + letter if letter in "&%$#_{}" else letter) for letter in text)


HYPERNETWORKS = ("pfedhn", "pfedhn-plus")  # the sentence is about the first that is there


def sentence(report: Report) -> str:
    """Say what a hypernetwork reaches in the first column beside others; empty if its numbers cannot say it."""
    column = report.columns[0]
    measured = {entry.label: entry for entry in report.in_column(column) if entry.test() is not None}
    label = next((label for label in HYPERNETWORKS if label in measured), None)
    if label is None:
        return ""
    ours, name = measured[label], display_name(label)
    named = {label: name, "local": "a model trained alone", "fedavg": "FedAvg's one shared model"}
    shown = {method: whose for method, whose in named.items() if method in measured}
    *parts, last = [f"{_measured_text(measured[method])} with {whose}" for method, whose in shown.items()]
    listed = " and ".join(filter(None, [", ".join(parts), last]))
    where = f"with {column_text(column)}, " if len(report.columns) > 1 else ""
    numbers_of_seeds = {len(measured[method].results) for method in shown}
    num_examples = sum(result.test.examples for result in ours.results.values())
    luck = f"one seed, {num_examples:,} test examples: " if numbers_of_seeds == {1} else ""
    text = f"{where}{luck}{_subject(ours)} is {listed}"
    if "local" in measured and (counts := compare(ours, measured["local"])) is not None:
        seeds = f" ({counts.num_seeds} seeds together)" if counts.num_seeds > 1 else ""
        text += (
            f"; of {sum(counts[:3])} clients{seeds}, {counts.better} do better with {name} than alone, "
            f"{counts.same} the same and {counts.worse} worse"
        )
    warning = " A single seed cannot rank methods." if 1 in numbers_of_seeds and len(shown) > 1 else ""
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
    running, diverged, halted = [], [], []
    for entry in report.entries:
        for seed in sorted({*entry.curves, *entry.running, *entry.diverged} - entry.results.keys()):
            which = display_name(entry.label) + (f", seed {seed}" if entry.num_planned > 1 else "")
            steps = entry.curves[seed].step if seed in entry.curves else ()
            progress = f"{which} (step {max(steps, default=0):,} of {entry.cell.steps:,})"
            if seed in entry.running:
                running.append(progress)
            elif seed in entry.diverged:
                diverged.append(which)
            else:
                halted.append(progress)
    sentences = (
        (running, "Running now: {}."),
        (diverged, "Diverged, so without a score: {}; diverged.txt in a run's folder says in which round."),
        (halted, "Begun, but stopped before the end: {}; started again, they continue or say what failed."),
    )
    return " ".join(text.format(_some(names)) for names, text in sentences if names)


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return "; ".join([*names[:MAX_NAMED], *more])
