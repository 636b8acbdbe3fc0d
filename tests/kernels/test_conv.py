"""The convolution block against plain PyTorch; its kernels on a GPU where there is one, else in Triton's interpreter.

The kernels are fed small integers: every sum is then exact in float32 (and in tf32), so results must be equal, not
close, and pooling windows with several equal maxima and outputs of exactly zero come up all the time.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import KERNEL_DEVICE, ON_GPU, integers, needs_gpu, needs_triton
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from pfedhn.kernels import conv as kernels
from pfedhn.kernels import launch


def with_gradients(block: Callable[..., Tensor], tensors: tuple[Tensor, ...], *how: Any) -> list[Tensor]:
    """The block's output, and the gradients of x, weight and bias along fixed integers."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = block(*leaves, *how)
    direction = torch.arange(out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape) % 5 - 2
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)]


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("side", [9, 12])
def test_reference_is_conv_relu_pool(side: int, pool: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 5, padding=1).double()
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    out = functional.relu(conv(x))
    expected = functional.max_pool2d(out, 2) if pool else out
    assert torch.equal(kernels.reference_conv_block(x, conv.weight, conv.bias, 1, pool), expected)
    assert torch.equal(kernels.conv_block(x, conv.weight, conv.bias, 1, pool), expected)


def test_module_is_interchangeable_with_conv2d() -> None:
    torch.manual_seed(3)
    conv = nn.Conv2d(3, 16, 5, padding=2)
    state_of_generator = torch.get_rng_state()
    torch.manual_seed(3)
    block = kernels.ConvBlock(3, 16, 5, padding=2)
    assert torch.equal(torch.get_rng_state(), state_of_generator)
    assert list(block.state_dict()) == list(conv.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), conv.parameters(), strict=True))
    conv.load_state_dict(kernels.ConvBlock(3, 16, 5).state_dict())
    block.load_state_dict(conv.state_dict())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(block(x), functional.relu(functional.max_pool2d(conv(x), 2)))


def test_shapes_the_kernels_do_not_know_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)

    def is_supported(
        channels: int = 3,
        out_channels: int = 16,
        kernel: int = 5,
        padding: int = 0,
        side: int = 8,
        pool: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> bool:
        x = torch.empty(1, channels, side, side, dtype=dtype)
        weight = torch.empty(out_channels, channels, kernel, kernel, dtype=dtype)
        return kernels.is_supported(x, weight, torch.empty(out_channels, dtype=dtype), padding, pool)

    for channels, out_channels in itertools.product((1, 3, 8, 16, 32, 64), (8, 24, 64, 128)):
        assert is_supported(channels, out_channels)
    assert all(is_supported(kernel=5, padding=padding) for padding in (0, 1, 2))
    assert all(is_supported(kernel=3, padding=padding) for padding in (0, 1))
    assert is_supported(side=5, pool=False)
    assert not is_supported(side=5, pool=True)
    assert not is_supported(side=4, pool=False)
    assert not is_supported(channels=2)
    assert not is_supported(out_channels=12)
    assert not is_supported(out_channels=136)
    assert not is_supported(kernel=7)
    assert not is_supported(kernel=5, padding=3)
    assert not is_supported(kernel=3, padding=2)
    assert not is_supported(dtype=torch.float64)


def test_block_sizes_are_what_triton_takes() -> None:
    kinds = ("forward", "weight_gradient", "input_gradient")
    sizes = ((1, 4, 8, 16, 32, 64), range(8, 129, 8), (3, 5), (4, 32))
    keys_of_all = list(itertools.product(kinds, *sizes, ("one", "many"), ("tf32", "tf32x3")))
    tuned = [blocks for key in keys_of_all if (blocks := launch.tuned_blocks(key)) is not None]
    assert len(tuned) > 1
    for blocks in [*launch.CONFIGS.values(), *tuned, *map(kernels.default_blocks, keys_of_all)]:
        assert all(size >= 16 for size in blocks[:3])
        assert all(size == launch.power_of_two(size) for size in blocks[:4])
        assert blocks.stages >= 1
        assert blocks.groups >= 1


# C, O, K, padding, height, width, pool: each kernel and padding, each class of channels, odd sides, pooling or not.
SHAPES = [
    (3, 16, 5, 0, 10, 10, True),
    (3, 8, 5, 1, 7, 8, True),
    (3, 32, 5, 2, 5, 6, True),
    (3, 16, 3, 0, 7, 6, False),
    (1, 16, 3, 1, 7, 9, True),
    (1, 8, 5, 0, 6, 7, False),
    (8, 16, 5, 0, 8, 9, True),
    (8, 24, 5, 2, 4, 5, False),
    (16, 32, 5, 0, 8, 7, True),
    (16, 32, 3, 1, 5, 6, True),
    (16, 40, 3, 0, 5, 4, False),
    (16, 8, 5, 1, 6, 5, True),
    (32, 64, 3, 1, 5, 5, True),
    (32, 16, 5, 2, 3, 4, True),
    (64, 128, 3, 1, 3, 3, False),
    (64, 16, 5, 0, 6, 6, True),
]


@needs_triton
@pytest.mark.parametrize(("channels", "out_channels", "kernel", "padding", "height", "width", "pool"), SHAPES)
def test_block_on_triton(
    channels: int, out_channels: int, kernel: int, padding: int, height: int, width: int, pool: bool
) -> None:
    torch.manual_seed(0)
    x = integers(3, channels, height, width)
    tensors = (x, integers(out_channels, channels, kernel, kernel), integers(out_channels))
    assert kernels.is_supported(*tensors, padding, pool)
    results = with_gradients(kernels.conv_block, tensors, padding, pool)
    doubles = tuple(t.double() for t in tensors)
    for result, expected in zip(
        results, with_gradients(kernels.reference_conv_block, doubles, padding, pool), strict=True
    ):
        assert torch.equal(result, expected.float())
    assert results[0].is_contiguous(memory_format=torch.channels_last)


@needs_triton
def test_block_on_triton_of_any_strides() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3), torch.randn(16)[::2]
    x, weight, bias = x.to(KERNEL_DEVICE), weight.to(KERNEL_DEVICE), bias.to(KERNEL_DEVICE)
    expected = with_gradients(kernels.conv_block, (x, weight, bias), 1, True)
    strided = torch.zeros(2, 6, 6, 9, device=KERNEL_DEVICE)[..., 1:].permute(0, 3, 1, 2).copy_(x)
    turned = weight.permute(1, 3, 2, 0).contiguous().permute(3, 0, 2, 1)
    results = with_gradients(kernels.conv_block, (strided, turned, bias), 1, True)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@needs_triton
