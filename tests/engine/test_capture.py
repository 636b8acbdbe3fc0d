"""What a GPU would replay, run on a CPU: the captured round is the loop's, for every method."""

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from support import assert_close, assert_same_bits, finish, memories_of, model, mostly_slow, simulate, with_steps
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.combinators import with_settings
from pfedhn.data.federation import Federation
from pfedhn.engine import blocks, capture, executors, gpu, local_steps
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.captured_round import rates
from pfedhn.engine.evaluate import Chunk
from pfedhn.engine.graphs import pile_up, side_by_side
from pfedhn.engine.local_steps import LocalSteps, trace_key
from pfedhn.engine.network import convolves
from pfedhn.engine.rounds import rounds
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Diverged, State
from pfedhn.errors import UserError
from pfedhn.params import copy


def algorithm(method: str) -> Any:
    return with_steps(method, 3)


def captured(simulation: Simulation) -> tuple[State, list[float]]:
    state = simulation.initial_state()
    run = CapturedRun(simulation, state)
    losses = [p.evaluation.splits["test"].mean_loss for p in run.rounds() if p.evaluation]
    return state, losses


@pytest.mark.parametrize(
    ("method", "cohort", "target"),
    mostly_slow(
        itertools.product(ALGORITHMS, (1, 3), ("mlp", "conv")),
        *((method, 3, "mlp") for method in ("pfedhn", "local", "per-fedavg")),
        ("pfedhn-pc", 1, "conv"),
    ),
)
def test_captured_is_the_loop(
    method: str, cohort: int, target: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "convolves", lambda *_: False)  # as where the package's kernels take convolutions
    loop = simulate(algorithm(method), federation, target, rounds=5, cohort=cohort, evaluate_every=2, executor="loop")
    expected = loop.initial_state()
    losses = [p.evaluation.splits["test"].mean_loss for p in loop.rounds(expected) if p.evaluation]
    fast = simulate(algorithm(method), federation, target, rounds=5, cohort=cohort, evaluate_every=2)
    state, fast_losses = captured(fast)
    assert_close(memories_of(state), memories_of(expected))
    assert fast_losses == pytest.approx(losses, rel=1e-6)
    assert (state.round, state.bytes_down, state.bytes_up) == (expected.round, expected.bytes_down, expected.bytes_up)
    assert state.best is not None
    assert expected.best is not None
    assert state.best.evaluation.step == expected.best.evaluation.step


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedhn-plus-pc"))
def test_a_round_can_be_gone_through_without_numbers(
    method: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which announces its kernels; `prepare` suppresses what it raises, and this does not."""
    monkeypatch.setattr(gpu, "_traced", {})
    simulation = simulate(algorithm(method), federation, "conv", cohort=2)
    state = simulation.initial_state()
    run = CapturedRun(simulation, state)
    before = copy((memories_of(state), run.counter, run.bad))
    with executors.without_numbers():
        _, trained = run._trained(run.signatures[0])
        trained.append(run._scores_of(run.chunks))
    assert all(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(trained))
    assert_same_bits((memories_of(state), run.counter, run.bad), before)
    assert not run.before[run.signatures[0]].ready


@pytest.mark.slow
def test_what_a_person_s_own_code_keeps_has_numbers(federation: Federation) -> None:
    @lru_cache
    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.float64)

    def metric(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(-1) == y) * ones(len(y))

    class Metric:
        def method(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return metric(outputs, y)

    for own in (metric, Metric().method, partial(metric)):
        ones.cache_clear()
        scores = {}
        for executor in ("loop", "captured"):
            target = {"mlp": replace(model(), per_example_metric=own)}
            simulation = simulate(PFedHN(local_steps=2), federation, target, rounds=3, executor=executor)
            assert not blocks.is_known(simulation)
            last = [p.evaluation for p in rounds(simulation, simulation.initial_state()) if p.evaluation][-1]
            scores[executor] = last.splits["test"].metric.tolist()
        assert scores["captured"] == scores["loop"]
        assert any(scores["loop"])
    known = simulate(PFedHN(local_steps=2), federation, executor="captured")
    assert blocks.is_known(known)
    assert blocks.is_known(blocks.on_blocks(known))
    known.models["mlp"].training_module.register_forward_hook(lambda *_: None)
    assert not blocks.is_known(known)


@pytest.fixture
def may_compile(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A compiler that waits for it, and then makes functions that tell who they are."""
    event = threading.Event()

    def compiled(part: gpu.BackgroundCompiledGraph) -> None:
        event.wait(60)
        part.best = lambda *values: part.graph.forward(*values)
        part.is_done = True

    monkeypatch.setattr(gpu, "_traced", {})
    monkeypatch.setattr(gpu.BackgroundCompiledGraph, "compile", compiled)
    monkeypatch.setattr(gpu, "WHOLE_PROCESS", nullcontext())  # or nothing could be traced while this compiler waits
    for place in (capture, local_steps):
        monkeypatch.setattr(place, "compile_once", gpu.BackgroundCompiledGraph)
    monkeypatch.setattr(local_steps, "compile_graph", gpu.BackgroundCompiledGraph)
    return event


@pytest.mark.parametrize("evaluate_every", [1, 100])
@pytest.mark.slow
def test_rounds_do_not_wait_for_the_compiler(
    evaluate_every: int, federation: Federation, may_compile: threading.Event
) -> None:
    """They begin with the graphs as they were traced, and are captured anew when all of them are compiled."""
    settings = {"rounds": 6, "evaluate_every": evaluate_every}
    loop = finish(simulate(PFedHN(local_steps=2), federation, executor="loop", **settings))
    simulation = simulate(PFedHN(local_steps=2), federation, **settings)
    state = simulation.initial_state()
    run = CapturedRun(simulation, state)
    progress = run.rounds()
    while state.round < 3:
        next(progress)
    assert [len(parts) for parts in run.uncompiled.values()] == [5]  # before, draw, what is hoisted, step, after
    first = dict(run.graphs)
    may_compile.set()
    gpu.COMPILER.wait()
    list(progress)
    assert not run.uncompiled
    assert set(run.graphs) == set(first)
    assert all(graph is not first[signature] for signature, graph in run.graphs.items())
    assert_close(memories_of(state), memories_of(loop))


@pytest.mark.slow
def test_a_run_beside_an_equal_one_waits_for_the_compiler(federation: Federation, may_compile: threading.Event) -> None:
    """The first goes on as it was traced; the second is captured once, from what was compiled."""
    settings = {"rounds": 9, "evaluate_every": 1, "executor": "captured"}
    simulations = [simulate(PFedHN(local_steps=2), federation, seed=seed, **settings) for seed in range(2)]
    states = [simulation.initial_state() for simulation in simulations]
    first, second = (rounds(*each) for each in zip(simulations, states, strict=True))
    next(first)
    for _ in range(4):
        assert next(second).is_pause
        next(first)
    assert states[0].round > 0
    assert states[1].best is None
    may_compile.set()
    gpu.COMPILER.wait()
    captured: list[CapturedRun] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedRun, "_renew_graphs", lambda run: captured.append(run) if run.uncompiled else None)
        list(second)
    assert not captured
    list(first)
    for simulation, state in zip(simulations, states, strict=True):
        loop = finish(replace(simulation, executor="loop"))
        assert_close(memories_of(state), memories_of(loop))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_the_compiler_has_not_begun_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = threading.Semaphore(0)

    def compiled(part: gpu.BackgroundCompiledGraph) -> None:
        allowed.acquire(timeout=60)
        part.is_done = True

    monkeypatch.setattr(gpu.BackgroundCompiledGraph, "compile", compiled)
    one = torch.tensor(1.0)
    parts = [gpu.BackgroundCompiledGraph(executors.make_fx(torch.exp)(one), [one]) for _ in range(3)]
    for part in parts:
        part(one)
    dropping = threading.Thread(target=gpu.COMPILER.drop)
    until(lambda: len(gpu.COMPILER.waiting) == 2)  # the first is begun
    dropping.start()
    until(lambda: not gpu.COMPILER.waiting)
    assert dropping.is_alive()  # it waits for the first
    parts[1](one)
    allowed.release()
    dropping.join(30)
    assert not dropping.is_alive()  # and not for what others ask for meanwhile
    assert [(part.is_asked, part.is_done) for part in parts] == [(True, True), (True, False), (False, False)]
    allowed.release()
    gpu.COMPILER.wait()
    assert parts[1].is_done


