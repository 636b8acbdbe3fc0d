"""Rounds that do not wait: the server steps as soon as enough of the clients at work have replied."""

from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.data.batches import cohort
from pfedhn.engine.crew import CohortShard
from pfedhn.engine.round import Returned
from pfedhn.engine.state import State, Work
from pfedhn.errors import UserError
from pfedhn.params import copy, take

if TYPE_CHECKING:
    from pfedhn.engine.simulate import Simulation


def next_of(seed: int, number: int, num_idle: int) -> int:
    """Which of the clients that are idle, in their order, is sent message `number` of a run that does not wait."""
    return int(cohort(keys.fold(seed, "rounds"), number, num_idle, 1))


def check_in_flight(simulation: "Simulation", in_flight: int) -> None:
    if in_flight < 1:
        raise UserError(f"in_flight is {in_flight}; at least one client must be at work.")
    if not simulation.algorithm.needs.communication:
        name = simulation.exchange.method_name
        raise UserError(f"clients of {name} send nothing to wait for; leave in_flight out.")
    if simulation.resize_every is not None or simulation.make_crew is not None:
        raise UserError(
            "a run that does not wait trains one client at a time, on one network each; leave out either in_flight "
            "or what resizes clients or shares them out."
        )


def step_without_waiting(simulation: "Simulation", state: State, in_flight: int) -> None:
    """Keep many clients at work, and step when enough of them have replied, as a server over a network does.

    How long a client takes is drawn from half the mean time to one and a half of it.
    """
    flight = state.flight
    while len(flight.replies) < simulation.clients_per_round:
        while len(flight.working) < in_flight and (idle := _idle(simulation, state)):
            _send(simulation, state, idle[next_of(simulation.seed, flight.num_sent, len(idle))])
        if not flight.working:
            break  # nobody has budget left
        work = min(flight.working, key=lambda work: (work.due, work.number))
        flight.working.remove(work)
        flight.now = work.due
        flight.replies.append(work)
        staleness = state.round - work.version
        flight.sum_staleness += staleness
        flight.max_staleness = max(flight.max_staleness, staleness)
        state.bytes_down += work.bytes_down
        state.memories.private[simulation.model_of(work.client).name].put([work.client], work.kept)
    if not flight.replies:
        return
    groups = [
        [w for w in flight.replies if simulation.model_of(w.client) is model] for model in simulation.models.values()
    ]
    groups = [group for group in groups if group]
    clients = [[work.client for work in group] for group in groups]
    returned = []
    for group, some in zip(groups, clients, strict=True):
        replies = pytree.tree_map(lambda *leaves: torch.cat(leaves), *(work.reply for work in group))
        rows = take(state.memories.rows, torch.tensor(some, device=simulation.device))
        returned.append(Returned(simulation.model_of(some[0]), rows, replies))
    simulation.server_step(state, returned, clients, torch.tensor(state.round, device=simulation.device))
    flight.replies = []


def _idle(simulation: "Simulation", state: State) -> list[int]:
    """Who can be sent weights."""
    busy = {work.client for work in (*state.flight.working, *state.flight.replies)}
    everybody = range(simulation.federation.num_clients)
    return [client for client in everybody if client not in busy and simulation.has_budget(state, client)]


def _send(simulation: "Simulation", state: State, client: int) -> None:
    memories, number, flight = state.memories, state.flight.num_sent, state.flight
    name, index = simulation.model_of(client).name, torch.tensor([client], device=simulation.device)
    kept = memories.private[name].take([client])
    shard = CohortShard(name, number, [client], memories.shared, take(memories.rows, index), kept)
    trained = simulation.train(shard)
    simulation.refuse_diverged(shard, trained)
    due = flight.now + 0.5 + float(keys.uniform(keys.fold(simulation.seed, "duration", number), 1))
    replies = trained.replies._replace(version=torch.full_like(index, state.round))
    flight.working.append(Work(client, number, state.round, due, trained.bytes_down, *copy((replies, trained.kept))))
    flight.num_sent += 1
    if simulation.privacy is not None:
        state.num_updates[client] += 1
