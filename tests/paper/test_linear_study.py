"""Proposition 1: the trained linear hypernetwork is the truncated decomposition of the local solutions."""

from dataclasses import replace

import numpy
import pytest
import torch

from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import Experiment
from pfedhn.paper import linear
from pfedhn.paper.client_map import neighbors, purity
from pfedhn.paper.mix_and_match import normalized
from pfedhn.paper.novel_clients import nearest_distance

DIM, RANK = 6, 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [RANK, pytest.param(1, marks=pytest.mark.slow)])
def test_the_trained_space_is_the_principal_one(rank: int) -> None:
    partition = {"rank": RANK, "dim": DIM, "samples": 12}
    cell = replace(linear.cell(rank), clients=12, cohort_size=12, partition=partition, steps=12 * 120)
    cell = replace(cell, settings={**cell.settings, "lr": 0.03})
    simulation = build_simulation(Experiment("linear", (cell,)).runs([0])[0], Options(executor="vectorized"))
    state = simulation.initial_state()
    for _ in simulation.rounds(state):
        pass
    federation = simulation.federation
    x = federation.x[federation.splits["train"].of(0)].double()
    assert numpy.allclose(x.T @ x / len(x), numpy.eye(DIM), atol=1e-5)  # what the proposition assumes
    local = numpy.stack([linear._solution(federation, client) for client in range(federation.num_clients)])
    (w,) = state.memories.shared.phi.values()
    rows = simulation.algorithm.up_to_date(state.memories.rows, state.memories.shared)  # type: ignore[attr-defined]
    true = linear.truth(federation.num_clients, 0, DIM, RANK)
    found = linear.compared(w.double().numpy(), rows.embedding.double().numpy(), local, true)
    assert found["angle"] < 0.2
    assert found["loss"] == pytest.approx(found["closed_loss"], rel=1e-4)
    centered = numpy.linalg.svd(local - local.mean(0), full_matrices=False)[2][:rank]
    cosines = numpy.linalg.svd(centered @ numpy.linalg.qr(w.double().numpy())[0], compute_uv=False)
    assert cosines.min() < 0.9998  # two degrees off: it is not the centered one
    if rank == RANK:
        assert found["error"] < found["local_error"]  # and it removes noise


def test_neighbors_rows_and_distances() -> None:
    embeddings = numpy.array([[0.0], [0.1], [5.0], [5.1]])
    assert neighbors(embeddings).tolist() == [1, 0, 3, 2]
    assert purity(neighbors(embeddings), numpy.array([0, 0, 1, 1])) == 1.0
    assert purity(neighbors(embeddings), numpy.array([0, 1, 0, 1])) == 0.0
    assert normalized(numpy.array([[0.5, 1.0, 0.75], [0.3, 0.3, 0.3]])).tolist() == [[0, 1, 0.5], [1, 1, 1]]
    new, trained = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    assert nearest_distance(new, trained) == [0.5]
