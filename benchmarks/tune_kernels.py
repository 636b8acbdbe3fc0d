"""On a GPU: finds block sizes for pfedhn.kernels, for the networks of the paper, and writes kernel_configs.json.

    python benchmarks/tune_kernels.py --check                # are the kernels right here? about a minute
    python benchmarks/tune_kernels.py [--seconds 220] [--output FILE] [--compare] [--only lenet16] [--precision tf32x3]

A first generation of random candidates per kernel, then neighbors of the best until the time is up; other processes
compile while this one measures. Candidates are checked before they are timed: on small integers every sum is exact,
in tf32 too, so results must be equal to float64's. The file is rewritten after each generation and whenever one ends.
"""

import argparse
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

SOURCE = Path(__file__).resolve().parent.parent / "src"


def import_alone(name: str) -> Any:
    """One module of the package: the package as a whole needs more than a bare GPU machine has."""
    if "pfedhn" not in sys.modules:
        package = types.ModuleType("pfedhn")
        package.__path__ = [str(SOURCE / "pfedhn")]
        sys.modules["pfedhn"] = package
    return importlib.import_module(f"pfedhn.{name}")


conv, launch, linear = (import_alone(f"kernels.{name}") for name in ("conv", "launch", "linear"))
Blocks = launch.Blocks

DEVICE = "cuda"
BATCH = 64
PRECISIONS = ("tf32", "tf32x3")
MAX_SHARED_BYTES = 100_000  # of an H200's 232,448: smaller GPUs have about this much
MAX_PARTIAL_SUMS = 2**24


class Layer(NamedTuple):
    name: str
    channels: int
    out_channels: int
    kernel: int
    padding: int
    side: int
    pool: bool = True
    is_first: bool = False  # its input gradient is never asked for

    @property
    def out_side(self) -> int:
        side: int = conv.output_size(self.side, self.kernel, self.padding, self.pool)
        return side


def lenet(num_kernels: int, in_channels: int) -> list[Layer]:
    name = f"lenet{num_kernels}" + ("-unpadded" if in_channels == 3 else "")
    return [
        Layer(f"{name}.conv1", in_channels, num_kernels, 5, 0, 32, is_first=True),
        Layer(f"{name}.conv2", num_kernels, 2 * num_kernels, 5, 0, 14),
    ]


FIRST_CHANNELS = conv.PADDED_CHANNELS.get(3, 3)
OMNIGLOT = [
    Layer("omniglot.conv1", 1, 16, 3, 1, 28, is_first=True),
    Layer("omniglot.conv2", 16, 32, 3, 1, 14),
    Layer("omniglot.conv3", 32, 64, 3, 1, 7),
    Layer("omniglot.conv4", 64, 128, 3, 1, 3, pool=False),
]
LAYERS = [*lenet(16, FIRST_CHANNELS), *OMNIGLOT, *lenet(8, FIRST_CHANNELS), *lenet(32, FIRST_CHANNELS)]
OTHER_WIDTH = [lenet(16, 3 if FIRST_CHANNELS == 4 else 4)[0]]


class LinearLayer(NamedTuple):
    name: str
    inputs: int
    outputs: int
    is_first: bool = False

    relu = True


LINEAR_LAYERS = [
    LinearLayer("lenet16.fc1", 800, 120),
    LinearLayer("lenet16.fc2", 120, 84),
    LinearLayer("lenet16.fc3", 84, 10),
    LinearLayer("lenet100.fc3", 84, 100),
    LinearLayer("omniglot.fc1", 1152, 120),
    LinearLayer("omniglot.fc2", 120, 1623),
    LinearLayer("mlp.fc1", 784, 100, is_first=True),
    LinearLayer("mlp.fc2", 100, 10),
    LinearLayer("lenet8.fc1", 400, 120),
    LinearLayer("lenet32.fc1", 1600, 120),
]


