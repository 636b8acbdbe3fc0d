"""A run's directory: what the run is, how it goes on, and what it found.

spec.toml          what the run is: method, network, schedule, data, where it is made
metrics.jsonl      a line per evaluation
checkpoint-*       its state (checkpoint.py), with the evaluations so far
start.safetensors  the weights it started from, if these are another run's
result.json        what it found; it is written last and marks the run as finished
diverged.txt       a sentence that says where it diverged; removed when the run is started again

spec.toml, the checkpoints and the result carry a digest of themselves. The latter two also carry digests of all that
the run is made of (`identity`), and what metrics.jsonl must hold. So files that were changed, cut or mixed up are
refused, or mended from the newest checkpoint when the run is started again.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pfedhn.algorithm import Algorithm
from pfedhn.combinators import WRAPPERS
from pfedhn.data.description import Description
from pfedhn.engine.robust import Robust
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule, State
from pfedhn.errors import RunError, UserError
from pfedhn.settings import settings_in, to_toml
from pfedhn.storage.checkpoint import (
    Loaded,
    checkpoints,
    differences,
    load_state,
    newest_history,
    remove_old,
    save_state,
)
from pfedhn.storage.files import DamagedError, digest, parsed, sealed_json, sealed_text, unsealed_json, unsealed_text
from pfedhn.storage.identity import (
    digests_of,
    method_name,
    robust_name,
    settings_of,
    start_content,
    transform_name,
)
from pfedhn.storage.schema import Moment, PretrainingCost, Result, SchemaError, from_json, to_json
from pfedhn.system.environment import Environment, environment
from pfedhn.system.files import append, claimed, flush, make_folder, read_bytes, write_atomically, writing
from pfedhn.system.reference import Code

FORMAT = 3  # 2: files without digests; 1: too little to load a run
SECONDS_FOR_A_LOCK = 5.0  # a worker whose parent was killed needs a round to notice
METRICS, RESULT, DIVERGED = "metrics.jsonl", "result.json", "diverged.txt"
CHAIN = "sha256"  # a field of each line that earlier versions wrote: a digest of this line and all before it
LOST = "{} has lost its spec.toml, which says what its run is; run it again elsewhere."
OLDER = (
    "{} was made by another version of pfedhn, which this one can neither load nor go on with; run it again elsewhere."
)


class MendableError(RunError):
    """A file of a run cannot be trusted; the run writes it anew when it is started again."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; start the run again, which mends it.")


@dataclass(frozen=True)
class Origin:
    """The name and the provenance of a run, which its simulation does not know."""

    name: str
    method: str  # as it is registered, or "module:qualname"
    experiment: str = ""
    cell: Mapping[str, Any] = field(default_factory=dict)  # of an experiment's run
    dataset: str | None = None  # where it has a name
    preprocessing: Mapping[str, Any] | None = None  # what was done to the raw data
    pretrain: PretrainingCost | None = None
    command: str = ""

    @staticmethod
    def of(method: str | Algorithm[Any, Any, Any], directory: Path | None) -> "Origin":
        """The origin of a run that no experiment made; it is named after its directory or its method."""
        name = method_name(method)
        return Origin(directory.resolve().name if directory else name, name)


@dataclass(frozen=True)
class Network:
    factory: Code
    loss: Code
    metric: Code | None = None


@dataclass(frozen=True)
class Part:
    """A method or a transform with every setting, by its registered name or by "module:qualname"."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class StoredSpec:
    """The content of spec.toml."""

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
    privacy: Mapping[str, Any] | None = None
    in_flight: int | None = None
    robust: Part | None = None


def describe(simulation: Simulation, origin: Origin) -> StoredSpec:
    """Make the content of spec.toml."""
    networks = {
        name: Network(
            Code.of(model.factory),
            Code.of(model.per_example_loss),
            None if model.per_example_metric is None else Code.of(model.per_example_metric),
        )
        for name, model in simulation.models.items()
    }
    return StoredSpec(
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
        robust=_part_of(simulation.robust),
    )


def _part_of(robust: Robust | None) -> Part | None:
    return None if robust is None else Part(robust_name(robust), settings_of(robust))


def identity(spec: StoredSpec) -> dict[str, str]:
    """Digests of everything that decides a run's numbers, except the machine and the versions of libraries."""
    parts = ("method", "upload", "download", "schedule", "seed", "executor")
    return {part: digest(to_json(getattr(spec, part))) for part in parts} | dict(spec.digests)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make a run's directory and keep other processes out of it inside the block."""
    make_folder(directory)
    with claimed(directory, SECONDS_FOR_A_LOCK):
        yield


