"""Section 5.2, Table 2: clients of three sizes from one hypernetwork.

75 clients, 25 of each size. Methods that average weights train the three groups apart. What one embedding knows is
shown by serving each client all three sizes from it, also those that it never trained. Clients that go on to another
size during training are a cell more: the paper says that capacities change with time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy

from pfedhn.experiments.finished import Finished
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry, Summary, display_name
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, on_digits, setting
from pfedhn.report.tables import number_text

SIZES = ("lenet-s", "lenet-m", "lenet-l")
CLIENTS = 75
RESIZE_EVERY = 500  # ten times in a run
LETTERS = ("S", "M", "L")
PAPER = {
    ("cifar10", "fedavg"): ((36.91, 2.26), (42.09, 2.37), (47.51, 1.97)),
    ("cifar10", "per-fedavg"): ((70.72, 2.57), (72.33, 2.57), (75.13, 0.61)),
    ("cifar10", "pfedme"): ((81.21, 1.23), (84.08, 1.63), (83.15, 2.45)),
    ("cifar10", "lg-fedavg"): ((73.93, 3.65), (53.13, 3.49), (54.72, 2.50)),
    ("cifar10", "pfedhn"): ((85.38, 1.21), (86.92, 1.35), (87.20, 0.76)),
    ("cifar100", "fedavg"): ((9.79, 0.19), (11.76, 1.14), (17.86, 2.42)),
    ("cifar100", "per-fedavg"): ((41.49, 0.91), (43.22, 0.16), (44.03, 1.77)),
    ("cifar100", "pfedme"): ((39.91, 0.81), (41.99, 0.55), (44.93, 1.63)),
    ("cifar100", "lg-fedavg"): ((33.48, 4.83), (29.15, 1.51), (23.01, 1.41)),
    ("cifar100", "pfedhn"): ((48.04, 0.89), (48.66, 1.21), (50.66, 2.70)),
}
BASELINES = ("fedavg", "per-fedavg", "pfedme", "lg-fedavg")


def cells() -> tuple[Cell, ...]:
    found = []
    for dataset in ("cifar10", "cifar100"):
        for method in ("pfedhn", "pfedhn-pc", "pfedhn-plus", "pfedhn-plus-pc"):
            cell = replace(table1_cell(dataset, method, CLIENTS), sizes=SIZES)
            found += [cell] if setting(cell, "personal") else [cell, replace(cell, resize_every=RESIZE_EVERY)]
        for method in BASELINES:
            cell = table1_cell(dataset, method, CLIENTS)
            found += [replace(cell, sizes=SIZES, part=size, model=size) for size in SIZES]
    return tuple(found)


def compute(finished: Finished) -> Mapping[str, Any]:
    """Each client's accuracy with every size, from its one embedding; a personal layer has only the size it trained."""
    run, federation = finished.run, finished.federation
    if finished.cell.part is not None or setting(finished.cell, "personal"):
        return {}
    accuracy: dict[str, list[float]] = {}
    for name, model in run.plan.models.items():
        scores = [
            finished.scores(model, run.personal_weights(client, architecture=name), client)
            for client in range(federation.num_clients)
        ]
        accuracy[name] = [correct / count if count else float("nan") for _, correct, count in scores]
    return {"served": accuracy}


