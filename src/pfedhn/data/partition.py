"""Who gets which examples: labels in, one list of examples' numbers per client and split out.

Every rule first fixes each client's share of each class, then deals every split (train, validation, test) by those same
shares. An example goes to one client or is counted as unused: shares are rounded down, as in the paper.
Axes: [N] clients, [C]lasses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal, Protocol, TypeAlias

import numpy
from numpy.typing import NDArray

from pfedhn import keys
from pfedhn.data.arrays import check_choice
from pfedhn.errors import UserError, short
from pfedhn.settings import whole_number

Integers: TypeAlias = NDArray[numpy.int64]
Floats: TypeAlias = NDArray[numpy.float64]

FEW_CLIENTS = 100_000

Shares: TypeAlias = Literal["paper", "reference"]
Form: TypeAlias = Literal["paper", "per-class"]
Normalize: TypeAlias = Literal["apart", "jointly"]


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of one split's examples: class, and where there are such, group and coarse class."""

    y: Integers
    groups: Integers | None = None
    coarse: Integers | None = None


@dataclass(frozen=True, eq=False)
class Assignment:
    """The numbers of every client's examples in each split, ascending, and the shares they were dealt by."""

    clients: dict[str, list[Integers]]
    unused: dict[str, Integers]
    shares: Floats  # [N, C]
    num_novel: int = 0  # how many of the clients, last in the lists, join after training

    @property
    def num_clients(self) -> int:
        """All of them, those that join later included."""
        return len(self.shares)


class Partition(Protocol):
    def assign(self, splits: Mapping[str, Labels], key: keys.Key) -> Assignment: ...


