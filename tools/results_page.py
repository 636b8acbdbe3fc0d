"""Writes what results/ says: docs/results.md in short, docs/results-log.md in full, figures, and results/results.csv.

`make results` runs it. No number on the pages is typed in: what has no line is shown as not run yet. results/notes.md
goes into the middle of the log; README gets the sentences of the short page and the figure of accuracy against bytes.
"""

import csv
import html
import io
import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.errors import UserError
from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.spec import Cell, Experiment, RunSpec
from pfedhn.paper.experiments import BEYOND_THE_PAPER, EXPERIMENTS, RATES_TAKEN_FROM
from pfedhn.report.entries import Column, Entry, Report, Summary, display_name, to_reports
from pfedhn.report.figures import draw_curves, to_svg
from pfedhn.report.findings import Finding
from pfedhn.report.pairs import LEAST_SEEDS, PAIRS_ARE, Difference, difference, interval_text, pairs, scores
from pfedhn.report.results import Runs, read_file
from pfedhn.report.tables import bytes_text, number_text, seconds_text, steps_text
from pfedhn.report.traffic import accuracy_at, best_of, draw_traffic, mean_line, megabytes_to
from pfedhn.storage.schema import Curve, Result
from pfedhn.studies import findings
from pfedhn.system.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("table1-cifar10", "table1-cifar100", "table1-omniglot", "table1-mnist")
NOT_RUN = "—"
NUM_PAPER_RUNS = 3
SEEDS = EXPERIMENTS[TABLES[0]].seeds
FAR = 2.0  # points of accuracy: further from the paper than this, a baseline needs an explanation
OURS = ("pfedhn", "pfedhn-pc")
STRONGER = {  # our rows, and the row of the paper that each makes stronger
    "pfedhn-plus": "pfedhn",
    "pfedhn-plus-pc": "pfedhn-pc",
    "pfedhn-plus-ft": "pfedhn",
    "pfedhn-plus-pc-ft": "pfedhn-pc",
    "pfedhn-shared": "pfedhn",
}
NOT_TUNED_ALONE = {"pfedhn-shared": "rates of pFedHN+; fixed layers, embeddings and trunk by trials"}
RECIPES = ("pfedhn-plus", "pfedhn-shared")  # of ours; the other rows are their forms
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "omniglot": "Omniglot", "mnist": "MNIST"}
SUMMARIZED = ("cifar10", "cifar100", "omniglot")

# The rows of a table under headings that say whose recipe they are.
GROUPS: Mapping[str, Collection[str]] = {
    "The paper's methods, by its recipe": [name for name in ALGORITHMS if name not in BEYOND_THE_PAPER],
    "Our stronger recipe of pFedHN": STRONGER,
    "Baselines that are not in the paper": [name for name in BEYOND_THE_PAPER if name not in STRONGER],
}

# What a faithful re-implementation of pFedHN reached: accuracy over samples, deviation, number of runs.
REACHED: Mapping[tuple[str, str, int], tuple[float, float | None, int]] = {
    ("pfedhn", "cifar10", 10): (90.65, 0.30, 2),
    ("pfedhn-pc", "cifar10", 10): (92.15, 0.54, 2),
    ("pfedhn", "cifar10", 50): (89.59, 0.83, 3),
    ("pfedhn-pc", "cifar10", 50): (91.00, 0.65, 3),
    ("pfedhn", "cifar10", 100): (88.15, 0.57, 2),
    ("pfedhn-pc", "cifar10", 100): (88.85, 0.22, 2),
    ("pfedhn", "cifar100", 10): (63.0, 3.0, 6),
    ("pfedhn-pc", "cifar100", 10): (66.92, 0.48, 2),
    ("pfedhn", "cifar100", 50): (59.56, 0.17, 3),
    ("pfedhn-pc", "cifar100", 50): (58.45, 2.07, 3),
    ("pfedhn", "cifar100", 100): (53.04, 0.40, 2),
    ("pfedhn-pc", "cifar100", 100): (51.62, 1.00, 2),
    ("pfedhn", "omniglot", 50): (76.0, None, 1),
    ("pfedhn-pc", "omniglot", 50): (83.7, None, 1),
}


