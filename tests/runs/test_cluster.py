"""A round whose clients are shared out over the workers of a Ray cluster is the round of one process."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from clusters import cluster_of
from support import assert_close, assert_same_bits, memories_of

import pfedhn
from pfedhn.engine.crew import CohortShard
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import UserError
from pfedhn.params import take
from pfedhn.runs import cluster as module
from pfedhn.runs.assemble import assemble
from pfedhn.runs.cluster import Software, Workers, connection

pytestmark = pytest.mark.filterwarnings(  # Ray leaves files open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

NUM_CLIENTS, COHORT = 100_000, 1_000


def test_another_version_is_said() -> None:
    assert Software.here().trouble_here() is None
    other = Software.here()._replace(torch="0.4")
    assert other.trouble_here() == (
        f"it has torch {torch.__version__}, and the machine that asks 0.4; install the same version on both"
    )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with cluster_of() as nodes, connection(f"ray:{nodes.address}"):
        yield nodes


def loader() -> Callable[[int], Any]:
    """Made inside a function, so that it travels: a worker has no modules of tests."""

    def examples(client: int) -> Any:
        draw = numpy.random.default_rng(client)
        x, y = draw.normal(size=(12, 8)), draw.integers(0, 4, size=12)
        return {"train": (x[:8], y[:8]), "validation": (x[8:10], y[8:10]), "test": (x[10:], y[10:])}

    return examples


def of_this_module(client: int) -> Any:
    return loader()(client)


def large(load: Any = None, **settings: Any) -> Simulation:
    """A thousand clients a round of a hundred thousand, each loaded when it takes part."""
    load = loader() if load is None else load
    federation = pfedhn.Federation.lazy(NUM_CLIENTS, load, train=8, validation=2, test=2).evaluating(20)
    return assemble(
        pfedhn.PFedHN(local_steps=5),
        federation,
        lambda: pfedhn.MLP(8, 6, 4),
        steps=2 * COHORT,
        cohort_size=COHORT,
        evaluate_every=COHORT,
        device="cpu",
        **settings,
    )


def a_round(simulation: Simulation, trainer: Any) -> Any:
    memories, clients = simulation.initial_state().memories, simulation.cohort(0)
    rows = take(memories.rows, torch.tensor(clients))
    (name,) = simulation.models
    kept = memories.private[name].take(clients)
    return trainer.train(CohortShard(name, 0, clients, memories.shared, rows, kept))


@pytest.mark.slow
def test_a_large_cohort_over_workers_is_the_round_of_one_process(nodes: Any) -> None:
    alone = large()
    shared_out = replace(alone, make_crew=Workers)
    expected, state = alone.initial_state(), shared_out.initial_state()
    for simulation, moving in ((alone, expected), (shared_out, state)):
        for _ in simulation.rounds(moving):
            pass
    assert state.round == 2
    assert_close(memories_of(state), memories_of(expected), rtol=1e-4, atol=1e-6)  # float32
    assert (state.bytes_down, state.bytes_up) == (expected.bytes_down, expected.bytes_up)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(nodes: Any) -> None:
    import ray

    simulation = large()
    crew = Workers(simulation)
    assert len(crew.workers) == 2
    expected = a_round(simulation, crew)
    os.kill(ray.get(crew.workers[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    again = a_round(simulation, crew)
    assert_same_bits(again[:2], expected[:2])
    assert again.bytes_down == expected.bytes_down


@pytest.mark.slow
def test_data_that_a_worker_cannot_load_are_said(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLINICS", str(tmp_path))  # here, and not where the workers were started

    examples = loader()

    def load(client: int) -> Any:
        assert os.environ["CLINICS"]
        return examples(client)

    simulation = large(load)
    with pytest.raises(UserError, match=r"loading client \d+ failed \(KeyError: 'CLINICS'\); fix `load`"):
        a_round(simulation, Workers(simulation))


@pytest.mark.slow
def test_workers_of_another_version_are_refused(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Software, "here", lambda: Software("9.9.9", torch.__version__))
    with pytest.raises(UserError, match=r"a Ray worker cannot be used: it has pfedhn \S+, and the machine that asks 9"):
        Workers(large())


@pytest.mark.slow
def test_workers_without_a_persons_own_modules_are_refused(nodes: Any) -> None:
    with pytest.raises(
        UserError, match=r"cannot make the run .*test_cluster.*; give every machine your own modules too"
    ):
        Workers(large(of_this_module))


@pytest.mark.slow
def test_train_shares_its_rounds_out_where_it_is_told_to(nodes: Any) -> None:
    federation = pfedhn.Federation.lazy(50, loader(), train=8, validation=2, test=2)
    settings: Any = {"steps": 40, "cohort_size": 20, "progress": False, "executor": "traced", "device": "cpu"}
    model = lambda: pfedhn.MLP(8, 6, 4)  # noqa: E731
    alone = pfedhn.train("pfedhn", federation, model, **settings)
    there = pfedhn.train("pfedhn", federation, model, on=f"ray:{nodes.address}", **settings)
    assert_close(memories_of(there.state), memories_of(alone.state), rtol=1e-5, atol=1e-6)
    x = numpy.random.default_rng(0).normal(size=(12, 8))
    joined = there.add_client(x, numpy.arange(12) % 4, rounds=2)  # the workers have nothing to do with it
    assert joined.model(torch.zeros(1, 8)).shape == (1, 4)
