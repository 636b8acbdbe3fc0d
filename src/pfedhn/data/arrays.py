"""Check the arrays that a user gives, and make tensors of them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, get_args

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pfedhn.errors import UserError, closest, short

SPLITS = ("train", "validation", "test")
Arrays: TypeAlias = tuple[ArrayLike | Tensor, ArrayLike | Tensor]
ClientData: TypeAlias = Arrays | Mapping[str, Arrays]
Array: TypeAlias = NDArray[Any]
Pair: TypeAlias = tuple[Tensor, Tensor]

MAX_CLASSES = 100_000
NUM_CLASSES_ON_TRUST = 2_000  # a party with few examples may have any of Omniglot's 1,623 classes
EXPECTED = 'a client brings {"train": (x, y), "validation": (x, y), "test": (x, y)}, arrays of numbers'


def as_tensor(values: Any, what: str = "it") -> Tensor:
    """Numbers in the precision of training; whole numbers as int64, but images of bytes stay bytes."""
    try:
        tensor = values.detach() if isinstance(values, Tensor) else torch.from_numpy(_native(numpy.asarray(values)))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # texts, dates, lists of unequal lengths, ...
        raise UserError(f"{what} must be an array of numbers, not {short(values)}{_way_out(values)}.") from None
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_meta:
        raise UserError(f"{what} must be a plain array of real numbers, not {str(tensor.dtype).split('.')[-1]} ones.")
    if tensor.dtype == torch.uint64 and tensor.numel() and int(tensor.view(torch.int64).min()) < 0:
        raise UserError(f"{what} holds whole numbers from 2**63 on; give them as floating point.")
    if tensor.dtype == torch.float64:
        tensor = tensor.to(torch.get_default_dtype())
    return (
        tensor
        if tensor.is_floating_point() or (tensor.dtype == torch.uint8 and tensor.ndim > 1)
        else tensor.to(torch.int64)
    )


def _way_out(values: Any) -> str:
    """How to make numbers of datasets and texts."""
    if isinstance(values, torch.utils.data.Dataset):
        return "; of a PyTorch Dataset, give x = torch.stack([x for x, _ in dataset]) and y = [y for _, y in dataset]"
    with suppress(ValueError):
        if numpy.asarray(values).dtype.kind in "US":
            return "; number the classes: names, y = numpy.unique(y, return_inverse=True)"
    return ""


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """As PyTorch takes it: in this machine's order of bytes, one number after the other."""
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def as_pair(client: int | str, what: str, arrays: Any) -> Pair:
    """A client's x and y."""
    if isinstance(arrays, torch.utils.data.Dataset):
        raise UserError(f"client {client}: {what} is a {type(arrays).__name__}{_way_out(arrays)}.")
    try:
        x, y = arrays
        pair = as_tensor(x, "x"), as_tensor(y, "y")
        check_lengths(*pair)
    except UserError as error:
        raise UserError(f"client {client}: {what} does not fit: {str(error).rstrip('.')}; {EXPECTED}.") from None
    except (TypeError, ValueError):  # no pair
        raise UserError(f"client {client}: {what} is {short(arrays)}; {EXPECTED}.") from None
    return pair


def refuse_mixed_labels(named: Sequence[tuple[int | str, Tensor]]) -> None:
    """Refuse labels of different kinds or shapes: one client's fractions would make a regression of all.

    Args:
        named: The name and labels of every client that has examples.
    """
    for client, y in named[1:]:
        other, first = named[0]
        if y.is_floating_point() != first.is_floating_point():
            kinds = {True: "floating-point labels, numbers to predict,", False: "class numbers"}
            raise UserError(
                f"client {client} has {kinds[y.is_floating_point()]} and client {other} has "
                f'{kinds[first.is_floating_point()]}; give all clients one kind (for files, task = "regression" or '
                '"classification" makes it one).'
            )
        if y.shape[1:] != first.shape[1:]:
            raise UserError(
                f"client {client} has labels of shape {tuple(y.shape[1:])}, and client {other} of shape "
                f"{tuple(first.shape[1:])}; give all clients one kind."
            )


