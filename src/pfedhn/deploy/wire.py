"""Messages as bytes: a small JSON header and tensors in safetensors. Nothing that is read can run code.

    message   "pfhn" | length of the header | header | tensors
    envelope  length of the signature | signature | message

A message describes the tree of its tensors by itself: which dictionaries and tuples, which shapes and types. The digest
of that description is its layout, by which a receiver sees that it got what it asked for.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.utils import _pytree as pytree

VERSION = 1
MAGIC = b"pfhn"
MAX_HEADER = 1 << 24  # bytes: a network of a hundred thousand tensors fits
MAX_DEPTH = 16  # of a tree and of values: what nests deeper would only exhaust the reader
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
"""The types of numbers that cross the wire."""


HEAD = "record"  # among the values of a message: the newest hash of its sender's record (`deploy.record`)
REFUSALS = ("version", "budget", "consent", "party")
"""Why a party may say that it does not answer: it lacks the version that is asked for; has no budget left; does not
consent; or another reason of its own."""


class WireError(ValueError):
    """Why a message is refused, to stand in a sentence after the name of its sender."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason  # one word, under which it is counted


@dataclass(frozen=True)
class Message:
    """What one side says to the other.

    Args:
        kind: "hello", "train", "evaluate" or "compare", and the same for what answers it; "refusal" for an answer that
            is none.
        run: Of which run.
        party: To or from which party.
        values: What JSON can hold.
        tensors: A tree of dictionaries, tuples and lists with tensors at its leaves.
    """

    kind: str
    run: str
    party: str
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Any = ()


def packed(message: Message) -> bytes:
    """A message as bytes."""
    leaves: list[Tensor] = []
    header = {
        "wire": VERSION, "kind": message.kind, "run": message.run, "party": message.party,
        "values": dict(message.values), "tree": _described(message.tensors, leaves),
    }  # fmt: skip
    content = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    # Cloned: leaves may share memory, which the format refuses.
    tensors = {str(place): leaf.detach().cpu().contiguous().clone() for place, leaf in enumerate(leaves)}
    return b"".join([MAGIC, struct.pack("<I", len(content)), content, save(tensors)])


def unpacked(content: bytes) -> Message:
    """A message from bytes that anybody may have made."""
    if len(content) < 8 or content[:4] != MAGIC:
        raise WireError("form", "sent bytes that are no message")
    (length,) = struct.unpack("<I", content[4:8])
    if length > min(MAX_HEADER, len(content) - 8):
        raise WireError("form", "sent a message that was cut")
    header = _header(content[8 : 8 + length])
    try:
        tensors = load(content[8 + length :])
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError, TypeError):
        raise WireError("form", "sent tensors that are damaged or cut") from None
    leaves = {name: leaf.clone() for name, leaf in tensors.items()}  # libraries choose kernels by alignment
    tree = _rebuilt(header["tree"], leaves, iter(range(len(leaves) + 1)), 0)
    if leaves:
        raise WireError("form", "sent tensors that belong to nothing")
    return Message(header["kind"], header["run"], header["party"], header["values"], tree)


def _header(content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise WireError("form", "sent a header that is no JSON") from None
    kinds = {"wire": int, "kind": str, "run": str, "party": str, "values": dict}
    if not isinstance(header, dict) or header.keys() != {*kinds, "tree"}:
        raise WireError("form", "sent a header without the parts of one")
    if header["wire"] != VERSION:
        raise WireError("version", f"speaks version {header['wire']!s:.20} of the wire, and this is {VERSION}")
    for name, kind in kinds.items():
        if type(header[name]) is not kind:
            raise WireError("form", f"sent a header whose {name} does not fit")
    if _is_deep(header["values"]):
        raise WireError("form", "sent values that nest too deep")
    return header


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _is_deep(values: Any) -> bool:
    level = [values]
    for _ in range(MAX_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [value for part in parts for value in part]
    return bool(level)


def _described(tree: Any, leaves: list[Tensor]) -> Any:
    """A tree as JSON; its tensors, in order, are added to `leaves`."""
    if isinstance(tree, Tensor):
        name = str(tree.dtype).removeprefix("torch.")
        if name not in TYPES:
            raise TypeError(f"numbers of type {name} do not cross the wire")
        leaves.append(tree)
        return {"leaf": [name, list(tree.shape)]}
    if type(tree) is dict:
        if not all(isinstance(key, str) for key in tree):
            raise TypeError("a dictionary that crosses the wire has texts for keys")
        return {"dict": [[key, _described(part, leaves)] for key, part in tree.items()]}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [_described(part, leaves) for part in tree]}
    raise TypeError(f"a {type(tree).__name__} does not cross the wire; use dictionaries, tuples, lists and tensors")


def _rebuilt(tree: Any, leaves: dict[str, Tensor], places: Any, depth: int) -> Any:
    wrong = WireError("form", "sent a tree of tensors that cannot be read")
    if depth > MAX_DEPTH or not isinstance(tree, dict) or len(tree) != 1:
        raise wrong
    ((kind, parts),) = tree.items()
    if not isinstance(parts, list):
        raise wrong
    if kind == "leaf":
        leaf = leaves.pop(str(next(places, -1)), None)
        if leaf is None or parts != [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]:
            raise WireError("form", "sent tensors of other shapes than its header says")
        if leaf.dtype not in TYPES.values():  # the format of the tensors knows more of them
            raise WireError("form", "sent numbers of a type that does not cross the wire")
        return leaf
    if kind == "dict":
        pairs = [part for part in parts if isinstance(part, list) and len(part) == 2 and isinstance(part[0], str)]
        if len(pairs) != len(parts) or len({key for key, _ in pairs}) != len(pairs):
            raise wrong
        return {key: _rebuilt(part, leaves, places, depth + 1) for key, part in pairs}
    if kind not in ("tuple", "list"):
        raise wrong
    values = [_rebuilt(part, leaves, places, depth + 1) for part in parts]
    return tuple(values) if kind == "tuple" else values


def layout(tree: Any) -> str:
    """A name for the form of a tree: its dictionaries and tuples, the shapes and types of its tensors."""
    return hashlib.sha256(json.dumps(_described(tree, [])).encode()).hexdigest()


def enveloped(signature: bytes, content: bytes) -> bytes:
    return struct.pack("<H", len(signature)) + signature + content


def from_envelope(envelope: bytes) -> tuple[bytes, bytes]:
    """The signature and the content of an envelope."""
    if len(envelope) < 2:
        raise WireError("form", "sent bytes that are no message")
    (length,) = struct.unpack("<H", envelope[:2])
    if len(envelope) < 2 + length:
        raise WireError("form", "sent a message that was cut")
    return envelope[2 : 2 + length], envelope[2 + length :]


def identity(content: bytes) -> bytes:
    """The digest of a message without the head of its sender's record: the same question has the same identity."""
    (length,) = struct.unpack("<I", content[4:8])
    header = json.loads(content[8 : 8 + length])
    header["values"].pop(HEAD, None)
    found = hashlib.sha256(json.dumps(header, separators=(",", ":")).encode())
    found.update(memoryview(content)[8 + length :])
    return found.digest()


def head_of(message: Message) -> str:
    """The head of the sender's record that a message names; empty if it names none."""
    found = message.values.get(HEAD)
    return found if isinstance(found, str) and len(found) == 64 else ""


def norm(tree: Any) -> float:
    """The length of all numbers of a tree as one vector; infinite or NaN where one of them is."""
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in pytree.tree_leaves(tree)))


def is_finite(tree: Any) -> bool:
    """Whether every number of a tree is finite."""
    return all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(tree))
