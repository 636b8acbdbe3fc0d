"""Columns of a table as numbers: texts encoded, empty cells filled in, in one declared way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy
import torch
from numpy.typing import ArrayLike, NDArray

from pfedhn.data.arrays import Array, as_tensor
from pfedhn.data.cells import Columns, is_empty, is_few, is_mark, leave_it_out
from pfedhn.data.federation import Federation
from pfedhn.data.reading import Column, TableReading
from pfedhn.errors import UserError, closest, some

Encode: TypeAlias = Literal["refuse", "one-hot"]
Missing: TypeAlias = Literal["refuse", "median", "zero"]
Fitted: TypeAlias = Literal["client", "all"]

MAX_CATEGORIES = 100  # of a column of texts; more are names, not kinds

FILL_IT = (
    "fill it, drop the example, or have such cells filled in with "
    'read = {missing = "median"} in the experiment\'s file (in Python, missing="median")'
)


def encode_it(name: str) -> str:
    """What to do about a column of texts."""
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
        fitted: Whose training examples a median is taken of: the client's own, or all clients'. Where a client has no
            value of a column, all clients'.
    """

    encode: Encode = "refuse"
    missing: Missing = "refuse"
    fitted: Fitted = "client"

    @property
    def is_used(self) -> bool:
        return self.encode != "refuse" or self.missing != "refuse"


PLAIN = Encoding()


def encoded(
    columns: Columns, features: Sequence[str], encoding: Encoding
) -> tuple[NDArray[numpy.float32], tuple[Column, ...]]:
    """[examples, features], with NaN where a number is missing, and what became of each column."""
    parts, described, refused = [], [], {}
    for name in features:
        try:
            if encoding.is_used:
                values, column = _encoded_column(columns, name, encoding)
            else:
                values, column = to_numbers(columns, name, encode_it(name), FILL_IT)[:, None], Column(name)
        except UserError as error:
            refused[name] = error
            continue
        parts.append(values)
        described.append(column)
    if refused:
        first, *others = refused
        more = f" Nor can {some(list(map(repr, others)))} be read as they are." if others else ""
        raise UserError(f"{refused[first]}{more}")
    return numpy.concatenate(parts, axis=1), tuple(described)


def _encoded_column(columns: Columns, name: str, encoding: Encoding) -> tuple[NDArray[numpy.float32], Column]:
    cells = _texts(columns[name])
    if encoding.missing == "refuse" and "" in cells:
        raise UserError(f"{name!r} in {columns.where(cells.index(''))} is empty; {FILL_IT}.")
    has_no_number = any(cells) and not any(map(_is_number, cells))  # which then are kinds
    if not has_no_number and (values := _numbers(columns, name, cells)) is not None:
        if encoding.missing == "refuse" and numpy.isnan(values).any():
            place = int(numpy.flatnonzero(numpy.isnan(values))[0])
            raise UserError(f"{name!r} in {columns.where(place)} is {cells[place]!r}; {FILL_IT}.")
        return values[:, None], Column(name)
    kinds = sorted(set(cells) - {""})
    if any(map(_is_number, kinds)):
        others = _no_numbers(cells)
        wrong = f"{name!r} in {columns.where(others[0])} is {cells[others[0]]!r} and not a number"
        if encoding.encode == "refuse":
            raise UserError(f"{wrong}; {encode_it(name)}.")
        if is_few(len(others), len(cells) - cells.count("")):
            raise UserError(
                f"{wrong}, as nearly all of that column are; fix or empty the cell, {leave_it_out(name)}, or write "
                "texts throughout if the numbers are names of kinds."
            )
    if encoding.encode == "refuse":
        raise UserError(f"column {name!r} of {columns.file.name} holds texts such as {kinds[0]!r}; {encode_it(name)}.")
    if len(kinds) > MAX_CATEGORIES:
        raise UserError(
            f"column {name!r} of {columns.file.name} has {len(kinds):,} different texts, and one-hot would make as "
            f"many columns; bring it to at most {MAX_CATEGORIES}, or {leave_it_out(name)}."
        )
    return _one_hot(cells, kinds), Column(name, tuple(kinds))


def encoded_like(columns: Columns, table: TableReading) -> NDArray[numpy.float32]:
    """[examples, features] of another table, its columns found by name and read as the run's were.

    Where the run fills empty cells in, a number that is missing is NaN.
    """
    parts = []
    for column in table.columns:
        name = column.name
        if name not in columns:
            raise UserError(
                f"{columns.file.name} has no column {name!r}, which the run was trained on; {closest(name, columns)}"
            )
        cells = _texts(columns[name])
        if column.texts is not None:
            if not table.is_filled and "" in cells:
                place = columns.where(cells.index(""))
                raise UserError(f"{name!r} in {place} is empty; fill the cell or drop the example.")
            unknown = [cell for cell in cells if cell and cell not in column.texts]
            if unknown:
                raise UserError(
                    f"column {name!r} of {columns.file.name} holds {unknown[0]!r}, which the run was not trained on; "
                    f"{closest(unknown[0], column.texts)}"
                )
            parts.append(_one_hot(cells, column.texts))
        elif table.is_filled:
            if (values := _numbers(columns, name, cells)) is None:
                bad = _no_numbers(cells)[0]
                raise UserError(f"{name!r} in {columns.where(bad)} is {cells[bad]!r} and not a number; fix the cell.")
            parts.append(values[:, None])
        else:
            parts.append(to_numbers(columns, name)[:, None])
    return numpy.concatenate(parts, axis=1)


