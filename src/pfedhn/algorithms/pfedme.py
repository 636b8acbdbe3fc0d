"""pFedMe (T. Dinh, Tran, Nguyen, NeurIPS 2020): personal models held to the shared one by a Moreau envelope.

    server   send w                                                                    send
    client   x_i = theta = w; R times, on a batch B:                                   train
                 K times:  theta -= lr_p (grad L(theta; B) + lambda (theta - x_i) + mu theta)
                 x_i -= lr lambda (x_i - theta)
             keep theta_i = theta; return w - x_i
    server   w <- w - beta sum_i |T_i| (w - x_i) / sum_i |T_i|                         receive
    client   tested with theta_i                                                       personalize

Differs: the authors' code overwrites its personal model with x_i before it is tested; `tested="x"` does as it does.
Only chosen clients work; the others keep their last theta_i, and one never chosen is tested with w.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn.algorithm import (
    Algorithm,
    FineTuning,
    Group,
    Rule,
    Uses,
    client_weights,
    only_group,
)
from pfedhn.algorithms.fedavg import after_mean_update, only_start
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pack
from pfedhn.sgd import SGD, Batches, Rate, gradient, scan


class Private(NamedTuple):
    personal: Params
    has_trained: Tensor


@dataclass(frozen=True)
class PFedMe(Algorithm[Params, tuple[()], Private]):
    """pFedMe; `lr` moves x_i, `personal_lr` theta_i."""

    lr: Rate = 5e-3  # learning rate of x_i, the client's copy of the shared model
    personal_lr: Rate = 1e-2  # lr_p, learning rate of theta_i, its personal model
    strength: float = 15.0  # lambda, how strongly theta_i is held to x_i
    mixing: float = 1.0  # beta, how far the server moves to the average
    outer_steps: int = 20  # R, minibatches in one round
    inner_steps: int = 3  # K, steps of theta_i on each minibatch
    decay: float = 1e-3  # mu, weight decay of theta_i
    tested: Literal["theta", "x"] = "theta"  # which of the two is tested; "x" is what the authors' code does
    rule: Rule = "size"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    @property
    def num_batches(self) -> int:
        return self.outer_steps

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(SGD(self.personal_lr, weight_decay=self.decay))

    @property
    def uses(self) -> Uses:
        return Uses(personal=("personal",))

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        return only_start("pFedMe", models, starts)

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        device = next(iter(start.values())).device
        return Private(start, torch.zeros((), dtype=torch.bool, device=device))

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        w, unpack = pack(received)
        gradient_of = gradient(model.loss, unpack)

        def step(carry: tuple[Tensor, Tensor], batch: Batches, rates: tuple[Rate, Rate]) -> tuple[Tensor, Tensor]:
            (x, theta), (lr, personal_lr) = carry, rates
            for _ in range(self.inner_steps):
                direction = gradient_of(theta, batch) + self.strength * (theta - x) + self.decay * theta
                theta = theta - personal_lr * direction
            return x - lr * self.strength * (x - theta), theta

        x, theta = scan(step, (w, w), batches, (self.lr, self.personal_lr))
        personal = unpack(theta if self.tested == "theta" else x)
        return unpack(w - x), Private(personal, torch.ones_like(private.has_trained))

    def receive(self, shared: Params, groups: Sequence[Group]) -> tuple[Params, list[tuple[()]]]:
        group = only_group(groups, "pFedMe")
        return after_mean_update(shared, group, self.mixing * client_weights(self.rule, group.sizes)), [group.rows]

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return {
            name: torch.where(private.has_trained, private.personal[name], value) for name, value in received.items()
        }
