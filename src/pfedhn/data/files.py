"""A person's own data: a folder of arrays per client, or one table with a column that names the client."""

import csv
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias, get_args

import numpy
from numpy.typing import NDArray

from pfedhn.data.arrays import Array
from pfedhn.data.columns import (
    FILL_IT,
    PLAIN,
    Columns,
    Encode,
    Encoding,
    Fitted,
    Missing,
    encoded,
    encoded_like,
    filled,
    is_empty,
    is_few,
    is_mark,
    leave_it_out,
    to_numbers,
)
from pfedhn.data.federation import Federation
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
from pfedhn.data.reading import Column, ImageReading, Reading, TableReading
from pfedhn.errors import UserError, closest, first_line, short
from pfedhn.system.files import given_path, reading

MAX_HEADER = 1_000_000  # characters of the first line that are looked at
MAX_CELL = 1_000  # characters in a cell of a text file; numbers and names are shorter, and all of a column get room

TABLES = (".csv", ".tsv", ".parquet")

Task: TypeAlias = Literal["auto", "classification", "regression"]


class Folders(NamedTuple):
    """What every client's folder holds."""

    clients: dict[str, tuple[Array, Array]]  # (x, y) by the folder's name
    class_names: tuple[str, ...] | None  # of classes 0, 1, ... where the labels were text


class Table(NamedTuple):
    """A table of numbers in which every example has a client and a label."""

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


def read_federation(
    path: str | Path,
    client_column: str | None = None,
    label_column: str | None = None,
    *,
    ignore_columns: Sequence[str] = (),
    task: Task = "auto",
    split: tuple[float, float, float] = (0.7, 0.15, 0.15),
    stratify: bool = False,
    seed: int = 0,
    resize: int | tuple[int, int] | None = None,
    channels: Channels = "rgb",
    corrupt: Corrupt = "refuse",
    encode: Encode = "refuse",
    missing: Missing = "refuse",
    fitted: Fitted = "client",
) -> Federation:
    """A federation of your own files, in which clients and classes keep their names.

    Args:
        path: A folder that `from_folders` reads, a folder with a folder of images per client and class, or a file that
            `from_table` reads.
        client_column: The column of a table that names the client.
        label_column: The column of a table that holds the label.
        ignore_columns: Columns of a table that are no features, such as dates and numbers of people.
        task: What the labels are, as in `from_table`.
        split: The fractions of a client's examples for training, validation and test.
        stratify: Draw each client's split within each of its classes instead of over all its examples.
        seed: The seed of the split.
        resize: Height and width of all images, or one number for both; needed if their sizes differ.
        channels: For images: "rgb" or "gray".
        corrupt: For images: whether a damaged file is refused ("refuse") or left out with a warning ("skip").
        encode: For a table: whether text columns are refused or become a column for each value ("one-hot").
        missing: For a table: whether empty cells are refused or filled with their column's "median", or with "zero".
        fitted: For a table: whether a median is that of the client's own training examples ("client") or of all
            clients' ("all").

    Examples:
        >>> import pathlib, tempfile
        >>> from pfedhn.datasets import read_federation
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "visits.csv"
        >>> visits = [f"{'lyon' if i % 3 else 'paris'},{i},{'ill' if i % 2 else 'well'}" for i in range(30)]
        >>> _ = path.write_text("\\n".join(["clinic,dose,outcome", *visits]))
        >>> federation = read_federation(path, client_column="clinic", label_column="outcome")
        >>> federation.names, federation.class_names
        (('lyon', 'paris'), ('ill', 'well'))
    """
    data: Folders | Table
    place = given_path(path)
    with reading(place):
        is_folder = place.is_dir()
        if not place.exists():
            raise UserError(f"there is no file or folder {place}; give a folder per client, or a table.")
    encoding = Encoding(encode, missing, fitted)
    size = image_size(resize)
    options = {"resize": size, "channels": channels, "corrupt": corrupt}
    is_images = is_folder and _holds_images(place)
    if is_folder and not is_images and not any((folder / "x.npy").exists() for folder in _folders_of(place)):
        refuse_other_layout(place)
    _refuse_unused(place, is_images, is_folder, options, encoding)
    how = None
    if is_images:
        data = Folders(*read_images(_folders_of(place), size, channels, corrupt))
        how = Reading(images=ImageReading(channels, corrupt, size))
    elif is_folder:
        data = from_folders(path, task)
    elif client_column is None or label_column is None:
        raise UserError(f"{path} is read as a table; say which column names the client and which holds the label.")
    else:
        data = from_table(path, client_column, label_column, task, encoding, ignore_columns)
        table = TableReading(client_column, label_column, data.columns, missing, fitted, sha256=file_digest(place))
        if encoding.is_used:  # split first: what is filled in comes from training examples
            rows = numpy.arange(len(data.y))[:, None]
            named = data._replace(x=rows.astype(numpy.int64)).clients
            kept = {"split": split, "stratify": stratify, "seed": seed, "class_names": data.class_names}
            federation, table = filled(Federation.from_clients(named, **kept), data.x, table)  # type: ignore[arg-type]
            return replace(federation, reading=Reading(table))
        how = Reading(table)
    federation = Federation.from_clients(
        data.clients, split=split, stratify=stratify, seed=seed, class_names=data.class_names
    )
    return replace(federation, reading=how)


