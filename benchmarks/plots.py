"""Draw the curves of docs/performance.md from what was measured: every line of benchmarks/results/*.jsonl.

    python benchmarks/plots.py

There is one file for light pages and one for dark ones. Of equal measurements the last one counts, files in the order
of their names.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from pfedhn.report.figures import to_svg

RESULTS = Path(__file__).parent / "results"
FILE = Path(__file__).parents[1] / "docs" / "figures" / "cost.svg"
WEIGHTS = {"lenet-S": 62_958, "lenet-M": 121_182, "lenet-L": 256_830}
TEXTBOOK, CPU, GPU, GPU_16 = "textbook, CPU", "CPU", "GPU", "GPU, 16 runs at once"
COLORS = {TEXTBOOK: "#808080", CPU: "#1f6f8b", GPU: "#c1502e", GPU_16: "#d99a1c"}

Record = dict[str, Any]
Points = dict[float, float]


def read() -> list[Record]:
    lines = [line for file in sorted(RESULTS.glob("*.jsonl")) for line in file.read_text().splitlines()]
    records: list[Record] = [json.loads(line) for line in lines]
    for record in records:
        record["kind"] = str(record.get("device", ""))[:4].rstrip(",:")
        if record.get("check") == "time":  # lines from before the sweeps say less
            record["target"] = "lenet-M" if record["target"] == "lenet" else record["target"]
            record.setdefault("local_steps", 50)
            record.setdefault("program", "captured")
    return records


def points(records: list[Record], over: str, value: str = "ms_per_round_and_run", **wanted: Any) -> Points:
    """{what is varied: milliseconds} of the records that agree with `wanted`."""
    found = [r for r in records if value in r and over in r and all(r.get(k) == v for k, v in wanted.items())]
    found = [r for r in found if over != "target" or r[over] in WEIGHTS]
    latest = {float(WEIGHTS.get(r[over]) or r[over]): float(r[value]) for r in found}
    return dict(sorted(latest.items()))


def curves(records: list[Record], over: str) -> dict[str, Points]:
    """The round of the paper's CIFAR-10 runs, with one thing varied."""
    usual: dict[str, Any] = {"check": "time", "target": "lenet-M", "local_steps": 50, "runs": 1, "clients": 50}
    usual = {name: value for name, value in usual.items() if name != over}
    named = {
        TEXTBOOK: points(records, over, kind="cpu", program="textbook", **usual),
        CPU: points(records, over, kind="cpu", program="traced", **usual),
        GPU: points(records, over, kind="cuda", method="pfedhn", **usual),
        GPU_16: points(records, over, kind="cuda", method="pfedhn", **usual | {"runs": 16}) if over != "runs" else {},
    }
    return {name: values for name, values in named.items() if len(values) > 1}


def draw(axes: Axes, named: dict[str, Points], title: str, x_label: str, is_flat: bool = False) -> None:
    for name, values in named.items():
        axes.plot(list(values), list(values.values()), marker="o", markersize=3.5, label=name, color=COLORS[name])
    ticks = sorted({x for values in named.values() for x in values})
    tops = [max(values.values()) for values in named.values() if values]
    if is_flat:
        axes.set_xscale("log")
        axes.set_ylim(0, 2 * max(tops, default=1))
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(named) > 1:
        axes.legend(fontsize=8, frameon=False)


def figure_of(records: list[Record]) -> Figure:
    figure = Figure(figsize=(8.4, 6.0), layout="constrained")
    (clients, steps), (runs, sizes) = figure.subplots(2, 2)
    flat = points(records, "clients", "ms_per_round", workload="one local step", program="traced", kind="cpu")
    draw(clients, {CPU: flat}, "Clients (one local step of an MLP)", "clients in the federation", is_flat=True)
    draw(steps, curves(records, "local_steps"), "Local steps", "local steps per round")
    draw(runs, curves(records, "runs"), "Runs at the same time, each one's share", "runs (CPU: processes on 2 cores)")
    draw(sizes, curves(records, "target"), "Size of the target network", "weights of LeNet S, M, L")
    figure.supylabel("milliseconds per round", fontsize=9)
    return figure


def main() -> None:
    for file, is_dark in ((FILE, False), (FILE.with_stem(f"{FILE.stem}-dark"), True)):
        file.write_bytes(to_svg(figure_of(read()), is_dark))
        print(file)


if __name__ == "__main__":
    main()
