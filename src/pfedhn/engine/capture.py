"""The whole round as one CUDA graph, so that the host only replays it; many runs share a GPU on streams of their own.

What a round does is written in the algorithm and in `simulate`; here it is cut into three functions of plain tensors
(before, the local steps, after), each traced, compiled and captured. Axes: [C]lients of a cohort, [K] steps.

Clients of a cohort share kernels where that is a gain. With PyTorch's convolutions it is not (those of many clients are
grouped ones, which are slow): then one client's local steps are a graph of their own, replayed for each, and so is the
evaluation of one client's model.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithm import Algorithm
from pfedhn.data.batches import Examples, cohort, draw_batches
from pfedhn.engine.evaluate import Chunk, evaluate, plan, to_splits
from pfedhn.engine.executors import (
    EXECUTORS,
    Executor,
    Function,
    TogetherScan,
    Traced,
    TracedScan,
    one_by_one,
    run_as_traced,
    without_numbers,
)
from pfedhn.engine.gpu import (
    COMPILER,
    BackgroundCompiledGraph,
    choosing_once,
    compile_graph,
    compile_once,
    content,
    form,
    shared_by_equal_runs,
)
from pfedhn.engine.network import convolves
from pfedhn.engine.round import Exchange, Kept, Offer, Returned, bytes_down, bytes_up
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS, Diverged, Progress, State
from pfedhn.errors import first_line
from pfedhn.kernels import launch as kernels
from pfedhn.kernels.fuse import Fused
from pfedhn.model import Model
from pfedhn.params import Params, copy, stack, take
from pfedhn.sgd import Batches, Rate
from pfedhn.system import fingerprint
from pfedhn.system.process import WHOLE_PROCESS

logger = logging.getLogger("pfedhn")

Signature: TypeAlias = tuple[tuple[str, int], ...]
"""The make-up of a cohort: how many clients of each architecture."""


MAX_TOGETHER = 32  # clients whose minibatches are in memory at a time; they fill a GPU


PAUSE = 1e-3  # seconds for the compiler, whose Python waits for this thread's


MIN_ROUNDS = 8192  # the schedule's length: runs of other lengths, as in tuning, are not compiled for anew


def rates(algorithm: Any, dtype: torch.dtype, device: torch.device) -> Params:
    """The settings that a grid varies, as tensors: graphs take them as data, so that a grid compiles once."""
    hints = get_type_hints(type(algorithm))
    names = [name for name, hint in hints.items() if hint in (Rate, Rate | None)]
    given = {name: getattr(algorithm, name) for name in names}
    return {
        name: torch.as_tensor(value, dtype=dtype, device=device) for name, value in given.items() if value is not None
    }


def exchange_with_rates(exchange: Exchange, rates: Mapping[str, Any]) -> Exchange:
    return replace(exchange, algorithm=with_rates(exchange.algorithm, rates))


def with_rates(algorithm: Algorithm[Any, Any, Any], rates: Mapping[str, Any]) -> Algorithm[Any, Any, Any]:
    changed: Algorithm[Any, Any, Any] = replace(algorithm, **rates)  # type: ignore[type-var]
    return changed


def offers_to_all(
    exchange: Exchange, model: Model, shared: Any, rows: Any, number: Tensor, identities: Tensor
) -> Offer:
    """What [C] clients are offered, stacked; a method without rows sends one thing to all of them."""
    if pytree.tree_leaves(rows) or exchange.download.draws:
        stacked: Offer = torch.vmap(lambda row, identity: exchange.offer(model, shared, row, number, identity))(
            rows, identities
        )
        return stacked
    one = exchange.offer(model, shared, rows, number, identities[0])
    offers: Offer = pytree.tree_map(lambda leaf: leaf.expand(len(identities), *leaf.shape), one)
    return offers


def before_training(exchange: Exchange, models: Mapping[str, Model], signature: Signature) -> Function:
    """Who takes part, what they are offered and what they keep."""

    def before(rates: Params, counter: Tensor, schedule: Tensor, memories: Any, slots: Any, identities: Tensor) -> Any:
        shared, rows_table, private_tables = memories
        # schedule[counter] would ask the host. Where everybody takes part in every round, the schedule has one line.
        everybody = schedule.index_select(0, counter.remainder(len(schedule)).reshape(1)).squeeze(0)
        number = counter.clone()  # of its own: the counter moves on at the end of the round
        results = []
        start = 0
        for name, count in signature:
            members = everybody[start : start + count]
            start += count
            rows = take(rows_table, members)
            kept = take(private_tables[name], slots[name][members])
            at_rates = exchange_with_rates(exchange, rates)
            offers = offers_to_all(at_rates, models[name], shared, rows, number, identities[members])
            results.append((members, rows, offers, kept))
        return results

    return before


def drawing(width: int) -> Function:
    """The rows that some clients train on in a round."""

    def draw(counter: Tensor, batch_key: Tensor, members: Tensor, data: Any) -> Batches:
        x, y, palette, index, offset, size, identities, steps = data  # a palette, or nothing
        examples, key = Examples(index, offset, size), keys.fold(batch_key, counter)
        return draw_batches(x, y, examples, members, key, steps, width, identities[members], *palette)

    return draw


def after_training(exchange: Exchange, models: Mapping[str, Model], signature: Signature) -> Function:
    """The replies, the server step, and what is remembered written back, unless a number is not finite."""

    def after(
        rates: Params,
        counter: Tensor,
        bad: Tensor,
        memories: Any,
        slots: Any,
        sizes: Tensor,
        identities: Tensor,
        trained: Any,
    ) -> None:
        shared, rows_table, private_tables = memories
        at_rates = exchange_with_rates(exchange, rates)
        returned, remembered = [], []
        for (name, _), (members, rows, offers, updates, kept) in zip(signature, trained, strict=True):
            replies, kept = torch.vmap(at_rates.reply)(offers, updates, kept, sizes[members], identities[members])
            returned.append(Returned(models[name], rows, replies))
            remembered.append(kept)
        finite = torch.cat([part.replies.metrics["is_finite"] for part in returned])
        everybody = torch.cat([members for members, *_ in trained])
        is_good = finite.all() & (bad[0] < 0)
        new_shared, new_rows = at_rates.step(shared, returned)
        for old, new in zip(pytree.tree_leaves(shared), pytree.tree_leaves(new_shared), strict=True):
            old.copy_(torch.where(is_good, new, old))
        for (name, _), (members, rows, *_), kept, rows_after in zip(
            signature, trained, remembered, new_rows, strict=True
        ):
            _write(rows_table, members, rows, rows_after, is_good)
            places = slots[name][members]
            _write(private_tables[name], places, take(private_tables[name], places), kept, is_good)
        first_bad = torch.stack(
            [counter, everybody.index_select(0, (~finite).to(torch.int8).argmax().reshape(1)).squeeze(0)]
        )
        bad.copy_(torch.where(is_good | (bad[0] >= 0), bad, first_bad))
        counter.add_(1)

    return after


def on_blocks(simulation: Simulation) -> Simulation:
    """The simulation with ordinary layers on the package's kernels, where that gives the same outputs."""
    x = simulation.federation.first(2)
    models = {}
    for name, model in simulation.models.items():
        other, weights = replace(model, factory=Fused(model.factory)), model.fresh(0)
        if is_known(simulation):
            with without_numbers():
                other.outputs(weights, x)
        with torch.no_grad():
            outputs = pytree.tree_leaves([one.outputs(weights, x) for one in (model, other)])
        middle = len(outputs) // 2
        is_same = all(map(_are_near, outputs[:middle], outputs[middle:]))
        models[name] = other if is_same else model
    return replace(simulation, models=models)