class _Rule:
    """Gives a rule the repr of its call without defaults. Rules are named as functions: users call them once."""

    def __repr__(self) -> str:
        values = [(field, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        given = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class by_classes(_Rule):
    """Each client has a few of the classes: the paper's partition of CIFAR and MNIST.

    Every class goes to the same number of clients (to within one, where clients x classes per client is not a multiple
    of the number of classes), and its holders share its examples in proportion to draws from U(0.4, 0.6). With fewer
    clients x classes per client than classes, some classes have no holder, and their examples are counted as unused.

    Args:
        classes_per_client: How many different classes each client has; in the paper 2 of 10, or 10 of 100.
        num_clients: How many clients there are.
        shares: "paper" divides a class among its holders alone. "reference" does as the authors' code does today: one
            more share of each class is drawn and handed to nobody, which leaves a third of CIFAR-10 unused with 10
            clients and 9 % with 50.
        first_class: Of the classes that clients have; examples of the others are counted as unused.
        last_class: Likewise; the last one by default.

    Examples:
        >>> import numpy
        >>> from pfedhn.data.partition import Labels, by_classes
        >>> train = Labels(numpy.arange(1000) % 10)
        >>> assignment = by_classes(2, num_clients=5).assign({"train": train}, key=0)
        >>> [len(set(train.y[examples])) for examples in assignment.clients["train"]]
        [2, 2, 2, 2, 2]
    """

    classes_per_client: int
    num_clients: int
    shares: Shares = "paper"
    first_class: int = 0
    last_class: int | None = None

    def __post_init__(self) -> None:
        whole_number("classes_per_client", self.classes_per_client)
        whole_number("num_clients", self.num_clients)
        check_choice("shares", self.shares, Shares)
        whole_number("first_class", self.first_class, least=0)
        if self.last_class is not None:
            whole_number("last_class", self.last_class, least=self.first_class)

    def assign(self, splits: Mapping[str, Labels], key: keys.Key) -> Assignment:
        classes, num_classes = _classes(splits)
        last = num_classes if self.last_class is None else self.last_class
        classes = classes[(classes >= self.first_class) & (classes <= last)]
        _check_enough(splits, self.num_clients)
        if self.classes_per_client > len(classes):
            raise UserError(
                f"{self.classes_per_client} classes per client were asked for, but the labels have {len(classes)}; "
                f"ask for at most {len(classes)}."
            )
        generator = keys.numpy_generator(keys.fold(key, "classes"))
        # Differs: the reference code can hand a client one class twice when C is not a multiple of k. Taking the k
        # rarest classes at once cannot, and keeps the numbers of holders within one of each other to the last client.
        holds = numpy.zeros((self.num_clients, len(classes)), dtype=bool)
        num_holders = numpy.zeros(len(classes), dtype=numpy.int64)
        for client in range(self.num_clients):
            chosen = numpy.lexsort((generator.random(len(classes)), num_holders))[: self.classes_per_client]
            holds[client, chosen] = True
            num_holders[chosen] += 1
        generator = keys.numpy_generator(keys.fold(key, "shares"))
        weights = generator.uniform(0.4, 0.6, holds.shape) * holds
        total = weights.sum(0)
        if self.shares == "reference":
            # Its slots per class are floor(nk / C) + 1; a slot nobody took still counts in the sum.
            num_slots = self.num_clients * self.classes_per_client // len(classes) + 1
            total += generator.uniform(0.4, 0.6, len(classes)) * (num_slots - num_holders)
        shares = numpy.zeros((self.num_clients, num_classes))
        shares[:, classes] = numpy.divide(weights, total, out=numpy.zeros_like(weights), where=total > 0)
        return _deal(splits, shares, key)


@dataclass(frozen=True, repr=False)
class dirichlet(_Rule):
    """Each client's classes follow a Dirichlet distribution: the paper's experiment on clients that join later.

    A small alpha gives clients few classes each, a large one gives all the same mixture. Clients may get few examples
    or none, most often in validation and test; `Federation` refuses a client without training examples.

    Args:
        alpha: The concentration for the training clients; 0.1 in the paper.
        num_clients: How many clients train; 90 in the paper.
        form: "paper" draws every client's mixture of classes, then divides each class by its sum over clients.
            "per-class", the form most code uses, draws for every class how it is divided over clients.
        novel_clients: How many more clients join after training (`federation.joining`); 10 in the paper.
        novel_alpha: The concentration for the novel clients (default: alpha).
        normalize: "apart" first cuts the examples at random between training and novel clients, in proportion to their
            numbers, and divides each part on its own: the training clients' examples do not depend on novel_alpha, so
            that one trained run serves every novel_alpha. "jointly" divides each class over all clients together, as
            the paper's text reads.

    Examples:
        >>> import numpy
        >>> from pfedhn.data.partition import Labels, dirichlet
        >>> rule = dirichlet(0.1, num_clients=9, novel_clients=1, novel_alpha=1.0)
        >>> rule
        dirichlet(alpha=0.1, num_clients=9, novel_clients=1, novel_alpha=1.0)
        >>> assignment = rule.assign({"train": Labels(numpy.arange(1000) % 10)}, key=0)
        >>> assignment.num_clients, assignment.num_novel
        (10, 1)
    """

    alpha: float
    num_clients: int
    form: Form = "paper"
    novel_clients: int = 0
    novel_alpha: float | None = None
    normalize: Normalize = "apart"

    def __post_init__(self) -> None:
        whole_number("num_clients", self.num_clients)
        whole_number("novel_clients", self.novel_clients, least=0)
        check_choice("form", self.form, Form)
        check_choice("normalize", self.normalize, Normalize)
        _check_alpha("alpha", self.alpha)
        if self.novel_alpha is not None:
            _check_alpha("novel_alpha", self.novel_alpha)
            if not self.novel_clients:
                raise UserError("novel_alpha was given without novel clients; give novel_clients too.")

    def assign(self, splits: Mapping[str, Labels], key: keys.Key) -> Assignment:
        classes, num_classes = _classes(splits)
        _check_enough(splits, self.num_clients + self.novel_clients)
        alphas = (self.alpha, self.alpha if self.novel_alpha is None else self.novel_alpha)
        sides = (self.num_clients, self.novel_clients)
        # A key for each side: what is drawn for novel clients must not move the training clients' draws.
        training, novel = (
            self._log_weights(alpha, size, len(classes), keys.fold(key, purpose))
            for alpha, size, purpose in zip(alphas, sides, ("shares", "novel shares"), strict=True)
        )
        shares = numpy.zeros((sum(sides), num_classes))
        if self.normalize == "jointly" or not self.novel_clients:
            shares[:, classes] = _divided(numpy.concatenate([training, novel]))
            return _deal(splits, shares, key, self.novel_clients)
        own = [numpy.zeros((size, num_classes)) for size in sides]
        owners = {}
        for side, log_weights in zip(own, (training, novel), strict=True):
            side[:, classes] = _divided(log_weights)
        for name, labels in splits.items():
            shuffled = keys.numpy_generator(keys.fold(key, "novel rows", name)).permutation(len(labels.y))
            num_novel = round(len(shuffled) * self.novel_clients / sum(sides))
            parts = numpy.sort(shuffled[num_novel:]), numpy.sort(shuffled[:num_novel])
            owners[name] = numpy.empty(len(labels.y), dtype=numpy.int64)
            for side, part, start, purpose in zip(own, parts, (0, sides[0]), ("rows", "novel"), strict=True):
                dealt = _owners(labels.y[part], side, keys.fold(key, purpose, name))
                owners[name][part] = numpy.where(dealt == len(side), sum(sides), start + dealt)
        # A share is of the whole class, so that training and novel clients are on one scale.
        shares[:] = numpy.concatenate([side * (len(side) / sum(sides)) for side in own])
        return _assignment(owners, shares, self.novel_clients)

    def _log_weights(self, alpha: float, num_clients: int, num_classes: int, key: keys.Key) -> Floats:
        """Logarithms of Gamma(alpha) draws [N, C]; divided by a client's or a class's sum these are Dirichlet.

        Gamma(a) = Gamma(a + 1) * U^(1/a), so a small alpha, whose draws underflow, still has a largest client per
        class: no class is ever divided 0 / 0 and no draw needs repeating.
        """
        generator = keys.numpy_generator(key)
        shape = (num_clients, num_classes)
        draws = numpy.log(generator.standard_gamma(alpha + 1, shape)) - generator.standard_exponential(shape) / alpha
        return draws - numpy.logaddexp.reduce(draws, axis=1, keepdims=True) if self.form == "paper" else draws


@dataclass(frozen=True, repr=False)
class by_group(_Rule):
    """One client per group, with all its examples, in ascending order of group: Omniglot's alphabets in the paper.

    The groups are given next to the labels; every split needs them.

    Examples:
        >>> import numpy
        >>> from pfedhn.data.partition import Labels, by_group
        >>> train = Labels(y=numpy.array([0, 1, 2, 3]), groups=numpy.array([7, 4, 7, 7]))
        >>> by_group().assign({"train": train}, key=0).clients["train"]
        [array([1]), array([0, 2, 3])]
    """

    def assign(self, splits: Mapping[str, Labels], key: keys.Key) -> Assignment:
        groups = _required(splits, "groups", "by_group", "the group (say, hospital or alphabet)")
        _, num_classes = _classes(splits)
        distinct = numpy.unique(numpy.concatenate(list(groups.values())))
        owners = {name: numpy.searchsorted(distinct, values) for name, values in groups.items()}
        counts = numpy.zeros((len(distinct), num_classes))
        for name, labels in splits.items():
            numpy.add.at(counts, (owners[name], labels.y), 1)
        return _assignment(owners, counts / numpy.maximum(counts.sum(0), 1))


@dataclass(frozen=True, repr=False)
class by_coarse_class(_Rule):
    """Each coarse class belongs to a few clients, which share all of its fine classes evenly.

    Coarse class c, in ascending order, is held by clients c * clients_per_class and the following. On CIFAR-100 five
    clients per coarse class make 100 clients with five related classes each.

    Args:
        clients_per_class: How many clients share one coarse class.

    Examples:
        >>> import numpy
        >>> from pfedhn.data.partition import Labels, by_coarse_class
        >>> train = Labels(y=numpy.arange(80) % 4, coarse=numpy.arange(80) % 4 // 2)
        >>> assignment = by_coarse_class(2).assign({"train": train}, key=0)
        >>> [sorted({int(label) for label in train.y[examples]}) for examples in assignment.clients["train"]]
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """

    clients_per_class: int

    def __post_init__(self) -> None:
        whole_number("clients_per_class", self.clients_per_class)

    def assign(self, splits: Mapping[str, Labels], key: keys.Key) -> Assignment:
        coarse = numpy.concatenate(list(_required(splits, "coarse", "by_coarse_class", "the coarse class").values()))
        fine = numpy.concatenate([labels.y for labels in splits.values()])
        classes, num_classes = _classes(splits)
        distinct, numbers = numpy.unique(coarse, return_inverse=True)
        _check_enough(splits, len(distinct) * self.clients_per_class)
        parent = numpy.zeros(num_classes, dtype=numpy.int64)
        parent[fine] = numbers
        torn = numpy.flatnonzero(parent[fine] != numbers)
        if len(torn):
            raise UserError(
                f"class {fine[torn[0]]} is in coarse classes {coarse[torn[0]]} and {distinct[parent[fine[torn[0]]]]}; "
                "give every class one coarse class."
            )
        shares = numpy.zeros((len(distinct) * self.clients_per_class, num_classes))
        # Rounded up: 1 / 49 is a little less than a 49th, and of 49 examples its floor would be none.
        share = numpy.nextafter(1 / self.clients_per_class, 1)
        for client in range(len(shares)):
            shares[client, classes[parent[classes] == client // self.clients_per_class]] = share
        return _deal(splits, shares, key)


def _deal(splits: Mapping[str, Labels], shares: Floats, key: keys.Key, num_novel: int = 0) -> Assignment:
    owners = {name: _owners(labels.y, shares, keys.fold(key, "rows", name)) for name, labels in splits.items()}
    return _assignment(owners, shares, num_novel)


def _owners(y: Integers, shares: Floats, key: keys.Key) -> Integers:
    """The client of each example: floor(share * size) random examples of a class go to each of its holders.

    The number of clients stands for nobody. Shares of a class that sum to 1 but for rounding cannot hand out more
    examples than there are: the sum of the floors is a whole number under size + 1.
    """
    num_clients, num_classes = shares.shape
    shuffled = keys.numpy_generator(key).permutation(len(y))
    by_class = shuffled[numpy.argsort(y[shuffled], kind="stable")]
    sizes = numpy.bincount(y, minlength=num_classes)
    counts = numpy.floor(shares * sizes).astype(numpy.int64)
    counts = numpy.concatenate([counts, [sizes - counts.sum(0)]])
    owners = numpy.empty(len(y), dtype=numpy.int64)
    owners[by_class] = numpy.repeat(numpy.tile(numpy.arange(num_clients + 1), num_classes), counts.T.ravel())
    return owners


def _assignment(owners: Mapping[str, Integers], shares: Floats, num_novel: int = 0) -> Assignment:
    clients, unused = {}, {}
    for name, owner in owners.items():
        sizes = numpy.bincount(owner, minlength=len(shares) + 1)
        parts = numpy.split(numpy.argsort(owner, kind="stable"), numpy.cumsum(sizes)[:-1])
        clients[name], unused[name] = parts[:-1], parts[-1]
    return Assignment(clients, unused, shares, num_novel)


def _divided(log_weights: Floats) -> Floats:
    """Each class divided over the clients of one side in proportion to their weights."""
    weights = numpy.exp(log_weights - log_weights.max(0))
    result: Floats = weights / weights.sum(0)
    return result


def _classes(splits: Mapping[str, Labels]) -> tuple[Integers, int]:
    """The classes that occur in any split, and the number of columns that hold them (gaps in the numbers included)."""
    if not any(len(labels.y) for labels in splits.values()):
        raise UserError("there are no examples to share out; give at least one split with labels.")
    classes = numpy.unique(numpy.concatenate([labels.y for labels in splits.values()]))
    return classes, int(classes[-1]) + 1


def _check_enough(splits: Mapping[str, Labels], num_clients: int) -> None:
    """At once where their table would take minutes to fill; of a few, those without examples are named later."""
    num_examples = sum(len(labels.y) for labels in splits.values())
    if num_clients > max(num_examples, FEW_CLIENTS):
        raise UserError(f"{num_clients:,} clients cannot share {num_examples:,} examples; use fewer clients.")


def _required(splits: Mapping[str, Labels], field: str, rule: str, meaning: str) -> dict[str, Integers]:
    values = {}
    for name, labels in splits.items():
        given = getattr(labels, field)
        if given is None and len(labels.y):
            raise UserError(
                f"{rule} needs {meaning} of every example, and the {name} examples have none; give {field}."
            )
        values[name] = numpy.empty(0, dtype=numpy.int64) if given is None else given
    return values


def _check_alpha(name: str, value: float) -> None:
    # Outside these bounds the logarithms lose all meaning, long after the partition has stopped changing.
    if not isinstance(value, Real) or isinstance(value, bool) or not 1e-9 <= value <= 1e9:
        raise UserError(f"{name} is {short(value)}; give a number above 0, from 1e-9 to 1e9.")
