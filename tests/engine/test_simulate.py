"""The round in one process: who takes part, what is remembered and counted, what happens when numbers run away."""

import copy as python_copy
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import (
    BATCH_SIZE,
    NUM_CLIENTS,
    TRAIN_SIZES,
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
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithm import Uses
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.lg_fedavg import LGFedAvg
from pfedhn.algorithms.local import Local
from pfedhn.algorithms.per_fedavg import PerFedAvg
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.algorithms.pfedme import PFedMe
from pfedhn.data.batches import cohort
from pfedhn.data.federation import Federation
from pfedhn.engine import evaluate
from pfedhn.engine.executors import EXECUTORS
from pfedhn.engine.rounds import rounds as progress_of
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Diverged, Schedule, State
from pfedhn.errors import UserError
from pfedhn.model import Model
from pfedhn.models import cross_entropy, is_correct
from pfedhn.params import copy, take

SMALL = {"local_steps": 2, "hidden_dim": 6, "local_lr": 0.1}


# Cohorts and minibatches


@pytest.mark.parametrize(("num_clients", "size"), [(1, 1), (2, 1), (6, 3), (50, 5), (50, 49), (1_000, 5)])
def test_cohorts_are_drawn_without_replacement(num_clients: int, size: int) -> None:
    for number in range(30):
        clients = cohort(3, number, num_clients, size).tolist()
        assert len(set(clients)) == size
        assert set(clients) <= set(range(num_clients))
        assert cohort(3, torch.tensor(number), num_clients, size).tolist() == clients


def test_everybody_is_everybody_in_order() -> None:
    assert cohort(3, 17, 6, 6).tolist() == list(range(6))


@pytest.mark.slow
def test_clients_are_chosen_equally_often() -> None:
    """Five standard deviations of a binomial count."""
    num_rounds, num_clients, size = 3_000, 10, 3
    counts = Counter(client for r in range(num_rounds) for client in cohort(1, r, num_clients, size).tolist())
    mean = num_rounds * size / num_clients
    spread = (mean * (1 - size / num_clients)) ** 0.5
    assert all(abs(counts[client] - mean) < 5 * spread for client in range(num_clients))


def test_minibatches_are_a_clients_own_rows_without_repetition(federation: Federation) -> None:
    numbered = replace(federation, x=torch.arange(len(federation.x)))
    clients = torch.tensor([4, 3, 0])
    drawn = numbered.batches(clients, 5, 20, BATCH_SIZE)
    assert drawn.x.shape == (3, 20, BATCH_SIZE)
    for place, client in enumerate(clients.tolist()):
        own = set(numbered.splits["train"].of(client).tolist())
        for rows, labels, mask in zip(drawn.x[place], drawn.y[place], drawn.mask[place], strict=True):
            chosen = rows[mask].tolist()
            assert len(set(chosen)) == len(chosen) == min(BATCH_SIZE, TRAIN_SIZES[client])
            assert set(chosen) <= own
            assert torch.equal(labels[mask], federation.y[rows[mask]])
        assert len({tuple(rows.tolist()) for rows in drawn.x[place]}) > 1  # a fresh draw every step


def test_a_clients_minibatches_do_not_depend_on_its_company(federation: Federation) -> None:
    together = federation.batches(torch.tensor([1, 4]), 5, 3, BATCH_SIZE)
    alone = federation.batches(torch.tensor([4]), 5, 3, BATCH_SIZE)
    assert_same_bits(take(together, 1), take(alone, 0))


# The schedule


@pytest.mark.parametrize(("size", "every"), [(1, 30), (5, 30), (5, 7), (3, 1)])
def test_budget_and_evaluations_are_counted_in_communication_steps(size: int, every: int) -> None:
    schedule = Schedule(steps=100, cohort_size=size, evaluate_every=every)
    num_rounds = schedule.num_rounds(50, communicates=True)
    assert num_rounds * size >= 100 > (num_rounds - 1) * size
    evaluated = [r for r in range(num_rounds) if schedule.is_evaluated(r * size, (r + 1) * size)]
    passed = {next(r for r in range(num_rounds) if (r + 1) * size >= mark) for mark in range(every, 101, every)}
    assert set(evaluated) == passed | {num_rounds - 1}


def test_a_method_that_sends_nothing_trains_everybody(federation: Federation) -> None:
    simulation = simulate(Local(**{"local_steps": 1}), federation, rounds=2, cohort=1)
    assert simulation.cohort(0) == list(range(NUM_CLIENTS))
    assert simulation.num_rounds == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ALGORITHMS)
