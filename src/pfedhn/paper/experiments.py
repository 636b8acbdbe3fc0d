"""The experiments that come with the package: the demo, and the tables of the paper with its published numbers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.experiments.rates import apply_rates, rates_for, read_rates
from pfedhn.experiments.spec import Cell, Experiment
from pfedhn.paper.robustness import ROBUSTNESS, robustness_cifar10

RATES_FILE = Path(__file__).with_name("rates.toml")  # what `pfedhn tune` chose for the experiments below
PACKAGE_RATES = read_rates(RATES_FILE)  # read once: a dozen experiments take theirs
RATES_TAKEN_FROM = {"table1-mnist": "table1-cifar10"}  # the paper says of no tuning on MNIST


def with_rates_of(experiment: Experiment, file: Path) -> Experiment:
    """Apply the learning rates that a file has for an experiment; on MNIST, methods without any take CIFAR-10's."""
    return apply_rates(experiment, rates_for(experiment.name, file, RATES_TAKEN_FROM.get(experiment.name)))


def _tuned(experiment: Experiment) -> Experiment:
    """With the package's own rates; an experiment that was not tuned keeps the methods' defaults."""
    names = (RATES_TAKEN_FROM.get(experiment.name), experiment.name)  # its own rates win
    rates = {method: part for name in names for method, part in PACKAGE_RATES.get(name or "", {}).items()}
    return apply_rates(experiment, rates) if rates else experiment


# What the demo and the experiments beside it share.
DIGITS = Cell(
    clients=50,
    partition={"rule": "by_classes", "classes_per_client": 3},
    split=(0.5, 0.2, 0.3),
    model="mlp-32",
    batch_size=16,
    settings={"local_steps": 20},
)


def digits_cells(rates: Mapping[str, Mapping[str, float]], **fields: Any) -> tuple[Cell, ...]:
    """A cell for each method that has rates."""
    return tuple(
        replace(DIGITS, method=method, settings={**DIGITS.settings, **own}, **fields) for method, own in rates.items()
    )


# Chosen on validation at the demo's 700 steps, on the splits of seeds that it does not use (10 to 12): every method's
# rates, by `pfedhn tune` on the paper's grids, pFedHN+ on 16 pairs of its own (docs/quickstart.md).
DEMO_RATES = {
    "local": {"local_lr": 0.01},
    "fedavg": {"local_lr": 0.05},
    "fedper": {"local_lr": 0.05},
    "pfedhn-plus": {"lr": 0.001, "local_lr": 0.05},
}
DEMO = _tuned(
    Experiment(
        name="demo",
        title="Handwritten digits: 50 clients, each with 3 of the 10 digits and few examples",
        cells=digits_cells(DEMO_RATES, steps=700, evaluate_every=50),
    )
)

# What fewer bits on the wire cost, and not to wait for cohorts: the demo's clients and the paper's pFedHN, in more
# steps. Chosen on validation, on splits of other seeds: every rate on the paper's grids at 600 steps (seeds 10 to 12),
# pFedHN's and FedAvg's two best again at 2,000 (seeds 10 and 11).
LONGER_RATES = {
    "fedavg": {"local_lr": 0.05},
    "fedper": {"local_lr": 0.05},
    "pfedhn": {"lr": 0.01, "local_lr": 0.005},
}
WIRES = (("full", "full"), ("half", "full"), ("8-bit", "full"), ("half", "half"), ("8-bit", "8-bit"))
COMPRESSION = Experiment(
    name="compression",
    title="Handwritten digits: 50 clients whose updates and weights cross the wire in fewer bits",
    cells=tuple(
        replace(cell, upload=upload, download=download)
        for cell in digits_cells(LONGER_RATES, steps=2_000)
        if cell.method != "fedper"
        for upload, download in WIRES
    ),
)
STALENESS = Experiment(
    name="staleness",
    title="Handwritten digits: 50 clients, several at work at once on weights that grow old meanwhile",
    cells=tuple(
        replace(cell, in_flight=in_flight)
        for cell in digits_cells(LONGER_RATES, steps=1_000, evaluate_every=50)
        for in_flight in (1, 4, 16)
    ),
)


def with_privacy(cell: Cell, noises: Mapping[float, float], **settings: Any) -> tuple[Cell, ...]:
    """A cell with privacy of single examples: for each budget the noise with which it lasts the run, on average."""
    cells = []
    for epsilon, noise in noises.items():
        privacy = {"level": "example", "clip": 1.0, "noise": noise, "epsilon": epsilon}
        cells.append(replace(cell, privacy=privacy, settings={**cell.settings, **settings}))
    return tuple(cells)


