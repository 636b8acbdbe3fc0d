"""How hard were the splits of the runs on CIFAR-10 and MNIST? A client tells two classes apart, and pairs differ.

    python tools/class_pairs.py

Reads their tables beside it, makes each run's split again (the data sets must be cached), and compares three things:
our accuracy, what the same accuracy per pair gives when every pair is as frequent as the rule makes it on average, and
how far that varies from one draw of a split to the next.
"""

from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy

from pfedhn.experiments.build import build_federation
from pfedhn.report.results import read_file

TABLES = ("table1-cifar10", "table1-mnist")
METHODS = ("pfedhn", "pfedhn-pc")
NUM_CLASSES, NUM_DRAWS = 10, 2_000


def main() -> None:
    print(
        "| data set | method | clients | ours | with pairs as frequent as on average | deviation from split to split |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for table in TABLES:
        compare(table)


def compare(table: str) -> None:
    (runs,) = read_file(Path(__file__).resolve().parents[1] / "results" / f"{table}.jsonl")
    accuracies: dict[tuple[str, int], dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    ours: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, result in runs.results.items():
        cell = runs.experiment.find(name).cell
        if cell.method not in METHODS:
            continue
        federation = build_federation(cell, result.seed)
        test, key = result.test, (cell.method, cell.clients)
        ours[key].append(100 * test.score)
        for client, (correct, count) in enumerate(zip(test.clients or (), test.client_examples or (), strict=True)):
            pair = tuple(sorted(set(federation.y[federation.splits["train"].of(client)].tolist())))
            accuracies[key][pair].append(100 * correct / count)
    pairs = list(combinations(range(NUM_CLASSES), 2))
    generator = numpy.random.default_rng(0)
    for (method, clients), by_pair in accuracies.items():
        if clients < len(pairs):
            continue  # too few clients to know every pair
        nearest = accuracies[method, 100] | by_pair
        known = {pair: float(numpy.mean(nearest[pair])) for pair in pairs}
        draws = [
            numpy.mean(
                [
                    known[min(a, b), max(a, b)]
                    for _ in range(clients // 5)
                    for a, b in generator.permutation(NUM_CLASSES).reshape(-1, 2)
                ]
            )
            for _ in range(NUM_DRAWS)
        ]
        columns = numpy.mean(ours[method, clients]), numpy.mean(list(known.values())), numpy.std(draws)
        print(
            f"| {table.removeprefix('table1-')} | {method} | {clients} | "
            + " | ".join(f"{value:.2f}" for value in columns)
            + " |"
        )


if __name__ == "__main__":
    main()
