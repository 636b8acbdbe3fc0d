"""The methods that people compare with, against plain versions of them, as in test_twins.py.

Beside each twin stand tests for the faults that other implementations of the method have had (docs/baselines.md).
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import (
    CHANNELS,
    NUM_CLASSES,
    NUM_CLIENTS,
    Conv,
    assert_close,
    assert_same_bits,
    finish,
    model,
    mostly_slow,
    personal,
    simulate,
)
from test_twins import (
    CLIENTS,
    LAST,
    LOCAL,
    SIZES,
    TWINS,
    average,
    cohorts,
    descend,
    network,
    optimizer,
    row,
    training_batches,
    weights_of,
)
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, max_pool2d, mse_loss
from torch.nn.utils import clip_grad_norm_

import pfedhn
from pfedhn import keys
from pfedhn.algorithm import LABEL_COUNTS, Group
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedamp import FedAMP
from pfedhn.algorithms.fedbn import FedBN
from pfedhn.algorithms.feddbe import FedDBE
from pfedhn.algorithms.fedpac import FedPAC
from pfedhn.algorithms.fedproto import FedProto
from pfedhn.algorithms.fedprox import FedProx
from pfedhn.algorithms.fedrod import FedRoD
from pfedhn.algorithms.mr_mtl import MRMTL
from pfedhn.algorithms.pfedgraph import PFedGraph
from pfedhn.algorithms.pfedlhn import PFedLHN
from pfedhn.algorithms.scaffold import Scaffold
from pfedhn.algorithms.simplex import least_weights, nearest_weights
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import UserError
from pfedhn.model import Model
from pfedhn.models import cross_entropy as cross_entropy_of_each
from pfedhn.models import is_correct
from pfedhn.params import Params, copy, take, zeros_like
from pfedhn.privacy import Privacy, Protection, keyed_normal, protecting
from pfedhn.sgd import Batches

LAST_WEIGHT = {"mlp": "3.weight", "conv": "out.weight"}
EXACT = {"rtol": 1e-12, "atol": 1e-13}
every_target = pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))


def descend_pulled(
    spec: Any, net: torch.nn.Module, center: Params, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """SGD on the loss plus mu/2 times the squared distance; a clip bounds the gradient of the loss alone."""
    steps = optimizer(spec, net.parameters())
    for x, y in batches:
        steps.zero_grad()
        cross_entropy(net(x), y).backward()
        if spec.local_clip is not None:
            clip_grad_norm_(net.parameters(), spec.local_clip)
        distance = sum((value - center[name]).square().sum() for name, value in net.named_parameters())
        (spec.strength / 2 * distance).backward()
        steps.step()


# FedProx


@every_target
@pytest.mark.parametrize(
    "spec", [row("fedprox", **LOCAL, strength=0.7), row("fedprox", **LOCAL, strength=2.0, local_clip=0.5)], ids=str
)
def test_fedprox(federation: Federation, target: str, spec: FedProx) -> None:
    simulation = simulate(spec, federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net = network(model(target), w)
            descend_pulled(spec, net, w, training_batches(simulation, number, client))
            trained[client] = weights_of(net)
        w = average("size", trained)

    state = finish(simulation)
    assert_close(state.memories.shared, w, **EXACT)
    assert_close(personal(simulation, state), [w for _ in CLIENTS], **EXACT)


def test_the_proximal_term_has_the_gradient_of_half_a_squared_distance(federation: Federation) -> None:
    """Not that of the distance itself, and not none: two steps with a strength of s differ by lr s (w_1 - w)."""
    batches = Batches(*take(federation.batches(torch.tensor([2]), 1, 2, 5), 0))
    w, private = model().fresh(1), {}
    plain = {"local_lr": 0.1, "local_steps": 2, "local_momentum": 0.0, "local_weight_decay": 0.0}
    free, held = (
        ALGORITHMS["fedprox"](**plain, strength=strength).train(model(), w, private, batches)[0]
        for strength in (0.0, 3.0)
    )
    first, _ = ALGORITHMS["fedavg"](**(plain | {"local_steps": 1})).train(model(), w, private, take(batches, slice(1)))
    for name in w:  # an update is received minus trained, so that after one step w_1 - w is minus the first update
        assert_close(held[name], free[name] + 0.1 * 3.0 * -first[name], **EXACT)
        assert (held[name] - free[name]).abs().max() > 1e-4


# FedBN


class Block(nn.Module):
    """A residual block whose BatchNorm layers have names that do not tell what they are, as torchvision's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.downsample = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return (self.main(x) + self.downsample(x)).relu()


def nested() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(CHANNELS, 3, 3), nn.BatchNorm2d(3))
    return nn.Sequential(stem, nn.Sequential(nn.Sequential(Block(3))), nn.Flatten(), nn.Linear(48, NUM_CLASSES))


NORMS = {f"{layer}.{part}" for layer in ("0.1", "1.0.0.main.1", "1.0.0.downsample.1") for part in ("weight", "bias")}


