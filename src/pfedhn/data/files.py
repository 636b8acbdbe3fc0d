"""A person's own data: a folder of arrays per client, or one table with a column that names the client."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from pfedhn.data.catalogue import Array
from pfedhn.errors import UserError, closest, first_line


def from_folders(path: str | Path) -> tuple[list[str], list[tuple[Array, Array]]]:
    """The user's own data: a folder per client, each with x.npy and y.npy.

    Returns the clients' names (the folders', sorted) and their (x, y), for `Federation.from_clients`. Text labels
    become class numbers 0, 1, ... in the sorted order of all clients' labels.

    >>> import numpy, pathlib, tempfile
    >>> from pfedhn.datasets import from_folders
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> for client in ("paris", "lyon"):
    ...     (root / client).mkdir()
    ...     numpy.save(root / client / "x.npy", numpy.zeros((4, 3)))
    ...     numpy.save(root / client / "y.npy", numpy.array(["cat", "dog", "cat", "dog"]))
    >>> names, clients = from_folders(root)
    >>> names, clients[0][1]
    (['lyon', 'paris'], array([0, 1, 0, 1]))
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give one that holds a folder per client.")
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not folders:
        raise UserError(f"{root} holds no folders; make one per client, with x.npy and y.npy in it.")
    clients = []
    for folder in folders:
        x, y = (_load_array(folder / file) for file in ("x.npy", "y.npy"))
        if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
            raise UserError(f"{folder} has x of shape {x.shape} and y of shape {y.shape}; give one label per row.")
        clients.append((x, y))
    labels, _ = _class_numbers([y for _, y in clients])
    return [folder.name for folder in folders], [(x, y) for (x, _), y in zip(clients, labels, strict=True)]


class Table(NamedTuple):
    """A table of numbers with a client and a label in each row."""

    x: NDArray[numpy.float32]  # [rows, features]
    y: Array  # class numbers int64, or float32 where the labels have fractions
    groups: NDArray[numpy.int64]  # the client of each row
    client_names: list[str]
    feature_names: list[str]
    label_names: list[str]  # of classes 0, 1, ... where the labels were text, else empty