class Problem(NamedTuple):
    kind: str
    layer: Layer
    runs: int
    precision: str = "tf32"

    def __str__(self) -> str:
        return f"{self.layer.name:22} {self.kind:16} R={self.runs:<3} {self.precision}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """x, weight, bias and output as the kernels see them."""
        layer = self.layer
        return {
            "x": (self.runs, BATCH, layer.side, layer.side, layer.channels),
            "weight": (self.runs, layer.kernel, layer.kernel, layer.channels, layer.out_channels),
            "bias": (self.runs, layer.out_channels),
            "out": (self.runs, BATCH, layer.out_side, layer.out_side, layer.out_channels),
        }

    @property
    def key(self) -> Any:
        return conv.config_key(self.kind, self.shapes["x"], self.shapes["out"], self.layer.kernel, self.precision)

    @property
    def blocks(self) -> Any:
        """Those in use now."""
        return conv.blocks_for(self.kind, self.shapes["x"], self.shapes["out"], self.layer.kernel, self.precision)

    def product(self) -> tuple[int, int, int]:
        """Examples, columns and depth of the whole matrix product."""
        layer = self.layer
        stride = 2 if layer.pool else 1
        pixels = BATCH * layer.out_side**2
        length = (layer.kernel + stride - 1) ** 2 * layer.channels
        if self.kind == "forward":
            return pixels, layer.out_channels, length
        if self.kind == "weight_gradient":
            return length + 1, layer.out_channels, pixels
        return BATCH * launch.ceil_divide(layer.side, stride) ** 2, layer.channels * stride**2, layer.out_channels

    def programs(self, blocks: Any) -> int:
        rows, columns, depth = self.product()
        tiles: int = launch.ceil_divide(rows, blocks.rows) * launch.ceil_divide(columns, blocks.columns)
        if self.kind == "weight_gradient":
            tiles *= min(blocks.groups, launch.ceil_divide(depth, blocks.depth))
        return tiles

    def allows(self, blocks: Any) -> bool:
        if min(blocks) < 1:
            return False
        rows, columns, depth = self.product()
        corners = 4 if self.layer.pool else 1
        width = blocks.columns * (1 if self.kind == "input_gradient" else corners)  # of the tile of results
        copies = corners if self.kind == "input_gradient" else 1  # tiles per step: one for each corner
        copies *= 2 if self.precision == "tf32x3" else 1
        shared = 4 * copies * blocks.stages * blocks.depth * (blocks.rows + width)
        numbers_per_thread = blocks.rows * width / (32 * blocks.warps)
        sums = self.runs * blocks.groups * corners * rows * columns if self.kind == "weight_gradient" else 0
        return (
            16 <= blocks.rows <= min(512, launch.tile(rows))
            and 16 <= blocks.columns <= min(128, launch.tile(columns))
            and 16 <= blocks.depth <= min(128, launch.tile(depth))
            and blocks.warps <= 8
            and blocks.stages <= 4
            and blocks.groups <= 512
            and (self.kind == "weight_gradient") == (blocks.groups > 1)
            and 4 <= numbers_per_thread <= 128
            and shared <= MAX_SHARED_BYTES
            and sums <= MAX_PARTIAL_SUMS
            and (self.runs > 1 or self.programs(blocks) >= min(40, self.programs(conv.default_blocks(self.key))))
        )

    def first_candidates(self, count: int) -> list[Any]:
        known = [self.blocks, conv.default_blocks(self.key)]
        choices = itertools.product(
            (16, 32, 64, 128, 256, 512),
            (16, 32, 64, 128),
            (16, 32, 64),
            (1, 2, 4, 8),
            (1, 2, 3),
            (8, 16, 32, 64, 128, 256) if self.kind == "weight_gradient" else (1,),
        )
        allowed = [blocks for blocks in itertools.starmap(Blocks, choices) if self.allows(blocks)]
        return list(dict.fromkeys(known + random.Random(str(self)).sample(allowed, min(count, len(allowed)))))

    def neighbors(self, blocks: Any) -> Iterator[Any]:
        for field in Blocks._fields:
            value = getattr(blocks, field)
            for other in (value - 1, value + 1) if field == "stages" else (value // 2, value * 2):
                candidate = blocks._replace(**{field: other})
                if self.allows(candidate):
                    yield candidate

    def call(self, blocks: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Launches the kernel, cut up as `blocks` say."""
        layer, precision = self.layer, self.precision
        launch.CONFIGS[self.key] = blocks
        how = (layer.padding, layer.pool)
        if self.kind == "forward":
            out, argmax = conv.conv_block_op(tensors["x"], tensors["weight"], tensors["bias"], *how, precision)
            return [out, argmax]
        gradient, argmax = tensors["gradient"], tensors["argmax"]
        if self.kind == "weight_gradient":
            groups = conv.num_groups(blocks, gradient.shape)
            how_many = (layer.kernel, *how, groups, precision)
            return [conv.weight_gradient_op(tensors["x"], gradient, argmax, *how_many)]
        sides = (layer.side, layer.side)
        return [conv.input_gradient_op(gradient, argmax, tensors["weight"], *sides, *how, precision)]


