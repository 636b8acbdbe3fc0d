"""Experiments: named sets of cells; each cell and seed is a run with a directory of its own.

A directory holds one experiment: `experiment.toml`, and a sub-folder per run with `spec.toml`, `metrics.jsonl`, checkpoints
and `result.json`. The same command on the same directory goes on where it stopped.
"""

import hashlib
import inspect
import json
import os
import platform
import shlex
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

import pfedhn.models as models
from pfedhn import datasets, keys, partition
from pfedhn.algorithm import Factory
from pfedhn.algorithms import ALGORITHMS
from pfedhn.checkpoint import write_atomically
from pfedhn.federation import Federation
from pfedhn.params import Params
from pfedhn.run import Run, RunError, build_algorithm, build_model, execute
from pfedhn.settings import SettingError, build, closest, fits, to_toml
from pfedhn.simulate import Progress, Schedule, Simulation

PARTITIONS: dict[str, Callable[..., partition.Partition]] = {
    "by_classes": partition.by_classes,
    "dirichlet": partition.dirichlet,
    "by_group": partition.by_group,
    "by_coarse_class": partition.by_coarse_class,
}
LENET_SIZES = {"lenet": 16, "lenet-s": 8, "lenet-m": 16, "lenet-l": 32}
Watch = Callable[[Progress, Run], None]


@dataclass(frozen=True)
class Cell:
    """One method on one federation; with a seed it is a run. The fields of an experiment file are these."""

    method: str = "pfedhn"
    dataset: str = "digits"
    clients: int = 50
    partition: Mapping[str, Any] = field(default_factory=lambda: {"rule": "by_classes", "classes_per_client": 5})
    split: tuple[float, float, float] = (0.7, 0.15, 0.15)
    stratify: bool = False
    data_seed: int | None = None  # of the split; the run's seed by default
    labels: Literal["global", "within-group"] = "global"
    model: str = "mlp-32"
    steps: int = 5_000
    cohort_size: int | None = None
    batch_size: int = 64
    evaluate_every: int = 30
    pretrain: str | None = None  # the method whose last model every client starts from
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method


@dataclass(frozen=True)
class Experiment:
    """A named set of cells, each run with every seed."""

    name: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    title: str = ""
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # "method/clients" -> mean, deviation

    def runs(self) -> dict[str, tuple[Cell, int]]:
        """Every run by the name of its folder."""
        short = [(cell.method, cell.dataset, cell.clients) for cell in self.cells]
        named = {}
        for cell in self.cells:
            name = f"{cell.method}-{cell.dataset}-{cell.clients}"
            if short.count((cell.method, cell.dataset, cell.clients)) > 1:
                name += "-" + cell_digest(cell)[:6]
            for seed in self.seeds:
                named[f"{name}-seed{seed}"] = (cell, seed)
        return named


def cell_digest(cell: Cell) -> str:
    return hashlib.sha256(json.dumps(asdict(cell), sort_keys=True).encode()).hexdigest()


def check(experiment: Experiment) -> None:
    """Refuse what could not run before anything is written."""
    if not experiment.cells:
        raise SettingError(f"the experiment {experiment.name!r} has no cells.")
    for cell in experiment.cells:
        build_algorithm(cell.method, cell.settings)
        if cell.dataset not in datasets.DATASETS:
            raise SettingError(f"there is no data set {cell.dataset!r}; {closest(cell.dataset, datasets.DATASETS)}")
        build_partition(cell)
        if cell.pretrain is not None and cell.pretrain not in ALGORITHMS:
            raise SettingError(f"pretrain names no method: {cell.pretrain!r}; {closest(cell.pretrain, ALGORITHMS)}")


def from_toml(path: Path) -> Experiment:
    """A user's own experiment; lists in scalar fields make a grid, `[methods.NAME]` holds what differs by method."""
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path} is not valid TOML: {error}.") from None
    return from_table(table, path.stem)


