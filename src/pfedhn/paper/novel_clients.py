"""Section 5.3 and appendix: clients that join after training.

90 clients train, 10 join. The examples of the two are divided apart, so that one trained run serves every mixture of
the new clients. Only what is a new client's own learns: its embedding, from the mean of the trained ones, and the head
of PC; pFedMe and Per-FedAvg do their usual local work from the trained model. Rounds and rate are chosen on the
validation examples of the new clients.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn.experiments.finished import Finished
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Summary
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, on_digits
from pfedhn.report.tables import number_text

ALPHAS = (0.1, 0.25, 0.5, 1.0)
NUM_NOVEL = 10
ROUNDS = 100
SMALL_ROUNDS = 4


def compute(finished: Finished) -> Mapping[str, Any]:
    """By alpha: each new client's accuracy, how far it is from the nearest client that trained, and what was chosen."""
    run = finished.run
    rounds = SMALL_ROUNDS if finished.cell.dataset == "digits" else ROUNDS
    trained = finished.federation.class_shares
    found = {}
    for alpha in ALPHAS:
        federation = finished.another_federation(partition={**finished.cell.partition, "novel_alpha": alpha})
        assert federation.joining is not None
        joined = run.add_clients(federation.joining, rounds=rounds, trial_rounds=rounds)
        start = run.add_clients(federation.joining, rounds=0)
        found[f"{alpha:g}"] = {
            "accuracy": joined.accuracy,
            "accuracy_at_start": start.accuracy,
            "distance": nearest_distance(federation.joining.class_shares, trained),
            "classes": effective_classes(federation.joining.class_shares),
            "round": joined.round,
            "rate": joined.settings.get("embedding_lr"),
            "validation": [score for _, score in joined.tried],
        }
    return {"alphas": found, "trained": run.chosen.splits["test"].client_mean}


def effective_classes(shares: Tensor) -> list[float]:
    """[clients]: how many classes a client has, a rare one counting for less: the exponential of the entropy."""
    counts: list[float] = torch.special.entr(shares.double()).sum(1).exp().tolist()
    return counts


def nearest_distance(new: Tensor, trained: Tensor) -> list[float]:
    """[new]: the total variation between a client's mixture of classes and the nearest one among those that trained."""
    distances = 0.5 * (new[:, None].double() - trained[None].double()).abs().sum(-1)
    nearest: list[float] = distances.min(1).values.tolist()
    return nearest


def percent(accuracies: Sequence[float | None]) -> NDArray[numpy.float64]:
    return 100 * numpy.array(accuracies, dtype=numpy.float64)


class Joined(NamedTuple):
    """The new clients of a method with one alpha."""

    label: str
    alpha: str
    gap: Summary  # of accuracy, to the clients that trained
    distance: Summary
    line: Sequence[str]  # of the table


def joined(label: str, numbers: Mapping[int, Mapping[str, Any]], alpha: str) -> Joined:
    parts = [values["alphas"][alpha] for values in numbers.values()]
    trained = [100 * values["trained"] for values in numbers.values()]
    novel = [float(numpy.nanmean(percent(part["accuracy"]))) for part in parts]
    start = [float(numpy.nanmean(percent(part["accuracy_at_start"]))) for part in parts]
    gap = drawing.over_seeds(new - old for new, old in zip(novel, trained, strict=True))
    distance = drawing.over_seeds(float(numpy.mean(part["distance"])) for part in parts)
    classes = [value for part in parts for value in part.get("classes", ())]
    line = [
        *(label, alpha, f"{numpy.mean(classes):.1f}" if classes else "", number_text(distance)),
        *(number_text(drawing.over_seeds(values)) for values in (trained, novel)),
        *(number_text(gap), number_text(drawing.over_seeds(start))),
        *(", ".join(str(part["round"]) for part in parts), ", ".join(map(rate_text, parts))),
    ]
    return Joined(label, alpha, gap, distance, line)


def draw(found: Found) -> Finding:
    names = ["clients that trained", "new clients", "gap", "before joining", "rounds", "rate"]
    lines: list[Sequence[str]] = [["method", "alpha", "classes", "distance", *names]]
    by_method: dict[str, list[Joined]] = {}
    for entry, numbers in found.computed:
        alphas = next(iter(numbers.values()))["alphas"]
        by_method[entry.cell.method] = [joined(entry.label, numbers, alpha) for alpha in alphas]
    lines += [one.line for every in by_method.values() for one in every]
    said = [f"{every[0].label} {', '.join(f'{one.gap.mean:+.1f}' for one in every)}" for every in by_method.values()]
    figures: dict[str, Callable[[], Any]] = {}
    if by_method:
        figures = {"": partial(gap_picture, found.title, by_method), "clients": partial(scatter, found)}
    published = "" if found.is_small else " In the paper, pFedHN has the smallest gap for every alpha."
    return found.finding(
        "New clients get a model from a hypernetwork that does not change: only what is their own learns, which is the "
        "embedding and, with PC, the classifier. The gap is the paper's, new clients less those that trained; with a "
        "larger alpha new clients have more classes to tell apart, which is a harder task also for a client that "
        f"trains with the others.{published} Gap in points here, from alpha 0.1 to 1: "
        f"{'; '.join(said) or 'not computed yet'}.",
        [(lines, CAPTION)],
        figures,
    )


