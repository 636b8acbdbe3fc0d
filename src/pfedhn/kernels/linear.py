"""A linear layer with an optional ReLU for minibatches: Triton on a GPU, plain PyTorch elsewhere, same numbers.

A local step is a chain of small products (64 rows), and each costs a launch whatever its size: PyTorch takes four or
five of them per layer (product, sum of its parts, ReLU, two gradients, the bias's), this one takes two.

Axes: [R]uns or clients, [B]atch, [I]nputs, [O]utputs. `torch.vmap` makes [R] longer, nothing else; where something is
the same for all runs, its R is 1. The kernels are matrix products [rows, depth] x [depth, columns]:

    forward            rows: B; columns: O; depth: I
    backward, of x     rows: B; columns: I; depth: O
    backward, weight   rows: O; columns: I; depth: B; programs of the first column also sum the bias's gradient

Nothing is added atomically: the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
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
    launch_blocks,
    operator,
    power_of_two,
    tile,
    tuned_blocks,
)
from pfedhn.kernels.runs import Gradient, fold_runs, sum_to_runs, unfold_runs

if TYPE_CHECKING:
    import triton.language as tl

MAX_BATCH = 256  # larger products fill the GPU, and the library's are better there


class Linear(nn.Linear):
    """A linear layer with an optional ReLU behind it, in one pass on a GPU.

    Its parameters have the names and the initial numbers of `nn.Linear`, so the two can be exchanged.

    Args:
        in_features: Numbers that go in.
        out_features: Numbers that come out.
        relu: Whether a ReLU follows.

    Examples:
        >>> import torch
        >>> Linear(84, 10, relu=True)(torch.randn(64, 84)).shape
        torch.Size([64, 10])
    """

    def __init__(self, in_features: int, out_features: int, relu: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        return linear_block(x, self.weight, self.bias, self.relu)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, relu={self.relu}"


def linear_block(x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """x [B, I], weight [O, I], bias [O] -> [B, O]."""
    if not is_supported(x, weight, bias):
        return reference_linear_block(x, weight, bias, relu)
    out = apply_forward(x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0), relu, dot_precision())
    return out.squeeze(0)


def reference_linear_block(x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    out = functional.linear(x, weight, bias)
    return functional.relu(out) if relu else out


def is_supported(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    return (
        is_usable(x.device)
        and x.ndim == 2
        and 0 < x.shape[0] <= MAX_BATCH
        and x.shape[1] > 0
        and x.dtype == weight.dtype == bias.dtype == torch.float32
        and x.device == weight.device == bias.device
    )


def config_key(kind: str, runs: int, batch: int, inputs: int, outputs: int, precision: str) -> ConfigKey:
    """What block sizes were tuned for, as `conv.config_key` has it: a linear layer is a 1x1 convolution."""
    return kind, inputs, outputs, 1, power_of_two(batch), "many" if is_full(runs) else "one", precision


def blocks_for(kind: str, runs: int, batch: int, inputs: int, outputs: int, precision: str) -> Blocks:
    """The tuned block sizes, or a guess: one run fills few of a GPU's processors, so its tiles are small."""
    key = config_key(kind, runs, batch, inputs, outputs, precision)
    return tuned_blocks(key) or default_blocks(key)


MAX_BACKWARD_ROWS = 32
"""From 64 on, Hopper GPUs multiply asynchronously, and Triton (3.6 to 3.9) copies the next tile of a factor that is
also summed, as the gradient is for the bias, over the one that the product still reads.
tests/kernels/test_races.py looks."""


def default_blocks(key: ConfigKey) -> Blocks:
    kind, inputs, outputs, _, batch, runs, _ = key
    many = runs == "many"
    if kind == "linear_forward":
        if many:
            return Blocks(min(tile(batch), 64), min(tile(outputs), 32), min(tile(inputs), 32), warps=4, stages=3)
        return Blocks(16, 16 if outputs <= 512 else 64, min(tile(inputs), 128), warps=4, stages=3)
    if many:
        rows = min(tile(min(batch, outputs)), MAX_BACKWARD_ROWS)
        return Blocks(rows, min(tile(inputs), 64), 32, warps=4, stages=2)
    return Blocks(MAX_BACKWARD_ROWS, min(tile(inputs), 32), 64, warps=4, stages=2)


