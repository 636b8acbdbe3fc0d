"""One run of an experiment in its folder."""

import threading
from collections.abc import Generator, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.data import preprocessing
from pfedhn.experiments.directory import Options, plain
from pfedhn.experiments.pretraining import pretrained
from pfedhn.experiments.provenance import rerun_command
from pfedhn.experiments.queue import Listener
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, dataset_name, pretraining_run
from pfedhn.models import network_name
from pfedhn.runs.execute import execute
from pfedhn.runs.progress import Said, watch_run
from pfedhn.runs.run import Run
from pfedhn.runs.tracking import tracker
from pfedhn.storage.directory import Origin, read_spec
from pfedhn.storage.restore import to_plan


def start(
    directory: Path,
    experiment: Experiment,
    run: RunSpec,
    options: Options,
    listen: Listener,
    stop: threading.Event,
    gpu: str | None = None,
) -> Generator[bool, None, Run]:
    """A run that is ready to go, in its folder: it pauses after every round, and `stop` ends it at a checkpoint.

    Its files say what was asked for (`options.device`), not which of several GPUs it happened to get (`gpu`).
    """
    device, cost, starts = gpu or options.device, None, None
    if (earlier := pretraining_run(experiment, run)) is not None:
        cost, weights = pretrained(directory / earlier.name, device)
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
