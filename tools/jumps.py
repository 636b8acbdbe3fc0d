"""What happens inside a run whose accuracy jumps: norms beside the learning curve, for several runs side by side.

    python tools/jumps.py table1-cifar100 --only method=pfedhn-pc,clients=50 --seeds 0,1,2 \\
        --out jumps.jsonl --with weight_decay=0.001 --with weight_decay=0.0001 --with weight_decay=0

Every --with is a set of runs of its own; settings in one --with are divided by commas.

A line per run: steps, validation and test accuracy, and at the same steps the norm of each trunk layer and of the head
of the hypernetwork, of the embeddings (mean over clients), of the weights made for the clients (mean) and of the
server's velocity. On a GPU if there is one.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedhn.combinators import innermost
from pfedhn.engine.gpu import set_up_gpu
from pfedhn.engine.graphs import side_by_side
from pfedhn.engine.rounds import rounds
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Progress, State
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.grid import select, with_assignments
from pfedhn.experiments.spec import RunSpec
from pfedhn.paper.experiments import EXPERIMENTS
from pfedhn.params import Params
from pfedhn.settings import parse_assignments
from pfedhn.storage.schema import to_json
from pfedhn.system.environment import environment


def norm(tensors: Any) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in tensors])))


def norms(simulation: Simulation, state: State) -> dict[str, float]:
    rows, shared = state.memories.rows, simulation.exchange.newest(state.memories.shared)
    algorithm: Any = innermost(simulation.algorithm)
    embeddings: Tensor = algorithm.up_to_date(rows, shared).embedding
    (model,) = simulation.models.values()
    made: Params = torch.func.vmap(lambda row: algorithm.send(model, shared, row))(rows)
    found = {name.removesuffix(".weight"): norm([value]) for name, value in shared.phi.items() if "weight" in name}
    return found | {
        "velocity": norm(shared.velocity.values()),
        "embedding": float(embeddings.norm(dim=1).mean()),
        "made": float(torch.cat([weights.flatten(1) for weights in made.values()], 1).norm(dim=1).mean()),
    }


def watched(simulation: Simulation, lines: list[dict[str, Any]]) -> Iterator[Progress]:
    state = simulation.initial_state()
    for progress in rounds(simulation, state):
        if progress.evaluation is not None:
            splits = progress.evaluation.splits
            scores = {split: round(splits[split].sample_mean, 4) for split in ("validation", "test")}
            found = {name: float(f"{value:.4g}") for name, value in norms(simulation, state).items()}
            lines.append({"step": progress.step, **scores, **found})
        yield progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--only", default="method=pfedhn-pc,clients=50")
    parser.add_argument("--with", action="append", dest="variants")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seeds = [int(seed) for seed in options.seeds.split(",")]
    started = time.monotonic()
    planned: list[tuple[str, RunSpec]] = []
    for variant in options.variants or [""]:
        assignments = parse_assignments(list(filter(None, variant.split(","))))
        experiment = with_assignments(EXPERIMENTS[options.experiment], assignments)
        planned += [(variant, run) for run in select(experiment, [options.only], seeds)]
    if device == "cuda":
        set_up_gpu("tf32", is_deterministic=False, num_runs=len(planned))
    lines: list[list[dict[str, Any]]] = [[] for _ in planned]
    runs = [
        watched(build_simulation(run, Options(device=device)), seen)
        for (_, run), seen in zip(planned, lines, strict=True)
    ]
    for _ in side_by_side(runs):
        pass
    with options.out.open("a") as file:
        for (variant, run), seen in zip(planned, lines, strict=True):
            columns = {key: [line[key] for line in seen] for key in seen[0]}
            about = {"run": run.name, "with": variant, "seconds": round(time.monotonic() - started, 1)}
            file.write(json.dumps(about | {"environment": to_json(environment(device))} | columns) + "\n")


if __name__ == "__main__":
    main()
