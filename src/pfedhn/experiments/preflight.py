"""Everything that is checked before the first run starts: once, and handed on as a value."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pfedhn.data.files import file_digest
from pfedhn.data.loaded import forget_datasets
from pfedhn.errors import UserError
from pfedhn.experiments.build import CheckedNetworks, build_simulation, refuse_unused_start
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.directory import Directory, Options, finished
from pfedhn.experiments.execute import refuse_changed_base
from pfedhn.experiments.spec import Experiment, RunSpec, is_own_data, with_pretraining
from pfedhn.storage.directory import MendableError, Spec, read_spec
from pfedhn.storage.identity import is_data_of
from pfedhn.storage.schema import Result


@dataclass(frozen=True)
class Preflight:
    """The runs of a command, with the results of those that are finished."""

    directory: Path
    experiment: Experiment
    runs: tuple[RunSpec, ...]  # those asked for and those they start from, these first
    finished: Mapping[str, Result]
    damaged: Mapping[str, str]  # why a run whose result cannot be read starts again

    @property
    def waiting(self) -> list[RunSpec]:
        return [run for run in self.runs if run.name not in self.finished]


def survey(directory: Path, experiment: Experiment, runs: Sequence[RunSpec]) -> Preflight:
    """Find out which runs of a command are finished."""
    wanted = with_pretraining(experiment, runs)
    results, damaged = _finished(directory, wanted)
    return Preflight(directory, experiment, tuple(wanted), results, damaged)


def preflight(directory: Path, experiment: Experiment, runs: Sequence[RunSpec], options: Options) -> Preflight:
    """Refuse a command whose runs could not work or could not continue; nothing is written.

    `check` has seen the experiment already. The data sets of the package must be there.
    """
    folder = Directory(directory)
    folder.refuse_other(experiment)
    known = folder.read()[1] if folder.is_experiment else []  # runs of earlier commands too
    ready = survey(directory, experiment, runs)
    others = {run.name: run for run in known if run.name not in {wanted.name for wanted in ready.runs}}
    everybody = [*others.values(), *ready.runs]
    specs = {run.name: spec for run in everybody if (spec := read_spec(directory / run.name)) is not None}
    _refuse_other_executor(directory, {run.name: specs[run.name] for run in ready.runs if run.name in specs}, options)
    ended = ready.finished.keys() | _finished(directory, others.values())[0].keys()
    _refuse_changed_data(directory, [run for run in everybody if run.name in ended], specs, bool(ready.waiting))
    if ready.waiting:
        refuse_changed_base(directory, specs)
    return ready


def build_each_cell(runs: Iterable[RunSpec], options: Options) -> None:
    """Build each cell once, and try each network once, so that data or settings that cannot work are refused now."""
    cells = {run.cell_name: run for run in reversed(list(runs))}
    checked: CheckedNetworks = {}
    for run in reversed(cells.values()):
        simulation = build_simulation(run, options, checked=checked)
        if run.cell.pretrain is not None:
            refuse_unused_start(simulation, run.cell)
    if options.device == "cpu":
        forget_datasets()


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


def _refuse_other_executor(directory: Path, specs: Mapping[str, Spec], options: Options) -> None:
    """Refuse now, not when a run starts: the directory would keep an option that its runs cannot continue with."""
    for name, spec in specs.items():
        if spec.executor != options.executor:
            raise UserError(
                f"{directory / name} was begun with the executor {spec.executor}, so it cannot go on with "
                f"{options.executor}, whose sums round otherwise; give --executor {spec.executor}, or another --out."
            )


def _refuse_changed_data(
    directory: Path, finished_runs: Iterable[RunSpec], specs: Mapping[str, Spec], is_going_on: bool
) -> None:
    """Refuse to train runs on other data than the finished ones beside them.

    Args:
        directory: Of the experiment.
        finished_runs: Its runs that have ended.
        specs: Of every run that has begun.
        is_going_on: Whether others will be trained; a folder, which takes long to read, is looked at only then.
    """
    digests: dict[str, str] = {}
    for run in finished_runs:
        spec, place = specs.get(run.name), Path(run.cell.dataset)
        if spec is None:
            continue
        table = None if spec.data.reading is None else spec.data.reading.table
        if is_own_data(run.cell.dataset) and place.is_dir():
            if not is_going_on or run.cell.dataset in digests:  # all runs were compared with the first when they began
                continue
            digests[run.cell.dataset] = ""
        elif table is None or not place.is_file():
            continue
        else:
            if run.cell.dataset not in digests:
                digests[run.cell.dataset] = file_digest(place)
            if digests[run.cell.dataset] == table.sha256:
                continue
        now = build_federation(run.cell, run.seed)  # a file may only be written another way
        columns = None if now.reading is None or now.reading.table is None else now.reading.table.columns
        if not is_data_of(spec.digests, now) or columns != (None if table is None else table.columns):
            raise UserError(
                f"{place} has changed since {directory / run.name} was finished; give another --out for runs on what "
                f"it holds now, or bring the {'folder' if table is None else 'table'} back that these runs are of."
            )
