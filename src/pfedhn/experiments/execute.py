"""One run of an experiment in its folder; runs that wait for their turn, and what came of them."""

import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pfedhn.engine.state import Diverged
from pfedhn.errors import RunError, UserError, first_line, place_in_own_code
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.data import preprocessing
from pfedhn.experiments.directory import Options, plain
from pfedhn.experiments.provenance import rerun_command
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, dataset_name, pretraining_run
from pfedhn.models import network_name
from pfedhn.params import Params, take
from pfedhn.runs.execute import execute
from pfedhn.runs.load import load
from pfedhn.runs.progress import Event, RunFailed, RunFinished, Said, watch_run
from pfedhn.runs.run import Run
from pfedhn.runs.tracking import tracker
from pfedhn.storage.history import read_result
from pfedhn.storage.restore import to_plan
from pfedhn.storage.schema import Cost, Result
from pfedhn.storage.spec import Origin, read_spec

Listener: TypeAlias = Callable[[Event], None]


def start(
    directory: Path,
    experiment: Experiment,
    run: RunSpec,
    options: Options,
    listen: Listener,
    stop: threading.Event,
    card: str | None = None,
) -> Generator[bool, None, Run]:
    """A run that is ready to go, in its folder: it pauses after every round, and `stop` ends it at a checkpoint.

    Its files say what was asked for (`options.device`), not which of several GPUs it happened to get (`card`).
    """
    device, cost, starts = card or options.device, None, None
    if (earlier := pretraining_run(experiment, run)) is not None:
        cost, weights = _pretrained(directory / earlier.name, device)
        starts = {network_name(run.cell.part or run.cell.model): weights}
    simulation = build_simulation(run, replace(options, device=device), starts)
    if any(model.constants for model in simulation.models.values()):  # others may have begun before they changed
        refuse_changed_base(directory, _begun_alike(directory, run.cell))
    origin = Origin(
        run.name,
        run.cell.method,
        experiment.name,
        asdict(run.cell),
        dataset_name(run.cell),
        preprocessing(run.cell),
        cost,
        rerun_command(experiment, run, options),
    )
    return execute(
        simulation,
        directory / run.name,
        origin,
        stop=stop,
        watch=watch_run(run.name, simulation, listen),
        say=lambda sentence: listen(Said(run.name, sentence)),
        checkpoint_every=options.checkpoint_every,
        threads=options.threads,
        callbacks=[] if options.track is None else [tracker(options.track, experiment.name, directory)],
        norms=options.norms,
    )


def refuse_changed_base(directory: Path, names: Iterable[str]) -> None:
    """Beside runs of an experiment that were trained on one frozen base, none shall be trained on another."""
    for name in names:
        spec = read_spec(directory / name)
        if spec is not None and "frozen" in spec.digests:
            to_plan(directory / name, spec)  # which refuses another base


def _begun_alike(directory: Path, cell: Cell) -> list[str]:
    """A run of the experiment that has begun with the same network, if there is one."""
    for file in sorted(directory.glob("*/spec.toml")):
        spec = read_spec(file.parent)
        stored = {"network": {}} | dict((spec and spec.cell) or {})
        if all(stored.get(name) == plain(getattr(cell, name)) for name in ("model", "network")):
            return [file.parent.name]
    return []


def _pretrained(folder: Path, device: str) -> tuple[Cost, Params]:
    """The earlier stage of a method such as LG-FedAvg: its cost, and the model of its last round."""
    result = read_result(folder)
    if result is None:
        raise RunError(f"{folder}, which this run starts from, is not finished; run it first.")
    cost = Cost(result.name, result.steps, result.bytes_down, result.bytes_up, result.seconds)
    earlier = load(folder, device=device)
    plan, memories = earlier.plan, earlier.memories(last=True)
    model = plan.model_of(0)
    if plan.exchange.num_personal_batches(model, is_adapted=True):  # it would adapt on examples what it publishes
        shared = plan.exchange.served(memories.shared)
        return cost, plan.algorithm.publish(model, shared, take(memories.rows, 0))
    return cost, earlier.personal_weights(0, last=True)


class Failure(NamedTuple):
    """Why a run did not finish."""

    sentence: str
    is_bad_input: bool  # else something happened on the way: divergence, a full disk
    has_diverged: bool = False


@dataclass
class Outcome:
    """What came of several runs, by their names."""

    results: dict[str, Result] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)


@dataclass
class Queue:
    """Runs that wait for a turn, or for the run they start from."""

    experiment: Experiment
    waiting: list[RunSpec]  # in the order in which they should start
    outcome: Outcome
    listen: Listener

    def __post_init__(self) -> None:
        # Once, since `take` is asked after every round while there is room for another run.
        pairs = [(run.name, pretraining_run(self.experiment, run)) for run in self.waiting]
        self.earlier = {name: earlier.name for name, earlier in pairs if earlier is not None}

    def take(self) -> RunSpec | None:
        """A run that can start now; None if there is none."""
        for run in list(self.waiting):
            earlier = self.earlier.get(run.name)
            if earlier in self.outcome.failures:
                self.waiting.remove(run)
                self.end(run.name, Failure(f"the run it starts from, {earlier}, failed.", False))
            elif earlier is None or earlier in self.outcome.results:
                self.waiting.remove(run)
                return run
        return None

    def end(self, name: str, ending: Result | Failure) -> None:
        if isinstance(ending, Failure):
            self.outcome.failures[name] = ending
            self.listen(RunFailed(name, ending.sentence))
        else:
            self.outcome.results[name] = ending
            self.listen(RunFinished(name, ending))


def failure(error: Exception, folder: Path) -> Failure:
    failure = failure_from(error)
    if failure is None:
        log, place = folder / "error.txt", place_in_own_code(error)
        where = place or "an error inside pfedhn"
        failure = Failure(f"{first_line(error)} ({where}; the details are in {log}).", place is not None)
        try:
            log.write_text("".join(traceback.format_exception(error)))
        except OSError:  # the disk may be what failed
            failure = Failure(f"{first_line(error)} ({where}).", place is not None)
    return failure


def failure_from(error: BaseException) -> Failure | None:
    """An error that a person can do something about, in one sentence; None for one that only we can."""
    if isinstance(error, UserError):
        return Failure(str(error), not isinstance(error, RunError), isinstance(error, Diverged))
    return None
