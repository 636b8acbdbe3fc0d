"""Learning rates by experiment and method, as `pfedhn tune` writes them and runs read them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.find import find_method
from pfedhn.algorithms.method import Method
from pfedhn.errors import UserError, closest
from pfedhn.experiments.spec import Experiment, distinct
from pfedhn.settings import checked, fits, parse_toml, to_toml
from pfedhn.storage.files import SEAL, DamagedError, sealed_text, unsealed_text
from pfedhn.system.files import make_folder, one_at_a_time, read_text, write_atomically

Rates: TypeAlias = dict[str, dict[str, Any]]
"""Settings by method, as `pfedhn tune` chooses them."""

RATES_HEADING = """\
# Learning rates that `pfedhn tune` chose on validation examples: a heading for each experiment and method.
# It writes this file anew and keeps the headings that it did not tune; comments are lost. A first line
# `sha256` vouches for the others: take it out when you change a rate.
"""


def rates_file(experiment_file: Path) -> Path:
    """Where the rates that were chosen for a user's experiment are kept."""
    return experiment_file.with_suffix(".rates.toml")


def read_rates(file: Path) -> dict[str, Rates]:
    """The rates of a file by experiment, every method and setting checked."""
    try:
        text = read_text(file)
        table = parse_toml(unsealed_text(text.encode()) if text.startswith(SEAL) else text, file)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is damaged ({error}); fix or remove it.") from None
    except DamagedError as error:
        raise UserError(f"{file} {error}; if that was you, take its first line out, or else tune again.") from None
    for experiment, by_method in table.items():
        if not fits(by_method, Mapping[str, Mapping[str, Any]]):
            raise UserError(f"{file}: {experiment!r} does not fit; write rates under headings [EXPERIMENT.METHOD].")
        for method, settings in by_method.items():
            heading = f"{file}: [{experiment}.{method}]"
            checked(headed(heading, method).kinds, settings, heading)
    return table


def headed(heading: str, method: str) -> Method:
    """The method that a heading such as [tune.pfedhn] names."""
    if ":" not in method and method not in ALGORITHMS:
        raise UserError(f"{heading} names no method; {closest(method, ALGORITHMS)}")
    return find_method(method)


def rates_for(experiment: str, file: Path, stand_in: str | None = None) -> Rates:
    """The rates of one experiment; a method that it has none for takes those of the one that stands in."""
    table = read_rates(file)
    if experiment in table or stand_in in table:
        return table.get(stand_in or experiment, {}) | table.get(experiment, {})
    held = f"it holds {', '.join(map(repr, table))}" if table else "it is empty"
    raise UserError(f"{file} has no rates for {experiment!r}; {held}.")


def apply_rates(experiment: Experiment, rates: Rates) -> Experiment:
    """The cells of the methods named with these settings; a method that is not named keeps its own."""
    cells = [
        replace(cell, settings={**cell.settings, **rates[cell.method]}) if cell.method in rates else cell
        for cell in experiment.cells
    ]
    return replace(experiment, cells=distinct(cells))


def save_rates(file: Path, experiment: str, rates: Rates) -> None:
    """Put the rates of some methods of an experiment into a file, and keep what else it holds."""
    make_folder(file.parent)
    with one_at_a_time(file.parent):
        table = read_rates(file) if file.exists() else {}
        table[experiment] = {**table.get(experiment, {}), **rates}
        write_atomically(file, sealed_text(f"{RATES_HEADING}\n{to_toml(table)}"))
