"""Appendix C: does it help to bound the hypernetwork's Lipschitz constant, as Theorem 1 suggests?"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.report.pairs import Difference, difference, interval_text
from pfedhn.studies import drawing
from pfedhn.studies.study import Found, Study, known, on_digits, setting, varied

CLIENTS = (10, 50, 100)
PAPER = {
    (False, 10): (90.83, 1.56),
    (False, 50): (88.38, 0.29),
    (False, 100): (87.97, 0.70),
    (True, 10): (90.94, 2.18),
    (True, 50): (87.02, 0.22),
    (True, 100): (85.30, 1.81),
}
NAMES = {False: "without", True: "with spectral normalization"}


def draw(found: Found) -> Finding:
    kinds: dict[tuple[str, bool], list[Entry]] = {}
    alike: dict[tuple[str, int], list[Entry]] = {}
    for entry in found.entries:
        alike.setdefault((entry.cell.method, entry.cell.clients), []).append(entry)
    entries = [entry for pair in alike.values() for entry in drawing.on_common_seeds(pair)]
    for entry in sorted(entries, key=lambda entry: entry.cell.clients):
        kinds.setdefault((entry.cell.method, setting(entry.cell, "spectral_norm")), []).append(entry)
    lines = [["method", "clients", "spectral normalization", "accuracy", "paper", "seeds"]]
    for (method, is_on), of_kind in kinds.items():
        for entry in of_kind:
            paper = PAPER.get((is_on, entry.cell.clients)) if method == "pfedhn" and not found.is_small else None
            first = [entry.label, str(entry.cell.clients), "yes" if is_on else "no"]
            accuracy = drawing.text(drawing.accuracy(entry))
            lines.append([*first, accuracy, drawing.paper_text(paper), drawing.seeds_of(entry)])
    said = [
        f"{gap.mean:+.1f} points with {clients} clients ({interval_text(gap, digits=1)})"
        for clients, gap in differences(kinds, "pfedhn").items()
    ]
    return Finding(
        found.study.name,
        found.title,
        "Theorem 1 suggests to bound the hypernetwork's Lipschitz constant; the paper sees no gain from it. Here every "
        "matrix divided by its largest singular value changes pFedHN, seed against the same seed, by "
        f"{', '.join(said) or 'nothing known yet'}; in brackets 95 % intervals.",
        [(lines, drawing.caption(entries))],
        {"": partial(picture, found.title, kinds, {} if found.is_small else PAPER)},
    )


def differences(kinds: Mapping[tuple[str, bool], list[Entry]], method: str) -> dict[int, Difference]:
    """What normalization adds, by the number of clients."""
    named = {
        (is_on, entry.cell.clients): entry
        for (name, is_on), entries in kinds.items()
        for entry in entries
        if name == method and entry.results
    }
    both = sorted(clients for is_on, clients in named if is_on and (False, clients) in named)
    found = {clients: difference(named[True, clients], named[False, clients]) for clients in both}
    return {clients: gap for clients, gap in found.items() if gap is not None}


def picture(
    title: str,
    kinds: Mapping[tuple[str, bool], list[Entry]],
    paper: Mapping[tuple[bool, int], tuple[float, float]],
) -> Any:
    figure, axes = drawing.titled(7.0, 4.2, title)
    counts = sorted({entry.cell.clients for entries in kinds.values() for entry in entries})
    for number, ((method, is_on), entries) in enumerate(kinds.items()):
        shift = 0.09 * (number - (len(kinds) - 1) / 2)
        places = [counts.index(entry.cell.clients) + shift for entry in entries]
        means = [summary for entry in entries if (summary := drawing.accuracy(entry)) is not None]
        label, color = f"{entries[0].label} {NAMES[is_on]}", drawing.COLORS[number]
        drawing.errorbar(axes, places, means, color, label, linestyle="none", marker=drawing.MARKERS[number])
        if method == "pfedhn":
            known = [
                (place, paper[is_on, e.cell.clients])
                for place, e in zip(places, entries, strict=True)
                if (is_on, e.cell.clients) in paper
            ]
            axes.scatter([p + 0.035 for p, _ in known], [m for _, (m, _) in known], marker="x", color=color, s=45)
    if paper:
        axes.scatter([], [], marker="x", color=drawing.PAPER, s=45, label=drawing.PAPER_LABEL)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlim(-0.5, len(counts) - 0.5)
    drawing.finished_axes(axes, "clients", "test accuracy in %")
    return figure


def small(cell: Cell) -> Cell:
    return replace(on_digits(cell), clients={10: 6, 50: 12, 100: 18}[cell.clients])


STUDY = Study(
    "spectral-norm",
    "Appendix C: spectral normalization of the hypernetwork (CIFAR-10)",
    tuple(
        varied(table1_cell("cifar10", method, clients), spectral_norm=is_on)
        for method in known("pfedhn", "pfedhn-plus")
        for is_on in (False, True)
        for clients in CLIENTS
    ),
    draw,
    small=small,
)
