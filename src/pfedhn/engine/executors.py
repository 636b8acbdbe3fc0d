"""From a function of one client to a cohort: `loop` is the reference, every other executor must agree with it.

Axes: [C]lients of a cohort, [K] steps.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pfedhn.engine.closures import Watch, lift
from pfedhn.engine.hoist import fits, for_all_steps, hoist
from pfedhn.errors import UserError, first_line
from pfedhn.keys import seeded
from pfedhn.params import copy, stack, take
from pfedhn.sgd import Step, python_loop, scanning
from pfedhn.system.process import WHOLE_PROCESS

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


_has_numbers: ContextVar[bool] = ContextVar("has_numbers", default=True)


@contextmanager
def without_numbers() -> Iterator[None]:
    """In the block, results have shapes but no numbers, and kernels are announced instead of launched.

    Only for code that keeps no tensor that it makes: one without numbers would silently spoil what it meets later.
    """
    token, mode = _has_numbers.set(False), FakeTensorMode(allow_non_fake_inputs=True)
    complaints = logging.getLogger("torch._subclasses.fake_tensor")  # of an operator that fails, besides the exception
    level = complaints.level
    complaints.setLevel(logging.CRITICAL)
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = False  # a tensor that was kept all the same is refused by those with numbers
        complaints.setLevel(level)
        _has_numbers.reset(token)


def first_step(step: Step, carry: Any, batches: Any, constants: Any) -> Any:
    """Take one step instead of all, for tensors without numbers."""
    return step(carry, take(batches, 0), constants) if len(pytree.tree_leaves(batches)[0]) else carry


def run_as_traced(graph: GraphModule, arguments: Sequence[Tensor]) -> Function:
    return graph.forward


@dataclass
class Traced:
    """A function over trees of tensors, traced into plain operators at its first call.

    Args:
        function: All tensors that it uses are arguments of it, or constants of the run.
        compile: What is done to a graph before it runs.
        writes: Whether the function writes to its arguments. Tracing runs it, so it is then traced on copies of them.
        needs_numbers: Whether it is traced with the numbers of its arguments. Without them (see `without_numbers`)
            nothing is computed, and there are no copies.
    """

    function: Function
    compile: Compile = run_as_traced
    writes: bool = False
    needs_numbers: bool = True
    ready: dict[Any, tuple[Function, Any]] = field(default_factory=dict)
    has_constants: bool = False  # tensors that the function brought along: its graph serves nobody else

    def __call__(self, *arguments: Any) -> Any:
        if not _has_numbers.get():
            return self.function(*arguments)
        leaves, spec = pytree.tree_flatten(arguments)
        key = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self.ready:
            results: list[Any] = []

            def flat(*values: Tensor) -> list[Tensor]:
                outputs, output_spec = pytree.tree_flatten(self.function(*pytree.tree_unflatten(values, spec)))
                results.append(output_spec)
                return outputs

            given = copy(leaves) if self.writes and self.needs_numbers else distinct(leaves)
            graph = trace(flat, given, self.needs_numbers)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            self.has_constants |= bool(constants_of(graph))
            self.ready[key] = (self.compile(graph, leaves), results[-1])
        compiled, output_spec = self.ready[key]
        return pytree.tree_unflatten(compiled(*leaves), output_spec)


def trace(function: Function, arguments: Sequence[Any], needs_numbers: bool = True) -> GraphModule:
    with WHOLE_PROCESS:
        return _trace(function, arguments, needs_numbers)


def _trace(function: Function, arguments: Sequence[Any], needs_numbers: bool) -> GraphModule:
    if not needs_numbers:
        bare: GraphModule = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        return bare
    # By default a separate fake mode notes the shape of every node, which takes a third of the time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        graph: GraphModule = make_fx(function)(*arguments)
    return graph


def constants_of(graph: GraphModule) -> list[Tensor]:
    return [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]


def copy_with_layout(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does: a graph may hold views that only such a layout allows."""
    if tensor.numel() == 0:
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


MAX_GRAPHS = 16  # of one function for tensors of the same shapes, of which a few are usual


class Steps(NamedTuple):
    """How steps are run: after its batch, `step` takes its part of what `ahead` has made of all batches."""

    step: Function
    ahead: Function | None = None


class FlatStep(NamedTuple):
    """A step as a function of plain tensors: those of the carry, then of a batch, then the constants."""

    step: Step
    function: Function
    carry: list[Tensor]
    batches: list[Tensor]  # with an axis of steps
    constants: list[Tensor]
    spec: Any  # of the carry
    key: Any  # what is computed, as far as the tensors do not tell


