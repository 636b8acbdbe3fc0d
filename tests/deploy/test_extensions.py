"""Extras, label counts and features, by two methods that need them; neither is a row of the table.

SCAFFOLD sends control variates beside weights, both ways; FedRoD needs label counts and the input of the last layer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

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
from pfedhn import keys
from pfedhn.algorithm import LABEL_COUNTS, NO_EXTRAS, Algorithm, Extra, Extras, client_weights, only_group
from pfedhn.algorithm import Group as Cohort
from pfedhn.algorithms.fedavg import FedAvg, after_mean_update, only_start
from pfedhn.combinators import with_statistics
from pfedhn.data.federation import Federation
from pfedhn.deploy.join import max_message
from pfedhn.deploy.plan import plan_digest
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.signing import opened, sealed
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.executors import EXECUTORS
from pfedhn.engine.plan import Plan
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.transform import TRANSFORMS
from pfedhn.errors import UserError
from pfedhn.kernels.fuse import Fused
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.models import cross_entropy, is_correct
from pfedhn.params import Params, pack, pick, subtract, take, weighted_sum, zeros_like
from pfedhn.privacy import Privacy
from pfedhn.sgd import SGD, Batches, Rate, gradient, scan
from pfedhn.storage.checkpoint import load_state, save_state

LR, STEPS = 0.1, 3
CLIENTS = range(NUM_CLIENTS)


def control(values: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to parameters, under names that no parameter has."""
    return {f"control/{name}": value for name, value in values.items()}


class Memory(NamedTuple):
    weights: Params  # w
    control: Params  # c


@dataclass(frozen=True)
class Scaffold(Algorithm[Memory, tuple[()], Params]):
    """SCAFFOLD (Karimireddy et al., ICML 2020), option II, with a server step of 1.

    server   send w, c                                                          send
    client   K times: w_i <- w_i - lr (grad L(w_i) - c_i + c)                   train
             c_i' = c_i - c + (w - w_i) / (K lr); keep c_i'; return w - w_i, c_i' - c_i
    server   w <- w - mean_i (w - w_i); c <- c + sum_i (c_i' - c_i) / N         receive
    """

    local_lr: Rate = LR
    local_steps: int = STEPS
    num_clients: int = 0
    max_norm: float = 1e3

    @property
    def num_batches(self) -> int:
        return self.local_steps

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> "Scaffold":
        return replace(self, num_clients=num_clients)

    def extras(self, model: Model) -> Extras:
        shapes = control({name: tuple(shape) for name, shape in model.shapes.items()})
        return Extras(down=shapes, up={name: Extra(shape, self.max_norm) for name, shape in shapes.items()})

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Memory:
        start = only_start("SCAFFOLD", models, starts)
        return Memory(start, zeros_like(start))

    def init_private(self, model: Model, start: Params, key: Key) -> Params:
        return zeros_like(start)

    def send(self, model: Model, shared: Memory, row: tuple[()]) -> Params:
        return shared.weights | control(shared.control)

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        w, unpack = pack(pick(received, model.shapes))
        c, _ = pack({name: received[f"control/{name}"] for name in model.shapes})
        c_i, _ = pack({name: private[name] for name in model.shapes})
        gradient_of = gradient(model.loss, unpack)

        def step(weights: Tensor, batch: Batches, constants: tuple[Rate, Tensor]) -> Tensor:
            lr, correction = constants
            return weights - lr * (gradient_of(weights, batch) + correction)

        w_i = scan(step, w, batches, (self.local_lr, c - c_i))
        new = c_i - c + (w - w_i) / (self.local_steps * self.local_lr)
        return unpack(w - w_i) | control(unpack(new - c_i)), unpack(new)

    def receive(self, shared: Memory, groups: Sequence[Cohort]) -> tuple[Memory, list[tuple[()]]]:
        group = only_group(groups, "SCAFFOLD")
        ones = torch.ones_like(group.sizes, dtype=torch.float64)
        moved = weighted_sum(group.extras, ones / self.num_clients)
        controls = {name: value + moved[f"control/{name}"] for name, value in shared.control.items()}
        return Memory(after_mean_update(shared.weights, group, ones / len(ones)), controls), [group.rows]