def read_results(folder: Path) -> list[Report]:
    """A report for each table, with what the folder holds of it."""
    stored = [runs for file in sorted(folder.glob("*.jsonl")) for runs in read_file(file)]
    tables = [_of_today(name, stored) for name in TABLES]
    return [
        report for runs in tables for report in to_reports([replace(runs, diverged=_diverged(folder, runs.experiment))])
    ]


def _diverged(folder: Path, experiment: Experiment) -> frozenset[str]:
    """The runs that diverged with the settings that the experiment has now; they have a line and no result."""
    found = set()
    for file in sorted((folder / "checks").glob("*-diverged.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["experiment"] != experiment.name or line["seed"] not in SEEDS:
                continue
            for cell in experiment.cells:
                is_of = (cell.method, cell.clients) == (line["method"], line["clients"])
                if is_of and not _are_other_defaults(cell, line["settings"]):
                    found.add(experiment.run_of(cell, line["seed"]).name)
    return frozenset(found)


def _of_today(name: str, stored: Sequence[Runs]) -> Runs:
    """The stored runs of an experiment, all of the settings that it has now."""
    experiment = EXPERIMENTS[name]
    planned = {run.name: run for run in experiment.runs()}
    results: dict[str, Result] = {}
    curves: dict[str, Curve] = {}
    for runs in stored:
        if runs.experiment.name != name:
            continue
        for run, result in runs.results.items():
            planned[run], then = experiment.find(run), runs.experiment.find(run)
            if _without_settings(planned[run]) != _without_settings(then) or _are_other_defaults(
                planned[run].cell, result.settings
            ):
                raise UserError(f"the stored run {run} has other settings than {name!r} has now; run it again.")
            results[run], curves[run] = result, runs.curves[run]
    for run, (result, curve) in _before_fine_tuning(experiment, results, curves).items():
        planned[run], results[run], curves[run] = experiment.find(run), result, curve
    return Runs(experiment, list(planned.values()), results, curves)


def _without_settings(run: RunSpec) -> RunSpec:
    """What else there is to a run; of settings, those that the method had count, whoever set them."""
    return replace(run, cell=replace(run.cell, settings={}))


def _before_fine_tuning(
    experiment: Experiment, results: Mapping[str, Result], curves: Mapping[str, Curve]
) -> dict[str, tuple[Result, Curve]]:
    """What a row has by the runs of its fine-tuned form, which train alike, with seeds that it was not run with."""
    known = {(result.cell["method"], result.cell["clients"], result.seed) for result in results.values()}
    found = {}
    for name, result in results.items():
        method, clients = ALGORITHMS[result.cell["method"]].rates_from, result.cell["clients"]
        if method not in STRONGER or (method, clients, result.seed) in known or result.unadapted is None:
            continue
        (cell,) = (cell for cell in experiment.cells if (cell.method, cell.clients) == (method, clients))
        run, before = experiment.run_of(cell, result.seed), {**result.settings, "adaptation_steps": 0}
        assert not _are_other_defaults(cell, before), run.name
        served: dict[str, Any] = {"validation": result.unadapted.validation, "test": result.unadapted.test}
        served |= {"unadapted": None, "adapted": None}
        found[run.name] = (
            replace(result, name=run.name, cell=asdict(run.cell), settings=before, **served),
            curves[name],
        )
    return found


def _are_other_defaults(cell: Cell, settings: Mapping[str, Any]) -> bool:
    """Whether the method would now run with other settings.

    What is none follows from the federation; what a run was not asked for did not exist when it was made.
    """
    method: Any = cell_algorithm(cell)
    today = {name: value for name, value in json.loads(json.dumps(asdict(method))).items() if value is not None}
    return any(settings[name] != value for name, value in today.items() if name in settings)


@dataclass(frozen=True)
class Bar:
    """What a cell must reach: two standard errors of the difference under the mean it is compared with."""

    mean: float
    num_runs: int
    is_measured: bool  # else the paper's own number
    deviation: float | None
    bound: float | None  # None while there is nothing to compare

    def is_passed(self, ours: Summary) -> bool:
        return self.bound is not None and ours.mean >= self.bound


def bar(entry: Entry) -> Bar | None:
    """r - 2 s sqrt(1/n + 1/n_r): s is the largest deviation that anybody saw. None without a number to compare with."""
    reached = REACHED.get((entry.cell.method, *entry.column))
    paper = entry.published
    if paper is None and reached is None:
        return None
    mean, num_runs = (reached[0], reached[2]) if reached else (paper[0], NUM_PAPER_RUNS) if paper else (math.nan, 0)
    ours = entry.test("samples")
    deviations = [ours and ours.deviation, reached and reached[1], paper and paper[1]]
    known = [value for value in deviations if value is not None]
    if ours is None or not known:
        return Bar(mean, num_runs, reached is not None, None, None)
    bound = mean - 2 * max(known) * math.sqrt(1 / ours.num_seeds + 1 / num_runs)
    return Bar(mean, num_runs, reached is not None, max(known), bound)


def compared(report: Report) -> Report:
    """With the table's own seeds only, on which all methods have the same splits: further ones are a method's alone."""

    def common(entry: Entry) -> Entry:
        results = {seed: result for seed, result in entry.results.items() if seed in SEEDS}
        return replace(entry, results=results, curves={seed: entry.curves[seed] for seed in results})

    return replace(report, entries=[common(entry) for entry in report.entries])


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
        found = entry and entry.test()
        if not found:
            return entry.diverged_text if entry else ""
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


def leaders(report: Report, column: Column) -> set[str]:
    """The best method of a column, and those that the seeds cannot tell from it; who has too few seeds is left out."""
    found = {entry.label: entry for entry in compared(report).in_column(column) if len(entry.results) >= LEAST_SEEDS}
    means = {label: summary.mean for label, entry in found.items() if (summary := entry.test())}
    if len(means) < 2:
        return set()
    best = max(means, key=lambda label: means[label])
    apart = {label: _paired(report, column, label, best) for label in means if label != best}
    return {best, *(label for label, gap in apart.items() if gap is not None and gap.holds_zero)}


def _paired(report: Report, column: Column, label: str, other: str) -> Difference | None:
    """One method minus another over all seeds that both have; None where one of them was not run."""
    mine, theirs = report.entry(label, column), report.entry(other, column)
    return None if mine is None or theirs is None else difference(mine, theirs)


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


def wrapped(text: str) -> str:
    """A line of a list, as wide as the other lines of a page."""
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


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
            and any(_is_run(report, name, column) for name in STRONGER)
        }
        if not found:
            continue
        ahead = sum(bool(names & set(STRONGER)) for names in found.values())
        behind = sum(
            bool(names & set(STRONGER))
            and not any(_wins_a_seed(report, column, name) for name in names & set(STRONGER))
            for report in every
            for column in report.columns
            if (names := found.get((report.title, column)))
        )
        missing = [
            name
            for name in BEYOND_THE_PAPER
            if name not in STRONGER
            and not all(
                _is_run(report, name, column)
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
            if report.title in shown and (gap := _paired(report, column, mine, theirs)) is not None and gap.ends
        ]
        for mine, theirs in STRONGER.items()
        if not mine.endswith("-ft")  # the same training
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
        behind = sum(not _wins_a_seed(report, column, name) for report, column in places)
        if places:
            known = sum(_is_run(r, name, column) for r in every for column in r.columns if (r.title, column) in leading)
            told.append(
                f"{display_name(name)} alone in {len(places)} of {known}" + (f" ({behind} behind)" if behind else "")
            )
    return ", ".join(told)


def _wins_a_seed(report: Report, column: Column, label: str) -> bool:
    """Whether a method is, with one seed at least, as good as the best mean of the column."""
    entries = {entry.label: entry for entry in compared(report).in_column(column) if len(entry.results) >= LEAST_SEEDS}
    means = {name: summary.mean for name, entry in entries.items() if (summary := entry.test())}
    mine, best = scores(entries[label]), scores(entries[max(means, key=lambda name: means[name])])
    return any(mine[seed] >= best[seed] for seed in mine if seed in best)


def _is_run(report: Report, label: str, column: Column) -> bool:
    """Whether a method has enough seeds there to be compared."""
    entry = compared(report).entry(label, column)
    return entry is not None and len(entry.results) >= LEAST_SEEDS


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
                gap = _paired(report, column, mine, best)
                line += ["", ""] if gap is None else [f"{gap.mean:+.1f}", interval_text(gap, digits=1)]
            lines.append(line)
    return lines


CSV_COLUMNS = (
    *("experiment", "method", "dataset", "clients", "seed", "test_over_clients", "test_over_examples"),
    *("validation_over_examples", "test_loss", "chosen_step", "steps", "bytes_up", "bytes_down", "seconds"),
    *("device", "precision", "torch", "commit", "finished", "settings", "command"),
)


def table_of_runs(folder: Path) -> str:
    """Every stored run as a line of CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for file in sorted(folder.glob("*.jsonl")):
        for runs in read_file(file):
            for result in runs.results.values():
                test, where, cell = result.test, result.environment, result.cell
                writer.writerow(
                    [
                        *(runs.experiment.name, cell["method"], cell["dataset"], cell["clients"], result.seed),
                        *(test.client_mean, test.sample_mean, result.validation.sample_mean, test.loss),
                        *(
                            result.chosen_step,
                            result.steps,
                            result.bytes_up,
                            result.bytes_down,
                            round(result.seconds, 1),
                        ),
                        *(where.device, where.precision, where.torch, where.commit, where.finished),
                        *(json.dumps(result.settings, sort_keys=True), result.command),
                    ]
                )
    return text.getvalue()


def page(every: Sequence[Report], notes: str, tuning: Sequence[Mapping[str, Any]]) -> str:
    reports = [compared(report) for report in every]
    parts = [OPENING]
    for report, whole in zip(reports, every, strict=True):
        parts += [f"## {report.title}", markdown(grid(report))]
        for (dataset, clients), name in pictured(report).items():
            parts.append(shown_figure(name, f"{dataset}, {clients} clients: accuracy against communication"))
        if _finished(report):
            parts += [markdown(costs(report)), markdown(origins(report))]
            for column in report.columns:
                lines = pairs(whole, column, seeds=SEEDS)
                if lines:
                    parts += [f"{column_name(column)} clients, ranks and paired differences:", markdown(lines)]
        else:
            parts.append("No run of this table is stored yet.")
    parts += ["## Does pFedHN reach what it should?", BAR_TEXT, markdown(bars(every))]
    parts += ["## Baselines that differ from the paper", *far_section(reports), notes.strip()]
    parts += ["## Rates", RATES_TEXT, *tuning_section(tuning), STORED_TEXT]
    return "\n\n".join(part for part in parts if part) + "\n"


OPENING = f"""\
<!-- Made by `make results` from the files in results/. Do not edit: the text on differences is results/notes.md. -->

# Results: the log

The long form of the [results](results.md). Every number of ours comes from a line in `results/` of the repository, and
the line names the command that reproduces it ([how](#how-a-result-is-stored-and-rerun)).

Accuracy is that of each client's own model on its own test examples, in percent, at the round chosen on validation.
*Over clients* is the mean of the clients' accuracies, as the paper defines it; *over samples* counts every test
example once, as the authors' code does. ± is the sample standard deviation over seeds (n - 1); the paper's is over
three seeds.

A cell of the tables has our accuracy over clients (and the number of seeds), the paper's, and the difference. {NOT_RUN}
means *not run yet*; *1 seed* marks a number that no second seed has confirmed; a run that [diverged](#per-fedavg) has
no score. Tables and figures have the seeds 0, 1 and 2, on which all methods have the same splits. pFedHN and pFedHN-PC
are the paper's recipe, pFedHN+ and pFedHN+-PC [our stronger one](fidelity.md#our-stronger-recipe); headings in the
tables say whose a row is.

**Ranks and paired differences.** {PAIRS_ARE[0].upper()}{PAIRS_ARE[1:]} A pair takes all seeds that both methods have.

Before you quote a number, read [what explains the differences from the
paper](#baselines-that-differ-from-the-paper). Wall times are of runs that shared the GPU with others;
[performance](performance.md) has those of runs alone."""


def grid(report: Report) -> list[list[str]]:
    """Methods by numbers of clients."""

    def cells(label: str) -> list[str]:
        entries = [report.entry(label, column) for column in report.columns]
        return ["" if entry is None else cell_text(entry) for entry in entries]

    heading = ["method", *(f"{clients} clients" for _, clients in report.columns)]
    return [heading, *grouped(report.labels, cells)]


def cell_text(entry: Entry) -> str:
    ours, difference = entry.test(), entry.difference()
    if ours is None:
        lines = [entry.diverged_text or NOT_RUN]
    else:
        lines = [f"**{number_text(ours)}** ({counts_text(ours, entry)})"]
    if entry.published is not None:
        lines.append("paper {:.2f} ± {:.2f}".format(*entry.published))
    if difference is not None:
        lines.append(f"{difference:+.2f}")
    return "<br>".join(lines)


def seeds_text(value: Summary) -> str:
    return "*1 seed*" if value.num_seeds == 1 else f"{value.num_seeds} seeds"


def counts_text(value: Summary, entry: Entry) -> str:
    """How many seeds a number is of, and how many have none."""
    return ", ".join(filter(None, [seeds_text(value), entry.diverged_text]))


def costs(report: Report) -> list[list[str]]:
    """Every finished cell: both averages and what it cost."""
    return [
        ["method", "clients", "over clients", "over samples", "steps", "sent up", "sent down", "wall time"],
        *(
            [
                *(display_name(entry.label), str(entry.cell.clients)),
                *(number_text(entry.test("clients")), number_text(entry.test("samples")), steps_text(entry)),
                *(bytes_text(entry.total("bytes_up")), bytes_text(entry.total("bytes_down"))),
                seconds_text(entry.total("seconds")),
            ]
            for entry in _finished(report)
        ),
    ]


def origins(report: Report) -> list[list[str]]:
    """How the cells were made; those of a method that were made alike share a line."""
    numbers: dict[tuple[str, ...], list[str]] = {}
    for entry in _finished(report):
        made = display_name(entry.label), rates_text(entry), entry.hardware, commits_text(entry)
        numbers.setdefault(made, []).append(str(entry.cell.clients))
    lines = [["method", "clients", "rates", "hardware", "commit"]]
    return lines + [[made[0], ", ".join(clients), *made[1:]] for made, clients in numbers.items()]


def _finished(report: Report) -> list[Entry]:
    return [entry for entry in report.entries if entry.results]


def rates_text(entry: Entry) -> str:
    known = ALGORITHMS[entry.cell.method]
    names = list(ALGORITHMS[known.rates_from].grid if known.rates_from else known.grid)
    settings = next(iter(entry.results.values())).settings
    values = {name: settings[name] for name in names if settings.get(name) is not None}
    listed = ", ".join(f"{name} {_value_text(value)}" for name, value in values.items())
    if entry.cell.method in NOT_TUNED_ALONE:
        return f"{listed} ({NOT_TUNED_ALONE[entry.cell.method]})"
    if any(name in entry.cell.settings for name in names):
        source = RATES_TAKEN_FROM.get(f"table1-{entry.cell.dataset}")
        return f"{listed} (tuned)" if source is None else f"{listed} (tuned for {source})"
    return f"{listed} (the authors')" if entry.cell.method in OURS else f"{listed} (not tuned)"


def _value_text(value: Any) -> str:
    """A rate, or the names of layers."""
    return f"{value:g}" if isinstance(value, float | int) else " and ".join(value) or "none"


def commits_text(entry: Entry) -> str:
    commits = {str(result.environment.commit) for result in entry.results.values()}
    return ", ".join(sorted(commit[:8] + ("+changes" if "+" in commit else "") for commit in commits))


BAR_TEXT = """\
A check against regressions: a cell of pFedHN or pFedHN-PC should not be more than two standard errors of the
difference below what is known to be reachable, so its bound is *r - 2 s √(1/n + 1/m)*. *r* is the mean of *m* runs of
an independent re-implementation that was written for this check and is not part of the package, or, where that was
not run, the paper's mean of 3. *s* is the largest of three standard deviations: ours, the re-implementation's and the
paper's. *n* is our number of runs, in some cells more than the table's three. Accuracies here are over samples. Cells
that fail are [looked at below](#cells-of-pfedhn-below-their-bound)."""


def bars(reports: Sequence[Report]) -> list[list[str]]:
    lines = [["cell", "r", "of", "s", "bound", "ours, over samples", "reached"]]
    for entry in (entry for report in reports for entry in report.entries if entry.cell.method in OURS):
        found, ours = bar(entry), entry.test("samples")
        if found is None:
            continue
        dataset, clients = entry.column
        source = f"{found.num_runs} runs" if found.num_runs > 1 else "1 run"
        line = [f"{display_name(entry.label)}, {dataset}, {clients} clients", f"{found.mean:.2f}"]
        line.append(source if found.is_measured else f"{source} (paper)")
        if ours is None or found.bound is None or found.deviation is None:
            line += [NOT_RUN] * 4
        else:
            line += [f"{found.deviation:.2f}", f"{found.bound:.2f}", f"{number_text(ours)} ({seeds_text(ours)})"]
            line.append("yes" if found.is_passed(ours) else "**no**")
        lines.append(line)
    return lines


def far_from_paper(reports: Sequence[Report]) -> Iterator[Entry]:
    """Baselines whose mean is more than two points above or under the paper's."""
    for entry in (entry for report in reports for entry in report.entries if entry.cell.method not in OURS):
        difference = entry.difference()
        if difference is not None and abs(difference) > FAR:
            yield entry


def far_section(reports: Sequence[Report]) -> list[str]:
    if not any(_finished(report) for report in reports):
        return ["No baseline is stored yet."]
    found = list(far_from_paper(reports))
    if not found:
        return [f"No baseline that was run differs from the paper by more than {FAR:g} points."]
    lines = [["method", "data set", "clients", "ours", "paper", "difference", "there after"]]
    for entry in found:
        paper, difference = entry.published, entry.difference()
        assert paper is not None
        assert difference is not None
        dataset, clients = entry.column
        lines.append([display_name(entry.label), dataset, str(clients), number_text(entry.test())])
        lines[-1] += [f"{paper[0]:.2f} ± {paper[1]:.2f}", f"{difference:+.2f}", steps_to(entry, paper[0])]
    about = f"""All cells that differ by more than {FAR:g} points; explanations follow the table. *There after* says
when the mean of our test curves first reaches the paper's number, in communication steps."""
    return [about, markdown(lines)]


def steps_to(entry: Entry, accuracy: float) -> str:
    """When the mean of an entry's curves first reaches an accuracy, of the steps there are."""
    curves = [entry.curve(seed) for seed in entry.results]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    reached = next((step for step in steps if fmean(curve[step] for curve in curves) >= accuracy), None)
    return "never" if reached is None else f"{reached:,} of {steps[-1]:,}"


def unexplained(reports: Sequence[Report], notes: str) -> list[str]:
    """Methods that differ from the paper and have no heading of their own in the notes."""
    headings = set(re.findall(r"^### (.+?)\s*$", notes, re.MULTILINE))
    names = dict.fromkeys(display_name(entry.cell.method) for entry in far_from_paper(reports))
    return [name for name in names if name not in headings]


RATES_TEXT = """\
pFedHN and pFedHN-PC run with their authors' learning rates. Those of the baselines are chosen by `pfedhn tune` on the
paper's grids: learning rates 0.1, 0.05, 0.01, 0.005 and personal ones 0.05, 0.01, 0.005, 0.001, on validation examples,
with 50 clients and seed 0. Every point runs for a fifth of the steps, then the best three for all of them. The choice
is kept for 10 and 100 clients. Our stronger recipe and the baselines that the paper does not have were tuned later,
with seed 10, which is in no table, and with a tenth of the steps first: pFedHN+ and pFedHN+-PC by the server's rate and
decay, the others by the paper's learning rates and, where their authors tune a second setting, by that. LG-FedAvg takes
FedAvg's rate, MNIST takes CIFAR-10's. Points within about a percentage point of each other cannot be told apart by one
seed. A rate that diverged with another of the table's seeds is excluded: Local on Omniglot was tuned again on all three
seeds, and pFedMe on Omniglot took its second-best point (0.1 and 0.01), as the best diverged with seed 2. Per-FedAvg
(HF) is the exception. On CIFAR-100 it has its third point after 500 steps, as both finalists diverged with seed 10;
with 50 and 100 clients that one diverges too, in five of six runs. On Omniglot its finalist (0.01 and 0.005) diverged
with all three seeds, so it has the next point of the grid (0.1 and 0.001), which diverges with one. No further point
was run in full. pFedHN and pFedHN-PC were tuned on CIFAR-100 only to see [what the paper's search would
choose](#runs-that-jump); the table does not use it.

The baselines of CIFAR-100 were tuned with a version whose linear layer, by our estimate, got one minibatch in 200,000
wrong (a race between two copies on the GPU). This is fixed; the runs of CIFAR-100 and Omniglot in the tables were
made later, and networks with ten classes were never affected. Per-FedAvg's grid was run again for 1,000 steps: the
best three are the same, but 0.005 and 0.005 comes first among them, possibly by chance; they were not run in full
again."""


def tuning_section(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every point that was tried, from the files that `pfedhn tune` writes."""
    if not records:
        return ["No tuning is stored yet."]
    parts = []
    for record in records:
        heading = f"### {record['experiment']}"
        if heading not in parts:
            parts.append(heading)
        for method, found in record["methods"].items():
            names = list(found["points"][0]["rates"])
            stages = {
                stage: next(point[stage]["steps"] for point in found["points"] if point[stage])
                for stage in ("first", "finals")
                if any(point[stage] for point in found["points"])
            }
            lines = [[*names, *(f"{steps:,} steps" for steps in stages.values()), ""]]
            for point in found["points"]:
                rates = [_value_text(point["rates"][name]) for name in names]
                lines.append([*rates, *(score_text(point[stage]) for stage in stages), "chosen" * point["chosen"]])
            seeds = ", ".join(map(str, found["seeds"]))
            parts.append(f"{display_name(method)}, validation accuracy over samples (seeds {seeds}):")
            parts.append(markdown(lines))
    return parts


def score_text(stage: Mapping[str, Any] | None) -> str:
    if stage is None:
        return ""
    return "diverged" if stage["score"] is None else f"{100 * stage['score']:.2f}"


STORED_TEXT = """\
## How a result is stored and rerun

`results/` has a `.jsonl` file for each table: a line with the experiment, then a line for each run. A run's line
holds every field of its cell, every setting of the method, seed, command, commit, device, versions, precision and
whether it was deterministic, wall time, bytes, the checksum of the split, scores at the chosen round with each
client's number of correct examples and of examples, and the learning curve. [Experiments](experiments.md#resultjson)
describes the fields.

```sh
pfedhn run table1-cifar10 --out runs/table1-cifar10                               # on a GPU
pfedhn report runs/table1-cifar10 --export results/table1-cifar10.jsonl           # at any time: what is finished
make results                                                                      # this page and its figures
pfedhn report results                                                             # the same as tables and figures
```

A `.jsonl` file that was made on another machine goes in the same way: `pfedhn report FILE.jsonl --export ...`.

To check a cell, take `command` from its line and run it at its `commit` with an `--out` of its own. If
`environment.deterministic` is true, the same device and versions give the same bits: the same correct examples of
every client and the same losses. Otherwise the order of sums on a GPU may differ, and the result differs about as
much as that of another seed. Steps and bytes of LG-FedAvg include the FedAvg run that it starts from. The commits
`3c43e209` and `4e9ed78c`, which lines of Per-FedAvg (HF), of the rivals of pFedHN-S and of
`benchmarks/results/h200-float32.jsonl` name, are not in this history: `8e1975b` has what they had (the kernels came in
with `7edb4e7`), with later block sizes, and its tuner no longer takes `--precision ieee`.

`results/jumps/` has what `tools/jumps.py` wrote, `results/checks/` the runs and comparisons that the text above
quotes and no table holds: runs on a CPU, Per-FedAvg's grid, runs of its Hessian-free form that diverged, FedAvg and
Ditto with all that pFedHN-S has, and what `tools/same_seed.py` found about runs made twice."""


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


def pictured(report: Report) -> dict[Column, str]:
    """The data sets and numbers of clients that a run is stored of, with the names of their figures' files."""
    columns = dict.fromkeys(entry.column for entry in _finished(report))
    return {(dataset, clients): f"results-{dataset}-{clients}" for dataset, clients in columns}


def draw(every: Sequence[Report]) -> dict[str, bytes]:
    """Figures for light and for dark pages: accuracy against steps for every method, against bytes for the best."""
    figures = {}
    for ending, is_dark in (("", False), ("-dark", True)):
        for report in every:
            for column, name in pictured(report).items():
                figure = draw_curves(compared(report), column)
                assert figure is not None
                figures[f"{name}{ending}.svg"] = to_svg(figure, is_dark)
        if places := raced(every):
            figures[f"{TRAFFIC}{ending}.svg"] = to_svg(draw_traffic(places, said_of_bytes(every)), is_dark)
    return figures


TRAFFIC = "results-bytes"
RACED: tuple[Column, ...] = (("cifar10", 50), ("cifar100", 50))  # where all methods are run


def raced(every: Sequence[Report]) -> list[tuple[Report, Column, str]]:
    """The columns of the figure of accuracy against bytes that have several methods, with their names."""
    return [
        (compared(report), column, f"{column_name(column)} clients")
        for report in every
        for column in report.columns
        if column in RACED and len(best_of(compared(report), column)) > 1
    ]


def said_of_bytes(every: Sequence[Report]) -> str:
    """What to see in the figure of accuracy against bytes."""
    early, needed = [], []
    for report, column, _ in raced(every):
        name = NAMES[column[0]]
        lines = best_of(report, column)
        whole = max(max(mean_line(entry)) for entry in lines)
        first = max(lines, key=lambda entry: accuracy_at(entry, whole / 10))
        early.append(f"{display_name(first.label)} ({accuracy_at(first, whole / 10):.1f} % on {name})")
        stronger, paper = report.entry("pfedhn-plus", column), report.entry("pfedhn", column)
        if stronger is None or paper is None or not stronger.results or (goal := paper.test()) is None:
            continue
        size = megabytes_to(stronger, goal.mean)
        if size is not None:
            needed.append(f"{size:.0f} of {max(mean_line(paper)):.0f} MB on {name}")
    text = f"With a tenth of the bytes, before any fine-tuning, ahead of all are {' and '.join(early)}."
    if needed:
        mine, theirs = display_name("pfedhn-plus"), display_name("pfedhn")
        text += f" {mine}, our recipe (thick), is where the paper's {theirs} ends after {' and '.join(needed)}."
    return text


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


def read_ladder(results: Path) -> Finding | None:
    """What the ablation on CIFAR-10 shows; None while it has no stored run."""
    file = results / "ablation-cifar10.jsonl"
    found = findings(read_file(file)) if file.exists() else []
    return next((finding for finding in found if finding.figures), None)


README_OPENING = """\
Table 1 of the paper, run again: its eight methods by its own recipe, *our* stronger recipe of pFedHN (pFedHN+ and
pFedHN+-PC; FT: with fine-tuning; pFedHN-S: on top of a shared model), and baselines that the paper does not have. From
the [results](docs/results.md):"""


def read_tuning(folder: Path) -> list[dict[str, Any]]:
    records = []
    for file in sorted(folder.glob("tuning-*.json"), key=lambda file: file.stem):
        try:
            record = json.loads(file.read_text())
            tuning_section([record])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UserError(f"{file} is no record of `pfedhn tune` ({type(error).__name__}: {error}).") from None
        records.append(record)
    return records


def build(results: Path, docs: Path, readme: Path) -> None:
    reports, notes = read_results(results), (results / "notes.md").read_text()
    figures = draw(reports)
    for file in (docs / "figures").glob("results-*.*"):
        if file.name not in figures:
            file.unlink()
    for name, content in figures.items():
        write_atomically(docs / "figures" / name, content)
    write_atomically(docs / "results.md", summary(reports).encode())
    write_atomically(docs / "results-log.md", page(reports, notes, read_tuning(results)).encode())
    write_atomically(results / "results.csv", table_of_runs(results).encode())
    block = readme_block(reports, read_ladder(results))
    write_atomically(readme, README_BLOCK.sub(lambda _: block, readme.read_text()).encode())


if __name__ == "__main__":
    try:
        build(ROOT / "results", ROOT / "docs", ROOT / "README.md")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
