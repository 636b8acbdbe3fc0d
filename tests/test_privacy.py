"""Private training is what its paper says, costs what Opacus says, and stops when the budget is spent."""

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    BATCH_SIZE,
    NUM_CLIENTS,
    TRAIN_SIZES,
    assert_close,
    finish,
    make_federation,
    memories_of,
    model,
    mostly_slow,
    simulate,
    with_steps,
)
from torch import Tensor

import pfedhn
from pfedhn import keys
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import UserError
from pfedhn.experiments.build import cell_algorithm, cell_privacy, check
from pfedhn.experiments.grid import from_table
from pfedhn.model import Model
from pfedhn.paper.experiments import EXPERIMENTS
from pfedhn.params import Params, take
from pfedhn.privacy import Privacy, Protection, RoundCost, keyed_normal, num_places, protecting, spent
from pfedhn.sgd import SGD, Batches
from pfedhn.storage.checkpoint import load_state, save_state

PLAIN = ("pfedhn", "pfedhn-pc", "fedavg", "fedprox", "mr-mtl", "fedper", "fedrep", "fedbabu", "lg-fedavg", "local")
OTHERS = ("apfl", "ditto", "fedala", "per-fedavg", "per-fedavg-hf", "pfedme")


@pytest.fixture(scope="module")
def federation() -> Federation:
    return make_federation()


@pytest.mark.parametrize("name", mostly_slow(["mlp", "conv"], "conv"))
def test_a_private_step_is_a_plain_loop_over_examples(federation: Federation, name: str) -> None:
    """Autograd for one example at a time, its gradient clipped by hand; then decay and momentum as ever."""
    network, clip, noise, expected = model(name), 3.0, 0.02, 4.0
    batches = take(federation.sampled_batches(torch.tensor([2]), 9, 4, BATCH_SIZE), 0)
    assert not bool(batches.mask.all())
    start = network.fresh(3)
    sgd = SGD(0.3, momentum=0.9, weight_decay=0.01)
    protection = Protection(Privacy(clip, noise, level="example"), expected, keyed_normal(17))
    with protecting(protection):
        weights, _ = sgd.run(network.loss, start, batches)

    module = network.with_weights(start)
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), 0.3, momentum=0.9, weight_decay=0.01)
    count = sum(value.numel() for value in parameters.values())
    draws = keys.normal(keys.fold(17, 1), 4 * count).reshape(4, count)
    num_clipped = 0
    for number in range(4):
        total: dict[str, Tensor] = {part: torch.zeros_like(value) for part, value in parameters.items()}
        for x, y, counts in zip(*take(batches, number), strict=True):
            if not counts:
                continue
            loss = torch.nn.functional.cross_entropy(module(x[None]), y[None])
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            length = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            num_clipped += length > clip
            for part, value in zip(parameters, gradients, strict=True):
                total[part] += value * min(1.0, clip / length)
        pieces = draws[number].split([value.numel() for value in parameters.values()])
        for (part, value), piece in zip(parameters.items(), pieces, strict=True):
            value.grad = (total[part] + noise * clip * piece.reshape(value.shape)) / expected
        optimizer.step()
    assert 0 < num_clipped < int(batches.mask.sum())
    assert_close(weights, {part: value.detach() for part, value in parameters.items()})


@pytest.mark.parametrize("method", mostly_slow(PLAIN, "pfedhn-pc", "fedrep"))
def test_without_noise_or_clipping_it_is_ordinary_training(federation: Federation, method: str) -> None:
    """On batches of all examples, where sampling has nothing to choose; others draw other examples."""
    ordinary = simulate(with_steps(method, 2), federation, rounds=3, cohort=2, batch_size=max(TRAIN_SIZES))
    private = replace(ordinary, privacy=Privacy(math.inf, 0.0, level="example"))
    assert_close(memories_of(finish(private)), memories_of(finish(ordinary)))
    noised = replace(ordinary, privacy=Privacy(1.0, 0.5, level="example"))
    with pytest.raises(AssertionError):
        assert_close(memories_of(finish(noised)), memories_of(finish(ordinary)))


