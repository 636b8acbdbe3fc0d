"""How long the server's memories are, beside a learning curve: norms of what it trains, knows and serves."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.combinators import published_part
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Memories
from pfedhn.model import Model
from pfedhn.params import pick, take

CLIENTS_AT_ONCE = 16  # whose weights are held together


def norms(simulation: Simulation, memories: Memories) -> dict[str, float]:
    """Euclidean norms of the server's memories; a method that has no such memory has no such norm.

    "shared" is of what the server trains for all, which is phi of pFedHN, and not of an average of it. The others are
    means over clients: "embeddings" of the embedding, "served" of the weights that a client is given to use, and
    "apart" of how these differ from the mean of all that run the same network.
    """
    found: dict[str, Tensor] = {}
    method = simulation.algorithm
    trained = published_part(method, simulation.exchange.newest(memories.shared))
    if parts := pytree.tree_leaves(trained):
        found["shared"] = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))
    if (embeddings := simulation.embeddings(memories)) is not None:
        found["embeddings"] = embeddings.norm(dim=1).mean()
    if method.needs.communication:
        served = [_of_network(simulation, model, memories) for model in simulation.models.values()]
        found["served"], found["apart"] = torch.cat(served, 1).mean(1)
    return {name: float(f"{float(value):.6g}") for name, value in found.items()}


def _of_network(simulation: Simulation, model: Model, memories: Memories) -> Tensor:
    """[2, C]: the norm of the weights of each client that runs `model`, and of their difference from the mean."""
    shared, executor = simulation.exchange.memory_of_method(memories.shared), simulation.executor_for(model)
    clients = [client for client in range(simulation.federation.num_clients) if simulation.model_of(client) is model]
    index = torch.tensor(clients, dtype=torch.int64, device=simulation.device)

    def one_client(client: Tensor, row: Any) -> Tensor:
        weights = pick(simulation.algorithm.publish(model, shared, row), model.shapes).values()
        return torch.cat([value.flatten() for value in weights])

    def parts() -> Iterator[Tensor]:
        for group in index.split(CLIENTS_AT_ONCE):
            yield executor.map(one_client)(group, take(memories.rows, group))

    if not clients:
        return torch.empty(2, 0, device=simulation.device)
    mean = torch.stack([part.sum(0) for part in parts()]).sum(0) / len(clients)
    return torch.cat([torch.stack([part.norm(dim=1), (part - mean).norm(dim=1)]) for part in parts()], 1)
