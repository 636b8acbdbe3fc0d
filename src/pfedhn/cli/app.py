"""The command line: demo, list, run, tune, report, bench, data, doctor."""

import importlib.util
import inspect
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import click
import numpy
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import pfedhn
from pfedhn.algorithms import ALGORITHMS
from pfedhn.data import catalogue as datasets
from pfedhn.data.describe import describe, plot
from pfedhn.engine.executors import EXECUTORS
from pfedhn.errors import UserError, closest, first_line
from pfedhn.experiments import build as experiments
from pfedhn.experiments import runner
from pfedhn.experiments import tune as tuning
from pfedhn.experiments.directory import Directory, Options, num_cores
from pfedhn.experiments.execute import Outcome, failure_from
from pfedhn.experiments.grid import from_toml, refuse_without_effect, select, with_assignments
from pfedhn.experiments.paper import DEMO, EXPERIMENTS, with_rates_of
from pfedhn.experiments.provenance import environment, processor_name
from pfedhn.experiments.rates import rates_file, read_rates, save_rates
from pfedhn.experiments.spec import Cell, Experiment, find_run, with_pretraining
from pfedhn.files import write_atomically
from pfedhn.progress import Display
from pfedhn.report import results
from pfedhn.report import tables as reports
from pfedhn.report.entries import Average, asked_for, collect
from pfedhn.report.figures import draw_demo
from pfedhn.report.page import FORMATS, check_formats, write
from pfedhn.settings import parse_assignments

BAD_INPUT, FAILED, STOPPED = 2, 1, 130  # exit codes

EXTRAS = {
    "data": (("datasets", "PIL"), "reads MNIST, CIFAR and Omniglot"),
    "report": (("matplotlib",), "draws pictures"),
}
"""Optional parts: the modules they need and what they are for."""


class Stopped(Exception):
    """Ctrl-C came, and the runs in a directory stand in their checkpoints."""


class Commands(typer.core.TyperGroup):
    """Ends every error a person can mend with one sentence and an exit code, and no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if isinstance(error, click.exceptions.NoArgsIsHelpError):
                raise
            command = (error.ctx or ctx).command_path
            _complain(f"{error.format_message()} (`{command} --help` says more.)")
            raise typer.Exit(BAD_INPUT) from None
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except BrokenPipeError:  # the reader of `pfedhn list | head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (Exception, KeyboardInterrupt) as error:
            if ctx.params.get("debug"):
                raise
            sentence, code = _ending(error)
            if code == STOPPED:
                typer.echo(sentence, err=True)
            else:
                _complain(sentence)
            raise typer.Exit(code) from None


def _ending(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt | Stopped):
        return str(error) or "stopped.", STOPPED
    failure = failure_from(error)
    if failure is not None:
        return failure.sentence, BAD_INPUT if failure.is_bad_input else FAILED
    return f"{first_line(error)} (an error inside pfedhn; `pfedhn --debug ...` shows where).", FAILED


def _complain(sentence: str) -> None:
    Console(stderr=True).print(f"[red]error:[/] {escape(sentence)}", highlight=False, soft_wrap=True)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(
    no_args_is_help=True, help="Data sets: which there are, decode one into the cache, look at how clients share it."
)
app.add_typer(data_app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pfedhn {pfedhn.__version__}")
        raise typer.Exit


@app.callback()
def all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PFEDHN_DEBUG", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Personalized federated learning with hypernetworks: a model of its own for every client.

    [bold]pfedhn demo[/] shows it within two minutes; [bold]pfedhn list[/] what there is to run.
    """


