"""SCAFFOLD (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020): FedAvg whose clients correct their drift.

    server   send w and c                                                                  send
    client   K times, on a batch:  w_i <- w_i - lr_l (g_k + c - c_i),  g_k = grad L(w_i)   train
             c_i' = mean_k g_k, which is c_i - c + (w - w_i) / (K lr_l)
             keep c_i'; return w - w_i and c_i' - c_i
    server   w <- w - lr mean_i (w - w_i);  c <- c + sum_i (c_i' - c_i) / N                receive

This is option II of the paper, with the control variate as the mean of the gradients: momentum, weight decay and a rate
of zero leave it right, which the quotient is only for plain SGD. c is the mean of all N clients' c_i, chosen or not.
Twice FedAvg's bytes go each way. c_i starts at zero, also for a client that joins, which uses the trained w. Differs:
the division is by the N of the plan, also where a party of a network joins later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pfedhn.algorithm import Extra, Extras, Group, Rule, Uses, client_weights, only_group
from pfedhn.algorithms.fedavg import FedAvg, after_mean_update
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pack, pick, weighted_sum, zeros_like
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, Batches, Rate, clip_vector, gradient, scan

CONTROL = "control/"  # before the names of parameters

Carry = tuple[Tensor, Tensor, Tensor]  # w_i, its velocity, and the sum of the gradients


class Shared(NamedTuple):
    weights: Params  # w
    control: Params  # c


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD; clients take plain SGD steps by default, as in the paper."""

    lr: Rate = 1.0  # learning rate of the server's steps; 1 takes the mean of the clients' weights
    local_momentum: Fraction = 0.0  # momentum of a client's steps; reset in every round
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)
    max_norm: float = 1e4  # largest norm of a tensor of control variates that a deployed server accepts
    num_clients: int = 0  # N, clients of the federation, over which c is a mean; filled in

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> Self:
        return replace(self, num_clients=self.num_clients or num_clients)

    @property
    def uses(self) -> Uses:
        return Uses(published=("weights",))

    def extras(self, model: Model) -> Extras:
        shapes = control({name: tuple(shape) for name, shape in model.shapes.items()})
        return Extras(down=shapes, up={name: Extra(shape, self.max_norm) for name, shape in shapes.items()})

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Any:
        weights = super().init_shared(models, starts, key)
        return Shared(weights, zeros_like(weights))

    def init_private(self, model: Model, start: Params, key: Key) -> Params:
        return zeros_like(pick(start, model.shapes))

    def send(self, model: Model, shared: Any, row: tuple[()]) -> Params:
        weights: Params = shared.weights
        return weights | control(shared.control)

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        w, unpack = pack(pick(received, model.shapes))
        names = unpack(w)
        c, _ = pack({name: received[CONTROL + name] for name in names})
        c_i, _ = pack({name: private[name] for name in names})
        gradient_of = gradient(model.loss, unpack)

        def step(carry: Carry, batch: Batches, constants: tuple[Rate, Tensor]) -> Carry:
            (w_i, speed, total), (lr, correction) = carry, constants
            g = clip_vector(gradient_of(w_i, batch), self.local_clip, len(w_i)) + self.local_weight_decay * w_i
            return *SGD(lr, self.local_momentum).step(w_i, speed, g + correction), total + g

        rest = torch.zeros_like(w)
        w_i, _, total = scan(step, (w, rest, rest), batches, (self.local_lr, c - c_i))
        new = total / self.local_steps
        return unpack(w - w_i) | control(unpack(new - c_i)), unpack(new)

    def receive(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[tuple[()]]]:
        group = only_group(groups, "SCAFFOLD")
        weights = after_mean_update(shared.weights, group, self.lr * client_weights(self.rule, group.sizes))
        moved = weighted_sum(group.extras, torch.ones_like(group.sizes, dtype=torch.float64) / self.num_clients)
        return Shared(weights, {name: x + moved[CONTROL + name] for name, x in shared.control.items()}), [group.rows]

    def personalize(self, model: Model, received: Params, private: Params, batches: Batches) -> Params:
        return pick(received, model.shapes)


def control(values: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to parameters, under names that no parameter has."""
    return {CONTROL + name: value for name, value in values.items()}
