"""SPEC, the file that a federation is made of: an experiment of one cell and one seed, and what no party knows alone.

method = "pfedhn-pc"
model = "mlp-32"
clients = 3                       # how many parties are expected
steps = 600
seeds = [0]

[data]                            # what every party's examples look like
classes = ["ill", "well"]         # or a number, where labels are numbers from 0
label = "outcome"                 # of a table: the column of the label,
features = ["age", "dose"]        # and those of the features, in this order
mean = [51.0, 1.2]                # what features are scaled by, if they are
std = [17.0, 0.4]

[policy]                          # how the server deals with parties (`pfedhn.deploy.server.Policy`)
reply_seconds = 300.0
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from pfedhn import models
from pfedhn.data.cells import read_columns
from pfedhn.data.columns import to_numbers
from pfedhn.data.description import Description
from pfedhn.data.federation import Federation
from pfedhn.data.folders import load_array
from pfedhn.deploy.server import Policy
from pfedhn.engine.network import check_model
from pfedhn.engine.plan import Plan, make_plan
from pfedhn.engine.transform import find_transform
from pfedhn.errors import UserError, closest, short
from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.grid import from_table
from pfedhn.experiments.spec import Cell
from pfedhn.model import Factory, Model
from pfedhn.models import cross_entropy, is_correct, squared_error
from pfedhn.settings import build, parse_toml
from pfedhn.system.files import given_path, reading
from pfedhn.system.reference import find


@dataclass(frozen=True)
class Data:
    """What every party's examples look like.

    Args:
        classes: The names of the classes, or how many there are; left out where numbers are predicted.
        outputs: How many numbers are predicted for an example, where there are no classes.
        shape: Of one example; of a table, as many as it has features.
        label: The column of a table that holds the label.
        features: The columns of a table that are the features, in order.
        mean: What is subtracted from an example: one number, or one for each feature or channel.
        std: What it is divided by then.
    """

    classes: tuple[str, ...] | int | None = None
    outputs: int = 1
    shape: tuple[int, ...] = ()
    label: str | None = None
    features: tuple[str, ...] = ()
    mean: tuple[float, ...] | float | None = None
    std: tuple[float, ...] | float | None = None

    @property
    def num_outputs(self) -> int:
        if self.classes is None:
            return self.outputs
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def example_shape(self) -> tuple[int, ...]:
        return self.shape or (len(self.features),)


@dataclass(frozen=True)
class Spec:
    """Everything that the file says."""

    cell: Cell
    seed: int
    data: Data
    policy: Policy
    sizes: Mapping[str, str] = field(default_factory=dict)  # networks of several sizes, by what parties call them
    joining_rounds: int = 20

    @property
    def data_seed(self) -> int:
        return self.seed if self.cell.data_seed is None else self.cell.data_seed


def read_spec(text: str, path: Path) -> Spec:
    """What such a file says, or a sentence that says what is wrong with it."""
    table = dict(parse_toml(text, path))
    own = {name: table.pop(name, {}) for name in ("data", "policy", "sizes")}
    for name, part in own.items():
        if not isinstance(part, Mapping):
            raise UserError(f"{name} does not fit; write it under a heading [{name}].")
    joining_rounds = table.pop("joining_rounds", 20)
    if type(joining_rounds) is not int or joining_rounds < 1:
        raise UserError(f"joining_rounds = {short(joining_rounds)} does not fit; it must be at least 1.")
    experiment = from_table({"seeds": [0], **table}, path.stem)
    if len(experiment.cells) != 1 or len(experiment.seeds) != 1:
        raise UserError(
            f"{path.name} has {len(experiment.cells)} cells and {len(experiment.seeds)} seeds; a federation runs once, "
            "so leave one of each."
        )
    (cell,) = experiment.cells
    if cell.pretrain is not None:
        raise UserError("pretrain is for experiments; a federation starts fresh, so leave it out.")
    if cell.privacy:
        raise UserError("privacy is each party's own choice (`pfedhn join --help`); leave it out of this file.")
    data = build(Data, own["data"], "[data]")
    policy = build(Policy, own["policy"], "[policy]")
    if cell.in_flight is not None:
        policy = replace(policy, in_flight=cell.in_flight)
    spec = Spec(cell, experiment.seeds[0], data, policy, own["sizes"], joining_rounds)
    _check(spec)
    return spec


def _check(spec: Spec) -> None:
    data, cell = spec.data, spec.cell
    if data.num_outputs < 1 or not data.example_shape or min(data.example_shape) < 1:
        raise UserError(
            "[data] does not say what examples look like; give shape = [...] of one example, or features = [...] of a "
            "table, and the classes."
        )
    if isinstance(data.classes, tuple) and len(set(data.classes)) != len(data.classes):
        raise UserError("[data] names a class twice; name each once.")
    if data.features and data.shape not in ((), (len(data.features),)):
        raise UserError("[data] has features and a shape that differ; leave the shape out.")
    if data.features and data.label is None:
        raise UserError('[data] has features and no label; say which column it is: label = "...".')
    if any(value <= 0 or not math.isfinite(value) for value in listed(data.std)):
        raise UserError("[data] std does not fit; it must be above 0.")
    for name in ("steps", "batch_size", "evaluate_every", "clients", "cohort_size"):
        if (value := getattr(cell, name)) is not None and value < 1:
            raise UserError(f"{name} = {value} does not fit; it must be at least 1.")
    _check_policy(spec.policy, cell.clients)


def _check_policy(policy: Policy, num_clients: int) -> None:
    """Refuse what would stop a server from ever asking anybody, or from ever believing an answer."""
    one, zero = ("start_with", "patience", "in_flight"), ("max_staleness", "aside_seconds", "return_seconds")
    for least, names in ((1, one), (0, (*zero, "checkpoint_seconds"))):
        for name in names:
            if (value := getattr(policy, name)) is not None and value < least:
                raise UserError(f"{name} = {value} does not fit; it must be at least {least}.")
    for name in ("reply_seconds", "max_update"):
        if (value := getattr(policy, name)) <= 0:
            raise UserError(f"{name} = {value} does not fit; it must be above 0.")
    if policy.start_with is not None and policy.start_with > num_clients:
        raise UserError(f"start_with = {policy.start_with} does not fit; {num_clients} parties are expected.")


def listed(value: tuple[float, ...] | float | None) -> Sequence[float]:
    """A number or several, as several."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def to_plan(spec: Spec) -> Plan:
    """What server and parties know alike."""
    cell, data = spec.cell, spec.data
    is_classes = data.classes is not None
    made = {}
    for name, network in (spec.sizes or {cell.model: cell.model}).items():
        loss, metric = (cross_entropy, is_correct) if is_classes else (squared_error, None)
        made[name] = Model(name, _factory(network, data), loss, metric, "cpu", torch.float32)
    algorithm = cell_algorithm(cell)
    if spec.policy.in_flight is not None and not algorithm.communicates:
        raise UserError(f"parties of {cell.method} send nothing to wait for; leave in_flight out.")
    return make_plan(
        algorithm,
        made,
        described(spec),
        steps=cell.steps,
        cohort_size=cell.cohort_size,
        batch_size=cell.batch_size,
        evaluate_every=cell.evaluate_every,
        seed=spec.seed,
        upload=find_transform(cell.upload),
        download=find_transform(cell.download),
        joining_rounds=spec.joining_rounds,
    )


