"""Ordinary layers on the package's kernels: `nn.Conv2d`, ReLU and max-pool, `nn.Linear` and ReLU, found and replaced.

The network keeps its layers, their names and their weights. Only its forward pass is written anew, from a trace of the
person's own: where a convolution is followed by a ReLU and perhaps a 2x2 max-pool, in either order, or a linear layer
by a ReLU, one block stands in their place. A forward pass that a trace cannot show (one that asks what the numbers are,
or does something else while training) stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pfedhn.kernels.conv import ConvBlock, conv_block
from pfedhn.kernels.linear import Linear, linear_block
from pfedhn.model import UNFUSED, Factory

RELU = (torch.relu, torch.relu_, functional.relu, functional.relu_, "relu", "relu_")
MAX_POOL = (functional.max_pool2d, torch.max_pool2d)

_classes: dict[Any, type[nn.Module]] = {}  # by network and code, so that equal networks are of one class


@dataclass(frozen=True)
class Fused:
    """Makes what a factory makes, with its layers on the package's kernels; equal for equal factories."""

    factory: Factory

    def __call__(self) -> nn.Module:
        return fuse(self.factory())


def fuse(module: nn.Module) -> nn.Module:
    """The module with a forward pass on the package's blocks; the module as it is where nothing can be replaced."""
    codes = []
    for is_training in (True, False):
        module.train(is_training)
        try:
            graph = _with_blocks(_Tracer().trace(module), module)
        except Exception:  # of a person's own code, which was not written for a trace
            graph = None
        codes.append(None if graph is None else graph.python_code("self"))
    module.train()
    code = codes[0]
    if code is None or codes[1] is None or code.src != codes[1].src:  # nothing to do, or it is tested otherwise
        return module
    key = (type(module), code.src)
    if key not in _classes:
        names = dict(code.globals)
        exec(code.src, names)  # noqa: S102 - which torch.fx wrote; the names of a GraphModule may clash
        members = {"forward": names["forward"], UNFUSED: type(module)}
        _classes[key] = type(type(module).__name__, (type(module),), members)
    module.__class__ = _classes[key]
    return module


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, ConvBlock | Linear) or super().is_leaf_module(module, name)


def _with_blocks(graph: fx.Graph, module: nn.Module) -> fx.Graph | None:
    """The graph with blocks in the place of layers; None if there are none."""
    has_blocks = False
    for node in list(graph.nodes):
        layer = _layer(node, module)
        if not isinstance(layer, nn.Conv2d | nn.Linear) or type(layer) not in (nn.Conv2d, nn.Linear):
            continue  # not what a person derived from them, which may do more
        if len(node.args) != 1 or node.kwargs or layer.bias is None:
            continue
        following, pools = _following(node, module)
        relus = len(following) - len(pools)
        if isinstance(layer, nn.Conv2d):
            if not _is_simple(layer) or relus != 1:
                continue
            block: Callable[..., Tensor] = conv_block
            options: tuple[Any, ...] = (layer.padding[0], bool(pools))
        elif pools:
            continue
        else:
            block, options = linear_block, (relus == 1,)
        with graph.inserting_before(node):
            weight, bias = (graph.get_attr(f"{node.target}.{name}") for name in ("weight", "bias"))
            made = graph.call_function(block, (node.args[0], weight, bias, *options))
        (following[-1] if following else node).replace_all_uses_with(made)
        for dead in (*reversed(following), node):
            graph.erase_node(dead)
        has_blocks = True
    if not has_blocks:
        return None
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # what a block returns may lie otherwise in memory
    graph.lint()
    return graph


def _layer(node: fx.Node, module: nn.Module) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_simple(layer: nn.Conv2d) -> bool:
    """Whether a convolution is one of those that a block computes."""
    square = layer.kernel_size[0] == layer.kernel_size[1] and layer.padding_mode == "zeros" and layer.groups == 1
    padded = isinstance(layer.padding, tuple) and layer.padding[0] == layer.padding[1]
    return square and padded and layer.stride == (1, 1) and layer.dilation == (1, 1)


def _following(node: fx.Node, module: nn.Module) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ReLU and the max-pool that alone use a result, one of each at most; and which of them are pools."""
    found: list[fx.Node] = []
    pools: list[fx.Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        is_pool = _is_pool(node, module)
        if not is_pool and not _is_relu(node, module):
            break
        if (is_pool and pools) or (not is_pool and len(found) > len(pools)):
            break
        found.append(node)
        pools += [node] * is_pool
    if pools and len(found) == 1:  # a max-pool without a ReLU is no part of a block
        return [], []
    return found, pools


def _is_relu(node: fx.Node, module: nn.Module) -> bool:
    return isinstance(_layer(node, module), nn.ReLU) or (
        node.op in ("call_function", "call_method") and node.target in RELU and set(node.kwargs) <= {"inplace"}
    )


def _is_pool(node: fx.Node, module: nn.Module) -> bool:
    layer = _layer(node, module)
    if isinstance(layer, nn.MaxPool2d):
        found: tuple[Any, ...] = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return tuple(map(_side, found)) == (2, 2, 0, 1) and not (layer.ceil_mode or layer.return_indices)
    if node.op != "call_function" or node.target not in MAX_POOL:
        return False
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    kernel, stride = _side(given.get("kernel_size")), given.get("stride")
    others = _side(given.get("padding", 0)), _side(given.get("dilation", 1))
    is_plain = others == (0, 1) and not (given.get("ceil_mode") or given.get("return_indices"))
    return kernel == 2 and (stride is None or _side(stride) == 2) and is_plain


def _side(value: Any) -> Any:
    """2 for 2 and for (2, 2)."""
    if isinstance(value, tuple | list) and len(set(value)) == 1:
        return value[0]
    return value
