"""Inputs that a hasty person might give: none ends in an error of ours, and none hangs."""

import pytest
from faults.inputs import FULL, HANG, INTERNAL, judged, try_inputs

SHORT = {
    "command lines": 10,
    "experiment files": 10,
    "tables": 15,
    "folders of arrays": 15,
    "archives of images": 5,
    "Python calls": 40,
}


def refuse_bad(tries: dict[str, int], seed: int) -> None:
    rows = try_inputs(tries, seed)
    assert not [line for row in rows for line in row.bad]
    assert [sum(row.outcomes.values()) for row in rows] == list(tries.values())


@pytest.mark.slow
def test_some_inputs_of_every_kind() -> None:
    refuse_bad(SHORT, seed=0)


@pytest.mark.slow
def test_more_inputs_of_every_kind() -> None:
    refuse_bad({kind: max(1, count // 10) for kind, count in FULL.items()}, seed=1)


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (1, "error: ValueError: x (an error inside pfedhn; `pfedhn --debug ...` shows where)."),
        (1, "Traceback (most recent call last):"),
        (-11, ""),
        (139, "error: a sentence that says what to do."),
        (2, ""),
        (2, "error: "),
        (0, "\x1b[31mobeyed"),
    ],
)
def test_the_judge_knows_an_error_of_ours(code: int, stderr: str) -> None:
    assert judged(code, "", stderr)[0] == INTERNAL


def test_what_hangs_and_what_is_raw_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from faults import inputs

    assert inputs.called(lambda: 1 / 0)[0] == INTERNAL
    monkeypatch.setattr(inputs, "SECONDS", 0.05)
    assert inputs.called(lambda: time.sleep(5))[0] == HANG
