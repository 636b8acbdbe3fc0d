"""Columns of a table as numbers: texts encoded, empty cells filled in, in one declared way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy
import torch
from numpy.typing import ArrayLike, NDArray

from pfedhn.data.arrays import Array, as_tensor
from pfedhn.data.cells import Columns, check_columns, is_blank, is_empty, is_few, leave_it_out, texts
from pfedhn.data.federation import Federation
from pfedhn.data.reading import Column, TableReading
from pfedhn.errors import UserError, closest, some

Encode: TypeAlias = Literal["refuse", "one-hot"]
Missing: TypeAlias = Literal["refuse", "median", "zero"]
Fitted: TypeAlias = Literal["client", "all"]
Features: TypeAlias = NDArray[numpy.float32]

MAX_CATEGORIES = 100  # of a column of texts; more are names, not kinds

FILL_IT = (
    "fill it, drop the example, or have such cells filled in with "
    'read = {missing = "median"} in the experiment\'s file (in Python, missing="median")'
)
FIX, FILL = "fix the cell", "fill the cell or drop the example"


def encode_it(name: str) -> str:
    """The way out for a column of texts."""
    return (
        'make numbers of such columns with read = {encode = "one-hot"} in the experiment\'s file (in Python, '
        f'encode="one-hot"), or {leave_it_out(name)}'
    )


@dataclass(frozen=True)
class Encoding:
    """How columns become numbers.

    Args:
        encode: Columns of texts are refused, or become a column of zeros and ones for each text ("one-hot").
        missing: Empty cells are refused, or filled with the median of their column, or with 0. Among numbers, `MARKS`
            such as NA are empty cells too. An empty cell among texts is none of them.
        fitted: Whether a median is that of the client's training examples or of all clients'. If a client has no value
            in a column, it is all clients'.
    """

    encode: Encode = "refuse"
    missing: Missing = "refuse"
    fitted: Fitted = "client"


PLAIN = Encoding()


def encoded(columns: Columns, features: Sequence[str], encoding: Encoding) -> tuple[Features, tuple[Column, ...]]:
    """[examples, features], with NaN where a number is missing, and what became of each column."""
    parts, described, refused = [], [], {}
    for name in features:
        try:
            column = Column(name, _kinds(columns, name) if encoding.encode == "one-hot" else None)
            parts.append(_read_as(column, columns, encoding.missing != "refuse", encode_it(name), FILL_IT))
            described.append(column)
        except UserError as error:
            refused[name] = error
    if refused:
        first, *others = refused
        more = f" Nor can {some(list(map(repr, others)))} be read as they are." if others else ""
        raise UserError(f"{refused[first]}{more}")
    return numpy.concatenate(parts, axis=1), tuple(described)


def encoded_like(columns: Columns, table: TableReading) -> Features:
    """[examples, features] of another table, its columns found by name and read as the run's were.

    If the run fills empty cells in, a missing number is NaN.
    """
    names = [column.name for column in table.columns]
    check_columns(columns.file.name, columns, names, ", which the run was trained on")
    return numpy.concatenate([_read_as(column, columns, table.is_filled) for column in table.columns], axis=1)


def _kinds(columns: Columns, name: str) -> tuple[str, ...] | None:
    """The texts of a column, sorted; None of a column of numbers."""
    import pandas

    cells = texts(columns[name])
    is_number = pandas.to_numeric(cells, errors="coerce").notna()
    others = numpy.flatnonzero(~is_number & ~is_blank(cells))
    kinds = tuple(sorted(set(cells) - {""}))
    if not kinds or (is_number.any() and not len(others)):
        return None
    if is_number.any() and is_few(len(others), int((cells != "").sum())):
        raise UserError(
            f"{name!r} in {columns.where(others[0])} is {cells[others[0]]!r} and not a number, as nearly all of that "
            f"column are; fix or empty the cell, {leave_it_out(name)}, or write texts throughout if the numbers are "
            "names of kinds."
        )
    if len(kinds) > MAX_CATEGORIES:
        raise UserError(
            f"column {name!r} of {columns.file.name} has {len(kinds):,} different texts, and one-hot would make as "
            f"many columns; bring it to at most {MAX_CATEGORIES}, or {leave_it_out(name)}."
        )
    return kinds


def _read_as(column: Column, columns: Columns, is_filled: bool, text: str = FIX, empty: str = FILL) -> Features:
    """[examples, features] of one column; an empty cell has none of the column's texts."""
    name = column.name
    if column.texts is None:
        return to_numbers(columns, name, text, empty, is_filled)[:, None]
    from sklearn.preprocessing import OneHotEncoder

    cells = texts(columns[name])
    if not is_filled and (cells == "").any():
        raise UserError(f"{name!r} in {columns.where(int((cells == '').argmax()))} is empty; {empty}.")
    unknown = numpy.flatnonzero((cells != "") & ~cells.isin(column.texts))
    if len(unknown):
        cell = cells[unknown[0]]
        raise UserError(
            f"{name!r} in {columns.where(unknown[0])} is {cell!r}, which the run was not trained on; "
            f"{closest(cell, column.texts)}"
        )
    encoder = OneHotEncoder(
        categories=[list(column.texts)], handle_unknown="ignore", sparse_output=False, dtype=numpy.float32
    )
    hot: Features = encoder.fit_transform(cells.to_numpy()[:, None])
    return hot