def from_table(table: Mapping[str, Any], name: str) -> Experiment:
    table = dict(table)
    seeds = table.pop("seeds", [0, 1, 2])
    if not isinstance(seeds, list) or not seeds or not all(fits(seed, int) for seed in seeds):
        raise SettingError(f"seeds = {seeds!r} does not fit; it must be a list of whole numbers.")
    heading = {key: table.pop(key, default) for key, default in (("name", name), ("title", ""))}
    by_method = table.pop("methods", {})
    if "cells" in table:
        cells = [build(Cell, cell, f"cell {number}") for number, cell in enumerate(table.pop("cells"))]
        if table:
            raise SettingError(f"beside `cells` stands {next(iter(table))!r}; a file has either cells or a grid.")
        return Experiment(heading["name"], tuple(cells), tuple(seeds), heading["title"])
    methods = table.pop("method", list(by_method) or ["pfedhn"])
    for method in by_method:
        if method not in ALGORITHMS:
            raise SettingError(f"[methods.{method}] names no method; {closest(method, ALGORITHMS)}")
    cells = []
    for method in methods if isinstance(methods, list) else [methods]:
        for point in _grid({"method": method} | table):
            cells.append(_with_values(build(Cell, point, name), by_method.get(method, {})))
    return Experiment(heading["name"], tuple(cells), tuple(seeds), heading["title"])


