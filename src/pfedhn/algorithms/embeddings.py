"""The server's memory of each client: an embedding, and how the server's optimizer moves it.

SGD: the published code decays EVERY embedding at every server step and lets its left-over momentum move it, chosen or
not. A row that gets no gradient follows (velocity, value) -> A (velocity, value) with a fixed 2x2 matrix A, so n missed
steps are A^n: a row is brought up to date only when somebody looks.
Adam: a row moves only when its client is chosen, and counts its own steps.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, AdamW, Rate

NUM_POWERS = 32  # as many bits as a count of missed steps has
JOINING_FACTORS = (1, 10, 100, 1_000, 10_000)  # of the embedding's learning rate, while a client joins


class Row(NamedTuple):
    """The server's memory of one client; a leading axis makes a table of them."""

    embedding: Tensor
    velocity: Tensor
    last_step: Tensor  # int32, the server step that embedding and velocity stand for; Adam: the row's own steps so far
    square: Tensor | tuple[()] = ()  # Adam's second moment


def step_powers(lr: float, momentum: float, weight_decay: float) -> Tensor:
    """A, A^2, A^4, ...: by repeated squaring in float64, since A's eigenvalues turn complex for large lr * decay."""
    matrix = [[momentum, weight_decay], [-lr * momentum, 1 - lr * weight_decay]]
    powers = [torch.tensor(matrix, dtype=torch.float64)]
    for _ in range(NUM_POWERS - 1):
        powers.append(powers[-1] @ powers[-1])
    return torch.stack(powers)


def caught_up(rows: Row, powers: Tensor, step: Tensor) -> Row:
    """Rows as they stand at `step`: A^n is the product of the powers that the bits of n name."""
    missed = (step - rows.last_step).clamp(min=0)  # a new client's row runs ahead of a frozen server
    bits = torch.arange(len(powers), device=missed.device)
    chosen = ((missed[..., None] >> bits) & 1).bool()[..., None, None]
    total = torch.where(chosen, powers, torch.eye(2, dtype=torch.float64, device=missed.device))
    while total.shape[-3] > 1:  # powers of one matrix commute: multiply them in pairs
        total = _product(total[..., ::2, :, :], total[..., 1::2, :, :])
    state = torch.stack([rows.velocity, rows.embedding], dim=-2)
    velocity, embedding = _product(total.squeeze(-3), state.double()).to(state.dtype).unbind(-2)
    return Row(embedding, velocity, step.expand_as(missed))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product as sums of products, which a compiler fuses where it would call a library for each."""
    return (left[..., None] * right[..., None, :, :]).sum(-2)


@dataclass(frozen=True)
class Embeddings:
    """How a server starts and trains the embeddings of its clients."""

    kind: Literal["trained", "fixed"] = "trained"  # "fixed": the federation's descriptors, or class shares
    dim: int | None = None  # length of an embedding; none: int(1 + clients / 4), at most 64
    scale: Rate = 1.0  # initial standard deviation of the embeddings
    optimizer: Literal["sgd", "adam"] = "sgd"  # with Adam, only those of chosen clients move
    lr: Rate | None = None  # learning rate of the server's steps on the embeddings; that of phi by default
    momentum: Fraction | None = None  # momentum of the steps on the embeddings; that of phi by default
    weight_decay: Rate | None = None  # weight decay of the embeddings; that of phi by default

    def for_clients(self, num_clients: int, descriptor_dim: int | None) -> "Embeddings":
        """The same with their length filled in: as given, as a client is described, or as the authors choose it.

        They take int(1 + n / 4); here it is at most 64 in large federations.
        """
        is_fixed = self.kind == "fixed"
        if is_fixed and self.dim and descriptor_dim not in (None, self.dim):
            raise UserError(
                f"embedding_dim is {self.dim}, but the federation describes a client by {descriptor_dim} numbers; set "
                'embedding_dim to None ("none" in a file), which takes as many.'
            )
        dim = self.dim or (descriptor_dim if is_fixed else min(int(1 + num_clients / 4), 64))
        return replace(self, dim=dim)

    def rows(self, server: SGD | AdamW) -> "Rows":
        """What moves the rows; settings that are None are those of the server's optimizer."""
        assert self.dim is not None, "for_clients fills in the length of an embedding"
        lr = server.lr if self.lr is None else self.lr
        momentum = server.momentum if self.momentum is None else self.momentum
        decay = server.weight_decay if self.weight_decay is None else self.weight_decay
        kind = Rows if self.optimizer == "sgd" else AdamRows
        return kind(self.dim, lr, momentum, decay, self.scale, self.kind == "fixed")


@dataclass(frozen=True)
class Rows:
    """Rows that are trained by SGD, or fixed to what describes each client."""

    dim: int
    lr: Rate
    momentum: float
    weight_decay: Rate
    scale: Rate = 1.0
    is_fixed: bool = False

    def powers(self) -> Tensor:
        return step_powers(float(self.lr), self.momentum, float(self.weight_decay))

    def start(self, key: Key, descriptor: Tensor | None) -> Row:
        value = descriptor if self.is_fixed else self.scale * keys.normal(key, self.dim)
        assert value is not None
        return self.at_rest(value, torch.zeros((), dtype=torch.int32, device=value.device))

    def join(self, rows: Row, powers: Tensor, step: Tensor, descriptor: Tensor | None) -> Row:
        # A commented-out sentence in the paper's source starts a new embedding at the mean of the trained ones.
        value = self.at(rows, powers, step).embedding.mean(0) if descriptor is None else descriptor
        return self.at_rest(value, step)

    def rates_for_joining(self) -> list[float]:
        """Learning rates to try while a client joins; none if its embedding does not move.

        In training a client's weights move mostly by phi. While a client joins, phi stands still and its embedding has
        to go all the way alone: how much faster it must be depends on the run.
        """
        return [] if self.is_fixed or not float(self.lr) else [float(self.lr) * factor for factor in JOINING_FACTORS]

    def at_rest(self, value: Tensor, step: Tensor) -> Row:
        return Row(value, torch.zeros_like(value), step)

    def at(self, rows: Row, powers: Tensor, step: Tensor) -> Row:
        return rows if self.is_fixed else caught_up(rows, powers, step)

    def moved(self, row: Row, gradient: Tensor, step: Tensor) -> Row:
        if self.is_fixed:
            return row
        sgd = SGD(self.lr, self.momentum, self.weight_decay)
        return Row(*sgd.step(row.embedding, row.velocity, gradient), step.expand_as(row.last_step))


@dataclass(frozen=True)
class AdamRows(Rows):
    """Rows that are trained by Adam; `weight_decay` is decoupled."""

    def at_rest(self, value: Tensor, step: Tensor) -> Row:
        return Row(value, torch.zeros_like(value), torch.zeros_like(step), torch.zeros_like(value))

    def at(self, rows: Row, powers: Tensor, step: Tensor) -> Row:
        return rows

    def moved(self, row: Row, gradient: Tensor, step: Tensor) -> Row:
        if self.is_fixed:
            return row
        assert isinstance(row.square, Tensor)
        adam = AdamW(self.lr, self.momentum, weight_decay=self.weight_decay)
        number = row.last_step + 1
        embedding, velocity, square = adam.step(row.embedding, row.velocity, row.square, gradient, number[..., None])
        return Row(embedding, velocity, number, square)
