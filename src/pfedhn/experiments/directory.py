"""The files of one experiment: `experiment.toml`, which carries its own digest, and a folder per run."""

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pfedhn.engine.executors import EXECUTORS
from pfedhn.errors import RunError, UserError, closest
from pfedhn.experiments.grid import assignments_for, from_table, only_this
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, pretraining_cell
from pfedhn.runs.tracking import TRACKERS
from pfedhn.settings import build, to_toml
from pfedhn.storage.directory import MendableError, read_finished, read_spec
from pfedhn.storage.files import DamagedError, sealed_text, unsealed_text
from pfedhn.storage.schema import Result
from pfedhn.system.files import is_empty, make_folder, one_at_a_time, read_bytes, reading, write_atomically
from pfedhn.system.process import num_cores

MAX_THREADS = 1_024
OLD_EXECUTORS = {"vectorised": "vectorized"}  # as earlier versions wrote them into a directory


@dataclass(frozen=True)
class Options:
    """How to run an experiment; a directory keeps these for `--resume`."""

    source: str = ""  # the experiment's name, or its file
    assignments: tuple[str, ...] = ()  # as given to --set
    data_dir: Path | None = None
    device: str = "cpu"
    executor: str = "auto"
    checkpoint_every: int | None = None
    threads: int | None = None  # of each run: with another number its sums round otherwise, and the bits differ
    precision: str = "tf32"  # of products on a GPU, or fp32
    deterministic: bool = False  # the same bits from the same GPU and versions
    rates: Path | None = None  # as given to --rates
    small: bool = False  # as given to --small: a study at reduced size
    track: str | None = None  # as given to --track
    norms: bool = False  # as given to --norms, or as the study needs them

    def check(self) -> None:
        if self.executor not in (known := ["auto", *EXECUTORS, "captured"]):
            raise UserError(f"there is no executor {self.executor!r}; {closest(self.executor, known)}")
        if self.precision not in ("tf32", "fp32"):
            raise UserError(f"--precision is {self.precision!r}; it must be tf32 or fp32.")
        if self.track is not None and self.track not in TRACKERS:
            raise UserError(f"there is no tracker {self.track!r}; {closest(self.track, TRACKERS)}")
        for name in ("checkpoint_every", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if self.threads is not None and self.threads > MAX_THREADS:  # PyTorch would end the process
            raise UserError(f"--threads is {self.threads}; it must be at most {MAX_THREADS}.")

    def table(self) -> dict[str, Any]:
        """As a directory keeps them."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return values | {name: str(values[name].resolve()) for name in ("data_dir", "rates") if name in values}

    def with_threads(self, num_runs: int, jobs: int | None, is_on_cluster: bool = False) -> "Options":
        """Share the cores among the runs side by side, unless the number of threads was given.

        On a cluster each run has one core, since its machine is not known yet.
        """
        if self.threads is not None or self.device != "cpu":
            return self
        return replace(self, threads=1 if is_on_cluster else max(1, num_cores() // num_jobs(num_runs, jobs)))


def rerun_command(experiment: Experiment, run: RunSpec, options: Options) -> str:
    """The command that repeats just this run."""
    words = ["pfedhn", "run", options.source or experiment.name, *(["--small"] if options.small else [])]
    words += ["--only", only_this(experiment, run), "--seeds", str(run.seed)]
    earlier = [] if run.cell.pretrain is None else [pretraining_cell(experiment, run.cell)]
    for text in assignments_for(options.assignments, [run.cell, *earlier]):  # others would be refused
        words += ["--set", text]
    for name in ("rates", "device", "executor", "threads", "precision", "deterministic", "data_dir"):
        value = getattr(options, name)
        if name == "device" or value != getattr(Options, name):
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


@dataclass(frozen=True)
class Directory:
    """The files of one experiment."""

    path: Path

    def refuse_other(self, experiment: Experiment, named: Path | None = None) -> list[RunSpec]:
        """Refuse a directory that is neither empty nor holds this very experiment.

        Args:
            experiment: What is to be kept there.
            named: The folder that the person gave, if this is a part of it.

        Returns:
            The runs that were asked for so far.
        """
        named = named or self.path
        if is_empty(self.path):
            return []
        if self.is_experiment:
            stored, planned = self.read()
            if plain(asdict(stored)) == plain(asdict(experiment)):
                return planned
            name, difference = _first_difference(plain(asdict(stored)), plain(asdict(experiment)))
            if name.endswith("lr") or _differ_in_settings(stored, experiment):
                way_out = "give another --out, or the settings it was made with"
                if named == self.path:
                    way_out = f"`pfedhn run --resume {named}` keeps those it was made with, another --out takes the new"
                raise UserError(
                    f"{named} holds {stored.name!r} with other method settings ({difference}): --rates, --set, the "
                    f"file or the .rates.toml beside it has changed since; {way_out}."
                )
            raise UserError(
                f"{named} holds another experiment, or other settings of it: {difference}; give another --out, or the "
                "settings it was made with."
            )
        if not self._has_runs:  # each of them refuses other settings when it goes on
            raise UserError(f"{named} is not empty and holds no experiment; give another --out.")
        return []

    def open(self, experiment: Experiment, planned: Sequence[RunSpec], options: Options | None = None) -> None:
        """Claim the directory for an experiment, or refuse one that holds another.

        Commands at the same time wait for each other here, so that none loses what another has planned.
        """
        make_folder(self.path)
        with one_at_a_time(self.path):
            before = self.refuse_other(experiment)  # another command may have been first
            names = dict.fromkeys(run.name for run in (*before, *planned))
            table = {**plain(asdict(experiment)), "planned": list(names)}
            if options is not None:
                table["options"] = options.table()
            write_atomically(self.path / "experiment.toml", sealed_text(to_toml(table)))

    @property
    def is_experiment(self) -> bool:
        return (self.path / "experiment.toml").exists()

    @property
    def _has_runs(self) -> bool:
        """Whether runs of an experiment lie here, possibly without their `experiment.toml`."""
        return any(self.path.glob("*-seed*/spec.toml"))

    def read(self) -> tuple[Experiment, list[RunSpec]]:
        """The stored experiment and the runs that were asked for so far."""
        table = self._table()
        file = self.path / "experiment.toml"
        try:
            experiment = from_table(table, self.path.name)
            names = table.get("planned")
            if not isinstance(names, list):
                raise UserError("it does not say which runs were asked for.")
            planned = [experiment.find(str(name)) for name in names]
        except UserError as error:
            reason = str(error).removesuffix(".")
            raise RunError(f"{file} is damaged ({reason}); {REMOVE}.") from None
        return experiment, planned

    def options(self) -> Options:
        """How the runs were last started."""
        stored = dict(self._table().get("options", {}))
        stored["executor"] = OLD_EXECUTORS.get(stored.get("executor", "auto"), stored.get("executor", "auto"))
        for name in ("data_dir", "rates"):
            if name in stored:
                stored[name] = Path(stored[name])
        return build(Options, stored, "options")

    def _table(self) -> dict[str, Any]:
        file = self.path / "experiment.toml"
        with reading(self.path):
            if not self.is_experiment and self._has_runs:
                raise RunError(
                    f"{file} is missing; repeat the command that started the experiment, with --out {self.path}, and "
                    "its runs continue."
                )
            if not self.is_experiment:
                raise UserError(
                    f"{self.path} holds no experiment to go on with; `pfedhn run NAME --out {self.path}` starts one."
                )
        try:
            return tomllib.loads(unsealed_text(read_bytes(file)))
        except DamagedError as error:
            raise RunError(f"{file} {error}; {REMOVE}.") from None
        except tomllib.TOMLDecodeError as error:
            raise RunError(f"{file} is damaged ({error}); {REMOVE}.") from None


def finished(folder: Path, run: RunSpec) -> Result | None:
    """The result of a finished run, whose files are sound (its checkpoints are not looked at); None if it must run."""
    if (result := read_finished(folder)) is not None:
        check_place(folder, run, result)
    return result


def check_place(folder: Path, run: RunSpec, result: Result) -> None:
    """Refuse the result of another run than that whose folder it is in."""
    if _is_of(run, result.name, result.seed, result.cell):
        return
    spec = read_spec(folder)
    if spec is not None and not _is_of(run, spec.name, spec.seed, spec.cell):
        raise RunError(
            f"{folder} holds another run, {spec.name}; move or remove that folder, and the command that made the "
            "experiment runs what belongs there."
        )
    raise MendableError(f"{folder / 'result.json'} is of another run")


def _is_of(run: RunSpec, name: str, seed: int, cell: Mapping[str, Any] | None) -> bool:
    try:
        return (name, seed) == (run.name, run.seed) and build(Cell, cell or {}, name) == run.cell
    except UserError:
        return False


def _differ_in_settings(one: Experiment, other: Experiment) -> bool:
    """Whether two experiments differ in the settings of their methods alone."""
    bare = [replace(each, cells=tuple(replace(cell, settings={}) for cell in each.cells)) for each in (one, other)]
    return bool(plain(asdict(bare[0])) == plain(asdict(bare[1])))


REMOVE = "remove it and repeat the command that started the experiment: its runs continue"


def _first_difference(there: Any, here: Any, where: str = "") -> tuple[str, str]:
    """A field in which two experiments differ, and how: "steps", "steps is 20 there and 5000 here"."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys([*there, *here]):
            if there.get(name) != here.get(name):
                return _first_difference(there.get(name), here.get(name), name)
    if where == "cells":
        if len(there) != len(here):
            return where, f"it has {len(there)} cells and this {len(here)}"
        pair = next((one, other) for one, other in zip(there, here, strict=True) if one != other)
        return _first_difference(*pair)
    return where, f"{where} is {there} there and {here} here"


def plain(value: Any) -> Any:
    """Values as TOML gives them back: lists for tuples, "none" inside tables of settings."""
    if isinstance(value, Mapping):
        return {
            key: {k: "none" if v is None else plain(v) for k, v in part.items()}
            if isinstance(part, Mapping)
            else plain(part)
            for key, part in value.items()
            if part is not None
        }
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def num_jobs(num_runs: int, wanted: int | None) -> int:
    return max(1, min(num_runs, wanted or num_cores()))
