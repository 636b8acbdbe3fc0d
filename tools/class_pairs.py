"""How hard were the splits of the runs on CIFAR-10 and MNIST? A client tells two classes apart, and pairs differ.

    python tools/class_pairs.py

Reads their tables beside it, makes each run's split again (the data sets must be cached), and compares three things:
our accuracy, what the same accuracy per pair gives when every pair is as frequent as the rule makes it on average, and
how far that varies from one draw of a split to the next. Then, for Table 2: how hard the pairs of each size's clients
are, by the accuracy that pFedHN has on them in Table 1.
"""

from collections import defaultdict
from collections.abc import Collection
from itertools import combinations
from pathlib import Path

import numpy

from pfedhn.experiments.data import build_federation
from pfedhn.experiments.spec import Cell
from pfedhn.report.results import Runs, read_file
from pfedhn.storage.schema import Result

TABLES = ("table1-cifar10", "table1-mnist")
METHODS = ("pfedhn", "pfedhn-pc")
NUM_CLASSES, NUM_DRAWS = 10, 2_000


Pair = tuple[int, ...]
ByPair = dict[Pair, list[float]]


def main() -> None:
    print(
        "| data set | method | clients | ours | with pairs as frequent as on average | deviation from split to split |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for table in TABLES:
        compare(table)
    print("\n| Table 2, CIFAR-10, clients of size | ours | their pairs in Table 1 | all pairs |")
    print("|---|---:|---:|---:|")
    compare_sizes()


def read(name: str) -> Runs:
    (runs,) = read_file(Path(__file__).resolve().parents[1] / "results" / f"{name}.jsonl")
    return runs


def clients_of(cell: Cell, result: Result) -> list[tuple[Pair, float]]:
    """The classes of each client of a run, and its accuracy."""
    federation, test = build_federation(cell, result.seed), result.test
    scores = zip(test.clients or (), test.client_examples or (), strict=True)
    return [
        (tuple(sorted(set(federation.y[federation.splits["train"].of(client)].tolist()))), 100 * correct / count)
        for client, (correct, count) in enumerate(scores)
    ]


def by_pair(runs: Runs, methods: Collection[str]) -> dict[tuple[str, int], ByPair]:
    """The accuracies on each pair of classes, by method and number of clients."""
    accuracies: dict[tuple[str, int], ByPair] = defaultdict(lambda: defaultdict(list))
    for name, result in runs.results.items():
        cell = runs.experiment.find(name).cell
        if cell.method in methods:
            for pair, accuracy in clients_of(cell, result):
                accuracies[cell.method, cell.clients][pair].append(accuracy)
    return accuracies


def compare(table: str) -> None:
    runs = read(table)
    accuracies = by_pair(runs, METHODS)
    ours: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, result in runs.results.items():
        cell = runs.experiment.find(name).cell
        ours[cell.method, cell.clients].append(100 * result.test.score)
    pairs = list(combinations(range(NUM_CLASSES), 2))
    generator = numpy.random.default_rng(0)
    for (method, clients), found in accuracies.items():
        if clients < len(pairs):
            continue  # too few clients to know every pair
        nearest = accuracies[method, 100] | found
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


def compare_sizes() -> None:
    """pFedHN's clients in Table 2, whose first third is small."""
    accuracies = by_pair(read("table1-cifar10"), ["pfedhn"])
    merged: ByPair = defaultdict(list)
    for clients in (50, 100):
        for pair, values in accuracies["pfedhn", clients].items():
            merged[pair] += values
    known = {pair: float(numpy.mean(values)) for pair, values in merged.items()}
    every, runs = numpy.mean(list(known.values())), read("table2")
    for name, result in runs.results.items():
        cell = runs.experiment.find(name).cell
        if (cell.method, cell.dataset, cell.resize_every) != ("pfedhn", "cifar10", None):
            continue
        table = numpy.array([(accuracy, known[pair]) for pair, accuracy in clients_of(cell, result)])
        for size, (ours, theirs) in zip("SML", table.reshape(3, -1, 2).mean(1), strict=True):
            print(f"| {size}, seed {result.seed} | {ours:.2f} | {theirs:.2f} | {every:.2f} |")


if __name__ == "__main__":
    main()
