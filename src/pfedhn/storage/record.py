"""A run's directory, whoever made it: what is written of a run, and how it is read back.

spec.toml          what the run is: method, network, schedule, data, where it is made
metrics.jsonl      a line per evaluation
checkpoint-*       its state (engine/checkpoint.py), with the evaluations so far
start.safetensors  the weights it started from, if these are another run's
result.json        what it found; written last, so that it says: finished
diverged.txt       in words, that it diverged, and where; gone when it is started again

Every file but the last carries a digest of itself; the checkpoints and the result also carry names for all that the run
is made of (`identity`), the lines of metrics.jsonl one that follows from these and from the lines before. So what was
changed, cut or mixed up is refused, or mended from the newest checkpoint when the run is started again.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from pfedhn.data.lazy import LazyFederation
from pfedhn.data.palette import decode
from pfedhn.engine.network import with_frozen
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule
from pfedhn.engine.transform import TRANSFORMS, Transform
from pfedhn.errors import RunError, UserError, first_line
from pfedhn.model import Factory, Model, PerExample
from pfedhn.params import Params
from pfedhn.privacy import Privacy
from pfedhn.settings import build, to_toml
from pfedhn.storage.checkpoint import CheckpointError, checkpoints, differences, verified
from pfedhn.storage.schema import Cost, Moment, Result, SchemaError, from_json, to_json
from pfedhn.storage.seal import (
    DamagedError,
    chained,
    digest,
    parsed,
    sealed_json,
    sealed_text,
    unsealed_json,
    unsealed_text,
)
from pfedhn.system import fingerprint
from pfedhn.system.environment import Environment, environment
from pfedhn.system.files import append, claimed, make_folder, read_bytes, write_atomically
from pfedhn.system.reference import Code, find, find_code, name_of

DIVERGED = "diverged.txt"
FORMAT = 3  # 2: files without digests; 1: too little to load a run
NUM_CLIENTS_LOOKED_AT = 8  # of a federation whose data are loaded when needed, in its digest
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
    plan: Mapping[str, Any] | None = None  # what else its experiment is, but for the cells, and how it is run


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
    plan: Mapping[str, Any] | None = None
    privacy: Mapping[str, Any] | None = None
    in_flight: int | None = None


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
        _digests(simulation),
        replace(environment(simulation.federation.x.device), finished=None),
        origin.cell or None,
        origin.plan,
        None if simulation.privacy is None else settings_of(simulation.privacy),
        simulation.in_flight,
    )


def _digests(simulation: Simulation) -> dict[str, str]:
    """Names for what a run is made of, where a file cannot hold the thing itself."""
    models, wire = simulation.models, (simulation.upload, simulation.download)
    own_code = [type(part) for part in (simulation.algorithm, *wire)]
    digests = {
        "data": data_digest(simulation.federation),
        "partition": partition_digest(simulation.federation),
        "clients": clients_digest(simulation.federation),
        "networks": networks_digest(models),
        "network code": _of_all(fingerprint.of_module(model.training_module) for model in models.values()),
        "loss": _of_all(fingerprint.of_code(model.per_example_loss) for model in models.values()),
        "metric": _of_all(fingerprint.of_code(model.per_example_metric) for model in models.values()),
        "method code": _of_all(map(fingerprint.of_code, own_code)),
    }
    if (constants := constants_digest(models)) is not None:
        digests["frozen"] = constants
    if simulation.resize_every is not None:
        digests["resizing"] = digest(simulation.resize_every)
    if simulation.privacy is not None:
        digests["privacy"] = digest(settings_of(simulation.privacy))
    if simulation.in_flight is not None:
        digests["in flight"] = digest(simulation.in_flight)
    if simulation.starts is not None:
        digests["start"] = hashlib.sha256(_start_content(simulation.starts)).hexdigest()
    return digests


def _of_all(names: Iterable[str]) -> str:
    """One name for several pieces of code."""
    found = list(names)
    return f"{fingerprint.VERSION} {digest(found)}"


def identity(spec: Spec) -> dict[str, str]:
    """Names for everything that decides a run's numbers, but for the machine and the versions it is made with."""
    parts = ("method", "upload", "download", "schedule", "seed", "executor")
    return {part: digest(to_json(getattr(spec, part))) for part in parts} | dict(spec.digests)


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


