"""What a run found: metrics.jsonl and result.json, written and read back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedhn.errors import RunError
from pfedhn.storage.checkpoint import CheckpointError, checkpoints, differences, verified
from pfedhn.storage.schema import Moment, Result, SchemaError, from_json, to_json
from pfedhn.storage.seal import (
    DamagedError,
    chained,
    digest,
    parsed,
    sealed_json,
    unsealed_json,
)
from pfedhn.storage.spec import LOST, Spec, identity, read_spec
from pfedhn.system.files import append, read_bytes, write_atomically


def metrics_line(moment: Moment, before: str) -> tuple[str, str]:
    """An evaluation as a line of metrics.jsonl after another one, by whose digest it is known; and its own digest."""
    table = to_json(moment)
    own = chained(before, table)
    return json.dumps({**table, "sha256": own}) + "\n", own


def append_moment(directory: Path, moment: Moment, before: str) -> str:
    """Write an evaluation down; the digest that the next one takes as `before`, the first that of the run."""
    line, own = metrics_line(moment, before)
    append(directory / "metrics.jsonl", line)
    return own


def write_history(directory: Path, history: Sequence[Moment], run: str) -> str:
    """Write the evaluations so far anew: what a run that goes on has not seen, it will write again."""
    lines, before = [], run
    for moment in history:
        line, before = metrics_line(moment, before)
        lines.append(line)
    content = "".join(lines).encode()
    file = directory / "metrics.jsonl"
    if content != (read_bytes(file) if file.exists() else b""):
        write_atomically(file, content)
    return before


def write_result(directory: Path, result: Result) -> None:
    write_atomically(directory / "result.json", sealed_json(to_json(result), indent=1))


class MendableError(RunError):
    """A file of a run cannot be trusted, and the run writes it anew when it is started again."""


MENDS = "start the run again, which mends it"


def read_history(directory: Path) -> list[Moment]:
    """Every evaluation so far, if each is as it was written and none is missing that others vouch for.

    A run that goes on or was killed may have half a last line, which does not count.
    """
    file = directory / "metrics.jsonl"
    vouched: Sequence[Any]
    if (result := read_result(directory)) is not None:
        before, vouched = digest(result.digests), ()
    elif not file.exists() and not any(directory.glob("checkpoint-*")):
        return []
    elif (spec := read_spec(directory)) is not None:
        before, vouched = digest(identity(spec)), _history_of_newest(directory, identity(spec))
    else:
        raise RunError(LOST.format(directory))
    moments: list[Moment] = []
    lines = read_bytes(file).split(b"\n") if file.exists() else [b""]
    for number, line in enumerate(lines[:-1], 1):
        try:
            moment, before = _moment_of(line, before)
        except DamagedError:
            raise MendableError(f"{file} is damaged in line {number}; {MENDS}.") from None
        moments.append(moment)
    if len(moments) < len(vouched) or (result is not None and (before != result.history or lines[-1])):
        raise MendableError(f"{file} has lost lines; {MENDS}.")
    return moments


def _moment_of(line: bytes, before: str) -> tuple[Moment, str]:
    table = parsed(line)
    own = table.pop("sha256", None)
    if own != chained(before, table):
        raise DamagedError("was changed after it was written")
    return from_json(Moment, table), str(own)


def _history_of_newest(directory: Path, run: Mapping[str, str]) -> Sequence[Any]:
    """The evaluations that the newest intact checkpoint knows."""
    for path in checkpoints(directory):
        try:
            history: Sequence[Any] = verified(path, run)["history"]
        except CheckpointError:
            continue
        except RunError:  # the run goes on, and has removed it meanwhile
            return ()
        return history
    return ()


def read_result(directory: Path, spec: Spec | None = None) -> Result | None:
    """What a finished run found; None while it is not finished.

    Args:
        directory: Of the run.
        spec: What the run is, if the result shall be refused where it is another one's.
    """
    file = directory / "result.json"
    if not file.exists():
        return None
    try:
        result = from_json(Result, unsealed_json(read_bytes(file)))
    except DamagedError as error:
        raise MendableError(f"{file} {error}; {MENDS}.") from None
    except SchemaError as error:
        raise MendableError(f"{file} cannot be read: {error}; {MENDS}.") from None
    if result.digests is None or result.history is None:
        raise MendableError(f"{file} does not say what its run was made of; {MENDS}.")
    if spec is not None and (differing := differences(result.digests, identity(spec))):
        raise MendableError(f"{file} is of another run (its {', '.join(differing)} differ); {MENDS}.")
    return result.without_harmful_adaptation()


def read_finished(directory: Path) -> Result | None:
    """The result of a finished run, all of whose files but the checkpoints are sound; None while it is not finished."""
    result = read_result(directory, read_spec(directory))
    if result is not None:
        read_history(directory)
    return result
