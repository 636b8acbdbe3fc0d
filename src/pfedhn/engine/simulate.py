"""The round, in one process: who takes part, what crosses the wire, what everybody remembers.

Axes: [N] clients, [C]lients of a cohort that share one architecture.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.data.description import Description
from pfedhn.data.federation import Federation
from pfedhn.engine.attack import Attack
from pfedhn.engine.crew import CohortShard, Trained, Trainer
from pfedhn.engine.evaluate import Chunk, SplitResult, chunks_of, evaluate, score, to_splits
from pfedhn.engine.executors import EXECUTORS, Executor
from pfedhn.engine.in_flight import check_in_flight, step_without_waiting
from pfedhn.engine.network import choose_executor, draws_freely
from pfedhn.engine.plan import Joining, Plan
from pfedhn.engine.round import Kept, Offer, Reply, Returned, bytes_down, bytes_of_starts, bytes_up
from pfedhn.engine.state import (
    EVALUATED_SPLITS,
    Best,
    Diverged,
    Evaluation,
    Memories,
    Progress,
    State,
)
from pfedhn.engine.transform import FULL
from pfedhn.errors import UserError
from pfedhn.model import Model
from pfedhn.params import copy, put, stack, take
from pfedhn.privacy import Protection, RoundCost, keyed_normal
from pfedhn.sgd import Batches

ROWS_AT_ONCE = 50_000  # made together: making one takes ten times its memory


class ClientInputs(NamedTuple):
    """What ONE client brings into a round; a leading axis makes a stack."""

    identity: Tensor
    number: Tensor  # of the round
    row: Any
    kept: Kept
    batches: Batches
    size: Tensor
    noise: Tensor  # the key of what its network draws by itself
    secret: Tensor  # the key of what protects its data


@dataclass(frozen=True, eq=False)
class Simulation(Plan):
    """A plan and the data of its clients; a value, all of whose motion is in a `State`."""

    clients: Description = field(init=False, repr=False)  # those of the federation
    federation: Federation = field(kw_only=True)
    attack: Attack | None = None  # what hostile clients send, to measure a defense
    make_crew: Callable[["Simulation"], Trainer] | None = None  # who shares the clients of a round; nobody where None
    _chosen: dict[str, str] = field(default_factory=dict, init=False, repr=False)  # which executor runs which network
    _executors: dict[str, Executor] = field(default_factory=dict, init=False, repr=False)  # they keep their graphs

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", self.federation.description)
        super().__post_init__()
        if self.in_flight is not None:
            check_in_flight(self, self.in_flight)
        if self.attack is not None and not (self.upload == self.download == FULL):
            raise UserError("hostile clients are simulated with full updates alone; leave upload and download out.")

    @staticmethod
    def of(plan: Plan, federation: Federation) -> "Simulation":
        """A plan with its clients' data."""
        values = {item.name: getattr(plan, item.name) for item in fields(Plan) if item.name != "clients"}
        return Simulation(**values, federation=federation)

    def initial_state(self) -> State:
        descriptors = self.descriptors_of(
            self.federation
        )  # first: it says what is missing where clients cannot be described
        starts = self.initial_models()
        if self.joins is None:
            shared = self.exchange.init_shared(self.models, starts, keys.fold(self.seed, "shared"))
            rows = self._first_rows(shared, descriptors)
        else:
            shared, rows = self.joins.shared, self._joining_rows(self.joins, descriptors)
        # Copied, since a captured round writes it in place and a method may hand over the initial model itself.
        shared = copy(shared)
        down = 0
        if self.starts is not None:  # every client downloads the earlier run's model once
            down = bytes_of_starts(starts, Counter(self.model_of(i).name for i in range(self.federation.num_clients)))
        return State(0, Memories(shared, rows, self.private_tables(shared, rows)), bytes_down=down)

    def _first_rows(self, shared: Any, descriptors: Tensor) -> Any:
        """The server's memory of every client [N, ...] before the first round."""
        clients = torch.arange(self.federation.num_clients, device=self.federation.x.device)
        row_keys = torch.as_tensor(keys.fold(self.seed, "row", self.federation.identity(clients)))
        first_row = partial(self.first_row, shared)
        rows = first_row(row_keys[0], descriptors[0])
        if not pytree.tree_leaves(rows):
            return rows
        rows = pytree.tree_map(lambda leaf: leaf.new_empty((len(clients), *leaf.shape)), rows)
        for start in range(0, len(clients), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            put(rows, part, torch.vmap(first_row)(row_keys[part], descriptors[part]))
        return rows

    def _joining_rows(self, joins: Joining, descriptors: Tensor) -> Any:
        given = [value if self.algorithm.needs.descriptors else None for value in descriptors]
        rows = [self.joining_row(joins.shared, joins.rows, value) for value in given]
        return copy(stack(rows))  # rounds write rows in place, and one row alone may hold the server's own tensors

    def rounds(self, state: State) -> Iterator[Progress]:
        """Run to the end from `state`, moving it along; evaluations come as they happen."""
        if state.round == 0 and state.best is None:
            yield Progress(0, self.choose(state, self.evaluate(state)))
        while self.has_rounds_left(state):
            number = state.round
            if self.in_flight is None:
                self._round(state, number)
            else:
                step_without_waiting(self, state, self.in_flight)
            before, after = number * self.clients_per_round, (number + 1) * self.clients_per_round
            state.round = number + 1
            is_evaluated = self.schedule.is_evaluated(before, after)
            yield Progress(after, self.choose(state, self.evaluate(state)) if is_evaluated else None)

    def has_rounds_left(self, state: State) -> bool:
        """Whether training goes on: there are steps left, and validation got better within the patience."""
        size, patience = self.clients_per_round, self.schedule.patience
        step = state.round * size
        if state.round >= self.num_rounds or patience is None or state.best is None:
            return state.round < self.num_rounds
        return step - state.best.evaluation.step < patience or not self.schedule.is_evaluated(step - size, step)

    def privacy_cost(self, client: int) -> RoundCost:
        """What a round costs a client."""
        assert self.privacy is not None
        size = int(self.federation.splits["train"].size[client])
        return self.privacy.cost(size, self.schedule.batch_size, self.algorithm.num_batches)

    def has_budget(self, state: State, client: int) -> bool:
        """Whether a client may send one more update."""
        if self.privacy is None:
            return True
        return state.num_updates[client] < self.privacy.num_rounds(self.privacy_cost(client))

    def _round(self, state: State, number: int) -> None:
        memories = state.memories
        members = [client for client in self.cohort(number) if self.has_budget(state, client)]
        if not members:
            return  # nobody of this cohort has budget left, and the server has nothing to step by
        returned: list[Returned] = []
        weights_down = 0
        remembered: list[tuple[list[int], Kept]] = []
        for model in self.models.values():
            clients = [client for client in members if self.model_of(client) is model]
            if not clients:
                continue
            rows = take(memories.rows, torch.tensor(clients, device=self.device))
            kept = memories.private[model.name].take(clients)
            shard = CohortShard(model.name, number, clients, memories.shared, rows, kept)
            trained = (self._crew or self).train(shard)
            self.refuse_diverged(shard, trained)
            returned.append(Returned(model, rows, trained.replies))
            weights_down += trained.bytes_down
            remembered.append((clients, trained.kept))
        self.server_step(state, returned, [clients for clients, _ in remembered])
        state.bytes_down += weights_down
        for part, (clients, kept) in zip(returned, remembered, strict=True):
            memories.private[part.model.name].put(clients, kept)
        if self.privacy is not None:
            state.num_updates.update(members)

    def refuse_diverged(self, shard: CohortShard, trained: Trained) -> None:
        is_finite = trained.replies.metrics["is_finite"]
        if not bool(is_finite.all()):
            first = shard.clients[int((~is_finite).nonzero()[0])]
            raise Diverged.at(shard.number, self.federation.name_of(first), self.algorithm, self.federation)

    def server_step(
        self, state: State, returned: list[Returned], clients: list[list[int]], now: Tensor | None = None
    ) -> None:
        """The server's step from the replies of some clients, of each architecture."""
        names = [[self.federation.name_of(client) for client in some] for some in clients]
        counting, state.robust = self.guarded(state.robust, returned, names)
        shared, new_rows = self._step(state.memories.shared, counting, now)
        state.memories = state.memories._replace(shared=shared)
        state.bytes_up += bytes_up(part.replies for part in returned)
        for some, rows in zip(clients, new_rows, strict=True):
            put(state.memories.rows, torch.tensor(some, device=self.device), rows)

    @cached_property
    def _crew(self) -> Trainer | None:
        return None if self.make_crew is None else self.make_crew(replace(self, make_crew=None))

    def train(self, shard: CohortShard) -> Trained:
        """Both halves of a round for some of its clients; the server's step comes after all of them."""
        model = self.models[shard.architecture]
        both_halves = self.executor_for(model).map(self._one_client(model, shard.shared))
        offers, replies, kept = both_halves(*self._inputs(shard))
        if self.attack is not None:
            key = keys.fold(self.seed, "attack", shard.number)
            replies = replies._replace(
                update=self.attack.replace_in(replies.update, offers.weights, shard.clients, key)
            )
        return Trained(replies, kept, bytes_down([offers]))

    @property
    def device(self) -> torch.device:
        return self.federation.x.device

    def on(self, device: str) -> "Simulation":
        """The same run with its data and networks on a device; what it starts from stays where it is."""
        models = {name: replace(model, device=device) for name, model in self.models.items()}
        return replace(self, federation=self.federation.to(device), models=models)

    def _inputs(self, shard: CohortShard) -> ClientInputs:
        """What the clients of one architecture bring into a round, all [C, ...]."""
        number = shard.number
        index = torch.tensor(shard.clients, device=self.device)
        identities = self.federation.identity(index)
        key = keys.fold(self.seed, "batches", number)
        is_sampled = self.privacy is not None and self.privacy.level == "example"
        draw = self.federation.sampled_batches if is_sampled else self.federation.batches
        return ClientInputs(
            identities,
            torch.full_like(index, number),
            shard.rows,
            shard.kept,
            draw(index, key, self.algorithm.num_batches, self.schedule.batch_size),
            self.federation.splits["train"].size[index],
            torch.as_tensor(keys.fold(self.seed, "noise", number, identities)),
            torch.as_tensor(keys.fold(self.seed, "privacy", number, identities)),
        )

    def _one_client(self, model: Model, shared: Any) -> Callable[..., tuple[Offer, Reply, Kept]]:
        """Both halves of the round for ONE client: what it is offered, its reply and what it keeps."""
        exchange, executor = self.exchange, self.executor_for(model)
        make_offer = executor.traced(
            ("offer", model.name),
            lambda shared, row, number, identity: exchange.offer(model, shared, row, number, identity),
        )

        def one_client(*given: Any) -> tuple[Offer, Reply, Kept]:
            mine = ClientInputs(*given)
            offer = make_offer(shared, mine.row, mine.number, mine.identity)
            is_alone = executor.name == "loop"
            with (
                model.seeded(mine.noise, is_alone),
                executor.running(model.name, "train", (offer, mine.kept, mine.batches)),
            ):
                update, kept = exchange.train(model, offer, mine.kept, mine.batches, self._protection(mine))
            return offer, *exchange.reply(offer, update, kept, mine.size, mine.identity)

        return one_client

    def _protection(self, mine: ClientInputs) -> Protection | None:
        if self.privacy is None:
            return None
        expected = mine.size.clamp(max=self.schedule.batch_size)
        return Protection(self.privacy, expected, keyed_normal(mine.secret))

    def _step(self, shared: Any, returned: Sequence[Returned], now: Tensor | None = None) -> tuple[Any, list[Any]]:
        models = [part.model for part in returned]

        def step(shared: Any, parts: list[Any], *now: Tensor) -> tuple[Any, list[Any]]:
            returned = [Returned(model, *part) for model, part in zip(models, parts, strict=True)]
            return self.stepping.step(shared, returned, *now)

        key = ("step" if now is None else "late step", *(model.name for model in models))
        given = (shared, [(part.rows, part.replies) for part in returned], *(() if now is None else (now,)))
        result: tuple[Any, list[Any]] = self.executor_for(models[0]).traced(key, step)(*given)
        return result

    def executor_for(self, model: Model) -> Executor:
        if model.name not in self._chosen:
            self._chosen[model.name] = choose_executor(self.executor, model, self.federation, self.clients_per_round)
        name = self._chosen[model.name]
        if name not in self._executors:
            self._executors[name] = EXECUTORS[name]()
        return self._executors[name]

    def choose(self, state: State, splits: dict[str, SplitResult]) -> Evaluation:
        """Note an evaluation and keep the first strictly best one; where there are no validation rows, the last."""
        evaluation = Evaluation(state.round * self.clients_per_round, state.round, splits)
        validation = splits["validation"]
        is_blind = int(validation.count.sum()) == 0
        score, best = self.schedule.score, state.best
        if best is None or is_blind or score(validation) > score(best.evaluation.splits["validation"]):
            memories = state.memories._replace(shared=self.exchange.for_use(state.memories.shared))
            state.best = Best.of(evaluation, memories, state.best)
        return evaluation

    def evaluate(self, state: State) -> dict[str, SplitResult]:
        """Every client's personal model on its validation and test rows."""
        return self.scores(state.memories, state.round)

    def scores(
        self,
        memories: Memories,
        number: int,
        is_adapted: bool = False,
        executor: Executor | None = None,
        chunks: Sequence[Chunk] | None = None,
    ) -> dict[str, SplitResult]:
        """As `evaluate`, after round `number`, whose memories are given.

        Args:
            is_adapted: Whether every client takes its own adaptation steps first.
            executor: Instead of the run's own; one that runs clients together.
            chunks: Instead of all clients, some of them.
        """
        if chunks is None:
            chunks = self.chunks if executor is None else self._chunks(one_by_one=False)
        results = evaluate(
            self.exchange,
            chunks,
            self.federation,
            memories.shared,
            memories.rows,
            lambda chunk: memories.private[chunk.model.name].take(chunk.clients),
            self.executor_for if executor is None else lambda model: executor,
            self.personalize_key(number),
            self.schedule.batch_size,
            is_adapted,
        )
        return to_splits(results, self.federation, EVALUATED_SPLITS, self.has_metric)

    def outputs(self, memories: Memories, number: int, is_adapted: bool) -> Iterator[tuple[Chunk, Tensor]]:
        """What clients' personal networks make [C, E, ...] of their validation and test rows, chunk by chunk.

        Arguments as `scores`.
        """
        for chunk in self.chunks:
            yield (
                chunk,
                score(
                    self.exchange,
                    chunk,
                    self.federation,
                    memories.shared,
                    take(memories.rows, chunk.members),
                    memories.private[chunk.model.name].take(chunk.clients),
                    self.executor_for(chunk.model),
                    self.personalize_key(number),
                    self.schedule.batch_size,
                    is_adapted,
                    lambda model, weights, x, y, masks: model.outputs(weights, x),
                ),
            )

    @cached_property
    def chunks(self) -> list[Chunk]:
        return self._chunks(any(self.executor_for(model).name != "vectorized" for model in self.models.values()))

    def _chunks(self, one_by_one: bool) -> list[Chunk]:
        return chunks_of(self.federation, self.model_of, EVALUATED_SPLITS, one_by_one)

    @cached_property
    def draws_freely(self) -> bool:
        """Whether a network draws by other means than dropout layers: then clients are run one by one."""
        return any(draws_freely(model, self.federation) for model in self.models.values())

    def identity(self, client: int) -> int:
        return int(self.federation.identity(torch.tensor(client, device=self.device)))

    def label_counts(self, client: int, num_labels: int) -> Tensor | None:
        return self.federation.label_counts(client, num_labels)

    def batches_of(self, client: int, key: keys.Key, num_batches: int, data: Federation | None = None) -> Batches:
        if data is not None:
            return super().batches_of(client, key, num_batches, data)
        member = torch.tensor([client], device=self.device)
        return take(self.federation.batches(member, key, num_batches, self.schedule.batch_size), 0)
