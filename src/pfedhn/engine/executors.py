"""From a function of one client to a cohort: `loop` is the reference, every other executor must agree with it.

Axes: [C]lients of a cohort, [K] steps.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pfedhn.params import copy, stack, take
from pfedhn.sgd import Step, python_loop, scanning

logger = logging.getLogger("pfedhn")

Function: TypeAlias = Callable[..., Any]
Mapper: TypeAlias = Callable[[Function], Function]
"""Turns a function of one client into a function of stacks: every argument and result gains a leading [C] axis."""

Compile: TypeAlias = Callable[[GraphModule, Sequence[Tensor]], Function]


def one_by_one(function: Function) -> Function:
    def mapped(*stacks: Any) -> Any:
        num_clients = pytree.tree_leaves(stacks)[0].shape[0]
        return stack([function(*take(stacks, client)) for client in range(num_clients)])

    return mapped


def together(function: Function) -> Function:
    def mapped(*stacks: Any) -> Any:
        return torch.vmap(function)(*stacks)

    return mapped


def distinct(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves, a tensor that stands twice copied: a trace would take it for one input."""
    result: list[Tensor] = []
    for leaf in leaves:
        stands_before = any(leaf is other for other in result)
        result.append(leaf.clone() if stands_before else leaf)
    return result


def run_as_traced(graph: GraphModule, arguments: Sequence[Tensor]) -> Function:
    return graph.forward


@dataclass
class Traced:
    """A function over trees of tensors, traced into plain operators at its first call.

    writes: whether the function writes to its arguments; tracing runs it, so it is then traced on copies of them.
    """

    function: Function
    compile: Compile = run_as_traced
    writes: bool = False
    ready: dict[Any, tuple[Function, Any]] = field(default_factory=dict)
    has_constants: bool = False  # tensors that the function brought along: its graph serves nobody else

    def __call__(self, *arguments: Any) -> Any:
        leaves, spec = pytree.tree_flatten(arguments)
        key = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self.ready:
            results: list[Any] = []

            def flat(*values: Tensor) -> list[Tensor]:
                outputs, output_spec = pytree.tree_flatten(self.function(*pytree.tree_unflatten(values, spec)))
                results.append(output_spec)
                return outputs

            graph = make_fx(flat)(*(copy(leaves) if self.writes else distinct(leaves)))
            graph.graph.eliminate_dead_code()
            graph.recompile()
            self.has_constants |= has_constants(graph)
            self.ready[key] = (self.compile(graph, leaves), results[-1])
        compiled, output_spec = self.ready[key]
        return pytree.tree_unflatten(compiled(*leaves), output_spec)


def has_constants(graph: GraphModule) -> bool:
    return any(node.op == "get_attr" for node in graph.graph.nodes)


@dataclass
class TracedScan:
    """Runs the steps from a graph of plain operators, traced at the first call: no autograd, no Python of the module.

    One instance serves one function of one architecture, whose scans it tells apart by their order.
    """

    compile: Compile = run_as_traced
    graphs: dict[Any, Function | None] = field(default_factory=dict)
    constants: dict[float, Tensor] = field(default_factory=dict)
    position: int = 0
    has_constants: bool = False

    def __call__(self, step: Step, carry: Any, batches: Any, constants: Any) -> Any:
        moving, spec = pytree.tree_flatten(carry)
        data, data_spec = pytree.tree_flatten(batches)
        fixed, form, unflatten = self._constants(constants, moving)
        slices = list(zip(*(leaf.unbind(0) for leaf in data), strict=True))
        if not slices:
            return carry
        key = (self.position, form, *((leaf.shape, leaf.dtype) for leaf in (*moving, *slices[0])))
        self.position += 1
        if key not in self.graphs:

            def flat_step(*leaves: Tensor) -> list[Tensor]:
                first, second = len(moving), len(moving) + len(data)
                result = step(
                    pytree.tree_unflatten(leaves[:first], spec),
                    pytree.tree_unflatten(leaves[first:second], data_spec),
                    unflatten(leaves[second:]),
                )
                return pytree.tree_leaves(result)

            self.graphs[key] = self._trace(flat_step, (*moving, *slices[0], *fixed))
        graph = self.graphs[key]
        if graph is None:
            return python_loop(step, carry, batches, constants)
        for piece in slices:
            moving = graph(*moving, *piece, *fixed)
        return pytree.tree_unflatten(moving, spec)

    def _constants(self, constants: Any, carry: Sequence[Tensor]) -> tuple[list[Tensor], Any, Function]:
        """The constants as tensors, which of them there are, and the way back; a None stays what it is.

        Rates become tensors, so that every point of a grid runs from one graph.
        """
        leaves, spec = pytree.tree_flatten(constants)
        given = [leaf for leaf in leaves if leaf is not None]
        fixed = [leaf if isinstance(leaf, Tensor) else self._constant(leaf, carry) for leaf in given]

        def unflatten(values: Sequence[Tensor]) -> Any:
            rest = iter(values)
            return pytree.tree_unflatten([None if leaf is None else next(rest) for leaf in leaves], spec)

        return fixed, tuple(leaf is None for leaf in leaves), unflatten

    def _constant(self, value: float, carry: Sequence[Tensor]) -> Tensor:
        """Made once: a captured graph cannot fetch a number from the host."""
        if value not in self.constants:
            like = next((leaf for leaf in carry if leaf.is_floating_point()), carry[0])  # not a step count
            self.constants[value] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self.constants[value]

    def _trace(self, function: Function, arguments: tuple[Tensor, ...]) -> Function | None:
        try:
            # Copies: the tracer takes arguments that are one tensor for one input, and pFedMe starts with x = theta.
            with torch.random.fork_rng(devices=[]):  # tracing draws what dropout draws: it must not count
                graph = make_fx(function)(*(argument.clone() for argument in arguments))
            graph.graph.eliminate_dead_code()
            graph.recompile()
            self.has_constants |= has_constants(graph)
            return self.compile(graph, arguments)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            logger.warning("this network cannot be traced and runs step by step, slower: %s", reason)
            return None


