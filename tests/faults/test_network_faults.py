"""A federation without faults; `make test-faults` kills and stops every part of it."""

import pytest
from faults import network


@pytest.mark.slow
def test_an_undisturbed_federation_is_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ROUNDS", 2)
    monkeypatch.setattr(network, "FAULTS", {})
    assert not [line for row in network.try_network() for line in row.bad]
