"""Who shares the clients of a round: this process alone, several devices of a machine, or workers elsewhere.

Whoever trains a part of a cohort has a copy of the run, so that only memories and updates travel; what a client draws
depends on its name, the round and the seed, so that it does not matter who trains it. The server's step is made here,
of all replies.
Axes: [C]lients of a cohort that share one architecture.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from pfedhn.engine.round import Kept, Reply


class CohortShard(NamedTuple):
    """Clients of one architecture that take part in a round, and what they begin it with."""

    architecture: str
    number: int  # of the round
    clients: list[int]
    shared: Any
    rows: Any  # [C, ...]
    kept: Kept  # [C, ...]

    def split(self, num_parts: int) -> "list[CohortShard]":
        """Split into parts of nearly equal size, in order; fewer parts if there are fewer clients."""
        num_parts = min(num_parts, len(self.clients))
        bounds = [len(self.clients) * part // num_parts for part in range(num_parts + 1)]
        pieces = [slice(start, end) for start, end in pairwise(bounds)]
        return [
            self._replace(clients=self.clients[piece], rows=_part(self.rows, piece), kept=_part(self.kept, piece))
            for piece in pieces
        ]


class Trained(NamedTuple):
    """The result of training a shard."""

    replies: Reply  # [C, ...]
    kept: Kept  # [C, ...]
    bytes_down: int


class Trainer(Protocol):
    """Trains shards of the rounds of one run: the run itself, or several copies of it together."""

    def train(self, shard: CohortShard) -> Trained: ...


class MovableTrainer(Trainer, Protocol):
    """A trainer that can be copied to another device."""

    @property
    def device(self) -> torch.device: ...

    def on(self, device: str) -> "MovableTrainer":
        """A copy whose data and networks are on a device."""


class Devices:
    """Several devices of this machine, each with a copy of the data, that share the clients of every round.

    One thread gives all of them their work: a GPU is told what to do long before it has done it.
    """

    def __init__(self, run: MovableTrainer, names: Sequence[str]) -> None:
        self.home = run.device
        self.copies = [run.on(name) for name in names]

    def train(self, shard: CohortShard) -> Trained:
        shards = shard.split(len(self.copies))
        parts = [copy.train(to_device(part, copy.device)) for copy, part in zip(self.copies, shards, strict=False)]
        return together([to_device(part, self.home) for part in parts])


def together(parts: Sequence[Trained]) -> Trained:
    """The parts of a cohort as one, in their order."""
    replies, kept = (
        pytree.tree_map(lambda *leaves: torch.cat(leaves), *trees)
        for trees in ([part.replies for part in parts], [part.kept for part in parts])
    )
    return Trained(replies, kept, sum(part.bytes_down for part in parts))


def to_device(tree: Any, device: torch.device | str) -> Any:
    """The tree with its tensors on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _part(tree: Any, piece: slice) -> Any:
    return pytree.tree_map(lambda leaf: leaf[piece], tree)
