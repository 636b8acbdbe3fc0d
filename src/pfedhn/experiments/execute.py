"""One run of an experiment in its folder, from its checkpoint to its result; runs that wait for their turn."""

import json
import threading
import tomllib
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from pfedhn.engine.checkpoint import CheckpointError, load_state, remove_old
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Diverged
from pfedhn.errors import RunError, UserError, first_line
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.directory import Options, plain, read_result
from pfedhn.experiments.provenance import environment, rerun_command
from pfedhn.experiments.spec import Cell, Experiment, find_run, pretraining_cell, pretraining_run
from pfedhn.files import claimed, make_folder, write_atomically
from pfedhn.params import Params
from pfedhn.progress import Event, Failed, Finished, Said, Watch, watch_run
from pfedhn.run import Run, drain, executing, partition_digest, stop_on_signal
from pfedhn.settings import fits, to_toml

SECONDS_FOR_A_LOCK = 5.0  # a worker whose parent was killed needs a round to notice


def run_one(directory: Path, experiment: Experiment, name: str, **options: Any) -> dict[str, Any]:
    """One run to its end in its folder, and what it found; a finished run is only read. Options as `running_one`."""
    with stop_on_signal() as stop:
        return drain(running_one(directory, experiment, name, stop, **options))


def running_one(
    directory: Path,
    experiment: Experiment,
    name: str,
    stop: threading.Event,
    *,
    data_dir: Path | None = None,
    device: str = "cpu",
    executor: str = "auto",
    watch: Callable[[str, Simulation], Watch] | None = None,
    say: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
    threads: int | None = None,
    command: str = "",
) -> Generator[None, None, dict[str, Any]]:
    """`run_one`, pausing after every round so that several runs can take turns on one device."""
    cell, seed = find_run(experiment, name)
    folder = directory / name
    if stored := read_result(folder):
        return stored
    make_folder(folder)
    engine: dict[str, Any] = {"data_dir": data_dir, "device": device, "executor": executor}
    with claimed(folder, SECONDS_FOR_A_LOCK), _computing_with(_stored_threads(folder) or threads):
        before: dict[str, Any] = {}
        starts = None
        if cell.pretrain is not None:
            before, starts = _pretrained(
                directory, experiment, cell, seed, engine, watch, say, checkpoint_every, threads
            )
        simulation = build_simulation(cell, seed, **engine, starts=starts)
        method: Any = simulation.algorithm
        spec = {"name": name, "seed": seed, "threads": torch.get_num_threads(), **asdict(cell)}
        spec["settings"] = asdict(method)  # also those that were left at their defaults
        write_atomically(folder / "spec.toml", to_toml(plain(spec)).encode())
        watcher = watch(name, simulation) if watch else None
        run = yield from executing(simulation, folder, stop, watcher, say, checkpoint_every)
        result = {
            "name": name,
            "experiment": experiment.name,
            "cell": asdict(cell),
            "settings": spec["settings"],
            "seed": seed,
            **run.summary(),
            **({"pretrain": before} if before else {}),
            "unused_rows": dict(simulation.federation.unused),
            "partition_sha256": partition_digest(simulation.federation),
            "command": command,
            "environment": environment(device),
        }
        write_atomically(folder / "result.json", json.dumps(result, indent=1).encode())
        remove_old(folder, 1)  # nothing goes on from the one before any more
    return result


def _stored_threads(folder: Path) -> int | None:
    """How many threads the run began with: with another number its sums would round otherwise."""
    try:
        threads = tomllib.loads((folder / "spec.toml").read_text())["threads"]
    except (OSError, ValueError, KeyError):
        return None
    return threads if fits(threads, int) else None


@contextmanager
def _computing_with(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pretrained(
    directory: Path,
    experiment: Experiment,
    cell: Cell,
    seed: int,
    engine: Mapping[str, Any],
    watch: Callable[[str, Simulation], Watch] | None,
    say: Callable[[str], None],
    checkpoint_every: int | None,
    threads: int | None,
) -> tuple[dict[str, Any], dict[str, Params]]:
    """The earlier stage of a method such as LG-FedAvg: its cost, and the model of its last round."""
    earlier = pretraining_cell(experiment, cell)
    name = next(n for n, value in replace(experiment, seeds=(seed,)).runs().items() if value == (earlier, seed))
    result = run_one(
        directory,
        experiment,
        name,
        **engine,
        watch=watch,
        say=say,
        checkpoint_every=checkpoint_every,
        threads=threads,
    )
    simulation = build_simulation(earlier, seed, **engine)
    state, _ = load_state(directory / name, simulation)
    if state is None:
        raise CheckpointError(f"{directory / name} has lost its checkpoint; remove the folder and run again.")
    weights = Run(simulation, state).personal_weights(0, last=True)
    cost = {key: result[key] for key in ("name", "steps", "bytes_down", "bytes_up", "seconds")}
    return cost, {cell.model: weights}


class Failure(NamedTuple):
    """Why a run did not finish."""

    sentence: str
    is_bad_input: bool  # else something happened on the way: divergence, a full disk
    has_diverged: bool = False


@dataclass
class Outcome:
    """What came of several runs."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)


Listener: TypeAlias = Callable[[Event], None]


@dataclass
class Queue:
    """Runs that wait for a turn, or for the run they start from."""

    experiment: Experiment
    waiting: list[str]  # in the order in which they should start
    outcome: Outcome
    listen: Listener

    def __post_init__(self) -> None:
        # Once, since `take` is asked after every round while there is room for another run.
        self.earlier = {name: pretraining_run(self.experiment, name) for name in self.waiting}

    def take(self) -> str | None:
        """A run that can start now; None if there is none."""
        for name in list(self.waiting):
            earlier = self.earlier[name]
            if earlier in self.outcome.failures:
                self.waiting.remove(name)
                self.end(name, Failure(f"the run it starts from, {earlier}, failed.", False))
            elif earlier is None or earlier in self.outcome.results:
                self.waiting.remove(name)
                return name
        return None

    def end(self, name: str, ending: dict[str, Any] | Failure) -> None:
        if isinstance(ending, Failure):
            self.outcome.failures[name] = ending
            self.listen(Failed(name, ending.sentence))
        else:
            self.outcome.results[name] = ending
            self.listen(Finished(name, ending))


def running(
    directory: Path, experiment: Experiment, name: str, options: Options, listen: Listener, stop: threading.Event
) -> Generator[None, None, dict[str, Any]]:
    cell, seed = find_run(experiment, name)
    return running_one(
        directory,
        experiment,
        name,
        stop,
        **options.engine(),
        watch=lambda run, simulation: watch_run(run, simulation, listen),
        say=lambda sentence: listen(Said(name, sentence)),
        checkpoint_every=options.checkpoint_every,
        threads=options.threads,
        command=rerun_command(experiment, cell, seed, options),
    )


def failure(error: Exception, folder: Path) -> Failure:
    failure = failure_from(error)
    if failure is None:
        log = folder / "error.txt"
        failure = Failure(f"{first_line(error)} (an error inside pfedhn; the details are in {log}).", False)
        try:
            log.write_text("".join(traceback.format_exception(error)))
        except OSError:  # the disk may be what failed
            failure = Failure(f"{first_line(error)} (an error inside pfedhn).", False)
    return failure


def failure_from(error: BaseException) -> Failure | None:
    """An error that a person can do something about, in one sentence; None for one that only we can."""
    if isinstance(error, UserError):
        return Failure(str(error), not isinstance(error, RunError), isinstance(error, Diverged))
    return None
