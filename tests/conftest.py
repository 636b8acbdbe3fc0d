"""Fixtures of every test; what they are made of is in `support`."""

import signal

import hypothesis
import pytest
from support import make_federation

from pfedhn.data.federation import Federation
from pfedhn.system.process import STOPS

# On a machine that others use, a slow example says nothing.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

# A shell lets what it starts in the background ignore Ctrl-C, and `nohup` the end of a terminal: tests of both would
# wait for nothing.
for number in STOPS:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def federation() -> Federation:
    return make_federation()
