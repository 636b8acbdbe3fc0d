"""What the words of a command name: an experiment, its rates, seeds, a device."""

import os
from collections.abc import Sequence
from pathlib import Path

from pfedhn.errors import UserError, closest
from pfedhn.experiments.grid import from_toml
from pfedhn.experiments.paper import EXPERIMENTS
from pfedhn.experiments.rates import rates_file
from pfedhn.experiments.spec import Experiment
from pfedhn.files import given_path, reading


def find_experiment(name: str) -> tuple[Experiment, str]:
    """An experiment by name or file, and how a later command should name it."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name], name
    file = given_path(name)
    with reading(file):
        if file.is_file():
            return from_toml(file), str(given_path(file, is_resolved=True))
    if file.suffix == ".toml" or os.sep in name:
        raise UserError(f"there is no file {name}.")
    raise UserError(f"there is no experiment {name!r}; {closest(name, EXPERIMENTS)}")


def rates_beside(source: str) -> Path | None:
    """The file of rates that was read with a user's experiment file."""
    file = None if source in EXPERIMENTS else rates_file(Path(source))
    return file if file is not None and file.exists() else None


def whole_numbers(texts: Sequence[str] | None) -> list[int] | None:
    """`["0,1", "2"]` -> [0, 1, 2]."""
    if not texts:
        return None
    try:
        return list(dict.fromkeys(int(part) for text in texts for part in text.split(",")))
    except ValueError:
        raise UserError(f"--seeds {' '.join(texts)} does not fit; it takes whole numbers, e.g. 0,1,2.") from None
