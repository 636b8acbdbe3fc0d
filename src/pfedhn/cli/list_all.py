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
    from pfedhn.data.silo_catalogue import SILOS
    from pfedhn.experiments.registry import experiments
    from pfedhn.report.entries import counted
    from pfedhn.report.study import studies

    found = {
        "methods": {name: known.description for name, known in ALGORITHMS.items()},
        "datasets": {
            **{name: source.description for name, source in DATASETS.items()},
            **{name: silo.description for name, silo in SILOS.items()},
        },
        "experiments": {name: item.title for name, item in experiments().items()},
        "studies": {name: study.title for name, study in studies().items()},
    }
    if as_json:
        say(json.dumps(found))
        return
    for name, item in experiments().items():
        sizes = f"{counted(len(item.cells), 'cell')}, {counted(len(item.seeds), 'seed')} each"
        found["experiments"][name] += f" ({sizes})"
    for name, study in studies().items():
        found["studies"][name] += f" ({counted(len(study.experiment().cells), 'cell')})"
    console, titles = Screen(), {"datasets": "data sets", "studies": "studies: the rest of the paper, and hospitals"}
    for kind, texts in found.items():
        console.print(listing(titles.get(kind, kind), list(texts.items())))
    console.print(
        "`pfedhn run NAME` runs an experiment or a study; `pfedhn run FILE.toml` runs yours (see its --help)."
    )


def listing(title: str, lines: Sequence[tuple[str, ...]]) -> Table:
    """Names, and what each of them is."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="cyan")
    for cells in lines:
        table.add_row(*map(escape, cells))
    table.add_row("")
    return table
