"""Draws what jumps.py wrote, for light and for dark pages: a row for each setting, a line for each seed.

python tools/jumps_figure.py results/jumps/pfedhn-pc-cifar100-50.jsonl docs/figures/jumps-50.svg
python tools/jumps_figure.py results/jumps/pfedhn-cifar100-10.jsonl docs/figures/jumps-10.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pfedhn.report.figures import to_svg

COLUMNS = {
    "validation": "validation accuracy, %",
    "velocity": "server's velocity (norm)",
    "head.lenet": "hypernetwork's head (norm)",
}
TICKS = {"velocity": (0.1, 0.3, 1, 3, 10), "head.lenet": (20, 50, 100, 200)}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
FIRST_STEP = 150  # before it everything rises


def figure_of(source: Path) -> Figure:
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in source.read_text().splitlines():
        run = json.loads(line)
        runs.setdefault(run["with"], []).append(run)
    figure = Figure(figsize=(10, 0.8 + 2.3 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), len(COLUMNS), sharex=True, sharey="col", squeeze=False)
    for axes_of_row, (name, found) in zip(grid, runs.items(), strict=True):
        for axes, (key, label) in zip(axes_of_row, COLUMNS.items(), strict=True):
            for color, run in zip(COLORS, found, strict=False):
                scale = 100 if key == "validation" else 1
                points = [(step, scale * value) for step, value in zip(run["step"], run[key], strict=True)]
                shown = [point for point in points if point[0] >= FIRST_STEP]
                seed = run["run"].rpartition("-")[2].replace("seed", "seed ")
                axes.plot(*zip(*shown, strict=True), color=color, linewidth=1.2, label=seed)
            if key != "validation":
                axes.set_yscale("log")
                axes.set_yticks(ticks := TICKS[key], [f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
            axes.grid(color="#E6E6E6", linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=0, labelsize=9)
            axes.set_title(label if axes in grid[0] else "", loc="left", fontsize=10)
        axes_of_row[0].set_ylabel(name.replace("_", " ").replace("=", " "), fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("communication steps", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def main(source: Path, target: Path) -> None:
    target.write_bytes(to_svg(figure_of(source)))
    target.with_stem(f"{target.stem}-dark").write_bytes(to_svg(figure_of(source), is_dark=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
