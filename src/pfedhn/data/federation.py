"""Who owns which rows of data; cohorts and minibatches, each a function of (seed, round, client).

Axes: [N] clients, [C]lients of a cohort, [K] steps, [B]atch.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pfedhn import keys
from pfedhn.data import partition as partitions
from pfedhn.errors import UserError, closest, some
from pfedhn.keys import Key
from pfedhn.sgd import Batches

SPLITS = ("train", "validation", "test")
Arrays: TypeAlias = tuple[ArrayLike | Tensor, ArrayLike | Tensor]
ClientData: TypeAlias = Arrays | Mapping[str, Arrays]


@dataclass(frozen=True)
class Examples:
    """The rows of every client in one split: client i owns index[offset[i] : offset[i] + size[i]]."""

    index: Tensor
    offset: Tensor  # [N]
    size: Tensor  # [N]

    def of(self, client: int) -> Tensor:
        start = int(self.offset[client])
        return self.numbers(torch.arange(start, start + int(self.size[client]), device=self.offset.device))

    def numbers(self, places: Tensor) -> Tensor:
        """The row numbers at these places of `index`."""
        return self.index[places]

    def __len__(self) -> int:
        return len(self.offset)


class ExamplesInOrder(Examples):
    """Rows numbered client after client, so that no index is kept: place and number are one."""

    def numbers(self, places: Tensor) -> Tensor:
        return places


@dataclass(frozen=True, eq=False)
class Federation:
    """A set of clients, each with training, validation and test rows of its own.

    Make one with `Federation.from_arrays` (one data set, split among clients by a rule) or
    `Federation.from_clients` (every client brings its own arrays).

    >>> import numpy, pfedhn
    >>> x, y = numpy.random.default_rng(0).normal(size=(600, 8)), numpy.arange(600) % 6
    >>> federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=12), seed=0)
    >>> federation.num_clients
    12
    """

    x: Tensor
    y: Tensor
    splits: Mapping[str, Examples]
    unused: Mapping[str, int] = field(default_factory=dict)
    descriptors: Tensor | None = None  # [N, D], for `embedding="fixed"`; the clients' class shares where not given
    architectures: tuple[str, ...] | None = None  # [N], which of several target networks each client runs
    names: tuple[str, ...] | None = None  # [N]; clients are called by their numbers where None
    class_names: tuple[str, ...] | None = None
    identities: Tensor | None = None  # [N], what clients draw by: from their names, or numbers that do not begin at 0
    joining: "Federation | None" = None  # clients that take part after training, with the same x and y

    def __post_init__(self) -> None:
        if self.names is not None and self.identities is None:
            _check_names(self.names, self.num_clients)
            identities = torch.tensor(list(map(keys.hash_text, self.names)), device=self.splits["train"].size.device)
            object.__setattr__(self, "identities", identities)

    def with_training_examples(self) -> "Federation":
        """Itself, unless a client has nothing to train on."""
        empty = [self.name_of(client) for client in (self.splits["train"].size == 0).nonzero().flatten().tolist()]
        if empty:
            raise UserError(
                f"client{'s' if len(empty) > 1 else ''} {some(empty)} would have no training rows; "
                "use fewer clients, more data or a milder split."
            )
        if self.joining is not None:
            self.joining.with_training_examples()
        return self

    def checked(self) -> "Federation":
        """Itself, unless its data could not be trained on."""
        self.with_training_examples()
        _check_values(self.x, self.y)
        if self.class_names is not None:
            if self.num_classes is None:
                raise UserError("y does not hold class numbers, so class_names have nothing to name; leave them out.")
            if (top := int(self.y.max())) >= self.num_classes:
                raise UserError(f"y holds the class {top}, and class_names has {self.num_classes}; name every class.")
        return self

    @staticmethod
    def from_arrays(
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        partition: "partitions.Partition",
        *,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        seed: int = 0,
        test: Arrays | None = None,
        groups: ArrayLike | Tensor | None = None,
        coarse: ArrayLike | Tensor | None = None,
        test_coarse: ArrayLike | Tensor | None = None,
        stratify: bool = False,
        class_names: Sequence[str] | None = None,
    ) -> "Federation":
        """Share one data set out among clients.

        Args:
            x: The examples, one after the other.
            y: Their class numbers, from 0.
            partition: Who gets which examples, for instance `pfedhn.by_classes(2, num_clients=50)`.
            split: The fractions of the examples for training, validation and test, drawn at random; every client's
                share of a class is the same in all three. With `test`, the third is 0.
            seed: The seed of the split and of the partition.
            test: (x, y), where the data set has test examples of its own.
            groups: The group of each example, for `by_group`.
            coarse: The coarse class of each example, for `by_coarse_class`.
            test_coarse: The coarse class of each example in `test`.
            stratify: Draw the split within each class instead of over all examples.
            class_names: What classes 0, 1, ... are called.
        """
        rows, labels = _tensor(x), _tensor(y)
        _check_lengths(rows, labels)
        test_rows, test_labels = (None, None) if test is None else (_tensor(test[0]), _tensor(test[1]))
        if test_rows is not None and test_labels is not None:
            _check_lengths(test_rows, test_labels)
            rows = torch.cat([rows, test_rows])
        assignment = share_out(
            labels,
            partition,
            split=split,
            seed=seed,
            test_labels=test_labels,
            groups=_optional(groups),
            coarse=_optional(coarse),
            test_coarse=_optional(test_coarse),
            stratify=stratify,
        )
        everything = labels if test_labels is None else torch.cat([labels, test_labels])
        return Federation.from_assignment(rows, everything, assignment, class_names).checked()

    @staticmethod
    def from_assignment(
        x: Tensor, y: Tensor, assignment: partitions.Assignment, class_names: Sequence[str] | None = None
    ) -> "Federation":
        """A federation of clients that own these examples; the assignment's novel clients are those that join later."""
        count, total = assignment.num_clients - assignment.num_novel, assignment.num_clients

        def owned(start: int, end: int) -> dict[str, Examples]:
            return {name: _rows(assignment.clients[name][start:end]) for name in SPLITS}

        named = None if class_names is None else tuple(class_names)
        joining = None
        if count < total:
            joining = Federation(x, y, owned(count, total), class_names=named, identities=torch.arange(count, total))
        unused = {name: len(left) for name, left in assignment.unused.items()}
        return Federation(x, y, owned(0, count), unused, class_names=named, joining=joining)

    @staticmethod
    def from_clients(
        clients: Sequence[ClientData] | Mapping[str, ClientData],
        *,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        stratify: bool = False,
        seed: int = 0,
        class_names: Sequence[str] | None = None,
    ) -> "Federation":
        """A federation of clients that bring their own data.

        A client with a name draws its split and its minibatches by it, so that it draws on a machine of its own what it
        draws among the others.

        Args:
            clients: A list, or a mapping from each client's own name. A client is either (x, y), which is split at
                random, or the splits themselves, as {"train": (x, y), "validation": (x, y), "test": (x, y)}.
            split: The fractions of a client's examples for training, validation and test.
            stratify: Draw each client's split within each of its classes instead of over all its examples.
            seed: The seed of the split.
            class_names: What classes 0, 1, ... are called.

        Examples:
            >>> import numpy, pfedhn
            >>> x, y = numpy.random.default_rng(0).normal(size=(40, 8)), numpy.arange(40) % 2
            >>> clients = {"lyon": (x[:20], y[:20]), "paris": (x[20:], y[20:])}
            >>> pfedhn.Federation.from_clients(clients).number_of("paris")
            1
        """
        if not clients:
            raise UserError("a federation needs at least one client.")
        names = tuple(clients) if isinstance(clients, Mapping) else None
        if names is not None:
            _check_names(names, len(clients))
            if set(names) <= set(SPLITS):
                raise UserError(
                    f"{some(names)} are splits of one client; give a list of clients, or a mapping from their names."
                )
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        owned: dict[str, list[NDArray[numpy.int64]]] = {name: [] for name in SPLITS}
        start = 0
        for number, client in enumerate(clients.values() if isinstance(clients, Mapping) else clients):
            if isinstance(client, Mapping):
                given = _splits(repr(names[number]) if names else number, client)
                for name in SPLITS:
                    length = 0
                    if name in given:
                        x, y = given[name]
                        _check_lengths(x, y)
                        xs.append(x)
                        ys.append(y)
                        length = len(x)
                    owned[name].append(numpy.arange(start, start + length))
                    start += length
            else:
                x, y = _tensor(client[0]), _tensor(client[1])
                _check_lengths(x, y)
                parts = _split(
                    y.numpy(),
                    split,
                    stratify,
                    keys.fold(seed, "partition", "split", names[number] if names else number),
                )
                for name, part in zip(SPLITS, parts, strict=True):
                    owned[name].append(start + part)
                xs.append(x)
                ys.append(y)
                start += len(x)
        shapes = {tuple(x.shape[1:]) for x in xs if len(x)}
        if len(shapes) > 1:
            raise UserError(f"clients bring rows of different shapes {sorted(shapes)}; one network needs one shape.")
        return Federation(
            torch.cat(xs),
            torch.cat(ys),
            {name: _rows(lists) for name, lists in owned.items()},
            names=names,
            class_names=None if class_names is None else tuple(class_names),
        ).checked()

    @staticmethod
    def lazy(
        num_clients: int,
        load: Callable[[int], Mapping[str, Arrays]],
        *,
        train: int | ArrayLike | Tensor,
        validation: int | ArrayLike | Tensor = 0,
        test: int | ArrayLike | Tensor = 0,
        num_cached: int = 1_024,
    ) -> "Federation":
        """A federation whose data are made or loaded when a client takes part or is tested, so that it may be large.

        load: client number -> {"train": (x, y), "validation": (x, y), "test": (x, y)}, the same at every call.
        train, validation, test: how many rows each client has, one number for all or one per client.
        num_cached: of how many clients, the last ones used, the data are kept.

        To test a million clients takes as long as it sounds: `evaluating` chooses some of them.
        """
        number = _whole_numbers(num_clients)
        if number is None or number.ndim or number < 1:
            raise UserError(f"a federation needs at least one client, not {_short(num_clients)}.")
        num_clients = int(number)
        given = zip(SPLITS, (train, validation, test), strict=True)
        sizes = {name: _counts(name, value, num_clients) for name, value in given}
        total = sum(sizes.values(), torch.zeros(num_clients, dtype=torch.int64))
        offset, splits = total.cumsum(0) - total, {}
        for name, size in sizes.items():
            splits[name] = ExamplesInOrder(torch.empty(0, dtype=torch.int64), offset, size)
            offset = offset + size
        first = _loaded(load, 0)
        if "train" not in first:
            raise UserError(f"client 0 brings no train rows; {EXPECTED}.")
        x, y = first["train"]
        return LazyFederation(x, y, splits, load=load, ends=offset, num_cached=num_cached).checked()

    @property
    def num_clients(self) -> int:
        """How many clients train; those that join later are not counted."""
        return len(self.splits["train"])

    @property
    def num_joining(self) -> int:
        """How many clients join later."""
        return 0 if self.joining is None else self.joining.num_clients

    @cached_property
    def num_classes(self) -> int | None:
        """None where y is not a class number."""
        if self.y.is_floating_point() or self.y.ndim > 1:
            return None
        return int(self.y.max()) + 1 if self.class_names is None else len(self.class_names)

    @cached_property
    def class_shares(self) -> Tensor:
        """[N, classes]: the fraction of each class in a client's training rows."""
        if self.num_classes is None:
            raise UserError("this federation has no class labels to describe clients by; give it descriptors.")
        counts = torch.stack(
            [
                torch.bincount(self.y[self.splits["train"].of(i)], minlength=self.num_classes)
                for i in range(self.num_clients)
            ]
        )
        return (counts / counts.sum(1, keepdim=True)).to(self.x.dtype if self.x.is_floating_point() else torch.float32)

    @property
    def descriptor_dim(self) -> int | None:
        """How many numbers describe a client where embeddings are fixed."""
        return self.num_classes if self.descriptors is None else self.descriptors.shape[1]

    @cached_property
    def largest_train_size(self) -> int:
        return int(self.splits["train"].size.max())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Federation":
        """The same federation with its data on a device, its floating-point data in `dtype`, images channels last.

        The shape of an image stays [C, H, W]; only its order in memory changes, which convolutions run faster on.
        """

        def move(value: Tensor) -> Tensor:
            return value.to(device, dtype if dtype and value.is_floating_point() else value.dtype)

        splits = {
            name: replace(rows, index=rows.index.to(device), offset=rows.offset.to(device), size=rows.size.to(device))
            for name, rows in self.splits.items()
        }
        descriptors = None if self.descriptors is None else move(self.descriptors)
        x, y = in_fast_order(move(self.x)), move(self.y)
        return replace(
            self,
            x=x,
            y=y,
            splits=splits,
            descriptors=descriptors,
            identities=None if self.identities is None else self.identities.to(device),
            joining=None if self.joining is None else replace(self.joining, x=x, y=y).to(device, dtype),
        )

    def with_descriptors(self, descriptors: ArrayLike | Tensor) -> "Federation":
        """The same federation with a fixed description of every client, for `PFedHN(embedding="fixed")`.

        Args:
            descriptors: [N, D], those of clients that join later last.
        """
        values = _tensor(descriptors)
        if values.ndim != 2 or len(values) != self.num_clients + self.num_joining:
            raise UserError(
                f"descriptors must have one line for each of the {self._everybody}, not {tuple(values.shape)}."
            )
        values = values.to(self.x if self.x.is_floating_point() else torch.float32)
        joining = self.joining and replace(self.joining, descriptors=values[self.num_clients :])
        return replace(self, descriptors=values[: self.num_clients], joining=joining)

    def with_architectures(self, architectures: Sequence[str]) -> "Federation":
        """The same federation in which client i runs the target network named architectures[i].

        Args:
            architectures: One name per client, those of clients that join later last.
        """
        if len(architectures) != self.num_clients + self.num_joining:
            raise UserError(f"{len(architectures)} architectures were given for {self._everybody}.")
        names = tuple(architectures)
        joining = self.joining and replace(self.joining, architectures=names[self.num_clients :])
        return replace(self, architectures=names[: self.num_clients], joining=joining)

    def evaluating(self, clients: int | Sequence[int], seed: int = 0) -> "Federation":
        """The same federation in which only these clients are tested: the others lose validation and test examples.

        Clients that join later are tested when they join, whoever is chosen here.

        Args:
            clients: Their numbers, or how many to draw at random.
            seed: The seed of that draw.
        """
        chosen = _whole_numbers(clients)
        if chosen is None or chosen.ndim > 1:
            raise UserError(
                "the clients to evaluate are given as a list of their numbers, or as how many to draw, not as "
                f"{_short(clients)}."
            )
        if chosen.ndim == 0:
            if not 1 <= chosen <= self.num_clients:
                raise UserError(f"{int(chosen)} clients cannot be drawn from {self.num_clients}.")
            chosen = cohort(keys.fold(seed, "evaluated"), 0, self.num_clients, int(chosen))
        elif not len(chosen) or chosen.min() < 0 or chosen.max() >= self.num_clients:
            raise UserError(f"the clients to evaluate must be numbers from 0 to {self.num_clients - 1}.")
        splits = dict(self.splits)
        for name in SPLITS[1:]:
            size = torch.zeros_like(splits[name].size, memory_format=torch.contiguous_format)
            size[chosen] = splits[name].size[chosen]
            splits[name] = replace(splits[name], size=size)
        return replace(self, splits=splits)

    def name_of(self, number: int) -> str:
        """What a client is called: its own name, or its number."""
        if self.names is not None:
            return self.names[number]
        return str(number if self.identities is None else int(self.identities[number]))

    def number_of(self, client: int | str) -> int:
        """The place in the table of a client that is given by its name, or by its place already."""
        if isinstance(client, str) and self.names is not None:
            if client not in self._places:
                raise UserError(f"there is no client {client!r}; {closest(client, self.names)}")
            return self._places[client]
        first, number = 0, _whole_numbers(client)
        if isinstance(client, str):
            first = 0 if self.identities is None else int(self.identities[0])
            number = torch.tensor(int(client)) if client.isdecimal() else None
        if number is None or number.ndim or not first <= number < first + self.num_clients:
            last = first + self.num_clients - 1
            raise UserError(f"there is no client {_short(client)}; they are numbered from {first} to {last}.")
        return int(number) - first

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names or ())}

    def identity(self, clients: Tensor) -> Tensor:
        """What these clients' draws are keyed by, on whatever machine they are made."""
        return clients if self.identities is None else self.identities[clients]

    def batches(self, clients: Tensor, key: Key, num_batches: int, batch_size: int) -> Batches:
        """Minibatches [C, K, B, ...] of training rows, each drawn without replacement, independent between steps."""
        width = min(batch_size, self.largest_train_size)
        steps = torch.arange(num_batches, device=clients.device)
        numbers, mask = draw_examples(self.splits["train"], clients, key, steps, width, self.identity(clients))
        return Batches(*self.examples(numbers), mask)

    def examples(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """x and y at these row numbers."""
        return gather(self.x, numbers), self.y[numbers]

    def __repr__(self) -> str:
        counts = ", ".join(f"{int(self.splits[name].size.sum())} {name}" for name in SPLITS)
        unused = sum(self.unused.values())
        return f"{type(self).__name__}({self._everybody}; examples: {counts}, {unused} unused)"

    @property
    def _everybody(self) -> str:
        later = f" and {self.num_joining} that join later" if self.num_joining else ""
        return f"{self.num_clients} clients{later}"


@dataclass(frozen=True, eq=False, repr=False)
class LazyFederation(Federation):
    """As `Federation.lazy` makes it: `x` and `y` are client 0's training rows and show the form of everybody's."""

    load: Callable[[int], Mapping[str, Arrays]] = field(kw_only=True)
    ends: Tensor = field(kw_only=True)  # [N], the number after a client's last row
    num_cached: int = field(kw_only=True)
    num_outputs: int | None = field(kw_only=True, default=None)  # labels must be smaller; a run fills it in

    num_classes = None  # nobody has seen all labels

    @property
    def class_shares(self) -> Tensor:
        raise UserError(
            "the classes of clients that are loaded when needed are not known; describe them with "
            "federation.with_descriptors(...)."
        )

    @cached_property
    def examples_of(self) -> Callable[[int], tuple[Tensor, Tensor]]:
        """All rows of a client, split after split."""
        return lru_cache(self.num_cached)(self._load)

    def _load(self, client: int) -> tuple[Tensor, Tensor]:
        given, xs, ys = _loaded(self.load, client), [], []
        bounds = [int(self.splits[name].offset[client]) for name in SPLITS] + [int(self.ends[client])]
        for name, (start, end) in zip(SPLITS, pairwise(bounds), strict=True):
            x, y = given.get(name, (self.x[:0], self.y[:0]))
            if len(x) != end - start or len(y) != end - start:
                raise UserError(
                    f"client {client} brings {len(x)} {name} rows and {len(y)} labels; {end - start} were announced."
                )
            for what, values, like in (("rows", x, self.x), ("labels", y, self.y)):
                if len(x) and values.shape[1:] != like.shape[1:]:
                    shapes = tuple(values.shape[1:]), tuple(like.shape[1:])
                    raise UserError(
                        f"client {client} brings {name} {what} of shape {shapes[0]}; client 0 has {shapes[1]}."
                    )
            if not self.y.is_floating_point() and _whole_numbers(y) is None:
                raise UserError(
                    f"client {client} brings {name} labels that are not whole numbers, and client 0's are; give class "
                    "numbers, or for regression floating-point labels from client 0 on."
                )
            xs.append(x.to(self.x))
            ys.append(y.to(self.y))
        try:
            _check_values(torch.cat(xs), torch.cat(ys))
        except ValueError as error:
            raise UserError(f"client {client}: {error}") from None
        if self.num_outputs is not None and (top := int(torch.cat(ys).max())) >= self.num_outputs:
            raise UserError(
                f"client {client} has the label {top}, but the network has {self.num_outputs} outputs (labels 0 to "
                f"{self.num_outputs - 1}); give the network more outputs or mend the labels."
            )
        return in_fast_order(torch.cat(xs)), torch.cat(ys)

    def examples(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        if not numbers.numel():
            return gather(self.x, numbers), self.y[numbers]
        clients, places = torch.searchsorted(self.ends, numbers, right=True).unique(return_inverse=True)
        loaded = [self.examples_of(client) for client in clients.tolist()]
        lengths = torch.tensor([len(y) for _, y in loaded], device=numbers.device)
        shift = lengths.cumsum(0) - self.ends[clients]  # from a row's number to its place among the loaded
        x, y = (torch.cat(parts) for parts in zip(*loaded, strict=True))
        return gather(x, numbers + shift[places]), y[numbers + shift[places]]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Federation:
        return replace(super().to(device, dtype), ends=self.ends.to(device))  # type: ignore[call-arg]


def share_out(
    labels: Tensor,
    partition: "partitions.Partition",
    *,
    split: tuple[float, float, float],
    seed: int,
    test_labels: Tensor | None = None,
    groups: NDArray[numpy.int64] | None = None,
    coarse: NDArray[numpy.int64] | None = None,
    test_coarse: NDArray[numpy.int64] | None = None,
    stratify: bool = False,
) -> partitions.Assignment:
    """Which example goes to which client and split; test examples are numbered after the others."""
    if labels.is_floating_point():
        raise UserError("y holds fractions, and a partition goes by class; use Federation.from_clients for regression.")
    if len(split) != 3 or min(split) < 0 or abs(sum(split) - 1) > 1e-6:
        raise UserError(f"split {split} must be three fractions (train, validation, test) that sum to 1.")
    if test_labels is not None and split[2] != 0:
        raise UserError("with a test set of its own, give split=(train, validation, 0).")
    key = keys.fold(seed, "partition")
    numbers = labels.numpy()
    parts = _split(numbers, split, stratify, keys.fold(key, "split"))
    splits = {
        name: partitions.Labels(
            numbers[part],
            groups=None if groups is None else groups[part],
            coarse=None if coarse is None else coarse[part],
        )
        for name, part in zip(SPLITS, parts, strict=True)
    }
    if test_labels is not None:
        parts[2] = len(labels) + numpy.arange(len(test_labels))
        splits["test"] = partitions.Labels(test_labels.numpy(), coarse=test_coarse)
    assignment = partition.assign(splits, keys.fold(key, "clients"))
    if not any(len(owned) for lists in assignment.clients.values() for owned in lists):
        raise UserError(f"{partition!r} leaves every client without examples; use fewer clients or more data.")
    numbers_of = dict(zip(SPLITS, parts, strict=True))
    return replace(
        assignment,
        clients={name: [part[owned] for owned in assignment.clients[name]] for name, part in numbers_of.items()},
        unused={name: part[assignment.unused[name]] for name, part in numbers_of.items()},
    )


def draw_batches(
    x: Tensor,
    y: Tensor,
    rows: Examples,
    clients: Tensor,
    key: Key,
    steps: Tensor,
    width: int,
    identities: Tensor | None = None,
) -> Batches:
    """`Federation.batches` on bare tensors, which an engine can trace.

    Args:
        steps: The batches' numbers, from 0.
        identities: [C], what `clients` draw by (`Federation.identity`); their numbers where None.
    """
    numbers, mask = draw_examples(rows, clients, key, steps, width, clients if identities is None else identities)
    return Batches(gather(x, numbers), y[numbers], mask)


def draw_examples(
    rows: Examples, clients: Tensor, key: Key, steps: Tensor, width: int, identities: Tensor
) -> tuple[Tensor, Tensor]:
    """Row numbers [C, K, B] of minibatches, and which of them count."""
    size, offset = rows.size[clients], rows.offset[clients]
    step_keys = keys.fold(torch.as_tensor(keys.fold(key, identities)).unsqueeze(-1), steps)
    places = keys.permutation_head(step_keys, size[:, None], width)
    numbers = rows.numbers(offset[:, None, None] + places)
    mask = torch.arange(width, device=clients.device) < size[:, None, None]
    return numbers, mask.expand(numbers.shape)


def in_fast_order(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def gather(x: Tensor, numbers: Tensor) -> Tensor:
    """Rows by number; images that are stored with their channels last stay so."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)[numbers].movedim(-1, -3)
    return x[numbers]


def cohort(key: Key, round_number: int | Tensor, num_clients: int, size: int) -> Tensor:
    """The clients of one round, drawn without replacement; with `size` = all, every client in order."""
    if size == num_clients:
        device = round_number.device if isinstance(round_number, Tensor) else None
        return torch.arange(num_clients, device=device)
    return keys.permutation_head(keys.fold(key, "cohort", round_number), num_clients, size)


def _tensor(values: Any) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(numpy.ascontiguousarray(values))
    if tensor.dtype == torch.float64:
        tensor = tensor.to(torch.get_default_dtype())
    return (
        tensor
        if tensor.is_floating_point() or (tensor.dtype == torch.uint8 and tensor.ndim > 1)
        else tensor.to(torch.int64)
    )


def _whole_numbers(values: Any) -> Tensor | None:
    """One number or a list of them as int64; None where they are anything else, such as fractions."""
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # what torch raises depends on what it is given
        return None
    if numbers.dtype == torch.bool or numbers.is_complex():
        return None
    whole = numbers.to(torch.int64)
    return whole if torch.equal(whole.to(numbers.dtype), numbers) else None


def _counts(name: str, values: Any, num_clients: int) -> Tensor:
    """[N]: how many rows each client announces."""
    counts = _whole_numbers(values)
    if counts is None or (counts < 0).any():
        raise UserError(
            f"{name} says how many rows a client has, so it must be a whole number or one for each client, "
            f"not {_short(values)}."
        )
    if counts.shape not in ((), (num_clients,)):
        raise UserError(
            f"{name} has the shape {tuple(counts.shape)}; give one number for all {num_clients} clients, or one for "
            "each of them."
        )
    return counts.expand(num_clients)


EXPECTED = 'a client brings {"train": (x, y), "validation": (x, y), "test": (x, y)}, arrays of numbers'


def _loaded(load: Callable[[int], Mapping[str, Arrays]], client: int) -> dict[str, tuple[Tensor, Tensor]]:
    try:
        given = load(client)
    except Exception as error:  # of the user's own code, so it may be any
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"loading client {client} failed ({reason}); mend `load`, or what it reads.") from error
    if not isinstance(given, Mapping):
        raise UserError(f"for client {client} load returned {_short(given)}; {EXPECTED}.")
    return _splits(client, given)


def _splits(client: int | str, given: Mapping[str, Arrays | None]) -> dict[str, tuple[Tensor, Tensor]]:
    """The splits of a client that brings its own; those that it leaves out are missing here too."""
    for name in given:
        if name not in SPLITS:
            raise UserError(f"client {client} has a split {name!r}; {closest(str(name), SPLITS)}")
    splits = {}
    for name, arrays in given.items():
        if arrays is None:
            continue
        try:
            x, y = (_tensor(values) for values in arrays)
        except (TypeError, ValueError, RuntimeError):  # no pair, or one of texts, of lists of unequal lengths, ...
            raise UserError(f"client {client}: {name} is {_short(arrays)}; {EXPECTED}.") from None
        if not x.ndim or not y.ndim:
            raise UserError(f"client {client}: {name} is {_short(arrays)}; {EXPECTED}.")
        splits[name] = x, y
    return splits


def _check_names(names: Sequence[Any], num_clients: int) -> None:
    if len(names) != num_clients:
        raise UserError(f"{len(names)} names were given for {num_clients} clients; give one for each.")
    wrong = [name for name in names if not isinstance(name, str) or not name.strip()]
    if wrong:
        raise UserError(f"a client is called {_short(wrong[0])}; give every client a name of at least one letter.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two clients are called {twice!r}; give every client a name of its own.")


def _optional(values: Any) -> NDArray[numpy.int64] | None:
    return None if values is None else numpy.asarray(values, dtype=numpy.int64)


def _check_lengths(x: Tensor, y: Tensor) -> None:
    if len(x) != len(y):
        raise UserError(f"x has {len(x)} rows and y has {len(y)}; they must be equal.")


def _check_values(x: Tensor, y: Tensor) -> None:
    if x.is_floating_point() and not torch.isfinite(x).all():
        row = int((~torch.isfinite(x.reshape(len(x), -1))).any(1).nonzero()[0])
        raise UserError(f"row {row} of x holds NaN or infinity; clean the data before federating it.")
    if y.is_floating_point() and not torch.isfinite(y).all():
        raise UserError("y holds NaN or infinity; clean the data before federating it.")
    if not y.is_floating_point() and y.numel() and int(y.min()) < 0:
        row = int((y < 0).nonzero()[0][0])
        raise UserError(f"row {row} has the label {int(y.min())}; class labels start at 0.")


def _split(
    labels: NDArray[Any], fractions: tuple[float, float, float], stratify: bool, key: Key
) -> list[NDArray[numpy.int64]]:
    """Row numbers for training, validation and test; each part sorted, so only membership is random."""
    generator = keys.numpy_generator(key)
    strata = (
        [numpy.flatnonzero(labels == value) for value in numpy.unique(labels)]
        if stratify
        else [numpy.arange(len(labels))]
    )
    parts: list[list[NDArray[numpy.int64]]] = [[], [], []]
    for stratum in strata:
        shuffled = generator.permutation(stratum)
        first, second = round(len(stratum) * fractions[0]), round(len(stratum) * (fractions[0] + fractions[1]))
        for part, numbers in zip(parts, numpy.split(shuffled, [first, second]), strict=True):
            part.append(numbers)
    return [numpy.sort(numpy.concatenate(part)) for part in parts]


def _rows(lists: Sequence[NDArray[numpy.int64]]) -> Examples:
    sizes = numpy.array([len(numbers) for numbers in lists], dtype=numpy.int64)
    index = numpy.concatenate(lists).astype(numpy.int64)
    return Examples(torch.from_numpy(index), torch.from_numpy(numpy.cumsum(sizes) - sizes), torch.from_numpy(sizes))


def _short(value: Any) -> str:
    """A value that does not fit, on one line however large it is."""
    return " ".join(reprlib.repr(value).split())
