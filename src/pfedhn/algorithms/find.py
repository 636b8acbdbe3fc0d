"""Find a method by its name, and the row of the table for a method."""

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeAlias

from pfedhn.algorithm import Algorithm
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.method import Method
from pfedhn.combinators import innermost
from pfedhn.errors import UserError, closest, short
from pfedhn.system.reference import find_code

AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any]

REPLACED = {
    **dict.fromkeys(("communicates", "needs_descriptors", "needs_float32", "statistics"), "the property `needs`"),
    **dict.fromkeys(("averaged_part", "with_averaged_part", "for_use"), "the property `uses`"),
    "adapt": "the property `fine_tuning`",
    "averaging": "pfedhn.averaged(...)",
    "choices_for_joining": "add_client(settings=...)",
    "usual_cohort_size": "cohort_size of the run",
}
"""Members that methods of earlier versions could have, and what says the same now."""


def refuse_replaced(kind: type[Any]) -> None:
    """Refuse a class of a user with a member that nobody asks for any more."""
    if name := next((name for name in dir(kind) if name in REPLACED), None):
        raise UserError(f"{kind.__name__} has {name!r}, which has no effect since version 0.2; use {REPLACED[name]}.")
    if "init_row" in dir(kind) and len(inspect.signature(kind.init_row).parameters) == 3:
        raise UserError(
            f"{kind.__name__}.init_row takes (key, descriptor); since version 0.2 the server's shared memory comes "
            "first: init_row(self, shared, key, descriptor)."
        )


def find_method(name: str) -> Method:
    """Return the method of this name: an entry of `ALGORITHMS`, or a class of your own as "mine.py:FedProx"."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        raise UserError(f"there is no method {name!r}; {closest(name, ALGORITHMS)}")
    kind = find_code(name)
    if not isinstance(kind, type) or Algorithm not in kind.__mro__:
        raise UserError(f"{name} is not a method; give a class that inherits from a method such as pfedhn.FedAvg.")
    parameters = vars(kind).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise UserError(f"{name} is not a frozen dataclass; write @dataclass(frozen=True) above the class.")
    refuse_replaced(kind)
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))  # type: ignore[attr-defined]
        raise UserError(f"{name} does not define {missing}; see the protocol, pfedhn.algorithm.Algorithm.")
    for item in fields(kind):
        if item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"{name}: the setting {item.name!r} has no default; give it one.")
    return Method(kind.__name__, kind)


def entry_of_class(kind: type[Any]) -> tuple[str, Method] | None:
    """The name and the row of the first entry of the table with this very class."""
    return next(((name, row) for name, row in ALGORITHMS.items() if kind in (row.algorithm, row.wider)), None)


def method_of(algorithm: AnyAlgorithm) -> Method:
    """The row of the table for a method, wrapped or not."""
    return method_of_class(type(innermost(algorithm)))


def method_of_class(kind: type[Any]) -> Method:
    """The first row of the table with this class, or with the nearest that it extends; else a row of this class."""
    for parent in kind.__mro__:
        if (found := entry_of_class(parent)) is not None:
            return found[1] if parent is kind else replace(found[1], name=kind.__name__, algorithm=kind, settings={})
    return Method(kind.__name__, kind)


def build_algorithm(method: str | AnyAlgorithm, settings: Mapping[str, Any] | None = None) -> AnyAlgorithm:
    """Make an algorithm from its name and settings, or check the settings of a given one."""
    if isinstance(method, type):
        raise UserError(f"{method.__name__} is a class; give the method itself, {method.__name__}(...), or its name.")
    if not isinstance(method, str) and not (isinstance(method, Algorithm) and is_dataclass(method)):
        raise UserError(f"method is {short(method)}; give a name of pfedhn.ALGORITHMS, or a method such as PFedHN().")
    if not isinstance(method, str):
        refuse_replaced(type(innermost(method)))
        method_of(method).check(method)
        return method
    known = find_method(method)
    return known.made(settings or {}, method if method in ALGORITHMS else known.name)
