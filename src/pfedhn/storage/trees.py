"""Trees of tensors in files that vouch for themselves: what was cut or changed counts as missing."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.system.files import read_bytes, write_atomically

SHA256 = 32  # bytes


def named(prefix: str, tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their places in it."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return {prefix + pytree.keystr(path): leaf for path, leaf in pairs}


def filled(prefix: str, form: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """A tree of the given form with the tensors that `named` took from one, on a device or where they are."""
    # Cloned into memory of their own: libraries choose kernels by alignment, and a file's tensors lie anywhere.
    leaves = [tensors[name].clone().to(device) for name in named(prefix, form)]
    return pytree.tree_unflatten(leaves, pytree.tree_structure(form))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name, whole or not at all."""
    content = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    write_atomically(path, hashlib.sha256(content).digest() + content, mode=0o600)


def read_tensors(path: Path) -> dict[str, Tensor] | None:
    """The tensors of such a file; None where it is missing, or is not as it was written."""
    if not path.exists():
        return None
    content = read_bytes(path)
    if hashlib.sha256(content[SHA256:]).digest() != content[:SHA256]:
        return None
    return load(content[SHA256:])
