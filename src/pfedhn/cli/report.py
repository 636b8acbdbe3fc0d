"""`pfedhn report`: tables and figures from the files of runs."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pfedhn.cli.options import JsonOption
from pfedhn.errors import UserError
from pfedhn.system.screen import Screen, say, table_screen


def report(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="DIR-OR-FILE...",
            help="Directories that `pfedhn run` made, or .jsonl files that --export made, or a folder of these.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, Option(help="Where the files are written.", show_default="DIR/report; for .jsonl files, report")
    ] = None,
    formats: Annotated[
        list[str] | None,
        Option("--format", metavar="md,csv,...", help="Some of md, csv, tex, png, svg, html.", show_default="all"),
    ] = None,
    study: Annotated[
        Path | None, Option(metavar="FILE.py", help="Your own study, which draws what these runs show.")
    ] = None,
    average: Annotated[
        str, Option(help="Which accuracy is compared and drawn: over clients or over samples.")
    ] = "clients",
    export: Annotated[
        Path | None,
        Option(
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
    from pfedhn.report.entries import Average, counted, to_reports
    from pfedhn.report.findings import to_terminal as finding_to_terminal
    from pfedhn.report.page import FORMATS, check_formats, write
    from pfedhn.report.study import findings
    from pfedhn.report.tables import to_json, to_terminal
    from pfedhn.report.verdict import to_json as verdict_to_json
    from pfedhn.report.verdict import to_terminal as verdict_to_terminal
    from pfedhn.report.verdict import verdicts
    from pfedhn.system.files import writing

    if average not in ("clients", "samples"):
        raise UserError(f"--average must be clients or samples, got {average!r}.")
    over: Average = "samples" if average == "samples" else "clients"
    files_asked = [name for name, value in (("--export", export), ("--out", out), ("--format", formats)) if value]
    if as_json and files_asked:
        raise UserError(f"--json writes no files, so {files_asked[0]} cannot be given with it.")
    if export is not None and files_asked[1:]:
        raise UserError(f"--export makes no report, so {files_asked[1]} cannot be given with it.")
    wanted = [part.strip() for text in formats or [] for part in text.split(",")]
    check_formats(wanted)
    if export is not None:
        with writing(export):
            export.exists()  # a name that the system does not take is refused before anything is read
        done = results.export(paths, export)
        say(f"{export}: {counted(done.new, 'run')} added, {done.replaced} replaced, {done.total} in all.")
        return
    runs = [part for path in paths for part in results.read(path)]
    found = to_reports(runs)
    if as_json:
        judged = [verdict_to_json(verdict) for item in found for verdict in verdicts(item)]
        say(json.dumps({"reports": to_json(found), "verdicts": judged}))
        return
    own = None if study is None else find_study(str(study))
    shown = findings(runs, [] if own is None else [own])
    console = table_screen()
    for item in found:
        console.print(to_terminal(item, over))
        console.print(verdict_to_terminal(verdicts(item)))
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
