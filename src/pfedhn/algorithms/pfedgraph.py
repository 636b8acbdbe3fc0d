"""pFedGraph (Ye, Ni, Wu, Chen, Wang, ICML 2023): the server learns which clients are worth combining.

    server   send u_i, the client's own combination                                          send
    client   w_i <- K steps of SGD from u_i on L_i(w_i) - lambda cos(w_i, u_i)               train
             return u_i - w_i
    server   d_ij = -cos(w_i - w_0, w_j - w_0), and -1 if it is below -0.9                   receive
             a_i  = argmin_a alpha sum_j (a_j - p_j)^2 + sum_j d_ij a_j,  a >= 0, sum a = 1
             u_i <- sum_j a_ij w_j
    client   tested with u_i                                                                 personalize

p_j is the share of client j in the cohort's training examples, and w_0 the common start. The quadratic program is a
Euclidean projection: a_i is the nearest point of the simplex to p - d_i / (2 alpha). The server keeps a model for each
client, and clients combine within a cohort: take large ones, or all clients (`cohort_size`). A client that joins starts
from the mean of all u_i, and the server keeps what it trains. Differs: the authors' code adds the cosine with the
opposite sign, and takes it to sum_j a_ij w_j / |w_j|, which it sends beside u_i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedhn.algorithm import Group, Uses, client_weights, only_group
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.simplex import nearest_weights
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, mixtures, subtract
from pfedhn.sgd import Batches, Rate

ALIKE = -0.9  # distances below are as if two clients had moved in one direction


@dataclass(frozen=True)
class PFedGraph(FedAvg):
    """pFedGraph with the cosine as the measure of likeness."""

    strength: Rate = 0.01  # lambda, how strongly a client's weights are held to the direction of its combination
    alpha: Rate = 0.8  # how strongly combinations are held to the mean by training examples

    @property
    def uses(self) -> Uses:
        return Uses(published=())

    def init_row(self, shared: Any, key: Key, descriptor: Tensor | None) -> Any:
        return shared

    def join_row(self, shared: Any, rows: Any, descriptor: Tensor | None) -> Any:
        return {name: value.mean(0) for name, value in rows.items()}

    def send(self, model: Model, shared: Any, row: Any) -> Params:
        weights: Params = row
        return weights

    def train(self, model: Model, received: Params, private: Any, batches: Batches) -> tuple[Params, Any]:
        strength = self.strength

        def loss(weights: Params, batch: Batches) -> Tensor:
            return model.loss(weights, batch) - strength * cosine(weights, received)

        weights, _ = self.local_sgd.run(loss, received, batches)
        return subtract(received, weights), private

    def receive(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[Any]]:
        group = only_group(groups, "pFedGraph")
        trained = subtract(group.rows, group.updates)
        moved = {name: value - shared[name] for name, value in trained.items()}
        distances = -cosines(moved)
        distances = torch.where(distances < ALIKE, -1.0, distances)
        shares = client_weights(self.rule, group.sizes)
        return shared, [mixtures(trained, nearest_weights(shares - distances / (2 * self.alpha)))]

    def move_row(self, model: Model, shared: Any, row: Any, update: Params) -> Any:
        return subtract(row, update)

    def personalize(self, model: Model, received: Params, private: Any, batches: Batches) -> Params:
        return received


def cosine(left: Params, right: Params) -> Tensor:
    """The cosine of the angle between two models as vectors."""
    product = torch.stack([(value * right[name]).sum() for name, value in left.items()]).sum()
    return product / (length(left) * length(right))


def length(weights: Params) -> Tensor:
    return torch.stack([value.square().sum() for value in weights.values()]).sum().sqrt()


def products(stacked: Params) -> Tensor:
    """[C, C]: the inner products of all pairs of [C] models, in float64."""
    parts = [value.reshape(len(value), -1).double() for value in stacked.values()]
    return torch.stack([part @ part.T for part in parts]).sum(0)


def cosines(stacked: Params) -> Tensor:
    """[C, C]: the cosines of all pairs; 0 for a model of zeros."""
    found = products(stacked)
    lengths = found.diagonal().sqrt()
    return found / (lengths.unsqueeze(1) * lengths).clamp(min=torch.finfo(found.dtype).tiny)
