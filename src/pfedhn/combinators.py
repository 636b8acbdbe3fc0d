"""Methods that wrap a method: a moving average of its models, fine-tuning, the treatment of BatchNorm's statistics.

    averaged(FedAvg(), 0.998)                            clients use a moving average (EMA) of the shared model
    fine_tuned(averaged(FedAvg(), 0.998), 50)            and take 50 SGD steps of fine-tuning before they use it
    with_statistics(FedAvg(), "shared")                  the server averages BatchNorm's statistics too

None of them changes what is trained, but for shared statistics. In files and on the command line they are settings of
every method: `averaging`, `adaptation_steps`, `statistics` and `statistics_batches`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.algorithm import Algorithm, Extras, FineTuning, Group, Needs, Uses
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pick, placeholder_like
from pfedhn.settings import INNER, ZeroOrMore, settings_in, values_of, with_values
from pfedhn.sgd import Batches, FractionRate, Rate

Method = Algorithm[Any, Any, Any]


@dataclass(frozen=True)
class _Wrapper(Algorithm[Any, Any, Any]):
    """A method that does everything as the method inside it; its subclasses change something."""

    method: Method = field(metadata=INNER)

    @property
    def uses(self) -> Uses:
        return self.method.uses

    @property
    def needs(self) -> Needs:
        return self.method.needs

    @property
    def num_batches(self) -> int:
        return self.method.num_batches

    @property
    def num_personalize_batches(self) -> int:
        return self.method.num_personalize_batches

    @property
    def fine_tuning(self) -> FineTuning | None:
        return self.method.fine_tuning

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> Self:
        return replace(self, method=self.method.for_clients(num_clients, descriptor_dim))

    def frozen(self, model: Model) -> Collection[str]:
        return self.method.frozen(model)

    def extras(self, model: Model) -> Extras:
        return self.method.extras(model)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Any:
        return self.method.init_shared(models, starts, key)

    def init_row(self, shared: Any, key: Key, descriptor: Tensor | None) -> Any:
        return self.method.init_row(shared, key, descriptor)

    def join_row(self, shared: Any, rows: Any, descriptor: Tensor | None) -> Any:
        return self.method.join_row(shared, rows, descriptor)

    def init_private(self, model: Model, start: Params, key: Key) -> Any:
        return self.method.init_private(model, start, key)

    def send(self, model: Model, shared: Any, row: Any) -> Params:
        return self.method.send(model, shared, row)

    def publish(self, model: Model, shared: Any, row: Any) -> Params:
        return self.method.publish(model, shared, row)

    def train(self, model: Model, received: Params, private: Any, batches: Batches) -> tuple[Params, Any]:
        return self.method.train(model, received, private, batches)

    def receive(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[Any]]:
        return self.method.receive(shared, groups)

    def up_to_date(self, rows: Any, shared: Any) -> Any:
        return self.method.up_to_date(rows, shared)

    def move_row(self, model: Model, shared: Any, row: Any, update: Params) -> Any:
        return self.method.move_row(model, shared, row, update)

    def personalize(self, model: Model, received: Params, private: Any, batches: Batches) -> Params:
        return self.method.personalize(model, received, private, batches)


class Average(NamedTuple):
    """A memory as the method trains it, and the moving average of a part of it."""

    newest: Any
    average: Any
    step: Tensor  # of the memory, so far


@dataclass(frozen=True)
class Averaged(_Wrapper):
    """Clients use a moving average of what the method trains; it enters no training.

    The server averages what it publishes. If a client's own model is not made of that (Local, Ditto, pFedMe), the
    client averages its own model, a step each time that it trains.
    """

    averaging: FractionRate | None = None  # how much of its past the average keeps at a step; none: the newest is used

    def __post_init__(self) -> None:
        if self.averaging is None:
            raise UserError("an averaged method needs averaging, how much of its past the average keeps, as 0.998.")
        if self.uses.published == () and self.uses.personal == ():
            name = type(innermost(self.method)).__name__
            raise UserError(
                f"the server of {name} keeps a model for each client, which no moving average covers; leave averaging "
                "out."
            )

    @property
    def averages_private(self) -> bool:
        return self.uses.personal != ()

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Average:
        device = next(iter(next(iter(starts.values())).values())).device
        return _first(self.method.init_shared(models, starts, key), self.uses.published, device)

    def init_private(self, model: Model, start: Params, key: Key) -> Any:
        private = self.method.init_private(model, start, key)
        device = next(iter(start.values())).device
        return _first(private, self.uses.personal, device) if self.averages_private else private

    def init_row(self, shared: Average, key: Key, descriptor: Tensor | None) -> Any:
        return self.method.init_row(self.used(shared), key, descriptor)

    def join_row(self, shared: Average, rows: Any, descriptor: Tensor | None) -> Any:
        return self.method.join_row(self.used(shared), rows, descriptor)

    def send(self, model: Model, shared: Average, row: Any) -> Params:
        return self.method.send(model, shared.newest, row)

    def publish(self, model: Model, shared: Average, row: Any) -> Params:
        return self.method.publish(model, self.used(shared), row)

    def train(self, model: Model, received: Params, private: Any, batches: Batches) -> tuple[Params, Any]:
        if not self.averages_private:
            return self.method.train(model, received, private, batches)
        update, newest = self.method.train(model, received, private.newest, batches)
        return update, _moved(private, newest, self.uses.personal, self.averaging)

    def receive(self, shared: Average, groups: Sequence[Group]) -> tuple[Average, list[Any]]:
        newest, rows = self.method.receive(shared.newest, groups)
        return _moved(shared, newest, self.uses.published, self.averaging), rows

    def up_to_date(self, rows: Any, shared: Average) -> Any:
        return self.method.up_to_date(rows, self.used(shared))

    def move_row(self, model: Model, shared: Average, row: Any, update: Params) -> Any:
        return self.method.move_row(model, self.used(shared), row, update)

    def personalize(self, model: Model, received: Params, private: Any, batches: Batches) -> Params:
        own = _with_part(private.newest, self.uses.personal, private.average) if self.averages_private else private
        return self.method.personalize(model, received, own, batches)

    def used(self, shared: Average) -> Any:
        """The method's shared memory with the average in the place of what is averaged."""
        return _with_part(shared.newest, self.uses.published, shared.average)