def as_splits(client: int | str, given: Mapping[str, Arrays | None]) -> dict[str, Pair]:
    """The splits that a client brings, training first."""
    for name in given:
        if name not in SPLITS:
            raise UserError(f"client {client} has a split {name!r}; {closest(str(name), SPLITS)}")
    return {name: as_pair(client, name, given[name]) for name in SPLITS if given.get(name) is not None}


def as_whole_numbers(values: Any) -> Tensor | None:
    """One number or a list of them as int64; None if they are not whole numbers."""
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # what torch raises depends on what it is given
        return None
    if numbers.dtype == torch.bool or numbers.is_complex():
        return None
    whole = numbers.to(torch.int64)
    if numbers.dtype == torch.uint64 and bool((whole < 0).any()):
        return None
    return whole if torch.equal(whole.to(numbers.dtype), numbers) else None


def as_numbers_of(what: str, values: Any) -> NDArray[numpy.int64] | None:
    """One whole number for each example, such as its group; None stays None."""
    if values is None:
        return None
    numbers = as_whole_numbers(values)
    if numbers is None or numbers.ndim != 1:
        raise UserError(f"{what} must be a whole number for each example, not {short(values)}.")
    return numbers.numpy()


def check_lengths(x: Tensor, y: Tensor) -> None:
    if not x.ndim or not y.ndim:
        raise UserError(f"x has the shape {tuple(x.shape)} and y {tuple(y.shape)}; give lists of examples and labels.")
    if len(x) != len(y):
        raise UserError(f"x has {len(x)} examples and y has {len(y)} labels; give one label per example.")


def check_names(names: Sequence[Any], num_clients: int) -> None:
    if len(names) != num_clients:
        raise UserError(f"{len(names)} names were given for {num_clients} clients; give one for each.")
    wrong = [name for name in names if not isinstance(name, str) or not name.strip()]
    if wrong:
        raise UserError(f"a client is called {short(wrong[0])}; give every client a name of at least one letter.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two clients are called {twice!r}; give every client another name.")


def check_values(x: Tensor, y: Tensor) -> None:
    if x.is_floating_point() and not torch.isfinite(x).all():
        example = int((~torch.isfinite(x.reshape(len(x), -1))).any(1).nonzero()[0])
        raise UserError(f"example {example} of x holds NaN or infinity; clean the data before federating it.")
    if y.is_floating_point() and not torch.isfinite(y).all():
        raise UserError("y holds NaN or infinity; clean the data before federating it.")
    if not y.is_floating_point() and y.numel() and int(y.min()) < 0:
        example = int((y < 0).nonzero()[0][0])
        raise UserError(f"example {example} has the label {int(y.min())}; class labels start at 0.")


def check_classes(labels: Sequence[Tensor], num_examples: int, class_names: Sequence[str] | None = None) -> None:
    """Refuse labels that are not class numbers, before anything as large as the highest label is allocated."""
    if class_names is not None and not (
        isinstance(class_names, Sequence) and all(isinstance(name, str) for name in class_names)
    ):
        raise UserError(f"class_names is {short(class_names)}; give a list of texts, one for each class.")
    if any(y.is_floating_point() or y.ndim > 1 for y in labels):
        if class_names is not None:
            raise UserError("y does not hold class numbers, so class_names have nothing to name; leave them out.")
        return
    top = max((int(y.max()) for y in labels if len(y)), default=0)
    if class_names is not None and top >= len(class_names):
        raise UserError(f"y holds the class {top}, and class_names has {len(class_names)}; name every class.")
    most = min(MAX_CLASSES, max(NUM_CLASSES_ON_TRUST, num_examples if class_names is None else len(class_names)))
    if top >= most:
        raise UserError(
            f"y holds the class number {top}, and {num_examples} examples may have class numbers below {most}; if y "
            'holds numbers to predict, give them as floating point (for files: task = "regression"), else number the '
            "classes from 0."
        )


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Refuse a setting that is none of the choices of a `Literal`."""
    if not isinstance(value, str) or value not in get_args(choices):
        raise UserError(f"{name} is {short(value)}; choose {' or '.join(map(repr, get_args(choices)))}.")
