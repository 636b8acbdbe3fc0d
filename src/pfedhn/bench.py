"""How fast the engine is against pFedHN as a textbook writes it: same data, same batches, measured in turns.

Every program lives in a process of its own, so that its memory can be told, and runs a round when the parent says so:
one after the other, again and again, so that a busy neighbour slows all of them alike.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from pfedhn import keys, textbook
from pfedhn.algorithm import Model
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.capture import CapturedRun
from pfedhn.federation import Federation, Rows
from pfedhn.models import MLP, LeNet, cross_entropy, is_correct
from pfedhn.params import Params
from pfedhn.simulate import Schedule, Simulation, State

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
TOLERANCE = 1e-3  # relative, of all weights after one round, tf32 off


class Images(Dataset[tuple[Tensor, int]]):
    """uint8 images [N, H, W, C], each made when it is asked for, step by step as torchvision's CIFAR10 makes it.

    open_image: `PIL.Image.fromarray`, which torchvision calls; without Pillow arrays stand for pictures.
    """

    def __init__(
        self, images: Tensor, y: Tensor, mean: Tensor, std: Tensor, open_image: Callable[[Any], Any] = numpy.asarray
    ) -> None:
        self.images, self.y, self.open_image = images.numpy(), y.tolist(), open_image
        self.mean, self.std, self.dtype = mean.tolist(), std.tolist(), mean.dtype

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        picture = self.open_image(self.images[row].squeeze())
        return self.normalised(self.to_tensor(picture)), self.y[row]

    def to_tensor(self, picture: Any) -> Tensor:
        """transforms.ToTensor"""
        x = torch.from_numpy(numpy.array(picture, copy=True)).view(self.images.shape[1:])
        return x.permute(2, 0, 1).contiguous().to(self.dtype).div(255)

    def normalised(self, x: Tensor) -> Tensor:
        """transforms.Normalize"""
        x = x.clone()
        mean, std = torch.as_tensor(self.mean, dtype=x.dtype), torch.as_tensor(self.std, dtype=x.dtype)
        if (std == 0).any():
            raise ValueError("a standard deviation is zero.")
        return x.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


class PlainLeNet(nn.Module):
    """`models.LeNet` as its authors write it: the same weights, names and numbers from PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(800, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2).flatten(1)
        output: Tensor = self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))
        return output


@dataclass(frozen=True)
class Workload:
    """A federation and a target network of the bench."""

    name: str
    num_clients: int
    rows_per_client: int
    local_steps: int = 50
    batch_size: int = 64

    def images(self) -> tuple[Tensor, Tensor]:
        """uint8 pictures [N, H, W, C] of noise, and labels: what is in them does not change the time."""
        count = self.num_clients * self.rows_per_client
        generator = keys.torch_generator(keys.fold(0, "bench"))
        shape = (count, 32, 32, 3) if self.name == "lenet" else (count, 8, 8, 1)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8), torch.arange(count) % 10

    def simulation(self, device: str, executor: str) -> tuple[Simulation, Tensor]:
        images, y = self.images()
        mean, std = (MEAN, STD) if images.shape[-1] == 3 else (MEAN[:1], STD[:1])
        x = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
        start = torch.arange(self.num_clients) * self.rows_per_client
        rows = Rows(torch.arange(len(y)), start, torch.full_like(start, self.rows_per_client))
        federation = Federation(x, y, {"train": rows, "validation": rows, "test": rows})
        federation = federation if executor.startswith("textbook") else federation.to(device)
        factory = _mlp if self.name == "mlp" else PlainLeNet if executor.startswith("textbook") else LeNet
        model = Model(self.name, factory, cross_entropy, is_correct, torch.device(device))
        algorithm = PFedHN(local_steps=self.local_steps).for_clients(self.num_clients)
        schedule = Schedule(1_000_000, 1, self.batch_size, 1_000_000)
        engine = "loop" if executor.startswith("textbook") else executor
        return Simulation(algorithm, {self.name: model}, federation, schedule, 0, engine), images