OutOption = Annotated[Path | None, typer.Option("--out", help="Where the runs are kept.", show_default="runs/NAME")]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", help="Runs side by side.", show_default="one per core, or what a GPU holds"),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with the files of data sets; without it, the Hugging Face Hub."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of every cell (steps=100, partition.alpha=0.1), a setting of every method "
        "that has it (local_lr=0.01) or of one method (pfedhn.lr=0.05). Can be given several times.",
    ),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.", show_default="auto")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the runs and the picture are kept.")] = Path("runs/demo"),
    jobs: JobsOption = None,
) -> None:
    """Watch pFedHN learn on handwritten digits, beside other methods: a table, a picture, no downloads.

    The same command again shows what is there; after Ctrl-C it goes on.

    \b
    [bold]Examples[/]
      pfedhn demo
      pfedhn demo --out my-demo
    """
    screen = Console(stderr=True)
    names = select(DEMO, [], None)
    screen.print(f"[bold]{escape(DEMO.title)}.[/]", highlight=False)
    methods = ", ".join(dict.fromkeys(cell.method for cell in DEMO.cells))
    screen.print(f"{methods}; {len(DEMO.seeds)} seeds each: {len(names)} runs.", highlight=False)
    _end(_run(DEMO, names, out, Options(source="demo"), jobs))
    (found,) = collect([out])
    Console().print(reports.to_terminal(found))
    typer.echo()
    typer.echo(reports.sentence(found))
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo("The picture needs matplotlib: pip install 'pfedhn[report]', then the same command again.")
    else:
        picture = out / "demo.png"
        write_atomically(picture, draw_demo(found))
        typer.echo(f"The picture: {picture}")
    typer.echo("Next: `pfedhn run demo --set partition.classes_per_client=2 --out runs/two-classes` (who wins now?),")
    typer.echo(f"      `pfedhn report {out}` (tables and pictures as files), `pfedhn list` (what else there is).")


@app.command("list")
def list_all() -> None:
    """List the methods, the data sets and the experiments.

    \b
    [bold]Example[/]
      pfedhn list
    """
    console = Console()
    console.print(_listing("methods", [(name, _method_line(name)) for name in ALGORITHMS]))
    console.print(_listing("data sets", [(name, source.description) for name, source in datasets.DATASETS.items()]))
    rows = [
        (name, f"{item.title} ({len(item.cells)} cells, {len(item.seeds)} seeds each)")
        for name, item in EXPERIMENTS.items()
    ]
    console.print(_listing("experiments", rows))
    console.print("`pfedhn run NAME` runs an experiment; `pfedhn run FILE.toml` one of your own (see its --help).")


def _listing(title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="cyan")
    for cells in rows:
        table.add_row(*map(escape, cells))
    table.add_row("")
    return table


def _method_line(name: str) -> str:
    """The first line of the file that a paper has; of a variant, of its own function."""
    made_by = ALGORITHMS[name]
    described = inspect.getmodule(made_by) if inspect.isclass(made_by) else made_by
    return (inspect.getdoc(described) or "").splitlines()[0]


