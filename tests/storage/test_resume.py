"""Stopped at any moment and gone on: the same bits as a run that was never stopped, for every method."""

import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import assert_same_bits, memories_of, mostly_slow, simulate, with_steps

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Diverged, Progress
from pfedhn.runs.execute import drain, execute
from pfedhn.runs.run import Run
from pfedhn.storage.checkpoint import CheckpointError, checkpoints, load_state, save_state
from pfedhn.storage.directory import identity, read_history, read_spec
from pfedhn.storage.schema import Moment


class Killed(BaseException):
    """Stands for kill -9: nothing gets to clean up after it."""


def simulation(method: str, federation: Federation, executor: str = "auto") -> Simulation:
    return simulate(with_steps(method, 2), federation, rounds=10, cohort=2, evaluate_every=3, executor=executor)


def run(simulation: Simulation, directory: Path, **options: Any) -> Run:
    return drain(execute(simulation, directory, **options))


def run_killed_at(step: int, simulation: Simulation, directory: Path, every: int) -> None:
    def watch(progress: Progress, found: Run) -> None:
        if progress.step >= step:
            raise Killed

    with pytest.raises(Killed):
        run(simulation, directory, watch=watch, checkpoint_every=every)


def without_seconds(directory: Path) -> list[Moment]:
    return [replace(moment, seconds=0.0) for moment in read_history(directory)]


def assert_same_run(found: Run, expected: Run, directory: Path, expected_directory: Path) -> None:
    assert_same_bits(memories_of(found.state), memories_of(expected.state))
    assert found.chosen.step == expected.chosen.step
    assert_same_bits(found.state.best.memories.shared, expected.state.best.memories.shared)  # type: ignore[union-attr]
    assert_same_bits(
        [split.loss for split in found.chosen.splits.values()],
        [split.loss for split in expected.chosen.splits.values()],
    )
    assert (found.state.bytes_down, found.state.bytes_up) == (expected.state.bytes_down, expected.state.bytes_up)
    assert without_seconds(directory) == without_seconds(expected_directory)


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedhn-pc", "fedper", "per-fedavg", "pfedme"))
def test_killed_at_random_and_resumed(method: str, federation: Federation, tmp_path: Path) -> None:
    expected = run(simulation(method, federation), tmp_path / "whole")
    size = simulation(method, federation).clients_per_round
    generator = random.Random(method)
    directory = tmp_path / "stopped"
    for _ in range(2):  # killed twice
        run_killed_at(size * generator.randrange(1, 10), simulation(method, federation), directory, every=2 * size)
    found = run(simulation(method, federation), directory)
    assert_same_run(found, expected, directory, tmp_path / "whole")


