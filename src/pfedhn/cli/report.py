"""`pfedhn report`: tables and figures from the files of runs."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from pfedhn.cli.options import JsonOption
from pfedhn.errors import UserError
from pfedhn.system.screen import Screen, say, table_screen


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
        typer.Option(
            "--format", metavar="md,csv,...", help="Some of md, csv, tex, png, svg, html.", show_default="all"
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option("--study", metavar="FILE.py", help="A study of your own that draws what these runs show."),
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
    as_json: JsonOption = False,
) -> None:
    """Make tables, figures and an HTML page from the files of finished and unfinished runs.

    Several directories of one experiment are put together seed by seed; those
    of different experiments stand side by side. Accuracy is that of each client's
    own model on its own test examples, at the round chosen on validation: the mean
    over clients, then mean ± standard deviation over seeds.

    \b
    [bold]Examples[/]
      pfedhn report runs/demo
      pfedhn report runs/table1-cifar10 runs/table1-cifar100 --out tables
      pfedhn report runs/demo --format md,png
      pfedhn report runs/demo --export results/demo.jsonl
      pfedhn report results/demo.jsonl
      pfedhn report runs/local-steps results/table1-cifar10.jsonl
      pfedhn report runs/mine --study mine.py
      pfedhn report runs/demo --json
    """
    from pfedhn.cli.find import find_study
    from pfedhn.report import results
    from pfedhn.report.entries import Average, to_reports
    from pfedhn.report.findings import to_terminal as finding_to_terminal
    from pfedhn.report.page import FORMATS, check_formats, write
    from pfedhn.report.study import findings
    from pfedhn.report.tables import to_json, to_terminal
    from pfedhn.system.files import writing

    if average not in ("clients", "samples"):
        raise UserError(f"--average {average} does not fit; it takes clients or samples.")
    over: Average = "samples" if average == "samples" else "clients"
    files_asked = [name for name, value in (("--out", out), ("--format", formats), ("--export", export)) if value]
    if as_json and files_asked:
        raise UserError(f"--json writes no files, so {files_asked[0]} cannot be given with it.")
    wanted = [part.strip() for text in formats or [] for part in text.split(",")]
    check_formats(wanted)
    if export is not None:
        if given := next((name for name, value in (("--out", out), ("--format", formats)) if value), None):
            raise UserError(f"--export makes no report, so {given} cannot be given with it.")
        with writing(export):
            export.exists()  # a name that the system does not take is refused before anything is read
        for path in paths:
            _check_place(path)
        done = results.export(paths, export)
        added = "1 run" if done.new == 1 else f"{done.new} runs"
        say(f"{export}: {added} added, {done.replaced} replaced, {done.total} in all.")
        return
    for path in paths:
        _check_place(path)
    runs = [part for path in paths for part in results.read(path)]
    found = to_reports(runs)
    if as_json:
        say(json.dumps({"reports": to_json(found)}))
        return
    own = [] if study is None else [find_study(str(study))]
    shown = findings(runs, [item for item in own if item is not None])
    console = table_screen()
    for item in found:
        console.print(to_terminal(item, over))
    for finding in shown:
        console.print(finding_to_terminal(finding))
    if not wanted:
        wanted = list(FORMATS)
        if importlib.util.find_spec("matplotlib") is None:
            wanted = [name for name in wanted if name not in ("png", "svg") and not (name == "html" and shown)]
            Screen(stderr=True).print("no figures: they need matplotlib (pip install 'pfedhn[report]').")
    is_one_directory = len(paths) == 1 and any((paths[0] / f"{name}.toml").exists() for name in ("experiment", "spec"))
    place = out or (paths[0] / "report" if is_one_directory else Path("report"))
    files = write(found, place, wanted, over, shown)
    say(f"Written to {place}: {', '.join(file.name for file in files)}")


def _check_place(path: Path) -> None:
    """Refuse what is no place of results, before its lines are called wrong."""
    from pfedhn.system.files import reading

    with reading(path):
        if not path.exists():
            raise UserError(f"there is no file or folder {path}; give a directory that `pfedhn run` made.")
        if path.is_file() and path.suffix.lower() != ".jsonl":
            made = Path("runs") / path.stem
            hint = f", such as {made}" if path.suffix == ".toml" and made.is_dir() else ""
            raise UserError(f"{path} holds no results; give the directory that `pfedhn run` made{hint}.")
