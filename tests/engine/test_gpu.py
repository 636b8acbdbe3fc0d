"""What only a real card shows of captured rounds; float64, so that they must equal the loop to rounding. Skipped in CI.

python -m pytest -q -p no:xdist tests/engine/test_gpu.py tests/kernels/test_conv.py tests/kernels/test_linear.py
"""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ClosesOver, assert_close, finish, memories_of, model, simulate
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.utils import _pytree as pytree

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.data.federation import Federation
from pfedhn.engine import gpu
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.graphs import side_by_side
from pfedhn.engine.local_steps import LocalSteps
from pfedhn.engine.rounds import rounds
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.kernels.launch import SharedGPU
from pfedhn.models import LeNet
from pfedhn.storage.checkpoint import load_state, save_state
from pfedhn.storage.identity import data_digest

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler warns of itself
]


def on_card(algorithm: Any, federation: Federation, *names: str, **settings: Any) -> Simulation:
    models = {name: replace(model(name), device="cuda") for name in names or ("mlp",)}
    return simulate(algorithm, federation.to("cuda"), models, **settings)


def captured(simulation: Simulation) -> State:
    state = simulation.initial_state()
    run = CapturedRun(simulation, state)
    run.prepare()  # here, so that what cannot be captured fails instead of falling back
    run.settle()
    list(run.rounds())
    return state


@pytest.mark.parametrize(("method", "cohort"), [("pfedhn", 1), ("pfedhn-pc", 3), ("fedper", 3), ("per-fedavg", 2)])
def test_captured_is_the_loop(method: str, cohort: int, federation: Federation) -> None:
    algorithm = ALGORITHMS[method](local_steps=3)
    settings = {"rounds": 5, "cohort": cohort, "evaluate_every": 2}
    expected = finish(on_card(algorithm, federation, executor="loop", **settings))
    assert_close(memories_of(captured(on_card(algorithm, federation, **settings))), memories_of(expected))


@pytest.mark.parametrize("cohort", [1, 3])
def test_images_are_bytes_on_the_card(cohort: int, federation: Federation) -> None:
    algorithm, settings = ALGORITHMS["pfedhn"](local_steps=3), {"rounds": 5, "cohort": cohort, "evaluate_every": 2}
    simulation = on_card(algorithm, federation, "conv", **settings)
    assert simulation.federation.x.dtype == torch.uint8
    assert data_digest(simulation.federation) == data_digest(federation)
    there = replace(federation.to("cuda"), x=federation.x.cuda())
    expected = captured(replace(simulation, federation=there))
    assert_close(memories_of(captured(simulation)), memories_of(expected))


@pytest.mark.parametrize("method", ["pfedhn", "local", "fedper"])
def test_clients_whose_steps_are_a_graph_of_their_own(method: str, federation: Federation) -> None:
    algorithm = ALGORITHMS[method](local_steps=3)
    settings = {"rounds": 5, "cohort": 4, "evaluate_every": 8}
    names = ("batchnorm", "mlp") if method == "pfedhn" else ("batchnorm",)
    if len(names) > 1:
        federation = federation.with_architectures([*names, names[0]] * 2)
    expected = finish(on_card(algorithm, federation, *names, executor="loop", **settings))
    simulation = on_card(algorithm, federation, *names, **settings)
    assert CapturedRun(simulation, simulation.initial_state()).is_apart
    state = captured(simulation)
    assert_close(memories_of(state), memories_of(expected))
    assert state.best is not None
    assert expected.best is not None
    assert_close(state.best.evaluation.splits["test"].loss, expected.best.evaluation.splits["test"].loss)


