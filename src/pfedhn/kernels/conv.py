"""Convolution, bias, 2x2 max-pool and ReLU in one pass: Triton on a GPU, plain PyTorch elsewhere, same numbers.

Axes: [R]uns or clients, [B]atch, [H]eight, [W]idth, [C]hannels in, [O] channels out, [K] side of the square kernel.
Outside, `ConvBlock` looks like `nn.Conv2d`: images [B, C, H, W], weight [O, C, K, K]. Inside, images are
[R, B, H, W, C] and weights [R, K, K, C, O], both contiguous, so that what one step of a kernel needs lies together. The
weights get there by a permuted copy: a few tens of kilobytes that the compiler copies along with whatever made them,
while strided reads would be repeated by every program. `torch.vmap` makes [R] longer, nothing else; where something is
the same for all runs, its R is 1.

The three kernels are matrix products [rows, depth] x [depth, columns] whose operands are gathered on the way in:

    forward          rows: outputs; depth: the outputs' fields; columns: O, for each corner of the pooling window
    weight_gradient  rows: fields, then a row of ones, which gives the bias; depth: outputs; columns: as forward
    input_gradient   rows: 2x2 squares of input pixels; depth: O, window by window; columns: the square's 4 C numbers

The field of a pooled output is the (K + 1) x (K + 1) square of pixels that the four convolutions under it see. It is
read once for all four corners, though each corner uses only K K of it: reading costs more than multiplying by zero.

`forward` leaves one byte per output for the backward pass: the corner (0 to 3) its maximum came from, or 4 where the
ReLU cut it off. Both gradients read it beside the pooled gradient, so no unpooled map is ever written. Nothing is added
atomically: a weight gradient comes as partial sums over groups of pixels, and the same inputs give the same bits.
Sizes are compile-time constants, because integer division by a run-time size costs a factor of three; the batch size
is not, or each new one would compile anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedhn.kernels.launch import (
    Blocks,
    ConfigKey,
    ceil_divide,
    dot_precision,
    is_full,
    is_usable,
    launch,
    launch_blocks,
    operator,
    power_of_two,
    tile,
    tuned_blocks,
)
from pfedhn.kernels.runs import Gradient, fold_runs, sum_to_runs, unfold_runs

if TYPE_CHECKING:
    import triton.language as tl

CHANNELS_IN = (1, 3, 8, 16, 32, 64)
PADDED_CHANNELS = {3: 4}  # a pixel of four numbers is one 16-byte load, one of three is three loads
MAX_PADDING = {3: 1, 5: 2}  # by kernel side


def config_key(kind: str, x_shape: Sequence[int], out_shape: Sequence[int], kernel: int, precision: str) -> ConfigKey:
    """What block sizes were tuned for: kind, C, O, K, image side as a power of two, "one" or "many" runs, precision."""
    side = power_of_two(max(x_shape[2:4]))
    return kind, x_shape[4], out_shape[4], kernel, side, "many" if is_full(out_shape[0]) else "one", precision


def blocks_for(kind: str, x_shape: Sequence[int], out_shape: Sequence[int], kernel: int, precision: str) -> Blocks:
    key = config_key(kind, x_shape, out_shape, kernel, precision)
    return tuned_blocks(key) or default_blocks(key)


def default_blocks(key: ConfigKey) -> Blocks:
    """A guess for shapes nobody tuned: small tiles while one run alone has to fill the GPU."""
    kind, channels, out_channels, kernel, _, runs, _ = key
    many = runs == "many"
    if kind == "forward":
        return Blocks(128 if many else 64, 16, 32 if channels >= 32 else 16, warps=4, stages=2)
    if kind == "weight_gradient":
        length = (kernel + 1) ** 2 * channels + 1
        groups = max(2, min(8 if many else 32, 2**16 // (length * out_channels)))  # a megabyte of partial sums
        return Blocks(min(tile(length), 64), 16, 32, warps=4, stages=2, groups=groups)
    columns, depth = min(tile(4 * channels), 64 if many else 32), min(tile(out_channels), 32)
    return Blocks(64 if many else 32, columns, depth, warps=4, stages=2)


class ConvBlock(nn.Module):
    """A convolution with bias, an optional 2x2 max-pool and a ReLU, in one pass on a GPU.

    Its parameters have the names and the initial numbers of `nn.Conv2d`, so the two can be exchanged.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Side of the square kernel; its stride is 1.
        padding: Zeros added at each side of the input.
        pool: Whether to take the maximum of each 2x2 square of the output.

    Examples:
        >>> import torch
        >>> ConvBlock(3, 16, 5)(torch.randn(64, 3, 32, 32)).shape
        torch.Size([64, 16, 14, 14])
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, padding: int = 0, pool: bool = True
    ) -> None:
        super().__init__()
        twin = nn.Conv2d(in_channels, out_channels, kernel_size)
        assert twin.bias is not None
        self.weight, self.bias = twin.weight, twin.bias
        self.padding, self.pool = padding, pool

    def forward(self, x: Tensor) -> Tensor:
        return conv_block(x, self.weight, self.bias, self.padding, self.pool)

    def extra_repr(self) -> str:
        out_channels, in_channels, kernel, _ = self.weight.shape
        return f"{in_channels}, {out_channels}, kernel_size={kernel}, padding={self.padding}, pool={self.pool}"