def file_digest(file: Path) -> str:
    """A name for what a file holds."""
    with reading(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folders_of(root: Path) -> list[Path]:
    with reading(root):
        return sorted(folder for folder in root.iterdir() if is_client_folder(folder))


def is_client_folder(place: Path) -> bool:
    return place.is_dir() and not place.name.startswith(".")


def _holds_images(root: Path) -> bool:
    """Whether clients' folders hold folders of images, and not arrays."""
    folders = _folders_of(root)
    return (
        bool(folders) and not any((folder / "x.npy").exists() for folder in folders) and any(map(image_files, folders))
    )


def _refuse_unused(
    place: Path, is_images: bool, is_folder: bool, options: Mapping[str, Any], encoding: Encoding
) -> None:
    """What says how images are read means nothing to a table, and the other way round."""
    for name, kind, choices in (("channels", options["channels"], Channels), ("corrupt", options["corrupt"], Corrupt)):
        if not isinstance(kind, str) or kind not in get_args(choices):
            raise UserError(f"{name} is {short(kind)}; it must be {' or '.join(get_args(choices))}.")
    for name, choices in (("encode", Encode), ("missing", Missing), ("fitted", Fitted)):
        if getattr(encoding, name) not in get_args(choices):
            raise UserError(f"{name} is {short(getattr(encoding, name))}; it must be {' or '.join(get_args(choices))}.")
    if not is_images and (
        options["resize"] is not None or options["corrupt"] != "refuse" or options["channels"] != "rgb"
    ):
        raise UserError(f"resize, channels and corrupt are for images, and {place} has none; leave them out.")
    if is_folder and encoding != PLAIN:
        raise UserError(f"encode, missing and fitted are for tables, and {place} is a folder.")


def from_folders(path: str | Path, task: Task = "auto") -> Folders:
    """Your own data: a folder per client, each with x.npy and y.npy.

    Text labels become class numbers 0, 1, ... in the sorted order of all clients' labels.

    Args:
        path: The folder that holds the clients' folders; their names, sorted, are the clients'.
        task: What the labels are, as in `from_table`; with "auto", floating-point labels are numbers to predict.

    Examples:
        >>> import numpy, pathlib, tempfile
        >>> from pfedhn.datasets import from_folders
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for client in ("paris", "lyon"):
        ...     (root / client).mkdir()
        ...     numpy.save(root / client / "x.npy", numpy.zeros((4, 3)))
        ...     numpy.save(root / client / "y.npy", numpy.array(["cat", "dog", "cat", "dog"]))
        >>> clients, class_names = from_folders(root)
        >>> list(clients), clients["lyon"][1], class_names
        (['lyon', 'paris'], array([0, 1, 0, 1]), ('cat', 'dog'))
    """
    root = given_path(path)
    with reading(root):
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give one that holds a folder per client.")
    folders = _folders_of(root)
    if not folders:
        raise UserError(
            f"{root} holds no folders; make one per client, with x.npy and y.npy or a folder of images per class."
        )
    clients = []
    for folder in folders:
        x, y = load_array(folder / "x.npy", "biuf"), load_array(folder / "y.npy", "biufUS")
        if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
            raise UserError(f"{folder} has x of shape {x.shape} and y of shape {y.shape}; give one label per example.")
        clients.append((x, y))
    _refuse_mixed_kinds([(folder, y) for folder, (_, y) in zip(folders, clients, strict=True) if len(y)], task)
    labels, class_names = _labels([y for _, y in clients], task, str(root))
    named = {folder.name: (x, y) for folder, (x, _), y in zip(folders, clients, labels, strict=True)}
    return Folders(named, class_names)


def from_table(
    path: str | Path,
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
        path: The file. Cells of a .csv file are separated by commas; or by semicolons, where its first line has these
            and no commas, and then numbers may have decimal commas.
        client_column: The column that names the client.
        label_column: The column that holds the label.
        task: "classification" where labels are class numbers or names, "regression" where they are numbers to predict.
            With "auto" it is regression if some label has a fraction.
        encoding: What is done about columns of texts and empty cells, which are refused by default; `read_federation`
            fills cells in, and here they are NaN.
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
    file = given_path(path)
    with reading(file):
        if not file.is_file():
            raise UserError(f"{file} is not a file; give a .csv, .tsv or .parquet file.")
    if not isinstance(ignore_columns, Sequence) or isinstance(ignore_columns, str):
        raise UserError(f"ignore_columns is {short(ignore_columns)}; give a list of columns.")
    needed = (client_column, label_column)  # whose empty cells are refused below: nothing fills them in
    columns = read_columns(
        file, lambda name: encoding.is_used or name in needed, lambda name: name in ignore_columns, FILL_IT
    )
    for wanted in (client_column, label_column, *ignore_columns):
        if not isinstance(wanted, str) or wanted not in columns:
            raise UserError(f"{file.name} has no column {short(wanted)}; {closest(wanted, columns)}")
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
    _refuse_marks(columns, label_column)
    x, described = encoded(columns, features, encoding)
    (y,), class_names = _labels([_as_numbers(columns[label_column])], task, f"column {label_column!r} of {file.name}")
    clients, groups = numpy.unique(_as_identifiers(columns[client_column]), return_inverse=True)
    client_names = tuple(map(str, clients.tolist()))
    names = tuple(feature for column in described for feature in column.features)
    return Table(x, y, groups.astype(numpy.int64), client_names, names, class_names, described)


def count_clients(path: str | Path, client_column: str) -> int:
    """How many clients a table has, whatever its other columns hold; 0 where it has no such column."""
    columns = read_columns(given_path(path), lambda name: True, lambda name: name != client_column)
    cells = _as_identifiers(columns[client_column]) if client_column in columns else numpy.empty(0)
    return len(numpy.unique(cells))


def _refuse_marks(columns: Columns, label: str) -> None:
    """NA and the like among labels that are numbers would make classes of all of them."""
    cells = [str(cell) for cell in columns[label].tolist()]
    marks = [place for place, cell in enumerate(cells) if is_mark(cell)]
    numbers = numpy.array([cell for cell in cells if not is_mark(cell)])
    if marks and len(numbers) and _as_numbers(numbers).dtype.kind in "if":
        raise UserError(
            f"{columns.where(marks[0])} has {cells[marks[0]]!r} for {label!r}; fill the cell or drop the example."
        )


def load_array(path: Path, kinds: str) -> Array:
    """An array of one of these kinds of numbers or text (as `numpy.dtype.kind` calls them)."""
    with reading(path):
        if not path.exists():
            raise UserError(f"{path} is missing; every client's folder needs x.npy and y.npy.")
        if not path.is_file():
            raise UserError(f"{path} is not a file; write it with numpy.save.")
    try:
        # Mapped first: a header that promises more than the file holds is refused before room is made for it.
        mapped = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); make it readable.") from error
    except Exception as error:  # whatever a damaged file makes of NumPy's reader
        raise UserError(f"{path} is not an array of numbers or text; write it with numpy.save.") from error
    if not isinstance(mapped, numpy.ndarray):
        mapped.close()
        raise UserError(f"{path} holds several arrays (.npz); write one with numpy.save.")
    if mapped.dtype.kind not in kinds:
        allowed = "numbers or texts" if "U" in kinds else "numbers"
        raise UserError(f"{path} holds {mapped.dtype} and not {allowed}; convert it before numpy.save.")
    return numpy.array(mapped)


def _refuse_mixed_kinds(labels: Sequence[tuple[Path, Array]], task: Task) -> None:
    """One folder with fractions or texts must not change what the labels of all the others are."""

    def kind(array: Array) -> str:
        if array.dtype.kind in "US":
            return "text"
        return "floating-point" if array.dtype.kind == "f" and task == "auto" else "whole"

    for folder, array in labels[1:]:
        if array.shape[1:] != labels[0][1].shape[1:]:
            raise UserError(
                f"{folder} has labels of shape {array.shape[1:]} and {labels[0][0]} of shape {labels[0][1].shape[1:]}; "
                "give all clients one kind."
            )
        if kind(array) != kind(labels[0][1]):
            raise UserError(
                f"{folder} has {kind(array)} labels and {labels[0][0]} has {kind(labels[0][1])} ones; give all clients "
                'one kind, or say task = "classification" or "regression" where all are numbers.'
            )


def _labels(labels: Sequence[Array], task: Task, where: str) -> tuple[list[Array], tuple[str, ...] | None]:
    """Labels as numbers: text becomes its place in the sorted order of all, numbers to predict become float32."""
    if not isinstance(task, str) or task not in get_args(Task):
        raise UserError(f"there is no task {short(task)}; {closest(task, get_args(Task))}")
    kinds = {array.dtype.kind for array in labels}
    if task == "regression":
        if kinds & set("USO"):
            raise UserError(f'the labels in {where} are text, and task = "regression" predicts numbers; give numbers.')
        return [array.astype(numpy.float32) for array in labels], None
    if task == "classification" and kinds & set("f"):
        labels = [_as_numbers(array) for array in labels]
        kinds = {array.dtype.kind for array in labels}
        if kinds & set("f"):
            raise UserError(
                f'the labels in {where} have fractions, and task = "classification" has classes; give their numbers or '
                'names, or use task = "regression".'
            )
    if kinds & set("USO"):
        try:
            texts = [array.astype(str) for array in labels]
        except UnicodeDecodeError as error:
            raise UserError(f"the labels in {where} are bytes that are no text; give texts or numbers.") from error
        names = numpy.unique(numpy.concatenate(texts))
        return [numpy.searchsorted(names, text).astype(numpy.int64) for text in texts], tuple(map(str, names.tolist()))
    return [array.astype(numpy.float32 if kinds & set("f") else numpy.int64) for array in labels], None


def read_columns(
    file: Path,
    takes_empty: Callable[[str], bool] = lambda name: False,
    is_ignored: Callable[[str], bool] = lambda name: False,
    empty: str = "fill or drop them",
) -> Columns:
    """The columns of a table.

    Args:
        file: CSV, TSV or parquet.
        takes_empty: Whether a column of a parquet file may have empty cells.
        is_ignored: Whether nobody looks at a column, which may then hold anything.
        empty: What to do about empty cells otherwise, in words.
    """
    if not is_table(file):
        raise UserError(f"{file.name} is neither .csv, .tsv nor .parquet; save the table as one of these.")
    if file.suffix.lower() == ".parquet":
        return _read_parquet(file, is_ignored, takes_empty, empty)
    return _read_csv(file, is_ignored)


def _read_csv(file: Path, is_ignored: Callable[[str], bool]) -> Columns:
    try:
        with reading(file), file.open(newline="", encoding="utf-8-sig") as stream:
            separator = _separator(file, stream)
            reader = csv.reader(stream, delimiter=separator)
            header = [name.strip() for name in next(reader, [])]
            numbered = [(reader.line_num, line) for line in reader if line]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save the table as UTF-8."
        ) from error
    except csv.Error as error:
        raise UserError(f"{file} is not a table of cells ({error}); repair it.") from error
    if "\0" in "".join(header):
        raise UserError(f"{file} is not UTF-8 text (its header has null characters); save the table as UTF-8.")
    if len(set(header)) != len(header) or not header:
        raise UserError(f"the first line of {file.name} must name every column once.")
    ignored = list(map(is_ignored, header))
    for number, line in numbered:
        if len(line) != len(header):
            others = [word for sign, word in SEPARATORS.items() if sign != separator and sign in "".join(header)]
            hint = f", or separate all cells by commas if they are separated by {others[0]}" if others else ""
            raise UserError(
                f"line {number} of {file.name} has {len(line)} cells and the header {len(header)}; repair it{hint}."
            )
        for place, cell in enumerate(line):
            if len(cell) > MAX_CELL and not ignored[place]:
                raise UserError(
                    f"line {number} of {file.name} has a cell of {len(cell):,} characters; more than {MAX_CELL:,} are "
                    f"no number and no name: drop the column {header[place]!r}, or {leave_it_out(header[place])}."
                )
    columns: dict[str, Array] = {
        name: _unread(len(numbered)) if ignored[place] else _stripped([line[place] for _, line in numbered]).astype(str)
        for place, name in enumerate(header)
    }
    if separator == ";":
        columns = _with_points(file, columns)
    return Columns(file, columns, [number for number, _ in numbered])


