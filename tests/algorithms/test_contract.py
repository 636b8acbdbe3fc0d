"""What every row of ALGORITHMS and a method of a newcomer promise, in one table.

Three rows are left out: fedavg-ft, pfedhn-plus-ft and pfedhn-plus-pc-ft train as fedavg, pfedhn-plus and pfedhn-plus-pc
do. Their fine-tuning begins after the chosen round and enters none of these promises (see engine/test_adaptation.py).
"""

import copy as python_copy
import re
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support import (
    NUM_CLASSES,
    NUM_CLIENTS,
    ClosesOver,
    assert_close,
    assert_same_bits,
    changed,
    finish,
    memories_of,
    model,
    mostly_slow,
    personal,
    simulate,
)
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithm import LABEL_COUNTS, Algorithm, Group
from pfedhn.algorithms import ALGORITHMS
from pfedhn.combinators import with_settings
from pfedhn.data.federation import Federation
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.executors import EXECUTORS
from pfedhn.engine.simulate import Simulation
from pfedhn.params import copy, pick, stack, subtract, take
from pfedhn.settings import values_of
from pfedhn.sgd import Batches

SMALL = {
    "local_steps": 3,
    "outer_steps": 3,
    "inner_steps": 2,
    "mixture_steps": 2,
    "hidden_dim": 7,
    "embedding_dim": 3,
    "local_lr": 0.1,
}
FINE_TUNED = ("fedavg-ft", "pfedhn-plus-ft", "pfedhn-plus-pc-ft")
METHODS: dict[str, Callable[..., Any]] = {
    **{name: known for name, known in ALGORITHMS.items() if name not in FINE_TUNED},
    "closes-over": ClosesOver,
    "pfedhn-added": partial(ALGORITHMS["pfedhn"], head="added"),
    "pfedhn-low-rank": partial(ALGORITHMS["pfedhn"], generated=("last",), head="low-rank", rank=1),
    "pfedhn-chunked": partial(ALGORITHMS["pfedhn"], head="chunked", chunk_size=7),
}
FOR_TABLES = ("pfedhn-intercept", "pfedhn-last", "fedper-intercept")
# Each remembers and sends what another row does; of the rest, scaffold, feddbe and fedpac are tested by `make test`.
NEWER = ("fedprox", "fedbn", "mr-mtl", "fedrod", "fedproto", "pfedgraph", "fedamp", "pfedlhn")
# Of what the others are, with other settings.
VARIANTS = ("pfedhn-plus-pc", "pfedhn-shared", "per-fedavg-hf", "pfedhn-added", *FOR_TABLES, *NEWER)
every_method = pytest.mark.parametrize("method", mostly_slow(METHODS, *(set(METHODS) - set(VARIANTS))))
every_target = pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))


def small(method: str) -> Any:
    """The method as users get it by name, with fewer steps and a smaller hypernetwork where it has them."""
    return changed(METHODS[method](), SMALL)


class Parts:
    """One cohort in the middle of a run, and the arguments of each function of the protocol."""

    def __init__(self, simulation: Simulation) -> None:
        state = finish(simulation)  # nothing is at rest any more
        self.algorithm, self.model = simulation.algorithm, simulation.model_of(0)
        self.clients = [2, 3, 0]
        index = torch.tensor(self.clients)
        self.shared, self.all_rows = simulation.exchange.memory_of_method(state.memories.shared), state.memories.rows
        self.newest = simulation.exchange.newest(state.memories.shared)
        self.rows = take(self.all_rows, index)
        self.private = state.memories.private[self.model.name].take(self.clients).private
        self.federation = federation = simulation.federation
        size = simulation.schedule.batch_size
        self.batches = federation.batches(index, 1, self.algorithm.num_batches, size)
        self.extra = federation.batches(index, 2, self.algorithm.num_personalize_batches, size)
        self.sizes = federation.splits["train"].size[index]

    def send(self, place: int) -> Any:
        return self.algorithm.send(self.model, self.shared, take(self.rows, place))

    def train(self, place: int) -> Any:
        private, batches = take((self.private, self.batches), place)
        return self.algorithm.train(self.model, self.send(place), private, Batches(*batches))

    def personalize(self, place: int) -> Any:
        private, batches = take((self.private, self.extra), place)
        return self.algorithm.personalize(self.model, self.send(place), private, Batches(*batches))

    def receive(self, order: list[int]) -> Any:
        updates, up = stack([self.train(place)[0] for place in order]), self.algorithm.extras(self.model).up
        index = torch.tensor(order)
        weights = {name: value for name, value in updates.items() if name not in up}
        group = Group(self.model, take(self.rows, index), weights, self.sizes[index], extras=pick(updates, up))
        return self.algorithm.receive(self.shared, [group])

    def inputs(self) -> Any:
        return self.shared, self.all_rows, self.rows, self.private, self.batches, self.extra, self.sizes