def is_known(simulation: Simulation) -> bool:
    """Whether all that a round runs is code of this package or of PyTorch, which keeps no tensor that it makes."""
    exchange, models = simulation.exchange, simulation.models.values()
    modules = [module for model in models for module in model.training_module.modules()]
    functions = [function for model in models for function in (model.per_example_loss, model.per_example_metric)]
    functions += [value for module in modules for value in vars(module).values() if isinstance(value, FUNCTIONS)]
    classes = [
        kind
        for part in (exchange.algorithm, exchange.upload, exchange.download, *modules)
        for kind in type(part).__mro__
    ]
    return (
        not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        and all(function is None or isinstance(function, FunctionType) for function in functions)
        and all(_origin(part) in KNOWN for part in (*classes, *functions) if part is not None)
    )


FUNCTIONS = (FunctionType, MethodType, partial)
KNOWN = {"pfedhn", "torch", "builtins", "typing", "abc"}


def _origin(part: Any) -> str:
    return str(part.__module__).partition(".")[0]


def _are_near(one: Any, other: Any) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-3, equal_nan=True)


class Cost(NamedTuple):
    """Bytes of one round."""

    down: int
    up: int


@dataclass
class Repeated:
    """Stands in for a CUDA graph on a CPU, where the tests check what a GPU would replay."""

    replay: Callable[[], None]