@pytest.mark.parametrize("method", mostly_slow(OTHERS, "ditto"))
def test_methods_with_other_gradients_are_refused(federation: Federation, method: str) -> None:
    simulation = simulate(with_steps(method, 2), federation, privacy=Privacy(1.0, 1.0, level="example"))
    with pytest.raises(UserError, match="train by plain SGD"):
        finish(simulation)
    finish(replace(simulation, privacy=Privacy(1.0, 1.0)))  # of whole clients it is offered


@dataclass(frozen=True)
class ByItself(FedAvg):
    """Differentiates the loss without asking anybody."""

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        gradient = torch.func.grad(model.loss)(received, take(batches, 0))
        return {name: self.local_lr * value for name, value in gradient.items()}, private


def test_a_method_that_goes_around_the_private_steps_is_refused(federation: Federation) -> None:
    simulation = simulate(ByItself(), federation)
    finish(simulation)
    with pytest.raises(UserError, match="train by plain SGD"):
        finish(replace(simulation, privacy=Privacy(1.0, 1.0, level="example")))


@pytest.mark.parametrize(
    ("executor", "level"),
    mostly_slow(itertools.product(("traced", "vectorized"), ("client", "example")), ("vectorized", "example")),
)
def test_every_executor_draws_the_same_noise(federation: Federation, executor: str, level: Any) -> None:
    privacy = Privacy(0.5, 1.0, level=level)
    settings: dict[str, Any] = {"rounds": 2, "cohort": 3, "privacy": privacy}
    method = with_steps("pfedhn-pc", 2)
    states = [finish(simulate(method, federation, executor=name, **settings)) for name in ("loop", executor)]
    assert_close(memories_of(states[1]), memories_of(states[0]))


def test_clients_and_rounds_get_noise_of_their_own(federation: Federation) -> None:
    """With a clip that leaves nothing, an update is its noise: normal, and never the same twice."""
    simulation = simulate(with_steps("fedavg", 1), federation, privacy=Privacy(1e-9, 1e9, level="client"))
    first = Simulation._protection
    updates = []
    for number in range(2):
        for client in range(2):
            secret = torch.as_tensor(keys.fold(simulation.seed, "privacy", number, client))
            inputs = type("Mine", (), {"size": torch.tensor(9), "secret": secret})()
            protection = first(simulation, inputs)
            assert protection is not None
            updates.append(protection.released({"a": torch.zeros(4000), "b": torch.zeros(4000)}))
    parts = [part for update in updates for part in update.values()]
    for number, one in enumerate(parts):
        assert abs(float(one.std()) - 1) < 5 / 8000**0.5
        for other in parts[:number]:
            assert abs(float((one * other).mean())) < 5 / 4000**0.5


def test_examples_join_a_minibatch_by_themselves(federation: Federation) -> None:
    """Each with the same probability, independent of the others; a client with few examples uses all of them."""
    count = 4_000
    batches = federation.sampled_batches(torch.arange(NUM_CLIENTS), 3, count, BATCH_SIZE)
    sizes = batches.mask.sum(-1).double()
    for client, size in enumerate(TRAIN_SIZES):
        rate = min(1.0, BATCH_SIZE / size)
        mean, variance = float(sizes[client].mean()), float(sizes[client].var())
        wanted = size * rate * (1 - rate)  # of a sum of independent choices; of a fixed size it would be 0
        assert abs(mean - size * rate) <= 5 * math.sqrt(wanted / count)
        assert abs(variance - wanted) <= 10 * wanted * math.sqrt(2 / count)
    # Every example is equally likely: the mean of what was drawn is the mean of the client's examples.
    chosen = batches.x[2][batches.mask[2]]
    everybody = federation.x[federation.splits["train"].of(2)]
    spread = everybody.std(0) / math.sqrt(len(chosen))
    assert bool(((chosen.mean(0) - everybody.mean(0)).abs() <= 6 * spread + 1e-12).all())
    one = federation.sampled_batches(torch.tensor([2]), 3, count, BATCH_SIZE)
    assert torch.equal(one.mask[0], batches.mask[2])  # whoever is drawn beside it


