"""`pfedhn list`: what there is to run."""

import json
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from pfedhn.cli.options import JsonOption
from pfedhn.system.screen import Screen, say


def list_all(as_json: JsonOption = False) -> None:
    """List the methods, the data sets, the experiments and the studies.

    \b
    [bold]Example[/]
      pfedhn list
    """
    from pfedhn.algorithms import ALGORITHMS
    from pfedhn.data.catalogue import DATASETS
    from pfedhn.experiments.registry import experiments
    from pfedhn.report.entries import counted
    from pfedhn.report.study import studies

    if as_json:
        table = {
            "methods": {name: known.description for name, known in ALGORITHMS.items()},
            "datasets": {name: source.description for name, source in DATASETS.items()},
            "experiments": {name: item.title for name, item in experiments().items()},
            "studies": {name: study.title for name, study in studies().items()},
        }
        say(json.dumps(table))
        return
    console = Screen()
    console.print(listing("methods", [(name, ALGORITHMS[name].description) for name in ALGORITHMS]))
    console.print(listing("data sets", [(name, source.description) for name, source in DATASETS.items()]))
    lines = [
        (name, f"{item.title} ({counted(len(item.cells), 'cell')}, {counted(len(item.seeds), 'seed')} each)")
        for name, item in experiments().items()
    ]
    console.print(listing("experiments", lines))
    lines = [
        (name, f"{study.title} ({counted(len(study.experiment().cells), 'cell')})") for name, study in studies().items()
    ]
    console.print(listing("studies: the rest of the paper", lines))
    console.print(
        "`pfedhn run NAME` runs an experiment or a study; `pfedhn run FILE.toml` one of your own (see its --help)."
    )


def listing(title: str, lines: Sequence[tuple[str, ...]]) -> Table:
    """Names, and what each of them is."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="cyan")
    for cells in lines:
        table.add_row(*map(escape, cells))
    table.add_row("")
    return table
