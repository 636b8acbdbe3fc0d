"""What methods compute from features, the inputs of a network's last layer.

Axes: [B]atch, [D] length of a feature vector, [L]abels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.sgd import Batches, scan


def of_examples(features: Tensor) -> Tensor:
    """[B, D]: one vector for each example; of several, as of the words of a text, their mean."""
    return features if features.ndim == 2 else features.flatten(1, -2).mean(1)


def mean_feature(features: Tensor, batch: Batches) -> Tensor:
    """[D]: the mean over the examples of a minibatch that the mask keeps."""
    kept = torch.where(batch.mask.unsqueeze(1), of_examples(features), 0.0)
    return kept.sum(0) / batch.mask.sum()


def class_sums(features: Tensor, batch: Batches, num_labels: int) -> tuple[Tensor, Tensor]:
    """[L, D] and [L]: the sum of the feature vectors of each class in a minibatch, and how many there are."""
    labels = torch.arange(num_labels, device=features.device)
    belongs = ((batch.y.unsqueeze(1) == labels) & batch.mask.unsqueeze(1)).to(features)
    return belongs.T @ of_examples(features), belongs.sum(0)


def distance_to_prototypes(features: Tensor, batch: Batches, prototypes: Tensor, known: Tensor) -> Tensor:
    """The mean squared distance of features from the prototype of their class; 0 for a class that has none.

    Args:
        features: The inputs of the last layer.
        batch: Whose labels say which prototype belongs to an example.
        prototypes: [L, D].
        known: [L], whether a class has a prototype.
    """
    counts = (known[batch.y] > 0.5) & batch.mask
    gap = of_examples(features) - prototypes[batch.y]
    return torch.where(counts, gap.square().mean(1), 0.0).sum() / batch.mask.sum()


def weighted_means(means: Tensor, weights: Tensor, otherwise: Tensor) -> Tensor:
    """[L, D]: the mean over clients of [C, L, D] by weights [C, L]; as it was for a class that nobody has."""
    total = weights.sum(0)
    found = (weights.unsqueeze(2) * means).sum(0) / torch.where(total > 0, total, 1.0).unsqueeze(1)
    return torch.where(total.unsqueeze(1) > 0, found, otherwise)


class ClassStatistics(NamedTuple):
    """Sums over the examples of some minibatches, by class."""

    sums: Tensor  # [L, D], of the feature vectors
    squares: Tensor  # [L], of their squared lengths
    counts: Tensor  # [L], how many there are

    @property
    def means(self) -> Tensor:
        """[L, D]: the mean feature of each class; 0 for one without examples."""
        return self.sums / self.counts.clamp(min=1).unsqueeze(1)

    @property
    def mean_squares(self) -> Tensor:
        """[L]: the mean squared length of each class's features."""
        return self.squares / self.counts.clamp(min=1)


def class_statistics(
    model: Model, weights: Params, batches: Batches, num_labels: int, num_features: int
) -> ClassStatistics:
    """Statistics of a network's features on minibatches [K, B, ...], by class; nothing is trained."""
    like = next(iter(weights.values()))

    def step(carry: ClassStatistics, batch: Batches, weights: Params) -> ClassStatistics:
        features, _ = model.features(weights, batch)
        sums, counts = class_sums(features, batch, num_labels)
        squares, _ = class_sums(of_examples(features).square().sum(1, keepdim=True), batch, num_labels)
        return ClassStatistics(carry.sums + sums, carry.squares + squares.squeeze(1), carry.counts + counts)

    shapes = ((num_labels, num_features), (num_labels,), (num_labels,))
    return scan(step, ClassStatistics(*(like.new_zeros(shape) for shape in shapes)), batches, weights)
