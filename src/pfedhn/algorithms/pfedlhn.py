"""pFedLHN (Neural Processing Letters, 2023): pFedHN whose hypernetwork writes every layer from its own embedding.

The paper is "Layer-Wise Personalized Federated Learning with Hypernetwork".

    server   layer l of client i:  v_il = coefficients_il D, a mixture of a few learned vectors D,       send
             theta_il = head_l(W v_il + b), with one linear head for each tensor and no ReLU
    client   theta~_i = K steps of SGD from theta_i                                                      train
    server   (D, W, b, heads, coefficients_i) take a step of AdamW along                                 receive
             the mean over the cohort of (d theta_i / d(...))^T (theta_i - theta~_i)

Clients and layers differ by their coefficients alone: a few numbers for each tensor. A client that joins starts from
the mean coefficients, and they alone learn. Differs: with several clients a round the authors' code adds up weights and
updates before it multiplies, so that one client's update meets another's derivative; here each meets its own. Their
AdamW moves the coefficients of all clients in every round, this one those of the cohort.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from torch import Tensor

from pfedhn import keys
from pfedhn.algorithms.embeddings import Embeddings, Row
from pfedhn.algorithms.hypernetwork import Shapes, init_linear
from pfedhn.algorithms.pfedhn import PFedHN, Shared
from pfedhn.errors import UserError
from pfedhn.params import Params
from pfedhn.sgd import SGD, AdamW


@dataclass(frozen=True)
class LayerHypernetwork:
    """The form of h(v; phi) with an embedding for each tensor; its functions are those of `Hypernetwork`."""

    num_vectors: int
    vector_dim: int
    hidden_dim: int

    def init(self, architectures: Mapping[str, Shapes], key: keys.Key) -> Params:
        vectors = keys.normal(keys.fold(key, "vectors"), self.num_vectors * self.vector_dim)
        phi = {"vectors": vectors.unflatten(0, (self.num_vectors, -1)).float()}
        phi |= init_linear("trunk.0", self.hidden_dim, self.vector_dim, keys.fold(key, "trunk.0"))
        for architecture, shapes in architectures.items():
            for name, shape in shapes.items():
                head = f"head.{architecture}/{name}"
                phi |= init_linear(head, shape.numel(), self.hidden_dim, keys.fold(key, head))
        return phi

    def num_coefficients(self, phi: Params) -> int:
        """How many a client has: as its largest architecture has tensors, times the learned vectors."""
        heads = [name for name in phi if name.startswith("head.") and name.endswith(".bias")]
        return self.num_vectors * max(Counter(name.partition("/")[0] for name in heads).values(), default=0)

    def generate(self, phi: Params, spectral: Params, architecture: str, shapes: Shapes, embeddings: Tensor) -> Params:
        """The weights of one architecture for a stack of coefficients [C, D] -> {name: [C, ...]}."""
        coefficients = embeddings[..., : self.num_vectors * len(shapes)].unflatten(-1, (-1, self.num_vectors))
        features = coefficients @ phi["vectors"] @ phi["trunk.0.weight"].T + phi["trunk.0.bias"]
        weights = {}
        for number, (name, shape) in enumerate(shapes.items()):
            head = f"head.{architecture}/{name}"
            flat = features[..., number, :] @ phi[f"{head}.weight"].T + phi[f"{head}.bias"]
            weights[name] = flat.reshape((*flat.shape[:-1], *shape))
        return weights

    def init_spectral(self, phi: Params, architectures: Mapping[str, Shapes], key: keys.Key) -> Params:
        return {}

    def power_step(self, phi: Params, spectral: Params, architectures: Mapping[str, Shapes]) -> Params:
        return {}


@dataclass(frozen=True)
class PFedLHN(PFedHN):
    """pFedLHN; `embeddings` are the coefficients of a client for each tensor of its network."""

    server: SGD | AdamW = AdamW(3e-4, weight_decay=1e-2, clip=30.0)  # the server's steps; its clip covers coefficients
    embeddings: Embeddings = Embeddings(dim=5, scale=0.002, optimizer="adam")  # coefficients of each tensor
    hidden_dim: int = 128  # width of what the heads read
    vector_dim: int = 40  # length of the learned vectors that coefficients mix; there are embedding_dim of them

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> Self:
        usual = {item.name: item.default for item in fields(PFedHN)}
        for name in ("num_hidden", "linear", "spectral_norm"):
            if getattr(self, name) != usual[name]:
                raise UserError(f"{name} = {getattr(self, name)!r} has no effect for pFedLHN; leave it out.")
        if self.embeddings.kind == "fixed":
            raise UserError("pFedLHN trains the coefficients of every client; embedding = 'fixed' is for pfedhn.")
        return super().for_clients(num_clients, descriptor_dim)

    @property
    def hypernetwork(self) -> Any:
        return LayerHypernetwork(self.rows.dim, self.vector_dim, self.hidden_dim)

    def init_row(self, shared: Shared, key: keys.Key, descriptor: Tensor | None) -> Row:
        return replace(self.rows, dim=self.hypernetwork.num_coefficients(shared.phi)).start(key, descriptor)
