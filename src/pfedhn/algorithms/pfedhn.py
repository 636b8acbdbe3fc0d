"""pFedHN (Shamsian et al., ICML 2021, Algorithm 1): a hypernetwork writes each client's weights from its embedding.

pFedHN-PC if some layers stay with the client.

    server   theta_i  = h(v_i; phi)                                                    send
    client   theta~_i = K steps of SGD from theta_i (and from omega_i, which it keeps)  train
    server   (phi, v_i) -= lr * (d theta_i / d(phi, v_i))^T (theta_i - theta~_i)       receive

`receive` runs the small generator again instead of keeping a graph alive between calls: any order of replies, any
number of clients, over a network too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.algorithm import Group, Rule, client_weights
from pfedhn.algorithms.embeddings import Row, caught_up, step_powers
from pfedhn.algorithms.hypernetwork import Hypernetwork, default_embedding_dim
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.layers import layer_names
from pfedhn.model import Model
from pfedhn.params import Params, clip, pick, pull_back, subtract, zeros_like
from pfedhn.sgd import SGD, Batches, Rate


class Shared(NamedTuple):
    phi: Params
    velocity: Params
    spectral: Params  # left singular vectors, only with spectral_norm
    powers: Tensor  # of the matrix that moves an unchosen row by one step
    step: Tensor  # server steps so far


class Private(NamedTuple):
    head: Params  # omega_i
    velocity: Params


@dataclass(frozen=True)
class PFedHN:
    """pFedHN; with `personal` layers, pFedHN-PC.

    `embedding` "trained" learns v_i; "fixed" takes the federation's descriptor of each client instead.
    """

    lr: Rate = 1e-2
    local_lr: Rate = 5e-3
    embedding_lr: Rate | None = None  # lr
    local_steps: int = 50
    personal: tuple[str, ...] = ()  # layers that stay with the client; "last" is the last layer
    embedding: Literal["trained", "fixed"] = "trained"
    embedding_dim: int | None = None  # int(1 + clients / 4), at most 64
    hidden_dim: int = 100
    num_hidden: int = 3
    linear: bool = False
    spectral_norm: bool = False
    momentum: float = 0.9
    weight_decay: float = 1e-3
    local_momentum: float = 0.9
    local_weight_decay: float = 5e-5
    clip: float | None = 50.0
    local_clip: float | None = 50.0
    rule: Rule = "mean"

    usual_cohort_size = 1
    communicates = True
    num_personalize_batches = 0

    @property
    def num_batches(self) -> int:
        return self.local_steps

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> "PFedHN":
        if self.embedding == "fixed" and self.embedding_dim and descriptor_dim not in (None, self.embedding_dim):
            raise UserError(
                f"embedding_dim is {self.embedding_dim}, but the federation describes a client by {descriptor_dim} "
                "numbers; leave embedding_dim out."
            )
        usual = descriptor_dim if self.embedding == "fixed" else default_embedding_dim(num_clients)
        return self if self.embedding_dim else replace(self, embedding_dim=usual)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Shared:
        shapes = {name: self.generated(model) for name, model in models.items()}
        if not all(shapes.values()):
            raise UserError("personal names every layer, so nothing is left to generate; use local instead.")
        like = next(iter(next(iter(starts.values())).values()))
        phi = {name: value.to(like) for name, value in self.hypernetwork.init(shapes, key).items()}
        spectral = self.hypernetwork.init_spectral(phi, shapes, keys.fold(key, "spectral"))
        powers = step_powers(float(self.row_lr), self.momentum, self.weight_decay).to(like.device)
        return Shared(phi, zeros_like(phi), spectral, powers, torch.zeros((), dtype=torch.int32, device=like.device))

    def init_row(self, key: Key, descriptor: Tensor | None) -> Row:
        if self.embedding == "fixed":
            assert descriptor is not None
            value = descriptor
        else:
            assert self.embedding_dim is not None
            value = keys.normal(key, self.embedding_dim)
        return Row(value, torch.zeros_like(value), torch.zeros((), dtype=torch.int32, device=value.device))

    def join_row(self, shared: Shared, rows: Row, descriptor: Tensor | None) -> Row:
        # A commented-out sentence in the paper's source starts a new embedding at the mean of the trained ones.
        value = self.up_to_date(rows, shared).embedding.mean(0) if descriptor is None else descriptor
        return Row(value, torch.zeros_like(value), shared.step)

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        head = pick(model.fresh(key), self.kept(model)) if self.personal else {}
        return Private(head, zeros_like(head))

    def send(self, model: Model, shared: Shared, row: Row) -> Params:
        embedding = self.up_to_date(row, shared).embedding
        return self.hypernetwork.generate(shared.phi, shared.spectral, model.name, self.generated(model), embedding)

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        sgd = SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)
        # The head's momentum survives between rounds and its gradient is not clipped; the generated part's is.
        weights, velocity = sgd.run(
            model.loss, received | private.head, batches, velocity=private.velocity, clipped=received.keys()
        )
        return subtract(received, weights), Private(pick(weights, private.head), pick(velocity, private.head))

    def receive(self, shared: Shared, groups: Sequence[Group]) -> tuple[Shared, list[Row]]:
        rows = [self.up_to_date(group.rows, shared) for group in groups]
        weights = client_weights(self.rule, torch.cat([group.sizes for group in groups])).split(
            [len(group.sizes) for group in groups]
        )

        def generate(phi: Params, embeddings: list[Tensor]) -> list[Params]:
            return [
                self.hypernetwork.generate(phi, shared.spectral, g.model.name, self.generated(g.model), embedding)
                for g, embedding in zip(groups, embeddings, strict=True)
            ]

        cotangent = [
            {name: torch.einsum("c,c...->c...", part.to(value), value) for name, value in group.updates.items()}
            for group, part in zip(groups, weights, strict=True)
        ]
        to_phi, to_rows = pull_back(generate, shared.phi, [row.embedding for row in rows], cotangent=cotangent)
        if self.embedding == "fixed":
            to_rows = []
        gradient = clip(to_phi | {f"row.{i}": value for i, value in enumerate(to_rows)}, self.clip)
        step = shared.step + 1
        sgd = SGD(self.lr, self.momentum, self.weight_decay)
        moved = {name: sgd.step(value, shared.velocity[name], gradient[name]) for name, value in shared.phi.items()}
        phi, velocity = ({name: pair[i] for name, pair in moved.items()} for i in range(2))
        if self.embedding == "trained":
            embedding_sgd = SGD(self.row_lr, self.momentum, self.weight_decay)
            for i, row in enumerate(rows):
                value, pace = embedding_sgd.step(row.embedding, row.velocity, gradient[f"row.{i}"])
                rows[i] = Row(value, pace, step.expand_as(row.last_step))
        shapes = {group.model.name: self.generated(group.model) for group in groups}
        spectral = shared.spectral | self.hypernetwork.power_step(phi, shared.spectral, shapes)
        return Shared(phi, velocity, spectral, shared.powers, step), rows

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return received | private.head

    def up_to_date(self, rows: Row, shared: Shared) -> Row:
        return rows if self.embedding == "fixed" else caught_up(rows, shared.powers, shared.step)

    @property
    def row_lr(self) -> Rate:
        return self.lr if self.embedding_lr is None else self.embedding_lr

    @property
    def hypernetwork(self) -> Hypernetwork:
        assert self.embedding_dim is not None, "for_clients fills in the embedding dimension"
        return Hypernetwork(self.embedding_dim, self.hidden_dim, self.num_hidden, self.linear, self.spectral_norm)

    def kept(self, model: Model) -> frozenset[str]:
        return layer_names(model, self.personal, "personal")

    def generated(self, model: Model) -> dict[str, torch.Size]:
        kept = self.kept(model)
        return {name: shape for name, shape in model.shapes.items() if name not in kept}


def pfedhn_pc(**settings: object) -> PFedHN:
    """pFedHN-PC with its authors' rates: the last layer stays with the client."""
    return PFedHN(**({"lr": 5e-2, "personal": ("last",)} | settings))  # type: ignore[arg-type]
