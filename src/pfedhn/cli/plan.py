"""`pfedhn run --dry-run`: what would be run, how large it is and how long it takes."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.room import bytes_of_shared
from pfedhn.engine.rounds import rounds
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Best, Evaluation, State
from pfedhn.experiments.build import build_simulation, check
from pfedhn.experiments.directory import Directory, Options, num_jobs
from pfedhn.experiments.spec import Experiment, RunSpec, with_pretraining
from pfedhn.params import take
from pfedhn.sgd import SGD
from pfedhn.system.screen import say, table_screen

NUM_TRIED = 3  # rounds by which the time of all is guessed
NUM_EXAMPLES_TRIED = 256  # of one client, by which it is seen whether there is time to evaluate more
PATIENCE = 10.0  # seconds for a cell's rounds, and for its evaluation
SHORT = 0.3  # seconds of what is tried again, since the first time takes longer
COLUMNS = ("cell", "seeds", "rounds", "parameters", "memory", "time")


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
    """A round for each, and an evaluation as often as there are some."""
    state = simulation.initial_state()
    evaluation, scores = _evaluation_seconds(simulation, state)
    state.best = Best(Evaluation(0, 0, scores), state.memories)  # so that the first round comes first
    num_evaluations = simulation.schedule.steps / simulation.schedule.evaluate_every
    return simulation.num_rounds * _round_seconds(simulation, state) + num_evaluations * evaluation


def _evaluation_seconds(simulation: Simulation, state: State) -> tuple[float, dict[str, SplitResult]]:
    """How long all clients' examples take, by as many as there is time for; and what some clients scored."""
    chunks = simulation.chunks
    one = chunks[len(chunks) // 2]
    few = replace(
        one,
        clients=one.clients[:1],
        members=one.members[:1],
        index=one.index[:1, :NUM_EXAMPLES_TRIED],
        masks=one.masks[:1, :, :NUM_EXAMPLES_TRIED],
    )
    scores: dict[str, SplitResult] = {}
    seconds = _quickest(lambda: scores.update(simulation.scores(state.memories, 0, chunks=[few])))
    done = few.index.numel()
    if seconds / done * max(chunk.index.numel() for chunk in chunks) < PATIENCE:
        began, done = time.monotonic(), 0
        for chunk in chunks:
            simulation.scores(state.memories, 0, chunks=[chunk])
            seconds, done = time.monotonic() - began, done + chunk.index.numel()
            if seconds > PATIENCE:
                break
    return seconds / done * sum(chunk.index.numel() for chunk in chunks), scores


def _round_seconds(simulation: Simulation, state: State) -> float:
    """The quickest of a few rounds; where these would take long, the steps of a round by one of them."""
    guessed = simulation.clients_per_round * simulation.algorithm.num_batches * _step_seconds(simulation)
    if guessed > PATIENCE:
        return guessed
    steps = (NUM_TRIED + 2) * simulation.clients_per_round
    endless = replace(simulation.schedule, steps=steps, evaluate_every=steps)  # no evaluation among the rounds
    quickest, first = float("inf"), time.monotonic()
    began = first
    for number, _ in enumerate(rounds(replace(simulation, schedule=endless), state), 1):
        now = time.monotonic()
        quickest = min(quickest, now - began)
        if number >= NUM_TRIED or now - first > PATIENCE:
            break
        began = time.monotonic()
    return quickest


def _step_seconds(simulation: Simulation) -> float:
    """A client's local step, in the mean over clients; the networks may be of several sizes."""
    federation, starts, total = simulation.federation, simulation.initial_models(), 0.0
    names = Counter(simulation.model_of(client).name for client in range(federation.num_clients))
    for name, count in names.items():
        model = simulation.models[name]
        client = next(i for i in range(federation.num_clients) if simulation.model_of(i) is model)
        batches = take(federation.batches(torch.tensor([client]), 0, 1, simulation.schedule.batch_size), 0)
        weights = {part: starts[name][part] for part in model.shapes}
        with model.seeded(torch.zeros((), dtype=torch.int64)):
            total += count * _quickest(partial(SGD(0.0).run, model.loss, weights, batches))
    return total / federation.num_clients


def _quickest(work: Callable[[], object]) -> float:
    """How long something takes that takes longer the first time, unless it takes long anyway."""
    quickest = float("inf")
    for _ in range(NUM_TRIED):
        began = time.monotonic()
        work()
        quickest = min(quickest, time.monotonic() - began)
        if quickest > SHORT:
            break
    return quickest


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
    screen, widths = table_screen(), _widths(cells)
    if not as_json:
        screen.print(_table(widths, show_header=True))
    total, largest, listed = 0.0, 0.0, []
    for name, members in cells.items():
        size = measure(members[0], options)
        total += (size.seconds or 0.0) * len(members)
        largest = max(largest, size.megabytes)
        listed.append({"name": name, "runs": [member.name for member in members], **size._asdict()})
        if as_json:
            continue
        row = _table(widths)
        row.add_row(
            escape(name),
            str(len(members)),
            f"{size.rounds:,}",
            f"{size.parameters:,}",
            f"{size.megabytes:.1f} MB",
            "unknown" if size.seconds is None else _words(size.seconds),
        )
        screen.print(row)  # at once: the next may take a while to measure
    side_by_side = num_jobs(max(len(left), 1), jobs) if options.device == "cpu" else None
    if as_json:
        finished = [run.name for run in runs if run not in left]
        plan = {"directory": str(path), "cells": listed, "finished": finished, "jobs": side_by_side}
        say(json.dumps(plan))
        return
    beside = "" if side_by_side is None else f", {side_by_side} side by side"
    say(f"{len(left)} runs in {path}{beside} ({len(runs) - len(left)} are finished already).")
    if side_by_side is not None and left:
        say(
            f"About {_words(total / side_by_side)} and {largest * side_by_side:.0f} MB of data and server models; what "
            "training itself needs comes on top. Times are guessed by the first rounds, or by a step of a long one."
        )


def _widths(cells: Mapping[str, Sequence[RunSpec]]) -> list[int]:
    """How wide the columns are, before it is known what will stand in them."""
    steps = [f"{members[0].cell.steps:,}" for members in cells.values()]  # no run has more rounds
    likely = [*cells], ["999"], steps, ["10,000,000"], ["1000.0 MB"], ["unknown"]
    return [max(map(len, (name, *words))) for name, words in zip(COLUMNS, likely, strict=True)]


def _table(widths: Sequence[int], show_header: bool = False) -> Table:
    """Some lines of the table; those of all are one below the other."""
    table = Table(box=None, pad_edge=False, show_header=show_header)
    for name, width in zip(COLUMNS, widths, strict=True):
        table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True, min_width=width)
    return table


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