def test_batch_norms_are_found_by_type_at_any_depth() -> None:
    network = Model("nested", nested, cross_entropy_of_each, is_correct, dtype=torch.float64)
    roles = ALGORITHMS["fedbn"]().roles(network)
    assert set(roles.personal) == NORMS
    assert not [name for name in NORMS if "bn" in name or "norm" in name]
    assert set(roles.shared) == set(network.shapes) - NORMS


@pytest.mark.parametrize("spec", [row("fedbn", **LOCAL)], ids=["fedbn"])
def test_fedbn(federation: Federation, spec: FedBN) -> None:
    """With PyTorch's own BatchNorm layers, one network for each client."""
    network = Model("nested", nested, cross_entropy_of_each, is_correct, dtype=torch.float64)
    simulation = simulate(spec, federation, {"nested": network}, cohort=3)
    (start,) = simulation.initial_models().values()
    nets = [nested().double() for _ in CLIENTS]
    for net in nets:
        net.load_state_dict(net.state_dict() | start)
    w = {name: value for name, value in start.items() if name not in NORMS}
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            nets[client].load_state_dict(nets[client].state_dict() | w)
            batches = training_batches(simulation, number, client)
            descend(nets[client], [optimizer(spec, nets[client].parameters())], batches, None)
            trained[client] = {name: value for name, value in weights_of(nets[client]).items() if name in w}
        w = average("size", trained)

    state = finish(simulation)
    assert_close(state.memories.shared, w, **EXACT)
    for net in nets:
        net.load_state_dict(net.state_dict() | w)
    assert_close(personal(simulation, state), [dict(net.state_dict()) for net in nets], **EXACT)
    gammas = torch.stack([net.state_dict()["0.1.weight"] for net in nets])
    assert float(gammas.std(0).min()) > 1e-3


def test_without_batch_norm_a_warning_says_that_it_is_fedavg(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    fedbn, fedavg = (finish(simulate(ALGORITHMS[name](**LOCAL), federation, cohort=3)) for name in ("fedbn", "fedavg"))
    assert_same_bits(fedbn.memories.shared, fedavg.memories.shared)
    assert "mlp has no BatchNorm layer with weights, so FedBN trains it as FedAvg does" in caplog.text


# MR-MTL


@every_target
@pytest.mark.parametrize(
    "spec", [row("mr-mtl", **LOCAL, strength=0.7), row("mr-mtl", **LOCAL, strength=2.0, local_clip=0.5)], ids=str
)
def test_mr_mtl(federation: Federation, target: str, spec: MRMTL) -> None:
    simulation = simulate(spec, federation, target, cohort=2, rounds=6, seed=1)
    (w,) = simulation.initial_models().values()
    nets: dict[int, nn.Module] = {}
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net = nets.setdefault(client, network(model(target), w))
            descend_pulled(spec, net, w, training_batches(simulation, number, client))
            trained[client] = weights_of(net)
        w = average("mean", trained)
    assert 2 <= len(nets) < NUM_CLIENTS  # some client is never chosen, and is tested with w

    state = finish(simulation)
    assert_close(state.memories.shared, w, **EXACT)
    assert_close(personal(simulation, state), [weights_of(nets[i]) if i in nets else w for i in CLIENTS], **EXACT)


def test_mr_mtl_pulls_outside_the_clip_of_private_steps(federation: Federation) -> None:
    """Far from the mean, a step moves by the whole pull; clipped with the gradients it would move by at most the clip.

    The clip of single examples' gradients and the noise are so small here that the pull is nearly all of the step.
    """
    batches = Batches(*take(federation.batches(torch.tensor([2]), 1, 1, 5), 0))
    spec = ALGORITHMS["mr-mtl"](local_lr=0.1, local_steps=1, local_momentum=0.0, local_weight_decay=0.0, strength=2.0)
    own, w = model().fresh(1), model().fresh(2)
    private = spec.init_private(model(), own, 0)._replace(has_trained=torch.tensor(True))
    clip = 1e-6
    with protecting(Protection(Privacy(clip, 0.0, level="example"), 5.0, keyed_normal(3))):
        update, kept = spec.train(model(), w, private, batches)
    for name, value in kept.own.items():
        assert_close(value, own[name] - 0.1 * 2.0 * (own[name] - w[name]), rtol=0, atol=0.1 * clip)
        assert_close(update[name], w[name] - value, **EXACT)


# FedRoD


def head_of(net: nn.Module, target: str) -> nn.Linear:
    layer = net.get_submodule(model(target).last_layer)
    assert isinstance(layer, nn.Linear)
    return layer


def body_of(net: nn.Module, target: str, x: Tensor) -> Tensor:
    """The input of the last layer, written out for both networks."""
    if target == "mlp":
        return net[2](net[1](x.flatten(1)))  # type: ignore[index]
    return max_pool2d(net.conv(x), 2).relu().flatten(1)


def label_counts(federation: Federation, client: int) -> list[int]:
    labels = federation.y[federation.splits["train"].of(client)].tolist()
    return [labels.count(label) for label in range(NUM_CLASSES)]


@every_target
@pytest.mark.parametrize(
    "spec", [row("fedrod", **LOCAL), row("fedrod", **LOCAL, local_clip=0.5)], ids=["fedrod", "fedrod-clipped"]
)
def test_fedrod(federation: Federation, target: str, spec: FedRoD) -> None:
    """Two heads, two losses, two optimizers; a class without examples has minus infinity as its prior."""
    simulation = simulate(spec, federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    sizes = head_of(network(model(target), w), target)
    heads = [nn.Linear(sizes.in_features, sizes.out_features, dtype=torch.float64) for _ in CLIENTS]
    for head in heads:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    priors = [torch.tensor(label_counts(federation, client), dtype=torch.float64).log() for client in CLIENTS]
    assert sum(int(prior.isinf().sum()) for prior in priors) > 2
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net, own = network(model(target), w), heads[client]
            steps = [optimizer(spec, part.parameters()) for part in (net, own)]
            for x, y in training_batches(simulation, number, client):
                z = body_of(net, target, x)
                shared = head_of(net, target)(z)
                for each in steps:
                    each.zero_grad()
                cross_entropy(shared + priors[client], y).backward()
                cross_entropy(shared.detach() + own(z.detach()), y).backward()
                clip_grad_norm_(net.parameters(), spec.local_clip or math.inf)
                for each in steps:
                    each.step()
            trained[client] = weights_of(net)
        w = average("size", trained)

    state = finish(simulation)
    assert_close(state.memories.shared, w, **EXACT)
    x = federation.x[:9]
    for client, weights in enumerate(personal(simulation, state)):
        net = network(model(target), w)
        both = head_of(net, target)(body_of(net, target, x)) + heads[client](body_of(net, target, x))
        exported = model(target).with_weights(weights)  # the two heads add up to an ordinary network
        assert_close(exported(x).detach(), both.detach(), **EXACT)


def test_the_personal_head_of_fedrod_does_not_train_the_body(federation: Federation) -> None:
    """What is sent does not depend on head_P, and head_P is tested on top of the shared head, not alone."""
    batches = Batches(*take(federation.batches(torch.tensor([2]), 1, 4, 5), 0))
    spec = ALGORITHMS["fedrod"](**LOCAL)
    counts = federation.label_counts(2, NUM_CLASSES)
    private = spec.init_private(model(), model().fresh(1) | {LABEL_COUNTS: counts}, 0)
    other = private._replace(head={name: torch.ones_like(value) for name, value in private.head.items()})
    received = model().fresh(2)
    updates = [spec.train(model(), received, one, batches)[0] for one in (private, other)]
    assert_same_bits(*updates)
    head = spec.personalize(model(), received, other, batches)
    assert_close(head["3.bias"], received["3.bias"] + 1, **EXACT)


def test_fedrod_refuses_a_last_layer_that_is_not_linear(federation: Federation) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 36, NUM_CLASSES), nn.LayerNorm(NUM_CLASSES))

    normed = Model("normed", network, cross_entropy_of_each, is_correct, dtype=torch.float64)
    with pytest.raises(UserError, match="FedRoD works on a linear last layer, and the last layer of normed, '2', is"):
        simulate(ALGORITHMS["fedrod"](), federation, {"normed": normed})


