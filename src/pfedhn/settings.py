"""Settings from outside (a TOML file, a command line, a keyword) checked against the fields of a frozen dataclass.

The checks are written here, not taken from msgspec or pydantic: a rate may be a tensor inside a trace, "none" stands
for what TOML has no word for, and a refusal is one sentence that names the closest field and what would fit. With
either library all three would be code of ours around it.
"""

import datetime
import inspect
import math
import operator
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w
from torch import Tensor

from pfedhn.errors import UserError, closest, closest_setting, nearest_setting, short

Value = TypeVar("Value")
Kinds: TypeAlias = type[Any] | tuple[type[Any], ...]
"""The dataclass that has some settings, or several: a method and the wrappers around it, the outermost first."""
INNER = {"inner": True}
"""Metadata of the field of a wrapper that holds what it wraps; the settings of both are one table."""

LARGEST_WHOLE = 2**63 - 1  # of 64 bits, in which seeds and steps are counted
LARGEST_NUMBER = 3.4e38  # of float32, in which runs compute
LARGEST_COUNT = 10**9  # of steps and widths of a method
DEEPEST = 20  # tables and lists inside each other


PAGE = "docs/methods.md"  # which lists the settings of methods


class Bounds(NamedTuple):
    """What a setting may be, where that is not what `check_bounds` takes it for: `Annotated[int, Bounds(0, 1000)]`."""

    least: float
    most: float = LARGEST_COUNT


ZeroOrMore: TypeAlias = Annotated[int, Bounds(0)]
Fraction: TypeAlias = Annotated[float, Bounds(0, 1)]


SHORT_NAMES = {
    "lr": "server.lr",
    "optimizer": "server.optimizer",
    "momentum": "server.momentum",
    "weight_decay": "server.weight_decay",
    "clip": "server.clip",
    "embedding": "embeddings.kind",
    "embedding_dim": "embeddings.dim",
    "embedding_scale": "embeddings.scale",
    "embedding_optimizer": "embeddings.optimizer",
    "embedding_lr": "embeddings.lr",
    "embedding_momentum": "embeddings.momentum",
    "embedding_weight_decay": "embeddings.weight_decay",
}
"""Short names of settings that are inside a value. Files, command lines and stored runs may use either name."""

CHOICE = "optimizer"  # names the class of a value that may be of several: server = {optimizer = "adamw", lr = 6e-4}


class Setting(NamedTuple):
    """One setting of a dataclass, or of a value inside it."""

    hint: Any  # with its annotations
    default: Any


def settings_in(spec: Kinds) -> dict[str, Setting]:
    """All settings of a dataclass; a setting of the value `server` is called "server.lr"."""
    return _settings_in(spec)


def kinds_of(value: Any) -> tuple[type[Any], ...]:
    """The dataclass of a value, and of what it wraps."""
    inner = _inner(value)
    return (type(value), *(() if inner is None else kinds_of(inner)))


def _inner(value: Any) -> Any:
    return next((getattr(value, item.name) for item in fields(value) if item.metadata == INNER), None)


def _find_settings(spec: Kinds) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    if isinstance(spec, tuple):
        for kind in reversed(spec):
            for name, setting in settings_in(kind).items():
                found.setdefault(name, setting)
        return found
    hints = get_type_hints(spec, include_extras=True)
    for item in fields(spec):
        if item.metadata == INNER:
            continue
        default = item.default if item.default_factory is MISSING else item.default_factory()
        kinds = _kinds(hints[item.name])
        if not kinds:
            found[item.name] = Setting(hints[item.name], default)
        if len(kinds) > 1:
            found[f"{item.name}.{CHOICE}"] = Setting(Literal[tuple(kinds)], _kind_name(default))
        for kind in kinds.values():
            for name, setting in settings_in(kind).items():
                usual = getattr(default, name, setting.default)
                found.setdefault(f"{item.name}.{name}", setting._replace(default=usual))
    return found


def _find_hints(spec: Kinds) -> dict[str, Any]:
    kinds = spec if isinstance(spec, tuple) else (spec,)
    return {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}


# They are asked for in every round.
_settings_in: Callable[[Any], dict[str, Setting]] = cache(_find_settings)
_hints: Callable[[Any], dict[str, Any]] = cache(_find_hints)


