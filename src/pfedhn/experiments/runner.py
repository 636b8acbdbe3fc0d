"""The runs of an experiment side by side: in processes, or taking turns on a GPU."""

import gc
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from pfedhn.engine.capture import set_up_gpu
from pfedhn.experiments.build import build_simulation, cell_algorithm, forget_datasets
from pfedhn.experiments.directory import Options, num_jobs, read_result
from pfedhn.experiments.execute import Failure, Listener, Outcome, Queue, failure, running
from pfedhn.experiments.spec import (
    Cell,
    Experiment,
    find_run,
    pretraining_run,
    with_pretraining,
)
from pfedhn.experiments.workers import run_side_by_side
from pfedhn.run import drain, stop_on_signal


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


MAX_RUNS_ON_DEVICE = 24  # a card is busy long before; more only wait longer for their first result


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
    queue = Queue(experiment, waiting, outcome, listen)
    if options.device != "cpu":
        set_up_gpu(options.precision, options.deterministic, min(len(waiting), jobs or MAX_RUNS_ON_DEVICE))
        _take_turns(queue, directory, jobs, options)
        return outcome
    jobs = num_jobs(len(waiting), jobs)
    if jobs == 1:
        while (next_run := queue.take()) is not None:
            queue.end(next_run, _attempt(directory, experiment, next_run, options, listen))
    else:
        run_side_by_side(queue, directory, jobs, options)
    return outcome


def _num_rounds(experiment: Experiment, name: str) -> float:
    cell, _ = find_run(experiment, name)
    algorithm = cell_algorithm(cell)
    size = cell.cohort_size or algorithm.usual_cohort_size
    return cell.steps / (size if algorithm.communicates else cell.clients)


def _attempt(
    directory: Path, experiment: Experiment, name: str, options: Options, listen: Listener
) -> dict[str, Any] | Failure:
    try:
        with stop_on_signal() as stop:
            return drain(running(directory, experiment, name, options, listen, stop))
    except Exception as error:
        return failure(error, directory / name)


def _take_turns(queue: Queue, directory: Path, jobs: int | None, options: Options) -> None:
    """Runs side by side on one device, in this process: each queues a round on a stream of its own, then the next."""
    going: dict[str, Generator[None, None, dict[str, Any]]] = {}
    with stop_on_signal() as stop:
        while True:
            while len(going) < (jobs or MAX_RUNS_ON_DEVICE) and (jobs or not going or _has_room(options.device)):
                if stop.is_set() or (name := queue.take()) is None:
                    break
                going[name] = running(directory, queue.experiment, name, options, queue.listen, stop)
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


def _advance(queue: Queue, going: dict[str, Generator[None, None, dict[str, Any]]], name: str, directory: Path) -> None:
    try:
        next(going[name])
        return
    except StopIteration as end:
        queue.end(name, end.value)
    except KeyboardInterrupt:  # it wrote its checkpoint; the others have yet to write theirs
        pass
    except Exception as error:
        queue.end(name, failure(error, directory / name))
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
