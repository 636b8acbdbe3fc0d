"""A hypernetwork for any module: client embedding -> trunk -> the weights of a target network.

One trunk serves every architecture; each has a head, one wide matrix whose rows are the target's weights in order.
(One wide head equals one head per target tensor: `nn.Linear` is initialized by its fan-in alone.)
Axes: [C]lients, [D] embedding dimension.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pfedhn import keys
from pfedhn.keys import Key
from pfedhn.params import Params

Shapes = Mapping[str, torch.Size]

NUM_INITIAL_POWER_STEPS = 15  # as torch.nn.utils.parametrizations.spectral_norm


@dataclass(frozen=True)
class Hypernetwork:
    """The form of h(v; phi). `num_hidden` counts the [ReLU, Linear] pairs after the first layer, as the authors do."""

    embedding_dim: int
    hidden_dim: int = 100
    num_hidden: int = 3
    linear: bool = False  # h(v; W) = W v: no trunk, no bias
    spectral_norm: bool = False

    def init(self, architectures: Mapping[str, Shapes], key: Key) -> Params:
        """phi, each layer drawn as `nn.Linear` draws it, from a key of its own."""
        phi: Params = {}
        fan_in = self.embedding_dim
        if not self.linear:
            for layer in range(1 + self.num_hidden):
                phi |= _linear(f"trunk.{layer}", self.hidden_dim, fan_in, keys.fold(key, f"trunk.{layer}"))
                fan_in = self.hidden_dim
        for name, shapes in architectures.items():
            head = _linear(f"head.{name}", _num_weights(shapes), fan_in, keys.fold(key, f"head.{name}"))
            phi |= {f"head.{name}.weight": head[f"head.{name}.weight"]} if self.linear else head
        return phi

    def generate(self, phi: Params, spectral: Params, architecture: str, shapes: Shapes, embeddings: Tensor) -> Params:
        """The weights of one architecture for a stack of embeddings [C, D] -> {name: [C, ...]}."""
        features = embeddings
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
        parts = flat.split([math.prod(shape) for shape in shapes.values()], dim=-1)
        return {
            name: part.reshape((*part.shape[:-1], *shape))
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

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


def _linear(name: str, fan_out: int, fan_in: int, key: Key) -> Params:
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
