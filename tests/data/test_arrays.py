"""Labels that are no class numbers are refused before anything is made for each of them; so are wrong splits."""

import math
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch

from pfedhn import Federation, by_classes, by_group
from pfedhn.data.arrays import MAX_CLASSES, NUM_CLASSES_ON_TRUST, as_tensor, check_classes
from pfedhn.data.dealing import check_split
from pfedhn.errors import UserError

X = numpy.zeros((60, 2))
HIGH = numpy.where(numpy.arange(60) == 7, 20_000_000, numpy.arange(60) % 3)


def lazily(labels: Any) -> Federation:
    def load(client: int) -> Any:
        return {"train": (X, labels if client == 1 else HIGH % 3)}

    federation = Federation.lazy(3, load, train=60)
    federation.batches(torch.tensor([1]), 0, 1, 4)
    return federation


ROADS = {
    "from_arrays": lambda y: Federation.from_arrays(X, y, by_classes(1, num_clients=3)),
    "from_arrays by group": lambda y: Federation.from_arrays(X, y, by_group(), groups=numpy.arange(60) % 3),
    "from_arrays, test": lambda y: Federation.from_arrays(
        X, HIGH % 3, by_classes(1, num_clients=3), split=(0.5, 0.5, 0), test=(X, y)
    ),
    "from_clients": lambda y: Federation.from_clients([(X, HIGH % 3), (X, y)]),
    "from_clients, stratified": lambda y: Federation.from_clients([(X, y)], stratify=True),
    "from_clients, splits": lambda y: Federation.from_clients([{"train": (X, HIGH % 3), "test": (X, y)}]),
    "lazy": lazily,
    "lazy, client 0": lambda y: Federation.lazy(3, lambda client: {"train": (X, y)}, train=60),
}


@pytest.mark.parametrize("road", ROADS)
def test_a_label_of_twenty_million_is_refused_on_every_road(road: str) -> None:
    sentence = r"class number 20000000, and \d+ examples may have class numbers below \d+; .* as floating point"
    with pytest.raises(UserError, match=sentence) as caught:
        ROADS[road](HIGH)
    assert "\n" not in str(caught.value)
    ROADS[road](HIGH % 3)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.slow
def test_nothing_large_is_made_before_a_refusal() -> None:
    """A process that may not take 400 MB more than it has: a share of each class for three clients is 480 MB."""
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
import test_arrays
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
for road, build in test_arrays.ROADS.items():
    try:
        build(test_arrays.HIGH)
    except test_arrays.UserError:
        continue
    raise SystemExit(road)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_numbers_to_predict_may_be_as_high_as_they_are() -> None:
    federation = Federation.from_clients([(X, HIGH.astype(numpy.float32))])
    assert federation.num_classes is None
    assert float(federation.y.max()) == 20_000_000


@pytest.mark.parametrize(
    ("top", "num_examples", "num_names", "is_refused"),
    [
        (NUM_CLASSES_ON_TRUST - 1, 1, None, False),  # a party that has one example of Omniglot's
        (NUM_CLASSES_ON_TRUST, 1, None, True),
        (9_999, 10_000, None, False),
        (10_000, 10_000, None, True),
        (10_000, 3, 10_001, False),  # a party alone knows from the names how many classes there are
        (MAX_CLASSES - 1, 10_000_000, None, False),
        (MAX_CLASSES, 10_000_000, None, True),
        (MAX_CLASSES, 10_000_000, MAX_CLASSES + 1, True),
    ],
)
def test_where_the_bound_is(top: int, num_examples: int, num_names: int | None, is_refused: bool) -> None:
    names = None if num_names is None else [str(number) for number in range(num_names)]
    labels = [torch.tensor([], dtype=torch.int64), torch.tensor([0, top])]
    if is_refused:
        with pytest.raises(UserError, match=f"class number {top}, and {num_examples} examples"):
            check_classes(labels, num_examples, names)
    else:
        check_classes(labels, num_examples, names)


WRONG_SPLITS = [
    (0.5, 0.5),
    (0.5, 0.2, 0.2, 0.1),
    (0.5, 0.3, 0.3),
    (1.2, -0.1, -0.1),
    (math.nan, 0.5, 0.5),
    (math.inf, 0.0, 0.0),
    (math.inf, -math.inf, 1.0),
    ("a", "b", "c"),
    (None, 0.5, 0.5),
    0.7,
    None,
]


@pytest.mark.parametrize("split", WRONG_SPLITS)
def test_splits_that_are_none_are_refused_on_every_road(split: Any) -> None:
    y = HIGH % 3
    for build in (
        lambda: check_split(split),
        lambda: Federation.from_arrays(X, y, by_classes(1, num_clients=3), split=split),
        lambda: Federation.from_arrays(X, y, by_classes(1, num_clients=3), split=split, test=(X, y)),
        lambda: Federation.from_clients([(X, y)], split=split),
        lambda: Federation.from_clients({"lyon": {"train": (X, y)}}, split=split),
    ):
        with pytest.raises(UserError, match="must be three fractions"):
            build()


