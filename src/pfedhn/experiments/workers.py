"""Runs side by side in their own processes, each told what to do over a pipe."""

import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection as pipes
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

from pfedhn.experiments.execute import start
from pfedhn.experiments.preflight import Preflight
from pfedhn.experiments.queue import Queue, Stopped, failure, run_all
from pfedhn.experiments.spec import RunSpec
from pfedhn.runs.execute import drain
from pfedhn.runs.progress import Event, RunFailed, RunFinished
from pfedhn.system.process import start_process


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: RunSpec | None = None


def run_side_by_side(queue: Queue, jobs: int) -> None:
    """Hand runs to worker processes over a pipe each; no lock is shared, so a killed worker cannot block the others."""
    run_all(_Workers(queue, jobs))


class _Workers:
    """As many worker processes as runs go side by side."""

    def __init__(self, queue: Queue, jobs: int) -> None:
        self.queue, self.jobs = queue, jobs
        self.workers: list[_Worker] = []

    def hand_out(self) -> None:
        while any(worker.run is None for worker in self.workers) or len(self.workers) < self.jobs:
            run = self.queue.take()
            if run is None:
                return
            idle = next((worker for worker in self.workers if worker.run is None), None)
            if idle is None:
                idle = _Worker(*start_process(_work, self.queue.ready))
                self.workers.append(idle)
            idle.run = run
            idle.pipe.send(run)

    def stop(self) -> None:
        for worker in self.workers:
            with suppress(OSError):  # it may just have ended; `_hear` will find out
                worker.pipe.send(None)

    def hear(self) -> bool:
        busy = [worker for worker in self.workers if worker.run is not None]
        if not busy:
            return False
        pipes.wait([worker.pipe for worker in busy], timeout=0.1)
        for worker in busy:
            self._hear(worker)
        return True

    def _hear(self, worker: _Worker) -> None:
        assert worker.run is not None
        name = worker.run.name
        try:
            while worker.run is not None and worker.pipe.poll():
                if not self.queue.hear(worker.pipe.recv()):
                    worker.run = None
        except (EOFError, OSError):
            worker.pipe.close()
            worker.process.join()
            self.queue.hear(_failure_from_exit(name, worker.process.exitcode or 0))
            self.workers.remove(worker)

    def kill(self) -> None:
        for worker in self.workers:  # what they had to write is written
            worker.pipe.close()
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()


def _failure_from_exit(run: str, code: int) -> RunFailed:
    cause = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    hint = ", perhaps for want of memory (fewer --jobs need less)" if code == -signal.SIGKILL else ""
    return RunFailed(run, f"its process {cause}{hint}; the same command resumes from the last checkpoint.")


def _work(pipe: Connection, ready: Preflight) -> None:
    """A worker process: runs what its parent names, one after the other, and reports how they go."""
    stop = threading.Event()
    asked: SimpleQueue[RunSpec | None] = SimpleQueue()

    def hear() -> None:
        """Beside the run, which may be in a round that takes long."""
        while not stop.is_set():
            try:
                run = pipe.recv()
            except (EOFError, OSError):  # the parent is gone
                run = None
            if run is None:
                stop.set()
            asked.put(run)

    def listen(event: Event) -> None:
        with suppress(OSError):
            pipe.send(event)

    threading.Thread(target=hear, daemon=True).start()
    with suppress(OSError):
        while (run := asked.get()) is not None:
            ending: Event | Stopped
            try:
                result = drain(start(ready, run, listen, stop)).result
                assert result is not None
                ending = RunFinished(run.name, result)
            except KeyboardInterrupt:
                ending = Stopped(run.name)
            except Exception as error:
                ending = failure(error, ready.directory / run.name)
            pipe.send(ending)
