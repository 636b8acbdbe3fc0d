"""FedPAC (Xu, Tong, Huang, ICLR 2023): features are aligned by class means; heads combine among clients alike.

    server   send body, head_i and the prototypes c[k]                                        send
    client   with the received model, p_ik the share of class k among its n_i examples:       train
                 h_i[k] = p_ik mean_ik(z);  v_i = (sum_k p_ik mean_ik |z|^2 - sum_k |h_i[k]|^2) / n_i
             head_i <- K_h steps of SGD on CE, with the body frozen
             body_i <- K - K_h steps of SGD on CE + lambda mean |z - c[y]|^2, with the head frozen
             return what moved, v_i, h_i, and the mean features and counts of its classes
    server   body <- body - sum_i |T_i| (body - body_i) / sum_i |T_i|                         receive
             c[k] <- the mean of the clients' mean features by examples of the class
             for every i of the cohort, a_i = argmin_a sum_j a_j^2 v_j + |sum_j a_j (h_i - h_j)|^2,
             a >= 0, sum a = 1;  head_i <- sum_j a_ij head_j
    client   tested with body and head_i                                                      personalize

Statistics are of `feature_batches` minibatches, the same before and after training. The server learns the clients'
class shares, from h_i and the counts. With one client a round heads never combine. A client that joins starts from the
mean of the heads, and the server keeps the head that it trains. Differs: the authors compute statistics of all
examples, set small eigenvalues and weights to 0, and report accuracy after local training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfedhn.algorithm import LABEL_COUNTS, Extra, Extras, Group, Uses, client_weights, only_group
from pfedhn.algorithms.features import class_statistics, distance_to_prototypes, weighted_means
from pfedhn.algorithms.fedavg import FedAvg, after_mean_update
from pfedhn.algorithms.simplex import least_weights
from pfedhn.keys import Key
from pfedhn.layers import last_linear
from pfedhn.model import Model
from pfedhn.params import Params, mixtures, pick, subtract, take
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, Batches, Rate

PROTOTYPES, KNOWN = "prototypes", "known_classes"
VARIANCE, CLASS_FEATURES = "variance", "class_features"
CLASS_MEANS, CLASS_COUNTS = "class_means", "class_counts"


class Shared(NamedTuple):
    body: Params
    head: Params  # of every client at round 0
    prototypes: Tensor  # [L, D]
    known: Tensor  # [L], 1 for a class that has a prototype


@dataclass(frozen=True)
class FedPAC(FedAvg):
    """FedPAC; the last layer is the head, and the server keeps one for each client."""

    head_lr: Rate = 0.1  # learning rate of the steps that train the head; `local_lr` is that of the body
    head_share: Fraction = 0.2  # of the local steps, taken first, that train the head; the others train the body
    strength: Rate = 1.0  # lambda, how strongly features are held to the prototype of their class
    feature_batches: int = 10  # minibatches from which a client computes its statistics, before and after training
    max_norm: float = 1e4  # largest norm of features that a deployed server accepts; of variance and counts, its square

    @property
    def num_batches(self) -> int:
        return self.feature_batches + self.local_steps

    @property
    def uses(self) -> Uses:
        return Uses(published=("body",))

    def extras(self, model: Model) -> Extras:
        head = last_linear(model, "FedPAC")
        means, counts, square = (head.num_outputs, head.num_features), (head.num_outputs,), self.max_norm**2
        up = {VARIANCE: Extra((), square), CLASS_FEATURES: Extra(means, self.max_norm)}
        up |= {CLASS_MEANS: Extra(means, self.max_norm), CLASS_COUNTS: Extra(counts, square)}
        return Extras(down={PROTOTYPES: means, KNOWN: counts}, up=up, num_labels=head.num_outputs)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Any:
        start, head = super().init_shared(models, starts, key), last_linear(next(iter(models.values())), "FedPAC")
        body = {name: value for name, value in start.items() if name not in head.names}
        prototypes = torch.zeros_like(start[head.weight])
        return Shared(body, pick(start, head.names), prototypes, torch.zeros_like(prototypes[:, 0]))

    def init_row(self, shared: Any, key: Key, descriptor: Tensor | None) -> Any:
        return shared.head

    def join_row(self, shared: Any, rows: Any, descriptor: Tensor | None) -> Any:
        return {name: value.mean(0) for name, value in rows.items()}

    def init_private(self, model: Model, start: Params, key: Key) -> Tensor:
        """The client's label counts."""
        return start[LABEL_COUNTS]

    def send(self, model: Model, shared: Any, row: Any) -> Params:
        weights: Params = shared.body | row
        return weights | {PROTOTYPES: shared.prototypes, KNOWN: shared.known}

    def train(self, model: Model, received: Params, private: Tensor, batches: Batches) -> tuple[Params, Tensor]:
        last, weights = last_linear(model, "FedPAC"), pick(received, model.shapes)
        size = (last.num_outputs, last.num_features)
        head_steps = round(self.head_share * self.local_steps)
        data, steps = take(batches, slice(self.feature_batches)), take(batches, slice(self.feature_batches, None))
        first, second = take(steps, slice(head_steps)), take(steps, slice(head_steps, None))

        before = class_statistics(model, weights, data, *size)
        counts = private.to(before.counts)
        shares, means = counts / counts.sum(), before.means
        features = shares.unsqueeze(1) * means
        variance = (shares @ before.mean_squares - features.square().sum()) / counts.sum()

        # A class without a prototype has the client's own mean, if there are prototypes at all.
        known, strength = received[KNOWN] > 0.5, self.strength
        targets = torch.where(known.unsqueeze(1), received[PROTOTYPES], means)
        has_target = (known | ((before.counts > 0) & known.any())).to(counts)

        def aligned(weights: Params, batch: Batches) -> Tensor:
            z, outputs = model.features(weights, batch)
            return model.mean_loss(outputs, batch) + strength * distance_to_prototypes(z, batch, targets, has_target)

        head_sgd = SGD(self.head_lr, self.local_momentum, self.local_weight_decay, self.local_clip)
        body = {name for name in weights if name not in last.names}
        trained, _ = head_sgd.run(model.loss, weights, first, frozen=body)
        trained, _ = self.local_sgd.run(aligned, trained, second, frozen=last.names)
        after = class_statistics(model, trained, data, *size)
        update = subtract(weights, {name: trained[name] for name in weights})
        update |= {VARIANCE: variance, CLASS_FEATURES: features, CLASS_MEANS: after.means}
        return update | {CLASS_COUNTS: torch.where(after.counts > 0, counts, 0.0)}, private

    def receive(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[Any]]:
        group = only_group(groups, "FedPAC")
        body = group._replace(updates=pick(group.updates, shared.body))
        heads = subtract(group.rows, group.updates)
        shares = head_weights(group.extras[VARIANCE], group.extras[CLASS_FEATURES])
        rows = mixtures(heads, shares)
        means, counts = group.extras[CLASS_MEANS], group.extras[CLASS_COUNTS]
        after = shared._replace(
            body=after_mean_update(shared.body, body, client_weights(self.rule, group.sizes)),
            prototypes=weighted_means(means, counts, shared.prototypes),
            known=torch.maximum(shared.known, (counts.sum(0) > 0).to(shared.known)),
        )
        return after, [rows]

    def move_row(self, model: Model, shared: Any, row: Any, update: Params) -> Any:
        return subtract(row, update)

    def personalize(self, model: Model, received: Params, private: Tensor, batches: Batches) -> Params:
        return pick(received, model.shapes)


def head_weights(variances: Tensor, features: Tensor) -> Tensor:
    """[C, C]: for each client, how much of every client's head it takes: from variances [C] and features [C, L, D]."""
    vectors = features.double().flatten(1)
    # The differences themselves, not their expansion: clients that are alike would leave nothing but rounding.
    gaps = vectors.unsqueeze(1) - vectors.unsqueeze(0)
    return least_weights(torch.diag(variances.double()) + torch.einsum("ijd,ild->ijl", gaps, gaps))
