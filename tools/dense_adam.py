"""Adam on embeddings, lazy against dense: the digits of the demo, a table of accuracies as docs/methods.md has it.

    python tools/dense_adam.py

The package's Adam is lazy: a row of the table moves when its client is chosen, and counts its own steps. Dense is what
torch.optim.Adam makes of one table: in every round each row takes a step, on a gradient of zero if its client was not
chosen. Both run pFedHN+ with embeddings under Adam, on the same splits, clients and minibatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from pfedhn.algorithms import PLUS
from pfedhn.algorithms.embeddings import AdamRows, Row
from pfedhn.algorithms.method import Method
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.engine.rounds import rounds
from pfedhn.engine.simulate import Simulation
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import RunSpec
from pfedhn.paper.experiments import DIGITS
from pfedhn.sgd import AdamW

SEEDS = range(10, 15)  # the demo uses 0 to 2
STEPS = 400
RATES = (6e-4, 6e-3, 6e-2)  # of the embeddings; the first is that of phi


@dataclass(frozen=True)
class DenseAdamRows(AdamRows):
    """`last_step` is the server's; the steps that a row missed are taken when somebody looks."""

    def at_rest(self, value: Tensor, step: Tensor) -> Row:
        return Row(value, torch.zeros_like(value), step, torch.zeros_like(value))

    def at(self, rows: Row, powers: Tensor, step: Tensor) -> Row:
        missed, moments = step - rows.last_step, (rows.embedding, rows.velocity, rows.square)
        for number in range(1, int(missed.max()) + 1):
            moved = self.adam.step(*moments, torch.zeros_like(rows.embedding), (rows.last_step + number)[..., None])
            is_missed = (number <= missed)[..., None]
            moments = tuple(torch.where(is_missed, new, old) for new, old in zip(moved, moments, strict=True))
        embedding, velocity, square = moments
        return Row(embedding, velocity, step.expand_as(rows.last_step), square)

    def moved(self, row: Row, gradient: Tensor, step: Tensor) -> Row:
        embedding, velocity, square = self.adam.step(row.embedding, row.velocity, row.square, gradient, step)
        return Row(embedding, velocity, step.expand_as(row.last_step), square)

    @property
    def adam(self) -> AdamW:
        return AdamW(self.lr, self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class DensePFedHN(PFedHN):
    """pFedHN whose embeddings all take an Adam step in every round."""

    @property
    def rows(self) -> DenseAdamRows:
        lazy = super().rows
        return DenseAdamRows(*(getattr(lazy, item.name) for item in fields(lazy)))


def simulations(rate: float, kind: type[PFedHN]) -> Iterator[Simulation]:
    cell = replace(DIGITS, steps=STEPS)
    settings: dict[str, Any] = {**PLUS, "embedding_optimizer": "adam", "embedding_lr": rate, "embedding_momentum": 0.9}
    for seed in SEEDS:
        simulation = build_simulation(RunSpec(cell, seed, "dense-adam"), Options(executor="loop"))
        algorithm = Method("pFedHN", kind)(**settings, local_steps=20).for_clients(cell.clients)
        yield replace(simulation, algorithm=algorithm)


def outcome(simulation: Simulation) -> tuple[float, float]:
    """Test accuracy over clients at the round chosen on validation, and how far embeddings have come by the end."""
    state = simulation.initial_state()
    start = state.memories.rows.embedding.clone()
    for _ in rounds(simulation, state):
        pass
    assert state.best is not None
    end = simulation.embeddings(state.memories)
    assert end is not None
    return 100 * state.best.evaluation.splits["test"].client_mean, float((end - start).norm(dim=1).mean())


def main() -> None:
    torch.set_num_threads(1)
    print("| embedding rate | lazy | dense | dense less lazy, by seed | moved, lazy | moved, dense |")
    print("|---:|---:|---:|---|---:|---:|")
    for rate in RATES:
        lazy, dense = ([outcome(run) for run in simulations(rate, kind)] for kind in (PFedHN, DensePFedHN))
        scores = [mean(score for score, _ in found) for found in (lazy, dense)]
        ways = [mean(way for _, way in found) for found in (lazy, dense)]
        differences = ", ".join(f"{after[0] - before[0]:+.1f}" for before, after in zip(lazy, dense, strict=True))
        print(
            f"| {rate:g} | {scores[0]:.2f} | {scores[1]:.2f} | {differences} | {ways[0]:.3f} | {ways[1]:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
