"""The protocol every method follows: one round of federated learning, split where the network splits it.

    server                          |  wire  |             client i
    send(model, shared, row_i) -----|- received_i -->|  train(model, received_i, private_i, batches_i)
    receive(shared, groups)   <-----|-- update_i ----|  private_i stays here
                                    |- received_i -->|  personalize(model, received_i, private_i, batches_i)

Everything a method remembers is in one of three places: `shared` (server, for all), a `row` (server, for one client),
`private` (client, for itself). Each is a tree of tensors; `()` where a method has nothing to remember.
Axes: [C]lients of a cohort that share one architecture.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.sgd import Batches

Rule: TypeAlias = Literal["mean", "sum", "size"]
"""How the updates of several clients become one server step: their mean, their sum, or a mean weighted by data size."""


Shared = TypeVar("Shared")


Row = TypeVar("Row")


Private = TypeVar("Private")


class Group(NamedTuple):
    """What came back from the clients of one architecture in one round."""

    model: Model
    rows: Any  # [C, ...] at every leaf
    updates: Params  # [C, ...], received minus trained
    sizes: Tensor  # [C], training rows of each client


@runtime_checkable
class Algorithm(Protocol[Shared, Row, Private]):
    """One round, split at the wire. All functions are pure; only `receive` sees a cohort, the others one client."""

    @property
    def num_batches(self) -> int:
        """Minibatches that `train` consumes."""

    @property
    def num_personalize_batches(self) -> int:
        """Minibatches of training data that `personalize` consumes: 0 for most."""

    @property
    def communicates(self) -> bool:
        """Whether anything crosses the wire; a method that sends nothing trains every client in every round."""

    @property
    def usual_cohort_size(self) -> int:
        """Clients per round in the paper's comparison."""

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> "Algorithm[Shared, Row, Private]":
        """The same method with settings that depend on the size of the federation filled in."""

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Shared:
        """The server's memory at round 0, from one initial model per architecture."""

    def init_row(self, key: Key, descriptor: Tensor | None) -> Row:
        """The server's memory of ONE client; written in tensor operations, so that a million keys map at once."""

    def join_row(self, shared: Shared, rows: Row, descriptor: Tensor | None) -> Row:
        """The server's memory of a client that joins a trained federation whose rows [N, ...] are given."""

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        """ONE client's own memory, made on the client at first contact."""

    def send(self, model: Model, shared: Shared, row: Row) -> Params:
        """What ONE client receives. Never writes."""

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        """ONE client's local work: its update (received minus trained) and its new private memory."""

    def receive(self, shared: Shared, groups: Sequence[Group]) -> tuple[Shared, list[Row]]:
        """ONE server step from the updates of a cohort: new shared memory, new rows of each group."""

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        """The weights ONE client would use now: what every method is judged by."""


def client_weights(rule: Rule, sizes: Tensor) -> Tensor:
    """How much each of [C] updates counts in one server step, in float64: the weights' own precision comes last."""
    counts = sizes.double() if rule == "size" else torch.ones_like(sizes, dtype=torch.float64)
    return counts if rule == "sum" else counts / counts.sum()


def only_group(groups: Sequence[Group], method: str) -> Group:
    """Averaging methods add up weights of one shape; several architectures are refused."""
    if len(groups) != 1:
        names = ", ".join(group.model.name for group in groups)
        raise UserError(several_architectures(method, names))
    return groups[0]


def several_architectures(method: str, names: str) -> str:
    return (
        f"{method} averages weights of one shape and cannot serve the architectures {names} together; "
        "use pfedhn, or run it once per architecture."
    )
