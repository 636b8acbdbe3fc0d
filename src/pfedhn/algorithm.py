"""The protocol every method follows: one round of federated learning, split where the network splits it.

    server                          |      wire      |             client i
    send(model, shared, row_i) -----|- received_i -->|  train(model, received_i, private_i, batches_i)
    receive(shared, groups)   <-----|-- update_i ----|  private_i stays here
    publish(model, shared, row_i) --|- received_i -->|  personalize(model, received_i, private_i, batches_i)

Everything a method remembers is in one of three places: `shared` (server, for all), a `row` (server, for one client),
`private` (client, for itself). Each is a tree of tensors; `()` if a method has nothing to remember. A moving average,
fine-tuning and the treatment of BatchNorm's statistics are no part of a method: `combinators` adds them to any.
Axes: [C]lients of a cohort that share one architecture.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, weighted
from pfedhn.settings import refuse_foreign
from pfedhn.sgd import SGD, Batches

Rule: TypeAlias = Literal["mean", "sum", "size"]
"""How the updates of several clients become one server step: their mean, their sum, or a mean weighted by data size."""

Shared = TypeVar("Shared")
Row = TypeVar("Row")
Private = TypeVar("Private")


LABEL_COUNTS = "label_counts"
"""The name under which `init_private` finds its client's label counts, beside the initial weights."""


class Extra(NamedTuple):
    """A tensor that a client sends beside its update, in the network's floating-point type."""

    shape: tuple[int, ...]
    max_norm: float  # the largest that a deployed server accepts


@dataclass(frozen=True)
class Extras:
    """What a method uses besides weights: named tensors on the wire, and label counts.

    Args:
        down: The shapes of the tensors that `send` adds to the weights. `train` and `personalize` receive them.
        up: The tensors that `train` adds to its update. `receive` gets them unchanged, as `Group.extras`.
        num_labels: The number of classes, if `init_private` needs its client's label counts. They are in `start`, as
            [num_labels] training examples per class. They stay on the client.
    """

    down: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    up: Mapping[str, Extra] = field(default_factory=dict)
    num_labels: int | None = None

    @property
    def num_values(self) -> tuple[int, int]:
        """How many numbers travel beside the weights, down and up."""
        return sum(map(math.prod, self.down.values())), sum(math.prod(extra.shape) for extra in self.up.values())

    @property
    def unprotected(self) -> list[str]:
        """What the method computes from a client's examples besides gradients; noise on gradients does not hide it."""
        return [*self.up, *([] if self.num_labels is None else [LABEL_COUNTS])]


NO_EXTRAS = Extras()


class Group(NamedTuple):
    """What came back from the clients of one architecture in one round."""

    model: Model
    rows: Any  # [C, ...] at every leaf
    updates: Params  # [C, ...], received minus trained
    sizes: Tensor  # [C], training examples of each client
    parts: Tensor | None = None  # [C], how much of each update is here, which is less where it comes late; None for all
    extras: Mapping[str, Tensor] = MappingProxyType({})  # [C, ...], as each client sent them, late ones too


class Needs(NamedTuple):
    """What a method needs from the engine that runs it."""

    communication: bool = True  # without it nothing crosses the wire, and every client trains in every round
    float32: bool = False  # tf32, in which a GPU computes products by default, would spoil what a client computes
    descriptors: bool = False  # `init_row` and `join_row` get a description of each client
    statistics: Literal["private", "shared"] = "private"  # BatchNorm's: each client keeps its own, or they are averaged
    statistics_batches: int = 0  # minibatches to recompute them from before a model is used; 0 for none


class Uses(NamedTuple):
    """Which fields of a method's memories serve what. For tuples, None stands for the whole memory."""

    published: tuple[str, ...] | None = None  # of `shared`: what `publish` reads and a moving average covers
    training: tuple[str, ...] = ()  # of `shared`: what `receive` alone reads; the best round is kept without it
    personal: tuple[str, ...] | None = ()  # of `private`: the client's own model, which a moving average covers too
    embedding: str | None = None  # of a row: the vector that describes its client to the server, if there is one


def _nothing_frozen(model: Model) -> Collection[str]:
    return ()


class FineTuning(NamedTuple):
    """How a client fine-tunes the model of its chosen round before it uses it; nothing is sent."""

    sgd: SGD
    num_steps: int = 0  # each on a minibatch of its training data
    frozen: Callable[[Model], Collection[str]] = _nothing_frozen  # parameters that stay as they are