# FedDBE


@every_target
@pytest.mark.parametrize(
    "spec",
    [
        row("feddbe", **LOCAL, strength=5.0, mean_momentum=0.3),
        row("feddbe", **LOCAL, strength=50.0, local_clip=0.5),
    ],
    ids=["feddbe", "feddbe-clipped"],
)
def test_feddbe(federation: Federation, target: str, spec: FedDBE) -> None:
    simulation = simulate(spec, federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    vectors = [nn.Parameter(torch.zeros_like(w[LAST_WEIGHT[target]][0])) for _ in CLIENTS]
    first_means: dict[int, Tensor] = {}
    for number, clients in enumerate(cohorts(simulation)):
        mean = None
        if first_means:
            total = sum(SIZES[client] for client in first_means)
            mean = sum(SIZES[client] / total * value for client, value in first_means.items())
        trained, means = {}, {}
        for client in clients:
            net, vector = network(model(target), w), vectors[client]
            steps = optimizer(spec, [*net.parameters(), vector])
            running = torch.zeros_like(vector)
            for x, y in training_batches(simulation, number, client):
                steps.zero_grad()
                z = body_of(net, target, x)
                running = (1 - float(spec.mean_momentum)) * running.detach() + spec.mean_momentum * z.mean(0)
                if mean is None:
                    cross_entropy(head_of(net, target)(z), y).backward()
                else:
                    loss = cross_entropy(head_of(net, target)(z + vector), y)
                    (loss + spec.strength * (0.5 * (running - mean) ** 2).mean()).backward()
                clip_grad_norm_(net.parameters(), spec.local_clip or math.inf)
                steps.step()
            trained[client], means[client] = weights_of(net), running.detach()
        w = average("size", trained)
        first_means = means | first_means
    assert len(first_means) > 3  # some client comes first when others have a mean

    state = finish(simulation)
    assert_close(state.memories.shared.weights, w, **EXACT)
    total = sum(SIZES[client] * value for client, value in first_means.items())
    assert_close(state.memories.shared.total, total, **EXACT)
    x = federation.x[:9]
    for client, weights in enumerate(personal(simulation, state)):
        net = network(model(target), w)
        shifted = head_of(net, target)(body_of(net, target, x) + vectors[client])
        assert_close(model(target).with_weights(weights)(x).detach(), shifted.detach(), **EXACT)
    assert max(float(vector.detach().abs().max()) for vector in vectors) > 1e-3


def test_the_regularizer_of_feddbe_is_on_by_default_and_no_round_goes_uncounted(federation: Federation) -> None:
    simulation = simulate(ALGORITHMS["feddbe"](**LOCAL), federation, cohort=6, rounds=2)
    state = finish(simulation)
    without = simulate(ALGORITHMS["feddbe"](**LOCAL, strength=0.0), federation, cohort=6, rounds=2)
    assert (state.memories.shared.weights["1.weight"] - finish(without).memories.shared.weights["1.weight"]).any()
    size = sum(shape.numel() for shape in model().shapes.values())
    assert state.bytes_down == 2 * 6 * 8 * (size + 5 + 1)  # two rounds of six clients, and no round before them
    assert state.bytes_up == 2 * 6 * 8 * (size + 5)


# SCAFFOLD


@every_target
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("spec", [row("scaffold", **LOCAL, lr=0.8, local_clip=0.8)], ids=["scaffold"])
def test_scaffold(federation: Federation, target: str, spec: Scaffold, momentum: float) -> None:
    """Control variates as the paper has them: by the quotient for plain SGD, by the mean gradient with momentum."""
    spec = replace(spec, local_momentum=momentum)
    simulation = simulate(spec, federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    c, c_i = zeros_like(w), [zeros_like(w) for _ in CLIENTS]
    for number, clients in enumerate(cohorts(simulation)):
        trained, moves = {}, []
        for client in clients:
            net, batches = network(model(target), w), training_batches(simulation, number, client)
            steps = torch.optim.SGD(net.parameters(), spec.local_lr, momentum)
            mean = zeros_like(w)
            for x, y in batches:
                steps.zero_grad()
                cross_entropy(net(x), y).backward()
                clip_grad_norm_(net.parameters(), spec.local_clip)
                for name, value in net.named_parameters():
                    value.grad += spec.local_weight_decay * value.detach()
                    mean[name] = mean[name] + value.grad / len(batches)
                    value.grad += c[name] - c_i[client][name]
                steps.step()
            trained[client] = weights_of(net)
            new = mean
            if momentum == 0:
                scale = len(batches) * spec.local_lr
                new = {name: c_i[client][name] - c[name] + (w[name] - trained[client][name]) / scale for name in w}
            moves.append({name: new[name] - c_i[client][name] for name in w})
            c_i[client] = new
        mean = average("mean", trained)
        w = {name: w[name] - 0.8 * (w[name] - mean[name]) for name in w}
        c = {name: c[name] + len(clients) / NUM_CLIENTS * sum(move[name] for move in moves) / len(moves) for name in c}

    state = finish(simulation)
    assert_close(state.memories.shared.weights, w, **EXACT)
    assert_close(state.memories.shared.control, c, **EXACT)
    assert_close([take(state.memories.private[target].take([i]), 0).private for i in CLIENTS], c_i, **EXACT)
    assert_close(personal(simulation, state), [w for _ in CLIENTS], **EXACT)
    assert max(float(value.abs().max()) for value in c.values()) > 1e-3
    for name, value in c.items():  # whoever took part, c stays the mean over all clients
        assert_close(value, sum(one[name] for one in c_i) / NUM_CLIENTS, **EXACT)


# FedProto


def summed_by_class(z: Tensor, y: Tensor, sums: dict[int, Tensor], counts: Counter[int]) -> None:
    for vector, label in zip(z.detach(), y.tolist(), strict=True):
        sums[label] = sums.get(label, torch.zeros_like(vector)) + vector
        counts[label] += 1


def pulled_to_prototypes(z: Tensor, y: Tensor, prototypes: dict[int, Tensor]) -> Tensor:
    """The mean squared error between features and their prototypes, which are the features where there is none."""
    targets = [prototypes.get(label, vector) for vector, label in zip(z.detach(), y.tolist(), strict=True)]
    return mse_loss(z, torch.stack(targets))


@every_target
@pytest.mark.parametrize("rule", ["size", "mean"])
@pytest.mark.parametrize("spec", [row("fedproto", **LOCAL, strength=2.0, local_clip=0.8)], ids=["fedproto"])
def test_fedproto(federation: Federation, target: str, spec: FedProto, rule: str) -> None:
    spec = replace(spec, rule=rule)
    simulation = simulate(spec, federation, target, cohort=2)
    (start,) = simulation.initial_models().values()
    nets = [network(model(target), start) for _ in CLIENTS]
    prototypes: dict[int, Tensor] = {}
    for number, clients in enumerate(cohorts(simulation)):
        found: dict[int, list[tuple[int, Tensor]]] = {}
        for client in clients:
            net, steps = nets[client], optimizer(spec, nets[client].parameters())
            sums: dict[int, Tensor] = {}
            counts: Counter[int] = Counter()
            for x, y in training_batches(simulation, number, client):
                steps.zero_grad()
                z = body_of(net, target, x)
                summed_by_class(z, y, sums, counts)
                loss = cross_entropy(head_of(net, target)(z), y)
                (loss + 2.0 * pulled_to_prototypes(z, y, prototypes)).backward()
                clip_grad_norm_(net.parameters(), spec.local_clip)
                steps.step()
            own = label_counts(federation, client)
            for label, value in sums.items():
                found.setdefault(label, []).append((own[label] if rule == "size" else 1, value / counts[label]))
        for label, parts in found.items():
            total = sum(weight for weight, _ in parts)
            prototypes[label] = sum(weight / total * value for weight, value in parts)

    state = finish(simulation)
    shared = state.memories.shared
    assert shared.known.tolist() == [float(label in prototypes) for label in range(NUM_CLASSES)]
    assert_close({label: shared.prototypes[label] for label in prototypes}, prototypes, **EXACT)
    heads = simulate(replace(spec, tested="head"), federation, target, cohort=2)
    assert_close(personal(heads, state), [weights_of(net) for net in nets], **EXACT)
    x = federation.x
    for client, weights in enumerate(personal(simulation, state)):
        own = [label for label in prototypes if label_counts(federation, client)[label]]
        distances = torch.stack([(body_of(nets[client], target, x) - prototypes[label]).norm(dim=1) for label in own])
        nearest = torch.tensor(own)[distances.argmin(0)]
        assert torch.equal(model(target).with_weights(weights)(x).argmax(1), nearest)


def test_fedproto_sends_no_weights_and_a_class_of_nobody_keeps_its_prototype(federation: Federation) -> None:
    simulation = simulate(ALGORITHMS["fedproto"](**LOCAL), federation, cohort=1, rounds=1)
    state = finish(simulation)
    assert (state.bytes_down, state.bytes_up) == (8 * NUM_CLASSES * (5 + 1),) * 2
    spec, shared = simulation.algorithm, state.memories.shared
    means = {
        "class_means": torch.ones(1, NUM_CLASSES, 5).double(),
        "class_counts": torch.zeros(1, NUM_CLASSES).double(),
    }
    after, _ = spec.receive(shared, [Group(model(), (), {}, torch.tensor([3]), extras=means)])
    assert_same_bits(after, shared)
    assert 0 < float(shared.known.sum()) < NUM_CLASSES


def test_fedproto_serves_networks_of_several_forms_with_features_of_one_length(federation: Federation) -> None:
    def deep() -> nn.Module:
        first = nn.Linear(CHANNELS * 36, 7)
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, NUM_CLASSES))

    other = Model("deep", deep, cross_entropy_of_each, is_correct, dtype=torch.float64)
    kinds = ("mlp", "deep", "mlp", "deep", "mlp", "deep")
    models = {"mlp": model("mlp"), "deep": other}
    state = finish(simulate(ALGORITHMS["fedproto"](**LOCAL), federation.with_architectures(kinds), models, cohort=3))
    assert float(state.memories.shared.known.sum()) == NUM_CLASSES