def linear_forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    batch: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    relu: tl.constexpr,
    x_is_shared: tl.constexpr,
    weight_is_shared: tl.constexpr,
    bias_is_shared: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    tiles = tl.cdiv(batch, rows)
    run = (tl.program_id(0) // tiles).to(tl.int64)
    if not x_is_shared:
        x += run * batch * inputs
    if not weight_is_shared:
        weight += run * (outputs * inputs)
    if not bias_is_shared:
        bias += run * outputs
    out += run * batch * outputs

    row = (tl.program_id(0) % tiles * rows + tl.arange(0, rows))[:, None]
    column = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, inputs, depth):
        term = start + tl.arange(0, depth)
        across = term[None, :]
        left = tl.load(x + row * inputs + across, mask=(row < batch) & (across < inputs), other=0.0)
        down = term[:, None]
        right = tl.load(weight + column * inputs + down, mask=(column < outputs) & (down < inputs), other=0.0)
        total = tl.dot(left, right, total, input_precision=precision)
    total += tl.load(bias + column, mask=column < outputs, other=0.0)
    if relu:
        total = tl.where(total <= 0, 0.0, total)  # not a maximum: NaN must come through
    tl.store(out + row * outputs + column, total, mask=(row < batch) & (column < outputs))


def linear_backward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    gradient: tl.tensor,
    out: tl.tensor,
    of_x: tl.tensor,
    of_weight: tl.tensor,
    of_bias: tl.tensor,
    batch: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    relu: tl.constexpr,
    with_x: tl.constexpr,
    x_is_shared: tl.constexpr,
    weight_is_shared: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    run = tl.program_id(1).to(tl.int64)
    if not x_is_shared:
        x += run * batch * inputs
    if not weight_is_shared:
        weight += run * (outputs * inputs)
    gradient += run * batch * outputs
    out += run * batch * outputs

    across: tl.constexpr = (inputs + columns - 1) // columns
    place = tl.program_id(0)
    column = (place % across * columns + tl.arange(0, columns))[None, :]
    tiles_of_x = 0
    if with_x:
        tiles_of_x = tl.cdiv(batch, rows)
    number = place // across
    total = tl.zeros((rows, columns), tl.float32)
    if number < tiles_of_x:
        row = (number * rows + tl.arange(0, rows))[:, None]
        for start in range(0, outputs, depth):
            term = (start + tl.arange(0, depth))[None, :]
            mask = (row < batch) & (term < outputs)
            upstream = tl.load(gradient + row * outputs + term, mask=mask, other=0.0)
            if relu:
                upstream = tl.where(tl.load(out + row * outputs + term, mask=mask, other=0.0) <= 0, 0.0, upstream)
            term = (start + tl.arange(0, depth))[:, None]
            other = tl.load(weight + term * inputs + column, mask=(term < outputs) & (column < inputs), other=0.0)
            total = tl.dot(upstream, other, total, input_precision=precision)
        of_x += run * batch * inputs
        tl.store(of_x + row * inputs + column, total, mask=(row < batch) & (column < inputs))
    else:
        row = ((number - tiles_of_x) * rows + tl.arange(0, rows))[:, None]
        sums = tl.zeros((rows,), tl.float32)
        for start in range(0, batch, depth):
            term = (start + tl.arange(0, depth))[None, :]
            mask = (row < outputs) & (term < batch)
            upstream = tl.load(gradient + term * outputs + row, mask=mask, other=0.0)
            if relu:
                upstream = tl.where(tl.load(out + term * outputs + row, mask=mask, other=0.0) <= 0, 0.0, upstream)
            sums += tl.sum(upstream, axis=1)
            term = (start + tl.arange(0, depth))[:, None]
            other = tl.load(x + term * inputs + column, mask=(term < batch) & (column < inputs), other=0.0)
            total = tl.dot(upstream, other, total, input_precision=precision)
        of_weight += run * (outputs * inputs)
        tl.store(of_weight + row * inputs + column, total, mask=(row < outputs) & (column < inputs))
        if place % across == 0:
            line = (number - tiles_of_x) * rows + tl.arange(0, rows)
            tl.store(of_bias + run * outputs + line, sums, mask=line < outputs)


