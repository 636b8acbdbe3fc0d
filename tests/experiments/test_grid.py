"""Experiments: cells from files and command lines, and your own data."""

import hashlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import SMALL

from pfedhn.engine.transform import TRANSFORMS
from pfedhn.errors import UserError
from pfedhn.experiments.build import build_simulation, cell_algorithm, check
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.grid import from_table, from_toml, select, with_assignments
from pfedhn.experiments.spec import Cell, Experiment, cell_digest
from pfedhn.experiments.tables import with_table_defaults
from pfedhn.paper.experiments import EXPERIMENTS
from pfedhn.settings import parse_assignments, to_toml

# Files and tables


def test_every_experiment_of_the_package_survives_the_way_through_toml() -> None:
    for experiment in EXPERIMENTS.values():
        table = tomllib.loads(to_toml(asdict(experiment)))
        assert from_table(table, "another name") == experiment
        check(experiment)


def test_folds_have_a_seed_each_and_one_partition() -> None:
    experiment = from_table({"folds": 5, "clients": 6, "method": ["local", "pfedhn"]}, "folds")
    assert experiment.seeds == (0, 1, 2, 3, 4)
    local, pfedhn = experiment.cells
    tested = [build_federation(local, seed).splits["test"].of(0).tolist() for seed in range(5)]
    assert len({number for part in tested for number in part}) == sum(map(len, tested))
    assert build_federation(pfedhn, 7).splits["test"].of(0).tolist() == tested[2]
    other = build_federation(replace(local, data_seed=1), 0).splits["test"].of(0).tolist()
    assert other != tested[0]
    assert from_table({"folds": 5, "seeds": [3]}, "folds").seeds == (3,)
    assert with_assignments(from_table({}, "none"), {"folds": 4}).seeds == (0, 1, 2, 3)
    assert with_assignments(from_table({"seeds": [9]}, "none"), {"folds": 4}).seeds == (9,)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"folds": 2}, r"`folds` must be at least 3 \(training, validation and test\) and at most 1,000, got 2"),
        ({"folds": 10**15}, "and at most 1,000, got 1000000000000000"),
        (
            {"folds": 5, "split": [0.7, 0.15, 0.15]},
            r"`folds` = 5 leaves no use for `split` = \[0.7, 0.15, 0.15\]; leave",
        ),
        ({"folds": 5, "methods": {"local": {"split": [0.5, 0.25, 0.25]}}}, r"`folds` = 5 leaves no use for `split`"),
        ({"folds": [3, 5]}, "`folds` must be the same in all cells, got 3 and 5; write a file for each"),
    ],
)
def test_folds_that_do_not_fit_get_one_sentence(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        from_table(table, "folds")


def test_personalize_chooses_among_the_hypernetworks_of_a_table() -> None:
    table = Cell(dataset="there is none.csv", columns={"client": "a", "label": "b"})

    def methods(**content: Any) -> list[str]:
        content = {"dataset": table.dataset, "columns": dict(table.columns), **content}
        return list(dict.fromkeys(cell.method for cell in from_table(with_table_defaults(content, table), "t").cells))

    others = ["local", "fedavg", "fedper-intercept"]
    assert methods(personalize="auto") == methods()
    assert methods(personalize="last") == [*others, "pfedhn-last"]
    assert methods(personalize="all", method=["pfedhn", "local"]) == ["pfedhn-shared", "local"]
    assert methods(personalize="intercept", method="pfedhn", methods={"pfedhn": {"lr": 0.5}}) == ["pfedhn-intercept"]
    with pytest.raises(
        UserError, match=r"`personalize` is 'lats'; did you mean 'last'\? There are auto, intercept, last"
    ):
        methods(personalize="lats")
    with pytest.raises(UserError, match=r"`personalize` has no effect on method = \['local'\]; add"):
        methods(personalize="all", method="local")
    with pytest.raises(UserError, match="`personalize` is for tables; digits is none"):
        with_table_defaults({"personalize": "auto"}, Cell())


def test_lists_make_a_grid_and_methods_differ_where_they_say_so() -> None:
    text = """
    clients = [6, 8]
    steps = 30
    settings = {local_steps = [2, 4]}
    [methods.local]
    steps = 60
    [methods.pfedhn]
    lr = [0.1, 0.2]
    personal = ["last"]
    """
    experiment = from_table(tomllib.loads(text), "grid")
    assert len(experiment.cells) == 2 * 2 + 2 * 2 * 2
    assert {cell.steps for cell in experiment.cells if cell.method == "local"} == {60}
    ours = [cell for cell in experiment.cells if cell.method == "pfedhn"]
    assert {cell.steps for cell in ours} == {30}
    points = {(cell.clients, cell.settings["local_steps"], cell.settings["lr"]) for cell in ours}
    assert points == {(n, k, lr) for n in (6, 8) for k in (2, 4) for lr in (0.1, 0.2)}
    assert all(cell.settings["personal"] == ["last"] for cell in ours)
    check(experiment)
    assert "pfedhn-digits-6-local_steps=2-lr=0.1-seed0" in [run.name for run in experiment.runs()]
    assert len(experiment.runs()) == 3 * len(experiment.cells)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stepz = 3", "mine has no field 'stepz'; did you mean 'steps'?"),
        ("steps = '3'", "mine: steps = '3' does not fit; it must be a whole number."),
        ("steps = []", "steps = [] does not fit; a list here stands for several runs, so name some."),
        ("seeds = 3", "seeds = 3 does not fit; it must be a list of whole numbers."),
        ("seeds = []", "seeds = [] does not fit; it must be a list of whole numbers."),
        ("name = 3", "name = 3 does not fit; it must be a text."),
        ('name = "a\\nb"', r"`name` must be on one line, got 'a\nb'."),
        (
            "name = 'a/b'\nmethod = 'local'",
            "name = 'a/b' does not fit; it names a folder, so use letters, digits, - and _.",
        ),
        ("method = 'pfedn'", "there is no method 'pfedn'; did you mean 'pfedhn'?"),
        ("dataset = 'digit'", "there is no data set 'digit'; did you mean 'digits'?"),
        ("model = 'lenett'", "there is no target network 'lenett'; did you mean 'lenet'?"),
        ("clients = 0", "clients = 0 does not fit; it must be at least 1."),
        ("clients = [6, 0]", "clients = 0 does not fit; it must be at least 1."),
        ("partition = {rule = 'by_class'}", "partition: there is no rule 'by_class'; did you mean 'by_classes'?"),
        ("partition = {rule = 'dirichlet'}", "partition dirichlet needs alpha."),
        (
            "partition = {rule = 'by_classes', classes_per_client = 2, alpha = 1}",
            "partition by_classes has no setting 'alpha'; there are classes_per_client,",
        ),
        (
            "partition = {rule = 'by_classes', classes_per_client = 'two'}",
            "partition by_classes: classes_per_client = 'two' does not fit; it must be a whole number.",
        ),
        ("settings = {lr = 'fast'}", "pfedhn: lr = 'fast' does not fit; it must be a number."),
        (
            "lr = 0.1",
            "mine has no field 'lr', which is a setting of a method; write lr = 0.1 under the heading [methods.pf",
        ),
        (
            "method = ['local', 'pfedhn']\nsettings = {lr = 1}",
            "settings.lr is for all methods, and local has no 'lr'; write lr = 1 under the heading [methods.pfedhn].",
        ),
        ("method = ['fedavg']\nlr = 1", "write local_lr = 1 under the heading [methods.fedavg]."),
        (
            "num_clients = 3",
            "mine has no field 'num_clients'; did you mean 'clients'? See docs/experiments.md for all.",
        ),
        ("seed = 3", "mine has no field 'seed'; did you mean 'seeds'?"),
        ("settings = {llr = 1}", "pfedhn has no field 'llr'; did you mean 'lr'?"),
        ("[methods.pfedn]\nlr = 1", "[methods.pfedn] names no method; did you mean 'pfedhn'?"),
        ("method = 'local'\n[methods.pfedhn]\nlr = 1", "[methods.pfedhn] has no cell to change; add it to method ="),
        ("methods = 3", "methods does not fit; write what differs by method under headings"),
        ("steps = 3\n[[cells]]\nsteps = 3", "beside `cells` stands 'steps'; a file has either cells or a grid."),
        ("cells = [1]", "cells does not fit; write each cell under a heading [[cells]]."),
        ("[[cells]]\nstepz = 3", "cell 0 has no field 'stepz'; did you mean 'steps'?"),
        ("[published]\n'pfedhn/50' = 3", "published does not fit; write lines such as"),
        ("method = 'lg-fedavg'\npretrain = 'fedavg'", "lg-fedavg starts from a fedavg run, which 'mine' does not have"),
        ("pretrain = 'fedavgg'", "there is no method 'fedavgg'; did you mean 'fedavg'?"),
        ("steps = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        check(from_toml(file))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_published_numbers_can_stand_in_a_file() -> None:
    experiment = from_table(tomllib.loads("[published]\n'pfedhn/50' = [88.38, 0.29]"), "mine")
    assert experiment.published == {"pfedhn/50": (88.38, 0.29)}


# The command line's assignments and choices


def test_set_reaches_fields_settings_and_one_method() -> None:
    values = parse_assignments(["steps=7", "local_steps=3", "pfedhn.lr=0.5", "fedavg.batch_size=4", "clip=none"])
    fedavg, pfedhn = with_assignments(SMALL, values).cells
    assert (fedavg.steps, fedavg.batch_size, fedavg.settings) == (7, 4, {"local_steps": 3})
    assert (pfedhn.steps, pfedhn.batch_size) == (7, 8)
    assert pfedhn.settings == {"local_steps": 3, "lr": 0.5, "clip": "none"}
    assert cell_algorithm(pfedhn).server.clip is None  # type: ignore[attr-defined]


def test_set_another_partition_rule_drops_the_settings_of_the_old_one() -> None:
    changed = with_assignments(SMALL, parse_assignments(["partition.alpha=0.5", "partition.rule=dirichlet"]))
    assert all(cell.partition == {"rule": "dirichlet", "alpha": 0.5} for cell in changed.cells)
    check(changed)


def test_set_a_network_of_the_package_drops_the_arguments_of_a_function() -> None:
    cell = replace(SMALL.cells[0], model="pfedhn.models:resnet", network={"width": 4})
    experiment = replace(SMALL, cells=(cell,))
    (changed,) = with_assignments(experiment, parse_assignments(["model=mlp-8"])).cells
    assert (changed.model, changed.network) == ("mlp-8", {})
    with pytest.raises(UserError, match=r"network.width is an argument of a function"):
        check(with_assignments(experiment, parse_assignments(["network.width=8", "model=mlp-8"])))
    (same,) = with_assignments(experiment, parse_assignments(["model=pfedhn.models:resnet"])).cells
    assert same.network == {"width": 4}


def test_set_that_makes_cells_equal_leaves_one() -> None:
    table1 = EXPERIMENTS["table1-cifar10"]
    changed = with_assignments(table1, {"clients": 20, "steps": 10, "evaluate_every": 10, "pretrain": "none"})
    assert [cell.method for cell in changed.cells] == list(dict.fromkeys(cell.method for cell in table1.cells))


def test_set_of_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"--set: no cell has a field 'local_step'; did you mean 'local_steps'\?"):
        with_assignments(SMALL, {"local_step": 3})


def test_only_takes_any_of_several_values_of_a_field() -> None:
    table1 = EXPERIMENTS["table1-cifar10"]
    chosen = select(table1, ["method=pfedhn,method=fedavg", "clients=50"], [0, 7])
    assert [run.name for run in chosen] == [f"{m}-cifar10-50-seed{s}" for m in ("fedavg", "pfedhn") for s in (0, 7)]
    assert len(select(table1, [], None)) == len(table1.cells) * 3
    assert select(table1, ["name=pfedhn-cifar10-10"], [1]) == [table1.find("pfedhn-cifar10-10-seed1")]


@pytest.mark.parametrize(
    ("only", "sentence"),
    [
        ("metod=pfedhn", "--only: there is no field 'metod'; did you mean 'method'?"),
        ("pfedhn", "--only takes field=value, not 'pfedhn'."),
        ("clients=51", "--only clients=51 leaves no run of 'table1-cifar10', where clients is 10, 50 or 100."),
    ],
)
def test_only_refuses_what_it_does_not_understand(only: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        select(EXPERIMENTS["table1-cifar10"], [only], None)
    assert sentence in str(caught.value)


# Own data


def write_clients(folder: Path, spoil: Callable[[int, Any, Any], None] = lambda client, x, y: None) -> None:
    for client in range(3):
        (folder / f"client{client}").mkdir(parents=True)
        x = numpy.arange(80, dtype=numpy.float32).reshape(20, 4) % 7
        y = numpy.arange(20) % 2
        spoil(client, x, y)
        numpy.save(folder / f"client{client}" / "x.npy", x)
        numpy.save(folder / f"client{client}" / "y.npy", y)


def test_a_folder_of_clients_is_found_from_where_the_file_lies(tmp_path: Path) -> None:
    write_clients(tmp_path / "clinics")
    (tmp_path / "mine.toml").write_text("dataset = 'clinics'\nclients = 3\nmodel = 'mlp-4'")
    experiment = from_toml(tmp_path / "mine.toml")
    check(experiment)
    federation = build_federation(experiment.cells[0], seed=0)
    assert [int(size) for size in federation.splits["train"].size] == [14, 14, 14]
    assert experiment.runs()[0].name == "pfedhn-clinics-3-seed0"


def test_own_data_say_how_many_clients_there_are(tmp_path: Path) -> None:
    write_clients(tmp_path / "clinics")
    (tmp_path / "clinics" / ".cache").mkdir()
    lines = ["site,age,outcome", *(f"{site},{row},{row % 2}" for row in range(20) for site in ("a", "b"))]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    file = tmp_path / "mine.toml"
    file.write_text("dataset = 'clinics'")
    assert from_toml(file).runs()[0].name == "pfedhn-clinics-3-seed0"
    file.write_text(
        "dataset = 'visits.csv'\ncolumns = {client = 'site', label = 'outcome'}\nmethod = ['local', 'fedavg']"
    )
    assert [cell.clients for cell in from_toml(file).cells] == [2, 2]
    other = with_assignments(from_toml(file), {"dataset": str(tmp_path / "clinics")})
    assert [cell.clients for cell in other.cells] == [3, 3]
    assert [cell.clients for cell in with_assignments(other, {"clients": 7}).cells] == [7, 7]  # refused when it is read
    file.write_text("dataset = 'visits.csv'\ncolumns = {label = 'outcome'}\nmethod = 'local'")
    (cell,) = with_assignments(from_toml(file), {"columns.client": "site"}).cells
    assert cell.clients == 2
    file.write_text("dataset = 'visits.csv'\nclients = 4\ncolumns = {client = 'site', label = 'outcome'}")
    assert from_toml(file).cells[0].clients == 4
    file.write_text("dataset = 'digits'")
    assert from_toml(file).cells[0].clients == Cell().clients


def test_every_client_of_a_table_has_its_share_of_test_rows(tmp_path: Path) -> None:
    lines = ["site,age,outcome", *(f"{site},{row},{row % 2}" for row in range(20) for site in ("a", "b", "c"))]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    cell = Cell(dataset=str(tmp_path / "visits.csv"), clients=3, columns={"client": "site", "label": "outcome"})
    splits = build_federation(cell, seed=0).splits
    assert {name: rows.size.tolist() for name, rows in splits.items()} == {
        "train": [14] * 3,
        "validation": [3] * 3,
        "test": [3] * 3,
    }
    stratified = build_federation(replace(cell, stratify=True, split=(0.5, 0.3, 0.2)), seed=0)
    for client in range(3):  # ten rows of each class
        assert stratified.y[stratified.splits["test"].of(client)].bincount().tolist() == [2, 2]


def test_a_table_says_which_columns_are_client_and_label(tmp_path: Path) -> None:
    lines = ["site,age,dose,outcome"]
    lines += [f"{site},{row},{row % 3},{'ill' if row % 2 else 'well'}" for site in ("a", "b") for row in range(20)]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    cell = Cell(dataset=str(tmp_path / "visits.csv"), clients=2, columns={"client": "site", "label": "outcome"})
    check(Experiment("mine", (cell,)))
    federation = build_federation(cell, seed=0)
    assert federation.num_clients == 2
    assert federation.x.shape == (40, 2)
    with pytest.raises(UserError, match=r'say which column is the label: columns\.label = "\.\.\."'):
        build_federation(replace(cell, columns={"client": "site"}), seed=0)
    with pytest.raises(UserError, match=r"clients = 5, but .* has 2 clients; set clients = 2\."):
        build_federation(replace(cell, clients=5), seed=0)


def put_nan(client: int, x: Any, y: Any) -> None:
    x[3, 1] = numpy.nan if client == 1 else x[3, 1]


def put_negative(client: int, x: Any, y: Any) -> None:
    y[5] = -1 if client == 2 else y[5]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (put_nan, "example 23 of x holds NaN or infinity; clean the data before federating it."),
        (put_negative, "example 45 has the label -1; class labels start at 0."),
    ],
)
def test_spoilt_data_is_refused_with_its_row(tmp_path: Path, spoil: Callable[..., None], sentence: str) -> None:
    write_clients(tmp_path / "clinics", spoil)
    cell = Cell(dataset=str(tmp_path / "clinics"), clients=3)
    with pytest.raises(ValueError, match=sentence):
        build_federation(cell, seed=0)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file or folder .*; give a folder per client"):
        build_federation(Cell(dataset=str(tmp_path / "nowhere")), seed=0)


