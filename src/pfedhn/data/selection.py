"""Columns of a table that are no features: what only names its rows, what never changes, and what must be mended."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from pfedhn.data.cells import Columns, is_blank, leave_it_out, texts
from pfedhn.data.notes import note
from pfedhn.errors import UserError, some

if TYPE_CHECKING:
    import pandas

NEARLY_ALL = 0.9  # of a column's cells that are dates, or numbers with a unit
MANY_ROWS = 50  # in fewer, whole numbers may all differ by chance
INDEX = re.compile(r"|rownames|row\.names|Unnamed: \d+(\.\d+)*|__index_level_\d+__")  # names that R and pandas write
WHOLE = r"[+-]?\d+"
DATE = r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T ]\d{1,2}:\d{2}.*)?"
UNIT = r"[+-]?\d+(?:[.,]\d+)?\s*([A-Za-zµ%°€$£][A-Za-zµ%°€$£/²³]*\.?)"
CURRENCY = r"([$€£])\s*\d[\d.,]*"


def selected(columns: Columns, names: Sequence[str]) -> list[str]:
    """The columns that can be features; the others are named in a note.

    Left out are columns that are always the same, and those whose whole numbers or texts differ in every row, as an
    index and patient numbers do.

    Args:
        columns: Of the table.
        names: Those that a person did not leave out.
    """
    reasons = {name: reason for name in names if (reason := _why_not(name, texts(columns[name])))}
    if reasons:
        listed = some([f"{name!r} ({reason})" for name, reason in reasons.items()], 10)
        what = (
            "1 column is no feature and is" if len(reasons) == 1 else f"{len(reasons)} columns are no features and are"
        )
        note(
            f"{columns.file.resolve()}: columns {listed}",
            '%s: %s left out: %s. To use every column, set read = {select = "all"} (in Python, select="all").',
            *(columns.file.name, what, listed),
        )
    kept = [name for name in names if name not in reasons]
    if names and not kept:
        raise UserError(
            f"{columns.file.name} has no feature columns: each is the same or different in every row; give it others, "
            'or set read = {select = "all"} (in Python, select="all").'
        )
    return kept


def _why_not(name: str, cells: "pandas.Series[Any]") -> str | None:
    """Why a column is no feature, in words; None if it may be one."""
    different = cells.nunique()
    if different <= 1:
        return "the same in every row"
    is_whole = cells.str.fullmatch(WHOLE).all()
    if INDEX.fullmatch(name) and (is_whole or different == len(cells)):
        return "it numbers the rows"
    if different < len(cells):
        return None
    if is_whole:
        numbers = cells.astype(float)  # of any length
        is_counting = numbers.max() - numbers.min() == len(cells) - 1
        return "different in every row" if is_counting or len(cells) >= MANY_ROWS else None
    import pandas

    is_names = pandas.to_numeric(cells, errors="coerce").isna().all() and not is_blank(cells).any()
    return "different in every row" if is_names and _dirt(cells) is None else None


def refuse_unfit(columns: Columns, name: str) -> None:
    """Refuse a column of dates, of numbers with a unit, or of texts that differ in case or spaces alone."""
    import pandas

    cells = texts(columns[name])
    if pandas.to_numeric(cells[~is_blank(cells)], errors="coerce").notna().all():
        return
    found = _dirt(cells)
    if found is None:
        refuse_variants(columns, name, f", or {leave_it_out(name)}")
        return
    what, way_out, is_it = found
    place = int(is_it.to_numpy().argmax())
    raise UserError(
        f"column {name!r} of {columns.file.name} holds {what}, such as {cells[place]!r} in "
        f"{_line(columns, place)}; {way_out}, or {leave_it_out(name)}."
    )


def _dirt(cells: "pandas.Series[Any]") -> "tuple[str, str, pandas.Series[bool]] | None":
    """What nearly all cells are that is neither a number nor a name, the way out, and which cells are it."""
    is_filled = ~is_blank(cells)
    least = NEARLY_ALL * is_filled.sum()
    is_date = cells.str.fullmatch(DATE)
    if least and is_date.sum() >= least:
        return "dates", "write numbers instead, such as days since the first one", is_date
    units = cells.str.extract(f"^(?:{UNIT}|{CURRENCY})$").bfill(axis=1)[0].str.lower()
    unit = units.value_counts()
    if least and len(unit) and unit.iloc[0] >= least and cells[units.notna()].nunique() > 2:
        return "numbers with a unit", "write the numbers alone", units.notna()
    return None


def refuse_variants(columns: Columns, name: str, otherwise: str = "") -> None:
    """Refuse texts that differ in case or spaces alone, such as "Yes" and "yes"; `otherwise` is another way out."""
    cells = texts(columns[name])
    first: dict[str, str] = {}
    for text in cells.unique().tolist():
        alike = first.setdefault(" ".join(text.casefold().split()), text)
        if alike != text:
            one, other = (int(numpy.argmax(cells == variant)) for variant in (alike, text))
            raise UserError(
                f"column {name!r} of {columns.file.name} has {alike!r} ({_line(columns, one)}) and {text!r} "
                f"({_line(columns, other)}), which differ in case or spaces alone; write them alike{otherwise}."
            )


def _line(columns: Columns, place: int) -> str:
    return columns.where(place).removesuffix(f" of {columns.file.name}")
