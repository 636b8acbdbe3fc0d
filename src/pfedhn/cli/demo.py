"""`pfedhn demo`: the method at work within a minute."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pfedhn.cli.options import JobsOption
from pfedhn.system.screen import Screen, say


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the runs and the figure are kept.")] = Path("runs/demo"),
    jobs: JobsOption = None,
) -> None:
    """Watch pFedHN+ learn on handwritten digits, beside other methods: a table, a figure, no downloads.

    Run again, it shows the results; after Ctrl-C it resumes.

    \b
    [bold]Examples[/]
      pfedhn demo
      pfedhn demo --out my-demo
    """
    from pfedhn.cli.running import displayed, end
    from pfedhn.experiments.directory import Options
    from pfedhn.experiments.grid import select
    from pfedhn.experiments.runner import run_ready
    from pfedhn.paper.experiments import DEMO
    from pfedhn.report.entries import collect
    from pfedhn.report.figures import draw_demo
    from pfedhn.report.page import write
    from pfedhn.report.tables import sentence, to_terminal
    from pfedhn.system.files import write_atomically

    screen = Screen(stderr=True)
    runs = select(DEMO, [], None)
    screen.print(f"[bold]{escape(DEMO.title)}.[/]", highlight=False)
    methods = ", ".join(dict.fromkeys(cell.method for cell in DEMO.cells))
    screen.print(f"{methods}; {len(DEMO.seeds)} seeds each: {len(runs)} runs.", highlight=False)
    with displayed(DEMO, runs, out, Options(source="demo"), jobs) as ready:
        outcome = run_ready(ready.runs, jobs=jobs, options=ready.options, listen=ready.listen)
    end(outcome)
    (found,) = collect([out])
    Screen().print(to_terminal(found))
    say()
    say(sentence(found))
    (page,) = write([found], out / "report", ["html"])
    if importlib.util.find_spec("matplotlib") is None:
        say("The figure needs matplotlib: pip install 'pfedhn[report]', then the same command again.")
    else:
        figure = out / "demo.png"
        write_atomically(figure, draw_demo(found))
        say(f"The figure: {figure}")
    say(f"The page: {page} (opens in a browser, also offline)")
    say("Next: `pfedhn run demo --set partition.classes_per_client=2 --out runs/two-classes` (who wins now?),")
    say(f"      `pfedhn report {out}` (tables and figures as files), `pfedhn list` (what else there is).")
