"""FedRoD (Chen, Chao, ICLR 2022): one body with two heads, a shared one for all classes and a personal one on top.

    server   send body, head_G                                                                send
    client   K times, on a batch, with z = body(x) and n_i the client's label counts:         train
                 body, head_G <- a step of SGD on CE(head_G(z) + log n_i, y)
                 head_P       <- a step of SGD on CE(stop(head_G(z)) + head_P(stop(z)), y)
             keep head_P; return what moved of body and head_G
    server   average both by training examples                                                receive
    client   tested with body and head_G + head_P                                             personalize

The first loss is a balanced softmax: a class that the client does not have gets no share of it. Both gradients are
taken before either step. Heads are linear and add up, so that the personal model is an ordinary network. head_P starts
at zero: a client that was never chosen, or joins, is tested with the shared model. Differs: the authors' code is not
public; their variant whose head_P is made by a hypernetwork is left out.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from pfedhn.algorithm import LABEL_COUNTS, Extras
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.keys import Key
from pfedhn.layers import last_linear
from pfedhn.model import Model
from pfedhn.params import Params, pick, subtract, zeros_like
from pfedhn.sgd import Batches

OWN = "own."  # before the names of head_P


class Private(NamedTuple):
    head: Params  # head_P, by the names of head_G
    counts: Tensor  # n_i, training examples per class


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """FedRoD with a linear personal head; both heads are trained at the same rate."""

    def extras(self, model: Model) -> Extras:
        return Extras(num_labels=last_linear(model, "FedRoD").num_outputs)

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        return Private(zeros_like(pick(start, last_linear(model, "FedRoD").names)), start[LABEL_COUNTS])

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        head = last_linear(model, "FedRoD")
        prior = log_counts(private.counts, received[head.weight])

        def loss(weights: Params, batch: Batches) -> Tensor:
            z, outputs = model.features(pick(weights, received), batch)
            bias = None if head.bias is None else weights[OWN + head.bias]
            own = linear(z.detach(), weights[OWN + head.weight], bias)
            return model.mean_loss(outputs + prior, batch) + model.mean_loss(outputs.detach() + own, batch)

        start = received | {OWN + name: value for name, value in private.head.items()}
        trained, _ = self.local_sgd.run(loss, start, batches, clipped=received)
        return subtract(received, trained), private._replace(head={name: trained[OWN + name] for name in private.head})

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return received | {name: received[name] + value for name, value in private.head.items()}


def log_counts(counts: Tensor, like: Tensor) -> Tensor:
    """The logarithm of label counts; for a class without examples, that of the smallest number there is."""
    return counts.to(like.dtype).clamp(min=torch.finfo(like.dtype).tiny).log()
