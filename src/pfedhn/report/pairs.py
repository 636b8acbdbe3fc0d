"""Methods against each other, seed by seed: the luck of a split, which all methods share, cancels in a difference."""

import math
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

import pandas

from pfedhn.report.entries import (
    Average,
    Column,
    Entry,
    Report,
    Summary,
    column_text,
    display_name,
    loss_digits,
    seeds_alike,
    summarize,
)

CONFIDENCE = 0.95
LEAST_SEEDS = 3  # of an interval: that of two seeds is so wide that it says nothing


class Difference(NamedTuple):
    """The mean difference over seeds, in points, and the interval that holds the true one with 95 % confidence."""

    mean: float
    ends: tuple[float, float] | None  # None with fewer than three seeds
    num_seeds: int

    @property
    def holds_zero(self) -> bool:
        """Whether the seeds cannot tell the two apart; with too few for an interval, nothing is claimed."""
        return self.ends is not None and self.ends[0] <= 0 <= self.ends[1]


def scores(entry: Entry, average: Average = "clients") -> dict[int, float]:
    """Test accuracy in percent by seed; of a task without accuracy, minus the loss."""
    sign = 1 if entry.has_accuracy else -1
    return {seed: sign * value for seed, value in entry.scores(average).items() if not math.isnan(value)}


def difference(entry: Entry, other: Entry, average: Average = "clients") -> Difference | None:
    """`entry` minus `other` over the seeds in which both had the same splits; None if there is no such seed."""
    mine, theirs = scores(entry, average), scores(other, average)
    found = [mine[seed] - theirs[seed] for seed in seeds_alike(entry, other) if seed in mine and seed in theirs]
    if not found:
        return None
    mean = statistics.fmean(found)
    if len(found) < LEAST_SEEDS:
        return Difference(mean, None, len(found))
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(found) - 1)) * statistics.stdev(found) / math.sqrt(len(found))
    return Difference(mean, (mean - half, mean + half), len(found))


def ranks(
    entries: Sequence[Entry], average: Average = "clients", seeds: Collection[int] | None = None
) -> dict[str, Summary]:
    """Each method's place among all, 1 for the best, over the seeds that all of them have; equals share a place."""
    table = pandas.DataFrame({entry.label: scores(entry, average) for entry in entries}).dropna()  # a line per seed
    if seeds is not None:
        table = table[table.index.isin(list(seeds))]
    places = table.rank(axis="columns", ascending=False)
    return {label: summary for label in places if (summary := summarize(places[label])) is not None}


def pairs(
    report: Report, column: Column, average: Average = "clients", seeds: Collection[int] | None = None
) -> list[list[str]]:
    """A table of a column: each method's rank and how far it is from the best, best first.

    If some methods have three seeds, the best is one of them, and methods with fewer have no rank. The table is empty
    for one method alone, or if no two methods share two seeds. Means and ranks are over `seeds`, or all of them;
    differences take every seed that two methods share.
    """
    means = {
        entry.label: statistics.fmean(values)
        for entry in report.in_column(column)
        if (values := [value for seed, value in scores(entry, average).items() if seeds is None or seed in seeds])
    }
    entries = [entry for entry in report.in_column(column) if entry.label in means]
    if len(entries) < 2:
        return []
    ordered = sorted(entries, key=lambda entry: -means[entry.label])
    # One that has been run once and is ahead would leave all others without an interval.
    known = [entry for entry in ordered if len(scores(entry, average)) >= LEAST_SEEDS] or ordered
    best, places = known[0], ranks(known, average, seeds)
    differences = {entry.label: difference(entry, best, average) for entry in ordered if entry is not best}
    if not any(found is not None and found.num_seeds > 1 for found in differences.values()):
        return []
    sign = 1 if best.has_accuracy else -1  # a loss is shown as it is
    digits = 2 if best.has_accuracy else loss_digits(entries)
    lines = [["method", "mean", "rank", f"against {display_name(best.label)}", "95 % interval", "seeds"]]
    for entry in ordered:
        found, place = differences.get(entry.label), places.get(entry.label)
        lines.append(
            [
                display_name(entry.label),
                f"{sign * means[entry.label]:.{digits}f}",
                "" if place is None else f"{place.mean:.1f}",
                "" if found is None else f"{sign * found.mean:+.{digits}f}",
                "" if entry is best else interval_text(found, sign, digits),
                str(len(scores(entry, average)) if found is None else found.num_seeds),
            ]
        )
    return lines


def interval_text(found: Difference | None, sign: int = 1, digits: int = 2) -> str:
    """The ends of an interval, or why there is none."""
    if found is None:
        return "no seed in common"
    if found.ends is None:
        return f"too few seeds ({found.num_seeds})"
    return " to ".join(f"{end:+.{digits}f}" for end in sorted(sign * end for end in found.ends))


PAIRS_ARE = (
    "differences are taken seed by seed, on the same splits; if the interval contains zero, the seeds cannot tell the "
    "two methods apart. Rank: the mean place over the seeds that all methods have. Where others have three seeds, a "
    "method with fewer has no rank, and is not what they are compared with."
)


def caption(column: Column, has_folds: bool = False) -> str:
    """What the numbers are; folds share training examples, which a t interval over them does not know."""
    warning = " Folds share training examples, so these intervals are too narrow." if has_folds else ""
    return f"{column_text(column)}: {PAIRS_ARE}{warning}"