class Head(NamedTuple):
    weight: Tensor
    bias: Tensor
    counts: Tensor  # n_i, training examples per class


@dataclass(frozen=True)
class FedRoD(Algorithm[Params, tuple[()], Head]):
    """FedRoD (Chen, Chao, ICLR 2022) with a linear personal head.

    server   send body, head_G                                                                send
    client   K times, on a batch: z = body(x)                                                 train
                 body, head_G <- a step of SGD on CE(head_G(z) + log n_i, y)
                 head_P       <- a step of SGD on CE(stop(head_G(z)) + head_P(stop(z)), y)
             keep head_P; return what moved of body and head_G
    server   average                                                                          receive
    client   tested with body, head_G + head_P                                                personalize
    """

    local_lr: Rate = LR
    local_steps: int = STEPS
    num_labels: int = NUM_CLASSES

    @property
    def num_batches(self) -> int:
        return self.local_steps

    @property
    def local_sgd(self) -> SGD:
        return SGD(self.local_lr)

    def extras(self, model: Model) -> Extras:
        return Extras(num_labels=self.num_labels)

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        return only_start("FedRoD", models, starts)

    def init_private(self, model: Model, start: Params, key: Key) -> Head:
        weight, bias = (start[f"{model.last_layer}.{part}"] for part in ("weight", "bias"))
        return Head(torch.zeros_like(weight), torch.zeros_like(bias), start[LABEL_COUNTS])

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared

    def train(self, model: Model, received: Params, private: Head, batches: Batches) -> tuple[Params, Head]:
        prior = private.counts.to(private.bias.dtype).clamp(min=1e-8).log()

        def loss(weights: Params, batch: Batches) -> Tensor:
            z, outputs = model.features(pick(weights, model.shapes), batch)
            own = functional.linear(z.detach(), weights["own.weight"], weights["own.bias"])
            return model.mean_loss(outputs + prior, batch) + model.mean_loss(outputs.detach() + own, batch)

        start = received | {"own.weight": private.weight, "own.bias": private.bias}
        trained, _ = self.local_sgd.run(loss, start, batches)
        head = Head(trained["own.weight"], trained["own.bias"], private.counts)
        return subtract(received, trained), head

    def receive(self, shared: Params, groups: Sequence[Cohort]) -> tuple[Params, list[tuple[()]]]:
        group = only_group(groups, "FedRoD")
        return after_mean_update(shared, group, client_weights("size", group.sizes)), [group.rows]

    def personalize(self, model: Model, received: Params, private: Head, batches: Batches) -> Params:
        last = model.last_layer
        head = {f"{last}.weight": private.weight, f"{last}.bias": private.bias}
        return received | {name: received[name] + value for name, value in head.items()}


METHODS = {"scaffold": Scaffold(), "fedrod": FedRoD()}
every_method = pytest.mark.parametrize("method", METHODS)
every_target = pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))


def batches_of(simulation: Simulation, number: int, client: int) -> list[tuple[Tensor, Tensor]]:
    key = keys.fold(simulation.seed, "batches", number)
    one = simulation.federation.batches(torch.tensor([client]), key, STEPS, simulation.schedule.batch_size)
    return [(x[mask], y[mask]) for x, y, mask in zip(one.x[0], one.y[0], one.mask[0], strict=True)]


def network(target: str, weights: Params) -> nn.Module:
    return model(target).with_weights(weights).train()


def weights_of(module: nn.Module) -> Params:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


# Plain versions.


