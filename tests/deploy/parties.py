"""A federation of parties in one process, that share nothing but messages."""

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, changed, make_federation, simulate

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.deploy.contacts import Arrival
from pfedhn.deploy.party import Party
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.server import Server
from pfedhn.deploy.signing import PrivateKey, new_key
from pfedhn.deploy.wire import WireError
from pfedhn.engine.plan import Plan
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.params import take

RUN = "run"
SMALL = {"local_steps": 3, "outer_steps": 3, "inner_steps": 2, "hidden_dim": 7, "embedding_dim": 3, "local_lr": 0.1}
KEYS = [new_key() for _ in range(8)]  # to make one takes time


def small(method: str) -> Any:
    """A method with little to compute."""
    return changed(ALGORITHMS[method](), SMALL)


def named_federation() -> Federation:
    federation = make_federation()
    names = tuple(f"party-{number}" for number in range(federation.num_clients))
    return replace(federation, names=names, identities=None)


def alone(federation: Federation, client: int) -> Federation:
    """The data that one client has on a machine of its own."""
    own = {
        name: (federation.x[part.of(client)], federation.y[part.of(client)]) for name, part in federation.splits.items()
    }
    single = Federation.from_clients({federation.name_of(client): own})
    descriptors = None if federation.descriptors is None else federation.descriptors[client : client + 1]
    shares = federation.class_shares[client : client + 1] if descriptors is None else descriptors
    return replace(single, x=torch.cat([x for x, _ in own.values()]), descriptors=shares)


def simulation_of(algorithm: Any, federation: Federation | None = None, **settings: Any) -> Simulation:
    settings = {"executor": "loop", "evaluate_every": 2, **settings}
    return simulate(algorithm, federation or named_federation(), **settings)


@dataclass
class Virtual:
    """A transport whose clock moves when somebody waits. Every party does one thing after the other.

    Args:
        parties: What each makes of a message, by name; a mapping that may change on the way.
        seconds: How long a message and its answer take, by the party's name; no time by default.
    """

    parties: Mapping[str, Callable[[bytes], bytes]]
    seconds: Callable[[str], float] = lambda party: 0.0
    now: float = 0.0
    num_posted: int = 0
    _waiting: list[tuple[float, int, str, str, bytes]] = field(default_factory=list)
    _free: dict[str, float] = field(default_factory=dict)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)

    def clock(self) -> float:
        return self.now

    def members(self) -> set[str]:
        return set(self.parties)

    def withdraw(self, party: str, kind: str) -> None:
        """What is on its way comes all the same."""

    def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
        self.num_posted += 1
        ready = max(self.now, self._free.get(party, 0.0)) + self.seconds(party)
        self._free[party] = ready
        heapq.heappush(self._waiting, (ready, next(self._order), party, kind, content))

    def arrivals(self, seconds: float) -> list[Arrival]:
        if not self._waiting or self._waiting[0][0] > self.now + seconds:
            self.now += seconds
            return []
        ready, _, party, kind, content = heapq.heappop(self._waiting)
        self.now = max(self.now, ready)
        return self.delivered(party, kind, content)

    def delivered(self, party: str, kind: str, content: bytes) -> list[Arrival]:
        """What becomes of a message that has reached its party."""
        if party not in self.parties:
            return [Arrival(party, kind, None, "has left")]
        try:
            return [Arrival(party, kind, self.parties[party](content))]
        except WireError as error:
            return [Arrival(party, kind, None, f"refused a message: the sender {error}")]


@dataclass
class Group:
    """A server and its parties; any of them can be made anew from its folder, as after a kill."""

    simulation: Simulation
    folder: Path
    policy: Policy = field(default_factory=lambda: Policy(aside_seconds=5.0, reply_seconds=30.0))
    clients: list[int] | None = None  # who is there from the start; all
    server_key: PrivateKey = field(default_factory=lambda: KEYS[0])
    seconds: Callable[[str], float] = lambda party: 0.0
    make_transport: Callable[..., Virtual] = Virtual

    def __post_init__(self) -> None:
        federation = self.simulation.federation
        self.plan: Plan = replace(self.simulation, joining_rounds=3)
        self.events: list[Any] = []
        self.parties: dict[str, Party] = {}
        self.answers: dict[str, Callable[[bytes], bytes]] = {}
        everybody = range(federation.num_clients)
        self.keys = {federation.name_of(client): KEYS[1 + client] for client in everybody}
        self.transport = self.make_transport(self.answers, self.seconds)
        for client in everybody if self.clients is None else self.clients:
            self.add(client)
        self.server = self.new_server()

    def add(self, client: int) -> Party:
        federation = self.simulation.federation
        name = federation.name_of(client)
        architecture = "" if federation.architectures is None else federation.architectures[client]
        party = Party(
            self.plan, RUN, name, alone(federation, client), self.folder / name, self.keys[name],
            self.server_key.public_key(), architecture,
        )  # fmt: skip
        self.parties[name], self.answers[name] = party, party.answer
        return party

    def new_server(self) -> Server:
        self.server = Server(
            self.plan, RUN, self.folder / "server", self.server_key,
            lambda: {name: key.public_key() for name, key in self.keys.items()},
            self.transport, self.policy, self.events.append, self.transport.clock,
        )  # fmt: skip
        return self.server

    def said(self, event: str) -> list[Any]:
        return [one for one in self.events if one["event"] == event]


class Killed(BaseException):
    """As kill -9: nothing after it runs."""


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
            kept = party.kept("training", member.base, received_by(group, name))
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
    return group.plan.exchange.publish(model, group.server.state.shared, group.server.state.rows[name])


def with_cohorts(simulation: Simulation, rounds: list[list[str]]) -> State:
    """The simulator's state after rounds in which just these parties took part."""
    numbers = {simulation.federation.name_of(client): client for client in range(simulation.federation.num_clients)}
    told = replace(simulation)
    object.__setattr__(told, "cohort", lambda number: [numbers[name] for name in rounds[number]])
    state = told.initial_state()
    for _ in told.rounds(state):
        if state.round == len(rounds):
            break
    return state
