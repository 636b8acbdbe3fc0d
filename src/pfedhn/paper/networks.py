"""Larger networks than the paper's: a ResNet in LeNet's place, and adapters of a ResNet that was trained before.

Both are experiments of the package; here is what their results show, on the page of networks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from pfedhn.paper import drawing
from pfedhn.paper.experiments import EXPERIMENTS, table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.figures import make_logarithmic
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study

NAMES = {"resnet18": "ResNet-18", "lenet": "LeNet"}
TABLE1 = table1_cell("cifar100", "pfedhn", 50)  # LeNet with all the steps of the paper
DASHES = {"resnet18": "-", "lenet": (0, (4, 1.5))}


def named(entry: Entry) -> Entry:
    """With the head of its hypernetwork in its label."""
    head = entry.cell.settings.get("head")
    return entry if head is None else replace(entry, label=f"{entry.label} ({head} head)")


def gigabytes(entry: Entry) -> float:
    """What a whole run sends, both ways."""
    return max((result.bytes_down + result.bytes_up) / 1e9 for result in entry.results.values())


def unadapted(entry: Entry) -> str:
    """What clients have before they adapt, where they do."""
    before = [result.unadapted.test for result in entry.results.values() if result.unadapted is not None]
    return f"{100 * fmean(scores.client_mean or 0 for scores in before):.2f}" if before else ""


COLUMNS = {
    "accuracy": drawing.accuracy_text,
    "before adaptation": unadapted,
    "GB, both ways": lambda entry: f"{gigabytes(entry):.2f}",
}


def ranking(entries: Sequence[Entry]) -> str:
    """Every method and its accuracy, the best first."""
    ordered = sorted(entries, key=lambda entry: -drawing.accuracy(entry).mean)
    return ", ".join(f"{entry.label} {drawing.accuracy_text(entry, 1)}" for entry in ordered)


def draw_resnet(found: Found) -> Finding:
    entries = [named(entry) for entry in found.entries if entry.cell != TABLE1]
    by_network = {model: mine for model in NAMES if (mine := [entry for entry in entries if entry.cell.model == model])}
    ordered = [entry for mine in by_network.values() for entry in mine]
    said = [f"{NAMES[model]}: {ranking(mine)}." for model, mine in by_network.items()]
    lines, caption = drawing.table(
        ordered,
        COLUMNS,
        " Rates of LeNet are those of Table 1; every ResNet has the same one, which was not tuned. Before adaptation: "
        "what the server's model has at the chosen round.",
    )
    networks = ["network", *(NAMES[entry.cell.model] for entry in ordered)]
    return found.finding(
        f"Test accuracy in % after {entries[0].cell.steps:,} communication steps. {' '.join(said)}"
        f"{at_equal_bytes(found, entries)}",
        [([[network, *line] for network, line in zip(networks, lines, strict=True)], caption)],
        {"": partial(picture, found.title, entries)},
    )


def at_equal_bytes(found: Found, entries: Sequence[Entry]) -> str:
    """What each has for the bytes of LeNet's whole run of Table 1."""
    lenet = next((entry for entry in found.entries if entry.cell == TABLE1), None)
    resnet = next((e for e in entries if (e.cell.model, e.cell.method) == ("resnet18", "pfedhn")), None)
    if resnet is None or lenet is None:
        return ""
    budget, per_step = gigabytes(lenet), gigabytes(resnet) / resnet.cell.steps
    curve = drawing.mean_curve(resnet)
    step = max(step for step in curve if step * per_step <= budget)
    return (
        f" At equal bytes it is otherwise: for the {budget:.1f} GB of LeNet's {lenet.cell.steps:,} steps in Table 1, "
        f"where pFedHN has {drawing.accuracy_text(lenet, 1)} %, a ResNet takes {int(budget / per_step)} steps, and "
        f"after {step} of them pFedHN has {curve[step]:.1f} %."
    )


def picture(title: str, entries: Sequence[Entry]) -> Any:
    figure, axes = drawing.titled(9.0, 4.8, title)
    for number, entry in enumerate(entries):
        size = gigabytes(entry) / entry.cell.steps
        if not size:  # nothing is sent
            continue
        sent = {step * size: accuracy for step, accuracy in drawing.mean_curve(entry).items() if step}
        color, label = drawing.color_of(entry.cell.method, number), f"{NAMES[entry.cell.model]}, {entry.label}"
        drawing.curve(axes, sent, color, label, linewidth=1.8, linestyle=DASHES[entry.cell.model])
    make_logarithmic(axes, "x")
    heading = "accuracy of what the server sends, as it trains"
    drawing.finish(axes, "gigabytes sent, both ways", drawing.ACCURACY, heading)
    return figure


def draw_adapters(found: Found) -> Finding:
    entries = list(map(named, found.entries))
    about = " All seeds share one backbone. One rate for every method, which was not tuned."
    return found.finding(
        f"Test accuracy in % after {entries[0].cell.steps:,} communication steps: {ranking(entries)}.",
        [drawing.table(entries, COLUMNS, about)],
    )


DRAWN = {
    name: Study(name, EXPERIMENTS[name].title, (*EXPERIMENTS[name].cells, *more), draw, seeds=EXPERIMENTS[name].seeds)
    for name, more, draw in (("resnet-cifar100", (TABLE1,), draw_resnet), ("adapters-cifar100", (), draw_adapters))
}
"""Drawn from experiments that are run by their own name."""
