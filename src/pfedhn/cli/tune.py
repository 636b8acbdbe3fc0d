"""`pfedhn tune`: learning rates, chosen on validation."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from pfedhn.cli.options import (
    DataDirOption,
    DeviceOption,
    ExperimentArgument,
    JobsOption,
    OnOption,
    PrecisionOption,
    SetOption,
)
from pfedhn.system.screen import say


def tune(
    experiment: Annotated[str, ExperimentArgument],
    assignments: SetOption = None,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="FIELD=VALUE,...",
            help="Only these methods or cells: method=fedavg. In an experiment of the package, pFedHN and pFedHN-PC "
            "are tuned only if named here.",
        ),
    ] = None,
    seeds: Annotated[
        list[str] | None, Option(metavar="N,...", help="Scores are means over these seeds.", show_default="0")
    ] = None,
    fraction: Annotated[
        float, Option(metavar="F", help="Fraction of a cell's steps that every point gets at first.")
    ] = 0.2,
    finalists: Annotated[int, Option(metavar="N", help="Points of each method that then get all steps.")] = 3,
    save: Annotated[
        Path | None,
        Option(metavar="FILE", help="Also write the chosen rates to this file.", show_default="FILE.rates.toml"),
    ] = None,
    out: Annotated[Path | None, Option(help="Where its results are kept.", show_default="runs/NAME-tuning")] = None,
    jobs: JobsOption = None,
    on: OnOption = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show methods, points, runs and steps, and run nothing.")
    ] = False,
) -> None:
    """Choose learning rates on validation examples, from the paper's grids.

    Every point of a method's grid is run for a fifth of the steps, the best
    three for all of them; the best validation score wins. Every method of your
    own file is tuned; in an experiment of the package, pFedHN keeps its authors'
    rates unless --only names it. 50 clients are used if the experiment has such
    a cell, otherwise the median of its numbers of clients. After Ctrl-C or a
    crash, the same command resumes.

    The choice is kept in DIR/rates.toml. For mine.toml it is also kept beside
    it, in mine.rates.toml, where `pfedhn run mine.toml` finds it. A grid of your
    own stands in mine.toml under a heading tune.METHOD.

    \b
    [bold]Examples[/]
      pfedhn tune table1-cifar10 --device cuda
      pfedhn run table1-cifar10 --rates runs/table1-cifar10-tuning/rates.toml
      pfedhn tune mine.toml --only method=pfedhn,clients=20
    """
    from pfedhn.cli.find import whole_numbers
    from pfedhn.cli.tuning import make_plan, print_tuning_plan, tune_rates
    from pfedhn.experiments.directory import Options
    from pfedhn.system.files import given_path

    given: dict[str, Any] = {"fraction": fraction, "finalists": finalists, "save": save, "out": out}
    given |= {"data_dir": data_dir}
    planned = make_plan(experiment, assignments or [], only or [], whole_numbers(seeds), **given)
    if dry_run:
        print_tuning_plan(planned)
        return
    options = Options(data_dir=None if data_dir is None else given_path(data_dir, is_resolved=True))
    options = options if precision is None else replace(options, precision=precision)
    tune_rates(planned, options, jobs, on, device)
    is_found_by_itself = planned.is_own and save is None
    with_file = "" if is_found_by_itself else f" --rates {shlex.quote(str(planned.files[0]))}"
    say(f"Next: `pfedhn run {shlex.quote(experiment)}{with_file}` uses them.")
