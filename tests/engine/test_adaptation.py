"""What the engine offers to every method: an average of what is served, and a client's own steps at the end."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, assert_same_bits, changed, finish, model, mostly_slow, personal, simulate
from torch.nn.functional import cross_entropy

import pfedhn
from pfedhn import keys
from pfedhn.algorithm import FineTuning, Uses
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.find import REPLACED, build_algorithm
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.combinators import WithStatistics, fine_tuned, num_fine_tuning_steps, published_part, with_settings
from pfedhn.data.federation import Federation
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.rounds import scores_of_adapted
from pfedhn.engine.state import Best, Evaluation
from pfedhn.errors import UserError
from pfedhn.settings import values_of
from pfedhn.sgd import SGD
from pfedhn.storage.files import sealed_json, unsealed_json

SMALL = {"local_steps": 3, "hidden_dim": 7, "embedding_dim": 3, "local_lr": 0.1, "outer_steps": 3, "mixture_steps": 2}


def small(method: str, **settings: Any) -> Any:
    return changed(ALGORITHMS[method](**settings), SMALL)


# One row of each class: the others differ in settings alone.
KINDS = list({known.algorithm: name for name, known in reversed(ALGORITHMS.items())}.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", KINDS)
def test_adaptation_is_the_clients_own_sgd(federation: Federation, method: str) -> None:
    if method.startswith("per-fedavg"):
        spec = small(method, adaptation_steps=4, personal_lr=0.2)
    else:
        spec = small(method, adaptation_steps=4)
    simulation = simulate(spec, federation, rounds=6, cohort=2)
    state = finish(simulation)
    client, algorithm = 3, simulation.algorithm
    found = simulation.personal_weights(state.memories, simulation.model_of(client), client, state.round, True)

    start = personal(simulation, state)[client]
    count = algorithm.num_personalize_batches
    key = keys.fold(simulation.seed, "personalise", state.round)
    batches = federation.batches(torch.tensor([client]), key, count + 4, simulation.schedule.batch_size)
    net = model("mlp").training_module
    net.load_state_dict(start)
    sgd = algorithm.fine_tuning.sgd
    optimizer = torch.optim.SGD(net.parameters(), sgd.lr, sgd.momentum, weight_decay=sgd.weight_decay)
    for step in range(count, count + 4):
        x, y, mask = (value[0, step] for value in batches)
        optimizer.zero_grad()
        cross_entropy(net(x[mask]), y[mask]).backward()
        if sgd.clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), sgd.clip)
        optimizer.step()
    assert_close(found, {name: value.detach() for name, value in net.named_parameters()})
    assert any(not torch.equal(found[name], value) for name, value in start.items())


@pytest.mark.parametrize("method", mostly_slow(["fedavg-ft", "per-fedavg", "pfedhn-plus-pc"], "fedavg-ft"))
@pytest.mark.slow
def test_every_executor_adapts_alike(federation: Federation, method: str) -> None:
    found = []
    for executor in ("loop", "traced", "vectorized", "captured"):
        simulation = simulate(
            small(method, adaptation_steps=3), federation, "conv", rounds=3, cohort=2, executor=executor
        )
        state = simulation.initial_state()
        run = CapturedRun(simulation, state).rounds() if executor == "captured" else simulation.rounds(state)
        for _ in run:
            pass
        best = Best(Evaluation(6, 3, {}), state.memories)
        scores = scores_of_adapted(simulation, best)
        found.append({split: (part.loss, part.metric) for split, part in scores.items()})
        before = simulation.scores(state.memories, 3)
        assert not torch.equal(before["test"].loss, scores["test"].loss)
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in KINDS if ALGORITHMS[method]().uses != Uses(published=())])
def test_averaging_does_not_touch_training(federation: Federation, method: str) -> None:
    """What is trained is the same to the bit; what is served is the average of it."""
    plain = simulate(small(method, averaging=None), federation, rounds=5, cohort=2)
    averaged = simulate(small(method, averaging=0.6), federation, rounds=5, cohort=2)
    trained, both = finish(plain), finish(averaged)
    assert_same_bits(both.memories.shared.newest, trained.memories.shared)
    assert_same_bits(both.memories.rows, trained.memories.rows)
    if method == "local":
        return  # its server has nothing to average
    used = averaged.exchange.used(both.memories.shared)
    assert_same_bits(published_part(plain.algorithm, used), both.memories.shared.average)

    state, average = plain.initial_state(), None
    for number, _ in enumerate(plain.rounds(state)):
        part = published_part(plain.algorithm, state.memories.shared)
        keep = 0.0 if number == 0 else min(0.6, number / (9 + number))  # the first is the start
        average = {name: keep * (average or part)[name] + (1 - keep) * value for name, value in part.items()}
    assert_close(both.memories.shared.average, average)


@pytest.mark.parametrize("method", ["local", "ditto", "pfedme"])
def test_an_own_model_is_averaged_where_it_is_kept(federation: Federation, method: str) -> None:
    """What is trained is the same to the bit; a client uses the average of the models it had, one for each training."""
    plain = simulate(small(method), federation, rounds=6, cohort=2)
    averaged = simulate(fine_tuned(pfedhn.averaged(small(method), 0.6), 2), federation, rounds=6, cohort=2)
    state, own = plain.initial_state(), {}
    counts = dict.fromkeys(range(6), 0)
    for number, _ in enumerate(plain.rounds(state)):
        now = personal(plain, state)
        if number == 0:
            starts = plain.initial_models()["mlp"]
            own = dict.fromkeys(range(6), starts)
            continue
        members = range(6) if method == "local" else plain.cohort(number - 1)
        for client in members:
            keep = min(0.6, (1 + counts[client]) / (10 + counts[client]))
            own[client] = {n: keep * own[client][n] + (1 - keep) * value for n, value in now[client].items()}
            counts[client] += 1
    after = finish(averaged)
    assert max(counts.values()) > 1
    found = personal(averaged, after)
    for client, count in counts.items():
        if count:
            assert_close(found[client], own[client])
    kept = after.memories.private["mlp"]
    trained = state.memories.private["mlp"]
    assert_same_bits(kept.take(list(kept.slots)).private.newest, trained.take(list(kept.slots)).private)


def test_the_past_counts_less_at_first(federation: Federation) -> None:
    """A long memory would keep the random start: after 8 of 8 rounds most of the average is younger than the start."""
    simulation = simulate(pfedhn.averaged(FedAvg(local_lr=0.1), 0.999), federation, rounds=8)
    start = simulation.initial_models()["mlp"]
    state = finish(simulation)
    shared = state.memories.shared
    moved = {name: (shared.newest[name] - value).norm() for name, value in start.items()}
    assert all((shared.average[name] - start[name]).norm() > 0.3 * moved[name] for name in start)


def network() -> torch.nn.Module:
    return pfedhn.MLP(8, 6, 4)


@pytest.mark.slow
def test_a_run_is_chosen_unadapted_and_judged_adapted(tmp_path: Path) -> None:
    x, y = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 4
    federation = Federation.from_arrays(x + y[:, None], y, partition=pfedhn.by_classes(2, num_clients=8))
    common = {"steps": 30, "evaluate_every": 10, "progress": False, "batch_size": 8}
    plain = pfedhn.train(FedAvg(), federation, network, **common)
    tuned = pfedhn.train(fine_tuned(FedAvg(), 20), federation, network, directory=tmp_path, **common)
    assert plain.result is not None
    assert tuned.result is not None
    assert tuned.result.unadapted is not None
    assert tuned.chosen.step == plain.chosen.step
    assert tuned.result.unadapted.test == plain.result.test
    assert tuned.result.test.client_mean > plain.result.test.client_mean + 0.1
    right = []
    for client in range(8):
        rows = federation.splits["test"].of(client)
        outputs = tuned.personal_model(client)(federation.x[rows])
        right.append(float((outputs.argmax(-1) == federation.y[rows]).double().mean()))
    assert tuned.accuracy.tolist() == pytest.approx(right)
    loaded = pfedhn.load(tmp_path)
    assert loaded.accuracy.tolist() == tuned.accuracy.tolist()
    with pytest.raises(UserError, match="data="):
        loaded.personal_model(0)
    own = federation.splits["train"].of(0)
    assert_same_bits(loaded.personal_weights(0, data=(federation.x[own], federation.y[own])), tuned.personal_weights(0))


def test_steps_that_make_clients_worse_on_validation_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 4
    x = x + y[:, None]
    federation = Federation.from_arrays(x, y, partition=pfedhn.dirichlet(100.0, num_clients=8))
    common = {"steps": 30, "evaluate_every": 10, "progress": False, "batch_size": 8}
    plain = pfedhn.train(FedAvg(local_lr=0.1), federation, network, **common)
    spoiling = FineTuning(SGD(1.0, weight_decay=1.0))  # weights become minus their gradient
    monkeypatch.setattr(FedAvg, "fine_tuning", spoiling)
    tuned = pfedhn.train(
        fine_tuned(FedAvg(local_lr=0.1), 20), federation, network, directory=tmp_path / "run", **common
    )
    assert plain.result is not None
    assert tuned.result is not None
    assert tuned.result.adapted is not None
    assert tuned.result.adapted.validation.score < tuned.result.validation.score == plain.result.validation.score
    assert tuned.result.unadapted is not None
    assert tuned.result.test == tuned.result.unadapted.test == plain.result.test
    assert not tuned.adapts
    assert_same_bits(tuned.personal_weights(0), plain.personal_weights(0))
    loaded = pfedhn.load(tmp_path / "run")
    assert loaded.accuracy.tolist() == tuned.accuracy.tolist() == plain.accuracy.tolist()
    assert_same_bits(loaded.personal_weights(0), plain.personal_weights(0))  # and no examples are asked for
    rows = (y < 2).nonzero()[:60, 0]
    given = {"rounds": 2, "split": (0.5, 0.2, 0.3)}
    assert_same_bits(
        tuned.add_client(x[rows], y[rows], **given).weights, plain.add_client(x[rows], y[rows], **given).weights
    )


def test_a_run_of_an_earlier_version_is_loaded_with_the_models_that_validation_prefers(tmp_path: Path) -> None:
    x, y = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 4
    federation = Federation.from_arrays(x + y[:, None], y, partition=pfedhn.by_classes(2, num_clients=8))
    run = pfedhn.train(
        fine_tuned(FedAvg(), 5), federation, network, directory=tmp_path, steps=10, progress=False, batch_size=8
    )
    assert run.adapts
    assert run.result is not None
    assert run.result.unadapted is not None
    file = tmp_path / "result.json"
    table = unsealed_json(file.read_bytes())
    table["unadapted"]["validation"]["sample_mean"] = 1.0
    file.write_bytes(sealed_json(table))
    loaded = pfedhn.load(tmp_path)
    assert not loaded.adapts
    assert loaded.result is not None
    assert loaded.result.test == run.result.unadapted.test


@pytest.mark.slow
def test_a_client_that_joins_adapts_too() -> None:
    x, y = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 4
    federation = Federation.from_arrays(x + y[:, None], y, partition=pfedhn.by_classes(2, num_clients=8))
    algorithm = fine_tuned(pfedhn.averaged(PFedHN(hidden_dim=8), 0.9), 20)
    run = pfedhn.train(algorithm, federation, network, steps=20, progress=False, batch_size=8)
    rows = (y < 2).nonzero()[:60, 0]
    joined = run.add_client(x[rows] + y[rows, None], y[rows], rounds=2, split=(0.5, 0.2, 0.3))
    test = Federation.from_clients([(x[rows] + y[rows, None], y[rows])], split=(0.5, 0.2, 0.3), seed=0)
    kept = test.splits["test"].of(0)
    outputs = joined.model(test.x[kept].float())
    assert joined.accuracy == pytest.approx(float((outputs.argmax(-1) == test.y[kept]).double().mean()))


def test_a_method_that_cannot_fine_tune_says_so() -> None:
    class Silent(FedAvg):
        fine_tuning = None

    with pytest.raises(UserError, match="Silent does not say how its clients fine-tune"):
        fine_tuned(Silent(), 3)


def test_a_method_that_ignores_its_number_of_steps_says_so() -> None:
    @dataclass(frozen=True)
    class Deaf(FedAvg):
        adaptation_steps: int = 0

    with pytest.raises(UserError, match="its property fine_tuning takes 0 steps when it is 7"):
        fine_tuned(Deaf(), 7)
    assert num_fine_tuning_steps(fine_tuned(pfedhn.FedBABU(), 3)) == 3


def test_a_combinator_of_ones_own_is_not_dropped() -> None:
    @dataclass(frozen=True)
    class Noisy(WithStatistics):
        pass

    with pytest.raises(UserError, match="Noisy wraps FedAvg but is none of pfedhn's combinators"):
        pfedhn.averaged(Noisy(FedAvg()), 0.9)


def test_combinators_are_settings_of_every_method() -> None:
    method = pfedhn.with_statistics(fine_tuned(pfedhn.averaged(pfedhn.Ditto(strength=2.0), 0.9), 7), "shared", 3)
    around = {"averaging": 0.9, "adaptation_steps": 7, "statistics": "shared", "statistics_batches": 3}
    assert ALGORITHMS["ditto"](strength=2.0, **around) == method
    assert around.items() <= values_of(method).items()
    assert with_settings(method, {"averaging": None, "adaptation_steps": 0, "local_lr": 0.5}) == pfedhn.with_statistics(
        pfedhn.Ditto(strength=2.0, local_lr=0.5), "shared", 3
    )
    with pytest.raises(UserError, match="no effect for a method that sends nothing"):
        pfedhn.with_statistics(pfedhn.Local(), "shared").for_clients(3)


def test_members_of_earlier_versions_are_refused() -> None:
    @dataclass(frozen=True)
    class Old(FedAvg):
        communicates = False

    with pytest.raises(
        UserError, match=r"Old has .communicates., which has no effect since version 0\.2; use the prop"
    ):
        build_algorithm(fine_tuned(Old(), 2))
    assert not [name for name, known in ALGORITHMS.items() if any(hasattr(known.algorithm, old) for old in REPLACED)]


def test_rows_that_are_made_without_the_shared_memory_are_refused() -> None:
    @dataclass(frozen=True)
    class Old(FedAvg):
        def init_row(self, key: Any, descriptor: Any) -> Any:  # type: ignore[override]
            return ()

    with pytest.raises(
        UserError, match=r"Old.init_row takes \(key, descriptor\); since version 0\.2 the server's shared"
    ):
        build_algorithm(Old())
