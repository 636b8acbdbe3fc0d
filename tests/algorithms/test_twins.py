"""Each method, several rounds through the engine, against a plain version of it: modules, torch.optim, autograd.

Both sides get the same clients and the same minibatches; everything they remember must be equal to rounding.
"""

import copy
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import (
    MEAN,
    NUM_CLIENTS,
    STD,
    TRAIN_SIZES,
    assert_close,
    assert_same_bits,
    finish,
    memories_of,
    model,
    mostly_slow,
    personal,
    simulate,
    uint8_images,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear, normalize
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from pfedhn import keys
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.apfl import APFL
from pfedhn.algorithms.ditto import Ditto
from pfedhn.algorithms.fedala import FedALA
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.local import Local
from pfedhn.algorithms.per_fedavg import PerFedAvg
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.algorithms.pfedme import PFedMe
from pfedhn.bench import textbook
from pfedhn.bench.measure import Images
from pfedhn.combinators import innermost
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.model import Model
from pfedhn.params import Params, take
from pfedhn.settings import values_of
from pfedhn.sgd import AdamW, Batches

Minibatch = tuple[Tensor, Tensor]
CLIENTS = range(NUM_CLIENTS)
SIZES = dict(enumerate(TRAIN_SIZES))
LOCAL = {"local_lr": 0.1, "local_steps": 4, "local_momentum": 0.9, "local_weight_decay": 0.01}
TWINS = set()  # the rows of the method table that are compared below


def row(method: str, **settings: Any) -> Any:
    """A method as its row of the table makes it, with other settings; for the parameters of a test."""
    TWINS.add(method)
    return ALGORITHMS[method](**settings)


# What both sides are given.


def minibatches(simulation: Simulation, key: keys.Key, client: int, count: int) -> list[Minibatch]:
    one = simulation.federation.batches(torch.tensor([client]), key, count, simulation.schedule.batch_size)
    return [(x[mask], y[mask]) for x, y, mask in zip(one.x[0], one.y[0], one.mask[0], strict=True)]


def training_batches(simulation: Simulation, number: int, client: int) -> list[Minibatch]:
    key = keys.fold(simulation.seed, "batches", number)
    return minibatches(simulation, key, client, simulation.algorithm.num_batches)


def cohorts(simulation: Simulation) -> list[list[int]]:
    """Who takes part; refuses a schedule in which no client comes twice, since that would hide what is remembered."""
    chosen = [simulation.cohort(number) for number in range(simulation.num_rounds)]
    counts = Counter(client for clients in chosen for client in clients)
    assert len(chosen) >= 6
    assert max(counts.values()) >= 2
    return chosen


# Plain pieces.


def network(architecture: Model, weights: Params) -> nn.Module:
    module = copy.deepcopy(architecture.training_module)
    module.load_state_dict(weights)
    return module


def weights_of(module: nn.Module) -> Params:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def optimizer(spec: Any, parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, spec.local_lr, spec.local_momentum, weight_decay=spec.local_weight_decay)


def descend(
    net: nn.Module,
    optimizers: list[torch.optim.SGD],
    batches: list[Minibatch],
    clip: float | None,
    clipped: list[nn.Parameter] | None = None,
) -> list[float]:
    """One step per minibatch; the gradient norms met."""
    norms = []
    for x, y in batches:
        net.zero_grad()
        cross_entropy(net(x), y).backward()
        norm = clip_grad_norm_(list(net.parameters()) if clipped is None else clipped, clip or math.inf)
        norms.append(float(norm))
        for each in optimizers:
            each.step()
    return norms


def server_weights(rule: str, clients: list[int]) -> dict[int, float]:
    total = sum(SIZES[client] for client in clients)
    return {client: {"mean": 1 / len(clients), "sum": 1.0, "size": SIZES[client] / total}[rule] for client in clients}


def average(rule: str, models: dict[int, Params]) -> Params:
    weights = server_weights(rule, list(models))
    names = next(iter(models.values()))
    return {name: sum(weights[client] * models[client][name] for client in models) for name in names}


# Local


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize("spec", [row("local", **LOCAL, local_clip=0.8)], ids=["local"])
def test_local(federation: Federation, target: str, spec: Local) -> None:
    simulation = simulate(spec, federation, target, rounds=6)
    (start,) = simulation.initial_models().values()
    nets = [network(model(target), start) for _ in CLIENTS]
    optimizers = [optimizer(spec, net.parameters()) for net in nets]
    norms = []
    for number, clients in enumerate(cohorts(simulation)):
        for client in clients:
            batches = training_batches(simulation, number, client)
            norms += descend(nets[client], [optimizers[client]], batches, spec.local_clip)
    assert max(norms) > spec.local_clip > min(norms)

    state = finish(simulation)
    assert_close(personal(simulation, state), [weights_of(net) for net in nets])
    for client in CLIENTS:
        private = take(state.memories.private[target].take([client]), 0).private
        assert_close(private.velocity, velocity_of(nets[client], optimizers[client]))


def velocity_of(net: nn.Module, optimizer: torch.optim.SGD) -> Params:
    state = optimizer.state
    return {name: state[value]["momentum_buffer"] for name, value in net.named_parameters() if value in state}


# FedAvg, FedPer, LG-FedAvg


def averaging_twin(
    simulation: Simulation, kept: set[str], rule: str
) -> tuple[Params, Params, list[Params], list[float]]:
    """The shared weights, those that clients use, what every client keeps, and the gradient norms met."""
    ((name, start),) = simulation.initial_models().items()
    spec = innermost(simulation.algorithm)
    most = values_of(simulation.algorithm).get("averaging") or 0.0  # of its past that a moving average keeps
    shared = {name: value for name, value in start.items() if name not in kept}
    own = [{name: value for name, value in start.items() if name in kept} for _ in CLIENTS]
    norms, used = [], shared
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net = network(model(name), shared | own[client])
            batches = training_batches(simulation, number, client)
            norms += descend(net, [optimizer(spec, net.parameters())], batches, spec.local_clip)
            weights = weights_of(net)
            own[client] = {name: weights[name] for name in kept}
            trained[client] = {name: weights[name] for name in shared}
        shared = average(rule, trained)
        keep = min(most, (1 + number) / (10 + number))
        used = {name: keep * used[name] + (1 - keep) * value for name, value in shared.items()}
    return shared, used, own, norms


FIRST = {"mlp": {"1.weight", "1.bias"}, "conv": {"conv.weight", "conv.bias"}}
LAST = {"mlp": {"3.weight", "3.bias"}, "conv": {"out.weight", "out.bias"}}
INTERCEPT = {"mlp": {"3.bias"}, "conv": {"out.bias"}}
NONE: dict[str, set[str]] = {"mlp": set(), "conv": set()}


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize(
    ("spec", "rule", "kept"),
    [
        (row("fedavg", **LOCAL), "size", NONE),
        (row("fedavg", **LOCAL, local_clip=0.8, rule="mean"), "mean", NONE),
        (row("fedper", **LOCAL, local_clip=0.8), "size", LAST),
        (row("fedper-intercept", **LOCAL, averaging=0.4), "size", INTERCEPT),
        (row("lg-fedavg", **LOCAL), "mean", FIRST),
    ],
    ids=["fedavg", "fedavg-mean-clipped", "fedper-clipped", "fedper-intercept", "lg-fedavg"],
)
def test_averaging(federation: Federation, target: str, spec: FedAvg, rule: str, kept: dict[str, set[str]]) -> None:
    simulation = simulate(spec, federation, target, cohort=3)
    shared, used, own, norms = averaging_twin(simulation, kept[target], rule)
    clip = innermost(spec).local_clip
    assert clip is None or max(norms) > clip > min(norms)

    state = finish(simulation)
    assert_close(simulation.exchange.newest(state.memories.shared), shared)
    assert_close([take(state.memories.private[target].take([i]), 0).private for i in CLIENTS], own)
    assert_close(personal(simulation, state), [used | part for part in own])


def test_lg_fedavg_starts_from_another_run(federation: Federation) -> None:
    before = finish(simulate(ALGORITHMS["fedavg"](**LOCAL), federation, cohort=3))
    simulation = simulate(
        ALGORITHMS["lg-fedavg"](**LOCAL), federation, cohort=3, starts={"mlp": before.memories.shared}
    )
    shared, _, own, _ = averaging_twin(simulation, {"1.weight", "1.bias"}, "mean")
    assert_close(personal(simulation, finish(simulation)), [shared | part for part in own])


# Per-FedAvg


META = {"personal_lr": 0.3, "local_lr": 0.2, "local_steps": 3, "personal_steps": 2}


def gradient(net: nn.Module, weights: Params, batch: Minibatch) -> Params:
    net.load_state_dict(weights)
    x, y = batch
    values = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
    return dict(zip(weights, values, strict=True))


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize(
    ("spec", "per_step"),
    [(row("per-fedavg", **META), 2), (row("per-fedavg-hf", **META), 3)],
    ids=["first-order", "hessian-free"],
)
def test_per_fedavg(federation: Federation, target: str, spec: PerFedAvg, per_step: int) -> None:
    alpha, beta, d, tau = 0.3, 0.2, 1e-3, 3
    simulation = simulate(spec, federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    net = network(model(target), w)
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            batches = training_batches(simulation, number, client)
            assert len(batches) == tau * per_step
            w_i = w
            for step in range(tau):
                first, second, *third = batches[step * per_step : (step + 1) * per_step]
                g = gradient(net, w_i, first)
                u = {name: w_i[name] - alpha * g[name] for name in w}
                q = gradient(net, u, second)
                if third:
                    up = gradient(net, {name: w_i[name] + d * q[name] for name in w}, third[0])
                    down = gradient(net, {name: w_i[name] - d * q[name] for name in w}, third[0])
                    q = {name: q[name] - alpha * (up[name] - down[name]) / (2 * d) for name in w}
                w_i = {name: w_i[name] - beta * q[name] for name in w}
            trained[client] = w_i
        w = average("mean", trained)

    adapted = []
    for client in CLIENTS:
        net = network(model(target), w)
        batches = minibatches(simulation, simulation.personalize_key(simulation.num_rounds), client, 2)
        descend(net, [torch.optim.SGD(net.parameters(), alpha)], batches, None)
        adapted.append(weights_of(net))
    state = finish(simulation)
    assert_close(state.memories.shared, w)
    assert_close(personal(simulation, state), adapted)


# pFedMe


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize("tested", ["theta", "x"])
@pytest.mark.parametrize(
    "spec",
    [row("pfedme", lr=0.02, personal_lr=0.05, strength=7.0, mixing=0.8, outer_steps=4, inner_steps=3, decay=0.05)],
    ids=["pfedme"],
)
def test_pfedme(federation: Federation, target: str, spec: PFedMe, tested: str) -> None:
    lr, lr_p, lam, mu, beta = 0.02, 0.05, 7.0, 0.05, 0.8
    spec = replace(spec, tested=tested)
    simulation = simulate(spec, federation, target, cohort=2, rounds=6, seed=1)
    (w,) = simulation.initial_models().values()
    kept: dict[int, Params] = {}
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net, x_i = network(model(target), w), w
            theta = torch.optim.SGD(net.parameters(), lr_p)
            for batch in training_batches(simulation, number, client):
                for _ in range(3):
                    theta.zero_grad()
                    envelope = sum((v - x_i[n]).square().sum() for n, v in net.named_parameters()) * lam / 2
                    decay = sum(value.square().sum() for value in net.parameters()) * mu / 2
                    (cross_entropy(net(batch[0]), batch[1]) + envelope + decay).backward()
                    theta.step()
                x_i = {name: x_i[name] - lr * lam * (x_i[name] - v) for name, v in weights_of(net).items()}
            trained[client] = x_i
            kept[client] = weights_of(net) if tested == "theta" else x_i
        mean = average("size", trained)
        w = {name: (1 - beta) * w[name] + beta * mean[name] for name in w}
    assert 2 <= len(kept) < NUM_CLIENTS  # some client is never chosen, and is tested with w

    state = finish(simulation)
    assert_close(state.memories.shared, w)
    assert_close(personal(simulation, state), [kept.get(client, w) for client in CLIENTS])


# Ditto


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize("spec", [row("ditto", **LOCAL, local_clip=0.8, strength=0.7)], ids=["ditto"])
def test_ditto(federation: Federation, target: str, spec: Ditto) -> None:
    simulation = simulate(spec, federation, target, cohort=2)
    (w,) = simulation.initial_models().values()
    personal_nets = [network(model(target), w) for _ in CLIENTS]
    norms = []
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net, own = network(model(target), w), personal_nets[client]
            batches = training_batches(simulation, number, client)
            descend(net, [optimizer(spec, net.parameters())], batches, spec.local_clip)
            trained[client] = weights_of(net)
            steps = optimizer(spec, own.parameters())
            for x, y in batches:
                own.zero_grad()
                cross_entropy(own(x), y).backward()
                norms.append(float(clip_grad_norm_(own.parameters(), spec.local_clip)))
                for name, value in own.named_parameters():
                    value.grad += 0.7 * (value.detach() - w[name])
                steps.step()
        w = average("size", trained)
    assert max(norms) > spec.local_clip > min(norms)

    state = finish(simulation)
    assert_close(state.memories.shared, w)
    assert_close(personal(simulation, state), [weights_of(net) for net in personal_nets])


# FedRep and FedBABU


def phase(spec: FedAvg, net: nn.Module, names: Any, batches: list[Minibatch]) -> None:
    """Steps that move only the named parameters, by an optimizer of their own."""
    moving = [value for name, value in net.named_parameters() if name in names]
    descend(net, [optimizer(spec, moving)], batches, spec.local_clip, moving)


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize(
    ("spec", "head_steps", "rule"),
    [
        (row("fedrep", **LOCAL, local_clip=0.5, head_share=0.7), 3, "mean"),
        (row("fedbabu", **LOCAL, local_clip=0.5), 0, "size"),
    ],
    ids=["fedrep", "fedbabu"],
)
def test_head_and_body_in_phases(federation: Federation, target: str, spec: FedAvg, head_steps: int, rule: str) -> None:
    simulation = simulate(spec, federation, target, cohort=3)
    (start,) = simulation.initial_models().values()
    head = LAST[target]
    body = {name: value for name, value in start.items() if name not in head}
    heads = [{name: start[name] for name in head} for _ in CLIENTS]
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net = network(model(target), body | heads[client])
            batches = training_batches(simulation, number, client)
            phase(spec, net, head, batches[:head_steps])
            phase(spec, net, body, batches[head_steps:])
            weights = weights_of(net)
            heads[client] = {name: weights[name] for name in head}
            trained[client] = {name: weights[name] for name in body}
        body = average(rule, trained)

    state = finish(simulation)
    assert_close(state.memories.shared, body)
    assert_close(personal(simulation, state), [body | head for head in heads])


@pytest.mark.parametrize("adapted", ["all", "head"])
def test_fedbabu_adapts(federation: Federation, adapted: str) -> None:
    spec = ALGORITHMS["fedbabu"](**LOCAL, local_clip=0.5, adapted=adapted)
    batches = take(federation.batches(torch.tensor([2]), 1, 6, 5), 0)
    weights = model().fresh(3)
    net = network(model(), weights)
    plain = [(x[mask], y[mask]) for x, y, mask in zip(*batches, strict=True)]
    phase(spec, net, LAST["mlp"] if adapted == "head" else weights, plain)
    tuning = spec.fine_tuning
    tuned, _ = tuning.sgd.run(model().loss, weights, Batches(*batches), frozen=tuning.frozen(model()))
    assert_close(tuned, weights_of(net))


# FedALA


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize("tested", ["start", "trained"])
@pytest.mark.parametrize("spec", [row("fedala", **LOCAL, mixture_lr=4.0, mixture_steps=3)], ids=["fedala"])
def test_fedala(federation: Federation, target: str, spec: FedALA, tested: str) -> None:
    """As its authors write it: the gradient by a mixture is that by the mixed weight, times the difference."""
    eta, steps = 4.0, 3
    simulation = simulate(replace(spec, tested=tested), federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    upper = LAST[target]
    own = [w for _ in CLIENTS]
    mixtures = [{name: torch.ones_like(w[name]) for name in upper} for _ in CLIENTS]

    def start(client: int, w: Params, batches: list[Minibatch]) -> tuple[nn.Module, Params]:
        mixture, gap = mixtures[client], {name: w[name] - own[client][name] for name in upper}
        net = network(model(target), w)
        values = dict(net.named_parameters())

        def mix(mixture: Params) -> None:
            for name in upper:
                values[name].data = own[client][name] + mixture[name] * gap[name]

        mix(mixture)
        for x, y in batches:
            net.zero_grad()
            cross_entropy(net(x), y).backward()
            mixture = {name: (mixture[name] - eta * values[name].grad * gap[name]).clamp(0, 1) for name in upper}
            mix(mixture)
        return net, mixture

    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            batches = training_batches(simulation, number, client)
            net, mixtures[client] = start(client, w, batches[:steps])
            descend(net, [optimizer(spec, net.parameters())], batches[steps:], None)
            own[client] = trained[client] = weights_of(net)
        w = average("size", trained)
    inside = torch.cat([part.flatten() for mixture in mixtures for part in mixture.values()])
    assert (inside == 0).any()
    assert ((inside > 0) & (inside < 1)).any()

    expected = own
    if tested == "start":
        key = simulation.personalize_key(simulation.num_rounds)
        batches_of = [minibatches(simulation, key, client, steps) for client in CLIENTS]
        expected = [weights_of(start(client, w, batches_of[client])[0]) for client in CLIENTS]
    state = finish(simulation)
    assert_close(state.memories.shared, w)
    assert_close(personal(simulation, state), expected)


def test_a_new_client_of_fedala_moves_from_w_toward_the_common_start(federation: Federation) -> None:
    spec = ALGORITHMS["fedala"](mixture_lr=1e3, mixture_steps=3)
    common, w = model().fresh(1), model().fresh(2)
    batches = take(federation.batches(torch.tensor([2]), 1, 3, 5), 0)
    start, _ = spec.start(model(), w, spec.init_private(model(), common, 0), Batches(*batches))
    for name in LAST["mlp"]:
        share = (w[name] - start[name]) / (w[name] - common[name])
        assert ((share > -1e-9) & (share < 1 + 1e-9)).all()
        assert (share > 1e-3).any()
    assert_close({name: start[name] for name in FIRST["mlp"]}, {name: w[name] for name in FIRST["mlp"]})


# APFL


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize(("adaptive", "tested"), [(True, "copy"), (False, "newest")])
@pytest.mark.parametrize("spec", [row("apfl", **LOCAL, local_clip=0.8, alpha=0.6)], ids=["apfl"])
def test_apfl(federation: Federation, target: str, spec: APFL, adaptive: bool, tested: str) -> None:
    """The mixture is differentiated through, by alpha and by v_i."""
    spec = replace(spec, adaptive=adaptive, tested=tested)
    simulation = simulate(spec, federation, target, cohort=2)
    (w,) = simulation.initial_models().values()
    own = [network(model(target), w) for _ in CLIENTS]
    copies = [w for _ in CLIENTS]
    alphas = [torch.tensor(0.6, dtype=torch.float64) for _ in CLIENTS]

    def mix(client: int, w: Params) -> Params:
        return {
            name: alphas[client] * value + (1 - alphas[client]) * w[name]
            for name, value in own[client].named_parameters()
        }

    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net, batches = network(model(target), w), training_batches(simulation, number, client)
            if adaptive:
                alphas[client].requires_grad_()
                x, y = batches[0]
                (slope,) = torch.autograd.grad(
                    cross_entropy(functional_call(net, mix(client, w), x), y), alphas[client]
                )
                alphas[client] = (alphas[client].detach() - spec.local_lr * slope).clamp(0, 1)
            both = [optimizer(spec, each.parameters()) for each in (net, own[client])]
            for x, y in batches:
                net.zero_grad()
                own[client].zero_grad()
                cross_entropy(functional_call(net, mix(client, weights_of(net)), x), y).backward()
                cross_entropy(net(x), y).backward()
                for each in (net, own[client]):
                    clip_grad_norm_(each.parameters(), spec.local_clip)
                for each in both:
                    each.step()
            copies[client] = trained[client] = weights_of(net)
        w = average("mean", trained)
    assert not adaptive or len({float(alpha) for alpha in alphas}) >= 3

    state = finish(simulation)
    assert_close(state.memories.shared, w)
    expected = [mix(client, copies[client] if tested == "copy" else w) for client in CLIENTS]
    assert_close(personal(simulation, state), [{name: v.detach() for name, v in each.items()} for each in expected])


# pFedHN against the textbook


HYPER = {"hidden_dim": 6, "num_hidden": 2, "embedding_dim": 3, "lr": 0.3, "weight_decay": 0.05, "clip": None}


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize(
    ("settings", "images"),
    [
        pytest.param({}, False, id="plain"),
        pytest.param({}, True, id="images", marks=pytest.mark.slow),
        pytest.param({"clip": 0.05, "local_clip": 1.2}, True, id="images-clipped"),
        pytest.param({"embedding_lr": 1.1}, False, id="embedding-lr"),
        pytest.param({"num_hidden": 0, "lr": 0.05}, False, id="no-hidden", marks=pytest.mark.slow),
        pytest.param({"momentum": 0.0}, False, id="no-momentum", marks=pytest.mark.slow),
    ],
)
def test_pfedhn_textbook(federation: Federation, target: str, settings: dict[str, Any], images: bool) -> None:
    simulation = simulate(ALGORITHMS["pfedhn"](**(LOCAL | HYPER | settings)), federation, target, rounds=10)
    assert len(cohorts(simulation)) == 10
    start, state = simulation.initial_state(), finish(simulation)
    data = Images(uint8_images(), federation.y, MEAN, STD) if images else TensorDataset(federation.x, federation.y)
    *_, h = textbook.rounds(simulation, start, data)

    memories = state.memories
    assert_close(memories.shared.phi, h.phi())
    rows = simulation.algorithm.up_to_date(memories.rows, memories.shared)
    assert_close(rows.embedding, h.embedding.weight.detach())
    expected = [{n: v.detach() for n, v in h(torch.tensor(client)).items()} for client in CLIENTS]
    assert_close(personal(simulation, state), expected)


# pFedHN in all its forms


class Hyper(nn.Module):
    """One `nn.Linear` per trunk layer and per target tensor of every architecture, from the engine's first weights."""

    def __init__(self, simulation: Simulation, state: State) -> None:
        super().__init__()
        self.spec = innermost(simulation.algorithm)
        shared, rows = simulation.exchange.newest(state.memories.shared), state.memories.rows
        depth = 0 if self.spec.linear else 1 + self.spec.num_hidden
        self.trunk = nn.ModuleList(self._layer(shared, f"trunk.{i}", f"trunk.{i}") for i in range(depth))
        self.shapes = {name: self.spec.roles(m).generated for name, m in simulation.models.items()}
        self.heads = nn.ModuleDict()
        for name, shapes in self.shapes.items():
            heads, first = [], 0
            for tensor, shape in shapes.items():
                part = slice(first, first + shape.numel())
                heads.append(self._layer(shared, f"head.{name}", f"head.{name}.{tensor}", part))
                first = part.stop
            self.heads[name] = nn.ModuleList(heads)
        self.embedding = nn.Embedding.from_pretrained(
            rows.embedding.clone(), freeze=self.spec.embeddings.kind == "fixed"
        )
        for parameter in self.parameters():
            # Zeros, not None: torch.optim skips a parameter without a gradient, and then it would not decay.
            parameter.grad = torch.zeros_like(parameter)

    def _layer(self, shared: Any, name: str, vector: str, part: slice = slice(None)) -> nn.Linear:
        weight, bias = shared.phi[f"{name}.weight"][part], shared.phi.get(f"{name}.bias")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias[part]}))
        if self.spec.spectral_norm:
            layer.u = shared.spectral[vector].clone()
        return layer

    def apply_layer(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not self.spec.spectral_norm:
            return layer(x)
        with torch.no_grad():
            v = normalize(layer.weight.T @ layer.u, dim=0)
        return linear(x, layer.weight / torch.dot(layer.u, layer.weight @ v), layer.bias)

    @torch.no_grad()
    def power_step(self) -> None:
        for layer in self.modules():
            if hasattr(layer, "u"):
                v = normalize(layer.weight.T @ layer.u, dim=0)
                layer.u = normalize(layer.weight @ v, dim=0)

    def forward(self, name: str, client: int) -> Params:
        x = self.embedding(torch.tensor(client))
        for i, layer in enumerate(self.trunk):
            x = self.apply_layer(layer, x if i == 0 else x.relu())
        flat = [self.apply_layer(head, x) for head in self.heads[name]]
        return {tensor: f.reshape(s) for (tensor, s), f in zip(self.shapes[name].items(), flat, strict=True)}

    @torch.no_grad()
    def load_phi(self, phi: Params) -> None:
        for name, value in phi.items():
            layer, part = name.rsplit(".", 1)
            kind, which = layer.split(".", 1)
            layers = [self.trunk[int(which)]] if kind == "trunk" else list(self.heads[which])
            sizes = [len(getattr(each, part)) for each in layers]
            for each, piece in zip(layers, value.split(sizes), strict=True):
                getattr(each, part).copy_(piece)

    def phi(self, value: Any = lambda parameter: parameter.detach()) -> Params:
        parts = ("weight",) if self.spec.linear else ("weight", "bias")
        trunk = {
            f"trunk.{i}.{part}": value(getattr(layer, part)) for i, layer in enumerate(self.trunk) for part in parts
        }
        return trunk | {
            f"head.{name}.{part}": torch.cat([value(getattr(layer, part)) for layer in layers])
            for name, layers in self.heads.items()
            for part in parts
        }


class Rows:
    """The steps on the embeddings: by SGD all of them every time, by Adam those of the chosen clients."""

    def __init__(self, spec: PFedHN, embedding: nn.Embedding) -> None:
        self.table, self.is_adam = embedding.weight, spec.embeddings.optimizer == "adam"
        lr = spec.server.lr if spec.embeddings.lr is None else spec.embeddings.lr
        momentum = spec.server.momentum if spec.embeddings.momentum is None else spec.embeddings.momentum
        decay = spec.server.weight_decay if spec.embeddings.weight_decay is None else spec.embeddings.weight_decay
        self.all = torch.optim.SGD([self.table], lr, momentum, weight_decay=decay)
        self.rows = [nn.Parameter(row.detach().clone()) for row in self.table]
        self.each = [torch.optim.AdamW([row], lr, (momentum, 0.999), weight_decay=decay) for row in self.rows]

    def step(self, clients: list[int]) -> None:
        if not self.is_adam:
            self.all.step()
            return
        for client in clients:
            self.rows[client].grad = self.table.grad[client].clone()
            self.each[client].step()
            self.table.data[client] = self.rows[client].data

    def velocity(self) -> Tensor:
        if not self.is_adam:
            buffer = self.all.state[self.table].get("momentum_buffer")  # none without momentum
            return self.table.grad if buffer is None else buffer
        states = [optimizer.state[row] for optimizer, row in zip(self.each, self.rows, strict=True)]
        return torch.stack([state.get("exp_avg", torch.zeros_like(self.rows[0])) for state in states])


def check_pfedhn(simulation: Simulation) -> None:
    start = simulation.initial_state()
    spec, h = innermost(simulation.algorithm), Hyper(simulation, start)
    averaging = values_of(simulation.algorithm).get("averaging")
    layers = [*h.trunk.parameters(), *h.heads.parameters()]
    if isinstance(spec.server, AdamW):
        server = torch.optim.AdamW(
            layers, spec.server.lr, (spec.server.momentum, 0.999), weight_decay=spec.server.weight_decay
        )
    else:
        server = torch.optim.SGD(layers, spec.server.lr, spec.server.momentum, weight_decay=spec.server.weight_decay)
    rows = Rows(spec, h.embedding)
    average = {name: value.clone() for name, value in h.phi().items()}

    nets, head_optimizers = [], []
    for client in CLIENTS:
        architecture = simulation.model_of(client)
        net = network(architecture, architecture.fresh(keys.fold(simulation.seed, "private", client)))
        omega = [value for name, value in net.named_parameters() if name not in h.shapes[architecture.name]]
        nets.append(net)
        head_optimizers.append([optimizer(spec, omega)] if omega else [])

    local_norms, server_norms = [], []
    for number, clients in enumerate(cohorts(simulation)):
        for parameter in h.parameters():
            parameter.grad.zero_()
        weights = server_weights(spec.rule, clients)
        for client in clients:
            theta = h(simulation.model_of(client).name, client)
            net = nets[client]
            net.load_state_dict(theta, strict=False)
            generated = [value for name, value in net.named_parameters() if name in theta]
            optimizers = [optimizer(spec, generated), *head_optimizers[client]]
            batches = training_batches(simulation, number, client)
            local_norms += descend(net, optimizers, batches, spec.local_clip, clipped=generated)
            tilde = weights_of(net)
            (weights[client] / 2 * sum((theta[n] - tilde[n]).square().sum() for n in theta)).backward()
        server_norms.append(float(clip_grad_norm_(h.parameters(), spec.server.clip or math.inf)))
        server.step()
        if spec.embeddings.kind == "trained":
            rows.step(clients)
        h.power_step()
        if averaging is not None:
            keep = min(averaging, (1 + number) / (10 + number))
            average = {name: keep * average[name] + (1 - keep) * value for name, value in h.phi().items()}
    if spec.server.clip is not None:
        assert max(local_norms) > spec.local_clip > min(local_norms)
        assert max(server_norms) > spec.server.clip

    state = finish(simulation)
    shared, table = simulation.exchange.newest(state.memories.shared), state.memories.rows
    assert_close(shared.phi, h.phi())
    moments = ("exp_avg", "exp_avg_sq") if isinstance(spec.server, AdamW) else ("momentum_buffer",)
    for moment, ours in zip(moments, (shared.velocity, shared.square), strict=False):
        assert_close(ours, h.phi(lambda parameter, moment=moment: server.state[parameter][moment]))
    if spec.embeddings.kind == "trained":
        now = spec.up_to_date(table, shared)
        assert_close(now.embedding, h.embedding.weight.detach())
        assert_close(now.velocity, rows.velocity())
    else:
        assert_close(table.embedding, simulation.descriptors_of(simulation.federation))
    if averaging is not None:
        assert_close(state.memories.shared.average, average)
        h.load_phi(average)
    if spec.spectral_norm:
        ((name, heads),) = h.heads.items()
        vectors = {f"trunk.{i}": layer.u for i, layer in enumerate(h.trunk)}
        vectors |= {f"head.{name}.{t}": layer.u for t, layer in zip(h.shapes[name], heads, strict=True)}
        assert_close(shared.spectral, vectors)
    expected = []
    for client, net in enumerate(nets):
        theta = {n: v.detach() for n, v in h(simulation.model_of(client).name, client).items()}
        expected.append(theta | {n: v for n, v in weights_of(net).items() if n not in theta})
        if spec.personal:
            private = take(state.memories.private[simulation.model_of(client).name].take([client]), 0).private
            velocity = velocity_of(net, head_optimizers[client][0]) or {
                n: torch.zeros_like(v) for n, v in private.head.items()
            }
            assert_close(private.velocity, velocity)
    assert_close(personal(simulation, state), expected)


CLIPPED = {"clip": 0.05, "local_clip": 1.2}
SMALL = {"hidden_dim": 6, "num_hidden": 2, "embedding_dim": 3, "clip": None}


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize(
    ("spec", "cohort"),
    [
        (row("pfedhn-pc", **LOCAL, **HYPER), 1),
        (row("pfedhn-pc", **LOCAL, **(HYPER | CLIPPED)), 2),
        (row("pfedhn", **LOCAL, **HYPER), 3),
        (row("pfedhn", **LOCAL, **HYPER, rule="sum"), 3),
        (row("pfedhn", **LOCAL, **(HYPER | CLIPPED), rule="size"), 3),
        (row("pfedhn", **LOCAL, **HYPER, embedding_lr=1.5), 2),
        (row("pfedhn", **LOCAL, **HYPER, spectral_norm=True), 1),
        (row("pfedhn-pc", **LOCAL, **(HYPER | CLIPPED), spectral_norm=True), 2),
        (row("pfedhn", **LOCAL, **HYPER, linear=True), 1),
        (row("pfedhn", **LOCAL, **(HYPER | CLIPPED), linear=True), 2),
        (row("pfedhn-plus", **LOCAL, **SMALL), 1),
        (row("pfedhn-plus-pc", **LOCAL, **(SMALL | CLIPPED), averaging=0.4), 2),
        (row("pfedhn", **LOCAL, **HYPER, averaging=0.7, embedding_scale=0.2, embedding_momentum=0.3), 2),
        (
            row("pfedhn", **LOCAL, **SMALL, optimizer="adamw", embedding_optimizer="adam", lr=0.01, weight_decay=0.3),
            2,
        ),
    ],
    ids=[
        "pc",
        "pc-clipped",
        "mean",
        "sum",
        "size-clipped",
        "embedding-lr",
        "spectral",
        "spectral-pc",
        "linear",
        "linear-clipped",
        "plus",
        "plus-pc-clipped",
        "averaged",
        "adam-embeddings",
    ],
)
def test_pfedhn(federation: Federation, target: str, spec: PFedHN, cohort: int) -> None:
    check_pfedhn(simulate(spec, federation, target, rounds=10 if cohort == 1 else 6, cohort=cohort))


@pytest.mark.parametrize("settings", [{}, CLIPPED | {"rule": "size"}, {"linear": True}], ids=str)
def test_pfedhn_fixed_embeddings(federation: Federation, settings: dict[str, Any]) -> None:
    """Descriptors are data: they neither move nor decay, and their gradient does not count in the clipped norm.

    They are the clients' class shares (4 numbers) where nothing else (3 numbers) is given.
    """
    spec = ALGORITHMS["pfedhn"](**(LOCAL | HYPER | {"embedding": "fixed", "embedding_dim": None} | settings))
    check_pfedhn(simulate(spec, federation, cohort=2))
    given = federation.with_descriptors(keys.uniform(1, NUM_CLIENTS * 3).reshape(NUM_CLIENTS, 3))
    check_pfedhn(simulate(spec, given.to("cpu", torch.float64), cohort=2))


@pytest.mark.parametrize("cohort", mostly_slow([1, 3], 3))
@pytest.mark.parametrize(
    "spec",
    [ALGORITHMS["pfedhn"](**LOCAL, **HYPER), ALGORITHMS["pfedhn-pc"](**LOCAL, **(HYPER | CLIPPED))],
    ids=["plain", "pc"],
)
@pytest.mark.slow
def test_pfedhn_architectures(federation: Federation, spec: PFedHN, cohort: int) -> None:
    """Clients of three kinds on one trunk; the head of a kind that sits a round out still decays and still moves."""
    kinds = ("mlp", "conv", "wide", "conv", "mlp", "wide")
    models = {name: model(name) for name in ("mlp", "conv", "wide")}
    simulation = simulate(spec, federation.with_architectures(kinds), models, cohort=cohort)
    present = [{kinds[client] for client in clients} for clients in cohorts(simulation)]
    assert any(len(names) < len(models) for names in present)
    assert cohort == 1 or any(len(names) > 1 for names in present)
    check_pfedhn(simulation)


# pFedHN on a shared model


class SharedHyper(nn.Module):
    """What is added to the shared weights of one network: `nn.Linear` layers, from the engine's first weights."""

    def __init__(self, simulation: Simulation, state: State) -> None:
        super().__init__()
        self.spec, (model,) = innermost(simulation.algorithm), simulation.models.values()
        phi = simulation.exchange.newest(state.memories.shared).phi
        self.name, self.shapes = model.name, self.spec.roles(model).generated
        names = [*(f"trunk.{i}" for i in range(1 + self.spec.num_hidden)), f"head.{model.name}"]
        self.layers = nn.ModuleList(nn.Linear(*phi[f"{name}.weight"].T.shape, dtype=torch.float64) for name in names)
        self.embedding = nn.Embedding.from_pretrained(state.memories.rows.embedding.clone(), freeze=False)
        pairs = zip(names, self.layers, strict=True)
        self.names = {id(p): f"{name}.{part}" for name, layer in pairs for part, p in layer.named_parameters()}
        if self.spec.head == "chunked":
            self.chunks = nn.Parameter(phi[f"head.{model.name}.chunks"].clone())
            self.names[id(self.chunks)] = f"head.{model.name}.chunks"
        self.load_phi(phi)

    def of_phi(self) -> dict[str, nn.Parameter]:
        return {self.names[id(p)]: p for p in self.parameters() if p is not self.embedding.weight}

    @torch.no_grad()
    def load_phi(self, phi: Params) -> None:
        for name, parameter in self.of_phi().items():
            parameter.copy_(phi[name])

    def write(self, x: Tensor) -> Tensor:
        *trunk, head = self.layers
        return head(nn.Sequential(trunk[0], *(nn.Sequential(nn.ReLU(), layer) for layer in trunk[1:]))(x))

    def forward(self, client: int) -> Params:
        v = self.embedding(torch.tensor(client))
        if self.spec.head == "chunked":
            written = torch.cat([self.write(torch.cat([v, chunk])) for chunk in self.chunks])
        else:
            written = self.write(v)
        made, first = {}, 0

        def take_next(*shape: int) -> Tensor:
            nonlocal first
            first += math.prod(shape)
            return written[first - math.prod(shape) : first].reshape(shape)

        for name, shape in self.shapes.items():
            rank, rows = self.spec.rank, shape[0]
            columns = shape.numel() // rows
            if self.spec.head == "low-rank" and len(shape) > 1 and rank * (rows + columns) < shape.numel():
                left = take_next(rows, rank)
                made[name] = (left @ take_next(columns, rank).T).reshape(shape)
            else:
                made[name] = take_next(*shape)
        return made


def check_pfedhn_shared(simulation: Simulation) -> None:
    start = simulation.initial_state()
    spec, h, (model,) = innermost(simulation.algorithm), SharedHyper(simulation, start), simulation.models.values()
    averaging = values_of(simulation.algorithm).get("averaging")
    kind = torch.optim.AdamW if isinstance(spec.server, AdamW) else torch.optim.SGD
    momentum = {"betas": (spec.server.momentum, 0.999)} if kind is torch.optim.AdamW else {"momentum": 0.9}
    server = kind(h.of_phi().values(), spec.server.lr, **momentum, weight_decay=spec.server.weight_decay)
    rows = Rows(spec, h.embedding)
    first = simulation.initial_models()[model.name]
    w = {n: v.clone() for n, v in first.items() if spec.head != "dense" or n not in h.shapes}

    def personal_weights(client: int) -> Params:
        return w | {n: w[n] + made if n in w else made for n, made in h(client).items()}

    def remembered() -> Params:
        phi = {n: p.detach().clone() for n, p in h.of_phi().items()}
        return phi | {f"{model.name}/{n}": v for n, v in w.items()}

    average = remembered()
    for number, clients in enumerate(cohorts(simulation)):
        for parameter in h.parameters():
            parameter.grad = torch.zeros_like(parameter)
        weights, mean = server_weights(spec.rule, clients), {n: torch.zeros_like(v) for n, v in w.items()}
        for client in clients:
            theta = personal_weights(client)
            begin = w if spec.local_start == "shared" else {n: v.detach() for n, v in theta.items()}
            net = network(model, begin | model.constants)
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            batches = training_batches(simulation, number, client)
            descend(net, [optimizer(spec, trained)], batches, spec.local_clip, clipped=trained)
            end = weights_of(net)
            (weights[client] / 2 * sum((theta[n] - end[n]).square().sum() for n in h.shapes)).backward()
            mean = {n: value + weights[client] * (begin[n] - end[n]) for n, value in mean.items()}
        clip_grad_norm_(h.parameters(), spec.server.clip or math.inf)
        server.step()
        rows.step(clients)
        w = {n: value - spec.shared_lr * mean[n] for n, value in w.items()}
        if averaging is not None:
            keep = min(averaging, (1 + number) / (10 + number))
            average = {n: keep * average[n] + (1 - keep) * value for n, value in remembered().items()}

    state = finish(simulation)
    shared, table = simulation.exchange.newest(state.memories.shared), state.memories.rows
    assert_close(shared.phi | shared.common, remembered())
    now = spec.up_to_date(table, shared)
    assert_close(now.embedding, h.embedding.weight.detach())
    assert_close(now.velocity, rows.velocity())
    if averaging is not None:
        assert_close(state.memories.shared.average, average)
        h.load_phi(average)
        w = {n: average[f"{model.name}/{n}"] for n in w}
    assert_close(
        personal(simulation, state), [{n: v.detach() for n, v in personal_weights(c).items()} for c in CLIENTS]
    )


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
@pytest.mark.parametrize(
    ("spec", "cohort"),
    [
        (row("pfedhn-shared", **LOCAL, **SMALL), 1),
        (row("pfedhn-shared", **LOCAL, **(SMALL | CLIPPED), rule="size"), 3),
        (row("pfedhn-shared", **LOCAL, **SMALL, fixed_layers=("last",)), 2),
        (row("pfedhn-shared", **LOCAL, **(SMALL | {"num_hidden": 0}), local_start="personal"), 2),
        (row("pfedhn-shared", **LOCAL, **SMALL, head="low-rank", rank=1), 2),
        (row("pfedhn-shared", **LOCAL, **SMALL, head="chunked", chunk_size=7), 2),
        (row("pfedhn", **LOCAL, **(HYPER | {"lr": 0.1}), head="added"), 2),
        (row("pfedhn", **LOCAL, **(HYPER | {"lr": 0.1}), head="low-rank", rank=1), 1),
        (row("pfedhn", **LOCAL, **(HYPER | CLIPPED), head="chunked", chunk_size=7), 2),
        (row("pfedhn", **LOCAL, **HYPER, generated=("last",), shared_lr=0.7), 2),
        (row("pfedhn-last", **LOCAL, **SMALL), 1),
        (row("pfedhn-intercept", **LOCAL, **(SMALL | CLIPPED), averaging=0.4), 2),
    ],
    ids=[
        "shared",
        "shared-clipped",
        "shared-fixed-last",
        "shared-from-personal",
        "shared-low-rank",
        "shared-chunked",
        "added",
        "low-rank",
        "chunked",
        "generated-last",
        "last",
        "intercept",
    ],
)
def test_pfedhn_shared(federation: Federation, target: str, spec: Any, cohort: int) -> None:
    check_pfedhn_shared(simulate(spec, federation, target, rounds=10 if cohort == 1 else 6, cohort=cohort))


# Fine-tuned rows


TUNED = LOCAL | {"local_clip": 0.8, "adaptation_steps": 4}


@pytest.mark.parametrize(
    ("spec", "base"),
    [
        (row("fedavg-ft", **TUNED), "fedavg"),
        (row("pfedhn-plus-ft", **TUNED, **SMALL), "pfedhn-plus"),
        pytest.param(row("pfedhn-plus-pc-ft", **TUNED, **SMALL), "pfedhn-plus-pc", marks=pytest.mark.slow),
    ],
    ids=["fedavg-ft", "pfedhn-plus-ft", "pfedhn-plus-pc-ft"],
)
def test_fine_tuned(federation: Federation, spec: Any, base: str) -> None:
    """They train as another row does, to the bit; then every client takes a few steps of SGD."""
    small = SMALL if base.startswith("pfedhn") else {}
    trained = finish(simulate(ALGORITHMS[base](**LOCAL, **small, local_clip=0.8), federation, cohort=2))
    simulation = simulate(spec, federation, cohort=2)
    state = finish(simulation)
    assert_same_bits(memories_of(state), memories_of(trained))

    key = simulation.personalize_key(simulation.num_rounds)
    for client, start in enumerate(personal(simulation, state)):
        net = network(model(), start)
        sgd = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=0.01)
        descend(net, [sgd], minibatches(simulation, key, client, 4), 0.8)
        found = simulation.personal_weights(state.memories, model(), client, state.round, is_adapted=True)
        assert_close(found, weights_of(net))
