"""What SPEC leaves to the federation comes from its parties' training rows, as in a simulation of the same parties."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pfedhn.data.federation import Federation
from pfedhn.data.federation_summary import federation_statistics, scaled_with
from pfedhn.data.summaries import Asked, Noise, SummaryError
from pfedhn.deploy.examples import read_examples
from pfedhn.deploy.plan import plan_digest
from pfedhn.deploy.spec import FederationSpec, read_spec, to_plan, unresolved
from pfedhn.deploy.statistics import (
    asked_of,
    party_summary,
    received,
    resolved,
    resolved_data,
    statistics_of,
    with_data,
)
from pfedhn.errors import UserError
from pfedhn.experiments.data import dealing

TABLE = """
model = "mlp-4"
clients = 3
{more}
[data]
classes = "federation"
label = "outcome"
features = ["age", "dose"]
mean = "federation"
std = "federation"
"""
ARRAYS = """
model = "mlp-4"
clients = 3
[data]
classes = {classes}
shape = [2, 3, 3]
mean = "federation"
"""
PARTIES = {"lyon": 40, "paris": 25, "rome": 31}


def spec(text: str, **parts: str) -> FederationSpec:
    return read_spec(text.format(**parts), Path("mine.toml"))


def write_tables(folder: Path) -> dict[str, Path]:
    files = {}
    for number, (name, count) in enumerate(PARTIES.items()):
        draw = numpy.random.default_rng(number)
        kinds = ["well", "ill", "dead"] if name == "rome" else ["well", "ill"]
        lines = [
            f"{draw.normal(50 + 10 * number, 8):.4f},{draw.exponential():.4f},{kinds[row % len(kinds)]}"
            for row in range(count)
        ]
        files[name] = folder / f"{name}.csv"
        files[name].write_text("\n".join(["age,dose,outcome", *lines]))
    return files


def gathered(told: FederationSpec, places: dict[str, Path], min_group: int = 1) -> FederationSpec:
    """SPEC as the server resolves it, by way of JSON."""
    asked = Asked.of(json.loads(json.dumps(asked_of(told).to_json())))
    sent = [party_summary(place, name, told, asked, min_group=min_group) for name, place in places.items()]
    summaries = [received(json.loads(json.dumps(one)), told, asked) for one in sent]
    found = resolved(told, statistics_of(told, summaries))
    values = json.loads(json.dumps(resolved_data(told, statistics_of(told, summaries))))
    assert with_data(told, values) == found  # as a party makes it
    return found


@pytest.mark.parametrize("more", ["", "stratify = true", "folds = 5\nseeds = [2]"])
def test_parties_train_on_what_a_simulation_of_them_does(more: str, tmp_path: Path) -> None:
    told, files = spec(TABLE, more=more), write_tables(tmp_path)
    assert unresolved(told.data) == ("classes", "mean", "std")
    found = gathered(told, files)
    assert unresolved(found.data) == ()
    assert found.data.classes == ("dead", "ill", "well")
    plan = to_plan(found)
    parties = {name: read_examples(file, name, found, plan) for name, file in files.items()}
    rows = {name: numpy.genfromtxt(file, delimiter=",", skip_header=1, dtype=str) for name, file in files.items()}
    classes = ["dead", "ill", "well"]
    raw = {
        name: (part[:, :2].astype(numpy.float32), numpy.array([classes.index(label) for label in part[:, 2]]))
        for name, part in rows.items()
    }
    simulated = Federation.from_clients(raw, class_names=classes, **dealing(told.cell, told.seed))
    statistics = federation_statistics(simulated)
    assert found.data.mean == tuple(statistics.columns[name].mean for name in "01")
    assert found.data.std == statistics.deviations("01")
    scaled = scaled_with(simulated, statistics)
    for client, party in enumerate(parties.values()):
        for split in ("train", "validation", "test"):
            mine, theirs = party.splits[split].of(0), scaled.splits[split].of(client)
            assert torch.equal(party.x[mine], scaled.x[theirs])
            assert torch.equal(party.y[mine], scaled.y[theirs])


def test_only_what_is_left_open_is_asked_and_changed(tmp_path: Path) -> None:
    told = spec(ARRAYS, classes="3")
    assert asked_of(told) == Asked(("0", "1"), classes=False)
    assert asked_of(replace(told, data=replace(told.data, mean=None))) == Asked()
    places = {}
    for number, name in enumerate(PARTIES):
        places[name] = tmp_path / name
        places[name].mkdir()
        x = numpy.random.default_rng(number).integers(0, 255, (20, 2, 3, 3)).astype(numpy.uint8)
        numpy.save(places[name] / "x.npy", x)
        numpy.save(places[name] / "y.npy", numpy.arange(20) % 3)
    found = gathered(told, places)
    assert (found.data.std, found.data.classes) == (None, 3)
    assert isinstance(found.data.mean, tuple)
    assert len(found.data.mean) == 2
    counted = gathered(spec(ARRAYS, classes='"federation"'), places)
    assert counted.data.classes == 3  # numbers from 0
    assert plan_digest(to_plan(counted)) == plan_digest(to_plan(found))


def test_empty_cells_are_counted_and_small_classes_are_withheld(tmp_path: Path) -> None:
    files = write_tables(tmp_path)
    text = files["lyon"].read_text().replace("well", "rare", 1).splitlines()
    text[3:23] = [line.replace(line.split(",")[0], "", 1) for line in text[3:23]]
    files["lyon"].write_text("\n".join(text))
    told = spec(TABLE, more="")
    one = party_summary(files["lyon"], "lyon", told, asked_of(told), min_group=5)
    assert one["columns"]["age"]["missing"] > 5
    assert one["columns"]["dose"]["missing"] == 0
    assert "rare" not in one["classes"]
    noisy = asked_of(told, bounds={"age": (0.0, 120.0), "dose": (0.0, 10.0)})
    first, second = (
        party_summary(files["paris"], "paris", told, noisy, min_group=5, noise=Noise(1.0)) for _ in range(2)
    )
    assert first != second  # of the operating system's randomness
    assert received(first, told, noisy) == first
    with pytest.raises(SummaryError, match="other columns than were asked"):
        received(first, told, Asked(("age",)))


def test_what_is_open_is_not_trained_on(tmp_path: Path) -> None:
    told, files = spec(TABLE, more=""), write_tables(tmp_path)
    with pytest.raises(UserError, match="leaves classes and mean and std to the federation"):
        to_plan(told)
    plan = to_plan(gathered(told, files))
    with pytest.raises(UserError, match="gather them first"):
        read_examples(files["lyon"], "lyon", told, plan)
    nobody = statistics_of(told, [])
    with pytest.raises(UserError, match="no party says enough about 'age'"):
        resolved(told, nobody)
    with pytest.raises(UserError, match="no party says which classes"):
        resolved(spec(ARRAYS.replace('mean = "federation"', ""), classes='"federation"'), nobody)


GOOD: dict[str, Any] = {"classes": ["ill", "well"], "mean": [1.0, 2.0], "std": [1.0, 2.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["ill", "ill"]}, {"classes": "federation"}, {"classes": []}, {"std": [0.0, 1.0]},
        {"std": [math.nan, 1.0]}, {"mean": "federation"}, {"mean": ["1", 2.0]}, {"label": "other"}, {"mean": None},
    ],
)  # fmt: skip
def test_a_party_refuses_what_a_server_cannot_have_resolved(change: dict[str, Any]) -> None:
    told = spec(TABLE, more="")
    assert with_data(told, GOOD).data.classes == ("ill", "well")
    with pytest.raises(UserError):
        with_data(told, GOOD | change)
