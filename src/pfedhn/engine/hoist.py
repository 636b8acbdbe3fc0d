"""What a local step computes from its minibatch alone is taken out of it, and computed for all steps at once.

A step of LeNet pads its images to four channels and counts its examples: two kernels of 23, fifty times a round. Axes:
[K] steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

aten = torch.ops.aten

# Few on purpose: with an axis more, many operators round, promote types or lay out their results otherwise.
WORTH = {aten.constant_pad_nd.default, aten.sum.default, aten.sum.dim_IntList, aten.clone.default}
THROUGH = {
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
ALIGNMENT = 16
MAX_GROWTH = 2  # what is computed for a step may be this many times as large as its minibatch, since K are in memory


class Hoisted(NamedTuple):
    """A step in two parts."""

    ahead: GraphModule  # from the leaves of one batch to a list
    step: GraphModule  # as the whole step, with that list between batch and constants
    like: list[Tensor]  # what the list was when the step was traced, without numbers


def hoist(graph: GraphModule, num_carry: int, num_batch: int) -> Hoisted | None:
    """Take the operations that depend on the batch alone out of a step; None if none of them can be moved.

    Args:
        graph: A step as plain operators. Its inputs are the leaves of the carry, of the batch, and the constants.
        num_carry: How many leaves the carry has.
        num_batch: How many leaves the batch has.
    """
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    batch = inputs[num_carry : num_carry + num_batch]
    fixed = set(batch)
    for node in nodes:
        if node.all_input_nodes and fixed.issuperset(node.all_input_nodes) and _can_move(node):
            fixed.add(node)
    used = _frontier(nodes, fixed)
    unlike: dict[str, Node] = {}  # every BatchNorm counts the examples
    same = {node: unlike.setdefault(str((node.target, node.args, node.kwargs)), node) for node in used}
    found = list(unlike.values())
    is_large = sum(map(_bytes, found)) > MAX_GROWTH * sum(map(_bytes, batch))
    # The caller may write to what is returned.
    if not found or is_large or any(map(_writes, nodes)) or any(map(_is_returned, used)):
        return None
    ahead = _part(graph, batch, [node for node in nodes if node in fixed], found)
    constants = inputs[num_carry + num_batch :]
    step = _part(graph, [*inputs[:num_carry], *batch, *found, *constants], nodes, same=same)
    return Hoisted(ahead, step, [node.meta["val"] for node in found])


def for_all_steps(parts: Hoisted, axes: Sequence[int], stacks: Sequence[Tensor]) -> list[Tensor]:
    """[K, ...]: what the steps take besides their batches.

    Args:
        parts: The step.
        axes: Of the steps, in each stack.
        stacks: The leaves of all batches.
    """
    return [_aligned(value) for value in torch.vmap(parts.ahead.forward, in_dims=tuple(axes))(*stacks)]


def _aligned(value: Tensor) -> Tensor:
    """[K, ...] with every step's part at a multiple of 16 bytes: the compiler copies inputs that are not."""
    size = value[0].numel()
    spare = -size % max(1, ALIGNMENT // value.element_size())
    return functional.pad(value.reshape(-1, size), (0, spare))[:, :size].reshape(value.shape) if spare else value


def fits(parts: Hoisted, made: Sequence[Tensor]) -> bool:
    """Whether every step gets what it was traced with: its views hold for this layout only."""
    pairs = zip(made, parts.like, strict=True)
    return all(
        (one[0].shape, one[0].stride(), one.dtype) == (like.shape, like.stride(), like.dtype) for one, like in pairs
    )


def _can_move(node: Node) -> bool:
    if node.target is aten.clone.default:
        return node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target in WORTH or node.target in THROUGH


def _writes(node: Node) -> bool:
    """Whether it writes in place, perhaps to what would be computed ahead."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _frontier(nodes: Sequence[Node], fixed: set[Node]) -> list[Node]:
    """What the rest of a step uses of what can be moved, directly or through views, in the order of the graph."""
    found: set[Node] = set()
    waiting = [source for node in nodes if node not in fixed for source in node.all_input_nodes if source in fixed]
    while waiting:
        node = waiting.pop()
        if node.target in WORTH:
            found.add(node)
        else:
            waiting += node.all_input_nodes
    return [node for node in nodes if node in found]


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" or (user.target in THROUGH and _is_returned(user)) for user in node.users)


def _part(
    whole: GraphModule,
    inputs: Sequence[Node],
    nodes: Sequence[Node],
    outputs: Sequence[Node] | None = None,
    same: dict[Node, Node] | None = None,
) -> GraphModule:
    """Make a graph of some nodes of another.

    Args:
        whole: The graph.
        inputs: Nodes whose values are given.
        nodes: The others, in their order.
        outputs: Nodes whose values are returned; what the graph returns by default.
        same: By node, the one that is taken in its place.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if same and node in same:
            copies[node] = copies[same[node]]
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if outputs is not None:
        graph.output([copies[node] for node in outputs])
    part = GraphModule(whole, graph)
    part.graph.eliminate_dead_code()
    part.recompile()
    return part


def _bytes(node: Node) -> int:
    value: Any = node.meta["val"]
    return int(value.numel() * value.element_size())
