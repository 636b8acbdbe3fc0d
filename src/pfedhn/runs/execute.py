"""Run a simulation to its end, from its newest checkpoint, and write its files."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from pfedhn.engine.gpu import COMPILER, computing_on_gpu
from pfedhn.engine.norms import norms as norms_of
from pfedhn.engine.rounds import rounds
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Diverged, Evaluation, Progress
from pfedhn.errors import RunError
from pfedhn.runs.files import Files
from pfedhn.runs.progress import Watch
from pfedhn.runs.result import moment_of, result_of
from pfedhn.runs.run import Run
from pfedhn.runs.tracking import Callback
from pfedhn.settings import whole_number
from pfedhn.storage.spec import Origin, held, read_spec

CHECKPOINT_SECONDS = 60.0  # between two checkpoints of a run, or more:
CHECKPOINT_SHARE = 0.05  # what they may take of a process's time, all runs in it together

Value = TypeVar("Value")


def execute(
    simulation: Simulation,
    directory: Path | None = None,
    origin: Origin | None = None,
    *,
    stop: threading.Event | None = None,
    watch: Watch | None = None,
    say: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    norms: bool = False,
) -> Generator[bool, None, Run]:
    """Run to the end, from the newest intact checkpoint in `directory` if there is one.

    It pauses after every round, so that several runs can take turns, and says whether it waits for another one's work.

    Args:
        directory: Where the run is kept (`pfedhn.storage.spec`); nothing is written where None.
        origin: What the run is called and where it comes from.
        stop: Once it is set, the run writes a checkpoint and raises KeyboardInterrupt.
        watch: Called with the progress and the run after every round.
        say: Told of what a person should know, such as a damaged checkpoint.
        checkpoint_every: Communication steps between checkpoints; where None one a minute, less often where the runs of
            this process would spend more than a twentieth of their time on them.
        threads: Of PyTorch; a run that has begun keeps those that it began with, or its bits would change.
        callbacks: Called with the run and the evaluation after every one.
        norms: Whether every evaluation also notes the norms of the server's memories.
    """
    stop = stop or threading.Event()
    if checkpoint_every is not None:
        checkpoint_every = whole_number("checkpoint_every", checkpoint_every)
    run = Run(simulation, simulation.initial_state(), origin or Origin.of(simulation.algorithm, directory))
    with held(directory), _computing_with(directory, threads), _closing(callbacks), _PACE.shared():
        files = None if directory is None else Files.open(directory, simulation, run, say)
        started = time.monotonic() - run.seconds
        saved_at, saved_step = time.monotonic(), run.state.round * simulation.clients_per_round
        try:
            for progress in itertools.chain(_missing_evaluation(run), rounds(simulation, run.state)):
                run.seconds = time.monotonic() - started
                if progress.is_waiting and stop.is_set():
                    if files is not None and run.state.best is not None:
                        files.save(run)
                    raise KeyboardInterrupt
                if progress.is_pause:
                    if not stop.is_set():
                        yield progress.is_waiting
                    continue
                if progress.evaluation is not None:
                    _refuse_blind_choice(progress.evaluation)
                    moment = moment_of(progress.evaluation, run.state, run.seconds)
                    if norms:
                        moment = replace(moment, norms=norms_of(simulation, run.state.memories))
                    run.history.append(moment)
                    if files is not None:
                        files.append(run.history[-1])
                    for callback in callbacks:
                        callback(run, run.history[-1])
                if watch is not None and not stop.is_set():  # whoever watched may be gone
                    watch(progress, run)
                is_due = (
                    time.monotonic() - saved_at >= _PACE.seconds
                    if checkpoint_every is None
                    else progress.step - saved_step >= checkpoint_every
                )
                if files is not None and (is_due or stop.is_set()):
                    if simulation.federation.x.is_cuda:
                        torch.cuda.synchronize()  # rounds that are still queued are not its time
                    begun = time.monotonic()
                    files.save(run)
                    saved_at, saved_step = time.monotonic(), progress.step
                    _PACE.last = saved_at - begun
                if stop.is_set():
                    raise KeyboardInterrupt
                yield False
            run.result = result_of(run) if files is None else files.finish(run, say)
        except Diverged as error:
            if files is not None:
                files.tell_divergence(str(error))
                files.save(run)  # as it was before that round: its last good one
            raise
    return run


class _Pace:
    """How often the runs of a process write checkpoints: 24 hypernetworks take half a minute to write."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.last = 0.0  # seconds that one took

    @property
    def seconds(self) -> float:
        """Between two checkpoints of a run."""
        return max(CHECKPOINT_SECONDS, self.num_runs * self.last / CHECKPOINT_SHARE)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """One run more, inside the block."""
        self.num_runs += 1
        try:
            yield
        finally:
            self.num_runs -= 1


_PACE = _Pace()


def _missing_evaluation(run: Run) -> Iterator[Progress]:
    """The evaluation of the last round, if that was left in the middle."""
    simulation, step = run.simulation, run.state.round * run.simulation.clients_per_round
    is_evaluated = simulation.schedule.is_evaluated(step - simulation.clients_per_round, step)
    if run.history and run.history[-1].step < step and is_evaluated:
        yield Progress(step, simulation.choose(run.state, simulation.evaluate(run.state)))


def _refuse_blind_choice(evaluation: Evaluation) -> None:
    """No round is better than another by a number that is none."""
    validation = evaluation.splits["validation"]
    if int(validation.count.sum()) and validation.metric is not None and math.isnan(validation.score):
        raise RunError(
            f"the metric is NaN on validation examples at step {evaluation.step}, so that no round can be chosen by "
            "it; fix the metric."
        )


@contextmanager
def _closing(callbacks: Sequence[Callback]) -> Iterator[None]:
    try:
        yield
    finally:
        for callback in callbacks:
            getattr(callback, "close", lambda: None)()


@contextmanager
def _computing_with(directory: Path | None, threads: int | None) -> Iterator[None]:
    stored = None if directory is None else read_spec(directory)
    before = torch.get_num_threads()
    if stored is not None or threads is not None:
        torch.set_num_threads(threads if stored is None else stored.environment.threads)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drain(work: Generator[Any, None, Value]) -> Value:
    """Run a generator to its end and take what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Value = end.value
            return result


@contextmanager
def computing_on(device: str | torch.device, precision: str, deterministic: bool, num_runs: int = 1) -> Iterator[None]:
    """How products are computed inside the block; on a CPU there is nothing to choose."""
    if torch.device(device).type != "cuda":
        yield
        return
    with computing_on_gpu(precision, deterministic, num_runs):
        try:
            yield
        finally:
            COMPILER.drop()  # nothing goes on behind a person's back
