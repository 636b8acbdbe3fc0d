"""Runs with a display: everything between a checked command and its outcome."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pfedhn.cli.endings import BAD_INPUT, FAILED, LEARNED_NOTHING, Stopped, complain
from pfedhn.data import catalogue
from pfedhn.experiments.directory import Directory, Options
from pfedhn.experiments.preflight import Preflight, build_each_cell, preflight
from pfedhn.experiments.queue import Outcome
from pfedhn.experiments.runner import run_ready
from pfedhn.experiments.spec import Experiment, RunSpec
from pfedhn.experiments.tasks import Cluster
from pfedhn.runs.assemble import choose_device
from pfedhn.runs.progress import Detail, Display, Event
from pfedhn.system.screen import Screen


def run_shown(
    chosen: Experiment,
    runs: Sequence[RunSpec],
    path: Path,
    options: Options,
    jobs: int | None,
    cluster: Cluster | None = None,
    split: str = "test",
    detail: Detail = "normal",
    listen: Callable[[Event], None] = lambda event: None,
    until: float | None = None,
) -> tuple[Outcome, Preflight]:
    """Check and run what is not finished, side by side, and show progress and the scores on `split`.

    After `until`, by the monotonic clock, no run is started.
    """
    ready = preflight(path, chosen, runs, options, jobs, cluster is not None)
    left = ready.waiting
    screen = Screen(stderr=True)
    for name in dict.fromkeys(run.cell.dataset for run in left):
        if name in catalogue.DATASETS:
            get_dataset(name, options.data_dir, again=False)
    # The cluster may have a GPU that this machine lacks.
    build_each_cell(left, ready.options if cluster is None else replace(ready.options, device="cpu"))
    Directory(path).open(chosen, ready.runs, ready.options)
    if ready.finished and detail != "quiet":
        screen.print(f"{len(ready.finished)} of {len(ready.runs)} runs are finished already.", highlight=False)

    def tell(event: Event) -> None:
        listen(event)
        display(event)

    try:
        with Display(len(left), screen, split, detail) as display:
            outcome = run_ready(ready, tell, cluster, until)
    except KeyboardInterrupt:
        where = "" if cluster is None else f" --on {cluster.on}"
        raise Stopped(f"stopped; `pfedhn run --resume {path}{where}` continues.") from None
    return outcome, ready


def choose_device_on(cluster: Cluster | None, device: str | None) -> str:
    """The device that `--device` names; without it a GPU, if this machine or the cluster has one."""
    if cluster is None:
        return choose_device(device or "auto")
    if device is None or device == "auto":
        return "cuda" if cluster.has_gpu else "cpu"
    return device if device == "cuda" else choose_device(device)


def end(outcome: Outcome, complaint: str | None = None) -> None:
    """List the failed runs again at the end, a line for each reason; without any, say that nothing was learned."""
    if not outcome.failures:
        if complaint is not None:
            complain(complaint)
            raise typer.Exit(LEARNED_NOTHING)
        return
    reasons: dict[str, list[str]] = {}
    for name, failure in outcome.failures.items():
        reasons.setdefault(failure.sentence, []).append(name)
    for sentence, names in reasons.items():
        who = names[0] if len(names) == 1 else f"{len(names)} runs ({names[0]}, ...)"
        complain(f"{who}: {sentence}")
    raise typer.Exit(BAD_INPUT if all(failure.is_bad_input for failure in outcome.failures.values()) else FAILED)


def get_dataset(name: str, data_dir: Path | None, again: bool) -> Path:
    """Decode a data set into the cache; the bar appears with the first image."""
    display = Progress(
        TextColumn("decoding {task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=Screen(stderr=True),
        transient=True,
    )

    def move(done: int, total: int) -> None:
        if not display.tasks:
            display.add_task(name, total=total)
            display.start()
        display.update(display.tasks[0].id, completed=done)

    try:
        return catalogue.get(name, data_dir, move, again)
    finally:
        if display.tasks:
            display.stop()
