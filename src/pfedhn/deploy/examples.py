"""A party's own examples, read and scaled as the federation's SPEC says."""

from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.data.cells import read_columns
from pfedhn.data.columns import to_numbers
from pfedhn.data.federation import Federation
from pfedhn.data.folders import load_array
from pfedhn.deploy.spec import Data, FederationSpec, listed, still_unresolved, unresolved
from pfedhn.engine.network import check_model
from pfedhn.engine.plan import Plan
from pfedhn.errors import UserError, closest
from pfedhn.experiments.data import dealing
from pfedhn.system.files import given_path, reading


def read_examples(path: str | Path, name: str, spec: FederationSpec, plan: Plan, architecture: str = "") -> Federation:
    """A party's own examples: a folder with x.npy and y.npy, or a table; split as a simulation would split them."""
    place, data = given_path(path), spec.data
    if left := unresolved(data):
        raise still_unresolved(left)
    x, y = raw_examples(path, spec)
    class_names = tuple(map(str, range(data.classes))) if isinstance(data.classes, int) else data.classes
    federation = Federation.from_clients(
        {name: (_scaled(x, data), _labels(y, data, place))},
        class_names=class_names,
        **dealing(spec.cell, spec.seed),
    )
    if plan.device.type != "cpu":
        federation = federation.to(plan.device)
    check_model(plan.models[architecture or next(iter(plan.models))], federation)
    return federation


def raw_examples(path: str | Path, spec: FederationSpec, is_counted: bool = False) -> tuple[NDArray[Any], NDArray[Any]]:
    """A party's own examples and labels as they are in its files, neither scaled nor split.

    Args:
        path: A folder or a table.
        spec: Of the federation.
        is_counted: Whether empty cells of a table are counted later, and are NaN; they are refused otherwise.
    """
    place, data = given_path(path), spec.data
    with reading(place):
        if not place.exists():
            raise UserError(f"{place} does not exist; give a folder with x.npy and y.npy, or a table.")
        is_folder = place.is_dir()
    if is_folder:
        x, y = load_array(place / "x.npy", "biuf"), load_array(place / "y.npy", "biufUS")
    else:
        x, y = _of_table(place, data, is_counted)
    if tuple(x.shape[1:]) != data.example_shape:
        raise UserError(
            f"{place} has examples of shape {tuple(x.shape[1:])}; this federation's have {data.example_shape}."
        )
    if len(x) != len(y) or not len(x):
        raise UserError(f"{place} has {len(x)} examples and {len(y)} labels; give one label for each example.")
    return x, y


def _of_table(file: Path, data: Data, is_counted: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    if data.label is None or not data.features:
        raise UserError(f"{file} is a table, and [data] of this federation names no columns; give x.npy and y.npy.")
    columns = read_columns(file, is_ignored=lambda name: name not in {data.label, *data.features})
    if missing := [name for name in (data.label, *data.features) if name not in columns]:
        raise UserError(f"{file.name} has no column {missing[0]!r}; {closest(missing[0], columns)}")
    x = numpy.stack([to_numbers(columns, name, is_filled=is_counted) for name in data.features], axis=1)
    return x, columns[data.label]


def _scaled(x: NDArray[Any], data: Data) -> NDArray[Any]:
    if data.mean is None and data.std is None:
        return x
    lengths = {len(x.shape) > 1 and x.shape[1], 1}  # features of a table, channels of an image

    def fitting(values: tuple[float, ...] | float | str | None, default: float) -> NDArray[numpy.float32]:
        numbers = numpy.array(listed(values) or (default,), dtype=numpy.float32)
        if len(numbers) not in lengths:
            raise UserError(f"[data] scales by {len(numbers)} numbers, and an example has {x.shape[1]}; give as many.")
        return numbers.reshape(-1, *[1] * (x.ndim - 2))

    scaled: NDArray[Any] = (x.astype(numpy.float32) - fitting(data.mean, 0.0)) / fitting(data.std, 1.0)
    return scaled


def _labels(y: NDArray[Any], data: Data, place: Path) -> NDArray[Any]:
    if isinstance(data.classes, tuple):
        texts = [str(label.decode() if isinstance(label, bytes) else label) for label in y.tolist()]
        places = {name: number for number, name in enumerate(data.classes)}
        if unknown := [text for text in texts if text not in places]:
            raise UserError(f"{place} has the label {unknown[0]!r}; {closest(unknown[0], data.classes)}")
        return numpy.array([places[text] for text in texts], dtype=numpy.int64)
    try:
        numbers: NDArray[Any] = y.astype(numpy.float32 if data.classes is None else numpy.float64)
    except ValueError:
        raise UserError(f"the labels of {place} are texts, and this federation's are numbers; give numbers.") from None
    if isinstance(data.classes, int):
        if len(wrong := numbers[~numpy.isin(numbers, numpy.arange(data.classes))]):
            raise UserError(f"{place} has the label {wrong[0]:g}; this federation's go from 0 to {data.classes - 1}.")
        return numbers.astype(numpy.int64)
    return numbers
