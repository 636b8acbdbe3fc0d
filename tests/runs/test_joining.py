"""A client that joins a trained run: the settings it learns with are chosen on its validation examples, or given."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from support import assert_same_bits

import pfedhn
from pfedhn.algorithms.embeddings import JOINING_FACTORS
from pfedhn.algorithms.find import AnyAlgorithm, method_of
from pfedhn.algorithms.method import Method
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Diverged
from pfedhn.errors import UserError
from pfedhn.params import copy
from pfedhn.runs import joining
from pfedhn.runs.joining import NewClients
from pfedhn.runs.run import Run

STANDS_STILL, LEARNS, DIVERGES = ({"local_lr": rate} for rate in (0.0, 0.1, 1e30))


@dataclass(frozen=True)
class Choosy(pfedhn.Local):
    """Training that goes nowhere, so that a client which joins has something to choose."""

    local_lr: float = 0.0
    local_steps: int = 5


CHOOSY = Method("Choosy", Choosy, joining=lambda algorithm: [STANDS_STILL, DIVERGES, LEARNS])


@pytest.fixture(autouse=True)
def choosy_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    known = joining.method_of
    monkeypatch.setattr(joining, "method_of", lambda method: CHOOSY if isinstance(method, Choosy) else known(method))


def examples(count: int, seed: int = 0) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Four classes that a linear network tells apart."""
    y = numpy.arange(count) % 4
    noise = numpy.random.default_rng(seed).normal(size=(count, 4))
    return (numpy.eye(4)[y] * 3 + noise).astype("float32"), y


def trained(method: str | AnyAlgorithm, steps: int = 6, **changes: Any) -> Run:
    federation = Federation.from_arrays(*examples(240), pfedhn.by_classes(2, num_clients=6))
    return pfedhn.train(
        method, federation, lambda: pfedhn.MLP(4, 6, 4), steps=steps, executor="loop", progress=False, **changes
    )


def alone(seed: int = 1) -> Federation:
    """A federation of the one client that joins."""
    return Federation.from_arrays(*examples(80, seed), pfedhn.by_classes(4, num_clients=1), split=(0.5, 0.25, 0.25))


@pytest.fixture(scope="module")
def choosy() -> Run:
    return trained(Choosy())


@pytest.fixture(scope="module")
def generator() -> Run:
    return trained(pfedhn.PFedHN(local_steps=1), steps=1)


def test_the_best_of_a_method_s_choices_joins_and_one_that_diverges_is_survived(choosy: Run) -> None:
    new = choosy.add_client(*examples(80, 1), rounds=12, name="Oslo")
    assert new.settings == LEARNS
    assert [choice for choice, _ in new.tried] == [STANDS_STILL, DIVERGES, LEARNS]
    still, diverged, learned = (score for _, score in new.tried)
    assert diverged == -math.inf < still < learned
    given = choosy.add_client(*examples(80, 1), rounds=12, name="Oslo", settings=LEARNS)
    assert given.tried == []
    assert (given.settings, given.round) == (LEARNS, new.round)
    assert_same_bits(new.weights, given.weights)  # all rounds, not those of the trial
    assert new.accuracy > choosy.add_client(*examples(80, 1), rounds=12, name="Oslo", settings={}).accuracy


def test_a_run_stays_as_it_was_when_a_client_joins() -> None:
    run = trained(pfedhn.PFedHN(local_steps=3))
    before, weights = copy((run.memories().shared, run.memories().rows)), run.personal_weights(0)
    first, second = (run.add_clients(alone(), rounds=2).personal_weights(0) for _ in range(2))
    assert_same_bits((run.memories().shared, run.memories().rows), before)
    assert_same_bits(run.personal_weights(0), weights)
    assert_same_bits(first, second)


