"""`pfedhn run --dry-run`: what would be run, how large it is and how long it takes."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from pfedhn.engine.room import bytes_of_shared
from pfedhn.engine.rounds import rounds
from pfedhn.engine.simulate import Simulation
from pfedhn.experiments.build import build_simulation, check
from pfedhn.experiments.directory import Directory, Options, num_jobs
from pfedhn.experiments.spec import Experiment, RunSpec, with_pretraining
from pfedhn.screen import say, table_screen

NUM_TRIED = 3  # rounds by which the time of all is guessed


class Size(NamedTuple):
    """What one run of a cell is."""

    rounds: int
    parameters: int  # of the largest target network
    megabytes: float  # of examples and of the server's model
    seconds: float | None  # guessed; on a GPU only a run itself can tell


def measure(run: RunSpec, options: Options) -> Size:
    """The size of a run, and its time by the first rounds of it."""
    simulation = build_simulation(run, options)
    federation = simulation.federation
    held = federation.x.nbytes + federation.y.nbytes + bytes_of_shared(simulation)
    parameters = max(sum(shape.numel() for shape in model.shapes.values()) for model in simulation.models.values())
    seconds = None if federation.x.is_cuda else _seconds(simulation)
    return Size(simulation.num_rounds, parameters, held / 2**20, seconds)


def _seconds(simulation: Simulation) -> float:
    """The quickest of a few rounds for each, and an evaluation as often as there are some."""
    state = simulation.initial_state()
    began, evaluation, quickest = time.monotonic(), 0.0, float("inf")
    for number, progress in enumerate(rounds(simulation, state)):
        now = time.monotonic()
        if number == 0:
            evaluation = now - began
        elif progress.evaluation is None or progress.is_pause:
            quickest = min(quickest, now - began)
        else:
            quickest = min(quickest, max(now - began - evaluation, 0.0))
        if number >= NUM_TRIED:
            break
        began = time.monotonic()
    num_evaluations = simulation.schedule.steps / simulation.schedule.evaluate_every
    return simulation.num_rounds * (quickest if quickest < float("inf") else 0.0) + num_evaluations * evaluation


def print_plan(
    path: Path, experiment: Experiment, runs: Sequence[RunSpec], options: Options, jobs: int | None, as_json: bool
) -> None:
    """Say what `run` would do; nothing is written."""
    options.check()
    check(experiment)
    Directory(path).refuse_other(experiment)
    runs = with_pretraining(experiment, runs)
    left = [run for run in runs if not (path / run.name / "result.json").exists()]
    cells: dict[str, list[RunSpec]] = {}
    for run in left:
        cells.setdefault(run.cell_name, []).append(run)
    table = Table(box=None, pad_edge=False)
    for column in ("cell", "seeds", "rounds", "parameters", "memory", "time"):
        table.add_column(column, justify="left" if column == "cell" else "right", no_wrap=True)
    total, largest, listed = 0.0, 0.0, []
    for name, members in cells.items():
        size = measure(members[0], options)
        total += (size.seconds or 0.0) * len(members)
        largest = max(largest, size.megabytes)
        listed.append({"name": name, "runs": [member.name for member in members], **size._asdict()})
        taken = "unknown" if size.seconds is None else _words(size.seconds)
        table.add_row(
            escape(name),
            str(len(members)),
            f"{size.rounds:,}",
            f"{size.parameters:,}",
            f"{size.megabytes:.1f} MB",
            taken,
        )
    side_by_side = num_jobs(max(len(left), 1), jobs) if options.device == "cpu" else None
    if as_json:
        finished = [run.name for run in runs if run not in left]
        plan = {"directory": str(path), "cells": listed, "finished": finished, "jobs": side_by_side}
        say(json.dumps(plan))
        return
    table_screen().print(table)
    beside = "" if side_by_side is None else f", {side_by_side} side by side"
    say(f"{len(left)} runs in {path}{beside} ({len(runs) - len(left)} are finished already).")
    if side_by_side is not None and left:
        say(
            f"About {_words(total / side_by_side)} and {largest * side_by_side:.0f} MB of data and server models; what "
            "training itself needs comes on top. Times are guessed by the first rounds."
        )


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
