"""A data set of Hugging Face's `datasets` in which a column names the client."""

import secrets
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch

from pfedhn import keys
from pfedhn.data.arrays import SPLITS, Array, check_classes, check_values
from pfedhn.data.catalogue import ANOTHER_CACHE
from pfedhn.data.cells import check_columns, is_empty
from pfedhn.data.dealing import Split, split_examples
from pfedhn.data.federation import Federation
from pfedhn.data.images import Channels, decode, image_size
from pfedhn.data.labels import as_labels
from pfedhn.data.lazy import lazy_federation
from pfedhn.errors import UserError, first_line, short
from pfedhn.settings import check_seed
from pfedhn.system.files import cache_folder, make_folder

NUM_CACHED = 1_024  # clients whose examples are kept in memory, as those of `Federation.lazy`


def from_hugging_face(
    dataset: Any,
    client_column: str,
    label_column: str,
    input_column: str,
    *,
    split: Split = (0.7, 0.15, 0.15),
    stratify: bool = False,
    seed: int = 0,
    resize: int | tuple[int, int] | None = None,
    channels: Channels = "rgb",
    when_needed: bool = False,
) -> Federation:
    """A federation of a `datasets.Dataset`, whose rows have a client each.

    Args:
        dataset: One split, such as `datasets.load_dataset(..., split="train")` or `datasets.load_from_disk(...)`
            returns it. A stream (`streaming=True`) is written to a temporary file first, row by row, since it cannot be
            asked for the rows of one client; the file is in pfedhn's cache folder.
        client_column: The column that names the client.
        label_column: The column that holds the label: class numbers, texts, or fractions for regression.
        input_column: The column that holds the example: an image, or a list of numbers of one length.
        split: The fractions of a client's examples for training, validation and test, or a `Fold`.
        stratify: Draw each client's split within each of its classes.
        seed: The seed of the split.
        resize: Height and width that images are brought to, or one number for both.
        channels: Of images: "rgb" or "gray".
        when_needed: Read a client's examples when it takes part or is tested, for data that do not fit in memory.
            Names, classes, splits and minibatches are those of the same data in memory.

    Examples:
        >>> import datasets, pfedhn.datasets
        >>> rows = {"who": ["a", "b"] * 10, "what": [0, 1] * 10, "x": [[1.0, 2.0]] * 20}
        >>> table = datasets.Dataset.from_dict(rows)
        >>> federation = pfedhn.datasets.from_hugging_face(table, "who", "what", "x")
        >>> federation.names, tuple(federation.x.shape)
        (('a', 'b'), (20, 2))
    """
    wanted = (client_column, label_column, input_column)
    if hasattr(dataset, "__iter__") and hasattr(dataset, "select_columns") and not hasattr(dataset, "__len__"):
        dataset = _spooled(dataset, wanted)
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or not hasattr(dataset, "__len__"):
        raise UserError(
            f'dataset is {short(dataset)}; give one split of a data set, as load_dataset(..., split="train") makes it.'
        )
    check_columns("the data set", columns, wanted)
    for column in (client_column, label_column):
        empty = [row for row, cell in enumerate(dataset[column]) if is_empty(cell)]
        if empty:
            raise UserError(f"row {empty[0]} of the data set has no {column!r}; fill the cell or drop the row.")
    cells = dataset[client_column]
    owners = numpy.array([str(cell).strip() for cell in cells])
    are_numbers = all(isinstance(cell, int) for cell in cells)
    names = sorted(set(owners.tolist()), key=int if are_numbers else str)  # as in a table
    size = image_size(resize)
    labels, class_names = _labels(dataset, label_column)
    check_values(torch.empty(0), torch.from_numpy(labels))  # now: of data read when needed, a run would end halfway

    def decoded(rows: Array) -> list[Array]:
        values = dataset[rows.tolist()][input_column]
        return [decode(v, size, channels) if hasattr(v, "convert") else numpy.asarray(v) for v in values]

    def examples(rows: Array) -> tuple[Array, Array]:
        try:
            inputs, (first,) = decoded(rows), decoded(numpy.zeros(1, dtype=numpy.int64))
            if unlike := [part.shape for part in inputs if part.shape != first.shape]:
                raise ValueError(f"one has the shape {first.shape} and one {unlike[0]}")
            return numpy.stack(inputs), labels[rows]
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"the examples in column {input_column!r} do not make one array ({first_line(error)}); give lists of "
                "one length, or images of one size or with a resize."
            ) from error

    if not when_needed:
        data = {name: examples(numpy.flatnonzero(owners == name)) for name in names}
        return Federation.from_clients(data, split=split, stratify=stratify, seed=seed, class_names=class_names)
    check_seed(seed)
    known = torch.from_numpy(labels)
    check_classes([known], len(known), class_names)
    dealt = []
    for name in names:
        rows = numpy.flatnonzero(owners == name)
        parts = split_examples(labels[rows], split, stratify, keys.fold(seed, "partition", "split", name), repr(name))
        dealt.append({part: rows[numbers] for part, numbers in zip(SPLITS, parts, strict=True)})

    def load(client: int) -> Mapping[str, Any]:
        return {part: examples(rows) for part, rows in dealt[client].items() if len(rows)}

    sizes: dict[str, Any] = {part: [len(client[part]) for client in dealt] for part in SPLITS}
    federation = lazy_federation(len(names), load, sizes, num_cached=NUM_CACHED)
    in_order = torch.from_numpy(numpy.concatenate([client[part] for client in dealt for part in SPLITS]))
    return replace(federation, names=tuple(names), class_names=class_names, labels=known[in_order]).checked()


def _spooled(stream: Any, wanted: Sequence[str]) -> Any:
    """The columns of a stream as a data set on disk."""
    import datasets

    if stream.column_names is not None:  # else they are known by the first row
        check_columns("the data set", stream.column_names, wanted)
        stream = stream.select_columns(list(dict.fromkeys(wanted)))
    features = stream.features
    # As they are: an image that is decoded and encoded again may be another one.
    encoded = [name for name, kind in (features or {}).items() if isinstance(kind, datasets.Image) and kind.decode]
    for name in encoded:
        stream = stream.cast_column(name, datasets.Image(decode=False))
    folder = cache_folder()
    make_folder(folder, ANOTHER_CACHE)
    scratch = tempfile.TemporaryDirectory(dir=folder, prefix="stream-", ignore_cleanup_errors=True)
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        spooled = datasets.Dataset.from_generator(
            lambda: iter(stream), features=stream.features, cache_dir=scratch.name, fingerprint=secrets.token_hex(8)
        )
    except Exception as error:
        scratch.cleanup()
        raise UserError(
            f"the stream could not be read to its end and written to {folder} "
            f"({first_line(error.__cause__ or error)}); try again, make room there or {ANOTHER_CACHE}, or load the "
            "data set without streaming=True."
        ) from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    for name in encoded:
        spooled = spooled.cast_column(name, features[name])
    weakref.finalize(spooled, scratch.cleanup)
    return spooled


def _labels(dataset: Any, column: str) -> tuple[Array, tuple[str, ...] | None]:
    values = numpy.array(dataset[column])
    if values.dtype.kind not in "biufUS":
        raise UserError(f"the labels in column {column!r} are neither numbers nor texts; give one of these.")
    values = numpy.char.strip(values) if values.dtype.kind in "US" else values  # as in a table
    (labels,), found = as_labels([values], "auto", f"column {column!r}")
    named = getattr(getattr(dataset, "features", {}).get(column), "names", None)
    return labels, found or (tuple(named) if named else None)