def test_captured_before_and_after_the_compiler_is_done(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ("_traced", "_compiled"):
        monkeypatch.setattr(gpu, known, {})
    settings = {"rounds": 60, "evaluate_every": 1}
    expected = finish(on_card(PFedHN(local_steps=3), federation, executor="loop", **settings))
    simulation = on_card(PFedHN(local_steps=3), federation, **settings)
    state = simulation.initial_state()
    run = CapturedRun(simulation, state)
    rounds_of_it = run.rounds()
    next(rounds_of_it)
    assert run.uncompiled
    while state.round < 30:
        next(rounds_of_it)
    run.settle()
    list(rounds_of_it)
    assert not run.uncompiled
    assert_close(memories_of(state), memories_of(expected))


def test_the_chosen_round_lies_on_the_host(federation: Federation) -> None:
    settings = {"rounds": 4, "evaluate_every": 1}
    expected = finish(on_card(PFedHN(local_steps=3), federation, executor="loop", **settings)).best
    best = captured(on_card(PFedHN(local_steps=3), federation, **settings)).best
    assert best is not None
    assert expected is not None
    assert {leaf.device.type for leaf in pytree.tree_leaves(best.memories[:2])} == {"cpu"}
    assert best.evaluation.round == expected.evaluation.round
    assert_close(best.memories[:2], expected.memories[:2])


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_step_may_close_over_what_was_received(cohort: int, federation: Federation) -> None:
    settings = {"rounds": 5, "cohort": cohort}
    expected = finish(on_card(ClosesOver(local_steps=3), federation, executor="loop", **settings))
    assert_close(
        memories_of(captured(on_card(ClosesOver(local_steps=3), federation, **settings))), memories_of(expected)
    )


def test_a_frozen_layer(federation: Federation) -> None:
    def factory() -> nn.Module:
        network = model("conv").factory()
        network.conv.requires_grad_(False)  # type: ignore[union-attr]
        return network

    target = {"conv": replace(model("conv"), factory=factory, device="cuda")}
    there = federation.to("cuda")
    runs = [
        simulate(FedAvg(local_steps=3), there, target, rounds=4, cohort=3, executor=name) for name in ("loop", "auto")
    ]
    assert_close(memories_of(captured(runs[1])), memories_of(finish(runs[0])))


def test_architectures_whose_graphs_are_captured_on_the_way(federation: Federation) -> None:
    mixed = federation.with_architectures(["mlp", "wide"] * 3)
    runs = [on_card(PFedHN(local_steps=2), mixed, "mlp", "wide", rounds=8, executor=name) for name in ("loop", "auto")]
    assert_close(memories_of(captured(runs[1])), memories_of(finish(runs[0])))


def test_a_row_at_a_time(federation: Federation) -> None:
    runs = [
        on_card(PFedHN(local_steps=2), federation, rounds=3, batch_size=1, executor=name) for name in ("loop", "auto")
    ]
    assert_close(memories_of(captured(runs[1])), memories_of(finish(runs[0])))


def test_after_a_run_that_could_not_be_captured_others_can(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [
        on_card(PFedHN(local_steps=2), federation, rounds=3, executor=name) for name in ("loop", "captured", "captured")
    ]
    expected = memories_of(finish(runs[0]))
    with monkeypatch.context() as patch:
        patch.setattr(CapturedRun, "_evaluate", lambda *_: torch.cuda.synchronize())  # not allowed while capturing
        state = runs[1].initial_state()
        list(rounds(runs[1], state))
    assert "cannot be captured" in caplog.text
    assert_close(memories_of(state), expected)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_close(memories_of(captured(runs[2])), expected)


def test_graphs_may_be_freed_while_another_is_captured(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(on_card(PFedHN(local_steps=2), federation, rounds=2))
    work = LocalSteps.train_all

    def untidy(self: LocalSteps, groups: Any) -> Any:
        gc.collect()
        return work(self, groups)

    monkeypatch.setattr(LocalSteps, "train_all", untidy)
    runs = [on_card(PFedHN(local_steps=2), federation, rounds=3, executor=name) for name in ("loop", "auto")]
    assert_close(memories_of(captured(runs[1])), memories_of(finish(runs[0])))


def test_a_run_that_stopped_goes_on(federation: Federation, tmp_path: Path) -> None:
    whole, part = (on_card(PFedHN(local_steps=2), federation, rounds=7, evaluate_every=3) for _ in range(2))
    expected = captured(whole)
    state = part.initial_state()
    for progress in CapturedRun(part, state).rounds():
        if progress.step == 4:
            save_state(tmp_path, state, part)
            break
    again = load_state(tmp_path, part).state
    assert again is not None
    assert again.round == 4
    list(CapturedRun(part, again).rounds())
    assert_close(memories_of(again), memories_of(expected))
    assert again.best is not None
    assert expected.best is not None
    assert again.best.evaluation.step == expected.best.evaluation.step


def test_runs_side_by_side_are_the_runs_alone(federation: Federation) -> None:
    def some() -> list[Simulation]:
        return [
            on_card(ALGORITHMS["pfedhn"](local_steps=4, lr=0.1 * n), federation, rounds=20, seed=n) for n in range(1, 9)
        ]

    alone = [memories_of(captured(simulation)) for simulation in some()]
    states = [simulation.initial_state() for simulation in some()]
    for _ in side_by_side([CapturedRun(s, state).rounds() for s, state in zip(some(), states, strict=True)]):
        pass
    for state, expected in zip(states, alone, strict=True):
        assert_close(memories_of(state), expected)


@pytest.mark.parametrize("classes", [10, 47, 100, 1000])
def test_the_same_gradient_every_time(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedGPU, "runs", 24)
    torch.manual_seed(0)
    net = LeNet(classes).cuda()
    x, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(classes, (64,), device="cuda")
    weights = dict(net.named_parameters())

    def slope() -> Tensor:
        found = grad(lambda w: functional.cross_entropy(functional_call(net, w, (x,)), y))(weights)
        return torch.cat([value.flatten() for value in found.values()])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = slope()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            again = slope()
            count = torch.zeros((), device="cuda")  # captured: set to zero by every replay
            count += (again != first).any()
        differences = torch.zeros((), device="cuda")
        for _ in range(20_000):
            graph.replay()
            differences += count
    torch.cuda.synchronize()
    assert differences.item() == 0
