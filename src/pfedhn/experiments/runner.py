"""The runs of an experiment side by side: in processes on a CPU, taking turns on a GPU, or on a cluster."""

import gc
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from pfedhn.data.files import file_digest
from pfedhn.engine.state import Schedule
from pfedhn.errors import UserError
from pfedhn.experiments.build import (
    build_federation,
    build_simulation,
    cell_algorithm,
    forget_datasets,
    refuse_unused_start,
)
from pfedhn.experiments.directory import Options, finished, num_jobs
from pfedhn.experiments.execute import Listener, Outcome, Queue, failure, start
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, is_own_data, pretraining_run, with_pretraining
from pfedhn.experiments.tasks import Cluster
from pfedhn.experiments.workers import run_side_by_side
from pfedhn.runs.execute import computing_on
from pfedhn.runs.progress import Said
from pfedhn.runs.run import Run
from pfedhn.storage.history import MendableError
from pfedhn.storage.spec import is_data_of, read_spec
from pfedhn.system.stopping import stop_on_signal

MAX_RUNS_ON_DEVICE = 24  # a GPU is busy long before; more only wait longer for their first result


def prepare(runs: Sequence[RunSpec], options: Options) -> None:
    """Build each cell once, so that data or settings that cannot work are refused before anything is written."""
    seen: set[str] = set()
    for run in runs:
        if run.cell_name not in seen:
            seen.add(run.cell_name)
            simulation = build_simulation(run, options)
            if run.cell.pretrain is not None:
                refuse_unused_start(simulation, run.cell)
    if options.device == "cpu":
        forget_datasets()


def refuse_other_executor(directory: Path, runs: Sequence[RunSpec], options: Options) -> None:
    """Now, not when a run starts: the directory would keep the option that its runs cannot go on with."""
    for run in runs:
        spec = read_spec(directory / run.name)
        if spec is not None and spec.executor != options.executor:
            raise UserError(
                f"{directory / run.name} was begun with the executor {spec.executor}, so it cannot go on with "
                f"{options.executor}, whose sums round otherwise; give --executor {spec.executor}, or another --out."
            )


def refuse_changed_data(directory: Path, finished_runs: Sequence[RunSpec], is_going_on: bool) -> None:
    """A finished run is not run again, and beside it others would be trained on other data.

    Args:
        directory: Of the experiment.
        finished_runs: Its runs that have ended.
        is_going_on: Whether others will be trained; a folder, which takes long to read, is looked at only then.
    """
    digests: dict[str, str] = {}
    for run in finished_runs:
        spec, place = read_spec(directory / run.name), Path(run.cell.dataset)
        if spec is None:
            continue
        table = None if spec.data.reading is None else spec.data.reading.table
        if is_own_data(run.cell.dataset) and place.is_dir():
            if not is_going_on or run.cell.dataset in digests:  # all runs were compared with the first when they began
                continue
            digests[run.cell.dataset] = ""
        elif table is None or not place.is_file():
            continue
        else:
            if run.cell.dataset not in digests:
                digests[run.cell.dataset] = file_digest(place)
            if digests[run.cell.dataset] == table.sha256:
                continue
        now = build_federation(run.cell, run.seed)  # a file may only be written another way
        columns = None if now.reading is None or now.reading.table is None else now.reading.table.columns
        is_same = is_data_of(spec, now)
        if not is_same or columns != (None if table is None else table.columns):
            raise UserError(
                f"{place} has changed since {directory / run.name} was finished; give another --out for runs on what "
                f"it holds now, or bring the {'folder' if table is None else 'table'} back that these runs are of."
            )


