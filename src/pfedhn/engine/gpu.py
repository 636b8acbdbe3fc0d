"""How a GPU computes: its precision, compiled graphs, and what runs that are equal share."""

import atexit
import copy
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from importlib import import_module
from threading import Condition, Thread, main_thread
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from pfedhn.engine.closures import places_of
from pfedhn.engine.executors import Function, Traced, TracedScan
from pfedhn.errors import first_line
from pfedhn.kernels import launch as kernels
from pfedhn.system import fingerprint
from pfedhn.system.process import WHOLE_PROCESS

logger = logging.getLogger("pfedhn")

_compiled: dict[Any, Function] = {}


_traced: dict[Any, Traced | TracedScan] = {}


MAX_CACHED = 256

COMPILER_OPTIONS: dict[str, Any] = {
    "max_autotune_gemm_backends": "TRITON",  # cuBLAS chooses slow kernels for products this small
    "max_pointwise_cat_inputs": 64,  # a gradient is put together from its parts where it is used
    "combo_kernels": True,  # small independent kernels become one
    "autotune_num_choices_displayed": 0,
}
# The gradient of a local step is also used by a norm, and would be put together by a kernel for each layer.
STEP_OPTIONS: dict[str, Any] = {"force_pointwise_cat": True}


def compile_graph(graph: GraphModule, arguments: Sequence[Tensor], is_step: bool = True) -> Function:
    """Compile a traced graph; runs with the same graph and shapes share the result, whatever their seeds and rates.

    Only a local step, which a round repeats K times, is worth choosing kernels for by timing them.
    """
    if not arguments[0].is_cuda:
        return graph.forward  # a CPU gains nothing that would pay for the compiler
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    shapes = tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in arguments)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    key = (graph.code, shapes, is_step, kernels.dot_precision(), is_deterministic, id(graph) if constants else None)
    if key not in _compiled:
        while len(_compiled) >= MAX_CACHED:  # runs that use it hold on to it; nobody else needs one with constants
            del _compiled[next(iter(_compiled))]
        part = _compiled[key] = BackgroundCompiledGraph(graph, arguments, is_step)
        if is_deterministic or is_autotuned():
            part.compile()
    return _compiled[key]


class BackgroundCompiledGraph:
    """A graph that runs as traced until the compiler, in another thread, has finished it.

    Rounds begin sooner by that, at the price of their last bits: it depends on the clock from which round on they are
    computed by the compiled graph. So deterministic runs wait for the compiler.
    """

    def __init__(self, graph: GraphModule, arguments: Sequence[Tensor], is_step: bool = False) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # here: it takes a while

        self.graph = graph
        # The compiler needs no numbers, and must not write to them. Its cache is for those who bring an environment.
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        self.shapes: list[Any] = [mode.from_tensor(leaf) for leaf in arguments]
        self.is_step = is_step
        self.best: Function = graph.forward
        self.is_asked = self.is_done = False

    def compile(self) -> None:
        self.is_asked = True
        try:
            self.best = self._compiled()
        except Exception as error:
            if main_thread().is_alive():  # or the process ends, and has let go of the compiler's tools
                logger.warning("a part of the round could not be compiled and runs slower: %s", first_line(error))
        finally:
            self.is_done = True

    def _compiled(self) -> Function:
        import torch._inductor
        import torch._inductor.config as inductor

        options = STEP_OPTIONS if self.is_step else {}
        if self.is_step and is_autotuned():
            options = {**torch._inductor.list_mode_options("max-autotune-no-cudagraphs"), **options}
        own = GraphModule(self.graph, copy.deepcopy(self.graph.graph))  # which the compiler changes
        with inductor.patch({**COMPILER_OPTIONS, **options}):
            compiled: Function = torch._inductor.compile(own, self.shapes)
        return compiled

    @property
    def is_awaited(self) -> bool:
        return self.is_asked and not self.is_done

    def ask(self) -> None:
        """Have it compiled, unless that has been asked for."""
        if not self.is_asked:
            self.is_asked = True
            COMPILER.put(self)

    def __call__(self, *values: Tensor) -> Any:
        self.ask()
        chosen = _chosen.get()
        return (self.best if chosen is None else chosen.setdefault(self, self.best))(*values)


_chosen: ContextVar[dict[BackgroundCompiledGraph, Function] | None] = ContextVar("chosen", default=None)


@contextmanager
def choosing_once() -> Iterator[dict[BackgroundCompiledGraph, Function]]:
    """In the block, a graph runs the same way every time, so that warm-up and capture run the same code."""
    chosen: dict[BackgroundCompiledGraph, Function] = {}
    token = _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _chosen.reset(token)


class Compiler:
    """A thread that compiles one graph after the other: two would only wait for each other's Python."""

    def __init__(self) -> None:
        self.waiting: deque[BackgroundCompiledGraph] = deque()
        self.begun: BackgroundCompiledGraph | None = None
        self.changed = Condition()
        self.thread: Thread | None = None

    def put(self, work: BackgroundCompiledGraph) -> None:
        with self.changed:
            self.waiting.append(work)
            self.changed.notify_all()
            if self.thread is None or not self.thread.is_alive():
                if self.thread is None:
                    atexit.register(self.drop)  # a thread that Python ends in the middle takes the process with it
                self.thread = Thread(target=self._work, name="compiler", daemon=True)
                self.thread.start()

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                work = self.begun = self.waiting.popleft()
            try:
                with WHOLE_PROCESS:
                    work.compile()
            finally:
                with self.changed:
                    self.begun = None
                    self.changed.notify_all()

    def wait(self) -> None:
        """Until everything that was asked for is compiled."""
        with self.changed:
            self.changed.wait_for(lambda: self.begun is None and not self.waiting)

    def drop(self) -> None:
        """Let go of what has not been begun: who needs it asks again. What has been begun is waited for."""
        with self.changed:
            for work in self.waiting:
                work.is_asked = False
            self.waiting.clear()
            begun = self.begun
            self.changed.wait_for(lambda: begun is None or self.begun is not begun)


