"""Appendix C: does it help to bound the hypernetwork's Lipschitz constant, as Theorem 1 suggests?"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import CIFAR10, table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.report.pairs import difference, interval_text
from pfedhn.report.study import Found, Study, on_digits, setting, varied

CLIENTS = (10, 50, 100)
PAPER = {
    False: CIFAR10["pfedhn"],
    True: {10: (90.94, 2.18), 50: (87.02, 0.22), 100: (85.30, 1.81)},
}
NAMES = {False: "without", True: "with spectral normalization"}
Kind = tuple[str, bool]
"""A method, and whether its hypernetwork is normalized."""


def draw(found: Found) -> Finding:
    alike: dict[tuple[str, int], list[Entry]] = {}
    for entry in found.entries:
        alike.setdefault((entry.cell.method, entry.cell.clients), []).append(entry)
    entries = [entry for pair in alike.values() for entry in drawing.on_common_seeds(pair)]
    kinds: dict[Kind, dict[int, Entry]] = {}  # by number of clients
    for entry in sorted(entries, key=lambda entry: entry.cell.clients):
        kind = entry.cell.method, setting(entry.cell, "spectral_norm")
        kinds.setdefault(kind, {})[entry.cell.clients] = entry

    def published(entry: Entry) -> str:
        is_known = entry.cell.method == "pfedhn" and not found.is_small
        paper = PAPER[setting(entry.cell, "spectral_norm")]
        return drawing.paper_text(paper.get(entry.cell.clients) if is_known else None)

    columns = {
        "clients": lambda entry: str(entry.cell.clients),
        "spectral normalization": lambda entry: "yes" if setting(entry.cell, "spectral_norm") else "no",
        "accuracy": drawing.accuracy_text,
        "paper": published,
    }
    shown = [entry for by_clients in kinds.values() for entry in by_clients.values()]
    plain = kinds.get(("pfedhn", False), {})
    said = [
        f"{gap.mean:+.1f} points with {clients} clients ({interval_text(gap, digits=1)})"
        for clients, entry in kinds.get(("pfedhn", True), {}).items()
        if clients in plain and (gap := difference(entry, plain[clients])) is not None
    ]
    return found.finding(
        "Theorem 1 suggests to bound the hypernetwork's Lipschitz constant; the paper sees no gain from it. Here every "
        "matrix divided by its largest singular value changes pFedHN, seed against the same seed, by "
        f"{', '.join(said) or 'nothing known yet'}; in brackets 95 % intervals.",
        [drawing.table(shown, columns)],
        {"": partial(picture, found, kinds)},
    )


def picture(found: Found, kinds: Mapping[Kind, Mapping[int, Entry]]) -> Any:
    figure, axes = drawing.titled(7.0, 4.2, found.title)
    counts = sorted({clients for by_clients in kinds.values() for clients in by_clients})
    for number, ((method, is_on), by_clients) in enumerate(kinds.items()):
        shift = 0.09 * (number - (len(kinds) - 1) / 2)
        places = [counts.index(clients) + shift for clients in by_clients]
        entries, color = list(by_clients.values()), drawing.COLORS[number]
        style = {"linestyle": "none", "marker": drawing.MARKERS[number]}
        drawing.accuracies(axes, places, entries, color, f"{entries[0].label} {NAMES[is_on]}", **style)
        if method == "pfedhn" and not found.is_small:
            known = {
                counts.index(clients) + shift + 0.035: mean
                for clients, (mean, _) in PAPER[is_on].items()
                if clients in by_clients
            }
            axes.scatter(list(known), list(known.values()), marker="x", color=color, s=45)
    if not found.is_small:
        axes.scatter([], [], marker="x", color=drawing.PAPER, s=45, label=drawing.PAPER_LABEL)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlim(-0.5, len(counts) - 0.5)
    drawing.finish(axes, "clients", drawing.ACCURACY)
    return figure


def small(cell: Cell) -> Cell:
    return on_digits(cell, clients={10: 6, 50: 12, 100: 18}[cell.clients])


STUDY = Study(
    "spectral-norm",
    "Appendix C: spectral normalization of the hypernetwork (CIFAR-10)",
    tuple(
        varied(table1_cell("cifar10", method, clients), spectral_norm=is_on)
        for method in ("pfedhn", "pfedhn-plus")
        for is_on in (False, True)
        for clients in CLIENTS
    ),
    draw,
    small=small,
)
