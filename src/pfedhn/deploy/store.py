"""A server's state on its disk: checkpoints, and the journal of later records. Together they give the state.

A record is a small table and, for an accepted update, the party's signed message as it came. It is on the disk before
it counts: applied in order to the checkpoint, the records give the state that the server had.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pfedhn.deploy.database import Database
from pfedhn.deploy.state import Chosen, Member, Rules, ServerState
from pfedhn.errors import RunError, first_line
from pfedhn.storage.files import filled, named

NUM_KEPT = 2  # checkpoints: the newest, and the one before it in case the newest is damaged


class Unfit(Exception):
    """A record that the state cannot take; it is not on the disk."""


class Store:
    """The state of a server in the database of its folder."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        self.rules, self.database = rules, Database(folder)
        self.number = 0  # of the last record
        if any(folder.glob("journal-*")) or any((folder / "server").glob("journal-*")):
            raise RunError(f"{folder} holds a federation of version 0.1; end it with that, or give another folder.")
        with self.database.changing() as cursor:
            known = cursor.execute("select digest from plan").fetchone()
            if known is None:
                cursor.execute("insert into plan values (?)", (rules.plan_digest,))
            elif known[0] != rules.plan_digest:
                raise RunError(f"{folder} holds a run of another plan or version of pfedhn; give another folder.")

    def commit(self, state: ServerState, table: Mapping[str, Any], message: bytes = b"") -> None:
        """Apply a record to the state, then write it; nobody hears of it before it is written.

        In this order, since a record that cannot be applied would stop every server that reads it again. A record that
        fails may leave the state half changed: load it again.
        """
        try:
            self.rules.apply(state, table, message)
        except Exception as error:
            raise Unfit(f"the record {table['kind']!r} cannot be applied: {first_line(error)}") from error
        text, number = json.dumps(table, allow_nan=False), self.number + 1
        row = number, table["kind"], table.get("party"), text, message, _digest(text, message)
        with self.database.changing() as cursor:
            cursor.execute("insert into journal values (?, ?, ?, ?, ?, ?)", row)
        self.number = number

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
        with self.database.reading() as cursor:
            found = cursor.execute("select number, after, record from checkpoints order by number desc").fetchall()
            state, self.number = None, 0
            for number, after, record in found:
                state = self._checkpoint(cursor, number, record)
                if state is not None:
                    self.number = after
                    break
            if state is None:
                (first,) = cursor.execute("select min(number) from journal").fetchone()
                if found and first != 1:  # the journal does not reach back to the beginning
                    raise RunError(f"no checkpoint in {self.database.path} is sound; restore the folder from a backup.")
                state = self.rules.initial()
            for table, message in self._records(cursor):
                self.rules.apply(state, table, message)
        return state

    def _checkpoint(self, cursor: sqlite3.Cursor, number: int, record: str) -> ServerState | None:
        """The state of a checkpoint; None if it is damaged."""
        sha, tensors = hashlib.sha256(), dict[str, Tensor]()
        rows = cursor.execute("select name, content from tensors where checkpoint = ? order by name", (number,))
        try:
            for name, content in rows:
                sha.update(name.encode() + content)
                tensors[name] = load(content)["tensor"]
            table = json.loads(record)
        except (SafetensorError, ValueError, KeyError):
            return None
        sha.update(record.encode().partition(b', "sha256": ')[0])
        return None if table.pop("sha256", None) != sha.hexdigest() else _to_state(table, tensors, self.rules)

    def _records(self, cursor: sqlite3.Cursor) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The records after the last one that was read. Damage ends it: what comes after would be lost unsaid."""
        query = "select number, record, message, digest from journal where number > ? order by number"
        for number, text, message, digest in cursor.execute(query, (self.number,)):
            if number != self.number + 1 or digest != _digest(text, message):
                raise RunError(
                    f"record {self.number + 1} in {self.database.path} is missing or damaged; restore the folder from "
                    "a backup."
                )
            self.number = number
            yield json.loads(text), message

    def save(self, state: ServerState) -> None:
        """Write a checkpoint, and remove what is older than the one before it."""
        table, tensors = _to_record(state)
        contents = {name: save({"tensor": value.detach().cpu().contiguous()}) for name, value in tensors.items()}
        sha, text = hashlib.sha256(), json.dumps(table)[:-1]
        for name, content in sorted(contents.items()):
            sha.update(name.encode() + content)
        sha.update(text.encode())
        record = f'{text}, "sha256": "{sha.hexdigest()}"}}'
        with self.database.changing() as cursor:
            (newest,) = cursor.execute("select coalesce(max(number), 0) from checkpoints").fetchone()
            cursor.execute("insert into checkpoints values (?, ?, ?)", (newest + 1, self.number, record))
            rows = ((newest + 1, name, content) for name, content in contents.items())
            cursor.executemany("insert into tensors values (?, ?, ?)", rows)
            for table_name, column in (("checkpoints", "number"), ("tensors", "checkpoint")):
                cursor.execute(f"delete from {table_name} where {column} <= ?", (newest + 1 - NUM_KEPT,))  # noqa: S608
            (oldest,) = cursor.execute("select min(after) from checkpoints").fetchone()
            if newest + 1 >= NUM_KEPT:  # before that, the journal from the beginning makes up for the first one
                cursor.execute("delete from journal where number <= ?", (oldest,))


def _digest(text: str, message: bytes) -> str:
    return hashlib.sha256(text.encode() + b"\0" + message).hexdigest()


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