@dataclass(frozen=True)
class FineTuned(_Wrapper):
    """Clients take SGD steps from their model of the chosen round before they use it; nothing is sent.

    The steps are not used if they make the clients' validation score worse.
    """

    adaptation_steps: ZeroOrMore = 0  # SGD steps of fine-tuning that a client takes from its chosen model before use

    def __post_init__(self) -> None:
        if self.method.fine_tuning is None:
            name = type(innermost(self.method)).__name__
            raise UserError(f"{name} does not say how its clients fine-tune; give it a property fine_tuning.")

    @property
    def fine_tuning(self) -> FineTuning:
        tuning = self.method.fine_tuning
        assert tuning is not None
        return tuning._replace(num_steps=self.adaptation_steps)


@dataclass(frozen=True)
class WithStatistics(_Wrapper):
    """How the running statistics of BatchNorm layers are treated."""

    statistics: Literal["private", "shared"] = "private"  # BatchNorm's: each client's own, or averaged by the server
    statistics_batches: ZeroOrMore = 0  # minibatches to recompute BatchNorm's statistics from before use; 0 for none

    @property
    def needs(self) -> Needs:
        return self.method.needs._replace(statistics=self.statistics, statistics_batches=self.statistics_batches)

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> Self:
        if self.statistics == "shared" and not self.needs.communication:
            raise UserError("statistics = 'shared' has no effect for a method that sends nothing; leave it out.")
        return super().for_clients(num_clients, descriptor_dim)


WRAPPERS: tuple[type[_Wrapper], ...] = (FineTuned, WithStatistics, Averaged)  # the outermost first


def averaged(method: Method, averaging: Rate) -> Method:
    """Let clients use a moving average (EMA) of what a method trains.

    Args:
        method: Any method; training does not change.
        averaging: How much of its past the average keeps at a step, such as 0.998. It keeps less in the first steps.
    """
    return with_settings(method, {"averaging": averaging})


def fine_tuned(method: Method, num_steps: int) -> Method:
    """Let clients fine-tune the model of the chosen round before they use it, unless validation scores get worse.

    Args:
        method: Any method that says how its clients take SGD steps; training does not change.
        num_steps: SGD steps of each client, each on a fresh minibatch of its training data.
    """
    tuned = with_settings(method, {"adaptation_steps": num_steps})
    if num_fine_tuning_steps(tuned) != num_steps:
        name, taken = type(innermost(method)).__name__, num_fine_tuning_steps(tuned)
        raise UserError(
            f"{name} has its own setting adaptation_steps, but its property fine_tuning takes {taken} steps when it is "
            f"{num_steps}; let fine_tuning use it, or rename the setting."
        )
    return tuned