def to_numbers(columns: Columns, name: str, text: str = FIX, empty: str = FILL, is_filled: bool = False) -> Features:
    """A column of a table as features, which must be finite numbers.

    Args:
        columns: Of the table.
        name: Of the column.
        text: The way out for a text.
        empty: The way out for an empty cell.
        is_filled: Whether empty cells are filled in later; they are NaN then, and refused otherwise.
    """
    import pandas

    column = columns[name]
    numbers = pandas.to_numeric(pandas.Series(column, dtype=column.dtype), errors="coerce").to_numpy()
    with numpy.errstate(over="ignore"):  # what is too large for float32 is refused below
        values: Features = numbers.astype(numpy.float32)
    is_missing = numpy.isnan(values)
    if is_missing.any():
        is_missing = is_blank(texts(column)).to_numpy(dtype=bool)
    for is_wrong, why in (
        (numpy.isnan(values) & ~is_missing, f" and not a number; {text}"),
        (numpy.isinf(values), f" and not a finite number; {FIX}"),
        (is_missing & (not is_filled), f"; {empty}"),
    ):
        if is_wrong.any():
            place = int(is_wrong.argmax())
            cell = "empty" if is_empty(column[place]) else repr(str(column[place]))
            raise UserError(f"{name!r} in {columns.where(place)} is {cell}{why}.")
    return values


def filled(federation: Federation, x: Features, table: TableReading) -> tuple[Federation, TableReading]:
    """Replace a federation's examples, which are row numbers of `x`, by these rows with their empty cells filled in.

    The table that is returned holds the fill values. If it has common ones already, they are those of the run that
    these clients join.
    """
    values = torch.from_numpy(x)[federation.x[:, 0].long()]
    if table.missing == "median":
        is_number = torch.tensor([column.texts is None for column in table.columns for _ in column.features])
        clients, train, own = range(federation.num_clients), federation.splits["train"], {}
        if table.common is None:
            everybody = torch.cat([train.of(client) for client in clients])
            fill = medians(values[everybody], torch.zeros(values.shape[1]))
            table = replace(table, common=tuple(torch.where(is_number, fill, 0.0).tolist()))
        common = torch.tensor(table.common, dtype=values.dtype)
        for client in clients:
            fill = common
            if table.fitted == "client":
                fill = torch.where(is_number, medians(values[train.of(client)], common), 0.0)
                own[federation.name_of(client)] = tuple(fill.tolist())
            for part in federation.splits.values():
                mine = part.of(client)
                values[mine] = torch.where(values[mine].isnan(), fill, values[mine])
        table = replace(table, own=own)
    return replace(federation, x=values.nan_to_num(0.0)), table


def new_client(
    x: ArrayLike | torch.Tensor,
    y: ArrayLike | torch.Tensor,
    name: str | None,
    split: tuple[float, float, float],
    seed: int,
    table: TableReading | None,
) -> tuple[Federation, tuple[float, ...] | None]:
    """The federation of a client that joins, and the values of its empty cells if the run fills them in.

    These are the medians of its own training examples; in a column without values, those of all clients of the run.
    """

    def dealt(examples: ArrayLike | torch.Tensor) -> Federation:
        return Federation.from_clients(
            [(examples, y)] if name is None else {name: (examples, y)}, split=split, seed=seed
        )

    if table is None or not table.is_filled:
        return dealt(x), None
    values = as_tensor(x, "x").cpu().float()
    if tuple(values.shape[1:]) != (len(table.features),):  # which is refused where the network is known
        return dealt(x), None
    data, table = filled(dealt(torch.arange(len(values))[:, None]), values.numpy(), table)
    return data, table.fill_of(data.name_of(0))


def filled_with(x: Array, fill: Sequence[float] | None) -> Array:
    """Examples whose empty cells, which are NaN, are filled in feature by feature; as they are where `fill` is None."""
    if fill is None or x.dtype.kind != "f" or x.shape[1:] != (len(fill),):
        return x
    return numpy.where(numpy.isnan(x), numpy.array(fill, dtype=x.dtype), x)


def medians(values: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """[features]: the median of each feature's numbers, without NaN; `otherwise` of one that has none."""
    if not len(values):
        return otherwise
    ordered, count = values.sort(0).values, (~values.isnan()).sum(0)  # NaN comes last
    low, high = (ordered.gather(0, place.clamp(min=0)[None])[0] for place in ((count - 1) // 2, count // 2))
    return torch.where(count > 0, low + (high - low) / 2, otherwise)
