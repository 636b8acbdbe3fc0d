"""The paper lets one client take part in a round. What do several cost or gain, and how should their updates join?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry, Summary
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.study import Found, Study, known, setting, varied
from pfedhn.studies.sweep import mean_curve

SIZES = (5, 10, 25)
RULES = ("mean", "sum", "size")
NAMES = {"mean": "mean", "sum": "sum", "size": "mean by examples"}


def cells() -> tuple[Cell, ...]:
    found = []
    for method in known("pfedhn", "pfedhn-plus"):
        cell = table1_cell("cifar10", method, 50)
        found.append(cell)
        found += [replace(varied(cell, rule=rule), cohort_size=size) for size in SIZES for rule in RULES]
    return tuple(found)


def size_of(cell: Cell) -> int:
    return cell.cohort_size or 1


def called(entry: Entry) -> str:
    size = size_of(entry.cell)
    return "1 client" if size == 1 else f"{size} clients, {NAMES[setting(entry.cell, 'rule')]}"


def draw(found: Found) -> Finding:
    by_method: dict[str, list[Entry]] = {}
    for entry in found.entries:
        by_method.setdefault(entry.cell.method, []).append(entry)
    by_method = {method: drawing.on_common_seeds(entries) for method, entries in by_method.items()}
    shown = [entry for entries in by_method.values() for entry in entries]
    lines = [["method", "clients per round", "server step", "accuracy", "rounds", "seeds"]]
    for entry in shown:
        first = next(iter(entry.results.values()))
        rule = "" if size_of(entry.cell) == 1 else NAMES[setting(entry.cell, "rule")]
        numbers = [drawing.text(drawing.accuracy(entry)), f"{first.rounds:,}", drawing.seeds_of(entry)]
        lines.append([entry.label, str(size_of(entry.cell)), rule, *numbers])
    return Finding(
        found.study.name,
        found.title,
        "All runs have the same communication, so the server takes fewer steps where more clients take part in each. "
        f"{' '.join(sentence(entries) for entries in by_method.values())}",
        [(lines, drawing.caption(shown, " All have the same number of communication steps."))],
        {"": partial(picture, found.title, by_method)},
    )


def sentence(entries: Sequence[Entry]) -> str:
    """What several clients per round reach, by what the server does with their updates, and which of these is best."""
    known = {
        (size_of(entry.cell), setting(entry.cell, "rule")): summary
        for entry in entries
        if (summary := drawing.accuracy(entry)) is not None
    }
    sizes = sorted({size for size, _ in known if size > 1})
    alone = [
        f"{drawing.text(summary, 1)} % with one client per round" for (size, _), summary in known.items() if size == 1
    ]
    parts = [
        f"{', '.join(drawing.text(known[size, rule], 1) for size in sizes)} % where the server takes the {NAMES[rule]}"
        for rule in RULES
        if sizes and all((size, rule) in known for size in sizes)
    ]
    text = f"{entries[0].label}: {'; '.join(alone)}"
    if parts:
        text += f"; with {', '.join(map(str, sizes))} clients, {'; '.join(parts)}"
    best = [rule for rule in RULES if all(_is_best(known, size, rule) for size in sizes)]
    return text + (f'. Best for every number is `rule = "{best[0]}"`.' if parts and best else ".")


def _is_best(known: Mapping[tuple[int, str], Summary], size: int, rule: str) -> bool:
    here = {other: summary.mean for (number, other), summary in known.items() if number == size}
    return rule in here and here[rule] == max(here.values())


def picture(title: str, by_method: Mapping[str, Sequence[Entry]]) -> Any:
    width = 5.4 * len(by_method) + 2.0
    figure, all_axes = drawing.titled(width, 4.6, title, len(by_method), squeeze=False)
    sizes = sorted({size_of(entry.cell) for entries in by_method.values() for entry in entries})
    for entries, axes in zip(by_method.values(), all_axes[0], strict=True):
        for entry in entries:
            curve = mean_curve(entry)
            color = drawing.COLORS[sizes.index(size_of(entry.cell)) % 8]
            dash = {"mean": "-", "sum": (0, (4, 1.5)), "size": (0, (1, 1.2))}[setting(entry.cell, "rule")]
            style = {"color": color, "linestyle": dash, "linewidth": 1.6, "label": called(entry)}
            axes.plot(list(curve), list(curve.values()), **style)
        drawing.heading(axes, f"{entries[0].label}: color is the clients per round, dash the server step")
        drawing.finished_axes(axes, "communication steps (one client taking part once)", "test accuracy in %")
    return figure


STUDY = Study(
    "cohort-size",
    "How many clients per round (CIFAR-10, 50 clients)",
    cells(),
    draw,
)