def with_statistics(
    method: Method, statistics: Literal["private", "shared"] = "private", num_batches: int = 0
) -> Method:
    """Choose how the running statistics of BatchNorm layers are treated.

    Args:
        method: Any method.
        statistics: Whether each client keeps its own, or the server averages them as it averages weights.
        num_batches: Minibatches from which each client recomputes them before it uses its model; 0 for none.
    """
    return with_settings(method, {"statistics": statistics, "statistics_batches": num_batches})


def num_fine_tuning_steps(method: Method) -> int:
    """How many steps a client fine-tunes for; 0 if it does not."""
    tuning = method.fine_tuning
    return 0 if tuning is None else tuning.num_steps


def layers(method: Method) -> Iterator[Method]:
    """A method and those inside it, the outermost first."""
    yield method
    if isinstance(method, _Wrapper):
        yield from layers(method.method)


def innermost(method: Method) -> Method:
    """The method inside all wrappers."""
    *_, inner = layers(method)
    return inner


def kinds_around(kind: type[Any]) -> tuple[type[Any], ...]:
    """A method's class with all wrappers that it may have: the owners of all its settings."""
    return *WRAPPERS, kind


def with_settings(method: Method, values: Mapping[str, Any]) -> Method:
    """The same method with other settings, by their full names; wrappers come and go with theirs."""
    *wrappers, inner = layers(method)
    if foreign := next((kind for kind in map(type, wrappers) if kind not in WRAPPERS), None):
        raise UserError(
            f"{foreign.__name__} wraps {type(inner).__name__} but is none of pfedhn's combinators, so it would be "
            f"dropped here; write it as a method that extends {type(inner).__name__}."
        )
    known, around = settings_in(type(inner)), {}
    for name, value in {**values_of(method), **values}.items():
        if name not in known:
            around[name] = value
    return wrapped(with_values(inner, {name: value for name, value in values.items() if name in known}), around)


def wrapped(method: Method, values: Mapping[str, Any]) -> Method:
    """A method inside the wrappers that these settings ask for."""
    for kind in reversed(WRAPPERS):
        own = {name: values[name] for name in settings_in(kind) if name in values}
        if any(isinstance(value, Tensor) or value != settings_in(kind)[name].default for name, value in own.items()):
            method = kind(method, **own)
    return method


def newest_memory(method: Method, shared: Any) -> Any:
    """The innermost method's shared memory as it is trained."""
    return shared.newest if _average_of(method) else shared


def used_memory(method: Method, shared: Any) -> Any:
    """The innermost method's shared memory as clients use it: averaged, if the method is."""
    average = _average_of(method)
    return average.used(shared) if average else shared


def memory_for_use(method: Method, shared: Any) -> Any:
    """The shared memory, in the same form, without what only training reads."""
    uses, newest = method.uses, newest_memory(method, shared)
    if uses.training:
        newest = newest._replace(**{name: placeholder_like(getattr(newest, name)) for name in uses.training})
    if not _average_of(method):
        return newest
    return shared._replace(newest=_with_part(newest, uses.published, placeholder_like(shared.average)))


def published_part(method: Method, shared: Any) -> Any:
    """What the innermost method publishes of its shared memory, and so what an average of it covers."""
    return _part(shared, method.uses.published)


def _average_of(method: Method) -> Averaged | None:
    return next((layer for layer in layers(method) if isinstance(layer, Averaged)), None)


def _part(memory: Any, names: tuple[str, ...] | None) -> Any:
    return memory if names is None else {key: part for name in names for key, part in getattr(memory, name).items()}


def _with_part(memory: Any, names: tuple[str, ...] | None, values: Any) -> Any:
    if names is None:
        return values
    if not names:
        return memory
    return memory._replace(**{name: pick(values, getattr(memory, name)) for name in names})


def _first(memory: Any, names: tuple[str, ...] | None, device: torch.device) -> Average:
    return Average(memory, _part(memory, names), torch.zeros((), dtype=torch.int32, device=device))


def _moved(before: Average, newest: Any, names: tuple[str, ...] | None, keep: Rate | None) -> Average:
    """One step of the average. It forgets faster at first, when the past is a random start."""
    count = before.step.double()
    share = torch.as_tensor(keep, dtype=torch.float64, device=count.device).minimum((1 + count) / (10 + count))

    def one(average: Tensor, value: Tensor) -> Tensor:
        return torch.lerp(value, average, share.to(value.dtype)) if value.is_floating_point() else value

    return Average(newest, pytree.tree_map(one, before.average, _part(newest, names)), before.step + 1)
