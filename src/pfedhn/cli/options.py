"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pfedhn.cli import completion

ExperimentArgument = Argument(
    metavar="NAME-OR-FILE",
    help="An experiment that `pfedhn list` shows, or a TOML file.",
    show_default=False,
    autocompletion=completion.experiments,
)
OutOption = Annotated[Path | None, Option("--out", help="Where the runs are kept.", show_default="runs/NAME")]
JobsOption = Annotated[
    int | None,
    Option("--jobs", metavar="N", help="Runs at the same time.", show_default="one per core, or what a GPU holds"),
]
OnOption = Annotated[
    str | None,
    Option(
        "--on",
        metavar="ray|ray:ADDRESS",
        help="Run on a Ray cluster: a local one, or the one at ADDRESS.",
        show_default="this machine",
    ),
]
DataDirOption = Annotated[
    Path | None, Option("--data-dir", help="Folder with the files of data sets; without it, the Hugging Face Hub.")
]
SetOption = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="FIELD=VALUE",
        autocompletion=completion.assignments,
        help="Change a field of every cell (steps=100, partition.alpha=0.1), a setting of every method "
        "that has it (local_lr=0.01) or of one method (pfedhn.lr=0.05). Can be given several times.",
    ),
]
PrecisionOption = Annotated[
    str | None, Option("--precision", help="On a GPU: tf32, or fp32 (slower).", show_default="tf32")
]
DeviceOption = Annotated[
    str | None,
    Option(
        "--device",
        help="auto, cpu or cuda.",
        show_default="auto",
        autocompletion=completion.one_of("auto", "cpu", "cuda"),
    ),
]
RunArgument = Annotated[
    Path,
    Argument(
        metavar="RUN",
        help="The directory of a run, or of an experiment.",
        show_default=False,
        autocompletion=completion.run_directories,
    ),
]
RunNameOption = Annotated[
    str | None,
    Option("--run", metavar="NAME", help="For an experiment: which of its runs; a unique beginning will do."),
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object, for programs.")]