@pytest.fixture(scope="session")
def all_parts(federation: Federation) -> Callable[[str, str], Parts]:
    """Runs each method up to its parts once; that no function changes them is a test below."""
    return cache(lambda method, target: Parts(simulate(small(method), federation, target, rounds=3, cohort=2)))


@pytest.fixture
def parts(all_parts: Callable[[str, str], Parts], method: str, target: str) -> Parts:
    return python_copy.copy(all_parts(method, target))


def label_counts(parts: Parts, place: int) -> dict[str, Tensor]:
    """What `init_private` finds beside the initial weights, if the method asks for it."""
    if parts.algorithm.extras(parts.model).num_labels is None:
        return {}
    return {LABEL_COUNTS: parts.federation.label_counts(parts.clients[place], NUM_CLASSES)}


def form(tree: Any) -> Any:
    """What has to stay the same for a memory to be written back: names, shapes and types."""
    leaves, spec = pytree.tree_flatten(tree)
    return spec, [(leaf.shape, leaf.dtype) for leaf in leaves]


@every_method
def test_is_a_frozen_specification_of_the_protocol(method: str) -> None:
    spec = METHODS[method]()
    assert isinstance(spec, Algorithm)
    assert is_dataclass(spec)
    assert hash(spec) == hash(METHODS[method]())
    assert spec.for_clients(50).for_clients(50) == spec.for_clients(50)
    assert spec.num_batches > 0


@every_method
@every_target
def test_inputs_are_unchanged(parts: Parts) -> None:
    """By value and by version: a tensor written in place and written back would pass the first."""
    leaves = pytree.tree_leaves(parts.inputs())
    before, versions = copy(parts.inputs()), [leaf._version for leaf in leaves]
    received, sent = parts.send(1), copy(parts.send(1))
    for function in (parts.send, parts.train, parts.personalize):
        function(1)
    parts.receive([0, 1, 2])
    parts.algorithm.join_row(parts.shared, parts.all_rows, None)
    assert_same_bits(received, sent)
    assert_same_bits(parts.inputs(), before)
    assert [leaf._version for leaf in leaves] == versions


@every_method
@every_target
def test_same_inputs_give_same_bits(parts: Parts) -> None:
    for function in (parts.send, parts.train, parts.personalize):
        assert_same_bits(function(0), function(0))
    assert_same_bits(parts.receive([0, 1, 2]), parts.receive([0, 1, 2]))


@every_method
@every_target
def test_memories_are_trees_of_tensors_that_keep_their_form(parts: Parts) -> None:
    assert all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(parts.inputs()))
    shared, (rows,) = parts.receive([0, 1, 2])
    assert form(shared) == form(parts.shared)
    assert form(rows) == form(parts.rows)
    assert form(parts.train(0)[1]) == form(take(parts.private, 0))
    assert form(parts.algorithm.join_row(parts.shared, parts.all_rows, None)) == form(take(parts.rows, 0))
    memories = (shared, rows, parts.train(0)[1])
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(memories))


