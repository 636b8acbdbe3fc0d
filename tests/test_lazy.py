"""Data that are made when a client is asked for: the same numbers, and room for a million clients."""

import logging
from collections.abc import Mapping

import numpy
import pytest
import torch

import pfedhn
from pfedhn import Federation, keys
from pfedhn.bench import peak_memory_mb

SIZES = {"train": [7, 12, 5, 9, 20], "validation": [3, 0, 4, 2, 6], "test": [2, 5, 4, 0, 6]}
Pools = Mapping[str, tuple[numpy.ndarray, numpy.ndarray]]


def pools_of(client: int, shape: tuple[int, ...] = (6,), sizes: Mapping[str, int] | None = None) -> Pools:
    generator = keys.numpy_generator(keys.fold(3, "client", client))
    counts = sizes or {name: sizes_[client] for name, sizes_ in SIZES.items()}
    return {name: (generator.normal(size=(n, *shape)), generator.integers(3, size=n)) for name, n in counts.items()}


class Conv(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3))


@pytest.mark.parametrize("executor", ["loop", "traced", "vectorised"])
@pytest.mark.parametrize("method", ["pfedhn", "fedavg", "per-fedavg", "pfedhn-pc"])
def test_same_bits_as_in_memory(executor: str, method: str) -> None:
    held = Federation.from_clients([pools_of(client) for client in range(5)])
    lazy = Federation.lazy(5, pools_of, **SIZES, num_cached=2)
    runs = [
        pfedhn.train(
            method, data, mlp, steps=12, cohort_size=2, batch_size=8, evaluate_every=4,
            executor=executor, progress=False,
        )
        for data in (held, lazy)
    ]  # fmt: skip
    assert [record["test"] for record in runs[0].history] == [record["test"] for record in runs[1].history]
    for client in range(5):
        left, right = (run.personal_weights(client) for run in runs)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_images_stay_channels_last() -> None:
    held = Federation.from_clients([pools_of(client, (2, 4, 4)) for client in range(5)]).to("cpu")
    lazy = Federation.lazy(5, lambda client: pools_of(client, (2, 4, 4)), **SIZES).to("cpu")
    clients = torch.tensor([4, 1])
    left, right = (federation.batches(clients, 0, 3, 4) for federation in (held, lazy))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(left, right, strict=True))


def test_a_million_clients() -> None:
    asked: list[int] = []

    def load(client: int) -> Pools:
        asked.append(client)
        return pools_of(client, sizes={"train": 20, "validation": 5, "test": 5})

    before = peak_memory_mb()
    federation = Federation.lazy(1_000_000, load, train=20, validation=5, test=5).evaluating(10)
    algorithm = pfedhn.PFedHN(embedding_dim=13)
    run = pfedhn.train(algorithm, federation, mlp, steps=20, evaluate_every=10, progress=False)
    assert len(set(asked)) <= 1 + 10 + 20  # client 0, those tested, those trained
    assert int((run.chosen.pools["test"].count > 0).sum()) == 10
    row_bytes = 4 * (2 * 13 + 1)  # embedding, momentum and step
    assert peak_memory_mb() - before < 6 * 1e6 * row_bytes / 2**20  # now, at the chosen round, and who owns what


@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        (lambda client: {**pools_of(client), "train": (numpy.zeros((8, 6)), numpy.zeros(8))}, "8 train rows and 8"),
        (lambda client: pools_of(client, (6 + client,)), "shape \\(7,\\); client 0 has \\(6,\\)"),
        (lambda client: {k: (x / (client == 0), y) for k, (x, y) in pools_of(client).items()}, "client 1: row 0 of x"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_refusals(load: object, sentence: str) -> None:
    federation = Federation.lazy(5, lambda c: pools_of(c) if c == 0 else load(c), **SIZES)  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence):
        federation.batches(torch.tensor([1]), 0, 1, 4)


def test_fixed_descriptors_must_be_given() -> None:
    federation = Federation.lazy(5, pools_of, **SIZES)
    algorithm = pfedhn.PFedHN(embedding="fixed", embedding_dim=3)
    with pytest.raises(ValueError, match="with_descriptors"):
        pfedhn.train(algorithm, federation, mlp, steps=1, progress=False)


def test_evaluating_chooses_clients() -> None:
    held = Federation.from_clients([pools_of(client) for client in range(5)])
    some = held.evaluating([0, 4])
    assert some.pools["test"].size.tolist() == [2, 0, 0, 0, 6]
    assert some.pools["train"].size.tolist() == SIZES["train"]
    assert held.pools["test"].size.tolist() == SIZES["test"]
    with pytest.raises(ValueError, match="0 to 4"):
        held.evaluating([5])
    with pytest.raises(ValueError, match="cannot be drawn"):
        held.evaluating(6)


def test_captured_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lazy = Federation.lazy(5, pools_of, **SIZES)
    with caplog.at_level(logging.WARNING, "pfedhn"):
        pfedhn.train("pfedhn", lazy, mlp, steps=2, executor="captured", progress=False)
    assert [record.message for record in caplog.records if "captured" in record.message]


def mlp() -> torch.nn.Module:
    return pfedhn.MLP(6, 5, 3)
