"""pFedHN (Shamsian et al., ICML 2021, Algorithm 1): a hypernetwork generates each client's weights.

    server   theta_i  = h(v_i; phi)                                                    send
    client   theta~_i = K steps of SGD from theta_i (and from omega_i, which it keeps)  train
    server   (phi, v_i) -= lr * (d theta_i / d(phi, v_i))^T (theta_i - theta~_i)       receive

`receive` runs the small generator again instead of keeping a graph alive between calls: any order of replies, any
number of clients, over a network too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Self

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.algorithm import Algorithm, FineTuning, Group, Needs, Rule, Uses, weighted_updates
from pfedhn.algorithms.embeddings import Embeddings, Row, Rows
from pfedhn.algorithms.hypernetwork import Hypernetwork
from pfedhn.layers import Roles, assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, clip, pick, pull_back, subtract, zeros_like
from pfedhn.settings import Bounds, Fraction
from pfedhn.sgd import SGD, AdamW, Batches, Rate


class Shared(NamedTuple):
    phi: Params  # of the hypernetwork, which is for all clients
    velocity: Params
    square: Params  # second moments, only with AdamW
    spectral: Params  # left singular vectors, only with spectral_norm
    powers: Tensor  # of the matrix that moves an unchosen row by one step
    step: Tensor  # server steps so far


class Private(NamedTuple):
    head: Params  # omega_i
    velocity: Params


@dataclass(frozen=True)
class PFedHN(Algorithm[Shared, Row, Private]):
    """pFedHN; with `personal` layers, which stay with their client, pFedHN-PC."""

    server: SGD | AdamW = SGD(1e-2, 0.9, 1e-3, clip=50.0)  # the server's steps on phi; its clip covers embeddings too
    embeddings: Embeddings = Embeddings()  # the clients' embeddings: how they start, and the server's steps on them
    local_lr: Rate = 5e-3  # learning rate of a client's steps
    local_steps: int = 50  # K, a client's SGD steps in one round, each on a fresh minibatch
    local_momentum: Fraction = 0.9  # momentum of a client's steps; reset in every round, except for personal layers
    local_weight_decay: float = 5e-5  # weight decay of a client's steps
    local_clip: float | None = 50.0  # largest norm of a client's gradient, personal layers left out
    personal: tuple[str, ...] = ()  # layers that stay with the client; "last" is the last layer
    hidden_dim: int = 100  # width of the hypernetwork's trunk
    num_hidden: Annotated[int, Bounds(0, 1_000)] = 3  # [ReLU, Linear] pairs after the trunk's first layer
    linear: bool = False  # h(v; W) = W v: no trunk, no bias
    spectral_norm: bool = False  # divides every matrix of the hypernetwork by its largest singular value
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    @property
    def num_batches(self) -> int:
        return self.local_steps

    @property
    def local_sgd(self) -> SGD:
        return SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.local_sgd)

    @property
    def needs(self) -> Needs:
        return Needs(descriptors=self.embeddings.kind == "fixed")

    @property
    def uses(self) -> Uses:
        return Uses(published=("phi",), training=("velocity", "square"), embedding="embedding")

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> Self:
        return replace(self, embeddings=self.embeddings.for_clients(num_clients, descriptor_dim))

    @property
    def rows(self) -> Rows:
        return self.embeddings.rows(self.server)

    @property
    def hypernetwork(self) -> Hypernetwork:
        return Hypernetwork(self.rows.dim, self.hidden_dim, self.num_hidden, self.linear, self.spectral_norm)

    def roles(self, model: Model) -> Roles:
        return assign_roles(model, rest="generated", personal=self.personal)

    def generate(self, phi: Params, shared: Shared, model: Model, embedding: Tensor) -> Params:
        return self.hypernetwork.generate(phi, shared.spectral, model.name, self.roles(model).generated, embedding)

    def up_to_date(self, rows: Row, shared: Shared) -> Row:
        return self.rows.at(rows, shared.powers, shared.step)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: keys.Key) -> Shared:
        shapes = {name: self.roles(model).generated for name, model in models.items()}
        like = next(iter(next(iter(starts.values())).values()))
        phi = {name: value.to(like) for name, value in self.hypernetwork.init(shapes, key).items()}
        spectral = self.hypernetwork.init_spectral(phi, shapes, keys.fold(key, "spectral"))
        powers, step = self.rows.powers().to(like.device), torch.zeros((), dtype=torch.int32, device=like.device)
        return Shared(phi, zeros_like(phi), self.server.first_squares(phi), spectral, powers, step)

    def init_row(self, shared: Shared, key: keys.Key, descriptor: Tensor | None) -> Row:
        return self.rows.start(key, descriptor)

    def join_row(self, shared: Shared, rows: Row, descriptor: Tensor | None) -> Row:
        return self.rows.join(rows, shared.powers, shared.step, descriptor)

    def init_private(self, model: Model, start: Params, key: keys.Key) -> Private:
        head = pick(model.fresh(key), self.roles(model).personal) if self.personal else {}
        return Private(head, zeros_like(head))

    def send(self, model: Model, shared: Shared, row: Row) -> Params:
        return self.generate(shared.phi, shared, model, self.up_to_date(row, shared).embedding)

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        # The head's momentum survives between rounds and its gradient is not clipped; the generated part's is.
        start = received | private.head
        weights, velocity = self.local_sgd.run(model.loss, start, batches, private.velocity, clipped=received)
        return subtract(received, weights), Private(pick(weights, private.head), pick(velocity, private.head))

    def receive(self, shared: Shared, groups: Sequence[Group]) -> tuple[Shared, list[Row]]:
        rows = [self.up_to_date(group.rows, shared) for group in groups]
        shapes = {group.model.name: self.roles(group.model).generated for group in groups}
        updates = list(map(pick, weighted_updates(self.rule, groups), (shapes[group.model.name] for group in groups)))

        def theta(phi: Params, embeddings: list[Tensor]) -> list[Params]:
            return [self.generate(phi, shared, g.model, v) for g, v in zip(groups, embeddings, strict=True)]

        to_phi, to_rows = pull_back(theta, shared.phi, [row.embedding for row in rows], cotangent=updates)
        trained = {} if self.needs.descriptors else {f"row.{i}": value for i, value in enumerate(to_rows)}
        gradient, step = clip(to_phi | trained, self.server.clip), shared.step + 1
        phi, velocity, square = self.server.server_step(shared.phi, shared.velocity, shared.square, gradient, step)
        rows = [self.rows.moved(row, gradient[f"row.{i}"], step) if trained else row for i, row in enumerate(rows)]
        spectral = shared.spectral | self.hypernetwork.power_step(phi, shared.spectral, shapes)
        return shared._replace(phi=phi, velocity=velocity, square=square, spectral=spectral, step=step), rows

    def move_row(self, model: Model, shared: Shared, row: Row, update: Params) -> Row:
        row, generated = self.up_to_date(row, shared), pick(update, self.roles(model).generated)
        (to_row,) = pull_back(lambda v: self.generate(shared.phi, shared, model, v), row.embedding, cotangent=generated)
        return self.rows.moved(row, clip({"row": to_row}, self.server.clip)["row"], shared.step + 1)

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return received | private.head