class Stacks(NamedTuple):
    """The leaves of all batches, and which axis of each is that of the steps."""

    leaves: Sequence[Tensor]
    axes: Sequence[int]

    @property
    def length(self) -> int:
        return self.leaves[0].shape[self.axes[0]] if self.leaves else 0

    @property
    def strides(self) -> tuple[int, ...]:
        """From step to step."""
        return tuple(leaf.stride(axis) for leaf, axis in zip(self.leaves, self.axes, strict=True))

    @property
    def first(self) -> tuple[Tensor, ...]:
        return tuple(leaf.select(axis, 0) for leaf, axis in zip(self.leaves, self.axes, strict=True))

    def slices(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(leaf.unbind(axis) for leaf, axis in zip(self.leaves, self.axes, strict=True)), strict=True)


@dataclass
class TracedScan:
    """Runs the steps from a graph of plain operators, traced at the first call: no autograd, no Python of the module.

    One instance serves one function of one architecture, whose scans it tells apart by their order.

    Args:
        compile: What is done to a graph before it runs.
        is_always_watched: Whether every call may trace, at the cost of watching it. A CUDA graph, whose second call is
            recorded, needs what is new to be traced in the first.
        hoists: Whether what steps compute from their batches alone is computed for all steps at once.
    """

    compile: Compile = run_as_traced
    is_always_watched: bool = False
    hoists: bool = False
    graphs: dict[Any, Steps | None] = field(default_factory=dict)
    numbers: dict[float, Tensor] = field(default_factory=dict)
    position: int = 0
    has_constants: bool = False
    watch: Watch | None = None
    is_first_call: bool = True
    has_missed: bool = False  # whether a call met something new that it could not trace, since nobody watched

    @contextmanager
    def running(self, arguments: Any) -> Iterator[None]:
        """Inside the block, which is one call of the function, its steps run from graphs.

        Steps are traced in calls that are watched, which costs time: a call that meets a new step unwatched runs it
        step by step, and the next call is watched.

        Args:
            arguments: What the function is given: a tree of tensors.
        """
        if not _has_numbers.get():
            with scanning(first_step):
                yield
            return
        self.position = 0
        is_watched = self.is_always_watched or self.is_first_call or self.has_missed
        self.is_first_call = False
        with scanning(self):
            if not is_watched:
                yield
                return
            try:
                with Watch(arguments) as self.watch:
                    yield
            finally:
                self.watch = None

    def __call__(self, step: Step, carry: Any, batches: Any, constants: Any) -> Any:
        flat = self._flatten(step, carry, batches, constants)
        now = [leaf.contiguous() for leaf in flat.carry]
        data = Stacks(flat.batches, [0 for _ in flat.batches])
        if not data.length:
            return carry
        steps = self._steps(flat, flat.function, now, data, flat.constants)
        if steps is None:
            return python_loop(step, carry, batches, constants)
        return pytree.tree_unflatten(self._replay(steps, now, data, flat.constants), flat.spec)

    def _flatten(self, step: Step, carry: Any, batches: Any, constants: Any) -> FlatStep:
        """Rates and the tensors that a step closes over become constants: one graph serves all clients and a grid."""
        moving, spec = pytree.tree_flatten(carry)
        data, data_spec = pytree.tree_flatten(batches)
        lifted = lift(step)
        leaves, constants_spec = pytree.tree_flatten((constants, lifted.tensors))
        given = [leaf for leaf in leaves if leaf is not None]
        fixed = [leaf if isinstance(leaf, Tensor) else self._number(leaf, moving) for leaf in given]
        first, second = len(moving), len(moving) + len(data)

        def function(*values: Tensor) -> list[Tensor]:
            rest = iter(values[second:])
            result = lifted.step(
                pytree.tree_unflatten(values[:first], spec),
                pytree.tree_unflatten(values[first:second], data_spec),
                pytree.tree_unflatten([None if leaf is None else next(rest) for leaf in leaves], constants_spec),
            )
            return pytree.tree_leaves(result)

        key = (self.position, lifted.form, tuple(leaf is None for leaf in leaves))
        self.position += 1
        return FlatStep(step, function, moving, data, fixed, spec, key)

    def _number(self, value: float, carry: Sequence[Tensor]) -> Tensor:
        """Made once: a captured graph cannot fetch a number from the host."""
        if value not in self.numbers:
            like = next((leaf for leaf in carry if leaf.is_floating_point()), carry[0])  # not a step count
            self.numbers[value] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self.numbers[value]

    def _steps(
        self,
        flat: FlatStep,
        function: Function,
        now: Sequence[Tensor],
        data: Stacks,
        constants: Sequence[Tensor],
        dims: tuple[int | None, ...] = (),
    ) -> Steps | None:
        arguments = (*now, *data.first, *constants)
        layout = (dims, data.strides, *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in arguments))
        key = (flat.key, layout)
        num_alike = sum(other == layout for _, other in self.graphs)
        if key in self.graphs or num_alike == MAX_GRAPHS:
            return self.graphs.get(key)
        if self.watch is None:
            self.has_missed = True
            return None
        self.has_missed = False
        self.graphs[key] = self._trace(flat.step, function, now, data, constants, self.watch)
        if num_alike + 1 == MAX_GRAPHS:
            logger.warning(
                "a step that closes over other numbers in every call runs step by step, slower; give them to scan "
                "among the constants."
            )
        return self.graphs[key]

    def _trace(
        self,
        step: Step,
        function: Function,
        now: Sequence[Tensor],
        data: Stacks,
        constants: Sequence[Tensor],
        watch: Watch,
    ) -> Steps | None:
        arguments = (*now, *data.first, *constants)

        def contiguous(*leaves: Tensor) -> list[Tensor]:
            return [leaf.contiguous() for leaf in function(*leaves)]

        try:
            # Copies: the tracer takes arguments that are one tensor for one input, and pFedMe starts with x = theta.
            with seeded(None), watch.tracing(step):  # the trace may draw, for dropout
                graph = trace(contiguous, list(map(copy_with_layout, arguments)))
            graph.graph.eliminate_dead_code()
            graph.recompile()
            watch.refuse(constants_of(graph), step)
            self.has_constants |= bool(constants_of(graph))
            steps = self._in_two(graph, now, data, constants, watch) if self.hoists else None
            return steps or Steps(self.compile(graph, arguments))
        except UserError:
            raise
        except Exception as error:
            logger.warning("this network cannot be traced and runs step by step, slower: %s", first_line(error))
            return None

    def _in_two(
        self, graph: GraphModule, now: Sequence[Tensor], data: Stacks, constants: Sequence[Tensor], watch: Watch
    ) -> Steps | None:
        """The steps less what can be computed for all of them at once; None if nothing can."""
        parts = hoist(graph, len(now), len(data.leaves))
        if parts is None:
            return None
        ahead = Traced(partial(for_all_steps, parts, data.axes), self.compile, needs_numbers=False)
        with watch.suspended():
            made = ahead(data.leaves)
        if not fits(parts, made):
            return None
        first = [value[0] for value in made]
        return Steps(self.compile(parts.step, (*now, *data.first, *first, *constants)), ahead)

    def _replay(self, steps: Steps, now: list[Tensor], data: Stacks, constants: Sequence[Tensor]) -> list[Tensor]:
        with nullcontext() if self.watch is None else self.watch.suspended():
            made = [] if steps.ahead is None else steps.ahead(data.leaves)
            for k, piece in enumerate(data.slices()):
                now = steps.step(*now, *piece, *(value[k] for value in made), *constants)
        if self.watch is not None:
            self.watch.note(now)
        return now


