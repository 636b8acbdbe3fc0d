"""On a GPU: is the captured round the loop's, for every method, and how long does it take, alone and side by side.

python benchmarks/gpu.py --out results.jsonl [--only equal|time] [--runs 1,8,16] [--rounds 120]
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfedhn.algorithm import Model
from pfedhn.algorithms import ALGORITHMS
from pfedhn.capture import CapturedRun, side_by_side
from pfedhn.federation import Federation
from pfedhn.models import MLP, LeNet, OmniglotNet, cross_entropy, is_correct
from pfedhn.runner import commit
from pfedhn.simulate import Schedule, Simulation

DEVICE = torch.device("cuda")


def images(num_clients: int, rows: int, shape: tuple[int, ...], num_classes: int, seed: int = 0) -> Federation:
    """Random pictures whose mean tells their class, `rows` of training data per client."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for _ in range(num_clients):
        pools = {}
        for pool, count in (("train", rows), ("validation", rows // 4), ("test", rows // 4)):
            y = torch.randint(num_classes, (count,), generator=generator)
            x = torch.randn(count, *shape, generator=generator) + y.view(-1, *[1] * len(shape)) / num_classes
            pools[pool] = (x, y)
        clients.append(pools)
    return Federation.from_clients(clients)


def simulation(
    method: str,
    federation: Federation,
    factory: Any,
    schedule: Schedule,
    seed: int = 0,
    executor: str = "captured",
    **settings: Any,
) -> Simulation:
    algorithm = ALGORITHMS[method](**settings).for_clients(federation.num_clients)
    model = Model("model", factory, cross_entropy, is_correct, DEVICE)
    return Simulation(algorithm, {"model": model}, federation, schedule, seed, executor)


def relative_difference(left: Any, right: Any) -> float:
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True):
        if a.is_floating_point() and a.numel():
            worst = max(worst, float((a.double() - b.double()).norm() / (b.double().norm() + 1e-12)))
    return worst


def check_equal(write: Any, methods: list[str]) -> None:
    """The state after a few rounds, captured and by the loop, with tf32 off."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    targets = {
        "mlp": (images(8, 60, (1, 8, 8), 4), lambda: MLP(64, 32, 4)),
        "lenet": (images(6, 100, (3, 32, 32), 4), lambda: LeNet(4)),
    }
    for target, (federation, factory) in targets.items():
        federation = federation.to(DEVICE)
        for method in methods:
            settings: dict[str, Any] = {"outer_steps": 3} if method == "pfedme" else {"local_steps": 3}
            cohort = 1 if method == "pfedhn" else 3
            states = {}
            for executor in ("loop", "captured"):
                one = simulation(method, federation, factory, Schedule(12, cohort, 32, 6), 0, executor, **settings)
                state = one.initial_state()
                steps = CapturedRun(one, state).rounds() if executor == "captured" else one.rounds(state)
                scores = [p.evaluation.pools["validation"].loss for p in steps if p.evaluation]
                torch.cuda.synchronize()
                private = [table.take(list(range(federation.num_clients))) for table in state.memories.private.values()]
                states[executor] = (state.memories.shared, state.memories.rows, private, scores)
            difference = relative_difference(states["captured"], states["loop"])
            write(
                {
                    "check": "equal",
                    "target": target,
                    "method": method,
                    "difference": difference,
                    "equal": difference < 1e-3,
                }
            )


def measure(write: Any, runs: list[int], rounds: int, target: str, method: str, clients: int, every: int = 30) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    shape, factory = {
        "lenet": ((3, 32, 32), lambda: LeNet(10)),
        "omniglot": ((1, 28, 28), lambda: OmniglotNet(1623)),
    }[target]
    federation = images(clients, 40_000 // clients, shape, 10).to(DEVICE)
    cohort = ALGORITHMS[method]().usual_cohort_size
    for count in runs:
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        group = []
        for seed in range(count):
            one = simulation(method, federation, factory, Schedule(rounds * cohort, cohort, 64, every), seed)
            group.append(CapturedRun(one, one.initial_state()))
        iterators = [run.rounds() for run in group]
        for iterator in iterators:  # compile, capture and evaluate once
            next(iterator)
        torch.cuda.synchronize()
        ready = time.perf_counter()
        for _ in side_by_side(iterators):
            pass
        torch.cuda.synchronize()
        seconds = time.perf_counter() - ready
        write(
            {
                "check": "time",
                "target": target,
                "method": method,
                "clients": clients,
                "runs": count,
                "rounds": rounds,
                "cohort": cohort,
                "evaluate_every": every,
                "ms_per_round_and_run": 1e3 * seconds / rounds / count,
                "ms_per_round": 1e3 * seconds / rounds,
                "seconds_to_first_round": ready - started,
                "peak_memory_mb": torch.cuda.max_memory_allocated() / 2**20,
            }
        )
        if count == 1:
            profile(write, group[0])
        del group, iterators


def profile(write: Any, run: CapturedRun) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    graph = next(iter(run.graphs.values()))
    for name, one in (("round", graph), ("evaluation", run.evaluation_graph)):
        run.counter.zero_()
        torch.cuda.synchronize()
        with profiler(activities=[ProfilerActivity.CUDA]) as record:
            one.replay()
            torch.cuda.synchronize()
        events = sorted(record.key_averages(), key=lambda event: -event.device_time_total)
        write(
            {
                "check": "profile",
                "of": name,
                "kernels": sum(event.count for event in events),
                "busy_ms": sum(event.device_time_total for event in events) / 1e3,
                "top": [[event.key[:60], event.count, round(event.device_time_total, 1)] for event in events[:25]],
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["equal", "time"])
    parser.add_argument("--runs", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--target", default="lenet")
    parser.add_argument("--method", default="pfedhn")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--inductor", default="", help="settings to try, e.g. combo_kernels=True")
    options = parser.parse_args()
    for setting in filter(None, options.inductor.split(",")):
        import ast

        import torch._inductor.config as inductor

        name, _, value = setting.partition("=")
        setattr(inductor, name, ast.literal_eval(value))
    about = {
        "inductor": options.inductor,
        "device": f"cuda: {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }

    def write(record: dict[str, Any]) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps(record | about) + "\n")
        shown = {name: value for name, value in record.items() if name != "top"}
        print(json.dumps(shown), flush=True)
        for row in record.get("top", []):
            print("   ", row, flush=True)

    if options.only != "time":
        check_equal(write, options.method.split(",") if options.method != "all" else list(ALGORITHMS))
    if options.only != "equal":
        measure(
            write,
            [int(n) for n in options.runs.split(",")],
            options.rounds,
            options.target,
            options.method,
            options.clients,
        )


if __name__ == "__main__":
    main()
