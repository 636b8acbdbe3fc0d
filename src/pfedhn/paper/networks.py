"""Larger networks than the paper's: a ResNet in LeNet's place, and adapters of a ResNet that was trained before.

Both are experiments of the package; here is what their results show, on the page of networks.
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from pfedhn.paper.experiments import EXPERIMENTS, table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.figures import make_logarithmic
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.study import Found, Study
from pfedhn.studies.sweep import mean_curve

NAMES = {"resnet18": "ResNet-18", "lenet": "LeNet"}
TABLE1 = table1_cell("cifar100", "pfedhn", 50)  # LeNet with all the steps of the paper
DASHES = {"resnet18": "-", "lenet": (0, (4, 1.5))}


def name_of(entry: Entry) -> str:
    head = entry.cell.settings.get("head")
    return entry.label if head is None else f"{entry.label} ({head} head)"


def gigabytes(entry: Entry) -> float:
    """What a whole run sends, both ways."""
    return max((result.bytes_down + result.bytes_up) / 1e9 for result in entry.results.values())


def unadapted(entry: Entry) -> str:
    """What clients have before they adapt, where they do."""
    before = [result.unadapted for result in entry.results.values() if result.unadapted is not None]
    values = [mean for part in before if (mean := part.test.client_mean) is not None]
    return f"{100 * fmean(values):.2f}" if values else ""


def table(entries: Sequence[Entry], has_network: bool) -> list[list[str]]:
    heading = ["method", "accuracy", "before adaptation", "GB, both ways", "seeds"]
    lines = [["network", *heading] if has_network else heading]
    for entry in entries:
        numbers = [drawing.text(drawing.accuracy(entry)), unadapted(entry), f"{gigabytes(entry):.2f}"]
        line = [name_of(entry), *numbers, drawing.seeds_of(entry)]
        lines.append([NAMES[entry.cell.model], *line] if has_network else line)
    return lines


def ranking(entries: Sequence[Entry]) -> str:
    """Every method and its accuracy, the best first."""
    known = [(entry, summary) for entry in entries if (summary := drawing.accuracy(entry)) is not None]
    known.sort(key=lambda pair: -pair[1].mean)
    return ", ".join(f"{name_of(entry)} {drawing.text(summary, 1)}" for entry, summary in known)


def draw_resnet(found: Found) -> Finding:
    entries = [entry for entry in found.entries if entry.cell != TABLE1]
    by_network = {model: mine for model in NAMES if (mine := [entry for entry in entries if entry.cell.model == model])}
    steps = entries[0].cell.steps
    said = [f"{NAMES[model]}: {ranking(entries)}." for model, entries in by_network.items()]
    return Finding(
        found.study.name,
        found.title,
        f"Test accuracy in % after {steps:,} communication steps. {' '.join(said)}{at_equal_bytes(found, by_network)}",
        [
            (
                table([entry for entries in by_network.values() for entry in entries], has_network=True),
                drawing.caption(
                    entries,
                    " Rates of LeNet are those of Table 1; every ResNet has the same one, which was not tuned. Before "
                    "adaptation: what the server's model has at the chosen round.",
                ),
            )
        ],
        {"": partial(picture, found.title, entries)},
    )


def at_equal_bytes(found: Found, by_network: dict[str, list[Entry]]) -> str:
    """What each has for the bytes of LeNet's whole run of Table 1."""
    lenet = next((entry for entry in found.entries if entry.cell == TABLE1), None)
    entry = next((entry for entry in by_network.get("resnet18", []) if entry.cell.method == "pfedhn"), None)
    if entry is None or lenet is None:
        return ""
    budget, summary = gigabytes(lenet), drawing.accuracy(lenet)
    per_step, curve = gigabytes(entry) / entry.cell.steps, mean_curve(entry)
    step = max(step for step in curve if step * per_step <= budget)
    return (
        f" At equal bytes it is otherwise: for the {budget:.1f} GB of LeNet's {lenet.cell.steps:,} steps in Table 1, "
        f"where pFedHN has {drawing.text(summary, 1)} %, a ResNet takes {int(budget / per_step)} steps, and after "
        f"{step} of them pFedHN has {curve[step]:.1f} %."
    )


def picture(title: str, entries: Sequence[Entry]) -> Any:
    figure, axes = drawing.titled(9.0, 4.8, title)
    for number, entry in enumerate(entries):
        curve, size = mean_curve(entry), gigabytes(entry) / entry.cell.steps
        if not size:  # nothing is sent
            continue
        style = {"color": drawing.color_of(entry.cell.method, number), "linestyle": DASHES[entry.cell.model]}
        steps = [step for step in curve if step]
        label = f"{NAMES[entry.cell.model]}, {name_of(entry)}"
        axes.plot([step * size for step in steps], [curve[step] for step in steps], linewidth=1.8, label=label, **style)
    make_logarithmic(axes, "x")
    drawing.heading(axes, "accuracy of what the server sends, as it trains")
    drawing.finished_axes(axes, "gigabytes sent, both ways", "test accuracy in %")
    return figure


def draw_adapters(found: Found) -> Finding:
    return Finding(
        found.study.name,
        found.title,
        f"Test accuracy in % after {found.entries[0].cell.steps:,} communication steps: {ranking(found.entries)}.",
        [
            (
                table(found.entries, has_network=False),
                drawing.caption(
                    found.entries, " All seeds share one backbone. One rate for every method, which was not tuned."
                ),
            )
        ],
    )


DRAWN = {
    name: Study(name, EXPERIMENTS[name].title, (*EXPERIMENTS[name].cells, *more), draw, seeds=EXPERIMENTS[name].seeds)
    for name, more, draw in (("resnet-cifar100", (TABLE1,), draw_resnet), ("adapters-cifar100", (), draw_adapters))
}
"""Drawn from experiments that are run by their own name."""
