"""APFL (Deng, Kamani, Mahdavi, 2020): each client mixes the shared model with its own and learns how much.

    server   send w                                                                        send
    client   mix(v, w) = alpha_i v + (1 - alpha_i) w                                       train
             alpha_i <- clip(alpha_i - lr <v_i - w, grad L(mix(v_i, w); B_1)>, 0, 1)
             w_i = w; K times, on a batch B:
                 v_i <- a step of SGD along alpha_i grad L(mix(v_i, w_i); B)
                 w_i <- a step of SGD along grad L(w_i; B)
             keep v_i, w_i, alpha_i; return w - w_i
    server   w <- w - mean_i (w - w_i)                                                     receive
    client   tested with mix(v_i, w_i)                                                     personalize

A client computes twice: 2 K gradients, and one for alpha_i, where FedAvg takes K. Nothing more is sent for it. Only
chosen clients work: the others keep their last models, and one never chosen has the common start. Differs: the authors'
code mixes the outputs of two networks where the paper mixes weights, and also pulls alpha_i to zero.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn.algorithm import Rule
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pack, take
from pfedhn.sgd import SGD, Batches, FractionRate, Rate, clip_vector, gradient, scan

Carry = tuple[Tensor, Tensor, Tensor, Tensor]  # w_i, v_i and the velocity of each


class Private(NamedTuple):
    own: Params  # v_i
    copy: Params  # w_i, the client's copy of the shared model after its last training
    alpha: Tensor


@dataclass(frozen=True)
class APFL(FedAvg):
    """APFL; the personal model is a mixture of weights."""

    local_lr: Rate = 1e-2  # learning rate of a client's steps, and of alpha_i
    alpha: FractionRate = 0.5  # where alpha_i starts, the share of the client's own model in the mixture
    adaptive: bool = True  # whether alpha_i moves, by one step in every round
    tested: Literal["copy", "newest"] = "copy"  # whether v_i is mixed with w_i, or with the newest w
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        like = next(iter(start.values()))
        return Private(start, start, torch.as_tensor(self.alpha, dtype=like.dtype, device=like.device))

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        w, unpack = pack(received)
        v, _ = pack({name: private.own[name] for name in received})
        gradient_of, shared_gradient = gradient(model.loss, unpack), gradient(model.loss, unpack, is_tested=False)

        def learn(alpha: Tensor, batch: Batches, constants: tuple[Rate, Tensor, Tensor]) -> Tensor:
            lr, v, w = constants
            slope = torch.dot(v - w, gradient_of(mixed(alpha, v, w), batch))
            return (alpha - lr * slope).clamp(0.0, 1.0)

        def step(carry: Carry, batch: Batches, constants: tuple[Rate, Tensor]) -> Carry:
            (w_i, v_i, w_velocity, v_velocity), (lr, alpha) = carry, constants
            sgd = SGD(lr, self.local_momentum, self.local_weight_decay)
            w_gradient, v_gradient = shared_gradient(w_i, batch), alpha * gradient_of(mixed(alpha, v_i, w_i), batch)
            w_i, w_velocity = sgd.step(w_i, w_velocity, clip_vector(w_gradient, self.local_clip, len(w_i)))
            v_i, v_velocity = sgd.step(v_i, v_velocity, clip_vector(v_gradient, self.local_clip, len(v_i)))
            return w_i, v_i, w_velocity, v_velocity

        alpha, rest = private.alpha, torch.zeros_like(w)
        if self.adaptive:
            alpha = scan(learn, alpha, take(batches, slice(1)), (self.local_lr, v, w))
        w_i, v_i, _, _ = scan(step, (w, v, rest, rest), batches, (self.local_lr, alpha))
        return unpack(w - w_i), Private(unpack(v_i), unpack(w_i), alpha)

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        shared = private.copy if self.tested == "copy" else received
        return {name: mixed(private.alpha, private.own[name], value) for name, value in shared.items()}


def mixed(alpha: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    return alpha * own + (1 - alpha) * shared
