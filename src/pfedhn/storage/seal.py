"""Digests that files carry of themselves, so that a byte that changed is noticed before anything is made of it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "# sha256 "  # begins a sealed TOML file, where it is a comment; what is cut off is the end


class DamagedError(ValueError):
    """Why the content of a file cannot be trusted, to stand in a sentence after the file's name."""


def digest(value: Any) -> str:
    """A name for a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sealed_json(table: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A table as a JSON file that carries its digest."""
    return json.dumps({**table, "sha256": digest(table)}, indent=indent).encode()


def unsealed_json(content: bytes) -> dict[str, Any]:
    """The table of such a file, unless a byte of it has changed."""
    table = parsed(content)
    if table.pop("sha256", None) != digest(table):
        raise DamagedError("was changed after it was written")
    return table


def parsed(content: bytes) -> dict[str, Any]:
    """A table from JSON."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        raise DamagedError("is damaged") from None
    if not isinstance(table, dict):
        raise DamagedError("is damaged")
    return table


def sealed_text(text: str) -> bytes:
    """A TOML file with its digest in the first line."""
    return f"{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode()


def unsealed_text(content: bytes) -> str:
    """The text of such a file, unless a byte of it has changed."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise DamagedError("is damaged") from None
    if not text.startswith(SEAL):
        raise DamagedError("is damaged: its first line, which vouches for the others, is missing")
    text = text.partition("\n")[2]
    if content != sealed_text(text):
        raise DamagedError("was changed after it was written")
    return text
