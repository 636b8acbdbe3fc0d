"""Defenses against hostile updates: what counts of each, and that a run with one stops, resumes and is told apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import assert_same_bits, finish, make_federation, memories_of, model, simulate, with_steps

from pfedhn.deploy.plan import plan_digest
from pfedhn.engine.attack import Attack
from pfedhn.engine.robust import (
    NUM_TIMES,
    ROBUST,
    AdaptiveNorm,
    CoordinateMedian,
    PerParty,
    Robust,
    Seen,
    TrimmedMean,
    find_robust,
)
from pfedhn.engine.rounds import is_captured
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.engine.transform import TRANSFORMS
from pfedhn.errors import UserError
from pfedhn.params import subtract
from pfedhn.storage.checkpoint import load_state, save_state


@pytest.fixture(scope="module")
def federation() -> Any:
    return make_federation()


def test_an_update_is_scaled_to_the_median_of_the_others() -> None:
    robust = AdaptiveNorm(factor=3.0)
    parts, past = robust.parts({}, Seen({"a": 1.0, "b": 2.0, "c": 4.0, "d": 90.0}, 4))
    assert parts == {"a": 1.0, "b": 1.0, "c": 1.0, "d": pytest.approx(3.0 * 2.0 / 90.0)}  # of a, b, c
    parts, past = robust.parts(past, Seen({"b": 8.0}, 4))
    assert parts == {"b": 1.0}  # of a, c, d: 4
    parts, _ = robust.parts(past, Seen({"a": 30.0}, 4))
    assert parts == {"a": pytest.approx(3.0 * 8.0 / 30.0)}  # the latest of b counts


def test_no_update_counts_before_enough_others_are_known() -> None:
    past: Any = {}
    found = []
    for name in ("a", "b", "c", "d"):
        parts, past = AdaptiveNorm().parts(past, Seen({name: 1.0}, 5))
        found.append(parts[name])
    assert found == [0.0, 0.0, 1.0, 1.0]
    # One large norm among two others does not set the bound.
    parts, _ = AdaptiveNorm(factor=2.0).parts({}, Seen({"a": 1.0, "b": 3.0, "c": 100.0}, 3))
    assert parts == {"a": 1.0, "b": pytest.approx(2 / 3), "c": pytest.approx(2 / 100)}


def test_a_norm_fades() -> None:
    robust = AdaptiveNorm(factor=1.0, keeps=0.5)
    _, past = robust.parts({}, Seen({"a": 8.0, "b": 8.0, "c": 8.0}, 3))
    _, past = robust.parts(past, Seen({"a": 1.0, "b": 1.0}, 3))
    parts, _ = robust.parts(past, Seen({"c": 8.0}, 3))
    assert parts == {"c": 0.5}


def test_a_party_that_is_too_large_again_and_again_counts_less() -> None:
    past: Any = {}
    robust, found = PerParty(factor=2.0, keeps=0.0, memory=0.5), []
    for _ in range(3):
        parts, past = robust.parts(past, Seen({"a": 1.0, "b": 1.0, "c": 8.0}, 3))
        found.append(parts["c"])
        assert parts["a"] == parts["b"] == 1.0
    kept = [(1 + 0.25) / 2]
    kept += [(kept[0] + 0.25) / 2]
    kept += [(kept[1] + 0.25) / 2]
    assert found == pytest.approx([0.25 * part**2 for part in kept])
    for _ in range(6):
        parts, past = robust.parts(past, Seen({"a": 1.0, "b": 1.0, "c": 1.0}, 3))
    assert parts["c"] > 0.95  # it recovers


def test_a_party_that_sends_too_often_counts_less() -> None:
    past: Any = {}
    robust = PerParty(most_often=2.0)
    _, past = robust.parts(past, Seen({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, 4))
    for _ in range(NUM_TIMES):
        parts, past = robust.parts(past, Seen({"a": 1.0}, 4))
    assert parts["a"] == pytest.approx(2.0 / 4)  # all of the last updates are its own
    parts, _ = robust.parts(past, Seen({"b": 1.0}, 4))
    assert parts["b"] == 1.0


def test_trimmed_mean_and_median_are_those_of_numpy() -> None:
    values = torch.randn(5, 3, 2, dtype=torch.float64)
    ordered = numpy.sort(values.numpy(), axis=0)
    trimmed = TrimmedMean(trim=0.2).combined({"w": values})["w"]
    median = CoordinateMedian().combined({"w": values})["w"]
    for place in range(5):
        numpy.testing.assert_allclose(trimmed[place], ordered[1:4].mean(0), rtol=1e-12)
        numpy.testing.assert_allclose(median[place], numpy.median(values.numpy(), axis=0), rtol=1e-12)
    two = TrimmedMean().combined({"w": values[:2]})["w"]
    numpy.testing.assert_allclose(two[0], values[:2].numpy().mean(0), rtol=1e-12)  # nothing to trim
    four = CoordinateMedian().combined({"w": values[:4]})["w"]
    numpy.testing.assert_allclose(four[0], numpy.median(values[:4].numpy(), axis=0), rtol=1e-12)


def distance(one: State, other: State) -> float:
    gaps = subtract(one.memories.shared, other.memories.shared)
    return float(sum(gap.square().sum() for gap in gaps.values()) ** 0.5)


def attacked(federation: Any, robust: Robust | None, kind: Any = "scale") -> Simulation:
    attack = Attack(kind, clients=(2,))  # with the most examples
    return simulate(with_steps("fedavg", 2), federation, rounds=3, cohort=6, robust=robust, attack=attack)


@pytest.mark.parametrize("name", ROBUST)
def test_each_defense_keeps_a_hostile_client_near_the_run_without_it(federation: Any, name: str) -> None:
    honest, open_ = finish(attacked(federation, None, "none")), finish(attacked(federation, None))
    defended = finish(attacked(federation, ROBUST[name]))
    assert distance(open_, honest) > 100
    assert distance(defended, honest) < 3


def test_a_defense_that_takes_all_changes_nothing(federation: Any) -> None:
    plain = simulate(with_steps("pfedhn-pc", 2), federation, rounds=6, cohort=2)
    guarded = replace(plain, robust=AdaptiveNorm(factor=1e6))
    state = guarded.initial_state()
    state.robust = {"parties": {str(client): {"norm": 1.0} for client in range(federation.num_clients)}}
    assert_same_bits(memories_of(finish(guarded, state)), memories_of(finish(plain)))


def test_hostile_clients_send_what_they_are_meant_to() -> None:
    update, weights = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert Attack("none").sent(update, weights, 0)["w"].tolist() == [3.0, 4.0]
    assert Attack("flip").sent(update, weights, 0)["w"].tolist() == [-3.0, -4.0]
    scaled = Attack("scale", bound=5.0).sent(update, weights, 0)["w"]
    assert scaled.tolist() == pytest.approx([-0.999 * 15 * 0.6, -0.999 * 15 * 0.8])
    made = Attack("random", bound=5.0).sent(update, weights, 0)["w"]
    assert float(made.norm()) == pytest.approx(0.999 * 15)
    with pytest.raises(UserError, match="numbers from 0 to 1, not all"):
        Attack(clients=(0, 1)).honest(2)


def test_a_run_with_a_defense_resumes_with_the_same_bits(federation: Any, tmp_path: Path) -> None:
    simulation = simulate(with_steps("pfedhn-pc", 2), federation, rounds=8, cohort=1, robust=PerParty())
    whole, state = finish(simulation), simulation.initial_state()
    for _ in simulation.rounds(state):
        if state.round == 5:
            break
    save_state(tmp_path, state, simulation)
    again = load_state(tmp_path, simulation).state
    assert again is not None
    assert again.robust == state.robust
    assert len(again.robust["parties"]) > 1
    assert_same_bits(memories_of(finish(simulation, again)), memories_of(whole))
    assert again.robust == whole.robust


def test_networks_of_several_sizes_are_compared(federation: Any) -> None:
    architectures = ["mlp", "wide"] * 3
    simulation = simulate(
        with_steps("pfedhn", 2), federation.with_architectures(architectures),
        {"mlp": model("mlp"), "wide": model("wide")}, rounds=4, cohort=6, robust=AdaptiveNorm(),
        attack=Attack("scale", clients=(1,)),
    )  # fmt: skip
    state = finish(simulation)
    assert state.robust["parts"]["1"] < 0.1
    assert min(part for name, part in state.robust["parts"].items() if name != "1") > 0.1


def test_a_defense_is_part_of_a_plan_and_runs_outside_of_graphs(federation: Any) -> None:
    plain = simulate(with_steps("fedavg", 2), federation, cohort=3, executor="captured")
    digests = {plan_digest(plain)}
    for robust in (*ROBUST.values(), AdaptiveNorm(factor=3.0)):
        defended = replace(plain, robust=robust)
        digests.add(plan_digest(defended))
        assert not is_captured(defended)
    assert is_captured(plain)
    assert len(digests) == 2 + len(ROBUST)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("adaptive", "did you mean 'adaptive-norm'"),
        ({"factor": 2.0}, "robust needs a rule"),
        ({"rule": "adaptive-norm", "factr": 2.0}, "did you mean 'factor'"),
        ({"rule": "adaptive-norm", "factor": 0.5}, "at least 1"),
        ({"rule": "trimmed-mean", "trim": 0.5}, "at most 0.49"),
        ({"rule": "none"}, "there is no defense 'none'"),
        (3, "a defense is given as 3"),
    ],
)
def test_a_defense_that_cannot_be_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        find_robust(given)


def test_a_defense_by_name_and_by_table() -> None:
    assert find_robust("none") is find_robust(None) is None
    assert find_robust("median") == CoordinateMedian()
    assert find_robust({"rule": "per-party", "factor": 4}) == PerParty(factor=4)
    assert find_robust(TrimmedMean(0.1)) == TrimmedMean(0.1)


@pytest.mark.parametrize(
    ("method", "cohort", "change", "sentence"),
    [
        ("pfedhn", 5, {"robust": TrimmedMean()}, "takes a step for each client"),
        ("fedavg", 2, {"robust": TrimmedMean()}, "at least 3 updates in a step"),
        ("local", 6, {"robust": AdaptiveNorm()}, "sends no updates"),
        ("fedavg", 2, {"attack": Attack(), "upload": TRANSFORMS["half"]}, "full updates alone"),
    ],
)
def test_a_defense_that_would_do_nothing_is_refused(
    federation: Any, method: str, cohort: int, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        simulate(with_steps(method, 2), federation, cohort=cohort, **change)
