"""A cell becomes the federation that it names."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import assert_same_bits, memories_of
from torch.utils import _pytree as pytree

import pfedhn
from pfedhn.data.partition import dirichlet
from pfedhn.engine.rounds import rounds
from pfedhn.errors import UserError
from pfedhn.experiments.build import build_simulation, check
from pfedhn.experiments.data import build_federation, build_partition
from pfedhn.experiments.directory import Options
from pfedhn.experiments.execute import start
from pfedhn.experiments.grid import from_table, from_toml, with_assignments
from pfedhn.experiments.preflight import build_each_cell, survey
from pfedhn.experiments.spec import Cell, Experiment, RunSpec
from pfedhn.models import build, factory
from pfedhn.runs.assemble import assemble
from pfedhn.runs.execute import drain
from pfedhn.settings import to_toml
from pfedhn.storage.directory import Origin, RunDirectory

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


def test_columns_that_need_scaling_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random = numpy.random.default_rng(0)
    lines = [f"{'ab'[i % 2]},{random.normal():.3f},{random.normal(60, 15):.1f},{i % 2}" for i in range(60)]
    (tmp_path / "ages.csv").write_text("\n".join(["client,dose,age,label", *lines]))
    cell = Cell(dataset=str(tmp_path / "ages.csv"), columns={"client": "client", "label": "label"}, clients=2)
    build_federation(replace(cell, model="tabular-32"), seed=0)
    build_federation(replace(cell, sizes=("tabular-8", "tabular-16")), seed=0)
    assert not caplog.messages  # these networks scale by themselves
    for seed in (0, 1):
        build_federation(cell, seed)
    (message,) = caplog.messages
    assert message.startswith("ages.csv is not scaled: its column 'age' has mean ")


def table_with_labels(file: Path, labels: list[Any]) -> Cell:
    lines = [f"{'ab'[i % 2]},{i % 7},{label}" for i, label in enumerate(labels)]
    file.write_text("\n".join(["client,dose,cost", *lines]))
    return Cell(dataset=str(file), columns={"client": "client", "label": "cost"}, clients=2, model="tabular-32")


def test_numbers_to_predict_that_need_scaling_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random = numpy.random.default_rng(0)
    labels = [round(value, 3) for value in random.normal(0, 1, 200).tolist()]
    build_federation(table_with_labels(tmp_path / "scaled.csv", labels), seed=0)
    assert not caplog.messages
    cell = table_with_labels(tmp_path / "costs.csv", [1400 + 110 * label for label in labels])
    for seed in (0, 1):
        build_federation(cell, seed)
    (message,) = caplog.messages
    assert message.startswith("costs.csv: the numbers to predict, 'cost', have mean 1")
    assert 'Set read = {scale = "all"}' in message


def test_many_whole_numbers_are_asked_about_and_the_answer_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_federation(table_with_labels(tmp_path / "few.csv", [i % 100 for i in range(400)]), seed=0)
    build_federation(table_with_labels(tmp_path / "often.csv", [i % 101 for i in range(2020)]), seed=0)
    cell = table_with_labels(tmp_path / "days.csv", [i % 150 + 1 for i in range(400)])
    build_federation(replace(cell, task="classification"), seed=0)
    assert not caplog.messages
    for seed in (0, 1):
        build_federation(cell, seed)
    (message,) = caplog.messages
    assert message.startswith("days.csv: 'cost': 150 different whole numbers, which are taken for classes; the network")
    assert 'tells 151 apart. For a quantity, set task = "regression"' in message
    assert build_federation(replace(cell, task="regression"), seed=0).num_classes is None


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


@pytest.mark.parametrize("seed", [0, 3])
def test_a_table_is_split_alike_in_an_experiment_and_in_python(tmp_path: Path, seed: int) -> None:
    table = tmp_path / "visits.csv"
    rows = [f"{'lyon' if row % 3 else 'metz'},{row % 7},{'ill' if row % 2 else 'well'}" for row in range(60)]
    table.write_text("\n".join(["city,age,outcome", *rows]))
    columns = {"client": "city", "label": "outcome"}
    (tmp_path / "visits.toml").write_text(f'method = "local"\ndataset = "{table.name}"\n[columns]\n' + to_toml(columns))
    (cell,) = from_toml(tmp_path / "visits.toml").cells
    assert (cell.task, cell.clients) == ("classification", 2)
    in_experiment = build_federation(cell, seed)
    in_python = pfedhn.datasets.read_federation(table, "city", "outcome", seed=seed)
    assert in_experiment.names == in_python.names
    assert torch.equal(in_experiment.x, in_python.x)
    for split, owned in in_experiment.splits.items():
        assert torch.equal(owned.index, in_python.splits[split].index)
        assert torch.equal(owned.size, in_python.splits[split].size)


def test_a_network_by_its_name_starts_as_in_an_experiment() -> None:
    """First weights are drawn by the network's name."""
    cell = Cell(clients=6, model="mlp-8", settings={"local_steps": 1}, split=(0.5, 0.25, 0.25))
    in_experiment = build_simulation(RunSpec(cell, 0, "named"), Options())
    method = pfedhn.PFedHN(local_steps=1)
    in_python = assemble(method, build_federation(cell, 0), "mlp-8")
    assert_same_bits(memories_of(in_python.initial_state()), memories_of(in_experiment.initial_state()))
    with pytest.raises(UserError, match="mlp"):
        assemble(method, build_federation(cell, 0), "mpl-8")


