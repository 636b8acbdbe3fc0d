"""MR-MTL (Liu, Hu, Wu, Smith, NeurIPS 2022): clients train their own models, each held to the mean of all.

    server   send w                                                                        send
    client   w_i <- K steps of SGD from w_i on L_i(w_i) + lambda/2 |w_i - w|^2             train
             keep w_i; return w - w_i
    server   w <- w - mean_i (w - w_i), the mean of the w_i                                receive
    client   tested with w_i                                                               personalize

lambda = 0 is local training, and a large lambda is FedAvg. The pull joins the gradient after clipping and noise: it
tells nothing of an example, and each step takes one gradient, so privacy of single examples is offered. Differs: the
authors' code clips the pull with the gradient. Their clients take part in every round (`cohort_size`); here a client's
first w_i is the w that it receives, and one never chosen is tested with w.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedhn.algorithm import Rule, Uses
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, subtract
from pfedhn.sgd import Batches, Rate


class Private(NamedTuple):
    own: Params  # w_i
    has_trained: Tensor


@dataclass(frozen=True)
class MRMTL(FedAvg):
    """MR-MTL, mean-regularized multi-task learning."""

    strength: Rate = 1.0  # lambda, how strongly w_i is held to the received mean w
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    @property
    def uses(self) -> Uses:
        return Uses(personal=("own",))

    @property
    def pull(self) -> Rate:
        """How strongly a client's own model is held to the received one."""
        return self.strength

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        device = next(iter(start.values())).device
        return Private(start, torch.zeros((), dtype=torch.bool, device=device))

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        start = self.personalize(model, received, private, batches)
        weights, _ = self.local_sgd.run(model.loss, start, batches, pull=(self.pull, received))
        return subtract(received, weights), Private(weights, torch.ones_like(private.has_trained))

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return {name: torch.where(private.has_trained, private.own[name], value) for name, value in received.items()}