def _grid(table: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Every combination of the lists that stand where one value is meant."""
    single = {item.name for item in fields(Cell)} - {"split", "partition", "settings"}
    listed = next((key for key, value in table.items() if key in single and isinstance(value, list)), None)
    if listed is None:
        yield dict(table)
        return
    for value in table[listed]:
        yield from _grid({**table, listed: value})


def _with_values(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """A cell with some fields or method settings changed; "partition.alpha" reaches into a table."""
    names = [item.name for item in fields(Cell)]
    table = asdict(cell)
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if name in names:
            table[name] = {**table[name], **value} if isinstance(value, Mapping) else value
        elif rest and head in ("partition", "settings"):
            table[head] = {**table[head], rest: value}
        else:
            table["settings"] = {**table["settings"], name: value}
    return build(Cell, table, f"the {cell.method} cell")


def with_assignments(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """`--set`: a field of every cell, a setting of every method that has it, or "method.setting" for one method."""
    cells = list(experiment.cells)
    names = {item.name for item in fields(Cell)}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        reached = False
        for number, cell in enumerate(cells):
            target = rest if head in ALGORITHMS and rest else name
            if head in ALGORITHMS and rest and head != cell.method:
                continue
            is_field = target in names or target.partition(".")[0] in ("partition", "settings")
            if is_field or target in {item.name for item in fields(type(build_algorithm(cell.method)))}:  # type: ignore[arg-type]
                cells[number] = _with_values(cell, {target: value})
                reached = True
        if not reached:
            known = sorted(names | {f.name for cell in cells for f in fields(type(build_algorithm(cell.method)))})  # type: ignore[arg-type]
            raise SettingError(f"--set: no cell has a field {name!r}; {closest(name, known)}")
    return replace(experiment, cells=tuple(cells))


def select(experiment: Experiment, only: Sequence[str], seeds: Sequence[int] | None) -> list[str]:
    """`--only`: the names of the runs that match every field; a field given several times takes any of its values."""
    wanted: dict[str, list[str]] = {}
    for text in (part for entry in only for part in entry.split(",")):
        name, separator, value = text.partition("=")
        if not separator:
            raise SettingError(f"--only takes field=value, not {text!r}.")
        known = [item.name for item in fields(Cell)]
        if name not in known:
            raise SettingError(f"--only: there is no field {name!r}; {closest(name, known)}")
        wanted.setdefault(name, []).append(value)
    chosen = [
        name
        for name, (cell, seed) in replace(experiment, seeds=tuple(seeds or experiment.seeds)).runs().items()
        if all(str(getattr(cell, field)) in values for field, values in wanted.items())
    ]
    if not chosen:
        raise SettingError(f"--only {' '.join(only)} leaves no run of {experiment.name!r}.")
    return chosen


def build_partition(cell: Cell) -> partition.Partition:
    settings = dict(cell.partition)
    rule = settings.pop("rule", None)
    if rule not in PARTITIONS:
        raise SettingError(f"partition: there is no rule {rule!r}; {closest(str(rule), PARTITIONS)}")
    known = inspect.signature(PARTITIONS[rule]).parameters
    if "num_clients" in known:
        settings.setdefault("num_clients", cell.clients)
    for name in settings:
        if name not in known:
            raise SettingError(f"partition {rule} has no setting {name!r}; {closest(name, known)}")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if missing:
        raise SettingError(f"partition {rule} needs {', '.join(missing)}.")
    try:
        return PARTITIONS[rule](**settings)
    except TypeError as error:
        raise SettingError(f"partition {rule}: {error}.") from None


@lru_cache(maxsize=2)
def _dataset(name: str, data_dir: Path | None) -> datasets.Dataset:
    return datasets.load(name, data_dir)


def build_federation(cell: Cell, seed: int, data_dir: Path | None = None) -> Federation:
    data = _dataset(cell.dataset, data_dir)
    labels = data.y
    if cell.labels == "within-group":
        if data.within is None:
            raise SettingError(f"{cell.dataset} has no groups to number labels within; use labels = 'global'.")
        labels = data.within
    federation = Federation.from_arrays(
        data.x,
        data.y,
        build_partition(cell),
        split=cell.split,
        seed=seed if cell.data_seed is None else cell.data_seed,
        test=None if data.test_x is None or data.test_y is None else (data.test_x, data.test_y),
        groups=data.groups,
        coarse=data.coarse,
        test_coarse=data.test_coarse,
        stratify=cell.stratify,
    )
    return federation if labels is data.y else replace(federation, y=labels)


def build_factory(cell: Cell, federation: Federation) -> Factory:
    """A target network by name: lenet-s, lenet (m), lenet-l, omniglot, or mlp-32-16 for hidden layers of 32 and 16."""
    num_classes, shape = federation.num_classes or 1, federation.x.shape[1:]
    if cell.model in LENET_SIZES:
        return lambda: models.LeNet(num_classes, LENET_SIZES[cell.model], shape[0])
    if cell.model == "omniglot":
        return lambda: models.OmniglotNet(num_classes)
    kind, *hidden = cell.model.split("-")
    if kind == "mlp" and all(part.isdigit() for part in hidden):
        return lambda: models.MLP(int(numpy.prod(shape)), *map(int, hidden), num_classes)
    raise SettingError(
        f"there is no target network {cell.model!r}; {closest(cell.model, [*LENET_SIZES, 'omniglot', 'mlp-32'])}"
    )


def build_simulation(
    cell: Cell,
    seed: int,
    *,
    data_dir: Path | None = None,
    device: str = "cpu",
    executor: str = "auto",
    starts: Mapping[str, Params] | None = None,
) -> Simulation:
    federation = build_federation(cell, seed, data_dir).to(device)
    model = build_model(cell.model, build_factory(cell, federation), federation)
    algorithm = build_algorithm(cell.method, cell.settings).for_clients(federation.num_clients)
    size = min(algorithm.usual_cohort_size, federation.num_clients) if cell.cohort_size is None else cell.cohort_size
    schedule = Schedule(cell.steps, size, cell.batch_size, cell.evaluate_every)
    return Simulation(algorithm, {model.name: model}, federation, schedule, seed, executor, starts)


@dataclass(frozen=True)
class Directory:
    """The files of one experiment."""

    path: Path

    def open(self, experiment: Experiment, planned: Sequence[str]) -> None:
        """Claim the directory for an experiment, or refuse one that holds another."""
        check(experiment)
        content = asdict(experiment)
        file = self.path / "experiment.toml"
        before: list[str] = []
        if file.exists():
            stored, before = self.read()
            if asdict(stored) != content:
                raise RunError(
                    f"{self.path} holds another experiment ({stored.name!r}); "
                    "give another --out, or the command it was made with."
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise RunError(f"{self.path} is not empty and holds no experiment; give another --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        table = {**content, "planned": list(dict.fromkeys([*before, *planned]))}
        write_atomically(file, to_toml(table).encode())

    def read(self) -> tuple[Experiment, list[str]]:
        """The stored experiment and the runs that were asked for so far."""
        file = self.path / "experiment.toml"
        if not file.exists():
            raise RunError(
                f"{self.path} holds no experiment to go on with; `pfedhn run NAME --out {self.path}` starts one."
            )
        try:
            table = tomllib.loads(file.read_text())
            cells = tuple(build(Cell, cell, "stored cell") for cell in table["cells"])
            published = {name: tuple(value) for name, value in table.get("published", {}).items()}
            experiment = Experiment(table["name"], cells, tuple(table["seeds"]), table["title"], published)
        except (tomllib.TOMLDecodeError, KeyError, ValueError) as error:
            raise RunError(f"{file} is damaged ({error}); give another --out.") from None
        return experiment, table["planned"]

    def results(self) -> dict[str, dict[str, Any]]:
        """What finished runs reported, by run name."""
        found = {}
        for file in sorted(self.path.glob("*/result.json")):
            found[file.parent.name] = json.loads(file.read_text())
        return found


def run_one(
    directory: Path,
    experiment: Experiment,
    name: str,
    *,
    data_dir: Path | None = None,
    device: str = "cpu",
    executor: str = "auto",
    watch: Callable[[str, Simulation], Watch] | None = None,
    say: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
    command: str = "",
) -> dict[str, Any]:
    """One run to its end in its folder, and what it found; a finished run is only read."""
    all_runs = _runs_of_every_seed(experiment, name)
    cell, seed = all_runs[name]
    folder = directory / name
    result_file = folder / "result.json"
    if result_file.exists():
        stored: dict[str, Any] = json.loads(result_file.read_text())
        return stored
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"data_dir": data_dir, "device": device, "executor": executor}
    before: dict[str, Any] = {}
    starts = None
    if cell.pretrain is not None:
        before, starts = _pretrained(directory, experiment, cell, seed, options, watch, say, checkpoint_every)
    simulation = build_simulation(cell, seed, **options, starts=starts)
    write_atomically(folder / "spec.toml", to_toml({"name": name, "seed": seed, **asdict(cell)}).encode())
    run = execute(simulation, folder, watch(name, simulation) if watch else None, say, checkpoint_every)
    result = {
        "name": name,
        "experiment": experiment.name,
        "cell": asdict(cell),
        "seed": seed,
        **run.summary(),
        **({"pretrain": before} if before else {}),
        "unused_rows": dict(simulation.federation.unused),
        "partition_sha256": partition_digest(simulation.federation),
        "command": command,
        "environment": environment(device),
    }
    write_atomically(result_file, json.dumps(result, indent=1).encode())
    return result


def _runs_of_every_seed(experiment: Experiment, name: str) -> dict[str, tuple[Cell, int]]:
    """The experiment's runs, and the one named even if its seed was given on the command line."""
    seed = int(name.rpartition("-seed")[2])
    return replace(experiment, seeds=tuple(dict.fromkeys([*experiment.seeds, seed]))).runs()


def _pretrained(
    directory: Path,
    experiment: Experiment,
    cell: Cell,
    seed: int,
    options: Mapping[str, Any],
    watch: Callable[[str, Simulation], Watch] | None,
    say: Callable[[str], None],
    checkpoint_every: int | None,
) -> tuple[dict[str, Any], dict[str, Params]]:
    """The earlier stage of a method such as LG-FedAvg: its cost, and the model of its last round."""
    earlier = next(
        (
            other
            for other in experiment.cells
            if other.method == cell.pretrain
            and (other.dataset, other.clients, other.model) == (cell.dataset, cell.clients, cell.model)
        ),
        None,
    )
    if earlier is None:
        raise RunError(
            f"{cell.method} starts from a {cell.pretrain} run, which {experiment.name!r} does not have; add that cell."
        )
    name = next(n for n, value in replace(experiment, seeds=(seed,)).runs().items() if value == (earlier, seed))
    result = run_one(directory, experiment, name, **options, watch=watch, say=say, checkpoint_every=checkpoint_every)
    simulation = build_simulation(earlier, seed, **options)
    run = execute(simulation, directory / name)  # finished: reads its last checkpoint
    weights = run.personal_weights(0, last=True)
    cost = {key: result[key] for key in ("name", "steps", "bytes_down", "bytes_up", "seconds")}
    return cost, {cell.model: weights}


def partition_digest(federation: Federation) -> str:
    digest = hashlib.sha256()
    for rows in federation.pools.values():
        for part in (rows.index, rows.offset, rows.size):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def environment(device: str) -> dict[str, Any]:
    """Where and with what a result was made."""
    import pfedhn

    on_gpu = device.startswith("cuda")
    return {
        "device": f"cuda: {torch.cuda.get_device_name(device)}"
        if on_gpu
        else f"cpu: {platform.processor() or platform.machine()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "pfedhn": pfedhn.__version__,
        "commit": commit(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """The commit of the source, if it is known; PFEDHN_COMMIT says it where there is no repository."""
    if known := os.environ.get("PFEDHN_COMMIT"):
        return known
    where = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(where), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def rerun_command(experiment: str, cell: Cell, seed: int, assignments: Sequence[str]) -> str:
    sets = "".join(f" --set {shlex.quote(text)}" for text in assignments)
    return f"pfedhn run {experiment} --only method={cell.method},clients={cell.clients} --seeds {seed}{sets}"
