"""Ditto (Li, Hu, Beirami, Smith, ICML 2021): FedAvg, plus a personal model that is pulled toward the shared one.

    server   send w                                                                       send
    client   w_i = w; K times, on a batch B:                                              train
                 v_i <- a step of SGD along grad L(v_i; B) + lambda (v_i - w)
                 w_i <- a step of SGD along grad L(w_i; B)
             keep v_i; return w - w_i
    server   w <- w - sum_i |T_i| (w - w_i) / sum_i |T_i|                                 receive
    client   tested with v_i                                                              personalize

A client computes twice: 2 K gradients where FedAvg takes K. Nothing more is sent for it. Only chosen clients work: the
others keep their last v_i, and one never chosen has the common start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfedhn.algorithm import Algorithm, Group, Rule, client_weights, only_group
from pfedhn.algorithms.fedavg import averaged, only_start
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pack
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, Batches, Rate, clip_vector, gradient, scan

State = tuple[Tensor, Tensor, Tensor, Tensor]  # w_i, v_i and the velocity of each


@dataclass(frozen=True)
class Ditto(Algorithm[Params, tuple[()], Params]):
    """Ditto; both models take the same steps on the same minibatches."""

    local_lr: Rate = 1e-2  # learning rate of a client's steps, on both models
    strength: Rate = 1.0  # lambda, how strongly v_i is held to the received w
    local_steps: int = 50  # K, a client's SGD steps in one round on each of both models
    local_momentum: Fraction = 0.9  # momentum of a client's steps; reset in every round
    local_weight_decay: float = 5e-5  # weight decay of a client's steps
    local_clip: float | None = None  # largest norm of a gradient of the loss
    rule: Rule = "size"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)
    adaptation_steps: int = 0  # SGD steps that a client takes from its chosen model before using it

    @property
    def num_batches(self) -> int:
        return self.local_steps

    @property
    def local_sgd(self) -> SGD:
        return SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        return only_start("Ditto", models, starts)

    def init_private(self, model: Model, start: Params, key: Key) -> Params:
        return start

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        w, unpack = pack(received)
        v, _ = pack({name: private[name] for name in received})
        shared_gradient, own_gradient = gradient(model.loss, unpack, is_tested=False), gradient(model.loss, unpack)

        def step(carry: State, batch: Batches, constants: tuple[Rate, Rate, Tensor]) -> State:
            (w_i, v_i, w_velocity, v_velocity), (lr, strength, w) = carry, constants
            sgd = SGD(lr, self.local_momentum, self.local_weight_decay)
            w_gradient = clip_vector(shared_gradient(w_i, batch), self.local_clip, len(w_i))
            v_gradient = clip_vector(own_gradient(v_i, batch), self.local_clip, len(v_i))
            v_i, v_velocity = sgd.step(v_i, v_velocity, v_gradient + strength * (v_i - w))
            w_i, w_velocity = sgd.step(w_i, w_velocity, w_gradient)
            return w_i, v_i, w_velocity, v_velocity

        rest = torch.zeros_like(w)
        w_i, v_i, _, _ = scan(step, (w, v, rest, rest), batches, (self.local_lr, self.strength, w))
        return unpack(w - w_i), unpack(v_i)

    def receive(self, shared: Params, groups: Sequence[Group]) -> tuple[Params, list[tuple[()]]]:
        group = only_group(groups, "Ditto")
        return averaged(shared, group, client_weights(self.rule, group.sizes)), [group.rows]

    def personalize(self, model: Model, received: Params, private: Params, batches: Batches) -> Params:
        return private
