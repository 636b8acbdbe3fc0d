"""A row of the table of methods: a method under the name users give it, and what experiments need to know of it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pfedhn.algorithm import Algorithm
from pfedhn.combinators import innermost, kinds_around, with_settings, wrapped
from pfedhn.settings import Kinds, assembled, checked, checked_method, in_short, kinds_of, settings_in, values_in_short


class Copies(NamedTuple):
    """How often something is in memory at the peak of a run on a CPU, as measured for cohorts of 1, 4 and 8 clients."""

    shared: float = 4.0  # what the server remembers: as it is, as it was at the chosen round, a step's
    target: float = 4.0  # the weights of a client that is at work
    member: float = 2.4  # the weights of every client of a cohort


def _usual_copies(algorithm: Any) -> Copies:
    return Copies()


def _no_settings(algorithm: Any) -> list[dict[str, Any]]:
    return []


@dataclass(frozen=True)
class Method:
    """A row of `ALGORITHMS`. Calling it makes the algorithm: `ALGORITHMS["pfedhn"](lr=0.02)`.

    Args:
        name: The name in tables and figures, as its paper writes it.
        algorithm: The frozen dataclass that is the method.
        settings: What this variant sets; everything else is as the dataclass has it.
        summary: One line for lists; the first line of the algorithm's file by default.
        use: When to use it, in a sentence.
        grid: Which settings `pfedhn tune` varies, and over which values.
        is_tuned: Whether `pfedhn tune` varies them without being asked by name; if not, its authors chose.
        rates_from: The method whose tuned rates this one takes over.
        cohort_size: Clients per round in the paper's comparison.
        color: Of its lines in figures; one that is free by default.
        dash: Of its lines, as Matplotlib takes it.
        wider: A class with more settings, which takes over if one of those is given.
        copies: What a run of an algorithm of this class holds in memory.
        smaller: Settings under which such an algorithm may need less memory.
        joining: Settings worth trying while a client joins a trained federation; the first trains as the others did.
    """

    name: str
    algorithm: type[Algorithm[Any, Any, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    use: str = ""
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    is_tuned: bool = True
    rates_from: str | None = None
    cohort_size: int = 5
    color: str | None = None
    dash: Any = "-"
    wider: type[Algorithm[Any, Any, Any]] | None = None
    copies: Callable[[Any], Copies] = _usual_copies
    smaller: Callable[[Any], list[dict[str, Any]]] = _no_settings
    joining: Callable[[Any], list[dict[str, Any]]] = _no_settings

    def __call__(self, **settings: Any) -> Algorithm[Any, Any, Any]:
        return self.made(settings, self.name)

    @property
    def kinds(self) -> Kinds:
        """The classes that have all settings of this method."""
        *around, own = kinds_around(self.algorithm)
        return *around, *(() if self.wider is None else (self.wider,)), own

    def made(self, settings: Mapping[str, Any], what: str) -> Algorithm[Any, Any, Any]:
        """The algorithm with some settings, by their short or full names; `what` is the method's name in errors."""
        values = checked(self.kinds, self.settings, what) | checked_method(self.kinds, settings, what)
        known, wide = settings_in(self.algorithm), settings_in(self.wider or self.algorithm)
        is_wide = any(name in wide and name not in known and values[name] != wide[name].default for name in values)
        kind = self.wider if is_wide and self.wider else self.algorithm
        inner = {name: value for name, value in values.items() if name in settings_in(kind)}
        around = {name: value for name, value in values.items() if name not in known and name not in wide}
        return wrapped(assembled(kind, inner), around)

    def changed(self, algorithm: Algorithm[Any, Any, Any], settings: Mapping[str, Any]) -> Algorithm[Any, Any, Any]:
        """An algorithm of this row with some settings changed, by their short or full names."""
        kind = type(innermost(algorithm))
        values = checked_method(kinds_around(kind), settings, kind.__name__)
        return with_settings(algorithm, values) if values else algorithm

    def check(self, algorithm: Algorithm[Any, Any, Any]) -> None:
        """Refuse an algorithm of this row if a setting does not fit."""
        checked_method(kinds_of(algorithm), values_in_short(algorithm), type(innermost(algorithm)).__name__)

    def choices_for_joining(self, algorithm: Algorithm[Any, Any, Any]) -> list[dict[str, Any]]:
        """Settings worth trying while a client joins, by their short names."""
        inner = innermost(algorithm)
        return [in_short(type(inner), choice) for choice in self.joining(inner)]

    @property
    def description(self) -> str:
        return self.summary or (inspect.getdoc(inspect.getmodule(self.algorithm)) or "").splitlines()[0]
