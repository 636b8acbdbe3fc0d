"""Statistics before training: what SPEC leaves to the federation, what a party says, and SPEC with numbers.

    server   asked_of(spec) -> Asked, which goes to every party as `Asked.to_json()`
    party    party_summary(path, name, spec, Asked.of(...), min_group=...) -> a summary, plain JSON
    server   received(summary, spec), then statistics_of(spec, summaries), then resolved(spec, statistics)

The server sends what it resolved to the parties (`resolved_data`), who go on with it as if it had stood in the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.data.federation import Federation
from pfedhn.data.federation_summary import channels
from pfedhn.data.labels import as_numbers
from pfedhn.data.summaries import Asked, Noise, Statistics, Summary, checked, merged, summary_of
from pfedhn.deploy.examples import raw_examples
from pfedhn.deploy.spec import FEDERATION, Data, FederationSpec, check_data, unresolved
from pfedhn.errors import UserError
from pfedhn.experiments.data import dealing
from pfedhn.settings import build


def asked_of(
    spec: FederationSpec,
    edges: Mapping[str, tuple[float, ...]] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> Asked:
    """What the parties of a SPEC are asked for: nothing if it leaves nothing to the federation.

    Args:
        spec: Of the federation.
        edges: Inner edges of histograms by column, if these are wanted too.
        bounds: What values of a column lie between, for parties that add noise; those of SPEC by default.
    """
    data, left = spec.data, unresolved(spec.data)
    wanted = {"mean", "std"} & set(left) or edges
    names = data.classes if isinstance(data.classes, tuple) else None
    return Asked(
        columns_of(spec) if wanted else (),
        "classes" in left,
        edges or {},
        spec.bounds if bounds is None else bounds,
        names,
    )


def columns_of(spec: FederationSpec) -> tuple[str, ...]:
    """The features of a table, or the numbers of the channels of an array."""
    data = spec.data
    return data.features or tuple(map(str, range(data.example_shape[0])))


def widths_of(spec: FederationSpec) -> dict[str, int]:
    """How many values of each channel an example has."""
    width = int(numpy.prod(spec.data.example_shape[1:], dtype=numpy.int64))
    return dict.fromkeys(columns_of(spec), width)


def party_summary(
    path: str | Path,
    name: str,
    spec: FederationSpec,
    asked: Asked,
    *,
    min_group: int,
    noise: Noise | None = None,
    key: int | None = None,
) -> Summary:
    """What a party says about its training rows.

    Args:
        path: Its own data, as it joins with them.
        name: The party's.
        spec: Of the federation.
        asked: What the server wants to know, which the party may have cut down.
        min_group: Numbers of groups with fewer rows are withheld.
        noise: Noise on every number.
        key: What noise is drawn from; by default the operating system's randomness.
    """
    x, y = raw_examples(path, spec, is_counted=True)
    rows = training_rows(y, name, spec)
    values = channels(x[rows].astype(numpy.float64))
    columns = dict(zip(columns_of(spec), values.values(), strict=True))
    labels = as_numbers(y[rows]) if asked.classes else None
    return summary_of(columns, asked, min_group=min_group, labels=labels, noise=noise, key=key)


def training_rows(y: NDArray[Any], name: str, spec: FederationSpec) -> NDArray[numpy.int64]:
    """The numbers of the rows that a party will train on."""
    labels = as_numbers(y) if spec.data.classes is not None else y
    # The order of the classes is that of the federation's, so a stratified split is the same.
    _, numbers = numpy.unique(labels, return_inverse=True)
    places = numpy.arange(len(y))[:, None]
    federation = Federation.from_clients({name: (places, numbers.reshape(-1))}, **dealing(spec.cell, spec.seed))
    rows: NDArray[numpy.int64] = federation.x[federation.splits["train"].of(0), 0].numpy()
    return rows


def received(summary: Any, spec: FederationSpec, asked: Asked) -> Summary:
    """A summary that a party sent; `SummaryError` says why it cannot be one."""
    return checked(summary, asked, widths_of(spec))


def statistics_of(spec: FederationSpec, summaries: Sequence[Summary]) -> Statistics:
    """The statistics of a federation from its parties' checked summaries."""
    return merged(summaries, widths_of(spec))


def resolved(spec: FederationSpec, statistics: Statistics) -> FederationSpec:
    """A SPEC in which the federation's statistics stand for what it left to them."""
    return with_data(spec, resolved_data(spec, statistics))


def resolved_data(spec: FederationSpec, statistics: Statistics) -> dict[str, Any]:
    """What SPEC left to the federation, as JSON can hold it."""
    left, names = unresolved(spec.data), columns_of(spec)
    found: dict[str, Any] = {}
    if {"mean", "std"} & set(left):
        if unknown := [name for name in names if name not in statistics.columns]:
            raise UserError(
                f"no party says enough about {unknown[0]!r} to scale it; write `mean` and `std` into [data], or ask "
                "parties to allow smaller groups."
            )
        values = {"mean": [statistics.columns[name].mean for name in names], "std": list(statistics.deviations(names))}
        found |= {part: values[part] for part in ("mean", "std") if part in left}
    if "classes" in left:
        found["classes"] = _classes(statistics)
    return found


def _classes(statistics: Statistics) -> list[str] | int:
    """The names of the classes, sorted; how many there are, if all are numbers from 0."""
    names = list(statistics.classes)
    if not names:
        raise UserError("no party says which classes it has; write `classes` into [data].")
    if all(name.isascii() and name.isdecimal() and str(int(name)) == name for name in names):
        return max(map(int, names)) + 1
    return sorted(names)


def with_data(spec: FederationSpec, values: Mapping[str, Any]) -> FederationSpec:
    """A SPEC with what the server resolved; a party checks what a stranger sent by it, too."""
    left = unresolved(spec.data)
    if set(values) != set(left):
        raise UserError(f"the server resolved {sorted(values)} of [data], and the file leaves {sorted(left)} open.")
    if any(value is None or value == FEDERATION for value in values.values()):
        raise UserError("the server left parts of [data] open; it must send numbers.")
    stated = {name: value for name, value in vars(spec.data).items() if name not in left}
    data = build(Data, {**stated, **values}, "[data]")
    check_data(data)
    return replace(spec, data=data)
