"""A run that does not wait is what a server over a network would do, and can stop and go on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import (
    BATCH_SIZE,
    assert_close,
    assert_same_bits,
    finish,
    make_federation,
    memories_of,
    model,
    mostly_slow,
    simulate,
    with_steps,
)

from pfedhn import keys
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.data.federation import Federation
from pfedhn.engine.round import Reply, Returned
from pfedhn.engine.rounds import is_captured
from pfedhn.engine.transform import TRANSFORMS
from pfedhn.errors import UserError
from pfedhn.params import take
from pfedhn.privacy import Privacy
from pfedhn.storage.checkpoint import load_state, save_state


@pytest.fixture(scope="module")
def federation() -> Federation:
    return make_federation()


@pytest.mark.parametrize("method", mostly_slow(["pfedhn-pc", "fedavg"], "pfedhn-pc"))
def test_one_at_a_time_is_a_run_that_waits(federation: Federation, method: str) -> None:
    simulation = simulate(with_steps(method, 2), federation, rounds=6, executor="loop")
    waiting, state = finish(simulation), finish(replace(simulation, in_flight=1))
    assert_same_bits(memories_of(state), memories_of(waiting))
    assert (state.bytes_down, state.bytes_up) == (waiting.bytes_down, waiting.bytes_up)
    assert state.flight.max_staleness == 0


def test_an_update_is_for_the_weights_that_were_sent(federation: Federation) -> None:
    """Who is at work has what it makes of the server's weights of some steps ago, worked out here from those."""
    simulation = simulate(with_steps("fedavg", 2), federation, rounds=5, in_flight=3, executor="loop")
    state, exchange, network = simulation.initial_state(), simulation.exchange, model("mlp")
    history, num_old = [], 0
    for progress in simulation.rounds(state):
        history.append(state.memories.shared)
        for work in state.flight.working:
            shared, number, identity = history[work.version], torch.tensor(work.number), torch.tensor(work.client)
            key = keys.fold(simulation.seed, "batches", work.number)
            batches = take(federation.batches(identity.reshape(1), key, 2, BATCH_SIZE), 0)
            offer = exchange.offer(network, shared, (), number, identity)
            kept = exchange.first_contact(network, shared, shared, work.client)
            assert_close(take(work.reply.update, 0), exchange.train(network, offer, kept, batches)[0])
            num_old += work.version < progress.step
    assert num_old > 5
    assert state.flight.num_sent == 5 + 2  # who replied last has not been followed yet


@pytest.mark.slow
def test_more_at_work_are_staler(federation: Federation) -> None:
    """With one step per reply, an update is late by as many steps as others are at work, on average."""
    for in_flight in (3, 6):
        simulation = simulate(with_steps("fedavg", 1), federation, rounds=60, in_flight=in_flight)
        flight = finish(simulation).flight
        assert flight.sum_staleness / 60 == pytest.approx(in_flight - 1, rel=0.15)
        assert in_flight - 1 < flight.max_staleness < 3 * in_flight


@pytest.mark.slow
def test_a_stop_and_go_changes_nothing(federation: Federation, tmp_path: Path) -> None:
    """Also with clients of two networks, whose replies have other shapes, and budgets that run out."""
    privacy = Privacy(1.0, 3.0, epsilon=5.0)
    both = {"mlp": model("mlp"), "wide": model("wide")}
    mixed = federation.with_architectures(["mlp", "wide"] * 3)
    simulation = simulate(
        with_steps("pfedhn-pc", 2),
        mixed,
        both,
        rounds=14,
        cohort=2,
        in_flight=4,
        executor="loop",
        upload=TRANSFORMS["half"],
        privacy=privacy,
    )
    whole = finish(simulation)
    assert set(whole.num_updates.values()) == {privacy.num_rounds(simulation.privacy_cost(0))}
    state = simulation.initial_state()
    for progress in simulation.rounds(state):
        if progress.step == 10:
            break
    assert len(state.flight.working) >= 2
    save_state(tmp_path, state, simulation)
    loaded = load_state(tmp_path, simulation).state
    assert loaded is not None
    assert_same_bits([work[5:] for work in loaded.flight.working], [work[5:] for work in state.flight.working])
    again = finish(simulation, loaded)
    assert_same_bits(memories_of(again), memories_of(whole))
    assert again.num_updates == whole.num_updates
    assert vars(again.flight) | {"working": []} == vars(whole.flight) | {"working": []}
    assert (again.bytes_down, again.bytes_up) == (whole.bytes_down, whole.bytes_up)


def test_what_cannot_go_without_waiting_is_refused(federation: Federation) -> None:
    simulation = simulate(FedAvg(), federation)
    with pytest.raises(UserError, match="at least one client"):
        replace(simulation, in_flight=0)
    with pytest.raises(UserError, match="send nothing to wait for"):
        simulate(with_steps("local", 1), federation, in_flight=2)
    with pytest.raises(UserError, match="trains one client at a time"):
        replace(simulation, in_flight=2, make_crew=lambda run: run)
    assert not is_captured(replace(simulation, in_flight=2, executor="captured"))


def test_an_update_for_old_weights_counts_less(federation: Federation) -> None:
    """With s steps in between 1 / (1 + s) of it; the mean of FedAvg, whose sizes are equal here, is worked out."""
    simulation = simulate(FedAvg(local_steps=1, rule="mean"), federation)
    network, exchange = simulation.model_of(0), simulation.exchange
    shared = network.fresh(0)
    updates = {
        name: torch.stack([torch.ones_like(value), 2 * torch.ones_like(value)]) for name, value in shared.items()
    }
    one = torch.ones(2, dtype=torch.int64)
    replies = Reply(updates, one, {}, one, torch.tensor([7, 4]))
    now, _ = exchange.step(shared, [Returned(network, (), replies)], torch.tensor(7))
    assert_close(now, {name: value - (1 + 2 / 4) / 2 for name, value in shared.items()})
    in_full, _ = exchange.step(shared, [Returned(network, (), replies)])
    assert_close(in_full, {name: value - (1 + 2) / 2 for name, value in shared.items()})
