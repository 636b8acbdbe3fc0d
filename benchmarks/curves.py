"""How the cost of a CPU round depends on local steps, size of the target and runs at the same time.

    python benchmarks/curves.py --out benchmarks/results/cpu-curves.jsonl

One thing is varied at a time, from the paper's CIFAR-10 run, and measured in turns with the textbook. The least of
several turns counts: a neighbor only ever adds to it. The GPU's lines come from `benchmarks/gpu.py --only sweep`, the
number of clients from `pfedhn bench`. `benchmarks/plots.py` draws them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pfedhn.bench.measure import SIZES, Variant, Worker, Workload, in_turns, together
from pfedhn.storage.schema import to_json
from pfedhn.system.environment import environment

VARIANTS = (Variant("textbook"), Variant("traced"))


def line(variant: str, milliseconds: float, size: str = "M", local_steps: int = 50, runs: int = 1) -> dict[str, Any]:
    return {
        "check": "time",
        "device": "cpu, 1 thread" if runs == 1 else f"cpu, {runs} processes of 1 thread",
        "program": variant,
        "target": f"lenet-{size}",
        "clients": 50,
        "runs": runs,
        "local_steps": local_steps,
        "ms_per_round_and_run": round(milliseconds, 3),
    }


def measure(size: str, local_steps: int, repeats: int) -> list[dict[str, Any]]:
    workload = Workload(local_steps=local_steps, num_kernels=SIZES[size])
    workers = [Worker.start(variant, workload, "cpu") for variant in VARIANTS]
    for worker in workers:
        worker.first()
    milliseconds = in_turns(workers, repeats, lambda text: None, pick=min)
    for worker in workers:
        worker.end()
    return [line(p.name, taken, size, local_steps) for p, taken in zip(VARIANTS, milliseconds, strict=True)]


def measure_runs(counts: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Runs at the same time, each in a process of one thread."""
    workers = [Worker.start(Variant("traced"), Workload(), "cpu") for _ in range(max(counts))]
    for worker in workers:
        worker.first()
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats + 1):
        for count in counts:
            times[count].append(together(workers[:count]))
    for worker in workers:
        worker.end()
    return [line("traced", min(taken[1:]), runs=count) for count, taken in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    cases = [("M", steps) for steps in (1, 10, 25, 50, 100)] + [("S", 50), ("L", 50)]
    records = []
    for case in cases:
        print(*case, file=sys.stderr)
        records += measure(*case, options.repeats)
    records += measure_runs((1, 2, 4), options.repeats)
    versions = to_json(environment("cpu"))
    options.out.write_text("".join(json.dumps(record | {"versions": versions}) + "\n" for record in records))


if __name__ == "__main__":
    main()