@app.command()
def run(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME-OR-FILE", help="An experiment that `pfedhn list` shows, or a TOML file.", show_default=False
        ),
    ] = None,
    assignments: SetOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="FIELD=VALUE,...",
            help="Only the runs that match: method=pfedhn,clients=50. A field given twice takes either value.",
        ),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", metavar="N,...", help="Other seeds than the experiment's, e.g. 0,1."),
    ] = None,
    out: OutOption = None,
    jobs: JobsOption = None,
    rates: Annotated[
        Path | None,
        typer.Option("--rates", metavar="FILE", help="Learning rates that `pfedhn tune` chose.", show_default=False),
    ] = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    executor: Annotated[
        str | None,
        typer.Option(
            "--executor", help=f"How a cohort is computed: auto, {', '.join(EXECUTORS)}, captured.", show_default="auto"
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option("--checkpoint-every", metavar="STEPS", help="Steps between checkpoints.", show_default="a minute"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of each run.", show_default="cores / jobs")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="On a GPU: tf32, or fp32 (slower).", show_default="tf32")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a GPU: the same bits from the same card and versions.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the runs of a directory.")
    ] = None,
) -> None:
    """Run an experiment, side by side on the cores there are, and print its table.

    DIR holds one experiment, with a folder per run: its spec, its metrics as
    they come, checkpoints and the result. The same command on the same DIR goes
    on where it stopped, also after Ctrl-C or a power cut, and ends with the same
    numbers as if it had never stopped.

    \b
    [bold]Examples[/]
      pfedhn run demo
      pfedhn run demo --set steps=1000 --set pfedhn.lr=0.05 --out runs/longer
      pfedhn run table1-cifar10 --only method=pfedhn,method=fedavg,clients=50
      pfedhn run table1-mnist --seeds 0,1 --data-dir ~/data
      pfedhn run mine.toml --jobs 1
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
    if resume is not None:
        given = {"NAME-OR-FILE": experiment, "--set": assignments, "--only": only, "--seeds": seeds, "--out": out}
        given["--rates"] = rates
        if clash := [name for name, value in given.items() if value]:
            raise UserError(f"--resume goes on with what {resume} holds, so {clash[0]} cannot be given with it.")
        directory = Directory(resume)
        chosen, names = directory.read()
        options = directory.options()
    elif experiment is None:
        raise UserError("give the name or the file of an experiment, or --resume DIR; `pfedhn list` shows the names.")
    else:
        chosen, source = _find(experiment)
        if rates is not None:
            rates = rates.expanduser().resolve()
            if not rates.is_file():
                raise UserError(f"there is no file {rates}.")
            chosen = with_rates_of(chosen, rates)
        if (file := rates or _rates_beside(source)) is not None:
            Console(stderr=True).print(f"Learning rates: {escape(str(file))}", highlight=False, soft_wrap=True)
        chosen = with_assignments(chosen, parse_assignments(assignments or []))
        experiments.check(chosen)
        names = select(chosen, only or [], _numbers(seeds))
        runs = with_pretraining(chosen, names)
        refuse_without_effect(assignments or [], [find_run(chosen, run)[0] for run in runs])
        options = Options(source=source, assignments=tuple(assignments or []), rates=rates)
    if data_dir is not None:
        options = replace(options, data_dir=data_dir.expanduser().resolve())
    options = replace(
        options,
        device=options.device if device is None and resume is not None else _device(device or "auto"),
        executor=executor or options.executor,
        checkpoint_every=options.checkpoint_every if checkpoint_every is None else checkpoint_every,
        threads=options.threads if threads is None else threads,
        precision=options.precision if precision is None else precision,
        deterministic=options.deterministic or deterministic,
    )
    path = resume or out or Path("runs") / chosen.name
    outcome = _run(chosen, names, path, options, jobs)
    if outcome.results:
        for found in collect([path]):
            Console().print(reports.to_terminal(asked_for(found)))
    _end(outcome)


def _find(name: str) -> tuple[Experiment, str]:
    """An experiment by name or file, and how a later command should name it."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name], name
    file = Path(name).expanduser()
    if file.is_file():
        return from_toml(file), str(file.resolve())
    if file.suffix == ".toml" or os.sep in name:
        raise UserError(f"there is no file {name}.")
    raise UserError(f"there is no experiment {name!r}; {closest(name, EXPERIMENTS)}")


def _rates_beside(source: str) -> Path | None:
    """The file of rates that was read with a user's experiment file."""
    file = None if source in EXPERIMENTS else rates_file(Path(source))
    return file if file is not None and file.exists() else None


