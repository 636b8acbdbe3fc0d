"""Fixtures of every test; what they are made of is in `support`."""

import pytest
from support import make_federation

from pfedhn.data.federation import Federation


@pytest.fixture(scope="session")
def federation() -> Federation:
    return make_federation()
