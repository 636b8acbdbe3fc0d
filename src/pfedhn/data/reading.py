"""How a run's examples were read from files; it is kept with the run, so that later examples are read alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

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
    """The mean and the standard deviation of each input of a network, over all clients' training examples."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]  # 1 for an input that is always the same, which is only centered


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
    scaling: Scaling | None = None  # of the inputs
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


def reading_card(how: Reading | None, shape: Sequence[int], fill: Sequence[float] | None) -> dict[str, Any]:
    """The inputs of a model as plain values for its card; empty if they are unknown.

    Args:
        how: How the run read its examples.
        shape: Of one example.
        fill: The values of this client's empty cells, feature by feature.
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
    table = how.table
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
    if table.scaling is not None:
        inside = {"mean": list(table.scaling.mean), "deviation": list(table.scaling.deviation), "clip": MAX_DEVIATIONS}
    return {"shape": [len(table.features)], "columns": columns, "scaling": inside or None}


def label_card(how: Reading | None) -> dict[str, Any] | None:
    """The label of a table as plain values for a model's card."""
    if how is None or how.table is None:
        return None
    label: dict[str, Any] = {"name": how.table.label}
    if how.table.target is not None:
        label |= {"mean": how.table.target[0], "deviation": how.table.target[1]}
    return label
