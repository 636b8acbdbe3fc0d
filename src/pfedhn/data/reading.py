"""How a run's examples were read from files; it is kept with the run, so that later examples are read alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from pfedhn.statistics import MAX_DEVIATIONS

RESIZED_WITH = "Pillow's Image.resize with Image.Resampling.BILINEAR"


@dataclass(frozen=True)
class Column:
    """A column of a table that examples are made of."""

    name: str
    texts: tuple[str, ...] | None = None  # a feature of zeros and ones for each; one number where None

    @property
    def features(self) -> list[str]:
        """The names of its features, in order."""
        return [self.name] if self.texts is None else [f"{self.name}={text}" for text in self.texts]


@dataclass(frozen=True)
class Scaling:
    """The mean and the standard deviation of each input of a network, over training examples."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]  # 1 for an input that is always the same, which is only centered


class ClientReading(NamedTuple):
    """How the cells of one client become a network's inputs."""

    fill: tuple[float, ...] | None  # what its empty cells are filled with, feature by feature; None if they are refused
    scaling: Scaling | None  # of the inputs


@dataclass(frozen=True)
class TableReading:
    """How a table was read."""

    client: str  # the columns that are no features
    label: str
    columns: tuple[Column, ...]  # those that are, in the order of the features
    missing: str = "refuse"  # as in `Encoding`
    fitted: str = "client"
    common: tuple[float, ...] | None = None  # what empty cells are filled with, feature by feature: for everybody
    own: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # and for clients with their own medians
    sha256: str = ""  # of the file
    flagged: tuple[str, ...] = ()  # columns of numbers that have an input of 0 or 1 for an empty cell
    scaling: Scaling | None = None  # of the inputs, over all clients' training examples
    own_scaling: Mapping[str, Scaling] = field(default_factory=dict)  # of clients that scale by their own
    target: tuple[float, float] | None = None  # mean and deviation of numbers to predict, which the network learns

    @property
    def features(self) -> list[str]:
        """The names of the features that columns are encoded as; their empty cells are NaN."""
        return [feature for column in self.columns for feature in column.features]

    @property
    def inputs(self) -> list[str]:
        """The names of a network's inputs: the features, filled in and scaled, and then the flags of empty cells."""
        return [*self.features, *(f"{name} missing" for name in self.flagged)]

    @property
    def flagged_places(self) -> list[int]:
        """The places among the features of the columns with flags."""
        starts = accumulate((len(column.features) for column in self.columns), initial=0)
        return [start for start, column in zip(starts, self.columns, strict=False) if column.name in self.flagged]

    @property
    def is_filled(self) -> bool:
        """Whether empty cells are filled in."""
        return self.missing != "refuse"

    def fill_of(self, client: str) -> tuple[float, ...] | None:
        """The values of a client's empty cells, feature by feature; None if these are refused."""
        if not self.is_filled:
            return None
        return self.own.get(client, self.common or (0.0,) * len(self.features))

    def reading_of(self, client: str) -> ClientReading:
        """How a client's cells become inputs; one that is not of the run is treated as all clients together."""
        return ClientReading(self.fill_of(client), self.own_scaling.get(client, self.scaling))

    def scaled(self, values: Any) -> Any:
        """Labels, an array or a tensor of numbers, as the network learns them."""
        return values if self.target is None else (values - self.target[0]) / self.target[1]

    def unscaled(self, values: Any) -> Any:
        """Predictions of the network, an array or a tensor, in the units of the label."""
        return values if self.target is None else values * self.target[1] + self.target[0]


@dataclass(frozen=True)
class ImageReading:
    """How images were read."""

    channels: str
    corrupt: str = "refuse"
    resize: tuple[int, ...] | None = None  # height and width


@dataclass(frozen=True)
class Reading:
    """How examples were read: from a table, or from images."""

    table: TableReading | None = None
    images: ImageReading | None = None


def reading_card(how: Reading | None, shape: Sequence[int], client: ClientReading | None) -> dict[str, Any]:
    """The inputs of a model as plain values for its card; empty if they are unknown.

    Args:
        how: How the run read its examples.
        shape: Of one example.
        client: How this client's cells of a table become inputs.
    """
    if how is None:
        return {}
    if how.images is not None:
        return {
            "images": {
                "channels": ["gray"] if how.images.channels == "gray" else ["red", "green", "blue"],
                "height": shape[1],
                "width": shape[2],
                "resized_with": None if how.images.resize is None else RESIZED_WITH,
                "pixels_divided_by": 255,
            }
        }
    if how.table is None:
        return {}
    table, fill, scaling = how.table, *(client or ClientReading(None, how.table.scaling))
    columns: list[dict[str, Any]] = []
    place = 0
    for column in table.columns:
        told: dict[str, Any] = {"name": column.name}
        if column.texts is not None:
            told["texts"] = list(column.texts)
        elif fill is not None:
            told |= {"empty": fill[place]} | ({"flagged": True} if column.name in table.flagged else {})
        columns.append(told)
        place += len(column.features)
    inside: dict[str, Any] = {}
    if scaling is not None:
        inside = {"mean": list(scaling.mean), "deviation": list(scaling.deviation), "clip": MAX_DEVIATIONS}
        inside |= {"over": "this client's"} if table.own_scaling else {}
    return {"shape": [len(table.features)], "columns": columns, "scaling": inside or None}


def label_card(how: Reading | None) -> dict[str, Any] | None:
    """The label of a table as plain values for a model's card."""
    if how is None or how.table is None:
        return None
    label: dict[str, Any] = {"name": how.table.label}
    if how.table.target is not None:
        label |= {"mean": how.table.target[0], "deviation": how.table.target[1]}
    return label
