"""Which precision a method can be computed in on a GPU, when training stops, and which round is chosen."""

from dataclasses import replace

import pytest
import torch
from support import simulate

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.engine import rounds as rounds_module
from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.rounds import is_spoilt, rounds

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_only_a_method_that_divides_small_differences_is_spoilt_by_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "dot_precision", lambda: "tf32")
    assert [name for name, method in ALGORITHMS.items() if is_spoilt(method(), GPU)] == ["per-fedavg-hf"]
    assert is_spoilt(ALGORITHMS["per-fedavg"](form="hessian-free"), GPU)
    assert not is_spoilt(ALGORITHMS["per-fedavg-hf"](), CPU)
    monkeypatch.setattr(rounds_module, "dot_precision", lambda: "tf32x3")
    assert not is_spoilt(ALGORITHMS["per-fedavg-hf"](), GPU)


def test_it_is_said_when_the_run_begins(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = simulate(ALGORITHMS["per-fedavg-hf"](local_steps=1), federation, rounds=1)
    next(rounds(simulation, simulation.initial_state()))
    assert not caplog.records
    monkeypatch.setattr(rounds_module, "is_spoilt", lambda algorithm, device: algorithm.needs.float32)
    next(rounds(simulation, simulation.initial_state()))
    assert "PerFedAvg divides a difference that tf32 rounds away; give --precision fp32" in caplog.text


@pytest.mark.parametrize("executor", ["loop", pytest.param("captured", marks=pytest.mark.slow)])
def test_training_stops_when_validation_stops_getting_better(federation: Federation, executor: str) -> None:
    method = ALGORITHMS["fedavg"](local_steps=1, local_lr=0.0)  # nothing is learned, so that the first round is best
    simulation = simulate(method, federation, rounds=20, executor=executor)
    schedule = replace(simulation.schedule, evaluate_every=5)
    simulation = replace(simulation, schedule=replace(schedule, patience=15))
    state = simulation.initial_state()
    assert len([moment for moment in rounds(simulation, state) if moment.evaluation]) == 4
    assert state.round == 15
    assert not list(rounds(simulation, state)), "a run that is over goes on"


def test_the_loss_chooses_the_round_where_asked(federation: Federation) -> None:
    simulation = simulate(ALGORITHMS["fedavg"](), federation, rounds=1)
    by_loss = replace(simulation, schedule=replace(simulation.schedule, select="loss"))
    count = torch.tensor([10.0])
    accurate, sure = (
        {"validation": SplitResult(torch.tensor([loss]), torch.tensor([hits]), count)}
        for loss, hits in ((9.0, 8.0), (3.0, 7.0))
    )
    for chosen, wanted in ((simulation, accurate), (by_loss, sure)):
        state = chosen.initial_state()
        for splits in (accurate, sure):
            chosen.choose(state, splits)
        assert state.best is not None
        assert state.best.evaluation.splits is wanted
