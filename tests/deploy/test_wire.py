"""Messages survive the wire, and nothing but a message that its sender signed is read."""

import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import save
from support import assert_same_bits

from pfedhn.deploy.signing import load_or_make_key, new_key, opened, public_key, public_text, sealed
from pfedhn.deploy.wire import MAGIC, Message, WireError, is_finite, layout, norm, packed, unpacked
from pfedhn.errors import UserError

KEY, OTHER = new_key(), new_key()


def message(**changes: Any) -> Message:
    tensors = {
        "weight": torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
        "levels": (torch.tensor([-3, 5], dtype=torch.int8), torch.tensor(0.25)),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": [torch.zeros(0, 4)],
        "nothing": (),
    }
    given = {"kind": "train", "run": "r", "party": "lyon", "values": {"round": 3, "base": None}, "tensors": tensors}
    return Message(**(given | changes))


def form(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: form(part) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(form(part) for part in tree)
    return "leaf"


def test_a_message_comes_out_as_it_went_in() -> None:
    sent = message()
    got = opened(sealed(sent, KEY), KEY.public_key())
    assert (got.kind, got.run, got.party, got.values) == (sent.kind, sent.run, sent.party, sent.values)
    assert form(got.tensors) == form(sent.tensors)
    assert_same_bits(got.tensors, sent.tensors)
    assert layout(got.tensors) == layout(sent.tensors)


def test_tensors_that_share_memory_and_views_travel() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    got = unpacked(packed(message(tensors={"a": base[:, ::2], "b": base, "c": base.t()})))
    assert_same_bits(got.tensors, {"a": base[:, ::2], "b": base, "c": base.t()})


def test_layouts_tell_forms_apart() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.zeros(1)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.zeros(1)},
        {"a": torch.zeros(2, 3).double(), "b": torch.zeros(1)},
        {"b": torch.zeros(1), "a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": (torch.zeros(1),)},
    ]
    assert layout(one) == layout({"a": torch.ones(2, 3), "b": torch.ones(1)})
    assert len({layout(tree) for tree in [one, *others]}) == 1 + len(others)


def test_the_signature_covers_every_byte_and_is_of_one_key() -> None:
    envelope = sealed(message(), KEY)
    with pytest.raises(WireError, match="its key has not signed") as refused:
        opened(envelope, OTHER.public_key())
    assert refused.value.reason == "signature"
    for place in range(2, len(envelope), 7):
        altered = bytearray(envelope)
        altered[place] ^= 1
        with pytest.raises(WireError, match=r"its key has not signed"):
            opened(bytes(altered), KEY.public_key())


def test_what_is_too_large_is_not_even_verified() -> None:
    with pytest.raises(WireError, match="where 100 are the most") as refused:
        opened(sealed(message(), KEY), KEY.public_key(), limit=100)
    assert refused.value.reason == "size"


@settings(max_examples=60)
@given(some.binary(max_size=200), some.integers(0, 400), some.integers(0, 400))
def test_no_bytes_do_more_than_be_refused(noise: bytes, start: int, length: int) -> None:
    """Whoever holds a key can sign anything: what is read after the signature must be as careful as before."""
    whole = packed(message())
    for content in (noise, MAGIC + noise, whole[:start] + noise + whole[start + length :], whole[:start]):
        try:
            got = unpacked(content)
        except WireError:
            continue
        assert layout(got.tensors)


def forged(change: Callable[[dict[str, Any]], None], tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    content = packed(message())
    (length,) = struct.unpack("<I", content[4:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    rest = content[8 + length :] if tensors is None else save(tensors)
    return MAGIC + struct.pack("<I", len(text)) + text + rest


def set_tree(tree: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(tree=tree)


def nested(depth: int) -> Any:
    tree: Any = {"tuple": []}
    for _ in range(depth):
        tree = {"tuple": [tree]}
    return tree


FOREIGN = {
    "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64, "float8_e4m3fn": torch.float8_e4m3fn,
    "complex64": torch.complex64,
}  # fmt: skip
"""Types of numbers that the format of the tensors knows, and the wire does not."""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda: forged(lambda header: header.update(wire=2)), "version"),
        (lambda: forged(lambda header: header.update(round=1)), "form"),
        (lambda: forged(lambda header: header.update(values=[])), "form"),
        (lambda: forged(lambda header: header.update(party=None)), "form"),
        (lambda: forged(set_tree(nested(100))), "form"),
        (lambda: forged(lambda header: header.update(values=nested(100))), "form"),
        (lambda: forged(lambda header: header.update(values={"loss": float("nan")})), "form"),
        (lambda: forged(set_tree({"dict": []})), "form"),
        (lambda: forged(set_tree({"dict": [["a", {"leaf": ["float32", [3]]}]]}), {"0": torch.zeros(2)}), "form"),
        (lambda: forged(set_tree({"dict": [["a", {"leaf": ["float64", [2]]}]]}), {"0": torch.zeros(2)}), "form"),
        *(
            (partial(forged, set_tree({"tuple": [{"leaf": [name, [2]]}]}), {"0": torch.zeros(2).to(kind)}), "form")
            for name, kind in FOREIGN.items()
        ),
        (
            lambda: forged(
                set_tree({"dict": [["a", {"leaf": ["float32", [2]]}], ["a", {"leaf": ["float32", [2]]}]]}),
                {"0": torch.zeros(2), "1": torch.zeros(2)},
            ),
            "form",
        ),
        (lambda: MAGIC + struct.pack("<I", 1 << 31) + b"{}", "form"),
    ],
)  # fmt: skip
def test_forged_messages_are_refused(content: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(WireError) as refused:
        unpacked(content())
    assert refused.value.reason == reason


def test_only_plain_trees_cross() -> None:
    for tensors in ({1: torch.zeros(1)}, {"a": 3.0}, {"a": torch.zeros(1, dtype=torch.complex64)}):
        with pytest.raises(TypeError, match="cross"):
            packed(message(tensors=tensors))


def test_norm_and_finite_see_every_number() -> None:
    tree = {"a": torch.tensor([3.0]), "b": (torch.tensor([4], dtype=torch.int8),)}
    assert norm(tree) == 5.0
    assert is_finite(tree)
    assert not is_finite({"a": torch.tensor([1.0, float("inf")])})
    assert not is_finite({"a": torch.tensor([float("nan")])})


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Any) -> None:
    path = tmp_path / "key"
    key = load_or_make_key(path)
    assert path.stat().st_mode & 0o077 == 0
    again = load_or_make_key(path)
    assert public_text(again.public_key()) == public_text(key.public_key())
    assert opened(sealed(message(), again), public_key(public_text(key.public_key()) + " lyon")).party == "lyon"
    path.write_text("no key")
    with pytest.raises(UserError, match="ssh-keygen"):
        load_or_make_key(path)
    with pytest.raises(UserError, match="ssh-keygen"):
        public_key("ssh-ed25519 AAAA")
