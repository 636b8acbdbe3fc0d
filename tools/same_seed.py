"""Runs that were made more than once, of the same settings and seed: until which step are they the same to the bit?

    python tools/same_seed.py DIRECTORY ... > results/checks/same-seed-twice.jsonl

DIRECTORY: of `pfedhn run` or `pfedhn tune`; below it, every folder with metrics is a run. The validation loss and each
client's number of correct examples are compared, at every evaluation that two runs have in common.
"""

import itertools
import json
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

Scores = dict[int, Any]


def read(folder: Path) -> tuple[str, int, Scores]:
    """What makes a run the same as another, its steps, and its scores by step."""
    spec = tomllib.loads((folder / "spec.toml").read_text())
    steps = spec["steps"]
    same = {name: value for name, value in spec.items() if name not in ("name", "steps", "threads")}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    scores = {line["step"]: (line["validation"]["loss"], line["validation"].get("clients")) for line in lines}
    return json.dumps(same, sort_keys=True), steps, scores


def main(directories: list[Path]) -> None:
    runs: dict[str, list[tuple[Path, int, Scores]]] = defaultdict(list)
    for folder in sorted(file.parent for directory in directories for file in directory.rglob("metrics.jsonl")):
        key, steps, scores = read(folder)
        runs[key].append((folder, steps, scores))
    for alike in runs.values():
        for (one, steps, left), (other, other_steps, right) in itertools.combinations(alike, 2):
            # The last evaluation of a shorter run may come between two of a longer one.
            common = sorted(step for step in left.keys() & right.keys() if step < min(steps, other_steps))
            parted = next((step for step in common if left[step] != right[step]), None)
            print(
                json.dumps({"one": str(one), "other": str(other), "compared": common[-1], "first_difference": parted})
            )


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