def described(spec: Spec) -> Description:
    """The parties that are expected and what their examples look like; nobody knows their names and sizes yet."""
    data, scaling = spec.data, None
    if data.mean is not None or data.std is not None:
        scaling = {"scale": 1.0, "mean": listed(data.mean) or (0.0,), "std": listed(data.std) or (1.0,)}
    is_classes = data.classes is not None
    return Description(
        spec.cell.clients,
        data.example_shape,
        "float32",
        () if is_classes or data.outputs == 1 else (data.outputs,),
        "int64" if is_classes else "float32",
        spec.cell.batch_size,
        classes=data.num_outputs if is_classes else None,
        class_names=data.classes if isinstance(data.classes, tuple) else None,
        descriptor_dim=data.num_outputs if is_classes else None,
        preprocessing=scaling,
    )


def _factory(network: Any, data: Data) -> Factory:
    if isinstance(network, str) and ":" in network:  # of a package that is installed here
        made: Factory = find(network)
        return made
    if not isinstance(network, str):
        raise UserError(f"{short(network)} names no network; give a text, such as mlp-32.")
    models.check_name(network)
    return models.factory(network, data.num_outputs, data.example_shape)


def read_party(path: str | Path, name: str, spec: Spec, plan: Plan, architecture: str = "") -> Federation:
    """A party's own examples: a folder with x.npy and y.npy, or a table; split as a simulation would split them."""
    place, data = given_path(path), spec.data
    with reading(place):
        if not place.exists():
            raise UserError(f"{place} does not exist; give a folder with x.npy and y.npy, or a table.")
        is_folder = place.is_dir()
    if is_folder:
        x, y = load_array(place / "x.npy", "biuf"), load_array(place / "y.npy", "biufUS")
    else:
        x, y = _of_table(place, data)
    if tuple(x.shape[1:]) != data.example_shape:
        raise UserError(
            f"{place} has examples of shape {tuple(x.shape[1:])}; this federation's have {data.example_shape}."
        )
    if len(x) != len(y) or not len(x):
        raise UserError(f"{place} has {len(x)} examples and {len(y)} labels; give one label for each example.")
    class_names = tuple(map(str, range(data.classes))) if isinstance(data.classes, int) else data.classes
    federation = Federation.from_clients(
        {name: (_scaled(x, data), _labels(y, data, place))},
        split=spec.cell.split,
        stratify=spec.cell.stratify,
        seed=spec.data_seed,
        class_names=class_names,
    )
    check_model(plan.models[architecture or next(iter(plan.models))], federation)
    return federation