@dataclass
class InTurn:
    """Graphs of one round, in order, and how often each is replayed."""

    parts: list[tuple["Graph", int]]

    def replay(self) -> None:
        for graph, times in self.parts:
            for _ in range(times):
                graph.replay()


Graph: TypeAlias = torch.cuda.CUDAGraph | Repeated | InTurn

Part: TypeAlias = tuple[Callable[[], None], int]
"""What becomes a graph, and how often it is replayed."""


def pile_up(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks of one client each as piles, one for every architecture and like size, filled up to the same width."""
    kinds: dict[tuple[str, int], list[Chunk]] = {}
    for chunk in chunks:
        kinds.setdefault((chunk.model.name, kernels.power_of_two(chunk.index.shape[-1])), []).append(chunk)
    piles = []
    for mine in kinds.values():
        model = mine[0].model
        width = max(chunk.index.shape[-1] for chunk in mine)
        index, masks = (
            torch.cat([functional.pad(part, (0, width - part.shape[-1])) for part in parts])
            for parts in ([chunk.index for chunk in mine], [chunk.masks for chunk in mine])
        )
        clients = [client for chunk in mine for client in chunk.clients]
        piles.append(Chunk(model, clients, torch.cat([chunk.members for chunk in mine]), index, masks))
    return piles


@dataclass(eq=False)
class CapturedRun:
    """One simulation's buffers and graphs on a GPU. The state's own tensors are the buffers, written in place."""

    simulation: Simulation
    state: State
    graphs: dict[Signature, Graph] = field(default_factory=dict)
    scans: dict[tuple[str, int], TracedScan] = field(default_factory=dict)
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
        self.is_apart = any(convolves(model, simulation.federation) for model in simulation.models.values())
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # in its group, of the client that is trained
        self.is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.is_cuda else None  # a bare one is the first GPU's
        self.pool = torch.cuda.graph_pool_handle() if self.is_cuda else None  # no two graphs of a run work at a time
        self.counter = torch.tensor(state.round, device=device)
        self.bad = torch.full((2,), -1, device=device)  # first round and client whose numbers were not finite
        self.batch_key = torch.tensor(keys.fold(simulation.seed, "batches"), device=device)
        self.noise_key = torch.tensor(keys.fold(simulation.seed, "noise"), device=device)
        # Made here: the compiler takes an arange inside a graph for 32-bit indices, and keys need 64 bits.
        self.steps = torch.arange(simulation.algorithm.num_batches, device=device)
        self.rates = rates(simulation.algorithm, next(iter(simulation.models.values())).dtype, device)
        self.personalize_key = torch.tensor(keys.fold(simulation.seed, "personalise"), device=device)
        index = simulation.federation.splits["train"].index
        # As long as the data: seeds leave a few rows more or less to nobody, and must not be compiled for one by one.
        self.index = functional.pad(index, (0, max(0, len(simulation.federation.x) - len(index))))
        is_everybody = simulation.clients_per_round == simulation.federation.num_clients
        members = cohort(
            keys.fold(simulation.seed, "rounds"),
            torch.arange(1 if is_everybody else simulation.num_rounds),
            simulation.federation.num_clients,
            simulation.clients_per_round,
        ).reshape(-1, simulation.clients_per_round)
        order = {name: number for number, name in enumerate(simulation.models)}
        self.signatures: list[Signature] = []
        if len(order) > 1:  # one graph per make-up of the cohort: clients of one architecture side by side
            names = [[simulation.model_of(client).name for client in row] for row in members.tolist()]
            ranks = torch.tensor([[order[name] for name in row] for row in names])
            members = members.gather(1, ranks.argsort(dim=1, stable=True))
            counts = [Counter(row) for row in names]
            self.signatures = [tuple((name, count[name]) for name in order if count[name]) for count in counts]
        else:
            self.signatures = [((next(iter(order)), simulation.clients_per_round),)] * simulation.num_rounds
        if is_everybody:
            self.signatures = self.signatures[:1] * simulation.num_rounds
        spare = 0 if is_everybody else max(MIN_ROUNDS, kernels.power_of_two(len(members))) - len(members)
        self.schedule = functional.pad(members, (0, 0, 0, spare)).to(device)
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
        width = min(simulation.schedule.batch_size, simulation.federation.largest_train_size)
        self.draw = shared_by_equal_runs(
            self._key("draw", width, simulation.federation.palette is None),
            lambda: Traced(drawing(width), compile_once, needs_numbers=False),
        )
        self.identities = simulation.federation.identity(torch.arange(simulation.federation.num_clients, device=device))
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
            self.before[s] = shared_by_equal_runs(self._key("before", s), before)
            self.after[s] = shared_by_equal_runs(self._key("after", s), after)
        self.evaluator = Executor("apart", one_by_one) if self.is_apart else EXECUTORS["vectorized"]()
        self.chunks = plan(simulation.federation, simulation.model_of, EVALUATED_SPLITS, one_by_one=self.is_apart)
        if self.is_apart:
            self.chunks = pile_up(self.chunks)

    def _key(self, *parts: Any) -> Any:
        """Runs with equal keys trace alike: rates, seeds and data are arguments of what is traced."""
        simulation = self.simulation
        settings = with_rates(simulation.algorithm, dict.fromkeys(self.rates))
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        how = (str(self.counter.device), kernels.dot_precision(), kernels.SharedGPU.runs, is_deterministic)
        models = tuple(
            (model, form(model.training_module), content((model.per_example_loss, model.per_example_metric)))
            for model in simulation.models.values()
        )
        exchange = simulation.exchange
        draws = exchange.upload.draws or exchange.download.draws
        wire = (exchange.upload, exchange.download, exchange.is_frozen, exchange.seed if draws else None)
        return (*parts, fingerprint.of_code(type(settings)), content(settings), tuple(self.rates), models, how, wire)

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
        result = self._train_group(self.simulation.models[name], *one)
        if name not in self.trained:  # while warming up: it must outlive what is captured
            most = max(dict(one).get(name, 0) for one in set(self.signatures))
            self.trained[name] = pytree.tree_map(lambda leaf: leaf.new_zeros(most, *leaf.shape[1:]), result)
        for table, leaf in zip(pytree.tree_leaves(self.trained[name]), pytree.tree_leaves(result), strict=True):
            table.index_copy_(0, self.place, leaf)
        self.place.add_(1).remainder_(count)

    def _all_trained(self, signature: Signature) -> list[tuple[Params, Kept]]:
        return [take(self.trained[name], slice(count)) for name, count in signature]

    def _finish(self, signature: Signature, prepared: Any, trained: list[tuple[Params, Kept]]) -> None:
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

    def _trained(self, signature: Signature) -> tuple[Any, list[tuple[Params, Kept]]]:
        """A cohort as it is prepared, and what its clients' local steps give."""
        prepared = self._before(signature)
        groups = zip(signature, prepared, strict=True)
        named = [
            (self.simulation.models[name], members, offers, kept) for (name, _), (members, _, offers, kept) in groups
        ]
        return prepared, self._train_all(named)

    def _train_all(self, groups: Sequence[tuple[Model, Tensor, Offer, Kept]]) -> list[tuple[Params, Kept]]:
        """Every group's local steps, on branches of the graph that do not wait for one another."""
        if not self.is_cuda or len(groups) == 1:
            return [self._train_group(*group) for group in groups]
        main = torch.cuda.current_stream()
        results = []
        branches = [torch.cuda.Stream() for _ in groups]
        for branch, group in zip(branches, groups, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                results.append(self._train_group(*group))
        for branch in branches:
            main.wait_stream(branch)
        return results

    def _train_group(self, model: Model, members: Tensor, offers: Offer, kept: Kept) -> tuple[Params, Kept]:
        """The clients [C, ...] of one architecture, so many at a time that their minibatches take bounded memory."""
        federation = self.simulation.federation
        train = federation.splits["train"]
        tables = (self.index, train.offset, train.size, self.identities, self.steps)
        palette = () if federation.palette is None else (federation.palette,)
        data = (federation.x, federation.y, palette, *tables)
        results = []
        count = kernels.ceil_divide(len(members), MAX_TOGETHER)
        for number in range(count):
            part = slice(len(members) * number // count, len(members) * (number + 1) // count)
            batches = self.draw(self.counter, self.batch_key, members[part], data)
            noise = members[part]  # of no use without dropout, and no kernel more
            if model.has_dropout:
                noise = torch.as_tensor(keys.fold(self.noise_key, self.counter, self.identities[noise]))
            results.append(self._train(model, *take((offers, kept), part), batches, noise))
        return results[0] if len(results) == 1 else pytree.tree_map(lambda *parts: torch.cat(parts), *results)

    def _train(self, model: Model, offers: Offer, kept: Kept, batches: Batches, noise: Tensor) -> tuple[Params, Kept]:
        """The clients of one architecture, all arguments [C, ...]: together, so that a kernel serves all of them."""
        count = batches.mask.shape[0]
        kind = TracedScan if count == 1 else TogetherScan
        if (model.name, count) not in self.scans:
            make = partial(kind, compile_graph, is_always_watched=True, hoists=True)
            self.scans[model.name, count] = shared_by_equal_runs(self._key("steps", model.name, count), make)
        exchange = exchange_with_rates(self.simulation.exchange, self.rates)

        def train(offer: Offer, kept: Kept, batches: Batches, noise: Tensor) -> tuple[Params, Kept]:
            with model.seeded(noise, is_alone=False):
                return exchange.train(model, offer, kept, batches)

        given = (offers, kept, batches, noise)
        with self.scans[model.name, count].running(given):
            if count == 1:
                return stack([train(*take(given, 0))])
            result: tuple[Params, Kept] = torch.vmap(train)(*given)
            return result

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
        """Warm up on the capturing stream, then capture; with it comes what the compiler is not done with."""
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
        """Compile and capture what the first rounds need; nothing where none are left."""
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
        cost = self._bytes_of_rounds()
        if state.round == 0 and state.best is None:
            yield from self._evaluated(cost)
        for number in range(state.round, simulation.num_rounds):
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

    def _evaluated(self, cost: Mapping[Signature, Cost]) -> Iterator[Progress]:
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

    def _bytes_of_rounds(self) -> dict[Signature, Cost]:
        """What a round of each make-up weighs on the wire, from one client of each architecture."""
        exchange, number = self.simulation.exchange, torch.zeros_like(self.counter)
        shared, rows, private = self._memories()
        each = {}
        for name, tree in private.items():
            model, one = self.simulation.models[name], self.identities[0]
            offer = exchange.offer(model, shared, take(rows, 0), number, one)
            update = exchange.download.decode(offer.weights, model.dtype)  # an update has the names that were sent
            reply, _ = exchange.reply(offer, update, take(tree, 0), number, one)
            each[name] = Cost(bytes_down([offer]), bytes_up([reply]))
        return {
            s: Cost(*(sum(count * each[name][way] for name, count in s) for way in range(2)))
            for s in set(self.signatures)
        }


def _write(table: Any, index: Tensor, old: Any, new: Any, is_good: Tensor) -> None:
    for leaf, before, after in zip(
        pytree.tree_leaves(table), pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True
    ):
        leaf.index_copy_(0, index, torch.where(is_good, after, before))


def _to_host(value: Tensor) -> Tensor:
    """A copy that the host may read after the stream has got there."""
    if not value.is_cuda:
        return value.clone()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def _restore(tree: Any, kept: Any) -> None:
    for leaf, value in zip(pytree.tree_leaves(tree), pytree.tree_leaves(kept), strict=True):
        leaf.copy_(value)


def side_by_side(runs: Sequence[Iterator[Progress]]) -> Iterator[tuple[int, Progress]]:
    """Let runs take turns, a round each: streams overlap only if their work is queued in turns."""
    going = dict(enumerate(runs))
    while going:
        for number in list(going):
            progress = next(going[number], None)
            if progress is None:
                del going[number]
            else:
                yield number, progress
