"""Which precision a method can be computed in on a GPU, and what is said where it is too low."""

import pytest
import torch
from support import simulate

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.engine import rounds as rounds_module
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