def _numbers(texts: Sequence[str] | None) -> list[int] | None:
    """`["0,1", "2"]` -> [0, 1, 2]."""
    if not texts:
        return None
    try:
        return list(dict.fromkeys(int(part) for text in texts for part in text.split(",")))
    except ValueError:
        raise UserError(f"--seeds {' '.join(texts)} does not fit; it takes whole numbers, e.g. 0,1,2.") from None


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not name.startswith("cuda"):
        raise UserError(f"there is no device {name!r}; {closest(name, ['auto', 'cpu', 'cuda'])}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("this PyTorch finds no CUDA device; `pfedhn doctor` says more, --device cpu works anywhere.")
    return name


def _run(
    chosen: Experiment, names: Sequence[str], path: Path, options: Options, jobs: int | None, split: str = "test"
) -> Outcome:
    """Everything between a checked command and its outcome."""
    options.check()
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1.")
    directory = Directory(path)
    experiments.check(chosen)
    directory.refuse_other(chosen)
    names = with_pretraining(chosen, names)
    left = [name for name in names if not (path / name / "result.json").exists()]
    screen = Console(stderr=True)
    for name in dict.fromkeys(find_run(chosen, run)[0].dataset for run in left):
        if name in datasets.DATASETS:
            _get(name, options.data_dir, again=False)
    runner.prepare(path, chosen, left, options)
    if options.threads is None and (path / "experiment.toml").exists():
        options = replace(options, threads=directory.options().threads)  # however few runs are left by now
    options = options.with_threads(len(names), jobs)
    directory.open(chosen, names, options)
    if len(left) < len(names):
        screen.print(f"{len(names) - len(left)} of {len(names)} runs are finished already.", highlight=False)
    try:
        with Display(len(left), screen, split) as display:
            return runner.run_many(path, chosen, names, jobs=jobs, options=options, listen=display)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; `pfedhn run --resume {path}` goes on.") from None


def _end(outcome: Outcome) -> None:
    """Failed runs once more, where they can be seen: a line for each reason."""
    if not outcome.failures:
        return
    reasons: dict[str, list[str]] = {}
    for name, failure in outcome.failures.items():
        reasons.setdefault(failure.sentence, []).append(name)
    for sentence, names in reasons.items():
        who = names[0] if len(names) == 1 else f"{len(names)} runs ({names[0]}, ...)"
        _complain(f"{who}: {sentence}")
    raise typer.Exit(BAD_INPUT if all(failure.is_bad_input for failure in outcome.failures.values()) else FAILED)


@app.command()
def tune(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="NAME-OR-FILE", help="An experiment that `pfedhn list` shows, or a TOML file.", show_default=False
        ),
    ],
    assignments: SetOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="FIELD=VALUE,...",
            help="Only these methods or cells: method=fedavg. pFedHN and pFedHN-PC are tuned only if named here.",
        ),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", metavar="N,...", help="Scores are means over these.", show_default="0"),
    ] = None,
    fraction: Annotated[
        float, typer.Option("--fraction", metavar="F", help="Share of a cell's steps that every point gets first.")
    ] = tuning.FRACTION,
    finalists: Annotated[
        int, typer.Option("--finalists", metavar="N", help="Points of each method that then get all steps.")
    ] = tuning.FINALISTS,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Put the chosen rates into this file too.", show_default="FILE.rates.toml"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the runs are kept.", show_default="runs/NAME-tuning")
    ] = None,
    jobs: JobsOption = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
) -> None:
    """Choose learning rates on validation rows, from the paper's grids.

    Every point of a method's grid is run for a fifth of the steps, the best
    three for all of them; the best validation score wins. pFedHN keeps its
    authors' rates unless --only names it. 50 clients are used if the experiment
    has such a cell, else the middle one of its numbers. After Ctrl-C or a crash,
    the same command goes on.

    The choice is kept in DIR/rates.toml. For mine.toml it is also kept beside
    it, in mine.rates.toml, where `pfedhn run mine.toml` finds it.

    \b
    [bold]Examples[/]
      pfedhn tune table1-cifar10 --device cuda
      pfedhn run table1-cifar10 --rates runs/table1-cifar10-tuning/rates.toml
      pfedhn tune mine.toml --only method=pfedhn,clients=20
    """
    chosen, source = _find(experiment)
    values = parse_assignments(assignments or [])
    chosen = with_assignments(chosen, values)
    experiments.check(chosen)
    numbers = _numbers(seeds)
    study = tuning.plan(chosen, only or [], numbers, fraction=fraction, finalists=finalists, assigned=values)
    cells = [point.cell for method in study.methods for point in study.points_of(method)]
    refuse_without_effect(assignments or [], cells)
    if save is None and experiment not in EXPERIMENTS:
        save = rates_file(Path(source))
    path = out or Path("runs") / f"{chosen.name}-tuning"
    tuning.refuse_other(path, study)
    for file in (save, path / "rates.toml"):
        if file is not None and file.is_dir():
            raise UserError(f"{file} is a folder; the rates need a file.")
        if file is not None and file.exists():
            read_rates(file)  # a damaged one is refused now, not after hours
    if save is not None and (trouble := _write_trouble(save.parent)) is not None:
        raise UserError(f"{save} cannot be written ({trouble}); give another file as --save.")
    tuning.read_record(path / "tuning.json")
    options = Options(data_dir=None if data_dir is None else data_dir.expanduser().resolve())
    options = replace(options, device=_device(device or "auto"))
    points = [point for method in study.methods for point in study.points_of(method)]
    found = tuning.Findings(study, _run_stage(study, "first", points, path, options, jobs))
    points = [point for method in study.methods for point in found.finalists(method)]
    found = replace(found, finals=_run_stage(study, "finals", points, path, options, jobs))
    for table in found.tables():
        Console().print(table)
    words = ["pfedhn", "tune", source, *(word for text in assignments or [] for word in ("--set", text))]
    words += [word for text in only or [] for word in ("--only", text)]
    words += ["--seeds", ",".join(map(str, study.seeds)), "--fraction", f"{fraction:g}", "--finalists", str(finalists)]
    tuning.write_record(path / "tuning.json", chosen, found.record(shlex.join(words)))
    for file in (path / "rates.toml", save):
        if file is not None and found.rates():
            save_rates(file, chosen.name, found.rates())
            typer.echo(f"Learning rates: {file}")
    present = {cell.method for cell in chosen.cells}
    left = [method for method in tuning.ONLY_WHEN_NAMED if method in present and method not in study.methods]
    if left and not any("method=" in text for text in only or []):  # who names methods knows
        how = ",".join(f"method={method}" for method in left)
        typer.echo(f"Not tuned, and kept as it was: {', '.join(left)} (--only {how} tunes it).")
    if found.rates():
        is_found_by_itself = experiment not in EXPERIMENTS and save == rates_file(Path(source))
        with_file = "" if is_found_by_itself else f" --rates {shlex.quote(str(path / 'rates.toml'))}"
        typer.echo(f"Next: `pfedhn run {shlex.quote(experiment)}{with_file}` uses them.")
    if lost := [method for method in study.methods if found.winner(method) is None]:
        _complain(f"every point of {', '.join(lost)} diverged; no rate was chosen for it.")
        raise typer.Exit(FAILED)


