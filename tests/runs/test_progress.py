"""What a person sees while runs go on, where there is no terminal."""

import io
from typing import Any

import pytest
from rich.progress import Task

from pfedhn.runs import progress
from pfedhn.runs.progress import Detail, Display, RunFailed, Update
from pfedhn.system.screen import Screen


def lines_of(monkeypatch: pytest.MonkeyPatch, detail: Detail, num_runs: int = 1) -> list[str]:
    """Updates of a run that takes a second for each of twenty rounds of two clients."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with Display(num_runs, Screen(file=stream, color_system=None, width=200), detail=detail) as display:
        for number in range(21):
            now = float(number)
            display(Update("mine", 2 * number, 40, "validation 50.0 %, best 60.0 %", number % 10 == 0, 2))
        display(RunFailed("mine", "why"))
    return stream.getvalue().splitlines()


def test_a_log_has_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch, "normal", num_runs=3)
    assert [line.split()[0] for line in lines] == ["5", "10", "15", "20", "failed"]
    assert "mine: round 10 of 20, validation 50.0 %, best 60.0 %" in lines[1]
    assert lines[1].endswith("; 0 of 3 runs ended")


def test_quiet_says_nothing_and_verbose_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, "quiet") == []
    lines = lines_of(monkeypatch, "verbose")
    assert [line for line in lines if line.startswith("mine: round")] == [
        f"mine: round {number} of 20, validation 50.0 %, best 60.0 %" for number in (0, 10, 20)
    ]


def test_a_terminal_shows_rounds_the_best_and_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "speed", 52.3)
    stream = io.StringIO()
    screen = Screen(file=stream, force_terminal=True, color_system=None, width=80)
    with Display(1, screen) as display:
        for number in range(3):
            event: Any = Update("pfedhn-digits-50-seed0", 5 * number, 5_000, "validation 50.0 %, best 60.0 %", True, 5)
            display(event)
        display.progress.refresh()
        drawn = stream.getvalue()
    assert "2/1000" in drawn
    assert "best 60.0 %" in drawn
    assert "52/s" in drawn
