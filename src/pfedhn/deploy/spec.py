"""SPEC, the file that a federation is made of: an experiment of one cell and one seed, and what no party knows alone.

method = "pfedhn-pc"
model = "mlp-32"
clients = 3                       # how many parties are expected
steps = 600
seeds = [0]

[study]                           # who runs it and what for; each party reads it before it agrees
operator = "University Hospital of Lyon"
purpose = "predict the outcome of a treatment"

[data]                            # what every party's examples look like
classes = ["ill", "well"]         # or a number, if labels are numbers from 0
label = "outcome"                 # of a table: the column of the label,
features = ["age", "dose"]        # and those of the features, in this order
mean = [51.0, 1.2]                # what features are scaled by, if they are; "federation" leaves it to statistics of
std = [17.0, 0.4]                 # the parties' training rows, and so classes = "federation"

[bounds]                          # what features lie between, for parties that add noise to their statistics
age = [0, 120]
dose = [0.0, 10.0]

[policy]                          # how the server deals with parties (`pfedhn.deploy.policy.Policy`)
reply_seconds = 300.0
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from pfedhn import models
from pfedhn.data.description import Description
from pfedhn.deploy.policy import Policy, check_policy
from pfedhn.engine.plan import Plan, make_plan
from pfedhn.engine.robust import find_robust
from pfedhn.engine.transform import find_transform
from pfedhn.errors import UserError, closest, short
from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.grid import from_table
from pfedhn.experiments.spec import Cell
from pfedhn.model import Factory, Model
from pfedhn.models import cross_entropy, is_correct, squared_error
from pfedhn.settings import build, parse_toml, whole_number
from pfedhn.system.reference import find

MAX_PURPOSE = 500  # letters
FEDERATION = "federation"
Federation: TypeAlias = Literal["federation"]
"""What stands for a value that the parties' statistics give."""


@dataclass(frozen=True)
class Data:
    """What every party's examples look like.

    Args:
        classes: The names of the classes, or how many there are; left out where numbers are predicted. "federation"
            leaves it to the parties' summaries, and so `mean` and `std` (`pfedhn.deploy.statistics`).
        outputs: How many numbers are predicted for an example, if there are no classes.
        shape: Of one example; of a table, as many as it has features.
        label: The column of a table that holds the label.
        features: The columns of a table that are the features, in order.
        mean: What is subtracted from an example: one number, or one for each feature or channel.
        std: What it is divided by then.
    """

    classes: tuple[str, ...] | int | Federation | None = None
    outputs: int = 1
    shape: tuple[int, ...] = ()
    label: str | None = None
    features: tuple[str, ...] = ()
    mean: tuple[float, ...] | float | Federation | None = None
    std: tuple[float, ...] | float | Federation | None = None

    @property
    def num_outputs(self) -> int:
        if self.classes is None:
            return self.outputs
        if self.classes == FEDERATION:
            raise still_unresolved(("classes",))
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def example_shape(self) -> tuple[int, ...]:
        return self.shape or (len(self.features),)


@dataclass(frozen=True)
class Purpose:
    """Who runs a study, and what for.

    Args:
        operator: The person or institution that runs the server.
        purpose: What the models are for.
    """

    operator: str = ""
    purpose: str = ""


@dataclass(frozen=True)
class FederationSpec:
    """Everything that the file says."""

    cell: Cell
    seed: int
    data: Data
    policy: Policy
    sizes: Mapping[str, str] = field(default_factory=dict)  # networks of several sizes, by what parties call them
    joining_rounds: int = 20
    study: Purpose = Purpose()
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # of features, for parties that add noise


