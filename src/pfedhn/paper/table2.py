"""Section 5.2, Table 2: clients of three sizes from one hypernetwork.

75 clients, 25 of each size. Methods that average weights train the three groups apart. What one embedding knows is
shown by serving each client all three sizes from it, also those that it never trained. Clients that go on to another
size during training are a cell more: the paper says that capacities change with time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry, Summary, display_name, summarize
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.finished import Finished
from pfedhn.studies.study import Found, Study, known, on_digits, setting

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
        for method in known("pfedhn", "pfedhn-pc", "pfedhn-plus", "pfedhn-plus-pc"):
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


def sizes_of(cell: Cell) -> Sequence[str]:
    assert cell.sizes is not None
    return cell.sizes


def group(cell: Cell, size: str, step: int = 0) -> list[int]:
    """The clients of one size after so many steps, by their place in the run's results."""
    sizes = sizes_of(cell)
    stage = 0 if cell.resize_every is None else max(0, step - 1) // cell.resize_every
    mine = [i for i in range(cell.clients) if sizes[(i * len(sizes) // cell.clients + stage) % len(sizes)] == size]
    return list(range(len(mine))) if cell.part is not None else mine


def row(found: Found, entries: Sequence[Entry]) -> list[Summary | None]:
    """Accuracy of each size, of one run for all sizes or of one for each.

    A client that goes on to other sizes counts for the size that it has in the chosen round.
    """
    sizes = sizes_of(entries[0].cell)
    if entries[0].cell.resize_every is not None:
        (moving,) = entries
        return [
            summarize(
                _mean(moving.client_accuracy(seed)[group(moving.cell, size, result.chosen_step)]) / 100
                for seed, result in moving.results.items()
            )
            for size in sizes
        ]
    by_size = {entry.cell.part: entry for entry in entries}
    values: list[Summary | None] = []
    for size in sizes:
        entry = by_size.get(size) or by_size.get(None)
        values.append(None if entry is None else drawing.accuracy(entry, group(entry.cell, size)))
    return values


def _mean(accuracies: Sequence[float | None] | NDArray[numpy.float64]) -> float:
    return 100 * float(numpy.nanmean(numpy.array(accuracies, dtype=numpy.float64)))


def draw(found: Found) -> Finding:
    rows: dict[tuple[str, str, bool], list[Entry]] = {}
    for entry in found.entries:
        rows.setdefault((entry.cell.dataset, entry.cell.method, entry.cell.resize_every is not None), []).append(entry)
    lines = [["data set", "method", *LETTERS, "all", "seeds"]]
    for (dataset, method, moves), entries in rows.items():
        name = f"{entries[0].label}, sizes change" if moves else entries[0].label
        whole = drawing.text(drawing.accuracy(entries[0])) if entries[0].cell.part is None else ""
        paper = None if moves or found.is_small else PAPER.get((dataset, method))
        texts = [
            "\n".join([drawing.text(value), *([f"paper {drawing.paper_text(paper[i])}"] if paper else [])])
            for i, value in enumerate(row(found, entries))
        ]
        lines.append([dataset, name, *texts, whole, drawing.seeds_of(entries[0])])
    served = served_table(found)
    about = " All: every client with the size it has."
    if any(moves for _, _, moves in rows):
        about += f" Sizes change: every {RESIZE_EVERY} steps each client goes on to the next size."
    tables = [(lines, drawing.caption(found.entries, about))]
    if len(served) > 1:
        tables.append((served, "Accuracy in % of clients that trained one size, or all in turn, with each size."))
    return Finding(found.study.name, found.title, sentence(found, rows), tables, {"": partial(picture, found, rows)})


def sentence(found: Found, rows: Mapping[tuple[str, str, bool], list[Entry]]) -> str:
    def means(*key: Any) -> list[float]:
        return [summary.mean for summary in row(found, rows[key]) if summary is not None] if key in rows else []

    said = []
    for dataset in dict.fromkeys(name for name, _, _ in rows):
        ours, moved, stronger = (
            means(dataset, *key) for key in (("pfedhn", False), ("pfedhn", True), ("pfedhn-plus", False))
        )
        others = {
            entries[0].label: [summary.mean for summary in row(found, entries) if summary is not None]
            for (name, method, moves), entries in rows.items()
            if name == dataset and method in BASELINES
        }
        if len(ours) != len(LETTERS):
            continue
        text = " / ".join(f"{value:.1f}" for value in ours)
        whole = {name: values for name, values in others.items() if len(values) == len(LETTERS)}
        if whole:
            best = max(whole, key=lambda name: sum(whole[name]))
            missing = [label for label in map(display_name, BASELINES) if label not in whole]
            unknown = f"; without a number for every size: {', '.join(missing)}" if missing else ""
            text += f" (best of the others: {best}, {' / '.join(f'{value:.1f}' for value in whole[best])}{unknown})"
        if moved:
            text += f", and {' / '.join(f'{value:.1f}' for value in moved)} where clients change their size"
        if stronger:
            text += f"; pFedHN+ {' / '.join(f'{value:.1f}' for value in stronger)}"
        said.append(f"On {dataset}, pFedHN has {text}.")
    return (
        "One hypernetwork serves small, medium and large clients (S / M / L). Methods that average weights train three "
        f"groups apart, each of them with as many steps as pFedHN has for all three. {' '.join(said) or 'Not run yet.'}"
    )


def served_table(found: Found) -> list[list[str]]:
    lines = [["data set", "method", "trained as", *(f"served {letter}" for letter in LETTERS)]]
    for entry in found.entries:
        tables = [values["served"] for values in found.analyses(entry.cell).values() if "served" in values]
        if not tables:
            continue
        sizes = sizes_of(entry.cell)
        groups = {letter: group(entry.cell, size) for letter, size in zip(LETTERS, sizes, strict=True)}
        if entry.cell.resize_every is not None:
            groups = {"all in turn": list(range(entry.cell.clients))}
        for letter, members in groups.items():
            means = [summarize(_mean([table[other][i] for i in members]) for table in tables) for other in sizes]
            lines.append([entry.cell.dataset, entry.label, letter, *(drawing.text(mean, 1) for mean in means)])
    return lines


def picture(found: Found, rows: Mapping[tuple[str, str, bool], list[Entry]]) -> Any:
    datasets = list(dict.fromkeys(dataset for dataset, _, _ in rows))
    figure, all_axes = drawing.titled(5.6 * len(datasets) + 0.4, 4.8, found.title, len(datasets), squeeze=False)
    marks = list(dict.fromkeys((method, moves) for _, method, moves in rows))
    for dataset, axes in zip(datasets, all_axes[0], strict=True):
        mine = {key: entries for key, entries in rows.items() if key[0] == dataset}
        for number, ((_, method, moves), entries) in enumerate(mine.items()):
            means = row(found, entries)
            shift = 0.8 * (number - (len(mine) - 1) / 2) / len(mine)
            places = [place + shift for place, mean in enumerate(means) if mean is not None]
            values = [mean for mean in means if mean is not None]
            label = f"{entries[0].label}{', sizes change' if moves else ''}"
            style = {"marker": drawing.MARKERS[marks.index((method, moves)) % 8], "linestyle": "none"}
            if moves:
                style["markerfacecolor"] = "white"
            drawing.errorbar(axes, places, values, drawing.color_of(method, number), label, **style)
            if not moves and not found.is_small and (dataset, method) in PAPER:
                paper = [mean for mean, _ in PAPER[dataset, method]]
                axes.scatter([i + shift for i in range(3)], paper, marker="_", s=90, color=drawing.PAPER, zorder=3)
        if not found.is_small:
            axes.scatter([], [], marker="_", s=90, color=drawing.PAPER, label=drawing.PAPER_LABEL)
        axes.set_xticks(range(3), [f"{letter}" for letter in LETTERS])
        for line in (0.5, 1.5):
            axes.axvline(line, color="#BBBBBB", linewidth=0.8)
        drawing.heading(axes, dataset)
        drawing.finished_axes(axes, "size of a client's network", "test accuracy in %", legend=False)
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
