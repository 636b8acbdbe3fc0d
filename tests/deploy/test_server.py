"""A server and parties that share nothing but messages are the simulator, whatever is lost on the way."""

from pathlib import Path
from typing import Any

import pytest
from engine.test_round import small
from parties import Group, simulation_of
from support import assert_close, mostly_slow

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.fedper import FedPer
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.params import take


def simulated(simulation: Simulation) -> State:
    state = simulation.initial_state()
    for _ in simulation.rounds(state):
        pass
    return state


def assert_simulated(group: Group, expected: State) -> None:
    """The server's memories, what every party keeps, bytes, and the chosen round are the simulator's."""
    state, federation = group.server.state, group.simulation.federation
    assert state.has_ended
    assert_close(state.shared, expected.memories.shared)
    for client in range(federation.num_clients):
        name = federation.name_of(client)
        assert_close(state.rows[name], take(expected.memories.rows, client))
        party, member = group.parties[name], state.members[name]
        table = expected.memories.private[party.architecture]
        if client in table.slots and member.base is not None:
            kept = party._kept("training", member.base, received_by(group, name))
            assert_close(kept, take(table.tree, table.slots[client]))
    assert (state.bytes_down, state.bytes_up) == (expected.bytes_down, expected.bytes_up)
    assert state.best is not None
    assert expected.best is not None
    assert state.best.round == expected.best.evaluation.round
    splits = expected.best.evaluation.splits
    for client in range(federation.num_clients):
        scores = state.best.results[federation.name_of(client)]
        for split in ("validation", "test"):
            loss, metric, count = scores[split]
            assert loss == pytest.approx(float(splits[split].loss[client]), rel=1e-6)
            assert (metric, count) == (float(splits[split].metric[client]), int(splits[split].count[client]))


def received_by(group: Group, name: str) -> Any:
    member = group.server.state.members[name]
    model = group.plan.models[member.architecture]
    return group.plan.exchange("training").publish(model, group.server.state.shared, group.server.state.rows[name])


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedhn-pc", "fedavg", "local", "per-fedavg"))
def test_every_method_over_the_wire_is_the_simulator(method: str, tmp_path: Path) -> None:
    simulation = simulation_of(small(method), rounds=4, cohort=2)
    expected = simulated(simulation)
    group = Group(simulation, tmp_path)
    group.server.run()
    assert_simulated(group, expected)
    for client, weights in enumerate(personal_at_best(simulation, expected)):
        mine = group.parties[f"party-{client}"].personal_model().state_dict()
        assert_close({name: mine[name] for name in weights}, weights)
    assert not group.said("refused")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedAvg(local_steps=3, statistics="shared"), FedPer(local_steps=3)])
def test_batch_statistics_travel_or_stay(algorithm: FedAvg, tmp_path: Path) -> None:
    simulation = simulation_of(algorithm, models="batchnorm", rounds=4, cohort=2)
    expected = simulated(simulation)
    group = Group(simulation, tmp_path)
    group.server.run()
    assert_simulated(group, expected)
    for client, weights in enumerate(personal_at_best(simulation, expected)):
        mine = group.parties[f"party-{client}"].personal_model().state_dict()
        assert_close({name: mine[name] for name in weights}, weights)


def personal_at_best(simulation: Simulation, state: State) -> list[Any]:
    assert state.best is not None
    best, federation = state.best, simulation.federation
    return [
        simulation.personal_weights(best.memories, simulation.model_of(client), client, best.evaluation.round)
        for client in range(federation.num_clients)
    ]