@pytest.mark.slow
def test_captured_and_stopped_between_any_two_turns(federation: Federation, tmp_path: Path) -> None:
    """Also between a round and its evaluation, which must not be left out."""
    method, turns = "pfedhn-pc", 0
    expected = run(simulation(method, federation, "captured"), tmp_path / "whole")
    while not (tmp_path / "stopped" / "checkpoint-000000020.json").exists():
        stop, turns = threading.Event(), turns + 1
        work = execute(
            simulation(method, federation, "captured"), tmp_path / "stopped", stop=stop, checkpoint_every=1_000
        )
        for _ in range(turns % 3 + 1):
            next(work)
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            next(work)
    found = run(simulation(method, federation, "captured"), tmp_path / "stopped")
    assert turns > 3
    assert_same_run(found, expected, tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_killed_while_writing_a_checkpoint(
    number: int, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`number` counts the files of the checkpoints: tensors and JSON of the first, then of the second."""
    method = "pfedhn-pc"
    expected = run(simulation(method, federation), tmp_path / "whole")
    directory = tmp_path / "stopped"
    really_replace = os.replace
    moved: list[str] = []

    def replace(source: Any, target: Any) -> None:
        if "checkpoint" in str(target):
            if len(moved) == number:
                Path(source).write_bytes(Path(source).read_bytes()[:100])  # half written
                raise Killed
            moved.append(str(target))
        really_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        run(simulation(method, federation), directory, checkpoint_every=4)
    monkeypatch.setattr(os, "replace", really_replace)
    found = run(simulation(method, federation), directory)
    assert_same_run(found, expected, directory, tmp_path / "whole")


def damaged(directory: Path, how: str) -> None:
    newest = checkpoints(directory)[0]
    tensors = newest.with_suffix(".safetensors")
    if how == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-10])
    elif how == "edited tensors":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif how == "edited json":
        newest.write_text(newest.read_text().replace('"round": 8', '"round": 7'))
    elif how == "no tensors":
        tensors.unlink()
    else:
        newest.write_text("{")


@pytest.mark.parametrize("how", ["truncated", "edited tensors", "edited json", "no tensors", "half a json"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    how: str, federation: Federation, tmp_path: Path
) -> None:
    method = "fedper"
    expected = run(simulation(method, federation), tmp_path / "whole")
    directory = tmp_path / "stopped"
    run_killed_at(17, simulation(method, federation), directory, every=4)
    assert [path.stem for path in checkpoints(directory)] == ["checkpoint-000000016", "checkpoint-000000012"]
    damaged(directory, how)
    said: list[str] = []
    found = run(simulation(method, federation), directory, say=said.append)
    assert len(said) == 1
    assert "checkpoint-000000016" in said[0]
    assert_same_run(found, expected, directory, tmp_path / "whole")


def test_no_sound_checkpoint_left_is_one_sentence(federation: Federation, tmp_path: Path) -> None:
    one = simulation("fedavg", federation)
    save_state(tmp_path, one.initial_state(), one)
    damaged(tmp_path, "truncated")
    with pytest.raises(CheckpointError, match="No intact checkpoint is left"):
        load_state(tmp_path, one)


def test_a_finished_run_is_read_not_run_again(federation: Federation, tmp_path: Path) -> None:
    first = run(simulation("pfedhn", federation), tmp_path)
    steps: list[int] = []
    again = run(simulation("pfedhn", federation), tmp_path, watch=lambda progress, found: steps.append(progress.step))
    assert steps == []
    assert_same_bits(memories_of(again.state), memories_of(first.state))
    assert again.accuracy.tolist() == first.accuracy.tolist()


@pytest.mark.parametrize("executor", mostly_slow(["auto", "captured"], "auto"))
def test_a_run_that_diverges_leaves_its_last_good_state(executor: str, federation: Federation, tmp_path: Path) -> None:
    """A captured run notices late; what it would have written meanwhile is no state it ever was in."""
    wild = ALGORITHMS["pfedhn"](local_steps=40, local_lr=1e30, local_clip=None)
    one = simulate(wild, federation, rounds=6, evaluate_every=100, executor=executor)
    with pytest.raises(Diverged):
        run(one, tmp_path, checkpoint_every=1)
    stored = read_spec(tmp_path)
    assert stored is not None
    state, refused, _ = load_state(tmp_path, one, identity(stored))
    assert refused == []
    assert state is not None
    assert state.round == 0
    assert all(bool(leaf.isfinite().all()) for leaf in state.memories.shared.phi.values())


def test_a_run_that_diverges_says_so_in_its_folder_until_it_is_started_again(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "diverged.txt"
    one = simulation("pfedhn", federation)
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "refuse_diverged", Mock(side_effect=Diverged("training diverged in round 0.")))
        with pytest.raises(Diverged):
            run(one, tmp_path)
    assert note.read_text() == "training diverged in round 0.\n"
    run(one, tmp_path, watch=lambda progress, found: pytest.fail("it is still said") if note.exists() else None)
    assert not note.exists()


def test_a_checkpoint_waits_for_the_card_that_computes(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, waited = simulation("fedavg", federation), Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", waited)
    there = Mock(clients_per_round=2, device=torch.device("cuda:1"))
    save_state(tmp_path, one.initial_state(), there)
    waited.assert_called_once_with(torch.device("cuda:1"))


def test_a_state_that_is_not_finite_is_not_written(federation: Federation, tmp_path: Path) -> None:
    one = simulation("fedavg", federation)
    state = one.initial_state()
    next(iter(state.memories.shared.values())).fill_(float("inf"))
    with pytest.raises(Diverged, match="no longer finite"):
        save_state(tmp_path, state, one)
    assert checkpoints(tmp_path) == []
