"""The cells of a CSV, TSV, parquet or XLSX file, column by column.

pandas reads text files, pyarrow reads parquet, and openpyxl the first sheet of XLSX. Cells of texts and sheets stay
texts: `columns` decides which of them are numbers, so that an error can name the line and the column.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from pfedhn.data.arrays import Array
from pfedhn.errors import UserError, closest, first_line, short
from pfedhn.system.files import reading

if TYPE_CHECKING:
    import pandas

MAX_CELL = 1_000  # characters in a cell of a text file; numbers and names are shorter
TABLES = (".csv", ".tsv", ".parquet", ".xlsx")
SEPARATORS = {";": "semicolons", "\t": "tabs"}
MARKS = (
    ".",
    "na",
    "n/a",
    "#n/a",
    "n.a.",
    "<na>",
    "nan",
    "null",
    "none",
    "?",
    "-",
    "--",
)  # of an empty cell among numbers
FEW = 0.1  # of a column's cells that are no numbers: they are mistakes, and more make it a column of texts
GROUPED = re.compile(r"[+-]?\d{1,3}([. ]\d{3})+,\d+")  # 1.234,5 or 1 234,5


class Columns(dict[str, Array]):
    """The columns of a table by name, and the place of each example in the file."""

    def __init__(self, file: Path, separator: str | None = None, rows: Sequence[int] | None = None) -> None:
        super().__init__()
        self.file = file
        self.separator = separator  # of a text file
        self.rows = rows  # of a sheet: the number of each example's row

        self.kept: Array | None = None  # the places of the examples among those of the file, if some were dropped

    def where(self, example: int) -> str:
        """The place of an example, counted from 0, as an editor or a table viewer shows it."""
        if self.kept is not None:
            example = int(self.kept[example])
        if self.separator is not None:
            return f"line {self._lines[example + 1]} of {self.file.name}"
        return f"row {example + 1 if self.rows is None else self.rows[example]} of {self.file.name}"

    def only(self, examples: Array) -> "Columns":
        """The columns with some of their examples, which keep their places in the file."""
        found = Columns(self.file, self.separator, self.rows)
        found.update({name: cells[examples] for name, cells in self.items()})
        found.kept = examples if self.kept is None else self.kept[examples]
        return found

    @cached_property
    def _lines(self) -> list[int]:
        """The line of the header and of each example of a text file, which only errors ask for."""
        assert self.separator is not None
        return [line for line, _ in _records(self.file, _text(self.file), self.separator)]


def is_table(path: Path) -> bool:
    """Whether a file is read as a table."""
    return path.suffix.lower() in TABLES


def read_columns(file: Path, is_ignored: Callable[[str], bool] = lambda name: False) -> Columns:
    """Read the columns of a table.

    Args:
        file: CSV, TSV, parquet or XLSX.
        is_ignored: Whether a column is not used; it may then hold anything.
    """
    if not is_table(file):
        raise UserError(f"{file.name} is neither .csv, .tsv, .parquet nor .xlsx; save it as CSV.")
    readers = {".parquet": _read_parquet, ".xlsx": _read_sheet}
    return readers.get(file.suffix.lower(), _read_text)(file, is_ignored)


def _read_text(file: Path, is_ignored: Callable[[str], bool]) -> Columns:
    text = _text(file)
    if not text.strip():
        raise UserError(f"{file.name} is empty; give it a line that names the columns and a line for each example.")
    separator = _separator(file, text)
    header = [name.strip() for name in next(_records(file, text, separator))[1]]
    _check_header(file, header)
    read = Columns(file, separator)
    table = _parsed(file, text, separator, header)
    for place, name in enumerate(header):
        if is_ignored(name):
            read[name] = _unread(len(table))
            continue
        lengths = table[place].str.len()
        if (lengths > MAX_CELL).any():
            long = int(lengths.argmax())
            raise UserError(
                f"{read.where(long)} has a cell of {lengths.iloc[long]:,} characters; more than {MAX_CELL:,} are no "
                f"number and no name: drop the column {name!r}, or {leave_it_out(name)}."
            )
        read[name] = _stripped(table[place])
    if separator == ";":
        _write_points(read, [name for name in header if not is_ignored(name)])
    return read


def _check_header(file: Path, header: Sequence[str]) -> None:
    """Refuse a table without names of columns, or with two columns of one name."""
    if not any(header):
        raise UserError(f"{file.name} does not name its columns; name them in its first line.")
    name, count = Counter(header).most_common(1)[0]
    if count > 1 and name:
        raise UserError(f"{count} columns of {file.name} are called {name!r}; give every column another name.")
    if count > 1:
        raise UserError(f"{count} columns of {file.name} have no name; name them in the first line.")


def _read_sheet(file: Path, is_ignored: Callable[[str], bool]) -> Columns:
    """The first sheet of a spreadsheet; its cells become texts, as a CSV file has them."""
    import pandas

    with reading(file):
        file.open("rb").close()
    try:
        sheet = pandas.read_excel(file, header=None, dtype=object, na_filter=False, engine="openpyxl")
    except ImportError as error:
        raise UserError(f"{file.name} is a spreadsheet; save it as CSV, or pip install openpyxl.") from error
    except Exception as error:  # whatever a damaged archive makes openpyxl raise
        raise UserError(f"{file} is not a whole .xlsx file ({first_line(error)}); save it as CSV.") from error
    cells = sheet.map(_cell_text)
    if not len(cells):
        raise UserError(f"{file.name} is empty; give it a row that names the columns and a row for each example.")
    header = cells.iloc[0].tolist()
    _check_header(file, header)
    cells = cells[1:]
    cells = cells[(cells != "").any(axis=1)]
    read = Columns(file, rows=[number + 1 for number in cells.index])
    for place, name in enumerate(header):
        read[name] = _unread(len(cells)) if is_ignored(name) else cells[place].to_numpy()
    return read


def _cell_text(cell: Any) -> str:
    """A cell of a spreadsheet as a CSV file would have it."""
    if is_empty(cell):
        return ""
    if isinstance(cell, datetime):
        return cell.date().isoformat() if cell.time() == time() else cell.isoformat(" ")
    return str(cell).strip()


def _text(file: Path) -> str:
    with reading(file):
        content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save the table as UTF-8."
        ) from error
    if "\0" in text:
        raise UserError(f"{file} is not UTF-8 text (it has null characters); save the table as UTF-8.")
    return text


def _separator(file: Path, text: str) -> str:
    """The separator of cells; spreadsheets of countries with decimal commas write semicolons."""
    if file.suffix.lower() == ".tsv":
        return "\t"
    header = text.partition("\n")[0]
    return ";" if ";" in header and "," not in header else ","


def _parsed(file: Path, text: str, separator: str, header: list[str]) -> "pandas.DataFrame":
    """The cells below the header, without blank lines."""
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
        lines = [0, *(line for line, _ in _records(file, text, separator))]
        raise UserError(
            f"a quotation mark opens a cell below line {lines[-2]} of {file.name}, and none closes it; repair it."
        ) from None
    if (table[len(header) - 1] == "").any():  # pandas fills short lines up, which are refused here
        for _ in _records(file, text, separator):
            pass
    return table[(table != "").any(axis=1)]


def _records(file: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """(number of its last line, cells) of the header and every record that is not blank; pandas does not count lines.

    A record must have as many cells as the header.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        header = next(reader, [])
        yield reader.line_num, header
        for cells in filter(any, reader):
            if len(cells) != len(header):
                others = [word for sign, word in SEPARATORS.items() if sign != separator and sign in "".join(header)]
                hint = f", or separate all cells by commas if they are separated by {others[0]}" if others else ""
                raise UserError(
                    f"line {reader.line_num} of {file.name} has {len(cells)} cells and the header {len(header)}; "
                    f"repair it{hint}."
                )
            yield reader.line_num, cells
    except csv.Error as error:
        raise UserError(f"{file} is not a table of cells ({error}); repair it.") from error


