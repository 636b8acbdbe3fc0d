"""Minibatches and cohorts: which examples and clients are drawn, each a function of (seed, round, client).

Axes: [N] clients, [C]lients of a cohort, [K] steps, [B]atch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn import keys
from pfedhn.data.palette import decode
from pfedhn.keys import Key
from pfedhn.privacy import num_places
from pfedhn.sgd import Batches


@dataclass(frozen=True)
class Examples:
    """The examples of every client in one split: client i owns index[offset[i] : offset[i] + size[i]]."""

    index: Tensor
    offset: Tensor  # [N]
    size: Tensor  # [N]

    def of(self, client: int) -> Tensor:
        start = int(self.offset[client])
        return self.numbers(torch.arange(start, start + int(self.size[client]), device=self.offset.device))

    def numbers(self, places: Tensor) -> Tensor:
        """The numbers of the examples at these places of `index`."""
        return self.index[places]

    def __len__(self) -> int:
        return len(self.offset)


def as_examples(lists: Sequence[NDArray[numpy.int64]]) -> Examples:
    """The examples of one split, from the numbers of those that each client owns."""
    sizes = numpy.array([len(numbers) for numbers in lists], dtype=numpy.int64)
    index = numpy.concatenate(lists).astype(numpy.int64)
    return Examples(torch.from_numpy(index), torch.from_numpy(numpy.cumsum(sizes) - sizes), torch.from_numpy(sizes))


def draw_batches(
    x: Tensor,
    y: Tensor,
    table: Examples,
    clients: Tensor,
    key: Key,
    steps: Tensor,
    width: int,
    identities: Tensor | None = None,
    palette: Tensor | None = None,
) -> Batches:
    """`Federation.batches` on bare tensors, which an engine can trace.

    Args:
        x: All examples.
        y: Their labels.
        table: The training examples of every client.
        clients: [C], who draws.
        key: What the draw is for.
        steps: [K], the batches' numbers, from 0.
        width: The batch size.
        identities: [C], what `clients` draw by (`Federation.identity`); their numbers where None.
        palette: What the bytes of `x` stand for, if they are such.
    """
    numbers, mask = draw_examples(table, clients, key, steps, width, clients if identities is None else identities)
    return Batches(gather(x, numbers, palette), y[numbers], mask)


def draw_examples(
    table: Examples, clients: Tensor, key: Key, steps: Tensor, width: int, identities: Tensor
) -> tuple[Tensor, Tensor]:
    """The numbers [C, K, B] of the examples in minibatches, and which of them count."""
    size, offset = table.size[clients], table.offset[clients]
    step_keys = keys.fold(torch.as_tensor(keys.fold(key, identities)).unsqueeze(-1), steps)
    places = keys.permutation_head(step_keys, size[:, None], width)
    numbers = table.numbers(offset[:, None, None] + places)
    mask = torch.arange(width, device=clients.device) < size[:, None, None]
    return numbers, mask.expand(numbers.shape)


def sample_examples(
    table: Examples, clients: Tensor, key: Key, steps: Tensor, batch_size: int, largest: int, identities: Tensor
) -> tuple[Tensor, Tensor]:
    """The numbers [C, K, ...] of the examples that join minibatches by themselves, and which of them count."""
    size, offset = table.size[clients, None, None], table.offset[clients, None, None]
    step_keys = keys.fold(torch.as_tensor(keys.fold(key, identities)).unsqueeze(-1), steps, "sample")
    places = torch.arange(largest, device=clients.device)
    joins = (keys.uniform(step_keys, largest, clients.device) * size < batch_size) & (places < size)
    first = joins.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : num_places(batch_size)]
    mask = joins.gather(-1, first)
    return table.numbers(offset + torch.where(mask, first, 0)), mask


def gather(x: Tensor, numbers: Tensor, palette: Tensor | None = None) -> Tensor:
    """Examples by number; images that are stored with their channels last stay so. Bytes are decoded."""
    if palette is not None:
        return decode(x.permute(0, 2, 3, 1)[numbers], palette).movedim(-1, -3)
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)[numbers].movedim(-1, -3)
    return x[numbers]


def cohort(key: Key, round_number: int | Tensor, num_clients: int, size: int) -> Tensor:
    """The clients of one round, drawn without replacement; with `size` = all, every client in order."""
    if size == num_clients:
        device = round_number.device if isinstance(round_number, Tensor) else None
        return torch.arange(num_clients, device=device)
    return keys.permutation_head(keys.fold(key, "cohort", round_number), num_clients, size)