@pytest.mark.slow
def test_the_end_of_another_run_does_not_keep_one_from_being_compiled(
    federation: Federation, may_compile: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "Repeated", lambda work: Mock())  # a GPU replays kernels, and asks nobody meanwhile
    simulation = simulate(PFedHN(local_steps=2), federation, rounds=4, evaluate_every=100)
    run = CapturedRun(simulation, simulation.initial_state())
    progress = run.rounds()
    next(progress)
    until(lambda: len(gpu.COMPILER.waiting) == 4)
    ending = threading.Thread(target=gpu.COMPILER.drop)
    ending.start()
    until(lambda: not gpu.COMPILER.waiting)
    while run.state.round == 0:
        next(progress)
    may_compile.set()
    ending.join()
    gpu.COMPILER.wait()
    list(progress)
    assert not run.uncompiled


def test_nobody_compiles_while_a_network_is_made() -> None:
    """The compiler sets PyTorch's generator back to where it was when it began, and weights are drawn from it."""
    parts = []

    def factory() -> nn.Module:
        began = threading.Event()
        parts.append(Mock(compile=began.set))
        gpu.COMPILER.put(parts[-1])
        assert not began.wait(0.1)
        return nn.Linear(2, 1)

    replace(model("mlp"), factory=factory).fresh(0)
    assert parts
    gpu.COMPILER.wait()