def _write_points(columns: Columns, names: list[str]) -> None:
    """Bring columns of numbers that have decimal commas to points; the others stay as they are."""
    import pandas

    found: dict[str, list[str]] = {",": [], ".": []}
    numbers = {sign: rf"[+-]?(\d+(\{sign}\d*)?|\{sign}\d+)([eE][+-]?\d+)?" for sign in found}
    for name in names:
        cells = pandas.Series(columns[name], dtype=object)
        if grouped := next(filter(GROUPED.fullmatch, cells), None):
            raise UserError(
                f"column {name!r} of {columns.file.name} has numbers such as {grouped!r}; write them without a sign "
                "between thousands."
            )
        filled = cells[~is_blank(cells)]
        for sign, names_with_it in found.items():
            is_number = filled.str.fullmatch(numbers[sign])
            has_fraction = (is_number & filled.str.contains(sign, regex=False)).any()
            if has_fraction and is_few(int((~is_number).sum()), len(filled)):
                names_with_it.append(name)
        if name in found[","]:
            is_number = cells.str.fullmatch(numbers[","])
            columns[name] = cells.where(~is_number, cells.str.replace(",", ".", regex=False)).to_numpy()
    if found[","] and found["."]:  # 1.234 may be more than a thousand here
        raise UserError(
            f"{columns.file.name} has numbers with commas in column {found[','][0]!r} and with points in column "
            f"{found['.'][0]!r}; write them all with decimal points, and no sign between thousands."
        )


