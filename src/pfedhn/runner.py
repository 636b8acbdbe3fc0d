"""Run directories, and the runs of an experiment side by side: in processes, or taking turns on a GPU.

A directory holds one experiment: `experiment.toml`, and a sub-folder per run with `spec.toml`, `metrics.jsonl`,
checkpoints and `result.json`. The same command on the same directory goes on where it stopped.
"""

import errno
import gc
import json
import multiprocessing
import os
import platform
import re
import shlex
import signal
import subprocess
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch

from pfedhn.capture import set_up_gpu
from pfedhn.checkpoint import CheckpointError, load_state, remove_old, write_atomically
from pfedhn.executors import EXECUTORS
from pfedhn.experiment import (
    Cell,
    Experiment,
    assignments_for,
    build_simulation,
    cell_algorithm,
    cell_names,
    check,
    find_run,
    forget_datasets,
    from_table,
    pretraining_cell,
    pretraining_run,
    with_pretraining,
)
from pfedhn.params import Params
from pfedhn.progress import Event, Failed, Finished, Said, Update, Watch, watch_run
from pfedhn.run import (
    Run,
    RunError,
    drain,
    executing,
    partition_digest,
    stop_on_signal,
    stop_requests,
)
from pfedhn.settings import SettingError, build, closest, fits, to_toml
from pfedhn.simulate import Diverged, Simulation

