"""Compare methods within a column of Table 1, and write the result as text."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.paper.experiments import CIFAR10
from pfedhn.paper.stored_tables import SEEDS, STRONGER
from pfedhn.report.entries import Column, Entry, Report, Summary, display_name
from pfedhn.report.pairs import LEAST_SEEDS, Difference, difference, scores

NOT_RUN = "—"
OURS = ("pfedhn", "pfedhn-pc")
RECIPES = ("pfedhn-plus", "pfedhn-shared")  # our main variants
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "omniglot": "Omniglot", "mnist": "MNIST"}
SUMMARIZED = ("cifar10", "cifar100", "omniglot")

# The methods of a table under headings that say whose they are.
GROUPS: Mapping[str, Collection[str]] = {
    "The paper's methods, with its settings": list(CIFAR10),
    "Our variants of pFedHN": STRONGER,
    "Baselines that are not in the paper": [name for name in ALGORITHMS if name not in (*CIFAR10, *STRONGER)],
}


def compared(report: Report) -> Report:
    """With the table's own seeds only, on which all methods have the same splits: further ones are a method's alone."""

    def common(entry: Entry) -> Entry:
        results = {seed: result for seed, result in entry.results.items() if seed in SEEDS}
        return replace(entry, results=results, curves={seed: entry.curves[seed] for seed in results})

    return replace(report, entries=[common(entry) for entry in report.entries])


@dataclass(frozen=True)
class Place:
    """A column of a table, in which methods are compared."""

    whole: Report  # with every seed of a method
    report: Report  # with the table's own seeds
    column: Column

    @property
    def name(self) -> str:
        dataset, clients = self.column
        return f"{NAMES[dataset]}, {clients}"

    @property
    def is_summarized(self) -> bool:
        return self.column[0] in SUMMARIZED

    @property
    def entries(self) -> list[Entry]:
        return self.report.in_column(self.column)

    def entry(self, label: str) -> Entry | None:
        return self.report.entry(label, self.column)

    @cached_property
    def judged(self) -> dict[str, Entry]:
        """The methods that have enough seeds to be compared."""
        return {entry.label: entry for entry in self.entries if len(entry.results) >= LEAST_SEEDS}

    @cached_property
    def means(self) -> dict[str, float]:
        return {label: summary.mean for label, entry in self.judged.items() if (summary := entry.test())}

    @cached_property
    def leaders(self) -> set[str]:
        """The best method, and those that the seeds cannot tell from it; empty if there is nothing to compare."""
        if len(self.means) < 2:
            return set()
        best = max(self.means, key=lambda label: self.means[label])
        gaps = {label: self.minus(label, best) for label in self.means if label != best}
        return {best, *(label for label, gap in gaps.items() if gap is not None and gap.holds_zero)}

    def minus(self, label: str, other: str) -> Difference | None:
        """One method minus another over all seeds that both have; None if one of them was not run."""
        mine, theirs = self.whole.entry(label, self.column), self.whole.entry(other, self.column)
        return None if mine is None or theirs is None else difference(mine, theirs)

    def wins_a_seed(self, label: str) -> bool:
        """Whether a method is, with one seed at least, as good as the best mean."""
        best = max(self.means, key=lambda name: self.means[name])
        mine, theirs = scores(self.judged[label]), scores(self.judged[best])
        return any(mine[seed] >= theirs[seed] for seed in mine if seed in theirs)


def places_of(every: Sequence[Report]) -> list[Place]:
    return [Place(report, compared(report), column) for report in every for column in report.columns]


def grouped(labels: Sequence[str], cells: Callable[[str], list[str]]) -> list[list[str]]:
    """A line for each method, under headings that say whose recipe it is."""
    ours = [label for label in STRONGER if label in labels]  # in our order; all others as they come
    ordered = [label for label in labels if label not in ours] + ours
    lines = []
    for heading, methods in GROUPS.items():
        rows = [[display_name(label), *cells(label)] for label in ordered if label in methods]
        if rows:
            lines += [[f"*{heading}:*", *([""] * (len(rows[0]) - 1))], *rows]
    return lines


def seeds_text(value: Summary) -> str:
    return "*1 seed*" if value.num_seeds == 1 else f"{value.num_seeds} seeds"


def counts_text(value: Summary, entry: Entry) -> str:
    """How many seeds a number is of, and how many have none."""
    return ", ".join(filter(None, [seeds_text(value), entry.diverged_text]))


def finished_entries(reports: Sequence[Report]) -> list[Entry]:
    return [entry for report in reports for entry in report.entries if entry.results]


def value_text(value: Any) -> str:
    """A rate, or the names of layers."""
    return f"{value:g}" if isinstance(value, float | int) else " and ".join(value) or "none"