def _stripped(cells: Sequence[Any]) -> Array:
    """Cells, texts without spaces around them: "yes" and " yes" would be two classes, or two clients."""
    return numpy.fromiter((cell.strip() if isinstance(cell, str) else cell for cell in cells), object, len(cells))


def _unread(count: int) -> Array:
    """A column that is there, and that nobody looks at."""
    return numpy.full(count, None, dtype=object)


SEPARATORS = {";": "semicolons", "\t": "tabs"}


def _separator(file: Path, stream: TextIO) -> str:
    """What separates cells; a spreadsheet of a country with decimal commas writes semicolons."""
    if file.suffix.lower() == ".tsv":
        return "\t"
    header = stream.readline(MAX_HEADER)
    stream.seek(0)
    return ";" if ";" in header and "," not in header else ","


GROUPED = re.compile(r"\s*[+-]?\d{1,3}([. ]\d{3})+,\d+\s*")  # 1.234,5 or 1 234,5


def _with_points(file: Path, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns of numbers that have decimal commas, with points instead; the others as they are."""
    texts = {name: column for name, column in columns.items() if column.dtype.kind == "U"}
    commas = [name for name, column in texts.items() if _are_numbers(column, ",")]
    points = [name for name, column in texts.items() if _are_numbers(column, r"\.")]
    for name, column in texts.items():
        if grouped := next(filter(GROUPED.fullmatch, column.tolist()), None):
            raise UserError(
                f"column {name!r} of {file.name} has numbers such as {grouped.strip()!r}; write them without a sign "
                "between thousands."
            )
    if commas and points:  # 1.234 may be more than a thousand here
        raise UserError(
            f"{file.name} has numbers with commas in column {commas[0]!r} and with points in column {points[0]!r}; "
            "write them all with decimal points, and no sign between thousands."
        )
    return {
        name: numpy.array([cell.replace(",", ".") if _is_number(cell, ",") else cell for cell in column.tolist()], str)
        if name in commas
        else column
        for name, column in columns.items()
    }


def _are_numbers(column: Array, sign: str) -> bool:
    """Whether a column of texts holds numbers but for a few, and some have this sign before their fraction."""
    cells = [cell for cell in column.tolist() if cell.strip() and not is_mark(cell)]
    numbers = [cell for cell in cells if _is_number(cell, sign)]
    return any(re.search(sign, cell) for cell in numbers) and is_few(len(cells) - len(numbers), len(cells))


def _is_number(cell: str, sign: str) -> bool:
    return re.fullmatch(rf"\s*[+-]?(\d+({sign}\d*)?|{sign}\d+)([eE][+-]?\d+)?\s*", cell) is not None


def _read_parquet(
    file: Path, is_ignored: Callable[[str], bool], takes_empty: Callable[[str], bool], empty: str
) -> Columns:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("reading parquet needs pyarrow: pip install 'pfedhn[data]'") from error
    with reading(file):
        file.open("rb").close()
    try:
        table = parquet.read_table(file)
    except (OSError, MemoryError, pyarrow.ArrowException) as error:
        raise UserError(f"{file} is not a whole parquet file ({first_line(error)}); write it again.") from error
    if len(set(table.column_names)) != len(table.column_names):
        raise UserError(f"{file.name} has two columns of one name; give every column a name of its own.")
    columns = {}
    for name in table.column_names:
        if is_ignored(name):
            columns[name] = _unread(table.num_rows)
            continue
        if table[name].null_count and not takes_empty(name):
            raise UserError(f"column {name!r} of {file.name} has empty cells; {empty}.")
        try:
            columns[name] = table[name].to_numpy()
        except pyarrow.ArrowException as error:
            raise UserError(
                f"column {name!r} of {file.name} holds {table[name].type}; give numbers or texts, or "
                f"{leave_it_out(name)}."
            ) from error
        if columns[name].dtype.kind not in "biufUSO":
            raise UserError(
                f"column {name!r} of {file.name} holds {columns[name].dtype}; give numbers or texts, or "
                f"{leave_it_out(name)}."
            )
        if columns[name].dtype.kind == "O":
            columns[name] = _stripped(columns[name].tolist())
    return Columns(file, columns)


def _as_numbers(column: Array) -> Array:
    """Labels that are numbers throughout, as text in a CSV file, become numbers; whole ones become int64."""
    if column.dtype.kind in "USO":
        try:
            column = column.astype(numpy.float64)
        except (ValueError, TypeError, OverflowError):
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


def read_client(
    path: str | Path,
    label_column: str | None,
    class_names: Sequence[str] | None,
    shape: tuple[int, ...] = (),
    how: Reading | None = None,
) -> tuple[Array, Array]:
    """The examples (x, y) of one client: arrays, images in a folder per class, or a table with a label column.

    Args:
        path: A folder with x.npy and y.npy, a folder with a folder of images per class, or a .csv, .tsv or .parquet
            file.
        label_column: The column of a table that holds the label; that of the run's table where None.
        class_names: What the classes are called that text labels name.
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
        x, y = _table_of_one(place, label_column, shape, None if how is None else how.table)
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


def _table_of_one(
    file: Path, label_column: str | None, shape: tuple[int, ...], table: TableReading | None
) -> tuple[Array, Array]:
    label = label_column if label_column is not None or table is None else table.label
    columns = _columns_for(file, shape, table, label)
    if label is None or label not in columns:
        raise UserError(f"say which column of {file.name} is the label: --label NAME; {closest(label or '', columns)}")
    y = _as_numbers(columns[label])
    if table is not None:
        return encoded_like(columns, table), y
    features = [to_numbers(columns, name) for name in columns if name != label]
    if not features:
        raise UserError(f"{file.name} has no feature columns; give it at least one besides the label.")
    return numpy.stack(features, axis=1), y


def _columns_for(file: Path, shape: tuple[int, ...], table: TableReading | None, label: str | None) -> Columns:
    """The columns of a table for a run whose examples have this shape."""
    if len(shape) > 1:
        raise UserError(f"{file.name} is a table, and this run's examples have shape {shape}; give arrays or images.")
    if table is None:
        return read_columns(file)
    wanted = {label, *(column.name for column in table.columns)}
    return read_columns(file, lambda name: table.is_filled, lambda name: name not in wanted)


class Inputs(NamedTuple):
    """Examples to predict."""

    x: Array
    answers: Array | None = None  # the right ones, where they are known
    files: tuple[str, ...] | None = None  # of images: where each was


def read_inputs(
    path: str | Path,
    label_column: str | None = None,
    leave_out: Sequence[str] = (),
    shape: tuple[int, ...] = (),
    how: Reading | None = None,
) -> Inputs:
    """Examples to predict, and the right answers if a column has them.

    Args:
        path: A table, x.npy, a folder that has it, an image, or a folder of images.
        label_column: The column of a table that holds the right answers.
        leave_out: Columns that are no features, where the table has them.
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
        return Inputs(x, files=tuple(str(file.relative_to(place) if is_folder else file.name) for file in kept))
    if is_folder or is_array:
        x = load_array(place / "x.npy" if is_folder else place, "biuf")
        if x.ndim < 1 or not len(x):
            raise UserError(f"{place} has x of shape {x.shape}; give at least one example.")
        return Inputs(x)
    table = None if how is None else how.table
    columns = _columns_for(place, shape, table, label_column)
    if label_column is not None and label_column not in columns:
        raise UserError(f"{place.name} has no column {label_column!r}; {closest(label_column, columns)}")
    labels = None if label_column is None else _as_numbers(columns[label_column])
    features = [name for name in columns if name != label_column and name not in leave_out]
    if not features or not len(columns[features[0]]):
        raise UserError(f"{place.name} has no examples with features; give at least one.")
    if table is not None:
        return Inputs(encoded_like(columns, table), labels)
    return Inputs(numpy.stack([to_numbers(columns, name) for name in features], axis=1), labels)


def is_table(path: Path) -> bool:
    """Whether a file is read as a table."""
    return path.suffix.lower() in TABLES


def reading_again(path: str, client_column: str, label_column: str, encoding: Encoding) -> Reading:
    """How a run read its table, found from that table: runs of earlier versions that encoded texts do not say it."""
    file = given_path(path)
    if not file.is_file():
        raise UserError(f"this run encoded texts of {file}, which is not there any more; bring it back, or give x.npy.")
    columns = from_table(file, client_column, label_column, encoding=encoding).columns
    return Reading(TableReading(client_column, label_column, columns))
