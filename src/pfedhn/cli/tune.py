"""`pfedhn tune`: learning rates, chosen on validation."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from pfedhn.cli.endings import FAILED, complain
from pfedhn.cli.options import (
    DataDirOption,
    DeviceOption,
    ExperimentArgument,
    JobsOption,
    OnOption,
    PrecisionOption,
    SetOption,
)
from pfedhn.system.screen import Screen, say


def tune(
    experiment: Annotated[str, ExperimentArgument],
    assignments: SetOption = None,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="FIELD=VALUE,...",
            help="Only these methods or cells: method=fedavg. pFedHN and pFedHN-PC are tuned only if named here.",
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
) -> None:
    """Choose learning rates on validation examples, from the paper's grids.

    Every point of a method's grid is run for a fifth of the steps, the best
    three for all of them; the best validation score wins. pFedHN keeps its
    authors' rates unless --only names it. 50 clients are used if the experiment
    has such a cell, otherwise the median of its numbers of clients. After Ctrl-C or a crash,
    the same command resumes.

    The choice is kept in DIR/rates.toml. For mine.toml it is also kept beside
    it, in mine.rates.toml, where `pfedhn run mine.toml` finds it. A grid of your
    own stands in mine.toml under a heading tune.METHOD.

    \b
    [bold]Examples[/]
      pfedhn tune table1-cifar10 --device cuda
      pfedhn run table1-cifar10 --rates runs/table1-cifar10-tuning/rates.toml
      pfedhn tune mine.toml --only method=pfedhn,clients=20
    """
    from pfedhn.cli.find import find_experiment, whole_numbers
    from pfedhn.cli.running import choose_device_on
    from pfedhn.cli.stages import check_files, run_stage
    from pfedhn.experiments.build import check
    from pfedhn.experiments.directory import Options
    from pfedhn.experiments.grid import grids_from_toml, refuse_without_effect, with_assignments
    from pfedhn.experiments.rates import rates_file, save_rates
    from pfedhn.experiments.registry import experiments
    from pfedhn.experiments.tasks import connected
    from pfedhn.experiments.tune import TuningResults, plan, read_record, refuse_other, write_record
    from pfedhn.settings import parse_assignments
    from pfedhn.system.files import given_path

    chosen, source = find_experiment(experiment, data_dir=data_dir)
    values = parse_assignments(assignments or [])
    chosen = with_assignments(chosen, values, data_dir)
    numbers = whole_numbers(seeds)
    grids = grids_from_toml(Path(source)) if source.endswith(".toml") else {}
    tuning = plan(chosen, only or [], numbers, fraction=fraction, finalists=finalists, assigned=values, own_grids=grids)
    check(tuning.stages["finals"])  # those of the first stage differ in their steps alone
    points = [point for method in tuning.methods for point in tuning.points_of(method)]
    refuse_without_effect(assignments or [], [point.cell for point in points])
    if save is None and experiment not in experiments():
        save = rates_file(Path(source))
    path = out or Path("runs") / f"{chosen.name}-tuning"
    refuse_other(path, tuning)
    files = [file for file in (path / "rates.toml", save) if file is not None]
    check_files(files, save)
    read_record(path / "tuning.json")
    options = Options(data_dir=None if data_dir is None else given_path(data_dir, is_resolved=True))
    options = options if precision is None else replace(options, precision=precision)
    options.check()
    with connected(on) as cluster:
        options = replace(options, device=choose_device_on(cluster, device))
        found = TuningResults(tuning, run_stage(tuning, "first", points, path, options, jobs, cluster))
        points = [point for method in tuning.methods for point in found.finalists(method)]
        found = replace(found, finals=run_stage(tuning, "finals", points, path, options, jobs, cluster))
    for table in found.tables():
        Screen().print(table)
    words = ["pfedhn", "tune", source, *(word for text in assignments or [] for word in ("--set", text))]
    words += [word for text in only or [] for word in ("--only", text)]
    words += ["--seeds", ",".join(map(str, tuning.seeds)), "--fraction", f"{fraction:g}", "--finalists", str(finalists)]
    words += [] if precision is None else ["--precision", precision]
    write_record(path / "tuning.json", chosen, found.record(shlex.join(words)))
    for file in files if found.rates() else []:
        save_rates(file, chosen.name, found.rates())
        say(f"Learning rates: {file}")
    present = {cell.method for cell in chosen.cells}
    left = [method for method in tuning.grids if method in present and method not in tuning.methods]
    if left and not any("method=" in text for text in only or []):  # who names methods knows
        how = ",".join(f"method={method}" for method in left)
        say(f"Not tuned, and kept as it was: {', '.join(left)} (--only {how} tunes it).")
    if found.rates():
        is_found_by_itself = experiment not in experiments() and save == rates_file(Path(source))
        with_file = "" if is_found_by_itself else f" --rates {shlex.quote(str(path / 'rates.toml'))}"
        say(f"Next: `pfedhn run {shlex.quote(experiment)}{with_file}` uses them.")
    if lost := [method for method in tuning.methods if found.winner(method) is None]:
        complain(f"every point of {', '.join(lost)} diverged; no rate was chosen for it.")
        raise typer.Exit(FAILED)