# FedPAC


def least_by_trying(matrix: Tensor) -> Tensor:
    """The weights of the least quadratic form, found by trying every set of weights that may be above 0."""
    best, found = math.inf, matrix[0]
    for size in range(1, len(matrix) + 1):
        for chosen in map(list, itertools.combinations(range(len(matrix)), size)):
            part = torch.linalg.solve(matrix[chosen][:, chosen], torch.ones(size, dtype=torch.float64))
            weights = torch.zeros(len(matrix), dtype=torch.float64)
            weights[chosen] = part / part.sum()
            value = float(weights @ matrix @ weights)
            if (weights >= 0).all() and value < best:
                best, found = value, weights
    return found


def test_least_weights_are_those_found_by_trying() -> None:
    several = 0
    for seed in range(40):
        size, length = 1 + seed % 6, 1 + seed % 9
        vectors = keys.normal(keys.fold(seed, "vectors"), size * length).reshape(size, length) * 10.0 ** (seed % 4 - 2)
        gaps = vectors[:1] - vectors
        matrix = (
            torch.diag(keys.uniform(keys.fold(seed, "diagonal"), size).double() + 0.01)
            + gaps.double() @ gaps.double().T
        )
        weights = least_weights(matrix)
        assert_close(weights, least_by_trying(matrix), rtol=0, atol=1e-12)
        several += int(1 < (weights > 0).sum() < size)
    assert several > 5
    assert_close(least_weights(torch.ones(3, 3).double()).sum(), torch.tensor(1.0).double())
    assert_close(least_weights(torch.zeros(2, 2).double()), torch.tensor([0.5, 0.5]).double())


