"""The two halves of a round, carried by hand, are the simulator; transforms keep the mean and are what is counted."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import (
    BATCH_SIZE,
    NUM_CLIENTS,
    assert_close,
    assert_same_bits,
    changed,
    finish,
    memories_of,
    model,
    mostly_slow,
    simulate,
)
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.data.federation import Federation
from pfedhn.engine.round import Exchange, Kept, Offer, Reply, Returned
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.engine.transform import TRANSFORMS, EightBit, Half, Transform, find_transform
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.params import Params, num_bytes, put, stack, take

SMALL = {"local_steps": 3, "outer_steps": 3, "inner_steps": 2, "hidden_dim": 7, "embedding_dim": 3, "local_lr": 0.1}
EVERY_EXECUTOR = ("loop", "traced", "vectorized", "captured")


def small(method: str) -> Any:
    return changed(ALGORITHMS[method](), SMALL)


@dataclass
class Party:
    """A client on a machine of its own: it has its own examples, its identity, and what it keeps."""

    simulation: Simulation
    client: int
    kept: Kept | None = None

    def __post_init__(self) -> None:
        federation = self.simulation.federation
        own = {
            name: (federation.x[part.of(self.client)], federation.y[part.of(self.client)])
            for name, part in federation.splits.items()
        }
        alone = Federation.from_clients([own])  # in the default precision; the simulator's examples have more
        self.data = replace(alone, x=torch.cat([x for x, _ in own.values()]), identities=torch.tensor([self.client]))

    def answer(self, exchange: Exchange, offer: Offer) -> Reply:
        simulation = self.simulation
        target = simulation.model_of(self.client)
        identity = self.data.identity(torch.tensor(0))
        if self.kept is None:
            start, num_labels = simulation.initial_models()[target.name], simulation.extras[target.name].num_labels
            counts = None if num_labels is None else self.data.label_counts(0, num_labels)
            self.kept = exchange.first_contact(target, start, offer.weights, int(identity), counts)
        key = keys.fold(exchange.seed, "batches", int(offer.round))
        batches = self.data.batches(torch.tensor([0]), key, exchange.algorithm.num_batches, BATCH_SIZE)
        update, kept = exchange.train(target, offer, self.kept, take(batches, 0))
        size = self.data.splits["train"].size[0]
        reply, self.kept = exchange.reply(offer, update, kept, size, identity)
        return reply


def carried_by_hand(simulation: Simulation) -> tuple[State, list[Party]]:
    """Every round as a server and parties would do it that share nothing but offers and replies."""
    exchange, state = simulation.exchange, simulation.initial_state()
    parties = [Party(simulation, client) for client in range(NUM_CLIENTS)]
    shared, rows = state.memories.shared, state.memories.rows
    for number in range(simulation.num_rounds):
        returned = []
        for client in simulation.cohort(number):
            row, target = take(rows, client), simulation.model_of(client)
            offer = exchange.offer(target, shared, row, torch.tensor(number), torch.tensor(client))
            offer = over_the_wire(offer)
            reply = over_the_wire(parties[client].answer(exchange, offer))
            assert (int(reply.round), int(reply.version)) == (number, number)
            returned.append(Returned(target, row, reply))
        together = Returned(returned[0].model, *(stack([part[i] for part in returned]) for i in (1, 2)))
        shared, (new_rows,) = exchange.step(shared, [together])
        put(rows, torch.tensor(simulation.cohort(number)), new_rows)
    state.memories = state.memories._replace(shared=shared)
    return state, parties


def over_the_wire(message: Any) -> Any:
    """A message as bytes and back, so that nothing but numbers gets across."""
    leaves, spec = pytree.tree_flatten(message)
    sent = [
        (leaf.dtype, leaf.shape, leaf.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()) for leaf in leaves
    ]
    back = [torch.frombuffer(bytearray(b), dtype=t).reshape(s) if b else torch.empty(s, dtype=t) for t, s, b in sent]
    return pytree.tree_unflatten(back, spec)


@pytest.mark.parametrize("cohort", mostly_slow([1, 3], 3))
@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "fedavg", "ditto", "pfedhn-pc", "pfedhn-plus", "scaffold"))
def test_parties_that_share_only_offers_and_replies_are_the_simulator(
    method: str, cohort: int, federation: Federation
) -> None:
    simulation = simulate(small(method), federation, rounds=4, cohort=cohort, executor="loop")
    expected = finish(simulation)
    state, parties = carried_by_hand(simulation)
    # To rounding: a party with less than a batch has nothing to fill its batches up to another's size with.
    assert_close(state.memories.shared, expected.memories.shared)
    assert_close(state.memories.rows, expected.memories.rows)
    for client, slot in expected.memories.private["mlp"].slots.items():
        if (kept := parties[client].kept) is not None:
            assert_close(kept, take(expected.memories.private["mlp"].tree, slot))


def test_named_transforms_and_an_unknown_one() -> None:
    assert find_transform("half") == Half()
    assert find_transform(EightBit()) == EightBit()
    with pytest.raises(UserError, match=r"there is no transform 'hald'.*did you mean 'half'"):
        find_transform("hald")


def values() -> Params:
    """Numbers of every size, exact ones and zeros among them."""
    spread = keys.normal(3, 40) * torch.exp2(keys.normal(4, 40) * 6)
    return {"a": spread.reshape(5, 8), "b": torch.tensor([0.0, 1.0, -1.0, 0.5]), "zero": torch.zeros(3).double()}


@pytest.mark.parametrize("name", mostly_slow(["half", "8-bit"], "8-bit"))
def test_rounding_keeps_the_mean(name: str) -> None:
    transform, num_draws = TRANSFORMS[name], 1_000
    given = values()
    total = {key: torch.zeros_like(value) for key, value in given.items()}
    worst = {key: torch.zeros_like(value) for key, value in given.items()}
    for draw in range(num_draws):
        decoded = transform.decode(transform.encode(given, keys.fold(7, draw), ())[0], torch.float64)
        for key, value in decoded.items():
            total[key] += value / num_draws
            worst[key] = torch.maximum(worst[key], (value - given[key]).abs())
    for key, value in given.items():
        # One draw is off by less than a step; a mean of independent draws by less than five deviations of a step.
        step = torch.exp2(torch.floor(torch.log2(value.abs().clamp(min=1e-30))) - 7)
        step = step if name == "half" else (value.abs().max() / 127).expand_as(value)
        assert (worst[key] <= step * (1 + 1e-6)).all()
        assert ((total[key] - value).abs() <= 5 * step / 2 / num_draws**0.5 + 1e-12).all()


@pytest.mark.parametrize("executor", mostly_slow(EVERY_EXECUTOR, "loop", "vectorized"))
def test_bytes_are_those_of_what_is_encoded(federation: Federation, executor: str) -> None:
    target = model()
    num_weights = sum(shape.numel() for shape in target.shapes.values())
    num_tensors = len(target.shapes)
    expected = {"full": 8 * num_weights, "half": 2 * num_weights, "8-bit": num_weights + 4 * num_tensors}
    for up, down in (("half", "full"), ("8-bit", "half"), ("full", "8-bit")):
        simulation = simulate(
            FedAvg(local_steps=1), federation, rounds=2, cohort=3, executor=executor,
            upload=TRANSFORMS[up], download=TRANSFORMS[down],
        )  # fmt: skip
        state = run_with(simulation)
        assert (state.bytes_up, state.bytes_down) == (2 * 3 * expected[up], 2 * 3 * expected[down])


def run_with(simulation: Simulation) -> State:
    from pfedhn.engine.rounds import rounds

    state = simulation.initial_state()
    for _ in rounds(simulation, state):
        pass
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("upload", "method", "executor"),
    mostly_slow(
        itertools.product(["half", "8-bit"], ["pfedhn", "pfedhn-pc", "fedavg", "local"], EVERY_EXECUTOR[1:]),
        ("half", "fedavg", "captured"),
        ("8-bit", "pfedhn", "traced"),
        ("8-bit", "fedavg", "vectorized"),
    ),
)
def test_every_executor_draws_the_same_rounding(
    method: str, executor: str, upload: str, federation: Federation
) -> None:
    def memories(executor: str) -> Any:
        wire = {"upload": TRANSFORMS[upload], "download": TRANSFORMS["half"]}
        return memories_of(run_with(simulate(small(method), federation, rounds=3, cohort=3, executor=executor, **wire)))

    assert_close(memories(executor), memories("loop"), rtol=1e-6, atol=1e-9)


@dataclass(frozen=True)
class ErrorFeedback(Transform):
    """Sends the signs and a scale, and remembers what that left out for the next round."""

    def init_state(self, values: Params) -> Any:
        return {name: torch.zeros_like(value) for name, value in values.items()}

    def encode(self, values: Params, key: Key, state: Any) -> tuple[Any, Any]:
        wanted = {name: value + state[name] for name, value in values.items()}
        encoded = {name: (value.sign().to(torch.int8), value.abs().mean()) for name, value in wanted.items()}
        return encoded, {name: value - self.decode(encoded, value.dtype)[name] for name, value in wanted.items()}

    def decode(self, encoded: Any, dtype: torch.dtype) -> Params:
        return {name: signs.to(dtype) * scale for name, (signs, scale) in encoded.items()}


@pytest.mark.parametrize("executor", EVERY_EXECUTOR)
def test_a_transform_may_remember(executor: str, federation: Federation) -> None:
    """What a client has not sent yet is what its updates add up to, less what the server took them for."""
    sent: dict[int, list[Params]] = {}

    simulation = simulate(
        FedAvg(local_steps=2, rule="sum"), federation, rounds=4, cohort=1, executor=executor, upload=ErrorFeedback()
    )
    state = run_with(simulation)
    plain = simulate(FedAvg(local_steps=2, rule="sum"), federation, rounds=4, cohort=1, executor="loop")
    exchange, memories = replace(simulation, executor="loop").exchange, plain.initial_state().memories
    shared, rest = memories.shared, {client: ErrorFeedback().init_state(memories.shared) for client in range(6)}
    for number in range(4):
        (client,) = simulation.cohort(number)
        offer = exchange.offer(model(), shared, (), torch.tensor(number), torch.tensor(client))
        batches = federation.batches(torch.tensor([client]), keys.fold(5, "batches", number), 2, BATCH_SIZE)
        update, _ = exchange.train(model(), offer, Kept({}, (), {}), take(batches, 0))
        sent.setdefault(client, []).append(update)
        encoded, rest[client] = ErrorFeedback().encode(update, 0, rest[client])
        taken = ErrorFeedback().decode(encoded, torch.float64)
        shared = {name: value - taken[name] for name, value in shared.items()}
    assert_close(state.memories.shared, shared)
    for client, slot in state.memories.private["mlp"].slots.items():
        if client in sent:
            assert_close(take(state.memories.private["mlp"].tree, slot).upload, rest[client])


def test_who_joins_moves_a_row_and_nothing_else(federation: Federation) -> None:
    trained = simulate(ALGORITHMS["pfedhn"](**small_settings()), federation, rounds=6)
    state = finish(trained)
    joining = Simulation.of(trained.joining(federation.description, state.memories, 3, 11), federation)
    before = [leaf.clone() for leaf in pytree.tree_leaves(memories_of(state))]
    joined = finish(joining)
    assert_same_bits(joined.memories.shared, state.memories.shared)
    assert_same_bits(before, pytree.tree_leaves(memories_of(state)))
    starts = joining.initial_state().memories.rows
    assert not torch.equal(starts.embedding, joined.memories.rows.embedding)
    sent = trained.algorithm.send(model(), state.memories.shared, take(starts, 0))
    assert joined.bytes_up == 3 * NUM_CLIENTS * num_bytes(sent)


def small_settings() -> dict[str, Any]:
    return {"local_steps": 3, "hidden_dim": 7, "embedding_dim": 3, "local_lr": 0.1, "clip": None}


def test_the_row_of_who_joins_moves_as_in_training(federation: Federation) -> None:
    """Without clipping, whose norm is over all that moves, a joining row takes the step that it takes in `receive`."""
    simulation = simulate(ALGORITHMS["pfedhn"](**small_settings()), federation, rounds=6)
    memories = finish(simulation).memories
    row, exchange = take(memories.rows, 2), simulation.exchange
    offer = exchange.offer(model(), memories.shared, row, torch.tensor(9), torch.tensor(2))
    batches = federation.batches(torch.tensor([2]), 4, 3, BATCH_SIZE)
    update, kept = exchange.train(model(), offer, take(memories.private["mlp"].take([2]), 0), take(batches, 0))
    reply, _ = exchange.reply(offer, update, kept, torch.tensor(20), torch.tensor(2))
    returned = [Returned(model(), stack([row]), stack([reply]))]
    _, (trained,) = exchange.step(memories.shared, returned)
    same, (joined,) = replace(exchange, is_frozen=True).step(memories.shared, returned)
    assert same is memories.shared
    assert_close(joined, trained)


@dataclass(frozen=True)
class Served(FedAvg):
    """FedAvg that serves other weights than it trains: twice as large ones."""

    def publish(self, model: Any, shared: Params, row: Any) -> Params:
        return {name: 2 * value for name, value in shared.items()}


@pytest.mark.parametrize("executor", EVERY_EXECUTOR)
def test_publish_is_for_use_and_send_for_training(executor: str, federation: Federation) -> None:
    plain, served = (
        simulate(kind(local_steps=2), federation, rounds=3, executor=executor, evaluate_every=1)
        for kind in (FedAvg, Served)
    )
    states = [run_with(simulation) for simulation in (plain, served)]
    assert_same_bits(states[0].memories.shared, states[1].memories.shared)
    doubled = {name: 2 * value for name, value in states[1].memories.shared.items()}
    target, memories = model(), states[1].memories
    assert_close(served.personal_weights(memories, target, 0, 3), doubled)
    part = federation.splits["test"].of(1)
    outputs = target.outputs(doubled, federation.x[part])
    expected = target.per_example_loss(outputs, federation.y[part]).sum()
    assert_close(served.evaluate(states[1])["test"].loss[1], expected)
    joining = served.joining(federation.description, memories, rounds=1, seed=1)
    offer = joining.exchange.offer(target, memories.shared, (), torch.tensor(0), torch.tensor(0))
    assert_same_bits(offer.weights, doubled)


def test_a_transform_that_remembers_is_refused_for_downloads(federation: Federation) -> None:
    with pytest.raises(UserError, match="use it for uploads"):
        simulate(FedAvg(), federation, download=ErrorFeedback())
