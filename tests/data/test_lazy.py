"""Data that are made when a client is asked for: the same numbers, and room for a million clients."""

import itertools
import logging
from collections.abc import Mapping

import numpy
import pytest
import torch
from support import mostly_slow

import pfedhn
from pfedhn import Federation, keys
from pfedhn.bench.measure import peak_memory_mb

SIZES = {"train": [7, 12, 5, 9, 20], "validation": [3, 0, 4, 2, 6], "test": [2, 5, 4, 0, 6]}
Splits = Mapping[str, tuple[numpy.ndarray, numpy.ndarray]]


def splits_of(client: int, shape: tuple[int, ...] = (6,), sizes: Mapping[str, int] | None = None) -> Splits:
    generator = keys.numpy_generator(keys.fold(3, "client", client))
    counts = sizes or {name: sizes_[client] for name, sizes_ in SIZES.items()}
    return {name: (generator.normal(size=(n, *shape)), generator.integers(3, size=n)) for name, n in counts.items()}


class Conv(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("method", "executor"),
    mostly_slow(
        itertools.product(["pfedhn", "fedavg", "per-fedavg", "pfedhn-pc"], ["loop", "traced", "vectorized"]),
        ("fedavg", "vectorized"),
    ),
)
@pytest.mark.slow
def test_same_bits_as_in_memory(executor: str, method: str) -> None:
    held = Federation.from_clients([splits_of(client) for client in range(5)])
    lazy = Federation.lazy(5, splits_of, **SIZES, num_cached=2)
    runs = [
        pfedhn.train(
            method, data, mlp, steps=12, cohort_size=2, batch_size=8, evaluate_every=4,
            executor=executor, progress=False,
        )
        for data in (held, lazy)
    ]  # fmt: skip
    assert [moment.test for moment in runs[0].history] == [moment.test for moment in runs[1].history]
    for client in range(5):
        left, right = (run.personal_weights(client) for run in runs)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_images_stay_channels_last() -> None:
    held = Federation.from_clients([splits_of(client, (2, 4, 4)) for client in range(5)]).to("cpu")
    lazy = Federation.lazy(5, lambda client: splits_of(client, (2, 4, 4)), **SIZES).to("cpu")
    clients = torch.tensor([4, 1])
    left, right = (federation.batches(clients, 0, 3, 4) for federation in (held, lazy))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(left, right, strict=True))


@pytest.mark.slow
def test_a_million_clients() -> None:
    asked: list[int] = []

    def load(client: int) -> Splits:
        asked.append(client)
        return splits_of(client, sizes={"train": 20, "validation": 5, "test": 5})

    before = peak_memory_mb()
    federation = Federation.lazy(1_000_000, load, train=20, validation=5, test=5).evaluating(10)
    algorithm = pfedhn.ALGORITHMS["pfedhn"](embedding_dim=13)
    run = pfedhn.train(algorithm, federation, mlp, steps=20, evaluate_every=10, progress=False)
    assert len(set(asked)) <= 1 + 10 + 20  # client 0, those tested, those trained
    assert int((run.chosen.splits["test"].count > 0).sum()) == 10
    row_bytes = 4 * (2 * 13 + 1)  # embedding, momentum and step
    assert peak_memory_mb() - before < 6 * 1e6 * row_bytes / 2**20  # now, at the chosen round, and who owns what


@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        (lambda client: {**splits_of(client), "train": (numpy.zeros((8, 6)), numpy.zeros(8))}, "8 train examples"),
        (lambda client: splits_of(client, (6 + client,)), "shape \\(7,\\); client 0 has \\(6,\\)"),
        (lambda client: {k: (x / (client == 0), y) for k, (x, y) in splits_of(client).items()}, "client 1: example 0"),
        (lambda client: {k: (x, y[:, None]) for k, (x, y) in splits_of(client).items()}, "train labels of shape"),
        (lambda client: {k: (x, y + 0.5) for k, (x, y) in splits_of(client).items()}, "client 1 .* not whole numbers"),
        (lambda client: {**splits_of(client), "valid": 0}, "client 1 .*'valid'; did you mean 'validation'"),
        (lambda client: {"train": splits_of(client)["train"][0]}, "client 1: train is .*; a client brings {\"train\":"),
        (lambda client: {"train": (["a"], ["b"])}, "client 1: train does not fit.*; a client brings {\"train\":"),
        (lambda client: {"train": (torch.tensor(1), torch.tensor(2))}, "client 1: train does not fit"),
        (lambda client: splits_of(client)["train"], "for client 1 load returned .*; a client brings {\"train\":"),
        (lambda client: None, "for client 1 load returned None; a client brings {\"train\":"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_refusals(load: object, sentence: str) -> None:
    federation = Federation.lazy(5, lambda c: splits_of(c) if c == 0 else load(c), **SIZES)  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence):
        federation.batches(torch.tensor([1]), 0, 1, 4)


def test_the_first_client_is_refused_in_a_sentence_too() -> None:
    for load in (lambda client: None, lambda client: {}, lambda client: {"trian": ()}):
        with pytest.raises(ValueError, match="client 0"):
            Federation.lazy(5, load, **SIZES)  # type: ignore[arg-type]


