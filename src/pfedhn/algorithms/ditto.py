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

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedhn.algorithm import Uses
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pack
from pfedhn.sgd import SGD, Batches, Rate, clip_vector, gradient, scan

Carry = tuple[Tensor, Tensor, Tensor, Tensor]  # w_i, v_i and the velocity of each


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Ditto; both models take the same steps on the same minibatches."""

    strength: Rate = 1.0  # lambda, how strongly v_i is held to the received w

    @property
    def uses(self) -> Uses:
        return Uses(published=(), personal=None)

    def init_private(self, model: Model, start: Params, key: Key) -> Params:
        return start

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        w, unpack = pack(received)
        v, _ = pack({name: private[name] for name in received})
        shared_gradient, own_gradient = gradient(model.loss, unpack, is_tested=False), gradient(model.loss, unpack)

        def step(carry: Carry, batch: Batches, constants: tuple[Rate, Rate, Tensor]) -> Carry:
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

    def personalize(self, model: Model, received: Params, private: Params, batches: Batches) -> Params:
        return private
