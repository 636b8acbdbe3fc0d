"""Dropout whose draws are keyed by client, round, step and layer, so that every executor draws the same.

PyTorch's generator cannot do that where clients are mapped or a round is captured: it draws for all of them at once, or
the same again. Here a layer draws from the key of a `Draws`, which is set for ONE client's work; `sgd.scan` gives every
step a key of its own, so that a method need not mention it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfedhn import keys

PLAIN = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


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


class KeyedDropout(nn.modules.dropout._DropoutNd):
    """`nn.Dropout` and, for whole channels, `nn.Dropout1d`, `2d` and `3d`."""

    num_kept_dims: int | None  # how many of the last dimensions go together

    def forward(self, input: Tensor) -> Tensor:
        draws = _draws.get()
        if not self.training or draws is None or self.p == 0:
            return input
        together = 0 if self.num_kept_dims is None else self.num_kept_dims
        shape = input.shape[: input.ndim - together]
        uniform = draws.uniform(shape.numel()).reshape(*shape, *[1] * together)
        return torch.where(uniform >= self.p, input / (1 - self.p) if self.p < 1 else input, 0.0)


def keyed(module: nn.Module) -> None:
    """Let the dropout layers of a network draw by key, in place."""
    for part in dropouts(module):
        part.num_kept_dims = None if type(part) is nn.Dropout else int(type(part).__name__[-2])  # type: ignore[assignment]
        part.__class__ = KeyedDropout


def dropouts(module: nn.Module) -> list[nn.Module]:
    """The layers of a network that can draw by key."""
    return [part for part in module.modules() if type(part) in PLAIN and part.p > 0]  # type: ignore[operator]


def draws_freely(module: nn.Module) -> bool:
    """Whether a network draws in ways of its own besides: another kind of dropout, or a rate that it hands on."""
    return any(
        (
            isinstance(part, nn.modules.dropout._DropoutNd)
            and part.p > 0
            and not isinstance(part, (KeyedDropout, *PLAIN))
        )
        or any("drop" in name and isinstance(rate, float) and 0 < rate <= 1 for name, rate in vars(part).items())
        for part in module.modules()
    )