def _kinds(hint: Any) -> dict[str, type[Any]]:
    """The dataclasses that a setting may be, by their names in a file; empty if it is a plain value."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return {option.__name__.lower(): option for option in options if isinstance(option, type) and is_dataclass(option)}


def _kind_name(value: Any) -> str:
    return type(value).__name__.lower()


def full_name(spec: Kinds, name: str) -> str | None:
    """The name of a setting in `settings_in(spec)`, from its short or its full name; None if there is none."""
    known = settings_in(spec)
    return next((option for option in (name, SHORT_NAMES.get(name)) if option in known), None)


def short_names(spec: Kinds) -> dict[str, str]:
    """The shortest name of each setting, by its full name."""
    known = settings_in(spec)
    short = {full: name for name, full in SHORT_NAMES.items() if full in known and name not in known}
    return {full: short.get(full, full) for full in known}


def names_to_set(spec: Kinds) -> dict[str, Any]:
    """The type of each setting, by each of its names, and of each value that holds settings."""
    names = {name: setting.hint for name, setting in settings_in(spec).items()}
    return {**names, **{short: names[full] for full, short in short_names(spec).items()}}


def _short_to_set(spec: Kinds) -> list[str]:
    """The shortest name of each setting, those without a dot first."""
    return sorted(short_names(spec).values(), key=lambda name: "." in name)


def in_short(spec: Kinds, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their short names, tables of a value's settings taken apart; unknown names stay as they are."""
    short = short_names(spec)
    written = ((name, full_name(spec, name) or name, value) for name, value in _taken_apart(spec, values))
    return {short.get(full, name): value for name, full, value in written}


