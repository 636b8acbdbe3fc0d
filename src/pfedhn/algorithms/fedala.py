"""FedALA (Zhang et al., AAAI 2023): each client learns, number by number, how much of the shared head it takes over.

    server   send w                                                                          send
    client   upper layers, of which it has its own u_i:  start(W) = w - (1 - W) (w - u_i)    train
             M times, on a batch B:  W_i <- clip(W_i - eta grad_W L(w_lower, start(W_i); B), 0, 1)
             w_i <- K steps of SGD from (w_lower, start(W_i))
             keep u_i = upper layers of w_i, and W_i; return w - w_i
    server   w <- w - sum_i |T_i| (w - w_i) / sum_i |T_i|                                    receive
    client   tested with (w_lower, start(W_i)) after M steps of W_i on training data         personalize

W_i starts at one, where start(W_i) = w. Before its first training a client's u_i is the common start, so its M mixture
steps move it from w toward that start. Differs: the authors learn W_i until its loss is steady at first and for an
epoch of some of the examples later; M is a fixed number here. In their code every client, chosen or not, moves to a new
start in every round; here only chosen ones do, and the others when tested.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn.algorithm import Algorithm, Group, Rule, client_weights, only_group
from pfedhn.algorithms.fedavg import averaged, only_start
from pfedhn.keys import Key
from pfedhn.layers import assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, pack, pick, subtract, take
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, Batches, Rate, Share, gradient, scan


class Private(NamedTuple):
    own: Params  # w_i after the last training: the upper layers, and the others where they are tested
    mixture: Params  # W_i, of the upper layers


@dataclass(frozen=True)
class FedALA(Algorithm[Params, tuple[()], Private]):
    """FedALA; `local_lr` moves the model, `mixture_lr` how much of the shared upper layers a client takes over."""

    local_lr: Rate = 1e-2  # learning rate of a client's steps
    local_steps: int = 50  # K, a client's SGD steps in one round, each on a fresh minibatch
    local_momentum: Fraction = 0.9  # momentum of a client's steps; reset in every round
    local_weight_decay: float = 5e-5  # weight decay of a client's steps
    local_clip: float | None = None  # largest norm of a client's gradient
    upper: tuple[str, ...] = ("last",)  # layers that are mixed, "last" for the last one; the others are taken over
    mixture_lr: Rate = 1.0  # eta, learning rate of W_i
    mixture_steps: int = 10  # M, steps of W_i in one round and before a test, each on a fresh minibatch
    tested: Literal["start", "trained"] = "start"  # a client's start from the newest w, or w_i after its last training
    rule: Rule = "size"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)
    averaging: Share | None = None  # decay of the moving average that is served; None serves the newest weights
    adaptation_steps: int = 0  # SGD steps that a client takes from its chosen model before using it

    @property
    def num_batches(self) -> int:
        return self.mixture_steps + self.local_steps

    @property
    def num_personalize_batches(self) -> int:
        return self.mixture_steps if self.tested == "start" else 0

    @property
    def local_sgd(self) -> SGD:
        return SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        return only_start("FedALA", models, starts)

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        roles = assign_roles(model, rest="frozen", settings={"shared": "upper"}, shared=self.upper)
        own = pick(start, roles.shared) if self.tested == "start" else start
        return Private(own, {name: torch.ones_like(start[name]) for name in roles.shared})

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared

    def start(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Params]:
        """Where a client starts from, and the mixture it learned for that."""
        mixture, unpack = pack(private.mixture)

        def mixed(mixture: Params) -> Params:
            # Written so that a mixture of one is the received weight to the bit.
            return received | {
                name: received[name] - (1 - part) * (received[name] - private.own[name])
                for name, part in mixture.items()
            }

        gradient_of = gradient(lambda mixture, batch: model.loss(mixed(mixture), batch), unpack)

        def step(mixture: Tensor, batch: Batches, lr: Rate) -> Tensor:
            return (mixture - lr * gradient_of(mixture, batch)).clamp(0.0, 1.0)

        learned = unpack(scan(step, mixture, batches, self.mixture_lr))
        return mixed(learned), learned

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        first, second = take(batches, slice(self.mixture_steps)), take(batches, slice(self.mixture_steps, None))
        start, mixture = self.start(model, received, private, first)
        weights, _ = self.local_sgd.run(model.loss, start, second)
        return subtract(received, weights), Private(pick(weights, private.own), mixture)

    def receive(self, shared: Params, groups: Sequence[Group]) -> tuple[Params, list[tuple[()]]]:
        group = only_group(groups, "FedALA")
        return averaged(shared, group, client_weights(self.rule, group.sizes)), [group.rows]

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return self.start(model, received, private, batches)[0] if self.tested == "start" else private.own
