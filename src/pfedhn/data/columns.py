"""Columns of a table as numbers: texts encoded, empty cells filled in, in one declared way."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy
import torch
from numpy.typing import NDArray

from pfedhn.data.catalogue import Array
from pfedhn.data.federation import Federation
from pfedhn.errors import UserError, closest

Encode: TypeAlias = Literal["refuse", "one-hot"]
Missing: TypeAlias = Literal["refuse", "median", "zero"]
Fitted: TypeAlias = Literal["client", "all"]

MAX_CATEGORIES = 100  # of a column of texts; more are names, not kinds


@dataclass(frozen=True)
class Encoding:
    """How columns become numbers.

    Args:
        encode: Columns of texts are refused, or become a column of zeros and ones for each text ("one-hot").
        missing: Empty cells are refused, or filled with the median of their column, or with 0. An empty cell among
            texts is none of them.
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


def encoded(file: str, columns: Mapping[str, Array], encoding: Encoding) -> tuple[NDArray[numpy.float32], list[str]]:
    """[examples, features], with NaN where a number is missing, and what the features are called."""
    parts, names = [], []
    for name, column in columns.items():
        cells = ["" if _is_empty(cell) else str(cell).strip() for cell in column.tolist()]
        if encoding.missing == "refuse" and "" in cells:
            raise UserError(
                f"{name!r} of example {cells.index('') + 1} of {file} is empty; fill it, drop the example, or say how, "
                'as in missing = "median".'
            )
        try:
            parts.append(numpy.array([float(cell) if cell else numpy.nan for cell in cells], dtype=numpy.float32))
            names.append(name)
            if numpy.isinf(parts[-1]).any():
                raise UserError(f"column {name!r} of {file} has an infinite number; fix it.")
        except ValueError:
            kinds = sorted(set(cells) - {""})
            if encoding.encode == "refuse":
                raise UserError(
                    f"column {name!r} of {file} holds texts such as {kinds[0]!r}; drop it, or say how it becomes "
                    'numbers, as in encode = "one-hot".'
                ) from None
            if len(kinds) > MAX_CATEGORIES:
                raise UserError(
                    f"column {name!r} of {file} has {len(kinds):,} different texts, and one-hot would make as many "
                    f"columns; drop it, or bring it to at most {MAX_CATEGORIES}."
                ) from None
            parts += [numpy.array([cell == kind for cell in cells], dtype=numpy.float32) for kind in kinds]
            names += [f"{name}={kind}" for kind in kinds]
    return numpy.stack(parts, axis=1), names


def encoded_like(file: str, column: Array, trained: Array, name: str) -> NDArray[numpy.float32] | None:
    """A column of texts as the same column of a table was encoded one-hot; None for a column of numbers."""
    known = sorted({str(cell).strip() for cell in trained.tolist() if not _is_empty(cell)})
    try:
        for text in known:
            float(text)
    except ValueError:
        cells = ["" if _is_empty(cell) else str(cell).strip() for cell in column.tolist()]
        unknown = [cell for cell in cells if cell and cell not in known]
        if unknown:
            raise UserError(
                f"column {name!r} of {file} holds {unknown[0]!r}, which the run was not trained on; "
                f"{closest(unknown[0], known)}"
            ) from None
        return numpy.array([[cell == text for text in known] for cell in cells], dtype=numpy.float32)
    return None


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and numpy.isnan(cell)) or not str(cell).strip()


def filled(federation: Federation, x: NDArray[numpy.float32], encoding: Encoding) -> Federation:
    """The federation, whose examples are numbers of rows of `x`, with these rows, their empty cells filled in."""
    rows = federation.x[:, 0].long()
    values = torch.from_numpy(x)[rows]
    if encoding.missing == "median":
        train = federation.splits["train"]
        everybody = torch.cat([train.of(client) for client in range(federation.num_clients)])
        common = _medians(values[everybody], torch.zeros(values.shape[1]))
        for client in range(federation.num_clients):
            own = _medians(values[train.of(client)], common) if encoding.fitted == "client" else common
            for part in federation.splits.values():
                mine = part.of(client)
                values[mine] = torch.where(values[mine].isnan(), own, values[mine])
    return replace(federation, x=values.nan_to_num(0.0))


def _medians(values: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    medians = values.nanmedian(0).values if len(values) else otherwise
    return torch.where(medians.isnan(), otherwise, medians)
