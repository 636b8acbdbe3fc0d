"""The whole round as one CUDA graph, so that the host only replays it; many runs share a GPU, each on its own stream.

What a round does is written in the algorithm and in `simulate`; here it is cut into three functions of plain tensors
(before, the local steps, after), each traced, compiled and captured. Axes: [C]lients of a cohort, [K] steps.

Clients of a cohort share kernels where that is a gain. With PyTorch's convolutions it is not (those of many clients are
grouped ones, which are slow): then one client's local steps are a separate graph, replayed for each, and so is the
evaluation of one client's model.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.engine.blocks import has_convolutions, is_known, on_blocks
from pfedhn.engine.captured_round import (
    RoundBytes,
    Signature,
    after_training,
    before_training,
    bytes_of_rounds,
    cohort_schedule,
    rates,
)
from pfedhn.engine.evaluate import Chunk, chunks_of, evaluate, to_splits
from pfedhn.engine.executors import (
    EXECUTORS,
    Executor,
    Traced,
    one_by_one,
    run_as_traced,
    without_numbers,
)
from pfedhn.engine.gpu import (
    COMPILER,
    BackgroundCompiledGraph,
    choosing_once,
    compile_once,
    shared_by_equal_runs,
)
from pfedhn.engine.graphs import Graph, InTurn, Part, Repeated, pile_up
from pfedhn.engine.local_steps import ClientResult, LocalSteps, trace_key
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS, Diverged, Progress, State
from pfedhn.errors import first_line
from pfedhn.params import copy, take
from pfedhn.system.process import WHOLE_PROCESS

logger = logging.getLogger("pfedhn")

PAUSE = 1e-3  # seconds for the compiler, whose Python waits for this thread's


@dataclass(eq=False)
class CapturedRun:
    """One simulation's buffers and graphs on a GPU. The state's own tensors are the buffers, written in place."""

    simulation: Simulation
    state: State
    graphs: dict[Signature, Graph] = field(default_factory=dict)
    evaluation_graph: Graph | None = None
    uncompiled: dict[Signature, set[BackgroundCompiledGraph]] = field(
        default_factory=dict
    )  # what graphs run as it was traced
    prepared: dict[Signature, Any] = field(default_factory=dict)  # cohorts whose clients are trained one by one,
    trained: dict[str, Any] = field(default_factory=dict)  # and, by architecture, what they have come to

    def __post_init__(self) -> None:
        with WHOLE_PROCESS:
            self.simulation = simulation = on_blocks(self.simulation)
        state = self.state
        device = simulation.federation.x.device
        self.is_apart = has_convolutions(simulation)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # in its group, of the client that is trained
        self.is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.is_cuda else None  # a bare one is the first GPU's
        self.pool = torch.cuda.graph_pool_handle() if self.is_cuda else None  # no two graphs of a run work at a time
        self.counter = torch.tensor(state.round, device=device)
        self.bad = torch.full((2,), -1, device=device)  # first round and client whose numbers were not finite
        self.rates = rates(simulation.algorithm, next(iter(simulation.models.values())).dtype, device)
        self.personalize_key = torch.tensor(keys.fold(simulation.seed, "personalise"), device=device)
        self.schedule, self.signatures = cohort_schedule(simulation)
        self.slots = {}
        for name, table in state.memories.private.items():
            clients = [i for i in range(simulation.federation.num_clients) if simulation.model_of(i).name == name]
            if not clients:
                continue  # an architecture that nobody runs
            table.take(clients)  # everybody's private memory is made now: a graph cannot make it later
            slots = torch.zeros(simulation.federation.num_clients, dtype=torch.int64)
            slots[clients] = torch.tensor([table.slots[client] for client in clients])
            self.slots[name] = slots.to(device)
        shape = (simulation.federation.num_clients, len(EVALUATED_SPLITS), 2)
        self.scores = torch.zeros(shape, dtype=torch.float64, device=device)
        self.identities = simulation.federation.identity(torch.arange(simulation.federation.num_clients, device=device))
        self.local_steps = LocalSteps(simulation, self.rates, self.counter, self.identities)
        exchange = simulation.exchange
        about = (exchange, simulation.models)
        # What draws by a key of 64 bits is run as it was traced.
        compile_halves = run_as_traced if exchange.upload.draws or exchange.download.draws else compile_once
        known = is_known(simulation)
        self.before: dict[Signature, Traced] = {}
        self.after: dict[Signature, Traced] = {}
        for s in set(self.signatures):
            before = partial(Traced, before_training(*about, s), compile_halves, needs_numbers=not known)
            after = partial(Traced, after_training(*about, s), compile_halves, writes=True, needs_numbers=not known)
            self.before[s] = shared_by_equal_runs(trace_key(simulation, self.rates, "before", s), before)
            self.after[s] = shared_by_equal_runs(trace_key(simulation, self.rates, "after", s), after)
        self.evaluator = Executor("apart", one_by_one) if self.is_apart else EXECUTORS["vectorized"]()
        self.chunks = chunks_of(simulation.federation, simulation.model_of, EVALUATED_SPLITS, one_by_one=self.is_apart)
        if self.is_apart:
            self.chunks = pile_up(self.chunks)

    def _memories(self) -> Any:
        memories = self.state.memories
        private = {name: table.tree for name, table in memories.private.items() if name in self.slots}
        return memories.shared, memories.rows, private

    def _parts(self, signature: Signature) -> list[Part]:
        """What a round does, in the order in which it is captured and replayed, and how often each."""
        if not self.is_apart or sum(count for _, count in signature) == 1:
            return [(lambda: self._finish(signature, *self._trained(signature)), 1)]
        return [
            (lambda: self._prepare(signature), 1),
            *((partial(self._train_next, signature, number), count) for number, (_, count) in enumerate(signature)),
            (lambda: self._finish(signature, self.prepared[signature], self._all_trained(signature)), 1),
        ]

    def _prepare(self, signature: Signature) -> None:
        self.place.zero_()
        self.prepared[signature] = self._before(signature)

    def _train_next(self, signature: Signature, number: int) -> None:
        """The local steps of the next client of a group."""
        members, _, offers, kept = self.prepared[signature][number]
        name, count = signature[number]
        one = pytree.tree_map(lambda leaf: leaf.index_select(0, self.place), (members, offers, kept))
        result = self.local_steps.train_group(self.simulation.models[name], *one)
        if name not in self.trained:  # while warming up: it must outlive what is captured
            most = max(dict(one).get(name, 0) for one in set(self.signatures))
            self.trained[name] = pytree.tree_map(lambda leaf: leaf.new_zeros(most, *leaf.shape[1:]), result)
        for table, leaf in zip(pytree.tree_leaves(self.trained[name]), pytree.tree_leaves(result), strict=True):
            table.index_copy_(0, self.place, leaf)
        self.place.add_(1).remainder_(count)

    def _all_trained(self, signature: Signature) -> list[ClientResult]:
        return [take(self.trained[name], slice(count)) for name, count in signature]

    def _finish(self, signature: Signature, prepared: Any, trained: list[ClientResult]) -> None:
        known, train = (self._memories(), self.slots), self.simulation.federation.splits["train"]
        # The weights that were offered are of no use any more; the round and version that a client answers are.
        stacked = [
            (members, rows, offers._replace(weights=()), *result)
            for (members, rows, offers, _), result in zip(prepared, trained, strict=True)
        ]
        self.after[signature](self.rates, self.counter, self.bad, *known, train.size, self.identities, stacked)

    def _before(self, signature: Signature) -> Any:
        known = (self._memories(), self.slots)
        return self.before[signature](self.rates, self.counter, self.schedule, *known, self.identities)

    def _trained(self, signature: Signature) -> tuple[Any, list[ClientResult]]:
        """A cohort as it is prepared, and what its clients' local steps give."""
        prepared = self._before(signature)
        groups = zip(signature, prepared, strict=True)
        named = [
            (self.simulation.models[name], members, offers, kept) for (name, _), (members, _, offers, kept) in groups
        ]
        return prepared, self.local_steps.train_all(named)

    def _evaluation_parts(self) -> list[Part]:
        if not self.is_apart:
            return [(lambda: self._evaluate(self.chunks), 1)]
        return [
            (self._begin_evaluation, 1),
            *((partial(self._evaluate_next, pile), len(pile.members)) for pile in self.chunks),
        ]

    def _begin_evaluation(self) -> None:
        self.place.zero_()
        self.scores.zero_()

    def _evaluate(self, chunks: Sequence[Chunk]) -> None:
        self.scores.copy_(self._scores_of(chunks))

    def _evaluate_next(self, pile: Chunk) -> None:
        """The next client of those that have one architecture."""
        members, index, masks = (part.index_select(0, self.place) for part in (pile.members, pile.index, pile.masks))
        self.scores.add_(self._scores_of([Chunk(pile.model, pile.clients, members, index, masks)]))
        self.place.add_(1).remainder_(len(pile.members))

    def _scores_of(self, chunks: Sequence[Chunk]) -> Tensor:
        shared, rows, private = self._memories()
        simulation = self.simulation
        return evaluate(
            simulation.exchange,
            chunks,
            simulation.federation,
            shared,
            rows,
            lambda chunk: take(private[chunk.model.name], self.slots[chunk.model.name][chunk.members]),
            lambda model: self.evaluator,
            keys.fold(self.personalize_key, self.counter),
            simulation.schedule.batch_size,
        )

    def _capture(self, work: Callable[[], None]) -> tuple[Graph, set[BackgroundCompiledGraph]]:
        """Warm up on the capturing stream, then capture; also return the graphs that are still being compiled."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with self._on_stream():  # which is also left where capturing fails: `torch.cuda.graph` then stays on its stream
            kept = copy((self.counter, self.bad))  # here: rounds before this may still be counting on the stream
            self.bad.zero_()  # as if a number had not been finite: nothing is written
            with WHOLE_PROCESS, choosing_once() as chosen:
                work()
                _restore((self.counter, self.bad), kept)
                uncompiled = {part for part in chosen if not part.is_done}
                if self.stream is None:
                    return Repeated(work), uncompiled
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    work()
        return graph, uncompiled

    def turns_for_others(self) -> Iterator[Progress]:
        """As long as the compiler works on the rounds of an equal run, which goes on as it can: captured after that,
        this one has to be captured once only."""
        signature = self.signatures[min(self.state.round, len(self.signatures) - 1)]
        parts = [part for part, _ in self.after[signature].ready.values() if isinstance(part, BackgroundCompiledGraph)]
        while any(part.is_awaited for part in parts):
            time.sleep(PAUSE)
            step = self.state.round * self.simulation.clients_per_round
            yield Progress(step, None, is_pause=True, is_waiting=True)

    def settle(self) -> None:
        """Wait for the compiler and capture what it has made, so that rounds can be measured."""
        for _ in range(2):
            for signature in set(self.signatures):
                self.graph_of(signature)
            COMPILER.wait()
            self._renew_graphs()

    def _renew_graphs(self) -> None:
        """Where rounds began before the compiler was done, capture them anew once it is."""
        for part in set().union(*self.uncompiled.values()):
            part.ask()  # a run that ended on another thread may have dropped it
        compiled = [s for s, parts in self.uncompiled.items() if all(part.is_done for part in parts)]
        if compiled and self.stream is not None:
            self.stream.synchronize()
        for signature in compiled:
            del self.uncompiled[signature], self.graphs[signature]

    def prepare(self) -> None:
        """Compile and capture what the first rounds need, if any rounds are left."""
        if self.state.round >= self.simulation.num_rounds:
            return
        signature = self.signatures[self.state.round]
        with WHOLE_PROCESS:
            is_first = not self.before[signature].ready  # and no equal run has been here
            if is_first and not self.is_apart and is_known(self.simulation):
                self._announce_kernels(signature)
            self.graph_of(signature)
            if self.evaluation_graph is None:
                self.evaluation_graph, _ = self._capture_all(self._evaluation_parts())

    def _announce_kernels(self, signature: Signature) -> None:
        """Have the kernels of a round and of an evaluation compiled on other cores, while this one traces and compiles.

        What cannot be done without numbers is left to those who do it with them.
        """
        unlike = {(chunk.model.name, len(chunk.members)): chunk for chunk in self.chunks}
        try:
            with without_numbers():
                self._trained(signature)
                self._scores_of(list(unlike.values()))
        except Exception as error:
            logger.debug("kernels are compiled one after the other: %s", first_line(error))

    def graph_of(self, signature: Signature) -> Graph:
        if signature not in self.graphs:
            self.graphs[signature], uncompiled = self._capture_all(self._parts(signature))
            if uncompiled:
                self.uncompiled[signature] = uncompiled
        return self.graphs[signature]

    def _capture_all(self, parts: Sequence[Part]) -> tuple[Graph, set[BackgroundCompiledGraph]]:
        """One graph after the other, as `_capture`."""
        graphs: list[tuple[Graph, int]] = []
        uncompiled: set[BackgroundCompiledGraph] = set()
        for work, times in parts:
            with self._on_stream():
                self.place.zero_()
                if len(graphs) == 1:
                    graphs[0][0].replay()  # it prepares what the next parts are warmed up on
            graph, waiting = self._capture(work)
            graphs.append((graph, times))
            uncompiled |= waiting
        with self._on_stream():
            self.place.zero_()
        return graphs[0][0] if len(graphs) == 1 else InTurn(graphs), uncompiled

    def rounds(self) -> Iterator[Progress]:
        """As `Simulation.rounds`; yields between launches so that several runs can take turns on the GPU."""
        simulation, state = self.simulation, self.state
        self.prepare()
        state.bad = self.bad
        size = simulation.clients_per_round
        cost = bytes_of_rounds(simulation, self._memories(), self.identities[0], self.signatures)
        if state.round == 0 and state.best is None:
            yield from self._evaluated(cost)
        while simulation.has_rounds_left(state):
            number = state.round
            signature = self.signatures[number]
            self._renew_graphs()
            graph = self.graph_of(signature)
            with self._on_stream():
                graph.replay()
            state.round = number + 1
            state.bytes_down += cost[signature].down
            state.bytes_up += cost[signature].up
            if simulation.schedule.is_evaluated(number * size, (number + 1) * size):
                yield from self._evaluated(cost)
            else:
                yield Progress((number + 1) * size, None)
        if self.stream is not None:
            self.stream.synchronize()  # the state is whole for whoever reads it next, on whatever stream

    def _evaluated(self, cost: Mapping[Signature, RoundBytes]) -> Iterator[Progress]:
        simulation, state = self.simulation, self.state
        assert self.evaluation_graph is not None
        with self._on_stream():
            self.evaluation_graph.replay()
            scores, bad = _to_host(self.scores), _to_host(self.bad)
            done = torch.cuda.Event() if self.is_cuda else None
            if done is not None:
                done.record()
        # Let the other runs queue their work.
        yield Progress(state.round * simulation.clients_per_round, None, is_pause=True)
        if done is not None:
            done.synchronize()
        if int(bad[0]) >= 0:
            for number in range(int(bad[0]), state.round):
                state.bytes_down -= cost[self.signatures[number]].down
                state.bytes_up -= cost[self.signatures[number]].up
            state.round, state.bad = int(bad[0]), None
            client = simulation.federation.name_of(int(bad[1]))
            raise Diverged.at(int(bad[0]), client, simulation.algorithm, simulation.federation)
        splits = to_splits(scores, simulation.federation, EVALUATED_SPLITS, simulation.has_metric)
        with self._on_stream():
            evaluation = simulation.choose(state, splits)
        yield Progress(evaluation.step, evaluation)

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def _to_host(value: Tensor) -> Tensor:
    """A copy that the host may read after the stream has got there."""
    if not value.is_cuda:
        return value.clone()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def _restore(tree: Any, kept: Any) -> None:
    for leaf, value in zip(pytree.tree_leaves(tree), pytree.tree_leaves(kept), strict=True):
        leaf.copy_(value)
