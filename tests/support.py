"""A small federation in float64 and the few lines every test of a whole run needs.

Six clients of different sizes, one of them (client 3) smaller than a batch. The data come from integer arithmetic, so
they are the same bits on every machine.
"""

import io
import json
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.combinators import with_settings
from pfedhn.data.catalogue import DATASETS
from pfedhn.data.federation import Federation
from pfedhn.engine.network import with_frozen
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule, State
from pfedhn.experiments.directory import Options
from pfedhn.experiments.preflight import survey
from pfedhn.experiments.queue import Listener, Outcome
from pfedhn.experiments.runner import run_ready
from pfedhn.experiments.spec import Cell, Experiment, RunSpec
from pfedhn.experiments.tasks import Cluster
from pfedhn.kernels.launch import INTERPRETED
from pfedhn.model import Model
from pfedhn.models import cross_entropy, is_correct
from pfedhn.params import Params, pack, take
from pfedhn.settings import full_name, kinds_of, values_of
from pfedhn.sgd import Batches, gradient, scan
from pfedhn.storage.files import sealed_json, sealed_text, unsealed_json, unsealed_text

torch.set_num_threads(1)  # tests run side by side

TRAIN_SIZES = (12, 9, 20, 3, 15, 7)
NUM_CLIENTS = len(TRAIN_SIZES)
SIDE, CHANNELS, NUM_CLASSES = 6, 2, 4
BATCH_SIZE = 5
MEAN, STD = torch.tensor([0.5, 0.4], dtype=torch.float64), torch.tensor([0.25, 0.3], dtype=torch.float64)


