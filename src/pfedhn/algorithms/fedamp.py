"""FedAMP (Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021): clients are drawn to those whose models are alike.

    server   send u_i                                                                           send
    client   w_i <- K steps of SGD from w_i on L_i(w_i) + lambda / (2 alpha) |w_i - u_i|^2      train
             keep w_i; return u_i - w_i
    server   xi_ij = alpha A'(|w_i - w_j|^2) for j other than i, with A(x) = 1 - exp(-x/sigma)  receive
             u_i <- (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j
    client   tested with w_i                                                                    personalize

The server keeps a model for each client, and clients attract within a cohort: take large ones, or all clients, as the
paper does (`cohort_size`). A client's first w_i is the u_i that it receives. One that joins starts from the mean of all
u_i, and the server keeps what it trains. Differs: if the xi_ij of a client sum to more than 1, they are divided by
their sum, where the paper asks for an alpha that is small enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedhn.algorithm import Group, Uses, only_group
from pfedhn.algorithms.mr_mtl import MRMTL
from pfedhn.algorithms.pfedgraph import products
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, mixtures, subtract
from pfedhn.sgd import Rate


@dataclass(frozen=True)
class FedAMP(MRMTL):
    """FedAMP; its clients train as those of MR-MTL, held to models of their own."""

    strength: Rate = 1.0  # lambda; lambda / alpha is how strongly w_i is held to u_i
    alpha: Rate = 1.0  # alpha, how strongly clients attract each other
    sigma: Rate = 1.0  # the squared distance over which attraction falls to a third

    @property
    def uses(self) -> Uses:
        return Uses(published=(), personal=("own",))

    def init_row(self, shared: Any, key: Key, descriptor: Tensor | None) -> Any:
        return shared

    def join_row(self, shared: Any, rows: Any, descriptor: Tensor | None) -> Any:
        return {name: value.mean(0) for name, value in rows.items()}

    def send(self, model: Model, shared: Any, row: Any) -> Params:
        weights: Params = row
        return weights

    @property
    def pull(self) -> Rate:
        return self.strength / self.alpha

    def receive(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[Any]]:
        group = only_group(groups, "FedAMP")
        trained = subtract(group.rows, group.updates)
        return shared, [mixtures(trained, self.shares(squared_distances(trained)))]

    def shares(self, distances: Tensor) -> Tensor:
        """[C, C]: how much of every client's model goes into u_i, given squared distances."""
        attraction = self.alpha * torch.exp(-distances / self.sigma) / self.sigma
        eye = torch.eye(len(distances), dtype=distances.dtype, device=distances.device)
        others = attraction * (1 - eye)
        others = others / others.sum(1, keepdim=True).clamp(min=1)
        return others + eye * (1 - others.sum(1, keepdim=True))

    def move_row(self, model: Model, shared: Any, row: Any, update: Params) -> Any:
        return subtract(row, update)


def squared_distances(stacked: Params) -> Tensor:
    """[C, C]: between all pairs of [C] models, in float64; from the mean, so that clients alike keep their digits."""
    found = products({name: value - value.mean(0) for name, value in stacked.items()})
    squares = found.diagonal()
    return (squares.unsqueeze(1) + squares - 2 * found).clamp(min=0)
