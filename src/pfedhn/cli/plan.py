"""`pfedhn run --dry-run`: the runs of an experiment and their sizes."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from pfedhn.engine.memory import bytes_of_shared
from pfedhn.engine.simulate import Simulation
from pfedhn.experiments.directory import num_jobs
from pfedhn.experiments.preflight import Preflight, build_each_cell
from pfedhn.experiments.spec import RunSpec
from pfedhn.system.screen import say, table_screen

COLUMNS = ("cell", "seeds", "rounds", "parameters", "memory")


class Size(NamedTuple):
    """The size of one run of a cell."""

    rounds: int
    parameters: int  # of the largest target network
    megabytes: float  # of examples and of the server's model


def measure(simulation: Simulation) -> Size:
    federation = simulation.federation
    held = federation.x.nbytes + federation.y.nbytes + bytes_of_shared(simulation)
    parameters = max(sum(shape.numel() for shape in model.shapes.values()) for model in simulation.models.values())
    return Size(simulation.num_rounds, parameters, held / 2**20)


def print_plan(ready: Preflight, as_json: bool) -> None:
    """Say what `run` would do; nothing is written."""
    path, left = ready.directory, ready.waiting
    cells: dict[str, list[RunSpec]] = {}
    for run in left:
        cells.setdefault(run.cell_name, []).append(run)
    screen, widths = table_screen(), _widths(cells)
    if not as_json:
        screen.print(_table(widths, show_header=True))
    sizes: dict[str, Size] = {}

    def show(run: RunSpec, simulation: Simulation) -> None:
        name, size = run.cell_name, measure(simulation)
        sizes[name] = size
        if as_json:
            return
        row = _table(widths)
        row.add_row(
            escape(name),
            str(len(cells[name])),
            f"{size.rounds:,}",
            f"{size.parameters:,}",
            f"{size.megabytes:.1f} MB",
        )
        screen.print(row)  # at once: the next cell may take a while to build

    build_each_cell(left, ready.options, show)
    side_by_side = num_jobs(max(len(left), 1), ready.jobs) if ready.options.device == "cpu" else None
    if as_json:
        listed = [
            {"name": name, "runs": [run.name for run in cells[name]], **size._asdict()} for name, size in sizes.items()
        ]
        say(
            json.dumps(
                {"directory": str(path), "cells": listed, "finished": list(ready.finished), "jobs": side_by_side}
            )
        )
        return
    beside = "" if side_by_side is None else f", {side_by_side} side by side"
    say(f"{len(left)} runs in {path}{beside} ({len(ready.finished)} are finished already).")
    if side_by_side is not None and left:
        largest = max(size.megabytes for size in sizes.values())
        say(
            f"About {largest * side_by_side:.0f} MB hold data and server models; training needs more "
            "memory. A run shows the time it has left."
        )


def _widths(cells: Mapping[str, Sequence[RunSpec]]) -> list[int]:
    """Guess how wide each column must be before its cells are known."""
    steps = [f"{members[0].cell.steps:,}" for members in cells.values()]  # no run has more rounds
    likely = [*cells], ["999"], steps, ["10,000,000"], ["1000.0 MB"]
    return [max(map(len, (name, *words))) for name, words in zip(COLUMNS, likely, strict=True)]


def _table(widths: Sequence[int], show_header: bool = False) -> Table:
    """Some lines of the table; those of all are one below the other."""
    table = Table(box=None, pad_edge=False, show_header=show_header)
    for name, width in zip(COLUMNS, widths, strict=True):
        table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True, min_width=width)
    return table
