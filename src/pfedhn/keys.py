"""Keyed randomness: every draw is a pure function of (seed, purpose, round, client), so nothing random is ever stored.

A key is a signed 64-bit number, an `int` on the host or an int64 tensor (then every function maps over its shape).
All of it is wrapping integer arithmetic: a CPU, a GPU and another party's machine draw the same numbers.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn.system.process import WHOLE_PROCESS

Key: TypeAlias = int | Tensor
Array: TypeAlias = NDArray[numpy.int64]
Number = TypeVar("Number", int, Tensor, Array)

NUM_FEISTEL_ROUNDS = 12  # at 6, domains of fewer than twenty rows are visibly uneven
STEP = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number


def _wrap(value: Number) -> Number:
    """Bring a Python integer back to signed 64 bits, as arrays do by themselves."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63) if isinstance(value, int) else value


def mix(value: Number) -> Number:
    """A bijection of 64 bits in which every input bit moves every output bit (the finalizer of splitmix64).

    The masks make the arithmetic right shift of signed numbers a logical one.
    """
    value = _wrap((value ^ ((value >> 30) & ((1 << 34) - 1))) * -4658895280553007687)
    value = _wrap((value ^ ((value >> 27) & ((1 << 37) - 1))) * -7723592293110705685)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def fold(key: Key, *parts: str | Key) -> Key:
    """A new key from a key and what the draw is for: `fold(seed, "batches", round, client)`."""
    for part in parts:
        if isinstance(part, str):
            part = hash_text(part)
        mixed = key ^ (mix(part + STEP) if isinstance(part, Tensor) else mix(_wrap(part + STEP)))
        key = mix(mixed)  # type: ignore[type-var]
    return key


def hash_text(text: str) -> int:
    """The number that a text stands for in a key, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def permutation_head(key: Key, size: int | Tensor, count: int) -> Tensor:
    """The first `count` places of a keyed permutation of `range(size)`; a leading shape of keys or sizes maps.

    A Feistel network over a grid of a x b >= size cells, a close to b; a value outside `range(size)` is sent through
    again until it lands inside, so any size gives an exact permutation. Places past `size` read 0.
    """
    device = key.device if isinstance(key, Tensor) else size.device if isinstance(size, Tensor) else None
    keys = torch.as_tensor(key, dtype=torch.int64, device=device)
    sizes = torch.as_tensor(size, dtype=torch.int64, device=device)
    heads: Tensor = permutation_head_operator(*torch.broadcast_tensors(keys, sizes), count)
    return heads


@torch.library.custom_op("pfedhn::permutation_head", mutates_args=(), device_types="cpu")
def permutation_head_operator(keys: Tensor, sizes: Tensor, count: int) -> Tensor:
    """The permutation as one opaque operator, so that a traced graph draws anew instead of keeping what it drew.

    On a CPU in NumPy: a few hundred operations on a few hundred numbers, where the cost is the call.
    """
    return torch.from_numpy(_permutation_head(keys.unsqueeze(-1).numpy(), sizes.unsqueeze(-1).numpy(), count))


@permutation_head_operator.register_fake
def _(keys: Tensor, sizes: Tensor, count: int) -> Tensor:
    return keys.new_empty((*keys.shape, count))


def _permutation_head(keys: Array, sizes: Array, count: int) -> Array:
    columns = grid_columns(sizes)
    rows = (sizes + columns - 1) // columns
    places = numpy.arange(count)
    values = feistel(keys, numpy.minimum(places, sizes - 1), columns, rows)
    while (outside := values >= sizes).any():
        values = numpy.where(outside, feistel(keys, values, columns, rows), values)
    return numpy.where(places < sizes, values, 0)


def grid_columns(sizes: Array) -> Array:
    """The smallest number whose square is at least `sizes`; the correction makes it exact whatever sqrt rounds to."""
    root = numpy.sqrt(sizes.astype(numpy.float64)).astype(numpy.int64)
    root -= root * root > sizes
    return root + (root * root < sizes)


def feistel(keys: Number, values: Number, columns: Number, rows: Number) -> Number:
    left, right = values // columns, values % columns
    for turn in range(NUM_FEISTEL_ROUNDS):
        if turn % 2 == 0:
            left = (left + _draw(keys, turn, right)) % rows
        else:
            right = (right + _draw(keys, turn, left)) % columns
    return left * columns + right


def _draw(keys: Number, turn: int, half: Number) -> Number:
    """31 random bits for one half of a Feistel value."""
    return (mix(keys ^ (half * STEP + ((turn + 1) << 40))) >> 33) & ((1 << 31) - 1)


def uniform(key: Key, count: int, device: torch.device | None = None) -> Tensor:
    """`count` numbers in [0, 1), float64."""
    keys = torch.as_tensor(key, dtype=torch.int64, device=device).unsqueeze(-1)
    places = torch.arange(1, count + 1, device=keys.device)
    bits = (mix(keys ^ mix(places * STEP)) >> 11) & ((1 << 53) - 1)
    return bits.to(torch.float64) / (1 << 53)


@torch.library.custom_op("pfedhn::uniform", mutates_args=())
def uniform_operator(keys: Tensor, number: int, count: int) -> Tensor:
    """`uniform` of the keys folded with a number, opaque: a compiler takes places for 32 bits, and keys need 64."""
    return uniform(fold(keys, number), count)


@uniform_operator.register_fake
def _(keys: Tensor, number: int, count: int) -> Tensor:
    return keys.new_empty((*keys.shape, count), dtype=torch.float64)


@uniform_operator.register_vmap
def _(info: Any, dims: tuple[int | None, ...], keys: Tensor, number: int, count: int) -> tuple[Tensor, int]:
    assert dims[0] is not None
    return uniform_operator(keys.movedim(dims[0], 0), number, count), 0


def normal(key: Key, count: int, device: torch.device | None = None) -> Tensor:
    """`count` standard normal numbers, float64 (Box-Muller; 1 - u keeps the logarithm away from 0)."""
    radius, angle = uniform(key, 2 * count, device).unflatten(-1, (2, count)).unbind(-2)
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)


def torch_generator(key: Key) -> torch.Generator:
    """A CPU generator for code that takes one."""
    return torch.Generator().manual_seed(_torch_seed(key))


@contextmanager
def seeded(key: Key | None, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed PyTorch's global generator for a block, for code that takes no generator, such as `nn.Linear(3, 4)`.

    All threads share that generator, so a block excludes every other one, and the compiler, which seeds it too.
    Afterwards the generators of the CPU and of the given device continue from their former state.

    Args:
        key: What the block draws from; None leaves the generator as it is, for a block whose draws do not matter.
        device: Where the block draws.
    """
    is_cuda = torch.device(device).type == "cuda"
    with WHOLE_PROCESS, torch.random.fork_rng([device] if is_cuda else []):
        if key is not None:
            torch.manual_seed(_torch_seed(key))
        yield


def _torch_seed(key: Key) -> int:
    return int(key) & ((1 << 63) - 1)


def numpy_generator(key: Key) -> numpy.random.Generator:
    return numpy.random.Generator(numpy.random.Philox(key=int(key) & ((1 << 64) - 1)))