def _mlp() -> MLP:
    return MLP(64, 32, 10)


WORKLOADS = {"lenet": Workload("lenet", 50, 800), "mlp": Workload("mlp", 50, 18, local_steps=20, batch_size=16)}
PROGRAMS = ("textbook", "textbook-images", "loop", "traced", "captured")


def rounds_of(program: str, workload: Workload, device: str) -> Iterator[Callable[[], Params]]:
    """Each `next` is one round, and gives a look at phi after it."""
    simulation, images = workload.simulation(device, program)
    state = simulation.initial_state()
    if program.startswith("textbook"):
        yield from _textbook_rounds(program, simulation, state, images)
    elif program == "captured":
        run = CapturedRun(replace(simulation, schedule=replace(simulation.schedule, steps=2_000)), state)
        graph = run.graph_of(run.signatures[0])
        while True:
            graph.replay()
            if device != "cpu":
                torch.cuda.synchronize()
            yield lambda: state.memories.shared.phi
    else:
        number = 0
        while True:
            simulation._round(state, number)
            state.round = number = number + 1
            yield lambda: state.memories.shared.phi


def _textbook_rounds(
    program: str, simulation: Simulation, state: State, images: Tensor
) -> Iterator[Callable[[], Params]]:
    federation = simulation.federation
    mean, std = (MEAN, STD) if images.shape[-1] == 3 else (MEAN[:1], STD[:1])
    data = (
        TensorDataset(federation.x, federation.y)
        if program == "textbook"
        else Images(images, federation.y, mean, std, image_opener())
    )
    for h in textbook.rounds(simulation, state, data):
        yield h.phi


def image_opener() -> Callable[[Any], Any]:
    try:
        from PIL import Image
    except ImportError:
        return numpy.asarray
    return Image.fromarray