SECONDS_FOR_A_LOCK = 5.0  # a worker whose parent was killed needs a round to notice


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

    def check(self) -> None:
        if self.executor not in (known := ["auto", *EXECUTORS, "captured"]):
            raise SettingError(f"there is no executor {self.executor!r}; {closest(self.executor, known)}")
        if self.precision not in ("tf32", "fp32"):
            raise SettingError(f"--precision is {self.precision!r}; it must be tf32 or fp32.")
        for name in ("checkpoint_every", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SettingError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")

    def with_threads(self, num_runs: int, jobs: int | None) -> "Options":
        """Share the cores among the runs side by side, unless it was said how many threads each has."""
        if self.threads is not None or self.device != "cpu":
            return self
        return replace(self, threads=max(1, num_cores() // num_jobs(num_runs, jobs)))

    def engine(self) -> dict[str, Any]:
        return {"data_dir": self.data_dir, "device": self.device, "executor": self.executor}


@dataclass(frozen=True)
class Directory:
    """The files of one experiment."""

    path: Path

    def refuse_other(self, experiment: Experiment, named: Path | None = None) -> None:
        """Only an empty directory or one that holds this very experiment will do.

        named: the folder that the person gave, if this is a part of it.
        """
        named = named or self.path
        if (self.path / "experiment.toml").exists():
            stored, _ = self.read()
            if _plain(asdict(stored)) == _plain(asdict(experiment)):
                return
            if _plain(asdict(_without_rates(stored))) == _plain(asdict(_without_rates(experiment))):
                raise RunError(
                    f"{named} holds {stored.name!r} with other learning rates: --rates, --set or the experiment's "
                    ".rates.toml has changed since; give another --out, or the rates it was made with."
                )
            difference = _first_difference(_plain(asdict(stored)), _plain(asdict(experiment)))
            raise RunError(
                f"{named} holds another experiment, or other settings of it: {difference}; give another --out, or the "
                "settings it was made with."
            )
        if self.path.exists() and any(self.path.iterdir()):
            raise RunError(f"{named} is not empty and holds no experiment; give another --out.")

    def open(self, experiment: Experiment, planned: Sequence[str], options: Options | None = None) -> None:
        """Claim the directory for an experiment, or refuse one that holds another."""
        check(experiment)
        self.refuse_other(experiment)
        before = self.read()[1] if (self.path / "experiment.toml").exists() else []
        self.path.mkdir(parents=True, exist_ok=True)
        table = {**_plain(asdict(experiment)), "planned": list(dict.fromkeys([*before, *planned]))}
        if options is not None:
            table["options"] = {name: value for name, value in asdict(options).items() if value is not None}
            for name in ("data_dir", "rates"):
                if (place := getattr(options, name)) is not None:
                    table["options"][name] = str(place.resolve())
        write_atomically(self.path / "experiment.toml", to_toml(table).encode())

    def read(self) -> tuple[Experiment, list[str]]:
        """The stored experiment and the runs that were asked for so far."""
        table = self._table()
        try:
            experiment = from_table(table, self.path.name)
            planned = [str(name) for name in table["planned"]]
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.path / 'experiment.toml'} is damaged ({error}); give another --out.") from None
        return experiment, planned

    def options(self) -> Options:
        """How the runs were last started."""
        stored = dict(self._table().get("options", {}))
        for name in ("data_dir", "rates"):
            if name in stored:
                stored[name] = Path(stored[name])
        return build(Options, stored, "options")

    def results(self) -> dict[str, dict[str, Any]]:
        """What finished runs reported, by run name."""
        return {
            file.parent.name: result
            for file in sorted(self.path.glob("*/result.json"))
            if (result := read_result(file.parent)) is not None
        }

    def _table(self) -> dict[str, Any]:
        file = self.path / "experiment.toml"
        if not file.exists():
            raise RunError(
                f"{self.path} holds no experiment to go on with; `pfedhn run NAME --out {self.path}` starts one."
            )
        try:
            return tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{file} is damaged ({error}); give another --out.") from None


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


def _plain(value: Any) -> Any:
    """Values as TOML gives them back: lists for tuples, "none" inside tables of settings."""
    if isinstance(value, Mapping):
        return {
            key: {k: "none" if v is None else _plain(v) for k, v in part.items()}
            if isinstance(part, Mapping)
            else _plain(part)
            for key, part in value.items()
            if part is not None
        }
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished run reported; None while it is not finished."""
    file = folder / "result.json"
    if not file.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        raise RunError(f"{file} is damaged; remove it and run again: the run's checkpoint is still there.") from None
    return result


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
    folder.mkdir(parents=True, exist_ok=True)
    engine: dict[str, Any] = {"data_dir": data_dir, "device": device, "executor": executor}
    with _claimed(folder), _computing_with(_stored_threads(folder) or threads):
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
        write_atomically(folder / "spec.toml", to_toml(_plain(spec)).encode())
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


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keep a second process out of a run's folder; the system lets go of the lock however this one ends."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    deadline = time.monotonic() + SECONDS_FOR_A_LOCK
    with (folder / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks
                if time.monotonic() > deadline:
                    raise RunError(f"{folder} is being run by another process; wait for it or stop it.") from None
                time.sleep(0.1)
        yield


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


def prepare(directory: Path, experiment: Experiment, names: Sequence[str], options: Options) -> None:
    """Build each cell once, so that data or settings that cannot work are refused before anything is written."""
    seen: list[Cell] = []
    for name in names:
        cell, seed = find_run(experiment, name)
        if cell not in seen and not (directory / name / "result.json").exists():
            seen.append(cell)
            build_simulation(cell, seed, **options.engine())
    if options.device == "cpu":
        forget_datasets()


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

MAX_RUNS_ON_DEVICE = 24  # a card is busy long before; more only wait longer for their first result


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_jobs(num_runs: int, wanted: int | None) -> int:
    return max(1, min(num_runs, wanted or num_cores()))


def run_many(
    directory: Path,
    experiment: Experiment,
    names: Sequence[str],
    *,
    jobs: int | None = None,
    options: Options | None = None,
    listen: Listener = lambda event: None,
) -> Outcome:
    """Runs side by side: on a CPU each in a process of its own, on a GPU taking turns in this one.

    A run that fails does not stop the others. Ctrl-C lets every run write a checkpoint, then raises KeyboardInterrupt.

    jobs: by default as many as there are runs or cores, whichever is less; on a GPU as many as its memory has room for.
    """
    names = with_pretraining(experiment, names)
    options = (options or Options()).with_threads(
        len(names), jobs
    )  # as if none were finished: the bits must not change
    outcome = Outcome()
    waiting = []
    for name in names:
        if (result := read_result(directory / name)) is not None:
            outcome.results[name] = result
        else:
            waiting.append(name)
    # Started last, a run that takes long would leave the other cores idle at the end, or the card half used.
    awaited = {pretraining_run(experiment, name) for name in waiting}
    waiting.sort(key=lambda name: (name not in awaited, -_num_rounds(experiment, name)))
    queue = _Queue(experiment, waiting, outcome, listen)
    if options.device != "cpu":
        set_up_gpu(options.precision, options.deterministic, min(len(waiting), jobs or MAX_RUNS_ON_DEVICE))
        _take_turns(queue, directory, jobs, options)
        return outcome
    jobs = num_jobs(len(waiting), jobs)
    if jobs == 1:
        while (next_run := queue.take()) is not None:
            queue.end(next_run, _attempt(directory, experiment, next_run, options, listen))
    else:
        _run_side_by_side(queue, directory, jobs, options)
    return outcome


def _num_rounds(experiment: Experiment, name: str) -> float:
    cell, _ = find_run(experiment, name)
    algorithm = cell_algorithm(cell)
    size = cell.cohort_size or algorithm.usual_cohort_size
    return cell.steps / (size if algorithm.communicates else cell.clients)


@dataclass
class _Queue:
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


def _attempt(
    directory: Path, experiment: Experiment, name: str, options: Options, listen: Listener
) -> dict[str, Any] | Failure:
    try:
        with stop_on_signal() as stop:
            return drain(_running(directory, experiment, name, options, listen, stop))
    except Exception as error:
        return _failure(error, directory / name)


def _running(
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


def _failure(error: Exception, folder: Path) -> Failure:
    failure = failure_from(error)
    if failure is None:
        log = folder / "error.txt"
        failure = Failure(f"{first_line(error)} (an error inside pfedhn; the details are in {log}).", False)
        try:
            log.write_text("".join(traceback.format_exception(error)))
        except OSError:  # the disk may be what failed
            failure = Failure(f"{first_line(error)} (an error inside pfedhn).", False)
    return failure


def _take_turns(queue: _Queue, directory: Path, jobs: int | None, options: Options) -> None:
    """Runs side by side on one device, in this process: each queues a round on a stream of its own, then the next."""
    going: dict[str, Generator[None, None, dict[str, Any]]] = {}
    with stop_on_signal() as stop:
        while True:
            while len(going) < (jobs or MAX_RUNS_ON_DEVICE) and (jobs or not going or _has_room(options.device)):
                if stop.is_set() or (name := queue.take()) is None:
                    break
                going[name] = _running(directory, queue.experiment, name, options, queue.listen, stop)
                _advance(queue, going, name, directory)  # its first round shows how much room it takes
            if not going:
                break
            num_going = len(going)
            for name in list(going):
                _advance(queue, going, name, directory)
            if len(going) < num_going and queue.waiting and not stop.is_set():
                _give_memory_back()
    if stop.is_set():
        raise KeyboardInterrupt


def _advance(
    queue: _Queue, going: dict[str, Generator[None, None, dict[str, Any]]], name: str, directory: Path
) -> None:
    try:
        next(going[name])
        return
    except StopIteration as end:
        queue.end(name, end.value)
    except KeyboardInterrupt:  # it wrote its checkpoint; the others have yet to write theirs
        pass
    except Exception as error:
        queue.end(name, _failure(error, directory / name))
    del going[name]


def _give_memory_back() -> None:
    """What finished runs held is kept for their own streams; the next run would find the device full."""
    gc.collect()  # a run and its captured round refer to each other
    torch.cuda.empty_cache()


def _has_room(device: str) -> bool:
    """Whether one more run fits on the device."""
    if not device.startswith("cuda"):
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free > total / 8


def failure_from(error: BaseException) -> Failure | None:
    """An error that a person can do something about, in one sentence; None for one that only we can."""
    if isinstance(error, Diverged | CheckpointError):
        return Failure(str(error), False, isinstance(error, Diverged))
    if isinstance(error, OSError) and error.strerror is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return Failure(f"{where}{error.strerror[:1].lower()}{error.strerror[1:]}{_way_out(error.errno)}.", False)
    if isinstance(error, RunError | ValueError) and not isinstance(error, UnicodeError):
        return Failure(str(error), True)
    return None


def _way_out(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "; make room, and the same command goes on from the last checkpoint"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
        return "; give a place that can be written (--out for a folder; --export, --save or --plot for a file)"
    return ""


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(".: ")[:200]


class _Stopped(NamedTuple):
    """A worker's answer to a request to stop: the run stands in its checkpoint."""

    run: str


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: str | None = None


def _run_side_by_side(queue: _Queue, directory: Path, jobs: int, options: Options) -> None:
    """Hand runs to worker processes over a pipe each; no lock is shared, so a killed worker cannot block the others."""
    workers: list[_Worker] = []
    told_to_stop = False
    requests: list[int] = []
    with stop_requests(requests.append):
        try:
            while True:
                if requests and not told_to_stop:
                    told_to_stop = True
                    for worker in workers:
                        with suppress(OSError):  # it may just have ended; `_hear` will find out
                            worker.pipe.send(None)
                if len(requests) > 1:
                    raise KeyboardInterrupt
                if not requests:
                    _hand_out(queue, workers, directory, jobs, options)
                busy = [worker for worker in workers if worker.run is not None]
                if not busy:
                    break
                pipes.wait([worker.pipe for worker in busy], timeout=0.1)
                for worker in busy:
                    if not _hear(queue, worker):
                        workers.remove(worker)
        finally:
            for worker in workers:  # what they had to write is written
                worker.pipe.close()
                worker.process.kill()
            for worker in workers:
                worker.process.join()
    if requests:
        raise KeyboardInterrupt


def _hand_out(queue: _Queue, workers: list[_Worker], directory: Path, jobs: int, options: Options) -> None:
    while any(worker.run is None for worker in workers) or len(workers) < jobs:
        name = queue.take()
        if name is None:
            return
        idle = next((worker for worker in workers if worker.run is None), None)
        if idle is None:
            idle = _start_worker(directory, queue.experiment, options)
            workers.append(idle)
        idle.run = name
        idle.pipe.send(name)


def _start_worker(directory: Path, experiment: Experiment, options: Options) -> _Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, directory, experiment, options), daemon=True)
    # A terminal sends Ctrl-C to every process of a group, and a second one means "at once". A worker therefore never
    # hears a signal, only its parent. Blocked before it starts, since libraries start threads while they are imported.
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # starting it later would lift the block
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    else:
        process.start()
    theirs.close()
    return _Worker(process, mine)


