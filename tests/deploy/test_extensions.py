"""Extras, label counts and features, by two methods that need them.

SCAFFOLD sends control variates beside weights, both ways; FedRoD needs label counts and the input of the last layer.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import Group, assert_simulated, named_federation, simulated, simulation_of
from support import (
    NUM_CLASSES,
    NUM_CLIENTS,
    assert_close,
    assert_same_bits,
    finish,
    memories_of,
    model,
    mostly_slow,
    personal,
    simulate,
)
from torch import Tensor, nn
from torch.nn import functional

import pfedhn
from pfedhn.algorithm import NO_EXTRAS, Extra, Extras
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.fedrod import FedRoD
from pfedhn.algorithms.scaffold import Scaffold
from pfedhn.combinators import with_statistics
from pfedhn.data.federation import Federation
from pfedhn.deploy.join import max_message
from pfedhn.deploy.plan import plan_digest
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.signing import opened, sealed
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.plan import Plan
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.transform import TRANSFORMS
from pfedhn.errors import UserError
from pfedhn.kernels.fuse import Fused
from pfedhn.model import Model
from pfedhn.models import cross_entropy, is_correct
from pfedhn.params import Params, pack, pick, take, zeros_like
from pfedhn.privacy import Privacy
from pfedhn.sgd import Batches
from pfedhn.storage.checkpoint import load_state, save_state

LR, STEPS = 0.1, 3
CLIENTS = range(NUM_CLIENTS)

SCAFFOLD = Scaffold(local_lr=LR, local_steps=STEPS, max_norm=1e3)
METHODS = {"scaffold": SCAFFOLD, "fedrod": FedRoD(local_lr=LR, local_steps=STEPS)}
every_method = pytest.mark.parametrize("method", METHODS)
every_target = pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))


def private_of(simulation: Simulation, state: Any) -> list[Any]:
    (table,) = state.memories.private.values()
    return [take(table.take([client]), 0).private for client in CLIENTS]


# Everything that runs a round carries them.


def road(simulation: Simulation) -> Any:
    state = simulation.initial_state()
    for _ in CapturedRun(simulation, state).rounds() if simulation.executor == "captured" else simulation.rounds(state):
        pass
    return memories_of(state), personal(simulation, state), state.bytes_down, state.bytes_up


@every_method
@pytest.mark.parametrize("wire", ["full", "8-bit"])
def test_over_the_wire_they_are_the_simulator(method: str, wire: str, tmp_path: Path) -> None:
    transforms = {"upload": TRANSFORMS[wire], "download": TRANSFORMS["half" if wire == "8-bit" else wire]}
    simulation = simulation_of(METHODS[method], rounds=4, cohort=2, **transforms)
    group = Group(replace(simulation, executor="auto"), tmp_path)
    group.server.run()
    assert not group.said("refused")
    expected = simulated(simulation)
    assert_simulated(group, expected)
    for client, party in enumerate(group.parties.values()):
        memories, round_ = expected.best.memories, expected.best.evaluation.round
        weights = simulation.personal_weights(memories, simulation.model_of(client), client, round_)
        mine = party.personal_model().state_dict()
        assert mine.keys() == weights.keys()
        assert_close(dict(mine), weights)


def test_extras_and_batch_statistics_go_together(tmp_path: Path) -> None:
    simulation = simulation_of(with_statistics(SCAFFOLD, "shared"), models="batchnorm", rounds=2, cohort=2)
    group = Group(simulation, tmp_path)
    group.server.run()
    assert not group.said("refused")
    assert_simulated(group, simulated(simulation))


@every_method
def test_without_waiting_and_a_party_that_joins_after_the_end(method: str, tmp_path: Path) -> None:
    simulation = simulation_of(METHODS[method], rounds=4, cohort=2)
    policy = Policy(start_with=5, in_flight=3)
    group = Group(
        simulation, tmp_path, policy, clients=[0, 1, 2, 3, 4], seconds=lambda party: 0.3 * (int(party[-1]) % 5)
    )
    group.server.run()
    assert group.server.state.max_staleness > 0
    group.add(5)
    group.server.run()
    assert group.server.state.members["party-5"].round == 3
    assert not group.said("refused")
    assert group.parties["party-5"].personal_model() is not None


def test_late_extras_are_as_they_were_sent(federation: Federation) -> None:
    """The update of a late client counts less; its control variate does not, so that c stays the mean of all c_i."""
    simulation = simulate(METHODS["scaffold"], federation, cohort=2, in_flight=4)
    state = finish(simulation)
    assert state.flight.max_staleness > 0
    kept = private_of(simulation, state)
    for name, value in state.memories.shared.control.items():
        assert_close(value, sum(one[name] for one in kept) / NUM_CLIENTS)


def test_extras_count_on_the_wire(federation: Federation) -> None:
    plain = finish(simulate(FedAvg(local_steps=STEPS), federation, cohort=3))
    simulation = simulate(METHODS["scaffold"], federation, cohort=3)
    state = finish(simulation)
    assert (state.bytes_down, state.bytes_up) == (2 * plain.bytes_down, 2 * plain.bytes_up)
    size = sum(shape.numel() for shape in model().shapes.values())
    assert simulation.extras["mlp"].num_values == (size, size)
    label_counts = finish(simulate(METHODS["fedrod"], federation, cohort=3))
    assert (label_counts.bytes_down, label_counts.bytes_up) == (plain.bytes_down, plain.bytes_up)
    assert max_message(simulation) - max_message(simulate(FedAvg(), federation)) == 2 * 8 * size


# What a server refuses.


def altered(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Params], Params]:
    return lambda update: update | {name: change(update[name])}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            altered("control/3.bias", lambda x: x[:-1]),
            r"sent the extra 'control/3.bias' of shape \(3,\) where \(4,\) was",
        ),
        (lambda update: update | {"other": torch.zeros(2)}, "sent the extra 'other', which this run does not have"),
        (lambda update: {name: x for name, x in update.items() if name != "control/3.bias"}, "did not send the extra"),
        (altered("control/3.bias", lambda x: x / 0), "sent the extra 'control/3.bias', which is not finite"),
        (
            altered("control/3.bias", lambda x: x + 1e4),
            "sent the extra 'control/3.bias' of norm .* where 1e.03 is the most",
        ),
        (altered("control/3.bias", Tensor.float), "sent an update of other shapes or types"),
    ],
    ids=["shape", "unknown", "missing", "finite", "norm", "type"],
)
def test_a_wrong_extra_is_refused(change: Callable[[Params], Params], sentence: str, tmp_path: Path) -> None:
    group = Group(simulation_of(METHODS["scaffold"], rounds=2, cohort=6), tmp_path)
    party = group.parties["party-2"]

    def wrong(content: bytes) -> bytes:
        message = opened(party.answer(content), party.key.public_key())
        if message.kind == "train":
            message = replace(message, tensors=change(message.tensors))
        return sealed(message, party.key)

    group.answers["party-2"] = wrong
    group.server.run()
    refused = [event for event in group.said("refused") if event["reason"] != "silent"]
    assert {event["party"] for event in refused} == {"party-2"}
    assert all(re.search(sentence, event["sentence"]) for event in refused)
    assert group.server.state.num_accepted == 10


def test_large_extras_leave_the_bound_of_updates_as_it_is(tmp_path: Path) -> None:
    """An update is judged by the weights alone, however large the extras are that go with them."""
    group = Group(simulation_of(replace(METHODS["scaffold"], max_norm=1e9), rounds=1, cohort=6), tmp_path)
    party = group.parties["party-2"]
    bounds = []

    def large(content: bytes) -> bytes:
        message = opened(party.answer(content), party.key.public_key())
        if message.kind == "train":
            bounds.append(group.server.contacts.asked["party-2", "train"].max_norm)
            moved = {name: x + 1e6 * name.startswith("control/") for name, x in message.tensors.items()}
            message = replace(message, tensors=moved)
        return sealed(message, party.key)

    group.answers["party-2"] = large
    group.server.run()
    assert not group.said("refused")
    (weights,) = group.plan.initial_models().values()
    norm = float(pack(weights)[0].norm())
    assert bounds == [pytest.approx(group.policy.max_update * (1 + norm))]


def test_extras_are_part_of_the_plan() -> None:
    one, other, plain = (simulation_of(spec) for spec in (SCAFFOLD, replace(SCAFFOLD, max_norm=7.0), FedAvg()))
    assert plan_digest(one) != plan_digest(other)
    assert plain.extras == {"mlp": Extras()}


# What a method may declare.


@dataclass(frozen=True)
class Declares(FedAvg):
    """FedAvg that says one thing and does another."""

    declared: Extras = NO_EXTRAS
    sent: Params | None = None
    returned: Params | None = None

    def extras(self, model: Model) -> Extras:
        return self.declared

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared | (self.sent or {})

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        return zeros_like(pick(received, model.shapes)) | (self.returned or {}), private


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            Declares(sent={"c": torch.zeros(2)}),
            r"`send` returns 'c' of shape \(2,\) beside weights, and `extras` declares n",
        ),
        (Declares(returned={"c": torch.zeros(2)}), r"`train` returns 'c' of shape \(2,\) beside weights"),
        (Declares(declared=Extras(down={"c": (3,)}), sent={"c": torch.zeros(2)}), r"declares 'c' of shape \(3,\)"),
        (Declares(declared=Extras(up={"c": Extra((3,), 1.0)})), r"`train` returns nothing beside weights"),
        (Declares(declared=Extras(down={"3.bias": (4,)})), "the extra '3.bias' has the name of a parameter of mlp"),
        (Declares(declared=Extras(up={"c": Extra((3,), float("inf"))})), "the extra 'c' has the norm bound inf"),
        (Declares(declared=Extras(num_labels=3)), "client 2 has the label 3; labels must be below 3"),
    ],
)
def test_what_is_not_declared_is_refused(federation: Federation, spec: Declares, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        finish(simulate(spec, federation, cohort=6, rounds=1))


def test_labels_that_are_numbers_have_no_counts(federation: Federation) -> None:
    with pytest.raises(UserError, match="the labels here are not classes"):
        replace(federation, y=federation.y.double()).label_counts(0, NUM_CLASSES)


@every_method
def test_noise_on_gradients_does_not_protect_them(federation: Federation, method: str) -> None:
    private = Privacy(clip=1.0, noise=0.0, level="example")
    with pytest.raises(UserError, match=r"uses (control/1.bias|label_counts).* does not protect; use level = 'client'"):
        simulate(METHODS[method], federation, privacy=private)
    finish(simulate(METHODS[method], federation, rounds=2, privacy=replace(private, level="client")))


@every_method
def test_a_party_refuses_them_with_noise_on_gradients(method: str, tmp_path: Path) -> None:
    party = Group(simulation_of(METHODS[method]), tmp_path).parties["party-1"]
    with pytest.raises(UserError, match="noise on gradients does not protect"):
        replace(party, privacy=Privacy(clip=1.0, noise=1.0, epsilon=9.0, level="example"), heard=[])


# Features.


@pytest.mark.parametrize("fused", [False, True])
def test_features_are_the_input_of_the_last_layer(federation: Federation, fused: bool) -> None:
    factory = model("conv").factory
    target = Model("conv", Fused(factory) if fused else factory, cross_entropy, is_correct, dtype=torch.float64)
    weights = target.fresh(3)
    batch = take(federation.batches(torch.tensor([0]), 1, 1, 5), 0)
    batch = take(batch, 0)
    z, outputs = target.features(weights, batch)
    net = model("conv").with_weights(weights)
    expected = functional.max_pool2d(net.conv(batch.x), 2).relu().flatten(1).detach()
    assert_close(z, expected)
    assert_close(outputs, net(batch.x).detach())
    assert_close(functional.linear(z, weights["out.weight"], weights["out.bias"]), outputs)
    assert_same_bits(target.mean_loss(outputs, batch), target.loss(weights, batch))


class Uncalled(nn.Module):
    """Uses its last layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(72, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.flatten(1), self.out.weight, self.out.bias)


