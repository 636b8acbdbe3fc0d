"""What privacy of single patients costs the hospitals of the stroke trial: DP-SGD in every hospital, at four budgets.

Every hospital takes part in every round with one step over all its patients. So the noise of many hospitals averages
out on the server, which is what makes a budget go far. Clip and learning rates were chosen on validation, on seed 10.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean as mean
from typing import Any, TypeAlias

from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.hospitals import cells as all_cells
from pfedhn.paper.hospitals import on_made_up
from pfedhn.report.entries import Entry, display_name, summarize
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study
from pfedhn.report.tables import number_text

NAME = "hospitals-privacy"
METHODS = ("fedavg", "fedper-intercept")
ROUNDS = 20
CLIP = 6.0
NOISES = {8.0: 2.852, 4.0: 5.177, 2.0: 9.612, 1.0: 18.092}
"""For each epsilon, the noise with which it lasts for all rounds, at delta 1e-5."""
RATES = {8.0: 0.3, 4.0: 0.3, 2.0: 0.1, 1.0: 0.1}
ALL_PATIENTS = 1_000  # in a minibatch, more than a hospital has


def cells(data_dir: Path | None = None) -> tuple[Cell, ...]:
    """Training alone, and both methods without privacy and at each budget.

    Args:
        data_dir: The folder of the data, whose number of hospitals counts.
    """
    usual = {cell.method: cell for cell in all_cells(data_dir) if cell.dataset == "stroke"}
    found = [usual["local"]]
    for method in METHODS:
        found += [usual[method], *(private(usual[method], epsilon) for epsilon in NOISES)]
    return tuple(found)


def private(cell: Cell, epsilon: float) -> Cell:
    """A cell whose hospitals add noise to every step."""
    return replace(
        cell,
        model="linear-bias",
        steps=ROUNDS * cell.clients,
        cohort_size=cell.clients,
        evaluate_every=cell.clients,
        batch_size=ALL_PATIENTS,
        patience=None,
        privacy={"level": "example", "clip": CLIP, "noise": NOISES[epsilon], "epsilon": epsilon},
        settings={"local_steps": 1, "local_lr": RATES[epsilon]},
    )


def reduced(cell: Cell) -> Cell:
    """A cell on made-up hospitals, in a few steps."""
    small = on_made_up(cell)
    if not cell.privacy:
        return small
    return replace(small, cohort_size=small.clients, settings=cell.settings)


def draw(found: Found) -> Finding:
    """Say what the largest budget costs, and show every budget."""
    lines = [["method", "epsilon", "noise", "accuracy", "AUC", "log loss", "seeds"]]
    lines += [_line(entry) for entry in found.entries]
    losses = _losses(found.entries)
    return found.finding(_sentence(losses), [(lines, CAPTION)], {"": partial(_picture, losses)})


CAPTION = (
    "Measures on test examples: accuracy in % is the mean over hospitals, AUC and log loss are over patients. Mean ± "
    "standard deviation over seeds. Epsilon is of each patient of a hospital, at delta 1e-5; noise is in multiples of "
    f"the clipped norm, {CLIP:g}. Without privacy, methods have the defaults for tables."
)


def _line(entry: Entry) -> list[str]:
    privacy: Mapping[str, Any] = entry.cell.privacy
    found = [one.detailed for one in entry.results.values() if one.detailed is not None]
    accuracies = [100 * value for one in found if (value := one.clients.get("accuracy")) is not None]
    over = [
        number_text(summarize(value for one in found if (value := one.examples.get(name)) is not None), 3)
        for name in ("auc", "log_loss")
    ]
    budget = [f"{privacy['epsilon']:g}", f"{privacy['noise']:.3g}"] if privacy else ["no privacy", ""]
    name = display_name(entry.cell.method)
    return [name, *budget, number_text(summarize(accuracies), 1), *over, str(len(entry.results))]


Losses: TypeAlias = Mapping[str, Mapping[float | None, float]]
"""The mean log loss of each method, by epsilon; None is without privacy."""


def _losses(entries: Sequence[Entry]) -> Losses:
    losses: dict[str, dict[float | None, float]] = {}
    for entry in entries:
        loss = mean(result.test.loss for result in entry.results.values())
        losses.setdefault(entry.cell.method, {})[entry.cell.privacy.get("epsilon")] = loss
    return losses


def _picture(losses: Losses) -> Any:
    """The log loss of each method against epsilon, and that of training alone."""
    figure, axes = drawing.titled(6.4, 4.2, "A smaller privacy budget costs log loss")
    for number, (method, found) in enumerate(losses.items()):
        points = sorted((epsilon, loss) for epsilon, loss in found.items() if epsilon is not None)
        color = drawing.color_of(method, number)
        if points:
            axes.plot(*zip(*points, strict=True), color=color, marker="o", label=display_name(method))
        elif None in found:
            axes.axhline(found[None], color="#9A9A9A", linewidth=1.2, label=f"{display_name(method)}, sends nothing")
    axes.set_xscale("log")
    axes.set_xticks(list(NOISES), [f"{epsilon:g}" for epsilon in NOISES], minor=False)
    axes.minorticks_off()
    drawing.finish(axes, "epsilon", "log loss over test patients", "mean over seeds")
    return figure


def _sentence(losses: Losses) -> str:
    """The log loss of each method with the largest budget and without privacy, beside training alone."""
    largest, alone = max(NOISES), losses.get("local", {}).get(None)
    parts = [
        f"With epsilon {largest:g}, {display_name(method)} has a log loss of {found[largest]:.3f}; without privacy, it "
        f"has {found[None]:.3f}."
        for method, found in losses.items()
        if found.keys() >= {largest, None}
    ]
    if alone is not None and parts:
        parts.append(f"A hospital that trains alone sends nothing and has {alone:.3f}.")
    return " ".join(parts)


STUDY = Study(
    NAME,
    "Hospitals of the International Stroke Trial that train with privacy of single patients (DP-SGD)",
    cells(),
    draw,
    small=reduced,
    cells_for=cells,
)
