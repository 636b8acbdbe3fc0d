"""What the words of a command name: an experiment, its runs, its rates, its seeds."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pfedhn.errors import UserError, closest
from pfedhn.experiments.build import check
from pfedhn.experiments.directory import Options
from pfedhn.experiments.grid import from_toml, refuse_without_effect, select, with_assignments
from pfedhn.experiments.rates import rates_file
from pfedhn.experiments.registry import experiments
from pfedhn.experiments.spec import OTHER_TABLES, TABLE_ENDINGS, Experiment, RunSpec, with_pretraining
from pfedhn.paper.experiments import with_rates_of
from pfedhn.report.study import Study, studies
from pfedhn.settings import parse_assignments
from pfedhn.system.files import given_path, reading
from pfedhn.system.reference import load_file
from pfedhn.system.screen import say


def find_experiment(
    name: str, small: bool = False, also: Iterable[str] = (), data_dir: Path | None = None
) -> tuple[Experiment, str]:
    """Find an experiment by name or file, a study also at reduced size, and how a later command names it.

    `also` lists what else the name could have meant; `data_dir` is where natural federations are.
    """
    study = find_study(name)
    if small and study is None:
        raise UserError(f"--small is for studies, and {name!r} is none; there, --set steps=100 makes runs short.")
    if name in experiments():
        return experiments()[name], name
    file = given_path(name)
    if study is not None:
        source = name if name in studies() else str(given_path(file, is_resolved=True))
        return study.experiment(small, data_dir), source
    with reading(file):
        if file.suffix.lower() in (*TABLE_ENDINGS, *OTHER_TABLES) or file.is_dir():
            raise _is_data(file)
        if file.is_file():
            return from_toml(file, data_dir), str(given_path(file, is_resolved=True))
    if file.suffix in (".toml", ".py") or os.sep in name:
        raise UserError(f"there is no file {name}.")
    others = list(also)
    what = "no data set and no experiment" if others else "no experiment"
    raise UserError(f"there is {what} {name!r}; {closest(name, [*others, *experiments(), *studies()])}")


def _is_data(file: Path) -> UserError:
    """Say what a person may have meant by a table or a folder in place of an experiment."""
    if not file.exists():
        return UserError(f"there is no file {file}.")
    if (file / "experiment.toml").exists() or (file / "spec.toml").exists():
        return UserError(f"{file} holds runs; to go on with them, use `pfedhn run --resume {file}`.")
    what, columns = ("folder", "") if file.is_dir() else ("table", ' and columns = {client = "...", label = "..."}')
    return UserError(
        f"{file} is a {what} and not an experiment; write a file mine.toml with the lines dataset = {str(file)!r}"
        f"{columns}, and give that."
    )


def find_study(source: str) -> Study | None:
    """A study by its name, or from a Python file that has one as STUDY; None for an experiment that is none."""
    if source in studies():
        return studies()[source]
    if not source.endswith(".py"):
        return None
    study = getattr(load_file(Path(source)), "STUDY", None)
    if not isinstance(study, Study):
        raise UserError(f"{source} has no study; it must say STUDY = pfedhn.studies.Study(...).")
    return study


def chosen_runs(
    name: str,
    assignments: list[str],
    only: list[str],
    seeds: list[str] | None,
    rates: Path | None,
    small: bool,
    data_dir: Path | None = None,
) -> tuple[Experiment, list[RunSpec], Options]:
    """The experiment with the person's changes, the runs chosen from it, and how a later command names it."""
    chosen, source = find_experiment(name, small, data_dir=data_dir)
    beside = None if source in experiments() or source in studies() else rates_file(Path(source))
    if rates is not None:
        rates = given_path(rates, is_resolved=True)
        with reading(rates):
            if not rates.is_file():
                raise UserError(f"there is no file {rates}.")
        chosen = with_rates_of(chosen, rates)
    if (file := rates or beside) is not None and file.exists():
        say(f"Learning rates: {file}", is_error=True)
    chosen = with_assignments(chosen, parse_assignments(assignments), data_dir)
    check(chosen)
    runs = select(chosen, only, whole_numbers(seeds))
    refuse_without_effect(assignments, [run.cell for run in with_pretraining(chosen, runs)])
    norms = (study := find_study(name)) is not None and study.norms
    return chosen, runs, Options(source=source, small=small, assignments=tuple(assignments), rates=rates, norms=norms)


def whole_numbers(texts: Sequence[str] | None) -> list[int] | None:
    """`["0,1", "2"]` -> [0, 1, 2]."""
    if not texts:
        return None
    try:
        return list(dict.fromkeys(int(part) for text in texts for part in text.split(",")))
    except ValueError:
        raise UserError(f"--seeds must be whole numbers such as 0,1,2, got {' '.join(texts)!r}.") from None
