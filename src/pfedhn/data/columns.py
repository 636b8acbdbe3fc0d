"""Columns of a table as numbers: texts encoded, empty cells filled in, features scaled, in one declared way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy
import torch
from numpy.typing import ArrayLike, NDArray

from pfedhn.data.arrays import Array, Arrays, as_tensor
from pfedhn.data.cells import Columns, check_columns, is_blank, is_empty, is_few, leave_it_out, texts
from pfedhn.data.federation import Federation
from pfedhn.data.reading import ClientReading, Column, Reading, Scaling, TableReading
from pfedhn.data.selection import refuse_unfit
from pfedhn.data.summaries import FLAT
from pfedhn.errors import UserError, closest, some
from pfedhn.statistics import MAX_DEVIATIONS

Encode: TypeAlias = Literal["refuse", "one-hot"]
Missing: TypeAlias = Literal["refuse", "median", "zero", "flag"]
Fitted: TypeAlias = Literal["client", "all"]
Scale: TypeAlias = Literal["none", "all", "client"]
Select: TypeAlias = Literal["all", "auto"]
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
        missing: Empty cells are refused, or filled with the median of their column, or with 0. With "flag" they are
            filled with the median, and each column of numbers with empty cells in training examples has an input more,
            which is 1 for an empty cell. Among numbers, `MARKS` such as NA are empty cells too. An empty cell among
            texts is none of them.
        fitted: Whether a median is that of the client's training examples or of all clients'. If a client has no value
            in a column, it is all clients'.
        scale: Whether inputs, and numbers to predict, are scaled by their mean and standard deviation over all clients'
            training examples. With "client", each client's inputs are scaled over its own; an input that is always the
            same there is divided by the deviation over all clients'.
        select: Whether every column is a feature, or only those that can be one: "auto" leaves out columns that are
            different in every row or always the same, and refuses dates, numbers with units and texts that differ in
            case alone.
    """

    encode: Encode = "refuse"
    missing: Missing = "refuse"
    fitted: Fitted = "client"
    scale: Scale = "none"
    select: Select = "all"


PLAIN = Encoding()
USUAL = Encoding("one-hot", "flag", "all", "all", "auto")  # what is done where a person says nothing


def encoded(columns: Columns, features: Sequence[str], encoding: Encoding) -> tuple[Features, tuple[Column, ...]]:
    """[examples, features], with NaN where a number is missing, and what became of each column."""
    parts, described, refused = [], [], {}
    for name in features:
        try:
            if encoding.select == "auto":
                refuse_unfit(columns, name)
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


def fitted(federation: Federation, x: Features, table: TableReading, scale: Scale) -> Federation:
    """Replace a federation's examples, which are row numbers of `x`, by a network's inputs: filled in, flagged, scaled.

    The numbers that this takes come from training examples, and its `reading` holds them.
    """
    values = torch.from_numpy(x)
    train = federation.splits["train"]
    rows = federation.x[:, 0].long()
    everybody = rows[torch.cat([train.of(client) for client in range(federation.num_clients)])]
    if table.missing in ("median", "flag"):
        fill = torch.where(_is_number(table), medians(values[everybody], torch.zeros(values.shape[1])), 0.0)
        table = replace(table, common=tuple(fill.tolist()))
    if table.missing == "flag":
        has_empty = values[everybody].isnan().any(0)  # only numbers are NaN
        places = has_empty.nonzero().flatten().tolist()
        table = replace(table, flagged=tuple(table.features[place] for place in places))
    federation, table = filled(federation, x, table)
    if scale == "none":
        return replace(federation, reading=Reading(table))
    seen = torch.cat([train.of(client) for client in range(federation.num_clients)])
    table = replace(table, scaling=_scaling(federation.x[seen]))
    if scale == "client":
        table = _scaled_alone(federation, table)
    y = federation.y
    if y.is_floating_point():
        labels = y[seen].double()
        table = replace(table, target=(float(labels.mean()), float(labels.std(correction=0)) or 1.0))
    return replace(federation, x=_all_scaled(federation, table), y=table.scaled(y), reading=Reading(table))


def filled(federation: Federation, x: Features, table: TableReading) -> tuple[Federation, TableReading]:
    """Replace a federation's examples, which are row numbers of `x`, by these rows filled in and flagged.

    The table that is returned holds the fill values of these clients. It has the common ones already.
    """
    values = torch.from_numpy(x)[federation.x[:, 0].long()]
    is_empty, own = values.isnan(), {}
    if table.common is not None and table.fitted == "client":
        is_number, train = _is_number(table), federation.splits["train"]
        common = torch.tensor(table.common, dtype=values.dtype)
        for client in range(federation.num_clients):
            fill = torch.where(is_number, medians(values[train.of(client)], common), 0.0)
            own[federation.name_of(client)] = tuple(fill.tolist())
            for part in federation.splits.values():
                mine = part.of(client)
                values[mine] = torch.where(is_empty[mine], fill, values[mine])
        table = replace(table, own=own)
    elif table.common is not None:
        values = torch.where(is_empty, torch.tensor(table.common, dtype=values.dtype), values)
    if table.is_filled:
        values = values.nan_to_num(0.0)
    values = torch.cat([values, is_empty[:, table.flagged_places].to(values.dtype)], 1)
    return replace(federation, x=values), table


def _is_number(table: TableReading) -> torch.Tensor:
    """[features]: whether a feature is a column of numbers."""
    return torch.tensor([column.texts is None for column in table.columns for _ in column.features])


