"""The engine's speed against pFedHN as a textbook writes it: same data, same batches, measured in turns.

Every variant has its own process, so that its memory can be measured, and runs a round when the parent says so: one
after the other, again and again, so that a busy neighbor slows all of them alike.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

from pfedhn import keys
from pfedhn.algorithms.embeddings import Embeddings
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.bench import textbook
from pfedhn.data.batches import Examples
from pfedhn.data.federation import Federation
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.gpu import set_up_gpu
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule
from pfedhn.errors import UserError
from pfedhn.model import Model
from pfedhn.models import MLP, LeNet, cross_entropy, is_correct
from pfedhn.params import Params
from pfedhn.system.process import keep_freed_memory

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
TOLERANCE = 1e-3  # relative, of all weights after one round, tf32 off
EVALUATE_EVERY = 30  # rounds, as in the paper's runs
NUM_ROUNDS = 20_000  # more than anybody measures
SIZES = {"S": 8, "M": 16, "L": 32}  # first kernels of LeNet

Say = Callable[[str], None]
Look = Callable[[], Params]


class Images(Dataset[tuple[Tensor, int]]):
    """uint8 images [N, H, W, C], each made when it is asked for, step by step as torchvision's CIFAR10 makes it.

    Args:
        images: All images.
        y: Their labels.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        open_image: `PIL.Image.fromarray`, which torchvision calls; without Pillow arrays stand for images.
    """

    def __init__(
        self, images: Tensor, y: Tensor, mean: Tensor, std: Tensor, open_image: Callable[[Any], Any] = numpy.asarray
    ) -> None:
        self.images, self.y, self.open_image = images.numpy(), y.tolist(), open_image
        self.mean, self.std, self.dtype = mean.tolist(), std.tolist(), mean.dtype

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        image = self.open_image(self.images[place].squeeze())
        x = torch.from_numpy(numpy.array(image, copy=True)).view(self.images.shape[1:])  # as transforms.ToTensor
        x = x.permute(2, 0, 1).contiguous().to(self.dtype).div(255).clone()  # from here as transforms.Normalize
        mean, std = torch.as_tensor(self.mean, dtype=x.dtype), torch.as_tensor(self.std, dtype=x.dtype)
        if (std == 0).any():
            raise UserError("a standard deviation is zero.")
        return x.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)), self.y[place]


def image_opener() -> Callable[[Any], Any]:
    try:
        from PIL import Image
    except ImportError:  # of the extra "data"
        return numpy.asarray
    return Image.fromarray


class PlainLeNet(nn.Module):
    """`models.LeNet` as its authors write it: the same weights, names and numbers from PyTorch's own layers."""

    def __init__(self, num_kernels: int = 16) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, num_kernels, 5), nn.Conv2d(num_kernels, 2 * num_kernels, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(50 * num_kernels, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2).flatten(1)
        output: Tensor = self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))
        return output


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 10)])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers[1](functional.relu(self.layers[0](x.flatten(1))))
        return output


