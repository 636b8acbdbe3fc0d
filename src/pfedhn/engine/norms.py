"""How long the server's memories are, beside a learning curve: norms of what it trains, knows and serves."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Memories
from pfedhn.model import Model
from pfedhn.params import take

CLIENTS_AT_ONCE = 64  # whose weights are held together


def norms(simulation: Simulation, memories: Memories) -> dict[str, float]:
    """Euclidean norms of the server's memories; a method that has no such memory has no such norm.

    "shared" is of what the server trains for all, which is phi of pFedHN, and not of an average of it; "embeddings" is
    the mean over clients of their embeddings' norms, "served" that of the weights that clients are given to use.
    """
    found: dict[str, Tensor] = {}
    trained = simulation.algorithm.averaged_part(simulation.exchange.newest(memories.shared))
    if parts := pytree.tree_leaves(trained):
        found["shared"] = _norm(parts)
    if (embeddings := simulation.embeddings(memories)) is not None:
        found["embeddings"] = embeddings.norm(dim=1).mean()
    if simulation.algorithm.communicates:
        served = [part for model in simulation.models.values() for part in _served(simulation, model, memories)]
        found["served"] = torch.cat(served).mean()
    return {name: float(f"{float(value):.6g}") for name, value in found.items()}


def _served(simulation: Simulation, model: Model, memories: Memories) -> list[Tensor]:
    """The norm of what each client that runs `model` is given to use; some clients in each tensor."""
    shared, executor = simulation.exchange.served(memories.shared), simulation.executor_for(model)

    def one_client(client: Tensor, row: Any) -> Tensor:
        return _norm(simulation.algorithm.publish(model, shared, row).values())

    mine = [client for client in range(simulation.federation.num_clients) if simulation.model_of(client) is model]
    groups = torch.tensor(mine, dtype=torch.int64, device=simulation.device).split(CLIENTS_AT_ONCE)
    return [executor.map(one_client)(group, take(memories.rows, group)) for group in groups if len(group)]


def _norm(parts: Iterable[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))
    return norm