def test_progress_is_in_steps_and_starts_with_an_evaluation(federation: Federation, method: str) -> None:
    simulation = simulate(ALGORITHMS[method](), federation, rounds=1, cohort=2)
    progress = list(simulation.rounds(simulation.initial_state()))
    assert [p.step for p in progress] == [0, simulation.clients_per_round]
    assert [p.evaluation.round for p in progress if p.evaluation] == [0, 1]


# Same seed, same bits


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
def test_same_seed_same_bits(federation: Federation, target: str) -> None:
    """Whatever the state of torch's own generator, which is neither read nor moved."""
    results = []
    for number in range(2):
        torch.manual_seed(number)
        before = torch.get_rng_state()
        results.append(memories_of(finish(simulate(ALGORITHMS["pfedhn-pc"](**SMALL), federation, target, rounds=4))))
        assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(*results)


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedhn-pc", "local", "pfedme"))
def test_a_run_can_stop_and_go_on(federation: Federation, method: str) -> None:
    whole = finish(simulate(ALGORITHMS[method](), federation, rounds=3, cohort=2, evaluate_every=1))
    first = simulate(ALGORITHMS[method](), federation, rounds=3, cohort=2, evaluate_every=1)
    state = first.initial_state()
    for _ in zip(range(3), first.rounds(state), strict=False):
        pass  # the evaluation before the first round, and two rounds
    assert state.round == 2
    again = simulate(ALGORITHMS[method](), federation, rounds=3, cohort=2, evaluate_every=1)
    state = finish(again, python_copy.deepcopy(state))
    assert_same_bits(memories_of(state), memories_of(whole))
    assert (state.bytes_down, state.bytes_up) == (whole.bytes_down, whole.bytes_up)
    assert state.best is not None
    assert whole.best is not None
    assert state.best.evaluation.round == whole.best.evaluation.round


# Divergence


def test_divergence_names_the_rates_to_lower_and_labels_that_need_scaling() -> None:
    federation = Federation.from_clients([(torch.ones(4, 1), torch.full((4,), value)) for value in (0.5, 1400.0)])
    message = str(Diverged.at(3, "Oslo", ALGORITHMS["pfedhn"](local_lr=0.02, lr=0.5), federation))
    assert message == (
        "training diverged in round 3 at client Oslo: its weights are no longer finite; scale the labels, whose mean "
        "is 700.2, or lower the learning rates (local_lr = 0.02, lr = 0.5), for example with --set "
        "local_lr=0.002. The run stands as it was before that round."
    )
    assert "at client Oslo: its weights are no longer finite; lower the learning rates (lr = 0.005, pe" in str(
        Diverged.at(3, "Oslo", PFedMe(), replace(federation, y=federation.y / 1000))
    )
    far = Diverged.at(3, "Oslo", ALGORITHMS["pfedhn"](local_lr=0.02, lr=1000.0), federation)
    assert "for example with --set lr=0.01" in str(far)


def poisoned(federation: Federation, client: int) -> Federation:
    """One client's training rows are so large that its loss overflows; its other rows are as they were."""
    x = federation.x.clone()
    x[federation.splits["train"].of(client)] *= 1e200
    return replace(federation, x=x)


def snapshot(state: State) -> Any:
    """The private memories of clients in `slots` only: making one early is no change."""
    return state.round, state.bytes_down, state.bytes_up, copy(memories_of(state))


def until_divergence(simulation: Simulation, state: State, number: int, client: int) -> Any:
    """Run into it; what the state was before that round."""
    seen = []
    with pytest.raises(Diverged, match=rf"round {number}\b.*client {client}\b"):
        seen.extend(snapshot(state) for _ in simulation.rounds(state))
    return seen[-1]


