"""pFedHN (Shamsian et al., ICML 2021, Algorithm 1): a hypernetwork generates each client's weights.

    server   theta_i  = h(v_i; phi)                                                    send
    client   theta~_i = K steps of SGD from theta_i (and from omega_i, which it keeps)  train
    server   (phi, v_i) -= lr * (d theta_i / d(phi, v_i))^T (theta_i - theta~_i)       receive

It may generate some layers only (`generated`); the others are then shared by all clients, and the server moves them by
`shared_lr` times the mean update (1 is FedAvg), or they are frozen. Heads other than the dense one generate what is
added to shared layers. Clients can then start their local steps from the shared model alone (`local_start`): theta~_i
is K steps from there, the shared model learns as FedAvg's, and the hypernetwork what takes it to each client's end.

`receive` runs the small generator again instead of keeping a graph alive between calls: any order of replies, any
number of clients, over a network too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.adamw import AdamW
from pfedhn.algorithm import Algorithm, Group, Rule, weighted_updates
from pfedhn.algorithms.embeddings import AdamEmbeddings, Embeddings, Row, embedding_dim
from pfedhn.algorithms.hypernetwork import Head, Hypernetwork
from pfedhn.errors import UserError
from pfedhn.layers import Role, Roles, Shapes, assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, clip, nothing_like, pick, pull_back, subtract, weighted, zeros_like
from pfedhn.settings import Bounds, Fraction
from pfedhn.sgd import SGD, Batches, Rate, Share

JOINING_FACTORS = (1, 10, 100, 1_000, 10_000)  # of the embedding's rate, while a client joins


class Shared(NamedTuple):
    phi: Params
    velocity: Params
    square: Params  # second moments, only with AdamW
    spectral: Params  # left singular vectors, only with spectral_norm
    powers: Tensor  # of the matrix that moves an unchosen row by one step
    step: Tensor  # server steps so far
    common: Params  # layers that are one for all clients, by "network/parameter"


class Private(NamedTuple):
    head: Params  # omega_i
    velocity: Params


@dataclass(frozen=True)
class PFedHN(Algorithm[Shared, Row, Private]):
    """pFedHN; with `personal` layers, which stay with their client, pFedHN-PC."""

    lr: Rate = 1e-2  # learning rate of the server's steps on phi
    local_lr: Rate = 5e-3  # learning rate of a client's steps
    embedding_lr: Rate | None = None  # learning rate of the server's steps on the embeddings; lr by default
    local_steps: int = 50  # K, a client's SGD steps in one round, each on a fresh minibatch
    personal: tuple[str, ...] = ()  # layers that stay with the client; "last" is the last layer
    generated: tuple[str, ...] = ()  # layers that the hypernetwork generates; all that are not personal by default
    fixed_layers: tuple[str, ...] = ()  # layers that stay at their random start, the same for all, also in adaptation
    rest: Literal["shared", "frozen"] = "shared"  # what the other layers are, if some are named as generated
    shared_lr: Rate = 0.5  # learning rate of the server's steps on shared layers; 1 is FedAvg
    head: Head = "dense"  # the others generate additions to shared layers, "low-rank" and "chunked" for large targets
    local_start: Literal["personal", "shared"] = "personal"  # where local steps start: h(v_i), or what that is added to
    rank: int = 4  # rank of what a low-rank head adds to a matrix
    chunk_size: int = 2_000  # weights that a chunked head generates at a time
    embedding: Literal["trained", "fixed"] = "trained"  # "fixed": the federation's descriptors, or class shares
    embedding_dim: int | None = None  # length of an embedding; none: int(1 + clients / 4), at most 64
    hidden_dim: int = 100  # width of the hypernetwork's trunk
    num_hidden: Annotated[int, Bounds(0, 1_000)] = 3  # [ReLU, Linear] pairs after the trunk's first layer
    linear: bool = False  # h(v; W) = W v: no trunk, no bias
    spectral_norm: bool = False  # divides every matrix of the hypernetwork by its largest singular value
    optimizer: Literal["sgd", "adamw"] = "sgd"  # optimizer of the server's steps on phi; clients use SGD
    momentum: Fraction = 0.9  # momentum of the server's steps; AdamW: beta_1
    weight_decay: Rate = 1e-3  # weight decay of the server's steps; embeddings decay, chosen or not; AdamW: decoupled
    embedding_optimizer: Literal["sgd", "adam"] = "sgd"  # with Adam, only those of chosen clients move
    embedding_scale: Rate = 1.0  # initial standard deviation of the embeddings
    embedding_momentum: Fraction | None = None  # momentum of the steps on the embeddings; that of phi by default
    embedding_weight_decay: Rate | None = None  # weight decay of the embeddings; that of phi by default
    averaging: Share | None = None  # decay of the moving average that is served; None serves the newest weights
    local_momentum: Fraction = 0.9  # momentum of a client's steps; reset in every round, except for personal layers
    local_weight_decay: float = 5e-5  # weight decay of a client's steps
    clip: float | None = 50.0  # largest norm of the server's gradient, over phi and embeddings together
    local_clip: float | None = 50.0  # largest norm of a client's gradient, personal layers left out
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)
    statistics_batches: int = 0  # minibatches to recompute BatchNorm's statistics from before use; 0 for none
    adaptation_steps: int = 0  # SGD steps that a client takes from its chosen model before using it
    usual_cohort_size = 1

    @property
    def num_batches(self) -> int:
        return self.local_steps

    @property
    def local_sgd(self) -> SGD:
        return SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)

    @property
    def needs_descriptors(self) -> bool:
        return self.embedding == "fixed"

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> "PFedHN":
        if self.head != "dense" and (self.linear or self.spectral_norm):
            raise UserError(f"head = {self.head!r} goes with neither linear nor spectral_norm; leave them out.")
        self._refuse_without_effect()
        dim = embedding_dim(self.embedding_dim, num_clients, descriptor_dim, self.needs_descriptors)
        return replace(self, embedding_dim=dim)

    def _refuse_without_effect(self) -> None:
        """Who sets what changes nothing has something else in mind."""
        has_common = self.head != "dense" or (self.generated and self.rest == "shared")
        shared = "rest='shared'" if self.generated else "generated=('last',)"
        for name, has_effect, needed in (
            ("rest", self.generated, "layers that are generated, as generated=('last',)"),
            ("shared_lr", has_common, f"layers that are shared: head='added', 'low-rank' or 'chunked', or {shared}"),
            ("fixed_layers", not (self.generated and self.rest == "frozen"), "rest='shared'"),
            ("local_start", self.head != "dense", "head='added', 'low-rank' or 'chunked'"),
            ("rank", self.head == "low-rank", "head='low-rank'"),
            ("chunk_size", self.head == "chunked", "head='chunked'"),
        ):
            value = getattr(self, name)
            if not has_effect and value != getattr(PFedHN, name):
                raise UserError(f"{name} = {value!r} has no effect without {needed}; give that too, or leave it out.")

    def roles(self, model: Model) -> Roles:
        rest: Role = self.rest if self.generated else "generated"
        fixed = () if model.frozen else self.fixed_layers  # they are no parameters of a model that has them frozen
        layers = {"personal": self.personal, "generated": self.generated, "frozen": fixed}
        return assign_roles(model, rest=rest, settings={"frozen": "fixed_layers"}, **layers)

    def frozen(self, model: Model) -> Collection[str]:
        return self.roles(model).frozen

    def common(self, model: Model) -> Shapes:
        """The parameters that have a part which is one for all clients."""
        roles = self.roles(model)
        return roles.shared if self.head == "dense" else roles.shared | roles.generated

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: keys.Key) -> Shared:
        shapes = {name: self.roles(model).generated for name, model in models.items()}
        like = next(iter(next(iter(starts.values())).values()))
        phi = {name: value.to(like) for name, value in self.hypernetwork.init(shapes, key).items()}
        spectral = self.hypernetwork.init_spectral(phi, shapes, keys.fold(key, "spectral"))
        step = torch.zeros((), dtype=torch.int32, device=like.device)
        square = zeros_like(phi) if self.optimizer == "adamw" else {}
        common = {f"{n}/{part}": starts[n][part] for n, model in models.items() for part in self.common(model)}
        return Shared(phi, zeros_like(phi), square, spectral, self.embeddings.powers().to(like.device), step, common)

    def init_row(self, key: keys.Key, descriptor: Tensor | None) -> Row:
        return self.embeddings.start(key, descriptor)

    def join_row(self, shared: Shared, rows: Row, descriptor: Tensor | None) -> Row:
        return self.embeddings.join(rows, shared.powers, shared.step, descriptor)

    def init_private(self, model: Model, start: Params, key: keys.Key) -> Private:
        head = pick(model.fresh(key), self.roles(model).personal) if self.personal else {}
        return Private(head, zeros_like(head))

    def send(self, model: Model, shared: Shared, row: Row) -> Params:
        return self.publish(model, shared, row) if self.local_start == "personal" else self.base(model, shared)

    def base(self, model: Model, shared: Shared) -> Params:
        """What is one for all clients."""
        return {name: shared.common[f"{model.name}/{name}"] for name in self.common(model)}

    def publish(self, model: Model, shared: Shared, row: Row) -> Params:
        generated = self.generate(shared.phi, shared, model, self.up_to_date(row, shared).embedding)
        common = self.base(model, shared)
        return generated | {name: generated[name] + x if name in generated else x for name, x in common.items()}

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        # The head's momentum survives between rounds and its gradient is not clipped; the generated part's is.
        start, clipped = received | private.head, received.keys()
        weights, velocity = self.local_sgd.run(model.loss, start, batches, private.velocity, clipped)
        return subtract(received, weights), Private(pick(weights, private.head), pick(velocity, private.head))

    def receive(self, shared: Shared, groups: Sequence[Group]) -> tuple[Shared, list[Row]]:
        rows = [self.up_to_date(group.rows, shared) for group in groups]

        def generate(phi: Params, embeddings: list[Tensor]) -> list[Params]:
            pairs = zip(groups, embeddings, strict=True)
            return [self.generate(phi, shared, group.model, embedding) for group, embedding in pairs]

        embeddings, updates = [row.embedding for row in rows], weighted_updates(self.rule, groups)
        to_ends = updates  # from what a client is served to where its local steps ended, negative
        if self.local_start == "shared":  # they did not start from what is added
            made = zip(groups, generate(shared.phi, embeddings), strict=True)
            added = [(g, part if g.parts is None else weighted(part, g.parts)) for g, part in made]
            ended = [g._replace(updates={name: g.updates[name] + x for name, x in part.items()}) for g, part in added]
            to_ends = weighted_updates(self.rule, ended)
        generated = [pick(part, self.roles(g.model).generated) for g, part in zip(groups, to_ends, strict=True)]
        to_phi, to_rows = pull_back(generate, shared.phi, embeddings, cotangent=generated)
        trained = [] if self.needs_descriptors else to_rows
        gradient = clip(to_phi | {f"row.{i}": value for i, value in enumerate(trained)}, self.clip)
        step = shared.step + 1
        phi, velocity, square = self.server_step(shared, gradient, step)
        if trained:
            rows = [self.embeddings.moved(row, gradient[f"row.{i}"], step) for i, row in enumerate(rows)]
        shapes = {group.model.name: self.roles(group.model).generated for group in groups}
        spectral = shared.spectral | self.hypernetwork.power_step(phi, shared.spectral, shapes)
        moved = {
            f"{group.model.name}/{name}": part[name].sum(0)
            for group, part in zip(groups, updates, strict=True)
            for name in self.common(group.model)
        }
        common = {name: x - self.shared_lr * moved[name] if name in moved else x for name, x in shared.common.items()}
        return Shared(phi, velocity, square, spectral, shared.powers, step, common), rows

    def server_step(self, shared: Shared, gradient: Params, number: Tensor) -> tuple[Params, Params, Params]:
        """phi and its moments after one step of the server's optimizer."""
        if self.optimizer == "adamw":
            adamw = AdamW(self.lr, self.momentum, weight_decay=self.weight_decay)
            return adamw.step_all(shared.phi, shared.velocity, shared.square, gradient, number)
        return *SGD(self.lr, self.momentum, self.weight_decay).step_all(shared.phi, shared.velocity, gradient), {}

    def averaged_part(self, shared: Shared) -> Params:
        return shared.phi | shared.common

    def with_averaged_part(self, shared: Shared, average: Params) -> Shared:
        return shared._replace(phi=pick(average, shared.phi), common=pick(average, shared.common))

    def for_use(self, shared: Shared) -> Shared:
        return shared._replace(velocity=nothing_like(shared.velocity), square=nothing_like(shared.square))

    def move_row(self, model: Model, shared: Shared, row: Row, update: Params) -> Row:
        row = self.up_to_date(row, shared)
        if self.needs_descriptors:
            return row
        generated = pick(update, self.roles(model).generated)
        (gradient,) = pull_back(
            lambda v: self.generate(shared.phi, shared, model, v), row.embedding, cotangent=generated
        )
        return self.embeddings.moved(row, clip({"row": gradient}, self.clip)["row"], shared.step + 1)

    def choices_for_joining(self) -> list[dict[str, Any]]:
        # In training a client's weights move mostly by phi. While a client joins, phi stands still and its embedding
        # has to go all the way alone: how much faster it must be depends on the run.
        if self.needs_descriptors or not float(self.embeddings.lr):
            return [{}]
        return [{"embedding_lr": float(self.embeddings.lr) * factor} for factor in JOINING_FACTORS]

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return received | private.head

    def generate(self, phi: Params, shared: Shared, model: Model, embedding: Tensor) -> Params:
        return self.hypernetwork.generate(phi, shared.spectral, model.name, self.roles(model).generated, embedding)

    def up_to_date(self, rows: Row, shared: Shared) -> Row:
        return self.embeddings.at(rows, shared.powers, shared.step)

    @property
    def embeddings(self) -> Embeddings:
        assert self.embedding_dim is not None, "for_clients fills in the embedding dimension"
        lr = self.lr if self.embedding_lr is None else self.embedding_lr
        momentum = self.momentum if self.embedding_momentum is None else self.embedding_momentum
        decay = self.weight_decay if self.embedding_weight_decay is None else self.embedding_weight_decay
        kind = Embeddings if self.embedding_optimizer == "sgd" else AdamEmbeddings
        return kind(self.embedding_dim, lr, momentum, decay, self.embedding_scale, self.needs_descriptors)

    @property
    def hypernetwork(self) -> Hypernetwork:
        dim, form = self.embeddings.dim, (self.hidden_dim, self.num_hidden, self.linear, self.spectral_norm)
        return Hypernetwork(dim, *form, self.head, self.rank, self.chunk_size)