def _of_table(file: Path, data: Data) -> tuple[NDArray[Any], NDArray[Any]]:
    if data.label is None or not data.features:
        raise UserError(f"{file} is a table, and [data] of this federation names no columns; give x.npy and y.npy.")
    columns = read_columns(file, is_ignored=lambda name: name not in {data.label, *data.features})
    for wanted in (data.label, *data.features):
        if wanted not in columns:
            raise UserError(f"{file.name} has no column {wanted!r}; {closest(wanted, columns)}")
    x = numpy.stack([to_numbers(columns, name) for name in data.features], axis=1)
    return x, columns[data.label]


def _scaled(x: NDArray[Any], data: Data) -> NDArray[Any]:
    if data.mean is None and data.std is None:
        return x
    lengths = {len(x.shape) > 1 and x.shape[1], 1}  # features of a table, channels of an image

    def fitting(values: tuple[float, ...] | float | None, default: float) -> NDArray[numpy.float32]:
        numbers = numpy.array(listed(values) or (default,), dtype=numpy.float32)
        if len(numbers) not in lengths:
            raise UserError(f"[data] scales by {len(numbers)} numbers, and an example has {x.shape[1]}; give as many.")
        return numbers.reshape(-1, *[1] * (x.ndim - 2))

    scaled: NDArray[Any] = (x.astype(numpy.float32) - fitting(data.mean, 0.0)) / fitting(data.std, 1.0)
    return scaled


def _labels(y: NDArray[Any], data: Data, place: Path) -> NDArray[Any]:
    if data.classes is None:
        try:
            return y.astype(numpy.float32)
        except ValueError:
            raise UserError(f"the labels of {place} are no numbers, and this federation predicts numbers.") from None
    if isinstance(data.classes, int):
        try:
            whole: NDArray[Any] = y.astype(numpy.float64)
        except ValueError:
            raise UserError(f"the labels of {place} are texts, and this federation's are class numbers.") from None
        if not ((whole == numpy.floor(whole)) & (whole >= 0) & (whole < data.classes)).all():
            wrong = whole[~((whole == numpy.floor(whole)) & (whole >= 0) & (whole < data.classes))][0]
            raise UserError(f"{place} has the label {wrong:g}; this federation's go from 0 to {data.classes - 1}.")
        return whole.astype(numpy.int64)
    numbers = {name: number for number, name in enumerate(data.classes)}
    texts = [str(label.decode() if isinstance(label, bytes) else label) for label in y.tolist()]
    unknown = [text for text in texts if text not in numbers]
    if unknown:
        raise UserError(f"{place} has the label {unknown[0]!r}; {closest(unknown[0], data.classes)}")
    return numpy.array([numbers[text] for text in texts], dtype=numpy.int64)