def test_splits_may_be_of_any_kind_of_number() -> None:
    for split in ((1, 0, 0), [0.5, 0.25, 0.25], numpy.array([0.7, 0.15, 0.15]), torch.tensor([0.5, 0.5, 0.0])):
        assert check_split(split) == pytest.approx([float(part) for part in split])  # type: ignore[arg-type]


@pytest.mark.parametrize("client", [None, 3, (X,), (X, ["a"] * 60), (X, HIGH, HIGH), "xy"])
def test_a_client_that_brings_no_arrays_is_named(client: Any) -> None:
    with pytest.raises(UserError, match=r"client 1: its data (is|does not fit).*; a client brings"):
        Federation.from_clients([(X, HIGH % 3), client])


def test_one_client_with_floating_point_labels_does_not_make_a_regression_of_all() -> None:
    clients = {"lyon": (X, HIGH % 3), "paris": (X, (HIGH % 3).astype(float))}
    with pytest.raises(UserError, match=r"client 'paris' has floating-point labels.* client 'lyon' has class numbers"):
        Federation.from_clients(clients)
    with pytest.raises(UserError, match=r"client 1 has labels of shape \(2,\), and client 0 of shape \(\)"):
        Federation.from_clients([(X, HIGH % 3), (X, numpy.zeros((60, 2), dtype=int))])


def test_an_empty_split_does_not_change_the_kind_of_data() -> None:
    """An empty list is floating point to NumPy."""
    images = numpy.zeros((6, 1, 2, 2), dtype=numpy.uint8)
    federation = Federation.from_clients([{"train": (images, numpy.arange(6)), "validation": ([], [])}])
    assert (federation.x.dtype, federation.y.dtype) == (torch.uint8, torch.int64)
    assert federation.num_classes == 6


@pytest.mark.parametrize(
    "values",
    [
        X + 1j,
        torch.zeros(60, 2, dtype=torch.complex64),
        numpy.full((60, 2), "a"),
        numpy.zeros((60, 2), dtype="datetime64[s]"),
        numpy.full((60, 2), 2**63, dtype=numpy.uint64),
        torch.zeros(60, 2).to_sparse(),
        [[1], [2, 3]],
        None,
    ],
    ids=lambda values: str(getattr(values, "dtype", values)),
)
def test_what_is_no_array_of_real_numbers_is_refused(values: Any) -> None:
    for make in (
        lambda: Federation.from_arrays(values, HIGH % 3, by_classes(1, 3)),
        lambda: Federation.from_clients([(values, HIGH % 3)]),
    ):
        with pytest.raises(UserError, match=r"x must be an array|x must be a plain array|x holds whole numbers from"):
            make()


def test_another_order_of_bytes_is_read_as_what_it_means() -> None:
    x = numpy.arange(120.0).reshape(60, 2)
    swapped = x.astype(">f8"), (HIGH % 3).astype(">i4")
    assert torch.equal(Federation.from_clients([swapped]).x, Federation.from_clients([(x, HIGH % 3)]).x)


@pytest.mark.parametrize("groups", [numpy.arange(60) / 2, [math.nan] * 60, ["a"] * 60, numpy.arange(20), X, 3])
def test_groups_must_be_whole_numbers_one_for_each_example(groups: Any) -> None:
    with pytest.raises(UserError, match=r"groups must be a whole number for each example|groups has 20 entries"):
        Federation.from_arrays(X, HIGH % 3, by_group(), groups=groups)


@pytest.mark.parametrize("seed", [None, 1.5, "a", [1], 2**70])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    for make in (
        lambda: Federation.from_arrays(X, HIGH % 3, by_classes(1, 3), seed=seed),
        lambda: Federation.from_clients([(X, HIGH % 3)], seed=seed),
    ):
        with pytest.raises(UserError, match=r"seed is .*; give a whole number"):
            make()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_clients": 3, "train": 2**62}, "more examples together than can be numbered"),
        ({"num_clients": 10**12, "train": 3}, "the most that a federation can have"),
        ({"num_clients": 3, "train": 3, "load": None}, "give a function from a client's number"),
        ({"num_clients": 3, "train": 3, "num_cached": "many"}, "num_cached is 'many'"),
    ],
)
def test_counts_of_a_lazy_federation_fit_into_its_tables(arguments: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Federation.lazy(**{"load": lambda client: {"train": (X[:3], HIGH[:3] % 3)}, **arguments})


def test_texts_and_datasets_are_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"names, y = numpy\.unique\(y, return_inverse=True\)"):
        as_tensor(["ill", "well"], "y")
    dataset = torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(UserError, match=r"of a PyTorch Dataset, give x = torch\.stack"):
        as_tensor(dataset, "x")
    with pytest.raises(UserError, match=r"client 0: its data is a TensorDataset; of a PyTorch Dataset, give x = "):
        Federation.from_clients([dataset])  # type: ignore[list-item]
