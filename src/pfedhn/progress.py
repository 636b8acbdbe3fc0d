"""What a person sees while runs go on: a moving line for each, with its accuracy so far; a lasting one when it ends."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Progress as RunProgress
from pfedhn.result import Result, Scores
from pfedhn.screen import Screen

SECONDS_BETWEEN_UPDATES = 0.1  # a round may take a millisecond, and drawing one line takes about as long

Watch: TypeAlias = Callable[[RunProgress, Any], None]
"""Called after every round with the progress and the run."""


class Update(NamedTuple):
    """A run moved on."""

    run: str
    step: int
    total: int
    score: str  # the latest evaluation in words


class Said(NamedTuple):
    """A run has something to tell, say that a damaged checkpoint was passed over."""

    run: str
    sentence: str


class Finished(NamedTuple):
    run: str
    result: Result


class Failed(NamedTuple):
    run: str
    sentence: str


Event: TypeAlias = Update | Said | Finished | Failed
"""What runs report, also from one process to another."""


def watch_run(run: str, simulation: Simulation, tell: Callable[[Update], None]) -> Watch:
    """Tell of the start, of every evaluation, and in between often enough for the eye."""
    total = simulation.num_rounds * simulation.clients_per_round
    score, told = "compiling" if simulation.federation.x.is_cuda else "starting", 0.0
    tell(Update(run, 0, total, score))

    def watch(progress: RunProgress, state: Any) -> None:
        nonlocal score, told
        if progress.evaluation is not None:
            score = score_text(state)
        elif time.monotonic() - told < SECONDS_BETWEEN_UPDATES and progress.step < total:
            return
        told = time.monotonic()
        tell(Update(run, progress.step, total, score))

    return watch


def score_text(run: Any) -> str:
    validation: Scores = run.history[-1].validation
    if not validation.has_accuracy:
        return f"validation loss {validation.loss:.4f}"
    return f"validation {100 * validation.score:.1f} %"


def result_text(result: Result, split: str = "test") -> str:
    """One finished run in a line, with its scores on one split."""
    scores: Scores = getattr(result, split)
    text = f"{split} loss {scores.loss:.4f}"
    if scores.examples == 0:
        text = f"no {split} examples"
    elif scores.client_mean is not None and scores.sample_mean is not None:
        text = f"{split} {100 * scores.client_mean:.2f} % over clients, {100 * scores.sample_mean:.2f} % over samples"
    return f"{text}, {result.seconds:.1f} s"


class Display:
    """Draws events: live lines on a terminal; elsewhere only what ends or goes wrong, a line each.

    split: whose scores the line of a finished run has.
    """

    def __init__(self, num_runs: int, console: Screen | None = None, split: str = "test") -> None:
        self.console = console or Screen(stderr=True)
        self.split = split
        self.num_runs = num_runs
        self.lines: dict[str, TaskID] = {}
        self.progress = _progress(self.console)
        self.all_runs: TaskID | None = None

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self.progress.start()
            if self.num_runs > 1:
                self.all_runs = self.progress.add_task("all runs", total=self.num_runs, score="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for line in [*self.lines.values(), *([] if self.all_runs is None else [self.all_runs])]:
            self.progress.remove_task(line)
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case Update(run, step, total, score):
                if run not in self.lines:
                    self.lines[run] = self.progress.add_task(escape(run), total=total, score=score, completed=step)
                self.progress.update(self.lines[run], completed=step, score=score)
            case Said(run, sentence):
                self.console.print(f"{escape(run)}: {escape(sentence)}", highlight=False, soft_wrap=True)
            case Finished(run, result):
                self._end(run, f"[green]done[/]    {escape(run)}: {escape(result_text(result, self.split))}")
            case Failed(run, _):  # why is said at the end, where it can be seen
                self._end(run, f"[red]failed[/]  {escape(run)}")

    def _end(self, run: str, line: str) -> None:
        if run in self.lines:
            self.progress.remove_task(self.lines.pop(run))
        if self.all_runs is not None:
            self.progress.advance(self.all_runs)
        self.console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def bar(console: Screen | None = None) -> Iterator[Callable[[str, Simulation], Watch]]:
    """A live bar; the yielded function adds a line for one run and returns what to call as it moves."""
    with _progress(console or Screen(stderr=True)) as display:

        def add(name: str, simulation: Simulation) -> Watch:
            task = display.add_task(escape(name), total=None, score="starting")
            return watch_run(
                name,
                simulation,
                lambda update: display.update(task, completed=update.step, total=update.total, score=update.score),
            )

        yield add


def _progress(console: Screen) -> Progress:
    """Narrow enough for a terminal of 80 columns."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        _Time(compact=True),
        console=console,
    )


class _Time(TimeRemainingColumn):
    """The time left; before the first round, the time that compiling has taken so far."""

    def render(self, task: Task) -> Text:
        if task.completed:
            return super().render(task)
        return Text(f"{task.elapsed or 0:.0f} s", style="progress.elapsed")