@pytest.mark.parametrize("executor", mostly_slow(EXECUTORS, "loop"))
@pytest.mark.parametrize(
    "spec", [ALGORITHMS["pfedhn-pc"](**SMALL), FedAvg(local_steps=2), PFedMe(outer_steps=2)], ids=repr
)
def test_divergence_names_round_and_client_and_leaves_the_state(
    federation: Federation, spec: Any, executor: str
) -> None:
    victim = 4
    simulation = simulate(spec, poisoned(federation, victim), cohort=2, rounds=30, executor=executor)
    expected = next(r for r in range(30) if victim in simulation.cohort(r))
    assert expected > 0
    state = simulation.initial_state()
    before = until_divergence(simulation, state, expected, victim)
    now = snapshot(state)
    assert now[:3] == before[:3]
    assert now[0] == expected
    assert_same_bits(now[3], before[3])


def test_divergence_in_the_second_group_of_a_round_leaves_the_state_too(federation: Federation) -> None:
    kinds = ["mlp"] * 3 + ["conv"] * 3
    models = {"mlp": model("mlp"), "conv": model("conv")}
    simulation = simulate(
        ALGORITHMS["pfedhn"](**SMALL, local_clip=None),
        poisoned(federation, 4).with_architectures(kinds),
        models,
        cohort=3,
    )
    expected = next(r for r in range(8) if 4 in simulation.cohort(r))
    assert {kinds[client] for client in simulation.cohort(expected)} == {"mlp", "conv"}
    state = simulation.initial_state()
    before = until_divergence(simulation, state, expected, 4)
    assert snapshot(state)[:3] == before[:3]
    assert_same_bits(snapshot(state)[3], before[3])


# What is remembered and counted


def without_evaluation_rows(federation: Federation, clients: list[int]) -> Federation:
    splits = dict(federation.splits)
    for split in ("validation", "test"):
        size = splits[split].size.clone()
        size[clients] = 0
        splits[split] = replace(splits[split], size=size)
    return replace(federation, splits=splits)


def test_private_memories_are_made_at_first_contact(federation: Federation) -> None:
    unseen = [0, 1, 2, 5]
    simulation = simulate(
        ALGORITHMS["pfedhn-pc"](**SMALL), without_evaluation_rows(federation, unseen), rounds=2, cohort=1
    )
    took_part = {client for r in range(2) for client in simulation.cohort(r)}
    state = finish(simulation)
    expected = took_part | ({*range(NUM_CLIENTS)} - {*unseen})
    assert expected != {*range(NUM_CLIENTS)}
    assert set(state.memories.private["mlp"].slots) == expected


@pytest.mark.parametrize("method", ["local", "fedper", "lg-fedavg", "pfedme"])
def test_whoever_is_met_later_starts_where_the_first_did(federation: Federation, method: str) -> None:
    """One client is tested and trains first: its memory must not be the initial model's, which others start from."""
    first = simulate(ALGORITHMS[method](), federation).cohort(0)[0]
    simulation = simulate(ALGORITHMS[method](), federation.evaluating([first]), rounds=1)
    state = simulation.initial_state()
    start = copy(state.memories.private["mlp"].make(5))
    finish(simulation, state)
    assert_same_bits(state.memories.private["mlp"].make(5), start)


def test_an_architecture_nobody_runs_costs_nothing(federation: Federation) -> None:
    models = {"mlp": model("mlp"), "conv": model("conv")}
    simulation = simulate(
        ALGORITHMS["pfedhn-pc"](**SMALL), federation.with_architectures(["mlp"] * NUM_CLIENTS), models, rounds=2
    )
    assert finish(simulation).memories.private["conv"].slots == {}


def num_bytes(shapes: Any, names: Any = None) -> int:
    return sum(8 * shape.numel() for name, shape in shapes.items() if names is None or name in names)


