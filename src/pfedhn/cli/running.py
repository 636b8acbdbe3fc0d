"""Runs with a display: everything between a checked command and its outcome."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pfedhn.cli.endings import BAD_INPUT, FAILED, Stopped, complain
from pfedhn.data import catalogue
from pfedhn.errors import RunError, UserError
from pfedhn.experiments.build import check
from pfedhn.experiments.directory import Directory, Options, finished
from pfedhn.experiments.execute import Outcome, refuse_changed_base
from pfedhn.experiments.runner import prepare, refuse_changed_data, refuse_other_executor
from pfedhn.experiments.spec import Experiment, RunSpec, with_pretraining
from pfedhn.experiments.tasks import Cluster
from pfedhn.runs.assemble import choose_device
from pfedhn.runs.progress import Detail, Display
from pfedhn.storage.history import MendableError
from pfedhn.system.screen import Screen


class Ready(NamedTuple):
    """What `run_many` takes, once everything is checked and the display is up."""

    runs: list[RunSpec]
    options: Options
    listen: Display


@contextmanager
def displayed(
    chosen: Experiment,
    runs: Sequence[RunSpec],
    path: Path,
    options: Options,
    jobs: int | None,
    cluster: Cluster | None = None,
    split: str = "test",
    detail: Detail = "normal",
) -> Iterator[Ready]:
    """Inside the block, the runs named and those they start from can go on, and are shown as they do.

    Args:
        chosen: the experiment.
        runs: its runs that are wanted.
        path: the directory that holds it.
        options: how to run.
        jobs: runs side by side; None for as many as there are cores or room.
        cluster: where they will run; this machine where None.
        split: whose scores are shown as runs finish.
        detail: how much is shown.
    """
    options.check()
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1.")
    directory = Directory(path)
    check(chosen)
    directory.refuse_other(chosen)
    runs = with_pretraining(chosen, runs)
    refuse_other_executor(path, runs, options)
    left = [run for run in runs if not _is_finished(path / run.name, run)]
    names = {run.name for run in left}
    known: list[RunSpec] = []
    if directory.is_experiment:
        with suppress(RunError):  # where it cannot be read, `open` says what to do
            known = directory.read()[1]  # seeds of another day too
    finished_runs = {run.name: run for run in [*known, *runs] if run.name not in names}
    ended = [run for run in finished_runs.values() if _is_finished(path / run.name, run)]
    refuse_changed_data(path, ended, is_going_on=bool(left))
    if left:
        refuse_changed_base(path, dict.fromkeys(run.name for run in [*known, *runs]))
    screen = Screen(stderr=True)
    for name in dict.fromkeys(run.cell.dataset for run in left):
        if name in catalogue.DATASETS:
            get_dataset(name, options.data_dir, again=False)
    # This machine may have no GPU where the cluster has some.
    prepare(left, options if cluster is None else replace(options, device="cpu"))
    if options.threads is None and (path / "experiment.toml").exists():
        options = replace(options, threads=directory.options().threads)  # however few runs are left by now
    options = options.with_threads(len(runs), jobs, cluster is not None)
    directory.open(chosen, runs, options)
    if len(left) < len(runs) and detail != "quiet":
        screen.print(f"{len(runs) - len(left)} of {len(runs)} runs are finished already.", highlight=False)
    try:
        with Display(len(left), screen, split, detail) as display:
            yield Ready(runs, options, display)
    except KeyboardInterrupt:
        where = "" if cluster is None else f" --on {cluster.on}"
        raise Stopped(f"stopped; `pfedhn run --resume {path}{where}` continues.") from None


def choose_device_on(cluster: Cluster | None, device: str | None) -> str:
    """The device that `--device` names; without it a GPU, if this machine or the cluster has one."""
    if cluster is None:
        return choose_device(device or "auto")
    if device is None or device == "auto":
        return "cuda" if cluster.has_gpu else "cpu"
    return device if device == "cuda" else choose_device(device)


def _is_finished(folder: Path, run: RunSpec) -> bool:
    """Whether nothing is left to do; `run_many` says why a run whose files are damaged is started again."""
    try:
        return finished(folder, run) is not None
    except MendableError:
        return False


def end(outcome: Outcome) -> None:
    """Say once more which runs failed, where it can be seen: a line for each reason."""
    if not outcome.failures:
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
