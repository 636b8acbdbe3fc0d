"""One run of an experiment in its folder."""

import threading
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path

from pfedhn.errors import RunError
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.data import preprocessing
from pfedhn.experiments.directory import plain, rerun_command
from pfedhn.experiments.preflight import Preflight, refuse_changed_base
from pfedhn.experiments.spec import Cell, RunSpec, dataset_name
from pfedhn.models import network_name
from pfedhn.params import Params, take
from pfedhn.runs.execute import execute
from pfedhn.runs.load import load
from pfedhn.runs.progress import Event, Said, watch_run
from pfedhn.runs.run import Run
from pfedhn.runs.tracking import tracker
from pfedhn.storage.directory import Origin, StoredSpec, read_spec
from pfedhn.storage.schema import PretrainingCost


def start(
    ready: Preflight, run: RunSpec, listen: Callable[[Event], None], stop: threading.Event, gpu: str | None = None
) -> Generator[bool, None, Run]:
    """A run that is ready to go, in its folder: it pauses after every round, and `stop` ends it at a checkpoint.

    Its files say what was asked for (`options.device`), not which of several GPUs it happened to get (`gpu`).
    """
    directory, experiment, options = ready.directory, ready.experiment, ready.options
    device, cost, starts = gpu or options.device, None, None
    if (earlier := ready.starts_from.get(run.name)) is not None:
        cost, weights = _pretrained(directory / earlier, device)
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


def _pretrained(folder: Path, device: str) -> tuple[PretrainingCost, Params]:
    """The earlier stage of a method such as LG-FedAvg: its cost, and the model of its last round."""
    earlier = load(folder, device=device)
    if (result := earlier.result) is None:
        raise RunError(f"{folder}, which this run starts from, is not finished; run it first.")
    cost = PretrainingCost(result.name, result.steps, result.bytes_down, result.bytes_up, result.seconds)
    plan, memories = earlier.plan, earlier.memories(last=True)
    model = plan.model_of(0)
    if plan.exchange.num_personal_batches(model, is_adapted=True):  # it would adapt on examples what it publishes
        shared = plan.exchange.memory_of_method(memories.shared)
        return cost, plan.algorithm.publish(model, shared, take(memories.rows, 0))
    return cost, earlier.personal_weights(0, last=True)


def _begun_alike(directory: Path, cell: Cell) -> dict[str, StoredSpec]:
    """A run of the experiment that has begun with the same network, if there is one."""
    for file in sorted(directory.glob("*/spec.toml")):
        spec = read_spec(file.parent)
        stored = {"network": {}} | dict((spec and spec.cell) or {})
        if spec is not None and all(stored.get(name) == plain(getattr(cell, name)) for name in ("model", "network")):
            return {file.parent.name: spec}
    return {}
