"""What a run found: metrics.jsonl and result.json, written and read back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pfedhn.errors import RunError
from pfedhn.storage.checkpoint import CheckpointError, checkpoints, differences, verified
from pfedhn.storage.schema import Moment, Result, SchemaError, from_json, to_json
from pfedhn.storage.seal import (
    DamagedError,
    digest,
    parsed,
    sealed_json,
    unsealed_json,
)
from pfedhn.storage.spec import LOST, Spec, identity, read_spec
from pfedhn.system.files import append, read_bytes, write_atomically

METRICS = "metrics.jsonl"
CHAIN = "sha256"  # a field of each line that earlier versions wrote: a digest of this line and all before it


def append_moment(directory: Path, moment: Moment) -> None:
    append(directory / METRICS, json.dumps(to_json(moment)) + "\n")


def write_history(directory: Path, history: Sequence[Moment]) -> None:
    """Write these evaluations, unless the file holds them already; a resumed run writes later ones again."""
    tables, content = to_json(list(history)), _metrics(directory)
    with suppress(DamagedError):
        if digest(_tables(content)) == digest(tables) and content[-1:] in (b"", b"\n"):
            return
    write_atomically(directory / METRICS, "".join(json.dumps(table) + "\n" for table in tables).encode())


def history_digest(directory: Path) -> str:
    """The SHA-256 of metrics.jsonl, by which a result knows that its evaluations are complete."""
    return hashlib.sha256(_metrics(directory)).hexdigest()


def has_whole_history(directory: Path, result: Result) -> bool:
    """Whether metrics.jsonl is as it was when this result was written."""
    if result.history == history_digest(directory):
        return True
    last = _metrics(directory).split(b"\n")[-2:]  # earlier versions kept the end of the chain
    return len(last) == 2 and not last[1] and parsed(last[0]).get(CHAIN) == result.history


def write_result(directory: Path, result: Result) -> None:
    write_atomically(directory / "result.json", sealed_json(to_json(result), indent=1))


class MendableError(RunError):
    """A file of a run cannot be trusted, and the run writes it anew when it is started again."""


MENDS = "start the run again, which mends it"


def read_history(directory: Path) -> list[Moment]:
    """Read every evaluation so far, and refuse a file that the result or the newest checkpoint contradicts.

    A run that goes on or was killed may have half a last line, which does not count.
    """
    file, result = directory / METRICS, read_result(directory)
    known: Sequence[Any] = ()
    if result is None:
        if not file.exists() and not any(directory.glob("checkpoint-*")):
            return []
        if (spec := read_spec(directory)) is None:
            raise RunError(LOST.format(directory))
        known = _history_of_newest(directory, identity(spec))
    try:
        tables = _tables(_metrics(directory))
        moments = [from_json(Moment, table) for table in tables]
        if result is None:
            is_whole = digest(tables[: len(known)]) == digest(known)
        else:
            is_whole = has_whole_history(directory, result)
    except DamagedError as error:
        raise MendableError(f"{file} {error}; {MENDS}.") from None
    except SchemaError as error:
        raise MendableError(f"{file} is damaged ({error}); {MENDS}.") from None
    if not is_whole:
        raise MendableError(f"{file} was changed or has lost lines; {MENDS}.")
    return moments


def _metrics(directory: Path) -> bytes:
    file = directory / METRICS
    return read_bytes(file) if file.exists() else b""


def _tables(content: bytes) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    tables = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            table = parsed(line)
        except DamagedError:
            raise DamagedError(f"is damaged in line {number}") from None
        table.pop(CHAIN, None)
        tables.append(table)
    return tables


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
