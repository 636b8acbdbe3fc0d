"""`pfedhn add-client`: a model from a trained run for a new client."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pfedhn.cli.options import DeviceOption, RunArgument, RunNameOption
from pfedhn.errors import UserError
from pfedhn.system.screen import say

if TYPE_CHECKING:
    from pfedhn.runs.joining import NewClient

WIDE_INTERVAL = 20  # points of accuracy, from which on a score says little
FEW = 10  # test examples of numbers, which say little


def add_client(
    directory: RunArgument,
    data: Annotated[
        Path,
        Option(metavar="PATH", help="A folder with x.npy and y.npy, or with a folder of images per class, or a table."),
    ],
    label: Annotated[
        str | None, Option(metavar="COLUMN", help="For a table: the label column, if not the run's.")
    ] = None,
    run: RunNameOption = None,
    rounds: Annotated[
        int, Option(metavar="N", help="Rounds that the client takes part in. With 0 it learns nothing.")
    ] = 100,
    architecture: Annotated[
        str | None, Option(metavar="NAME", help="Which of a run's several target networks.")
    ] = None,
    name: Annotated[
        str | None, Option(help="The client's name; its random draws depend on it.", show_default="none")
    ] = None,
    seed: Annotated[int, Option(metavar="N", help="Seed of the split and the draws.")] = 0,
    assignments: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="FIELD=VALUE",
            help="A setting of the run's method while the client joins (embedding_lr=1.0), instead of what its "
            "validation examples choose. Can be given several times.",
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Where the model is written: .safetensors, .onnx or .pt2.")
    ] = None,
    device: DeviceOption = None,
) -> None:
    """Give a new client a model from a trained run.

    The run's hypernetwork stays as it is; only the new client's embedding learns,
    and its personal layers if the method has them. 70 % of the examples train,
    15 % choose the round and the embedding's learning rate, and the other 15 %
    measure the accuracy. A table is read as the run read its own: columns by
    name, texts and empty cells alike.

    A client with too few examples for this gets the model of a client that
    has not learned yet: --rounds 0.

    \b
    [bold]Examples[/]
      pfedhn add-client runs/demo/pfedhn-plus-digits-50-seed0 --data my-digits
      pfedhn add-client runs/clinics --run pfedhn-clinics-5-seed0 --data new.csv --label outcome --out new.safetensors
    """
    import time

    from pfedhn.data.files import read_client
    from pfedhn.report.entries import counted
    from pfedhn.runs.export import check_ending
    from pfedhn.runs.load import load
    from pfedhn.settings import parse_assignments

    if out is not None:
        check_ending(out)
    trained = load(directory, run=run, device=device or "auto")
    clients = trained.plan.clients
    given, y = read_client(data, label, clients.class_names, clients.shape, clients.reading)
    if trained.description.classes is None:
        y = y.astype("float32")  # for a regression, whole numbers are no classes
    x = trained.description.prepared(given)
    began = time.monotonic()
    settings = parse_assignments(assignments) if assignments else None
    options: dict[str, Any] = {"architecture": architecture, "name": name, "settings": settings, "seed": seed}
    before = trained.add_client(x, y, rounds=0, **options)
    count = int(before.splits["test"].count.sum())
    if count == 0 and rounds:
        raise UserError(
            f"{data} has {counted(len(x), 'example')}, too few to learn from some and judge by others; give "
            "more, or --rounds 0 for the model that a client gets before it learns."
        )
    joined = trained.add_client(x, y, rounds=rounds, **options) if rounds else before
    seconds = time.monotonic() - began
    if rounds == 0:
        say("Nothing was learned (--rounds 0): this is the model that a client gets before it learns.")
    if count:
        _say_scores(before, joined, len(x), rounds, seconds)
    if joined.tried:
        values = joined.settings.items()
        chosen = ", ".join(
            f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}" for name, value in values
        )
        say(f"It joined with {chosen}, the best on validation of {len(joined.tried)} settings that were tried.")
    if out is not None:
        joined.export(out)
        say(f"Its model is in {out}, and what it is in {out.with_suffix('.md')}.")


def _say_scores(before: "NewClient", joined: "NewClient", num_examples: int, rounds: int, seconds: float) -> None:
    """Say how good the model is on held-out examples, and how little these say if they are few."""
    from pfedhn.runs.measures import accuracy_interval

    test = joined.splits["test"]
    scores, count = [part.splits["test"] for part in (before, joined)], int(test.count.sum())
    is_accuracy = test.metric is not None
    texts = [f"{100 * part.sample_mean:.1f} %" if is_accuracy else f"{part.mean_loss:.4f}" for part in scores]
    what, interval, is_little = "loss", "", count < FEW
    if is_accuracy:
        low, high = (100 * bound for bound in accuracy_interval(test.sample_mean, count))
        what, interval = "accuracy", f" (95 % interval: {low:.1f} to {high:.1f} %)"
        is_little = high - low > WIDE_INTERVAL
    elif joined.card["test"]["error"] is not None:
        what = f"error (root mean square, in units of {joined.card['label']['name']})"
        texts = [f"{client.card['test']['error']:.4g}" for client in (before, joined)]
    told = f"Held-out {what}: {texts[1]}{interval} on {count} of {num_examples} examples"
    how = f" ({texts[0]} before joining). Round {joined.round} of {rounds} was chosen on validation; {seconds:.1f} s"
    say(f"{told}{how if rounds else ''}.")
    if is_little:
        amount = "1 test example says" if count == 1 else f"{count} test examples say"
        say(f"{amount} little; judge the model on more with `pfedhn predict --label`.")