@operator("pfedhn::linear_block")
def linear_block_op(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, precision: str) -> Tensor:
    """x [R, B, I], weight [R, O, I], bias [R, O] -> [R, B, O]. Any R may be 1 where others are not."""
    runs = max(x.shape[0], weight.shape[0], bias.shape[0])
    batch, outputs = x.shape[1], weight.shape[1]
    out = x.new_empty((runs, batch, outputs))
    blocks = blocks_for("linear_forward", runs, batch, x.shape[2], outputs, precision)
    launch_blocks(
        linear_forward_kernel,
        (runs * ceil_divide(batch, blocks.rows), ceil_divide(outputs, blocks.columns)),
        (x.contiguous(), weight.contiguous(), bias.contiguous(), out),
        blocks,
        batch=batch,
        inputs=x.shape[2],
        outputs=outputs,
        relu=relu,
        x_is_shared=x.shape[0] < runs,
        weight_is_shared=weight.shape[0] < runs,
        bias_is_shared=bias.shape[0] < runs,
        precision=precision,
    )
    return out


@operator("pfedhn::linear_block_backward")
def linear_backward_op(
    x: Tensor, weight: Tensor, gradient: Tensor, out: Tensor, relu: bool, with_x: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x [R, B, I] (empty without `with_x`), of the weight [R, O, I] and of the bias [R, O]."""
    runs, batch, outputs = gradient.shape
    inputs = x.shape[2]
    of_x = x.new_empty((runs, batch, inputs) if with_x else (runs, 0))
    of_weight, of_bias = x.new_empty((runs, outputs, inputs)), x.new_empty((runs, outputs))
    blocks = blocks_for("linear_backward", runs, batch, inputs, outputs, precision)
    tiles = ceil_divide(outputs, blocks.rows) + (ceil_divide(batch, blocks.rows) if with_x else 0)
    launch_blocks(
        linear_backward_kernel,
        (tiles * ceil_divide(inputs, blocks.columns), runs),
        (x.contiguous(), weight.contiguous(), gradient.contiguous(), out.contiguous(), of_x, of_weight, of_bias),
        blocks,
        batch=batch,
        inputs=inputs,
        outputs=outputs,
        relu=relu,
        with_x=with_x,
        x_is_shared=x.shape[0] < runs,
        weight_is_shared=weight.shape[0] < runs,
        precision=precision,
    )
    return of_x, of_weight, of_bias


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, precision: str) -> Tensor:
        out: Tensor = linear_block_op(x, weight, bias, relu, precision)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.relu, ctx.precision = inputs
        ctx.bias_runs = bias.shape[0]
        ctx.save_for_backward(x, weight, output)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        out = apply_forward(*fold_runs(info.batch_size, dims[:3], inputs[:3]), *inputs[3:])
        return unfold_runs(info.batch_size, out)[0], 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        with_x = ctx.needs_input_grad[0]
        of_x, of_weight, of_bias = apply_backward(x, weight, gradient, out, ctx.relu, with_x, ctx.precision)
        return (
            sum_to_runs(of_x, x.shape[0]) if with_x else None,
            sum_to_runs(of_weight, weight.shape[0]),
            sum_to_runs(of_bias, ctx.bias_runs),
            None,
            None,
        )


class Backward(Gradient):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, gradient: Tensor, out: Tensor, relu: bool, with_x: bool, precision: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        runs = max(t.shape[0] for t in (x, weight, gradient, out))
        gradient, out = (t.expand(runs, *t.shape[1:]) for t in (gradient, out))
        of_x, of_weight, of_bias = linear_backward_op(x, weight, gradient, out, relu, with_x, precision)
        return of_x, of_weight, of_bias

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        results = apply_backward(*fold_runs(info.batch_size, dims[:4], inputs[:4]), *inputs[4:])
        return unfold_runs(info.batch_size, *results), (0, 0, 0)


# mypy knows nothing of `apply`.
apply_forward: Callable[..., Tensor] = Forward.apply
apply_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = Backward.apply