def read_spec(text: str, path: Path) -> FederationSpec:
    """What such a file says, or a sentence that says what is wrong with it."""
    table = dict(parse_toml(text, path))
    own = {name: table.pop(name, {}) for name in ("data", "policy", "sizes", "study", "bounds")}
    for name, part in own.items():
        if not isinstance(part, Mapping):
            raise UserError(f"`{name}` must be a table, got {short(part)}; write it under a heading [{name}].")
    joining_rounds = whole_number("joining_rounds", table.pop("joining_rounds", 20))
    experiment = from_table({"seeds": [0], **table}, path.stem)
    if len(experiment.cells) != 1 or len(experiment.seeds) != 1:
        raise UserError(
            f"{path.name} has {len(experiment.cells)} cells and {len(experiment.seeds)} seeds; a federation runs once, "
            "so leave one of each."
        )
    (cell,) = experiment.cells
    if cell.patience is not None:
        raise UserError("a federation takes all its steps; leave `patience` out.")
    if cell.pretrain is not None:
        raise UserError("pretrain is for experiments; a federation starts fresh, so leave it out.")
    if cell.privacy:
        raise UserError("privacy is each party's own choice (`pfedhn join --help`); leave it out of this file.")
    if cell.attack:
        raise UserError("attack is for simulations; leave it out of this file.")
    data = build(Data, own["data"], "[data]")
    policy = build(Policy, own["policy"], "[policy]")
    if cell.in_flight is not None:
        policy = replace(policy, in_flight=cell.in_flight)
    study = build(Purpose, own["study"], "[study]")
    bounds = _bounds(own["bounds"], data)
    spec = FederationSpec(cell, experiment.seeds[0], data, policy, own["sizes"], joining_rounds, study, bounds)
    _check(spec)
    return spec


def _bounds(table: Mapping[str, Any], data: Data) -> dict[str, tuple[float, float]]:
    """What values of features lie between; a party that adds noise to its statistics needs it of every feature."""
    for name, pair in table.items():
        is_pair = isinstance(pair, list) and [type(part) in (int, float) for part in pair] == [True, True]
        if not is_pair or not -math.inf < pair[0] < pair[1] < math.inf:
            raise UserError(f"[bounds] {name} must be two rising numbers, got {short(pair)}.")
        if data.features and name not in data.features:
            raise UserError(f"[bounds] names {name!r}, which is no feature; {closest(name, data.features)}")
    return {name: (float(low), float(high)) for name, (low, high) in table.items()}


def check_data(data: Data) -> None:
    """Refuse [data] that does not say what examples look like, or contradicts itself."""
    num_outputs = 1 if data.classes == FEDERATION else data.num_outputs
    if num_outputs < 1 or not data.example_shape or min(data.example_shape) < 1:
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
        raise UserError(f"[data] `std` must be above 0, got {data.std}.")


def _check(spec: FederationSpec) -> None:
    cell = spec.cell
    check_data(spec.data)
    for name in ("steps", "batch_size", "evaluate_every", "clients", "cohort_size"):
        if (value := getattr(cell, name)) is not None:
            whole_number(name, value)
    for name, text in (("operator", spec.study.operator), ("purpose", spec.study.purpose)):
        if len(text) > MAX_PURPOSE or not text.isprintable():
            raise UserError(f"[study] {name} must be one line of at most {MAX_PURPOSE} letters.")
    check_policy(spec.policy, cell.clients)


def unresolved(data: Data) -> tuple[str, ...]:
    """What [data] leaves to the federation."""
    return tuple(name for name in ("classes", "mean", "std") if getattr(data, name) == FEDERATION)


def still_unresolved(names: Sequence[str]) -> UserError:
    return UserError(
        f"[data] leaves {' and '.join(names)} to the federation, whose statistics are not known yet; gather them first."
    )


def listed(value: tuple[float, ...] | float | str | None) -> Sequence[float]:
    """A number or several, as several; none of a value that is left to the federation."""
    if isinstance(value, str):
        return ()
    return () if value is None else value if isinstance(value, tuple) else (value,)


def to_plan(spec: FederationSpec, device: str = "cpu") -> Plan:
    """What server and parties know alike; each computes with it on its own device."""
    cell, data = spec.cell, spec.data
    if left := unresolved(data):
        raise still_unresolved(left)
    is_classes = data.classes is not None
    made = {}
    for name, network in (spec.sizes or {cell.model: cell.model}).items():
        loss, metric = (cross_entropy, is_correct) if is_classes else (squared_error, None)
        made[name] = Model(name, _factory(network, data), loss, metric, device, torch.float32)
    algorithm = cell_algorithm(cell)
    if spec.policy.in_flight is not None and not algorithm.needs.communication:
        raise UserError(f"parties of {cell.method} send nothing to wait for; leave in_flight out.")
    return make_plan(
        algorithm,
        made,
        described(spec),
        steps=cell.steps,
        cohort_size=cell.cohort_size,
        batch_size=cell.batch_size,
        evaluate_every=cell.evaluate_every,
        select=cell.select,
        seed=spec.seed,
        upload=find_transform(cell.upload),
        download=find_transform(cell.download),
        joining_rounds=spec.joining_rounds,
        robust=find_robust(cell.robust),
    )


def described(spec: FederationSpec) -> Description:
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