def _hear(queue: _Queue, worker: _Worker) -> bool:
    """Take in what a worker said; False once it is gone."""
    name = worker.run
    assert name is not None
    try:
        while worker.run is not None and worker.pipe.poll():
            match worker.pipe.recv():
                case Update() | Said() as event:
                    queue.listen(event)
                case _Stopped():
                    worker.run = None
                case ending:
                    worker.run = None
                    queue.end(name, ending)
    except (EOFError, OSError):
        worker.run = None
        worker.pipe.close()
        worker.process.join()
        queue.end(name, _failure_from_exit(worker.process.exitcode or 0))
        return False
    return True


def _failure_from_exit(code: int) -> Failure:
    cause = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    hint = ", perhaps for want of memory (fewer --jobs need less)" if code == -signal.SIGKILL else ""
    return Failure(f"its process {cause}{hint}; the same command goes on from the last checkpoint.", False)


def _work(pipe: Connection, directory: Path, experiment: Experiment, options: Options) -> None:
    """A worker process: runs what its parent names, one after the other, and reports how they go."""
    stop = threading.Event()

    def listen(event: Event) -> None:
        try:
            pipe.send(event)
            if not stop.is_set() and pipe.poll() and pipe.recv() is None:
                stop.set()
        except (EOFError, OSError):  # the parent is gone
            stop.set()

    with suppress(EOFError, OSError):
        while (name := pipe.recv()) is not None:
            try:
                ending: dict[str, Any] | Failure = drain(_running(directory, experiment, name, options, listen, stop))
            except KeyboardInterrupt:
                pipe.send(_Stopped(name))
                return
            except Exception as error:
                ending = _failure(error, directory / name)
            pipe.send(ending)


