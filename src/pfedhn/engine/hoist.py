"""What a local step computes from its minibatch alone is taken out of it, and computed for all steps at once.

A step of LeNet pads its images to four channels and counts its examples: two kernels of 24, fifty times a round. Axes:
[K] steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

MAX_GROWTH = 2  # what is computed for a step may be this many times as large as its minibatch, since K are in memory
COPIES = (torch.ops.aten.clone.default,)


class Hoisted(NamedTuple):
    """A step in two parts."""

    ahead: GraphModule  # from the leaves of one batch and the constants to a list
    step: GraphModule  # as the whole step, with that list between batch and constants
    differs: list[bool]  # from step to step; what comes of constants alone does not


def hoist(graph: GraphModule, num_carry: int, num_batch: int) -> Hoisted | None:
    """Take out of a step what does not depend on its carry; None if that is nothing, or if the step writes in place.

    What the compiler computes inside of other kernels (views, pointwise operations) stays where it is used.

    Args:
        graph: A step as plain operators. Its inputs are the leaves of the carry, of the batch, and the constants.
        num_carry: How many leaves the carry has.
        num_batch: How many leaves the batch has.
    """
    nodes = list(graph.graph.nodes)
    if any(_writes(node) for node in nodes):  # it may write to what would be computed ahead, or before it is read
        return None
    inputs = [node for node in nodes if node.op == "placeholder"]
    batch = inputs[num_carry : num_carry + num_batch]
    most = MAX_GROWTH * sum(_bytes(node) for node in batch)
    fixed = set(inputs[num_carry:])
    known: dict[str, Node] = {}
    for node in nodes:
        if _is_pure(node, most) and all(source in fixed for source in node.all_input_nodes):
            fixed.add(node)
            like = known.setdefault(str((node.target, node.args, node.kwargs)), node)
            if like is not node:  # every BatchNorm counts the examples
                node.replace_all_uses_with(like)
    found = _frontier(nodes, fixed)
    if not found:
        return None
    ahead = _part(graph, inputs[num_carry:], found, nodes)
    step = _part(graph, [*inputs[: num_carry + num_batch], *found, *inputs[num_carry + num_batch :]], None, nodes)
    return Hoisted(ahead, step, [bool(_origins(node) & set(batch)) for node in found])


def for_all_steps(parts: Hoisted, axes: Sequence[int], stacks: Sequence[Tensor], constants: Sequence[Tensor]) -> Any:
    """What the steps take besides their batches: [K, ...] where it differs.

    Args:
        parts: The step.
        axes: Of the steps, in each stack.
        stacks: The leaves of all batches.
        constants: As the step takes them.
    """
    mapped = torch.vmap(
        parts.ahead.forward,
        in_dims=(*axes, *(None for _ in constants)),
        out_dims=[0 if differs else None for differs in parts.differs],  # type: ignore[arg-type]
    )
    return mapped(*stacks, *constants)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_pure(node: Node, most: int) -> bool:
    """Whether an operator may run at another time, with a leading axis: no kernel of our own, nothing drawn."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in target.tags
        and isinstance(node.meta.get("val"), Tensor)
        and (target.is_view or _bytes(node) <= most)
    )


def _frontier(nodes: Sequence[Node], fixed: set[Node]) -> list[Node]:
    """What is worth computing ahead among what the rest of a step uses, in the order of the graph."""
    found: set[Node] = set()
    seen: set[Node] = set()
    waiting = [source for node in nodes if node not in fixed for source in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in seen or node not in fixed or node.op == "placeholder":
            continue
        seen.add(node)
        if _is_worth_it(node):
            found.add(node)
        else:
            waiting += node.all_input_nodes
    return [node for node in nodes if node in found]


def _is_worth_it(node: Node) -> bool:
    target: Any = node.target
    is_fused = target.is_view or (torch.Tag.pointwise in target.tags and target not in COPIES)
    return not is_fused and bool(_origins(node))


def _origins(node: Node) -> set[Node]:
    """The inputs of the graph that a node is computed from."""
    found: set[Node] = set()
    waiting = [node]
    seen: set[Node] = set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "placeholder":
            found.add(one)
        waiting += one.all_input_nodes
    return found


def _part(
    whole: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node] | None, nodes: Sequence[Node]
) -> GraphModule:
    """The part of a graph that leads from some of its nodes to others, or to its own output."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        is_given = node in copies or node.op == "placeholder" or (node.op == "output" and outputs is not None)
        if is_given or not all(source in copies for source in node.all_input_nodes):
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if outputs is not None:
        graph.output([copies[node] for node in outputs])
    part = GraphModule(whole, graph)
    part.graph.eliminate_dead_code()
    part.recompile()
    return part


def _bytes(node: Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()
