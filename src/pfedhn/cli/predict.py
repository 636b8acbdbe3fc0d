"""`pfedhn predict`: the predictions of a client's model."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pfedhn.cli.options import RunArgument, RunNameOption
from pfedhn.errors import UserError, some
from pfedhn.system.screen import say

if TYPE_CHECKING:
    import pandas

    from pfedhn.data.reading import Reading


def predict(
    directory: RunArgument,
    client: Annotated[str, Option(metavar="NAME", help="Whose model, by name or number.")],
    data: Annotated[Path, Option(metavar="PATH", help="A table (.csv, .tsv, .parquet, .xlsx), x.npy, or images.")],
    label: Annotated[
        str | None,
        Option(metavar="COLUMN", help="For a table: a column with the right answers, to report the accuracy."),
    ] = None,
    run: RunNameOption = None,
    out: Annotated[
        Path | None, Option(metavar="FILE.csv", help="Where the predictions go.", show_default="stdout")
    ] = None,
) -> None:
    """Predict with a client's model, a line for each example.

    A line has the class and its probability, or the predicted numbers. A table's
    columns are found by their names and read as the run read its own; others in it
    do not matter. Images are brought to the run's size.

    \b
    [bold]Examples[/]
      pfedhn predict runs/clinics --client Berlin --data new.csv
      pfedhn predict runs/clinics --client Berlin --data visits.csv --label outcome --out predicted.csv
      pfedhn predict runs/photos --client Berlin --data new-photos
      pfedhn predict runs/demo --run pfedhn-plus-digits-50-seed0 --client 7 --data my-digits
    """
    import pandas
    import torch

    from pfedhn.runs.load import load
    from pfedhn.system.files import given_path, write_atomically

    if out is not None and given_path(out, is_resolved=True) == given_path(data, is_resolved=True):
        raise UserError(f"--out {out} would replace the examples; give another name.")
    trained = load(directory, run=run, device="cpu")
    described = trained.description
    how = described.reading or _earlier_reading(trained.origin.cell, data)
    x, answers, files = trained.read_examples(data, client, label, how)
    model = trained.personal_model(client)
    with torch.no_grad():
        outputs: Any = model(x)
    if not isinstance(outputs, torch.Tensor):
        raise UserError("the network gives no single tensor; use personal_model in Python.")
    names = described.class_names
    if described.classes is None:
        values = outputs.reshape(len(outputs), -1)
        values = values if how is None or how.table is None else how.table.unscaled(values)
        columns = ["prediction"] if values.shape[1] == 1 else [f"prediction_{i}" for i in range(values.shape[1])]
        digits = [[float(f"{value:.7g}") for value in row] for row in values.tolist()]  # of float32
        lines = pandas.DataFrame(digits, columns=columns)
    else:
        best = outputs.softmax(-1).max(-1)
        said = [names[place] if names else place for place in best.indices.tolist()]
        lines = pandas.DataFrame({"prediction": said, "probability": [f"{p:.4f}" for p in best.values.tolist()]})
    said = lines.iloc[:, 0].tolist()
    if files is not None:
        lines.insert(0, "file", files)
        lines = _with_unread(lines, data)
    text = lines.to_csv(index=False)
    if out is None:
        sys.stdout.write(text)
    else:
        write_atomically(out, text.encode())
        say(f"{len(lines)} predictions are in {out}.")
    if answers is not None:
        say(_compared(said, answers.tolist(), described.classes is not None), is_error=True)


def _with_unread(lines: "pandas.DataFrame", data: Path) -> "pandas.DataFrame":
    """The predictions of images, with a line without a prediction for each one that could not be read."""
    from pfedhn.data.images import images_below
    from pfedhn.system.files import given_path

    place = given_path(data)
    listed = [str(file.relative_to(place)) if place.is_dir() else file.name for file in images_below(place)]
    unread = [name for name in listed if name not in set(lines["file"])]
    if not unread:
        return lines
    say(f"No prediction for {len(unread)} of {len(listed)} images, which are damaged: {some(unread)}.", is_error=True)
    return lines.astype(object).set_index("file").reindex(listed).reset_index()  # of whole numbers, NaN makes fractions


def _earlier_reading(cell: Mapping[str, Any], data: Path) -> "Reading | None":
    """How a run of an earlier version, which does not say it, encoded texts: its table must still be there."""
    from pfedhn.data.cells import is_table
    from pfedhn.data.columns import Encoding
    from pfedhn.data.files import reading_again

    options, columns = cell.get("read") or {}, cell.get("columns") or {}
    if options.get("encode") != "one-hot" or not is_table(data):
        return None
    given = {name: options[name] for name in ("encode", "missing", "fitted") if name in options}
    return reading_again(cell["dataset"], columns["client"], columns["label"], Encoding(**given))


def _compared(said: list[Any], answers: list[Any], is_class: bool) -> str:
    pairs = [(one, other) for one, other in zip(said, answers, strict=True) if other is not None and str(other).strip()]
    left_out = f" ({len(said) - len(pairs)} have no label.)" if len(pairs) < len(said) else ""
    if not pairs:
        return "No example has a label."
    if is_class:
        right = sum(str(one) == str(other) for one, other in pairs)
        return f"{100 * right / len(pairs):.1f} % are right: {right} of {len(pairs)}.{left_out}"
    try:
        error = sum((float(one) - float(other)) ** 2 for one, other in pairs) / len(pairs)
    except ValueError:
        raise UserError("the label column holds texts, and this run predicts numbers; give another --label.") from None
    return f"Mean squared error {error:.4f} over {len(pairs)} examples.{left_out}"