class LinearProblem(NamedTuple):
    """As `Problem`, for a linear layer."""

    kind: str
    layer: LinearLayer
    runs: int
    precision: str = "tf32"

    def __str__(self) -> str:
        return f"{self.layer.name:22} {self.kind:16} R={self.runs:<3} {self.precision}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        runs, layer = self.runs, self.layer
        return {
            "x": (runs, BATCH, layer.inputs),
            "weight": (runs, layer.outputs, layer.inputs),
            "bias": (runs, layer.outputs),
            "out": (runs, BATCH, layer.outputs),
        }

    @property
    def key(self) -> Any:
        return linear.config_key(self.kind, self.runs, BATCH, self.layer.inputs, self.layer.outputs, self.precision)

    @property
    def blocks(self) -> Any:
        return linear.blocks_for(self.kind, self.runs, BATCH, self.layer.inputs, self.layer.outputs, self.precision)

    @property
    def most_rows(self) -> int:
        return 128 if self.kind == "linear_forward" else linear.MAX_BACKWARD_ROWS

    def allows(self, blocks: Any) -> bool:
        inputs, outputs = self.layer.inputs, self.layer.outputs
        copies = 2 if self.precision == "tf32x3" else 1
        rows, columns, depth = (
            (BATCH, outputs, inputs) if self.kind == "linear_forward" else (BATCH, inputs, max(BATCH, outputs))
        )
        return (
            min(blocks) >= 1
            and 16 <= blocks.rows <= min(self.most_rows, launch.tile(rows))
            and 16 <= blocks.columns <= min(128, launch.tile(columns))
            and 16 <= blocks.depth <= min(256, launch.tile(depth))
            and blocks.warps <= 8
            and blocks.stages <= 5
            and blocks.groups == 1
            and blocks.rows * blocks.columns <= 128 * 32 * blocks.warps
            and copies * 4 * blocks.stages * blocks.depth * (blocks.rows + blocks.columns) <= MAX_SHARED_BYTES
        )

    def first_candidates(self, count: int) -> list[Any]:
        known = [self.blocks, linear.default_blocks(self.key)]
        choices = itertools.product((16, 32, 64), (16, 32, 64, 128), (32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 4), (1,))
        allowed = [blocks for blocks in itertools.starmap(Blocks, choices) if self.allows(blocks)]
        return list(dict.fromkeys(known + random.Random(str(self)).sample(allowed, min(count, len(allowed)))))

    def neighbors(self, blocks: Any) -> Iterator[Any]:
        return Problem.neighbors(self, blocks)  # type: ignore[arg-type]

    def call(self, blocks: Any, tensors: dict[str, Tensor]) -> list[Tensor]:
        launch.CONFIGS[self.key] = blocks
        x, weight, relu, precision = tensors["x"], tensors["weight"], self.layer.relu, self.precision
        if self.kind == "linear_forward":
            return [linear.linear_block_op(x, weight, tensors["bias"], relu, precision)]
        with_x = not self.layer.is_first
        results = linear.linear_backward_op(x, weight, tensors["gradient"], tensors["out"], relu, with_x, precision)
        return list(results)[0 if with_x else 1 :]