@every_method
@every_target
def test_an_update_has_the_names_of_what_was_sent(parts: Parts) -> None:
    sent, update, extras = parts.send(0), parts.train(0)[0], parts.algorithm.extras(parts.model)
    assert bool(sent) == parts.algorithm.needs.communication
    for found, declared in ((sent, extras.down), (update, {name: extra.shape for name, extra in extras.up.items()})):
        assert {name: tuple(value.shape) for name, value in found.items() if name in declared} == dict(declared)
    sent, update = ({name: x for name, x in values.items() if name in parts.model.shapes} for values in (sent, update))
    assert form(dict(sorted(update.items()))) == form(dict(sorted(sent.items())))
    assert {*sent, *extras.down} == set(parts.send(0))


@every_method
@every_target
def test_an_update_is_received_minus_trained(parts: Parts) -> None:
    """Whatever is trained, an update of nothing is zero: with all rates at 0 the difference vanishes.

    For a client at first contact: one with a model of its own may send that, as FedALA's clients do. Extras are no
    differences.
    """
    rates = {name: 0.0 for name in values_of(parts.algorithm) if name.endswith("lr")}
    parts.algorithm = with_settings(parts.algorithm, rates)
    private = parts.algorithm.init_private(parts.model, parts.model.fresh(7) | label_counts(parts, 0), 7)
    update, _ = parts.algorithm.train(parts.model, parts.send(0), private, Batches(*take(parts.batches, 0)))
    assert all(bool((value == 0).all()) for name, value in update.items() if name in parts.model.shapes)


@every_method
@every_target
def test_a_client_that_joins_moves_as_one_that_trains(parts: Parts) -> None:
    """A row after `move_row` is the row after `receive`, if both clients' training ends with the same weights.

    The one starts from what is published, the other from what is sent. An average of what is published is left out.
    """
    parts.algorithm, parts.shared = changed(parts.algorithm, {"averaging": None}), parts.newest
    sent, update = (pick(values, parts.model.shapes) for values in (parts.send(1), parts.train(1)[0]))
    served = pick(parts.algorithm.publish(parts.model, parts.shared, take(parts.rows, 1)), parts.model.shapes)
    _, (rows,) = parts.receive([1])
    trained = subtract(sent, update)
    moved = parts.algorithm.move_row(parts.model, parts.shared, take(parts.rows, 1), subtract(served, trained))
    assert_close(moved, take(rows, 0))


@every_method
@every_target
def test_personalize_covers_the_model(parts: Parts) -> None:
    weights = parts.personalize(2)
    assert {name: value.shape for name, value in weights.items()} == parts.model.shapes
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


@every_method
@every_target
def test_the_order_of_clients_does_not_matter(parts: Parts) -> None:
    shared, (rows,) = parts.receive([0, 1, 2])
    other, (other_rows,) = parts.receive([2, 0, 1])
    assert_close(other, shared, rtol=1e-12, atol=1e-14)
    assert_close(take(other_rows, torch.tensor([1, 2, 0])), rows, rtol=1e-12, atol=1e-14)


def road(simulation: Simulation) -> Any:
    """Everything a run leaves behind, by the road its executor names."""
    state = simulation.initial_state()
    captured = simulation.executor == "captured"
    for _ in CapturedRun(simulation, state).rounds() if captured else simulation.rounds(state):
        pass
    assert state.best is not None
    scores = {name: (p.loss, p.metric, p.count) for name, p in state.best.evaluation.splits.items()}
    return memories_of(state), personal(simulation, state), scores, state.bytes_up, state.bytes_down, state.round


VARIANTS = (
    *NEWER,
    "feddbe",
    "fedpac",
    "apfl",
    "closes-over",
    "ditto",
    "fedala",
    "pfedhn-shared",
    "fedrep",
    "per-fedavg",
    "per-fedavg-hf",
    "pfedhn-added",
    "pfedhn-chunked",
    "pfedhn-low-rank",
    "pfedhn-plus",
    "pfedhn-plus-pc",
)