def test_nan_comes_through_on_triton() -> None:
    x, bias = integers(1, 1, 4, 4), integers(8)
    weight = torch.full((8, 1, 3, 3), torch.nan, device=KERNEL_DEVICE)
    pool = ON_GPU  # the interpreter's maximum of nothing but NaN is an error
    assert kernels.conv_block(x, weight, bias, 1, pool).isnan().all()
    assert with_gradients(kernels.conv_block, (x, weight, bias), 1, pool)[1].isnan().all()


@needs_triton
def test_second_derivative_on_triton_is_refused() -> None:
    x, weight, bias = integers(1, 3, 6, 6), integers(8, 3, 5, 5), integers(8)

    def gradient_norm(weight: Tensor) -> Tensor:
        return grad(lambda w: kernels.conv_block(x, w, bias).square().sum())(weight).square().sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        grad(gradient_norm)(weight)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = kernels.ConvBlock(3, 8, 5)
        self.conv2 = kernels.ConvBlock(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv2(self.conv1(x)).flatten(1))


def transforms() -> dict[str, tuple[Callable[..., Any], str]]:
    """Ways to call `loss(params, x, y)`, and which of its arguments carry the axis of runs."""
    network = Network().to(KERNEL_DEVICE)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(network, params, (x,)), y)

    def autograd(params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        return dict(zip(params, torch.autograd.grad(loss(leaves, x, y), leaves.values()), strict=True))

    def of_all(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return vmap(loss, in_dims=(None, 0, 0))(params, x, y).sum()

    return {
        "autograd": (autograd, ""),
        "grad": (grad(loss), ""),
        "grad of x": (grad(loss, argnums=1), ""),
        "vmap": (vmap(loss), "params x y"),
        "vmap(grad)": (vmap(grad(loss)), "params x y"),
        "vmap(grad), one model": (vmap(grad(loss), in_dims=(None, 0, 0)), "x y"),
        "vmap(grad), one batch": (vmap(grad(loss), in_dims=(0, None, None)), "params"),
        "vmap(grad), last axis": (
            lambda params, x, y: vmap(grad(loss), in_dims=(0, 4, 0))(params, x.movedim(0, 4), y),
            "params x y",
        ),
        "grad(vmap), one model": (grad(of_all), "x y"),
        "grad(vmap) of the one batch": (
            grad(lambda params, x, y: vmap(loss, in_dims=(0, None, None))(params, x, y).sum(), argnums=1),
            "params",
        ),
        "vmap(vmap(grad))": (
            lambda params, x, y: vmap(vmap(grad(loss), in_dims=(0, None, None)), in_dims=(None, 0, 0))(params, x, y),
            "params x y",
        ),
    }


TRANSFORMS = transforms()


def arguments_for(batched: str, num_runs: int = 2) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(1)
    params = {
        name: (torch.randn(num_runs, *value.shape) * 0.3).to(KERNEL_DEVICE)
        for name, value in Network().named_parameters()
    }
    x, y = torch.randn(num_runs, 2, 3, 8, 8).to(KERNEL_DEVICE), torch.randint(0, 3, (num_runs, 2)).to(KERNEL_DEVICE)
    return (
        params if "params" in batched else {name: value[0] for name, value in params.items()},
        x if "x" in batched else x[0],
        y if "y" in batched else y[0],
    )


def by_reference(function: Callable[..., Any], *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_supported", lambda *_: False)
        return function(*arguments)


def calls(graph: torch.fx.GraphModule) -> dict[str, int]:
    return Counter(str(node.target).split(".")[1] for node in graph.graph.nodes if "pfedhn" in str(node.target))


@needs_triton
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_on_triton(name: str) -> None:
    function, batched = TRANSFORMS[name]
    arguments = arguments_for(batched)
    expected = by_reference(function, *arguments)
    torch.testing.assert_close(function(*arguments), expected, rtol=1e-4, atol=1e-5)
    graph = make_fx(function)(*arguments)
    torch.testing.assert_close(graph(*arguments), expected, rtol=1e-4, atol=1e-5)
    counts = calls(graph)
    assert counts["conv_block"] == 2
    # The first block's images have no gradient unless it is asked for; nor have weights that are fixed.
    of_images, of_weights = (2, 0) if " of " in name else (0, 0) if name == "vmap" else (1, 2)
    assert counts["conv_block_input_gradient"] == of_images
    assert counts["conv_block_weight_gradient"] == of_weights


@pytest.mark.filterwarnings("default")  # the compiler warns of itself
@needs_triton
@pytest.mark.parametrize("name", ["grad", "vmap(grad)"])
def test_compiled_trace_on_triton(name: str) -> None:
    function, batched = TRANSFORMS[name]
    arguments = arguments_for(batched)
    graph = make_fx(function)(*arguments)
    # On a CPU inductor would need a C++ compiler, which users may not have.
    compiled = torch.compile(graph, backend="inductor" if ON_GPU else "aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*arguments), by_reference(function, *arguments), rtol=1e-4, atol=1e-5)


@needs_triton
def test_many_runs_on_triton() -> None:
    torch.manual_seed(0)
    runs = launch.MANY_RUNS
    tensors = (integers(runs, 2, 8, 4, 4), integers(runs, 16, 8, 3, 3), integers(runs, 16))

    def along_ones(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return grad(lambda *inputs: kernels.conv_block(*inputs).sum(), argnums=(0, 1, 2))(x, weight, bias)

    results = vmap(along_ones)(*tensors)
    for run in range(runs):
        expected = by_reference(along_ones, *(t[run].double() for t in tensors))
        assert all(torch.equal(a[run], b.float()) for a, b in zip(results, expected, strict=True))


@needs_gpu
def test_tf32_on_gpu() -> None:
    torch.manual_seed(0)
    tensors = (integers(8, 16, 14, 14), integers(32, 16, 5, 5), integers(32))
    expected = with_gradients(kernels.reference_conv_block, tuple(t.double() for t in tensors))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        results = with_gradients(kernels.conv_block, tensors)
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(a, b.float()) for a, b in zip(results, expected, strict=True))


@needs_gpu
def test_captured_graph_on_gpu() -> None:
    function, batched = TRANSFORMS["vmap(grad)"]
    arguments = arguments_for(batched, num_runs=16)
    expected = function(*arguments)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = function(*arguments)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(results[name], expected[name]) for name in expected)
