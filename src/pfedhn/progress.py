"""What a person sees while a run goes on: one line per run, with the accuracy so far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pfedhn.simulate import Progress as RunProgress
from pfedhn.simulate import Simulation

Watch = Callable[[RunProgress, Any], None]


@contextmanager
def bar(console: Console | None = None) -> Iterator[Callable[[str, Simulation], Watch]]:
    """A live bar; the yielded function adds a line for one run and returns what to call as it moves."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as display:

        def add(name: str, simulation: Simulation) -> Watch:
            total = simulation.num_rounds * simulation.clients_per_round
            task = display.add_task(name, total=total, score="starting")

            def watch(progress: RunProgress, run: Any) -> None:
                if progress.evaluation is not None:
                    display.update(task, score=_score(run))
                display.update(task, completed=progress.step)

            return watch

        yield add


def _score(run: Any) -> str:
    validation = run.history[-1]["validation"]
    if "sample_mean" not in validation:
        return f"validation loss {validation['loss']:.4f}"
    best = run.chosen.pools["validation"].sample_mean
    return f"validation {100 * validation['sample_mean']:5.2f} % (best {100 * best:5.2f})"