@pytest.mark.parametrize(
    ("spec", "per_client"),
    [
        (FedAvg(local_steps=1), num_bytes(model().shapes)),
        (ALGORITHMS["pfedhn"](**SMALL), num_bytes(model().shapes)),
        (ALGORITHMS["pfedhn-pc"](**SMALL), num_bytes(model().shapes, {"1.weight", "1.bias"})),
        (LGFedAvg(local_steps=1), num_bytes(model().shapes, {"3.weight", "3.bias"})),
        (Local(local_steps=1), 0),
    ],
    ids=["fedavg", "pfedhn", "pfedhn-pc", "lg-fedavg", "local"],
)
def test_bytes(federation: Federation, spec: Any, per_client: int) -> None:
    state = finish(simulate(spec, federation, rounds=3, cohort=2, evaluate_every=1))
    assert (state.bytes_down, state.bytes_up) == (3 * 2 * per_client, 3 * 2 * per_client)


def test_the_download_of_an_earlier_runs_model_is_counted(federation: Federation) -> None:
    starts = {"mlp": model().fresh(1)}
    simulation = simulate(LGFedAvg(local_steps=1), federation, starts=starts)
    assert simulation.initial_state().bytes_down == NUM_CLIENTS * num_bytes(model().shapes)
    assert_same_bits(simulation.initial_models(), starts)


def test_bytes_follow_the_architecture(federation: Federation) -> None:
    kinds = ["mlp", "conv", "wide"] * 2
    models = {name: model(name) for name in ("mlp", "conv", "wide")}
    simulation = simulate(
        ALGORITHMS["pfedhn"](**SMALL), federation.with_architectures(kinds), models, cohort=2, rounds=5
    )
    expected = sum(num_bytes(models[kinds[c]].shapes) for r in range(5) for c in simulation.cohort(r))
    assert finish(simulation).bytes_up == expected


# The chosen round


@pytest.mark.slow
def test_the_best_round_is_the_first_strictly_best_on_validation(federation: Federation) -> None:
    spec = ALGORITHMS["pfedhn"](hidden_dim=8, local_steps=5, local_lr=0.1, lr=0.3)
    simulation = simulate(spec, federation, rounds=25, evaluate_every=1, seed=2)
    state = simulation.initial_state()
    scores, seen = [], []
    for progress in simulation.rounds(state):
        assert progress.evaluation is not None
        validation = progress.evaluation.splits["validation"]
        correct = round(validation.score * int(validation.count.sum()))  # sample-weighted accuracy, as a whole number
        assert correct == int(validation.metric.sum())
        scores.append(correct)
        seen.append(copy(memories_of(state)))
    best = scores.index(max(scores))
    assert scores.count(max(scores)) > 1  # a later tie must not win
    assert 0 < best < len(scores) - 1
    assert state.best is not None
    assert state.best.evaluation.round == best
    kept = State(best, state.best.memories)
    shared, rows, private = seen[best]
    assert_same_bits(memories_of(kept), (simulation.exchange.for_use(shared), rows, private))


@pytest.mark.parametrize("averaging", [None, 0.9])
def test_the_best_round_keeps_nothing_that_only_training_needs(averaging: float | None, federation: Federation) -> None:
    """A copy of it crosses to the host whenever a round is the best so far, which is often at first."""
    spec = ALGORITHMS["pfedhn"](hidden_dim=8, local_steps=2, optimizer="adamw", averaging=averaging)
    simulation = simulate(spec, federation, rounds=4, evaluate_every=1)
    state = finish(simulation)
    assert state.best is not None
    kept, now = state.best.memories.shared, state.memories.shared
    assert [leaf.shape for leaf in pytree.tree_leaves(kept)] == [leaf.shape for leaf in pytree.tree_leaves(now)]
    newest = kept if averaging is None else kept.newest
    unused = (newest.velocity, newest.square, () if averaging is None else newest.phi)
    assert not any(any(leaf.stride()) for leaf in pytree.tree_leaves(unused))
    used = simulation.exchange.used(kept).phi
    assert all(leaf.any() for name, leaf in used.items() if name.endswith("weight"))


