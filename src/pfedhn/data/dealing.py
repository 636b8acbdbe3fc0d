"""Examples cut into training, validation and test, and dealt to clients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn import keys
from pfedhn.data.arrays import (
    SPLITS,
    ClientData,
    Pair,
    as_pair,
    as_splits,
    check_classes,
    refuse_mixed_labels,
)
from pfedhn.data.partition import Assignment, Labels, Partition
from pfedhn.errors import UserError, short
from pfedhn.keys import Key
from pfedhn.settings import whole_number

LEAST_FOLDS, MOST_FOLDS = 3, 1_000  # at least one part each for training, validation and test


@dataclass(frozen=True)
class Fold:
    """One split of a cross-validation, in the place of the fractions for training, validation and test.

    Each client's examples are drawn once into as many parts as there are folds, by the seed alone. The part with this
    fold's number is for test, the next one for validation, and all others are for training. So the folds together test
    every example once.

    Args:
        number: Which of the folds, from 0.
        folds: How many there are, at least 3.

    Examples:
        >>> import numpy, pfedhn
        >>> clients = [(numpy.zeros((10, 2)), numpy.arange(10) % 2)] * 2
        >>> folds = [pfedhn.Federation.from_clients(clients, split=pfedhn.Fold(number, 5)) for number in range(5)]
        >>> sorted(example for fold in folds for example in fold.splits["test"].of(0).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    number: int
    folds: int

    def __post_init__(self) -> None:
        check_folds(self.folds)
        if whole_number("number", self.number, least=0) >= self.folds:
            raise UserError(
                f"there is no fold {self.number} of {self.folds}; give a number from 0 to {self.folds - 1}."
            )


Split: TypeAlias = tuple[float, float, float] | Fold


def check_folds(folds: int) -> None:
    """Refuse a number of folds that leaves no part for training, validation or test, or means too many runs."""
    if not LEAST_FOLDS <= whole_number("folds", folds) <= MOST_FOLDS:
        raise UserError(
            f"`folds` must be at least {LEAST_FOLDS} (training, validation and test) and at most {MOST_FOLDS:,}, "
            f"got {folds}."
        )


def check_split(split: Sequence[float] | Fold) -> tuple[float, float, float]:
    """The fractions of examples for training, validation and test."""
    if isinstance(split, Fold):
        return (split.folds - 2) / split.folds, 1 / split.folds, 1 / split.folds
    try:
        train, validation, test = (float(fraction) for fraction in split)
    except (TypeError, ValueError):  # not three, or not numbers
        train = validation = test = math.nan
    # NaN fails every comparison, and no sum with an infinity is 1.
    if not (min(train, validation, test) >= 0 and abs(train + validation + test - 1) <= 1e-6):
        raise UserError(f"split {short(split)} must be three fractions (train, validation, test) that sum to 1.")
    return train, validation, test


def split_examples(
    labels: NDArray[Any], split: Sequence[float] | Fold, stratify: bool, key: Key, client: int | str | None = None
) -> list[NDArray[numpy.int64]]:
    """The numbers of the examples in each split; each part is sorted, so that only membership is random.

    Args:
        labels: Of all examples.
        split: The fractions, or a fold.
        stratify: Whether the draw is within each class.
        key: Of the draw.
        client: Whose examples they are, for an error.
    """
    train, validation, _ = check_split(split)
    if not isinstance(stratify, bool):
        raise UserError(f"stratify is {short(stratify)}; it must be True or False.")
    generator = keys.numpy_generator(key)
    strata = (
        [numpy.flatnonzero(labels == value) for value in numpy.unique(labels)]
        if stratify and len(labels)
        else [numpy.arange(len(labels))]
    )
    if isinstance(split, Fold):
        if len(labels) < split.folds:
            raise UserError(
                f"client {client} has {len(labels)} examples, too few for {split.folds} folds; give fewer folds, or "
                f"leave small clients out (in a table: min_examples = {split.folds})."
            )
        # Dealt in turn, so that the parts differ by one example at most; which of them are larger is drawn.
        shuffled = numpy.concatenate([generator.permutation(stratum) for stratum in strata])
        numbers = numpy.empty(len(labels), dtype=numpy.int64)
        numbers[shuffled] = generator.permutation(split.folds)[numpy.arange(len(labels)) % split.folds]
        is_test, is_validation = (numbers == (split.number + later) % split.folds for later in (0, 1))
        return [numpy.flatnonzero(part) for part in (~(is_test | is_validation), is_validation, is_test)]
    parts: list[list[NDArray[numpy.int64]]] = [[], [], []]
    for stratum in strata:
        shuffled = generator.permutation(stratum)
        first, second = round(len(stratum) * train), round(len(stratum) * (train + validation))
        for part, numbers in zip(parts, numpy.split(shuffled, [first, second]), strict=True):
            part.append(numbers)
    return [numpy.sort(numpy.concatenate(part)) for part in parts]


def share_out(
    labels: Tensor,
    partition: Partition,
    *,
    split: Split,
    seed: int,
    test_labels: Tensor | None = None,
    groups: NDArray[numpy.int64] | None = None,
    coarse: NDArray[numpy.int64] | None = None,
    test_coarse: NDArray[numpy.int64] | None = None,
    stratify: bool = False,
) -> Assignment:
    """Which example goes to which client and split; test examples are numbered after the others."""
    for name, values, given in (
        ("groups", groups, labels),
        ("coarse", coarse, labels),
        ("test_coarse", test_coarse, test_labels),
    ):
        if values is not None and given is not None and len(values) != len(given):
            raise UserError(f"{name} has {len(values)} entries and y has {len(given)}; give one per example.")
    if not hasattr(partition, "assign") or isinstance(partition, type):
        raise UserError(f"partition is {short(partition)}; give a rule such as pfedhn.by_classes(2, num_clients=50).")
    if labels.is_floating_point() or (test_labels is not None and test_labels.is_floating_point()):
        raise UserError("y holds fractions, and a partition goes by class; use Federation.from_clients for regression.")
    if labels.ndim != 1:
        raise UserError(f"y has the shape {tuple(labels.shape)}; a partition goes by class, so give one number each.")
    if check_split(split)[2] != 0 and test_labels is not None:
        instead = "leave out folds" if isinstance(split, Fold) else "give split=(train, validation, 0)"
        raise UserError(f"with a test set of its own, {instead}.")
    key = keys.fold(seed, "partition")
    numbers = labels.cpu().numpy()
    if isinstance(split, Fold):
        whole = partition.assign({"train": Labels(numbers, groups, coarse)}, keys.fold(key, "clients"))
        return _folded(numbers, whole, split, stratify, keys.fold(key, "split"))
    parts = dict(zip(SPLITS, split_examples(numbers, split, stratify, keys.fold(key, "split")), strict=True))
    splits = {
        name: Labels(
            numbers[part],
            groups=None if groups is None else groups[part],
            coarse=None if coarse is None else coarse[part],
        )
        for name, part in parts.items()
    }
    if test_labels is not None:
        parts["test"] = len(labels) + numpy.arange(len(test_labels))
        splits["test"] = Labels(test_labels.cpu().numpy(), coarse=test_coarse)
    assignment = partition.assign(splits, keys.fold(key, "clients"))
    if not any(len(owned) for lists in assignment.clients.values() for owned in lists):
        raise UserError(f"{partition!r} leaves every client without examples; use fewer clients or more data.")
    return replace(
        assignment,
        clients={name: [part[owned] for owned in assignment.clients[name]] for name, part in parts.items()},
        unused={name: part[assignment.unused[name]] for name, part in parts.items()},
    )


def _folded(labels: NDArray[Any], whole: Assignment, fold: Fold, stratify: bool, key: Key) -> Assignment:
    """Split what each client has in all into the parts of a fold."""
    found: dict[str, list[NDArray[numpy.int64]]] = {name: [] for name in SPLITS}
    for client, owned in enumerate(whole.clients["train"]):
        parts = split_examples(labels[owned], fold, stratify, keys.fold(key, client), client)
        for name, part in zip(SPLITS, parts, strict=True):
            found[name].append(owned[part])
    nobody = numpy.empty(0, dtype=numpy.int64)
    return replace(whole, clients=found, unused={**dict.fromkeys(SPLITS, nobody), **whole.unused})


def split_clients(
    clients: Sequence[ClientData],
    names: Sequence[str] | None,
    split: Split,
    stratify: bool,
    seed: int,
    class_names: Sequence[str] | None,
) -> tuple[Tensor, Tensor, dict[str, list[NDArray[numpy.int64]]]]:
    """Check the clients' own arrays, join them, and split those that are not split yet (`Federation.from_clients`).

    Returns:
        x and y of one client after the other, and by split the numbers of each client's examples.
    """
    called: Sequence[int | str] = range(len(clients)) if names is None else [repr(name) for name in names]
    brought: list[dict[str, Pair]] = [
        as_splits(name, client) if isinstance(client, Mapping) else {"all": as_pair(name, "its data", client)}
        for name, client in zip(called, clients, strict=True)
    ]
    pairs = [(name, pair) for name, client in zip(called, brought, strict=True) for pair in client.values()]
    shapes = {tuple(x.shape[1:]) for _, (x, _) in pairs if len(x)}
    if len(shapes) > 1:
        raise UserError(f"clients bring examples of different shapes {sorted(shapes)}; one network needs one shape.")
    filled = [(name, pair) for name, pair in pairs if len(pair[0])]  # an empty array has no kind of labels
    refuse_mixed_labels([(name, y) for name, (_, y) in filled])
    xs, ys = zip(*[pair for _, pair in filled or pairs[:1]], strict=True)
    check_classes(ys, sum(map(len, ys)), class_names)
    owned: dict[str, list[NDArray[numpy.int64]]] = {name: [] for name in SPLITS}
    start = 0
    for number, client in enumerate(brought):
        if "all" in client:
            key = keys.fold(seed, "partition", "split", number if names is None else names[number])
            parts = split_examples(client["all"][1].cpu().numpy(), split, stratify, key, called[number])
        else:
            if isinstance(split, Fold):
                raise UserError(f"client {called[number]} is split already; give (x, y) for folds.")
            ends = numpy.cumsum([len(client[name][1]) if name in client else 0 for name in SPLITS])
            parts = numpy.split(numpy.arange(ends[-1]), ends[:-1])
        for name, part in zip(SPLITS, parts, strict=True):
            owned[name].append(start + part)
        start += sum(map(len, parts))
    return torch.cat(xs), torch.cat(ys), owned
