"""What a client's steps before a test are worth on Omniglot, on training examples and, wrongly, on test examples.

    python tools/omniglot_adaptation.py > results/checks/omniglot-adaptation-cpu.json     # minutes on one core
    python tools/omniglot_adaptation.py runs/omniglot/per-fedavg-omniglot-50-seed0        # of a run's shared model

Without a run, the shared model is trained on everybody's training examples together until it is as good as the shared
model of Per-FedAvg in our table: it tells all 1,623 characters apart. Then every client takes some plain SGD steps from
it and is tested, on all characters and among those of its own alphabet. Test accuracy over samples, in percent.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pfedhn
from pfedhn.engine.simulate import Simulation
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import RunSpec
from pfedhn.paper.experiments import EXPERIMENTS
from pfedhn.params import Params
from pfedhn.sgd import SGD
from pfedhn.storage.schema import to_json
from pfedhn.system.environment import environment

GOOD_ENOUGH = 0.54  # validation accuracy, about that of Per-FedAvg's shared model
LOOK_EVERY, AT_MOST = 200, 10_000


@dataclass(frozen=True)
class Adaptation:
    """Steps of a client before it is tested."""

    split: str = "train"
    steps: int = 0
    rate: float = 0.0
    batch_size: int = 64


TRIED = (
    Adaptation(),
    Adaptation("train", 1, 0.001),  # the table's rate
    Adaptation("train", 1, 0.05),
    Adaptation("train", 5, 0.05),
    Adaptation("train", 50, 0.05),
    Adaptation("test", 1, 0.05),
    Adaptation("test", 2, 0.05, 20),
    Adaptation("test", 2, 0.05),
)


def drawn(simulation: Simulation, numbers: Tensor, batch_size: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    chosen = numbers[torch.randperm(len(numbers), generator=random)[:batch_size]]
    return simulation.federation.examples(chosen)


def step(simulation: Simulation, sgd: SGD, weights: Params, velocity: Params, x: Tensor, y: Tensor) -> Any:
    model = simulation.model_of(0)

    def loss(weights: Params) -> Tensor:
        return model.per_example_loss(model.outputs(weights, x), y).mean()

    return sgd.step_all(weights, velocity, torch.func.grad(loss)(weights))


def pooled(simulation: Simulation) -> Params:
    """One model for all, trained on everybody's examples."""
    splits, random = simulation.federation.splits, torch.Generator().manual_seed(0)
    clients = range(simulation.federation.num_clients)
    train, validation = (torch.cat([splits[name].of(c) for c in clients]) for name in ("train", "validation"))
    (weights,) = simulation.initial_models().values()
    velocity, sgd = {name: torch.zeros_like(value) for name, value in weights.items()}, SGD(0.02, 0.9)
    for number in range(1, AT_MOST + 1):
        weights, velocity = step(simulation, sgd, weights, velocity, *drawn(simulation, train, 64, random))
        if number % LOOK_EVERY == 0:
            x, y = simulation.federation.examples(validation)
            accuracy = float((simulation.model_of(0).outputs(weights, x).argmax(1) == y).double().mean())
            print(f"step {number}: {100 * accuracy:.1f} % on validation", file=sys.stderr)
            if accuracy >= GOOD_ENOUGH:
                return weights
    raise SystemExit(f"error: the shared model has not reached {GOOD_ENOUGH} in {AT_MOST} steps.")


def adapted(simulation: Simulation, weights: Params, client: int, how: Adaptation, random: torch.Generator) -> Params:
    numbers = simulation.federation.splits[how.split].of(client)
    still = {name: torch.zeros_like(value) for name, value in weights.items()}
    for _ in range(how.steps):
        batch = drawn(simulation, numbers, how.batch_size, random)
        weights, _ = step(simulation, SGD(how.rate), weights, still, *batch)
    return weights


def tested(simulation: Simulation, shared: Params, how: Adaptation) -> Mapping[str, Any]:
    federation, random = simulation.federation, torch.Generator().manual_seed(1)
    correct = among_own = count = 0
    for client in range(federation.num_clients):
        weights = adapted(simulation, shared, client, how, random)
        x, y = federation.examples(federation.splits["test"].of(client))
        _, known = federation.examples(federation.splits["train"].of(client))
        outputs, own = simulation.model_of(client).outputs(weights, x), known.unique()
        correct += int((outputs.argmax(1) == y).sum())
        among_own += int((own[outputs[:, own].argmax(1)] == y).sum())
        count += len(y)
    accuracies = {"accuracy": correct / count, "among_own_characters": among_own / count}
    return {**to_json(how), **{name: round(100 * value, 2) for name, value in accuracies.items()}}


def main(run: Path | None) -> None:
    torch.set_num_threads(1)
    (cell,) = (cell for cell in EXPERIMENTS["table1-omniglot"].cells if cell.method == "per-fedavg")
    simulation = build_simulation(RunSpec(cell, 0, "per-fedavg-omniglot-50"), Options())
    shared = pooled(simulation) if run is None else pfedhn.load(run, device="cpu").memories().shared
    found = [tested(simulation, shared, how) for how in TRIED]
    print(
        json.dumps({"run": str(run or "pooled"), "environment": to_json(environment("cpu")), "found": found}, indent=1)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
