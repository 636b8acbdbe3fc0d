"""BatchNorm under federated training: against `nn.BatchNorm` in plain loops, in float64, padded batches among them."""

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import (
    BatchNormed,
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
from torch.func import functional_call

import pfedhn
from pfedhn import keys
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.ditto import Ditto
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.fedper import FedPer
from pfedhn.algorithms.local import Local
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.combinators import innermost, with_statistics
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import UserError
from pfedhn.params import Params, take
from pfedhn.sgd import Batches
from pfedhn.statistics import MaskedBatchNorm, collecting, masked, statistics_of, training_pass
from pfedhn.storage.checkpoint import load_state, save_state

LOCAL = {"local_lr": 0.1, "local_steps": 4, "local_momentum": 0.9, "local_weight_decay": 0.01}
Minibatch = tuple[Tensor, Tensor]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (7, 3)),
        (nn.BatchNorm1d(3, momentum=None), (7, 3, 4)),
        (nn.BatchNorm2d(3, momentum=0.3, eps=0.1), (7, 3, 4, 5)),
        (nn.BatchNorm3d(3, affine=False), (7, 3, 2, 4, 5)),
    ],
)
def test_a_layer_computes_as_pytorchs_without_the_rows_that_fill_a_batch_up(
    layer: nn.BatchNorm2d, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    plain, ours = layer.double(), masked(layer)
    mask = torch.arange(shape[0]) < 5
    statistics = statistics_of(ours)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        weights = {name: value.detach().requires_grad_() for name, value in ours.named_parameters()}
        with collecting() as after, training_pass(statistics, mask):
            outputs = functional_call(ours, weights, (x,))
        expected = plain(x[mask])
        assert_close(outputs[mask], expected)
        assert_close(after, statistics_of(plain))
        if weights:
            found = torch.autograd.grad((outputs[mask] ** 3).sum(), list(weights.values()))
            assert_close(found, torch.autograd.grad((expected**3).sum(), list(plain.parameters())))
        statistics = after
    assert_close(statistics_of(ours)[".running_mean"], torch.zeros(3, dtype=torch.float64))  # its buffers stay


def test_a_network_without_statistics_is_left_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3))
    assert masked(module) is module
    assert statistics_of(module) == {}


