"""A run that is asked to stop does so soon, and goes on to the same bits wherever it was left."""

import signal
import threading
import time
from pathlib import Path

import pytest
from support import assert_same_bits, memories_of, simulate, with_steps

from pfedhn import stopping
from pfedhn.data.federation import Federation
from pfedhn.engine import evaluate
from pfedhn.engine.checkpoint import checkpoints
from pfedhn.process import STOPS
from pfedhn.run import drain, execute
from pfedhn.stopping import Abandoned, leaving_rounds, stop_on_signal


@pytest.mark.parametrize("number", STOPS)
def test_every_request_to_stop_is_heard_and_a_second_one_at_once(number: signal.Signals) -> None:
    with stop_on_signal() as stop:
        signal.raise_signal(number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("moment", ["round", "evaluation"])
def test_a_round_that_is_left_in_the_middle_is_made_again(
    moment: str, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulation():  # type: ignore[no-untyped-def]
        return simulate(with_steps("fedper", 2), federation, rounds=6, cohort=2, evaluate_every=2, executor="loop")

    expected = drain(execute(simulation(), tmp_path / "whole"))
    monkeypatch.setattr(stopping, "SECONDS_FOR_A_ROUND", 0.001)
    monkeypatch.setattr(stopping, "SECONDS_BETWEEN_TRIES", 0.001)
    one, calls = simulation(), 0
    place, name = (evaluate, "score") if moment == "evaluation" else (type(one.algorithm), "train")
    really = getattr(place, name)

    def slow(*arguments, **more):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == (20 if moment == "evaluation" else 7):
            signal.raise_signal(signal.SIGINT)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:  # until the alarm finds that nothing is being changed
                pass
        return really(*arguments, **more)

    monkeypatch.setattr(place, name, slow)
    with stop_on_signal() as stop, pytest.raises(KeyboardInterrupt):
        drain(execute(one, tmp_path / "stopped", stop=stop))
    monkeypatch.undo()
    assert checkpoints(tmp_path / "stopped")
    found = drain(execute(simulation(), tmp_path / "stopped"))
    assert_same_bits(memories_of(found.state), memories_of(expected.state))
    assert [part.test for part in found.history] == [part.test for part in expected.history]


def test_nothing_is_left_while_something_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with leaving_rounds():
        signal.raise_signal(signal.SIGALRM)  # no round goes on
        monkeypatch.setattr(stopping, "PURE", {__file__})
        with pytest.raises(Abandoned):
            signal.raise_signal(signal.SIGALRM)
        monkeypatch.setattr(stopping, "CHANGING", {threading.__file__, __file__})
        signal.raise_signal(signal.SIGALRM)