@every_target
def test_scaffold(federation: Federation, target: str) -> None:
    simulation = simulate(METHODS["scaffold"], federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    c, c_i = zeros_like(w), [zeros_like(w) for _ in CLIENTS]
    for number in range(simulation.num_rounds):
        updates, moves = [], []
        for client in simulation.cohort(number):
            net, batches = network(target, w), batches_of(simulation, number, client)
            for x, y in batches:
                net.zero_grad()
                functional.cross_entropy(net(x), y).backward()
                with torch.no_grad():
                    for name, value in net.named_parameters():
                        value -= LR * (value.grad - c_i[client][name] + c[name])
            update = subtract(w, weights_of(net))
            new = {name: c_i[client][name] - c[name] + update[name] / (len(batches) * LR) for name in w}
            moves.append(subtract(new, c_i[client]))
            updates.append(update)
            c_i[client] = new
        w = {name: w[name] - sum(update[name] for update in updates) / len(updates) for name in w}
        c = {name: c[name] + sum(move[name] for move in moves) / NUM_CLIENTS for name in c}
    state = finish(simulation)
    assert_close(state.memories.shared, Memory(w, c), rtol=1e-12)
    assert_close(private_of(simulation, state), c_i, rtol=1e-12)
    assert_close(personal(simulation, state), [w for _ in CLIENTS], rtol=1e-12)
    assert max(float(value.abs().max()) for value in c.values()) > 1e-3


@every_target
def test_fedrod(federation: Federation, target: str) -> None:
    simulation = simulate(METHODS["fedrod"], federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    last = model(target).last_layer
    heads = [nn.Linear(*reversed(w[f"{last}.weight"].shape), dtype=torch.float64) for _ in CLIENTS]
    for head in heads:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    labels = [federation.y[federation.splits["train"].of(client)].tolist() for client in CLIENTS]
    counts = [torch.tensor([own.count(label) for label in range(NUM_CLASSES)]) for own in labels]
    assert any(0 in own for own in counts)
    for number in range(simulation.num_rounds):
        trained, cohort = {}, simulation.cohort(number)
        for client in cohort:
            net, head = network(target, w), heads[client]
            body = nn.Sequential(*list(net)[:-1]) if target == "mlp" else None
            optimizers = [torch.optim.SGD(part.parameters(), LR) for part in (net, head)]
            for x, y in batches_of(simulation, number, client):
                z = body(x) if body else functional.max_pool2d(net.conv(x), 2).relu().flatten(1)
                outputs = net.get_submodule(last)(z)
                prior = counts[client].double().clamp(min=1e-8).log()
                losses = (
                    functional.cross_entropy(outputs + prior, y),
                    functional.cross_entropy(outputs.detach() + head(z.detach()), y),
                )
                for loss, optimizer in zip(losses, optimizers, strict=True):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            trained[client] = weights_of(net)
        total = sum(len(labels[client]) for client in cohort)
        w = {name: sum(len(labels[client]) / total * trained[client][name] for client in cohort) for name in w}
    state = finish(simulation)
    assert_close(state.memories.shared, w, rtol=1e-12)
    own = [Head(head.weight.detach(), head.bias.detach(), counts[client]) for client, head in enumerate(heads)]
    assert_close(private_of(simulation, state), own, rtol=1e-12)
    weight, bias = f"{last}.weight", f"{last}.bias"
    tested = [w | {weight: w[weight] + head.weight, bias: w[bias] + head.bias} for head in own]
    assert_close(personal(simulation, state), tested, rtol=1e-12)


def private_of(simulation: Simulation, state: Any) -> list[Any]:
    (table,) = state.memories.private.values()
    return [take(table.take([client]), 0).private for client in CLIENTS]


# Everything that runs a round carries them.


def road(simulation: Simulation) -> Any:
    state = simulation.initial_state()
    for _ in CapturedRun(simulation, state).rounds() if simulation.executor == "captured" else simulation.rounds(state):
        pass
    return memories_of(state), personal(simulation, state), state.bytes_down, state.bytes_up


@pytest.mark.parametrize(
    ("method", "target", "cohort"),
    mostly_slow(
        [(method, *case) for method in METHODS for case in (("mlp", 3), ("conv", 1), ("batchnorm", 3))],
        ("scaffold", "mlp", 3),
        ("fedrod", "batchnorm", 3),
    ),
)
def test_executors_agree(federation: Federation, method: str, target: str, cohort: int) -> None:
    settings = {"rounds": 5, "cohort": cohort}
    results = {
        executor: road(simulate(METHODS[method], federation, target, executor=executor, **settings))
        for executor in (*EXECUTORS, "captured")
    }
    for result in results.values():
        assert_close(result, results["loop"], atol=1e-10 if target == "batchnorm" else 1e-12)


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
    simulation = simulation_of(with_statistics(Scaffold(), "shared"), models="batchnorm", rounds=2, cohort=2)
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
    one, other, plain = (simulation_of(spec) for spec in (Scaffold(), Scaffold(max_norm=7.0), FedAvg()))
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
