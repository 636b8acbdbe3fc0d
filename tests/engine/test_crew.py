"""A round whose clients are shared out is the round of one process."""

from typing import Any

import pytest
import torch
from support import assert_close, assert_same_bits, finish, memories_of, mlp, model, mostly_slow, simulate

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.engine.crew import CohortShard, Devices
from pfedhn.engine.round import Kept
from pfedhn.engine.rounds import is_captured
from pfedhn.errors import UserError
from pfedhn.runs.train import train

TWO = ("cpu", "cpu:0")  # they stand in for two GPUs


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedhn", "fedavg"))
@pytest.mark.parametrize("executor", mostly_slow(["loop", "traced"], "traced"))
@pytest.mark.slow
def test_devices_that_share_a_round_give_its_bits(federation: Federation, method: str, executor: str) -> None:
    settings: Any = {"rounds": 3, "cohort": 5, "executor": executor}
    alone = simulate(ALGORITHMS[method](), federation, **settings)
    shared_out = simulate(ALGORITHMS[method](), federation, make_crew=lambda run: Devices(run, TWO), **settings)
    expected, state = finish(alone), finish(shared_out)
    # All but the server's sums over a cohort are of one client.
    assert_same_bits(memories_of(state), memories_of(expected))
    assert (state.bytes_down, state.bytes_up) == (expected.bytes_down, expected.bytes_up)


@pytest.mark.slow
def test_devices_that_batch_their_clients_agree_to_rounding(federation: Federation) -> None:
    settings: Any = {"rounds": 3, "cohort": 6, "executor": "vectorized"}
    alone = simulate(ALGORITHMS["pfedhn"](), federation, **settings)
    shared_out = simulate(ALGORITHMS["pfedhn"](), federation, make_crew=lambda run: Devices(run, TWO), **settings)
    assert_close(memories_of(finish(shared_out)), memories_of(finish(alone)))


@pytest.mark.slow
def test_clients_of_several_sizes_are_shared_out_size_by_size(federation: Federation) -> None:
    mixed = federation.with_architectures(["mlp", "wide"] * 3)
    models = {name: model(name) for name in ("mlp", "wide")}
    settings: Any = {"models": models, "rounds": 3, "cohort": 5, "executor": "loop"}
    alone = simulate(ALGORITHMS["pfedhn"](), mixed, **settings)
    shared_out = simulate(ALGORITHMS["pfedhn"](), mixed, make_crew=lambda run: Devices(run, TWO), **settings)
    assert_same_bits(memories_of(finish(shared_out)), memories_of(finish(alone)))


@pytest.mark.slow
def test_every_device_has_its_part_of_a_cohort(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(ALGORITHMS["fedavg"](), federation, cohort=5, executor="loop")
    crew = Devices(run, TWO)
    seen: list[list[int]] = []
    work = type(run).train
    monkeypatch.setattr(type(run), "train", lambda self, shard: seen.append(shard.clients) or work(self, shard))
    memories = run.initial_state().memories
    clients = [4, 1, 0, 5, 2]
    kept = memories.private["mlp"].take(clients)
    crew.train(CohortShard("mlp", 0, clients, memories.shared, memories.rows, kept))
    assert seen == [[4, 1], [0, 5, 2]]


@pytest.mark.parametrize(("clients", "parts"), [(1, 4), (7, 3), (8, 4), (1_000, 7)])
def test_parts_are_even_and_in_order(clients: int, parts: int) -> None:
    shard = CohortShard("mlp", 0, list(range(clients)), (), torch.arange(clients), Kept(*[()] * len(Kept._fields)))
    found = shard.split(parts)
    assert [client for part in found for client in part.clients] == shard.clients
    assert torch.equal(torch.cat([part.rows for part in found]), shard.rows)
    sizes = [len(part.clients) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(clients, parts)


def test_a_round_that_is_shared_out_is_not_captured(federation: Federation) -> None:
    run = simulate(ALGORITHMS["fedavg"](), federation, executor="captured", make_crew=lambda run: Devices(run, TWO))
    assert not is_captured(run)


@pytest.mark.slow
def test_several_devices_are_given_as_one_word(federation: Federation) -> None:
    settings: Any = {"steps": 10, "cohort_size": 5, "progress": False, "executor": "loop"}
    alone = train("fedavg", federation, mlp, device="cpu", **settings)
    shared_out = train("fedavg", federation, mlp, device="cpu,cpu:0", **settings)
    assert_same_bits(memories_of(shared_out.state), memories_of(alone.state))
    with pytest.raises(UserError, match="only one of them can share out the clients of a round"):
        train("fedavg", federation, mlp, device="cpu,cpu:0", on="ray", **settings)