def test_the_best_round_of_a_person_s_own_method_keeps_all_of_it(federation: Federation) -> None:
    """It may read anything, and have numbers that are expanded."""

    class Tied(FedAvg):
        def receive(self, shared: Any, groups: Any) -> Any:
            new, rows = super().receive(shared, groups)
            name = next(name for name, value in new.items() if value.ndim == 1)
            return new | {name: new[name].mean().expand(new[name].shape)}, rows

    class Ahead(PFedHN):
        uses = Uses(published=("phi", "common"))  # its `publish` might read the velocity

    simulation = simulate(Tied(local_steps=3, local_lr=0.3), federation, rounds=8, evaluate_every=1, cohort=2)
    state, seen = simulation.initial_state(), []
    for _ in simulation.rounds(state):
        seen.append(copy(state.memories.shared))
    assert state.best is not None
    assert state.best.evaluation.round > 0
    assert_same_bits(state.best.memories.shared, seen[state.best.evaluation.round])
    own = finish(simulate(Ahead(**SMALL), federation, rounds=3)).best
    assert own is not None
    assert all(any(leaf.stride()) for leaf in pytree.tree_leaves(own.memories.shared.velocity))


def test_without_a_metric_the_loss_chooses(federation: Federation) -> None:
    plain = replace(model(), per_example_metric=None)
    simulation = simulate(FedAvg(local_steps=3, local_lr=0.3), federation, {"mlp": plain}, rounds=8, evaluate_every=1)
    state = simulation.initial_state()
    losses = [p.evaluation.splits["validation"].mean_loss for p in simulation.rounds(state) if p.evaluation]
    assert state.best is not None
    assert state.best.evaluation.round == losses.index(min(losses)) > 0


def test_without_validation_rows_the_last_round_is_chosen(federation: Federation) -> None:
    splits = dict(federation.splits)
    splits["validation"] = replace(splits["validation"], size=torch.zeros_like(splits["validation"].size))
    state = finish(simulate(FedAvg(local_steps=1), replace(federation, splits=splits), rounds=3, evaluate_every=1))
    assert state.best is not None
    assert state.best.evaluation.round == 3


def test_scores_of_clients_without_rows(federation: Federation) -> None:
    simulation = simulate(FedAvg(local_steps=1), without_evaluation_rows(federation, [2]), rounds=1)
    result = simulation.evaluate(finish(simulation))["test"]
    others = [i for i in range(NUM_CLIENTS) if i != 2]
    assert torch.isnan(result.client_metric[2])
    accuracy = result.metric[others] / result.count[others]
    assert_close(result.client_mean, float(accuracy.mean()))
    assert_close(result.sample_mean, float(result.metric[others].sum() / result.count[others].sum()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "executor"),
    mostly_slow(
        itertools.product(["per-fedavg", "pfedhn-pc"], [*EXECUTORS, "captured"]),
        ("per-fedavg", "loop"),
        ("per-fedavg", "captured"),
        ("pfedhn-pc", "vectorized"),
    ),
)
def test_a_client_with_many_rows_is_tested_in_parts(
    federation: Federation, method: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per-FedAvg adapts before it is tested: every part must see the same adapted model."""
    algorithm = ALGORITHMS[method](local_steps=2, local_lr=0.1)
    found = []
    for limit in (4, 9, 4096):
        monkeypatch.setattr(evaluate, "EXAMPLES_PER_CHUNK", limit)
        simulation = simulate(algorithm, federation, rounds=3, cohort=2, evaluate_every=2, executor=executor)
        assert max(chunk.index.numel() for chunk in simulation.chunks) <= limit
        evaluations = [p.evaluation for p in progress_of(simulation, simulation.initial_state()) if p.evaluation]
        found.append([evaluation.splits[split] for evaluation in evaluations for split in ("validation", "test")])
    for *parts, whole in zip(*found, strict=True):
        for part in parts:
            assert_close((part.loss, part.metric), (whole.loss, whole.metric))
            assert torch.equal(part.count, whole.count)


# Refusals


def test_settings_that_cannot_work_are_refused(federation: Federation) -> None:
    with pytest.raises(ValueError, match="cohort of 7 cannot be drawn from 6"):
        simulate(FedAvg(), federation, cohort=7)
    with pytest.raises(ValueError, match="no executor 'quick'"):
        simulate(FedAvg(), federation, executor="quick")
    with pytest.raises(ValueError, match="batch_size"):
        simulate(FedAvg(), federation, batch_size=0)
    with pytest.raises(ValueError, match=r"'fc9'.*it has 1, 3"):
        simulate(PFedHN(personal=("fc9",)), federation).initial_state()
    with pytest.raises(ValueError, match="nothing is left to generate or to share"):
        simulate(LGFedAvg(global_layers=()), federation).initial_state()


# Modules that nobody here wrote for


class Words(nn.Module):
    """A recurrent classifier over tokens with an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x))
        return self.out(states[:, -1])


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(x)).mean(1))


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
        self.scale = nn.Parameter(torch.tensor(1.0))  # a scalar

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)


