"""`pfedhn run`: an experiment, by name or from a file."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
        typer.Option(
            "--only",
            metavar="FIELD=VALUE,...",
            autocompletion=completion.assignments,
            help="Only the runs that match: method=pfedhn,clients=50. A field given twice takes either value.",
        ),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", metavar="N,...", help="Seeds to use instead of the experiment's, e.g. 0,1."),
    ] = None,
    small: Annotated[
        bool,
        typer.Option("--small", help="A study at reduced size, on the digits; takes seconds on a CPU."),
    ] = False,
    out: OutOption = None,
    jobs: JobsOption = None,
    on: OnOption = None,
    rates: Annotated[
        Path | None,
        typer.Option("--rates", metavar="FILE", help="Learning rates that `pfedhn tune` chose.", show_default=False),
    ] = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    executor: Annotated[
        str | None,
        typer.Option(
            "--executor",
            help="How a cohort is computed: auto, loop, traced, vectorized, captured.",
            show_default="auto",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option("--checkpoint-every", metavar="STEPS", help="Steps between checkpoints.", show_default="a minute"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of each run.", show_default="cores / jobs")
    ] = None,
    precision: PrecisionOption = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a GPU: the same bits from the same GPU and versions.")
    ] = False,
    track: Annotated[
        str | None,
        typer.Option("--track", metavar="NAME", help="Also send every evaluation to tensorboard, mlflow or wandb."),
    ] = None,
    norms: Annotated[
        bool, typer.Option("--norms", help="Also note norms of what the server keeps at every evaluation.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan (runs and their sizes) and run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: the plan as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every evaluation.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            help="Resume the runs of a directory.",
            autocompletion=completion.run_directories,
        ),
    ] = None,
) -> None:
    """Run an experiment, its runs in parallel, and print its table.

    DIR holds one experiment, with a folder per run: its spec, its metrics as
    they come, checkpoints and the result. The same command on the same DIR
    resumes, also after Ctrl-C or a power cut, and ends with the same numbers as
    if it had never stopped.

    \b
    [bold]Examples[/]
      pfedhn run demo
      pfedhn run demo --set steps=1000 --set pfedhn-plus.lr=0.002 --out runs/longer
      pfedhn run table1-cifar10 --only method=pfedhn,method=fedavg,clients=50
      pfedhn run table1-mnist --seeds 0,1 --data-dir ~/data
      pfedhn run mine.toml --jobs 1
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
      dataset = "visits.csv"    a table (.csv, .tsv, .parquet), and with it
      columns = {client = "clinic", label = "outcome"}
    """
    from pfedhn.cli.choosing import chosen_runs, stored_runs
    from pfedhn.cli.running import choose_device_on, displayed, end
    from pfedhn.cli.showing import show_results
    from pfedhn.experiments.runner import run_ready
    from pfedhn.experiments.tasks import connected
    from pfedhn.storage.directory import MendableError
    from pfedhn.system.files import given_path

    if resume is not None:
        given = {"NAME-OR-FILE": experiment, "--set": assignments, "--only": only, "--seeds": seeds, "--out": out}
        given |= {"--rates": rates, "--small": "--small" if small else None}
        if clash := [name for name, value in given.items() if value]:
            raise UserError(f"--resume continues what {resume} holds, so {clash[0]} cannot be given with it.")
        chosen, runs, options = stored_runs(resume)
    elif experiment is None:
        raise UserError("give the name or the file of an experiment, or --resume DIR; `pfedhn list` shows the names.")
    else:
        chosen, runs, options = chosen_runs(experiment, assignments or [], only or [], seeds, rates, small)
    if data_dir is not None:
        options = replace(options, data_dir=given_path(data_dir, is_resolved=True))
    options = replace(
        options,
        executor=executor or options.executor,
        checkpoint_every=options.checkpoint_every if checkpoint_every is None else checkpoint_every,
        threads=options.threads if threads is None else threads,
        precision=options.precision if precision is None else precision,
        deterministic=options.deterministic or deterministic,
        track=track or options.track,
        norms=options.norms or norms,
    )
    if quiet and verbose:
        raise UserError("--quiet and --verbose cannot be given together; choose one.")
    if as_json and not dry_run:
        raise UserError("--json is for --dry-run; of finished runs, `pfedhn report --json` prints the results.")
    path = resume or out or Path("runs") / chosen.name
    if dry_run:
        from pfedhn.cli.plan import print_plan

        print_plan(path, chosen, runs, replace(options, device=choose_device_on(None, device)), jobs, as_json)
        return
    detail: Detail = "quiet" if quiet else "verbose" if verbose else "normal"
    with connected(on) as cluster:
        if device is not None or resume is None:
            options = replace(options, device=choose_device_on(cluster, device))
        with displayed(chosen, runs, path, options, jobs, cluster, detail=detail) as ready:
            outcome = run_ready(ready.runs, jobs=jobs, options=ready.options, listen=ready.listen, cluster=cluster)
    if outcome.results:
        try:
            show_results(path, ready.runs.runs, ready.options, quiet)
        except MendableError:
            end(outcome)  # a run that could not be mended is in no table, and why is said there
            raise
    end(outcome)