def _read_parquet(file: Path, is_ignored: Callable[[str], bool]) -> Columns:
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
    _check_header(file, table.column_names)
    read = Columns(file)
    for name in table.column_names:
        if is_ignored(name):
            read[name] = _unread(table.num_rows)
            continue
        try:
            column = table[name].to_pandas(integer_object_nulls=True, date_as_object=False).to_numpy()
            is_fit = column.dtype.kind in "biufO"
        except pyarrow.ArrowException:
            is_fit = False
        if not is_fit:
            raise UserError(
                f"column {name!r} of {file.name} holds {table[name].type}; give numbers or texts, or "
                f"{leave_it_out(name)}."
            )
        read[name] = _stripped(column) if column.dtype.kind == "O" else column
    return read


def _stripped(cells: Array) -> Array:
    """Cells, texts without spaces around them: "yes" and " yes" would be two classes, or two clients."""
    return numpy.fromiter((cell.strip() if isinstance(cell, str) else cell for cell in cells), object, len(cells))


def _unread(count: int) -> Array:
    """A column that exists and is not used."""
    return numpy.full(count, None, dtype=object)


def texts(column: Array) -> "pandas.Series[Any]":
    """Cells as texts without spaces around them; empty ones are ''."""
    import pandas

    cells = ["" if is_empty(cell) else str(cell).strip() for cell in column.tolist()]
    return pandas.Series(cells, dtype=object)


def is_empty(cell: Any) -> bool:
    """Whether a cell of a table holds nothing."""
    return cell is None or (isinstance(cell, float) and numpy.isnan(cell)) or not str(cell).strip()


def is_mark(cells: "pandas.Series[Any]") -> "pandas.Series[bool]":
    """Which texts say, among numbers, that there is none."""
    return cells.str.lower().isin(MARKS)


def is_blank(cells: "pandas.Series[Any]") -> "pandas.Series[bool]":
    """Which texts are empty cells among numbers."""
    return (cells == "") | is_mark(cells)


def is_few(count: int, total: int) -> bool:
    """Whether so many cells of a column that are no numbers are mistakes."""
    return count <= FEW * total


def check_columns(where: str, columns: Iterable[str], wanted: Iterable[str], why: str = "") -> None:
    """Refuse a table that lacks a wanted column; the sentence may say why it is wanted."""
    known = list(columns)
    for name in wanted:
        if not isinstance(name, str) or name not in known:
            raise UserError(f"{where} has no column {short(name)}{why}; {closest(name, known)}")


def leave_it_out(name: str) -> str:
    """The way out for a column that is no feature, such as a date."""
    return f'leave it out with columns.ignore = ["{name}"] (in Python, ignore_columns=["{name}"])'
