"""A run's directory, and spec.toml in it, which says what the run is.

spec.toml          what the run is: method, network, schedule, data, where it is made
metrics.jsonl      a line per evaluation (history.py)
checkpoint-*       its state (checkpoint.py), with the evaluations so far
start.safetensors  the weights it started from, if these are another run's
result.json        what it found; written last, so that it says: finished (history.py)
diverged.txt       in words, that it diverged, and where; gone when it is started again

spec.toml, the checkpoints and the result carry a digest of themselves; the latter two also carry names for all that the
run is made of (`identity`), and what metrics.jsonl must hold. So what was changed, cut or mixed up is refused, or
mended from the newest checkpoint when the run is started again.
"""

import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pfedhn.algorithm import Algorithm
from pfedhn.combinators import WRAPPERS
from pfedhn.data.description import Description
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule
from pfedhn.errors import RunError, UserError
from pfedhn.settings import settings_in, to_toml
from pfedhn.storage.checkpoint import differences
from pfedhn.storage.identity import (
    clients_digest,
    data_digest,
    digests_of,
    method_name,
    settings_of,
    start_content,
    transform_name,
)
from pfedhn.storage.schema import Cost, SchemaError, from_json, to_json
from pfedhn.storage.seal import (
    DamagedError,
    digest,
    sealed_text,
    unsealed_text,
)
from pfedhn.system.environment import Environment, environment
from pfedhn.system.files import claimed, make_folder, read_bytes, write_atomically
from pfedhn.system.reference import Code

DIVERGED = "diverged.txt"
FORMAT = 3  # 2: files without digests; 1: too little to load a run
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

    @staticmethod
    def of(method: str | Algorithm[Any, Any, Any], directory: Path | None) -> "Origin":
        """Describe a run that no experiment made: its name is that of its directory, or else of its method."""
        name = method_name(method)
        return Origin(directory.resolve().name if directory else name, name)


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
    plan: Mapping[str, Any] | None = None  # written by earlier versions
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
        replace(simulation.clients, name=origin.dataset, preprocessing=origin.preprocessing),
        digests_of(simulation),
        replace(environment(simulation.federation.x.device), finished=None),
        origin.cell or None,
        privacy=None if simulation.privacy is None else settings_of(simulation.privacy),
        in_flight=simulation.in_flight,
    )


def identity(spec: Spec) -> dict[str, str]:
    """Names for everything that decides a run's numbers, but for the machine and the versions it is made with."""
    parts = ("method", "upload", "download", "schedule", "seed", "executor")
    return {part: digest(to_json(getattr(spec, part))) for part in parts} | dict(spec.digests)


def is_data_of(spec: Spec, federation: Federation) -> bool:
    """Whether a run was trained on these clients and their examples."""
    found = {"data": data_digest(federation), "clients": clients_digest(federation)}
    return all(spec.digests[part] == name for part, name in found.items())


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
        refuse_other_base(directory, stored, given.digests.get("frozen"))
        if difference := _difference(stored, given):
            raise UserError(
                f"{directory} holds another run: {difference}; give another directory, or what it was made with."
            )
        return stored
    if simulation.starts is not None:
        write_atomically(directory / "start.safetensors", start_content(simulation.starts))
    write_spec(directory, given)
    return given


def refuse_other_base(directory: Path, stored: Spec, frozen: str | None) -> None:
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
    there, here = map(_with_combinators, (there, here))
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


def _with_combinators(spec: Spec) -> Spec:
    """The same with the settings of all combinators, of which earlier versions wrote some for some methods only."""
    usual = {name: "none" if known.default is None else known.default for name, known in settings_in(WRAPPERS).items()}
    return replace(spec, method=replace(spec.method, settings={**usual, **spec.method.settings}))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """A part of a spec by the names of its values: `lr`, `steps`; of a method, first its own."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        name if key == "name" else inner: part
        for key, item in value.items()
        for inner, part in _flat(key, item).items()
    }


def _without_none(value: Any, is_setting: bool = False) -> Any:
    """TOML has no None: it is left out of what we name, and written as "none" where it is a setting's value."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: "none" if part is None else _without_none(part, is_setting or name in ("settings", "cell"))
        for name, part in value.items()
        if part is not None or is_setting
    }


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
