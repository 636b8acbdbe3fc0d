"""A run's clients and the form of their examples, without the examples."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy
import torch
from numpy.typing import NDArray

from pfedhn import keys
from pfedhn.data.arrays import as_whole_numbers
from pfedhn.data.reading import Reading
from pfedhn.errors import UserError, closest, short

if TYPE_CHECKING:
    from pfedhn.data.federation import Federation


@dataclass(frozen=True)
class Description:
    """A run's clients and the form of their examples."""

    clients: int
    shape: tuple[int, ...]  # of one example
    dtype: str
    label_shape: tuple[int, ...]
    label_dtype: str
    largest_train_size: int  # of a client; minibatches are that wide at most
    name: str | None = None  # of the data set
    classes: int | None = None
    client_names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    identities: tuple[int, ...] | None = None  # what clients without names draw by, if not their numbers
    architectures: tuple[str, ...] | None = None
    descriptor_dim: int | None = None
    preprocessing: Mapping[str, Any] | None = None  # what was done to the raw data
    reading: Reading | None = None  # how the examples were read; runs of earlier versions do not say it

    @staticmethod
    def of(federation: "Federation") -> "Description":
        names, identities = federation.names, federation.identities
        return Description(
            federation.num_clients,
            tuple(federation.x.shape[1:]),
            _dtype_name(federation.dtype),
            tuple(federation.y.shape[1:]),
            _dtype_name(federation.y.dtype),
            federation.largest_train_size,
            classes=federation.num_classes,
            client_names=names,
            class_names=federation.class_names,
            identities=tuple(identities.tolist()) if identities is not None and names is None else None,
            architectures=federation.architectures,
            descriptor_dim=federation.descriptor_dim,
            reading=federation.reading,
        )

    def name_of(self, number: int) -> str:
        """The client's name, or its number."""
        if self.client_names is not None:
            return self.client_names[number]
        return str(number if self.identities is None else self.identities[number])

    def number_of(self, client: int | str) -> int:
        """A client's number: its position in every table.

        Args:
            client: Its name or its number, which may be text if no client's name is a number.
        """
        places, known = self._places, self.identities
        if isinstance(client, str) and places is not None:
            if client in places:
                return places[client]
            # If names are numbers themselves, one that is no name is a slip.
            if not client.isdecimal() or any(name.isdecimal() for name in places):
                hint = f"{closest(client, places)} One that did not train can join by `pfedhn add-client`."
                raise UserError(f"there is no client {client!r}; {hint}")
        first, last, number = 0, self.clients - 1, as_whole_numbers(client)
        if isinstance(client, str):  # without a name it is called by its number
            number = as_whole_numbers(int(client)) if client.isdecimal() else None
            if places is None and known is not None and number is not None:
                first, last = min(known), max(known)
                number = as_whole_numbers(known.index(int(number))) if int(number) in known else None
        if number is None or number.ndim or not 0 <= number < self.clients:
            raise UserError(f"there is no client {short(client)}; they are numbered from {first} to {last}.")
        return int(number)

    @cached_property
    def _places(self) -> dict[str, int] | None:
        names = self.client_names
        return None if names is None else {name: number for number, name in enumerate(names)}

    def identity(self, number: int) -> int:
        """The number that keys a client's draws, on every machine."""
        if self.client_names is not None:
            return keys.hash_text(self.client_names[number])
        return number if self.identities is None else self.identities[number]

    def prepared(self, x: NDArray[Any]) -> NDArray[numpy.float32]:
        """Examples as the run was trained on them: whole numbers are pixels, and treated as its own were."""
        steps = self.preprocessing
        values: NDArray[numpy.float32] = x.astype(numpy.float32)
        if x.dtype.kind not in "iu" or steps is None:
            return values
        values = values / float(steps["scale"])
        if len(self.shape) == 3:  # [N, height, width, channels], or without channels
            values = values[..., None] if values.ndim == 3 else values
            if values.shape[-1] == self.shape[0]:
                values = numpy.moveaxis(values, -1, 1)
        channels = (-1, *([1] * (values.ndim - 2)))
        mean, std = (numpy.array(steps[name], dtype=numpy.float32).reshape(channels) for name in ("mean", "std"))
        return ((values - mean) / std).astype(numpy.float32)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