class LinearCase:
    """As `Case`, for a linear layer."""

    def __init__(self, layer: LinearLayer, runs: int) -> None:
        torch.manual_seed(0)
        self.place = (layer, runs)
        shapes = LinearProblem("linear_forward", layer, runs).shapes
        self.tensors = {name: integers(*shapes[name]) for name in ("x", "weight", "bias")}
        self.tensors["gradient"] = integers(*shapes["out"])
        x, weight, bias = (self.tensors[name].double().requires_grad_() for name in ("x", "weight", "bias"))
        out = (x @ weight.mT + bias[:, None]).relu()
        gradients = torch.autograd.grad(out, (x, weight, bias), self.tensors["gradient"].double())
        self.tensors["out"] = out.detach().float()
        self.expected = {
            "linear_forward": [self.tensors["out"]],
            "linear_backward": [gradient.float() for gradient in gradients][1 if layer.is_first else 0 :],
        }

    def is_right(self, problem: Any, blocks: Any) -> bool:
        results = problem.call(blocks, self.tensors)
        return all(torch.equal(a, b) for a, b in zip(results, self.expected[problem.kind], strict=True))


def case_for(problem: Any) -> Any:
    kind = LinearCase if isinstance(problem, LinearProblem) else Case
    return kind(problem.layer, problem.runs)


def linear_problems(layers: list[LinearLayer], precision: str) -> list[LinearProblem]:
    kinds = ("linear_forward", "linear_backward")
    return [LinearProblem(kind, layer, runs, precision) for layer in layers for runs in (1, 16) for kind in kinds]


def problems(layers: list[Layer], precision: str) -> list[Problem]:
    kinds = ("weight_gradient", "forward", "input_gradient")
    return [
        Problem(kind, layer, runs, precision)
        for layer in layers
        for runs in (1, 16)
        for kind in kinds
        if not (kind == "input_gradient" and layer.is_first)
    ]


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, device=DEVICE).float()


class Case:
    """Inputs of one layer and number of runs, and what the kernels must make of them, by PyTorch in float64."""

    @torch.backends.cudnn.flags(enabled=False)  # its transforms (FFT, Winograd) would round
    def __init__(self, layer: Layer, runs: int) -> None:
        torch.manual_seed(0)
        self.place = (layer, runs)
        shapes = Problem("forward", layer, runs).shapes
        self.tensors = {name: integers(*shapes[name]) for name in ("x", "weight", "bias")}
        self.tensors["gradient"] = integers(*shapes["out"])
        self.expected: dict[str, Tensor] = {}
        parts: dict[str, list[Tensor]] = {"forward": [], "weight_gradient": [], "input_gradient": [], "argmax": []}
        for run in range(runs):
            x, weight, bias = (self.tensors[name][run].double().requires_grad_() for name in ("x", "weight", "bias"))
            unpooled = functional.conv2d(x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), bias, padding=layer.padding)
            if layer.pool:
                pooled, where = functional.max_pool2d(unpooled, 2, return_indices=True)
                where = where // unpooled.shape[3] % 2 * 2 + where % unpooled.shape[3] % 2
            else:
                pooled, where = unpooled, torch.zeros_like(unpooled)
            out = pooled.relu()
            argmax = torch.where(out > 0, where, 4).to(torch.int8)
            direction = self.tensors["gradient"][run].double().permute(0, 3, 1, 2)
            of_x, of_weight, of_bias = torch.autograd.grad(out, (x, weight, bias), direction)
            parts["forward"].append(out.detach().permute(0, 2, 3, 1))
            parts["argmax"].append(argmax.permute(0, 2, 3, 1))
            parts["weight_gradient"].append(torch.cat([of_weight.flatten(0, 2), of_bias[None]]))
            parts["input_gradient"].append(of_x)
        self.tensors["argmax"] = torch.stack(parts.pop("argmax")).contiguous()
        self.expected = {kind: torch.stack(part).float() for kind, part in parts.items()}

    def is_right(self, problem: Any, blocks: Any) -> bool:
        results = problem.call(blocks, self.tensors)
        is_right = torch.equal(results[0], self.expected[problem.kind])
        return is_right and (problem.kind != "forward" or torch.equal(results[1], self.tensors["argmax"]))