def test_there_is_room_for_what_may_join() -> None:
    """The chance of more is that of the tail of a binomial distribution, computed here term by term."""
    for batch_size, size in ((5, 2_000), (64, 900)):
        rate, room = batch_size / size, num_places(batch_size)
        logs = [
            math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)
            + k * math.log(rate) + (size - k) * math.log1p(-rate)
            for k in range(room + 1, size + 1)
        ]  # fmt: skip
        assert sum(map(math.exp, logs)) < 1e-12


def test_epsilon_is_opacus_own() -> None:
    accountants = pytest.importorskip("opacus.accountants")
    privacy = Privacy(1.0, 1.1, level="example")
    cost = privacy.cost(size=640, batch_size=64, num_batches=5)
    assert cost == RoundCost(1.1, 0.1, 5)
    theirs = accountants.RDPAccountant()
    for _ in range(5 * 7):
        theirs.step(noise_multiplier=1.1, sample_rate=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert privacy.spent(cost, 7) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-12)
    assert Privacy(1.0, 8.0).cost(640, 64, 5) == RoundCost(4.0, 1.0, 1)
    assert privacy.cost(10, 64, 5).sample_rate == 1.0
    assert spent([], 1e-5) == 0.0
    assert Privacy(1.0, 0.0).spent(Privacy(1.0, 0.0).cost(9, 9, 1), 1) == math.inf
    bounded = replace(privacy, epsilon=4.0)
    allowed = bounded.num_rounds(cost)
    assert bounded.spent(cost, allowed) <= 4.0 < bounded.spent(cost, allowed + 1)
    assert replace(bounded, epsilon=1e-3).num_rounds(cost) == 0


@pytest.mark.parametrize(("name", "size", "rounds"), [("privacy", 108, 50), ("privacy-cifar10", 800, 100)])
def test_budgets_of_the_experiments_last_as_long_as_their_runs(name: str, size: int, rounds: int) -> None:
    """Of a client with as many examples as most have, that is drawn as often as most are."""
    pytest.importorskip("opacus")
    cells = [cell for cell in EXPERIMENTS[name].cells if cell.privacy]
    assert len(cells) == 8
    for cell in cells:
        assert cell.steps == rounds * cell.clients
        privacy = cell_privacy(cell)
        assert privacy is not None
        cost = privacy.cost(size, cell.batch_size, cell_algorithm(cell).num_batches)
        assert rounds <= privacy.num_rounds(cost) <= 1.03 * rounds


