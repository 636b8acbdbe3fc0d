"""Summaries of parties' training rows, and the statistics of a federation that they give; no row leaves its party.

    asked    which columns, histograms and classes a server wants to know about                    Asked
    party    counts, sums and sums of squares of its rows, small groups withheld, noise on demand   summary_of
    server   checks what a stranger sent, and adds up                                              checked, merged

A summary is plain JSON. Sums are about a center, so that no digits are lost where values are large beside their spread:

    {"version": 1, "rows": 120, "min_group": 5, "noise": null,
     "columns": {"age": {"count": 118, "missing": null, "center": 51.5, "sum": 0.0, "squares": 2034.0,
                         "histogram": [12, null, null, 60]}},
     "classes": {"ill": 40, "well": 78}, "withheld_classes": 1}

A number that is null is withheld. Axes: [N] rows, [M] values of a row, such as the pixels of a channel.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy
from numpy.typing import NDArray

from pfedhn import keys
from pfedhn.errors import UserError, short

Summary: TypeAlias = dict[str, Any]
Numbers: TypeAlias = NDArray[Any]

VERSION = 1
MAX_COUNT = 1 << 40  # of rows
MAX_VALUE = 1e30  # of a mean or a deviation: far inside of 32 bits
MAX_COLUMNS, MAX_EDGES, MAX_CLASSES, MAX_NAME = 10_000, 1_000, 10_000, 1_000
FLAT = 2e-7  # a deviation below this part of the mean is lost in the rounding of 32 bits
CLASSES = "classes"
COLUMN_PARTS = ("count", "missing", "center", "sum", "squares")
SUMMARY_PARTS = ("version", "rows", "min_group", "noise", "columns", CLASSES, "withheld_classes")


class SummaryError(ValueError):
    """Why a summary or a question is refused, to stand in a sentence after the name of its sender."""


@dataclass(frozen=True)
class Noise:
    """Noise on every number of a summary: differential privacy of single rows.

    Args:
        epsilon: The budget of the whole summary.
        mechanism: "laplace" or "gaussian".
        delta: The probability that the bound does not hold, of Gaussian noise.
    """

    epsilon: float
    mechanism: Literal["laplace", "gaussian"] = "laplace"
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.mechanism not in ("laplace", "gaussian"):
            raise UserError(f"mechanism must be laplace or gaussian, got {short(self.mechanism)}.")
        if not 0 < self.epsilon < math.inf or not 0 < self.delta < 1:
            raise UserError(f"epsilon must be above 0 and delta in (0, 1), got {self.epsilon} and {self.delta}.")

    def deviations(self, num_queries: int) -> float:
        """The scale of noise on a number that one row changes by at most 1, of so many numbers."""
        if self.mechanism == "laplace":
            return num_queries / self.epsilon
        # rho-zCDP gives epsilon = rho + 2 sqrt(rho log(1 / delta)) at delta (Bun and Steinke, 2016).
        log = math.log(1 / self.delta)
        rho = (math.sqrt(log + self.epsilon) - math.sqrt(log)) ** 2
        return math.sqrt(num_queries / (2 * rho))


@dataclass(frozen=True)
class Asked:
    """What a server wants to know about every party's training rows.

    Args:
        columns: The columns of a table, or the channels of an array, whose mean and deviation are wanted.
        classes: Whether the classes and their counts are wanted.
        edges: The inner edges of a histogram of a column: values below the first and above the last have cells, too.
        bounds: What values of a column are taken to lie between, which noise needs. Values outside are clipped then.
        class_names: Classes that are known; only their counts are wanted then. Noise needs it.
    """

    columns: tuple[str, ...] = ()
    classes: bool = False
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": list(self.columns),
            CLASSES: self.classes,
            "edges": {name: list(edges) for name, edges in self.edges.items()},
            "bounds": {name: list(bounds) for name, bounds in self.bounds.items()},
            "class_names": None if self.class_names is None else list(self.class_names),
        }

    @staticmethod
    def of(value: Any) -> "Asked":
        """The question that a stranger sent."""
        parts = ("columns", CLASSES, "edges", "bounds", "class_names")
        _check(isinstance(value, dict) and value.keys() == set(parts), "asks in a form that cannot be read")
        columns, names, wanted = value["columns"], value["class_names"], value[CLASSES]
        _check(_are_names(columns, MAX_COLUMNS) and type(wanted) is bool, "asks for columns that cannot be read")
        _check(names is None or _are_names(names, MAX_CLASSES), "names classes that cannot be read")
        for part, least, most in (("edges", 1, MAX_EDGES), ("bounds", 2, 2)):
            given = value[part]
            is_good = isinstance(given, dict) and all(
                name in columns and _are_rising(numbers) and least <= len(numbers) <= most
                for name, numbers in given.items()
            )
            _check(is_good, f"sent {part} that cannot be used")
        edges = {name: tuple(map(float, numbers)) for name, numbers in value["edges"].items()}
        bounds = {name: (float(low), float(high)) for name, (low, high) in value["bounds"].items()}
        return Asked(tuple(columns), wanted, edges, bounds, None if names is None else tuple(names))

    def num_queries(self) -> int:
        """How many numbers one row may change: of rows, of each column and histogram, of classes."""
        return 1 + 3 * len(self.columns) + len(self.edges) + self.classes


def summary_of(
    columns: Mapping[str, Numbers],
    asked: Asked,
    *,
    min_group: int,
    labels: Numbers | None = None,
    noise: Noise | None = None,
    key: int | None = None,
) -> Summary:
    """What a party says about its training rows.

    Args:
        columns: The values of each column [N], or of each channel [N, M]; NaN is missing.
        asked: What is wanted.
        min_group: Numbers of groups with fewer rows are withheld.
        labels: The class of each row [N]: texts or whole numbers.
        noise: Noise on every number.
        key: What noise is drawn from; by default the operating system's randomness, which a real party needs.
    """
    if type(min_group) is not int or min_group < 1:
        raise UserError(f"min_group must be a whole number of at least 1, got {short(min_group)}.")
    missing = [name for name in asked.columns if name not in columns]
    if missing:
        raise UserError(f"there is no column {missing[0]!r} to summarize.")
    if asked.classes and labels is None:
        raise UserError("classes are asked for, and there are no labels; give them.")
    if noise is not None and (unbounded := [name for name in asked.columns if name not in asked.bounds]):
        raise UserError(f"noise needs bounds of every column, and {unbounded[0]!r} has none; leave noise out.")
    lengths = {len(columns[name]) for name in asked.columns} | (set() if labels is None else {len(labels)})
    if len(lengths) != 1:
        raise UserError(f"columns and labels must have one length, got {sorted(lengths)}.")
    (count,) = lengths
    disturb = _Disturbance(noise, asked.num_queries(), secrets.randbits(63) if key is None else key)
    rows = disturb("rows", count, 1.0)
    summary: Summary = {
        "version": VERSION,
        "rows": rows if rows >= min_group else None,
        "min_group": min_group,
        "noise": None if noise is None else vars(noise).copy(),
        "columns": {},
        CLASSES: None,
        "withheld_classes": 0,
    }
    is_told = summary["rows"] is not None
    for name in asked.columns:
        values = columns[name].astype(numpy.float64)
        told = _column(name, values.reshape(len(values), -1), asked, min_group, disturb) if is_told else None
        summary["columns"][name] = told
    if asked.classes and is_told:
        assert labels is not None
        counts = _classes(labels, asked, disturb)
        if counts is not None:
            shown = with_small_withheld(list(counts.values()), min_group, exact=noise is None)
            told = {name: part for name, part in zip(counts, shown, strict=True) if part is not None}
            summary[CLASSES], summary["withheld_classes"] = told, len(counts) - len(told)
    return summary


class _Disturbance:
    """Adds noise to numbers, each with its own key."""

    def __init__(self, noise: Noise | None, num_queries: int, key: int) -> None:
        self.noise, self.key = noise, key
        self.scale = 0.0 if noise is None else noise.deviations(num_queries)

    def __call__(self, name: str, value: float, sensitivity: float) -> Any:
        """A number that one row changes by at most `sensitivity`."""
        if self.noise is None:
            return value
        generator = keys.numpy_generator(int(keys.fold(self.key, name)))
        draw = generator.laplace if self.noise.mechanism == "laplace" else generator.normal
        return float(value + draw(0.0, self.scale * sensitivity))


def _column(
    name: str, values: NDArray[numpy.float64], asked: Asked, min_group: int, disturb: _Disturbance
) -> dict[str, Any] | None:
    """What is said about a column [N, M]; None if too few rows have a value."""
    present, width = values[~numpy.isnan(values).any(1)], values.shape[1]
    total, center, reach = len(values), 0.0, 0.0
    if disturb.noise is not None:
        low, high = asked.bounds[name]
        present, center, reach = present.clip(low, high), (low + high) / 2, (high - low) / 2
    elif len(present):
        center = float(present.mean())
    count = disturb(f"{name}: count", len(present), 1.0)
    if count < min_group:
        return None
    apart = present - center
    total_sum = disturb(f"{name}: sum", float(apart.sum()), width * reach)
    squares = disturb(f"{name}: squares", float((apart**2).sum()), width * reach**2)
    missing: int | float | None = total - len(present) if disturb.noise is None else None
    if missing is not None and 0 < missing < min_group:
        # The rows with a value stand for the others too: their number would tell how many are missing.
        factor = total / len(present)
        count, missing, total_sum, squares = total, None, total_sum * factor, squares * factor
    told = {"count": count, "missing": missing, "center": center, "sum": total_sum, "squares": max(0.0, squares)}
    if name in asked.edges:
        cells = numpy.histogram(present[:, 0] if width == 1 else present.mean(1), _all_edges(asked.edges[name]))[0]
        noisy = [disturb(f"{name}: cell {place}", int(cell), 1.0) for place, cell in enumerate(cells)]
        shown = with_small_withheld(noisy, min_group, exact=disturb.noise is None)
        if missing is None and disturb.noise is None and None not in shown:
            shown[shown.index(min(count for count in shown if count > 0))] = None  # or the cells' sum would tell
        told["histogram"] = shown
    return told


def _all_edges(edges: Sequence[float]) -> list[float]:
    return [-math.inf, *edges, math.inf]


def _classes(labels: Numbers, asked: Asked, disturb: _Disturbance) -> dict[str, Any] | None:
    """Rows of each class by its name; None where noise could not hide which classes there are."""
    names, counts = numpy.unique(
        numpy.array([_text(label) for label in labels.tolist()], dtype=str), return_counts=True
    )
    found: dict[str, Any] = dict(zip(names.tolist(), counts.tolist(), strict=True))
    if asked.class_names is None:
        return None if disturb.noise is not None else found
    return {name: disturb(f"class {name}", found.get(name, 0), 1.0) for name in asked.class_names}


def _text(label: Any) -> str:
    if isinstance(label, bytes):
        return label.decode()
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def with_small_withheld(counts: Sequence[Any], min_group: int, exact: bool) -> list[Any]:
    """Counts with small ones withheld; and with another, if one alone could be found from the sum of all.

    Args:
        counts: Of the cells.
        min_group: The smallest count that is said, besides 0.
        exact: Whether the counts have no noise; with noise a small one is withheld for its own size alone.
    """
    hidden = {place for place, count in enumerate(counts) if (count > 0 if exact else True) and count < min_group}
    while exact and hidden and sum(counts[place] for place in hidden) < min_group and len(hidden) < len(counts):
        others = [place for place in range(len(counts)) if place not in hidden and counts[place] > 0]
        if not others:
            break
        hidden.add(min(others, key=lambda place: counts[place]))
    return [None if place in hidden else count for place, count in enumerate(counts)]


@dataclass(frozen=True)
class ColumnStatistics:
    """A column over all parties that said something about it."""

    count: float  # rows with a value
    mean: float
    std: float  # of the population
    missing: float | None  # share of rows; None if nobody says it
    histogram: tuple[float, ...] | None  # rows in each cell, without those that are withheld
    num_parties: int


@dataclass(frozen=True)
class Statistics:
    """The training rows of a federation."""

    rows: float
    num_parties: int
    columns: Mapping[str, ColumnStatistics]  # those of which something is known
    classes: Mapping[str, float]  # rows of each class
    withheld_classes: int  # in all parties together; some of them may be known from others

    def deviations(self, names: Sequence[str]) -> tuple[float, ...]:
        """What columns are divided by: their deviations, and 1 for a column that hardly varies."""
        found = [self.columns[name] for name in names]
        return tuple(one.std if one.std > FLAT * abs(one.mean) else 1.0 for one in found)


def merged(summaries: Sequence[Summary], widths: Mapping[str, int] | None = None) -> Statistics:
    """The statistics of all rows behind some summaries.

    Args:
        summaries: Of the parties; those of strangers are `checked` first.
        widths: How many values of a channel a row has; 1 by default.
    """
    columns: dict[str, list[tuple[Summary, dict[str, Any]]]] = {}
    for summary in summaries:
        for name, told in summary["columns"].items():
            if told is not None and told["count"] > 0:
                columns.setdefault(name, []).append((summary, told))
    classes: dict[str, float] = {}
    for summary in summaries:
        for name, count in (summary[CLASSES] or {}).items():
            classes[name] = classes.get(name, 0) + count
    return Statistics(
        math.fsum(summary["rows"] or 0 for summary in summaries),
        len(summaries),
        {name: _merged_column(told, (widths or {}).get(name, 1)) for name, told in columns.items()},
        dict(sorted(classes.items())),
        sum(summary["withheld_classes"] for summary in summaries),
    )


def _merged_column(told: Sequence[tuple[Summary, Mapping[str, Any]]], width: int) -> ColumnStatistics:
    counts = [width * one["count"] for _, one in told]
    means = [one["center"] + one["sum"] / count for (_, one), count in zip(told, counts, strict=True)]
    total = math.fsum(counts)
    # About the mean of the first party, whose distance to the others' is small beside large values.
    origin = means[0]
    mean = origin + math.fsum(c * (m - origin) for c, m in zip(counts, means, strict=True)) / total
    within = math.fsum(one["squares"] - one["sum"] ** 2 / c for (_, one), c in zip(told, counts, strict=True))
    between = math.fsum(c * (m - mean) ** 2 for c, m in zip(counts, means, strict=True))
    stating = [(summary["rows"], _missing(summary, one)) for summary, one in told]
    known = [(rows, part) for rows, part in stating if part is not None]
    missing = math.fsum(part for _, part in known) / math.fsum(rows for rows, _ in known) if known else None
    histograms = [one["histogram"] for _, one in told if "histogram" in one]
    cells = [math.fsum(part or 0 for part in parts) for parts in zip(*histograms, strict=True)]
    std = math.sqrt(max(0.0, (within + between) / total))
    return ColumnStatistics(total / width, mean, std, missing, tuple(cells) if histograms else None, len(told))


def _missing(summary: Summary, told: Mapping[str, Any]) -> float | None:
    """The rows without a value; None if that is withheld."""
    missing: float | None = told["missing"]
    return missing if summary["noise"] is None else max(0.0, float(summary["rows"] - told["count"]))


def checked(value: Any, asked: Asked, widths: Mapping[str, int] | None = None) -> Summary:
    """A summary that a stranger sent, or the reason why it cannot be one.

    Args:
        value: What JSON gave.
        asked: What was asked for.
        widths: How many values of a channel a row has; 1 by default.
    """
    _check(isinstance(value, dict) and value.keys() == set(SUMMARY_PARTS), "sent a summary without the parts of one")
    _check(type(value["version"]) is int and value["version"] == VERSION, "sent a summary of another version")
    noise, rows, least = value["noise"], value["rows"], value["min_group"]
    _check(noise is None or _is_noise(noise), "describes its noise in a way that cannot be read")
    _check(type(least) is int and 1 <= least <= MAX_COUNT, "names a smallest group that cannot be")
    is_exact = noise is None
    _check(rows is None or (_is_count(rows, is_exact) and rows >= least), "says a number of rows that cannot be")
    columns, classes, withheld = value["columns"], value[CLASSES], value["withheld_classes"]
    _check(isinstance(columns, dict) and list(columns) == list(asked.columns), "sent other columns than were asked")
    for name, told in columns.items():
        is_good = told is None or (rows is not None and _is_column(told, name, asked, rows, is_exact, least))
        _check(
            is_good and _fits_spread(told, (widths or {}).get(name, 1), is_exact),
            f"sent numbers of {name!r:.80} that cannot be",
        )
    _check(type(withheld) is int and 0 <= withheld <= MAX_CLASSES, "withholds a number of classes that cannot be")
    _check(classes is not None or withheld == 0, "withholds classes and sends none")
    if classes is not None:
        _check(asked.classes and rows is not None, "sent classes that were not asked")
        _check(isinstance(classes, dict) and _are_names(list(classes), MAX_CLASSES), "sent classes that cannot be read")
        numbers = [name for name in classes if name.isdecimal()]  # which may become the number of classes
        _check(all(len(name) <= 6 and int(name) < MAX_CLASSES for name in numbers), "sent a class that cannot be")
        counts = list(classes.values())
        _check(
            all(_is_count(count, is_exact) and (count >= least or count == 0) for count in counts),
            "sent counts that cannot be",
        )
        _check(
            asked.class_names is None or classes.keys() <= set(asked.class_names), "sent classes that were not asked"
        )
        _check(not is_exact or sum(counts) <= rows, "sent more rows of classes than it has")
    return dict(value)


def _is_noise(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"epsilon", "mechanism", "delta"}:
        return False
    if value["mechanism"] not in ("laplace", "gaussian"):
        return False
    return all(_is_number(value[part]) and value[part] > 0 for part in ("epsilon", "delta"))


def _is_column(told: Any, name: str, asked: Asked, rows: float, is_exact: bool, least: int) -> bool:
    parts = {*COLUMN_PARTS, *(("histogram",) if name in asked.edges else ())}
    if not isinstance(told, dict) or told.keys() != parts:
        return False
    count, missing = told["count"], told["missing"]
    if not _is_count(count, is_exact) or count < least or (is_exact and count > rows):
        return False
    if not all(_is_number(told[part]) for part in ("center", "sum", "squares")):
        return False
    if max(abs(told["center"]), abs(told["sum"]) / count, told["squares"] / count) > MAX_VALUE:
        return False
    if missing is not None and not (is_exact and _is_count(missing, True) and count + missing == rows):
        return False
    if missing is not None and 0 < missing < least:
        return False
    if not all(_is_number(told[part]) for part in ("center", "sum", "squares")) or told["squares"] < 0:
        return False
    if name not in asked.edges:
        return True
    cells = told["histogram"]
    if not isinstance(cells, list) or len(cells) != len(asked.edges[name]) + 1:
        return False
    known = [cell for cell in cells if cell is not None]
    is_good = all(_is_count(cell, is_exact) and (cell >= least or cell == 0) for cell in known)
    return is_good and (not is_exact or sum(known) <= rows)


def _fits_spread(told: Any, width: int, is_exact: bool) -> bool:
    """Whether there are values with this sum and these squares; noise may leave none."""
    if told is None or not is_exact:
        return True
    return bool(told["sum"] ** 2 <= told["squares"] * told["count"] * width * (1 + 1e-9) + 1e-9)


def _is_count(value: Any, is_exact: bool) -> bool:
    kinds = (int,) if is_exact else (int, float)
    return type(value) in kinds and _is_number(value) and abs(value) <= MAX_COUNT and (value >= 0 or not is_exact)


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    return abs(value) < 1e100 and math.isfinite(value)


def _are_names(value: Any, most: int) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) and len(name) <= MAX_NAME for name in value):
        return False
    return len(value) <= most and len(set(value)) == len(value)


def _are_rising(value: Any) -> bool:
    if not isinstance(value, list) or not all(map(_is_number, value)):
        return False
    return all(low < high for low, high in pairwise(value))


def _check(is_good: bool, sentence: str) -> None:
    if not is_good:
        raise SummaryError(sentence)
