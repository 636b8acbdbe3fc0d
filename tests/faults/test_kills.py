"""Every command killed once, and five started at once; `make test-faults` does so a hundred times."""

import random
from pathlib import Path

import pytest
from faults import kills


@pytest.mark.slow
@pytest.mark.parametrize("kind", kills.COMMANDS)
def test_a_killed_command_ends_with_the_same_bits(kind: str) -> None:
    row = kills.killed(kind, 1, seed=0)
    assert (row.tries, row.bad) == (1, [])


@pytest.mark.slow
def test_of_commands_started_at_once_nothing_is_lost() -> None:
    assert not [line for row in kills.try_starts(5, seed=0) for line in row.bad]


@pytest.mark.parametrize("owner", ["finished", "seen"])
def test_a_command_that_fails_undisturbed_is_bad(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> str:
        raise IndexError(owner)

    def make(folder: Path, dice: random.Random) -> kills.Case:
        return [], fail if owner == "seen" else dict

    monkeypatch.setattr(kills, "finished", fail if owner == "finished" else lambda *given: "")
    monkeypatch.setitem(kills.COMMANDS, "run", (make, 0.6))
    row = kills.killed("run", 3, seed=0)
    assert row.tries == 3
    assert len(row.bad) == 3
