"""The round, in one process: who takes part, what crosses the wire, what everybody remembers.

Axes: [N] clients, [C]lients of a cohort that share one architecture.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithm import Algorithm, Group
from pfedhn.data.federation import Federation, cohort
from pfedhn.engine.evaluate import Chunk, SplitResult, evaluate, plan, to_splits
from pfedhn.engine.executors import EXECUTORS, Executor
from pfedhn.engine.network import choose_executor
from pfedhn.engine.state import (
    EVALUATED_SPLITS,
    Best,
    Diverged,
    Evaluation,
    Memories,
    PrivateTable,
    Progress,
    Schedule,
    State,
)
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, copy, num_bytes, put, take
from pfedhn.sgd import Batches

ROWS_AT_ONCE = 50_000  # made together: making one takes ten times its memory


@dataclass(frozen=True, eq=False)
class Simulation:
    """One method on one federation from one seed; a value, all of whose motion is in a `State`."""

    algorithm: Algorithm[Any, Any, Any]
    models: Mapping[str, Model]
    federation: Federation
    schedule: Schedule
    seed: int = 0
    executor: str = "auto"
    starts: Mapping[str, Params] | None = None  # from a run before this one; fresh where None
    _chosen: dict[str, str] = field(default_factory=dict, init=False, repr=False)  # which executor runs which network
    _executors: dict[str, Executor] = field(default_factory=dict, init=False, repr=False)  # they keep their graphs

    def __post_init__(self) -> None:
        size, num_clients = self.schedule.cohort_size, self.federation.num_clients
        if not 1 <= size <= num_clients and self.algorithm.communicates:
            raise UserError(f"a cohort of {size} cannot be drawn from {num_clients} clients.")
        if self.schedule.steps < 1 or self.schedule.evaluate_every < 1 or self.schedule.batch_size < 1:
            raise UserError("steps, evaluate_every and batch_size must be at least 1.")
        if not sum(int(self.federation.splits[split].size.sum()) for split in EVALUATED_SPLITS):
            raise UserError("no client has validation or test rows; leave some out of training to judge the models by.")
        known = ("auto", *EXECUTORS, "captured")
        if self.executor not in known:
            raise UserError(f"there is no executor {self.executor!r}; there are {', '.join(known)}.")

    @property
    def clients_per_round(self) -> int:
        return self.schedule.clients_per_round(self.federation.num_clients, self.algorithm.communicates)

    @property
    def num_rounds(self) -> int:
        return self.schedule.num_rounds(self.federation.num_clients, self.algorithm.communicates)

    def model_of(self, client: int) -> Model:
        if self.federation.architectures is None:
            return next(iter(self.models.values()))
        return self.models[self.federation.architectures[client]]

    def initial_state(self) -> State:
        descriptors = self.descriptors()  # first: it says what is missing where clients cannot be described
        starts = self.initial_models()
        # Copied, since a captured round writes it in place and a method may hand over the initial model itself.
        shared = copy(self.algorithm.init_shared(self.models, starts, keys.fold(self.seed, "shared")))
        device = self.federation.x.device
        clients = torch.arange(self.federation.num_clients, device=device)
        row_keys = torch.as_tensor(keys.fold(self.seed, "row", clients))
        dtype = next(iter(self.models.values())).dtype

        def init_row(key: Tensor, descriptor: Tensor) -> Any:
            row = self.algorithm.init_row(key, descriptor)
            return pytree.tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, row)

        descriptors = descriptors.to(device, dtype)
        rows = init_row(row_keys[0], descriptors[0])
        if pytree.tree_leaves(rows):
            rows = pytree.tree_map(lambda leaf: leaf.new_empty((len(clients), *leaf.shape)), rows)
            for start in range(0, len(clients), ROWS_AT_ONCE):
                part = slice(start, start + ROWS_AT_ONCE)
                put(rows, part, torch.vmap(init_row)(row_keys[part], descriptors[part]))
        down = 0
        if self.starts is not None:  # every client downloads the earlier run's model once
            down = sum(num_bytes(starts[self.model_of(i).name]) for i in range(self.federation.num_clients))
        return State(0, Memories(shared, rows, self._tables(starts)), bytes_down=down)

    def descriptors(self) -> Tensor:
        """[N, D]; zeros of no width where nobody asks for them."""
        if getattr(self.algorithm, "embedding", None) != "fixed":
            return torch.zeros(self.federation.num_clients, 0)
        given = self.federation.descriptors
        return self.federation.class_shares if given is None else given

    def initial_models(self) -> dict[str, Params]:
        if self.starts is not None:
            return dict(self.starts)
        return {name: model.fresh(keys.fold(self.seed, "init")) for name, model in self.models.items()}

    def _tables(self, starts: Mapping[str, Params]) -> dict[str, PrivateTable]:
        def make(name: str) -> Callable[[int], Any]:
            return lambda client: self.algorithm.init_private(
                self.models[name], starts[name], keys.fold(self.seed, "private", client)
            )

        return {name: PrivateTable(make(name)) for name in self.models}

    def rounds(self, state: State) -> Iterator[Progress]:
        """Run to the end from `state`, moving it along; evaluations come as they happen."""
        if state.round == 0 and state.best is None:
            yield Progress(0, self.choose(state, self.evaluate(state)))
        for number in range(state.round, self.num_rounds):
            self._round(state, number)
            before, after = number * self.clients_per_round, (number + 1) * self.clients_per_round
            state.round = number + 1
            is_evaluated = self.schedule.is_evaluated(before, after)
            yield Progress(after, self.choose(state, self.evaluate(state)) if is_evaluated else None)

    def cohort(self, number: int) -> list[int]:
        key = keys.fold(self.seed, "rounds")
        return cohort(key, number, self.federation.num_clients, self.clients_per_round).tolist()

    def _round(self, state: State, number: int) -> None:
        memories = state.memories
        members = self.cohort(number)
        groups: list[Group] = []
        trained: list[tuple[list[int], Any]] = []
        bytes_down, bytes_up = 0, 0
        for model in self.models.values():
            clients = [client for client in members if self.model_of(client) is model]
            if not clients:
                continue
            index = torch.tensor(clients, device=self.federation.x.device)
            rows = take(memories.rows, index)
            received, updates, private = self._train(model, memories, rows, clients, index, number)
            self._check_finite(clients, updates, private, number)
            sizes = self.federation.splits["train"].size[index]
            groups.append(Group(model, rows, updates, sizes))
            trained.append((clients, private))
            bytes_down += num_bytes(received)
            bytes_up += num_bytes(updates)
        shared, new_rows = self._receive(memories.shared, groups)
        state.memories = memories._replace(shared=shared)
        state.bytes_down += bytes_down
        state.bytes_up += bytes_up
        for group, (clients, private), rows in zip(groups, trained, new_rows, strict=True):
            put(memories.rows, torch.tensor(clients, device=self.federation.x.device), rows)
            memories.private[group.model.name].put(clients, private)

    def _receive(self, shared: Any, groups: list[Group]) -> tuple[Any, list[Any]]:
        models = [group.model for group in groups]

        def receive(shared: Any, parts: list[Any]) -> tuple[Any, list[Any]]:
            groups = [Group(model, *part) for model, part in zip(models, parts, strict=True)]
            return self.algorithm.receive(shared, groups)

        run = self.executor_for(models[0]).traced(("receive", *(model.name for model in models)), receive)
        result: tuple[Any, list[Any]] = run(shared, [tuple(group[1:]) for group in groups])
        return result

    def _train(
        self, model: Model, memories: Memories, rows: Any, clients: list[int], index: Tensor, number: int
    ) -> tuple[Params, Params, Any]:
        key = keys.fold(self.seed, "batches", number)
        batches = self.federation.batches(index, key, self.algorithm.num_batches, self.schedule.batch_size)
        noise = keys.fold(self.seed, "noise", number, index)
        executor = self.executor_for(model)
        send = executor.traced(("send", model.name), lambda shared, row: self.algorithm.send(model, shared, row))

        def one_client(
            member: Tensor, row: Any, private: Any, batches: Batches, noise: Tensor
        ) -> tuple[Params, Params, Any]:
            received = send(memories.shared, row)
            with model.seeded(noise), executor.running(model.name, "train", (received, private, batches)):
                update, private = self.algorithm.train(model, received, private, batches)
            return received, update, private

        result: tuple[Params, Params, Any] = executor.map(one_client)(
            index, rows, memories.private[model.name].take(clients), batches, noise
        )
        return result

    def executor_for(self, model: Model) -> Executor:
        if model.name not in self._chosen:
            self._chosen[model.name] = choose_executor(self.executor, model, self.federation, self.clients_per_round)
        name = self._chosen[model.name]
        if name not in self._executors:
            self._executors[name] = EXECUTORS[name]()
        return self._executors[name]

    def _check_finite(self, clients: list[int], updates: Params, private: Any, number: int) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves((updates, private)) if leaf.is_floating_point()]
        if all(bool(torch.isfinite(leaf).all()) for leaf in leaves):
            return
        bad = next(
            client
            for i, client in enumerate(clients)
            if not all(bool(torch.isfinite(leaf[i]).all()) for leaf in leaves)
        )
        raise Diverged.at(number, bad)

    def choose(self, state: State, splits: dict[str, SplitResult]) -> Evaluation:
        """Note an evaluation and keep the first strictly best one; where there are no validation rows, the last."""
        evaluation = Evaluation(state.round * self.clients_per_round, state.round, splits)
        validation = splits["validation"]
        is_blind = int(validation.count.sum()) == 0
        if state.best is None or is_blind or validation.score > state.best.evaluation.splits["validation"].score:
            memories, older = state.memories, None if state.best is None else state.best.memories
            kept = Memories(
                copy(memories.shared, older and older.shared),
                copy(memories.rows, older and older.rows),
                {name: table.copy(older and older.private[name]) for name, table in memories.private.items()},
            )
            state.best = Best(evaluation, kept)
        return evaluation

    def evaluate(self, state: State) -> dict[str, SplitResult]:
        """Every client's personal model on its validation and test rows."""
        memories = state.memories
        results = evaluate(
            self.algorithm,
            self.chunks,
            self.federation,
            memories.shared,
            memories.rows,
            lambda chunk: memories.private[chunk.model.name].take(chunk.clients),
            self.executor_for,
            self.personalize_key(state.round),
            self.schedule.batch_size,
        )
        return to_splits(results, self.federation, EVALUATED_SPLITS, self.has_metric)

    @cached_property
    def chunks(self) -> list[Chunk]:
        one_by_one = any(self.executor_for(model).name != "vectorized" for model in self.models.values())
        return plan(self.federation, self.model_of, EVALUATED_SPLITS, one_by_one)

    @property
    def has_metric(self) -> bool:
        return all(model.per_example_metric is not None for model in self.models.values())

    def personalize_key(self, number: int) -> Key:
        return keys.fold(self.seed, "personalise", number)  # spelled as in every stored result
