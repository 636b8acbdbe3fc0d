"""How a run's examples were read from files; it is kept with the run, so that later examples are read alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    target: tuple[float, float] | None = None  # mean and deviation of the labels that the network learns to predict

    def unscaled(self, values: Any) -> Any:
        """Predictions or labels of the network in the units of the label's column."""
        if self.target is None:
            return values
        mean, deviation = self.target
        return values * deviation + mean

    @property
    def features(self) -> list[str]:
        return [feature for column in self.columns for feature in column.features]

    @property
    def is_filled(self) -> bool:
        """Whether empty cells are filled in."""
        return self.missing != "refuse"

    def fill_of(self, client: str) -> tuple[float, ...] | None:
        """The values of a client's empty cells, feature by feature; None if these are refused."""
        if not self.is_filled:
            return None
        return self.own.get(client, self.common or (0.0,) * len(self.features))


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
    columns: list[dict[str, Any]] = []
    place = 0
    for column in how.table.columns:
        told: dict[str, Any] = {"name": column.name}
        if column.texts is not None:
            told["texts"] = list(column.texts)
        elif fill is not None:
            told["empty"] = fill[place]
        columns.append(told)
        place += len(column.features)
    return {"columns": columns}
