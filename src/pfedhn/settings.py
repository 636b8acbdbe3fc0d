"""Settings from outside (a TOML file, a command line, a keyword) checked against the fields of a frozen dataclass.

The checks are written here, not taken from msgspec or pydantic: a rate may be a tensor inside a trace, "none" stands
for what TOML has no word for, and a refusal is one sentence that names the closest field and what would fit. With
either library all three would be code of ours around it.
"""

import math
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w
from torch import Tensor

from pfedhn.errors import UserError, closest

Spec = TypeVar("Spec")


def build(spec: type[Spec], values: Mapping[str, Any], what: str) -> Spec:
    """`spec(**values)` after checking every name and type."""
    return spec(**checked(spec, values, what))


def checked(spec: type[Any], values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The values as `spec` takes them: lists become tuples, and "none" becomes None, for which TOML has no word."""
    hints = get_type_hints(spec)
    names = [item.name for item in fields(spec)]
    ready: dict[str, Any] = {}
    for name, value in values.items():
        if name not in names:
            raise UserError(f"{what} has no field {name!r}; {closest(name, names)}")
        ready[name] = tuple(value) if isinstance(value, list) else value
        if value == "none" and fits(None, hints[name]):
            ready[name] = None
        if not fits(ready[name], hints[name]):
            raise UserError(f"{what}: {name} = {_shown(value)} does not fit; it must be {describe(hints[name])}.")
    return ready


def _shown(value: Any) -> str:
    """A value as the person wrote it, or nearly: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(part, arguments[0]) for part in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return isinstance(value, Mapping)
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [describe(option) for option in arguments if option not in (type(None), Tensor)]
        return " or ".join(options + ['"none"'] * (type(None) in arguments))
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list{'' if arguments[-1] is Ellipsis else f' of {len(arguments)}'}, each {describe(arguments[0])}"
    if get_origin(hint) in (dict, Mapping):
        return "a table"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """`["steps=20", "partition.alpha=0.1"]` -> {"steps": 20, "partition.alpha": 0.1}; values as TOML writes them."""
    values = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise UserError(f"{text!r} is not of the form field=value.")
        values[name.strip()] = parse_value(value.strip())
    return values


def parse_value(text: str) -> Any:
    """A TOML value; what is none (a bare word) is taken as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def to_toml(table: Mapping[str, Any]) -> str:
    """A nested table as TOML; None is left out, since TOML has no such value."""
    return tomli_w.dumps(_without_none(table))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list | tuple) else value
