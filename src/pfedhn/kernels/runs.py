"""What the autograd functions of the blocks have in common: the axis of [R]uns, and no second derivative."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Gradient(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            "The Triton kernels have no second derivative; use the reference block, in plain PyTorch."
        )


def fold_runs(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make vmap's axis part of [R]; what is the same for all runs stays R = 1."""
    stacks = [t.unsqueeze(0) if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)]
    runs = max(t.shape[1] for t in stacks)
    return [(t if t.shape[:2] == (1, 1) else t.expand(size, runs, *t.shape[2:])).flatten(0, 1) for t in stacks]


def unfold_runs(size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.unflatten(0, (size, -1)) for t in tensors)


def sum_to_runs(gradient: Tensor, runs: int) -> Tensor:
    return gradient.sum(0, keepdim=True) if runs < gradient.shape[0] else gradient
