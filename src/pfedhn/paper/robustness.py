"""What hostile clients do to a federation, and what each defense is worth.

One of five clients, or two of ten, trains as it should and sends something else (`pfedhn.engine.attack`). It has no
validation and test examples, so the scores are those of the honest clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pfedhn.experiments.spec import Cell, Experiment

ATTACKS = ("none", "flip", "scale", "random")
FOR_ALL = (None, "adaptive-norm", "per-party")
FOR_SUMS = ("trimmed-mean", "median")

# Rates of `PRIVACY` and of the package's pFedHN-S; nothing was tuned under attack.
RATES: dict[str, dict[str, Any]] = {
    "fedavg": {"local_lr": 0.05},
    "pfedhn": {"lr": 0.01, "local_lr": 0.005},
    "pfedhn-pc": {"lr": 0.01, "local_lr": 0.005},
    "pfedhn-shared": {},
}
FIVE = Cell(
    clients=5,
    partition={"rule": "by_classes", "classes_per_client": 4},
    split=(0.6, 0.15, 0.25),
    steps=500,
    evaluate_every=50,
    settings={"local_steps": 20},
)


def attacked(cell: Cell, hostile: Sequence[int]) -> tuple[Cell, ...]:
    """A cell with each attack and each defense that is for its method."""
    defenses = (*FOR_ALL, *FOR_SUMS) if cell.method == "fedavg" else FOR_ALL
    return tuple(replace(cell, attack=_attack(kind, hostile), robust=robust) for robust in defenses for kind in ATTACKS)


def _attack(kind: str, hostile: Sequence[int]) -> Mapping[str, Any]:
    """Hostile clients of this kind; without an attack they are honest, and are scored no more than under one."""
    return {"kind": kind, "clients": list(hostile)}


ROBUSTNESS = Experiment(
    name="robustness",
    title="Handwritten digits: one of 5 clients is hostile",
    cells=tuple(
        one
        for method, rates in RATES.items()
        for one in attacked(replace(FIVE, method=method, settings={**FIVE.settings, **rates}), (0,))
    ),
)


def robustness_cifar10(cells: Mapping[str, Cell]) -> Experiment:
    """The same on CIFAR-10, two of 10 clients, with the cells of Table 1; an hour on one GPU, where it is not captured.

    Args:
        cells: Of Table 1 by method.
    """
    shorter = {method: replace(cells[method], steps=1_000, evaluate_every=100) for method in RATES}
    return Experiment(
        name="robustness-cifar10",
        title="CIFAR-10: two of 10 clients are hostile",
        cells=tuple(
            one
            for cell in shorter.values()
            for one in attacked(replace(cell, settings={**cell.settings, "local_steps": 10}), (0, 1))
        ),
        seeds=(0,),
    )
