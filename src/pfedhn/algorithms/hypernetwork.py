"""A hypernetwork for any module: client embedding -> trunk -> the weights of a target network.

One trunk serves every architecture; each has a head, one wide matrix whose rows are the target's weights in order.
(One wide head equals one head per target tensor: `nn.Linear` is initialized by its fan-in alone.)

Other heads write what is added to a model, at first zeros; for a target of millions of weights, from fewer numbers:

    added      every weight, as the dense head does
    low-rank   two factors A (v), B (v) of each matrix, whose product A B^T is added; other tensors as they are
    chunked    the target in pieces of equal length: the trunk sees the client's embedding beside the piece's own, which
               is learned (von Oswald et al., ICLR 2020), and one head writes all pieces

Axes: [C]lients, [D] embedding dimension, [P]ieces.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pfedhn import keys
from pfedhn.keys import Key
from pfedhn.params import Params

Shapes = Mapping[str, torch.Size]

Head: TypeAlias = Literal["dense", "added", "low-rank", "chunked"]

CHUNK_DIM = 32  # length of a piece's embedding
NUM_INITIAL_POWER_STEPS = 15  # as torch.nn.utils.parametrizations.spectral_norm


@dataclass(frozen=True)
class Hypernetwork:
    """The form of h(v; phi). `num_hidden` counts the [ReLU, Linear] pairs after the first layer, as the authors do."""

    embedding_dim: int
    hidden_dim: int = 100
    num_hidden: int = 3
    linear: bool = False  # h(v; W) = W v: no trunk, no bias
    spectral_norm: bool = False
    head: Head = "dense"
    rank: int = 4
    chunk_size: int = 2_000

    def init(self, architectures: Mapping[str, Shapes], key: Key) -> Params:
        """phi, each layer drawn from its own key, as `nn.Linear` draws it."""
        phi: Params = {}
        fan_in = self.embedding_dim + (CHUNK_DIM if self.head == "chunked" else 0)
        if not self.linear:
            for layer in range(1 + self.num_hidden):
                phi |= init_linear(f"trunk.{layer}", self.hidden_dim, fan_in, keys.fold(key, f"trunk.{layer}"))
                fan_in = self.hidden_dim
        for name, shapes in architectures.items():
            head = init_linear(f"head.{name}", self._num_outputs(shapes), fan_in, keys.fold(key, f"head.{name}"))
            phi |= {f"head.{name}.weight": head[f"head.{name}.weight"]} if self.linear else head
            if self.head == "low-rank":
                is_left = torch.cat([torch.full((size,), part == "left") for _, part, size in self._factors(shapes)])
                for value in head.values():
                    value[~is_left] = 0.0  # a product with zeros, and a change of zero
            if self.head in ("added", "chunked"):
                for value in head.values():
                    value.zero_()
            if self.head == "chunked":
                drawn = keys.normal(keys.fold(key, f"chunks.{name}"), self._num_pieces(shapes) * CHUNK_DIM)
                phi[f"head.{name}.chunks"] = drawn.unflatten(0, (-1, CHUNK_DIM)).float()
        return phi

    def _num_outputs(self, shapes: Shapes) -> int:
        if self.head in ("dense", "added"):
            return _num_weights(shapes)
        return self.chunk_size if self.head == "chunked" else sum(size for *_, size in self._factors(shapes))

    def _num_pieces(self, shapes: Shapes) -> int:
        return -(-_num_weights(shapes) // self.chunk_size)

    def _factors(self, shapes: Shapes) -> list[tuple[str, str, int]]:
        """What a low-rank head writes, in order: (name, "left" or "right", numbers), or (name, "whole", numbers)."""
        factors = []
        for name, shape in shapes.items():
            whole = math.prod(shape)
            rows, columns = (shape[0], whole // shape[0]) if len(shape) > 1 and whole else (0, 0)
            if 0 < self.rank * (rows + columns) < whole:
                factors += [(name, "left", self.rank * rows), (name, "right", self.rank * columns)]
            else:
                factors.append((name, "whole", whole))
        return factors

    def generate(self, phi: Params, spectral: Params, architecture: str, shapes: Shapes, embeddings: Tensor) -> Params:
        """The weights of one architecture for a stack of embeddings [C, D] -> {name: [C, ...]}."""
        features = embeddings
        if self.head == "chunked":
            chunks = phi[f"head.{architecture}.chunks"]
            shape = (*embeddings.shape[:-1], len(chunks))
            both = embeddings.unsqueeze(-2).expand(*shape, -1), chunks.expand(*shape, -1)
            features = torch.cat(both, dim=-1)
        if not self.linear:
            for layer in range(1 + self.num_hidden):
                # No ReLU after the last trunk layer: it and the head are two linear maps in a row, as published.
                features = features if layer == 0 else features.relu()
                weight = phi[f"trunk.{layer}.weight"]
                if self.spectral_norm:
                    weight = weight / _sigma(weight, spectral[f"trunk.{layer}"])
                features = features @ weight.T + phi[f"trunk.{layer}.bias"]
        weight = phi[f"head.{architecture}.weight"]
        if self.spectral_norm:
            weight = torch.cat(
                [
                    rows / _sigma(rows, spectral[f"head.{architecture}.{name}"])
                    for name, rows in _slices(weight, shapes).items()
                ]
            )
        flat = features @ weight.T
        if not self.linear:
            flat = flat + phi[f"head.{architecture}.bias"]
        if self.head == "low-rank":
            return self._products(flat, shapes)
        if self.head == "chunked":
            flat = flat.flatten(-2)[..., : _num_weights(shapes)]
        parts = flat.split([math.prod(shape) for shape in shapes.values()], dim=-1)
        return {
            name: part.reshape((*part.shape[:-1], *shape))
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def _products(self, flat: Tensor, shapes: Shapes) -> Params:
        """The weights from what a low-rank head wrote."""
        factors = self._factors(shapes)
        parts = flat.split([size for *_, size in factors], dim=-1)
        written = {(name, part): value for (name, part, _), value in zip(factors, parts, strict=True)}
        weights = {}
        for name, shape in shapes.items():
            leading = flat.shape[:-1]
            if (name, "whole") in written:
                weights[name] = written[name, "whole"].reshape(*leading, *shape)
            else:
                left, right = (written[name, part].unflatten(-1, (-1, self.rank)) for part in ("left", "right"))
                weights[name] = (left @ right.mT).reshape(*leading, *shape)
        return weights

    def init_spectral(self, phi: Params, architectures: Mapping[str, Shapes], key: Key) -> Params:
        """A left singular vector per normalized matrix: every trunk layer, and each target tensor's slice of a head."""
        if not self.spectral_norm:
            return {}
        matrices = self._matrices(phi, architectures)
        spectral = {
            name: normalize(keys.normal(keys.fold(key, name), matrix.shape[0]).to(matrix), dim=0, eps=1e-12)
            for name, matrix in matrices.items()
        }
        for _ in range(NUM_INITIAL_POWER_STEPS):
            spectral = self.power_step(phi, spectral, architectures)
        return spectral

    def power_step(self, phi: Params, spectral: Params, architectures: Mapping[str, Shapes]) -> Params:
        """One step of power iteration on every normalized matrix."""
        if not self.spectral_norm:
            return {}
        return {
            name: normalize(matrix @ _right(matrix, spectral[name]), dim=0, eps=1e-12)
            for name, matrix in self._matrices(phi, architectures).items()
        }

    def _matrices(self, phi: Params, architectures: Mapping[str, Shapes]) -> Params:
        trunk = {
            name.removesuffix(".weight"): value
            for name, value in phi.items()
            if name.startswith("trunk.") and name.endswith(".weight")
        }
        return trunk | {
            f"head.{architecture}.{name}": rows
            for architecture, shapes in architectures.items()
            for name, rows in _slices(phi[f"head.{architecture}.weight"], shapes).items()
        }


def _num_weights(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def init_linear(name: str, fan_out: int, fan_in: int, key: Key) -> Params:
    """The parameters of a linear layer, drawn as `nn.Linear` draws them."""
    bound = 1 / math.sqrt(fan_in)
    generator = keys.torch_generator(key)
    weight = torch.empty(fan_out, fan_in).uniform_(-bound, bound, generator=generator)
    return {f"{name}.weight": weight, f"{name}.bias": torch.empty(fan_out).uniform_(-bound, bound, generator=generator)}


def _slices(weight: Tensor, shapes: Shapes) -> Params:
    sizes = [math.prod(shape) for shape in shapes.values()]
    return dict(zip(shapes, weight.split(sizes), strict=True))


def _right(matrix: Tensor, left: Tensor) -> Tensor:
    return normalize(matrix.T @ left, dim=0, eps=1e-12)


def _sigma(matrix: Tensor, left: Tensor) -> Tensor:
    """The largest singular value as u^T W v with u and v held constant, so its gradient flows through W alone."""
    left = left.detach()
    return left @ (matrix @ _right(matrix, left).detach())
