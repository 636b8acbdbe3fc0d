"""A record that its owner can show: a file of signed lines, each with the hash of the line before it.

    {"number": 7, "time": 1763580000.1, "event": "asked", ..., "by": KEY, "previous": X, "hash": Y, "signature": Z}

A line's hash is the SHA-256 of the line without `hash` and `signature`, as JSON with sorted keys. The signature is over
the hash. `by` is the start of the key's digest, and the first line of a key holds the whole key. A party has one
record, the server one for each party. In every message, server and party tell each other the newest hash of their
records, so neither can later change what the other has seen (`deploy.audit`).
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pfedhn.deploy.signing import PrivateKey, PublicKey, has_signed_line, public_key, public_text, signed_line
from pfedhn.errors import RunError, UserError
from pfedhn.storage.files import digest
from pfedhn.system.files import keep_names, make_folder, one_at_a_time, read_bytes, writing

RECORD = "record.jsonl"  # of a party's folder
RECORDS = "record"  # of a server's folder: a folder with NAME.jsonl for each party
MAX_LINE = 1 << 20  # bytes
NO_HEAD = "0" * 64  # before the first line

Line = dict[str, Any]


class Record:
    """A record that grows; several processes may add to the same one.

    Args:
        path: The file.
        key: Signs the lines.
        clock: Seconds since 1970.
    """

    def __init__(self, path: Path, key: PrivateKey, clock: Callable[[], float] = time.time) -> None:
        self.path, self.key, self.clock = path, key, clock
        self._public = public_text(key.public_key())
        self._by = _by(self._public)
        self._size = -1  # of the file when it was last looked at
        self._number, self._head, self._last_by = 0, NO_HEAD, ""

    @property
    def head(self) -> str:
        """The hash of the newest line."""
        if self._size < 0:
            with one_at_a_time(self.path.parent):
                self._look()
        return self._head

    def add(self, event: str, is_lasting: bool = False, **details: Any) -> str:
        """Add a line and return its hash. A lasting line outlasts a power cut; any line outlasts its process."""
        with one_at_a_time(self.path.parent), writing(self.path):
            self._look()
            table: Line = {"number": self._number + 1, "time": round(self.clock(), 3), "event": event, **details}
            if self._by != self._last_by:
                table["key"] = self._public
            table |= {"by": self._by, "previous": self._head}
            head = digest(table)
            line = json.dumps({**table, "hash": head, "signature": signed_line(self.key, head)}).encode() + b"\n"
            with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(line)
                if is_lasting:
                    file.flush()
                    os.fsync(file.fileno())
            if is_lasting:
                keep_names(self.path.parent)
            self._size += len(line)
            self._number, self._head, self._last_by = table["number"], head, self._by
        return head

    def _look(self) -> None:
        """Find the end of the file, which another process may have moved; cut off a line that is half written."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == self._size:
            return
        with writing(self.path):
            content = b""
            if size:
                with self.path.open("rb") as file:
                    file.seek(max(0, size - MAX_LINE))
                    content = file.read()
            if size and not content.endswith(b"\n"):
                whole = content[: content.rfind(b"\n") + 1]
                size -= len(content) - len(whole)
                os.truncate(self.path, size)
                content = whole
        self._size = size
        if not content:
            self._number, self._head, self._last_by = 0, NO_HEAD, ""
            return
        try:
            last = json.loads(content[content.rfind(b"\n", 0, -1) + 1 :])
            self._number, self._head, self._last_by = int(last["number"]), str(last["hash"]), str(last["by"])
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{self.path} is damaged in its last line; move it away to begin a new record.") from None


class Records:
    """The records of a server, one for each party, so that one can be shown without the others."""

    def __init__(self, folder: Path, key: PrivateKey) -> None:
        self.folder, self.key = folder, key
        self._known: dict[str, Record] = {}

    def of(self, party: str) -> Record:
        if party not in self._known:
            make_folder(self.folder, mode=0o700)
            self._known[party] = Record(self.folder / f"{party}.jsonl", self.key)
        return self._known[party]

    def head_of_all(self, parties: Iterable[str]) -> str:
        """A name for all that these records hold now."""
        return digest({name: self.of(name).head for name in parties})


def read_record(path: Path) -> list[Line]:
    """The lines of a record that nobody has changed; else an error that names the first bad line.

    A line at the end that is half written does not count.
    """
    lines: list[Line] = []
    content = read_bytes(path)
    head, key = NO_HEAD, None
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        line, wrong = _checked(text, number, head, key)
        if wrong:
            raise RunError(f"line {number} of {path} {wrong}.")
        head, key = line["hash"], public_key(line["key"]) if "key" in line else key
        lines.append(line)
    return lines


def _checked(text: bytes, number: int, head: str, key: PublicKey | None) -> tuple[Line, str]:
    """A line, and what is wrong with it; nothing if it is sound."""
    try:
        line = json.loads(text)
        table = {name: value for name, value in line.items() if name not in ("hash", "signature")}
        found, signature, own = str(line["hash"]), str(line["signature"]), line.get("key")
        key = key if own is None else public_key(str(own))
        by, place, previous = str(line["by"]), line["number"], line["previous"]
        str(line["event"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError):
        return {}, "cannot be read"
    if found != digest(table):
        return line, "was changed after it was written"
    if (place, previous) != (number, head):
        return line, "does not follow the line before it: lines were removed, added or moved"
    if key is None or by != _by(public_text(key)) or not has_signed_line(signature, key, found):
        return line, "has a signature of another key"
    return line, ""


def keys_of(lines: list[Line]) -> Iterator[str]:
    """The keys that signed a record, oldest first."""
    return (line["key"] for line in lines if "key" in line)


def _by(public: str) -> str:
    return hashlib.sha256(public.encode()).hexdigest()[:16]