def _worker(pipe: Connection, program: str, workload: Workload, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    rounds = rounds_of(program, workload, device)
    phi = next(rounds)()
    pipe.send({name: value.detach().cpu().numpy() for name, value in phi.items()})
    while pipe.recv() == "round":
        started = time.perf_counter()
        next(rounds)
        pipe.send(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    pipe.send(peak if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20)


@dataclass
class Worker:
    """A program in a process of its own."""

    program: str
    pipe: Connection
    process: Any

    @staticmethod
    def start(program: str, workload: Workload, device: str, threads: int) -> "Worker":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(theirs, program, workload, device, threads), daemon=True)
        process.start()
        return Worker(program, ours, process)

    def round(self) -> float:
        self.pipe.send("round")
        seconds: float = self.pipe.recv()
        return seconds

    def end(self) -> float:
        self.pipe.send("end")
        peak: float = self.pipe.recv()
        self.process.join()
        return peak


def measure(
    workload: Workload, device: str, threads: int, repeats: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One line per program: milliseconds a round (median), ratio to the textbook, memory, and whether it is equal."""
    workers, first = [], {}
    for program in PROGRAMS:
        say(f"{workload.name}: starting {program}")
        workers.append(Worker.start(program, workload, device, threads))
        first[program] = workers[-1].pipe.recv()
    times: dict[str, list[float]] = {worker.program: [] for worker in workers}
    for turn in range(repeats):
        say(f"{workload.name}: turn {turn + 1} of {repeats}")
        for worker in workers:
            times[worker.program].append(1e3 * worker.round())
    milliseconds = {program: statistics.median(values) for program, values in times.items()}
    device_name = "cpu" if device == "cpu" else f"cuda: {torch.cuda.get_device_name()}"
    return [
        {
            "device": f"{device_name}, {threads} thread{'s' if threads > 1 else ''}"
            if device == "cpu"
            else device_name,
            "workload": workload.name,
            "program": worker.program,
            "ms_per_round": round(milliseconds[worker.program], 3),
            "ratio_to_textbook": round(milliseconds["textbook"] / milliseconds[worker.program], 3),
            "peak_memory_mb": round(worker.end(), 1),
            "equal": is_equal(first[worker.program], first["textbook"]),
        }
        for worker in workers
    ]


def measure_processes(workload: Workload, repeats: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Two engines of one thread each side by side, against the textbook with both threads to itself."""
    say(f"{workload.name}: two processes against two threads")
    alone = Worker.start("textbook", workload, "cpu", 2)
    pair = [Worker.start("captured", workload, "cpu", 1) for _ in range(2)]
    first = [worker.pipe.recv() for worker in (alone, *pair)]
    with_threads, side_by_side = [], []
    for _ in range(repeats):
        with_threads.append(1e3 * alone.round())
        started = time.perf_counter()
        for worker in pair:
            worker.pipe.send("round")
        for worker in pair:
            worker.pipe.recv()
        side_by_side.append(1e3 * (time.perf_counter() - started) / 2)
    slow, fast = statistics.median(with_threads), statistics.median(side_by_side)
    peaks = [worker.end() for worker in (alone, *pair)]
    return [
        {
            "device": "cpu, 2 threads", "workload": workload.name, "program": "textbook",
            "ms_per_round": round(slow, 3), "ratio_to_textbook": 1.0,
            "peak_memory_mb": round(peaks[0], 1), "equal": True,
        },
        {
            "device": "cpu, 2 processes of 1 thread", "workload": workload.name, "program": "captured, side by side",
            "ms_per_round": round(fast, 3), "ratio_to_textbook": round(slow / fast, 3),
            "peak_memory_mb": round(sum(peaks[1:]), 1), "equal": all(is_equal(other, first[0]) for other in first[1:]),
        },
    ]  # fmt: skip


def measure_clients(counts: tuple[int, ...], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A round of one local step against the number of clients, embedding dimension fixed: it must stay flat."""
    records = []
    for count in counts:
        say(f"a round among {count:,} clients")
        generator = keys.torch_generator(keys.fold(0, "bench"))
        x, y = torch.randn(1_000, 64, generator=generator), torch.arange(1_000) % 10
        rows = Rows(torch.arange(1_000), torch.zeros(count, dtype=torch.int64), torch.full((count,), 1_000))
        federation = Federation(x, y, {"train": rows, "validation": rows, "test": rows})
        model = Model("mlp", _mlp, cross_entropy, is_correct)
        algorithm = PFedHN(local_steps=1, embedding_dim=13)
        simulation = Simulation(algorithm, {"mlp": model}, federation, Schedule(10_000, 1, 64, 10_000), 0, "traced")
        state = simulation.initial_state()
        times = []
        for number in range(60):
            started = time.perf_counter()
            simulation._round(state, number)
            times.append(1e3 * (time.perf_counter() - started))
        table = state.memories.rows
        per_client = sum(leaf.element_size() * leaf[0].numel() for leaf in table)
        records.append(
            {
                "device": "cpu, 1 thread", "workload": f"one local step, {count} clients", "program": "traced",
                "ms_per_round": round(statistics.median(times[10:]), 3), "bytes_per_client": per_client,
            }
        )  # fmt: skip
    return records


def is_equal(left: Any, right: Any) -> bool:
    """Whether all weights together agree to `TOLERANCE`."""
    pairs = [(torch.from_numpy(left[name]).double(), torch.from_numpy(right[name]).double()) for name in right]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return bool(apart**0.5 <= TOLERANCE * size**0.5)


def bench(device: str = "cpu", repeats: int = 7, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """All workloads of a device."""
    torch.set_num_threads(1)
    records = []
    for workload in WORKLOADS.values():
        records += measure(workload, device, 1, repeats, say)
    if device == "cpu":
        records += measure_processes(WORKLOADS["lenet"], repeats, say)
        records += measure_clients((10, 1_000, 100_000, 1_000_000), say)
    return records
