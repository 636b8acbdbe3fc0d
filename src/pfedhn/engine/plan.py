"""A plan: a run without its clients' data. Simulations, loaded runs, servers and parties have one.

Axes: [N] clients.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithm import Algorithm, Extras
from pfedhn.data.batches import cohort, draw_examples
from pfedhn.data.description import Description
from pfedhn.data.federation import Federation
from pfedhn.engine.executors import EXECUTORS
from pfedhn.engine.network import with_frozen
from pfedhn.engine.robust import Past, Robust, guarded, refuse_unfit, stepping
from pfedhn.engine.round import Exchange, Kept, Reply, Returned
from pfedhn.engine.state import Memories, PrivateTable, Schedule, Select
from pfedhn.engine.transform import FULL, Transform
from pfedhn.errors import UserError
from pfedhn.model import Model
from pfedhn.models import squared_error
from pfedhn.params import Params, copy, in_dtype, stack, take
from pfedhn.privacy import Privacy, refuse_leaks
from pfedhn.sgd import Batches

NO_EXAMPLES = (
    "a run that was loaded does not have its clients' examples; give those that are needed, e.g. as "
    "personal_model(client, data=(x, y))."
)


class Joining(NamedTuple):
    """What a trained federation gives to clients that join it."""

    shared: Any
    rows: Any  # [N, ...] of the clients that trained
    starts: Mapping[str, Params]  # the initial models of its run


class Form(NamedTuple):
    """Trees with the names, shapes and types of a server's memories, and no values."""

    shared: Any
    row: Any  # of one client


