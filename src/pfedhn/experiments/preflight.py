"""Everything that is checked before the first run starts: once, and handed on as a value."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pfedhn.data.catalogue import forget_datasets
from pfedhn.data.silos import SILOS, find_silo_files
from pfedhn.data.tables import file_digest
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import UserError
from pfedhn.experiments.build import CheckedNetworks, build_simulation, refuse_unused_start
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.directory import Directory, Options, finished
from pfedhn.experiments.spec import Experiment, RunSpec, is_own_data, pretraining_run, with_pretraining
from pfedhn.storage.directory import MendableError, StoredSpec, read_spec
from pfedhn.storage.identity import is_data_of
from pfedhn.storage.restore import to_plan
from pfedhn.storage.schema import Result


@dataclass(frozen=True)
class Preflight:
    """The runs of a command, how they run, and the results of those that are finished."""

    directory: Path
    experiment: Experiment
    options: Options
    jobs: int | None  # runs side by side; if None, as many as there are cores, or as a GPU's memory holds
    runs: tuple[RunSpec, ...]  # those asked for and those they start from, these first
    starts_from: Mapping[str, str]  # the run that has to be finished before another can start, by the other's name
    finished: Mapping[str, Result]
    damaged: Mapping[str, str]  # why a run whose result cannot be read starts again

    @property
    def waiting(self) -> list[RunSpec]:
        return [run for run in self.runs if run.name not in self.finished]


def survey(
    directory: Path,
    experiment: Experiment,
    runs: Sequence[RunSpec],
    options: Options,
    jobs: int | None = None,
    is_on_cluster: bool = False,
) -> Preflight:
    """Find out which runs of a command are finished, which others wait for, and how many threads each has."""
    wanted = tuple(with_pretraining(experiment, runs))
    pairs = [(run.name, pretraining_run(experiment, run)) for run in wanted]
    starts_from = {name: earlier.name for name, earlier in pairs if earlier is not None}
    # As many threads as if no run were finished: the bits must not change.
    options = options.with_threads(len(wanted), jobs, is_on_cluster)
    return Preflight(directory, experiment, options, jobs, wanted, starts_from, *_finished(directory, wanted))


def preflight(
    directory: Path,
    experiment: Experiment,
    runs: Sequence[RunSpec],
    options: Options,
    jobs: int | None = None,
    is_on_cluster: bool = False,
) -> Preflight:
    """Refuse a command whose runs could not work or could not continue; nothing is written.

    `check` has seen the experiment already.
    """
    options.check()
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1.")
    folder = Directory(directory)
    known = folder.refuse_other(experiment)  # runs of earlier commands too
    if folder.is_experiment and options.threads is None:
        options = replace(options, threads=folder.options().threads)
    ready = survey(directory, experiment, runs, options, jobs, is_on_cluster)
    others = {run.name: run for run in known if run.name not in {wanted.name for wanted in ready.runs}}
    everybody = [*others.values(), *ready.runs]
    specs = {run.name: spec for run in everybody if (spec := read_spec(directory / run.name)) is not None}
    _refuse_other_executor(directory, {run.name: specs[run.name] for run in ready.runs if run.name in specs}, options)
    ended = ready.finished.keys() | _finished(directory, others.values())[0].keys()
    _refuse_changed_data(directory, [run for run in everybody if run.name in ended], specs, bool(ready.waiting))
    if ready.waiting:
        refuse_changed_base(directory, specs)
    return ready


def build_each_cell(
    runs: Iterable[RunSpec],
    options: Options,
    look: Callable[[RunSpec, Simulation], None] = lambda run, simulation: None,
) -> None:
    """Build each cell once, and try each network once, so that data or settings that cannot work are refused now.

    Args:
        runs: The first run of each cell is built; the data sets of the package must be there.
        options: How they will run.
        look: Called with each run that was built.
    """
    runs = list(runs)
    _refuse_missing_silos([run.cell.dataset for run in runs], options.data_dir)
    cells = {run.cell_name: run for run in reversed(runs)}
    checked: CheckedNetworks = {}
    for run in reversed(cells.values()):
        simulation = build_simulation(run, options, checked=checked)
        if run.cell.pretrain is not None:
            refuse_unused_start(simulation, run.cell)
        look(run, simulation)
    if options.device == "cpu":
        forget_datasets()


def _refuse_missing_silos(names: Iterable[str], data_dir: Path | None) -> None:
    """Refuse runs on natural federations that are not here, and say which of the others are."""
    here, missing = [], list[UserError]()
    for name in dict.fromkeys(name for name in names if name in SILOS):
        try:
            find_silo_files(name, data_dir)
            here.append(f"dataset={name}")
        except UserError as error:
            missing.append(error)
    if missing:
        rest = f"; or leave it out with --only {','.join(here)}" if here else ""
        raise UserError(f"{str(missing[0]).removesuffix('.')}{rest}.")


def _finished(directory: Path, runs: Iterable[RunSpec]) -> tuple[dict[str, Result], dict[str, str]]:
    """The results of finished runs, and why those of others cannot be read."""
    results, damaged = {}, {}
    for run in runs:
        try:
            if (result := finished(directory / run.name, run)) is not None:
                results[run.name] = result
        except MendableError as error:
            damaged[run.name] = str(error)
    return results, damaged


def refuse_changed_base(directory: Path, specs: Mapping[str, StoredSpec]) -> None:
    """Beside runs that were trained on one frozen base, refuse to train others on another."""
    for name, spec in specs.items():
        if "frozen" in spec.digests:
            to_plan(directory / name, spec)  # which refuses another base


def _refuse_other_executor(directory: Path, specs: Mapping[str, StoredSpec], options: Options) -> None:
    """Refuse now, not when a run starts: the directory would keep an option that its runs cannot continue with."""
    for name, spec in specs.items():
        if spec.executor != options.executor:
            raise UserError(
                f"{directory / name} was begun with the executor {spec.executor}, so it cannot go on with "
                f"{options.executor}, whose sums round otherwise; give --executor {spec.executor}, or another --out."
            )


def _refuse_changed_data(
    directory: Path, finished_runs: Iterable[RunSpec], specs: Mapping[str, StoredSpec], is_going_on: bool
) -> None:
    """Refuse to train runs on other data than the finished ones beside them.

    Args:
        directory: Of the experiment.
        finished_runs: Its runs that have ended.
        specs: Of every run that has begun.
        is_going_on: Whether others will be trained; a folder, which takes long to read, is looked at only then.
    """
    digest, folders = cache(file_digest), set()
    for run in finished_runs:
        spec, place = specs.get(run.name), Path(run.cell.dataset)
        if spec is None or not is_own_data(run.cell.dataset):
            continue
        table = None if spec.data.reading is None else spec.data.reading.table
        if table is None:
            if not is_going_on or not place.is_dir() or place in folders:
                continue
            folders.add(place)  # all its runs were compared with the first when they began
        elif not place.is_file() or digest(place) == table.sha256:
            continue
        now = build_federation(run.cell, run.seed)  # a file may only be written another way
        columns = None if now.reading is None or now.reading.table is None else now.reading.table.columns
        if not is_data_of(spec.digests, now) or columns != (None if table is None else table.columns):
            raise UserError(
                f"{place} has changed since {directory / run.name} was finished; give another --out for runs on what "
                f"it holds now, or bring the {'folder' if table is None else 'table'} back that these runs are of."
            )
