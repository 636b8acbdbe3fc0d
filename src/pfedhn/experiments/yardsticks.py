"""The yardsticks of an experiment on a table, in a small sealed file beside its runs.

They are computed once for the rows of each split, and a run finds those of its own rows by the digests in its result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pfedhn.experiments.data import build_federation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import RunSpec
from pfedhn.runs.yardsticks import yardsticks
from pfedhn.storage.directory import read_result, read_spec
from pfedhn.storage.files import DamagedError, sealed_json, unsealed_json
from pfedhn.storage.identity import data_digest, partition_digest
from pfedhn.storage.schema import Result, SchemaError, Yardstick, from_json, to_json
from pfedhn.system.files import one_at_a_time, read_bytes, write_atomically

FILE = "yardsticks.json"


@dataclass(frozen=True)
class OfSplit:
    """The yardsticks of one table, divided among clients and splits in one way."""

    partition_sha256: str  # as in a result: who has which rows
    data: str  # and in its digests: what the rows hold
    seed: int
    yardsticks: tuple[Yardstick, ...]

    def fits(self, result: Result) -> bool:
        """Whether a run was trained and tested on these rows."""
        data = self.data if result.digests is None else result.digests.get("data", self.data)
        return (result.partition_sha256, data) == (self.partition_sha256, self.data)


@dataclass(frozen=True)
class _File:
    splits: tuple[OfSplit, ...] = ()


def read_yardsticks(directory: Path) -> tuple[OfSplit, ...]:
    """The stored yardsticks of an experiment; none if there are none, or if the file was damaged."""
    file = directory / FILE
    if not file.exists():
        return ()
    try:
        return from_json(_File, unsealed_json(read_bytes(file))).splits
    except (DamagedError, SchemaError):  # the next `pfedhn run` computes them again
        return ()


def yardsticks_of(results: Iterable[Result], stored: Sequence[OfSplit]) -> dict[str, tuple[Yardstick, ...]]:
    """The yardsticks on the rows of each result, by `Result.rows`."""
    found = {result.rows: one.yardsticks for result in results for one in stored if one.fits(result)}
    return {rows: some for rows, some in found.items() if some}


def compute_yardsticks(
    directory: Path, runs: Sequence[RunSpec], options: Options, say: Callable[[str], None] = lambda text: None
) -> None:
    """Compute the yardsticks of every finished run on a table whose rows have none yet, and store them split by split.

    Args:
        directory: Of the experiment.
        runs: Finished or not.
        options: How the experiment was run.
        say: Called with what is being computed.
    """
    stored, missing = read_yardsticks(directory), dict[str, tuple[RunSpec, Result]]()
    for run in runs:
        result = read_result(directory / run.name)
        if result is None or any(one.fits(result) for one in stored) or not _is_on_table(directory / run.name):
            continue
        missing.setdefault(result.rows, (run, result))
    if missing:
        say(f"Fitting yardsticks to the rows of {len(missing)} split{'s' if len(missing) > 1 else ''}.")
    for run, result in missing.values():
        federation = build_federation(run.cell, run.seed, options.data_dir)
        made = OfSplit(partition_digest(federation), data_digest(federation), run.seed, ())
        if not made.fits(result):
            say(f"{run.cell.dataset} has changed since {run.name} was finished, so that run gets no yardsticks.")
            continue
        made = replace(made, yardsticks=yardsticks(federation, run.seed))
        with one_at_a_time(directory):  # another command may have stored some meanwhile
            others = [one for one in read_yardsticks(directory) if not one.fits(result)]
            write_atomically(directory / FILE, sealed_json(to_json(_File((*others, made)))))


def _is_on_table(folder: Path) -> bool:
    spec = read_spec(folder)
    return spec is not None and spec.data.reading is not None and spec.data.reading.table is not None
