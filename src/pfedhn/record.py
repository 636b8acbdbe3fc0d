"""A run's directory, whoever made it: what is written of a run, and how it is read back.

spec.toml          what the run is: method, network, schedule, data, where it is made
metrics.jsonl      a line per evaluation
checkpoint-*       its state (engine/checkpoint.py)
start.safetensors  the weights it started from, if these are another run's
result.json        what it found; written last, so that it says: finished
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from pfedhn.algorithm import Algorithm
from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.absent import AbsentFederation, Description
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule
from pfedhn.engine.transform import TRANSFORMS, Transform
from pfedhn.environment import environment
from pfedhn.errors import RunError, UserError, first_line
from pfedhn.files import append, claimed, make_folder, read_text, write_atomically
from pfedhn.model import Factory, Model, PerExample
from pfedhn.params import Params
from pfedhn.reference import Code, find, name_of
from pfedhn.result import Cost, Environment, Moment, Result, SchemaError, from_json, to_json
from pfedhn.settings import build, to_toml

FORMAT = 2  # 1: directories of `train` and of experiments differed, and said too little to load a run
SECONDS_FOR_A_LOCK = 5.0  # a worker whose parent was killed needs a round to notice


@dataclass(frozen=True)
class Origin:
    """What a simulation does not know of its run: what it is called, and where it comes from."""

    name: str
    method: str  # as it is registered, or "module:qualname"
    experiment: str = ""
    cell: Mapping[str, Any] = field(default_factory=dict)  # of an experiment's run
    dataset: str | None = None  # where it has a name
    preprocessing: Mapping[str, Any] | None = None  # what was done to the raw data
    pretrain: Cost | None = None
    command: str = ""


@dataclass(frozen=True)
class Network:
    """A target network of a run."""

    factory: Code
    loss: Code
    metric: Code | None = None


@dataclass(frozen=True)
class Part:
    """A method or a transform, by the name it is registered by or by "module:qualname", with every setting."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Spec:
    """Everything that spec.toml says."""

    format: int
    name: str
    seed: int
    executor: str
    method: Part
    upload: Part
    download: Part
    schedule: Schedule
    networks: Mapping[str, Network]
    data: Description
    digests: Mapping[str, str]  # by which one sees that a directory holds another run
    environment: Environment
    cell: Mapping[str, Any] | None = None


def describe(simulation: Simulation, origin: Origin) -> Spec:
    """What a run's directory says of it."""
    networks = {
        name: Network(
            Code.of(model.factory),
            Code.of(model.per_example_loss),
            None if model.per_example_metric is None else Code.of(model.per_example_metric),
        )
        for name, model in simulation.models.items()
    }
    digests = {"partition": partition_digest(simulation.federation), "networks": networks_digest(simulation.models)}
    if simulation.starts is not None:
        digests["start"] = hashlib.sha256(_start_content(simulation.starts)).hexdigest()
    return Spec(
        FORMAT,
        origin.name,
        simulation.seed,
        simulation.executor,
        Part(origin.method, settings_of(simulation.algorithm)),
        Part(transform_name(simulation.upload), settings_of(simulation.upload)),
        Part(transform_name(simulation.download), settings_of(simulation.download)),
        simulation.schedule,
        networks,
        replace(Description.of(simulation.federation), name=origin.dataset, preprocessing=origin.preprocessing),
        digests,
        replace(environment(simulation.federation.x.device), finished=None),
        origin.cell or None,
    )


def settings_of(spec: Any) -> dict[str, Any]:
    """Every setting of a method or transform, also those that were left at their defaults, as a file can hold them."""
    values: dict[str, Any] = to_json(asdict(spec)) if is_dataclass(spec) and not isinstance(spec, type) else {}
    values = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
    plain = (bool, int, float, str, list, dict, type(None))
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}


def method_name(method: str | Algorithm[Any, Any, Any]) -> str:
    """What a method is called: the name it is registered by, or else "module:qualname"."""
    if isinstance(method, str):
        return method
    registered = (name for name, known in ALGORITHMS.items() if known.algorithm is type(method))
    return next(registered, name_of(type(method)))


