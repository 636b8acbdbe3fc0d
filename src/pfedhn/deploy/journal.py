"""What a server has decided since its last checkpoint, one record after the other, each on the disk before it counts.

A record is a small table and, where a party's update was accepted, that party's signed message as it came. Applied in
order to the checkpoint, the records give the state that the server had: nothing that was accepted is lost.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pfedhn.errors import RunError
from pfedhn.system.files import keep_names, read_bytes, writing

HEAD = struct.Struct("<II32s")  # lengths of table and message, digest of both
BEGINNING = b'{"kind": "'  # of every table


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

    Any other damage ends it: what comes after would be lost without a word.

    Args:
        path: Of the journal.
        is_last: Whether it is the newest one; an older one has no end that is half written.
    """
    if not path.exists():
        return
    content, place = read_bytes(path), 0
    while place < len(content):
        record = _record(content, place)
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


def _record(content: bytes, place: int) -> tuple[dict[str, Any], bytes, int] | None:
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
        if found - HEAD.size > place and _record(content, found - HEAD.size) is not None:
            return True
        place = found
    return False
