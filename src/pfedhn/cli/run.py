"""`pfedhn run`: an experiment, by name or from a file."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pfedhn.cli import completion
from pfedhn.cli.options import (
    DataDirOption,
    DeviceOption,
    ExperimentArgument,
    JobsOption,
    OnOption,
    OutOption,
    PrecisionOption,
    SetOption,
)
from pfedhn.errors import UserError

if TYPE_CHECKING:
    from pfedhn.runs.progress import Detail


def run(
    experiment: Annotated[str | None, ExperimentArgument] = None,
    assignments: SetOption = None,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="FIELD=VALUE,...",
            autocompletion=completion.assignments,
            help="Only the runs that match: method=pfedhn,clients=50. A field given twice takes either value.",
        ),
    ] = None,
    seeds: Annotated[
        list[str] | None, Option(metavar="N,...", help="Seeds to use instead of the experiment's, e.g. 0,1.")
    ] = None,
    small: Annotated[
        bool, Option("--small", help="A study at reduced size, without downloads; takes seconds on a CPU.")
    ] = False,
    out: OutOption = None,
    jobs: JobsOption = None,
    on: OnOption = None,
    rates: Annotated[
        Path | None, Option(metavar="FILE", help="Learning rates that `pfedhn tune` chose.", show_default=False)
    ] = None,
    tune: Annotated[
        bool, Option("--tune", help="For your own file: first choose learning rates on validation, as `pfedhn tune`.")
    ] = False,
    tune_minutes: Annotated[
        float, Option("--tune-minutes", metavar="N", help="With --tune: start no new run of it after N minutes.")
    ] = 10.0,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    executor: Annotated[
        str | None,
        Option(help="How a cohort is computed: auto, loop, traced, vectorized, captured.", show_default="auto"),
    ] = None,
    checkpoint_every: Annotated[
        int | None, Option(metavar="STEPS", help="Steps between checkpoints.", show_default="a minute")
    ] = None,
    threads: Annotated[
        int | None, Option(metavar="N", help="Threads of each run.", show_default="cores / jobs")
    ] = None,
    precision: PrecisionOption = None,
    deterministic: Annotated[
        bool, Option("--deterministic", help="On a GPU: the same bits from the same GPU and versions.")
    ] = False,
    track: Annotated[
        str | None, Option(metavar="NAME", help="Send every evaluation to tensorboard, mlflow or wandb.")
    ] = None,
    norms: Annotated[bool, Option("--norms", help="Log norms of the server's weights at every evaluation.")] = False,
    no_yardsticks: Annotated[
        bool,
        Option("--no-yardsticks", help="On a table: skip the base rates, linear models and trees to compare with."),
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the plan (runs and their sizes) and run nothing.")] = False,
    as_json: Annotated[bool, Option("--json", help="With --dry-run: the plan as one JSON object.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print errors only.")] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Print a line for every evaluation.")] = False,
    resume: Annotated[
        Path | None,
        Option(metavar="DIR", help="Resume the runs of a directory.", autocompletion=completion.run_directories),
    ] = None,
) -> None:
    """Run an experiment, its runs in parallel, and print its table and a verdict.

    DIR holds one experiment, with a folder per run: its spec, its metrics as
    they come, checkpoints and the result. The same command on the same DIR
    resumes, also after Ctrl-C or a power cut, and ends with the same numbers as
    if it had never stopped. It ends with exit code 3 if no method of your own
    experiment learned anything.

    \b
    [bold]Examples[/]
      pfedhn run demo
      pfedhn run demo --set steps=1000 --set pfedhn-plus.lr=0.002 --out runs/longer
      pfedhn run table1-cifar10 --only method=pfedhn,method=fedavg,clients=50
      pfedhn run table1-mnist --seeds 0,1 --data-dir ~/data
      pfedhn run mine.toml --jobs 1
      pfedhn run mine.toml --tune
      pfedhn run table1-cifar10 --on ray:10.0.0.1:6379 --out /shared/table1
      pfedhn run mix-and-match --small
      pfedhn run --resume runs/mine

    \b
    [bold]mine.toml[/] (the fields of every cell; a list makes a run of each value)
      method = ["pfedhn", "local"]
      dataset = "digits"
      clients = [20, 50]
      partition = {rule = "by_classes", classes_per_client = 5}
      split = [0.5, 0.25, 0.25]
      model = "mlp-32"
      steps = 600
      seeds = [0, 1, 2]
      \\[methods.pfedhn]
      lr = [0.01, 0.05]

    \b
    [bold]Your own data[/] in such a file
      dataset = "clinics"       a folder with a folder per client: x.npy, y.npy
      dataset = "visits.csv"    a table (.csv, .xlsx, .parquet), and with it
      columns = {client = "clinic", label = "outcome"}
    """
    from pfedhn.cli.find import chosen_runs
    from pfedhn.cli.running import choose_device_on, end, run_shown
    from pfedhn.cli.showing import add_yardsticks, show_results
    from pfedhn.experiments.build import check
    from pfedhn.experiments.directory import Directory
    from pfedhn.experiments.tasks import connected
    from pfedhn.storage.directory import MendableError
    from pfedhn.system.files import given_path

    if resume is not None:
        given = {"NAME-OR-FILE": experiment, "--set": assignments, "--only": only, "--seeds": seeds, "--out": out}
        given |= {"--rates": rates, "--small": "--small" if small else None, "--tune": "--tune" if tune else None}
        if clash := [name for name, value in given.items() if value]:
            raise UserError(f"--resume continues what {resume} holds, so {clash[0]} cannot be given with it.")
        chosen, runs = Directory(resume).read()
        check(chosen)
        options = Directory(resume).options()
    elif experiment is None:
        raise UserError("give the name or the file of an experiment, or --resume DIR; `pfedhn list` shows the names.")
    else:
        chosen, runs, options = chosen_runs(experiment, assignments or [], only or [], seeds, rates, small, data_dir)
    changes: dict[str, Any] = {
        "executor": executor,
        "checkpoint_every": checkpoint_every,
        "threads": threads,
        "precision": precision,
        "deterministic": deterministic or None,
        "track": track,
        "norms": norms or None,
        "data_dir": None if data_dir is None else given_path(data_dir, is_resolved=True),
    }
    options = replace(options, **{name: value for name, value in changes.items() if value is not None})
    if quiet and verbose:
        raise UserError("--quiet and --verbose cannot be given together; choose one.")
    if as_json and not dry_run:
        raise UserError("--json is for --dry-run; of finished runs, `pfedhn report --json` prints the results.")
    path = resume or out or Path("runs") / chosen.name
    if tune and experiment is not None:
        from pfedhn.cli.tuning import tune_before_run

        if rates is not None:
            raise UserError("--tune chooses the learning rates, so --rates cannot be given with it.")
        begun = tune_before_run(
            options, experiment, assignments or [], only or [], path, jobs, on, device, tune_minutes, dry_run
        )
        if begun:
            chosen, runs, _ = chosen_runs(experiment, assignments or [], only or [], seeds, rates, small, data_dir)
    if dry_run:
        from pfedhn.cli.dry_run import print_dry_run
        from pfedhn.experiments.preflight import preflight

        options = replace(options, device=choose_device_on(None, device))
        print_dry_run(preflight(path, chosen, runs, options, jobs), as_json)
        return
    detail: Detail = "quiet" if quiet else "verbose" if verbose else "normal"
    with connected(on) as cluster:
        if device is not None or resume is None:
            options = replace(options, device=choose_device_on(cluster, device))
        outcome, ready = run_shown(chosen, runs, path, options, jobs, cluster, detail=detail)
    complaint = None
    if outcome.results:
        try:
            if not no_yardsticks:
                add_yardsticks(path, ready.runs, ready.options, quiet)
            complaint = show_results(path, ready.runs, ready.options, quiet)
        except MendableError:
            end(outcome)  # a run that could not be mended is in no table, and why is said there
            raise
    end(outcome, complaint)