def test_an_error_while_loading_names_the_client() -> None:
    def load(client: int) -> Splits:
        if client == 3:
            raise FileNotFoundError("no such file: three.npy")
        return splits_of(client)

    with pytest.raises(ValueError, match=r"client 3 failed \(FileNotFoundError: no such file: three.npy\)") as caught:
        Federation.lazy(5, load, **SIZES).batches(torch.tensor([2, 3]), 0, 1, 4)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ([7, 12, 5, 9], r"test has the shape \(4,\); give one number for all 5 clients"),
        ([7], r"test has the shape \(1,\)"),
        (numpy.ones((5, 1)), r"test has the shape \(5, 1\)"),
        ([2, 5, float("nan"), 0, 6], "test says how many examples .*nan"),
        (float("inf"), "test says how many examples .*inf"),
        (-1, "test says how many examples .*-1"),
        ([2, 5, 4, 0, -6], "test says how many examples .*-6"),
        (2.5, r"test says how many examples .*2\.5"),
        (True, "test says how many examples .*True"),
        ("many", "test says how many examples .*many"),
        (None, "test says how many examples .*None"),
        ([[1], [2, 3]], "test says how many examples"),
    ],
)
def test_counts_that_are_none(counts: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Federation.lazy(5, splits_of, **{**SIZES, "test": counts})  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, -1, 2.5, "5", None, [5]])
def test_numbers_of_clients_that_are_none(number: object) -> None:
    with pytest.raises(ValueError, match=r"num_clients is .*; give a whole number of at least 1"):
        Federation.lazy(number, splits_of, train=7)  # type: ignore[arg-type]


def test_counts_may_be_of_any_whole_kind() -> None:
    sizes = {"train": numpy.array(SIZES["train"], dtype=numpy.uint8), "validation": torch.tensor(SIZES["validation"])}
    federation = Federation.lazy(numpy.int64(5), splits_of, **sizes, test=[float(n) for n in SIZES["test"]])
    assert {name: federation.splits[name].size.tolist() for name in SIZES} == SIZES


def test_repr_is_one_short_line() -> None:
    text = repr(Federation.lazy(5, splits_of, **SIZES))
    assert text == "LazyFederation(5 clients; examples: 53 train, 15 validation, 17 test, 0 unused)"


@pytest.mark.parametrize("executor", ["loop", "traced", "vectorized"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_of_a_later_client_that_the_network_does_not_have(
    executor: str, split: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load(client: int) -> Splits:
        return {k: (x, y + 4 * (client == 4 and k == split)) for k, (x, y) in splits_of(client).items()}

    federation = Federation.lazy(5, load, **SIZES)
    with pytest.raises(
        ValueError, match=r"client 4 has the label [456], but the network has 3 outputs \(labels 0 to 2"
    ):
        pfedhn.train("fedavg", federation, mlp, steps=10, cohort_size=5, executor=executor, progress=False)
    assert not [record for record in caplog.records if "set_up_process" not in record.message]  # told once a process
    pfedhn.train("fedavg", federation, lambda: pfedhn.MLP(6, 7), steps=5, executor=executor, progress=False)


def test_fixed_descriptors_must_be_given() -> None:
    federation = Federation.lazy(5, splits_of, **SIZES)
    for algorithm in (
        pfedhn.ALGORITHMS["pfedhn"](embedding="fixed", embedding_dim=3),
        pfedhn.ALGORITHMS["pfedhn"](embedding="fixed"),
    ):
        with pytest.raises(ValueError, match="with_descriptors"):
            pfedhn.train(algorithm, federation, mlp, steps=1, progress=False)


def test_evaluating_chooses_clients() -> None:
    held = Federation.from_clients([splits_of(client) for client in range(5)])
    some = held.evaluating([0, 4])
    assert some.splits["test"].size.tolist() == [2, 0, 0, 0, 6]
    assert some.splits["train"].size.tolist() == SIZES["train"]
    assert held.splits["test"].size.tolist() == SIZES["test"]
    with pytest.raises(ValueError, match="0 to 4"):
        held.evaluating([5])
    for number in (6, 0, -1):
        with pytest.raises(ValueError, match=f"{number} clients cannot be drawn"):
            held.evaluating(number)
    assert (held.evaluating(numpy.int64(3)).splits["test"].size == held.evaluating(3).splits["test"].size).all()
    assert held.evaluating(numpy.array([0, 4], dtype=numpy.uint8)).splits["test"].size.tolist() == [2, 0, 0, 0, 6]
    for wrong in (2.5, "all", None, [0.5], True, [True, False], [[1]], {1}):
        with pytest.raises(ValueError, match="a list of their numbers, or as how many to draw, not as"):
            held.evaluating(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 to 4"):
        held.evaluating([])


def test_captured_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lazy = Federation.lazy(5, splits_of, **SIZES)
    with caplog.at_level(logging.WARNING, "pfedhn"):
        pfedhn.train("pfedhn", lazy, mlp, steps=2, executor="captured", progress=False)
    assert [record.message for record in caplog.records if "captured" in record.message]


def mlp() -> torch.nn.Module:
    return pfedhn.MLP(6, 5, 3)


def test_a_network_by_name_needs_the_number_of_classes() -> None:
    lazy = Federation.lazy(5, splits_of, **SIZES)
    with pytest.raises(
        pfedhn.UserError, match=r"'mlp-4' needs as many outputs as there are classes, .*MLP\(8, 16, 6\)"
    ):
        pfedhn.train("pfedhn", lazy, "mlp-4", steps=2, progress=False)
