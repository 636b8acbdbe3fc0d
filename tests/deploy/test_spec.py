"""The file of a federation and a party's data: what fits is what a simulation would make of it, the rest is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from pyarrow import csv, parquet

from pfedhn.data.files import read_federation
from pfedhn.deploy.examples import read_examples
from pfedhn.deploy.plan import plan_digest
from pfedhn.deploy.spec import FederationSpec, read_spec, to_plan
from pfedhn.errors import UserError
from pfedhn.models import squared_error

TABLE = """
model = "mlp-4"
clients = 3
[data]
classes = ["ill", "well"]
label = "outcome"
features = ["age", "dose"]
mean = [50.0, 1.0]
std = [10.0, 0.5]
"""
ARRAYS = """
clients = 4
[data]
classes = 3
shape = [2]
[sizes]
S = "mlp-4"
L = "mlp-8"
"""


def spec(text: str) -> FederationSpec:
    return read_spec(text, Path("mine.toml"))


def write_arrays(folder: Path, y: Any, width: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    numpy.save(folder / "x.npy", numpy.arange(len(y) * width, dtype=numpy.float32).reshape(len(y), width))
    numpy.save(folder / "y.npy", numpy.array(y))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clients = 3", "does not say what examples look like"),
        ("[data]\nclasses = 3", "does not say what examples look like"),
        ('[data]\nclasses = ["a", "a"]\nshape = [2]', "names a class twice"),
        ('[data]\nclasses = 2\nfeatures = ["a"]', "no label"),
        ("[data]\nclasses = 2\nshape = [2]\nstd = 0.0", "above 0"),
        ("[data]\nclases = 2", "did you mean 'classes'"),
        ("[policy]\npatients = 2\n[data]\nclasses = 2\nshape = [2]", "did you mean 'patience'"),
        ("seeds = [0, 1]\n[data]\nclasses = 2\nshape = [2]", "leave one of each"),
        ('method = ["pfedhn", "local"]\n[data]\nclasses = 2\nshape = [2]', "leave one of each"),
        ('pretrain = "fedavg"\n[data]\nclasses = 2\nshape = [2]', "leave it out"),
        ("steps = 0\n[data]\nclasses = 2\nshape = [2]", "at least 1"),
        *[
            (f"[policy]\n{line}\n[data]\nclasses = 2\nshape = [2]", sentence)
            for line, sentence in (
                ("in_flight = 0", "at least 1"),
                ("in_flight = -3", "at least 1"),
                ("start_with = 0", "at least 1"),
                ("start_with = 99", "at most 50, the number of clients, got 99"),
                ("patience = 0", "at least 1"),
                ("max_staleness = -1", "at least 0"),
                ("reply_seconds = -1.0", "above 0"),
                ("max_update = 0.0", "above 0"),
                ("aside_seconds = -1.0", "at least 0"),
                ("return_seconds = -1.0", "at least 0"),
                ("checkpoint_seconds = -1.0", "at least 0"),
            )
        ],
        ("joining_rounds = 0\n[data]\nclasses = 2\nshape = [2]", "at least 1"),
        ("data = 3", r"heading \[data\]"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        spec(text)


def test_a_plan_has_what_the_file_says() -> None:
    plan = to_plan(spec(ARRAYS + "[settings]\nlocal_steps = 7\n[policy]\nin_flight = 3\n"))
    assert list(plan.models) == ["S", "L"]
    assert plan.algorithm.num_batches == 7
    assert plan.num_clients == 4
    without_policy = to_plan(spec(ARRAYS + "[settings]\nlocal_steps = 7\n"))
    assert plan_digest(plan) == plan_digest(without_policy) != plan_digest(to_plan(spec(ARRAYS)))
    for wrong, sentence in (
        ("cohort_size = 9", "cannot be drawn from 4"), ('upload = "hald"', "did you mean 'half'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            to_plan(spec(wrong + ARRAYS))
    for given in (
        'in_flight = 2\nmethod = "local"' + ARRAYS,
        'method = "local"' + ARRAYS + "[policy]\nin_flight = 2\n",
    ):
        with pytest.raises(UserError, match="leave in_flight out"):
            to_plan(spec(given))
    with pytest.raises(UserError, match="no target network"):
        to_plan(spec(TABLE.replace("mlp-4", "mlq-4")))
    numbers = to_plan(spec('model = "mlp-4"\nclients = 2\n[data]\nshape = [2]\n'))
    assert next(iter(numbers.models.values())).per_example_loss is squared_error


def test_plans_with_other_frozen_weights_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "on_a_base.py").write_text(
        """from torch import nn

def make(base=0.5):
    network = nn.Linear(2, 3)
    nn.init.constant_(network.requires_grad_(False).weight, base)
    network.bias.requires_grad_()
    return network