def microseconds(call: Callable[[], Any], repeats: int = 20, rounds: int = 5) -> float:
    """Of one call among many in a CUDA graph, as the engine runs it: no launch gaps, data in the cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    times: list[float] = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return sorted(times)[len(times) // 2]


class Warming:
    """Stands in for a compiled kernel: a launch only compiles, into Triton's cache on disk."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *tensors, **constants: self.kernel.warmup(*(t.dtype for t in tensors), grid=grid, **constants)


def only_compile() -> None:
    compiled = launch.compiled
    launch.compiled = lambda kernel: Warming(compiled(kernel))


def compiling_processes(count: int) -> ProcessPoolExecutor | None:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=spawn, initializer=only_compile) if count else None


def compile_candidate(problem: Any, blocks: Any) -> str:
    """In another process. Says what went wrong, if anything did."""
    shapes = problem.shapes
    tensors = {name: torch.empty(shapes[name]) for name in ("x", "weight", "bias")}
    tensors["gradient"] = torch.empty(shapes["out"])
    tensors["out"] = torch.empty(shapes["out"])
    tensors["argmax"] = torch.empty(shapes["out"], dtype=torch.int8)
    try:
        problem.call(blocks, tensors)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


class Tuning:
    def __init__(self, output: Path, deadline: float) -> None:
        self.output = output
        self.deadline = deadline
        self.cases: dict[Any, Any] = {}
        self.start: dict[Any, float] = {}
        self.best: dict[Any, tuple[float, Any]] = {}
        self.tried: dict[Any, set[Any]] = {}
        self.failures = 0

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def measure(self, problem: Any, blocks: Any) -> None:
        place = (problem.layer, problem.runs)
        if place not in self.cases:
            self.cases[place] = case_for(problem)
        case = self.cases[place]
        try:
            is_right = case.is_right(problem, blocks)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            self.failed(problem, blocks, f"{type(error).__name__}: {error}"[:160])
            return
        if not is_right:
            self.failed(problem, blocks, "WRONG RESULT")
            return
        taken = microseconds(lambda: problem.call(blocks, case.tensors), repeats=20 if problem.runs == 1 else 10)
        self.start.setdefault(problem, taken)
        if problem not in self.best or taken < self.best[problem][0]:
            self.best[problem] = (taken, blocks)

    def failed(self, problem: Any, blocks: Any, reason: str) -> None:
        self.failures += 1
        print(f"  {problem} {tuple(blocks)} {reason}", flush=True)

    def generation(self, candidates: dict[Any, list[Any]], pool: ProcessPoolExecutor | None) -> None:
        waiting: list[tuple[Any, Any, Future[str] | None]] = [
            (problem, blocks, pool.submit(compile_candidate, problem, blocks) if pool else None)
            for problem, several in candidates.items()
            for blocks in several
        ]
        done = None
        for problem, blocks, future in waiting:
            if done not in (None, problem):
                self.report(done)
            done = problem
            if self.time_left() <= 0:
                break
            try:
                error = future.result(timeout=max(1.0, self.time_left())) if future else ""
            except TimeoutError:
                break
            except BrokenExecutor:
                error = ""  # a compiling process died; what it left undone is compiled here
            self.tried.setdefault(problem, set()).add(blocks)
            if error:
                self.failed(problem, blocks, error)
            else:
                self.measure(problem, blocks)
        if done:
            self.report(done)
        for _, _, future in waiting:
            if future:
                future.cancel()
        self.write()

    def report(self, problem: Any) -> None:
        if problem in self.best:
            taken, blocks = self.best[problem]
            tried = len(self.tried[problem])
            line = f"{problem} {self.start[problem]:8.1f} -> {taken:8.1f} us  {tuple(blocks)}  {tried} tried"
            print(f"{line}, {self.time_left():.0f} s left", flush=True)

    def write(self) -> None:
        configs = launch.read_configs(self.output) | {p.key: blocks for p, (_, blocks) in self.best.items()}
        temporary = self.output.with_suffix(".partial")
        launch.write_configs(temporary, configs)
        os.replace(temporary, self.output)

    def summary(self) -> None:
        print("\nmicroseconds per network and local step, per run")
        totals: dict[tuple[str, int], list[float]] = {}
        for problem, (taken, _) in self.best.items():
            total = totals.setdefault((problem.layer.name.split(".")[0], problem.runs), [0.0, 0.0])
            total[0] += self.start[problem] / problem.runs
            total[1] += taken / problem.runs
        for (name, runs), (before, after) in totals.items():
            print(f"  {name:18} R={runs:<3} {before:7.1f} -> {after:7.1f}")


