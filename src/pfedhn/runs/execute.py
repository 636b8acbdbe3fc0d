"""Run a simulation to its end, from its newest checkpoint, and write its files."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pfedhn.engine.gpu import COMPILER, computing_on_gpu
from pfedhn.engine.norms import norms as norms_of
from pfedhn.engine.rounds import rounds, scores_of_adapted
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS, Diverged, Evaluation, Progress, State
from pfedhn.errors import RunError
from pfedhn.runs.detailed import detailed
from pfedhn.runs.progress import Watch
from pfedhn.runs.run import Run
from pfedhn.runs.tracking import Callback
from pfedhn.settings import whole_number
from pfedhn.storage.directory import Origin, RunDirectory, held
from pfedhn.storage.identity import partition_digest, settings_of
from pfedhn.storage.schema import Clients, Moment, Result, Scores, SplitScores, to_json
from pfedhn.system.environment import environment

CHECKPOINT_SECONDS = 60.0  # between two checkpoints of a run, or more:
CHECKPOINT_SHARE = 0.05  # what they may take of a process's time, all runs in it together

NUM_CLIENTS_IN_METRICS = 1_000  # larger federations keep per-client scores of the chosen round only
NUM_CLIENTS_DESCRIBED = 2_000  # of more, a result does not say who holds what

Value = TypeVar("Value")


@dataclass
class _Pace:
    """How often the runs of a process write checkpoints: 24 hypernetworks take half a minute to write."""

    num_runs: int = 0
    last: float = 0.0  # seconds that one took

    @property
    def seconds(self) -> float:
        """Between two checkpoints of a run."""
        return max(CHECKPOINT_SECONDS, self.num_runs * self.last / CHECKPOINT_SHARE)


_PACE = _Pace()


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
        directory: Where the run is kept (`pfedhn.storage.directory`); without one, nothing is written.
        origin: What the run is called and where it comes from.
        stop: Once it is set, the run writes a checkpoint and raises KeyboardInterrupt.
        watch: Called with the progress and the run after every round.
        say: Called with what a person should know, such as a damaged checkpoint.
        checkpoint_every: Communication steps between checkpoints. By default one is written every minute, or less often
            if the runs of this process would spend more than a twentieth of their time on them.
        threads: PyTorch's threads; a resumed run keeps those that it began with, or its bits would change.
        callbacks: Called with the run and the evaluation after every evaluation.
        norms: Whether every evaluation also notes the norms of the server's memories.
    """
    stop = stop or threading.Event()
    if checkpoint_every is not None:
        checkpoint_every = whole_number("checkpoint_every", checkpoint_every)
    run = Run(simulation, simulation.initial_state(), origin or Origin.of(simulation.algorithm, directory))
    alone = nullcontext() if directory is None else held(directory)
    with alone, _going_on(threads, callbacks):
        files = None if directory is None else _resumed(run, directory, say)
        started = time.monotonic() - run.seconds
        saved_at, saved_step = time.monotonic(), run.state.round * simulation.clients_per_round

        def save() -> None:
            if files is not None:
                files.save(run.state, simulation, run.history)

        try:
            for progress in itertools.chain(_missing_evaluation(run), rounds(simulation, run.state)):
                run.seconds = time.monotonic() - started
                if progress.is_waiting and stop.is_set():
                    if run.state.best is not None:
                        save()
                    raise KeyboardInterrupt
                if progress.is_pause:
                    if not stop.is_set():
                        yield progress.is_waiting
                    continue
                if progress.evaluation is not None:
                    _refuse_blind_choice(progress.evaluation)
                    moment = _moment_of(progress.evaluation, run.state, run.seconds, simulation.loss_unit)
                    if norms:
                        moment = replace(moment, norms=norms_of(simulation, run.state.memories))
                    run.history.append(moment)
                    if files is not None:
                        files.append(moment)
                    for callback in callbacks:
                        callback(run, moment)
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
                    save()
                    saved_at, saved_step = time.monotonic(), progress.step
                    _PACE.last = saved_at - begun
                if stop.is_set():
                    raise KeyboardInterrupt
                yield False
            run.result = _result_of(run) if files is None else files.finish(lambda: _result_of(run), save, say)
        except Diverged as error:
            if files is not None:
                files.tell_divergence(str(error))
                save()  # as it was before that round: its last good one
            raise
    return run


def _resumed(run: Run, directory: Path, say: Callable[[str], None]) -> RunDirectory:
    """Open the run's directory and let the run go on from the newest intact checkpoint there."""
    files, stored = RunDirectory.open(directory, run.simulation, run.origin)
    for sentence in stored.refused:
        say(sentence)
    if (threads := files.spec.environment.threads) != torch.get_num_threads():
        torch.set_num_threads(threads)
    run.state, run.history = stored.state or run.state, stored.history
    run.seconds = run.history[-1].seconds if run.history else 0.0
    return files


