"""Compare methods within a column of Table 1, and write the result as text."""

import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.paper.experiments import BEYOND_THE_PAPER
from pfedhn.paper.stored_tables import SEEDS, STRONGER
from pfedhn.report.entries import Column, Entry, Report, Summary, display_name
from pfedhn.report.pairs import LEAST_SEEDS, Difference, difference, scores

NOT_RUN = "—"
OURS = ("pfedhn", "pfedhn-pc")
RECIPES = ("pfedhn-plus", "pfedhn-shared")  # of ours; the other rows are their forms
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "omniglot": "Omniglot", "mnist": "MNIST"}
SUMMARIZED = ("cifar10", "cifar100", "omniglot")

# The rows of a table under headings that say whose recipe they are.
GROUPS: Mapping[str, Collection[str]] = {
    "The paper's methods, by its recipe": [name for name in ALGORITHMS if name not in BEYOND_THE_PAPER],
    "Our stronger recipe of pFedHN": STRONGER,
    "Baselines that are not in the paper": [name for name in BEYOND_THE_PAPER if name not in STRONGER],
}


def compared(report: Report) -> Report:
    """With the table's own seeds only, on which all methods have the same splits: further ones are a method's alone."""

    def common(entry: Entry) -> Entry:
        results = {seed: result for seed, result in entry.results.items() if seed in SEEDS}
        return replace(entry, results=results, curves={seed: entry.curves[seed] for seed in results})

    return replace(report, entries=[common(entry) for entry in report.entries])


def column_name(column: Column) -> str:
    return f"{NAMES[column[0]]}, {column[1]}"


def _in_order(labels: Sequence[str]) -> list[str]:
    """Our rows in our order, wherever the first table that has one puts it; all others as they come."""
    ours = [label for label in STRONGER if label in labels]
    return [label for label in labels if label not in ours] + ours


def grouped(labels: Sequence[str], cells: Callable[[str], list[str]]) -> list[list[str]]:
    """A line for each method, under headings that say whose recipe it is."""
    lines = []
    for heading, methods in GROUPS.items():
        mine = [
            [display_name(label), *cells(label)] for label in _in_order(labels) if label.partition(" ")[0] in methods
        ]
        if mine:
            lines += [[f"*{heading}:*", *([""] * (len(mine[0]) - 1))], *mine]
    return lines


def leaders(report: Report, column: Column) -> set[str]:
    """The best method of a column, and those that the seeds cannot tell from it; who has too few seeds is left out."""
    found = {entry.label: entry for entry in compared(report).in_column(column) if len(entry.results) >= LEAST_SEEDS}
    means = {label: summary.mean for label, entry in found.items() if (summary := entry.test())}
    if len(means) < 2:
        return set()
    best = max(means, key=lambda label: means[label])
    apart = {label: paired(report, column, label, best) for label in means if label != best}
    return {best, *(label for label, gap in apart.items() if gap is not None and gap.holds_zero)}


def paired(report: Report, column: Column, label: str, other: str) -> Difference | None:
    """One method minus another over all seeds that both have; None where one of them was not run."""
    mine, theirs = report.entry(label, column), report.entry(other, column)
    return None if mine is None or theirs is None else difference(mine, theirs)


def wrapped(text: str) -> str:
    """A line of a list, as wide as the other lines of a page."""
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


def wins_a_seed(report: Report, column: Column, label: str) -> bool:
    """Whether a method is, with one seed at least, as good as the best mean of the column."""
    entries = {entry.label: entry for entry in compared(report).in_column(column) if len(entry.results) >= LEAST_SEEDS}
    means = {name: summary.mean for name, entry in entries.items() if (summary := entry.test())}
    mine, best = scores(entries[label]), scores(entries[max(means, key=lambda name: means[name])])
    return any(mine[seed] >= best[seed] for seed in mine if seed in best)


def is_run(report: Report, label: str, column: Column) -> bool:
    """Whether a method has enough seeds there to be compared."""
    entry = compared(report).entry(label, column)
    return entry is not None and len(entry.results) >= LEAST_SEEDS


def seeds_text(value: Summary) -> str:
    return "*1 seed*" if value.num_seeds == 1 else f"{value.num_seeds} seeds"


def counts_text(value: Summary, entry: Entry) -> str:
    """How many seeds a number is of, and how many have none."""
    return ", ".join(filter(None, [seeds_text(value), entry.diverged_text]))


def finished_entries(report: Report) -> list[Entry]:
    return [entry for entry in report.entries if entry.results]


def value_text(value: Any) -> str:
    """A rate, or the names of layers."""
    return f"{value:g}" if isinstance(value, float | int) else " and ".join(value) or "none"


def shown_figure(name: str, alt: str) -> str:
    """A figure of a page, of which the site shows the one for light or the one for dark."""
    return f"![{alt}](figures/{name}.svg#only-light)\n![{alt}](figures/{name}-dark.svg#only-dark)"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "|".join("---" if number == 0 else "---:" for number in range(len(lines[0]))) + "|"
    first, *rest = ["| " + " | ".join(map(_unbroken, line)) + " |" for line in lines]
    return "\n".join([first, rule, *rest])


def _unbroken(cell: str) -> str:
    """A number stays on one line with its deviation and its unit."""
    return re.sub(r" (?=±)|(?<=±) |(?<=\d) (?=[kMGT]?B$|min$|s$)", "\N{NO-BREAK SPACE}", cell)
