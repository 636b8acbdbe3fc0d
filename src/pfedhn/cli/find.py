"""What the words of a command name: an experiment, its rates, seeds, a device."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pfedhn.errors import UserError, closest
from pfedhn.experiments.grid import from_toml
from pfedhn.experiments.rates import rates_file
from pfedhn.experiments.registry import experiments
from pfedhn.experiments.spec import TABLE_ENDINGS, Experiment
from pfedhn.report.study import Study, studies
from pfedhn.system.files import given_path, reading
from pfedhn.system.reference import load_file


def find_experiment(name: str, small: bool = False, also: Iterable[str] = ()) -> tuple[Experiment, str]:
    """An experiment by name or file, and how a later command should name it.

    Args:
        name: Its name or file.
        small: A study at reduced size.
        also: What else could have been meant.
    """
    if small and (study := find_study(name)) is None:
        raise UserError(f"--small is for studies, and {name!r} is none; there, --set steps=100 makes runs short.")
    if name in experiments():
        return experiments()[name], name
    file = given_path(name)
    if (study := find_study(name)) is not None:
        return study.experiment(small), name if name in studies() else str(given_path(file, is_resolved=True))
    with reading(file):
        if file.suffix.lower() in TABLE_ENDINGS or file.is_dir():
            raise _is_data(file)
        if file.is_file():
            return from_toml(file), str(given_path(file, is_resolved=True))
    if file.suffix in (".toml", ".py") or os.sep in name:
        raise UserError(f"there is no file {name}.")
    others = list(also)
    what = "no data set and no experiment" if others else "no experiment"
    raise UserError(f"there is {what} {name!r}; {closest(name, [*others, *experiments(), *studies()])}")


def _is_data(file: Path) -> UserError:
    """What a person may have meant who named a table or a folder where an experiment belongs."""
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


def rates_beside(source: str) -> Path | None:
    """The file of rates that was read with a user's experiment file."""
    file = None if source in experiments() or source in studies() else rates_file(Path(source))
    return file if file is not None and file.exists() else None


def whole_numbers(texts: Sequence[str] | None) -> list[int] | None:
    """`["0,1", "2"]` -> [0, 1, 2]."""
    if not texts:
        return None
    try:
        return list(dict.fromkeys(int(part) for text in texts for part in text.split(",")))
    except ValueError:
        raise UserError(f"--seeds {' '.join(texts)} does not fit; it takes whole numbers, e.g. 0,1,2.") from None