@every_target
@pytest.mark.parametrize(
    "spec",
    [row("fedpac", **LOCAL, head_lr=0.2, head_share=0.5, strength=2.0, feature_batches=3, local_clip=0.8)],
    ids=["fedpac"],
)
def test_fedpac(federation: Federation, target: str, spec: FedPAC) -> None:
    simulation = simulate(spec, federation, target, cohort=2, seed=1)
    (w,) = simulation.initial_models().values()
    names = set(LAST[target])
    body = {name: value for name, value in w.items() if name not in names}
    heads = [{name: w[name] for name in names} for _ in CLIENTS]
    prototypes: dict[int, Tensor] = {}
    mixed = num_own_means = 0
    for number, clients in enumerate(cohorts(simulation)):
        trained, sent, found = {}, {}, {}
        for client in clients:
            net, counts = network(model(target), body | heads[client]), label_counts(federation, client)
            batches = training_batches(simulation, number, client)
            data, first, second = batches[:3], batches[3:5], batches[5:]
            assert len(second) == 2
            total = sum(counts)
            vectors: dict[int, list[Tensor]] = {}
            for x, y in data:
                for z, label in zip(body_of(net, target, x).detach(), y.tolist(), strict=True):
                    vectors.setdefault(label, []).append(z)
            means = {label: torch.stack(some).mean(0) for label, some in vectors.items()}
            h = torch.zeros(NUM_CLASSES, len(next(iter(means.values()))), dtype=torch.float64)
            v = 0.0
            for label, some in vectors.items():
                share, stacked = counts[label] / total, torch.stack(some)
                h[label] = share * means[label]
                v += share * float(torch.trace(stacked.T @ stacked) / len(some))
                v -= share**2 * float(means[label] @ means[label])

            own = dict(net.named_parameters())
            head_steps = torch.optim.SGD([own[name] for name in names], 0.2, 0.9, weight_decay=0.01)
            descend(net, [head_steps], first, 0.8, [own[name] for name in names])
            moving = [value for name, value in own.items() if name not in names]
            body_steps = optimizer(spec, moving)
            for x, y in second:
                net.zero_grad()
                z = body_of(net, target, x)
                loss = cross_entropy(head_of(net, target)(z), y)
                targets = means | prototypes if prototypes else {}
                num_own_means += len({*y.tolist()} - {*prototypes}) if prototypes else 0
                (loss + 2.0 * pulled_to_prototypes(z, y, targets)).backward()
                clip_grad_norm_(moving, 0.8)
                body_steps.step()
            trained[client], sent[client] = weights_of(net), (v / total, h)
            sums: dict[int, Tensor] = {}
            seen: Counter[int] = Counter()
            for x, y in data:
                summed_by_class(body_of(net, target, x), y, sums, seen)
            for label, value in sums.items():
                found.setdefault(label, []).append((counts[label], value / seen[label]))

        for client in clients:
            matrix = torch.diag(torch.tensor([sent[j][0] for j in clients], dtype=torch.float64))
            for a, j in enumerate(clients):
                for b, k in enumerate(clients):
                    matrix[a, b] += torch.trace((sent[client][1] - sent[j][1]).T @ (sent[client][1] - sent[k][1]))
            shares = least_by_trying(matrix)
            mixed += int((shares > 1e-6).sum() > 1)
            heads[client] = {
                name: sum(share * trained[j][name] for share, j in zip(shares, clients, strict=True)) for name in names
            }
        body = average("size", {client: {name: trained[client][name] for name in body} for client in clients})
        for label, parts in found.items():
            weight = sum(count for count, _ in parts)
            prototypes[label] = sum(count / weight * value for count, value in parts)
    assert mixed > 3
    assert num_own_means > 0  # of a class that has no prototype yet

    state = finish(simulation)
    assert_close(state.memories.shared.body, body, **EXACT)
    assert_close({label: state.memories.shared.prototypes[label] for label in prototypes}, prototypes, **EXACT)
    assert_close(personal(simulation, state), [body | heads[client] for client in CLIENTS], **EXACT)


