"""A tuning from its plan to the chosen rates: for `pfedhn tune`, and for `pfedhn run --tune` before its runs."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from pfedhn.cli.endings import FAILED, complain
from pfedhn.cli.find import find_experiment
from pfedhn.cli.running import choose_device_on
from pfedhn.cli.stages import check_files, run_stage
from pfedhn.errors import UserError
from pfedhn.experiments.build import check
from pfedhn.experiments.directory import Directory, Options
from pfedhn.experiments.grid import grids_from_toml, refuse_without_effect, with_assignments
from pfedhn.experiments.queue import Outcome
from pfedhn.experiments.rates import rates_file, save_rates
from pfedhn.experiments.tasks import connected
from pfedhn.experiments.tune import (
    FINALISTS,
    FRACTION,
    Point,
    Stage,
    Tuning,
    TuningResults,
    plan,
    read_record,
    refuse_other,
    write_record,
)
from pfedhn.settings import parse_assignments
from pfedhn.system.screen import Screen, say, table_screen

FIRST_SHARE = 0.5  # of the minutes of a tuning, for the stage in which every point runs


@dataclass(frozen=True)
class TuningPlan:
    """A checked tuning: what runs, how, and where its results and the chosen rates go."""

    experiment: str  # as the person named it
    source: str  # how a later command names it
    tuning: Tuning
    path: Path
    files: Sequence[Path]  # of rates
    assignments: Sequence[str] = ()
    only: Sequence[str] = ()

    @property
    def is_own(self) -> bool:
        """Whether this is a person's own experiment file, not an experiment of the package."""
        return self.source.endswith(".toml")

    def steps(self, stage: Stage, method: str) -> int:
        """The steps of a run of a method in a stage."""
        return self.tuning.cell(stage, self.tuning.points_of(method)[0]).steps

    def num_runs(self, stage: Stage, method: str) -> int:
        """The runs of a method in a stage, at most."""
        points = len(self.tuning.points_of(method))
        return len(self.tuning.seeds) * (points if stage == "first" else min(points, self.tuning.finalists))

    def sentence(self) -> str:
        """How much this runs, at most."""
        methods, stages = self.tuning.methods, self.tuning.stages
        first, finals = (sum(self.num_runs(stage, method) for method in methods) for stage in stages)
        steps = sum(self.num_runs(stage, name) * self.steps(stage, name) for stage in stages for name in methods)
        points = sum(len(self.tuning.points_of(method)) for method in methods)
        return (
            f"Tuning {', '.join(methods)}: {points} points, {first} short runs and up to {finals} full runs, {steps:,} "
            "steps in all."
        )


def make_plan(
    experiment: str,
    assignments: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    fraction: float = FRACTION,
    finalists: int = FINALISTS,
    save: Path | None = None,
    out: Path | None = None,
    data_dir: Path | None = None,
) -> TuningPlan:
    """Check a tuning, as the options of `pfedhn tune` describe it; nothing is written."""
    chosen, source = find_experiment(experiment, data_dir=data_dir)
    values = parse_assignments(assignments)
    chosen = with_assignments(chosen, values, data_dir)
    is_own = source.endswith(".toml")
    tuning = plan(
        chosen,
        only,
        seeds,
        fraction=fraction,
        finalists=finalists,
        assigned=values,
        own_grids=grids_from_toml(Path(source)) if is_own else {},
        tunes_all=is_own,
    )
    check(tuning.stages["finals"])  # those of the first stage differ in their steps alone
    points = [point for method in tuning.methods for point in tuning.points_of(method)]
    refuse_without_effect(assignments, [point.cell for point in points])
    if save is None and is_own:
        save = rates_file(Path(source))
    path = out or Path("runs") / f"{chosen.name}-tuning"
    refuse_other(path, tuning)
    files = [file for file in (path / "rates.toml", save) if file is not None]
    check_files(files, save)
    read_record(path / "tuning.json")
    return TuningPlan(experiment, source, tuning, path, files, assignments, only)