@dataclass
class TogetherScan(TracedScan):
    """A traced scan inside `torch.vmap`: the step is mapped and traced once, so that a graph serves all clients."""

    def __call__(self, step: Step, carry: Any, batches: Any, constants: Any) -> Any:
        moving, spec = pytree.tree_flatten(carry)
        data, data_spec = pytree.tree_flatten(batches)
        fixed, form, unflatten = self._constants(constants, moving)
        position, self.position = self.position, self.position + 1
        first, second = len(moving), len(moving) + len(data)

        def flat_step(*leaves: Tensor) -> list[Tensor]:
            result = step(
                pytree.tree_unflatten(leaves[:first], spec),
                pytree.tree_unflatten(leaves[first:second], data_spec),
                unflatten(leaves[second:]),
            )
            return pytree.tree_leaves(result)

        def run(leaves: Sequence[Tensor], is_mapped: Sequence[bool], size: int) -> list[Tensor]:
            """leaves: [C, ...] where mapped; of the data, steps are the axis behind that."""
            now = [
                leaf if mapped else leaf.expand(size, *leaf.shape)
                for leaf, mapped in zip(leaves[:first], is_mapped, strict=False)
            ]
            slices = zip(
                *(
                    leaf.unbind(1 if mapped else 0)
                    for leaf, mapped in zip(leaves[first:second], is_mapped[first:second], strict=True)
                ),
                strict=True,
            )
            dims = (*(0 for _ in now), *(0 if mapped else None for mapped in is_mapped[first:]))
            for piece in slices:
                arguments = (*now, *piece, *leaves[second:])
                key = (position, form, dims, *((leaf.shape, leaf.dtype) for leaf in arguments))
                if key not in self.graphs:
                    self.graphs[key] = self._trace(torch.vmap(flat_step, in_dims=dims), arguments)
                graph = self.graphs[key]
                now = torch.vmap(flat_step, in_dims=dims)(*arguments) if graph is None else graph(*arguments)
            return now

        return pytree.tree_unflatten(list(apply_mapped(run, *moving, *data, *fixed)), spec)


class _Mapped(torch.autograd.Function):
    """Lets a function see the stacks behind the tensors that `torch.vmap` gives to one client."""

    @staticmethod
    def forward(run: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.squeeze(0) for value in run(leaves, [False] * len(leaves), 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], run: Any, *leaves: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        stacks = [leaf if dim is None else leaf.movedim(dim, 0) for leaf, dim in zip(leaves, dims[1:], strict=True)]
        results = tuple(run(stacks, [dim is not None for dim in dims[1:]], info.batch_size))
        return results, (0,) * len(results)


apply_mapped: Callable[..., tuple[Tensor, ...]] = _Mapped.apply  # mypy knows nothing of `apply`


@dataclass
class Executor:
    """How the clients of a cohort are run: one by one or together, and step by step or from a traced graph."""

    name: str
    map: Mapper
    is_traced: bool = False
    scans: dict[tuple[str, str], TracedScan] = field(default_factory=dict)
    functions: dict[tuple[str, ...], Function] = field(default_factory=dict)

    def traced(self, key: tuple[str, ...], function: Function) -> Function:
        """`function`, from a graph where this executor traces; the key says which function it is."""
        if not self.is_traced:
            return function
        return self.functions.setdefault(key, Traced(function))

    @contextmanager
    def running(self, architecture: str, purpose: str) -> Iterator[None]:
        """Inside the block, local steps of `purpose` ("train", "personalize") run this executor's way."""
        if not self.is_traced:
            yield
            return
        scan = self.scans.setdefault((architecture, purpose), TracedScan())
        scan.position = 0
        with scanning(scan):
            yield


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "loop": lambda: Executor("loop", one_by_one),
    "traced": lambda: Executor("traced", one_by_one, is_traced=True),
    "vectorized": lambda: Executor("vectorized", together),
}
