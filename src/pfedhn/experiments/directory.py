"""The files of one experiment: `experiment.toml`, and a folder per run."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pfedhn.engine.executors import EXECUTORS
from pfedhn.errors import UserError, closest
from pfedhn.experiments.grid import from_table
from pfedhn.experiments.spec import Cell, Experiment, RunSpec
from pfedhn.files import is_empty, make_folder, read_text, reading, write_atomically
from pfedhn.settings import build, to_toml

MAX_THREADS = 1_024
OLD_EXECUTORS = {"vectorised": "vectorized"}  # as earlier versions wrote them into a directory


@dataclass(frozen=True)
class Options:
    """How to run, where that is no part of the experiment itself; a directory keeps them for `--resume`."""

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

    def check(self) -> None:
        if self.executor not in (known := ["auto", *EXECUTORS, "captured"]):
            raise UserError(f"there is no executor {self.executor!r}; {closest(self.executor, known)}")
        if self.precision not in ("tf32", "fp32"):
            raise UserError(f"--precision is {self.precision!r}; it must be tf32 or fp32.")
        for name in ("checkpoint_every", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if self.threads is not None and self.threads > MAX_THREADS:  # PyTorch would end the process
            raise UserError(f"--threads is {self.threads}; it must be at most {MAX_THREADS}.")

    def with_threads(self, num_runs: int, jobs: int | None) -> "Options":
        """Share the cores among the runs side by side, unless it was said how many threads each has."""
        if self.threads is not None or self.device != "cpu":
            return self
        return replace(self, threads=max(1, num_cores() // num_jobs(num_runs, jobs)))


@dataclass(frozen=True)
class Directory:
    """The files of one experiment."""

    path: Path

    def refuse_other(self, experiment: Experiment, named: Path | None = None) -> None:
        """Refuse a directory that is neither empty nor holds this very experiment.

        Args:
            experiment: What is to be kept there.
            named: The folder that the person gave, if this is a part of it.
        """
        named = named or self.path
        if is_empty(self.path):
            return
        if (self.path / "experiment.toml").exists():
            stored, _ = self.read()
            if plain(asdict(stored)) == plain(asdict(experiment)):
                return
            if plain(asdict(_without_rates(stored))) == plain(asdict(_without_rates(experiment))):
                raise UserError(
                    f"{named} holds {stored.name!r} with other learning rates: --rates, --set or the experiment's "
                    ".rates.toml has changed since; give another --out, or the rates it was made with."
                )
            difference = _first_difference(plain(asdict(stored)), plain(asdict(experiment)))
            raise UserError(
                f"{named} holds another experiment, or other settings of it: {difference}; give another --out, or the "
                "settings it was made with."
            )
        raise UserError(f"{named} is not empty and holds no experiment; give another --out.")

    def open(self, experiment: Experiment, planned: Sequence[RunSpec], options: Options | None = None) -> None:
        """Claim the directory for an experiment, or refuse one that holds another."""
        self.refuse_other(experiment)
        before = self.read()[1] if (self.path / "experiment.toml").exists() else []
        make_folder(self.path)
        names = dict.fromkeys(run.name for run in (*before, *planned))
        table = {**plain(asdict(experiment)), "planned": list(names)}
        if options is not None:
            table["options"] = {name: value for name, value in asdict(options).items() if value is not None}
            for name in ("data_dir", "rates"):
                if (place := getattr(options, name)) is not None:
                    table["options"][name] = str(place.resolve())
        write_atomically(self.path / "experiment.toml", to_toml(table).encode())

    def read(self) -> tuple[Experiment, list[RunSpec]]:
        """The stored experiment and the runs that were asked for so far."""
        table = self._table()
        try:
            experiment = from_table(table, self.path.name)
            planned = [experiment.find(str(name)) for name in table["planned"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.path / 'experiment.toml'} is damaged ({error}); give another --out.") from None
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
            if not file.exists():
                raise UserError(
                    f"{self.path} holds no experiment to go on with; `pfedhn run NAME --out {self.path}` starts one."
                )
        try:
            return tomllib.loads(read_text(file))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{file} is damaged ({error}); give another --out.") from None


def _first_difference(there: Any, here: Any, where: str = "") -> str:
    """Where two experiments part, as "steps is 20 there and 5000 here"."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys([*there, *here]):
            if there.get(name) != here.get(name):
                return _first_difference(there.get(name), here.get(name), name if name != "cells" else "")
    if isinstance(there, list) and isinstance(here, list) and all(isinstance(part, dict) for part in (*there, *here)):
        if len(there) != len(here):
            return f"it has {len(there)} cells and this {len(here)}"
        pair = next((one, other) for one, other in zip(there, here, strict=True) if one != other)
        return _first_difference(*pair)
    return f"{where} is {there} there and {here} here"


def _without_rates(experiment: Experiment) -> Experiment:
    def others(cell: Cell) -> Cell:
        return replace(cell, settings={name: v for name, v in cell.settings.items() if not name.endswith("lr")})

    return replace(experiment, cells=tuple(map(others, experiment.cells)))


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


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_jobs(num_runs: int, wanted: int | None) -> int:
    return max(1, min(num_runs, wanted or num_cores()))