@dataclass(frozen=True)
class Workload:
    """A federation and a target network of the bench: noise in the form of CIFAR-10 and LeNet, or of digits and MLP."""

    name: str = "lenet"
    num_clients: int = 50
    examples_per_client: int = 800
    local_steps: int = 50
    batch_size: int = 64
    num_kernels: int = 16

    def images(self) -> tuple[Tensor, Tensor]:
        """uint8 images [N, H, W, C], and labels: what is in them does not change the time."""
        count = self.num_clients * self.examples_per_client
        generator = keys.torch_generator(keys.fold(0, "bench"))
        shape = (count, 32, 32, 3) if self.name == "lenet" else (count, 8, 8, 1)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8), torch.arange(count) % 10

    def scale(self) -> tuple[Tensor, Tensor]:
        return (MEAN, STD) if self.name == "lenet" else (MEAN[:1], STD[:1])

    def federation(self) -> Federation:
        """Every client is evaluated on half as many examples as it trains on, as a client of CIFAR-10 is."""
        (images, y), (mean, std) = self.images(), self.scale()
        x = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
        start = torch.arange(self.num_clients) * self.examples_per_client
        train, tested = (
            Examples(torch.arange(len(y)), start, torch.full_like(start, self.examples_per_client // part))
            for part in (1, 4)
        )
        return Federation(x, y, {"train": train, "validation": tested, "test": tested})

    def target(self, is_plain: bool) -> Callable[[], nn.Module]:
        if self.name == "lenet":
            return lambda: PlainLeNet(self.num_kernels) if is_plain else LeNet(10, self.num_kernels)
        return PlainMLP if is_plain else lambda: MLP(64, 32, 10)

    def model(self, device: str, is_plain: bool = False) -> Model:
        return Model(self.name, self.target(is_plain), cross_entropy, is_correct, torch.device(device))

    def simulation(self, federation: Federation, model: Model, executor: str, seed: int = 0) -> Simulation:
        algorithm = PFedHN(local_steps=self.local_steps).for_clients(self.num_clients)
        schedule = Schedule(NUM_ROUNDS, 1, self.batch_size, EVALUATE_EVERY)
        return Simulation(algorithm, {self.name: model}, schedule, seed, executor, federation=federation)


WORKLOADS = {"lenet": Workload(), "mlp": Workload("mlp", examples_per_client=18, local_steps=20, batch_size=16)}


@dataclass(frozen=True)
class Variant:
    """A way to compute rounds: by one of the engine's executors, "textbook" or "textbook-images"."""

    executor: str
    runs: int = 1  # side by side, on a GPU
    rounds_per_turn: int = 1
    is_plain: bool = False  # the target from PyTorch's own layers, which the engine has no kernels for

    @property
    def name(self) -> str:
        plain = ", plain layers" if self.is_plain else ""
        return f"{self.executor}{plain}" + (f", {self.runs} runs side by side" if self.runs > 1 else "")


VARIANTS = {
    "cpu": tuple(map(Variant, ("textbook", "textbook-images", "loop", "traced"))),
    # A captured round is too short to be timed alone; 30 of them hold one evaluation, as in a run.
    "cuda": (
        *map(Variant, ("textbook", "textbook-images", "loop")),
        *(Variant("captured", runs, EVALUATE_EVERY) for runs in (1, 8, 16)),
        Variant("captured", 1, EVALUATE_EVERY, is_plain=True),
    ),
}


def rounds_of(variant: Variant, workload: Workload, device: str) -> Iterator[Look]:
    """Each `next` is one round of every run, and gives a look at the first one's phi after it."""
    federation = workload.federation()
    if variant.executor.startswith("textbook"):
        simulation = workload.simulation(federation, workload.model(device, is_plain=True), "loop")
        data: Dataset[Any] = TensorDataset(federation.x, federation.y)
        if variant.executor == "textbook-images":
            data = Images(*workload.images(), *workload.scale(), image_opener())
        for h in textbook.rounds(simulation, simulation.initial_state(), data):
            yield h.phi
        return
    federation, model = federation.to(device), workload.model(device, variant.is_plain)
    simulations = [workload.simulation(federation, model, variant.executor, seed) for seed in range(variant.runs)]
    yield from captured_rounds(simulations) if variant.executor == "captured" else looped_rounds(simulations[0])


def looped_rounds(simulation: Simulation) -> Iterator[Look]:
    state = simulation.initial_state()
    for number in range(simulation.num_rounds):
        simulation._round(state, number)
        state.round = number + 1
        yield lambda: state.memories.shared.phi


def captured_rounds(simulations: Sequence[Simulation]) -> Iterator[Look]:
    """Rounds of runs that take turns, evaluations where the schedule has them; nobody waits for the GPU."""
    runs = [CapturedRun(simulation, simulation.initial_state()) for simulation in simulations]
    iterators = [run.rounds() for run in runs]
    for number in range(simulations[0].num_rounds):
        for run, iterator in zip(runs, iterators, strict=True):
            while run.state.round <= number:
                next(iterator)
        if number == 0:
            for run in runs:
                run.settle()
        yield lambda: runs[0].state.memories.shared.phi


class Operators(TorchDispatchMode):
    """Counts the operators that compute something, which a view does not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [value.alias_info for value in func._schema.returns]
        self.count += not any(info is not None and not info.is_write for info in views)
        return func(*args, **(kwargs or {}))


class Kernel(NamedTuple):
    name: str
    calls: int
    microseconds: float


def kernels(work: Callable[[], Any]) -> list[Kernel]:
    """The kernels that a GPU runs meanwhile, those that take longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    events = [event for event in record.key_averages() if event.device_type.name == "CUDA"]
    found = [Kernel(event.key, event.count, event.device_time_total) for event in events]
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def count_kernels(work: Callable[[], Any], device: str) -> int:
    """How many kernels `work` launches on a GPU, or operators of PyTorch on a CPU."""
    if device != "cpu":
        return sum(kernel.calls for kernel in kernels(work))
    operators = Operators()
    with operators:
        work()
    return operators.count


def peak_memory_mb() -> float:
    """Peak memory of this process; Linux lets `ru_maxrss` begin with the parent's, so the other count is read."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _worker(pipe: Connection, variant: Variant, workload: Workload, device: str, threads: int, precision: str) -> None:
    if not variant.executor.startswith("textbook"):  # which is measured as a person would run it
        keep_freed_memory()
    torch.set_num_threads(threads)
    set_up_gpu(precision, is_deterministic=False, num_runs=variant.runs)
    rounds = rounds_of(variant, workload, device)
    phi = next(rounds)()
    if device != "cpu":
        torch.cuda.synchronize()  # each run writes on its own stream
    pipe.send({name: value.detach().cpu().numpy() for name, value in phi.items()})
    while pipe.recv() == "turn":
        started = time.perf_counter()
        for _ in range(variant.rounds_per_turn):
            next(rounds)
        if device != "cpu":
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - started) / variant.rounds_per_turn / variant.runs)
    peak = peak_memory_mb() if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20
    num_kernels = count_kernels(lambda: next(rounds), device)
    pipe.send((peak, num_kernels / variant.runs / workload.local_steps))


@dataclass
class Worker:
    """A variant in its own process."""

    variant: Variant
    pipe: Connection
    process: Any

    @staticmethod
    def start(variant: Variant, workload: Workload, device: str, threads: int = 1, precision: str = "fp32") -> "Worker":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, variant, workload, device, threads, precision)
        process = context.Process(target=_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that a worker that dies is noticed
        return Worker(variant, ours, process)

    def first(self) -> dict[str, Any]:
        """The hypernetwork's weights after the first round."""
        phi: dict[str, Any] = self.pipe.recv()
        return phi

    def turn(self) -> float:
        """Milliseconds a round (and run) took."""
        self.pipe.send("turn")
        seconds: float = self.pipe.recv()
        return 1e3 * seconds

    def end(self) -> tuple[float, float]:
        """Peak memory in megabytes, and kernels per local step."""
        self.pipe.send("end")
        peak, num_kernels = self.pipe.recv()
        self.process.join()
        return peak, num_kernels


def in_turns(
    workers: Sequence[Worker], repeats: int, say: Say, pick: Callable[[list[float]], float] = statistics.median
) -> list[float]:
    """Each worker's median, or what `pick` makes of its times."""
    times: list[list[float]] = [[] for _ in workers]
    for turn in range(repeats + 1):  # the first is not counted: memory is still growing
        say(f"turn {turn} of {repeats}")
        for worker, taken in zip(workers, times, strict=True):
            taken.append(worker.turn())
    return [pick(taken[1:]) for taken in times]


def measure(workload: Workload, device: str, repeats: int, say: Say) -> list[dict[str, Any]]:
    """One line per variant: milliseconds a round (median), ratio to the textbook, memory, and whether it is equal."""
    variants = VARIANTS["cpu" if device == "cpu" else "cuda"]
    say(f"{workload.name}: starting {len(variants)} variants")
    workers = [Worker.start(variant, workload, device) for variant in variants]
    first = [worker.first() for worker in workers]
    if device != "cpu":  # compared in full precision, timed as runs are; a process keeps what it compiled
        for worker in workers:
            worker.end()
        workers = [Worker.start(variant, workload, device, precision="tf32") for variant in variants]
        for worker in workers:
            worker.first()
    milliseconds = in_turns(workers, repeats, lambda text: say(f"{workload.name}: {text}"))
    return [
        record(
            device_name(device), workload, variant.name, taken, milliseconds[0], worker.end(), is_equal(phi, first[0])
        )
        for variant, worker, taken, phi in zip(variants, workers, milliseconds, first, strict=True)
    ]


def record(
    device: str,
    workload: Workload,
    variant: str,
    milliseconds: float,
    textbook_milliseconds: float,
    ended: tuple[float, float],
    equal: bool,
) -> dict[str, Any]:
    return {
        "device": device,
        "workload": workload.name,
        "program": variant,  # as in every stored line
        "ms_per_round": round(milliseconds, 3),
        "ratio_to_textbook": round(textbook_milliseconds / milliseconds, 3),
        "peak_memory_mb": round(ended[0], 1),
        "kernels_per_step": round(ended[1], 1),
        "equal": equal,
    }


def device_name(device: str, threads: int = 1) -> str:
    if device != "cpu":
        return f"cuda: {torch.cuda.get_device_name()}"
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def measure_processes(workload: Workload, repeats: int, say: Say) -> list[dict[str, Any]]:
    """Two engines of one thread each side by side, against the textbook with both threads to itself."""
    say(f"{workload.name}: two processes against two threads")
    alone = Worker.start(Variant("textbook"), workload, "cpu", threads=2)
    pair = [Worker.start(Variant("traced"), workload, "cpu") for _ in range(2)]
    first = [worker.first() for worker in (alone, *pair)]
    slow, fast = [], []
    for turn in range(repeats + 1):
        say(f"{workload.name}: two processes against two threads, turn {turn} of {repeats}")
        slow.append(alone.turn())
        fast.append(together(pair))
    textbook_ms, ours = statistics.median(slow[1:]), statistics.median(fast[1:])
    ended = [worker.end() for worker in (alone, *pair)]
    both = (ended[1][0] + ended[2][0], ended[1][1])
    equal = all(is_equal(phi, first[0]) for phi in first)
    return [
        record(device_name("cpu", 2), workload, "textbook", textbook_ms, textbook_ms, ended[0], True),
        record("cpu, 2 processes of 1 thread", workload, "traced, side by side", ours, textbook_ms, both, equal),
    ]


def together(workers: Sequence[Worker]) -> float:
    """Milliseconds per round and run of workers that run a turn at the same time."""
    started = time.perf_counter()
    for worker in workers:
        worker.pipe.send("turn")
    for worker in workers:
        worker.pipe.recv()
    return 1e3 * (time.perf_counter() - started) / len(workers)


def measure_clients(counts: Sequence[int], say: Say) -> list[dict[str, Any]]:
    """A round of one local step against the number of clients, embedding dimension fixed: it must stay flat."""
    generator = keys.torch_generator(keys.fold(0, "bench"))
    x, y = torch.randn(1_000, 64, generator=generator), torch.arange(1_000) % 10

    def held(count: int) -> Federation:
        examples = Examples(torch.arange(1_000), torch.zeros(count, dtype=torch.int64), torch.full((count,), 1_000))
        return Federation(x, y, {"train": examples, "validation": examples, "test": examples})

    def made(client: int) -> dict[str, tuple[Tensor, Tensor]]:
        part = slice(client % 900, client % 900 + 100)
        return {"train": (x[part], y[part]), "test": (x[part], y[part])}

    say("rounds among many clients")
    records = [clients_line("traced", held(count)) for count in counts]
    lazy = Federation.lazy(counts[-1], made, train=100, test=100)
    return [*records, clients_line("traced, data made when needed", lazy)]


def clients_line(variant: str, federation: Federation) -> dict[str, Any]:
    model = Model("mlp", lambda: MLP(64, 32, 10), cross_entropy, is_correct)
    algorithm = PFedHN(local_steps=1, embeddings=Embeddings(dim=13))
    simulation = Simulation(
        algorithm, {"mlp": model}, Schedule(10_000, 1, 64, 10_000), 0, "traced", federation=federation
    )
    state = simulation.initial_state()
    times = []
    for number in range(60):
        started = time.perf_counter()
        simulation._round(state, number)
        times.append(1e3 * (time.perf_counter() - started))
    leaves = pytree.tree_leaves(state.memories.rows)  # not its fields: an optimizer without squares keeps () there
    return {
        "device": device_name("cpu"),
        "workload": "one local step",
        "program": variant,  # as in every stored line
        "clients": federation.num_clients,
        "ms_per_round": round(statistics.median(times[10:]), 3),
        "bytes_per_client": sum(leaf.element_size() * leaf[0].numel() for leaf in leaves),
    }


def is_equal(left: Any, right: Any) -> bool:
    """Whether all weights together agree to `TOLERANCE`."""
    pairs = [(torch.from_numpy(left[name]).double(), torch.from_numpy(right[name]).double()) for name in right]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return bool(apart**0.5 <= TOLERANCE * size**0.5)


def bench(device: str = "cpu", repeats: int = 7, say: Say = print) -> list[dict[str, Any]]:
    """All workloads of a device."""
    torch.set_num_threads(1)
    if device != "cpu":
        return measure(WORKLOADS["lenet"], device, repeats, say)
    records = [line for workload in WORKLOADS.values() for line in measure(workload, device, repeats, say)]
    records += measure_processes(WORKLOADS["lenet"], repeats, say)
    return records + measure_clients((10, 1_000, 100_000, 1_000_000), say)
