"""Labels and clients' names as numbers."""

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy

from pfedhn.data.arrays import Array, check_choice
from pfedhn.data.cells import Columns, is_mark, texts
from pfedhn.data.notes import note
from pfedhn.errors import UserError, some

Task: TypeAlias = Literal["auto", "classification", "regression"]
Resolved: TypeAlias = Literal["classification", "regression"]

FEW_NUMBERS = 20  # whole numbers that are taken for classes


def as_labels(labels: Sequence[Array], task: Task, where: str) -> tuple[list[Array], tuple[str, ...] | None]:
    """Labels as numbers: text becomes its place in the sorted order of all, numbers to predict become float32."""
    check_choice("task", task, Task)
    if task == "classification":
        labels = [as_numbers(array) if array.dtype.kind == "f" else array for array in labels]
    kinds = {array.dtype.kind for array in labels}
    if task == "classification" and "f" in kinds:
        raise UserError(
            f'the labels in {where} have fractions, and task = "classification" has classes; give their numbers or '
            'names, or use task = "regression".'
        )
    if kinds & set("USO"):
        if task == "regression":
            raise UserError(f'the labels in {where} are text, and task = "regression" predicts numbers; give numbers.')
        try:
            words = numpy.concatenate([array.astype(str) for array in labels])
        except UnicodeDecodeError as error:
            raise UserError(f"the labels in {where} are bytes that are no text; give texts or numbers.") from error
        names, numbers = numpy.unique(words, return_inverse=True)
        ends = numpy.cumsum([len(array) for array in labels])
        return numpy.split(numbers, ends[:-1]), tuple(names.tolist())
    return [
        array.astype(numpy.float32 if task == "regression" or array.dtype.kind == "f" else numpy.int64)
        for array in labels
    ], None


def task_of(columns: Columns, label: str) -> Resolved:
    """Whether the labels of a table are classes or a quantity; a note says it of whole numbers, which may be either.

    Texts are classes, and numbers with fractions a quantity. More than 20 different whole numbers are a quantity too,
    unless they count from 0 or 1 and none of them is rare.
    """
    numbers = as_numbers(columns[label])
    if numbers.dtype.kind not in "iu" or not len(numbers):
        return "regression" if numbers.dtype.kind == "f" else "classification"
    different, counts = numpy.unique(numbers, return_counts=True)
    is_counting = different[0] in (0, 1) and different[-1] - different[0] == len(different) - 1
    is_even = len(different) <= 0.05 * len(numbers) and 4 * counts.min() >= counts.mean()
    file = columns.file
    if len(different) > FEW_NUMBERS and not (is_counting and is_even):
        note(
            f"{file.resolve()}: task of {label!r}",
            "%s: the labels, %r, are %s different whole numbers, which are taken for a quantity to predict. For "
            'classes, set task = "classification".',
            *(file.name, label, f"{len(different):,}"),
        )
        return "regression"
    if len(different) > 2:
        note(
            f"{file.resolve()}: task of {label!r}",
            '%s: the labels, %r, are %s classes (%s). For a quantity to predict, set task = "regression".',
            *(file.name, label, f"{len(different):,}", some(different.tolist(), 10)),
        )
    return "classification"


def as_numbers(column: Array) -> Array:
    """Labels that are numbers throughout, as text in a CSV file, become numbers; whole ones become int64."""
    import pandas

    if column.dtype.kind in "USO":
        cells = texts(column)
        numbers: Array = pandas.to_numeric(cells, errors="coerce").to_numpy(dtype=numpy.float64, copy=True)
        column = cells.to_numpy().astype(str) if numpy.isnan(numbers).any() else numbers
    if column.dtype.kind == "f" and numpy.all(column == numpy.floor(column)) and numpy.all(abs(column) < 2**53):
        return column.astype(numpy.int64)
    return column


def as_identifiers(column: Array) -> Array:
    """Clients 2 and 10 sort as numbers; but 007 and 7 are two clients, so only plain whole numbers become numbers."""
    if column.dtype.kind in "iu":
        return column
    text = column.astype(str)
    plain = all(re.fullmatch(r"0|[1-9]\d{0,17}", cell) for cell in text.tolist())
    return text.astype(numpy.int64) if plain else text


def labelled(columns: Columns, label: str) -> Columns:
    """The columns without the examples that have no label, which are counted in a note.

    An empty cell is no label. Among numbers, neither are marks such as NA.
    """
    cells = texts(columns[label]) if label in columns else None
    if cells is None or not len(cells):
        return columns  # which is refused elsewhere
    is_none = (cells == "").to_numpy(dtype=bool)
    marks = is_mark(cells).to_numpy(dtype=bool)
    others = cells[~is_none & ~marks].to_numpy()
    if marks.any() and len(others) and as_numbers(others).dtype.kind in "if":
        is_none = is_none | marks
    if not is_none.any():
        return columns
    if is_none.all():
        raise UserError(f"no row of {columns.file.name} has a label in column {label!r}; name another column.")
    count = int(is_none.sum())
    note(
        f"{columns.file.resolve()}: no {label!r}",
        "%s: %s of %s rows have no label in column %r and are left out.",
        *(columns.file.name, f"{count:,}", f"{len(cells):,}", label),
    )
    return columns.only(numpy.flatnonzero(~is_none))


def refuse_marks(columns: Columns, label: str) -> None:
    """NA and the like among labels that are numbers would make classes of all of them."""
    cells = texts(columns[label])
    marks = numpy.flatnonzero(is_mark(cells))
    numbers = cells.drop(marks).to_numpy()
    if len(marks) and len(numbers) and as_numbers(numbers).dtype.kind in "if":
        raise UserError(
            f"{columns.where(marks[0])} has {cells[marks[0]]!r} for {label!r}; fill the cell or drop the example."
        )
