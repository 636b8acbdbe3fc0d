"""New examples from files, read as a run read its own."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn.data.columns import filled_with
from pfedhn.data.files import read_inputs
from pfedhn.data.reading import Reading
from pfedhn.errors import UserError

if TYPE_CHECKING:
    from pfedhn.runs.run import Run


class GivenExamples(NamedTuple):
    """Examples from a file, for a client's own model."""

    x: Tensor
    answers: NDArray[Any] | None  # the right ones, where they are known
    files: tuple[str, ...] | None  # of images: where each was


def read_examples(
    run: "Run", path: str | Path, client: int | str, label: str | None = None, how: Reading | None = None
) -> GivenExamples:
    """Examples from a file, read as the run read its own.

    Args:
        run: Whose model takes them.
        path: As for `Run.read`.
        client: As for `Run.read`.
        label: The column of a table that holds the right answers.
        how: How the run read its own, if it does not say so itself.
    """
    described = run.description
    how = how or described.reading
    columns = run.origin.cell.get("columns") or {}
    leave_out = (columns.get("client", ""), columns.get("label", ""))
    given, answers, files = read_inputs(path, label, leave_out, described.shape, how)
    if isinstance(client, str) and client in run.joined:
        given = filled_with(given, run.joined[client].fill)
    elif how is not None and how.table is not None:
        given = filled_with(given, how.table.fill_of(described.name_of(described.number_of(client))))
    x = torch.from_numpy(described.prepared(given))
    if tuple(x.shape[1:]) != described.shape:
        raise UserError(
            f"{path} has examples of shape {tuple(x.shape[1:])}; this run's have {described.shape}: give the same "
            "features in the same order."
        )
    dtype: torch.dtype = getattr(torch, described.dtype)
    if x.is_floating_point() and not (is_finite := x.flatten(1).isfinite().all(1)).all():
        raise UserError(f"example {int((~is_finite).nonzero()[0])} of {path} has a number that is not finite; fix it.")
    dtype = run.plan.dtype if dtype.is_floating_point else dtype
    return GivenExamples(x.to(run.plan.device, dtype), answers, files)
