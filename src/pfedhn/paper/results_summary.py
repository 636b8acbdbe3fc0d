"""The short results page and the block of results in the README."""

import html
import re
from collections.abc import Collection, Mapping, Sequence, Set
from statistics import median

from pfedhn.paper.comparison import (
    OURS,
    RECIPES,
    SUMMARIZED,
    column_name,
    compared,
    counts_text,
    grouped,
    is_run,
    leaders,
    markdown,
    paired,
    shown_figure,
    wins_a_seed,
    wrapped,
)
from pfedhn.paper.experiments import BEYOND_THE_PAPER
from pfedhn.paper.results_figures import TRAFFIC, raced, said_of_bytes
from pfedhn.paper.stored_tables import SAME_TRAINING, SEEDS, STRONGER
from pfedhn.report.entries import Column, Report, display_name
from pfedhn.report.findings import Finding
from pfedhn.report.pairs import interval_text


def summary(every: Sequence[Report]) -> str:
    """The page of one screen: our accuracies, how far they are from the paper's, and what that says."""
    places = [
        (compared(report), column)
        for report in every
        for column in report.columns
        if report.entries[0].cell.dataset in SUMMARIZED
    ]
    labels = dict.fromkeys(entry.label for report, _ in places for entry in report.entries if entry.results)
    best = {column: leaders(report, column) for report in every for column in report.columns}

    def ours(label: str, report: Report, column: Column) -> str:
        entry = report.entry(label, column)
        if entry is None:
            return ""
        if not (found := entry.test()):
            return entry.diverged_text
        text = f"{found.mean:.1f}" if found.deviation is None else f"{found.mean:.1f} ± {found.deviation:.1f}"
        text += "" if found.num_seeds == len(SEEDS) else f" ({counts_text(found, entry)})"
        return f"**{text}**" if label in best[column] else text

    def from_paper(label: str, report: Report, column: Column) -> str:
        entry = report.entry(label, column)
        found = None if entry is None else entry.difference()
        return "" if found is None else f"{found:+.1f}"

    heading = ["method", *(column_name(column) for _, column in places)]
    table = [heading, *grouped(list(labels), lambda label: [ours(label, *place) for place in places])]
    differences = [
        heading,
        *([display_name(label), *(from_paper(label, *place) for place in places)] for label in labels),
    ]
    known = [line for line in differences if any(line[1:])]
    against = stronger_table(every)
    parts = [SUMMARY_OPENING, said(every), SUMMARY_TABLE, markdown(table)]
    parts += [SUMMARY_STRONGER, markdown(against)] if len(against) > 1 else []
    parts += [said_of_bytes(every), shown_figure(TRAFFIC, "Accuracy against bytes")] if raced(every) else []
    parts += ["Minus the paper's number, in points:", markdown(known), SUMMARY_END]
    return "\n\n".join(parts) + "\n"


SUMMARY_OPENING = """\
<!-- Made by `make results` from the files in results/. Do not edit. -->

# Results

The paper's Table 1, run by this package: the paper's eight methods by its own recipe, *our* stronger recipe of pFedHN
(pFedHN+ and pFedHN+-PC, also with fine-tuning, FT, and pFedHN-S on top of a shared model; [what is
different](fidelity.md#our-stronger-recipe)), and baselines that the paper does not have. In short:"""

SUMMARY_TABLE = """\
Test accuracy of each client's own model on its own test examples, in percent, averaged over clients, at the round
chosen on validation; mean ± standard deviation over seeds 0, 1 and 2, on the same splits for all methods. **Bold**: the
best with three seeds, and what all seeds that both have (three to six) cannot tell from it: the 95 % interval of the
paired difference contains zero. FT, and pFedHN-S: with 50 SGD steps of each client's own before
the test, which are not used if they make validation worse. On CIFAR-10 pFedHN+ and its FT form are separate runs,
which differ by chance too. Empty: not run. A run that [diverged](results-log.md#per-fedavg) has no score."""

SUMMARY_STRONGER = """\
Our two recipes minus the best method that is not ours, over all seeds that both have, in points with 95 % intervals:"""

SUMMARY_END = """\
The [log](results-log.md) has every cell with both averages, bytes, time, rates, commit, ranks and intervals, MNIST,
learning curves, what explains each difference from the paper, and how to rerun any number; `results/results.csv` has a
line for every run. The paper's other experiments are on [their own page](paper.md)."""


def said(every: Sequence[Report]) -> str:
    """What the numbers come to, in sentences that are made of them."""
    reports = [compared(report) for report in every if report.entries[0].cell.dataset in SUMMARIZED]
    entries = [entry for report in reports for entry in report.entries]
    lines = []
    for names, what in ((True, "pFedHN and pFedHN-PC, with their authors' rates,"), (False, "The six baselines")):
        known = [entry.difference() for entry in entries if (entry.cell.method in OURS) is names]
        gaps = [gap for gap in known if gap is not None]
        if gaps:
            more = "" if names else " of the paper, with rates tuned on its grids,"
            lines.append(
                f"- {what}{more} come out {min(gaps):+.1f} to {max(gaps):+.1f} points from the paper "
                f"(median {median(gaps):+.1f})."
            )
    best = {(report.title, column): leaders(report, column) for report in every for column in report.columns}
    shown = {report.title for report in reports}
    decided = {place: found for place, found in best.items() if found and place[0] in shown}
    if decided:
        ahead = sum(bool(found & set(OURS)) for found in decided.values())
        lines.append(
            f"- By the paper's recipe, pFedHN or pFedHN-PC is best, or tied with the best of all methods here, in "
            f"{ahead} of {len(decided)} columns."
        )
    lines += _said_of_stronger(every, best, shown)
    fedavg = {entry.column: entry for entry in entries if entry.label == "fedavg"}
    local = {entry.column: entry for entry in entries if entry.label == "local"}
    over = [a.mean - b.mean for at in local if (a := local[at].test()) and at in fedavg and (b := fedavg[at].test())]
    if over:
        lines.append(
            f"- Training alone (Local) beats one shared model (FedAvg) by {min(over):.0f} to {max(over):.0f} points: "
            "on splits like these, compare with Local."
        )
    return "\n".join(map(wrapped, lines))