# pFedGraph and FedAMP


def flat(weights: Params) -> Tensor:
    return torch.cat([value.flatten() for value in weights.values()])


def nearest_by_bisection(values: Tensor) -> Tensor:
    """The point of the simplex nearest to `values`: what is above a level that makes the sum 1."""
    low, high = values.min() - 1, values.max()
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if (values - level).clamp(min=0).sum() > 1 else (low, level)
    return (values - (low + high) / 2).clamp(min=0)


def test_nearest_weights_solve_the_program_of_pfedgraph() -> None:
    """The least of alpha sum (a - p)^2 + d a, against bisection and against points near it."""
    for seed in range(20):
        size = 1 + seed % 6
        p = keys.uniform(keys.fold(seed, "p"), size).double()
        p, d, alpha = p / p.sum(), keys.normal(keys.fold(seed, "d"), size).double(), 0.2 + seed / 10
        weights = nearest_weights(p - d / (2 * alpha))
        assert_close(weights, nearest_by_bisection(p - d / (2 * alpha)), rtol=0, atol=1e-13)

        def value(a: Tensor, p: Tensor = p, d: Tensor = d, alpha: float = alpha) -> Tensor:
            return alpha * (a - p).square().sum() + d @ a

        for corner in torch.eye(size, dtype=torch.float64):
            assert value(weights) <= value(0.99 * weights + 0.01 * corner) + 1e-15


