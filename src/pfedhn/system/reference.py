"""Code by name: store where a function or class is defined and its arguments, and find it again."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pfedhn.errors import UserError, first_line

FILE_PREFIX = "pfedhn_file_"  # of modules that are files, run by their path


@dataclass(frozen=True)
class Code:
    """A function or class that a run was made with, as a file can hold it."""

    name: str  # "module:qualname"
    arguments: tuple[Any, ...] | None = None  # of a functools.partial
    keywords: Mapping[str, Any] | None = None
    missing: str | None = None  # why nobody can make it from this alone, to stand in a sentence

    @staticmethod
    def of(thing: Callable[..., Any]) -> "Code":
        """Describe a callable: for `functools.partial(Network, 10)`, the name of `Network` and the 10."""
        if not isinstance(thing, functools.partial):
            return Code(name_of(thing), missing=_why_not(thing))
        name, why = name_of(thing.func), _why_not(thing.func)
        try:
            arguments = json.loads(json.dumps([thing.args, thing.keywords], allow_nan=False))
        except (TypeError, ValueError):
            return Code(name, missing=why or "has arguments that a file cannot hold")
        if _holds_none(arguments):
            return Code(name, missing=why or "has an argument None, which a file cannot hold")
        return Code(name, tuple(arguments[0]) or None, arguments[1] or None, why)

    def load(self) -> Callable[..., Any]:
        """Import the callable, which runs its module."""
        if self.missing is not None:
            raise UserError(f"{self.name} {self.missing}.")
        found = find_code(self.name)
        if self.arguments is None and self.keywords is None:
            return found
        return functools.partial(found, *(self.arguments or ()), **(self.keywords or {}))


def name_of(thing: Any) -> str:
    """`module:qualname` of a function or class; of any other object, that of its class.

    What is defined in a file that was run by its path has the path for a module.
    """
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    module = named.__module__
    if module.startswith(FILE_PREFIX):
        module = sys.modules[module].__file__
    return f"{module}:{named.__qualname__}"


def find(name: str) -> Callable[..., Any]:
    """Import the function or class with this name from the module that defines it.

    Names that no run could have been made with are refused: of the standard library, of PyTorch outside `torch.nn`,
    and those that lead from one module into another. So an edited file cannot call `os.system`.
    """
    module, _, path = name.partition(":")
    package = module.partition(".")[0]
    is_allowed = package not in sys.stdlib_module_names or package == "__main__"
    if not path or not is_allowed or (package == "torch" and not module.startswith("torch.nn.")):
        raise UserError(f"{name} is not code that a run can be made with.")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{name} cannot be imported here ({first_line(error)}).") from None
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise UserError(f"{name} is not there: {module} has nothing of that name.")
    is_code = inspect.isclass(found) or inspect.isfunction(found) or inspect.ismethod(found)
    if not is_code or name_of(found) != name:
        raise UserError(f"{name} is not code that a run can be made with.")
    return found  # type: ignore[no-any-return]


def find_code(name: str) -> Callable[..., Any]:
    """As `find`; the name of a Python file may stand for the module, as in "mine.py:clinics", and is run."""
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        return find(name)
    found = getattr(load_file(Path(file)), function, None)
    if not inspect.isfunction(found) and not inspect.isclass(found):
        raise UserError(f"{file} has no function or class {function!r}.")
    return found


def load_file(path: Path) -> ModuleType:
    """Run a Python file once, as a module."""
    path = path.expanduser().resolve()
    name = f"{FILE_PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        if not path.is_file():
            raise UserError(f"there is no file {path}.")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # first: a dataclass in it asks for its module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise UserError(f"{path} cannot be run ({first_line(error)}).") from error
    return sys.modules[name]


def _why_not(thing: Any) -> str | None:
    """Why another process could not import this; None if it can."""
    qualname = getattr(thing, "__qualname__", None)
    if qualname is None:
        return "is an object, of which only the class is known"
    if "<lambda>" in qualname:
        return "is a lambda, which has no name to import it by"
    if "<locals>" in qualname:
        return "is defined inside a function, from where it cannot be imported"
    try:
        return None if find_code(name_of(thing)) == thing else "is not what its name says"
    except UserError as error:
        return f"cannot be imported: {str(error).removesuffix('.')}"


def _holds_none(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_holds_none, value)) if isinstance(value, list) else value is None