def conv_block(x: Tensor, weight: Tensor, bias: Tensor, padding: int = 0, pool: bool = True) -> Tensor:
    """x [B, C, H, W], weight [O, C, K, K], bias [O] -> [B, O, H', W']; on a GPU a view of an NHWC result."""
    if not is_supported(x, weight, bias, padding, pool):
        return reference_conv_block(x, weight, bias, padding, pool)
    images, weights = x.permute(0, 2, 3, 1), weight.permute(2, 3, 1, 0)
    spare = PADDED_CHANNELS.get(x.shape[1], x.shape[1]) - x.shape[1]
    if spare:
        images, weights = functional.pad(images, (0, spare)), functional.pad(weights, (0, 0, 0, spare))
    out, _ = apply_forward(
        images.unsqueeze(0).contiguous(),
        weights.unsqueeze(0).contiguous(),
        bias.unsqueeze(0),
        padding,
        pool,
        dot_precision(),
    )
    return out.squeeze(0).permute(0, 3, 1, 2)


def reference_conv_block(x: Tensor, weight: Tensor, bias: Tensor, padding: int = 0, pool: bool = True) -> Tensor:
    out = functional.conv2d(x, weight, bias, padding=padding)
    # Pooling first: the same maximum, and the ReLU sees a quarter of the numbers.
    return functional.relu(functional.max_pool2d(out, 2) if pool else out)