def _one_hot(cells: Sequence[str], texts: Sequence[str]) -> NDArray[numpy.float32]:
    """[examples, texts]: 1 for the text of a cell; an empty cell has none."""
    from sklearn.preprocessing import OneHotEncoder

    encoder = OneHotEncoder(categories=[list(texts)], handle_unknown="ignore", sparse_output=False, dtype=numpy.float32)
    encoder.fit(numpy.array(texts, dtype=object)[:, None])
    if not cells:  # which scikit-learn refuses
        return numpy.empty((0, len(texts)), dtype=numpy.float32)
    hot: NDArray[numpy.float32] = encoder.transform(numpy.array(cells, dtype=object)[:, None])
    return hot


def _texts(column: Array) -> list[str]:
    """Cells without spaces around them; empty ones are ''."""
    return ["" if is_empty(cell) else str(cell).strip() for cell in column.tolist()]


def _no_numbers(cells: Sequence[str]) -> list[int]:
    """The places of cells that are neither numbers nor empty."""
    return [place for place, cell in enumerate(cells) if cell and not is_mark(cell) and not _is_number(cell)]


def _numbers(columns: Columns, name: str, cells: Sequence[str]) -> NDArray[numpy.float32] | None:
    """A column of numbers, NaN where a cell is empty or has a mark that says so; None for one of texts."""
    try:
        with numpy.errstate(over="ignore"):  # what is too large for float32 is refused below
            values = numpy.array([float(cell) if cell and not is_mark(cell) else numpy.nan for cell in cells]).astype(
                numpy.float32
            )
    except ValueError:
        return None
    if numpy.isinf(values).any():
        raise UserError(f"column {name!r} of {columns.file.name} has an infinite number; fix it.")
    return values


def to_numbers(columns: Columns, name: str, text: str = "", empty: str = "") -> NDArray[numpy.float32]:
    """A column of a table as features; what is no finite number is refused.

    Args:
        columns: Of the table.
        name: Of the column.
        text: What to do about a text, in words.
        empty: What to do about an empty cell.
    """
    column = columns[name]
    empty = empty or "fill the cell or drop the example"
    try:
        with numpy.errstate(over="ignore"):  # what is too large for float32 is refused below
            numbers: NDArray[numpy.float32] = column.astype(numpy.float32)
    except (ValueError, TypeError, OverflowError):
        bad = next((place for place, cell in enumerate(column) if not _is_number(cell)), 0)
        if not str(column[bad]).strip():
            raise UserError(f"{name!r} in {columns.where(bad)} is empty; {empty}.") from None
        if is_mark(str(column[bad])) and any(map(_is_number, column)):
            raise UserError(f"{name!r} in {columns.where(bad)} is {str(column[bad])!r}; {empty}.") from None
        text = text or "features must be numbers: encode or drop that column"
        raise UserError(f"{name!r} in {columns.where(bad)} is {str(column[bad])!r} and not a number; {text}.") from None
    if not numpy.isfinite(numbers).all():
        bad = int(numpy.flatnonzero(~numpy.isfinite(numbers))[0])
        raise UserError(f"{name!r} in {columns.where(bad)} is {str(column[bad])!r} and not a finite number; {empty}.")
    return numbers


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (ValueError, TypeError, OverflowError):
        return False
    return numpy.ndim(cell) == 0


def filled(federation: Federation, x: NDArray[numpy.float32], table: TableReading) -> tuple[Federation, TableReading]:
    """The federation, whose examples are numbers of rows of `x`, with these rows, their empty cells filled in.

    Also what they were filled with. Where the table has a fill for everybody already, clients join that run.
    """
    rows = federation.x[:, 0].long()
    values = torch.from_numpy(x)[rows]
    if table.missing == "median":
        train = federation.splits["train"]
        is_number = torch.tensor([column.texts is None for column in table.columns for _ in column.features])
        if table.common is None:
            everybody = torch.cat([train.of(client) for client in range(federation.num_clients)])
            common = medians(values[everybody], torch.zeros(values.shape[1]))
            table = replace(table, common=tuple(torch.where(is_number, common, 0.0).tolist()))
        common = torch.tensor(table.common, dtype=values.dtype)
        if table.fitted == "client":
            own = [medians(values[train.of(client)], common) for client in range(federation.num_clients)]
            names = [federation.name_of(client) for client in range(federation.num_clients)]
            fills = [tuple(torch.where(is_number, fill, 0.0).tolist()) for fill in own]
            table = replace(table, own=dict(zip(names, fills, strict=True)))
        for client in range(federation.num_clients):
            for part in federation.splits.values():
                mine = part.of(client)
                fill = torch.tensor(table.fill_of(federation.name_of(client)), dtype=values.dtype)
                values[mine] = torch.where(values[mine].isnan(), fill, values[mine])
    return replace(federation, x=values.nan_to_num(0.0)), table


def new_client(
    x: ArrayLike | torch.Tensor,
    y: ArrayLike | torch.Tensor,
    name: str | None,
    split: tuple[float, float, float],
    seed: int,
    table: TableReading | None,
) -> tuple[Federation, tuple[float, ...] | None]:
    """The federation of a client that joins, and what its empty cells were filled with if the run fills them in.

    They are filled by the client's own training examples, as the others' were; where these have no value of a column,
    by what all clients of the run had.
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