def run_many(
    directory: Path,
    experiment: Experiment,
    runs: Sequence[RunSpec],
    *,
    jobs: int | None = None,
    options: Options | None = None,
    listen: Listener = lambda event: None,
    cluster: Cluster | None = None,
) -> Outcome:
    """Runs side by side: on a CPU each in a process of its own, on a GPU taking turns in this one, or on a cluster.

    A run that fails does not stop the others. Ctrl-C lets every run write a checkpoint, then raises KeyboardInterrupt.

    Args:
        directory: Of the experiment; every run gets a folder of its name in it.
        experiment: What the runs are part of.
        runs: Those that are wanted. What they start from is run before them; what is finished is only read.
        jobs: By default as many as there are runs or cores, whichever is less; on a GPU as many as its memory holds.
        options: How to run.
        listen: Told of everything that happens.
        cluster: Whose machines run them; this machine where None.
    """
    runs = with_pretraining(experiment, runs)
    # As if none were finished: the bits must not change.
    options = (options or Options()).with_threads(len(runs), jobs, cluster is not None)
    queue = _line_up(directory, experiment, runs, listen)
    if cluster is not None:
        directory = directory.resolve()
        cluster.check(directory, queue.waiting, options)
        cluster.run(queue, directory, jobs, options)
        return queue.outcome
    if options.device == "cpu":
        jobs = num_jobs(len(queue.waiting), jobs)
        if jobs > 1:
            run_side_by_side(queue, directory, jobs, options)
            return queue.outcome
    cards = gpus_of(options.device)
    limit = jobs or MAX_RUNS_ON_DEVICE * len(cards)
    num_runs = -(-min(len(queue.waiting), limit) // len(cards))
    going: dict[str, Generator[bool, None, Run]] = {}
    waiting: set[str] = set()
    card_of: dict[str, str] = {}
    with computing_on(options.device, options.precision, options.deterministic, num_runs), stop_on_signal() as stop:
        while queue.waiting or going:
            # One at a time: its first round shows how much room a run takes.
            card = min(cards, key=[card_of[name] for name in going].count)  # where the fewest runs are
            is_seen = not waiting and (card not in map(card_of.get, going) or _has_memory(card))
            has_room = len(going) < limit and (jobs or is_seen)
            run = queue.take() if has_room and not stop.is_set() else None
            turns = list(going) if run is None else [run.name]
            if not turns:
                break
            for name in turns:
                try:
                    if run is not None:
                        card_of[name] = card
                    with _using(card_of[name]):
                        if run is not None:
                            going[name] = start(directory, experiment, run, options, listen, stop, card)
                        is_waiting = next(going[name])  # a round, queued on a stream of its own
                    (waiting.add if is_waiting else waiting.discard)(name)
                    continue
                except StopIteration as end:
                    queue.end(name, end.value.result)
                except KeyboardInterrupt:  # it wrote its checkpoint; the others have yet to write theirs
                    _wait_for(card_of[name])
                    if not stop.is_set():
                        raise
                except Exception as error:
                    _wait_for(card_of[name])
                    queue.end(name, failure(error, directory / name))
                going.pop(name, None)
                waiting.discard(name)
                _give_memory_back(options.device)
        if stop.is_set():
            raise KeyboardInterrupt
    return queue.outcome


def gpus_of(device: str) -> list[str]:
    """The devices that runs are spread over: every GPU of this machine, unless one is named."""
    if device != "cuda" or torch.cuda.device_count() < 2:
        return [device]
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def _using(card: str) -> AbstractContextManager[Any]:
    """Inside the block, what is made on a GPU without saying on which is made on this one."""
    return torch.cuda.device(card) if card.startswith("cuda:") else nullcontext()


def _line_up(directory: Path, experiment: Experiment, runs: Sequence[RunSpec], listen: Listener) -> Queue:
    """The runs that are not finished, in the order in which they should start."""
    outcome = Outcome()
    waiting = []
    for run in runs:
        try:
            result = finished(directory / run.name, run)
        except MendableError as error:
            listen(Said(run.name, str(error)))
            result = None
        if result is not None:
            outcome.results[run.name] = result
        else:
            waiting.append(run)
    # Started last, a run that takes long would leave the other cores idle at the end, or the GPU half used.
    awaited = {earlier.name for run in waiting if (earlier := pretraining_run(experiment, run)) is not None}
    waiting.sort(key=lambda run: (run.name not in awaited, -_num_rounds(run.cell)))
    return Queue(experiment, waiting, outcome, listen)


def _num_rounds(cell: Cell) -> float:
    algorithm = cell_algorithm(cell)
    size = cell.cohort_size or Schedule.default_cohort_size(algorithm, cell.clients)
    return cell.steps / (size if algorithm.communicates else cell.clients)


def _wait_for(card: str) -> None:
    """What a run holds is freed together with its error. Rounds that it has in line on a GPU may still use it."""
    if card.startswith("cuda"):
        with suppress(RuntimeError):  # of the two errors, the run's own says more
            torch.cuda.synchronize(card)


def _give_memory_back(device: str) -> None:
    """What finished runs held is kept for their own streams; the next run would find the device full."""
    if device == "cpu":
        return
    gc.collect()  # a run and its captured round refer to each other
    torch.cuda.empty_cache()


def _has_memory(device: str) -> bool:
    """Whether one more run fits on the device."""
    if not device.startswith("cuda"):
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free > total / 8
