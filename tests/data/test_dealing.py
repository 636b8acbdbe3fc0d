"""Dealing: no example is in two splits or with two clients, whatever the rule, the split and the clients."""

import re

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedhn import Federation, Fold, by_classes, by_coarse_class, by_group, dirichlet, keys
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


def of_each_fold(folds: list[Federation], name: str, client: int) -> list[list[int]]:
    return [fold.splits[name].of(client).tolist() for fold in folds]


@settings(max_examples=60)
@given(st.integers(3, 7), st.booleans(), st.lists(st.integers(7, 40), min_size=1, max_size=5), st.integers(0, 100))
def test_folds_test_every_example_of_a_client_once(folds: int, stratify: bool, sizes: list[int], seed: int) -> None:
    clients = [(numpy.zeros((size, 1)), numpy.arange(size) % 3) for size in sizes]
    made = [Federation.from_clients(clients, split=Fold(f, folds), stratify=stratify, seed=seed) for f in range(folds)]
    start = 0
    for client, size in enumerate(sizes):
        tested = of_each_fold(made, "test", client)
        assert sorted(number for part in tested for number in part) == list(range(start, start + size))
        assert max(map(len, tested)) - min(map(len, tested)) <= 1
        assert of_each_fold(made, "validation", client) == tested[1:] + tested[:1]
        for number, train in enumerate(of_each_fold(made, "train", client)):
            others = set(range(start, start + size)) - {*tested[number], *tested[(number + 1) % folds]}
            assert train == sorted(others)
        if stratify:
            counts = numpy.array([numpy.bincount(made[0].y[part], minlength=3) for part in tested])
            assert (counts.max(0) - counts.min(0)).max() <= 1
        start += size


@pytest.mark.parametrize("rule", RULES)
def test_folds_of_shared_out_examples_leave_each_with_its_client(rule: Partition) -> None:
    y = torch.arange(1200) % 6
    groups, coarse = (y % 3).numpy(), (y // 3).numpy()
    made = [share_out(y, rule, split=Fold(f, 3), seed=1, groups=groups, coarse=coarse) for f in range(3)]
    for client in range(made[0].num_clients):
        owners = [{int(number) for name in SPLITS for number in fold.clients[name][client]} for fold in made]
        assert owners[0] == owners[1] == owners[2]
        assert sorted(number for fold in made for number in fold.clients["test"][client].tolist()) == sorted(owners[0])


def test_folds_that_cannot_be_are_refused() -> None:
    few = {"lyon": (numpy.zeros((4, 1)), numpy.arange(4) % 2)}
    with pytest.raises(UserError, match=r"client 'lyon' has 4 examples, too few for 5 folds; give fewer folds, or"):
        Federation.from_clients(few, split=Fold(0, 5))
    with pytest.raises(
        UserError, match=r"`folds` must be at least 3 \(training, validation and test\) and at most 1,000, got 2"
    ):
        Fold(0, 2)
    with pytest.raises(UserError, match="there is no fold 5 of 5; give a number from 0 to 4"):
        Fold(5, 5)
    with pytest.raises(UserError, match="client 'lyon' is split already; give"):
        Federation.from_clients({"lyon": {"train": few["lyon"], "test": few["lyon"]}}, split=Fold(0, 3))
    with pytest.raises(UserError, match="with a test set of its own, leave out folds"):
        share_out(torch.arange(40) % 2, RULES[0], split=Fold(0, 3), seed=0, test_labels=torch.zeros(3).long())


@pytest.mark.parametrize("stratify", [False, True])
def test_splits_have_the_sizes_that_were_asked_for(stratify: bool) -> None:
    labels = numpy.repeat([0, 1], [100, 40])
    parts = split_examples(labels, (0.5, 0.3, 0.2), stratify, keys.fold(0, "split"))
    assert [len(part) for part in parts] == [70, 42, 28]
    if stratify:
        assert [int((labels[part] == 1).sum()) for part in parts] == [20, 12, 8]
