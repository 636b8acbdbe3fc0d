"""On a GPU: is the captured round the loop's, for every method, and how long does it take, alone and side by side.

    python benchmarks/gpu.py --out results.jsonl --only equal --method all
    python benchmarks/gpu.py --out results.jsonl --only time --runs 1,16,24 --rounds 150
    python benchmarks/gpu.py --out results.jsonl --only time --target lenet-SML    clients of three sizes, in turn
    python benchmarks/gpu.py --out results.jsonl --only time --target resnet18 --method fedavg --rounds 8 --every 20
    python benchmarks/gpu.py --out results.jsonl --only time --target resnet18 --head low-rank --rounds 8 --every 20
    python benchmarks/gpu.py --out results.jsonl --only sweep      the curves of docs/performance.md
    python benchmarks/gpu.py --out results.jsonl --only generic    a target without kernels of its own, against a graph
                                                                   of the same compiled step captured by hand

`pfedhn bench --device cuda` compares with the textbook.
"""

import argparse
import gc
import getpass
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from pfedhn import keys
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.bench import measure as bench
from pfedhn.combinators import innermost
from pfedhn.data.federation import Federation
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.executors import TracedScan
from pfedhn.engine.gpu import COMPILER, compile_graph, set_up_gpu
from pfedhn.engine.graphs import side_by_side
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule
from pfedhn.model import Model
from pfedhn.models import MLP, LeNet, OmniglotNet, ResNet, cross_entropy, is_correct
from pfedhn.params import pack, take
from pfedhn.system.environment import commit, processor_name

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where `--only equal` tells what rounding does
NUM_NUDGES = 32
TF32_TERAFLOPS = {"NVIDIA H200": 494.7}  # of dense products, by the data sheet
TARGETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    **{f"lenet-{size}": ((3, 32, 32), partial(LeNet, 10, kernels)) for size, kernels in bench.SIZES.items()},
    "lenet-plain": ((3, 32, 32), bench.PlainLeNet),
    "omniglot": ((1, 28, 28), partial(OmniglotNet, 1623)),
    "resnet18": ((3, 32, 32), partial(ResNet, 10)),  # too large for a dense hypernetwork: --head low-rank, or chunked
    "transformer": ((3, 32, 32), lambda: Transformer()),
}


SIZES = tuple(f"lenet-{size}" for size in bench.SIZES)
SEVERAL = "lenet-SML"  # one hypernetwork for clients of three sizes


class Transformer(nn.Module):
    """A small vision transformer: patches of 4 x 4 pixels, 64 numbers each, four layers of four heads."""

    def __init__(self, width: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.randn(64, width) / 10)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        output: Tensor = self.out(self.layers(tokens).mean(1))
        return output


