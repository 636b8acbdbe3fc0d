"""A run that is asked to stop does so soon, and goes on to the same bits wherever it was left."""

import signal

import pytest

from pfedhn.system.process import STOPS
from pfedhn.system.stopping import stop_on_signal


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
