"""The command line as a whole: its commands and the options that stand before them.

The modules of commands import what they need when they run, so that help comes at once, without PyTorch.
"""

from importlib import import_module
from typing import Annotated

import typer
from typer import Option

import pfedhn
from pfedhn.cli.data import data
from pfedhn.cli.endings import Commands
from pfedhn.system.screen import say

app = typer.Typer(
    cls=Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"pfedhn {pfedhn.__version__}")
        raise typer.Exit


@app.callback()
def all_commands(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, Option("--debug", envvar="PFEDHN_DEBUG", help="Show the traceback of an error.")] = False,
) -> None:
    """A simulator and a deployment framework for personalized federated learning.

    [bold]pfedhn demo[/] shows it within a minute; [bold]pfedhn list[/] what there is to run.
    """


# Each is a function in a module of its name.
COMMANDS = (
    *("demo", "list", "run", "tune", "report"),
    *("add-client", "export", "predict", "bench", "doctor"),
    *("serve", "invite", "join", "status", "evaluate", "audit", "backup"),
)
for command in COMMANDS:
    name = "list_all" if command == "list" else command.replace("-", "_")
    app.command(command)(getattr(import_module(f"pfedhn.cli.{name}"), name))
app.add_typer(data, name="data")