@pytest.mark.parametrize(
    ("method", "target", "cohort"),
    mostly_slow(
        [(method, *case) for method in METHODS for case in (("mlp", 3), ("conv", 1), ("batchnorm", 3))],
        *((method, "mlp", 3) for method in METHODS if method not in VARIANTS),
        ("pfedhn-pc", "conv", 1),
        ("fedper", "batchnorm", 3),
    ),
)
def test_executors_agree(federation: Federation, method: str, target: str, cohort: int) -> None:
    results = {
        executor: road(simulate(small(method), federation, target, rounds=5, cohort=cohort, executor=executor))
        for executor in (*EXECUTORS, "captured")
    }
    # A bias before BatchNorm has no gradient but what rounding leaves, of which Adam makes steps of its own size.
    atol = 1e-10 if target == "batchnorm" else 1e-12
    for result in results.values():
        assert_close(result, results["loop"], atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", mostly_slow([name for name in METHODS if name in ALGORITHMS], "local", "fedavg", "fedper", "ditto")
)
def test_several_architectures_are_refused_or_served_alike_by_every_executor(
    federation: Federation, method: str
) -> None:
    kinds = ("mlp", "conv", "wide", "conv", "mlp", "wide")
    models = {name: model(name) for name in dict.fromkeys(kinds)}
    several = simulate(small(method), federation.with_architectures(kinds), models, rounds=4, cohort=3)
    refusal = ""
    try:
        several.initial_state()
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert re.search(r"mlp, conv, wide .*use pfedhn", refusal)
        return
    results = {name: road(replace(several, executor=name)) for name in (*EXECUTORS, "captured")}
    for result in results.values():
        assert_close(result, results["loop"])


@every_method
def test_evaluation_is_the_personal_model_on_the_clients_own_rows(federation: Federation, method: str) -> None:
    simulation = simulate(small(method), federation, rounds=4, cohort=2)
    state = finish(simulation)
    found = simulation.evaluate(state)
    for split in ("validation", "test"):
        for client, weights in enumerate(personal(simulation, state)):
            rows = federation.splits[split].of(client)
            outputs = simulation.model_of(client).with_weights(weights)(federation.x[rows]).detach()
            losses = torch.nn.functional.cross_entropy(outputs, federation.y[rows], reduction="sum")
            assert_close(found[split].loss[client], losses)
            assert found[split].metric[client] == (outputs.argmax(1) == federation.y[rows]).sum()
        assert found[split].count.tolist() == federation.splits[split].size.tolist()


@pytest.mark.slow
@every_method
@every_target
def test_evaluating_more_often_changes_no_bit(federation: Federation, method: str, target: str) -> None:
    often, seldom = (
        finish(simulate(small(method), federation, target, rounds=5, cohort=2, evaluate_every=every))
        for every in (1, 1_000)
    )
    assert_same_bits(memories_of(often), memories_of(seldom))
    assert (often.bytes_up, often.bytes_down) == (seldom.bytes_up, seldom.bytes_down)


@every_method
def test_another_seed_is_another_start(federation: Federation, method: str) -> None:
    first, second = (simulate(small(method), federation, seed=seed) for seed in (0, 1))
    a, b = (personal(simulation, simulation.initial_state())[0] for simulation in (first, second))
    assert all(not torch.equal(a[name], b[name]) for name in a)


@every_method
def test_rows_and_private_memories_start_from_keys_alone(federation: Federation, method: str) -> None:
    """A party makes its own memory from the seed and its number: it need not see the others."""
    simulation = simulate(small(method), federation)
    algorithm, state, start = simulation.algorithm, simulation.initial_state(), simulation.initial_models()["mlp"]
    for client in range(NUM_CLIENTS):
        key = keys.fold(keys.fold(simulation.seed, "row"), torch.tensor(client))
        row = algorithm.init_row(state.memories.shared, key, None)
        assert_same_bits(take(state.memories.rows, client), row)
        counts = federation.label_counts(client, NUM_CLASSES)
        given = start | ({} if algorithm.extras(model()).num_labels is None else {LABEL_COUNTS: counts})
        private = algorithm.init_private(model(), given, keys.fold(simulation.seed, "private", client))
        assert_same_bits(take(state.memories.private["mlp"].take([client]), 0).private, private)