def transform_name(transform: Transform) -> str:
    """What a transform is called: the name it is registered by, or else "module:qualname"."""
    registered = (name for name, known in TRANSFORMS.items() if known == transform)
    return next(registered, name_of(type(transform)))


def partition_digest(federation: Federation) -> str:
    """A name for who owns which examples."""
    digest = hashlib.sha256()
    for examples in federation.splits.values():
        for part in (examples.index, examples.offset, examples.size):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def networks_digest(models: Mapping[str, Model]) -> str:
    """A name for the weights that the target networks have."""
    shapes = {name: {part: list(shape) for part, shape in model.shapes.items()} for name, model in models.items()}
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def held(directory: Path | None) -> AbstractContextManager[None]:
    """Keep a second process out of a run's directory inside the block; there is nothing to keep out of None."""
    if directory is None:
        return nullcontext()
    make_folder(directory)
    return claimed(directory, SECONDS_FOR_A_LOCK)


def open_directory(directory: Path, simulation: Simulation, origin: Origin) -> None:
    """Write down what the run is, or refuse a directory that holds another one."""
    spec = describe(simulation, origin)
    text = to_toml(_without_none(to_json(spec)))
    if (stored := read_spec(directory)) is not None:
        given = from_json(Spec, tomllib.loads(text))
        parts = ("method", "upload", "download", "seed", "schedule", "digests")
        differing = [part for part in parts if getattr(given, part) != getattr(stored, part)]
        if differing:
            raise UserError(
                f"{directory} holds another run (its {', '.join(differing)} differ); give another directory, or the "
                "settings it was made with."
            )
        return
    if simulation.starts is not None:
        write_atomically(directory / "start.safetensors", _start_content(simulation.starts))
    write_atomically(directory / "spec.toml", text.encode())


def _start_content(starts: Mapping[str, Params]) -> bytes:
    tensors = {f"{name}/{part}": value for name, weights in starts.items() for part, value in weights.items()}
    return save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})


