"""Runs that wait for their turn, and what came of them."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pfedhn.engine.state import Diverged
from pfedhn.errors import RunError, UserError, first_line, place_in_own_code
from pfedhn.experiments.spec import Experiment, RunSpec, pretraining_run
from pfedhn.runs.progress import Event, RunFailed, RunFinished
from pfedhn.storage.schema import Result

Listener: TypeAlias = Callable[[Event], None]


class Failure(NamedTuple):
    """Why a run did not finish."""

    sentence: str
    is_bad_input: bool  # else something happened on the way: divergence, a full disk
    has_diverged: bool = False


@dataclass
class Outcome:
    """What came of several runs, by their names."""

    results: dict[str, Result] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)


@dataclass
class Queue:
    """Runs that wait for a turn, or for the run they start from."""

    experiment: Experiment
    waiting: list[RunSpec]  # in the order in which they should start
    outcome: Outcome
    listen: Listener

    def __post_init__(self) -> None:
        # Once, since `take` is asked after every round while there is room for another run.
        pairs = [(run.name, pretraining_run(self.experiment, run)) for run in self.waiting]
        self.earlier = {name: earlier.name for name, earlier in pairs if earlier is not None}

    def take(self) -> RunSpec | None:
        """A run that can start now; None if there is none."""
        for run in list(self.waiting):
            earlier = self.earlier.get(run.name)
            if earlier in self.outcome.failures:
                self.waiting.remove(run)
                self.end(run.name, Failure(f"the run it starts from, {earlier}, failed.", False))
            elif earlier is None or earlier in self.outcome.results:
                self.waiting.remove(run)
                return run
        return None

    def end(self, name: str, ending: Result | Failure) -> None:
        if isinstance(ending, Failure):
            self.outcome.failures[name] = ending
            self.listen(RunFailed(name, ending.sentence))
        else:
            self.outcome.results[name] = ending
            self.listen(RunFinished(name, ending))


def failure(error: Exception, folder: Path) -> Failure:
    failure = failure_from(error)
    if failure is None:
        log, place = folder / "error.txt", place_in_own_code(error)
        where = place or "an error inside pfedhn"
        failure = Failure(f"{first_line(error)} ({where}; the details are in {log}).", place is not None)
        try:
            log.write_text("".join(traceback.format_exception(error)))
        except OSError:  # the disk may be what failed
            failure = Failure(f"{first_line(error)} ({where}).", place is not None)
    return failure


def failure_from(error: BaseException) -> Failure | None:
    """An error that a person can do something about, in one sentence; None for one that only we can."""
    if isinstance(error, UserError):
        return Failure(str(error), not isinstance(error, RunError), isinstance(error, Diverged))
    return None