def _run_stage(
    study: tuning.Study,
    stage: tuning.Stage,
    points: Sequence[tuning.Point],
    out: Path,
    options: Options,
    jobs: int | None,
) -> Outcome:
    """The runs of some points; one that diverges is a finding, any other failure ends the command."""
    path = out / stage
    options = replace(options, source=str((path / "experiment.toml").resolve()))
    Console(stderr=True).print(f"[bold]{escape(study.stages[stage].title)}[/]", highlight=False)
    try:
        # No test score is shown: who sees it while choosing has chosen by it.
        outcome = _run(study.stages[stage], study.runs(stage, points), path, options, jobs, split="validation")
    except Stopped:
        raise Stopped("stopped; the same command goes on.") from None
    _end(Outcome(failures={name: why for name, why in outcome.failures.items() if not why.has_diverged}))
    return outcome


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR-OR-FILE...",
            help="Directories that `pfedhn run` made, or .jsonl files that --export made, or a folder of these.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where the files are written.", show_default="DIR/report; for .jsonl files, report"),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="md,csv,...", help=f"Of {', '.join(FORMATS)}.", show_default="all"),
    ] = None,
    average: Annotated[
        str, typer.Option("--average", help="Which accuracy is compared and drawn: over clients or over samples.")
    ] = "clients",
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE.jsonl",
            help="Instead of a report, put each finished run into FILE as one small line; a run made again replaces "
            "its line.",
        ),
    ] = None,
) -> None:
    """Make tables and pictures of finished and unfinished runs, from their files alone.

    Several directories of one experiment are put together seed by seed; those
    of different experiments stand side by side. Accuracy is that of each client's
    own model on its own test rows, at the round chosen on validation: the mean
    over clients, then mean ± sample deviation over seeds.

    \b
    [bold]Examples[/]
      pfedhn report runs/demo
      pfedhn report runs/table1-cifar10 runs/table1-cifar100 --out tables
      pfedhn report runs/demo --format md,png
      pfedhn report runs/demo --export results/demo.jsonl
      pfedhn report results/demo.jsonl
    """
    if average not in get_args(Average):
        raise UserError(f"--average {average} does not fit; it takes clients or samples.")
    over: Average = "samples" if average == "samples" else "clients"
    wanted = [part.strip() for text in formats or [] for part in text.split(",")]
    check_formats(wanted)
    if export is not None:
        if given := next((name for name, value in (("--out", out), ("--format", formats)) if value), None):
            raise UserError(f"--export makes no report, so {given} cannot be given with it.")
        done = results.export(paths, export)
        added = "1 run" if done.new == 1 else f"{done.new} runs"
        typer.echo(f"{export}: {added} added, {done.replaced} replaced, {done.total} in all.")
        return
    found = collect(paths)
    console = Console()
    for item in found:
        console.print(reports.to_terminal(item, over))
    if not wanted:
        wanted = list(FORMATS)
        if importlib.util.find_spec("matplotlib") is None:
            wanted = [name for name in wanted if name not in ("png", "html")]
            Console(stderr=True).print("no pictures: they need matplotlib (pip install 'pfedhn[report]').")
    is_one_directory = len(paths) == 1 and (paths[0] / "experiment.toml").exists()
    place = out or (paths[0] / "report" if is_one_directory else Path("report"))
    files = write(found, place, wanted, over)
    typer.echo(f"Written to {place}: {', '.join(file.name for file in files)}")


