"""The paper lets one client take part in a round. What do several cost or gain, and how should their updates join?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, setting, varied

SIZES = (5, 10, 25)
NAMES = {"mean": "mean", "sum": "sum", "size": "mean by examples"}  # of the server's rules
DASHES = {"mean": "-", "sum": (0, (4, 1.5)), "size": (0, (1, 1.2))}


def cells() -> tuple[Cell, ...]:
    found = []
    for method in ("pfedhn", "pfedhn-plus"):
        cell = table1_cell("cifar10", method, 50)
        found.append(cell)
        found += [replace(varied(cell, rule=rule), cohort_size=size) for size in SIZES for rule in NAMES]
    return tuple(found)


def size_of(entry: Entry) -> int:
    return entry.cell.cohort_size or 1


def rule_of(entry: Entry) -> str:
    return str(setting(entry.cell, "rule"))


def draw(found: Found) -> Finding:
    methods = drawing.by_method(found.entries)
    columns = {
        "clients per round": lambda entry: str(size_of(entry)),
        "server step": lambda entry: "" if size_of(entry) == 1 else NAMES[rule_of(entry)],
        "accuracy": drawing.accuracy_text,
        "rounds": lambda entry: f"{next(iter(entry.results.values())).rounds:,}",
    }
    shown = [entry for entries in methods.values() for entry in entries]
    return found.finding(
        "All runs have the same communication, so the server takes fewer steps where more clients take part in each. "
        f"{' '.join(sentence(entries) for entries in methods.values())}",
        [drawing.table(shown, columns, " All have the same number of communication steps.")],
        {"": partial(picture, found.title, methods)},
    )


def sentence(entries: Sequence[Entry]) -> str:
    """What several clients per round reach with each rule of the server, and which rule is best."""
    several = [entry for entry in entries if size_of(entry) > 1]
    sizes = sorted({size_of(entry) for entry in several})
    rules = {rule: [entry for entry in several if rule_of(entry) == rule] for rule in NAMES}
    complete = {rule: mine for rule, mine in rules.items() if mine and len(mine) == len(sizes)}
    text = f"{entries[0].label}: " + "; ".join(
        f"{drawing.accuracy_text(entry, 1)} % with one client per round" for entry in entries if size_of(entry) == 1
    )
    if not complete:
        return f"{text}."
    parts = [
        f"{', '.join(drawing.accuracy_text(entry, 1) for entry in mine)} % where the server takes the {NAMES[rule]}"
        for rule, mine in complete.items()
    ]
    text += f"; with {', '.join(map(str, sizes))} clients, {'; '.join(parts)}"
    best_of = {size: max(drawing.accuracy(entry).mean for entry in several if size_of(entry) == size) for size in sizes}
    best = [rule for rule in complete if all(drawing.accuracy(e).mean == best_of[size_of(e)] for e in complete[rule])]
    return text + (f'. Best for every number is `rule = "{best[0]}"`.' if best else ".")


def picture(title: str, methods: Mapping[str, Sequence[Entry]]) -> Any:
    width = 5.4 * len(methods) + 2.0
    figure, all_axes = drawing.titled(width, 4.6, title, len(methods), squeeze=False)
    sizes = sorted({size_of(entry) for entries in methods.values() for entry in entries})
    for entries, axes in zip(methods.values(), all_axes[0], strict=True):
        for entry in entries:
            size, rule = size_of(entry), rule_of(entry)
            label = "1 client" if size == 1 else f"{size} clients, {NAMES[rule]}"
            style = {"linestyle": DASHES[rule], "linewidth": 1.6}
            drawing.curve(axes, drawing.mean_curve(entry), drawing.COLORS[sizes.index(size) % 8], label, **style)
        heading = f"{entries[0].label}: color is the clients per round, dash the server step"
        drawing.finish(axes, "communication steps (one client taking part once)", drawing.ACCURACY, heading)
    return figure


STUDY = Study("cohort-size", "How many clients per round (CIFAR-10, 50 clients)", cells(), draw)