# What privacy of single examples costs: ten clients, that have 108 training examples each. Every method has rates of
# its own with privacy and without, chosen on validation among a few (seed 10; with privacy at epsilon 8).
NOISES = {8.0: 6.04, 4.0: 10.91, 2.0: 20.2, 1.0: 38.0}  # a client is drawn 50 times, and takes 5 steps each time
TEN = Cell(
    clients=10,
    partition={"rule": "by_classes", "classes_per_client": 5},
    split=(0.6, 0.15, 0.25),
    steps=500,
    batch_size=64,
    evaluate_every=50,
    settings={"local_steps": 20},
)
PRIVACY = Experiment(
    name="privacy",
    title="Handwritten digits: 10 clients that train with privacy of single examples (DP-SGD)",
    cells=(
        replace(TEN, method="local", settings={**TEN.settings, "local_lr": 0.01}),
        replace(TEN, method="fedavg", settings={**TEN.settings, "local_lr": 0.05}),
        *with_privacy(replace(TEN, method="fedavg"), NOISES, local_steps=5, local_lr=0.1),
        replace(TEN, method="pfedhn", settings={**TEN.settings, "lr": 0.01, "local_lr": 0.005}),
        *with_privacy(replace(TEN, method="pfedhn"), NOISES, local_steps=5, lr=0.01, local_lr=0.05),
    ),
)
# The same on CIFAR-10, with about 800 training examples a client, rates as without privacy but for fewer local steps.
CIFAR_NOISES = {8.0: 1.80, 4.0: 3.07, 2.0: 5.54, 1.0: 10.4}  # drawn 100 times, 10 steps each time

# Table 1 of the paper: test accuracy, mean and deviation over three seeds; columns are numbers of clients.
CIFAR10 = {
    "local": {10: (86.46, 4.02), 50: (68.11, 7.39), 100: (59.32, 5.59)},
    "fedavg": {10: (51.42, 2.41), 50: (47.79, 4.48), 100: (44.12, 3.10)},
    "per-fedavg": {10: (76.65, 4.84), 50: (83.03, 0.25), 100: (80.19, 1.99)},
    "fedper": {10: (87.27, 1.39), 50: (83.39, 0.47), 100: (80.99, 0.71)},
    "pfedme": {10: (87.69, 1.93), 50: (86.09, 0.32), 100: (85.23, 0.58)},
    "lg-fedavg": {10: (89.11, 2.66), 50: (85.19, 0.58), 100: (81.49, 1.56)},
    "pfedhn": {10: (90.83, 1.56), 50: (88.38, 0.29), 100: (87.97, 0.70)},
    "pfedhn-pc": {10: (92.47, 1.63), 50: (90.08, 0.63), 100: (88.09, 0.86)},
}
CIFAR100 = {
    "local": {10: (58.98, 1.38), 50: (19.98, 1.41), 100: (15.12, 0.58)},
    "fedavg": {10: (15.96, 0.55), 50: (15.71, 0.35), 100: (14.59, 0.40)},
    "per-fedavg": {10: (50.14, 1.06), 50: (45.89, 0.76), 100: (48.28, 0.70)},
    "fedper": {10: (55.76, 0.34), 50: (48.32, 1.46), 100: (42.08, 0.18)},
    "pfedme": {10: (51.97, 1.29), 50: (49.09, 1.10), 100: (45.57, 1.02)},
    "lg-fedavg": {10: (53.69, 1.42), 50: (53.16, 2.18), 100: (49.99, 3.13)},
    "pfedhn": {10: (65.74, 1.80), 50: (59.48, 0.67), 100: (53.24, 0.31)},
    "pfedhn-pc": {10: (68.15, 1.49), 50: (60.17, 1.63), 100: (52.40, 0.74)},
}
OMNIGLOT = {
    "local": {50: (65.97, 0.86)},
    "fedavg": {50: (41.61, 3.59)},
    "per-fedavg": {50: (76.46, 0.17)},
    "fedper": {50: (69.92, 3.12)},
    "pfedme": {50: (69.98, 0.28)},
    "lg-fedavg": {50: (72.99, 5.00)},
    "pfedhn": {50: (72.03, 1.08)},
    "pfedhn-pc": {50: (81.89, 0.15)},
}
MNIST = {
    "fedavg": {10: (96.22, 0.65), 50: (97.12, 0.07), 100: (96.99, 0.19)},
    "per-fedavg": {10: (97.72, 0.05), 50: (98.57, 0.07), 100: (98.75, 0.26)},
    "pfedme": {10: (99.40, 0.04), 50: (99.30, 0.13), 100: (99.12, 0.06)},
    "pfedhn": {10: (99.53, 0.16), 50: (99.28, 0.11), 100: (99.16, 0.19)},
}


