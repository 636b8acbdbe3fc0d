"""A federation without its data: who the clients are and what their examples look like, where these are elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn.data.arrays import SPLITS, Arrays
from pfedhn.data.batches import Examples
from pfedhn.data.federation import Federation
from pfedhn.data.reading import Reading
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.sgd import Batches

NO_EXAMPLES = (
    "a run that was loaded does not have its clients' examples; give those that are needed, e.g. as "
    "personal_model(client, data=(x, y))."
)


@dataclass(frozen=True)
class Description:
    """What is known of clients and their examples without seeing one."""

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
    def of(federation: Federation) -> "Description":
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


@dataclass(frozen=True, eq=False, repr=False)
class AbsentFederation(Federation):
    """A federation that was described; whoever needs an example of it is told that it has none."""

    description: Description = field(kw_only=True)

    @staticmethod
    def of(description: Description, device: torch.device | str) -> "AbsentFederation":
        def empty(dtype: str, shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(0, *shape, dtype=getattr(torch, dtype), device=device)

        sizes = torch.zeros(description.clients, dtype=torch.int64, device=device)
        descriptors = None
        if description.descriptor_dim is not None:  # each client's own is in the server's memory of it
            descriptors = torch.zeros(1, description.descriptor_dim, device=device).expand(description.clients, -1)
        return AbsentFederation(
            empty(description.dtype, description.shape),
            empty(description.label_dtype, description.label_shape),
            {name: Examples(empty("int64", ()), sizes, sizes) for name in SPLITS},
            descriptors=descriptors,
            architectures=description.architectures,
            identities=None if description.identities is None else torch.tensor(description.identities, device=device),
            names=description.client_names,
            class_names=description.class_names,
            reading=description.reading,
            description=description,
        )

    @property
    def num_classes(self) -> int | None:
        return self.description.classes

    @property
    def largest_train_size(self) -> int:
        return self.description.largest_train_size

    @property
    def class_shares(self) -> Tensor:
        raise UserError(NO_EXAMPLES)

    def _check_examples(self) -> None:
        if not len(self.x):
            raise UserError(NO_EXAMPLES)

    def batches(self, clients: Tensor, key: Key, num_batches: int, batch_size: int) -> Batches:
        if num_batches:
            self._check_examples()
            return super().batches(clients, key, num_batches, batch_size)
        shape = (len(clients), 0, min(batch_size, self.largest_train_size))
        kinds = ((self.x, self.dtype), (self.y, self.y.dtype))
        x, y = (part.new_zeros(*shape, *part.shape[1:], dtype=dtype) for part, dtype in kinds)
        return Batches(x, y, torch.zeros(shape, dtype=torch.bool, device=self.x.device))

    def examples(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        self._check_examples()
        return super().examples(numbers)


def with_examples(federation: Federation, client: int, data: Arrays) -> Federation:
    """A federation that has the training examples of one client alone, and draws from them as that client does."""
    x = federation.x
    dtype = federation.dtype if federation.dtype.is_floating_point else None
    given = Federation.from_clients([{"train": data}]).to(x.device, dtype)
    if given.x.shape[1:] != x.shape[1:]:
        raise UserError(
            f"the examples have the shape {tuple(given.x.shape[1:])}; this run's have {tuple(x.shape[1:])}."
        )
    size = torch.zeros(federation.num_clients, dtype=torch.int64, device=x.device)
    size[client] = len(given.x)
    train = Examples(torch.arange(len(given.x), device=x.device), torch.zeros_like(size), size)
    # As wide a minibatch as among the others: with another width, sums round otherwise.
    absent = AbsentFederation.of(Description.of(federation), x.device)
    return replace(absent, x=given.x, y=given.y, palette=given.palette, splits={**absent.splits, "train": train})
