"""Dealing: no example is in two splits or with two clients, whatever the rule, the split and the clients."""

import re

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedhn import Federation, by_classes, by_coarse_class, by_group, dirichlet, keys
from pfedhn.data.arrays import SPLITS
from pfedhn.data.dealing import share_out, split_examples
from pfedhn.data.partition import Partition
from pfedhn.errors import UserError

RULES: list[Partition] = [
    by_classes(1, num_clients=5),
    by_classes(1, num_clients=30, shares="reference"),
    dirichlet(0.3, num_clients=8),
    dirichlet(0.3, num_clients=8, form="per-class", novel_clients=3, novel_alpha=2.0),
    dirichlet(0.3, num_clients=8, novel_clients=3, normalize="jointly"),
    by_group(),
    by_coarse_class(3),
]


@st.composite
def fractions(draw: st.DrawFn) -> tuple[float, float, float]:
    train = draw(st.floats(0, 1))
    validation = draw(st.floats(0, 1)) * (1 - train)
    return train, validation, max(0.0, 1 - train - validation)


@settings(max_examples=150)
@given(
    st.sampled_from(RULES),
    fractions(),
    st.booleans(),
    st.integers(0, 200),
    st.integers(1, 300),
    st.integers(1, 12),
    st.integers(0, 100),
)
def test_no_example_is_in_two_splits_or_with_two_clients(
    rule: Partition,
    split: tuple[float, float, float],
    stratify: bool,
    num_test: int,
    count: int,
    num_classes: int,
    seed: int,
) -> None:
    y = torch.randint(num_classes, (count + num_test,), generator=torch.Generator().manual_seed(seed))
    if num_test:
        split = (split[0], 1 - split[0], 0.0)
    groups = None if num_test else (y % 3).numpy()
    parts = {"groups": groups, "coarse": (y[:count] // 3).numpy(), "test_coarse": (y[count:] // 3).numpy()}
    test_labels = y[count:] if num_test else None
    try:
        assignment = share_out(
            y[:count], rule, split=split, seed=seed, test_labels=test_labels, stratify=stratify, **parts
        )
    except UserError as error:
        if not re.search("leaves every client without examples|by_group needs", str(error)):
            raise
        return
    federation = Federation.from_assignment(y[:, None].float(), y, assignment)
    everybody = [federation] if federation.joining is None else [federation, federation.joining]
    assert sum(part.num_clients for part in everybody) == assignment.num_clients
    owned = [
        number
        for part in everybody
        for name in SPLITS
        for client in range(part.num_clients)
        for number in part.splits[name].of(client).tolist()
    ]
    unused = [number for name in SPLITS for number in assignment.unused[name].tolist()]
    assert sorted(owned + unused) == list(range(count + num_test))
    assert sum(federation.unused.values()) == len(unused)
    if num_test:
        tested = [number for part in everybody for number in part.splits["test"].index.tolist()]
        assert min([*tested, *assignment.unused["test"].tolist()]) >= count


@settings(max_examples=100)
@given(fractions(), st.booleans(), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 100))
def test_no_example_of_a_client_is_in_two_splits(
    split: tuple[float, float, float], stratify: bool, sizes: list[int], seed: int
) -> None:
    clients = [(numpy.zeros((size, 1)), numpy.arange(size) % 3) for size in sizes]
    try:
        federation = Federation.from_clients(clients, split=split, stratify=stratify, seed=seed)
    except UserError as error:
        if "would have no training examples" not in str(error):
            raise
        return
    start = 0
    for client, size in enumerate(sizes):
        owned = [number for name in SPLITS for number in federation.splits[name].of(client).tolist()]
        assert sorted(owned) == list(range(start, start + size))
        start += size


@pytest.mark.parametrize("stratify", [False, True])
def test_splits_have_the_sizes_that_were_asked_for(stratify: bool) -> None:
    labels = numpy.repeat([0, 1], [100, 40])
    parts = split_examples(labels, (0.5, 0.3, 0.2), stratify, keys.fold(0, "split"))
    assert [len(part) for part in parts] == [70, 42, 28]
    if stratify:
        assert [int((labels[part] == 1).sum()) for part in parts] == [20, 12, 8]
