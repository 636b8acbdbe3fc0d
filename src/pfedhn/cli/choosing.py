"""Which runs a command means: those of an experiment as it was asked for, or those that a directory holds."""

from pathlib import Path

from rich.markup import escape

from pfedhn.cli.find import find_experiment, find_study, rates_beside, whole_numbers
from pfedhn.errors import UserError
from pfedhn.experiments.build import check
from pfedhn.experiments.directory import Directory, Options
from pfedhn.experiments.grid import refuse_without_effect, select, with_assignments
from pfedhn.experiments.spec import Experiment, RunSpec, with_pretraining
from pfedhn.paper.experiments import with_rates_of
from pfedhn.settings import parse_assignments
from pfedhn.system.files import given_path, reading
from pfedhn.system.screen import Screen


def stored_runs(path: Path) -> tuple[Experiment, list[RunSpec], Options]:
    """What a directory holds, which of its runs were asked for, and how they were started."""
    directory = Directory(path)
    chosen, runs = directory.read()
    check(chosen)
    return chosen, runs, directory.options()


def chosen_runs(
    name: str, assignments: list[str], only: list[str], seeds: list[str] | None, rates: Path | None, small: bool
) -> tuple[Experiment, list[RunSpec], Options]:
    """The experiment with what the person changed in it, the runs chosen of it, and how a later command names it."""
    chosen, source = find_experiment(name, small)
    if rates is not None:
        rates = given_path(rates, is_resolved=True)
        with reading(rates):
            if not rates.is_file():
                raise UserError(f"there is no file {rates}.")
        chosen = with_rates_of(chosen, rates)
    if (file := rates or rates_beside(source)) is not None:
        Screen(stderr=True).print(f"Learning rates: {escape(str(file))}", highlight=False, soft_wrap=True)
    chosen = with_assignments(chosen, parse_assignments(assignments))
    check(chosen)
    runs = select(chosen, only, whole_numbers(seeds))
    refuse_without_effect(assignments, [run.cell for run in with_pretraining(chosen, runs)])
    norms = (study := find_study(name)) is not None and study.norms
    return chosen, runs, Options(source=source, small=small, assignments=tuple(assignments), rates=rates, norms=norms)
