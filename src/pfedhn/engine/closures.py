"""The tensors that a step reads without being given them: they become arguments of it, or are refused.

A traced step is replayed for other clients and rounds, where a tensor that it merely closes over would stay what it was
when the step was traced. `lift` makes an argument of every tensor in a closure. A tensor that reaches the step another
way (an attribute of an object, a global variable) cannot be lifted: `Watch` lets it pass if it was there before the
call, as the weights of a frozen layer were, and refuses it if the call received or made it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pfedhn.errors import UserError
from pfedhn.sgd import Step


class Place(NamedTuple):
    """Where a function keeps something that it reads: a cell of its closure, its defaults, a partial's arguments."""

    name: str
    content: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Lifted(NamedTuple):
    """A step whose constants are a pair: those it was written for, and the tensors that it closed over."""

    step: Step
    tensors: list[Tensor]
    form: Any  # hashable: steps with another form compute something else


def lift(step: Step) -> Lifted:
    """Take the tensors that `step` closes over out of it, so that they can be given to it.

    Tensors in the closures of local functions that it uses are taken out too, also where they stand in containers,
    default values and arguments of `functools.partial`. Objects stay as they are: the buffers of a model and the
    settings of an algorithm are constants of a run.
    """
    places, codes = places_of(step)
    parts = [pytree.tree_flatten(place.content) for place in places]
    tensors = [leaf for leaves, _ in parts for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = [
        (type(leaf), leaf)
        for leaves, _ in parts
        for leaf in leaves
        if isinstance(leaf, int | float | complex | str | None)
    ]
    arrays = [
        (leaf.dtype.str, leaf.shape, leaf.tobytes())
        for leaves, _ in parts
        for leaf in leaves
        if isinstance(leaf, numpy.ndarray)
    ]

    def lifted(carry: Any, batch: Any, constants: tuple[Any, Sequence[Tensor]]) -> Any:
        given, values = constants
        rest = iter(values)
        now = [[next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves] for leaves, _ in parts]
        try:
            for place, leaves, (before, spec) in zip(places, now, parts, strict=True):
                if any(isinstance(leaf, Tensor) for leaf in before):
                    place.write(pytree.tree_unflatten(leaves, spec))
            result = step(carry, batch, given)
            for place, leaves in zip(places, now, strict=True):
                _refuse_change(place, leaves)
            return result
        finally:
            for place in places:
                place.write(place.content)

    return Lifted(lifted, tensors, (*codes, *numbers, *arrays, *(str(spec) for _, spec in parts)))


def places_of(function: Any) -> tuple[list[Place], list[Any]]:
    """What a function reads of its surroundings, through the local functions that it finds there too; their code."""
    places: dict[Any, Place] = {}
    codes: dict[int, Any] = {}
    waiting = [function]
    while waiting:
        function = waiting.pop()
        if id(function) in codes:
            continue
        new: dict[Any, Place] = {}
        if isinstance(function, partial):
            codes[id(function)] = type(function)
            new[id(function)] = _partial_place(function)
            waiting.append(function.func)
        elif isinstance(function, FunctionType):
            codes[id(function)] = function.__code__
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if id(cell) not in places and not _is_empty(cell):
                    new[id(cell)] = _place(repr(name), cell, "cell_contents")
            for attribute in ("__defaults__", "__kwdefaults__"):
                if getattr(function, attribute):
                    name = f"the default values of {function.__name__}"
                    new[id(function), attribute] = _place(name, function, attribute)
        for place in new.values():
            waiting += (leaf for leaf in pytree.tree_leaves(place.content) if isinstance(leaf, FunctionType | partial))
        places |= new
    return list(places.values()), list(codes.values())


def _place(name: str, owner: Any, attribute: str) -> Place:
    return Place(
        name, getattr(owner, attribute), partial(getattr, owner, attribute), partial(setattr, owner, attribute)
    )


def _partial_place(function: partial[Any]) -> Place:
    def read() -> Any:
        return function.args, function.keywords

    def write(content: Any) -> None:
        function.__setstate__((function.func, *content, vars(function)))  # type: ignore[attr-defined]

    return Place(f"the arguments of {function}", read(), read, write)


def _is_empty(cell: Any) -> bool:
    """Whether a variable has no value yet, as that of a local function which is defined further down."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _refuse_change(place: Place, before: Sequence[Any]) -> None:
    after = pytree.tree_leaves(place.read())
    if len(after) != len(before) or any(new is not old for new, old in zip(after, before, strict=True)):
        raise UserError(
            f"the step changes {place.name}, a variable outside of it, which a traced step would do only once; make it "
            "part of the carry, or use executor 'loop'."
        )


class Watch(TorchDispatchMode):
    """Note the tensors that a call gets and makes, to tell them from those that existed before."""

    supports_higher_order_operators = True

    def __init__(self, arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages(arguments)
        self.traced: Step | None = None  # what a step makes while it is traced is its own

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.traced is not None:
            if function is torch.ops.aten._local_scalar_dense.default:
                self.refuse(args, self.traced)  # it would become a number of the graph
            _refuse_to_trace_shapes(function, args)
        result = function(*args, **(kwargs or {}))
        if self.traced is None:
            self.storages |= storages(result) - storages((args, kwargs))  # a view of what was there is nothing new
        return result

    def note(self, tensors: Any) -> None:
        self.storages |= storages(tensors)

    @contextmanager
    def tracing(self, step: Step) -> Iterator[None]:
        self.traced = step
        try:
            yield
        finally:
            self.traced = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let compiled code run in the block: the compiler does nothing while a mode watches."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def refuse(self, tensors: Any, step: Step) -> None:
        """Refuse tensors of this call that `step` does not get as arguments: other clients would compute with them."""
        if found := storages(tensors) & self.storages:
            raise UserError(
                f"the step reads {name_of(step, found)}, which one client received, remembered or computed, from an "
                "object or a global variable, where other clients would find it too; give it to scan among the "
                "constants, or keep it in a local variable of the function around the step."
            )


def _refuse_to_trace_shapes(function: Any, args: Any) -> None:
    """A graph holds the shapes that it was traced with, so that none may depend on values, as that of `x[x > 0]`."""
    if torch.Tag.dynamic_output_shape not in getattr(function, "tags", ()):
        return
    if function is torch.ops.aten.index.Tensor:
        is_mask = (index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if not any(is_mask):
            return
    raise RuntimeError(f"the shape of what {function} returns depends on values")


def storages(tree: Any) -> set[StorageWeakRef]:
    """Where the tensors of a tree keep their numbers; a view keeps them where the whole does.

    A reference frees the numbers but keeps their place: a tensor made later cannot pass for one that is gone.
    """
    found = set()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            while is_functorch_wrapped_tensor(leaf):
                leaf = get_unwrapped(leaf)
            found.add(StorageWeakRef(leaf.untyped_storage()))
    return found


MAX_SEARCHED = 10_000  # objects: an object may lead to anything


def name_of(function: Any, wanted: set[StorageWeakRef]) -> str:
    """How a function comes by a tensor that is kept where `wanted` says, as a person would write it."""
    waiting: list[tuple[str, Any]] = [("", function)]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_SEARCHED:
        path, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if path and storages(value) & wanted:
                return repr(path)
        else:
            waiting += _parts(path, value)
    return "a tensor"  # behind something that cannot be looked into


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    dot = f"{path}." if path else ""
    if isinstance(value, partial):
        yield from ((path, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), (path, value.__func__))
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if not _is_empty(cell))
        yield from ((path, part) for part in (value.__defaults__, value.__kwdefaults__))
        yield from ((name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif not isinstance(value, type | ModuleType) and hasattr(value, "__dict__"):
        yield from ((f"{dot}{name}", part) for name, part in vars(value).items())
