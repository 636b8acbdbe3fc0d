"""A deployed server defends itself as the simulator does, replays it from its journal, and says what it notices."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import Group, Killed, assert_simulated, simulated, simulation_of, small
from support import mostly_slow

from pfedhn.cli.federation import sayer
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.signing import opened, sealed
from pfedhn.deploy.store import Store
from pfedhn.deploy.watch import Watch, changes
from pfedhn.engine.attack import Attack
from pfedhn.engine.robust import ROBUST
from pfedhn.engine.simulate import Simulation

HOSTILE = 0
FOR_SUMS = ("trimmed-mean", "median")


def hostile(group: Group, client: int = HOSTILE, scale: float = -1.0) -> None:
    """Let a party send its updates turned."""
    name = f"party-{client}"
    answer, key = group.parties[name].answer, group.keys[name]

    def turned(content: bytes) -> bytes:
        message = opened(answer(content), key.public_key(), 1 << 24)
        if message.kind == "train":
            message = replace(message, tensors={part: scale * leaf for part, leaf in message.tensors.items()})
        return sealed(message, key)

    group.answers[name] = turned


def attacked(method: str, robust: str) -> Simulation:
    cohort = 6 if robust in FOR_SUMS else 2
    settings: dict[str, Any] = {"robust": ROBUST[robust], "attack": Attack("flip", (HOSTILE,))}
    return simulation_of(small(method), rounds=5, cohort=cohort, **settings)


CASES = [("pfedhn-pc", "per-party"), ("pfedhn", "adaptive-norm"), ("fedavg", "trimmed-mean"), ("fedavg", "median")]


@pytest.mark.parametrize(("method", "robust"), mostly_slow(CASES, CASES[0], CASES[2]))
def test_a_server_defends_itself_as_the_simulator_does(method: str, robust: str, tmp_path: Path) -> None:
    simulation = attacked(method, robust)
    expected = simulated(simulation)
    group = Group(simulation, tmp_path)
    hostile(group)
    group.server.run()
    assert_simulated(group, expected)
    mine, theirs = group.server.state.robust, expected.robust
    assert mine["parts"].keys() == theirs["parts"].keys()
    for name, one in theirs.get("parties", {}).items():
        for part, value in one.items():
            assert mine["parties"][name][part] == pytest.approx(value)
    assert not group.said("refused")


def test_the_journal_gives_back_what_a_defense_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after every second step, and once a checkpoint was written: the same run in the end."""
    simulation = attacked("pfedhn", "per-party")
    expected = simulated(simulation)
    group = Group(simulation, tmp_path, Policy(checkpoint_seconds=0.0))
    hostile(group)
    whole, steps = Store.commit, []

    def commit(store: Store, state: Any, table: Any, message: bytes = b"") -> None:
        whole(store, state, table, message)
        if table["kind"] == "step":
            steps.append(state.robust)
            if len(steps) % 2 == 0:
                raise Killed

    monkeypatch.setattr(Store, "commit", commit)
    while not group.server.state.has_ended:
        try:
            group.server.run()
        except Killed:
            group.transport._waiting.clear()
            assert group.new_server().state.robust == steps[-1]
    monkeypatch.undo()
    group.server.run()
    assert len(steps) == 5
    assert_simulated(group, expected)


def test_a_bound_that_is_too_small_for_honest_updates_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = Group(simulation_of(small("fedavg"), rounds=2, cohort=6), tmp_path, Policy(max_update=1e-4))
    stop = _after(group, lambda: bool(group.said("alert")))
    group.server.run(stop)
    (alert,) = group.said("alert")
    assert group.server.state.round == 0
    assert (alert["reason"], "party" in alert) == ("bound", False)
    assert "max_update = 0.0001 refuses the updates of 4 of 6 parties" in alert["sentence"]
    sayer(as_json=False)(alert)
    assert "alert: max_update = 0.0001 refuses" in " ".join(capsys.readouterr().out.split())
    # The bound that is named lets them through.
    needed = float(alert["sentence"].split("set max_update = ")[1].split()[0])
    again = Group(group.simulation, tmp_path / "again", Policy(max_update=needed))
    again.server.run()
    assert again.server.state.round == 2
    assert not again.said("alert")