@app.command()
def bench(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of a table.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.", show_default="auto")] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Turns that every program takes.")] = 7,
) -> None:
    """Measure the engine against pFedHN as a textbook writes it, side by side.

    Same data, same batches; every program runs one round in turn, in a process of
    its own, and all are checked to compute the same weights. Takes two minutes on
    two quiet cores. On a GPU the captured rounds include an evaluation of all
    clients every 30 rounds; runs side by side show the time of a round and run.

    \b
    [bold]Examples[/]
      pfedhn bench
      pfedhn bench --json > bench.jsonl
    """
    from pfedhn.bench.measure import bench as measure

    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; it must be at least 1.")
    chosen = _device(device or "auto")
    console = Console(stderr=True)
    with console.status("starting") as status:
        records = measure(chosen, repeats, status.update)
    if as_json:
        for record in records:
            typer.echo(json.dumps(record | {"versions": environment(chosen)}))
        return
    columns = {
        "workload": "workload", "program": "program", "device": "device", "clients": "clients",
        "ms_per_round": "ms a round", "ratio_to_textbook": "x textbook", "peak_memory_mb": "peak MB",
        "bytes_per_client": "bytes a client", "kernels_per_step": "kernels a step", "equal": "equal",
    }  # fmt: skip
    for title, is_shown in (("Against the textbook", False), ("Against the number of clients", True)):
        rows = [record for record in records if ("clients" in record) == is_shown]
        used = [name for name in columns if any(name in record for record in rows)]
        if rows:
            table = Table(*(columns[name] for name in used), box=None, title=title)
            for record in rows:
                table.add_row(*(_cell(record.get(name)) for name in used))
            Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)