class Plain:
    """Every client's module, the batches that the engine draws, and SGD as PyTorch has it."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.algorithm = simulation, simulation.algorithm
        self.sizes = simulation.federation.splits["train"].size.double()
        start = simulation.initial_models()["batchnorm"]
        self.clients = [self.module(start) for _ in range(simulation.federation.num_clients)]
        self.server = self.module(start)

    def module(self, weights: Params) -> nn.Module:
        module = BatchNormed().double().train()
        module.load_state_dict(weights, strict=False)
        return module

    def batches(self, number: int, client: int) -> list[Minibatch]:
        simulation = self.simulation
        key = keys.fold(simulation.seed, "batches", number)
        one: Any = simulation.federation.batches(
            torch.tensor([client]), key, self.algorithm.num_batches, simulation.schedule.batch_size
        )
        return [(x[mask], y[mask]) for x, y, mask in zip(one.x[0], one.y[0], one.mask[0], strict=True)]

    def optimizer(self, module: nn.Module) -> torch.optim.SGD:
        sgd = innermost(self.algorithm).local_sgd
        return torch.optim.SGD(module.parameters(), sgd.lr, sgd.momentum, weight_decay=sgd.weight_decay)

    def train(self, module: nn.Module, optimizer: torch.optim.SGD, batches: list[Minibatch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    def mean(self, modules: dict[int, dict[str, Tensor]]) -> Params:
        total = sum(self.sizes[client] for client in modules)
        names = next(iter(modules.values()))
        return {
            name: sum(self.sizes[client] / total * state[name] for client, state in modules.items()) for name in names
        }

    def states(self) -> list[Params]:
        return [dict(module.state_dict()) for module in self.clients]


def parameters(module: nn.Module) -> Params:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def averaging(simulation: Simulation, own: tuple[str, ...]) -> list[Params]:
    """FedAvg by hand; names that begin with one of `own` stay with their client."""
    plain = Plain(simulation)
    for number in range(simulation.num_rounds):
        trained = {}
        for client in simulation.cohort(number):
            module = plain.clients[client]
            shared = {k: v for k, v in plain.server.state_dict().items() if not k.endswith(own)}
            module.load_state_dict(shared, strict=False)
            plain.train(module, plain.optimizer(module), plain.batches(number, client))
            trained[client] = {k: v.clone() for k, v in module.state_dict().items() if not k.endswith(own)}
        plain.server.load_state_dict(plain.mean(trained), strict=False)
    for module in plain.clients:
        shared = {k: v for k, v in plain.server.state_dict().items() if not k.endswith(own)}
        module.load_state_dict(shared, strict=False)
    return plain.states()


COUNT = "num_batches_tracked"
STATISTICS = ("running_mean", "running_var", COUNT)


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        (FedAvg(**LOCAL), STATISTICS),
        (with_statistics(FedAvg(**LOCAL), "shared"), (COUNT,)),
        pytest.param(FedPer(**LOCAL), (*STATISTICS, "out.weight", "out.bias"), marks=pytest.mark.slow),
    ],
)
def test_averaging_with_statistics_that_are_private_or_shared(
    federation: Federation, algorithm: FedAvg, own: tuple[str, ...]
) -> None:
    simulation = simulate(algorithm, federation, "batchnorm", rounds=6, cohort=3)
    assert_close(personal(simulation, finish(simulation)), averaging(simulation, own))


def test_local(federation: Federation) -> None:
    simulation = simulate(Local(**LOCAL), federation, "batchnorm", rounds=3)
    plain = Plain(simulation)
    for client, module in enumerate(plain.clients):
        optimizer = plain.optimizer(module)
        for number in range(3):
            plain.train(module, optimizer, plain.batches(number, client))
    assert_close(personal(simulation, finish(simulation)), plain.states())


@pytest.mark.slow
def test_ditto_has_the_statistics_of_the_model_that_is_tested(federation: Federation) -> None:
    simulation = simulate(Ditto(**LOCAL, strength=0.7), federation, "batchnorm", rounds=6, cohort=2)
    plain = Plain(simulation)
    for number in range(6):
        trained = {}
        for client in simulation.cohort(number):
            module, own = copy.deepcopy(plain.server), plain.clients[client]
            held, optimizer = parameters(module), plain.optimizer(own)
            for x, y in plain.batches(number, client):
                optimizer.zero_grad()
                nn.functional.cross_entropy(own(x), y).backward()
                for name, value in own.named_parameters():
                    value.grad += 0.7 * (value.detach() - held[name])
                optimizer.step()
            plain.train(module, plain.optimizer(module), plain.batches(number, client))
            trained[client] = parameters(module)
        plain.server.load_state_dict(plain.mean(trained), strict=False)
    assert_close(personal(simulation, finish(simulation)), plain.states())


@pytest.mark.slow
def test_pfedhn_generates_the_affine_part_and_clients_keep_the_statistics(federation: Federation) -> None:
    algorithm = ALGORITHMS["pfedhn"](hidden_dim=7, embedding_dim=3, local_steps=3, local_lr=0.1, personal=("out",))
    simulation = simulate(algorithm, federation, "batchnorm", rounds=1)
    state = simulation.initial_state()
    (client,) = simulation.cohort(0)
    start = personal(simulation, state)[client]
    assert not torch.equal(start["norm1.weight"], torch.ones(3, dtype=torch.float64))
    plain = Plain(simulation)
    module = plain.module({name: value for name, value in start.items() if "running" not in name})
    optimizer = plain.optimizer(module)
    for x, y in plain.batches(0, client):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        generated = [value for name, value in module.named_parameters() if not name.startswith("out")]
        nn.utils.clip_grad_norm_(generated, 50.0)
        optimizer.step()
    kept = take(finish(simulation, state).memories.private["batchnorm"].take([client]), 0)
    assert_close(kept.statistics, statistics_of(module))
    assert_close(kept.private.head["out.weight"], parameters(module)["out.weight"])


@pytest.mark.parametrize("executor", mostly_slow(["loop", "traced", "vectorized"], "vectorized"))
def test_statistics_made_anew_are_those_of_the_rows(federation: Federation, executor: str) -> None:
    algorithm = with_statistics(FedAvg(**LOCAL), num_batches=3)
    simulation = simulate(algorithm, federation, "batchnorm", rounds=3, cohort=2, executor=executor)
    state = finish(simulation)
    for client in range(federation.num_clients):
        found = simulation.personal_weights(state.memories, simulation.model_of(client), client, state.round)
        one = federation.batches(torch.tensor([client]), simulation.personalize_key(state.round), 3, 5)
        module = BatchNormed().double().train()
        module.load_state_dict({k: v for k, v in found.items() if "running" not in k}, strict=False)
        module.norm1.momentum = None
        for name in ("norm1", "norm2"):
            getattr(module, name).num_batches_tracked.zero_()
        for x, mask in zip(one.x[0], one.mask[0], strict=True):
            module(x[mask])
        assert_close(
            {k: v for k, v in found.items() if "norm" in k and "running" in k},
            {k: v for k, v in statistics_of(module).items() if "running" in k},
        )
    losses = simulation.evaluate(state)["test"].loss
    rows = federation.splits["test"].of(2)
    used = model("batchnorm").with_weights(simulation.personal_weights(state.memories, simulation.model_of(2), 2, 3))
    expected = nn.functional.cross_entropy(used(federation.x[rows]), federation.y[rows], reduction="sum")
    assert_close(losses[2], expected.detach())


def test_a_checkpoint_holds_the_statistics(federation: Federation, tmp_path: Path) -> None:
    simulation = simulate(with_statistics(FedAvg(**LOCAL), "shared"), federation, "batchnorm", rounds=6, cohort=2)
    state = simulation.initial_state()
    for number in range(3):
        simulation._round(state, number)
        state.round = number + 1
    save_state(tmp_path, state, simulation)
    loaded = load_state(tmp_path, simulation).state
    assert loaded is not None
    assert_same_bits(memories_of(loaded), memories_of(state))
    assert_same_bits(memories_of(finish(simulation, loaded)), memories_of(finish(simulation)))


def data(num_rows: int = 240) -> tuple[numpy.ndarray, numpy.ndarray]:
    generator = numpy.random.default_rng(0)
    y = numpy.arange(num_rows) % 4
    return generator.normal(size=(num_rows, 6)).astype("float32") + 3 * y[:, None], y


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def small(x: Any, y: Any, **settings: Any) -> pfedhn.Run:
    federation = Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=6))
    settings = {"steps": 40, "batch_size": 8, "evaluate_every": 20, "progress": False, **settings}
    return pfedhn.train(PFedHN(local_steps=4), federation, network, device="cpu", **settings)


@pytest.mark.slow
def test_a_personal_model_is_a_plain_module_that_gives_the_run_s_accuracy(tmp_path: Path) -> None:
    x, y = data()
    run = small(x, y, directory=tmp_path / "run", cohort_size=6)
    found = pfedhn.load(tmp_path / "run", device="cpu").personal_model(3)
    assert type(found[1]) is nn.BatchNorm1d
    federation = run.simulation.federation
    rows = federation.splits["test"].of(3)
    accuracy = (found(federation.x[rows]).argmax(1) == federation.y[rows]).double().mean()
    assert accuracy == run.accuracy[3]


@pytest.mark.slow
def test_a_client_that_joins_gets_statistics_of_its_own_rows() -> None:
    x, y = data()
    run = small(x, y)
    near, far = (run.add_client(x + shift, y, rounds=2).model[1].running_mean for shift in (0.0, 50.0))
    assert not torch.allclose(near, far, atol=1.0)
    assert not torch.allclose(run.add_client(x, y, rounds=0).model[1].running_mean, torch.zeros(8), atol=0.1)


@pytest.mark.slow
def test_what_has_no_variance_or_no_rows_is_refused_in_a_sentence() -> None:
    x, y = data()
    with pytest.raises(UserError, match=r"batch_size is 1, of which .* \(in its BatchNorm layers 1\); let it be 2"):
        small(x, y, batch_size=1)
    federation = Federation.from_clients([(x[:40], y[:40]), {"train": (x[:1], y[:1]), "test": (x[:9], y[:9])}])
    with pytest.raises(UserError, match=r"client 1 has 1 training example, of which .*; give it two at least"):
        pfedhn.train("fedavg", federation, network, steps=1, progress=False)
    with pytest.raises(UserError, match=r"^the client has 1 training example, of which the network '.*' cannot make"):
        small(x, y).add_client(x[:2], y[:2])

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x.reshape(-1, 3)).reshape(-1, 6))

    federation = Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=6))
    with pytest.raises(UserError, match=r"BatchNorm layer 'norm' sees 8 rows for a batch of 4"):
        pfedhn.train("fedavg", federation, Folded, steps=1, progress=False)
    with pytest.raises(UserError, match=r"'1' is a SyncBatchNorm, which computes its batch statistics in a way"):
        pfedhn.train(
            "fedavg", federation, lambda: nn.SyncBatchNorm.convert_sync_batchnorm(network()), steps=1, progress=False
        )


def test_the_loss_of_weights_alone_needs_no_tracking(federation: Federation) -> None:
    batch = take(federation.batches(torch.tensor([0]), 0, 1, 5), 0)
    target = model("batchnorm")
    assert bool(target.loss(target.fresh(0), Batches(*take(batch, 0))).isfinite())


@pytest.mark.parametrize("is_affine", [True, False])
def test_plain_arithmetic_is_what_pytorch_s_operator_computes(is_affine: bool) -> None:
    """Which a GPU takes for models that are used: there PyTorch's operator cannot be mapped over clients."""
    network = nn.Sequential(nn.BatchNorm2d(3, affine=is_affine)).double().eval()
    layer = network[0]
    assert isinstance(layer, nn.BatchNorm2d)
    for value in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
        if value is not None:
            value.data.uniform_(0.5, 2.0)
    x = torch.rand(4, 3, 5, 5, dtype=torch.float64)
    (mine,) = masked(network).children()
    assert isinstance(mine, MaskedBatchNorm)
    assert_close(mine._by_running_statistics(x), network(x))
