"""FedDBE (Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, NeurIPS 2023): each client keeps the bias of its features.

    server   send w and z_bar, the mean feature of the clients so far                                  send
    client   r = 0; K times, on a batch, with z = body(x):                                             train
                 r <- (1 - m) r + m mean(z)
                 w_i, p_i <- a step of SGD on CE(head(z + p_i), y) + kappa/2 mean((r - z_bar)^2)
             keep p_i, a vector as long as z; return w - w_i, r
    server   w <- w - sum_i |T_i| (w - w_i) / sum_i |T_i|                                              receive
             z_bar <- the mean of the clients' first r by training examples
    client   tested with head(body(x) + p_i)                                                           personalize

head(z + p) = W z + (b + W p), so that the personal model is an ordinary network: p_i moves into the bias. Before there
is a z_bar, in the first round, clients train as by FedAvg. p_i starts at zero, also for a client that joins. Differs:
the authors train all clients once before the first round, for z_bar alone. Here every client's first training gives its
part, so that z_bar is the authors' after the first round if all clients take part in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from pfedhn.algorithm import Extra, Extras, Group, Uses
from pfedhn.algorithms.features import mean_feature
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.layers import LastLinear, last_linear
from pfedhn.model import Model
from pfedhn.params import Params, pack, pick
from pfedhn.sgd import SGD, Batches, FractionRate, Rate, clip_vector, gradient_and_more, scan

MEAN, HAS_MEAN, OWN_MEAN = "mean_feature", "has_mean_feature", "own_mean_feature"
OWN = "own.feature"

Carry = tuple[Tensor, Tensor, Tensor]  # w_i and p_i, their velocity, and r
Constants = tuple[Rate, Rate, Rate, Tensor, Tensor]


class Shared(NamedTuple):
    weights: Params  # w
    total: Tensor  # of the clients' first r, times their training examples
    num_examples: Tensor  # of these clients


@dataclass(frozen=True)
class FedDBE(FedAvg):
    """FedDBE, domain bias eliminator on FedAvg."""

    strength: Rate = 50.0  # kappa, how strongly the mean feature is held to that of all clients
    mean_momentum: FractionRate = 1.0  # m, how much a minibatch enters the mean feature; 1 takes the last one's alone
    max_norm: float = 1e4  # largest norm of a mean feature that a deployed server accepts

    @property
    def uses(self) -> Uses:
        return Uses(published=("weights",))

    def head(self, model: Model) -> LastLinear:
        head = last_linear(model, "FedDBE")
        if head.bias is None:
            raise UserError(
                f"FedDBE keeps a client's vector in the bias of the last layer, and {model.last_layer!r} of "
                f"{model.name} has none; give it one, or use another method."
            )
        return head

    def extras(self, model: Model) -> Extras:
        shape = (self.head(model).num_features,)
        return Extras(down={MEAN: shape, HAS_MEAN: ()}, up={OWN_MEAN: Extra(shape, self.max_norm)})

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Any:
        weights = super().init_shared(models, starts, key)
        weight = weights[self.head(next(iter(models.values()))).weight]
        return Shared(weights, torch.zeros_like(weight[0]), torch.zeros_like(weight[0, 0]))

    def init_row(self, shared: Any, key: Key, descriptor: Tensor | None) -> Any:
        """Whether the client has trained, which is when its part of z_bar was made."""
        return torch.zeros_like(torch.as_tensor(key), dtype=torch.bool)

    def join_row(self, shared: Any, rows: Any, descriptor: Tensor | None) -> Any:
        return torch.zeros_like(rows[0])

    def init_private(self, model: Model, start: Params, key: Key) -> Tensor:
        return torch.zeros_like(start[self.head(model).weight][0])

    def send(self, model: Model, shared: Any, row: Any) -> Params:
        weights: Params = shared.weights
        mean, has_mean = shared.total / shared.num_examples.clamp(min=1), (shared.num_examples > 0).to(shared.total)
        return weights | {MEAN: mean, HAS_MEAN: has_mean}

    def train(self, model: Model, received: Params, private: Tensor, batches: Batches) -> tuple[Params, Tensor]:
        received_weights, weight = pick(received, model.shapes), self.head(model).weight
        start, unpack = pack(received_weights | {OWN: private})
        num_clipped = len(start) - len(private)

        def objective(weights: Params, batch: Batches, running: Tensor, constants: Constants) -> tuple[Tensor, Tensor]:
            _, strength, momentum, mean, has_mean = constants
            features, outputs = model.features(pick(weights, received_weights), batch)
            running = (1 - momentum) * running + momentum * mean_feature(features, batch)
            shifted = outputs + has_mean * linear(weights[OWN], weights[weight])
            distance = (running - mean).square().mean() / 2
            return model.mean_loss(shifted, batch) + has_mean * strength * distance, running

        def step(carry: Carry, batch: Batches, constants: Constants) -> Carry:
            vector, speed, running = carry
            gradient_of = gradient_and_more(lambda w, batch: objective(w, batch, running, constants), unpack)
            gradient, running = gradient_of(vector, batch)
            sgd = SGD(constants[0], self.local_momentum, self.local_weight_decay)
            return *sgd.step(vector, speed, clip_vector(gradient, self.local_clip, num_clipped)), running

        has_mean = (received[HAS_MEAN] > 0.5).to(received[HAS_MEAN])
        constants = (self.local_lr, self.strength, self.mean_momentum, received[MEAN], has_mean)
        first = (start, torch.zeros_like(start), torch.zeros_like(private))
        vector, _, running = scan(step, first, batches, constants)
        update = unpack(start - vector)
        return {name: update[name] for name in received_weights} | {OWN_MEAN: running}, unpack(vector)[OWN]

    def receive(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[Any]]:
        weights, _ = super().receive(shared.weights, groups)
        (group,) = groups
        counts = torch.where(group.rows, 0, group.sizes).to(shared.total)
        total = shared.total + counts @ group.extras[OWN_MEAN]
        return Shared(weights, total, shared.num_examples + counts.sum()), [torch.ones_like(group.rows)]

    def move_row(self, model: Model, shared: Any, row: Any, update: Params) -> Any:
        return torch.ones_like(row)

    def personalize(self, model: Model, received: Params, private: Tensor, batches: Batches) -> Params:
        head, weights = self.head(model), pick(received, model.shapes)
        assert head.bias is not None
        return weights | {head.bias: weights[head.bias] + linear(private, weights[head.weight])}