def tune(arguments: argparse.Namespace) -> int:
    layers = LAYERS + (OTHER_WIDTH if arguments.compare else [])
    precision, parts = arguments.precision, arguments.only.split(",")
    chosen: list[Any] = problems([layer for layer in layers if any(part in layer.name for part in parts)], precision)
    linear_layers = [layer for layer in LINEAR_LAYERS if any(part in layer.name for part in parts)]
    chosen += linear_problems(linear_layers, precision)
    chosen = [problem for problem in chosen if arguments.runs in (None, problem.runs)]
    tuning = Tuning(arguments.output, time.monotonic() + arguments.seconds)
    pool = compiling_processes(arguments.workers)
    gc.freeze()  # a capture collects garbage, and PyTorch itself is most of what there is to look through
    print(f"{len(chosen)} kernels, {arguments.workers} processes compile, {torch.cuda.get_device_name()}", flush=True)
    try:
        candidates = {problem: problem.first_candidates(arguments.first) for problem in chosen}
        while any(candidates.values()) and tuning.time_left() > 0:
            tuning.generation(candidates, pool)
            candidates = {
                problem: [
                    blocks for blocks in problem.neighbors(best) if blocks not in tuning.tried.get(problem, set())
                ]
                for problem, (_, best) in tuning.best.items()
            }
    finally:
        tuning.write()
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)
    tuning.summary()
    if arguments.compare:
        compare(tuning)
    print(f"{tuning.failures} candidates failed; written: {arguments.output}", flush=True)
    return 0


def compare(tuning: Tuning) -> None:
    """What decided the layout: three or four channels in the first layer, and what PyTorch takes for the same block."""
    print("\nfirst layer of LeNet, by channels (microseconds, all runs)")
    for problem, (taken, _) in tuning.best.items():
        if problem.layer.name in ("lenet16.conv1", "lenet16-unpadded.conv1"):
            print(f"  C={problem.layer.channels} {problem.kind:16} R={problem.runs:<3} {taken:8.1f}")
    for runs in (1, 16):
        images = torch.randn(runs * BATCH, 32, 32, 3, device=DEVICE)
        taken = microseconds(partial(functional.pad, images, (0, 1)))
        print(f"  padding the images from 3 to 4   R={runs:<3} {taken:8.1f}")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    print("PyTorch, one run: forward, backward (microseconds)")
    for layer in LAYERS:
        tensors = Case(layer, 1).tensors
        x = tensors["x"][0].permute(0, 3, 1, 2).requires_grad_(not layer.is_first)
        weight = tensors["weight"][0].permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        weight.requires_grad_()
        bias = tensors["bias"][0].requires_grad_()
        leaves = [t for t in (x, weight, bias) if t.requires_grad]
        forward_pass = partial(conv.reference_conv_block, x, weight, bias, layer.padding, layer.pool)
        try:
            forward = microseconds(forward_pass)
            both = microseconds(partial(forward_and_backward, forward_pass, leaves))
            print(f"  {layer.name:16} {forward:8.1f} {both - forward:8.1f}", flush=True)
        except Exception as error:
            print(f"  {layer.name:16} {type(error).__name__}: {error}"[:160], flush=True)


