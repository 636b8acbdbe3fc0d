"""Norms of the server's memories: those of a plain computation, noted where they are asked for and nowhere else."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import NUM_CLIENTS, finish, model, simulate

import pfedhn
from pfedhn.algorithms import ALGORITHMS
from pfedhn.combinators import innermost
from pfedhn.data.federation import Federation
from pfedhn.engine.norms import norms
from pfedhn.params import Params, subtract, take
from pfedhn.settings import values_of


def length(weights: Params) -> float:
    return float(torch.cat([value.flatten() for value in weights.values()]).norm())


@pytest.mark.parametrize("executor", ["loop", "vectorized"])
@pytest.mark.parametrize("method", ["pfedhn", "pfedhn-plus"])
def test_norms_of_a_hypernetwork(federation: Federation, method: str, executor: str) -> None:
    spec: Any = ALGORITHMS[method](local_steps=2, hidden_dim=7, lr=0.1, local_lr=0.1)
    simulation = simulate(spec, federation, rounds=4, executor=executor)
    state = finish(simulation)
    found = norms(simulation, state.memories)
    trained, rows = simulation.exchange.newest(state.memories.shared), state.memories.rows
    used = simulation.exchange.used(state.memories.shared)
    assert (length(trained.phi) == length(used.phi)) == (values_of(spec).get("averaging") is None)
    assert found["shared"] == pytest.approx(length(trained.phi), rel=1e-5)
    up_to_date = innermost(simulation.algorithm).up_to_date(rows, trained)
    assert found["embeddings"] == pytest.approx(float(up_to_date.embedding.norm(dim=1).mean()), rel=1e-5)
    network, algorithm = simulation.model_of(0), innermost(simulation.algorithm)
    given = [algorithm.publish(network, used, take(rows, client)) for client in range(NUM_CLIENTS)]
    assert found["served"] == pytest.approx(sum(map(length, given)) / NUM_CLIENTS, rel=1e-5)
    mean = {name: sum(weights[name] for weights in given) / NUM_CLIENTS for name in given[0]}
    apart = [length(subtract(weights, mean)) for weights in given]
    assert found["apart"] == pytest.approx(sum(apart) / NUM_CLIENTS, rel=1e-5)
    assert min(apart) > 1e-6


def test_a_method_has_the_norms_of_what_its_server_keeps(federation: Federation) -> None:
    average = simulate(ALGORITHMS["fedavg"](local_steps=2), federation, rounds=2, cohort=2)
    state = finish(average)
    size = pytest.approx(length(state.memories.shared), rel=1e-5)
    same = pytest.approx(0, abs=1e-12)  # for all clients
    assert norms(average, state.memories) == {"shared": size, "served": size, "apart": same}
    alone = simulate(ALGORITHMS["local"](local_steps=2), federation, rounds=1)
    assert norms(alone, finish(alone).memories) == {}


def test_several_networks_count_by_their_clients(federation: Federation) -> None:
    names = ["conv"] + ["mlp"] * (NUM_CLIENTS - 1)
    models = {name: model(name) for name in ("mlp", "conv", "batchnorm")}  # nobody runs the last
    simulation = simulate(ALGORITHMS["pfedhn"](local_steps=1), federation.with_architectures(names), models, rounds=1)
    state = finish(simulation)
    shared, rows, algorithm = state.memories.shared, state.memories.rows, simulation.algorithm
    each = [length(algorithm.publish(models[name], shared, take(rows, place))) for place, name in enumerate(names)]
    found = norms(simulation, state.memories)
    assert found["served"] == pytest.approx(sum(each) / NUM_CLIENTS, rel=1e-5)
    assert 0 < found["apart"] < found["served"]


def train(folder: Path, **settings: Any) -> pfedhn.Run:
    x, y = numpy.random.default_rng(0).normal(size=(120, 4)), numpy.arange(120) % 3
    federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=4))
    spec = pfedhn.PFedHN(local_steps=1, hidden_dim=4)
    common: dict[str, Any] = {"steps": 4, "evaluate_every": 2, "progress": False, "device": "cpu"}
    return pfedhn.train(spec, federation, "mlp-3", directory=folder, **(common | settings))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "captured"])
def test_they_are_in_the_history_of_a_run_that_was_asked_for_them(tmp_path: Path, executor: str) -> None:
    run = train(tmp_path / "with", norms=True, executor=executor)
    noted = [moment.norms for moment in run.history]
    assert noted[-1] == norms(run.simulation, run.state.memories) != noted[0]
    assert [moment.norms for moment in pfedhn.load(tmp_path / "with").history] == noted
    assert run.history[-1].numbers()["served_norm"] == noted[-1]["served"]
    without = train(tmp_path / "without", executor=executor)
    assert [moment.norms for moment in without.history] == [None] * 3
    lines = (tmp_path / "without" / "metrics.jsonl").read_text().splitlines()
    assert not any("norms" in json.loads(line) for line in lines)
    assert [moment.test for moment in without.history] == [moment.test for moment in run.history]
