"""Batch statistics: BatchNorm whose running mean and variance are values that a step is given and gives back.

A layer that writes to its own buffers computes something else for every client that comes later. Here a forward pass
reads and writes the running statistics of a `Tracker`, which is set for ONE client's work; `sgd.gradient` takes them
out of the gradient and `sgd.scan` carries them from step to step, so that a method need not mention them.
Axes: [B]atch.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfedhn.errors import UserError
from pfedhn.params import Params

COUNT = "num_batches_tracked"
MAX_DEVIATIONS = 10.0  # that a scaled column of a table may be from its mean


@dataclass
class Tracker:
    """The running statistics of ONE client, which move along as it trains."""

    now: Params


@dataclass
class _Pass:
    """One forward pass in training mode."""

    mask: Tensor  # [B], False for rows that fill a batch up
    before: Params
    share: float | None = None
    after: Params = field(default_factory=dict)


_tracker: ContextVar[Tracker | None] = ContextVar("tracker", default=None)
_collected: ContextVar[Params | None] = ContextVar("collected", default=None)
_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)


@contextmanager
def tracking(start: Params) -> Iterator[Tracker]:
    """Inside the block, which is ONE client's work, the statistics of its training passes are noted."""
    tracker = Tracker(start)
    token = _tracker.set(tracker)
    try:
        yield tracker
    finally:
        _tracker.reset(token)


def tracked() -> Tracker | None:
    """The statistics of the client that is at work, if its network has any."""
    tracker = _tracker.get()
    return tracker if tracker is not None and tracker.now else None


@contextmanager
def collecting() -> Iterator[Params]:
    """Inside the block, a forward pass leaves its new statistics in the dictionary, for whoever unwraps them."""
    collected: Params = {}
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


@contextmanager
def training_pass(initial: Params, mask: Tensor, share: float | None = None) -> Iterator[None]:
    """Inside the block, a network normalizes by the rows of its batch that the mask keeps.

    Args:
        initial: The running statistics before the pass, unless a client's are tracked.
        mask: [B], False for rows that fill a batch up.
        share: How much of this batch enters the running statistics; as each layer has it where None.
    """
    collected, tracker = _collected.get(), tracked()
    before = {**(initial if tracker is None else tracker.now), **(collected or {})}
    now = _Pass(mask, before, share)
    token = _pass.set(now)
    try:
        yield
    finally:
        _pass.reset(token)
    if collected is not None:
        collected.update(before | now.after)


class MaskedBatchNorm(_BatchNorm):
    """`nn.BatchNorm1d`, `2d` and `3d` for a step: it leaves its buffers alone and padded rows out."""

    path: str  # where it stands in its network

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        now = _pass.get()
        if not self.training or now is None:
            return self._by_running_statistics(input) if not self.training and input.is_cuda else super().forward(input)
        if input.shape[0] != now.mask.shape[0]:
            raise UserError(
                f"the BatchNorm layer {self.path!r} sees {input.shape[0]} rows for a batch of {now.mask.shape[0]} "
                "examples, so that rows which fill a batch up cannot be told from others; use GroupNorm or LayerNorm "
                "there."
            )
        dims = [dim for dim in range(input.ndim) if dim != 1]
        keep = now.mask.reshape(-1, *[1] * (input.ndim - 1))
        count = now.mask.sum().to(input.dtype) * input[0, 0].numel()
        mean = torch.where(keep, input, 0.0).sum(dims) / count
        shape = [1, -1, *[1] * (input.ndim - 2)]
        centered = input - mean.reshape(shape)
        variance = torch.where(keep, centered * centered, 0.0).sum(dims) / count
        self._note(now, mean.detach(), (variance * (count / (count - 1))).detach())
        outputs = centered * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.weight is not None:
            outputs = outputs * self.weight.reshape(shape) + self.bias.reshape(shape)
        return outputs

    def _by_running_statistics(self, input: Tensor) -> Tensor:
        """What PyTorch's operator computes, which on a GPU cannot be mapped over clients."""
        assert self.running_mean is not None
        assert self.running_var is not None
        shape = [1, -1, *[1] * (input.ndim - 2)]
        scale = torch.rsqrt(self.running_var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        outputs = (input - self.running_mean.reshape(shape)) * scale.reshape(shape)
        return outputs if self.bias is None else outputs + self.bias.reshape(shape)

    def _note(self, now: _Pass, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics as PyTorch does; a momentum of None is a plain average of all batches."""

        def latest(name: str) -> Tensor:
            full = f"{self.path}.{name}"
            return now.after.get(full, now.before[full])

        count = latest(COUNT) + 1
        share: float | Tensor | None = self.momentum if now.share is None else now.share
        share = 1.0 / count.to(mean) if share is None else share
        for name, value in (("running_mean", mean), ("running_var", variance)):
            old = latest(name)
            now.after[f"{self.path}.{name}"] = old + share * (value - old)
        now.after[f"{self.path}.{COUNT}"] = count


def normalizations(module: nn.Module) -> dict[str, _BatchNorm]:
    """The layers of a network in training mode that keep batch statistics, by name; one may be frozen by `eval`."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.training and part.running_mean is not None
    }


def statistics_of(module: nn.Module) -> Params:
    """The running statistics of a network, by the names that its state dict has for them."""
    return {
        f"{name}.{buffer}": value.detach()
        for name, part in normalizations(module).items()
        for buffer, value in part.named_buffers(recurse=False)
    }


def copied(module: nn.Module) -> nn.Module:
    """A copy for our own use, which has its frozen parameters in common: a pretrained base is in memory once."""
    return copy.deepcopy(module, {id(value): value for value in module.parameters() if not value.requires_grad})


def masked(module: nn.Module) -> nn.Module:
    """A network like `module` whose BatchNorm layers are `MaskedBatchNorm`; the same one where it has none."""
    tracking = normalizations(module)
    for name, part in tracking.items():
        if type(part).forward is not _BatchNorm.forward:
            raise UserError(
                f"the layer {name!r} is a {type(part).__name__}, which computes its batch statistics in a way of its "
                "own; use nn.BatchNorm2d, GroupNorm or LayerNorm."
            )
    frozen = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and not part.training and part.running_mean is not None
    }
    names = [*tracking, *(name for name, part in frozen.items() if type(part).forward is _BatchNorm.forward)]
    if not names:
        return module
    module = copied(module)
    for name in names:
        layer = module.get_submodule(name)
        layer.__class__ = MaskedBatchNorm
        layer.path = name
    return module
