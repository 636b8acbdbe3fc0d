"""The command line as a whole: its commands and the options that stand before them.

The modules of commands import what they need when they run, so that help comes at once, without PyTorch.
"""

from typing import Annotated

import typer

import pfedhn
from pfedhn.cli.add_client import add_client
from pfedhn.cli.bench import bench
from pfedhn.cli.data import data
from pfedhn.cli.demo import demo
from pfedhn.cli.doctor import doctor
from pfedhn.cli.endings import Commands
from pfedhn.cli.export import export
from pfedhn.cli.invite import invite
from pfedhn.cli.join import join
from pfedhn.cli.list import list_all
from pfedhn.cli.predict import predict
from pfedhn.cli.report import report
from pfedhn.cli.run import run
from pfedhn.cli.serve import serve
from pfedhn.cli.status import status
from pfedhn.cli.tune import tune
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PFEDHN_DEBUG", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """A simulator and a deployment framework for personalized federated learning.

    [bold]pfedhn demo[/] shows it within a minute; [bold]pfedhn list[/] what there is to run.
    """


app.command()(demo)
app.command("list")(list_all)
app.command()(run)
app.command()(tune)
app.command()(report)
app.command("add-client")(add_client)
app.command()(export)
app.command()(predict)
app.command()(bench)
app.command()(doctor)
app.command()(serve)
app.command()(invite)
app.command()(join)
app.command()(status)
app.add_typer(data, name="data")
