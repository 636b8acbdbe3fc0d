"""The protocol every method follows: one round of federated learning, split where the network splits it.

    server                          |  wire  |             client i
    send(model, shared, row_i) -----|- received_i -->|  train(model, received_i, private_i, batches_i)
    receive(shared, groups)   <-----|-- update_i ----|  private_i stays here
                                    |- received_i -->|  personalise(model, received_i, private_i, batches_i)

Everything a method remembers is in one of three places: `shared` (server, for all), a `row` (server, for one client),
`private` (client, for itself). Each is a tree of tensors; `()` where a method has nothing to remember.
Axes: [C]lients of a cohort that share one architecture.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfedhn.keys import Key
from pfedhn.params import Params
from pfedhn.sgd import Batches

Factory: TypeAlias = Callable[[], nn.Module]
PerExample: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(outputs, y) -> one value per example."""

Rule: TypeAlias = Literal["mean", "sum", "size"]
"""How the updates of several clients become one server step: their mean, their sum, or a mean weighted by data size."""


@dataclass(frozen=True)
class Model:
    """An architecture: the shapes of its weights, its loss and its factory. Holds no trained weights."""

    name: str
    factory: Factory
    per_example_loss: PerExample
    per_example_metric: PerExample | None = None
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        _ = self.testing_module  # made now: a module cannot be made inside a vmap, a gradient or a trace

    @cached_property
    def training_module(self) -> nn.Module:
        return self._build(0).train()

    @cached_property
    def testing_module(self) -> nn.Module:
        return copy.deepcopy(self.training_module).eval()

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the trainable parameters. Frozen parameters and buffers are constants of the architecture."""
        return {name: value.shape for name, value in _trainable(self.training_module).items()}

    @cached_property
    def is_plain(self) -> bool:
        """Whether every parameter belongs to a linear layer, so that many clients batch into one product."""
        owners = [module for module in self.training_module.modules() if list(module.parameters(recurse=False))]
        return all(isinstance(module, nn.Linear) for module in owners)

    @cached_property
    def is_random(self) -> bool:
        """Whether the forward pass draws random numbers while training (dropout)."""
        return any(
            (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
            or (isinstance(rate := getattr(module, "dropout", None), float) and rate > 0)
            for module in self.training_module.modules()
        )

    @contextmanager
    def seeded(self, noise: Tensor) -> Iterator[None]:
        """Key the random numbers that the forward pass draws by itself, if it draws any."""
        if not self.is_random:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(noise) & ((1 << 63) - 1))
            yield

    def _build(self, key: Key) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(key) & ((1 << 63) - 1))
            return self.factory().to(self.device, self.dtype)

    def fresh(self, key: Key) -> Params:
        """Newly initialised weights, a function of the key alone."""
        return {name: value.detach() for name, value in _trainable(self._build(key)).items()}

    def loss(self, weights: Params, batch: Batches) -> Tensor:
        """Mean loss over the rows of one batch [B, ...] that the mask keeps."""
        outputs = functional_call(self.training_module, weights, (batch.x,))
        values = self.per_example_loss(outputs, batch.y)
        return torch.where(batch.mask, values, 0.0).sum() / batch.mask.sum()

    def outputs(self, weights: Params, x: Tensor) -> Any:
        return functional_call(self.testing_module, weights, (x,))

    def with_weights(self, weights: Params) -> nn.Module:
        """A plain module of this architecture that carries `weights`."""
        module = copy.deepcopy(self.testing_module)
        module.load_state_dict({name: value.detach() for name, value in weights.items()}, strict=False)
        return module


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


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
    def num_personalise_batches(self) -> int:
        """Minibatches of training data that `personalise` consumes: 0 for most."""

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

    def personalise(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        """The weights ONE client would use now: what every method is judged by."""


def client_weights(rule: Rule, sizes: Tensor) -> Tensor:
    """How much each of [C] updates counts in one server step, in float64: the weights' own precision comes last."""
    counts = sizes.double() if rule == "size" else torch.ones_like(sizes, dtype=torch.float64)
    return counts if rule == "sum" else counts / counts.sum()


def only_group(groups: Sequence[Group], method: str) -> Group:
    """Averaging methods add up weights of one shape; several architectures are refused."""
    if len(groups) != 1:
        names = ", ".join(group.model.name for group in groups)
        raise ValueError(several_architectures(method, names))
    return groups[0]


def several_architectures(method: str, names: str) -> str:
    return (
        f"{method} averages weights of one shape and cannot serve the architectures {names} together; "
        "use pfedhn, or run it once per architecture."
    )


def layer_names(model: Model, layers: Sequence[str], setting: str) -> frozenset[str]:
    """The parameters that belong to the named layers, e.g. "fc3" -> {"fc3.weight", "fc3.bias"}."""
    chosen = set()
    for layer in layers:
        if layer == "last":
            layer = last_layer(model)
        owned = {name for name in model.shapes if name == layer or name.startswith(layer + ".")}
        if not owned:
            known = ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in model.shapes))
            raise ValueError(f"{setting} names the layer {layer!r}, which {model.name} does not have; it has {known}.")
        chosen |= owned
    return frozenset(chosen)


def last_layer(model: Model) -> str:
    """The layer that holds the last parameter: the classifier of an ordinary network."""
    return list(model.shapes)[-1].rpartition(".")[0] or list(model.shapes)[-1]