def _said_of_stronger(
    every: Sequence[Report], best: Mapping[tuple[str, Column], set[str]], shown: Collection[str]
) -> list[str]:
    """In how many columns our recipe leads, and how far it is above the paper's."""
    told = []
    for is_shown, place in ((True, "columns where they have three seeds"), (False, "columns of MNIST")):
        found = {
            (report.title, column): best[report.title, column]
            for report in every
            for column in report.columns
            if (report.title in shown) is is_shown
            and best[report.title, column]
            and any(is_run(report, name, column) for name in STRONGER)
        }
        if not found:
            continue
        ahead = sum(bool(names & set(STRONGER)) for names in found.values())
        behind = sum(
            bool(names & set(STRONGER)) and not any(wins_a_seed(report, column, name) for name in names & set(STRONGER))
            for report in every
            for column in report.columns
            if (names := found.get((report.title, column)))
        )
        missing = [
            name
            for name in BEYOND_THE_PAPER
            if name not in STRONGER
            and not all(
                is_run(report, name, column)
                for report in every
                for column in report.columns
                if (report.title, column) in found
            )
        ]
        few = ", ".join(map(display_name, missing))
        told.append(
            f"- One of our rows is best, or tied with the best, in {ahead} of the {len(found)} {place}"
            + (f", behind it with every seed in {behind} of them" if behind else "")
            + (f"; {listed}" if (listed := _counts(every, found)) else "")
            + (f" ({few} with fewer than three seeds in some of these)." if few else ".")
        )
    gains = {
        (mine, theirs): [
            gap.mean
            for report in every
            for column in report.columns
            if report.title in shown and (gap := paired(report, column, mine, theirs)) is not None and gap.ends
        ]
        for mine, theirs in STRONGER.items()
        if mine not in SAME_TRAINING
    }
    parts = [
        f"{display_name(mine)} minus {display_name(theirs)} is {min(found):+.1f} to {max(found):+.1f} points, one "
        f"point or more in {sum(gain >= 1 for gain in found)} of {len(found)} columns"
        for (mine, theirs), found in gains.items()
        if found
    ]
    return told + ([f"- Seed by seed, {'; '.join(parts)}."] if parts else [])


def _counts(every: Sequence[Report], leading: Mapping[tuple[str, Column], Set[str]]) -> str:
    """How often each recipe of ours is among those that lead, and how often it is behind with every seed then."""
    told = []
    for name in RECIPES:
        places = [(r, column) for r in every for column in r.columns if name in leading.get((r.title, column), ())]
        behind = sum(not wins_a_seed(report, column, name) for report, column in places)
        if places:
            known = sum(is_run(r, name, column) for r in every for column in r.columns if (r.title, column) in leading)
            told.append(
                f"{display_name(name)} alone in {len(places)} of {known}" + (f" ({behind} behind)" if behind else "")
            )
    return ", ".join(told)


def stronger_table(every: Sequence[Report]) -> list[list[str]]:
    """A line for each column in which a recipe of ours was run: how far each is from the best method that is not."""
    lines = [["column", "the best other"]]
    for mine in RECIPES:
        lines[0] += [display_name(mine), "interval"]
    for report in every:
        for column in report.columns:
            entries = [entry for entry in compared(report).in_column(column) if entry.results]
            means = {entry.label: summary.mean for entry in entries if (summary := entry.test())}
            others = [label for label in means if label not in STRONGER]
            if not others or not any(mine in means for mine in RECIPES):
                continue
            best = max(others, key=lambda label: means[label])
            line = [column_name(column), display_name(best)]
            for mine in RECIPES:
                gap = paired(report, column, mine, best)
                line += ["", ""] if gap is None else [f"{gap.mean:+.1f}", interval_text(gap, digits=1)]
            lines.append(line)
    return lines


README_BLOCK = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)


def readme_block(every: Sequence[Report], ladder: Finding | None = None) -> str:
    """What README says of the results, between its two marks; with the ablation's figure once that has been run."""
    parts = [README_OPENING, said(every)]
    if raced(every):
        parts.append(readme_figure(TRAFFIC, f"Test accuracy against megabytes per client. {said_of_bytes(every)}"))
    if ladder is not None:
        parts.append("What each part of the stronger recipe does ([numbers](docs/paper.md)):")
        parts.append(readme_figure(f"paper-{ladder.stem('')}", ladder.sentence))
    return "\n\n".join(parts) + "\n"


def readme_figure(name: str, alt: str) -> str:
    """A figure for a page that does not know `#only-dark`."""
    words = html.escape(alt, quote=False).replace('"', "&quot;")
    return f"""\
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/figures/{name}-dark.svg">
  <img alt="{words}" src="docs/figures/{name}.svg">
</picture>"""


README_OPENING = """\
Table 1 of the paper, run again: its eight methods by its own recipe, *our* stronger recipe of pFedHN (pFedHN+ and
pFedHN+-PC; FT: with fine-tuning; pFedHN-S: on top of a shared model), and baselines that the paper does not have. From
the [results](docs/results.md):"""