def print_tuning_plan(planned: TuningPlan) -> None:
    """Say what a tuning would run and write; nothing is run."""
    table = Table("method", "settings", box=None, pad_edge=False)
    for heading in ("points", "short runs", "steps each", "full runs", "steps each"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method in planned.tuning.methods:
        numbers = [len(planned.tuning.points_of(method))]
        for stage in planned.tuning.stages:
            numbers += [planned.num_runs(stage, method), planned.steps(stage, method)]
        table.add_row(escape(method), ", ".join(planned.tuning.grids[method]), *(f"{number:,}" for number in numbers))
    table_screen().print(table)
    say(planned.sentence())
    say(f"The chosen learning rates would be written to {' and '.join(map(str, planned.files))}.")


def tune_rates(
    planned: TuningPlan,
    options: Options,
    jobs: int | None = None,
    on: str | None = None,
    device: str | None = None,
    minutes: float | None = None,
) -> None:
    """Run a tuning and write what it chose.

    Args:
        planned: What is tuned.
        options: How its runs run, but for the device.
        jobs: As `--jobs`.
        on: As `--on`.
        device: As `--device`.
        minutes: After which no point is started any more; None for no bound.
    """
    tuning, path, only = planned.tuning, planned.path, planned.only
    options.check()
    began = time.monotonic()

    def until(share: float) -> float | None:
        return None if minutes is None else began + 60 * minutes * share

    def run(stage: Stage, points: list[list[Point]], until: float | None) -> Outcome:
        # By turns, so that each method has some points when the time is over.
        turns = [point for point in chain.from_iterable(zip_longest(*points)) if point is not None]
        return run_stage(tuning, stage, turns, path, options, jobs, cluster, until)

    with connected(on) as cluster:
        options = replace(options, device=choose_device_on(cluster, device))
        found = TuningResults(
            tuning, run("first", [tuning.usual_first(name) for name in tuning.methods], until(FIRST_SHARE))
        )
        found = replace(found, finals=run("finals", [found.finalists(name) for name in tuning.methods], until(1)))
    for table in found.tables():
        Screen().print(table)
    words = ["pfedhn", "tune", planned.source, *(word for text in planned.assignments for word in ("--set", text))]
    words += [word for text in only for word in ("--only", text)]
    words += ["--seeds", ",".join(map(str, tuning.seeds)), "--fraction", f"{tuning.fraction:g}"]
    words += ["--finalists", str(tuning.finalists)]
    words += [] if options.precision == Options.precision else ["--precision", options.precision]
    write_record(path / "tuning.json", tuning.experiment, found.record(shlex.join(words)))
    for file in planned.files if found.rates() else []:
        save_rates(file, tuning.experiment.name, found.rates())
        say(f"Learning rates: {file}")
    if num_left := found.num_left_out():
        kept = "" if found.rates() else ", so that no rate was chosen"
        say(f"{num_left} points were left out when the time was over{kept}; `pfedhn tune` runs them.")
    if untuned := [method for method in tuning.methods if num_left and found.winner(method) is None]:
        say(f"Not tuned for lack of time: {', '.join(untuned)}.")
    present = {cell.method for cell in tuning.experiment.cells}
    left = [method for method in tuning.grids if method in present and method not in tuning.methods]
    if left and not any("method=" in text for text in only):  # who names methods knows
        how = ",".join(f"method={method}" for method in left)
        say(f"Not tuned, and kept as it was: {', '.join(left)} (--only {how} tunes it).")
    if lost := [method for method in tuning.methods if found.has_diverged(method)]:
        complain(f"every point of {', '.join(lost)} diverged; no rate was chosen for it.")
        raise typer.Exit(FAILED)


def tune_before_run(
    options: Options,
    experiment: str,
    assignments: Sequence[str],
    only: Sequence[str],
    directory: Path,
    jobs: int | None,
    on: str | None,
    device: str | None,
    minutes: float,
    dry_run: bool,
) -> bool:
    """Tune a person's own experiment before it is run; False if nothing was tuned."""
    if not options.source.endswith(".toml"):
        raise UserError(
            f"--tune is for your own experiment file, and {experiment} is none; use `pfedhn tune {experiment}`, and "
            "then --rates."
        )
    if not minutes > 0:
        raise UserError(f"--tune-minutes is {minutes:g}; it must be above 0.")
    if Directory(directory).is_experiment:  # whose runs were begun with the rates that are beside the file
        say(f"{directory} holds this experiment already, so nothing is tuned again.", is_error=True)
        return False
    planned = make_plan(experiment, assignments, only, data_dir=options.data_dir)
    if dry_run:
        print_tuning_plan(planned)
        return False
    say(f"{planned.sentence()} After {minutes:g} minutes no further run of it starts.", is_error=True)
    tune_rates(planned, Options(data_dir=options.data_dir, precision=options.precision), jobs, on, device, minutes)
    return True