def _without_none(value: Any, is_setting: bool = False) -> Any:
    """TOML has no None: it is left out of what we name, and written as "none" where it is a setting's value."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: "none" if part is None else _without_none(part, is_setting or name in ("settings", "cell"))
        for name, part in value.items()
        if part is not None or is_setting
    }


def append_moment(directory: Path, moment: Moment) -> None:
    append(directory / "metrics.jsonl", json.dumps(to_json(moment)) + "\n")


def cut_history(directory: Path, step: int) -> list[Moment]:
    """Forget what was written after the checkpoint at `step`: the run will write it again."""
    kept = [moment for moment in read_history(directory) if moment.step <= step]
    if (directory / "metrics.jsonl").exists():
        content = "".join(json.dumps(to_json(moment)) + "\n" for moment in kept)
        write_atomically(directory / "metrics.jsonl", content.encode())
    return kept


def write_result(directory: Path, result: Result) -> None:
    write_atomically(directory / "result.json", json.dumps(to_json(result), indent=1).encode())


def read_spec(directory: Path) -> Spec | None:
    """What a directory says of its run; None if it holds none."""
    file = directory / "spec.toml"
    if not file.exists():
        if any(directory.glob("checkpoint-*")):
            raise UserError(OLDER.format(directory))
        return None
    try:
        table = tomllib.loads(read_text(file))
        if table.get("format") != FORMAT:
            raise UserError(OLDER.format(directory))
        return from_json(Spec, table)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, SchemaError) as error:
        raise UserError(f"{file} is damaged ({error}); use another directory.") from None


OLDER = (
    "{} was made by another version of pfedhn, which this one can neither load nor go on with; run it again elsewhere."
)


def read_history(directory: Path) -> list[Moment]:
    """Every evaluation so far; the last line of a run that was killed may be half written."""
    file = directory / "metrics.jsonl"
    moments: list[Moment] = []
    for line in read_text(file).splitlines() if file.exists() else []:
        try:
            moments.append(from_json(Moment, json.loads(line)))
        except ValueError:
            break
    return moments


def read_result(directory: Path) -> Result | None:
    """What a finished run found; None while it is not finished."""
    file = directory / "result.json"
    if not file.exists():
        return None
    try:
        return from_json(Result, json.loads(read_text(file)))
    except SchemaError as error:
        raise UserError(f"{file} cannot be read: {error}; remove it and run again.") from None
    except ValueError:
        raise UserError(f"{file} is damaged; remove it and run again: the run's checkpoint is still there.") from None


def to_simulation(
    directory: Path,
    spec: Spec,
    *,
    model: Factory | Mapping[str, Factory] | None,
    method: type[Any] | None,
    loss: PerExample | None,
    metric: PerExample | None,
    device: str,
) -> Simulation:
    """The simulation of a run from its directory; what is given stands for what the directory names.

    Its federation knows the clients and holds no examples.
    """
    dtype: torch.dtype = getattr(torch, spec.data.dtype)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    models = {}
    for name, network in spec.networks.items():
        factory = model.get(name) if isinstance(model, Mapping) else model
        factory = factory or _factory(directory, name, network.factory)
        wanted = metric
        if metric is None and network.metric is not None:
            wanted = _function(directory, "metric", network.metric)
        models[name] = Model(name, factory, loss or _function(directory, "loss", network.loss), wanted, device, dtype)
    if networks_digest(models) != spec.digests["networks"]:
        raise UserError(f"the network has other weights than the one that {directory} was made with; give that one.")
    return Simulation(
        _algorithm(directory, spec.method, method),
        models,
        AbsentFederation.of(spec.data, device),
        spec.schedule,
        spec.seed,
        spec.executor,
        _read_start(directory / "start.safetensors", models, device) if "start" in spec.digests else None,
        _transform(directory, "upload", spec.upload),
        _transform(directory, "download", spec.download),
    )


def _factory(directory: Path, name: str, code: Code) -> Factory:
    with _naming(f"the network {name!r}", directory, "; give what makes it as load(..., model=...)"):
        factory = code.load()
        made = factory.func if isinstance(factory, partial) else factory
        if isinstance(made, type) and not issubclass(made, nn.Module):
            raise UserError(f"{code.name} is no nn.Module.")
        return factory


def _algorithm(directory: Path, method: Part, given: type[Any] | None) -> Algorithm[Any, Any, Any]:
    with _naming("the method", directory, "; give its class as load(..., method=...)"):
        known = ALGORITHMS.get(method.name)
        algorithm = _built(method, given or (find(method.name) if known is None else known.algorithm))
        if not isinstance(algorithm, Algorithm):
            raise UserError(f"{method.name} is no method.")
        return algorithm


def _transform(directory: Path, direction: str, part: Part) -> Transform:
    if part.name in TRANSFORMS:
        return TRANSFORMS[part.name]
    with _naming(f"the transform of the {direction}", directory, ""):
        transform = _built(part, find(part.name))
        if not hasattr(transform, "encode"):
            raise UserError(f"{part.name} is no transform.")
        return transform  # type: ignore[no-any-return]


def _built(part: Part, kind: Any) -> Any:
    """The frozen dataclass that is a method or a transform, with the settings that were stored."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        raise UserError(f"{part.name} is no method and no transform.")
    return build(kind, part.settings, part.name)


def _function(directory: Path, what: str, code: Code) -> PerExample:
    """The loss or the metric; where it cannot be imported, a function that says so when somebody needs it."""
    try:
        with _naming(f"the {what}", directory, f"; give it as load(..., {what}=...)"):
            return code.load()
    except UserError as error:
        sentence = str(error)

    def refuse(outputs: Any, y: Tensor) -> Tensor:
        raise UserError(sentence)

    return refuse


@contextmanager
def _naming(what: str, directory: Path, way_out: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        reason = str(error).removesuffix(".")
        raise UserError(f"{what} cannot be made from {directory} alone: {reason}{way_out}.") from None


def _read_start(file: Path, models: Mapping[str, Model], device: str) -> dict[str, Params]:
    """The weights that a run started from, in the order of the network: a file has them in another."""
    try:
        tensors = load_file(file, device)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} is missing or damaged ({first_line(error)}); run it again.") from None
    return {name: {part: tensors[f"{name}/{part}"] for part in model.shapes} for name, model in models.items()}