COMPILER = Compiler()


def compile_once(graph: GraphModule, arguments: Sequence[Tensor]) -> Function:
    """Compile what a round does once."""
    return compile_graph(graph, arguments, is_step=False)


def shared_by_equal_runs(key: Any, make: Callable[[], Traced | TracedScan]) -> Any:
    """What an equal run has traced already; tracing a round takes a second, and an experiment has hundreds of runs."""
    found = _traced.get(key)
    if found is None or found.has_constants:
        while len(_traced) >= MAX_CACHED:
            del _traced[next(iter(_traced))]
        found = _traced[key] = make()
    return found


Seen: TypeAlias = dict[int, tuple[int, Any]]
"""What has been looked at, by its place in memory: its number, and itself, so that the place stays taken."""

OF_EVERY_MODULE = {name for name in vars(nn.Module()) if name.startswith("_")}


def form(network: nn.Module, seen: Seen | None = None) -> Any:
    """What a network computes, as far as its parts tell: one factory may make another if it reads a variable."""
    seen = {} if seen is None else seen
    for part in network.modules():
        seen.setdefault(id(part), (len(seen), part))

    def about(part: nn.Module) -> Any:
        settings = {name: value for name, value in vars(part).items() if name not in OF_EVERY_MODULE}
        hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
        return type(part), fingerprint.of_code(type(part)), content((settings, hooks), seen)

    shapes = tuple((name, value.shape, value.requires_grad) for name, value in network.named_parameters())
    return shapes, tuple((name, about(part)) for name, part in network.named_modules())


def content(value: Any, seen: Seen | None = None) -> Any:
    """Something hashable that is equal for values that are alike, wherever they lie in memory.

    Of a tensor only shape and type count: a trace in which its numbers stay is not shared.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)  # 1 is not 1.0 here, nor 0.0 -0.0
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, type):
        return value, fingerprint.of_code(value)
    if isinstance(value, Enum | ModuleType):
        return value
    seen = {} if seen is None else seen
    inside = partial(content, seen=seen)
    if isinstance(value, weakref.ref):
        return inside(value())
    if id(value) in seen:  # it may hold itself
        return "again", seen[id(value)][0]
    seen[id(value)] = (len(seen), value)
    own = getattr(value, "__dict__", None)  # attributes beside what a container holds, a function or fields say
    beside = None
    if isinstance(own, dict) and not isinstance(value, nn.Module):
        beside = inside({name: one for name, one in own.items() if not _is_cached(type(value), name)})
    if isinstance(value, Mapping):
        return type(value), tuple((inside(key), inside(one)) for key, one in value.items()), beside
    if isinstance(value, list | tuple):
        return type(value), tuple(map(inside, value)), beside
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(inside, value)), beside
    if isinstance(value, FunctionType):
        return fingerprint.of_code(value), tuple(inside(place.content) for place in places_of(value)[0]), beside
    if isinstance(value, partial):
        return inside((value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return inside((value.__func__, value.__self__))
    if isinstance(value, nn.Module):
        return form(value, seen)
    if is_dataclass(value):
        return type(value), tuple(inside(getattr(value, one.name)) for one in fields(value)), beside
    if isinstance(own, dict):
        return type(value), beside
    try:
        hash(value)
    except Exception:  # of any kind: it is a person's
        return SameObject(value)
    return type(value), value


def _is_cached(kind: type, name: str) -> bool:
    """Whether an attribute is there only because somebody has asked for it."""
    return any(isinstance(vars(one).get(name), cached_property) for one in kind.__mro__)


@dataclass(frozen=True, eq=False)
class SameObject:
    """Equal only for the same object. It keeps the object alive, so that its `id` is not given to another."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def set_up_gpu(precision: str, is_deterministic: bool, num_runs: int = 1) -> None:
    """Say how all runs of this process compute on a GPU.

    Args:
        precision: "fp32", or "tf32", which rounds the factors of products to 10 bits and is faster.
        is_deterministic: Whether the same bits are wanted, whatever else runs there.
        num_runs: How many runs will take turns; unless the same bits are wanted, kernels suit themselves to it.
    """
    if torch.cuda.is_available():
        Thread(target=import_module, args=("torch._dynamo",), daemon=True).start()  # while the data are loaded
    kernels.SharedGPU.runs = 1 if is_deterministic else num_runs
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    # Every stream of a run gets a workspace. On a large GPU it would take 32 MiB, as deterministic products need.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8" if is_deterministic else ":4096:2:16:8")
    if is_deterministic:
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()  # those that other runs have left
        torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def computing_on_gpu(precision: str, is_deterministic: bool, num_runs: int = 1) -> Iterator[None]:
    """`set_up_gpu` for the length of a block; afterwards the process computes as it did before."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    runs, workspace = kernels.SharedGPU.runs, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    set_up_gpu(precision, is_deterministic, num_runs)
    try:
        yield
    finally:
        kernels.SharedGPU.runs = runs
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def is_autotuned() -> bool:
    """PFEDHN_AUTOTUNE=1 spends a minute on choosing kernels by timing, for rounds of many runs 5 % faster.

    Kernels chosen by timing are not always the same ones, so a deterministic run does without.
    """
    return os.environ.get("PFEDHN_AUTOTUNE", "0") == "1" and not torch.are_deterministic_algorithms_enabled()
