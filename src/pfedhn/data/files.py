"""Your own files as a federation: arrays, images or a table; and more examples, read in the same way."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from pfedhn.data.arrays import Array, check_choice
from pfedhn.data.cells import Columns, check_columns, read_columns
from pfedhn.data.columns import (
    PLAIN,
    USUAL,
    Encode,
    Encoding,
    Fitted,
    Missing,
    Scale,
    Select,
    encoded_like,
    to_numbers,
)
from pfedhn.data.dealing import Split
from pfedhn.data.federation import Federation
from pfedhn.data.folders import client_folders, from_folders, load_array
from pfedhn.data.images import (
    Channels,
    Corrupt,
    image_files,
    image_size,
    images_below,
    read_images,
    read_like,
    refuse_other_layout,
)
from pfedhn.data.labels import Task, as_numbers, labelled
from pfedhn.data.reading import ImageReading, Reading, TableReading
from pfedhn.data.tables import MIN_EXAMPLES, from_table, table_federation, used_columns
from pfedhn.errors import UserError, closest
from pfedhn.system.files import given_path, reading


def read_federation(
    path: str | Path | Columns,
    client_column: str | None = None,
    label_column: str | None = None,
    *,
    ignore_columns: Sequence[str] = (),
    task: Task = "auto",
    split: Split = (0.7, 0.15, 0.15),
    stratify: bool = False,
    seed: int = 0,
    resize: int | tuple[int, int] | None = None,
    channels: Channels = "rgb",
    corrupt: Corrupt = "refuse",
    encode: Encode = "one-hot",
    missing: Missing = "flag",
    fitted: Fitted = "all",
    scale: Scale = "all",
    select: Select = "auto",
    min_examples: int = MIN_EXAMPLES,
) -> Federation:
    """A federation of your own files, in which clients and classes keep their names.

    Args:
        path: A folder that `from_folders` reads, a folder with a folder of images per client and class, or a file that
            `from_table` reads, or the columns of a table.
        client_column: The column of a table that names the client.
        label_column: The column of a table that holds the label.
        ignore_columns: Columns of a table that are no features, such as dates and what is known only later.
        task: What the labels are, as in `from_table`. For a table, "auto" also takes many different whole numbers for a
            quantity, and a note says so.
        split: The fractions of a client's examples for training, validation and test, or a `Fold`.
        stratify: Draw each client's split within each of its classes instead of over all its examples.
        seed: The seed of the split.
        resize: Height and width of all images, or one number for both; needed if their sizes differ.
        channels: For images: "rgb" or "gray".
        corrupt: For images: whether a damaged file is refused ("refuse") or left out with a warning ("skip").
        encode: For a table: whether text columns are refused or become a column for each value ("one-hot").
        missing: For a table: whether empty cells are refused, filled with their column's "median" or with "zero", or
            filled with the median and marked by a further feature, "flag".
        fitted: For a table: whether a median is that of the client's own training examples ("client") or of all
            clients' ("all").
        scale: For a table: whether features, and numbers to predict, are scaled by their mean and standard deviation
            over all clients' training examples ("all") or stay as they are ("none"). With "client", features are scaled
            over each client's own. `federation.reading.table` undoes it in predictions: `unscaled`.
        select: For a table: "auto" leaves out columns that are the same or different in every row, such as numbers of
            patients, and refuses dates and other columns that need mending; with "all", every column is a feature.
        min_examples: For a table: clients with fewer examples do not train.

    Examples:
        >>> import pathlib, tempfile
        >>> from pfedhn.datasets import read_federation
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "visits.csv"
        >>> visits = [f"{'lyon' if i % 3 else 'paris'},{i % 7},{'ill' if i % 2 else 'well'}" for i in range(30)]
        >>> _ = path.write_text("\\n".join(["clinic,dose,outcome", *visits]))
        >>> federation = read_federation(path, client_column="clinic", label_column="outcome")
        >>> federation.names, federation.class_names
        (('lyon', 'paris'), ('ill', 'well'))
    """
    is_read = isinstance(path, Columns)
    place = path.file if isinstance(path, Columns) else given_path(path)
    with reading(place):
        is_folder = not is_read and place.is_dir()
        if not is_read and not place.exists():
            raise UserError(f"there is no file or folder {place}; give a folder per client, or a table.")
    size, encoding = image_size(resize), Encoding(encode, missing, fitted, scale, select)
    choices = {"channels": Channels, "corrupt": Corrupt, "encode": Encode, "missing": Missing, "fitted": Fitted}
    choices |= {"scale": Scale, "select": Select}
    given = (channels, corrupt, encode, missing, fitted, scale, select)
    for (name, values), value in zip(choices.items(), given, strict=True):
        check_choice(name, value, values)
    folders = client_folders(place) if is_folder else []
    is_arrays = any((folder / "x.npy").exists() for folder in folders)
    is_images = not is_arrays and any(map(image_files, folders))
    if is_folder and not is_arrays and not is_images:
        refuse_other_layout(place)
    if not is_images and (size, channels, corrupt) != (None, "rgb", "refuse"):
        raise UserError(f"resize, channels and corrupt are for images, and {place} has none; leave them out.")
    dealt: dict[str, Any] = {"split": split, "stratify": stratify, "seed": seed}
    if not is_folder:
        if client_column is None or label_column is None:
            raise UserError(f"{place} is read as a table; say which column names the client and which holds the label.")
        dealt |= {"task": task, "ignore_columns": ignore_columns, "encoding": encoding, "min_examples": min_examples}
        return table_federation(used_columns(path, ignore_columns), client_column, label_column, **dealt)
    if encoding not in (USUAL, PLAIN) or min_examples not in (MIN_EXAMPLES, 1):
        options = "encode, missing, fitted, scale, select and min_examples"
        raise UserError(f"{options} are for tables, and {place} is a folder; leave them out.")
    data = read_images(folders, size, channels, corrupt) if is_images else from_folders(place, task)
    how = Reading(images=ImageReading(channels, corrupt, size)) if is_images else None
    federation = Federation.from_clients(data.clients, class_names=data.class_names, **dealt)
    return replace(federation, reading=how)


def read_client(
    path: str | Path,
    label_column: str | None,
    class_names: Sequence[str] | None,
    shape: tuple[int, ...] = (),
    how: Reading | None = None,
) -> tuple[Array, Array]:
    """The examples (x, y) of one client: arrays, images in a folder per class, or a table with a label column.

    Args:
        path: A folder with x.npy and y.npy, a folder with a folder of images per class, or a table.
        label_column: The column of a table that holds the label; that of the run's table where None.
        class_names: The names of the classes, for text labels.
        shape: Of one example of the run that the client joins; images are brought to it.
        how: How that run read its own: a table's columns are found by name, and empty cells that it fills in are
            NaN. Without it, all columns but the label are features, in their order.
    """
    place = given_path(path)
    x: Array
    y: Array
    if place.is_dir() and not (place / "x.npy").exists() and (listed := image_files(place)):
        kept, x = read_like([file for _, file in listed], shape, None if how is None else how.images)
        y = numpy.array([label for label, file in listed if file in kept])
    elif place.is_dir():
        x, y = load_array(place / "x.npy", "biuf"), load_array(place / "y.npy", "biufUS")
    elif place.is_file():
        table = None if how is None else how.table
        label = label_column if label_column is not None or table is None else table.label
        if label is None:
            raise UserError(f"say which column of {place.name} is the label: --label NAME.")
        x, labels = _examples_of(place, label, (), shape, table, only_labelled=True)
        assert labels is not None
        y = labels
    else:
        raise UserError(f"there is no file or folder {place}; give a folder with x.npy and y.npy, or a table.")
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y) or not len(x):
        raise UserError(f"{place} has x of shape {x.shape} and y of shape {y.shape}; give one label per example.")
    if y.dtype.kind in "USO":
        names = list(class_names or ())
        unknown = [label for label in dict.fromkeys(map(str, y.tolist())) if label not in names]
        if unknown:
            hint = closest(unknown[0], names) if names else "its classes are numbers, from 0."
            raise UserError(f"{place} has the label {unknown[0]!r}, which the run does not know; {hint}")
        y = numpy.array([names.index(str(label)) for label in y.tolist()], dtype=numpy.int64)
    return x, y


def _examples_of(
    file: Path,
    label: str | None,
    leave_out: Sequence[str],
    shape: tuple[int, ...],
    table: TableReading | None,
    only_labelled: bool = False,
) -> tuple[Array, Array | None]:
    """The examples of a table for a run whose examples have this shape, and their labels if a column has them."""
    if len(shape) > 1:
        raise UserError(f"{file.name} is a table, and this run's examples have shape {shape}; give arrays or images.")
    wanted = None if table is None else {label, *(column.name for column in table.columns)}
    columns = read_columns(file, lambda name: wanted is not None and name not in wanted)
    check_columns(file.name, columns, [] if label is None else [label])
    if label is not None and only_labelled:
        columns = labelled(columns, label)
    labels = None if label is None else as_numbers(columns[label])
    features = [name for name in columns if name != label and name not in leave_out]
    if not features or not len(columns[features[0]]):
        raise UserError(f"{file.name} has no examples with features; give at least one.")
    if table is not None:
        return encoded_like(columns, table), labels
    return numpy.stack([to_numbers(columns, name) for name in features], axis=1), labels


class ExamplesToPredict(NamedTuple):
    """Examples to predict."""

    x: Array
    answers: Array | None = None  # the right ones, if they are known
    files: tuple[str, ...] | None = None  # of images: where each was


def read_inputs(
    path: str | Path,
    label_column: str | None = None,
    leave_out: Sequence[str] = (),
    shape: tuple[int, ...] = (),
    how: Reading | None = None,
) -> ExamplesToPredict:
    """Examples to predict, and the right answers if a column has them.

    Args:
        path: A table, x.npy, a folder that has it, an image, or a folder of images.
        label_column: The column of a table that holds the right answers.
        leave_out: Columns that are no features; the table may lack them.
        shape: Of one example of the run; images are brought to it.
        how: How the run read its own, as for `read_client`.
    """
    place = given_path(path)
    with reading(place):
        is_folder, is_array = place.is_dir(), place.suffix.lower() == ".npy"
        if not place.exists():
            raise UserError(f"there is no file {place}; give a table, x.npy, images, or a folder that has them.")
    is_array = is_array or (place / "x.npy").exists()
    images = [] if is_array else images_below(place)
    if (is_folder or is_array or images) and label_column is not None:
        raise UserError(f"{place} is not a table and has no column {label_column!r}; leave --label out.")
    if images:
        kept, x = read_like(images, shape, None if how is None else how.images)
        return ExamplesToPredict(
            x, files=tuple(str(file.relative_to(place) if is_folder else file.name) for file in kept)
        )
    if is_folder or is_array:
        x = load_array(place / "x.npy" if is_folder else place, "biuf")
        if x.ndim < 1 or not len(x):
            raise UserError(f"{place} has x of shape {x.shape}; give at least one example.")
        return ExamplesToPredict(x)
    return ExamplesToPredict(*_examples_of(place, label_column, leave_out, shape, None if how is None else how.table))


def reading_again(path: str, client_column: str, label_column: str, encoding: Encoding) -> Reading:
    """How a run read its table, found from that table: runs of earlier versions that encoded texts do not say it."""
    file = given_path(path)
    if not file.is_file():
        raise UserError(f"this run encoded texts of {file}, which is not there any more; bring it back, or give x.npy.")
    columns = from_table(file, client_column, label_column, encoding=encoding).columns
    return Reading(TableReading(client_column, label_column, columns))
