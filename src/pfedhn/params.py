"""Weights as plain dictionaries, and the little arithmetic that federated learning does on them.

A leading [C]lients axis on every tensor makes a stack of models. `Tree` is any nesting of dictionaries, tuples and
named tuples with tensors at the leaves: the form of every memory in the package.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

PLACEHOLDER = "_pfedhn_placeholder"
Params = dict[str, Tensor]
Tree = TypeVar("Tree")


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Params:
    return {name: left[name] - right[name] for name in left}


def pick(params: Mapping[str, Tensor], names: Collection[str]) -> Params:
    return {name: value for name, value in params.items() if name in names}


def zeros_like(params: Mapping[str, Tensor]) -> Params:
    return {name: torch.zeros_like(value) for name, value in params.items()}


def pack(params: Mapping[str, Tensor]) -> tuple[Tensor, Callable[[Tensor], Params]]:
    """All weights in one vector, and the way back."""
    shapes = {name: value.shape for name, value in params.items()}
    sizes = [value.numel() for value in params.values()]

    def unpack(vector: Tensor) -> Params:
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), vector.split(sizes), strict=True)}

    return torch.cat([value.reshape(-1) for value in params.values()]), unpack


def weighted(stacked: Mapping[str, Tensor], weights: Tensor) -> Params:
    """Each of [C] times its weight."""
    return {name: torch.einsum("c,c...->c...", weights.to(value), value) for name, value in stacked.items()}


def weighted_sum(stacked: Mapping[str, Tensor], weights: Tensor) -> Params:
    """Sum over the [C] axis, each client counted with its weight."""
    return {name: torch.tensordot(weights.to(value.dtype), value, dims=1) for name, value in stacked.items()}


def mixtures(stacked: Mapping[str, Tensor], shares: Tensor) -> Params:
    """[I, ...]: for each row of shares [I, C], the sum over the [C] axis by that row.

    In float64, since a GPU's tf32 would round the weights themselves.
    """
    return {
        name: (shares.double() @ value.reshape(len(value), -1).double())
        .to(value)
        .reshape(len(shares), *value.shape[1:])
        for name, value in stacked.items()
    }


def clip(gradient: Mapping[str, Tensor], limit: float | None, names: Collection[str] | None = None) -> Params:
    """Scale the named part of a gradient (all of it by default) down to a global norm of `limit`.

    The 1e-6 is that of `torch.nn.utils.clip_grad_norm_`, which the published code uses.
    """
    chosen = gradient if names is None else pick(gradient, names)
    if limit is None or not chosen:
        return dict(gradient)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in chosen.values()]))
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return {name: value * factor if name in chosen else value for name, value in gradient.items()}


def pull_back(function: Callable[..., Any], *inputs: Any, cotangent: Any) -> tuple[Any, ...]:
    """The vector-Jacobian product of `function` at `inputs` along `cotangent`: one gradient per input."""
    product = torch.func.vjp(function, *inputs)[1]
    result: tuple[Any, ...] = product(cotangent)
    return result


def take(tree: Tree, index: Any) -> Tree:
    """The entries at `index` of the leading axis, at every leaf."""
    result: Tree = pytree.tree_map(lambda leaf: leaf[index], tree)
    return result


def put(tree: Tree, index: Any, values: Tree) -> None:
    """Write `values` at `index` of the leading axis, in place: a pure copy of a million rows costs 41 ms a round."""
    for leaf, value in zip(pytree.tree_leaves(tree), pytree.tree_leaves(values), strict=True):
        leaf[index] = value


def stack(trees: Sequence[Tree]) -> Tree:
    """Trees of one form as one tree with a leading axis; of a single tree, a view."""
    if len(trees) == 1:
        result: Tree = pytree.tree_map(lambda leaf: leaf.unsqueeze(0), trees[0])
        return result
    result = pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)
    return result


def placeholder_like(tree: Tree) -> Tree:
    """Zeros in the form of a tree that take no memory, to be read only: for parts that nobody needs."""
    result: Tree = pytree.tree_map(_placeholder, tree)
    return result


def _placeholder(leaf: Tensor) -> Tensor:
    zeros = torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)
    setattr(zeros, PLACEHOLDER, True)  # one cannot tell by its strides: a person's own numbers may be expanded, too
    return zeros


def _is_placeholder(leaf: Tensor) -> bool:
    return hasattr(leaf, PLACEHOLDER)


def copy(tree: Tree, into: Tree | None = None, on_host: bool = False) -> Tree:
    """A copy at every leaf; `into`, an older copy that nobody needs, lends its memory where the shapes are the same.

    With `on_host`, what is on a GPU is copied to the host's memory, in the order of the GPU's stream: wait for the
    stream before you read it. What `placeholder_like` made stays as it is.
    """
    leaves, spec = pytree.tree_flatten(tree)
    if into is not None:
        olds = pytree.tree_leaves(into)
        if [old.shape for old in olds] == [leaf.shape for leaf in leaves]:
            for old, leaf in zip(olds, leaves, strict=True):
                if not (on_host and _is_placeholder(leaf)):
                    old.copy_(leaf, non_blocking=on_host)
            return into
    copies = [_on_host(leaf) if on_host else leaf.clone() for leaf in leaves]
    result: Tree = pytree.tree_unflatten(copies, spec)
    return result


def _on_host(leaf: Tensor) -> Tensor:
    if not leaf.is_cuda:
        return leaf if _is_placeholder(leaf) else leaf.clone()
    return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf, non_blocking=True)


def in_dtype(tree: Tree, dtype: torch.dtype) -> Tree:
    """The same tree with its floating-point numbers in another type."""
    result: Tree = pytree.tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)
    return result


def num_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(tree))
