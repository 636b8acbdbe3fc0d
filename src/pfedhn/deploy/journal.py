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

from pfedhn.files import keep_names, read_bytes, writing

HEAD = struct.Struct("<II32s")  # lengths of table and message, digest of both


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


def records(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The records of a journal. What a server that was killed left half written at its end is cut off."""
    if not path.exists():
        return
    content, place = read_bytes(path), 0
    while place < len(content):
        record = _record(content, place)
        if record is None:
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