def group(cell: Cell, size: str, step: int = 0) -> list[int]:
    """The clients of one size after so many steps, by their place in the run's results."""
    sizes = cell.sizes or SIZES
    stage = 0 if cell.resize_every is None else max(0, step - 1) // cell.resize_every
    mine = [i for i in range(cell.clients) if sizes[(i * len(sizes) // cell.clients + stage) % len(sizes)] == size]
    return list(range(len(mine))) if cell.part is not None else mine


class Row(NamedTuple):
    """One run for all sizes, or one for each."""

    dataset: str
    method: str
    moves: bool  # whether clients go on to other sizes
    entries: list[Entry]
    means: list[Summary | None]  # accuracy of each size; a client that moves counts for its size in the chosen round

    @property
    def label(self) -> str:
        return f"{self.entries[0].label}, sizes change" if self.moves else self.entries[0].label

    @property
    def published(self) -> Sequence[tuple[float, float]] | None:
        return None if self.moves else PAPER.get((self.dataset, self.method))

    @property
    def known(self) -> list[float]:
        return [mean.mean for mean in self.means if mean is not None]


def rows_of(entries: Sequence[Entry]) -> list[Row]:
    groups: dict[tuple[str, str, bool], list[Entry]] = {}
    for entry in entries:
        key = entry.cell.dataset, entry.cell.method, entry.cell.resize_every is not None
        groups.setdefault(key, []).append(entry)
    sizes = entries[0].cell.sizes or SIZES
    return [Row(*key, mine, [accuracy(mine, size) for size in sizes]) for key, mine in groups.items()]


def accuracy(entries: Sequence[Entry], size: str) -> Summary | None:
    """Over the clients that have a size in the chosen round; None if no run has this size."""
    entry = next((entry for entry in entries if entry.cell.part in (size, None)), None)
    if entry is None:
        return None
    groups = {seed: group(entry.cell, size, result.chosen_step) for seed, result in entry.results.items()}
    return drawing.over_seeds(float(numpy.nanmean(entry.client_accuracy(seed)[groups[seed]])) for seed in groups)


def draw(found: Found) -> Finding:
    rows = rows_of(found.entries)
    lines = [["data set", "method", *LETTERS, "all", "seeds"]]
    for row in rows:
        first = row.entries[0]
        whole = drawing.accuracy_text(first) if first.cell.part is None else ""
        paper = None if found.is_small else row.published
        texts = [
            "\n".join([number_text(mean), *([f"paper {drawing.paper_text(paper[i])}"] if paper else [])])
            for i, mean in enumerate(row.means)
        ]
        lines.append([row.dataset, row.label, *texts, whole, str(len(first.results))])
    about = " All: every client with the size it has."
    if any(row.moves for row in rows):
        about += f" Sizes change: every {RESIZE_EVERY} steps each client goes on to the next size."
    tables = [(lines, drawing.caption(found.entries, about))]
    served = served_table(found)
    if len(served) > 1:
        tables.append((served, "Accuracy in % of clients that trained one size, or all in turn, with each size."))
    said = [text for dataset in dict.fromkeys(row.dataset for row in rows) if (text := sentence(rows, dataset))]
    return found.finding(
        "One hypernetwork serves small, medium and large clients (S / M / L). Methods that average weights train three "
        "groups apart, each of them with as many steps as pFedHN has for all three. "
        f"{' '.join(said) or 'Not run yet.'}",
        tables,
        {"": partial(picture, found, rows)},
    )


def sentence(rows: Sequence[Row], dataset: str) -> str:
    """What pFedHN has on a data set, beside the best of the others and its variants."""
    known = {(row.method, row.moves): row.known for row in rows if row.dataset == dataset}

    def text(values: Sequence[float]) -> str:
        return " / ".join(f"{value:.1f}" for value in values)

    ours = known.get(("pfedhn", False), [])
    if len(ours) != len(LETTERS):
        return ""
    said = text(ours)
    whole = {method: known.get((method, False), []) for method in BASELINES}
    whole = {method: values for method, values in whole.items() if len(values) == len(LETTERS)}
    if whole:
        best = max(whole, key=lambda method: sum(whole[method]))
        missing = [display_name(method) for method in BASELINES if method not in whole]
        unknown = f"; without a number for every size: {', '.join(missing)}" if missing else ""
        said += f" (best of the others: {display_name(best)}, {text(whole[best])}{unknown})"
    if moved := known.get(("pfedhn", True)):
        said += f", and {text(moved)} where clients change their size"
    if stronger := known.get(("pfedhn-plus", False)):
        said += f"; pFedHN+ {text(stronger)}"
    return f"On {dataset}, pFedHN has {said}."


def served_table(found: Found) -> list[list[str]]:
    lines = [["data set", "method", "trained as", *(f"served {letter}" for letter in LETTERS)]]
    for entry, numbers in found.computed:
        tables = [values["served"] for values in numbers.values() if "served" in values]
        if not tables:
            continue
        sizes = entry.cell.sizes or SIZES
        groups = {letter: group(entry.cell, size) for letter, size in zip(LETTERS, sizes, strict=True)}
        if entry.cell.resize_every is not None:
            groups = {"all in turn": list(range(entry.cell.clients))}
        for letter, members in groups.items():
            line = [entry.cell.dataset, entry.label, letter]
            for size in sizes:
                served = [100 * numpy.array(table[size], dtype=numpy.float64)[members] for table in tables]
                line.append(number_text(drawing.over_seeds(float(numpy.nanmean(part)) for part in served), 1))
            lines.append(line)
    return lines


def picture(found: Found, rows: Sequence[Row]) -> Any:
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    figure, all_axes = drawing.titled(5.6 * len(datasets) + 0.4, 4.8, found.title, len(datasets), squeeze=False)
    marks = list(dict.fromkeys((row.method, row.moves) for row in rows))
    for dataset, axes in zip(datasets, all_axes[0], strict=True):
        mine = [row for row in rows if row.dataset == dataset]
        for number, row in enumerate(mine):
            shift = 0.8 * (number - (len(mine) - 1) / 2) / len(mine)
            places = [place + shift for place, mean in enumerate(row.means) if mean is not None]
            means = [mean for mean in row.means if mean is not None]
            style = {"marker": drawing.MARKERS[marks.index((row.method, row.moves)) % 8], "linestyle": "none"}
            if row.moves:
                style["markerfacecolor"] = "white"
            drawing.errorbar(axes, places, means, drawing.color_of(row.method, number), row.label, **style)
            if row.published and not found.is_small:
                paper = [mean for mean, _ in row.published]
                axes.scatter([i + shift for i in range(3)], paper, marker="_", s=90, color=drawing.PAPER, zorder=3)
        if not found.is_small:
            axes.scatter([], [], marker="_", s=90, color=drawing.PAPER, label=drawing.PAPER_LABEL)
        axes.set_xticks(range(3), LETTERS)
        for line in (0.5, 1.5):
            axes.axvline(line, color="#BBBBBB", linewidth=0.8)
        drawing.finish(axes, "size of a client's network", drawing.ACCURACY, dataset, legend=False)
        axes.grid(axis="x", visible=False)
    named = drawing.legend_of(all_axes[0])
    figure.legend(named.values(), named, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def small(cell: Cell) -> Cell:
    """Both data sets become the digits; with the methods' own rates, so that the two are one."""
    reduced = on_digits(cell)
    return replace(reduced, settings={name: value for name, value in reduced.settings.items() if "lr" not in name})


STUDY = Study(
    "table2",
    "Table 2: 75 clients of three sizes, one hypernetwork",
    cells(),
    draw,
    compute,
    small,
)
