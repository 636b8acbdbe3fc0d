"""Runs side by side in processes of their own, each told what to do over a pipe."""

import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection as pipes
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from pfedhn.experiments.directory import Options
from pfedhn.experiments.execute import start
from pfedhn.experiments.queue import Failure, Queue, failure
from pfedhn.experiments.spec import Experiment, RunSpec
from pfedhn.runs.execute import drain
from pfedhn.runs.progress import Event, Said, Update
from pfedhn.storage.schema import Result
from pfedhn.system.process import start_process, stop_requests


class _Stopped(NamedTuple):
    """A worker's answer to a request to stop: the run stands in its checkpoint."""

    run: str


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: RunSpec | None = None


def run_side_by_side(queue: Queue, directory: Path, jobs: int, options: Options) -> None:
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


def _hand_out(queue: Queue, workers: list[_Worker], directory: Path, jobs: int, options: Options) -> None:
    while any(worker.run is None for worker in workers) or len(workers) < jobs:
        run = queue.take()
        if run is None:
            return
        idle = next((worker for worker in workers if worker.run is None), None)
        if idle is None:
            idle = _Worker(*start_process(_work, directory, queue.experiment, options))
            workers.append(idle)
        idle.run = run
        idle.pipe.send(run)


def _hear(queue: Queue, worker: _Worker) -> bool:
    """Take in what a worker said; False once it is gone."""
    assert worker.run is not None
    name = worker.run.name
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
    return Failure(f"its process {cause}{hint}; the same command resumes from the last checkpoint.", False)


def _work(pipe: Connection, directory: Path, experiment: Experiment, options: Options) -> None:
    """A worker process: runs what its parent names, one after the other, and reports how they go."""
    stop = threading.Event()
    asked: SimpleQueue[RunSpec | None] = SimpleQueue()

    def hear() -> None:
        """Beside the run, which may be in a round that takes long."""
        while True:
            try:
                run = pipe.recv()
            except (EOFError, OSError):  # the parent is gone
                run = None
            asked.put(run)
            if run is None:
                stop.set()
                return

    def listen(event: Event) -> None:
        with suppress(OSError):
            pipe.send(event)

    threading.Thread(target=hear, daemon=True).start()
    with suppress(OSError):
        while (run := asked.get()) is not None:
            ending: Result | Failure | None
            try:
                ending = drain(start(directory, experiment, run, options, listen, stop)).result
            except KeyboardInterrupt:
                pipe.send(_Stopped(run.name))
                return
            except Exception as error:
                ending = failure(error, directory / run.name)
            pipe.send(ending)