def test_parts_are_not_shared_where_they_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for one GPU runs on no other, and a deterministic run needs parts of its own."""
    monkeypatch.setattr(gpu, "_compiled", {})
    monkeypatch.setattr(gpu, "BackgroundCompiledGraph", Mock(side_effect=lambda *_: Mock()))
    graph = executors.make_fx(torch.exp)(torch.tensor(1.0))
    first, second = (Mock(is_cuda=True, shape=(), dtype=torch.float32, device=f"cuda:{n}") for n in range(2))
    first.stride = second.stride = tuple
    parts = [gpu.compile_graph(graph, [leaf]) for leaf in (first, second, first)]
    assert parts[0] is parts[2]
    assert parts[0] is not parts[1]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert gpu.compile_graph(graph, [first]) is not parts[0]


def test_a_graph_that_cannot_be_compiled_runs_as_it_was_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction")

    one = torch.tensor(1.0)
    part = gpu.BackgroundCompiledGraph(executors.make_fx(torch.exp)(one), [one])
    monkeypatch.setattr("torch._inductor.compile", fails)
    assert part(one) == one.exp()
    gpu.COMPILER.wait()
    assert part.is_done
    assert part(one) == one.exp()
    assert [record.message for record in caplog.records] == [
        "a part of the round could not be compiled and runs slower: RuntimeError: no such instruction"
    ]


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedme"))
@pytest.mark.slow
def test_memories_share_nothing_with_one_another_or_the_start(method: str, federation: Federation) -> None:
    """They are written in place; with one client nothing was ever copied, and pFedMe's shared model was its private."""
    start = {"mlp": model().fresh(3)}
    before = copy(start)
    client = federation.splits["train"].of(2)
    alone = Federation.from_clients([(federation.x[client], federation.y[client])]).to("cpu", torch.float64)
    runs = [simulate(algorithm(method), alone, rounds=3, executor=name, starts=start) for name in ("loop", "captured")]
    states = [run.initial_state() for run in runs]
    for run, state in zip(runs, states, strict=True):
        list(rounds(run, state))
    assert_close(memories_of(states[1]), memories_of(states[0]))
    assert_same_bits(start, before)