def _after(group: Group, is_over: Callable[[], bool]) -> Any:
    class Stop:
        def is_set(self) -> bool:
            return is_over() or group.transport.now > 1000

    return Stop()


def test_a_party_that_turns_against_its_own_past_is_said(tmp_path: Path) -> None:
    group = Group(simulation_of(small("fedavg"), rounds=14, cohort=6), tmp_path)
    hostile(group, scale=1.0)
    group.server.run(_after(group, lambda: group.server.state.round >= 5))
    assert not group.said("alert")
    hostile(group, scale=-1.0)
    group.server.run(_after(group, lambda: group.server.state.round >= 6))
    (alert,) = group.said("alert")
    assert (alert["party"], alert["reason"]) == ("party-0", "turned")
    assert alert["cosine"] < -0.5


def told() -> tuple[Watch, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return Watch(1.0, lambda event, **details: events.append({"event": event, **details})), events


def test_an_alert_comes_once_until_it_is_over() -> None:
    watch, events = told()
    watch.stepped({"a": 0.1, "b": 1.0})
    watch.stepped({"a": 0.2})
    assert [(event["party"], event["reason"]) for event in events] == [("a", "weakened")]
    watch.stepped({"a": 0.9})
    watch.stepped({"a": 0.1})
    assert len(events) == 2


def test_most_parties_must_be_refused_before_the_bound_is_blamed() -> None:
    watch, events = told()
    watch.refused("a", 9.0, ["a", "b", "c"])
    watch.accepted("b", {"w": torch.ones(3)})
    assert not events
    watch.refused("c", 5.0, ["a", "b", "c"])
    assert "set max_update = 14 under" in events[0]["sentence"]  # twice the median of 9 and 5


def test_a_large_update_is_looked_at_in_part() -> None:
    watch, events = told()
    update = {"w": torch.randn(20_000)}
    for _ in range(4):
        watch.accepted("a", update)
    watch.accepted("a", {"w": -update["w"]})
    assert [event["reason"] for event in events] == ["turned"]
    assert events[0]["cosine"] == pytest.approx(-1.0, abs=1e-3)


def results(shares: list[float]) -> dict[str, Any]:
    count = 100
    scores = {name: {"validation": [1.0, share * count, count]} for name, share in zip("abcd", shares, strict=False)}
    return {"results": scores}


@pytest.mark.parametrize(
    ("before", "after", "parted"),
    [
        ([0.5, 0.9, 0.9, 0.9], [0.9, 0.6, 0.5, 0.4], ["a"]),  # it gains, and the others lose
        ([0.9, 0.5, 0.5, 0.5], [0.4, 0.6, 0.6, 0.6], ["a"]),
        ([0.5, 0.5, 0.5, 0.5], [0.9, 0.8, 0.7, 0.7], []),
        ([0.5, 0.5, 0.5, 0.5], [0.42, 0.6, 0.7, 0.7], []),  # no more than chance
        ([0.9, 0.5, 0.5], [0.4, 0.6, 0.6], []),  # too few others
    ],
)
def test_a_score_that_parts_from_the_others_is_said(before: Any, after: Any, parted: list[str]) -> None:
    watch, events = told()
    history = [results(before), results(before), results(before), results(after)]
    watch.scored(history[1:])
    assert not events  # too few evaluations
    watch.scored(history)
    assert [event["party"] for event in events] == parted


def test_scores_that_nobody_has_are_not_compared() -> None:
    nobody = {"results": {name: {"validation": [0.0, None, 0]} for name in "abc"}}
    assert changes([nobody] * 5) == {}
