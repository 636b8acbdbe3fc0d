"""Runs that wait for their turn, what came of them, and how those that go on side by side are started and stopped."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from pfedhn.engine.state import Diverged, Schedule
from pfedhn.errors import RunError, UserError, first_line, place_in_own_code
from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.preflight import Preflight
from pfedhn.experiments.spec import Cell, RunSpec
from pfedhn.runs.progress import Event, RunFailed, RunFinished, Said, Update
from pfedhn.storage.schema import Result
from pfedhn.system.process import stop_requests

Listener: TypeAlias = Callable[[Event], None]


class Stopped(NamedTuple):
    """A worker's answer to a request to stop: the run is kept in its checkpoint."""

    run: str


@dataclass
class Outcome:
    """What came of several runs, by their names."""

    results: dict[str, Result] = field(default_factory=dict)
    failures: dict[str, RunFailed] = field(default_factory=dict)


class Queue:
    """Runs that wait for a turn, or for the run they start from, in the order in which they should start."""

    def __init__(self, ready: Preflight, listen: Listener, until: float | None = None) -> None:
        """Queue what waits; after `until`, by the monotonic clock, no run starts, and till then they start in order."""
        self.ready, self.listen, self.outcome, self.until = ready, listen, Outcome(dict(ready.finished)), until
        for name, sentence in ready.damaged.items():
            listen(Said(name, sentence))
        # Started last, a run that takes long would leave the other cores idle at the end, or the GPU half used.
        awaited = {ready.starts_from.get(run.name) for run in ready.waiting}
        self.waiting = ready.waiting
        if until is None:
            self.waiting.sort(key=lambda run: (run.name not in awaited, -_num_rounds(run.cell)))

    def take(self) -> RunSpec | None:
        """A run that can start now; None if there is none."""
        if self.until is not None and time.monotonic() > self.until:
            self.waiting.clear()
        for run in list(self.waiting):
            earlier = self.ready.starts_from.get(run.name)
            if earlier in self.outcome.failures:
                self.waiting.remove(run)
                self.hear(RunFailed(run.name, f"the run it starts from, {earlier}, failed."))
            elif earlier is None or earlier in self.outcome.results:
                self.waiting.remove(run)
                return run
        return None

    def hear(self, word: Event | Stopped) -> bool:
        """Take in what is said of a run; False if it was the last word."""
        match word:
            case Stopped():
                return False
            case RunFailed():
                self.outcome.failures[word.run] = word
            case RunFinished():
                self.outcome.results[word.run] = word.result
        self.listen(word)
        return isinstance(word, Update | Said)


def _num_rounds(cell: Cell) -> float:
    algorithm = cell_algorithm(cell)
    size = cell.cohort_size or Schedule.default_cohort_size(algorithm, cell.clients)
    return cell.steps / (size if algorithm.needs.communication else cell.clients)


def failure(error: Exception, folder: Path) -> RunFailed:
    """Why the run in a folder failed; the traceback is kept there if it says more than the error."""
    if isinstance(error, UserError):
        return RunFailed(folder.name, str(error), not isinstance(error, RunError), isinstance(error, Diverged))
    log, place = folder / "error.txt", place_in_own_code(error)
    where = place or "an error inside pfedhn"
    try:
        log.write_text("".join(traceback.format_exception(error)))
        where += f"; the details are in {log}"
    except OSError:  # the disk may be what failed
        pass
    return RunFailed(folder.name, f"{first_line(error)} ({where}).", place is not None)


class Crew(Protocol):
    """Workers that runs of a queue are given to."""

    def hand_out(self) -> None:
        """Give runs to workers that have none."""

    def stop(self) -> None:
        """Ask every worker to write a checkpoint."""

    def hear(self) -> bool:
        """Wait a moment for what workers say; False if none has a run."""

    def kill(self) -> None:
        """End every worker at once."""


def run_all(crew: Crew) -> None:
    """Run until nothing waits. A signal stops every run at a checkpoint, a second one at once."""
    requests: list[int] = []
    is_told = False
    with stop_requests(requests.append):
        try:
            while True:
                if len(requests) > 1:
                    raise KeyboardInterrupt
                if requests and not is_told:
                    is_told = True
                    crew.stop()
                if not requests:
                    crew.hand_out()
                if not crew.hear():
                    break
        finally:
            crew.kill()
    if requests:
        raise KeyboardInterrupt