@pytest.mark.slow
def test_a_client_stops_when_its_budget_is_spent(federation: Federation, tmp_path: Path) -> None:
    """Small clients, whose examples are drawn more often, stop first; the others go on; a stop and go changes nothing.

    When nobody has budget left, the server's memory stands still.
    """
    privacy = Privacy(0.5, 2.0, epsilon=5.0, level="example")
    simulation = simulate(with_steps("pfedhn", 2), federation, rounds=60, cohort=3, privacy=privacy)
    state = simulation.initial_state()
    seen = []
    for progress in simulation.rounds(state):
        if progress.step == 30:
            save_state(tmp_path, state, simulation)
        seen.append((dict(state.num_updates), state.memories.shared.phi))
    allowed = {client: privacy.num_rounds(simulation.privacy_cost(client)) for client in range(NUM_CLIENTS)}
    assert allowed[3] < allowed[0] < allowed[2]
    assert dict(state.num_updates) == {client: number for client, number in allowed.items() if number}
    last = next(number for number, (counts, _) in enumerate(seen) if counts == seen[-1][0])
    assert 0 < last < len(seen) - 2
    assert_close(seen[last][1], seen[-1][1], rtol=0, atol=0)
    loaded = load_state(tmp_path, simulation).state
    assert loaded is not None
    assert sum(loaded.num_updates.values()) > 0
    again = finish(simulation, loaded)
    assert again.num_updates == state.num_updates
    assert_close(memories_of(again), memories_of(state), rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_says_what_was_spent_and_keeps_it(tmp_path: Path, federation: Federation) -> None:
    privacy = Privacy(1.0, 2.0, epsilon=30.0, level="example")
    federation = replace(federation, x=federation.x.float())
    settings: dict[str, Any] = {"steps": 6, "batch_size": 5, "progress": False, "directory": tmp_path}
    method = FedAvg(local_steps=2)
    run = pfedhn.train(method, federation, Small, privacy=privacy, **settings)
    assert run.state.num_updates.total() > 0
    cost = run.simulation.privacy_cost(0)
    assert run.epsilon[0] == privacy.spent(cost, run.state.num_updates[0])
    loaded = pfedhn.load(tmp_path)
    assert loaded.plan.privacy == privacy
    assert loaded.state.num_updates == run.state.num_updates
    with pytest.raises(UserError, match="how many examples a client has"):
        _ = loaded.epsilon
    with pytest.raises(UserError, match="private in another way"):
        pfedhn.train(method, federation, Small, privacy=replace(privacy, noise=3.0), **settings)
    plain = pfedhn.train(method, federation, Small, **{**settings, "directory": None})
    assert bool((plain.epsilon == math.inf).all())


class Small(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(72, 4))


def test_what_leaks_or_does_not_fit_is_refused(federation: Federation) -> None:
    private = Privacy(1.0, 1.0, level="example")
    with pytest.raises(UserError, match="BatchNorm mixes"):
        simulate(FedAvg(), federation, "batchnorm", privacy=private)
    simulate(FedAvg(), federation, "batchnorm", privacy=Privacy(1.0, 1.0))
    with pytest.raises(UserError, match="which classes a client has"):
        simulate(pfedhn.ALGORITHMS["pfedhn"](embedding="fixed"), federation, privacy=private)
    with pytest.raises(UserError, match="give a pfedhn"):
        pfedhn.train("fedavg", federation, Small, steps=1, privacy=1.0, progress=False)  # type: ignore[arg-type]
    for table, sentence in (
        ({"noise": 1.0}, "privacy needs clip"),
        ({"clip": 1.0, "noise": "much"}, "noise"),
        ({"clip": 1.0, "noise": 1.0, "levl": "example"}, "has no field"),
        ({"clip": -1.0, "noise": 1.0}, "must be above 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            check(from_table({"method": "fedavg", "privacy": table}, "mine"))
    experiment = from_table({"method": "fedavg", "privacy": {"clip": 1, "noise": 2.0, "level": "example"}}, "mine")
    check(experiment)


def test_a_batch_of_nobody_moves_by_noise_alone() -> None:
    """An example that was not drawn, or whose gradient is not finite, has no part in the step."""
    network = model("mlp")
    start = network.fresh(0)
    x = torch.zeros(1, 3, 2, 6, 6, dtype=torch.float64)
    x[0, 1:] = math.inf
    batches = Batches(x, torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[False, False, True]]))
    with protecting(Protection(Privacy(1.0, 0.0, level="example"), 2.0, keyed_normal(0))):
        weights, _ = SGD(0.1).run(network.loss, start, batches)
    assert_close(weights, start, rtol=0, atol=0)


def test_an_update_that_is_not_finite_leaves_as_noise_alone() -> None:
    """Whether training diverged is something that the data say, and no factor bounds it."""
    protection = Protection(Privacy(1.0, 2.0), 1.0, keyed_normal(3))
    for wrong in (math.nan, math.inf):
        left = protection.released({"a": torch.tensor([1.0, wrong]), "b": torch.full((3000,), 1e30)})
        assert all(bool(part.isfinite().all()) for part in left.values())
        assert abs(float(left["b"].mean())) < 5 * 2 / 3000**0.5


def test_noise_can_be_drawn_step_by_step() -> None:
    """As a party does, so that the noise of a whole round is never in its memory."""
    network = model("mlp")
    start, counts = network.fresh(0), []

    def normal(count: int, like: Tensor) -> Tensor:
        counts.append(count)
        return torch.full((count,), float(len(counts)), dtype=like.dtype)

    batches = Batches(
        torch.zeros(4, 3, 2, 6, 6, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3) > 0
    )
    with protecting(Protection(Privacy(1.0, 0.5, level="example"), 2.0, normal, is_stepwise=True)):
        weights, _ = SGD(0.1).run(network.loss, start, batches)
    assert counts == [sum(value.numel() for value in start.values())] * 4
    moved = 0.1 * (1 + 2 + 3 + 4) * 0.5 / 2.0
    assert_close(weights, {name: value - moved for name, value in start.items()})