@app.command()
def doctor() -> None:
    """Check what this machine has: Python, PyTorch, device, optional parts, cache, data sets.

    Ends with code 1 if something that every run needs is missing.

    \b
    [bold]Example[/]
      pfedhn doctor
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    table.add_row("pfedhn", f"{pfedhn.__version__}, {Path(pfedhn.__file__).parent}")
    table.add_row("python", f"{platform.python_version()}, {sys.executable}")
    table.add_row("torch", f"{torch.__version__}, NumPy {numpy.__version__}")
    table.add_row("device", escape(_device_line()))
    table.add_row("cores", f"{num_cores()} ({processor_name()})")
    table.add_row("threads", f"{torch.get_num_threads()} unless --jobs or --threads say otherwise")
    for name, (modules, purpose) in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        state = f"present ({purpose})" if not missing else f"missing ({purpose}): pip install 'pfedhn[{name}]'"
        table.add_row(f"extra {name}", escape(state))
    cache = datasets.cache_path("digits").parent
    trouble = _write_trouble(cache)
    state = (
        "can be written" if trouble is None else f"cannot be written ({trouble}); set PFEDHN_CACHE to another folder"
    )
    table.add_row("cache", escape(f"{cache}: {state}"))
    for name in datasets.DATASETS:
        where = " --data-dir FOLDER" if datasets.DATASETS[name].hub is None else ""
        state = _data_state(name)
        again = {"not cached": "", "damaged": " --again"}.get(state)
        table.add_row(f"data {name}", state if again is None else f"{state}: pfedhn data get {name}{where}{again}")
    Console().print(table)
    try:
        datasets.load("digits")
    except Exception as error:  # whatever it is, the person should see it here
        _complain(f"the embedded data set cannot be read ({first_line(error)}); install scikit-learn anew.")
        raise typer.Exit(FAILED) from None
    typer.echo("Ready: `pfedhn demo`.")


def _device_line() -> str:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return f"cuda ({', '.join(names)}; CUDA {torch.version.cuda}), which --device auto takes"
    built = f"PyTorch is built for CUDA {torch.version.cuda}, but finds no GPU" if torch.version.cuda else "no CUDA"
    return f"cpu ({built})"


def _write_trouble(folder: Path) -> str | None:
    """Why nothing can be written there; None if it can."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _data_state(name: str) -> str:
    return "always there" if name == "digits" else datasets.cache_state(name)


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and which are in the cache.

    \b
    [bold]Example[/]
      pfedhn data list
    """
    rows = [(name, source.description, _data_state(name)) for name, source in datasets.DATASETS.items()]
    Console().print(_listing("data sets", rows))


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, cifar10, cifar100, omniglot.")],
    data_dir: DataDirOption = None,
    again: Annotated[bool, typer.Option("--again", help="Decode even if there is a cached copy.")] = False,
) -> None:
    """Decode a data set into the cache, from files or from the Hugging Face Hub.

    The cache is the folder in the environment variable PFEDHN_CACHE, or
    ~/.cache/pfedhn; it can be copied to a machine without network.

    \b
    [bold]Examples[/]
      pfedhn data get cifar10
      pfedhn data get omniglot --data-dir ~/data
    """
    typer.echo(f"{name}: {_get(name, data_dir, again)}")


def _get(name: str, data_dir: Path | None, again: bool) -> Path:
    """Decode into the cache; the bar appears with the first image."""
    display = Progress(
        TextColumn("decoding {task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )

    def move(done: int, total: int) -> None:
        if not display.tasks:
            display.add_task(name, total=total)
            display.start()
        display.update(display.tasks[0].id, completed=done)

    try:
        return datasets.get(name, data_dir, move, again)
    finally:
        if display.tasks:
            display.stop()


@data_app.command("show")
def data_show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A data set, or an experiment or TOML file, whose first cell is shown."),
    ],
    assignments: SetOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the split.")] = 0,
    data_dir: DataDirOption = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it as well (.png, .pdf or .svg).")
    ] = None,
) -> None:
    """Show how clients share a data set: their rows, their classes, what is left unused.

    \b
    [bold]Examples[/]
      pfedhn data show demo --plot split.png
      pfedhn data show digits --set clients=20
      pfedhn data show mnist --set partition.rule=dirichlet \\
                             --set partition.alpha=0.1
    """
    chosen = Experiment(name, (_cell_for(name),)) if name in datasets.DATASETS else _find(name)[0]
    chosen = with_assignments(chosen, parse_assignments(assignments or []))
    experiments.check(chosen)
    cell = chosen.cells[0]
    if cell.dataset in datasets.DATASETS:
        _get(cell.dataset, data_dir, again=False)
    federation = experiments.build_federation(cell, seed, data_dir)
    typer.echo(describe(federation))
    if picture is not None:
        plot(federation, picture)
        typer.echo(f"The picture: {picture}")


def _cell_for(name: str) -> Cell:
    """A data set as the paper splits it."""
    if name == "digits":
        return DEMO.cells[0]
    if name == "omniglot":
        return Cell(dataset=name, clients=50, partition={"rule": "by_group"}, split=(0.7, 0.15, 0.15), model="omniglot")
    return next(cell for item in EXPERIMENTS.values() for cell in item.cells if cell.dataset == name)