def test_a_last_layer_that_is_not_called_has_no_features(federation: Federation) -> None:
    target = Model("uncalled", Uncalled, cross_entropy, is_correct, dtype=torch.float64)
    batch = take(take(federation.batches(torch.tensor([0]), 1, 1, 5), 0), 0)
    with pytest.raises(UserError, match="the forward pass of uncalled does not call its last layer 'out'"):
        target.features(target.fresh(0), batch)


# Stored runs.


@every_method
def test_a_stored_state_goes_on(federation: Federation, method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cohort": 2, "in_flight": 4, "upload": TRANSFORMS["8-bit"]}
    simulation = simulate(METHODS[method], federation, **settings)
    state = simulation.initial_state()
    for _ in simulation.rounds(state):
        if state.round == 3:
            break
    save_state(tmp_path, state, simulation)
    loaded = load_state(tmp_path, simulation).state
    assert loaded is not None
    assert_same_bits(memories_of(finish(simulation, loaded)), memories_of(finish(simulation)))


@every_method
def test_a_stored_run_loads_and_takes_in_a_client(method: str, tmp_path: Path) -> None:
    federation, factory = named_federation(), model().factory
    settings: dict[str, Any] = {"steps": 8, "batch_size": 5, "cohort_size": 2, "progress": False, "device": "cpu"}
    run = pfedhn.train(METHODS[method], federation, factory, directory=tmp_path, **settings)
    loaded = pfedhn.load(tmp_path, model=factory, method=type(METHODS[method]), device="cpu")
    for client in ("party-1", "party-3"):
        assert_same_bits(loaded.personal_model(client).state_dict(), run.personal_model(client).state_dict())
    new = loaded.add_client(federation.x[:30], federation.y[:30], rounds=2)
    assert new.weights.keys() == model().shapes.keys()


def test_a_client_that_was_never_met_needs_its_examples(tmp_path: Path) -> None:
    """Its label counts are unknown in a run that was loaded."""
    run = pfedhn.train(FedRoD(), named_federation(), model().factory, steps=2, progress=False, device="cpu")
    plan = to_plan_of(run.plan)
    memories = run.state.best.memories
    table = memories.private[run.plan.model_of(0).name]
    del table.slots[1]
    with pytest.raises(UserError, match="does not have its clients' examples"):
        plan.personal_weights(memories, plan.model_of(1), 1, 0)


def to_plan_of(simulation: Any) -> Plan:
    """The run without its clients' data."""
    return Plan(**{item.name: getattr(simulation, item.name) for item in fields(Plan)})
