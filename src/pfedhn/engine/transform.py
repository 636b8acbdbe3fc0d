"""What is done to weights and updates on their way: the seam of the wire, for compression, clipping, noise.

A transform encodes on one side with its own key and decodes on the other. The encoded bytes are those counted.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.errors import UserError, closest, short
from pfedhn.keys import Key
from pfedhn.params import Params


class Transform(Protocol):
    """How ONE message is encoded by its sender and decoded by its receiver; functions are pure.

    A sender may remember something from message to message (`state`, a tree of tensors), such as what rounding left
    over. Of uploads it stays with the client; downloads have none, since the server would need one for each client.
    """

    draws: bool = False
    """Whether `encode` uses its key; what draws is not handed to a compiler, which would narrow the key's 64 bits."""

    def init_state(self, values: Params) -> Any:
        """What a sender remembers before its first message, given the form of what it sends."""
        return ()

    def encode(self, values: Params, key: Key, state: Any) -> tuple[Any, Any]:
        """What crosses the wire, a tree of tensors, and what the sender remembers from now on."""
        return values, state

    def decode(self, encoded: Any, dtype: torch.dtype) -> Params:
        """What the receiver takes it for."""
        result: Params = encoded
        return result


@dataclass(frozen=True)
class Full(Transform):
    """Every number as it is."""


@dataclass(frozen=True)
class Half(Transform):
    """16 bits a number: bfloat16, which has the range of float32, rounded at random so that the mean is kept.

    Rounding to the nearest would lose every update that is small beside its own weight, in every round alike.
    """

    draws = True

    def encode(self, values: Params, key: Key, state: Any) -> tuple[Any, Any]:
        return {name: self._rounded(value, keys.fold(key, name)) for name, value in values.items()}, state

    def decode(self, encoded: Any, dtype: torch.dtype) -> Params:
        return {name: value.to(dtype) for name, value in encoded.items()}

    @staticmethod
    def _rounded(value: Tensor, key: Key) -> Tensor:
        # A unit in the last place of a number with 8 significant bits, at least that of the smallest normal number.
        exponent = torch.floor(torch.log2(value.abs().clamp(min=2.0**-126)))
        unit = torch.exp2(exponent - 7)
        return (torch.floor(value / unit + uniform_like(value, key)) * unit).to(torch.bfloat16)


@dataclass(frozen=True)
class EightBit(Transform):
    """8 bits a number and a scale for each tensor: whole numbers from -127 to 127, rounded so that the mean is kept."""

    draws = True

    def encode(self, values: Params, key: Key, state: Any) -> tuple[Any, Any]:
        return {name: self._rounded(value, keys.fold(key, name)) for name, value in values.items()}, state

    def decode(self, encoded: Any, dtype: torch.dtype) -> Params:
        return {name: levels.to(dtype) * scale.to(dtype) for name, (levels, scale) in encoded.items()}

    @staticmethod
    def _rounded(value: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        scale = (value.abs().amax() / 127).to(torch.float32)
        levels = value / torch.where(scale > 0, scale, 1.0)
        return torch.floor(levels + uniform_like(value, key)).clamp(-127, 127).to(torch.int8), scale


def uniform_like(value: Tensor, key: Key) -> Tensor:
    return keys.uniform(key, math.prod(value.shape), value.device).to(value.dtype).reshape(value.shape)


FULL = Full()
TRANSFORMS: dict[str, Transform] = {"full": FULL, "half": Half(), "8-bit": EightBit()}
"""By the name that `upload` and `download` take."""


def find_transform(given: str | Transform) -> Transform:
    if not isinstance(given, str):
        if isinstance(given, type) or not all(hasattr(given, name) for name in ("init_state", "encode", "decode")):
            raise UserError(f"a transform is given as {short(given)}; {closest('', TRANSFORMS)}")
        return given
    if given not in TRANSFORMS:
        raise UserError(f"there is no transform {given!r} for uploads and downloads; {closest(given, TRANSFORMS)}")
    return TRANSFORMS[given]
