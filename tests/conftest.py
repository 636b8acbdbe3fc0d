"""Fixtures of every test; what they are made of is in `support`."""

import hypothesis
import pytest
from support import make_federation

from pfedhn.data.federation import Federation

# On a machine that others use, a slow example says nothing.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


@pytest.fixture(scope="session")
def federation() -> Federation:
    return make_federation()