def _taken_apart(spec: Kinds, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    hints = _hints(spec)
    for name, value in values.items():
        kinds = _kinds(hints.get(name))
        if kinds and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", part) for inner, part in _completed(kinds, value).items())
        elif kinds and type(value) in kinds.values():
            if len(kinds) > 1:
                yield f"{name}.{CHOICE}", _kind_name(value)
            yield from ((f"{name}.{item.name}", getattr(value, item.name)) for item in fields(value))
        else:
            yield name, value


def _completed(kinds: Mapping[str, type[Any]], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table, with the defaults of the class that it names; a table that names none changes what is there."""
    named = table.get(CHOICE) if len(kinds) > 1 else None
    kind = kinds.get(named) if isinstance(named, str) else None
    usual = {} if kind is None else {item.name: item.default for item in fields(kind) if item.default is not MISSING}
    return {**table, **{name: "none" if x is None else x for name, x in usual.items() if name not in table}}


def values_of(spec: Any) -> dict[str, Any]:
    """The settings of a frozen dataclass by their full names."""
    inner, own = _inner(spec), [item.name for item in fields(spec) if item.metadata != INNER]
    values = dict(_taken_apart(type(spec), {name: getattr(spec, name) for name in own}))
    return values if inner is None else {**values, **values_of(inner)}


def values_in_short(spec: Any) -> dict[str, Any]:
    """The settings of a frozen dataclass by their short names; what has none is left out if it is as usual."""
    short, known = short_names(kinds_of(spec)), settings_in(kinds_of(spec))
    return {
        short[name]: value
        for name, value in values_of(spec).items()
        if "." not in short[name] or value != known[name].default
    }


def value_of(spec: Any, name: str) -> Any:
    """One setting of a frozen dataclass, by its short or its full name."""
    return values_of(spec)[full_name(kinds_of(spec), name) or name]


def build(spec: type[Value], values: Mapping[str, Any], what: str, page: str = PAGE) -> Value:
    """A dataclass from its settings, after checking every name and type; `page` of the documentation lists them."""
    return assembled(spec, checked(spec, values, what, page))


def refuse_foreign(spec: type[Any], given: Mapping[str, Any]) -> None:
    """Refuse an argument that a dataclass does not take, and say how its nearest setting is given."""
    if not is_dataclass(spec) or not (foreign := [name for name in given if name not in spec.__dataclass_fields__]):
        return
    takes = inspect.signature(spec.__init__).parameters.values()  # a person may have written it
    if foreign[0] in {item.name for item in takes} or any(item.kind is item.VAR_KEYWORD for item in takes):
        return
    names = _short_to_set(spec)
    found = nearest_setting(foreign[0], names)
    owner, _, inner = (full_name(spec, found or "") or "").partition(".")
    hint = closest_setting(foreign[0], names, PAGE)
    if inner:
        default = next(item.default for item in fields(spec) if item.name == owner)
        if is_dataclass(default) and hasattr(default, inner):
            value = replace(default, **{inner: given[foreign[0]]})  # type: ignore[type-var]
            hint = f"give {owner}={value!r}."
    raise UserError(f"{spec.__name__} has no argument {foreign[0]!r}; {hint}")


def assembled(spec: type[Value], values: Mapping[str, Any]) -> Value:
    """A dataclass from settings by their full names; what is not named is as it is by default."""
    return spec(**_arguments(spec, values, {item.name: item.default for item in fields(spec)}))  # type: ignore[arg-type]


def with_values(spec: Value, values: Mapping[str, Any]) -> Value:
    """The same dataclass with some settings changed, by their full names."""
    return replace(spec, **_arguments(type(spec), values, {name: getattr(spec, name) for name in _hints(type(spec))}))  # type: ignore[type-var]


def _arguments(spec: type[Any], values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    hints = _hints(spec)
    arguments: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        owner, _, inner = name.partition(".")
        if inner:
            inside.setdefault(owner, {})[inner] = value
        else:
            arguments[name] = value
    for owner, given in inside.items():
        kinds, old = _kinds(hints[owner]), before[owner]
        kind = kinds[given.pop(CHOICE) if len(kinds) > 1 and CHOICE in given else _kind_name(old)]
        names = [item.name for item in fields(kind)]
        if foreign := next((inner for inner in given if inner not in names), None):
            raise UserError(f"{kind.__name__} has no setting {foreign!r}; {closest(foreign, names)}")
        kept = {item.name: getattr(old, item.name) for item in fields(old) if item.name in names}
        arguments[owner] = kind(**{**kept, **given})
    return arguments


def checked(spec: Kinds, values: Mapping[str, Any], what: str, page: str = PAGE) -> dict[str, Any]:
    """Settings by their full names, as `assembled` takes them.

    Lists become tuples, and "none" becomes None, for which TOML has no word.
    """
    return {name: value for name, _, value in _checked(spec, values, what, page)}


def _checked(spec: Kinds, values: Mapping[str, Any], what: str, page: str = PAGE) -> Iterator[tuple[str, str, Any]]:
    """Each setting as its full name, the name that was written, and its value."""
    owners = [name for name, hint in _hints(spec).items() if _kinds(hint)]
    for written, value in _taken_apart(spec, values):
        if written in owners:
            first = next(name for name in settings_in(spec) if name.startswith(f"{written}."))
            raise UserError(f"{what}: {written} = {_shown(value)} does not fit; it must be a table, as {first} = ...")
        name = full_name(spec, written)
        if name is None:
            raise UserError(f"{what} has no field {written!r}; {closest_setting(written, _short_to_set(spec), page)}")
        hint = settings_in(spec)[name].hint
        ready = tuple(value) if isinstance(value, list) else value
        if isinstance(value, str) and value == "none" and fits(None, hint):
            ready = None
        if not fits(ready, hint):
            raise UserError(f"{what}: {written} = {_shown(value)} does not fit; it must be {describe(hint)}.")
        yield name, written, ready


def checked_method(spec: Kinds, values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`checked`, for the settings of a method, whose numbers have bounds on every road to it."""
    ready = {}
    for name, written, value in _checked(spec, values, what):
        check_bounds(settings_in(spec)[name], value, f"{what}: {written}")
        ready[name] = value
    return ready


def check_bounds(setting: Setting, value: Any, what: str) -> None:
    """Refuse a number that no method can compute with.

    A number is at least 0. Of what is counted there is at least one, unless there is none by default. A field that is
    otherwise says so in its type (`Bounds`).
    """
    if isinstance(value, Tensor) and value.ndim:
        raise UserError(f"{what} has the shape {tuple(value.shape)}; a rate is one number.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    options = (setting.hint, *get_args(setting.hint))  # the type itself, or one of several
    counts = int in options
    usual = Bounds(1 if counts and setting.default != 0 else 0, LARGEST_COUNT if counts else LARGEST_NUMBER)
    declared = [part for option in options for part in getattr(option, "__metadata__", ())]
    bounds = next((part for part in declared if isinstance(part, Bounds)), usual)
    if value < bounds.least:
        raise UserError(f"{what} = {value} does not fit; it must be at least {bounds.least}.")
    if value > bounds.most:
        raise UserError(f"{what} = {value:.3g} does not fit; it must be at most {bounds.most:g}.")


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
    if origin is Annotated:
        return fits(value, arguments[0])
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
    if origin is Annotated:
        return describe(arguments[0])
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
