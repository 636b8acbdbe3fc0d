"""A cell becomes the federation that it names."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from pfedhn.data.partition import dirichlet
from pfedhn.errors import UserError
from pfedhn.experiments.build import build_federation, build_partition
from pfedhn.experiments.directory import Options
from pfedhn.experiments.grid import from_table, from_toml
from pfedhn.experiments.runner import prepare
from pfedhn.experiments.spec import Cell

NOVEL = {"rule": "dirichlet", "alpha": 1.0, "novel_clients": 2}


def test_an_experiments_clients_are_those_that_train() -> None:
    cell = Cell(clients=6, partition=NOVEL, split=(0.5, 0.25, 0.25))
    federation = build_federation(cell, seed=0)
    assert (federation.num_clients, federation.num_joining) == (6, 2)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ('normalise = "pools"', "apart"),
        ('normalize = "pools"', "apart"),
        ('normalise = "jointly"', "jointly"),
        ('normalize = "jointly"', "jointly"),
        ('normalize = "apart"', "apart"),
    ],
)
def test_files_with_the_old_spelling_are_still_read(spelling: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(f'clients = 6\npartition = {{rule = "dirichlet", alpha = 1.0, novel_clients = 2, {spelling}}}')
    (cell,) = from_toml(path).cells
    assert build_partition(cell) == dirichlet(1.0, 6, novel_clients=2, normalize=expected)  # type: ignore[arg-type]


def test_a_setting_that_never_was_is_refused_whatever_its_value() -> None:
    for value in ("pools", ["pools"], {"pools": 1}):
        with pytest.raises(UserError, match="dirichlet has no setting 'normal'; did you mean 'normalize'"):
            build_partition(Cell(partition={**NOVEL, "normal": value}))


def test_own_data_keep_their_names(tmp_path: Path) -> None:
    for name in ("metz", "lyon"):
        (tmp_path / name).mkdir()
        numpy.save(tmp_path / name / "x.npy", numpy.zeros((20, 3)))
        numpy.save(tmp_path / name / "y.npy", numpy.array(["ill", "well"] * 10))
    cell = Cell(dataset=str(tmp_path), clients=2)
    federation = build_federation(cell, seed=0)
    assert federation.names == ("lyon", "metz")
    assert federation.class_names == ("ill", "well")
    with pytest.raises(UserError, match="has 2 clients; set clients = 2"):
        build_federation(replace(cell, clients=3), seed=0)
    table = tmp_path / "table.csv"
    table.write_text("city,size,state\n" + "\n".join(f"lyon,{i},{i % 2}" for i in range(20)))
    with pytest.raises(UserError, match=r"say which column is the label: columns\.label = "):
        build_federation(Cell(dataset=str(table), clients=1, columns={"client": "city"}), seed=0)


def test_how_many_clients_there_are_is_said_once() -> None:
    with pytest.raises(UserError, match="num_clients is not given here; the field `clients` says how many"):
        build_partition(Cell(clients=5, partition={**NOVEL, "num_clients": 7}))


def test_a_start_that_a_method_makes_nothing_of_is_refused(tmp_path: Path) -> None:
    experiment = from_table(
        {"method": ["fedavg", "pfedhn"], "clients": 5, "model": "mlp-4", "methods": {"pfedhn": {"pretrain": "fedavg"}}},
        "",
    )
    with pytest.raises(UserError, match="pfedhn makes nothing of the model that pretrain = 'fedavg' would give it"):
        prepare(tmp_path, experiment.runs([0]), Options())
    for method in ("lg-fedavg", "fedper", "local", "pfedme"):
        cells = tuple(replace(cell, method=method) if cell.pretrain else cell for cell in experiment.cells)
        prepare(tmp_path, replace(experiment, cells=cells).runs([0]), Options())