def _scaling(values: torch.Tensor) -> Scaling:
    """The mean and deviation of each input of training examples."""
    numbers = values.double()
    mean, deviation = numbers.mean(0), numbers.std(0, correction=0)
    deviation = torch.where(deviation > FLAT * mean.abs(), deviation, 1.0)
    return Scaling(tuple(mean.tolist()), tuple(deviation.tolist()))


def _scaled_alone(federation: Federation, table: TableReading) -> TableReading:
    """The table with the scaling of each client over its own training examples."""
    assert table.scaling is not None
    own = {}
    for client in range(federation.num_clients):
        numbers = federation.x[federation.splits["train"].of(client)].double()
        mean, deviation = numbers.mean(0), numbers.std(0, correction=0)
        common = torch.tensor(table.scaling.deviation, dtype=torch.float64)
        deviation = torch.where(deviation > FLAT * torch.maximum(mean.abs(), common), deviation, common)
        own[federation.name_of(client)] = Scaling(tuple(mean.tolist()), tuple(deviation.tolist()))
    return replace(table, own_scaling=own)


def _all_scaled(federation: Federation, table: TableReading) -> torch.Tensor:
    """The inputs of all clients as the network takes them."""
    if not table.own_scaling:
        return scaled(federation.x, table.scaling)
    values = federation.x.clone()
    for client in range(federation.num_clients):
        for part in federation.splits.values():
            mine = part.of(client)
            values[mine] = scaled(values[mine], table.reading_of(federation.name_of(client)).scaling)
    return values


def scaled(values: torch.Tensor, scaling: Scaling | None) -> torch.Tensor:
    """Inputs as the network takes them, as far as the run scales them."""
    if scaling is None:
        return values
    mean, deviation = (torch.tensor(part, dtype=values.dtype) for part in (scaling.mean, scaling.deviation))
    return ((values - mean) / deviation).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)


def new_client(
    x: ArrayLike | torch.Tensor,
    y: ArrayLike | torch.Tensor,
    name: str | None,
    split: tuple[float, float, float],
    seed: int,
    table: TableReading | None,
) -> tuple[Federation, ClientReading | None]:
    """The federation of a client that joins, and how its cells of a table became inputs.

    Arguments as `new_clients`.
    """
    data, table = new_clients([(x, y)] if name is None else {name: (x, y)}, split, seed, table)
    return data, None if table is None else table.reading_of(data.name_of(0))


def new_clients(
    clients: Sequence[Arrays] | Mapping[str, Arrays],
    split: tuple[float, float, float],
    seed: int,
    table: TableReading | None,
) -> tuple[Federation, TableReading | None]:
    """The federation of clients that join, and how they were read; None if their examples stay as they are.

    Where medians or scales are the clients' own, these are of a client's training examples; the median of a column
    without values is that of all clients of the run. Examples and labels are scaled as the run's are.

    Args:
        clients: The examples of each, encoded as the run's, with NaN for empty cells.
        split: The fractions of a client's examples for training, validation and test.
        seed: Of the split.
        table: How the run read its table.
    """
    names = list(clients) if isinstance(clients, Mapping) else None
    given = list(clients.values() if isinstance(clients, Mapping) else clients)

    def dealt(examples: Sequence[Arrays]) -> Federation:
        named = examples if names is None else dict(zip(names, examples, strict=True))
        return Federation.from_clients(named, split=split, seed=seed)

    if table is None or not (table.is_filled or table.scaling is not None):
        return dealt(given), None
    values = [as_tensor(x, "x").cpu().float() for x, _ in given]
    if any(tuple(part.shape[1:]) != (len(table.features),) for part in values):  # refused where the network is known
        return dealt(given), None
    labels = [as_tensor(y, "y").cpu() for _, y in given]
    if table.target is not None:
        labels = [table.scaled(part.float()) for part in labels]
    rows = torch.arange(sum(map(len, values)))[:, None].split([len(part) for part in values])
    data, table = filled(dealt(list(zip(rows, labels, strict=True))), torch.cat(values).numpy(), table)
    if table.own_scaling:
        table = _scaled_alone(data, table)
    return replace(data, x=_all_scaled(data, table), reading=Reading(table)).checked(), table


def prepared(x: Array, table: TableReading | None, client: ClientReading | None) -> Array:
    """Encoded examples as a network takes them: empty cells, which are NaN, filled in and flagged, and all scaled.

    They stay as they are if the table is unknown or has other features.

    Args:
        x: The examples.
        table: How the run read its table.
        client: How the cells of their client become inputs.
    """
    if table is None or client is None or x.dtype.kind not in "iuf" or x.shape[1:] != (len(table.features),):
        return x
    values = torch.from_numpy(x.astype(numpy.float32))
    is_empty = values.isnan()
    if client.fill is not None:
        values = torch.where(is_empty, torch.tensor(client.fill, dtype=values.dtype), values)
    values = torch.cat([values, is_empty[:, table.flagged_places].to(values.dtype)], 1)
    return scaled(values, client.scaling).numpy()


def medians(values: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """[features]: the median of each feature's numbers, without NaN; `otherwise` of one that has none."""
    if not len(values):
        return otherwise
    ordered, count = values.sort(0).values, (~values.isnan()).sum(0)  # NaN comes last
    low, high = (ordered.gather(0, place.clamp(min=0)[None])[0] for place in ((count - 1) // 2, count // 2))
    return torch.where(count > 0, low + (high - low) / 2, otherwise)
