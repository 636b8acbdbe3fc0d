"""Runs that were made more than once, of the same settings and seed: until which step are they the same to the bit?

    python tools/same_seed.py DIRECTORY ... > results/checks/same-seed-twice.jsonl

DIRECTORY: of `pfedhn run` or `pfedhn tune`; below it, every folder with metrics is a run. The validation loss and each
client's number of correct examples are compared, at every evaluation that two runs have in common.
"""

import itertools
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfedhn.storage.directory import read_history, read_spec
from pfedhn.storage.schema import to_json

Scores = dict[int, Any]


def read(folder: Path) -> tuple[str, int, Scores]:
    """What makes a run the same as another, its steps, and its scores by step."""
    spec = read_spec(folder)
    if spec is None:
        raise SystemExit(f"error: {folder} holds no run.")
    steps, anybody = spec.schedule.steps, replace(spec.schedule, steps=0)
    same = to_json([spec.seed, spec.method, anybody, spec.digests, {**(spec.cell or {}), "steps": 0}])
    scores = {moment.step: (moment.validation.loss, moment.validation.clients) for moment in read_history(folder)}
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