def environment(device: str) -> dict[str, Any]:
    """Where and with what a result was made."""
    import pfedhn

    on_gpu = device.startswith("cuda")
    return {
        "device": f"cuda: {torch.cuda.get_device_name(device)}" if on_gpu else f"cpu: {processor_name()}",
        "threads": torch.get_num_threads(),
        "precision": "tf32" if on_gpu and torch.get_float32_matmul_precision() != "highest" else "fp32",
        "deterministic": torch.are_deterministic_algorithms_enabled() if on_gpu else True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "pfedhn": pfedhn.__version__,
        "commit": commit(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@lru_cache
def processor_name() -> str:
    """The processor as its maker calls it, where the system says."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()


@lru_cache
def commit() -> str | None:
    """The commit of the source, if it is known; PFEDHN_COMMIT says it where there is no repository."""
    if known := os.environ.get("PFEDHN_COMMIT"):
        return known

    def ask(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        # A result of source that was changed since must not pass for the commit's own.
        return ask("rev-parse", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def rerun_command(experiment: Experiment, cell: Cell, seed: int, options: Options) -> str:
    """The command that repeats just this run."""
    words = [
        "pfedhn",
        "run",
        options.source or experiment.name,
        "--only",
        only_this(experiment, cell),
        "--seeds",
        str(seed),
    ]
    earlier = [] if cell.pretrain is None else [pretraining_cell(experiment, cell)]
    for text in assignments_for(options.assignments, [cell, *earlier]):  # others would be refused
        words += ["--set", text]
    if options.rates is not None:
        words += ["--rates", str(options.rates)]
    words += ["--device", options.device]
    if options.executor != "auto":
        words += ["--executor", options.executor]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    if options.precision != Options.precision:
        words += ["--precision", options.precision]
    if options.deterministic:
        words += ["--deterministic"]
    if options.data_dir is not None:
        words += ["--data-dir", str(options.data_dir)]
    return shlex.join(words)


def only_this(experiment: Experiment, cell: Cell) -> str:
    """What `--only` takes to leave one cell: the fewest of method, data set and clients, or else its name."""
    alike: Collection[Cell] = [other for other in experiment.cells if other.method == cell.method]
    chosen = [f"method={cell.method}"]
    for name in ("dataset", "clients"):
        if len({getattr(other, name) for other in alike}) > 1:
            chosen.append(f"{name}={getattr(cell, name)}")
    fitting = [other for other in alike if (other.dataset, other.clients) == (cell.dataset, cell.clients)]
    if len(fitting) == 1 and "," not in cell.dataset:
        return ",".join(chosen)
    place = next(number for number, other in enumerate(experiment.cells) if other == cell)
    return f"name={cell_names(experiment.cells)[place]}"
