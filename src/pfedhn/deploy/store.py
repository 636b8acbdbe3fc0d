"""A server's folder: checkpoints, and after each the journal of later records. Together they give the state.

A record is a small table and, for an accepted update, the party's signed message as it came. It is on the disk before
it counts: applied in order to the checkpoint, the records give the state that the server had.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pfedhn.deploy.plan import older_digests
from pfedhn.deploy.state import Chosen, Member, Rules, ServerState
from pfedhn.errors import RunError, first_line
from pfedhn.storage.checkpoint import (
    NUM_KEPT,
    CheckpointError,
    checkpoints,
    read_checkpoint_tensors,
    read_record,
    remove_old,
    write_checkpoint,
)
from pfedhn.storage.files import filled, named, read_tensors
from pfedhn.system.files import keep_names, make_folder, read_bytes, write_atomically, writing

FORMAT = 4
OLD_FORMAT = 3  # has its tensors in a file without an ending, which carries its own digest
HEAD = struct.Struct("<II32s")  # of a record: lengths of table and message, digest of both
BEGINNING = b'{"kind": "'  # of every table


class Unfit(Exception):
    """A record that the state cannot take; it is not on the disk."""


@dataclass
class Store:
    """A server's folder."""

    folder: Path
    rules: Rules
    number: int = 0  # of the checkpoint that the current journal follows

    def __post_init__(self) -> None:
        make_folder(self.folder, mode=0o700)

    def commit(self, state: ServerState, table: Mapping[str, Any], message: bytes = b"") -> None:
        """Apply a record to the state, then write it; nobody hears of it before it is written.

        In this order, since a record that cannot be applied would stop every server that reads it again. A record that
        fails may leave the state half changed: load it again.
        """
        try:
            self.rules.apply(state, table, message)
        except Exception as error:
            raise Unfit(f"the record {table['kind']!r} cannot be applied: {first_line(error)}") from error
        append_record(self._journal(self.number), table, message)

    def can_step(self, name: str) -> bool:
        """Whether the state on the disk can take a step with the update of this party alone."""
        state = self.load()
        state.replies = {name: state.replies[name]}
        try:
            self.rules.apply(state, {"kind": "step"})
        except Exception:
            return False
        return True

    def load(self) -> ServerState:
        """The newest intact checkpoint, with all later records applied."""
        state, found = None, checkpoints(self.folder)
        for path in found:
            try:
                state = self._read(path)
            except CheckpointError:
                continue
            self.number = _number(path)
            break
        # Older checkpoints make up for a damaged one: journals follow each other without a gap.
        newest = max([self.number, *map(_number, found), *map(_number, self._journals())])
        missing = [number for number in range(self.number, newest + 1) if not self._journal(number).exists()]
        if newest and missing:
            if state is None:
                raise RunError(f"no checkpoint in {self.folder} is sound; restore the folder from a backup.")
            raise RunError(f"{self._journal(missing[0])} is missing; restore the folder from a backup.")
        if state is None:
            state = self.rules.initial()
        for number in range(self.number, newest + 1):
            for table, message in records(self._journal(number), is_last=number == newest):
                self.rules.apply(state, table, message)
            self.number = number
        return state

    def save(self, state: ServerState) -> None:
        """Write a checkpoint and begin a new journal."""
        number = self.number + 1
        # Both journals must exist before the checkpoint counts, since a missing one is an error. The new one is
        # emptied: in a folder that was restored from a copy, its records did not come after this checkpoint.
        if not self._journal(self.number).exists():
            write_atomically(self._journal(self.number), b"", mode=0o600)
        write_atomically(self._journal(number), b"", mode=0o600)
        table, tensors = _to_record(state)
        table |= {"format": FORMAT, "plan": self.rules.plan_digest}
        tensors = {name: value.clone() for name, value in tensors.items()}  # the format refuses shared memory
        write_checkpoint(self.folder, number, table, tensors, mode=0o600)
        self.number = number
        remove_old(self.folder, NUM_KEPT)
        if len(kept := checkpoints(self.folder)) == NUM_KEPT:
            for journal in self._journals():
                if _number(journal) < _number(kept[-1]):
                    journal.unlink(missing_ok=True)

    def _read(self, path: Path) -> ServerState:
        table = read_record(path)
        format_, plan = table.pop("format"), table.pop("plan")
        is_same = plan == self.rules.plan_digest or plan in older_digests(self.rules.plan)
        if format_ not in (OLD_FORMAT, FORMAT) or not is_same:
            raise RunError(f"{self.folder} holds a run of another plan or version of pfedhn; give another folder.")
        if format_ == FORMAT:
            tensors = read_checkpoint_tensors(path, table)
            del table["tensors_sha256"]
        elif (old := read_tensors(path.with_suffix(""))) is not None:
            tensors = old
        else:
            raise CheckpointError(f"{path.stem} is missing or damaged, and was not used.")
        if table["has_ended"] and "is_adapted" not in table:  # earlier versions decided nothing
            has_steps = self.rules.plan.fine_tunes
            table["is_adapted"] = (True if table["final"] else None) if has_steps else False
        return _to_state(table, tensors, self.rules)

    def _journals(self) -> list[Path]:
        return sorted(self.folder.glob("journal-*"))

    def _journal(self, number: int) -> Path:
        return self.folder / f"journal-{number:09d}"


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _to_record(state: ServerState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state between rounds: what JSON can hold, and tensors by name."""
    assert not state.replies, "a checkpoint is written between rounds"
    tensors = named("shared", state.shared)
    for name, row in state.rows.items():
        tensors |= named(f"row/{name}", row)
    skipped = ("shared", "rows", "members", "replies", "best", "tested", "cohort", "attempt", "is_open")
    table = {name: value for name, value in vars(state).items() if name not in skipped}
    table["members"] = [asdict(member) for member in state.members.values()]
    for part, chosen in (("best", state.best), ("tested", state.tested)):
        table[part] = None
        if chosen is not None:
            tensors |= named(f"{part}/shared", chosen.shared)
            for name, row in chosen.rows.items():
                tensors |= named(f"{part}/row/{name}", row)
            table[part] = {
                "round": chosen.round, "score": repr(chosen.score), "results": chosen.results,
                "rows": list(chosen.rows), "bases": chosen.bases,
            }  # fmt: skip
    return table, tensors


def _to_state(table: dict[str, Any], tensors: Mapping[str, Tensor], rules: Rules) -> ServerState:
    form = rules.plan.form
    members = {one["name"]: Member(**one) for one in table.pop("members")}
    chosen = {part: table.pop(part) for part in ("best", "tested")}
    state = ServerState(filled("shared", form.shared, tensors), members=members, **table)
    state.rows = {name: filled(f"row/{name}", form.row, tensors) for name in members}
    for part, known in chosen.items():
        if known is not None:
            rows = {name: filled(f"{part}/row/{name}", form.row, tensors) for name in known["rows"]}
            shared = filled(f"{part}/shared", form.shared, tensors)
            score, results = float(known["score"]), known["results"]
            setattr(state, part, Chosen(known["round"], shared, rows, known["bases"], score, results))
    return state


def append_record(path: Path, table: Mapping[str, Any], message: bytes = b"") -> None:
    """Add a record; when this returns it outlasts a power cut."""
    text = json.dumps(table, allow_nan=False).encode()
    head = HEAD.pack(len(text), len(message), hashlib.sha256(text + message).digest())
    is_new = not path.exists()
    with writing(path):
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(head + text + message)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            keep_names(path.parent)


def records(path: Path, is_last: bool = True) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The records of a journal. What a server that was killed left half written at its end is cut off.

    Any other damage ends it: what comes after would be lost without a word. Only the newest journal (`is_last`) can
    have an end that is half written.
    """
    if not path.exists():
        return
    content, place = read_bytes(path), 0
    while place < len(content):
        record = _record_at(content, place)
        if record is None:
            if not is_last or _has_records_after(content, place):
                raise RunError(
                    f"{path} is damaged at byte {place:,} of {len(content):,}; bring the folder back from a backup, or "
                    f"cut the file there (truncate -s {place}) to go on without what came after."
                )
            with writing(path):
                os.truncate(path, place)
            return
        table, message, place = record
        yield table, message


def _record_at(content: bytes, place: int) -> tuple[dict[str, Any], bytes, int] | None:
    if len(content) < place + HEAD.size:
        return None
    table_length, message_length, digest = HEAD.unpack_from(content, place)
    start = place + HEAD.size
    end = start + table_length + message_length
    if len(content) < end or hashlib.sha256(content[start:end]).digest() != digest:
        return None
    table: dict[str, Any] = json.loads(content[start : start + table_length])
    return table, content[start + table_length : end], end


def _has_records_after(content: bytes, place: int) -> bool:
    """Whether a sound record follows one that is not; then it is no end that was half written."""
    while (found := content.find(BEGINNING, place + 1)) >= 0:
        if found - HEAD.size > place and _record_at(content, found - HEAD.size) is not None:
            return True
        place = found
    return False
