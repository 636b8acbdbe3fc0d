"""What methods compute from features, the inputs of a network's last layer.

Axes: [B]atch, [D] length of a feature vector, [L]abels.
"""

import torch
from torch import Tensor

from pfedhn.sgd import Batches


def of_examples(features: Tensor) -> Tensor:
    """[B, D]: one vector for each example; of several, as of the words of a text, their mean."""
    return features if features.ndim == 2 else features.flatten(1, -2).mean(1)


def mean_feature(features: Tensor, batch: Batches) -> Tensor:
    """[D]: the mean over the examples of a minibatch that the mask keeps."""
    kept = torch.where(batch.mask.unsqueeze(1), of_examples(features), 0.0)
    return kept.sum(0) / batch.mask.sum()