def absolute_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - y).abs()


def sentences() -> Federation:
    """Most tokens of a sentence are of one of three kinds, and its label is which."""
    clients = []
    for client in range(4):
        key = keys.fold(1, client)
        y = (keys.uniform(keys.fold(key, "label"), 40) * 3).long()
        x = (keys.uniform(keys.fold(key, "any"), 40 * 7) * 9).long().reshape(40, 7)
        is_typical = keys.uniform(keys.fold(key, "typical"), 40 * 7).reshape(40, 7) < 0.8
        clients.append((torch.where(is_typical, x - x % 3 + y[:, None], x), y))
    return Federation.from_clients(clients)


def curves() -> Federation:
    clients = []
    for client in range(4):
        x = keys.normal(keys.fold(2, client), 40 * 4).reshape(40, 4).float()
        clients.append((x, (1 + client) * x[:, 0] - x[:, 1].abs()))
    return Federation.from_clients(clients)


FOREIGN: dict[str, Any] = {
    "lstm": (sentences, Words, cross_entropy, is_correct),
    "transformer": (sentences, Attention, cross_entropy, is_correct),
    "regressor": (curves, Regressor, absolute_error, None),
}


@pytest.fixture
def foreign(kind: str) -> tuple[Federation, dict[str, Model]]:
    make, factory, loss, metric = FOREIGN[kind]
    return make(), {kind: Model(kind, factory, loss, metric)}


@pytest.mark.parametrize("kind", mostly_slow(FOREIGN, "regressor"))
def test_any_module_learns_under_pfedhn(foreign: tuple[Federation, dict[str, Model]]) -> None:
    federation, models = foreign
    spec = ALGORITHMS["pfedhn"](lr=0.02, local_lr=0.05, local_steps=10, hidden_dim=20, num_hidden=1)
    simulation = simulate(spec, federation, models, rounds=40, batch_size=16)
    state = simulation.initial_state()
    losses = [p.evaluation.splits["validation"].mean_loss for p in simulation.rounds(state) if p.evaluation]
    assert losses[-1] < 0.9 * losses[0]
    for client, weights in enumerate(personal(simulation, state)):
        assert_same_shapes(weights, simulation.model_of(client))


def assert_same_shapes(weights: dict[str, Tensor], architecture: Model) -> None:
    assert {name: value.shape for name, value in weights.items()} == architecture.shapes


@pytest.mark.parametrize(
    ("method", "kind"),
    mostly_slow(
        itertools.product(ALGORITHMS, FOREIGN),
        *((method, "regressor") for method in ("pfedhn-pc", "per-fedavg", "pfedme")),
        ("fedavg", "lstm"),
        ("pfedhn", "transformer"),
    ),
)
def test_any_module_runs_under_every_method(foreign: tuple[Federation, dict[str, Model]], method: str) -> None:
    federation, models = foreign
    small = {"local_steps": 2, "outer_steps": 2, "hidden_dim": 5}
    spec = changed(ALGORITHMS[method](), small)
    if federation.y.is_floating_point() and any(spec.extras(network).num_labels for network in models.values()):
        with pytest.raises(UserError, match="counts the examples of each class, and the labels here are not classes"):
            finish(simulate(spec, federation, models, rounds=2, cohort=2, batch_size=8))
        return
    state = finish(simulate(spec, federation, models, rounds=2, cohort=2, batch_size=8))
    assert state.best is not None
    assert torch.isfinite(state.best.evaluation.splits["test"].loss).all()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.out = nn.Embedding(11, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.embed(x)).mean(1))


