"""FedProto (Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, AAAI 2022): clients share the mean feature of each class alone.

    server   send the prototypes c[k]                                                         send
    client   w_i <- K steps of SGD from w_i on CE + lambda mean |z - c[y]|^2, with z the       train
             input of the last layer
             keep w_i; return its mean feature of each class and n_ik, its examples of it
    server   c[k] <- sum_i n_ik mean_ik / sum_i n_ik                                          receive
    client   tested with the nearest prototype among those of its own classes                 personalize

The nearest prototype is the largest of c[k] z - |c[k]|^2 / 2, so that the personal model is an ordinary network with
another last layer; `tested="head"` keeps its own. Class means are made of the K training passes. A class that nobody of
a cohort has keeps its prototype; an example of a class without one has no second term. The server sees how many
examples of each class a client has. Networks may differ if the inputs of their last layers are equally long. A client
that joins trains its own network from the common start, toward the trained prototypes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn.algorithm import LABEL_COUNTS, Algorithm, Extra, Extras, FineTuning, Group, Uses
from pfedhn.algorithms.features import class_sums, distance_to_prototypes, weighted_means
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.layers import last_linear
from pfedhn.model import Model
from pfedhn.params import Params, pack, pick
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, Batches, Rate, clip_vector, gradient_and_more, scan

PROTOTYPES, KNOWN = "prototypes", "known_classes"
CLASS_MEANS, CLASS_COUNTS = "class_means", "class_counts"
UNLIKELY = 100.0  # by which the output of a class without a prototype is below all others

Carry = tuple[Tensor, Tensor, Tensor, Tensor]  # w_i, its velocity, the sums of features and the counts of each class
Constants = tuple[Rate, Rate, Tensor, Tensor]


class Shared(NamedTuple):
    prototypes: Tensor  # [L, D]
    known: Tensor  # [L], 1 for a class that has a prototype


class Private(NamedTuple):
    weights: Params  # w_i
    counts: Tensor  # [L], training examples per class


@dataclass(frozen=True)
class FedProto(Algorithm[Shared, tuple[()], Private]):
    """FedProto; kilobytes cross the wire, and networks stay with their clients."""

    local_lr: Rate = 1e-2  # learning rate of a client's steps
    local_steps: int = 50  # K, a client's SGD steps in one round, each on a fresh minibatch
    local_momentum: Fraction = 0.9  # momentum of a client's steps; reset in every round
    local_weight_decay: float = 5e-5  # weight decay of a client's steps
    local_clip: float | None = None  # largest norm of a client's gradient
    strength: Rate = 1.0  # lambda, how strongly features are held to the prototype of their class
    tested: Literal["prototypes", "head"] = "prototypes"  # whether the nearest prototype or the client's head decides
    rule: Literal["size", "mean"] = "size"  # how class means combine: by examples of the class, or equally
    max_norm: float = 1e4  # largest norm of class means that a deployed server accepts; of class counts, its square

    @property
    def num_batches(self) -> int:
        return self.local_steps

    @property
    def uses(self) -> Uses:
        return Uses(published=(), personal=("weights",))

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip))

    def extras(self, model: Model) -> Extras:
        head = last_linear(model, "FedProto")
        if self.tested == "prototypes" and head.bias is None:
            raise UserError(
                f"the nearest prototype needs a bias in the last layer, and {model.last_layer!r} of {model.name} has "
                "none; give it one, or set tested = 'head'."
            )
        means, counts = (head.num_outputs, head.num_features), (head.num_outputs,)
        up = {CLASS_MEANS: Extra(means, self.max_norm), CLASS_COUNTS: Extra(counts, self.max_norm**2)}
        return Extras(down={PROTOTYPES: means, KNOWN: counts}, up=up, num_labels=head.num_outputs)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Shared:
        heads = {name: last_linear(model, "FedProto") for name, model in models.items()}
        if len({(head.num_outputs, head.num_features) for head in heads.values()}) > 1:
            raise UserError(
                "FedProto averages features of one length and cannot serve the architectures "
                f"{', '.join(models)} together; make the inputs of their last layers equally long, or use pfedhn."
            )
        name, head = next(iter(heads.items()))
        prototypes = torch.zeros_like(starts[name][head.weight])
        return Shared(prototypes, torch.zeros_like(prototypes[:, 0]))

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        return Private(pick(start, model.shapes), start[LABEL_COUNTS])

    def send(self, model: Model, shared: Shared, row: tuple[()]) -> Params:
        return {PROTOTYPES: shared.prototypes, KNOWN: shared.known}

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        start, unpack = pack(private.weights)
        num_labels = len(private.counts)

        def objective(weights: Params, batch: Batches, constants: Constants) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            _, strength, prototypes, known = constants
            features, outputs = model.features(weights, batch)
            distance = distance_to_prototypes(features, batch, prototypes, known)
            return model.mean_loss(outputs, batch) + strength * distance, class_sums(features, batch, num_labels)

        def step(carry: Carry, batch: Batches, constants: Constants) -> Carry:
            vector, speed, sums, counts = carry
            gradient_of = gradient_and_more(lambda weights, batch: objective(weights, batch, constants), unpack)
            gradient, (more_sums, more_counts) = gradient_of(vector, batch)
            sgd = SGD(constants[0], self.local_momentum, self.local_weight_decay)
            vector, speed = sgd.step(vector, speed, clip_vector(gradient, self.local_clip, len(vector)))
            return vector, speed, sums + more_sums, counts + more_counts

        prototypes, known = received[PROTOTYPES], received[KNOWN]
        first = (start, torch.zeros_like(start), torch.zeros_like(prototypes), torch.zeros_like(known))
        vector, _, sums, seen = scan(step, first, batches, (self.local_lr, self.strength, prototypes, known))
        counts = private.counts.to(known) if self.rule == "size" else torch.ones_like(known)
        means = sums / seen.clamp(min=1).unsqueeze(1)
        update = {CLASS_MEANS: means, CLASS_COUNTS: torch.where(seen > 0, counts, 0.0)}
        return update, private._replace(weights=unpack(vector))

    def receive(self, shared: Shared, groups: Sequence[Group]) -> tuple[Shared, list[tuple[()]]]:
        means, counts = (torch.cat([group.extras[name] for group in groups]) for name in (CLASS_MEANS, CLASS_COUNTS))
        known = torch.maximum(shared.known, (counts.sum(0) > 0).to(shared.known))
        return Shared(weighted_means(means, counts, shared.prototypes), known), [group.rows for group in groups]

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        if self.tested == "head":
            return private.weights
        head, prototypes = last_linear(model, "FedProto"), received[PROTOTYPES]
        assert head.bias is not None
        own = (received[KNOWN] > 0.5) & (private.counts > 0)
        scores = -prototypes.square().sum(1) / 2
        others = torch.where(own, scores, torch.inf).min() - UNLIKELY
        nearest = {
            head.weight: torch.where(own.unsqueeze(1), prototypes, 0.0),
            head.bias: torch.where(own, scores, others),
        }
        return private.weights | {
            name: torch.where(own.any(), value, private.weights[name]) for name, value in nearest.items()
        }
