"""`pfedhn run --dry-run`: the runs of an experiment and their sizes."""

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from pfedhn.engine.memory import bytes_of_shared
from pfedhn.engine.simulate import Simulation
from pfedhn.experiments.directory import num_jobs
from pfedhn.experiments.preflight import Preflight, build_each_cell
from pfedhn.experiments.spec import RunSpec
from pfedhn.system.screen import say, table_screen


def print_dry_run(ready: Preflight, as_json: bool) -> None:
    """Say what `run` would do; nothing is written."""
    path, left = ready.directory, ready.waiting
    by_cell: dict[str, list[RunSpec]] = {}
    for run in left:
        by_cell.setdefault(run.cell_name, []).append(run)
    cells: list[dict[str, Any]] = []

    def measure(run: RunSpec, simulation: Simulation) -> None:
        federation, models = simulation.federation, simulation.models.values()
        held = federation.x.nbytes + federation.y.nbytes + bytes_of_shared(simulation)
        parameters = max(sum(shape.numel() for shape in model.shapes.values()) for model in models)
        sizes = {"rounds": simulation.num_rounds, "parameters": parameters, "megabytes": held / 2**20}
        cells.append({"name": run.cell_name, "runs": [member.name for member in by_cell[run.cell_name]], **sizes})

    build_each_cell(left, ready.options, measure)
    side_by_side = num_jobs(max(len(left), 1), ready.jobs) if ready.options.device == "cpu" else None
    if as_json:
        finished = list(ready.finished)
        say(json.dumps({"directory": str(path), "cells": cells, "finished": finished, "jobs": side_by_side}))
        return
    table = Table("cell", box=None, pad_edge=False)
    for heading in ("seeds", "rounds", "parameters", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in cells:
        numbers = f"{len(cell['runs'])}", f"{cell['rounds']:,}", f"{cell['parameters']:,}"
        table.add_row(escape(cell["name"]), *numbers, f"{cell['megabytes']:.1f} MB")
    table_screen().print(table)
    beside = "" if side_by_side is None else f", {side_by_side} side by side"
    say(f"{len(left)} runs in {path}{beside} ({len(ready.finished)} are finished already).")
    if side_by_side is not None and left:
        largest = max(cell["megabytes"] for cell in cells)
        say(
            f"About {largest * side_by_side:.0f} MB hold data and server models; training needs more memory. A run "
            "shows the time it has left."
        )
