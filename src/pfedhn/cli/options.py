"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

ExperimentArgument = typer.Argument(
    metavar="NAME-OR-FILE", help="An experiment that `pfedhn list` shows, or a TOML file.", show_default=False
)
OutOption = Annotated[Path | None, typer.Option("--out", help="Where the runs are kept.", show_default="runs/NAME")]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", help="Runs side by side.", show_default="one per core, or what a GPU holds"),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ray|ray:ADDRESS",
        help="Run on a Ray cluster: one of this machine, or the one at ADDRESS.",
        show_default="this machine",
    ),
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