# Methods that are not in the paper's tables: our stronger recipe, and baselines that came later or were left out.
BEYOND_THE_PAPER = (
    "pfedhn-plus",
    "pfedhn-plus-pc",
    "pfedhn-plus-ft",
    "pfedhn-plus-pc-ft",
    "pfedhn-shared",
    "fedavg-ft",
    "per-fedavg-hf",
    "ditto",
    "fedrep",
    "fedbabu",
    "fedala",
    "apfl",
)
# pFedHN-S on CIFAR-10 has the embeddings and the trunk of pFedHN+, chosen on validation with 50 clients, as rates are.
SHARED_AS_PLUS = {"embedding_scale": 0.1, "embedding_dim": "none", "num_hidden": 3}
OWN_HEADS = ("local", "fedper", "fedrep", "pfedhn-pc", "pfedhn-plus-pc", "pfedhn-plus-pc-ft")


def table1(name: str, title: str, numbers: Mapping[str, Mapping[int, tuple[float, float]]], common: Cell) -> Experiment:
    """The cells of one data set: 5,000 communication steps; LG-FedAvg 1,000 after FedAvg; Local 2,000 SGD steps."""
    cells = [_table1_cell(method, clients, common) for method, columns in numbers.items() for clients in columns]
    cells += [_table1_cell(method, clients, common) for method in BEYOND_THE_PAPER for clients in numbers["pfedhn"]]
    published = {
        f"{method}/{clients}": value for method, columns in numbers.items() for clients, value in columns.items()
    }
    return Experiment(name=name, title=title, cells=tuple(cells), published=published)


def _table1_cell(method: str, clients: int, common: Cell) -> Cell:
    settings = dict(common.settings) if issubclass(ALGORITHMS[method].algorithm, PFedHN) else {}
    if method == "pfedhn-shared" and common.dataset == "cifar10":
        settings = SHARED_AS_PLUS | settings
    cell = replace(common, method=method, clients=clients, settings=settings)
    if common.dataset == "omniglot" and method in OWN_HEADS:
        cell = replace(cell, labels="within-group")  # a head of the client's own need not know other alphabets
    if method == "local":
        # 40 rounds of 50 steps for everybody, each followed by an evaluation
        return replace(cell, steps=40 * clients, evaluate_every=min(clients, cell.evaluate_every))
    if method == "lg-fedavg":
        return replace(cell, steps=1_000, pretrain="fedavg")
    return cell


def _cifar(dataset: str, classes_per_client: int) -> Cell:
    return Cell(
        dataset=dataset,
        partition={"rule": "by_classes", "classes_per_client": classes_per_client},
        split=(0.8, 0.2, 0.0),
        model="lenet",
    )


# A ResNet in LeNet's place: the paper's clients, a fifth of its steps. Statistics are made anew before a model is used,
# since the layers under them change between a client's rounds. LeNet learns at the rates of Table 1. One rate for every
# ResNet: a grid for each method would take longer than the experiment.
ANEW = {"statistics_batches": 5}
LOW_RANK, CHUNKED = {"head": "low-rank"}, {"head": "chunked", "chunk_size": 10_000}
RESNET_RATE = {"local_lr": 0.01}
RESNET_STEPS = {"local_steps": 20}  # for both networks; the paper's 50 of a ResNet take 0.2 s on an H200
RESNET_CELLS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("pfedhn", "resnet18", {**LOW_RANK, **ANEW, **RESNET_RATE}),
    ("pfedhn", "resnet18", {**CHUNKED, **ANEW, **RESNET_RATE}),
    ("pfedhn-pc", "resnet18", {**LOW_RANK, **ANEW, **RESNET_RATE}),
    ("fedper", "resnet18", {**ANEW, **RESNET_RATE}),
    ("fedavg-ft", "resnet18", {**ANEW, **RESNET_RATE}),
    ("local", "resnet18", RESNET_RATE),
    *(
        (method, "lenet", PACKAGE_RATES["table1-cifar100"].get(method, {}))
        for method in ("pfedhn", "pfedhn-pc", "fedper", "fedavg-ft", "local")
    ),
)
RESNET = Experiment(
    name="resnet-cifar100",
    title="CIFAR-100, 50 clients with 10 classes each: ResNet-18 with BatchNorm, and LeNet at the same steps",
    cells=tuple(
        replace(
            _cifar("cifar100", 10),
            method=method,
            model=model,
            steps=1_000,
            evaluate_every=50,
            settings={**RESNET_STEPS, **settings},
        )
        for method, model, settings in RESNET_CELLS
    ),
    seeds=(0,),
)