@pytest.mark.slow
def test_trials_are_short_and_one_of_all_rounds_is_not_run_again(choosy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    joining = Simulation.joining

    def counted(self: Simulation, federation: Federation, memories: Any, rounds: int, seed: int) -> Simulation:
        lengths.append(rounds)
        return joining(self, federation, memories, rounds, seed)

    monkeypatch.setattr(Simulation, "joining", counted)
    for rounds, expected in ((12, [10, 10, 10, 12]), (3, [3, 3, 3]), (0, [1])):
        lengths.clear()
        choosy.add_client(*examples(80, 1), rounds=rounds)
        assert lengths == expected
    lengths.clear()
    choosy.add_clients(alone(), rounds=12, trial_rounds=12)
    assert lengths == [12, 12, 12]


def test_the_choice_is_made_on_validation_examples_alone(choosy: Run) -> None:
    def scores(spoiled: str | None) -> list[float]:
        data = alone()
        if spoiled is not None:
            data.y[data.splits[spoiled].of(0)] = torch.randint(4, (len(data.splits[spoiled].of(0)),))
        return [score for _, score in choosy.add_clients(data, rounds=2).tried]

    torch.manual_seed(0)
    assert scores("test") == scores(None)
    assert scores("validation") != scores(None)


def test_of_equal_choices_the_first_is_taken(choosy: Run) -> None:
    data = alone()
    data.y[data.splits["validation"].of(0)] = 3
    data.y[data.splits["train"].of(0)] = 0  # whoever learns this is right no more often
    joined = choosy.add_clients(data, rounds=2)
    assert joined.tried[0][1] == joined.tried[2][1]
    assert joined.settings == STANDS_STILL


def test_where_nothing_can_be_chosen_a_client_joins_as_in_training(choosy: Run) -> None:
    for changes in ({"split": (0.8, 0.0, 0.2)}, {"rounds": 0}):
        new = choosy.add_client(*examples(80, 1), **{"rounds": 2, **changes})  # type: ignore[arg-type]
        assert (new.settings, new.tried) == ({}, [])


def test_a_choice_that_diverges_later_gives_way_to_the_next(choosy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    join = joining._join

    def diverging_late(*given: Any) -> NewClients:
        rounds, settings = given[3:5]
        if rounds == 12 and settings == LEARNS:
            raise Diverged("in round 11")
        return join(*given)

    monkeypatch.setattr(joining, "_join", diverging_late)
    assert choosy.add_client(*examples(80, 1), rounds=12).settings == STANDS_STILL


def test_outputs_that_are_no_numbers_win_no_choice(choosy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their accuracy is that of class 0, which may be all that a client has."""
    join = joining._join

    def without_numbers(*given: Any) -> NewClients:
        joined = join(*given)
        if given[4] != LEARNS:
            return joined
        validation = joined.splits["validation"]
        spoiled = replace(validation, loss=validation.loss * math.nan, metric=validation.count)
        return replace(joined, splits={**joined.splits, "validation": spoiled})

    monkeypatch.setattr(joining, "_join", without_numbers)
    new = choosy.add_client(*examples(80, 1), rounds=12)
    assert new.settings == STANDS_STILL
    assert dict((str(choice), score) for choice, score in new.tried)[str(LEARNS)] == -math.inf


def test_where_every_choice_diverges_it_is_said_as_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(Choosy())
    both = replace(CHOOSY, joining=lambda algorithm: [DIVERGES, DIVERGES])
    monkeypatch.setattr(joining, "method_of", lambda method: both)
    run.plan = replace(run.plan, algorithm=Choosy(**DIVERGES))
    with pytest.raises(Diverged, match="training diverged in round 0"):
        run.add_client(*examples(80, 1), rounds=12)


@pytest.mark.parametrize(
    "method", ["fedper", pfedhn.ALGORITHMS["pfedhn"](embedding="fixed", local_steps=3)], ids=["fedper", "fixed"]
)
def test_a_method_without_choices_joins_once(method: str | AnyAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(method)
    assert method_of(run.plan.algorithm).choices_for_joining(run.plan.algorithm) == []
    expected = run.add_client(*examples(80, 1), rounds=3, settings={})
    joined = []
    join = joining._join
    monkeypatch.setattr(joining, "_join", lambda *given: joined.append(given[3:5]) or join(*given))
    new = run.add_client(*examples(80, 1), rounds=3)
    assert joined == [(3, {})]
    assert (new.settings, new.tried) == ({}, [])
    assert_same_bits((new.weights, new.row, new.private), (expected.weights, expected.row, expected.private))


@pytest.mark.parametrize(("method", "rate"), [("pfedhn", 1e-2), ("pfedhn-plus-pc", 0.03)])
def test_pfedhn_tries_larger_rates_of_the_embedding(method: str, rate: float) -> None:
    run = trained(pfedhn.ALGORITHMS[method](local_steps=2), steps=2)
    choices = method_of(run.plan.algorithm).choices_for_joining(run.plan.algorithm)
    assert [choice["embedding_lr"] / rate for choice in choices] == pytest.approx(JOINING_FACTORS)
    as_trained, first = (run.add_client(*examples(40, 1), rounds=1, settings=given) for given in ({}, choices[0]))
    assert_same_bits(first.weights, as_trained.weights)


def test_an_embedding_that_stood_still_in_training_has_no_rate_to_multiply() -> None:
    algorithm = pfedhn.ALGORITHMS["pfedhn"](embedding_lr=0.0).for_clients(4)
    assert pfedhn.ALGORITHMS["pfedhn"].joining(algorithm) == []


@pytest.mark.slow
def test_a_larger_rate_serves_a_client_whose_embedding_has_far_to_go() -> None:
    """Half of the clients call every class by the number of another, which only an embedding can say."""
    x, y = examples(480)
    who = numpy.arange(480) // 4 % 8
    federation = Federation.from_arrays(x, (y + who % 2 * 2) % 4, pfedhn.by_group(), groups=who)
    sizes = {"embedding_dim": 4, "hidden_dim": 20, "num_hidden": 1}
    method = pfedhn.ALGORITHMS["pfedhn"](lr=0.1, local_lr=0.1, embedding_lr=1e-3, local_steps=10, **sizes)
    run = pfedhn.train(
        method, federation, lambda: pfedhn.MLP(4, 4), steps=160, cohort_size=4, executor="loop", progress=False
    )
    x, y = examples(100, 2)
    usual, chosen = (run.add_client(x, (y + 2) % 4, rounds=1, settings=given, name="Oslo") for given in ({}, None))
    assert chosen.settings["embedding_lr"] > 1e-3
    assert chosen.splits["validation"].score > usual.splits["validation"].score


def test_trials_do_not_spend_of_a_client_s_privacy() -> None:
    run = trained(Choosy(), steps=6, privacy=pfedhn.Privacy(clip=1.0, noise=1.0))
    assert run.add_client(*examples(80, 1), rounds=2).tried == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"embeding_lr": 1.0}, "has no field 'embeding_lr'; did you mean 'embedding_lr'"),
        ({"embedding_lr": -1.0}, "must be at least 0"),
        ({"hidden_dim": 7}, "hidden_dim cannot change while a client joins"),
        ({"num_hidden": 1}, "num_hidden cannot change while a client joins"),
        ({"averaging": 0.9}, "averaging cannot change while a client joins"),
        ({"embedding": "fixed"}, "embedding cannot change while a client joins"),
        ({"embedding_optimizer": "adam"}, "embedding_optimizer cannot change while a client joins"),
        ("embedding_lr", "settings is 'embedding_lr'; give names and values"),
    ],
)
def test_settings_that_do_not_fit_what_was_trained_are_refused(generator: Run, settings: Any, sentence: str) -> None:
    for rounds in (0, 1):
        with pytest.raises(UserError, match=sentence):
            generator.add_client(*examples(40, 1), rounds=rounds, settings=settings)


@pytest.mark.parametrize(("largest", "threads"), [(10**9, 1), (0, 2)])
def test_a_client_joins_a_small_network_in_one_thread(
    largest: int, threads: int, choosy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "SMALL_NETWORK", largest)
    seen, evaluate = [], Simulation.evaluate
    monkeypatch.setattr(Simulation, "evaluate", lambda *given: seen.append(torch.get_num_threads()) or evaluate(*given))
    torch.set_num_threads(2)
    try:
        choosy.add_client(*examples(80, 1), rounds=0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {threads}
