"""Settings from outside (a TOML file, a command line, a keyword) checked against the fields of a frozen dataclass.

The checks are written here, not taken from msgspec or pydantic: a rate may be a tensor inside a trace, "none" stands
for what TOML has no word for, and a refusal is one sentence that names the closest field and what would fit. With
either library all three would be code of ours around it.
"""

import datetime
import math
import operator
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w
from torch import Tensor

from pfedhn.errors import UserError, closest, short

Spec = TypeVar("Spec")

LARGEST_WHOLE = 2**63 - 1  # of 64 bits, in which seeds and steps are counted
LARGEST_NUMBER = 3.4e38  # of float32, in which runs compute
LARGEST_COUNT = 10**9  # of steps and widths of a method
DEEPEST = 20  # tables and lists inside each other


class Bounds(NamedTuple):
    """What a setting may be, where that is not what `check_bounds` takes it for: `Annotated[int, Bounds(0, 1000)]`."""

    least: float
    most: float = LARGEST_COUNT


ZeroOrMore: TypeAlias = Annotated[int, Bounds(0)]
Fraction: TypeAlias = Annotated[float, Bounds(0, 1)]


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
        if isinstance(value, str) and value == "none" and fits(None, hints[name]):
            ready[name] = None
        if not fits(ready[name], hints[name]):
            raise UserError(f"{what}: {name} = {_shown(value)} does not fit; it must be {describe(hints[name])}.")
    return ready


def checked_method(spec: type[Any], values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`checked`, for the settings of a method, whose numbers have bounds on every road to it."""
    ready = checked(spec, values, what)
    check_bounds(spec, ready, what)
    return ready


def check_bounds(spec: type[Any], values: Mapping[str, Any], what: str) -> None:
    """Refuse numbers that no method can compute with.

    A number is at least 0. Of what is counted there is at least one, unless there is none by default. A field that is
    otherwise says so in its type (`Bounds`).
    """
    hints = get_type_hints(spec, include_extras=True)
    for item in fields(spec):
        value = values.get(item.name)
        if isinstance(value, Tensor) and value.ndim:
            raise UserError(f"{what}: {item.name} has the shape {tuple(value.shape)}; a rate is one number.")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        counts = int in (hints[item.name], *get_args(hints[item.name]))
        usual = Bounds(1 if counts and item.default != 0 else 0, LARGEST_COUNT if counts else LARGEST_NUMBER)
        options = (hints[item.name], *get_args(hints[item.name]))  # the type itself, or one of several
        declared = [part for option in options for part in getattr(option, "__metadata__", ())]
        bounds = next((part for part in declared if isinstance(part, Bounds)), usual)
        if value < bounds.least:
            raise UserError(f"{what}: {item.name} = {value} does not fit; it must be at least {bounds.least}.")
        if value > bounds.most:
            raise UserError(f"{what}: {item.name} = {value:.3g} does not fit; it must be at most {bounds.most:g}.")


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """A count that a person gave in Python, as an int; NumPy's whole numbers are some too."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= LARGEST_WHOLE:
        raise UserError(f"{name} is {short(value)}; give a whole number of at least {least}.")
    return number


def check_seed(value: Any, name: str = "seed") -> int:
    """A seed of draws: any whole number of 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        number = LARGEST_WHOLE + 1
    if isinstance(value, bool) or not -LARGEST_WHOLE <= number <= LARGEST_WHOLE:
        raise UserError(f"{name} is {short(value)}; give a whole number of at most 64 bits.")
    return number


def _shown(value: Any) -> str:
    """A value as the person wrote it, or nearly: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else short(value)


def fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(part, arguments[0]) for part in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        key, part = arguments or (Any, Any)
        return isinstance(value, Mapping) and all(fits(k, key) and fits(v, part) for k, v in value.items())
    if hint is Any:
        return True
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # PyTorch takes whole numbers of 64 bits, also where it computes with fractions.
        return is_number and (abs(value) <= LARGEST_WHOLE if isinstance(value, int) else math.isfinite(value))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_WHOLE
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
    if origin in (dict, Mapping):
        return "a table" + (f", each entry {describe(arguments[1])}" if arguments and arguments[1] is not Any else "")
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
    if "\n" in text:  # it would be several values
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or a number of thousands of digits, or brackets without end
        return text
    check_plain(value, text if len(text) <= 40 else f"{text[:40]}...")
    return value


def parse_toml(text: str, file: object) -> dict[str, Any]:
    """The content of a TOML file that a person wrote: numbers, texts, true and false, in lists and tables."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None
    check_plain(table, file)
    return table


def _too_deep(where: object) -> UserError:
    return UserError(f"{where} is nested too deeply; {DEEPEST} tables and lists inside each other are enough.")


def check_plain(value: Any, where: object, depth: int = 0) -> None:
    """Refuse dates and times, for which no setting asks, and what is nested without end."""
    if depth > DEEPEST:
        raise _too_deep(where)
    if isinstance(value, datetime.date | datetime.time):
        raise UserError(f"{where} holds the date or time {value}; write a text or a number instead.")
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            check_plain(part, where, depth + 1)


def to_toml(table: Mapping[str, Any]) -> str:
    """A nested table as TOML; None is left out, since TOML has no such value."""
    return tomli_w.dumps(_without_none(table))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list | tuple) else value