SIZES = Cell(clients=6, sizes=("mlp-8", "mlp-16", "mlp-32"), steps=12, evaluate_every=4, settings={"local_steps": 1})


def one_run(cell: Cell) -> RunSpec:
    return Experiment("several", (cell,)).runs([0])[0]


def test_clients_of_several_sizes_are_served_by_one_hypernetwork() -> None:
    simulation = build_simulation(one_run(SIZES), Options())
    assert [simulation.model_of(client).name for client in range(6)] == [
        name for name in SIZES.sizes or () for _ in range(2)
    ]
    whole = build_federation(SIZES, seed=0)
    part = build_federation(replace(SIZES, method="fedavg", part="mlp-16"), seed=0)
    assert part.num_clients == 2
    for client in (0, 1):
        assert part.splits["test"].of(client).tolist() == whole.splits["test"].of(2 + client).tolist()
    assert part.number_of("3") == 1
    both = [federation.batches(torch.tensor([client]), 5, 2, 4).y for federation, client in ((whole, 3), (part, 1))]
    assert both[0].equal(both[1])  # the same draws, alone or among all


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"part": "mlp-64"}, "part = 'mlp-64' is none of the sizes"),
        ({"part": "mlp-8", "resize_every": 4}, "clients of one size cannot go on to the next"),
        ({"sizes": None, "part": "mlp-8"}, "give sizes too"),
        ({"sizes": ("mlp-8", "mlp-8")}, "name different networks"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(Experiment("several", (replace(SIZES, **wrong),)))


def test_clients_that_go_on_after_other_steps_are_another_run(tmp_path: Path) -> None:
    often, seldom = (
        build_simulation(one_run(replace(SIZES, resize_every=steps, cohort_size=6, steps=36)), Options())
        for steps in (12, 18)
    )
    origin = Origin("sizes", "pfedhn")
    RunDirectory.open(tmp_path, often, origin)
    RunDirectory.open(tmp_path, often, origin)
    with pytest.raises(UserError, match="the clients go on to another network after other steps"):
        RunDirectory.open(tmp_path, seldom, origin)


def test_clients_go_on_to_the_next_size() -> None:
    """In every stage each client trains and is tested with another network, and the state is one."""
    simulation = build_simulation(one_run(replace(SIZES, resize_every=4, cohort_size=6, steps=36)), Options())
    stages = replace(simulation, resize_every=12)
    state, twin = stages.initial_state(), simulation.initial_state()
    steps = [progress.step for progress in rounds(stages, state)]
    assert steps == [0, 6, 12, 18, 24, 30, 36]
    names = list(simulation.models)
    for stage in range(3):
        moved = [names[(names.index(name) + stage) % 3] for name in simulation.federation.architectures or ()]
        alone = replace(
            simulation,
            resize_every=None,
            federation=simulation.federation.with_architectures(moved),
            schedule=replace(simulation.schedule, steps=12 * (stage + 1)),
        )
        for _ in alone.rounds(twin):
            pass
    for one, other in zip(*(pytree.tree_leaves(s.memories.shared) for s in (state, twin)), strict=True):
        assert one.equal(other)


def test_a_fixed_embedding_by_class() -> None:
    cell = replace(SIZES, sizes=None, descriptors="class", settings={"embedding": "fixed"})
    federation = build_federation(cell, seed=0)
    assert federation.descriptors is not None
    counts = torch.stack(
        [torch.bincount(federation.y[federation.splits["train"].of(i)], minlength=10) for i in range(6)]
    )
    assert torch.allclose(federation.descriptors, counts / counts.sum(0))


def test_a_function_makes_the_data(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy, pfedhn\n\n"
        "def clinics(clients, seed, rows=20):\n"
        "    draw = numpy.random.default_rng(seed)\n"
        "    return pfedhn.Federation.from_clients(\n"
        "        [(draw.normal(size=(rows, 4)).astype('f'), numpy.arange(rows) % 2) for _ in range(clients)]\n"
        "    )\n"
    )
    toml = tmp_path / "mine.toml"
    toml.write_text('dataset = "mine.py:clinics"\nclients = 3\npartition = {rows = 12}\n')
    (cell,) = from_toml(toml).cells
    check(Experiment("made", (cell,)))
    federation = build_federation(cell, seed=0)
    assert (federation.num_clients, len(federation.x)) == (3, 36)
    with pytest.raises(UserError, match="has no setting 'row'; did you mean 'rows'"):
        check(Experiment("made", (replace(cell, partition={"row": 12}),)))
    with pytest.raises(UserError, match="has no function or class 'hospitals'"):
        check(Experiment("made", (replace(cell, dataset=f"{file}:hospitals"),)))
    other = tmp_path / "other.py"
    other.write_text("def houses():\n    return None\n")
    with pytest.raises(UserError, match=r"other.py:houses cannot be called .* begin with def houses\(clients, seed\)"):
        check(Experiment("made", (replace(cell, dataset=f"{other}:houses", partition={}),)))


NETWORKS = """
import math
from torch import nn

def tower(num_classes, shape, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(),
                         nn.Linear(width, num_classes))

class Wide(nn.Linear):
    def __init__(self, columns):
        super().__init__(columns, 10)

    def forward(self, x):
        return super().forward(x.flatten(1))
"""


def test_a_function_makes_the_network(tmp_path: Path) -> None:
    (tmp_path / "networks.py").write_text(NETWORKS)
    toml = tmp_path / "mine.toml"
    toml.write_text('model = "networks.py:tower"\nclients = 5\nsteps = 2\nmethod = "fedavg"\nnetwork = {width = 4}\n')
    experiment = with_assignments(from_toml(toml), {"network.width": 6})
    check(experiment)
    (cell,) = experiment.cells
    (run,) = experiment.runs([0])
    ready = survey(tmp_path / "runs", experiment, [run], Options(device="cpu"))
    drain(start(ready, run, lambda event: None, threading.Event()))
    (folder,) = (tmp_path / "runs").glob("*-seed0")
    found = pfedhn.load(folder, device="cpu").personal_model(0)
    assert found[1].out_features == 6
    assert found[3].out_features == 10
    for change, sentence in (
        ({"network": {"widht": 4}}, "has no setting 'widht'; did you mean 'width'"),
        ({"model": f"{tmp_path / 'networks.py'}:spire"}, "has no function or class 'spire'"),
        ({"model": f"{tmp_path / 'networks.py'}:Wide", "network": {}}, r"needs columns; give network\.columns = "),
        (
            {"model": "mlp-4"},
            r"network\.width is an argument of a function that makes the network, and model = 'mlp-4'",
        ),
        ({"model": "os:system", "network": {}}, "not code that a run can be made with"),
    ):
        with pytest.raises(UserError, match=sentence):
            check(Experiment("own", (replace(cell, **change),)))
    check(Experiment("own", (replace(cell, model=f"{tmp_path / 'networks.py'}:Wide", network={"columns": 64}),)))


def test_a_resnet_by_name_or_with_settings() -> None:
    experiment = from_table({"model": "pfedhn.models:resnet", "network": {"width": 4, "blocks": [1, 1]}}, "own")
    check(experiment)
    (cell,) = experiment.cells
    module = factory(cell.model, 10, (3, 8, 8), cell.network)()
    assert module(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    names = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    assert names == {
        *("conv1", "bn1", "fc", "layer2.0.downsample.0", "layer2.0.downsample.1"),
        *(f"layer{i}.0.{part}" for i in (1, 2) for part in ("conv1", "bn1", "conv2", "bn2")),
    }
    with torch.device("meta"):
        whole = build("resnet18", 100, (3, 32, 32))
    assert sum(value.numel() for value in whole.parameters()) == 11_220_132


def test_how_many_clients_there_are_is_said_once() -> None:
    with pytest.raises(UserError, match="num_clients is not given here; the field `clients` says how many"):
        build_partition(Cell(clients=5, partition={**NOVEL, "num_clients": 7}))


def test_a_start_that_a_method_makes_nothing_of_is_refused() -> None:
    experiment = from_table(
        {"method": ["fedavg", "pfedhn"], "clients": 5, "model": "mlp-4", "methods": {"pfedhn": {"pretrain": "fedavg"}}},
        "",
    )
    with pytest.raises(UserError, match="pfedhn makes nothing of the model that pretrain = 'fedavg' would give it"):
        build_each_cell(experiment.runs([0]), Options())
    for method in ("lg-fedavg", "fedper", "local", "pfedme"):
        cells = tuple(replace(cell, method=method) if cell.pretrain else cell for cell in experiment.cells)
        build_each_cell(replace(experiment, cells=cells).runs([0]), Options())
