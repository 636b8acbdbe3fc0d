"""Every fault of a message once; `make test-faults` tries each many times."""

import pytest
from faults.messages import FAULTS, Case, logger, try_one
from faults.table import GOOD


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_message_loses_nothing(kind: str) -> None:
    outcome, said = try_one(kind, "0")
    assert outcome in GOOD, said


def test_a_fault_that_ends_the_run_leaves_the_log_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "run", lambda case: 1 / 0)
    assert try_one("party raises", "0")[0] == "broken"
    assert not logger.disabled