def other():
    return make(0.25)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    network = 'model = "on_a_base:{}"\nclients = 2\n[data]\nclasses = 3\nshape = [2]\n'
    one, same = (to_plan(spec(network.format("make"))) for _ in range(2))
    other = to_plan(spec(network.format("other")))
    other = replace(other, models=dict(zip(one.models, other.models.values(), strict=True)))
    assert plan_digest(one) == plan_digest(same) != plan_digest(other)


def test_what_a_method_freezes_is_frozen_at_the_start_that_the_seed_gives_it() -> None:
    settings = '[settings]\ngenerated = ["last"]\nrest = "frozen"\n'
    plans = [to_plan(spec(f"seeds = [{seed}]\n{ARRAYS}{settings}")) for seed in (0, 1)]
    first, second = (plan.models["S"].constants for plan in plans)
    assert first
    assert not first.keys() & plans[0].models["S"].shapes.keys()
    assert not all(torch.equal(first[name], second[name]) for name in first)


def test_a_party_has_the_split_that_a_simulation_gives_it(tmp_path: Path) -> None:
    for name, y in (("lyon", [0, 1, 2] * 7), ("paris", [1, 1, 2, 0] * 6)):
        write_arrays(tmp_path / name, y)
    together = read_federation(tmp_path)
    given = spec(ARRAYS)
    for client, name in enumerate(("lyon", "paris")):
        alone = read_examples(tmp_path / name, name, given, to_plan(given))
        assert alone.num_classes == 3
        assert int(alone.identity(torch.tensor(0))) == int(together.identity(torch.tensor(client)))
        for split, part in together.splits.items():
            mine = alone.splits[split].of(0)
            assert torch.equal(alone.x[mine], together.x[part.of(client)])
            assert torch.equal(alone.y[mine], together.y[part.of(client)])


def test_a_table_is_read_by_its_columns_and_scaled(tmp_path: Path) -> None:
    lines = [f"{'well' if i % 3 else 'ill'},{40 + i},note{i},{0.5 * (i % 4)}" for i in range(20)]
    (tmp_path / "visits.csv").write_text("\n".join(["outcome,age,comment,dose", *lines]))
    given = spec(TABLE)
    data = read_examples(tmp_path / "visits.csv", "lyon", given, to_plan(given))
    ages, doses = (40 + torch.arange(20.0) - 50) / 10, (0.5 * (torch.arange(20) % 4) - 1) / 0.5
    expected = torch.stack([ages, doses], 1)
    numbers = torch.cat([data.splits[split].of(0) for split in ("train", "validation", "test")]).sort().values
    assert torch.equal(numbers, torch.arange(20))
    torch.testing.assert_close(data.x, expected)
    assert torch.equal(data.y, (torch.arange(20) % 3 > 0).long())
    kept = csv.read_csv(tmp_path / "visits.csv")
    notes = kept.set_column(2, "comment", pyarrow.array([None, *(["seen"] * 19)]))  # nobody reads it
    parquet.write_table(notes, tmp_path / "visits.parquet")
    same = read_examples(tmp_path / "visits.parquet", "lyon", given, to_plan(given))
    torch.testing.assert_close(same.x, expected)


def test_data_that_do_not_fit_stay_out(tmp_path: Path) -> None:
    table, arrays = spec(TABLE), spec(ARRAYS)
    (tmp_path / "visits.csv").write_text("outcome,age,dose\n" + "dead,3,1\n" * 9)
    with pytest.raises(UserError, match="has the label 'dead'; there are ill, well"):
        read_examples(tmp_path / "visits.csv", "lyon", table, to_plan(table))
    (tmp_path / "other.csv").write_text("outcome,age,does\n" + "ill,3,1\n" * 9)
    with pytest.raises(UserError, match="no column 'dose'; did you mean 'does'"):
        read_examples(tmp_path / "other.csv", "lyon", table, to_plan(table))
    with pytest.raises(UserError, match="names no columns"):
        read_examples(tmp_path / "other.csv", "lyon", arrays, to_plan(arrays))
    with pytest.raises(UserError, match="does not exist"):
        read_examples(tmp_path / "nothing", "lyon", arrays, to_plan(arrays))
    for y, sentence in (
        ([0, 1, 3] * 5, "label 3; .* from 0 to 2"),
        ([0.5, 1, 2] * 5, "label 0.5"),
        (["a"] * 9, "texts"),
    ):
        write_arrays(tmp_path / "own", y)
        with pytest.raises(UserError, match=sentence):
            read_examples(tmp_path / "own", "lyon", arrays, to_plan(arrays))
    write_arrays(tmp_path / "own", [0, 1, 2] * 5, width=3)
    with pytest.raises(UserError, match=r"shape \(3,\); .* \(2,\)"):
        read_examples(tmp_path / "own", "lyon", arrays, to_plan(arrays))
