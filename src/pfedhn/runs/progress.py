"""What a person sees while runs go on: a moving line for each, with its accuracy so far; a lasting one at its end."""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Progress as RunProgress
from pfedhn.storage.schema import Result, Scores
from pfedhn.system.screen import Screen

SECONDS_BETWEEN_UPDATES = 0.1  # a round may take a millisecond, and drawing one line takes about as long
SECONDS_BETWEEN_LINES = 5.0  # in a log or behind a pipe, which show no bar

Detail: TypeAlias = Literal["quiet", "normal", "verbose"]

Watch: TypeAlias = Callable[[RunProgress, Any], None]
"""Called after every round with the progress and the run."""


class Update(NamedTuple):
    """A run moved on."""

    run: str
    step: int
    total: int
    score: str  # the latest evaluation in words, and the best so far
    is_evaluation: bool = False
    steps_per_round: int = 1


class Said(NamedTuple):
    """A run has something to tell, such as a damaged checkpoint."""

    run: str
    sentence: str


class RunFinished(NamedTuple):
    run: str
    result: Result


class RunFailed(NamedTuple):
    """Why a run did not finish."""

    run: str
    sentence: str
    is_bad_input: bool = False  # else something happened on the way: divergence, a full disk
    has_diverged: bool = False


Event: TypeAlias = Update | Said | RunFinished | RunFailed
"""What runs report, also from one process to another."""


def watch_run(run: str, simulation: Simulation, tell: Callable[[Update], None]) -> Watch:
    """Report the start, every evaluation, and in between often enough for the eye."""
    size = simulation.clients_per_round
    total = simulation.num_rounds * size
    score, told = "compiling" if simulation.federation.x.is_cuda else "starting", 0.0
    tell(Update(run, 0, total, score, False, size))

    def watch(progress: RunProgress, state: Any) -> None:
        nonlocal score, told
        if progress.evaluation is not None:
            score = state.scores_so_far
        elif time.monotonic() - told < SECONDS_BETWEEN_UPDATES and progress.step < total:
            return
        told = time.monotonic()
        tell(Update(run, progress.step, total, score, progress.evaluation is not None, size))

    return watch


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
    """Draw events: live lines on a terminal; elsewhere a line every few seconds, and one for every end or problem.

    Args:
        num_runs: The number of runs.
        console: Where it draws; stderr by default.
        split: The split whose scores the line of a finished run shows.
        detail: "quiet" says nothing but what went wrong, "verbose" has a line for every evaluation.
        keeps: Whether the lines stay at the end.
    """

    def __init__(
        self,
        num_runs: int,
        console: Screen | None = None,
        split: str = "test",
        detail: Detail = "normal",
        keeps: bool = False,
    ) -> None:
        self.console = console or Screen(stderr=True)
        self.split, self.num_runs, self.detail = split, num_runs, detail
        self.lines: dict[str, TaskID] = {}
        self.progress = Progress(  # narrow enough for a terminal of 80 columns
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            _Rate(),
            _Time(compact=True),
            console=self.console,
            transient=not keeps,
        )
        self.all_runs: TaskID | None = None
        self.is_live = self.console.is_terminal and detail != "quiet"
        self.begun = self.said = time.monotonic()
        self.num_ended = 0

    def __enter__(self) -> "Display":
        if self.is_live:
            self.progress.start()
            if self.num_runs > 1:
                self.all_runs = self.progress.add_task("all runs", total=self.num_runs, score="")
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self.progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case Update(run, step, steps, score, is_evaluation, steps_per_round):
                number, total = step // steps_per_round, steps // steps_per_round
                line = score.replace("validation", "val.")  # for a terminal of 80 columns
                if run not in self.lines:
                    self.lines[run] = self.progress.add_task(escape(run), total=total, score=line, completed=number)
                self.progress.update(self.lines[run], completed=number, score=line)
                if is_evaluation and self.detail == "verbose":
                    self._print(f"{escape(run)}: round {number} of {total}, {escape(score)}")
                elif not self.is_live:
                    self._say_from_time_to_time(run, f"round {number} of {total}, {score}")
            case Said(run, sentence):
                self.console.print(f"{escape(run)}: {escape(sentence)}", highlight=False, soft_wrap=True)
            case RunFinished(run, result):
                self._end(run, f"[green]done[/]    {escape(run)}: {escape(result_text(result, self.split))}")
            case RunFailed(run, _):  # why is said at the end, where it can be seen
                self._end(run, f"[red]failed[/]  {escape(run)}")

    def _say_from_time_to_time(self, run: str, state: str) -> None:
        """For logs and pipes: print every few seconds, and less often the longer it takes."""
        now = time.monotonic()
        if now - self.said < max(SECONDS_BETWEEN_LINES, (now - self.begun) / 20):
            return
        self.said = now
        speed = self.progress.tasks[self.progress.task_ids.index(self.lines[run])].speed
        rate = f", {speed:.1f} rounds/s" if speed else ""
        others = len(self.lines) - 1
        beside = f"; {others} beside it" if others else ""
        ended = f"; {self.num_ended} of {self.num_runs} runs ended" if self.num_runs > 1 else ""
        self._print(f"{now - self.begun:.0f} s  {escape(run)}: {escape(state)}{rate}{beside}{ended}")

    def _print(self, line: str) -> None:
        if self.detail != "quiet":
            self.console.print(line, highlight=False, soft_wrap=True)

    def _end(self, run: str, line: str) -> None:
        self.num_ended += 1
        if run in self.lines:
            self.progress.remove_task(self.lines.pop(run))
        if self.all_runs is not None:
            self.progress.advance(self.all_runs)
        self._print(line)


class _Rate(ProgressColumn):
    """Rounds per second; the line of all runs together shows none."""

    def render(self, task: Task) -> Text:
        if not task.speed or not task.fields["score"]:
            return Text("")
        return Text(f"{task.speed:.{0 if task.speed >= 10 else 1}f}/s")


class _Time(TimeRemainingColumn):
    """The time left; before the first round, the time that compiling has taken so far."""

    def render(self, task: Task) -> Text:
        if task.completed:
            return super().render(task)
        return Text(f"{task.elapsed or 0:.0f} s", style="progress.elapsed")
