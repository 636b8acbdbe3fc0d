"""Every fault of a message once; `make test-faults` tries each many times."""

import pytest
from faults.messages import FAULTS, try_one
from faults.table import GOOD


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_message_loses_nothing(kind: str) -> None:
    outcome, said = try_one(kind, "0")
    assert outcome in GOOD, said
