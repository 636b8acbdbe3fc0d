"""The schema of results: what is written is read again, old words too, and what does not fit is named."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from pfedhn.storage.schema import (
    Curve,
    Environment,
    Measures,
    Moment,
    PretrainingCost,
    Result,
    SchemaError,
    Scores,
    SplitScores,
    from_json,
    to_json,
)

SCORES = Scores(0.5, 6, 0.75, 2 / 3, (1, 3), (2, 4))
RESULT = Result(
    "pfedhn-digits-2-seed0",
    "small",
    cell={"method": "pfedhn", "pretrain": None},
    settings={"personal": ["last"], "clip": None},
    seed=0,
    chosen_step=4,
    steps=8,
    rounds=8,
    validation=replace(SCORES, clients=None, client_examples=None),
    test=SCORES,
    bytes_down=10,
    bytes_up=20,
    seconds=1.5,
    unused_examples={"train": 1},
    partition_sha256="abc",
    command="pfedhn run small",
    environment=Environment("cpu: abacus", 1, "fp32", True, commit="0123"),
    pretrain=PretrainingCost("fedavg-digits-2-seed0", 4, 1, 2, 0.5),
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(to_json(value)))


@pytest.mark.parametrize(
    "value",
    [
        RESULT,
        replace(RESULT, pretrain=None),
        SCORES,
        Scores(0.25, 4),
        Moment(4, 2, SCORES, SCORES, 1, 2, 0.5),
        Curve((0, 4), Measures((0.1, 0.2), (0.3, 0.4)), Measures(loss=(2.0, 1.0))),
    ],
)
def test_what_is_written_is_read_again(value: Any) -> None:
    assert from_json(type(value), through_json(value)) == value


def test_old_words_are_read() -> None:
    table = through_json(RESULT)
    table["unused_rows"] = table.pop("unused_examples")
    for split in ("validation", "test"):
        table[split]["rows"] = table[split].pop("examples")
    table["test"]["client_rows"] = table["test"].pop("client_examples")
    assert from_json(Result, table) == RESULT


@pytest.mark.parametrize(
    ("before", "after", "is_used"),
    [
        ((1.0, 0.5), (1.0, 0.6), True),
        ((1.0, 0.5), (1.0, 0.5), True),
        ((1.0, 0.6), (1.0, 0.5), False),
        ((math.nan, math.nan), (math.nan, math.nan), True),  # nobody has validation examples
        ((1.0, 0.5), (math.nan, 0.6), False),  # the steps diverged
        ((1.0, None), (2.0, None), False),  # a task without accuracy
        ((1.0, None), (math.nan, None), False),
    ],
)
def test_a_run_has_the_models_that_validation_prefers(before: Any, after: Any, is_used: bool) -> None:
    """Runs of earlier versions have those after the clients' own steps in any case."""
    first, last = (Scores(loss, 4, score, score, (2,), (4,)) for loss, score in (before, after))
    result = replace(RESULT, validation=last, test=last, unadapted=SplitScores(first, first))
    today = result.without_harmful_adaptation()
    assert (today is result) is is_used
    assert today.test is (last if is_used else first)
    assert today.adapted == (None if is_used else SplitScores(last, last))
    assert today.without_harmful_adaptation() is today


def test_unknown_keys_are_passed_over() -> None:
    assert from_json(Result, {**through_json(RESULT), "kind": "run", "curve": {}}) == RESULT


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": "0"}, "'seed' is missing or of the wrong kind"),
        ({"seed": True}, "'seed' is missing or of the wrong kind"),
        ({"seconds": None}, "'seconds' is missing or of the wrong kind"),
        ({"test": [1]}, "'test' is missing or of the wrong kind"),
        ({"test": {"loss": 0.5, "examples": 6}}, "'test' is not whole"),
        ({"test": {**to_json(SCORES), "clients": [1]}}, "'test' is not whole"),
        ({"test": {**to_json(SCORES), "clients": [1, "3"]}}, "'test' is not whole"),
        ({"validation": {"loss": 0.5, "examples": 6, "client_mean": 0.5}}, "'validation' is not whole"),
        ({"environment": {"device": "cpu"}}, "'environment' is not whole"),
        ({"unused_examples": {"train": "many"}}, "'unused_examples' is missing or of the wrong kind"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError, match=sentence):
        from_json(Result, {**through_json(RESULT), **changes})


def test_what_is_missing_is_named() -> None:
    table = through_json(RESULT)
    del table["partition_sha256"]
    with pytest.raises(SchemaError, match="'partition_sha256' is missing"):
        from_json(Result, table)


def test_a_curve_has_a_value_for_every_step() -> None:
    moments = [Moment(step, step, SCORES, Scores(float(step), 6), 0, 0, 0.0) for step in (0, 4)]
    curve = Curve.of(moments)
    assert curve.step == (0, 4)
    assert curve.validation == Measures((0.75, 0.75), (2 / 3, 2 / 3))
    assert curve.test == Measures(loss=(0.0, 4.0))
    with pytest.raises(SchemaError):
        replace(curve, step=(0, 4, 8))


def test_rounds_are_chosen_by_accuracy_or_by_the_loss() -> None:
    assert SCORES.score == 2 / 3
    assert Scores(0.25, 4).score == -0.25
