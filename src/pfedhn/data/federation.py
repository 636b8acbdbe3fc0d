"""A federation: clients, the examples that each of them owns, and their minibatches.

Axes: [N] clients, [C]lients of a cohort, [K] steps, [B]atch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pfedhn import keys
from pfedhn.data.arrays import (
    SPLITS,
    Arrays,
    ClientData,
    as_numbers_of,
    as_pair,
    as_tensor,
    as_whole_numbers,
    check_classes,
    check_lengths,
    check_names,
    check_values,
)
from pfedhn.data.batches import Examples, as_examples, cohort, draw_examples, gather, sample_examples
from pfedhn.data.dealing import Split, check_split, share_out, split_clients
from pfedhn.data.description import Description
from pfedhn.data.palette import in_fast_order, stored
from pfedhn.data.partition import Assignment, Partition
from pfedhn.data.reading import Reading
from pfedhn.errors import UserError, short, some
from pfedhn.keys import Key
from pfedhn.settings import check_seed
from pfedhn.sgd import Batches


@dataclass(frozen=True, eq=False)
class Federation:
    """A set of clients, each with its own training, validation and test examples.

    Make one with `Federation.from_arrays` (one data set, divided among clients by a rule), `Federation.from_clients`
    (every client brings its own arrays) or `Federation.lazy` (a client's data are loaded when they are needed).

    Examples:
        >>> import numpy, pfedhn
        >>> x, y = numpy.random.default_rng(0).normal(size=(600, 8)), numpy.arange(600) % 6
        >>> federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=12), seed=0)
        >>> federation.num_clients
        12
    """

    x: Tensor  # the examples, or on a GPU the bytes that `palette` decodes; `examples` gives their values
    y: Tensor
    splits: Mapping[str, Examples]
    unused: Mapping[str, int] = field(default_factory=dict)
    descriptors: Tensor | None = None  # [N, D], for `embedding="fixed"`; the clients' class shares where not given
    architectures: tuple[str, ...] | None = None  # [N], which of several target networks each client runs
    names: tuple[str, ...] | None = None  # [N]; clients are called by their numbers where None
    class_names: tuple[str, ...] | None = None
    identities: Tensor | None = None  # [N], what clients draw by: from their names, or numbers that do not begin at 0
    joining: "Federation | None" = None  # clients that take part after training, with the same x and y
    reading: Reading | None = None  # how the examples were read from files
    palette: Tensor | None = None  # [channels, 256], the values that the bytes of `x` stand for

    def __post_init__(self) -> None:
        if self.palette is not None and self.x.dtype != torch.uint8:  # `x` was replaced by values
            object.__setattr__(self, "palette", None)
        if self.names is not None and self.identities is None:
            check_names(self.names, self.num_clients)
            identities = torch.tensor(list(map(keys.hash_text, self.names)), device=self.splits["train"].size.device)
            object.__setattr__(self, "identities", identities)

    def with_training_examples(self) -> "Federation":
        """Refuse clients without training examples; return the federation."""
        empty = [self.name_of(client) for client in (self.splits["train"].size == 0).nonzero().flatten().tolist()]
        if empty:
            raise UserError(
                f"client{'s' if len(empty) > 1 else ''} {some(empty)} would have no training examples; "
                "use fewer clients, more data or a milder partition."
            )
        if self.joining is not None:
            self.joining.with_training_examples()
        return self

    def checked(self) -> "Federation":
        """Refuse data that cannot be trained on; return the federation."""
        self.with_training_examples()
        check_values(self.x, self.y)
        return self

    @staticmethod
    def from_arrays(
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        partition: Partition,
        *,
        split: Split = (0.7, 0.15, 0.15),
        seed: int = 0,
        test: Arrays | None = None,
        groups: ArrayLike | Tensor | None = None,
        coarse: ArrayLike | Tensor | None = None,
        test_coarse: ArrayLike | Tensor | None = None,
        stratify: bool = False,
        class_names: Sequence[str] | None = None,
    ) -> "Federation":
        """Divide one data set among clients.

        Args:
            x: The examples, one after the other.
            y: Their class numbers, from 0.
            partition: Who gets which examples, for instance `pfedhn.by_classes(2, num_clients=50)`.
            split: The fractions of the examples for training, validation and test, drawn at random; every client's
                share of a class is the same in all three. With `test`, the third is 0. Or a `Fold`.
            seed: The seed of the split and of the partition.
            test: (x, y), if the data set has separate test examples.
            groups: The group of each example, for `by_group`.
            coarse: The coarse class of each example, for `by_coarse_class`.
            test_coarse: The coarse class of each example in `test`.
            stratify: Draw the split within each class instead of over all examples.
            class_names: What classes 0, 1, ... are called.
        """
        check_seed(seed)
        pairs = [(as_tensor(x, "x"), as_tensor(y, "y"))]
        check_lengths(*pairs[0])
        if test is not None:
            pairs.append(as_pair("all", "test", test))
        for pair in pairs:
            check_values(*pair)
        xs, ys = zip(*pairs, strict=True)
        check_classes(ys, sum(map(len, ys)), class_names)
        assignment = share_out(
            ys[0],
            partition,
            split=split,
            seed=seed,
            test_labels=None if test is None else ys[1],
            groups=as_numbers_of("groups", groups),
            coarse=as_numbers_of("coarse", coarse),
            test_coarse=as_numbers_of("test_coarse", test_coarse),
            stratify=stratify,
        )
        x, y = (parts[0] if test is None else torch.cat(parts) for parts in (xs, ys))  # one part is not copied
        return Federation.from_assignment(x, y, assignment, class_names).with_training_examples()

    @staticmethod
    def from_assignment(
        x: Tensor,
        y: Tensor,
        assignment: Assignment,
        class_names: Sequence[str] | None = None,
        palette: Tensor | None = None,
    ) -> "Federation":
        """A federation of clients that own these examples; the assignment's novel clients are those that join later."""
        count, total = assignment.num_clients - assignment.num_novel, assignment.num_clients

        def owned(start: int, end: int) -> dict[str, Examples]:
            return {name: as_examples(assignment.clients[name][start:end]) for name in SPLITS}

        named = None if class_names is None else tuple(class_names)
        joining = None
        if count < total:
            numbers = torch.arange(count, total)
            joining = Federation(x, y, owned(count, total), class_names=named, identities=numbers, palette=palette)
        unused = {name: len(left) for name, left in assignment.unused.items()}
        return Federation(x, y, owned(0, count), unused, class_names=named, joining=joining, palette=palette)

    @staticmethod
    def from_clients(
        clients: Sequence[ClientData] | Mapping[str, ClientData],
        *,
        split: Split = (0.7, 0.15, 0.15),
        stratify: bool = False,
        seed: int = 0,
        class_names: Sequence[str] | None = None,
    ) -> "Federation":
        """A federation of clients that bring their own data.

        A named client's split and minibatches depend on its name, so that it draws the same on its own machine as among
        the others.

        Args:
            clients: A list, or a mapping from each client's own name. A client is either (x, y), which is split at
                random, or the splits themselves, as {"train": (x, y), "validation": (x, y), "test": (x, y)}.
            split: The fractions of a client's examples for training, validation and test, or a `Fold`.
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
        if not isinstance(clients, Sequence | Mapping) or isinstance(clients, str):
            raise UserError(f"clients are given as a list, or as a mapping from their names, not as {short(clients)}.")
        if not clients:
            raise UserError("a federation needs at least one client.")
        check_split(split)
        check_seed(seed)
        names: tuple[str, ...] | None = None
        if isinstance(clients, Mapping):
            names, clients = tuple(clients), list(clients.values())
            check_names(names, len(clients))
            if set(names) <= set(SPLITS):
                raise UserError(
                    f"{some(names)} are splits of one client; give a list of clients, or a mapping from their names."
                )
        x, y, owned = split_clients(clients, names, split, stratify, seed, class_names)
        return Federation(
            x,
            y,
            {name: as_examples(lists) for name, lists in owned.items()},
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

        Testing a million clients takes long: `evaluating` chooses some of them.

        Args:
            num_clients: How many clients there are.
            load: Client number -> {"train": (x, y), "validation": (x, y), "test": (x, y)}, the same at every call.
            train: How many training examples each client has, one number for all or one per client.
            validation: As `train`, for validation.
            test: As `train`, for test.
            num_cached: How many clients' data are kept in memory, those used last.
        """
        from pfedhn.data.lazy import lazy_federation  # it is built on this class

        return lazy_federation(
            num_clients, load, {"train": train, "validation": validation, "test": test}, num_cached
        ).checked()

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
        """None if y does not hold class numbers."""
        if self.y.is_floating_point() or self.y.ndim > 1:
            return None
        return int(self.y.max()) + 1 if self.class_names is None else len(self.class_names)

    @cached_property
    def class_counts(self) -> Tensor:
        """[N, classes]: how many training examples of each class a client has."""
        if self.num_classes is None:
            raise UserError("this federation has no class labels to describe clients by; give it descriptors.")
        return torch.stack([self.label_counts(client, self.num_classes) for client in range(self.num_clients)])

    def label_counts(self, client: int, num_labels: int) -> Tensor:
        """[num_labels]: how many training examples of each class a client has."""
        if self.y.is_floating_point() or self.y.ndim > 1:
            raise UserError("this method counts the examples of each class, and the labels here are not classes.")
        counts = torch.bincount(self.labels_of(self.splits["train"].of(client)), minlength=num_labels)
        if len(counts) > num_labels:
            label = len(counts) - 1
            raise UserError(f"client {self.name_of(client)} has the label {label}; labels must be below {num_labels}.")
        return counts

    @property
    def class_shares(self) -> Tensor:
        """[N, classes]: the fraction of each class in a client's training examples."""
        counts = self.class_counts
        return (counts / counts.sum(1, keepdim=True)).to(self.dtype if self.dtype.is_floating_point else torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the examples' values, however they are stored."""
        return self.x.dtype if self.palette is None else self.palette.dtype

    def first(self, count: int) -> Tensor:
        """The values of the first examples, whoever owns them."""
        return gather(self.x[:count], torch.arange(len(self.x[:count]), device=self.x.device), self.palette)

    @property
    def descriptor_dim(self) -> int | None:
        """The size of a client's fixed embedding."""
        return self.num_classes if self.descriptors is None else self.descriptors.shape[1]

    @cached_property
    def largest_train_size(self) -> int:
        return int(self.splits["train"].size.max())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Federation":
        """The same federation with its data on a device, its floating-point data in `dtype`, images channels last.

        The shape of an image stays [C, H, W]; only its order in memory changes, which convolutions run faster on. On a
        GPU, images that have at most 256 values in each channel are kept as bytes, which `examples` decodes.

        Args:
            device: Where the data go.
            dtype: The type of floating-point data; None keeps theirs.
        """

        def move(value: Tensor) -> Tensor:
            return value.to(device, dtype if dtype and value.is_floating_point() else value.dtype)

        splits = {
            name: replace(table, **{part: getattr(table, part).to(device) for part in ("index", "offset", "size")})
            for name, table in self.splits.items()
        }
        x, palette = self._stored(device)
        x, y, palette = in_fast_order(move(x)), move(self.y), None if palette is None else move(palette)
        return replace(
            self,
            x=x,
            y=y,
            palette=palette,
            splits=splits,
            descriptors=None if self.descriptors is None else move(self.descriptors),
            identities=None if self.identities is None else self.identities.to(device),
            joining=None
            if self.joining is None
            else replace(self.joining, x=x, y=y, palette=palette).to(device, dtype),
        )

    def _stored(self, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
        """The examples as a device keeps them; bytes stay bytes."""
        return stored(self.x, device) if self.palette is None else (self.x, self.palette)

    def with_descriptors(self, descriptors: ArrayLike | Tensor) -> "Federation":
        """The same federation with a fixed description of every client, for `PFedHN(embeddings=Embeddings("fixed"))`.

        Args:
            descriptors: [N, D], those of clients that join later last.
        """
        values = as_tensor(descriptors, "descriptors")
        if values.ndim != 2 or len(values) != self.num_clients + self.num_joining:
            raise UserError(
                f"descriptors must have one line for each of the {self._everybody}, not {tuple(values.shape)}."
            )
        values = values.to(self.x.device, self.dtype if self.dtype.is_floating_point else torch.float32)
        joining = self.joining and replace(self.joining, descriptors=values[self.num_clients :])
        return replace(self, descriptors=values[: self.num_clients], joining=joining)

    def with_architectures(self, architectures: Sequence[str]) -> "Federation":
        """The same federation in which client i runs the target network named architectures[i].

        Args:
            architectures: One name per client, those of clients that join later last.
        """
        is_list = isinstance(architectures, Sequence) and not isinstance(architectures, str)
        if not is_list or not all(isinstance(name, str) for name in architectures):
            raise UserError(f"architectures are {short(architectures)}; give a list of names, one for each client.")
        if len(architectures) != self.num_clients + self.num_joining:
            raise UserError(f"{len(architectures)} architectures were given for {self._everybody}.")
        names = tuple(architectures)
        joining = self.joining and replace(self.joining, architectures=names[self.num_clients :])
        return replace(self, architectures=names[: self.num_clients], joining=joining)

    def only(self, clients: Sequence[int]) -> "Federation":
        """The federation of some of its clients, each of which draws what it draws among all of them.

        Args:
            clients: Their numbers.
        """
        chosen = torch.as_tensor(clients, device=self.splits["train"].size.device)
        splits = {
            name: replace(table, offset=table.offset[chosen], size=table.size[chosen])
            for name, table in self.splits.items()
        }
        return replace(
            self,
            splits=splits,
            descriptors=None if self.descriptors is None else self.descriptors[chosen],
            architectures=None if self.architectures is None else tuple(self.architectures[i] for i in clients),
            names=None if self.names is None else tuple(self.names[i] for i in clients),
            identities=self.identity(chosen),
        )

    def evaluating(self, clients: int | Sequence[int], seed: int = 0) -> "Federation":
        """The same federation in which only these clients are tested: the others lose validation and test examples.

        Clients that join later are tested when they join, whoever is chosen here.

        Args:
            clients: Their numbers, or how many to draw at random.
            seed: The seed of that draw.
        """
        chosen = as_whole_numbers(clients)
        if chosen is None or chosen.ndim > 1:
            raise UserError(
                "the clients to evaluate are given as a list of their numbers, or as how many to draw, not as "
                f"{short(clients)}."
            )
        if chosen.ndim == 0:
            if not 1 <= chosen <= self.num_clients:
                raise UserError(f"{int(chosen)} clients cannot be drawn from {self.num_clients}.")
            chosen = cohort(keys.fold(check_seed(seed), "evaluated"), 0, self.num_clients, int(chosen))
        elif not len(chosen) or chosen.min() < 0 or chosen.max() >= self.num_clients:
            raise UserError(f"the clients to evaluate must be numbers from 0 to {self.num_clients - 1}.")
        splits = dict(self.splits)
        for name in SPLITS[1:]:
            size = torch.zeros_like(splits[name].size, memory_format=torch.contiguous_format)
            size[chosen] = splits[name].size[chosen]
            splits[name] = replace(splits[name], size=size)
        return replace(self, splits=splits)

    def name_of(self, number: int) -> str:
        """A client's name, or its number if it has none.

        Args:
            number: Its position in every table.
        """
        if self.names is not None:
            return self.names[number]
        return str(number if self.identities is None else int(self.identities[number]))

    def number_of(self, client: int | str) -> int:
        """A client's number: its position in every table.

        Args:
            client: Its name, or its number, which may be text where no client's name is a number.
        """
        return self.description.number_of(client)

    @cached_property
    def description(self) -> Description:
        """The clients and the form of their examples."""
        return Description.of(self)

    def identity(self, clients: Tensor) -> Tensor:
        """The numbers that key these clients' draws, on every machine."""
        return clients if self.identities is None else self.identities[clients]

    def batches(self, clients: Tensor, key: Key, num_batches: int, batch_size: int) -> Batches:
        """Minibatches [C, K, B, ...] of training examples, each drawn without replacement, independent of others."""
        width = min(batch_size, self.largest_train_size)
        steps = torch.arange(num_batches, device=clients.device)
        numbers, mask = draw_examples(self.splits["train"], clients, key, steps, width, self.identity(clients))
        return Batches(*self.examples(numbers), mask)

    def sampled_batches(self, clients: Tensor, key: Key, num_batches: int, batch_size: int) -> Batches:
        """Minibatches [C, K, ...] that every training example joins by itself, `batch_size` of them on average.

        A client with fewer examples uses all of them. This is Poisson sampling, as privacy accountants assume.
        """
        table, largest = self.splits["train"], self.largest_train_size
        steps = torch.arange(num_batches, device=clients.device)
        numbers, mask = sample_examples(table, clients, key, steps, batch_size, largest, self.identity(clients))
        return Batches(*self.examples(numbers), mask)

    def examples(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """x and y of the examples with these numbers."""
        return gather(self.x, numbers, self.palette), self.y[numbers]

    def labels_of(self, numbers: Tensor) -> Tensor:
        """y of the examples with these numbers, of which x may not be at hand."""
        return self.y[numbers]

    def __repr__(self) -> str:
        counts = ", ".join(f"{int(self.splits[name].size.sum())} {name}" for name in SPLITS)
        unused = sum(self.unused.values())
        return f"{type(self).__name__}({self._everybody}; examples: {counts}, {unused} unused)"

    @property
    def _everybody(self) -> str:
        later = f" and {self.num_joining} that join later" if self.num_joining else ""
        return f"{self.num_clients} clients{later}"