@dataclass(frozen=True, eq=False)
class Plan:
    """One method, its networks and a schedule from one seed, and who the clients are; their data are elsewhere.

    Args:
        algorithm: The method, for as many clients as there are.
        models: The target networks by name.
        clients: Who the clients are and what their examples look like.
        schedule: How long the run is, and how often it is evaluated.
        seed: Of the run.
        executor: How the clients' steps are computed.
        starts: Weights of each network that every client starts from, of an earlier run; fresh ones by default.
        upload: What a client does to its update.
        download: What the server does to the weights that it sends.
        joins: The trained federation that these clients join; its shared memory is frozen.
        resize_every: Communication steps after which every client goes on to the next network.
        privacy: What clients do to keep their data from those who see their updates.
        in_flight: How many clients are at work at once in a run that does not wait for its cohorts; None waits.
        joining_rounds: How many rounds a party of a network takes part in that joins when training has ended.
        robust: The server's defense against hostile updates; None takes every update as it is.
    """

    algorithm: Algorithm[Any, Any, Any]
    models: Mapping[str, Model]
    clients: Description
    schedule: Schedule
    seed: int = 0
    executor: str = "auto"
    starts: Mapping[str, Params] | None = None
    upload: Transform = FULL
    download: Transform = FULL
    joins: Joining | None = None
    resize_every: int | None = None
    privacy: Privacy | None = None
    in_flight: int | None = None
    joining_rounds: int = 20
    robust: Robust | None = None

    def __post_init__(self) -> None:
        size, num_clients = self.schedule.cohort_size, self.num_clients
        if not 1 <= size <= num_clients and self.algorithm.needs.communication:
            raise UserError(f"a cohort of {size} cannot be drawn from {num_clients} clients.")
        if self.schedule.steps < 1 or self.schedule.evaluate_every < 1 or self.schedule.batch_size < 1:
            raise UserError("steps, evaluate_every and batch_size must be at least 1.")
        if self.schedule.patience is not None and self.resize_every is not None:
            raise UserError("`patience` and `resize_every` cannot be given together; leave one of them out.")
        if self.download.init_state({}) != ():
            raise UserError("a transform that remembers cannot be used for downloads; use it for uploads.")
        has_statistics = any(model.statistics for model in self.models.values())
        self._check_extras()
        unprotected = sorted({name for extras in self.extras.values() for name in extras.unprotected})
        refuse_leaks(self.privacy, has_statistics, self.algorithm.needs.descriptors, unprotected)
        if self.robust is not None:
            has_rows, needs = bool(pytree.tree_leaves(self.form.row)), self.algorithm.needs
            method = self.exchange.method_name
            refuse_unfit(self.robust, method, num_clients, self.clients_per_round, needs.communication, has_rows)
        known = ("auto", *EXECUTORS, "captured")
        if self.executor not in known:
            raise UserError(f"there is no executor {self.executor!r}; there are {', '.join(known)}.")

    def _check_extras(self) -> None:
        for name, extras in self.extras.items():
            model, names = self.models[name], {*extras.down, *extras.unprotected}
            if taken := sorted(names & {*model.shapes, *model.statistics}):
                raise UserError(f"the extra {taken[0]!r} has the name of a parameter of {name}; give it another name.")
            for extra, (_, bound) in extras.up.items():
                if not 0 < bound < math.inf:
                    raise UserError(f"the extra {extra!r} has the norm bound {bound}; it must be above 0 and finite.")

    @cached_property
    def extras(self) -> dict[str, Extras]:
        """What travels beside the weights of each network: names, shapes and norm bounds."""
        return {name: self.algorithm.extras(model) for name, model in self.models.items()}

    @property
    def num_clients(self) -> int:
        return self.clients.clients

    @cached_property
    def loss_unit(self) -> float:
        """What a loss is multiplied by for reports: a squared error of scaled labels is brought to their own units."""
        table = None if self.clients.reading is None else self.clients.reading.table
        is_squared = all(model.per_example_loss is squared_error for model in self.models.values())
        return 1.0 if table is None or table.target is None or not is_squared else table.target[1] ** 2

    @property
    def exchange(self) -> Exchange:
        """The two halves of every round."""
        return Exchange(self.algorithm, self.seed, self.upload, self.download, self.joins is not None)

    @property
    def stepping(self) -> Exchange:
        """The exchange that takes the server's step from what `guarded` returns."""
        return stepping(self.exchange, self.robust)

    def guarded(
        self, past: Past, returned: Sequence[Returned], names: Sequence[Sequence[str]]
    ) -> tuple[Sequence[Returned], Past]:
        """The replies of a step as they count, by the names of each group's parties, and what the defense remembers."""
        if self.robust is None:
            return returned, past
        return guarded(self.robust, self.exchange, past, returned, names, self.num_clients)

    @property
    def clients_per_round(self) -> int:
        return self.schedule.clients_per_round(self.num_clients, self.algorithm.needs.communication)

    def cohort(self, number: int) -> list[int]:
        """The clients that take part in a round."""
        return cohort(keys.fold(self.seed, "rounds"), number, self.num_clients, self.clients_per_round).tolist()

    @property
    def num_rounds(self) -> int:
        return self.schedule.num_rounds(self.num_clients, self.algorithm.needs.communication)

    @property
    def fine_tunes(self) -> bool:
        return self.exchange.fine_tunes

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.models.values())).dtype

    @property
    def device(self) -> torch.device:
        return torch.device(next(iter(self.models.values())).device)

    @property
    def descriptor_dim(self) -> int:
        """How many numbers describe a client to the method; 0 if it asks for none."""
        return (self.clients.descriptor_dim or 0) if self.algorithm.needs.descriptors else 0

    @property
    def has_metric(self) -> bool:
        return all(model.per_example_metric is not None for model in self.models.values())

    def model_of(self, client: int) -> Model:
        if self.clients.architectures is None:
            return next(iter(self.models.values()))
        return self.models[self.clients.architectures[client]]

    def identity(self, client: int) -> int:
        """The number that keys a client's draws."""
        return self.clients.identity(client)

    def initial_models(self) -> dict[str, Params]:
        """The weights of each network before the first round, which everybody makes from the seed."""
        if self.joins is not None:
            return dict(self.joins.starts)
        return copy(self._fresh_models) if self.starts is None else dict(self.starts)

    @cached_property
    def _fresh_models(self) -> dict[str, Params]:
        return {name: model.fresh(keys.fold(self.seed, "init")) for name, model in self.models.items()}

    def first_row(self, shared: Any, key: keys.Key, descriptor: Tensor | None) -> Any:
        """The server's memory of ONE client before its first round; `shared` is its memory for all at round 0."""
        memory = self.exchange.memory_of_method(shared)
        return in_dtype(self.algorithm.init_row(memory, key, descriptor), self.dtype)

    def joining_row(self, shared: Any, rows: Any, descriptor: Tensor | None) -> Any:
        """The server's memory of ONE client that joins; `shared` and `rows` [N, ...] are of the trained federation."""
        memory = self.exchange.memory_of_method(shared)
        return in_dtype(self.algorithm.join_row(memory, rows, descriptor), self.dtype)

    def descriptors_of(self, data: Federation) -> Tensor:
        """[N, D]: what describes clients to the method; of no width if it asks for nothing."""
        if not self.algorithm.needs.descriptors:
            return torch.zeros(data.num_clients, 0, dtype=self.dtype, device=self.device)
        values = data.descriptors
        if values is None:  # class shares; new clients may lack the last classes
            shares = data.class_shares
            values = pad(shares, (0, max(0, self.descriptor_dim - shares.shape[1])))
        shape, usual = tuple(values.shape[1:]), (self.descriptor_dim,)
        if shape != usual:
            raise UserError(f"the descriptor has the shape {shape}; this run's have {usual}.")
        return values.to(self.device, self.dtype)

    def private_tables(self, shared: Any, rows: Any) -> dict[str, PrivateTable]:
        """Empty tables of what clients keep; of the server's memories, only the form counts."""

        def make(model: Model) -> Callable[[int], Any]:
            received = cache(lambda: self.exchange.sent(model, shared, take(rows, 0)))

            def first_contact(client: int) -> Kept:
                start, num_labels = self.initial_models()[model.name], self.extras[model.name].num_labels
                counts = None if num_labels is None else self.label_counts(client, num_labels)
                return self.exchange.first_contact(model, start, received(), self.identity(client), counts)

            return first_contact

        return {name: PrivateTable(make(model)) for name, model in self.models.items()}

    def label_counts(self, client: int, num_labels: int) -> Tensor | None:
        """The label counts of a client; None without its examples."""
        return None

    @cached_property
    def form(self) -> Form:
        """The form of the server's memories, by which stored ones are read; nothing is drawn."""
        starts = self.initial_models()
        _ = [(model.shapes, model.statistics, model.constants) for model in self.models.values()]  # cached with values
        with FakeTensorMode(allow_non_fake_inputs=True):
            shared = self.exchange.init_shared(self.models, starts, 0)
            descriptor = torch.zeros(self.descriptor_dim, dtype=self.dtype, device=self.device)
            row = self.first_row(shared, torch.zeros((), dtype=torch.int64, device=self.device), descriptor)
        return Form(shared, row)

    def form_of_work(self, memories: Memories, client: int) -> tuple[Reply, Kept]:
        """What a client at work has, all [1, ...]; only the form counts."""
        model = self.model_of(client)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        kept = memories.private[model.name].make(client)
        offer = self.exchange.offer(model, memories.shared, take(memories.rows, client), zero, zero)
        update = self.exchange.update_form(model, self.download.decode(offer.weights, model.dtype))
        return stack([self.exchange.reply(offer, update, kept, zero, zero)])

    def joining(self, clients: Description, memories: Memories, rounds: int, seed: int) -> "Plan":
        """The plan by which clients join this run as it stands in `memories`: all of them train in every round."""
        count = clients.clients
        schedule = replace(self.schedule, steps=rounds * count, cohort_size=count, evaluate_every=count, patience=None)
        joins = Joining(memories.shared, memories.rows, self.initial_models())
        values = {name: getattr(self, name) for name in Plan.__dataclass_fields__}
        return Plan(
            **values
            | {"clients": clients, "schedule": schedule, "seed": seed, "joins": joins}
            | {"in_flight": None, "robust": None}
        )

    def embeddings(self, memories: Memories) -> Tensor | None:
        """[N, D]: what the server knows of each client by now; None if the method has no embeddings."""
        name = self.algorithm.uses.embedding
        if name is None:
            return None
        rows = self.algorithm.up_to_date(memories.rows, self.exchange.memory_of_method(memories.shared))
        embeddings: Tensor = getattr(rows, name)
        return embeddings

    def personal_weights(
        self,
        memories: Memories,
        model: Model,
        client: int,
        number: int,
        is_adapted: bool = False,
        data: Federation | None = None,
    ) -> Params:
        """The weights that a client would use after round `number`, whose memories are given.

        Args:
            memories: After that round.
            model: The client's network.
            client: Its place.
            number: Of the round.
            is_adapted: Whether it takes its own adaptation steps first.
            data: A federation of this client alone, for a method that trains on its examples.
        """
        key = self.personalize_key(number)
        batches = self.batches_of(client, key, self.exchange.num_personal_batches(model, is_adapted), data)
        table, num_labels = memories.private[model.name], self.extras[model.name].num_labels
        is_new = client not in table.slots
        if is_new and num_labels is not None and self.label_counts(client, num_labels) is None:
            raise UserError(NO_EXAMPLES)
        kept = take(table.take([client]), 0)
        noise = keys.fold(key, "noise", torch.tensor([self.identity(client)], device=self.device))
        with model.seeded(take(torch.as_tensor(noise), 0)):
            return self.exchange.personal_weights(
                model, memories.shared, take(memories.rows, client), kept, batches, is_adapted
            )

    def batches_of(self, client: int, key: keys.Key, num_batches: int, data: Federation | None = None) -> Batches:
        """Minibatches [K, B, ...] of ONE client, drawn as among the others, from its own examples in `data`."""
        # As wide a minibatch as among the others: with another width, sums round otherwise.
        width = min(self.schedule.batch_size, self.clients.largest_train_size)
        if data is not None:
            identity = torch.tensor([self.identity(client)], device=self.device)
            first, steps = torch.zeros_like(identity), torch.arange(num_batches, device=self.device)
            numbers, mask = draw_examples(data.splits["train"], first, key, steps, width, identity)
            return take(Batches(*data.examples(numbers), mask), 0)
        if num_batches:
            raise UserError(NO_EXAMPLES)
        clients, shape = self.clients, (0, width)
        dtype: torch.dtype = getattr(torch, clients.dtype)
        dtype = self.dtype if dtype.is_floating_point else dtype
        return Batches(
            torch.zeros(*shape, *clients.shape, dtype=dtype, device=self.device),
            torch.zeros(*shape, *clients.label_shape, dtype=getattr(torch, clients.label_dtype), device=self.device),
            torch.zeros(shape, dtype=torch.bool, device=self.device),
        )

    def personalize_key(self, number: int) -> keys.Key:
        return self.exchange.personalize_key(number)


def make_plan(
    algorithm: Algorithm[Any, Any, Any],
    models: Mapping[str, Model],
    clients: Description,
    *,
    steps: int,
    batch_size: int,
    evaluate_every: int,
    cohort_size: int | None = None,
    select: Select = "metric",
    patience: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Plan:
    """Assemble a plan, for Python, experiments, stored runs and networks alike; other settings as in `Plan`.

    Args:
        algorithm: The method; settings that depend on the size of the federation are filled in.
        cohort_size: Clients per round; the method's usual number by default.
        select: What chooses the round on validation.
        patience: Steps without a better validation score after which training stops; it goes on by default.
    """
    algorithm = algorithm.for_clients(clients.clients, clients.descriptor_dim)
    if cohort_size is None:
        cohort_size = Schedule.default_cohort_size(algorithm, clients.clients)
    frozen = {name: with_frozen(model, algorithm, seed) for name, model in models.items()}
    schedule = Schedule(steps, cohort_size, batch_size, evaluate_every, select, patience)
    return Plan(algorithm, frozen, clients, schedule, seed, **settings)