@every_target
@pytest.mark.parametrize(
    "spec",
    [row("pfedgraph", **LOCAL, strength=0.5, alpha=0.5), row("pfedgraph", **(LOCAL | {"local_steps": 12}), alpha=1.0)],
    ids=str,
)
def test_pfedgraph(federation: Federation, target: str, spec: PFedGraph) -> None:
    simulation = simulate(spec, federation, target, cohort=4)
    (start,) = simulation.initial_models().values()
    combined = [start for _ in CLIENTS]
    several = alike = 0
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net, center = network(model(target), combined[client]), flat(combined[client])
            steps = optimizer(spec, net.parameters())
            for x, y in training_batches(simulation, number, client):
                steps.zero_grad()
                vector = torch.cat([value.flatten() for value in net.parameters()])
                likeness = cosine_similarity(vector, center, dim=0, eps=0.0)
                (cross_entropy(net(x), y) - spec.strength * likeness).backward()
                steps.step()
            trained[client] = weights_of(net)
        total = sum(SIZES[client] for client in clients)
        p = torch.tensor([SIZES[client] / total for client in clients], dtype=torch.float64)
        moved = {client: flat(trained[client]) - flat(start) for client in clients}
        for client in clients:
            d = torch.stack([-cosine_similarity(moved[client], moved[j], dim=0, eps=0.0) for j in clients])
            alike += int((d < -0.9).sum()) - 1
            d[d < -0.9] = -1.0
            shares = nearest_by_bisection(p - d / (2 * spec.alpha))
            several += int(1 < (shares > 0).sum() < len(clients))
            combined[client] = {
                name: sum(share * trained[j][name] for share, j in zip(shares, clients, strict=True)) for name in start
            }
    assert several > 3
    assert alike > 0

    state = finish(simulation)
    assert_close(personal(simulation, state), combined, **EXACT)


@every_target
@pytest.mark.parametrize(
    "spec",
    [row("fedamp", **LOCAL, strength=0.8, alpha=0.4, sigma=2.0), row("fedamp", **LOCAL, alpha=3.0, sigma=0.5)],
    ids=str,
)
def test_fedamp(federation: Federation, target: str, spec: FedAMP) -> None:
    simulation = simulate(spec, federation, target, cohort=4, rounds=6)
    (start,) = simulation.initial_models().values()
    combined = [start for _ in CLIENTS]
    nets = [network(model(target), start) for _ in CLIENTS]
    sums = []
    for number, clients in enumerate(cohorts(simulation)):
        for client in clients:
            steps = optimizer(spec, nets[client].parameters())
            for x, y in training_batches(simulation, number, client):
                steps.zero_grad()
                parameters = nets[client].named_parameters()
                distance = sum((value - combined[client][name]).square().sum() for name, value in parameters)
                (cross_entropy(nets[client](x), y) + spec.strength / (2 * spec.alpha) * distance).backward()
                steps.step()
        trained = {client: weights_of(nets[client]) for client in clients}
        for i in clients:
            xi = {}
            for j in set(clients) - {i}:
                square = (flat(trained[i]) - flat(trained[j])).square().sum().requires_grad_()
                (slope,) = torch.autograd.grad(1 - torch.exp(-square / spec.sigma), square)
                xi[j] = float(spec.alpha * slope)
            sums.append(sum(xi.values()))
            xi = {j: value / max(1.0, sums[-1]) for j, value in xi.items()}
            shares = xi | {i: 1 - sum(xi.values())}
            combined[i] = {name: sum(share * trained[j][name] for j, share in shares.items()) for name in start}
    assert (max(sums) > 1) == (spec.alpha > 1)

    state = finish(simulation)
    assert_close([take(state.memories.rows, client) for client in CLIENTS], combined, **EXACT)
    assert_close(personal(simulation, state), [weights_of(net) for net in nets], **EXACT)


def test_fedamp_is_local_only_without_its_proximal_term(federation: Federation) -> None:
    """A term made of detached weights has no gradient, and would leave every client on its own."""
    plain = {**LOCAL, "local_momentum": 0.0}
    alone = personal_of(simulate(ALGORITHMS["local"](**plain), federation, rounds=3))
    for strength, is_local in ((0.0, True), (1.0, False)):
        found = personal_of(simulate(ALGORITHMS["fedamp"](**plain, strength=strength), federation, cohort=6, rounds=3))
        for mine, own in zip(found, alone, strict=True):
            assert torch.allclose(flat(mine), flat(own), rtol=1e-12, atol=1e-13) == is_local


def personal_of(simulation: Simulation) -> list[Params]:
    return personal(simulation, finish(simulation))


def test_a_moving_average_of_models_that_the_server_keeps_one_by_one_is_refused() -> None:
    with pytest.raises(UserError, match="PFedGraph keeps a model for each client, which no moving average covers"):
        ALGORITHMS["pfedgraph"](averaging=0.9)


# pFedLHN