def images(num_clients: int, num_examples: int, shape: tuple[int, ...], num_classes: int, seed: int = 0) -> Federation:
    """Random images whose mean tells their class; `num_examples` to train on per client. Pictures have 256 values."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for _ in range(num_clients):
        splits = {}
        for split, count in (("train", num_examples), ("validation", num_examples // 4), ("test", num_examples // 4)):
            y = torch.randint(num_classes, (count,), generator=generator)
            x = torch.randn(count, *shape, generator=generator) + y.view(-1, *[1] * len(shape)) / num_classes
            splits[split] = ((32 * x).round().clamp(-128, 127) / 32 + 0.0, y)  # one zero, not two
        clients.append(splits)
    return Federation.from_clients(clients)


def simulation(
    method: str,
    federation: Federation,
    models: list[Model],
    schedule: Schedule,
    seed: int,
    executor: str,
    **settings: Any,
) -> Simulation:
    algorithm = ALGORITHMS[method](**settings).for_clients(federation.num_clients)
    return Simulation(
        algorithm, {model.name: model for model in models}, schedule, seed, executor, federation=federation
    )


def relative_difference(left: Any, right: Any) -> float:
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True):
        if a.is_floating_point() and a.numel():
            worst = max(worst, float((a.double() - b.double()).norm() / (b.double().norm() + 1e-12)))
    return worst


def check_equal(write: Any, methods: list[str]) -> None:
    """The state after a few rounds, captured and by the loop, with tf32 off.

    Where rounding decides on which side of zero an activation lies, a difference of a bit becomes one of weights, and
    Adam moves a weight as far for a gradient that is all rounding as for any other. So captured rounds may differ from
    the loop as much as the loop differs from itself where it starts from memories whose last bits are others.
    """
    if DEVICE.type == "cuda":
        set_up_gpu("fp32", is_deterministic=False)
    targets = {
        "mlp": (images(8, 60, (1, 8, 8), 4), lambda: MLP(64, 32, 4)),
        "lenet": (images(6, 100, (3, 32, 32), 4), lambda: LeNet(4)),
        "lenet-plain": (images(6, 100, (3, 32, 32), 4), bench.PlainLeNet),
    }
    for target, (federation, factory) in targets.items():
        there = federation.to(DEVICE)
        model = Model("model", factory, cross_entropy, is_correct, DEVICE)
        for method in methods:
            expected = few_rounds(method, there, model, "loop")
            others = [few_rounds(method, there, model, "loop", seed) for seed in range(NUM_NUDGES)]
            own = [max(relative_difference(other[part], expected[part]) for other in others) for part in (0, 1)]
            for how in ("as traced", "compiled") if DEVICE.type == "cuda" else ():
                found = few_rounds(method, there, model, how)
                losses, memories = map(relative_difference, found, expected)
                write(
                    {
                        "check": "equal",
                        "target": target,
                        "method": method,
                        "captured": how,
                        "difference": memories,
                        "difference_of_losses": losses,
                        "nudged_difference": own[1],
                        "nudged_difference_of_losses": own[0],
                        "equal": losses < max(1e-3, 2 * own[0]) and memories < max(1e-3, 2 * own[1]),
                    }
                )
            if DEVICE.type == "cpu":
                about = {"check": "nudged", "target": target, "method": method, "nudges": NUM_NUDGES}
                write(about | {"nudged_difference": own[1], "nudged_difference_of_losses": own[0]})


def few_rounds(
    method: str, federation: Federation, model: Model, how: str, nudge: int | None = None
) -> tuple[Any, Any]:
    """Losses on validation, and what everybody remembers in the end; few, since what rounding does grows with each."""
    settings: dict[str, Any] = {"outer_steps": 3} if method == "pfedme" else {"local_steps": 3}
    cohort = 1 if method == "pfedhn" else 3
    schedule = Schedule(4 * cohort, cohort, 32, 2 * cohort)
    one = simulation(method, federation, [model], schedule, 0, "captured", **settings)
    state = one.initial_state()
    everybody, tables = list(range(federation.num_clients)), state.memories.private.values()
    if nudge is not None:
        noise = torch.Generator().manual_seed(nudge)
        for table in tables:
            table.take(everybody)  # which makes what it has not
        known = (state.memories.shared, state.memories.rows, [table.tree for table in tables])
        for leaf in pytree.tree_leaves(known):
            if leaf.is_floating_point():
                leaf.mul_((1 + 6e-8 * torch.randn(leaf.shape, generator=noise)).to(leaf))
    steps = replace(one, executor="loop").rounds(state) if how == "loop" else CapturedRun(one, state).rounds()
    losses = [p.evaluation.splits["validation"].loss for p in steps if p.evaluation]
    if how != "loop":
        torch.cuda.synchronize()
        COMPILER.wait()
    private = [table.take(everybody) for table in tables]
    return losses, (state.memories.shared, state.memories.rows, private)


def measure(
    write: Any,
    runs: list[int],
    rounds: int,
    target: str = "lenet-M",
    method: str = "pfedhn",
    clients: int = 50,
    every: int = 30,
    is_profiled: bool = False,
    **settings: Any,
) -> None:
    """Milliseconds per round and run, evaluation of all clients included."""
    names = SIZES if target == SEVERAL else (target,)
    set_up_gpu("tf32", is_deterministic=False)
    federation = images(clients, 40_000 // clients, TARGETS[names[0]][0], 10).to(DEVICE)
    models = [Model(name, TARGETS[name][1], cross_entropy, is_correct, DEVICE) for name in names]
    if len(names) > 1:
        federation = federation.with_architectures([names[client % len(names)] for client in range(clients)])
    cohort = ALGORITHMS[method].cohort_size
    schedule = Schedule(rounds * cohort, cohort, 64, every)
    for count in runs:
        set_up_gpu("tf32", is_deterministic=False, num_runs=count)
        gc.collect()  # a run and its captured round refer to each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        ones = [simulation(method, federation, models, schedule, seed, "captured", **settings) for seed in range(count)]
        write(
            {
                "check": "time",
                "program": "captured",
                "target": target,
                "method": method,
                "head": getattr(innermost(ones[0].algorithm), "head", None),
                "clients": clients,
                "runs": count,
                "rounds": ones[0].num_rounds,
                "local_steps": ones[0].algorithm.num_batches,
                "cohort": ones[0].clients_per_round,
                "evaluate_every": every,
                **timed(ones, names, started, write if is_profiled and count == 1 else None),
            }
        )


def timed(ones: Sequence[Simulation], targets: Sequence[str], started: float, write: Any) -> dict[str, Any]:
    """What runs side by side take in time and memory; the first one's kernels are written down by `write`, if any."""
    group = [CapturedRun(one, one.initial_state()) for one in ones]
    iterators = [run.rounds() for run in group]
    next(iterators[0])  # traced, captured and evaluated once; the compiler goes on with it
    torch.cuda.synchronize()
    ready = time.perf_counter()
    group[0].settle()
    for run, iterator in zip(group[1:], iterators[1:], strict=True):  # by now, captured once
        next(iterator)
        run.settle()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in side_by_side(iterators):
        pass
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    num_rounds, cohort = ones[0].num_rounds, ones[0].clients_per_round
    num_steps = len(ones) * num_rounds * cohort * ones[0].algorithm.num_batches
    teraflops = num_steps * step_flops(targets) / seconds / 1e12
    limit = TF32_TERAFLOPS.get(torch.cuda.get_device_name())
    memory = {
        "peak_memory_mb": torch.cuda.max_memory_allocated() / 2**20,
        "reserved_memory_mb": torch.cuda.max_memory_reserved() / 2**20,  # what the allocator keeps from other processes
    }
    if write is not None:
        profile(write, group[0])
    return {
        "ms_per_round_and_run": 1e3 * seconds / num_rounds / len(ones),
        "ms_per_round": 1e3 * seconds / num_rounds,
        "teraflops": teraflops,
        "fraction_of_limit": None if limit is None else teraflops / limit,
        "seconds_to_first_round": ready - started,
        "seconds_to_all_compiled": begun - started,
        **memory,
    }


