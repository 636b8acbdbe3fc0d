"""A federation whose data are made or loaded when a client takes part or is tested, so that it may be large."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pfedhn.data.arrays import (
    EXPECTED,
    SPLITS,
    Arrays,
    Pair,
    as_splits,
    as_whole_numbers,
    check_classes,
    check_values,
)
from pfedhn.data.batches import Examples, gather
from pfedhn.data.federation import Federation
from pfedhn.data.palette import in_fast_order
from pfedhn.errors import UserError, first_line, short
from pfedhn.settings import whole_number

MAX_CLIENTS = 100_000_000  # the server's table of them has 48 bytes for each
MAX_EXAMPLES = 2**62  # their numbers have 64 bits

Load: TypeAlias = Callable[[int], Mapping[str, Arrays]]


class ExamplesInOrder(Examples):
    """Examples numbered client after client, so that no index is kept: place and number are one."""

    def numbers(self, places: Tensor) -> Tensor:
        return places


@dataclass(frozen=True, eq=False, repr=False)
class LazyFederation(Federation):
    """As `Federation.lazy` makes it: `x` and `y` are client 0's training examples and show the form of everybody's."""

    load: Load = field(kw_only=True)
    ends: Tensor = field(kw_only=True)  # [N], the number after a client's last example
    num_cached: int = field(kw_only=True)
    num_outputs: int | None = field(kw_only=True, default=None)  # labels must be smaller; a run fills it in

    labels: Tensor | None = field(kw_only=True, default=None)  # of all examples, by number, if they are known

    @property
    def num_classes(self) -> int | None:
        """None also if the labels are not known."""
        if self.labels is None or self.labels.is_floating_point() or self.labels.ndim > 1:
            return None
        return int(self.labels.max()) + 1 if self.class_names is None else len(self.class_names)

    @property
    def class_shares(self) -> Tensor:
        if self.labels is None:
            raise UserError(
                "the classes of clients that are loaded when needed are not known; describe them with "
                "federation.with_descriptors(...)."
            )
        return super().class_shares

    def labels_of(self, numbers: Tensor) -> Tensor:
        return self.examples(numbers)[1] if self.labels is None else self.labels[numbers]

    @cached_property
    def examples_of(self) -> Callable[[int], Pair]:
        """All examples of a client, split after split."""
        return lru_cache(self.num_cached)(self._load)

    def _load(self, client: int) -> Pair:
        given, xs, ys = _loaded(self.load, client), [], []
        bounds = [int(self.splits[name].offset[client]) for name in SPLITS] + [int(self.ends[client])]
        for name, (start, end) in zip(SPLITS, pairwise(bounds), strict=True):
            x, y = given.get(name, (self.x[:0], self.y[:0]))
            if len(x) != end - start or len(y) != end - start:
                raise UserError(
                    f"client {client} brings {len(x)} {name} examples and {len(y)} labels; "
                    f"{end - start} were announced."
                )
            for what, values, like in (("examples", x, self.x), ("labels", y, self.y)):
                if len(x) and values.shape[1:] != like.shape[1:]:
                    shapes = tuple(values.shape[1:]), tuple(like.shape[1:])
                    raise UserError(
                        f"client {client} brings {name} {what} of shape {shapes[0]}; client 0 has {shapes[1]}."
                    )
            if not self.y.is_floating_point() and as_whole_numbers(y) is None:
                raise UserError(
                    f"client {client} brings {name} labels that are not whole numbers, and client 0's are; give class "
                    "numbers, or for regression floating-point labels from client 0 on."
                )
            xs.append(x.to(self.x))
            ys.append(y.to(self.y))
        x, y = torch.cat(xs), torch.cat(ys)
        try:
            check_values(x, y)
            check_classes([y], int(self.ends[-1]))
        except UserError as error:
            raise UserError(f"client {client}: {error}") from None
        if self.num_outputs is not None and (top := int(y.max())) >= self.num_outputs:
            raise UserError(
                f"client {client} has the label {top}, but the network has {self.num_outputs} outputs (labels 0 to "
                f"{self.num_outputs - 1}); give the network more outputs or fix the labels."
            )
        return in_fast_order(x), y

    def examples(self, numbers: Tensor) -> Pair:
        if not numbers.numel():
            return gather(self.x, numbers), self.y[numbers]
        clients, places = torch.searchsorted(self.ends, numbers, right=True).unique(return_inverse=True)
        loaded = [self.examples_of(client) for client in clients.tolist()]
        lengths = torch.tensor([len(y) for _, y in loaded], device=numbers.device)
        shift = lengths.cumsum(0) - self.ends[clients]  # from an example's number to its place among the loaded
        x, y = (torch.cat(parts) for parts in zip(*loaded, strict=True))
        return gather(x, numbers + shift[places]), y[numbers + shift[places]]

    def _stored(self, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
        return self.x, None  # what is loaded next may have other values than bytes could say

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Federation:
        labels = None if self.labels is None else self.labels.to(device)
        return replace(super().to(device, dtype), ends=self.ends.to(device), labels=labels)  # type: ignore[call-arg]


def lazy_federation(num_clients: int, load: Load, sizes: Mapping[str, Any], num_cached: int) -> LazyFederation:
    """`Federation.lazy`; sizes: how many examples each client has in each split."""
    num_clients = whole_number("num_clients", num_clients)
    if not callable(load):
        raise UserError(f"load is {short(load)}; give a function from a client's number to its examples.")
    if num_clients > MAX_CLIENTS:
        raise UserError(f"{num_clients:,} clients are more than {MAX_CLIENTS:,}, the most that a federation can have.")
    num_cached = whole_number("num_cached", num_cached, least=0)
    counts = {name: _counts(name, value, num_clients) for name, value in sizes.items()}
    if sum(float(count.double().sum()) for count in counts.values()) > MAX_EXAMPLES:
        raise UserError("the clients announce more examples together than can be numbered; fix the counts.")
    total = sum(counts.values(), torch.zeros(num_clients, dtype=torch.int64))
    offset, splits = total.cumsum(0) - total, {}
    for name, size in counts.items():
        splits[name] = ExamplesInOrder(torch.empty(0, dtype=torch.int64), offset, size)
        offset = offset + size
    first = _loaded(load, 0)
    if "train" not in first:
        raise UserError(f"client 0 brings no train examples; {EXPECTED}.")
    check_classes([first["train"][1]], int(total.sum()))
    return LazyFederation(*first["train"], splits, load=load, ends=offset, num_cached=num_cached)


def _loaded(load: Load, client: int) -> dict[str, Pair]:
    try:
        given = load(client)
    except Exception as error:  # of the user's own code, so it may be any
        raise UserError(
            f"loading client {client} failed ({first_line(error)}); fix `load`, or what it reads."
        ) from error
    if not isinstance(given, Mapping):
        raise UserError(f"for client {client} load returned {short(given)}; {EXPECTED}.")
    return as_splits(client, given)


def _counts(name: str, values: Any, num_clients: int) -> Tensor:
    """[N]: how many examples each client announces."""
    counts = as_whole_numbers(values)
    if counts is None or (counts < 0).any():
        raise UserError(
            f"{name} says how many examples a client has, so it must be a whole number or one for each client, "
            f"not {short(values)}."
        )
    if counts.shape not in ((), (num_clients,)):
        raise UserError(
            f"{name} has the shape {tuple(counts.shape)}; give one number for all {num_clients} clients, or one for "
            "each of them."
        )
    return counts.expand(num_clients)