def data_digest(federation: Federation) -> str:
    """A name for the examples and labels; of data that are loaded when needed, those of the first and a few others."""
    palette = federation.palette
    how = () if palette is None else (partial(decode, palette=palette.cpu()), fingerprint.of_tensor(palette))
    parts = [fingerprint.of_tensor(federation.x, *how), fingerprint.of_tensor(federation.y)]
    if isinstance(federation, LazyFederation):
        last = federation.num_clients - 1
        places = {last * number // (NUM_CLIENTS_LOOKED_AT - 1) for number in range(NUM_CLIENTS_LOOKED_AT)}
        for client in sorted(places):
            parts += [fingerprint.of_tensor(part) for part in federation.examples_of(client)]
    return digest(parts)


def clients_digest(federation: Federation) -> str:
    """A name for who the clients are: their names, what they draw by, how they are described, and who joins later."""
    descriptors, identities, joining = federation.descriptors, federation.identities, federation.joining
    return digest(
        [
            federation.num_clients,
            federation.names,
            None if identities is None else fingerprint.of_tensor(identities),
            None if descriptors is None else fingerprint.of_tensor(descriptors),
            federation.architectures,
            federation.class_names,
            None if joining is None else [partition_digest(joining), clients_digest(joining)],
        ]
    )


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


def constants_digest(models: Mapping[str, Model]) -> str | None:
    """A name for the values that the target networks have and nobody trains; None where there are none."""
    parts = {
        name: {part: fingerprint.of_tensor(value) for part, value in sorted(model.constants.items())}
        for name, model in models.items()
    }
    return digest(parts) if any(parts.values()) else None


def held(directory: Path | None) -> AbstractContextManager[None]:
    """Keep a second process out of a run's directory inside the block; there is nothing to keep out of None."""
    if directory is None:
        return nullcontext()
    make_folder(directory)
    return claimed(directory, SECONDS_FOR_A_LOCK)


def open_directory(directory: Path, simulation: Simulation, origin: Origin) -> Spec:
    """Write down what the run is, or refuse a directory that holds another one."""
    # As it will be read again: TOML has no None and no tuples.
    given = from_json(Spec, tomllib.loads(_text(describe(simulation, origin))))
    if (stored := read_spec(directory)) is not None:
        _refuse_other_base(directory, stored, given.digests.get("frozen"))
        if difference := _difference(stored, given):
            raise UserError(
                f"{directory} holds another run: {difference}; give another directory, or what it was made with."
            )
        return stored
    if simulation.starts is not None:
        write_atomically(directory / "start.safetensors", _start_content(simulation.starts))
    write_spec(directory, given)
    return given


def _refuse_other_base(directory: Path, stored: Spec, frozen: str | None) -> None:
    """Refuse what a network has frozen, where the run was trained on something else; older runs do not say on what."""
    if stored.digests.get("frozen", frozen) != frozen:
        raise UserError(
            f"{directory} was trained on other frozen weights than the network has now (was its base trained anew, or "
            "replaced?); bring back those it was trained on, or train it again in another directory."
        )


def write_spec(directory: Path, spec: Spec) -> None:
    write_atomically(directory / "spec.toml", sealed_text(_text(spec)))


def _text(spec: Spec) -> str:
    return to_toml(_without_none(to_json(spec)))


WORDS = {
    "data": "the examples or labels are others",
    "partition": "the clients have other examples in training, validation or test",
    "clients": "the clients' names, descriptors or networks are others",
    "networks": "the network has other weights",
    "network code": "the network computes otherwise",
    "loss": "the loss is another",
    "metric": "the metric is another",
    "method code": "the code of the method or of a transform is another",
    "resizing": "the clients go on to another network after other steps",
    "privacy": "its clients keep their data private in another way",
    "in flight": "another number of clients is at work at once",
    "start": "it starts from other weights",
}
"""What it means that two runs differ in a digest."""


def _difference(there: Spec, here: Spec) -> str:
    """In what two runs differ, in words; empty if in nothing that decides their numbers."""
    found = []
    for part in differences(identity(there), identity(here)):
        if part == "frozen":  # an older version did not write it down, and "network code" tells
            continue
        if part in WORDS:
            found.append(WORDS[part])
            continue
        one, other = (_flat(part, to_json(getattr(spec, part))) for spec in (there, here))
        name = next(name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name))
        found.append(f"{name} is {one.get(name)!r} there and {other.get(name)!r} here")
    tables = [None if spec.data.reading is None else spec.data.reading.table for spec in (there, here)]
    columns = [table.columns for table in tables if table is not None]
    if len(columns) == 2 and columns[0] != columns[1]:  # predictions would go by the wrong ones
        found.append("the columns of its table are others")
    return ", ".join(found)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """A part of a spec by the names of its values: `lr`, `steps`; of a method, first its own."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        name if key == "name" else inner: part
        for key, item in value.items()
        for inner, part in _flat(key, item).items()
    }


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


def metrics_line(moment: Moment, before: str) -> tuple[str, str]:
    """An evaluation as a line of metrics.jsonl after another one, by whose digest it is known; and its own digest."""
    table = to_json(moment)
    own = chained(before, table)
    return json.dumps({**table, "sha256": own}) + "\n", own


def append_moment(directory: Path, moment: Moment, before: str) -> str:
    """Write an evaluation down; the digest that the next one takes as `before`, the first that of the run."""
    line, own = metrics_line(moment, before)
    append(directory / "metrics.jsonl", line)
    return own


def write_history(directory: Path, history: Sequence[Moment], run: str) -> str:
    """Write the evaluations so far anew: what a run that goes on has not seen, it will write again."""
    lines, before = [], run
    for moment in history:
        line, before = metrics_line(moment, before)
        lines.append(line)
    content = "".join(lines).encode()
    file = directory / "metrics.jsonl"
    if content != (read_bytes(file) if file.exists() else b""):
        write_atomically(file, content)
    return before


def write_result(directory: Path, result: Result) -> None:
    write_atomically(directory / "result.json", sealed_json(to_json(result), indent=1))


def read_spec(directory: Path) -> Spec | None:
    """What a directory says of its run; None if it holds none."""
    file = directory / "spec.toml"
    if not file.exists():
        if any(directory.glob("checkpoint-*")):
            raise RunError((OLDER if (directory / "run.json").exists() else LOST).format(directory))
        return None
    content = read_bytes(file)
    try:
        try:
            text = unsealed_text(content)
        except DamagedError:
            if _is_older(content):
                raise UserError(OLDER.format(directory)) from None
            raise
        return from_json(Spec, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, DamagedError, SchemaError) as error:
        reason = str(error) if isinstance(error, DamagedError) else f"is damaged ({error})"
        raise RunError(f"{file} {reason}; run it again in another directory.") from None


def _is_older(content: bytes) -> bool:
    try:
        return bool(tomllib.loads(content.decode()).get("format", 1) != FORMAT)
    except ValueError:
        return False


LOST = "{} has lost its spec.toml, which says what its run is; run it again elsewhere."
OLDER = (
    "{} was made by another version of pfedhn, which this one can neither load nor go on with; run it again elsewhere."
)


class MendableError(RunError):
    """A file of a run cannot be trusted, and the run writes it anew when it is started again."""


MENDS = "start the run again, which mends it"


def read_history(directory: Path) -> list[Moment]:
    """Every evaluation so far, if each is as it was written and none is missing that others vouch for.

    A run that goes on or was killed may have half a last line, which does not count.
    """
    file = directory / "metrics.jsonl"
    vouched: Sequence[Any]
    if (result := read_result(directory)) is not None:
        before, vouched = digest(result.digests), ()
    elif not file.exists() and not any(directory.glob("checkpoint-*")):
        return []
    elif (spec := read_spec(directory)) is not None:
        before, vouched = digest(identity(spec)), _history_of_newest(directory, identity(spec))
    else:
        raise RunError(LOST.format(directory))
    moments: list[Moment] = []
    lines = read_bytes(file).split(b"\n") if file.exists() else [b""]
    for number, line in enumerate(lines[:-1], 1):
        try:
            moment, before = _moment_of(line, before)
        except DamagedError:
            raise MendableError(f"{file} is damaged in line {number}; {MENDS}.") from None
        moments.append(moment)
    if len(moments) < len(vouched) or (result is not None and (before != result.history or lines[-1])):
        raise MendableError(f"{file} has lost lines; {MENDS}.")
    return moments


def _moment_of(line: bytes, before: str) -> tuple[Moment, str]:
    table = parsed(line)
    own = table.pop("sha256", None)
    if own != chained(before, table):
        raise DamagedError("was changed after it was written")
    return from_json(Moment, table), str(own)


def _history_of_newest(directory: Path, run: Mapping[str, str]) -> Sequence[Any]:
    """The evaluations that the newest intact checkpoint knows."""
    for path in checkpoints(directory):
        try:
            history: Sequence[Any] = verified(path, run)["history"]
        except CheckpointError:
            continue
        except RunError:  # the run goes on, and has removed it meanwhile
            return ()
        return history
    return ()


def read_result(directory: Path, spec: Spec | None = None) -> Result | None:
    """What a finished run found; None while it is not finished.

    Args:
        directory: Of the run.
        spec: What the run is, if the result shall be refused where it is another one's.
    """
    file = directory / "result.json"
    if not file.exists():
        return None
    try:
        result = from_json(Result, unsealed_json(read_bytes(file)))
    except DamagedError as error:
        raise MendableError(f"{file} {error}; {MENDS}.") from None
    except SchemaError as error:
        raise MendableError(f"{file} cannot be read: {error}; {MENDS}.") from None
    if result.digests is None or result.history is None:
        raise MendableError(f"{file} does not say what its run was made of; {MENDS}.")
    if spec is not None and (differing := differences(result.digests, identity(spec))):
        raise MendableError(f"{file} is of another run (its {', '.join(differing)} differ); {MENDS}.")
    return result.as_validation_has_it()


def read_finished(directory: Path) -> Result | None:
    """The result of a finished run, all of whose files but the checkpoints are sound; None while it is not finished."""
    result = read_result(directory, read_spec(directory))
    if result is not None:
        read_history(directory)
    return result


def to_simulation(
    directory: Path,
    spec: Spec,
    *,
    model: Factory | Mapping[str, Factory] | None = None,
    method: type[Any] | None = None,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    device: str = "cpu",
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
    algorithm = _algorithm(directory, spec.method, method)
    models = {name: with_frozen(network, algorithm, spec.seed) for name, network in models.items()}
    if networks_digest(models) != spec.digests["networks"]:
        raise UserError(f"the network has other weights than the one that {directory} was made with; give that one.")
    _refuse_other_base(directory, spec, constants_digest(models))
    return Simulation(
        algorithm,
        models,
        AbsentFederation.of(spec.data, device),
        spec.schedule,
        spec.seed,
        spec.executor,
        _read_start(directory / "start.safetensors", spec.digests["start"], models, device)
        if "start" in spec.digests
        else None,
        _transform(directory, "upload", spec.upload),
        _transform(directory, "download", spec.download),
        privacy=None if spec.privacy is None else build(Privacy, spec.privacy, "privacy"),
        in_flight=spec.in_flight,
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
        algorithm = _built(method, given or (find_code(method.name) if known is None else known.algorithm))
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


def _read_start(file: Path, sha256: str, models: Mapping[str, Model], device: str) -> dict[str, Params]:
    """The weights that a run started from, in the order of the network: a file has them in another."""
    try:
        is_its_own = hashlib.sha256(file.read_bytes()).hexdigest() == sha256
        tensors = load_file(file, device)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} is missing or damaged ({first_line(error)}); run it again.") from None
    if not is_its_own:
        raise RunError(f"{file} is not what this run started from; bring that back, or run it again.")
    return {
        name: {part: tensors[f"{name}/{part}"] for part in model.shapes}
        | {part: tensors[f"{name}/{part}"] for part in model.statistics if f"{name}/{part}" in tensors}
        for name, model in models.items()
    }