@dataclass
class TogetherScan(TracedScan):
    """A traced scan inside `torch.vmap`: the step is mapped and traced once, so that a graph serves all clients."""

    def __call__(self, step: Step, carry: Any, batches: Any, constants: Any) -> Any:
        flat = self._flatten(step, carry, batches, constants)
        first, second = len(flat.carry), len(flat.carry) + len(flat.batches)

        def run(leaves: Sequence[Tensor], is_mapped: Sequence[bool], size: int) -> list[Tensor]:
            # A leaf is [C, ...] where it is mapped; the steps are the next axis of the data.
            now = [
                (leaf if mapped else leaf.expand(size, *leaf.shape)).contiguous()
                for leaf, mapped in zip(leaves[:first], is_mapped, strict=False)
            ]
            data = Stacks(leaves[first:second], [1 if mapped else 0 for mapped in is_mapped[first:second]])
            if not data.length:
                return now
            dims = (*(0 for _ in now), *(0 if mapped else None for mapped in is_mapped[first:]))
            function = torch.vmap(flat.function, in_dims=dims)
            steps = self._steps(flat, function, now, data, leaves[second:], dims)
            if steps is not None:
                return self._replay(steps, now, data, leaves[second:])
            for piece in data.slices():
                now = function(*now, *piece, *leaves[second:])
            return now

        results = apply_mapped(run, *flat.carry, *flat.batches, *flat.constants)
        return pytree.tree_unflatten(list(results), flat.spec)


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
    make_scan: Callable[[], TracedScan] = TracedScan
    scans: dict[tuple[str, str], TracedScan] = field(default_factory=dict)
    functions: dict[tuple[str, ...], Function] = field(default_factory=dict)

    def traced(self, key: tuple[str, ...], function: Function) -> Function:
        """`function`, from a graph where this executor traces; the key says which function it is."""
        if not self.is_traced:
            return function
        return self.functions.setdefault(key, Traced(function))

    def running(self, architecture: str, purpose: str, arguments: Any) -> AbstractContextManager[None]:
        """Inside the block, which is one call of a function, its local steps run this executor's way.

        Args:
            architecture: The network that is trained.
            purpose: What the function does: "train" or "personalize".
            arguments: What the function is given: a tree of tensors.
        """
        if not self.is_traced:
            return nullcontext()
        return self.scans.setdefault((architecture, purpose), self.make_scan()).running(arguments)


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "loop": lambda: Executor("loop", one_by_one),
    "traced": lambda: Executor("traced", one_by_one, is_traced=True),
    "vectorized": lambda: Executor("vectorized", together),
}