def test_whole_numbers_are_classes_unless_the_cell_says_otherwise(tmp_path: Path) -> None:
    write_clients(tmp_path / "clinics")
    cell = Cell(dataset=str(tmp_path / "clinics"), clients=3)
    assert build_federation(cell, seed=0).num_classes == 2
    numbers = build_federation(replace(cell, task="regression"), seed=0)
    assert numbers.num_classes is None
    assert numbers.y.is_floating_point()


def test_a_transform_of_the_wire_is_a_field_of_a_cell() -> None:
    changed = with_assignments(SMALL, parse_assignments(["upload=8-bit"]))
    check(changed)
    sent = [build_simulation(experiment.runs()[0], Options()) for experiment in (SMALL, changed)]
    assert [simulation.upload for simulation in sent] == [TRANSFORMS["full"], TRANSFORMS["8-bit"]]
    with pytest.raises(UserError, match="there is no transform '8bit' for uploads and downloads; did you mean '8-bit'"):
        check(with_assignments(SMALL, {"download": "8bit"}))


def test_fields_that_came_later_leave_the_names_of_stored_runs_alone() -> None:
    cell, other = Cell(), Cell(upload="half")
    younger = (
        "task",
        "upload",
        "download",
        "sizes",
        "part",
        "resize_every",
        "descriptors",
        "network",
        "read",
        "privacy",
        "in_flight",
        "select",
        "patience",
        "folds",
        "robust",
        "attack",
    )
    older = {name: value for name, value in asdict(cell).items() if name not in younger}
    assert cell_digest(cell) == hashlib.sha256(json.dumps(older, sort_keys=True).encode()).hexdigest()
    assert cell_digest(other) != cell_digest(cell)


def test_a_defense_is_given_by_name_or_with_settings() -> None:
    experiment = from_table({"method": "fedavg", "robust": ["none", "median", {"rule": "adaptive-norm"}]}, "grid")
    assert [cell.robust for cell in experiment.cells] == [None, "median", {"rule": "adaptive-norm"}]
    (cell,) = with_assignments(from_table({"robust": "per-party"}, "one"), {"robust.factor": 3.0}).cells
    assert cell.robust == {"rule": "per-party", "factor": 3.0}
    table = from_table({"robust": {"rule": "per-party", "memory": 0.9}}, "one")
    (cell,) = with_assignments(table, {"robust": "median"}).cells
    assert cell.robust == "median"
