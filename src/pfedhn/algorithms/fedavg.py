"""FedAvg (McMahan et al., AISTATS 2017): one shared model; clients train it, the server averages.

    server   send w                                                    send
    client   w_i <- K steps of SGD from w; return w - w_i              train
    server   w <- w - sum_i |T_i| (w - w_i) / sum_i |T_i|              receive

FedPer and LG-FedAvg are this with some layers kept by the clients (`roles`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pfedhn.algorithm import (
    Algorithm,
    FineTuning,
    Group,
    Rule,
    client_weights,
    only_group,
    several_architectures,
)
from pfedhn.keys import Key
from pfedhn.layers import Roles, assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, pick, subtract, weighted_sum
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, Batches, Rate


@dataclass(frozen=True)
class FedAvg(Algorithm[Params, tuple[()], Any]):
    """FedAvg; the personal model of every client is the shared one."""

    local_lr: Rate = 1e-2  # learning rate of a client's steps
    local_steps: int = 50  # K, a client's SGD steps in one round, each on a fresh minibatch
    local_momentum: Fraction = 0.9  # momentum of a client's steps; reset in every round
    local_weight_decay: float = 5e-5  # weight decay of a client's steps
    local_clip: float | None = None  # largest norm of a client's gradient
    rule: Rule = "size"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    @property
    def num_batches(self) -> int:
        return self.local_steps

    @property
    def local_sgd(self) -> SGD:
        return SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.local_sgd)

    def roles(self, model: Model) -> Roles:
        """Every layer is shared; FedPer and LG-FedAvg leave some with the client."""
        return assign_roles(model, rest="shared")

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        start = only_start(type(self).__name__, models, starts)
        return pick(start, self.roles(next(iter(models.values()))).shared)

    def init_private(self, model: Model, start: Params, key: Key) -> Any:
        return pick(start, self.roles(model).personal)

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared

    def train(self, model: Model, received: Params, private: Any, batches: Batches) -> tuple[Params, Any]:
        weights, _ = self.local_sgd.run(model.loss, received | private, batches)
        return subtract(received, weights), pick(weights, private)

    def receive(self, shared: Params, groups: Sequence[Group]) -> tuple[Params, list[tuple[()]]]:
        group = only_group(groups, type(self).__name__)
        return after_mean_update(shared, group, client_weights(self.rule, group.sizes)), [group.rows]

    def personalize(self, model: Model, received: Params, private: Any, batches: Batches) -> Params:
        weights: Params = received | private
        return weights


def only_start(method: str, models: Mapping[str, Model], starts: Mapping[str, Params]) -> Params:
    """The initial model of a method that shares one; several architectures are refused."""
    if len(models) != 1:
        raise several_architectures(method, ", ".join(models))
    return starts[next(iter(models))]


def after_mean_update(shared: Params, group: Group, weights: Tensor) -> Params:
    """The shared model after one step along the clients' updates, each counted with its weight [C]."""
    return subtract(shared, weighted_sum(group.updates, weights))
