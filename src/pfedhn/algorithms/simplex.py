"""Weights that are at least 0 and sum to 1: the nearest ones to a vector, and those that make a quadratic form least.

Both are written in tensor operations without a branch, so that they can be traced, mapped and captured.
Axes: [...] any number of problems, [M] weights.
"""

import torch
from torch import Tensor

NUM_STEPS = 35  # of Newton's method; each makes the gap about ten times smaller
SHRINKS, INSIDE = 0.1, 0.99  # what is aimed at of the gap, and how far a step may go to the boundary
LEAST_GAP = 1e-26
RIDGE = 1e-13  # of the largest entry of the diagonal: of equal weights there is one solution


def nearest_weights(values: Tensor) -> Tensor:
    """[..., M]: the Euclidean projection onto the simplex (Held, Wolfe, Crowder, 1974)."""
    ordered = values.sort(dim=-1, descending=True).values
    count = torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)
    excess = (ordered.cumsum(-1) - 1) / count
    last = (ordered > excess).sum(-1, keepdim=True) - 1
    return (values - excess.gather(-1, last)).clamp(min=0)


def least_weights(matrices: Tensor) -> Tensor:
    """[..., M]: the weights w with the least w^T Q w, for positive semidefinite Q [..., M, M] in float64.

    A primal-dual interior-point method finds which weights are 0; the others then solve a linear system, so that the
    result is exact to rounding. Of several solutions it takes one inside.
    """
    scale = matrices.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    q = matrices / torch.where(scale > 0, scale, 1.0)
    regular = q + RIDGE * eye
    weights = torch.full_like(q[..., 0], 1 / q.shape[-1])
    slopes, level = torch.ones_like(weights), torch.zeros_like(weights[..., :1])
    for _ in range(NUM_STEPS):
        gap = (SHRINKS * (weights * slopes).mean(-1, keepdim=True)).clamp(min=LEAST_GAP)
        target = level - (q @ weights[..., None]).squeeze(-1) + gap / weights
        right = torch.stack([target, torch.ones_like(target)], -1)
        to_target, to_level = _solved(regular + torch.diag_embed(slopes / weights), right).unbind(-1)
        change = (1 - weights.sum(-1, keepdim=True) - to_target.sum(-1, keepdim=True)) / to_level.sum(-1, keepdim=True)
        step = to_target + change * to_level
        slope_step = (gap - slopes * step) / weights - slopes
        length = torch.minimum(_longest(weights, step), _longest(slopes, slope_step))
        weights, slopes, level = weights + length * step, slopes + length * slope_step, level + length * change
    held = weights > slopes
    inside = torch.where(held[..., None] & held[..., None, :], q, torch.where(held[..., None], 0.0, eye))
    exact = _solved(inside, held.to(q)[..., None]).squeeze(-1)
    exact = exact / exact.sum(-1, keepdim=True)
    is_solution = (exact.isfinite() & (exact >= 0)).all(-1, keepdim=True)
    return torch.where(is_solution, exact, weights / weights.sum(-1, keepdim=True))


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """The solution of a positive definite system; not a number where it is not definite.

    Elimination in plain operations: PyTorch's solvers call a library that cannot be captured in a CUDA graph.
    """
    size = matrix.shape[-1]
    both, places = torch.cat([matrix, right], -1), torch.arange(size, device=matrix.device)[:, None]
    for place in range(size):  # a positive definite matrix needs no pivots
        pivot = both[..., place : place + 1, place : place + 1]
        row = both[..., place : place + 1, :] / torch.where(pivot > 0, pivot, torch.nan)
        both = torch.where(places == place, row, both - both[..., :, place : place + 1] * row)
    return both[..., size:]


def _longest(values: Tensor, step: Tensor) -> Tensor:
    """How much of a step leaves all values above 0, at most all of it."""
    limits = torch.where(step < 0, -values / step, torch.inf)
    return (INSIDE * limits.amin(-1, keepdim=True)).clamp(max=1.0)
