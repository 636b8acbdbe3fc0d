"""The cells of a CSV, TSV or parquet file, column by column.

pandas reads text files and pyarrow reads parquet. Cells of a text file stay texts: `columns` decides which of them are
numbers, so that an error can name the line and the column.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from pfedhn.data.arrays import Array
from pfedhn.errors import UserError, first_line
from pfedhn.system.files import reading

MAX_HEADER = 1_000_000  # characters of the first line that are searched for separators
MAX_CELL = 1_000  # characters in a cell of a text file; numbers and names are shorter
TABLES = (".csv", ".tsv", ".parquet")
SEPARATORS = {";": "semicolons", "\t": "tabs"}
MARKS = ("na", "n/a", "#n/a", "n.a.", "<na>", "nan", "null", "none", "?", "-", "--")  # of an empty cell among numbers
FEW = 0.1  # of a column's cells that are no numbers: they are mistakes, and more make it a column of texts


class Columns(dict[str, Array]):
    """The columns of a table by name, and the place of each example in the file."""

    def __init__(self, file: Path, columns: Mapping[str, Array], separator: str | None = None) -> None:
        super().__init__(columns)
        self.file = file
        self.separator = separator  # of a text file

    def where(self, example: int) -> str:
        """The place of an example, counted from 0, as an editor or a table viewer shows it."""
        place = f"row {example + 1}" if self.separator is None else f"line {self._lines[example + 1]}"
        return f"{place} of {self.file.name}"

    @cached_property
    def _lines(self) -> list[int]:
        """The line of the header and of each example of a text file, which only errors ask for."""
        assert self.separator is not None
        return [line for line, cells in _records(self.file, _text(self.file), self.separator) if cells]


def is_table(path: Path) -> bool:
    """Whether a file is read as a table."""
    return path.suffix.lower() in TABLES


def read_columns(
    file: Path,
    takes_empty: Callable[[str], bool] = lambda name: False,
    is_ignored: Callable[[str], bool] = lambda name: False,
    empty: str = "fill or drop them",
) -> Columns:
    """Read the columns of a table.

    Args:
        file: CSV, TSV or parquet.
        takes_empty: Whether a column of a parquet file may have empty cells.
        is_ignored: Whether a column is not used; it may then hold anything.
        empty: The way out for other empty cells, which ends the error's sentence.
    """
    if not is_table(file):
        raise UserError(f"{file.name} is neither .csv, .tsv nor .parquet; save the table as one of these.")
    if file.suffix.lower() == ".parquet":
        return _read_parquet(file, is_ignored, takes_empty, empty)
    return _read_text(file, is_ignored)


def _read_text(file: Path, is_ignored: Callable[[str], bool]) -> Columns:
    text = _text(file)
    separator = _separator(file, text)
    _, first = next(_records(file, text, separator), (0, []))
    header = [name.strip() for name in first]
    if "\0" in "".join(header):
        raise UserError(f"{file} is not UTF-8 text (its header has null characters); save the table as UTF-8.")
    if len(set(header)) != len(header) or not header:
        raise UserError(f"the first line of {file.name} must name every column once.")
    read = Columns(file, {}, separator)
    for name, cells in zip(header, _parsed(file, text, separator, header), strict=True):
        if is_ignored(name):
            read[name] = _unread(len(cells))
            continue
        long = next((place for place, cell in enumerate(cells) if len(cell) > MAX_CELL), None)
        if long is not None:
            raise UserError(
                f"{read.where(long)} has a cell of {len(cells[long]):,} characters; more than {MAX_CELL:,} are no "
                f"number and no name: drop the column {name!r}, or {leave_it_out(name)}."
            )
        read[name] = _stripped(cells)
    if separator == ";":
        read.update(_with_points(file, read))
    return read


def _text(file: Path) -> str:
    with reading(file):
        content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save the table as UTF-8."
        ) from error


def _parsed(file: Path, text: str, separator: str, header: Sequence[str]) -> list[list[str]]:
    """The cells below the header, column by column; a line must have as many of them as the header."""
    import pandas

    try:
        table = pandas.read_csv(
            io.StringIO(text, newline=""),
            sep=separator,
            header=None,  # else a first column without a name would become an index
            dtype=object,
            na_filter=False,
            skip_blank_lines=False,
        )[1:]
    except pandas.errors.ParserError:
        last = _refuse_ragged(file, text, separator, header)
        raise UserError(
            f"a quotation mark opens a cell below line {last} of {file.name}, and none closes it; repair it."
        ) from None
    if (table[len(header) - 1] == "").any():  # pandas fills short lines up, and blank ones
        _refuse_ragged(file, text, separator, header)
        table = table[[bool(cells) for _, cells in _records(file, text, separator)][1:]]
    return [table[place].tolist() for place in range(len(header))]


def _refuse_ragged(file: Path, text: str, separator: str, header: Sequence[str]) -> int:
    """Refuse a line with more or fewer cells than the header; the line above the last record if there is none."""
    lines = [0]
    for line, cells in _records(file, text, separator):
        if cells and len(cells) != len(header):
            others = [word for sign, word in SEPARATORS.items() if sign != separator and sign in "".join(header)]
            hint = f", or separate all cells by commas if they are separated by {others[0]}" if others else ""
            raise UserError(
                f"line {line} of {file.name} has {len(cells)} cells and the header {len(header)}; repair it{hint}."
            )
        lines.append(line)
    return lines[-2]


def _records(file: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """(number of its last line, cells) of every record, for errors: pandas does not count lines."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        yield from ((reader.line_num, cells) for cells in reader)
    except csv.Error as error:
        raise UserError(f"{file} is not a table of cells ({error}); repair it.") from error


def _stripped(cells: Sequence[Any]) -> Array:
    """Cells, texts without spaces around them: "yes" and " yes" would be two classes, or two clients."""
    return numpy.fromiter((cell.strip() if isinstance(cell, str) else cell for cell in cells), object, len(cells))


def _unread(count: int) -> Array:
    """A column that exists and is not used."""
    return numpy.full(count, None, dtype=object)


def _separator(file: Path, text: str) -> str:
    """What separates cells; a spreadsheet of a country with decimal commas writes semicolons."""
    if file.suffix.lower() == ".tsv":
        return "\t"
    header = io.StringIO(text[:MAX_HEADER], newline="").readline()
    return ";" if ";" in header and "," not in header else ","


GROUPED = re.compile(r"\s*[+-]?\d{1,3}([. ]\d{3})+,\d+\s*")  # 1.234,5 or 1 234,5


def _with_points(file: Path, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns of numbers that have decimal commas, with points instead; the others as they are."""
    texts = {name: column for name, column in columns.items() if None not in column}
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
        name: _stripped([cell.replace(",", ".") if _is_number(cell, ",") else cell for cell in column.tolist()])
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


def is_mark(cell: str) -> bool:
    """Whether a cell says, among numbers, that there is none."""
    return cell.strip().lower() in MARKS


def is_few(count: int, total: int) -> bool:
    """Whether so many cells of a column that are no numbers are mistakes."""
    return count <= FEW * total


def is_empty(cell: Any) -> bool:
    """Whether a cell of a table holds nothing."""
    return cell is None or (isinstance(cell, float) and numpy.isnan(cell)) or not str(cell).strip()


def leave_it_out(name: str) -> str:
    """What to do about a column that is no feature: a date, or somebody's number."""
    return f'leave it out with columns.ignore = ["{name}"] (in Python, ignore_columns=["{name}"])'