# A ResNet learns half of the classes in one place; 50 clients adapt it to the other half, which it has never seen. It
# has half the width, and its stem halves the images, so that the runs of three seeds take minutes. One rate for every
# method, that of the backbone's own training: a ResNet takes long to start on a GPU, so that a grid takes longer.
ADAPTER_RATE = {"local_lr": 0.02}
BACKBONE = Experiment(
    name="backbone-cifar100",
    title="ResNet-18 of half the width on the first 50 classes of CIFAR-100, in one place",
    cells=(
        Cell(
            method="local",
            dataset="cifar100",
            clients=1,
            partition={"rule": "by_classes", "classes_per_client": 50, "last_class": 49},
            split=(0.9, 0.1, 0.0),
            model="pfedhn.models:ResNet",
            network={"width": 32, "stem_stride": 2},
            steps=80,  # rounds of 50 SGD steps: 22 epochs; without augmentation, more do not help
            batch_size=128,
            evaluate_every=5,
            settings={"local_lr": 0.02, "local_weight_decay": 5e-4},
        ),
    ),
    seeds=(0,),
)
ADAPTERS = Experiment(
    name="adapters-cifar100",
    title="The other 50 classes of CIFAR-100, 50 clients with 5 each: low-rank adapters of a frozen ResNet",
    cells=tuple(
        Cell(
            method=method,
            dataset="cifar100",
            clients=50,
            partition={"rule": "by_classes", "classes_per_client": 5, "first_class": 50},
            split=(0.8, 0.2, 0.0),
            model="pfedhn.experiments.adapters:adapted",
            network={"backbone": "runs/backbone-cifar100/local-cifar100-1-seed0", "rank": 4},
            steps=2_000,
            batch_size=32,
            evaluate_every=250,
            settings={"local_steps": 5, **ADAPTER_RATE, **settings},
        )
        for method, settings in (
            ("pfedhn", {**LOW_RANK, **ANEW}),
            ("pfedhn-pc", {**LOW_RANK, **ANEW}),
            ("fedavg", ANEW),
            ("fedavg-ft", ANEW),
            ("fedper", ANEW),
            ("local", {}),
        )
    ),
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: _tuned(experiment)
    for experiment in (
        DEMO,
        COMPRESSION,
        STALENESS,
        PRIVACY,
        ROBUSTNESS,
        table1("table1-cifar10", "Table 1, CIFAR-10: 2 classes per client", CIFAR10, _cifar("cifar10", 2)),
        table1("table1-cifar100", "Table 1, CIFAR-100: 10 classes per client", CIFAR100, _cifar("cifar100", 10)),
        table1(
            "table1-omniglot",
            "Table 1, Omniglot: an alphabet per client",
            OMNIGLOT,
            Cell(dataset="omniglot", partition={"rule": "by_group"}, stratify=True, model="omniglot"),
        ),
        table1(
            "table1-mnist",
            "Appendix C, MNIST: 2 classes per client",
            MNIST,
            Cell(
                dataset="mnist",
                partition={"rule": "by_classes", "classes_per_client": 2},
                split=(5 / 6, 1 / 6, 0.0),
                model="mlp-100",
                settings={"num_hidden": 1},
            ),
        ),
        RESNET,
        BACKBONE,
        ADAPTERS,
    )
}


_TABLE1 = {cell.method: cell for cell in EXPERIMENTS["table1-cifar10"].cells if cell.clients == 50}
EXPERIMENTS["privacy-cifar10"] = Experiment(
    name="privacy-cifar10",
    title="CIFAR-10: 50 clients that train with privacy of single examples (DP-SGD)",
    cells=tuple(
        cell
        for method in ("fedavg", "pfedhn")
        for cell in (_TABLE1[method], *with_privacy(_TABLE1[method], CIFAR_NOISES, local_steps=10))
    ),
)

EXPERIMENTS["robustness-cifar10"] = robustness_cifar10(
    {cell.method: cell for cell in EXPERIMENTS["table1-cifar10"].cells if cell.clients == 10}
)


def usual_cell(dataset: str) -> Cell:
    """A data set as the paper splits it; the digits, and one that is in no experiment, as the demo does."""
    if dataset == "omniglot":
        return Cell(
            dataset=dataset, clients=50, partition={"rule": "by_group"}, split=(0.7, 0.15, 0.15), model="omniglot"
        )
    cells = (cell for item in EXPERIMENTS.values() for cell in item.cells if cell.dataset == dataset)
    return next(cells, replace(DEMO.cells[0], dataset=dataset))


def table1_cell(dataset: str, method: str, clients: int) -> Cell:
    """A cell of Table 1, or the one with 50 clients with another number of clients."""
    cells = {cell.clients: cell for cell in EXPERIMENTS[f"table1-{dataset}"].cells if cell.method == method}
    return cells.get(clients) or replace(cells[50], clients=clients)