def free_port() -> int:
    """A port on which nothing listens; below those that the system lends to connections that go out."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, 3, 3)
        self.out = nn.Linear(12, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.max_pool2d(self.conv(x), 2).relu().flatten(1))


def mlp(hidden: int = 5) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES)
    )


class BatchNormed(nn.Module):
    """With statistics over images and over single values; one of its layers has neither weight nor bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm1 = nn.Conv2d(CHANNELS, 3, 3), nn.BatchNorm2d(3)
        self.hidden, self.norm2 = nn.Linear(12, 5), nn.BatchNorm1d(5, affine=False, momentum=None)
        self.out = nn.Linear(5, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = nn.functional.max_pool2d(self.norm1(self.conv(x)), 2).relu().flatten(1)
        return self.out(self.norm2(self.hidden(features)).relu())


FACTORIES = {"mlp": mlp, "conv": Conv, "wide": lambda: mlp(7), "batchnorm": BatchNormed}


def model(name: str = "mlp", dtype: torch.dtype = torch.float64) -> Model:
    return Model(name, FACTORIES[name], cross_entropy, is_correct, dtype=dtype)


def pictures(client: int, split: str, count: int) -> tuple[Tensor, Tensor]:
    """uint8 images [N, H, W, C] and labels: noise on a pattern per class; each client mostly sees two classes."""
    key = keys.fold(0, "pictures", client, split)
    coins = keys.uniform(keys.fold(key, "label"), count)
    y = torch.where(coins < 0.45, client, torch.where(coins < 0.9, client + 1, client + 2)) % NUM_CLASSES
    shape = (SIDE, SIDE, CHANNELS)
    patterns = keys.uniform(keys.fold(0, "pattern"), NUM_CLASSES * SIDE * SIDE * CHANNELS).unflatten(0, (-1, *shape))
    noise = keys.uniform(keys.fold(key, "noise"), count * SIDE * SIDE * CHANNELS).unflatten(0, (-1, *shape))
    return ((patterns[y] + noise) * 127).to(torch.uint8), y


def normalized(images: Tensor) -> Tensor:
    return ((images.double() / 255 - MEAN) / STD).permute(0, 3, 1, 2).contiguous()


def splits(client: int) -> dict[str, tuple[Tensor, Tensor]]:
    sizes = {"train": TRAIN_SIZES[client], "validation": 4 + client % 3, "test": 3 + client % 2}
    return {split: pictures(client, split, size) for split, size in sizes.items()}


def uint8_images() -> Tensor:
    """All rows of the federation, in its order, before they are normalized."""
    return torch.cat([images for client in range(NUM_CLIENTS) for images, _ in splits(client).values()])


def make_federation() -> Federation:
    clients = [{split: (normalized(x), y) for split, (x, y) in splits(i).items()} for i in range(NUM_CLIENTS)]
    return replace(Federation.from_clients(clients).to("cpu", torch.float64), x=normalized(uint8_images()))


@dataclass(frozen=True)
class ClosesOver(FedAvg):
    """FedProx as everybody writes it first: its step closes over the received weights."""

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        start, unpack = pack(received)
        gradient_of = gradient(model.loss, unpack)

        def step(weights: Tensor, batch: Batches, lr: Any) -> Tensor:
            return weights - lr * (gradient_of(weights, batch) + 0.5 * (weights - start))

        return unpack(start - scan(step, start, batches, self.local_lr)), private


def simulate(
    algorithm: Any,
    federation: Federation,
    models: Mapping[str, Model] | str = "mlp",
    *,
    rounds: int = 8,
    cohort: int = 1,
    batch_size: int = BATCH_SIZE,
    evaluate_every: int = 1_000_000,
    seed: int = 5,
    **settings: Any,
) -> Simulation:
    models = {models: model(models)} if isinstance(models, str) else models
    algorithm = algorithm.for_clients(federation.num_clients, federation.descriptor_dim)
    models = {name: with_frozen(network, algorithm, seed) for name, network in models.items()}
    size = cohort if algorithm.needs.communication else federation.num_clients
    schedule = Schedule(rounds * size, cohort, batch_size, evaluate_every)
    return Simulation(algorithm, models, schedule, seed, federation=federation, **settings)


def finish(simulation: Simulation, state: State | None = None) -> State:
    state = simulation.initial_state() if state is None else state
    for _ in simulation.rounds(state):
        pass
    return state


def personal(simulation: Simulation, state: State) -> list[Params]:
    """The weights every client would use now."""
    weights = []
    for client in range(simulation.federation.num_clients):
        architecture, memories = simulation.model_of(client), state.memories
        algorithm, one = simulation.algorithm, torch.tensor([client], device=simulation.federation.x.device)
        batches = simulation.federation.batches(
            one,
            simulation.personalize_key(state.round),
            algorithm.num_personalize_batches,
            simulation.schedule.batch_size,
        )
        kept = take(memories.private[architecture.name].take([client]), 0)
        row = take(memories.rows, client)
        weights.append(simulation.exchange.personal_weights(architecture, memories.shared, row, kept, take(batches, 0)))
    return weights


def assert_close(actual: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Trees of tensors, equal to rounding."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_same_bits(actual: Any, expected: Any) -> None:
    left, right = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def memories_of(state: State) -> Any:
    """All three memories as one tree, private ones by client."""
    memories = state.memories
    private = {
        f"{name}.{client}": take(table.tree, slot)
        for name, table in memories.private.items()
        for client, slot in sorted(table.slots.items())
    }
    return memories.shared, memories.rows, private


def run_many(
    directory: Path,
    experiment: Experiment,
    runs: Sequence[RunSpec],
    *,
    jobs: int | None = None,
    options: Options | None = None,
    listen: Listener = lambda event: None,
    cluster: Cluster | None = None,
) -> Outcome:
    """Run some runs of an experiment, and before them those they start from, unchecked."""
    ready = survey(directory, experiment, runs, options or Options(), jobs, cluster is not None)
    return run_ready(ready, listen, cluster)


# Triton's kernels: on a GPU where there is one, else in Triton's interpreter, which needs a process of its own.
ON_GPU = torch.cuda.is_available() and not INTERPRETED
KERNEL_DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
needs_triton = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs below test_the_kernels_in_the_interpreter")


def integers(*shape: int) -> Tensor:
    """Small ones: every sum of them is exact in float32, and in tf32, so that results must be equal, not close."""
    return torch.randint(-2, 3, shape, device=KERNEL_DEVICE).float()


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test of which `make test` takes only those given as fast; tuples are several arguments."""
    cases = list(values)
    assert all(case in cases for case in fast)
    return [
        case if case in fast else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]


SMALL = Experiment(
    name="small",
    cells=tuple(
        Cell(
            method=method,
            clients=6,
            split=(0.5, 0.25, 0.25),
            model="mlp-4",
            steps=30,
            batch_size=8,
            evaluate_every=10,
            settings={"local_steps": 2},
        )
        for method in ("fedavg", "pfedhn")
    ),
    seeds=(0, 1),
)


def scores(directory: Path, name: str) -> Any:
    """Everything a run found, less what depends on the clock and the place."""
    metrics = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((directory / name / "result.json").read_text())
    tensors = (directory / name / f"checkpoint-{result['steps']:09d}.safetensors").read_bytes()
    for line in metrics:
        del line["seconds"]
    for key in ("seconds", "environment", "command", "history", "sha256"):  # digests depend on the seconds
        del result[key]
    result.get("pretrain", {}).pop("seconds", None)
    return metrics, result, tensors


def encoded(pixels: numpy.ndarray, **options: Any) -> bytes:
    """An image file."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", **options)
    return stream.getvalue()


def write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """A parquet file as on the Hugging Face Hub; bytes are images."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    images = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    arrays = {
        name: pyarrow.array([{"bytes": blob, "path": None} for blob in values], images)
        if isinstance(values[0], bytes)
        else pyarrow.array(values)
        for name, values in columns.items()
    }
    parquet.write_table(pyarrow.table(arrays), path)


def allow_parts(patch: pytest.MonkeyPatch) -> None:
    """Let a few images pass for a whole data set, which is checked elsewhere."""
    for name, source in list(DATASETS.items()):
        patch.setitem(DATASETS, name, replace(source, num_rows=(), sha256=None))


def images(name: str, count: int, seed: int) -> numpy.ndarray:
    """Random images as Pillow wants them: [N, H, W] or [N, H, W, 3]."""
    channels, height, width = DATASETS[name].shape
    shape = (count, height, width, 3) if channels == 3 else (count, height, width)
    return numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)


def resealed(file: Path, change: Callable[[str], str]) -> None:
    """Change a sealed TOML file as somebody would who knows how to seal it."""
    file.write_bytes(sealed_text(change(unsealed_text(file.read_bytes()))))


def resealed_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The same for a sealed JSON file, whose table is changed in place."""
    table = unsealed_json(file.read_bytes())
    change(table)
    file.write_bytes(sealed_json(table))


def changed(spec: Any, settings: Mapping[str, Any]) -> Any:
    """A method with those of the settings that it has, by their short names."""
    full = {full_name(kinds_of(spec), name): value for name, value in settings.items()}
    return with_settings(spec, {name: value for name, value in full.items() if name is not None})


def with_steps(method: str, number: int) -> Any:
    """A method by name that takes so few local steps, whatever it calls them."""
    spec = ALGORITHMS[method]()
    return with_settings(spec, {name: number for name in values_of(spec) if name.endswith("_steps")})
