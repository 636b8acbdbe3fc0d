"""`pfedhn export`: personal models as files that run without this package."""

from pathlib import Path
from typing import Annotated

from typer import Option

from pfedhn.cli.options import RunArgument, RunNameOption
from pfedhn.errors import UserError
from pfedhn.system.screen import say

PARTY = "party.json"  # of the folder of a party that takes part in a federation


def export(
    directory: RunArgument,
    to: Annotated[Path, Option(metavar="FILE", help="Where: .onnx, .pt2 or .safetensors; with --all, a folder.")],
    client: Annotated[str | None, Option(metavar="NAME", help="Whose model, by name or number.")] = None,
    every: Annotated[bool, Option("--all", help="The model of every client.")] = False,
    kind: Annotated[
        str | None,
        Option("--format", metavar="NAME", help="With --all: onnx, pt2 or safetensors.", show_default="onnx"),
    ] = None,
    run: RunNameOption = None,
    data: Annotated[
        Path | None,
        Option(
            metavar="PATH",
            help="The client's own training examples, for a method that adapts on them: a folder with x.npy and y.npy, "
            "or a table.",
        ),
    ] = None,
    label: Annotated[
        str | None, Option(metavar="COLUMN", help="If these are a table: the column that holds the label.")
    ] = None,
) -> None:
    """Write personal models to files that run without this package.

    ONNX and torch.export take batches of any size. A card beside each model says
    what it was trained on, what goes in, and its accuracy.

    \b
    [bold]Examples[/]
      pfedhn export runs/clinics --client Berlin --to berlin.onnx
      pfedhn export runs/demo --run pfedhn-plus-digits-50-seed0 --client 7 --to seven.pt2
      pfedhn export runs/clinics --all --to models --format safetensors
      pfedhn export pfedhn-lyon --to lyon.onnx  # a party exports its own
    """
    from pfedhn.cli.federation import need_the_extra
    from pfedhn.data.columns import prepared
    from pfedhn.data.files import read_client
    from pfedhn.runs.load import load

    if (directory / PARTY).exists():
        need_the_extra()
        from pfedhn.deploy.join import export_model

        name = export_model(directory.absolute(), to, data)
        say(f"The model of {name} is in {to}, and what it is in {to.with_suffix('.md')}.")
        return
    if every == (client is not None):
        raise UserError("say whose model is wanted: --client NAME for one, --all for every client.")
    if every and data is not None:
        raise UserError("--data are the examples of one client, so --all cannot be given with it.")
    if kind is not None and not every:
        raise UserError("--format is for --all; for one client, the ending of --to says what is written.")
    trained = load(directory, run=run, device="cpu")
    if client is None:
        files = trained.export_all(to, f".{kind or 'onnx'}")
        say(f"The models of {len(files)} clients are in {to}; its README.md lists them.")
        return
    examples = None
    if data is not None:
        described = trained.description
        x, y = read_client(data, label, described.class_names, described.shape, described.reading)
        if described.classes is None:
            y = y.astype("float32")
        if described.reading is not None and (table := described.reading.table) is not None:
            x = prepared(x, table, table.reading_of(described.name_of(described.number_of(client))))
            y = table.scaled(y)
        examples = described.prepared(x), y
    trained.export(client, to, data=examples)
    say(f"The model of client {client} is in {to}, and what it is in {to.with_suffix('.md')}.")
