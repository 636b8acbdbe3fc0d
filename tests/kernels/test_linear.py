"""The linear layer's kernels against plain PyTorch; on a GPU where there is one, else in Triton's interpreter.

Small integers as in test_conv.py: every sum is exact, so results must be equal.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import KERNEL_DEVICE, integers, needs_triton
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from pfedhn.kernels import launch, linear


def with_gradients(block: Callable[..., Tensor], tensors: tuple[Tensor, ...], relu: bool) -> list[Tensor]:
    """The layer's output, and the gradients of x, weight and bias along fixed integers."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = block(*leaves, relu)
    direction = torch.arange(out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape) % 5 - 2
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)]


def test_layer_is_interchangeable_with_nn_linear() -> None:
    torch.manual_seed(3)
    twin = nn.Linear(7, 5)
    torch.manual_seed(3)
    layer = linear.Linear(7, 5, relu=True)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), twin.parameters(), strict=True))
    assert list(layer.state_dict()) == list(twin.state_dict())
    x = torch.randn(3, 7)
    torch.testing.assert_close(layer(x), twin(x).relu())
    layer.relu = False
    torch.testing.assert_close(layer(x), twin(x))


def test_what_the_kernels_do_not_know_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_usable", lambda device: True)
    weight, bias = torch.empty(5, 7), torch.empty(5)
    assert linear.is_supported(torch.empty(64, 7), weight, bias)
    assert not linear.is_supported(torch.empty(linear.MAX_BATCH + 1, 7), weight, bias)
    assert not linear.is_supported(torch.empty(0, 7), weight, bias)
    assert not linear.is_supported(torch.empty(2, 3, 7), weight, bias)
    assert not linear.is_supported(torch.empty(64, 7).double(), weight.double(), bias.double())


@needs_triton
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("batch", "inputs", "outputs"), [(1, 1, 1), (5, 33, 10), (64, 84, 10), (18, 70, 130), (33, 150, 17)]
)
def test_layer_on_triton(batch: int, inputs: int, outputs: int, relu: bool) -> None:
    torch.manual_seed(0)
    tensors = (integers(batch, inputs), integers(outputs, inputs), integers(outputs))
    assert linear.is_supported(*tensors)
    doubles = tuple(t.double() for t in tensors)
    expected = with_gradients(linear.reference_linear_block, doubles, relu)
    for result, value in zip(with_gradients(linear.linear_block, tensors, relu), expected, strict=True):
        assert torch.equal(result, value.float())


@needs_triton
def test_layer_on_triton_of_any_strides() -> None:
    torch.manual_seed(0)
    x, weight, bias = integers(20, 9).T, integers(20, 12).T, integers(24)[::2]
    expected = with_gradients(linear.reference_linear_block, (x, weight, bias), True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(with_gradients(linear.linear_block, (x, weight, bias), True), expected, strict=True)
    )


@needs_triton
def test_nan_comes_through_a_layer_on_triton() -> None:
    weight = torch.full((4, 6), torch.nan, device=KERNEL_DEVICE)
    results = with_gradients(linear.linear_block, (integers(2, 6), weight, integers(4)), True)
    assert results[0].isnan().all()
    assert results[1].isnan().all()


@needs_triton
def test_second_derivative_of_a_layer_on_triton_is_refused() -> None:
    x, weight, bias = integers(3, 6), integers(4, 6), integers(4)

    def gradient_norm(weight: Tensor) -> Tensor:
        return grad(lambda w: linear.linear_block(x, w, bias).square().sum())(weight).square().sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        grad(gradient_norm)(weight)


@needs_triton
@pytest.mark.parametrize("runs", [2, launch.MANY_RUNS])
@pytest.mark.parametrize("dims", [(0, 0, 0), (None, 0, 0), (0, None, None), (1, 0, 0)])
def test_runs_of_a_layer_on_triton(runs: int, dims: tuple[int | None, ...]) -> None:
    torch.manual_seed(0)
    shapes = [(5, 20), (12, 20), (12,)]
    tensors = [
        integers(*shape) if dim is None else integers(runs, *shape).movedim(0, dim)
        for shape, dim in zip(shapes, dims, strict=True)
    ]

    def gradients(*inputs: Tensor) -> Any:
        return grad(lambda *t: linear.linear_block(*t, True).sum(), argnums=(0, 1, 2))(*inputs)

    results = vmap(gradients, in_dims=dims)(*tensors)
    for run in range(runs):
        one = [t if dim is None else t.select(dim, run) for t, dim in zip(tensors, dims, strict=True)]
        expected = with_ones(*one)
        assert all(torch.equal(a[run], b) for a, b in zip(results, expected, strict=True))


def with_ones(*inputs: Tensor) -> Any:
    return grad(lambda *t: linear.reference_linear_block(*t, True).sum(), argnums=(0, 1, 2))(*inputs)


@needs_triton
def test_a_step_of_layers_takes_two_operators_each_on_triton() -> None:
    layers = nn.Sequential(linear.Linear(6, 9, relu=True), linear.Linear(9, 4)).to(KERNEL_DEVICE)
    x = integers(3, 6)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers, params, (x,)).square().sum()

    params = {name: value.detach() for name, value in layers.named_parameters()}
    graph = make_fx(grad(loss))(params)
    counts = Counter(str(node.target) for node in graph.graph.nodes if "pfedhn" in str(node.target))
    assert counts == {"pfedhn.linear_block.default": 2, "pfedhn.linear_block_backward.default": 2}
    of_x = [node.args[5] for node in graph.graph.nodes if "linear_block_backward" in str(node.target)]
    assert sorted(of_x) == [False, True], "the data's gradient is computed"
    torch.testing.assert_close(graph(params), grad(loss)(params))