@contextmanager
def _going_on(threads: int | None, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Count the run and set PyTorch's threads for it; at the end, close the callbacks."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    _PACE.num_runs += 1
    try:
        yield
    finally:
        _PACE.num_runs -= 1
        torch.set_num_threads(before)
        for callback in callbacks:
            getattr(callback, "close", lambda: None)()


def _missing_evaluation(run: Run) -> Iterator[Progress]:
    """The evaluation of the last round, if the run was stopped before it."""
    simulation, step = run.simulation, run.state.round * run.simulation.clients_per_round
    is_evaluated = simulation.schedule.is_evaluated(step - simulation.clients_per_round, step)
    if run.history and run.history[-1].step < step and is_evaluated:
        yield Progress(step, simulation.choose(run.state, simulation.evaluate(run.state)))


def _refuse_blind_choice(evaluation: Evaluation) -> None:
    """Refuse a metric that is NaN, by which no round is better than another."""
    validation = evaluation.splits["validation"]
    if int(validation.count.sum()) and validation.metric is not None and math.isnan(validation.score):
        raise RunError(
            f"the metric is NaN on validation examples at step {evaluation.step}, so that no round can be chosen by "
            "it; fix the metric."
        )


def _moment_of(evaluation: Evaluation, state: State, seconds: float, loss_unit: float) -> Moment:
    """A line of metrics.jsonl."""
    splits = {}
    for name, result in evaluation.splits.items():
        scores = Scores.of(result, len(result.count) <= NUM_CLIENTS_IN_METRICS, loss_unit)
        splits[name] = replace(scores, client_examples=None)  # the same in every line; the result has them
    return Moment(
        evaluation.step,
        evaluation.round,
        splits["validation"],
        splits["test"],
        state.bytes_down,
        state.bytes_up,
        round(seconds, 3),
    )


def _result_of(run: Run) -> Result:
    simulation, origin, chosen, state = run.simulation, run.origin, run.chosen, run.state
    unit = simulation.loss_unit
    validation, test = (Scores.of(chosen.splits[split], loss_unit=unit) for split in EVALUATED_SPLITS)
    unadapted = None
    if simulation.fine_tunes:
        assert state.best is not None
        unadapted, adapted = SplitScores(validation, test), scores_of_adapted(simulation, state.best)
        validation, test = (Scores.of(adapted[split], loss_unit=unit) for split in EVALUATED_SPLITS)
    result = Result(
        origin.name,
        origin.experiment,
        to_json(origin.cell),
        to_json(settings_of(simulation.algorithm)),
        simulation.seed,
        chosen.step,
        state.round * simulation.clients_per_round,
        state.round,
        validation,
        test,
        state.bytes_down,
        state.bytes_up,
        round(run.seconds, 3),
        dict(simulation.federation.unused),
        partition_digest(simulation.federation),
        origin.command,
        environment(simulation.federation.x.device),
        origin.pretrain,
        unadapted,
        clients=_clients(run),
        select=simulation.schedule.select,
    ).without_harmful_adaptation()
    return replace(result, detailed=detailed(run, simulation.fine_tunes and result.adapted is None))


def _clients(run: Run) -> Clients | None:
    """Names, classes and a map of the clients; None if there are very many."""
    federation = run.simulation.federation
    if federation.num_clients > NUM_CLIENTS_DESCRIBED:
        return None
    classes = place = share = None
    if federation.num_classes is not None and len(federation.y):
        counts = federation.class_counts.tolist()
        classes = tuple({str(label): count for label, count in enumerate(row) if count} for row in counts)
    if run.plan.embeddings(run.memories()) is not None:
        place, share = _plane(run.embeddings())
    return Clients(federation.names, federation.class_names, classes, place, share)


def _plane(embeddings: Tensor) -> tuple[tuple[tuple[float, ...], ...] | None, float | None]:
    """Embeddings [N, D] on their first two principal components, and the share of the variance there."""
    centered = nn.functional.pad(embeddings - embeddings.mean(0), (0, 1))  # one axis alone is a line in the plane
    total = float(centered.square().sum())
    if not 0 < total < math.inf:
        return None, None
    _, axes = torch.linalg.eigh(centered.T @ centered)  # rising: the last two are the widest
    axes = axes[:, -2:].flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # an axis has no direction of its own
    plane = centered @ axes
    return tuple(tuple(round(part, 5) for part in row) for row in plane.tolist()), float(plane.square().sum()) / total


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
    """Set how a GPU computes products inside the block; a CPU has no choice."""
    if torch.device(device).type != "cuda":
        yield
        return
    with computing_on_gpu(precision, deterministic, num_runs):
        try:
            yield
        finally:
            COMPILER.drop()  # no compilation goes on in the background
