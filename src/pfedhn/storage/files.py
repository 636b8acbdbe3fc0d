"""Files that carry a digest of themselves: damage is noticed before anybody uses them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.system.files import read_bytes, write_atomically

SEAL = "# sha256 "  # begins a sealed TOML file, where it is a comment; what is cut off is the end
SHA256 = 32  # bytes


class DamagedError(ValueError):
    """Why the content of a file cannot be trusted, to stand in a sentence after the file's name."""


def digest(value: Any) -> str:
    """The SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sealed_json(table: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A table as a JSON file with its digest."""
    return json.dumps({**table, "sha256": digest(table)}, indent=indent).encode()


def unsealed_json(content: bytes) -> dict[str, Any]:
    """The table of such a file, unless a byte of it has changed."""
    table = parsed(content)
    if table.pop("sha256", None) != digest(table):
        raise DamagedError("was changed after it was written")
    return table


def parsed(content: bytes) -> dict[str, Any]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        table = None
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


def named(prefix: str, tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their paths in it."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return {prefix + pytree.keystr(path): leaf for path, leaf in pairs}


def filled(prefix: str, form: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """The inverse of `named`: a tree of the given form, on a device or where its tensors are."""
    # Cloned into memory of their own: libraries choose kernels by alignment, and a file's tensors lie anywhere.
    leaves = [tensors[name].clone().to(device) for name in named(prefix, form)]
    return pytree.tree_unflatten(leaves, pytree.tree_structure(form))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name, after a digest of their file."""
    content = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    write_atomically(path, hashlib.sha256(content).digest() + content, mode=0o600)


def read_tensors(path: Path) -> dict[str, Tensor] | None:
    """The tensors of such a file; None if it is missing, cut or changed."""
    if not path.exists():
        return None
    content = read_bytes(path)
    is_intact = hashlib.sha256(content[SHA256:]).digest() == content[:SHA256]
    return load(content[SHA256:]) if is_intact else None
