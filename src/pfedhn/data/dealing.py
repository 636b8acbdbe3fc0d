"""Examples cut into training, validation and test, and dealt to clients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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


def check_split(split: Sequence[float]) -> tuple[float, float, float]:
    """The fractions of examples for training, validation and test."""
    try:
        train, validation, test = (float(fraction) for fraction in split)
    except (TypeError, ValueError):  # not three, or not numbers
        train = validation = test = math.nan
    # NaN fails every comparison, and no sum with an infinity is 1.
    if not (min(train, validation, test) >= 0 and abs(train + validation + test - 1) <= 1e-6):
        raise UserError(f"split {short(split)} must be three fractions (train, validation, test) that sum to 1.")
    return train, validation, test


def split_examples(
    labels: NDArray[Any], split: Sequence[float], stratify: bool, key: Key
) -> list[NDArray[numpy.int64]]:
    """The numbers of the examples in each split; each part is sorted, so that only membership is random."""
    train, validation, _ = check_split(split)
    if not isinstance(stratify, bool):
        raise UserError(f"stratify is {short(stratify)}; it must be True or False.")
    generator = keys.numpy_generator(key)
    strata = (
        [numpy.flatnonzero(labels == value) for value in numpy.unique(labels)]
        if stratify and len(labels)
        else [numpy.arange(len(labels))]
    )
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
    split: tuple[float, float, float],
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
        raise UserError("with a test set of its own, give split=(train, validation, 0).")
    key = keys.fold(seed, "partition")
    numbers = labels.cpu().numpy()
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


def split_clients(
    clients: Sequence[ClientData],
    names: Sequence[str] | None,
    split: tuple[float, float, float],
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
            parts = split_examples(client["all"][1].cpu().numpy(), split, stratify, key)
        else:
            ends = numpy.cumsum([len(client[name][1]) if name in client else 0 for name in SPLITS])
            parts = numpy.split(numpy.arange(ends[-1]), ends[:-1])
        for name, part in zip(SPLITS, parts, strict=True):
            owned[name].append(start + part)
        start += sum(map(len, parts))
    return torch.cat(xs), torch.cat(ys), owned
