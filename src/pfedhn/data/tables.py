"""Your own table: a CSV, TSV or parquet file with a column that names the client."""

from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from pfedhn.data.arrays import Array
from pfedhn.data.cells import Columns, check_columns, is_empty, read_columns
from pfedhn.data.columns import PLAIN, Encoding, encoded
from pfedhn.data.labels import Task, as_identifiers, as_labels, as_numbers, refuse_marks
from pfedhn.data.reading import Column
from pfedhn.errors import UserError, short
from pfedhn.system.files import given_path, reading


class Table(NamedTuple):
    """A table of numbers with a client and a label for each example."""

    x: NDArray[numpy.float32]  # [examples, features]
    y: Array  # class numbers int64, or float32 where the labels have fractions
    groups: NDArray[numpy.int64]  # the client of each example
    client_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...] | None  # of classes 0, 1, ... where the labels were text
    columns: tuple[Column, ...] = ()  # what the features were made of

    @property
    def clients(self) -> dict[str, tuple[Array, Array]]:
        """The examples (x, y) of each client by its name, as `Federation.from_clients` takes them."""
        owned = [self.groups == client for client in range(len(self.client_names))]
        return {name: (self.x[own], self.y[own]) for name, own in zip(self.client_names, owned, strict=True)}


def from_table(
    path: str | Path | Columns,
    client_column: str,
    label_column: str,
    task: Task = "auto",
    encoding: Encoding = PLAIN,
    ignore_columns: Sequence[str] = (),
) -> Table:
    """Your own data: a CSV, TSV or parquet file with an example in each line.

    One column names the client, one the label; all others are numeric features. Text labels become class numbers
    0, 1, ... in sorted order; so do clients (whole numbers in their own order). Features are not scaled.

    Args:
        path: The file, or columns that were read. Cells of a .csv file are separated by commas; or by semicolons, where
            its first line has these and no commas, and then numbers may have decimal commas.
        client_column: The column that names the client.
        label_column: The column that holds the label.
        task: "classification" where labels are class numbers or names, "regression" where they are numbers to predict.
            With "auto" it is regression if some label has a fraction.
        encoding: How columns become numbers; texts and empty cells are refused by default. `read_federation` fills
            empty cells in, and here they are NaN.
        ignore_columns: Columns that are no features.

    Examples:
        >>> import pathlib, tempfile
        >>> from pfedhn.datasets import from_table
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "visits.csv"
        >>> _ = path.write_text("clinic,age,dose,outcome\\nlyon,61,0.5,well\\nparis,47,1.5,ill\\nlyon,55,1.0,ill\\n")
        >>> table = from_table(path, client_column="clinic", label_column="outcome")
        >>> table.client_names, table.groups, table.y
        (('lyon', 'paris'), array([0, 1, 0]), array([1, 0, 0]))

    To federate it: `Federation.from_clients(table.clients, class_names=table.class_names)`.
    """
    if not isinstance(path, Columns):
        file = given_path(path)
        with reading(file):
            if not file.is_file():
                raise UserError(f"{file} is not a file; give a .csv, .tsv or .parquet file.")
    if not isinstance(ignore_columns, Sequence) or isinstance(ignore_columns, str):
        raise UserError(f"ignore_columns is {short(ignore_columns)}; give a list of columns.")
    columns = columns_of(path, lambda name: name in ignore_columns)
    return from_columns(columns, client_column, label_column, task, encoding, ignore_columns)


def columns_of(table: str | Path | Columns, is_ignored: Callable[[str], bool]) -> Columns:
    """The columns of a table that is a file, or those that were read already; arguments as `read_columns`."""
    return table if isinstance(table, Columns) else read_columns(given_path(table), is_ignored)


def from_columns(
    columns: Columns,
    client_column: str,
    label_column: str,
    task: Task = "auto",
    encoding: Encoding = PLAIN,
    ignore_columns: Sequence[str] = (),
) -> Table:
    """A table from its columns; arguments as `from_table`."""
    file, needed = columns.file, (client_column, label_column)  # nothing fills in their empty cells
    check_columns(file.name, columns, (*needed, *ignore_columns))
    if client_column == label_column:
        raise UserError(f"{label_column!r} cannot be both the client and the label; name two columns.")
    for name in needed:
        if name in ignore_columns:
            raise UserError(f"{name!r} cannot be ignored, since it is the client or the label; take it off that list.")
    features = [name for name in columns if name not in (*needed, *ignore_columns)]
    if not features:
        raise UserError(f"{file.name} has no feature columns; give it at least one besides client and label.")
    if not len(columns[label_column]):
        raise UserError(f"{file.name} has no examples; give it at least one per client.")
    for name in needed:
        cells = columns[name].tolist()
        empty = next((place for place, cell in enumerate(cells) if is_empty(cell)), None)
        if empty is not None:
            raise UserError(f"{columns.where(empty)} has no {name!r}; fill the cell or drop the example.")
        wrong = [cell for cell in cells if not isinstance(cell, str | int | float | Decimal)]
        if wrong:
            raise UserError(f"column {name!r} of {file.name} holds {short(wrong[0])}; give numbers or texts.")
    refuse_marks(columns, label_column)
    x, described = encoded(columns, features, encoding)
    (y,), class_names = as_labels([as_numbers(columns[label_column])], task, f"column {label_column!r} of {file.name}")
    clients, groups = numpy.unique(as_identifiers(columns[client_column]), return_inverse=True)
    client_names = tuple(map(str, clients.tolist()))
    names = tuple(feature for column in described for feature in column.features)
    return Table(x, y, groups.astype(numpy.int64), client_names, names, class_names, described)


def count_clients(path: str | Path | Columns, client_column: str) -> int:
    """The number of clients in a table, whatever its other columns hold; 0 without such a column."""
    columns = columns_of(path, lambda name: name != client_column)
    cells = as_identifiers(columns[client_column]) if client_column in columns else numpy.empty(0)
    return len(numpy.unique(cells))