@pytest.mark.parametrize(
    ("network", "executor"),
    mostly_slow(
        [(Attention, "auto"), (Attention, "loop"), *((Dropping, name) for name in ("auto", "traced", "captured"))],
        (Attention, "auto"),
    ),
)
@pytest.mark.parametrize(
    "spec", [ALGORITHMS["pfedhn-pc"](**SMALL), PerFedAvg(local_steps=2)], ids=["pfedhn-pc", "per-fedavg"]
)
@pytest.mark.slow
def test_dropout_is_keyed(spec: Any, network: type[nn.Module], executor: str) -> None:
    """Same seed, same bits, whatever torch's own generator is at; clients and rounds draw different masks."""
    results = []
    for number in range(2):
        models = {"transformer": Model("transformer", network, cross_entropy, is_correct)}
        assert models["transformer"].has_dropout
        torch.manual_seed(number)
        before = torch.get_rng_state()
        simulation = simulate(spec, sentences(), models, rounds=4, cohort=2, executor=executor, batch_size=8)
        state = finish(simulation)
        assert torch.equal(torch.get_rng_state(), before)
        assert state.best is not None
        results.append((memories_of(state), state.best.evaluation.splits["test"].loss))
    assert_same_bits(*results)


@pytest.mark.slow
def test_dropout_does_not_depend_on_what_ran_before() -> None:
    """A run that goes on after a stop must draw the masks it would have drawn: a fresh trace must not use any up."""
    states = []
    for stops in ((), (2,)):
        state: State | None = None
        for rounds in (*stops, 5):
            models = {"transformer": Model("transformer", Dropping, cross_entropy, is_correct)}
            spec = FedAvg(local_steps=2)
            state = finish(simulate(spec, sentences(), models, rounds=rounds, executor="traced", batch_size=8), state)
        states.append(memories_of(state))
    assert_same_bits(*states)


def test_every_round_client_and_step_drops_other_units(federation: Federation) -> None:
    masks = []

    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(72, 4)

        def forward(self, x: Tensor) -> Tensor:
            mask = self.drop(torch.ones(72, dtype=x.dtype))
            if self.training:
                masks.append(tuple((mask > 0).tolist()))
            return self.out(x.flatten(1) * mask)

    models = {"recording": Model("recording", Recording, cross_entropy, is_correct, dtype=torch.float64)}
    finish(simulate(FedAvg(local_steps=3), federation, models, rounds=2, cohort=NUM_CLIENTS, executor="loop"))
    assert len(masks) == 2 * NUM_CLIENTS * 3 + 1  # once it was tried
    assert len(set(masks)) == len(masks)


def test_dropout_matters() -> None:
    """Were it off in training, or drawn once for all clients, the tests above could not tell."""
    ends = []
    for dropout in (0.0, 0.5):
        models = {"t": Model("t", lambda dropout=dropout: Attention(dropout), cross_entropy, is_correct)}
        assert models["t"].has_dropout == (dropout > 0)
        ends.append(memories_of(finish(simulate(FedAvg(local_steps=2), sentences(), models, rounds=1)))[0])
    assert not torch.equal(ends[0]["out.weight"], ends[1]["out.weight"])


def test_vectorized_refuses_draws_that_it_cannot_key() -> None:
    models = {"transformer": Model("transformer", Attention, cross_entropy, is_correct)}
    with pytest.raises(ValueError, match="draws in ways of its own"):
        finish(simulate(FedAvg(local_steps=1), sentences(), models, executor="vectorized"))


def test_frozen_parameters_and_buffers_are_constants(federation: Federation) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(72, 5).requires_grad_(False)
            self.register_buffer("shift", torch.full((5,), 0.5))
            self.out = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.frozen(x.flatten(1)) + self.shift).relu())

    partly = Model("partly", Partly, cross_entropy, is_correct, dtype=torch.float64)
    assert set(partly.shapes) == {"out.weight", "out.bias"}
    before = python_copy.deepcopy(partly.training_module.state_dict())
    simulation = simulate(ALGORITHMS["pfedhn"](**SMALL), federation, {"partly": partly}, rounds=3)
    weights = personal(simulation, finish(simulation))[0]
    assert set(weights) == {"out.weight", "out.bias"}
    assert_same_bits(partly.training_module.state_dict(), before)
    assert_same_bits(
        dict(partly.with_weights(weights).named_parameters())["out.weight"].detach(), weights["out.weight"]
    )