def refuse_other_base(directory: Path, stored: StoredSpec, frozen: str | None) -> None:
    """Refuse frozen weights that the run was not trained on; directories of older versions do not name theirs."""
    if stored.digests.get("frozen", frozen) != frozen:
        raise UserError(
            f"{directory} was trained on other frozen weights than the network has now (was its base trained anew, or "
            "replaced?); bring back those it was trained on, or train it again in another directory."
        )


def write_spec(directory: Path, spec: StoredSpec) -> None:
    write_atomically(directory / "spec.toml", sealed_text(_text(spec)))


def _text(spec: StoredSpec) -> str:
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
    "robust": "its defense against hostile updates is another",
    "attack": "other clients are hostile, or in another way",
    "start": "it starts from other weights",
}
"""What it means that two runs differ in a digest."""


def _difference(there: StoredSpec, here: StoredSpec) -> str:
    """How two runs differ, in words; empty if all that decides their numbers is the same."""
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


def _with_combinators(spec: StoredSpec) -> StoredSpec:
    """The same with the settings of all combinators, of which earlier versions wrote some for some methods only."""
    usual = {name: "none" if known.default is None else known.default for name, known in settings_in(WRAPPERS).items()}
    return replace(spec, method=replace(spec.method, settings={**usual, **spec.method.settings}))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """The values of a part of a spec by their own names, such as `lr`; a method's name comes first."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        name if key == "name" else inner: part
        for key, item in value.items()
        for inner, part in _flat(key, item).items()
    }


def _without_none(value: Any, is_setting: bool = False) -> Any:
    """Replace None, which TOML lacks: a setting becomes "none", and every other field is left out."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: "none" if part is None else _without_none(part, is_setting or name in ("settings", "cell"))
        for name, part in value.items()
        if part is not None or is_setting
    }


def read_spec(directory: Path) -> StoredSpec | None:
    """Read spec.toml; None if the directory holds no run."""
    file = directory / "spec.toml"
    if not file.exists():
        if checkpoints(directory):
            raise RunError((OLDER if (directory / "run.json").exists() else LOST).format(directory))
        return None
    content = read_bytes(file)
    try:
        return from_json(StoredSpec, tomllib.loads(unsealed_text(content)))
    except DamagedError as error:
        if _is_older(content):
            raise UserError(OLDER.format(directory)) from None
        reason = str(error)
    except (tomllib.TOMLDecodeError, SchemaError) as error:
        reason = f"is damaged ({error})"
    raise RunError(f"{file} {reason}; run it again in another directory.")


def _is_older(content: bytes) -> bool:
    try:
        return bool(tomllib.loads(content.decode()).get("format", 1) != FORMAT)
    except ValueError:
        return False


@dataclass
class RunDirectory:
    """The directory of a run that goes on, which the caller holds (`held`)."""

    path: Path
    spec: StoredSpec

    @staticmethod
    def open(path: Path, simulation: Simulation, origin: Origin) -> tuple["RunDirectory", Loaded]:
        """Write what the run is, or refuse a directory that holds another run; read the newest intact checkpoint."""
        # As it will be read again: TOML has no None and no tuples.
        given = from_json(StoredSpec, tomllib.loads(_text(describe(simulation, origin))))
        if (spec := read_spec(path)) is not None:
            refuse_other_base(path, spec, given.digests.get("frozen"))
            if difference := _difference(spec, given):
                raise UserError(
                    f"{path} holds another run: {difference}; give another directory, or what it was made with."
                )
        else:
            spec = given
            if simulation.starts is not None:
                write_atomically(path / "start.safetensors", start_content(simulation.starts))
            write_spec(path, spec)
        with writing(path / DIVERGED):
            (path / DIVERGED).unlink(missing_ok=True)
        stored = load_state(path, simulation, identity(spec))
        write_history(path, stored.history)
        return RunDirectory(path, spec), stored

    def append(self, moment: Moment) -> None:
        append(self.path / METRICS, json.dumps(to_json(moment)) + "\n")

    def tell_divergence(self, sentence: str) -> None:
        write_atomically(self.path / DIVERGED, f"{sentence}\n".encode())

    def save(self, state: State, simulation: Simulation, history: Sequence[Moment]) -> None:
        """Write a checkpoint, after everything that it vouches for."""
        flush(self.path / METRICS)
        save_state(self.path, state, simulation, identity(self.spec), history)

    def finish(self, make: Callable[[], Result], save: Callable[[], None], say: Callable[[str], None]) -> Result:
        """Return the stored result if it is intact and of this run, or write a new one and the last checkpoint."""
        try:
            result = read_result(self.path, self.spec)
            if result is not None and _has_whole_history(self.path, result):
                return result
        except MendableError as error:
            say(f"{error} It was written anew from the last checkpoint.")
        result = replace(make(), digests=identity(self.spec), history=history_digest(self.path))
        if (self.path / RESULT).exists():  # it was made by an earlier process, whose environment the spec has
            result = replace(result, environment=replace(self.spec.environment, finished=result.environment.finished))
        save()
        write_result(self.path, result)
        remove_old(self.path, 1)  # nothing goes on from the one before any more
        return result