def step_flops(targets: Sequence[str], batch_size: int = 64) -> float:
    """Of the products of one local step, forward and backward; the mean over targets."""
    counts = []
    for target in targets:
        shape, factory = TARGETS[target]
        with FlopCounterMode(display=False) as counter:
            cross_entropy(factory()(torch.zeros(batch_size, *shape)), torch.zeros(batch_size).long()).mean().backward()
        counts.append(counter.get_total_flops())
    return float(statistics.mean(counts))


def sweep(write: Any, rounds: int) -> None:
    """One thing varied at a time, from the paper's CIFAR-10 run."""
    measure(write, [1, 4, 8, 16, 24], rounds)
    for steps in (1, 10, 25, 100):
        measure(write, [1], rounds, local_steps=steps)
    for target in ("lenet-S", "lenet-L"):
        measure(write, [1, 16], rounds, target)


def profile(write: Any, run: CapturedRun) -> None:
    for name, graph in (("round", next(iter(run.graphs.values()))), ("evaluation", run.evaluation_graph)):
        assert graph is not None
        run.counter.zero_()
        found = bench.kernels(graph.replay)
        write(
            {
                "check": "profile",
                "of": name,
                "kernels": sum(kernel.calls for kernel in found),
                "busy_ms": sum(kernel.microseconds for kernel in found) / 1e3,
                "top": [[kernel.name[:60], kernel.calls, round(kernel.microseconds, 1)] for kernel in found[:25]],
            }
        )


Road = Callable[[], Tensor]