def from_table(path: str | Path, client_column: str, label_column: str) -> Table:
    """The user's own data: a CSV, TSV or parquet file with a row per example.

    One column names the client, one the label; all others are numeric features. Text labels become class numbers
    0, 1, ... in sorted order; so do clients (whole numbers in their own order).

    >>> import pathlib, tempfile
    >>> from pfedhn.datasets import from_table
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "visits.csv"
    >>> _ = path.write_text("clinic,age,dose,outcome\\nlyon,61,0.5,well\\nparis,47,1.5,ill\\nlyon,55,1.0,ill\\n")
    >>> table = from_table(path, client_column="clinic", label_column="outcome")
    >>> table.client_names, table.groups, table.y
    (['lyon', 'paris'], array([0, 1, 0]), array([1, 0, 0]))

    To federate it: `Federation.from_arrays(table.x, table.y, partition=by_group(), groups=table.groups)`.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{file} is not a file; give a .csv, .tsv or .parquet file.")
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet}
    if file.suffix.lower() not in readers:
        raise UserError(f"{file.name} is neither .csv, .tsv nor .parquet; save the table as one of these.")
    columns = readers[file.suffix.lower()](file)
    for wanted in (client_column, label_column):
        if wanted not in columns:
            raise UserError(f"{file.name} has no column {wanted!r}; {closest(wanted, columns)}")
    features = [name for name in columns if name not in (client_column, label_column)]
    if not features:
        raise UserError(f"{file.name} has no feature columns; give it at least one besides client and label.")
    if not len(columns[label_column]):
        raise UserError(f"{file.name} has no rows; give it at least one per client.")
    for name in (client_column, label_column):
        empty = [row for row, cell in enumerate(columns[name].tolist(), start=1) if cell == ""]
        if empty:
            raise UserError(f"row {empty[0]} of column {name!r} of {file.name} is empty; fill or drop that row.")
    x = numpy.stack([_numbers(file, name, columns[name]) for name in features], axis=1)
    (y,), label_names = _class_numbers([_as_numbers(columns[label_column])])
    clients, groups = numpy.unique(_as_identifiers(columns[client_column]), return_inverse=True)
    return Table(x, y, groups.astype(numpy.int64), [str(name) for name in clients.tolist()], features, label_names)


def _load_array(path: Path) -> Array:
    try:
        array: Array = numpy.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; every client's folder needs x.npy and y.npy.") from error
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is not an array of numbers or text; write it with numpy.save.") from error
    return array


def _class_numbers(labels: Sequence[Array]) -> tuple[list[Array], list[str]]:
    """Labels as numbers: text becomes its place in the sorted order of all, fractions stay fractions (float32)."""
    kinds = {array.dtype.kind for array in labels}
    if kinds & set("USO"):
        texts = [array.astype(str) for array in labels]
        names = numpy.unique(numpy.concatenate(texts))
        return [numpy.searchsorted(names, text).astype(numpy.int64) for text in texts], [str(name) for name in names]
    return [array.astype(numpy.float32 if kinds & set("f") else numpy.int64) for array in labels], []


def _read_csv(file: Path) -> dict[str, Array]:
    with file.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.reader(stream, delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
        header = [name.strip() for name in next(reader, [])]
        rows = [row for row in reader if row]
    if len(set(header)) != len(header) or not header:
        raise UserError(f"the first line of {file.name} must name every column once.")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise UserError(
                f"row {number} of {file.name} has {len(row)} cells and the header {len(header)}; repair it."
            )
    return {name: numpy.array([row[place] for row in rows], dtype=str) for place, name in enumerate(header)}


def _read_parquet(file: Path) -> dict[str, Array]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("reading parquet needs pyarrow: pip install 'pfedhn[data]'") from error
    try:
        table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{file} is not a whole parquet file ({first_line(error)}); write it again.") from error
    for name in table.column_names:
        if table[name].null_count:
            raise UserError(f"column {name!r} of {file.name} has empty cells; fill or drop them.")
    return {name: table[name].to_numpy() for name in table.column_names}


def _numbers(file: Path, name: str, column: Array) -> NDArray[numpy.float32]:
    try:
        numbers: NDArray[numpy.float32] = column.astype(numpy.float32)
    except (ValueError, TypeError):
        row = next(number for number, cell in enumerate(column, start=1) if not _is_number(cell))
        raise UserError(
            f"row {row} of column {name!r} of {file.name} is {str(column[row - 1])!r} and not a number; "
            "features must be numbers: encode or drop that column."
        ) from None
    if len(bad := numpy.flatnonzero(~numpy.isfinite(numbers))):
        raise UserError(
            f"row {bad[0] + 1} of column {name!r} of {file.name} is {str(column[bad[0]])!r} and not a finite number; "
            "fill the cell or drop the row."
        )
    return numbers


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (ValueError, TypeError):
        return False
    return True


def _as_numbers(column: Array) -> Array:
    """Labels that are numbers in every row, as text in a CSV file, become numbers; whole ones become int64."""
    if column.dtype.kind in "USO":
        try:
            column = column.astype(numpy.float64)
        except (ValueError, TypeError):
            return column.astype(str)
    if column.dtype.kind == "f" and numpy.all(column == numpy.floor(column)) and numpy.all(abs(column) < 2**53):
        return column.astype(numpy.int64)
    return column


def _as_identifiers(column: Array) -> Array:
    """Clients 2 and 10 sort as numbers; but 007 and 7 are two clients, so only plain whole numbers become numbers."""
    if column.dtype.kind in "iu":
        return column
    text = column.astype(str)
    plain = all(re.fullmatch(r"0|[1-9]\d{0,17}", cell) for cell in text.tolist())
    return text.astype(numpy.int64) if plain else text
