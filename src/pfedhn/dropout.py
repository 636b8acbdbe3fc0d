"""Dropout whose draws are keyed by client, round, step and layer, so that every executor draws the same.

PyTorch's generator cannot do that where clients are mapped or a round is captured: it draws for all of them at once, or
the same again. Here a layer draws from the key of a `Draws`, which is set for ONE client's work; `sgd.scan` gives every
step a key of its own, so that a method need not mention it. What else a network draws (attention that hands a rate on,
a layer of one's own) comes from PyTorch's generator, which only the loop can seed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from pfedhn import keys

# How many of the first dimensions have a draw of their own, as PyTorch has it; what comes after goes together.
KINDS: dict[type[nn.Module], Callable[[int], int]] = {
    nn.Dropout: lambda ndim: ndim,
    nn.Dropout1d: lambda ndim: ndim - 1,
    nn.Dropout2d: lambda ndim: 2,
    nn.Dropout3d: lambda ndim: 2 if ndim == 5 else 1,
}


@dataclass
class Draws:
    """What a network draws from."""

    key: Tensor  # []
    count: int = 0  # draws from this key so far

    def next(self) -> Tensor:
        """A key of its own."""
        self.count += 1
        return torch.as_tensor(keys.fold(self.key, self.count))

    def uniform(self, count: int) -> Tensor:
        """`count` numbers in [0, 1)."""
        self.count += 1
        drawn: Tensor = keys.uniform_operator(self.key, self.count, count)
        return drawn


_draws: ContextVar[Draws | None] = ContextVar("draws", default=None)


@contextmanager
def drawing(key: Tensor) -> Iterator[Draws]:
    """Inside the block, dropout layers draw from the key."""
    draws = Draws(key)
    token = _draws.set(draws)
    try:
        yield draws
    finally:
        _draws.reset(token)


def drawn() -> Draws | None:
    """What the client at work draws from, if its network draws."""
    return _draws.get()


class KeyedDropout(_DropoutNd):
    """`nn.Dropout` and, for whole channels, `nn.Dropout1d`, `2d` and `3d`."""

    kind: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        draws = _draws.get()
        if not self.training or draws is None or self.p == 0:
            return input
        shape = input.shape[: KINDS[self.kind](input.ndim)]
        uniform = draws.uniform(shape.numel()).reshape(*shape, *[1] * (input.ndim - len(shape)))
        return torch.where(uniform >= self.p, input / (1 - self.p) if self.p < 1 else input, 0.0)

    def extra_repr(self) -> str:
        return f"{self.kind.__name__}, {super().extra_repr()}"  # a digest of a network is made of it


def keyed(module: nn.Module) -> nn.Module:
    """Let the dropout layers of a network draw by key, in place."""
    for part in module.modules():
        if type(part) in KINDS and not part.inplace:  # one that works in place may be called for that alone
            part.kind = type(part)  # type: ignore[assignment]
            part.__class__ = KeyedDropout
    return module


def has_dropout(module: nn.Module) -> bool:
    """Whether a network says that it drops: by a layer, or by a rate that a layer hands on."""
    return any(
        (isinstance(part, _DropoutNd) and part.p > 0)
        or (isinstance(rate := getattr(part, "dropout", None), float) and rate > 0)
        for part in module.modules()
    )