CAPTION = (
    "Accuracy in % over clients. Classes: of a new client, a rare one counting for less (the exponential of the "
    "entropy). Distance: total variation between mixtures of classes, to the nearest client that trained; the mean "
    "over new clients, whose examples are divided apart from those of clients that train. Gap: new clients less those "
    "that trained. Before joining: with the mean of the trained embeddings, or the shared model. Rounds and rate of "
    "the embedding: chosen on validation, by seed; ↑ is the largest rate that was tried, = one that made no difference."
)


def rate_text(part: Mapping[str, Any]) -> str:
    """The embedding's rate, and whether another might have been better."""
    if part["rate"] is None:
        return ""
    scores = [-math.inf if score is None else score for score in part["validation"]]  # None: training diverged
    mark = " =" if len(set(scores)) == 1 else " ↑" if scores.index(max(scores)) == len(scores) - 1 else ""
    return f"{part['rate']:g}{mark}"


def gap_picture(title: str, by_method: Mapping[str, Sequence[Joined]]) -> Any:
    figure, axes = drawing.titled(8.0, 4.4, title)
    for number, (method, every) in enumerate(by_method.items()):
        every = sorted(every, key=lambda one: one.distance.mean)
        places = [one.distance.mean for one in every]
        color, marker = drawing.color_of(method, number), drawing.MARKERS[number % 8]
        drawing.errorbar(axes, places, [one.gap for one in every], color, every[0].label, marker=marker)
    axes.axhline(0, color=drawing.PAPER, linewidth=0.9)
    heading = "marks: alpha of the new clients, 0.1 (left) to 1; with more classes the task is harder"
    distance = "mean total-variation distance to the nearest client that trained"
    drawing.finish(axes, distance, "new less trained clients, points", heading)
    return figure


def scatter(found: Found) -> Any:
    columns = 2 if len(found.computed) == 4 else min(3, len(found.computed))
    lines = math.ceil(len(found.computed) / columns)
    title = f"{found.title}: every new client"
    size = ((4.4 if columns == 2 else 3.7) * columns + 1.2, 3.3 * lines + 0.7)
    figure, all_axes = drawing.titled(*size, title, columns, lines, sharex=True, sharey=True, squeeze=False)
    for number, axes in enumerate(all_axes.flat[len(found.computed) :], len(found.computed)):
        axes.set_visible(False)
        all_axes.flat[number - columns].tick_params(labelbottom=True)  # nothing stands below it
    for (entry, numbers), axes in zip(found.computed, all_axes.flat, strict=False):
        parts = [values["alphas"] for values in numbers.values()]
        shown = []
        for place, alpha in enumerate(parts[0]):
            x = numpy.concatenate([numpy.array(part[alpha]["distance"]) for part in parts])
            y = numpy.concatenate([percent(part[alpha]["accuracy"]) for part in parts])
            style = {"s": 20, "alpha": 0.75, "linewidths": 0, "marker": drawing.MARKERS[place]}
            axes.scatter(x, y, color=drawing.COLORS[place], label=f"alpha {alpha}", **style)
            shown.append(numpy.stack([x, y])[:, ~numpy.isnan(y)])
        places, heights = numpy.concatenate(shown, 1)
        heading = entry.label
        if len(places) > 2:
            slope, height = numpy.polyfit(places, heights, 1)
            ends = numpy.array([places.min(), places.max()])
            axes.plot(ends, height + slope * ends, color=drawing.PAPER, linewidth=1.2, linestyle="--")
            heading += f": {slope / 10:+.1f} points per 0.1"
        drawing.finish(axes, "distance to the nearest trained client", "", heading, legend=False)
    for axes in all_axes[:, 0]:
        axes.set_ylabel(drawing.ACCURACY)
    figure.legend(*all_axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    return figure


def cells() -> tuple[Cell, ...]:
    rule = {"rule": "dirichlet", "alpha": 0.1, "novel_clients": NUM_NOVEL}
    methods = ("pfedhn", "pfedhn-pc", "pfedhn-plus", "pfedhn-plus-pc", "pfedme", "per-fedavg")
    return tuple(replace(table1_cell("cifar10", method, 90), partition=rule) for method in methods)


STUDY = Study(
    "novel-clients",
    "Section 5.3: clients that join after training (CIFAR-10, 90 train and 10 join)",
    cells(),
    draw,
    compute,
    partial(on_digits, partition={"rule": "dirichlet", "alpha": 0.5, "novel_clients": 4}),
)