@runtime_checkable
class Algorithm(Protocol[Shared, Row, Private]):
    """One round, split at the wire. A method writes only what it does; the rest has the bodies below.

    All functions are pure; only `receive` sees a cohort, the others one client.
    """

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Refuse a setting that the method does not have, as Python does, and name the right one."""
        refuse_foreign(cls, settings)
        return super().__new__(cls)

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Minibatches that `train` consumes."""

    @property
    def num_personalize_batches(self) -> int:
        """Minibatches of training data that `personalize` consumes."""
        return 0

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def uses(self) -> Uses:
        return Uses()

    @property
    def fine_tuning(self) -> FineTuning | None:
        """How a client fine-tunes; None for a method that does not say."""
        return None

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> Self:
        """The same method with settings that depend on the size of the federation filled in."""
        return self

    def frozen(self, model: Model) -> Collection[str]:
        """Parameters that nobody trains: they stay at their start, are stored once and never sent."""
        return ()

    def extras(self, model: Model) -> Extras:
        """What the method uses besides weights; their names must differ from those of the network's parameters."""
        return NO_EXTRAS

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Shared:
        """The server's memory at round 0, from one initial model per architecture."""
        return ()  # type: ignore[return-value]

    def init_row(self, shared: Shared, key: Key, descriptor: Tensor | None) -> Row:
        """The server's memory of ONE client at round 0, given its memory for all clients then.

        It is written in tensor operations, so that a million keys map at once.
        """
        return ()  # type: ignore[return-value]

    def join_row(self, shared: Shared, rows: Row, descriptor: Tensor | None) -> Row:
        """The server's memory of a client that joins a trained federation whose rows [N, ...] are given."""
        return ()  # type: ignore[return-value]

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        """ONE client's own memory, made on the client at first contact."""
        return ()  # type: ignore[return-value]

    def send(self, model: Model, shared: Shared, row: Row) -> Params:
        """What ONE client receives to train from. Never writes."""
        return {}

    def publish(self, model: Model, shared: Shared, row: Row) -> Params:
        """What ONE client gets to USE: for evaluation, for its own model, and to join a trained federation with."""
        return self.send(model, shared, row)

    @abstractmethod
    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        """ONE client's local work: its update (received minus trained) and its new private memory."""

    def receive(self, shared: Shared, groups: Sequence[Group]) -> tuple[Shared, list[Row]]:
        """ONE server step from the updates of a cohort: new shared memory, new rows of each group."""
        return shared, [group.rows for group in groups]

    def up_to_date(self, rows: Row, shared: Shared) -> Row:
        """Rows [N, ...] as of the server's last step, for a method whose every step moves the rows of all clients."""
        return rows

    def move_row(self, model: Model, shared: Shared, row: Row, update: Params) -> Row:
        """The row of ONE client that joins a trained federation, after its update; `shared` is frozen."""
        return row

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        """The weights ONE client would use now: what rounds are chosen by."""
        return received


def client_weights(rule: Rule, sizes: Tensor) -> Tensor:
    """How much each of [C] updates counts in one server step, in float64: the weights' own precision comes last."""
    counts = sizes.double() if rule == "size" else torch.ones_like(sizes, dtype=torch.float64)
    return counts if rule == "sum" else counts / counts.sum()


def weighted_updates(rule: Rule, groups: Sequence[Group]) -> list[Params]:
    """Every client's update, times how much it counts in one server step over all groups."""
    if sum(len(group.sizes) for group in groups) == 1:  # counts fully by every rule, and a round of one is compiled
        return [dict(group.updates) for group in groups]
    weights = client_weights(rule, torch.cat([group.sizes for group in groups]))
    parts = zip(groups, weights.split([len(group.sizes) for group in groups]), strict=True)
    return [weighted(group.updates, part) for group, part in parts]


def only_group(groups: Sequence[Group], method: str) -> Group:
    """The group of a method that adds up weights of one shape; several architectures are refused."""
    if len(groups) != 1:
        names = ", ".join(group.model.name for group in groups)
        raise several_architectures(method, names)
    return groups[0]


def several_architectures(method: str, names: str) -> UserError:
    return UserError(
        f"{method} averages weights of one shape and cannot serve the architectures {names} together; "
        "use pfedhn, or run it once per architecture."
    )