def roads(device: torch.device, workload: bench.Workload) -> tuple[Road, Road]:
    """The local steps of a client whose LeNet is of plain layers: as the engine takes them, and written out by hand."""
    federation = workload.federation().to(device)
    one = workload.simulation(federation, workload.model(str(device), is_plain=True), "captured")
    state, (model,), algorithm = one.initial_state(), one.models.values(), one.algorithm
    assert isinstance(algorithm, PFedHN)
    member = torch.zeros(1, dtype=torch.int64, device=device)
    batches = take(federation.batches(member, keys.fold(0, "bench"), workload.local_steps, workload.batch_size), 0)
    received = algorithm.send(model, state.memories.shared, take(state.memories.rows, 0))
    private = take(state.memories.private[model.name].take([0]), 0).private
    scan = TracedScan(compile_graph)

    def by_engine() -> Tensor:
        with scan.running((received, private, batches)):
            update, _ = algorithm.train(model, received, private, batches)
        return pack(update)[0]

    start, unpack = pack(received)

    def loss(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model.training_module, unpack(weights), (x,)), y).mean()

    def step(weights: Tensor, velocity: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        gradient = grad(loss)(weights, x, y)
        gradient = gradient * (50.0 / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp(max=1.0)
        velocity = 0.9 * velocity + gradient + 5e-5 * weights
        return weights - 5e-3 * velocity, velocity

    example = (start, torch.zeros_like(start), batches.x[0], batches.y[0])
    compiled: Callable[..., tuple[Tensor, Tensor]] = make_fx(step)(*(value.clone() for value in example))
    if device.type == "cuda":
        compiled = torch.compile(compiled, dynamic=False, fullgraph=True)

    def by_hand() -> Tensor:
        weights, velocity = start, torch.zeros_like(start)
        for x, y in zip(batches.x, batches.y, strict=True):
            weights, velocity = compiled(weights, velocity, x, y)
        return start - weights

    return by_engine, by_hand


def generic(write: Any, counts: tuple[int, ...] = (1, 16), replays: int = 30) -> None:
    """A target of ordinary layers, on no kernels of ours: the engine's graph against one captured by hand, in turns."""
    set_up_gpu("tf32", is_deterministic=False)
    workload = bench.Workload()
    by_engine, by_hand = roads(DEVICE, workload)
    by_engine()
    COMPILER.wait()
    for count in counts:
        both = {name: [captured(work) for _ in range(count)] for name, work in (("ours", by_engine), ("hand", by_hand))}
        times: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(7):
            for name, graphs in both.items():
                times[name].append(replayed(graphs, replays))
        ours, hand = (statistics.median(times[name]) for name in ("ours", "hand"))
        left, right = (both[name][0][2] for name in ("ours", "hand"))
        write(
            {
                "check": "generic",
                "target": "lenet-M of plain layers",
                "runs": count,
                "local_steps": workload.local_steps,
                "ms_by_engine": ours,
                "ms_by_hand": hand,
                "ratio": ours / hand,
                "difference": float((left - right).norm() / right.norm()),  # of tf32, grown over 50 steps
            }
        )


Captured = tuple[torch.cuda.CUDAGraph, torch.cuda.Stream, Tensor]


def captured(work: Callable[[], Tensor]) -> Captured:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    return graph, stream, result


def replayed(graphs: list[Captured], times: int) -> float:
    """Milliseconds per replay of each, the graphs in turns on streams of their own."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        for graph, stream, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / times / len(graphs)


def has_compiled() -> bool:
    """Whether the compilers will find what they made earlier, which makes the first round come sooner."""
    usual = {
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}",
        "TRITON_CACHE_DIR": Path.home() / ".triton" / "cache",
    }
    folders = [Path(os.environ.get(name) or folder) for name, folder in usual.items()]
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="time", choices=["equal", "time", "sweep", "generic"])
    parser.add_argument("--runs", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--target", choices=[*TARGETS, SEVERAL], default="lenet-M")
    parser.add_argument("--method", default="pfedhn")
    parser.add_argument("--head", choices=["dense", "low-rank", "chunked"], help="of pFedHN's hypernetwork")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--every", type=int, default=30, help="communication steps from one evaluation to the next")
    parser.add_argument("--inductor", default="", help="settings to try, e.g. combo_kernels=True")
    options = parser.parse_args()
    for setting in filter(None, options.inductor.split(",")):
        import ast

        import torch._inductor.config as inductor

        name, _, value = setting.partition("=")
        setattr(inductor, name, ast.literal_eval(value))
    about = {
        "inductor": options.inductor,
        "device": f"cuda: {torch.cuda.get_device_name()}" if DEVICE.type == "cuda" else f"cpu: {processor_name()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "compiled_before": has_compiled(),
    }

    def write(record: dict[str, Any]) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps(record | about) + "\n")
        shown = {name: value for name, value in record.items() if name != "top"}
        print(json.dumps(shown), flush=True)
        for row in record.get("top", []):
            print("   ", row, flush=True)

    if options.only == "equal":
        check_equal(write, options.method.split(",") if options.method != "all" else list(ALGORITHMS))
    elif options.only == "time":
        runs = [int(count) for count in options.runs.split(",")]
        settings = {} if options.head is None else {"head": options.head}
        about_runs = (options.target, options.method, options.clients, options.every)
        measure(write, runs, options.rounds, *about_runs, is_profiled=True, **settings)
    elif options.only == "sweep":
        sweep(write, options.rounds)
    else:
        generic(write)


if __name__ == "__main__":
    main()
