"""The server's memory of each client: an embedding, and how its optimizer moves it.

SGD: the published code decays EVERY embedding at every server step and lets its left-over momentum move it, chosen or
not. A row that gets no gradient follows (velocity, value) -> A (velocity, value) with a fixed 2x2 matrix A, so n missed
steps are A^n: a row is brought up to date only when somebody looks.
Adam: a row moves only when its client is chosen, and counts its own steps.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.adamw import AdamW
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.sgd import SGD, Rate

NUM_POWERS = 32  # as many bits as a count of missed steps has


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
    """How a server starts and moves its rows: trained by SGD, or fixed to what describes each client."""

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

    def at_rest(self, value: Tensor, step: Tensor) -> Row:
        return Row(value, torch.zeros_like(value), step)

    def at(self, rows: Row, powers: Tensor, step: Tensor) -> Row:
        return rows if self.is_fixed else caught_up(rows, powers, step)

    def moved(self, row: Row, gradient: Tensor, step: Tensor) -> Row:
        sgd = SGD(self.lr, self.momentum, self.weight_decay)
        return Row(*sgd.step(row.embedding, row.velocity, gradient), step.expand_as(row.last_step))


@dataclass(frozen=True)
class AdamEmbeddings(Embeddings):
    """How Adam moves them; `weight_decay` is decoupled."""

    def at_rest(self, value: Tensor, step: Tensor) -> Row:
        return Row(value, torch.zeros_like(value), torch.zeros_like(step), torch.zeros_like(value))

    def at(self, rows: Row, powers: Tensor, step: Tensor) -> Row:
        return rows

    def moved(self, row: Row, gradient: Tensor, step: Tensor) -> Row:
        assert isinstance(row.square, Tensor)
        adam = AdamW(self.lr, self.momentum, weight_decay=self.weight_decay)
        number = row.last_step + 1
        embedding, velocity, square = adam.step(row.embedding, row.velocity, row.square, gradient, number[..., None])
        return Row(embedding, velocity, number, square)


def embedding_dim(given: int | None, num_clients: int, descriptor_dim: int | None, is_fixed: bool) -> int | None:
    """The dimension of the rows: as given, as a client is described, or as the authors choose it.

    They take int(1 + n / 4); here it is held at 64 for large federations.
    """
    if is_fixed and given and descriptor_dim not in (None, given):
        raise UserError(
            f"embedding_dim is {given}, but the federation describes a client by {descriptor_dim} numbers; set "
            'embedding_dim to None ("none" in a file), which takes as many.'
        )
    return given or (descriptor_dim if is_fixed else min(int(1 + num_clients / 4), 64))
