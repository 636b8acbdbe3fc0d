"""CUDA graphs of a round and of an evaluation, replayed in order; on a CPU, functions that stand in for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn import functional

from pfedhn.engine.evaluate import Chunk
from pfedhn.engine.state import Progress
from pfedhn.kernels import launch as kernels


@dataclass
class Repeated:
    """The stand-in for a CUDA graph on a CPU, on which tests check what a GPU would replay."""

    replay: Callable[[], None]


@dataclass
class InTurn:
    """Graphs of one round, in order, and how often each is replayed."""

    parts: list[tuple["Graph", int]]

    def replay(self) -> None:
        for graph, times in self.parts:
            for _ in range(times):
                graph.replay()


Graph: TypeAlias = torch.cuda.CUDAGraph | Repeated | InTurn

Part: TypeAlias = tuple[Callable[[], None], int]
"""What becomes a graph, and how often it is replayed."""


def pile_up(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks of one client each as piles, one for every architecture and like size, filled up to the same width."""
    kinds: dict[tuple[str, int], list[Chunk]] = {}
    for chunk in chunks:
        kinds.setdefault((chunk.model.name, kernels.power_of_two(chunk.index.shape[-1])), []).append(chunk)
    piles = []
    for mine in kinds.values():
        model = mine[0].model
        width = max(chunk.index.shape[-1] for chunk in mine)
        index, masks = (
            torch.cat([functional.pad(part, (0, width - part.shape[-1])) for part in parts])
            for parts in ([chunk.index for chunk in mine], [chunk.masks for chunk in mine])
        )
        clients = [client for chunk in mine for client in chunk.clients]
        piles.append(Chunk(model, clients, torch.cat([chunk.members for chunk in mine]), index, masks))
    return piles


def side_by_side(runs: Sequence[Iterator[Progress]]) -> Iterator[tuple[int, Progress]]:
    """Let runs take turns, a round each: streams overlap only if their work is queued in turns."""
    going = dict(enumerate(runs))
    while going:
        for number in list(going):
            progress = next(going[number], None)
            if progress is None:
                del going[number]
            else:
                yield number, progress
