"""The head of a keyed permutation on a GPU: minibatches and cohorts are drawn without waiting for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfedhn.kernels.launch import ceil_divide, launch, power_of_two
from pfedhn.keys import NUM_FEISTEL_ROUNDS, permutation_head_operator

if TYPE_CHECKING:
    import triton.language as tl


def permutation_head_kernel(
    keys: tl.tensor,
    sizes: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    turns: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """`keys._permutation_head`, to the bit. The two halves of a value stay below 2^31, so their sums fit 32 bits."""
    key = tl.load(keys + tl.program_id(0))
    size = tl.load(sizes + tl.program_id(0))
    root = tl.sqrt(size.to(tl.float64)).to(tl.int64)
    root -= (root * root > size).to(tl.int64)
    root += (root * root < size).to(tl.int64)
    grid_columns = root.to(tl.uint32)
    grid_rows = ((size + root - 1) // root).to(tl.uint32)

    place = tl.program_id(1) * columns + tl.arange(0, columns)
    value = tl.minimum(place.to(tl.int64), size - 1)
    is_outside = place >= 0
    while tl.max(is_outside.to(tl.int32), axis=0) > 0:
        left = (value // root).to(tl.uint32)
        right = (value % root).to(tl.uint32)
        for turn in tl.static_range(turns):
            half = right if turn % 2 == 0 else left
            bits = key ^ (half.to(tl.int64) * -7046029254386353131 + ((turn + 1) << 40))
            bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
            bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
            bits = bits ^ ((bits >> 31) & 0x1FFFFFFFF)
            draw = ((bits >> 33) & 0x7FFFFFFF).to(tl.uint32)
            if turn % 2 == 0:
                left = (left + draw) % grid_rows
            else:
                right = (right + draw) % grid_columns
        value = tl.where(is_outside, left.to(tl.int64) * root + right.to(tl.int64), value)
        is_outside = value >= size
    value = tl.where(place < size, value, 0)
    tl.store(out + tl.program_id(0).to(tl.int64) * count + place, value, mask=place < count)


@permutation_head_operator.register_kernel("cuda")
def launch_permutation_head(key: Tensor, size: Tensor, count: int) -> Tensor:
    """`keys.permutation_head` without waiting for the host: a while loop on the device. key, size: int64."""
    keys, sizes = (t.contiguous() for t in torch.broadcast_tensors(key, size))
    out: Tensor = keys.new_empty((*keys.shape, count))
    if out.numel():
        columns = min(power_of_two(count), 128)
        grid = (keys.numel(), ceil_divide(count, columns))
        launch(
            permutation_head_kernel,
            grid,
            (keys, sizes, out),
            count=count,
            turns=NUM_FEISTEL_ROUNDS,
            columns=columns,
            num_warps=max(1, columns // 32),
        )
    return out
