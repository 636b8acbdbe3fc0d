"""Clients per second of a large cohort against the workers of a Ray cluster, which share its clients.

A round of 1,000 clients among 100,000, each of which is made when it takes part; the first round, in which every worker
traces its network, is not counted. Every line says how far the weights are from those of one process.

    python benchmarks/cohort.py --workers 0,1,2 >> benchmarks/results/cohort.jsonl
"""

import argparse
import json
import time
from dataclasses import replace

import pfedhn
from pfedhn.system.process import set_up_process

set_up_process()

import numpy  # noqa: E402 - PyTorch must not be loaded before
import torch  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from pfedhn.engine.simulate import Simulation  # noqa: E402
from pfedhn.runs.assemble import assemble  # noqa: E402
from pfedhn.runs.cluster import Workers, connection  # noqa: E402
from pfedhn.storage.schema import to_json  # noqa: E402
from pfedhn.system.environment import environment  # noqa: E402

IMAGE, CLASSES = (3, 32, 32), 10


def examples(client: int) -> dict[str, tuple[numpy.ndarray, numpy.ndarray]]:
    draw = numpy.random.default_rng(client)
    x, y = draw.normal(size=(80, *IMAGE)).astype(numpy.float32), draw.integers(0, CLASSES, size=80)
    return {"train": (x[:64], y[:64]), "validation": (x[64:72], y[64:72]), "test": (x[72:], y[72:])}


def simulation_of(clients: int, cohort: int, rounds: int) -> Simulation:
    federation = pfedhn.Federation.lazy(clients, examples, train=64, validation=8, test=8, num_cached=0)
    return assemble(
        pfedhn.PFedHN(local_steps=20),
        federation.evaluating(1),
        lambda: pfedhn.LeNet(CLASSES),
        steps=rounds * cohort,
        cohort_size=cohort,
        evaluate_every=rounds * cohort,
        device="cpu",
    )


def measure(simulation: Simulation, rounds: int) -> tuple[float, torch.Tensor]:
    """Clients per second after the first round, and the server's weights in the end."""
    state, seconds = simulation.initial_state(), []
    for number in range(rounds):
        started = time.perf_counter()
        simulation._round(state, number)
        seconds.append(time.perf_counter() - started)
    weights = torch.cat([leaf.flatten() for leaf in pytree.tree_leaves(state.memories.shared) if leaf.ndim])
    return simulation.clients_per_round * (rounds - 1) / sum(seconds[1:]), weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="0,1,2", help="numbers of workers; 0 is one process without Ray")
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on", default="ray")
    given = parser.parse_args()
    torch.set_num_threads(1)
    simulation, expected = simulation_of(given.clients, given.cohort, given.rounds), None
    with connection(given.on):
        for number in map(int, given.workers.split(",")):
            crew = None if number == 0 else lambda run, number=number: Workers(run, number)
            speed, weights = measure(replace(simulation, make_crew=crew), given.rounds)
            expected = weights if expected is None else expected
            line = {
                "measure": "cohort",
                "workers": number,
                "clients": given.clients,
                "cohort": given.cohort,
                "clients_per_second": round(speed, 1),
                "relative_difference": float((weights - expected).norm() / expected.norm()),
                "versions": to_json(environment("cpu")),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