@pytest.mark.parametrize("method", mostly_slow(["local", "fedper", "pfedhn-pc"], "fedper"))
@pytest.mark.slow
def test_a_large_cohort_trains_some_at_a_time(
    method: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_steps, "MAX_TOGETHER", 2)
    batches = []
    train = LocalSteps._train
    monkeypatch.setattr(
        LocalSteps, "_train", lambda self, *arguments: batches.append(arguments[-2]) or train(self, *arguments)
    )
    expected = finish(simulate(algorithm(method), federation, rounds=3, cohort=5, executor="loop"))
    state, _ = captured(simulate(algorithm(method), federation, rounds=3, cohort=5))
    assert_close(memories_of(state), memories_of(expected))
    assert {len(some.mask) for some in batches} <= {1, 2}


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "local"))
@pytest.mark.slow
def test_with_pytorch_s_convolutions_one_client_s_steps_are_a_graph(
    method: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is replayed for each: the convolutions of several clients at once are grouped ones, and slow on a GPU."""
    counts = []
    train, scores = LocalSteps._train, CapturedRun._scores_of
    monkeypatch.setattr(
        LocalSteps, "_train", lambda self, *arguments: counts.append(len(arguments[-1])) or train(self, *arguments)
    )
    monkeypatch.setattr(
        CapturedRun, "_scores_of", lambda self, chunks: counts.append(len(chunks[0].members)) or scores(self, chunks)
    )
    loop, fast = (
        simulate(algorithm(method), federation, "batchnorm", rounds=3, cohort=4, evaluate_every=4, executor=name)
        for name in ("loop", "captured")
    )
    expected = loop.initial_state()
    losses = [p.evaluation.splits["test"].mean_loss for p in loop.rounds(expected) if p.evaluation]
    state, fast_losses = captured(fast)
    assert_close(memories_of(state), memories_of(expected), atol=1e-10)  # rounding, which Adam makes larger
    assert fast_losses == pytest.approx(losses, rel=1e-6)
    assert set(counts) == {1}


@pytest.mark.slow
def test_groups_of_which_some_have_convolutions(federation: Federation) -> None:
    models = {name: model(name) for name in ("conv", "mlp")}
    mixed = federation.with_architectures(["conv", "mlp", "conv"] * 2)
    runs = [simulate(PFedHN(local_steps=2), mixed, models, rounds=6, cohort=4, executor="loop") for _ in range(2)]
    expected = finish(runs[0])
    state, _ = captured(runs[1])
    assert_close(memories_of(state), memories_of(expected))
    assert state.best is not None
    assert expected.best is not None
    assert_close(state.best.evaluation.splits["test"].loss, expected.best.evaluation.splits["test"].loss)


def test_clients_of_unlike_size_are_not_filled_up_to_the_largest() -> None:
    def chunk(client: int, width: int) -> Chunk:
        index = torch.arange(width).reshape(1, -1) + 1
        return Chunk(target, [client], torch.tensor([client]), index, torch.ones(1, 2, width, dtype=torch.bool))

    target = model()
    piles = pile_up([chunk(0, 3), chunk(1, 4), chunk(2, 900)])
    assert [(pile.clients, pile.index.shape) for pile in piles] == [([0, 1], (2, 4)), ([2], (1, 900))]
    assert piles[0].index.tolist() == [[1, 2, 3, 0], [1, 2, 3, 4]]
    assert piles[0].masks[:, 0].tolist() == [[True, True, True, False], [True] * 4]


def test_what_lies_beside_the_fields_of_a_dataclass_counts() -> None:
    @dataclass
    class Loss:
        scale: float = 1.0

    one, other = Loss(), Loss()
    assert gpu.content(one) == gpu.content(other)
    other.more = 0.1  # type: ignore[attr-defined]
    assert gpu.content(one) != gpu.content(other)


@pytest.mark.parametrize(("target", "is_found"), [("mlp", False), ("conv", True), ("batchnorm", True)])
def test_convolutions_are_found(target: str, is_found: bool, federation: Federation) -> None:
    assert convolves(model(target), federation) is is_found


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [1, 4])
def test_several_architectures(cohort: int, federation: Federation) -> None:
    models = {name: model(name) for name in ("mlp", "wide")}
    mixed = federation.with_architectures(["mlp", "wide"] * 3)
    runs = [simulate(PFedHN(local_steps=2), mixed, models, rounds=6, cohort=cohort, executor="loop") for _ in range(2)]
    expected = finish(runs[0])
    state, _ = captured(runs[1])
    assert_close(memories_of(state), memories_of(expected))


@pytest.mark.slow
def test_an_architecture_that_nobody_runs(federation: Federation, caplog: pytest.LogCaptureFixture) -> None:
    models = {name: model(name) for name in ("mlp", "wide")}
    alike = federation.with_architectures(["mlp"] * 6)
    runs = [simulate(PFedHN(local_steps=2), alike, models, rounds=3, executor=name) for name in ("loop", "captured")]
    states = [run.initial_state() for run in runs]
    for run, state in zip(runs, states, strict=True):
        list(rounds(run, state))
    assert_close(memories_of(states[1]), memories_of(states[0]))
    assert not [record for record in caplog.records if record.name.startswith("pfedhn")]


@pytest.mark.slow
def test_a_finished_run_captures_nothing(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next round would lie behind the schedule, which is an error that a GPU does not recover from."""
    simulation = simulate(PFedHN(local_steps=2), federation, rounds=3)
    state, _ = captured(simulation)
    monkeypatch.setattr(CapturedRun, "_parts", lambda *_: pytest.fail("there is no round left"))
    assert list(CapturedRun(simulation, state).rounds()) == []


@pytest.mark.slow
def test_a_make_up_met_late_is_captured_behind_the_rounds_before_it(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the counter is read on the run's stream: on another it might not have been counted up yet."""
    depth = [0]

    @contextmanager
    def on_stream(self: CapturedRun) -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    def watched(tree: object) -> object:
        reads.append(depth[0])
        return copy(tree)

    reads: list[int] = []
    monkeypatch.setattr(CapturedRun, "_on_stream", on_stream)
    monkeypatch.setattr(capture, "copy", watched)
    models = {name: model(name) for name in ("mlp", "wide")}
    mixed = federation.with_architectures(["mlp", "wide"] * 3)
    captured(simulate(PFedHN(local_steps=2), mixed, models, rounds=6))
    assert reads == [1] * 3  # two make-ups and the evaluation


@pytest.mark.slow
def test_divergence_keeps_the_round_before(federation: Federation) -> None:
    """The flag on the device names the first bad round and client, and nothing is written after it."""
    wild = PFedHN(local_steps=40, local_lr=1e30, local_clip=None)
    loop = simulate(wild, federation, rounds=6, evaluate_every=4, executor="loop")
    expected = loop.initial_state()
    with pytest.raises(Diverged) as by_loop:
        list(loop.rounds(expected))
    fast = simulate(wild, federation, rounds=6, evaluate_every=4)
    state = fast.initial_state()
    with pytest.raises(Diverged) as by_capture:
        list(CapturedRun(fast, state).rounds())
    assert str(by_capture.value) == str(by_loop.value)
    assert state.round == expected.round
    assert_close(memories_of(state)[:2], memories_of(expected)[:2])


def test_runs_side_by_side_are_the_runs_alone(federation: Federation) -> None:
    def some() -> list[Simulation]:
        return [
            simulate(ALGORITHMS["pfedhn"](local_steps=2, lr=lr), federation, rounds=4, seed=seed)
            for lr, seed in ((0.1, 1), (0.3, 2))
        ]

    alone = [captured(simulation)[0] for simulation in some()]
    states = [simulation.initial_state() for simulation in some()]
    together = [CapturedRun(simulation, state).rounds() for simulation, state in zip(some(), states, strict=True)]
    steps = [number for number, _ in side_by_side(together)]
    assert set(steps[:2]) == {0, 1}  # they take turns
    for state, expected in zip(states, alone, strict=True):
        assert_close(memories_of(state), memories_of(expected))


def test_rates_are_data() -> None:
    """A grid over learning rates runs from one graph: no rate is written into it."""
    always = {"server.lr", "local_lr", "server.weight_decay", "embeddings.scale"}
    assert set(rates(PFedHN(), torch.float32, torch.device("cpu"))) == always
    given = ALGORITHMS["pfedhn"](embedding_lr=1.0, averaging=0.9)
    assert set(rates(given, torch.float32, torch.device("cpu"))) == always | {"embeddings.lr", "averaging"}
    on_shared = ALGORITHMS["pfedhn"](head="added")
    assert set(rates(on_shared, torch.float32, torch.device("cpu"))) == always | {"shared_lr"}


@pytest.mark.slow
def test_splits_of_other_lengths_share_what_was_traced(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows more or less that nobody has, as from seed to seed, or a longer run, compile nothing anew."""
    traces: list[object] = []
    trace = executors.make_fx
    monkeypatch.setattr(gpu, "_traced", {})
    monkeypatch.setattr(executors, "make_fx", lambda function, **how: traces.append(function) or trace(function, **how))
    rows = federation.splits["train"]
    fewer = replace(rows, index=rows.index[:-1], size=rows.size - (torch.arange(len(rows)) == len(rows) - 1).long())
    shorter = replace(federation, splits={**federation.splits, "train": fewer})
    target = {"mlp": model()}
    captured(simulate(PFedHN(local_steps=2), federation, target, rounds=2))
    so_far = len(traces)
    state, _ = captured(simulate(PFedHN(local_steps=2), shorter, target, rounds=3))
    assert len(traces) == so_far > 0
    expected = finish(simulate(PFedHN(local_steps=2), shorter, target, rounds=3, executor="loop"))
    assert_close(memories_of(state), memories_of(expected))


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "fedavg"))
@pytest.mark.slow
def test_points_of_a_grid_share_what_was_traced(
    method: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rates and seeds trace nothing anew and are not taken for the first ones; other settings are traced."""
    traces: list[object] = []
    trace = executors.make_fx
    monkeypatch.setattr(gpu, "_traced", {})
    monkeypatch.setattr(executors, "make_fx", lambda function, **how: traces.append(function) or trace(function, **how))
    target = {"mlp": model()}
    first = algorithm(method)
    names = rates(first, torch.float32, torch.device("cpu"))
    halves = {name: 0.5 * float(value) for name, value in names.items()}
    halves.pop("shared_lr", None)  # which has no effect here, and is refused
    other = with_settings(first, halves)
    captured(simulate(first, federation, target, rounds=3, cohort=2))
    so_far = len(traces)
    assert so_far > 0
    state, _ = captured(simulate(other, federation, target, rounds=3, cohort=2, seed=5))
    assert len(traces) == so_far
    expected = finish(simulate(other, federation, target, rounds=3, cohort=2, seed=5, executor="loop"))
    assert_close(memories_of(state), memories_of(expected))
    captured(simulate(with_settings(first, SETTINGS[method]), federation, target, rounds=3, cohort=2))
    assert len(traces) > so_far


SLOPE = 1.0


@pytest.mark.parametrize(
    "change", mostly_slow(["activation", "slope", "width", "private", "hook", "global"], "private")
)
@pytest.mark.slow
def test_one_factory_may_make_other_networks(
    change: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that reads a variable is the same function after the variable has changed."""
    hidden = {"activation": nn.Identity, "slope": 0.1, "width": 5, "private": 1.0, "hook": 1.0, "global": 1.0}

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._scale = hidden["private"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self._scale * SLOPE

    def make() -> nn.Module:
        scaled, scale = Scaled(), hidden["hook"]
        scaled.register_forward_hook(lambda module, given, x: x * scale)
        first, last = (nn.Linear(*sizes, bias=False) for sizes in ((72, hidden["width"]), (hidden["width"], 4)))
        layers = [first, hidden["activation"](), nn.LeakyReLU(hidden["slope"]), scaled, last]
        return nn.Sequential(nn.Flatten(), *layers)  # without biases: blocks would have classes of their own

    others = {"activation": nn.Tanh, "slope": 0.5, "width": 6, "private": 3.0, "hook": 3.0, "global": 3.0}
    for value in (None, others[change]):
        hidden[change] = value or hidden[change]
        monkeypatch.setattr(f"{__name__}.SLOPE", hidden["global"])
        target = {"mlp": replace(model(), factory=make)}
        expected = finish(simulate(PFedHN(local_steps=3), federation, target, rounds=3, executor="loop"))
        state, _ = captured(simulate(PFedHN(local_steps=3), federation, target, rounds=3))
        assert_close(memories_of(state), memories_of(expected))


def test_networks_that_are_alike_have_one_form() -> None:
    """Though they lie elsewhere in memory; what holds itself, and what can be compared with nothing, have forms too."""

    def make(scale: float = 1.0) -> nn.Module:
        module = nn.Sequential(nn.LSTM(3, 2), nn.TransformerEncoderLayer(4, 2, 8))
        module._activation, module._call = (lambda x: scale * x), partial(max, scale)
        module._parent, module._bound = [module], module.forward
        module._settings = {"scale": numpy.full(2, scale), "names": {"a", "b"}, "table": torch.zeros(3)}
        return module

    first = gpu.form(make())
    assert hash(first) == hash(gpu.form(make()))
    assert first == gpu.form(make())
    assert first != gpu.form(make(2.0))
    for kind in (threading.Lock, lambda: memoryview(bytearray(b"a"))):
        one, other = kind(), kind()
        assert hash(gpu.content([one])) == hash(gpu.content([one]))
        assert gpu.content([one]) == gpu.content([one])
        assert gpu.content([one]) != gpu.content([other])


def test_a_setting_that_is_not_shown_counts(federation: Federation) -> None:
    @dataclass(frozen=True)
    class Hidden(PFedHN):
        scale: float = field(default=1.0, repr=False)

    first, other, alike = (simulate(Hidden(scale=scale), federation) for scale in (1.0, 3.0, 1.0))
    one, two, three = (trace_key(each, {}) for each in (first, other, alike))
    assert one == three
    assert one != two


SETTINGS: dict[str, dict[str, float]] = {method: {"local_momentum": 0.5} for method in ALGORITHMS} | {
    "per-fedavg": {"local_steps": 2},
    "per-fedavg-hf": {"local_steps": 2},
    "pfedme": {"outer_steps": 2},
}


def test_what_cannot_be_captured_runs_all_the_same(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once why, and nothing of the attempt is left in the state."""

    attempts: list[weakref.ref[CapturedRun]] = []

    def refuse(self: CapturedRun, chunks: object) -> None:
        attempts.append(weakref.ref(self))
        raise RuntimeError("operation not permitted when stream is capturing\nand much more")

    monkeypatch.setattr(CapturedRun, "_evaluate", refuse)
    runs = [simulate(PFedHN(local_steps=2), federation, rounds=3, executor=name) for name in ("loop", "captured")]
    states = [run.initial_state() for run in runs]
    list(rounds(runs[0], states[0]))
    gc.freeze()  # what other tests left behind need not be searched
    for _ in rounds(runs[1], states[1]):
        gc.collect()
        assert attempts[0]() is None  # nor is anything of it left in memory
    gc.unfreeze()
    assert_close(memories_of(states[1]), memories_of(states[0]))
    assert caplog.text.count("cannot be captured") == 1
    assert "not permitted" in caplog.text
    assert "much more" not in caplog.text


def test_a_capture_that_fails_leaves_the_stream(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for `torch.cuda.graph`, which does not go back to the stream before when capturing fails."""
    streams = ["default"]

    class Graph:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None:
            streams.append("capturing")

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("capture failed")

    @contextmanager
    def on_stream(self: CapturedRun) -> Iterator[None]:
        before = list(streams)
        try:
            yield
        finally:
            streams[:] = before

    run = CapturedRun(simulation := simulate(PFedHN(local_steps=2), federation), simulation.initial_state())
    run.stream = Mock()
    monkeypatch.setattr(CapturedRun, "_on_stream", on_stream)
    for name in ("current_stream", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    with pytest.raises(RuntimeError, match="capture failed"):
        run.prepare()
    assert streams == ["default"]


def test_what_a_person_can_mend_is_no_reason_to_run_otherwise(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedRun, "prepare", Mock(side_effect=UserError("mend this.")))
    simulation = simulate(PFedHN(local_steps=2), federation, executor="captured")
    with pytest.raises(UserError, match="mend this"):
        list(rounds(simulation, simulation.initial_state()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_captured_on_another_card(federation: Federation) -> None:
    there = federation.to("cuda:1", torch.float32)
    target = {"mlp": replace(model(dtype=torch.float32), device=torch.device("cuda:1"))}
    runs = [simulate(PFedHN(local_steps=2), there, target, rounds=3, executor=name) for name in ("loop", "captured")]
    states = [run.initial_state() for run in runs]
    for run, state in zip(runs, states, strict=True):
        list(rounds(run, state))
    assert_close(memories_of(states[1]), memories_of(states[0]), rtol=1e-4, atol=1e-6)


def test_a_network_that_cannot_be_traced_runs_step_by_step(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    class Choosy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x)
            return y if float(y.detach().sum()) > 0 else 2 * y  # a branch on a value

    plain = model()
    choosy = replace(plain, factory=lambda: Choosy(*plain.factory().children()))
    runs = [simulate(PFedHN(local_steps=3), federation, {"mlp": choosy}, executor=name) for name in ("loop", "traced")]
    expected, state = (finish(run) for run in runs)
    assert_close(memories_of(state), memories_of(expected))
    assert caplog.text.count("cannot be traced") == 1


def test_what_was_compiled_for_runs_of_the_past_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with buffers is compiled for each run, since they are constants of its graph."""
    monkeypatch.setattr(gpu, "_compiled", {})
    monkeypatch.setattr(gpu, "MAX_CACHED", 2)
    monkeypatch.setattr(gpu, "BackgroundCompiledGraph", lambda graph, *_: graph.forward)
    on_gpu = Mock(is_cuda=True, shape=(), dtype=torch.float32)
    for number in range(3):
        constant = torch.tensor(float(number))
        graph = executors.make_fx(constant.add)(torch.tensor(1.0))
        compiled = gpu.compile_graph(graph, [on_gpu])
        assert compiled(torch.tensor(1.0)) == 1 + number
    assert len(gpu._compiled) == 2


def test_a_deterministic_run_chooses_no_kernels_by_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDHN_AUTOTUNE", "1")
    assert gpu.is_autotuned()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not gpu.is_autotuned()
