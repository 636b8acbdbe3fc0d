"""Digests of tensors and code, by which a run is told from another."""

import dis
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pfedhn.system.process import num_cores

BYTES_AT_ONCE = 1 << 24
LIBRARIES = ("torch", "numpy", "pfedhn")  # their code is not looked at: a run's directory names their versions

PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, np.ndarray, Tensor)

VERSION = f"python {sys.version_info.major}.{sys.version_info.minor}"

_shared: Any = WeakTensorKeyDictionary()  # digests of tensors that nobody changes, by the tensor and its decoder


def remember(tensor: Tensor) -> Tensor:
    """Declare that nobody will change a tensor, so that its digest is computed only once."""
    _shared.setdefault(tensor, {})
    return tensor


def of_tensor(tensor: Tensor, decode: Callable[[Tensor], Tensor] | None = None, decoder: str = "") -> str:
    """A digest of a tensor's type, shape and values, on any device and in any memory order.

    Args:
        tensor: The values, or images as bytes, which are given to `decode` with their channels last.
        decode: Bytes -> values; the digest is that of the values.
        decoder: A name for `decode`: the same bytes may stand for other values.
    """
    known: dict[str, str] | None = _shared.get(tensor)
    if known is not None and decoder in known:
        return known[decoder]
    dtype = tensor.dtype if decode is None else decode(tensor[:0].movedim(1, -1).cpu()).dtype
    whole = hashlib.sha256(json.dumps([str(dtype), list(tensor.shape)]).encode())
    flat = tensor.detach() if tensor.ndim else tensor.detach()[None]
    if flat.ndim == 4:
        flat = flat.movedim(1, -1)  # as images lie in memory, where nothing has to be moved
    width = max(1, flat[:1].numel() * dtype.itemsize)  # parts are hashed apart, so they do not depend on the storage
    with ThreadPoolExecutor(max(1, min(4, num_cores()))) as threads:
        for part in threads.map(partial(_of_rows, decode=decode), flat.split(max(1, BYTES_AT_ONCE // width))):
            whole.update(part)
    if known is not None:
        known[decoder] = whole.hexdigest()
    return whole.hexdigest()


def _of_rows(rows: Tensor, decode: Callable[[Tensor], Tensor] | None) -> bytes:
    values = rows.cpu() if decode is None else decode(rows.cpu())
    values = values.contiguous().reshape(-1)  # in one order, however it lies
    return hashlib.sha256(values.view(torch.uint8).numpy().data).digest() if values.numel() else b""


def of_module(module: nn.Module) -> str:
    """A digest of what a network computes: its layers, the code of the user's classes, and all that is not trained."""
    kinds = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in map(type, module.modules())}
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    constants = {name: of_tensor(value) for name, value in module.state_dict().items() if name not in trained}
    parts = [repr(module), {name: of_code(kind) for name, kind in sorted(kinds.items())}, constants]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def of_code(thing: Any) -> str:
    """A digest of what a user's function or class does, and what it calls in turn; for a library's, of its name.

    It is made of the compiled code, which comments and the place in a file do not change, and of plain values that the
    code refers to. Another version of Python compiles to other code, so the digest begins with the version.
    """
    return f"{VERSION} {hashlib.sha256(chr(10).join(_facts(thing, set())).encode()).hexdigest()}"


def differ(one: str, other: str) -> bool:
    """Whether two digests differ; those of code by different versions of Python cannot be compared."""
    words = one.split(" "), other.split(" ")
    is_comparable = not all(len(part) == 3 for part in words) or words[0][:2] == words[1][:2]
    return one != other and is_comparable


def _facts(thing: Any, seen: set[int]) -> Iterator[str]:
    """Texts that tell one piece of code from another."""
    if isinstance(thing, partial):
        yield from _facts(thing.func, seen)
        for value in (*thing.args, *sorted(thing.keywords.items())):
            yield from _facts(value, seen)
    elif isinstance(thing, Tensor):
        yield of_tensor(thing)
    elif thing is None or isinstance(thing, bool | int | float | complex | str | bytes):
        yield repr(thing)
    elif isinstance(thing, np.ndarray) and thing.dtype.kind in "biufc":
        yield f"{thing.dtype} {thing.shape} {hashlib.sha256(np.ascontiguousarray(thing).data).hexdigest()}"
    elif isinstance(thing, list | tuple | set | frozenset | dict):
        if id(thing) in seen:  # it may hold itself
            return
        seen.add(id(thing))
        yield f"{type(thing).__name__} {len(thing)}"
        if not isinstance(thing, list | tuple):  # in an order that is not that of their making
            thing = sorted(thing.items() if isinstance(thing, dict) else thing, key=repr)
        for value in thing:
            yield from _facts(value, seen)
    else:
        yield from _of_callable(thing, seen)


def _of_callable(thing: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(thing, MethodType):
        yield from _facts(thing.__func__, seen)
        thing = thing.__self__
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    if _is_of_library(named):
        yield f"{named.__module__}:{getattr(named, '__qualname__', '')}"
    elif id(thing) not in seen:
        seen.add(id(thing))
        if isinstance(thing, FunctionType):
            yield from _of_function(thing, seen)
        elif inspect.isclass(thing):
            yield from _of_class(thing, seen)
        elif callable(thing) and inspect.isclass(named):  # an object that is called: its class, and what it holds
            yield from _of_class(named, seen)
            for value in sorted(getattr(thing, "__dict__", {}).items()):
                yield from _facts(value, seen)


def _is_of_library(thing: Any) -> bool:
    package = str(getattr(thing, "__module__", None)).partition(".")[0]
    if package == "__main__":
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in LIBRARIES or package in sys.stdlib_module_names or "site-packages" in file


def _of_class(kind: type, seen: set[int]) -> Iterator[str]:
    for base in kind.__mro__:
        if _is_of_library(base):
            yield f"{base.__module__}:{base.__qualname__}"
            continue
        for name, value in sorted(vars(base).items()):
            if name in ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__firstlineno__"):
                continue
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            values = (value.fget, value.fset) if isinstance(value, property) else (value,)
            for part in values:
                if isinstance(part, FunctionType) or part is None or isinstance(part, PLAIN):
                    yield name
                    yield from _facts(part, seen)


def _of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield from _of_compiled(function.__code__)
    for value in (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())):
        yield from _facts(value, seen)
    for cell in function.__closure__ or ():
        try:
            yield from _facts(cell.cell_contents, seen)
        except ValueError:  # not filled yet
            continue
    for name in sorted(_globals_of(function.__code__)):
        value = function.__globals__.get(name)
        if value is not None and not inspect.ismodule(value):
            yield name
            yield from _facts(value, seen)


def _of_compiled(code: CodeType) -> Iterator[str]:
    yield repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _of_compiled(value)
        else:
            yield repr(sorted(value, key=repr) if isinstance(value, frozenset) else value)


def _globals_of(code: CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for value in code.co_consts:
        if isinstance(value, CodeType):
            names |= _globals_of(value)
    return names
