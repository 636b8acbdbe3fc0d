"""The stages of tuning, each a set of runs with a display."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from pfedhn.cli.endings import Stopped
from pfedhn.cli.running import end, run_shown
from pfedhn.errors import UserError
from pfedhn.experiments.directory import Options
from pfedhn.experiments.queue import Outcome
from pfedhn.experiments.rates import read_rates
from pfedhn.experiments.tasks import Cluster
from pfedhn.experiments.tune import Point, Stage, Tuning
from pfedhn.runs.progress import Event, RunFinished
from pfedhn.storage.checkpoint import remove_old
from pfedhn.system.files import reading, write_trouble
from pfedhn.system.screen import Screen


def check_files(files: Sequence[Path], save: Path | None) -> None:
    """Refuse now, not after hours, what could not be written in the end."""
    for file in files:
        with reading(file):
            if file.is_dir():
                raise UserError(f"{file} is a folder; the rates need a file.")
            if file.exists():
                read_rates(file)
    if save is not None and (trouble := write_trouble(save.parent)) is not None:
        raise UserError(f"{save} cannot be written ({trouble}); give another file as --save.")


def run_stage(
    tuning: Tuning,
    stage: Stage,
    points: Sequence[Point],
    out: Path,
    options: Options,
    jobs: int | None,
    cluster: Cluster | None,
    until: float | None = None,
) -> Outcome:
    """Run some points, and after `until` start none; one that diverges is a finding, any other failure ends it all."""

    def forget(event: Event) -> None:
        if isinstance(event, RunFinished):  # nobody uses the model of a point, and those of a large grid fill a disk
            remove_old(path / event.run, num_kept=0)

    path, chosen = out / stage, tuning.stages[stage]
    options = replace(options, source=str((path / "experiment.toml").resolve()))
    Screen(stderr=True).print(f"[bold]{escape(chosen.title)}[/]", highlight=False)
    runs = tuning.runs(stage, points)
    try:
        # No test score is shown: who sees it while choosing has chosen by it.
        outcome, _ = run_shown(
            chosen, runs, path, options, jobs, cluster, split="validation", listen=forget, until=until
        )
    except Stopped:
        raise Stopped("stopped; the same command continues.") from None
    end(Outcome(failures={name: why for name, why in outcome.failures.items() if not why.has_diverged}))
    return outcome
