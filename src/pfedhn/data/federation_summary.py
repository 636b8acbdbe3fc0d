"""Statistics of a simulated federation, from the summaries that its clients would send as parties."""

from dataclasses import replace

import numpy
import torch
from numpy.typing import NDArray

from pfedhn import keys
from pfedhn.data.columns import scaled
from pfedhn.data.federation import Federation
from pfedhn.data.reading import Reading, Scaling
from pfedhn.data.summaries import Asked, Noise, Statistics, Summary, merged, summary_of


def names_of(federation: Federation) -> tuple[str, ...]:
    """The columns of a table, or the numbers of the features of an array or of the channels of images."""
    table = None if federation.reading is None else federation.reading.table
    return tuple(map(str, range(federation.x.shape[1]))) if table is None else tuple(table.inputs)


def channels(x: NDArray[numpy.float64]) -> dict[str, NDArray[numpy.float64]]:
    """The values [N, M] of each feature or channel of examples [N, C, ...], by its number."""
    parts = x.reshape(len(x), x.shape[1], -1)
    return {str(place): parts[:, place] for place in range(x.shape[1])}


def client_summary(
    federation: Federation, client: int, asked: Asked, min_group: int, noise: Noise | None = None, seed: int = 0
) -> Summary:
    """What a client says about its training examples."""
    mine = federation.splits["train"].of(client)
    x, y = federation.examples(mine)
    values = channels(x.double().cpu().numpy())
    columns = dict(zip(names_of(federation), values.values(), strict=True))
    labels = None
    if asked.classes:
        known = federation.class_names
        labels = y.cpu().numpy() if known is None else numpy.array(known)[y.cpu().numpy()]
    key = int(keys.fold(seed, "summary", federation.name_of(client)))
    return summary_of(columns, asked, min_group=min_group, labels=labels, noise=noise, key=key)


def federation_statistics(
    federation: Federation,
    asked: Asked | None = None,
    *,
    min_group: int = 1,
    noise: Noise | None = None,
    seed: int = 0,
) -> Statistics:
    """The statistics of all clients' training examples, as a server gets them.

    Args:
        federation: The clients; its examples are not scaled yet.
        asked: What is wanted; by default mean and deviation of everything, and classes if there are any.
        min_group: Numbers of groups with fewer rows are withheld.
        noise: Noise on every number.
        seed: What noise is drawn from.
    """
    if asked is None:
        asked = Asked(names_of(federation), classes=federation.num_classes is not None)
    summaries = [
        client_summary(federation, client, asked, min_group, noise, seed) for client in range(federation.num_clients)
    ]
    return merged(summaries, widths_of(federation))


def widths_of(federation: Federation) -> dict[str, int]:
    """How many values of each channel an example has."""
    width = int(numpy.prod(federation.x.shape[2:], dtype=numpy.int64))
    return dict.fromkeys(names_of(federation), width)


def scaled_with(federation: Federation, statistics: Statistics) -> Federation:
    """The same federation with examples scaled by the statistics of its clients; labels stay as they are."""
    names = names_of(federation)
    scaling = Scaling(tuple(statistics.columns[name].mean for name in names), statistics.deviations(names))
    table = None if federation.reading is None else federation.reading.table
    if table is not None:
        table = replace(table, scaling=scaling)
        return replace(federation, x=scaled(federation.x, scaling), reading=Reading(table))
    shape = (-1, *[1] * (federation.x.ndim - 2))
    x = federation.x if federation.x.is_floating_point() else federation.x.float()
    mean, deviation = (torch.tensor(part, dtype=x.dtype).reshape(shape) for part in (scaling.mean, scaling.deviation))
    return replace(federation, x=(x - mean) / deviation)