class LayerHyper(nn.Module):
    """The learned vectors, the shared layer and one head for each tensor, from the engine's first weights."""

    def __init__(self, phi: Params, shapes: dict[str, torch.Size], prefix: str) -> None:
        super().__init__()
        self.shapes = shapes
        self.names: dict[nn.Parameter, str] = {}
        self.vectors = nn.Embedding.from_pretrained(phi["vectors"].clone(), freeze=False)
        self.names[self.vectors.weight] = "vectors"
        self.trunk = self.layer(phi, "trunk.0")
        self.heads = nn.ModuleList(self.layer(phi, f"{prefix}{name}") for name in shapes)

    def layer(self, phi: Params, name: str) -> nn.Linear:
        layer = nn.Linear(*reversed(phi[f"{name}.weight"].shape), dtype=torch.float64)
        layer.load_state_dict({part: phi[f"{name}.{part}"] for part in ("weight", "bias")})
        self.names |= {layer.weight: f"{name}.weight", layer.bias: f"{name}.bias"}
        return layer

    def forward(self, coefficients: Tensor) -> Params:
        mixed = self.trunk(coefficients @ self.vectors.weight)
        heads = zip(self.shapes.items(), self.heads, mixed, strict=True)
        return {name: head(x).reshape(shape) for (name, shape), head, x in heads}


@every_target
@pytest.mark.parametrize("cohort", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [row("pfedlhn", **LOCAL, embedding_dim=3, vector_dim=4, hidden_dim=6, embedding_scale=0.3, lr=0.01, clip=0.05)],
    ids=["pfedlhn"],
)
def test_pfedlhn(federation: Federation, target: str, spec: PFedLHN, cohort: int) -> None:
    """Every client's update meets its own derivative: in a cohort of several there are no cross terms."""
    simulation = simulate(replace(spec, local_clip=1.2), federation, target, cohort=cohort)
    start = simulation.initial_state()
    shapes = model(target).shapes
    h = LayerHyper(start.memories.shared.phi, shapes, f"head.{target}/")
    table = start.memories.rows.embedding.clone().reshape(NUM_CLIENTS, len(shapes), 3)
    coefficients = [nn.Parameter(one.clone()) for one in table]
    server = torch.optim.AdamW(h.parameters(), 0.01, weight_decay=1e-2)
    own = [torch.optim.AdamW([one], 0.01, weight_decay=1e-2) for one in coefficients]
    norms = []
    for number, clients in enumerate(cohorts(simulation)):
        server.zero_grad()
        for client in clients:
            own[client].zero_grad()
            theta = h(coefficients[client])
            net = network(model(target), {name: value.detach() for name, value in theta.items()})
            descend(net, [optimizer(spec, net.parameters())], training_batches(simulation, number, client), 1.2)
            after = weights_of(net)
            sum(((theta[name] - after[name]).square().sum() for name in shapes), torch.tensor(0.0)).div(
                2 * len(clients)
            ).backward()
        moving = [*h.parameters(), *(coefficients[client] for client in clients)]
        norms.append(float(clip_grad_norm_(moving, 0.05)))
        server.step()
        for client in clients:
            own[client].step()
    assert max(norms) > 0.05

    state = finish(simulation)
    found = state.memories.shared.phi
    assert_close({name: found[name] for name in found}, {h.names[p]: p.detach() for p in h.parameters()}, **EXACT)
    assert_close(state.memories.rows.embedding, torch.stack([one.detach().flatten() for one in coefficients]), **EXACT)
    expected = [{name: value.detach() for name, value in h(one).items()} for one in coefficients]
    assert_close(personal(simulation, state), expected, **EXACT)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_hidden": 2}, "num_hidden = 2 has no effect for pFedLHN"),
        ({"embedding": "fixed"}, "pFedLHN trains the coefficients of every client"),
    ],
)
def test_pfedlhn_refuses_settings_of_the_other_hypernetwork(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ALGORITHMS["pfedlhn"](**settings).for_clients(6)


NEWER = (
    "fedprox",
    "fedbn",
    "mr-mtl",
    "fedrod",
    "feddbe",
    "scaffold",
    "fedproto",
    "fedpac",
    "pfedgraph",
    "fedamp",
    "pfedlhn",
)


@pytest.mark.slow
@pytest.mark.parametrize("method", NEWER)
def test_a_client_joins_and_its_model_is_a_plain_network(federation: Federation, method: str, tmp_path: Path) -> None:
    """Only what belongs to the client learns: the server's shared memory stays as it was trained."""
    spec = ALGORITHMS[method](**(LOCAL if method != "pfedlhn" else LOCAL | {"embedding_scale": 0.3}))
    run = pfedhn.train(spec, federation, Conv, steps=12, cohort_size=3, seed=1, progress=False)
    before = copy(run.state.memories.shared)
    client = federation.splits["train"].of(2)
    new = run.add_client(federation.x[client], federation.y[client], rounds=3)
    assert_same_bits(run.state.memories.shared, before)
    assert math.isfinite(new.splits["test"].mean_loss)
    assert type(new.model) is Conv
    assert_close(dict(new.model.named_parameters()), {name: nn.Parameter(x) for name, x in new.weights.items()})
    new.export(tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: value.shape for name, value in stored.items()} == model("conv").shapes


def test_every_method_has_a_twin() -> None:
    assert set(ALGORITHMS) == TWINS