def forward_and_backward(forward: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(forward().sum(), leaves)


def check(arguments: argparse.Namespace) -> int:
    """Every kernel, the transforms over them, and the permutation; 0 if all is right."""
    warnings.simplefilter("ignore")
    # Deterministic mode fills new tensors with NaN: what a kernel leaves unwritten shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    odd = [
        Layer(f"odd {number}", *shape)
        for number, shape in enumerate(
            [
                (4, 8, 5, 1, 9, True),
                (4, 32, 5, 2, 11, False),
                (4, 16, 3, 0, 12, True),
                (1, 24, 5, 0, 13, True),
                (8, 40, 5, 2, 7, True),
                (16, 128, 3, 0, 9, False),
                (32, 8, 5, 1, 8, True),
                (64, 64, 5, 0, 10, True),
                (64, 96, 3, 1, 5, True),
            ]
        )
    ]
    layers = [*LAYERS, *OTHER_WIDTH, *odd]
    kinds = ("forward", "weight_gradient", "input_gradient")
    every: list[Any] = [
        Problem(kind, layer, runs, precision)
        for layer, runs, kind, precision in itertools.product(layers, (1, 3, 16), kinds, PRECISIONS)
    ]
    every += [problem for precision in PRECISIONS for problem in linear_problems(LINEAR_LAYERS, precision)]
    blocks_of = {problem: problem.blocks for problem in every}  # before any call: that would change what others find
    pool = compiling_processes(arguments.workers)
    if pool:
        with pool:
            for problem, blocks in blocks_of.items():
                pool.submit(compile_candidate, problem, blocks)
        print("compiled", flush=True)
    wrong = 0
    case = None
    for problem, blocks in blocks_of.items():
        if case is None or case.place != (problem.layer, problem.runs):
            case = case_for(problem)
        try:
            result = "right" if case.is_right(problem, blocks) else "WRONG"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"[:300]
        if result != "right":
            wrong += 1
            print(f"{problem} {tuple(blocks)}: {result}", flush=True)
    print(f"{len(every)} kernels checked", flush=True)
    torch.use_deterministic_algorithms(False)
    for name, test in (
        ("transforms", check_transforms),
        ("permutation", check_permutation),
        ("rounding", check_rounding),
    ):
        try:
            test()
            print(f"{name}: right", flush=True)
        except Exception as error:
            wrong += 1
            print(f"{name}: {type(error).__name__}: {error}"[:2000], flush=True)
    print(f"{wrong} wrong")
    return int(wrong > 0)


def check_transforms() -> None:
    """vmap(grad) of a small network: eager, traced, compiled, captured; against the same in plain PyTorch."""
    from torch.func import functional_call, grad, vmap
    from torch.fx.experimental.proxy_tensor import make_fx

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = conv.ConvBlock(3, 16, 5)
            self.conv2 = conv.ConvBlock(16, 32, 5)
            self.fc = torch.nn.Linear(800, 10)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.fc(self.conv2(self.conv1(x)).flatten(1))
            return output

    torch.manual_seed(0)
    network = Network().to(DEVICE)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(network, params, (x,)), y)

    for runs in (1, 16):
        params = {
            name: torch.randn(runs, *value.shape, device=DEVICE) * 0.05 for name, value in network.named_parameters()
        }
        x, y = torch.randn(runs, BATCH, 3, 32, 32, device=DEVICE), torch.randint(10, (runs, BATCH), device=DEVICE)
        step = vmap(grad(loss))
        supported = conv.is_supported
        try:
            conv.is_supported = lambda *_: False
            doubles = {name: value.double() for name, value in params.items()}
            expected = {name: value.float() for name, value in step(doubles, x.double(), y).items()}
        finally:
            conv.is_supported = supported

        def close(results: dict[str, Tensor], road: str, expected: dict[str, Tensor] = expected) -> None:
            for name, result in results.items():
                difference = float((result - expected[name]).norm() / expected[name].norm())
                assert difference < 1e-4, f"{road}, {name}: differs by {difference}"

        close(step(params, x, y), "eager")
        graph = make_fx(step)(params, x, y)
        names = [str(node.target) for node in graph.graph.nodes]
        assert sum("input_gradient" in name for name in names) == 1, "the images' gradient is computed"
        close(graph(params, x, y), "traced")
        compiled = torch.compile(graph, fullgraph=True, dynamic=False)
        close(compiled(params, x, y), "compiled")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            compiled(params, x, y)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            results = compiled(params, x, y)
        captured.replay()
        torch.cuda.synchronize()
        close(results, "captured")
        first = {name: value.clone() for name, value in results.items()}
        captured.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(first[name], results[name]) for name in first), "two replays differ"