def write_history(directory: Path, history: Sequence[Moment]) -> None:
    """Write these evaluations, unless the file holds just them; a resumed run writes later ones again."""
    tables, content = to_json(list(history)), _metrics(directory)
    with suppress(DamagedError):
        if digest(_tables(content)) == digest(tables) and content[-1:] in (b"", b"\n"):
            return
    write_atomically(directory / METRICS, "".join(json.dumps(table) + "\n" for table in tables).encode())


def history_digest(directory: Path) -> str:
    """The SHA-256 of metrics.jsonl, by which a result knows that its evaluations are complete."""
    return hashlib.sha256(_metrics(directory)).hexdigest()


def _has_whole_history(directory: Path, result: Result) -> bool:
    """Whether metrics.jsonl is as it was when this result was written."""
    if result.history == history_digest(directory):
        return True
    last = _metrics(directory).split(b"\n")[-2:]  # earlier versions kept the end of the chain
    return len(last) == 2 and not last[1] and parsed(last[0]).get(CHAIN) == result.history


def write_result(directory: Path, result: Result) -> None:
    write_atomically(directory / RESULT, sealed_json(to_json(result), indent=1))


def read_history(directory: Path) -> list[Moment]:
    """Read every evaluation so far, and refuse a file that the result or the newest checkpoint contradicts.

    A run that goes on or was killed may have half a last line, which does not count.
    """
    file, result = directory / METRICS, read_result(directory)
    known = []
    if result is None and (spec := read_spec(directory)) is not None:
        known = newest_history(directory, identity(spec))
    try:
        tables = _tables(_metrics(directory))
        moments = [from_json(Moment, table) for table in tables]
        is_whole = digest(tables[: len(known)]) == digest(known)
        if result is not None:
            is_whole = _has_whole_history(directory, result)
    except DamagedError as error:
        raise MendableError(f"{file} {error}") from None
    except SchemaError as error:
        raise MendableError(f"{file} is damaged ({error})") from None
    if not is_whole:
        raise MendableError(f"{file} was changed or has lost lines")
    return moments


def _metrics(directory: Path) -> bytes:
    file = directory / METRICS
    return read_bytes(file) if file.exists() else b""


def _tables(content: bytes) -> list[dict[str, Any]]:
    """The tables of the complete lines of metrics.jsonl."""
    tables = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            table = parsed(line)
        except DamagedError:
            raise DamagedError(f"is damaged in line {number}") from None
        table.pop(CHAIN, None)
        tables.append(table)
    return tables


def read_result(directory: Path, spec: StoredSpec | None = None) -> Result | None:
    """Read the result of a finished run; None while it is not finished.

    Args:
        directory: The run's directory.
        spec: What the run is, to refuse the result of another run.
    """
    file = directory / RESULT
    if not file.exists():
        return None
    try:
        result = from_json(Result, unsealed_json(read_bytes(file)))
    except DamagedError as error:
        raise MendableError(f"{file} {error}") from None
    except SchemaError as error:
        raise MendableError(f"{file} cannot be read: {error}") from None
    if result.digests is None or result.history is None:
        raise MendableError(f"{file} does not say what its run was made of")
    if spec is not None and (differing := differences(result.digests, identity(spec))):
        raise MendableError(f"{file} is of another run (its {', '.join(differing)} differ)")
    return result.without_harmful_adaptation()


def read_finished(directory: Path) -> Result | None:
    """As `read_result`, after a check of all files except the checkpoints."""
    result = read_result(directory, read_spec(directory))
    if result is not None:
        read_history(directory)
    return result
