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

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.keys import Key
from pfedhn.layers import assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, pack, pick, subtract, take
from pfedhn.sgd import Batches, Rate, gradient, scan


class Private(NamedTuple):
    own: Params  # w_i after the last training: the upper layers, and the others where they are tested
    mixture: Params  # W_i, of the upper layers


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedALA; `local_lr` moves the model, `mixture_lr` how much of the shared upper layers a client takes over."""

    upper: tuple[str, ...] = ("last",)  # layers that are mixed, "last" for the last one; the others are taken over
    mixture_lr: Rate = 1.0  # eta, learning rate of W_i
    mixture_steps: int = 10  # M, steps of W_i in one round and before a test, each on a fresh minibatch
    tested: Literal["start", "trained"] = "start"  # a client's start from the newest w, or w_i after its last training

    @property
    def num_batches(self) -> int:
        return self.mixture_steps + self.local_steps

    @property
    def num_personalize_batches(self) -> int:
        return self.mixture_steps if self.tested == "start" else 0

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        roles = assign_roles(model, rest="frozen", settings={"shared": "upper"}, shared=self.upper)
        own = pick(start, roles.shared) if self.tested == "start" else start
        return Private(own, {name: torch.ones_like(start[name]) for name in roles.shared})

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

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return self.start(model, received, private, batches)[0] if self.tested == "start" else private.own