def is_supported(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> bool:
    if not is_usable(x.device) or x.ndim != 4 or x.numel() == 0:
        return False
    batch, channels, height, width = x.shape
    out_channels, _, kernel, kernel_width = weight.shape
    sides = (output_size(height, kernel, padding, pool), output_size(width, kernel, padding, pool))
    return (
        x.dtype == weight.dtype == bias.dtype == torch.float32
        and x.device == weight.device == bias.device
        and channels in CHANNELS_IN
        and out_channels % 8 == 0
        and 8 <= out_channels <= 128
        and kernel == kernel_width
        and 0 <= padding <= MAX_PADDING.get(kernel, -1)
        and min(sides) > 0
        and batch * height * width * max(channels, out_channels) < 2**31  # offsets inside one run are 32 bits
    )


def output_size(size: int, kernel: int, padding: int, pool: bool) -> int:
    size = size + 2 * padding - kernel + 1
    return size // 2 if pool else size


def forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    argmax: tl.tensor,
    batch: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    out_channels: tl.constexpr,
    kernel: tl.constexpr,
    padding: tl.constexpr,
    pool: tl.constexpr,
    x_is_shared: tl.constexpr,
    weight_is_shared: tl.constexpr,
    bias_is_shared: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    corners: tl.constexpr = 4 if pool else 1
    stride: tl.constexpr = 2 if pool else 1
    side: tl.constexpr = kernel + stride - 1
    size: tl.constexpr = out_height * out_width
    length: tl.constexpr = side * side * channels
    tiles = tl.cdiv(batch * size, rows)
    run = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * rows
    if not x_is_shared:
        x += run * batch * (height * width * channels)
    if not weight_is_shared:
        weight += run * (kernel * kernel * channels * out_channels)
    if not bias_is_shared:
        bias += run * out_channels
    out += run * batch * (size * out_channels)
    argmax += run * batch * (size * out_channels)

    pixel = (first + tl.arange(0, rows))[:, None]
    is_pixel = pixel < batch * size
    top = pixel % size // out_width * stride - padding
    left = pixel % out_width * stride - padding
    field = pixel // size * (height * width * channels) + (top * width + left) * channels
    column = tl.arange(0, corners * columns)[None, :]
    corner = column // columns
    channel = tl.program_id(1) * columns + column % columns

    total = tl.zeros((rows, corners * columns), tl.float32)
    for start in range(0, length, depth):
        term = start + tl.arange(0, depth)[None, :]
        # Where the channels fill a step, it lies within one place of the field, and the arithmetic on it is scalar.
        place = start // channels if channels % depth == 0 else term // channels
        down = place // side
        right = place % side
        mask = is_pixel & (term < length)
        if padding > 0:
            mask &= (top + down >= 0) & (top + down < height) & (left + right >= 0) & (left + right < width)
        pixels = tl.load(x + field + ((down * width + right) * channels + term % channels), mask=mask, other=0.0)
        term = start + tl.arange(0, depth)[:, None]
        place = start // channels if channels % depth == 0 else term // channels
        down = place // side - corner // 2
        right = place % side - corner % 2
        mask = (term < length) & (channel < out_channels)
        mask &= (down >= 0) & (down < kernel) & (right >= 0) & (right < kernel)
        tap = ((down * kernel + right) * channels + term % channels) * out_channels
        weights = tl.load(weight + tap + channel, mask=mask, other=0.0)
        total = tl.dot(pixels, weights, total, input_precision=precision)

    if pool:
        best, where = tl.max(tl.reshape(total, (rows, 4, columns)), axis=1, return_indices=True)
    else:
        best = total
        where = tl.zeros((rows, columns), tl.int32)
    channel = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
    is_channel = channel < out_channels
    best += tl.load(bias + channel, mask=is_channel, other=0.0)
    is_cut = best <= 0  # false for NaN, which must come through
    pixel = (first + tl.arange(0, rows))[:, None]
    mask = (pixel < batch * size) & is_channel
    place = pixel * out_channels + channel
    tl.store(out + place, tl.where(is_cut, 0.0, best), mask=mask)
    tl.store(argmax + place, tl.where(is_cut, 4, where).to(tl.int8), mask=mask)


def weight_gradient_kernel(
    x: tl.tensor,
    gradient: tl.tensor,
    argmax: tl.tensor,
    sums: tl.tensor,
    batch: tl.tensor,
    steps: tl.tensor,
    groups: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    out_channels: tl.constexpr,
    kernel: tl.constexpr,
    padding: tl.constexpr,
    pool: tl.constexpr,
    x_is_shared: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    corners: tl.constexpr = 4 if pool else 1
    stride: tl.constexpr = 2 if pool else 1
    side: tl.constexpr = kernel + stride - 1
    size: tl.constexpr = out_height * out_width
    length: tl.constexpr = side * side * channels
    taps: tl.constexpr = kernel * kernel * channels
    run = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    if not x_is_shared:
        x += run * batch * (height * width * channels)
    gradient += run * batch * (size * out_channels)
    argmax += run * batch * (size * out_channels)
    sums += tl.program_id(0).to(tl.int64) * (corners * (taps + 1) * out_channels)

    row = tl.program_id(1) * rows + tl.arange(0, rows)[:, None]
    down = row // channels // side
    right = row // channels % side
    place = (down * width + right) * channels + row % channels
    ones = tl.where(row == length, 1.0, 0.0)
    channel = tl.program_id(2) * columns + tl.arange(0, columns)[None, :]

    total = tl.zeros((rows, corners * columns), tl.float32)
    for step in range(steps):
        pixel = (group * steps + step) * depth + tl.arange(0, depth)
        is_pixel = pixel < batch * size
        mask = is_pixel[:, None] & (channel < out_channels)
        value = tl.load(gradient + pixel[:, None] * out_channels + channel, mask=mask, other=0.0)
        if pool:  # [depth, corners, columns]: a gradient stands at the corner its maximum came from
            where = tl.load(argmax + pixel[:, None] * out_channels + channel, mask=mask, other=4)
            is_here = where[:, None, :] == tl.arange(0, 4)[None, :, None]
            upstream = tl.reshape(tl.where(is_here, value[:, None, :], 0.0), (depth, 4 * columns))
        else:
            where = tl.load(argmax + pixel[:, None] * out_channels + channel, mask=mask, other=4)
            upstream = tl.where(where == 0, value, 0.0)
        top = pixel % size // out_width * stride - padding
        left = pixel % out_width * stride - padding
        field = (pixel // size * (height * width * channels) + (top * width + left) * channels)[None, :]
        mask = is_pixel[None, :] & (row < length)
        if padding > 0:
            vertical = top[None, :] + down
            horizontal = left[None, :] + right
            mask &= (vertical >= 0) & (vertical < height) & (horizontal >= 0) & (horizontal < width)
        pixels = tl.load(x + field + place, mask=mask, other=ones)
        total = tl.dot(pixels, upstream, total, input_precision=precision)

    # A corner's convolution sees the field from its own place on: what lies outside is another corner's.
    column = tl.arange(0, corners * columns)[None, :]
    corner = column // columns
    channel = tl.program_id(2) * columns + column % columns
    tap_down = down - corner // 2
    tap_right = right - corner % 2
    tap = (tap_down * kernel + tap_right) * channels + row % channels
    is_tap = (row < length) & (tap_down >= 0) & (tap_down < kernel) & (tap_right >= 0) & (tap_right < kernel)
    tap = tl.where(row == length, taps, tap)
    mask = (is_tap | (row == length)) & (channel < out_channels)
    tl.store(sums + (corner * (taps + 1) + tap) * out_channels + channel, total, mask=mask)


def input_gradient_kernel(
    gradient: tl.tensor,
    argmax: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    batch: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    out_channels: tl.constexpr,
    kernel: tl.constexpr,
    padding: tl.constexpr,
    pool: tl.constexpr,
    weight_is_shared: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    # Squares are counted in padded coordinates: there each one touches (K + 1) / 2 pooling windows each way, whatever
    # the padding, and the first one with a real pixel in it is number padding // stride.
    corners: tl.constexpr = 4 if pool else 1
    stride: tl.constexpr = 2 if pool else 1
    reach: tl.constexpr = (kernel - 1) // stride + 1
    squares_down: tl.constexpr = (height + padding - 1) // stride - padding // stride + 1
    squares_right: tl.constexpr = (width + padding - 1) // stride - padding // stride + 1
    squares: tl.constexpr = squares_down * squares_right
    size: tl.constexpr = out_height * out_width
    tiles = tl.cdiv(batch * squares, rows)
    run = (tl.program_id(0) // tiles).to(tl.int64)
    gradient += run * batch * (size * out_channels)
    argmax += run * batch * (size * out_channels)
    out += run * batch * (height * width * channels)
    if not weight_is_shared:
        weight += run * (kernel * kernel * channels * out_channels)

    square = tl.program_id(0) % tiles * rows + tl.arange(0, rows)[:, None]
    image = square // squares
    is_square = image < batch
    down = square % squares // squares_right + padding // stride
    right = square % squares_right + padding // stride
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    pixel_down = column // channels // 2
    pixel_right = column // channels % 2
    is_column = column < corners * channels

    total = tl.zeros((rows, columns), tl.float32)
    slices: tl.constexpr = (out_channels + depth - 1) // depth
    for step in range(reach * reach * slices):  # one loop: of nested ones Triton overlaps the inner's steps only
        back = step // slices // reach
        aside = step // slices % reach
        start = step % slices * depth
        vertical = down - back
        horizontal = right - aside
        is_window = is_square & (vertical >= 0) & (vertical < out_height) & (horizontal >= 0) & (horizontal < out_width)
        place = (image * size + vertical * out_width + horizontal) * out_channels
        channel = start + tl.arange(0, depth)[None, :]
        mask = is_window & (channel < out_channels)
        value = tl.load(gradient + place + channel, mask=mask, other=0.0)
        where = tl.load(argmax + place + channel, mask=mask, other=4)
        channel = start + tl.arange(0, depth)[:, None]
        for corner in tl.static_range(corners):
            tap_down = pixel_down + (back * stride - corner // 2)
            tap_right = pixel_right + (aside * stride - corner % 2)
            mask = is_column & (tap_down >= 0) & (tap_down < kernel) & (tap_right >= 0) & (tap_right < kernel)
            tap = ((tap_down * kernel + tap_right) * channels + column % channels) * out_channels
            weights = tl.load(weight + tap + channel, mask=mask & (channel < out_channels), other=0.0)
            total = tl.dot(tl.where(where == corner, value, 0.0), weights, total, input_precision=precision)

    vertical = down * stride + pixel_down - padding
    horizontal = right * stride + pixel_right - padding
    mask = is_square & is_column & (vertical >= 0) & (vertical < height) & (horizontal >= 0) & (horizontal < width)
    tl.store(out + ((image * height + vertical) * width + horizontal) * channels + column % channels, total, mask=mask)


def constants(
    x_shape: Sequence[int], out_shape: Sequence[int], kernel: int, padding: int, pool: bool, precision: str
) -> dict[str, Any]:
    """The arguments that all three kernels take, from shapes [R, B, height, width, channels]."""
    _, batch, height, width, channels = x_shape
    _, _, out_height, out_width, out_channels = out_shape
    return {
        "batch": batch,
        "height": height,
        "width": width,
        "channels": channels,
        "out_height": out_height,
        "out_width": out_width,
        "out_channels": out_channels,
        "kernel": kernel,
        "padding": padding,
        "pool": pool,
        "precision": precision,
    }


@operator("pfedhn::conv_block")
def conv_block_op(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool, precision: str
) -> tuple[Tensor, Tensor]:
    """x [R, B, H, W, C], weight [R, K, K, C, O], bias [R, O] -> output [R, B, H', W', O] and its corners, a byte each.

    Any R may be 1 where others are not.
    """
    _, batch, height, width, _ = x.shape
    runs = max(x.shape[0], weight.shape[0], bias.shape[0])
    kernel, out_channels = weight.shape[1], weight.shape[4]
    out_height, out_width = (output_size(side, kernel, padding, pool) for side in (height, width))
    out = x.new_empty((runs, batch, out_height, out_width, out_channels))
    argmax = torch.empty_like(out, dtype=torch.int8)
    blocks = blocks_for("forward", x.shape, out.shape, kernel, precision)
    launch_blocks(
        forward_kernel,
        (
            runs * ceil_divide(batch * out_height * out_width, blocks.rows),
            ceil_divide(out_channels, blocks.columns),
        ),
        (x.contiguous(), weight.contiguous(), bias.contiguous(), out, argmax),
        blocks,
        x_is_shared=x.shape[0] < runs,
        weight_is_shared=weight.shape[0] < runs,
        bias_is_shared=bias.shape[0] < runs,
        **constants(x.shape, out.shape, kernel, padding, pool, precision),
    )
    return out, argmax


MAX_SUM_ROWS, SUM_COLUMNS = 128, 32


def sum_groups_kernel(
    parts: tl.tensor,
    out: tl.tensor,
    groups: tl.tensor,
    size: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """[R, groups, size] -> [R, size]."""
    run = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    row = tl.arange(0, rows)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for start in range(0, groups, rows):
        inside = ((start + row) < groups)[:, None] & (column < size)[None, :]
        total += tl.load(parts + (run * groups + start + row)[:, None] * size + column[None, :], mask=inside, other=0.0)
    tl.store(out + run * size + column, tl.sum(total, axis=0), mask=column < size)


@operator("pfedhn::conv_block_weight_gradient")
def weight_gradient_op(
    x: Tensor, gradient: Tensor, argmax: Tensor, kernel: int, padding: int, pool: bool, groups: int, precision: str
) -> Tensor:
    """The weight's gradient [R, K K C + 1, O]; the last row is the bias's.

    The partial sums are summed in here: the compiler's own kernel for that took 8.7 us on an H200, PyTorch's 4.
    """
    runs, batch, out_height, out_width, out_channels = gradient.shape
    parts = groups * (4 if pool else 1)  # corners apart: they meet where the groups do
    side = kernel + 1 if pool else kernel
    sums = x.new_empty(runs, parts, kernel * kernel * x.shape[4] + 1, out_channels)
    blocks = blocks_for("weight_gradient", x.shape, gradient.shape, kernel, precision)
    launch_blocks(
        weight_gradient_kernel,
        (
            runs * groups,
            ceil_divide(side * side * x.shape[4] + 1, blocks.rows),
            ceil_divide(out_channels, blocks.columns),
        ),
        (x.contiguous(), gradient.contiguous(), argmax.contiguous(), sums),
        blocks,
        steps=ceil_divide(ceil_divide(batch * out_height * out_width, blocks.depth), groups),
        groups=groups,
        x_is_shared=x.shape[0] < runs,
        **constants(x.shape, gradient.shape, kernel, padding, pool, precision),
    )
    if parts == 1:
        return sums.squeeze(1)
    total = sums.new_empty(runs, *sums.shape[2:])
    size = total.shape[1] * total.shape[2]
    launch(
        sum_groups_kernel,
        (runs, ceil_divide(size, SUM_COLUMNS)),
        (sums, total),
        groups=parts,
        size=size,
        rows=min(power_of_two(parts), MAX_SUM_ROWS),
        columns=SUM_COLUMNS,
        num_warps=4,
    )
    return total


@operator("pfedhn::conv_block_input_gradient")
def input_gradient_op(
    gradient: Tensor, argmax: Tensor, weight: Tensor, height: int, width: int, padding: int, pool: bool, precision: str
) -> Tensor:
    runs, batch = gradient.shape[:2]
    kernel, channels = weight.shape[1], weight.shape[3]
    out = gradient.new_empty(runs, batch, height, width, channels)
    blocks = blocks_for("input_gradient", out.shape, gradient.shape, kernel, precision)
    stride = 2 if pool else 1
    down, right = ((side + padding - 1) // stride - padding // stride + 1 for side in (height, width))
    launch_blocks(
        input_gradient_kernel,
        (
            runs * ceil_divide(batch * down * right, blocks.rows),
            ceil_divide(stride * stride * channels, blocks.columns),
        ),
        (gradient.contiguous(), argmax.contiguous(), weight.contiguous(), out),
        blocks,
        weight_is_shared=weight.shape[0] < runs,
        **constants(out.shape, gradient.shape, kernel, padding, pool, precision),
    )
    return out


# An autograd.Function over plain operators, because torch.func refuses operators with their own autograd formula.
# Each `vmap` rule applies its Function again rather than the operator, so that transforms nest in any order.
class Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool, precision: str
    ) -> tuple[Tensor, Tensor]:
        out, argmax = conv_block_op(x, weight, bias, padding, pool, precision)
        return out, argmax

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, ctx.padding, ctx.pool, ctx.precision = inputs
        ctx.bias_runs = bias.shape[0]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        out, argmax = apply_forward(*fold_runs(info.batch_size, dims[:3], inputs[:3]), *inputs[3:])
        return unfold_runs(info.batch_size, out, argmax), (0, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x, weight, argmax = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        how = (ctx.padding, ctx.pool, ctx.precision)
        if gradient is not None:
            gradient = gradient.contiguous()
            if ctx.needs_input_grad[0]:
                of_x = apply_input_gradient(gradient, argmax, weight, x.shape[2], x.shape[3], *how)
                of_x = sum_to_runs(of_x, x.shape[0])
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                of_weight, of_bias = apply_weight_gradient(x, gradient, argmax, weight.shape[1], *how)
                of_weight, of_bias = sum_to_runs(of_weight, weight.shape[0]), sum_to_runs(of_bias, ctx.bias_runs)
        return of_x, of_weight, of_bias, None, None, None


class WeightGradient(Gradient):
    @staticmethod
    def forward(
        x: Tensor, gradient: Tensor, argmax: Tensor, kernel: int, padding: int, pool: bool, precision: str
    ) -> tuple[Tensor, Tensor]:
        gradient, argmax = on_all_runs(gradient, argmax, x)
        # Chosen here, below every vmap: only now is the number of runs known.
        blocks = blocks_for("weight_gradient", x.shape, gradient.shape, kernel, precision)
        groups = num_groups(blocks, gradient.shape)
        sums = weight_gradient_op(x, gradient, argmax, kernel, padding, pool, groups, precision)
        return sums[:, :-1].unflatten(1, (kernel, kernel, x.shape[4])), sums[:, -1]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        of_weight, of_bias = apply_weight_gradient(*fold_runs(info.batch_size, dims[:3], inputs[:3]), *inputs[3:])
        return unfold_runs(info.batch_size, of_weight, of_bias), (0, 0)


class InputGradient(Gradient):
    @staticmethod
    def forward(
        gradient: Tensor,
        argmax: Tensor,
        weight: Tensor,
        height: int,
        width: int,
        padding: int,
        pool: bool,
        precision: str,
    ) -> Tensor:
        gradient, argmax = on_all_runs(gradient, argmax, weight)
        of_x: Tensor = input_gradient_op(gradient, argmax, weight, height, width, padding, pool, precision)
        return of_x

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        of_x = apply_input_gradient(*fold_runs(info.batch_size, dims[:3], inputs[:3]), *inputs[3:])
        return unfold_runs(info.batch_size, of_x)[0], 0


# mypy knows nothing of `apply`.
apply_forward: Callable[..., tuple[Tensor, Tensor]] = Forward.apply
apply_weight_gradient: Callable[..., tuple[Tensor, Tensor]] = WeightGradient.apply
apply_input_gradient: Callable[..., Tensor] = InputGradient.apply


def on_all_runs(gradient: Tensor, argmax: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    runs = max(gradient.shape[0], argmax.shape[0], other.shape[0])
    return gradient.expand(runs, *gradient.shape[1:]), argmax.expand(runs, *argmax.shape[1:])


def num_groups(blocks: Blocks, out_shape: Sequence[int]) -> int:
    """How many partial sums to make: about `blocks.groups`, none of them empty."""
    _, batch, out_height, out_width, _ = out_shape
    tiles = ceil_divide(batch * out_height * out_width, blocks.depth)
    return ceil_divide(tiles, ceil_divide(tiles, blocks.groups))