def check_permutation() -> None:
    keys = importlib.import_module("pfedhn.keys")
    some = torch.arange(-500, 500) * 7046029254386353131
    for size in (1, 2, 3, 10, 63, 64, 65, 1000, 39999, 2**31 + 11, 2**40 + 3):
        on_gpu = keys.permutation_head(some.to(DEVICE), size, 64)
        assert torch.equal(on_gpu.cpu(), keys.permutation_head(some, size, 64)), f"size {size}"
    sizes = torch.randint(1, 900, (1000,))
    on_gpu = keys.permutation_head(some.to(DEVICE), sizes.to(DEVICE), 3200)
    assert torch.equal(on_gpu.cpu(), keys.permutation_head(some, sizes, 3200)), "many sizes"
    one, size = some[:1].to(DEVICE), torch.tensor([600], device=DEVICE)
    taken = microseconds(lambda: keys.permutation_head(one, size, 3200))
    print(f"  permutation of 600 rows, 3200 places: {taken:.1f} us")


def check_rounding() -> None:
    """How far the outputs of layers are from float64's: float32 must be a thousand times closer than tf32."""
    errors: dict[str, list[float]] = {}
    for precision in (*PRECISIONS, "ieee"):
        torch.manual_seed(0)
        for layer in LAYERS[:2]:
            shapes = Problem("forward", layer, 5).shapes
            x, weight, bias = (torch.randn(shapes[name], device=DEVICE) for name in ("x", "weight", "bias"))
            out, _ = conv.conv_block_op(x, weight, bias, layer.padding, layer.pool, precision)
            exact = [
                functional.conv2d(a.permute(0, 3, 1, 2), b.permute(3, 2, 0, 1), c, padding=layer.padding)
                for a, b, c in zip(x.double(), weight.double(), bias.double(), strict=True)
            ]
            expected = functional.max_pool2d(torch.cat(exact), 2).relu().permute(0, 2, 3, 1).unflatten(0, (5, BATCH))
            errors.setdefault(precision, []).append(float((out - expected).norm() / expected.norm()))
        x, weight = torch.randn(5, BATCH, 800, device=DEVICE), torch.randn(5, 120, 800, device=DEVICE)
        out = linear.linear_block_op(x, weight, torch.zeros(5, 120, device=DEVICE), False, precision)
        expected = x.double() @ weight.double().mT
        errors[precision].append(float((out - expected).norm() / expected.norm()))
        print(f"  {precision:7} {', '.join(f'{error:.2g}' for error in errors[precision])}")
    assert 1000 * max(errors["tf32x3"]) < min(errors["tf32"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--output", type=Path, default=launch.CONFIGS_FILE)
    parser.add_argument("--check", action="store_true", help="only check results, with the block sizes in use now")
    parser.add_argument("--compare", action="store_true", help="also time what was decided against")
    parser.add_argument("--only", default="", help="only layers whose name contains one of: lenet16,omniglot,conv1")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="of products")
    parser.add_argument("--runs", type=int, choices=(1, 16), help="only blocks for one run, or for many")
    parser.add_argument("--first", type=int, default=12, help="random candidates per kernel to begin with")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    return check(arguments) if arguments.check else tune(arguments)


if __name__ == "__main__":
    sys.exit(main())
