"""A party against a server that asks for more than the study and the owner's policy allow."""

import datetime
import errno
import re
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import KEYS, RUN, Group, simulation_of, small

from pfedhn.deploy import guard as guards
from pfedhn.deploy.guard import MAX_PER_ROUND, check_plan, check_spec
from pfedhn.deploy.party import NEUTRAL, Party
from pfedhn.deploy.party_policy import PartyPolicy, Refusal, read_party_policy, seconds_to_wait
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.signing import opened, sealed
from pfedhn.deploy.spec import read_spec
from pfedhn.deploy.wire import HEAD, Message
from pfedhn.errors import UserError
from pfedhn.privacy import Privacy

SPEC = """
model = "mlp-4"
clients = 3
[data]
classes = ["ill", "well"]
label = "outcome"
features = ["age", "dose"]
"""
LOOKS: dict[str, Any] = {"is_adapted": False, "best": None, "is_last": False, "base": None}


class Asked:
    """A party and a server that asks it whatever it likes."""

    def __init__(self, folder: Path, rounds: int = 4, **policy: Any) -> None:
        simulation = simulation_of(small("pfedhn-pc"), rounds=rounds, cohort=1, evaluate_every=rounds)
        self.group = Group(simulation, folder, Policy(start_with=1), clients=[0])
        self.party = self.made(**policy)

    def made(self, may_replace: bool = False, **policy: Any) -> Party:
        """The party, made anew from its folder; its server waits for cohorts."""
        spec = read_spec(SPEC, Path("mine.toml"))
        first = self.group.parties["party-0"]
        self.party = replace(first, policy=PartyPolicy(**policy), spec=spec, may_replace=may_replace, heard=[])
        return self.party

    def ask(self, kind: str, shift: float = 0.0, head: str = "", **values: Any) -> Message:
        """The answer to a message with the weights of the first round, moved by `shift`."""
        (model,) = self.group.plan.models.values()
        state = self.group.server.state
        row = self.group.plan.first_row(state.shared, torch.tensor(0), None)
        weights = self.group.plan.exchange.publish(model, state.shared, row)
        weights = {name: value + shift for name, value in weights.items()}
        values = {"phase": "training", **values} | ({HEAD: head} if head else {})
        message = Message(kind, RUN, "party-0", values, weights)
        return opened(self.party.answer(sealed(message, KEYS[0])), self.party.key.public_key())

    def train(self, number: int, shift: float = 0.0, **values: Any) -> Message:
        values = {"round": number, "version": number, "base": None, "keep": [], **values}
        return self.ask("train", shift, **values)

    def test(self, number: int, shift: float = 0.0, **values: Any) -> Message:
        return self.ask("evaluate", shift, **{**LOOKS, "round": number, **values})

    def is_refused(self, answer: Message, why: str) -> None:
        """The owner reads why, the server does not."""
        assert (answer.kind, answer.values["reason"], answer.values["sentence"]) == ("refusal", "party", NEUTRAL)
        assert re.search(why, self.party.heard[-1]["sentence"]), self.party.heard[-1]["sentence"]


def test_rounds_beyond_the_study_are_refused(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    assert asked.train(3).kind == "train"
    asked.is_refused(asked.train(4), "asks for round 4; the study has 4 of them")
    asked.is_refused(asked.train(9, version=0), "asks for round 9")
    asked.is_refused(asked.train(0, version=9), "asks for round 9")
    asked.is_refused(asked.train(3, phase="joining"), "asks for round 3; the study has 3 of them")
    asked.is_refused(asked.train(0, phase="more"), "phase more")
    for wrong in (-1, True, None, 0.5):
        asked.is_refused(asked.ask("train", round=wrong, version=0, base=None, keep=[]), "names no round")
    asked.is_refused(asked.test(5), "model of round 5")
    assert asked.party.files.versions("training") == [3]


def test_a_round_is_repeated_a_few_times_and_not_for_ever(tmp_path: Path) -> None:
    """As after a restored backup; the same message gets the same answer however often it comes."""
    asked = Asked(tmp_path)
    first = asked.train(0)
    for head in ("a" * 64, "b" * 64):  # the server's record has grown
        assert asked.train(0, **{"head": head}).values == first.values
    for shift in range(1, MAX_PER_ROUND):
        assert asked.train(0, 0.1 * shift).kind == "train"
    asked.is_refused(asked.train(0, 0.9), "with 3 other messages before")
    asked.made()  # killed and started again
    asked.is_refused(asked.train(0, 0.9), "with 3 other messages before")
    assert asked.train(0, 0.1).kind == "train"  # its answer was lost
    assert [asked.train(1, 0.1 * shift).kind for shift in range(3)] == ["train"] * 3
    asked.is_refused(asked.train(1, 0.9), "with 3 other messages")
    asked.is_refused(asked.train(0, 0.8), "with 3 other messages")
    assert asked.train(2).kind == "train"
    asked.is_refused(asked.train(2, 0.1), "round 2 again; the policy of this party allows 4 times")
    assert asked.train(3).kind == "train"  # the study's rounds go on


def test_repetitions_can_be_ruled_out(tmp_path: Path) -> None:
    asked = Asked(tmp_path, max_repeats=0)
    assert asked.train(0).kind == "train"
    asked.is_refused(asked.train(0, 0.1), "round 0 again")
    assert asked.train(1).kind == "train"


def test_numbers_of_a_server_that_does_not_wait_are_counted(tmp_path: Path) -> None:
    """Its messages are numbered over all parties, and numbers come again after it was killed."""
    asked = Asked(tmp_path, rounds=2, max_repeats=2)
    asked.party = replace(asked.party, spec=None)
    for number, version in ((7, 0), (9, 0), (9, 1), (30, 1)):
        assert asked.train(number, 0.1 * version, version=version).kind == "train"
    asked.is_refused(asked.train(31, version=1), "has sent 4 updates; the study has 2 rounds and 2 may repeat")
    asked.is_refused(asked.train(32, version=2), "asks for round 32")


def test_updates_are_bounded_by_the_owner(tmp_path: Path) -> None:
    asked = Asked(tmp_path, max_rounds=2)
    assert [asked.train(number).kind for number in (0, 1)] == ["train"] * 2
    asked.is_refused(asked.train(2), "has sent 2 updates; its policy allows 2")
    asked.is_refused(asked.train(0, phase="joining"), "its policy allows 2")


def test_tests_are_bounded(tmp_path: Path) -> None:
    """Scores of weights that a server makes up tell of the examples too."""
    asked = Asked(tmp_path, rounds=1, max_repeats=0)
    allowed = asked.party.guard._num_tests
    for number in range(allowed):
        assert asked.test(0, 0.01 * number).kind == "evaluate"
    assert asked.test(0, 0.01).kind == "evaluate"
    asked.is_refused(asked.test(0, 9.0), f"has tested {allowed} models")


def test_the_model_of_a_run_that_has_ended_stays(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.train(0)
    assert asked.test(1, is_last=True, base=0).kind == "evaluate"
    chosen, version = asked.party.files.chosen(), (asked.party.folder / "kept-training-0").read_bytes()
    assert asked.test(1, is_last=True, base=0).kind == "evaluate"  # its answer was lost
    for answer in (
        asked.test(1, 0.5, is_last=True, base=0), asked.test(2, is_last=True), asked.test(1), asked.train(1),
        asked.train(0, 0.5), asked.train(0, phase="joining"),
    ):  # fmt: skip
        asked.is_refused(answer, "the run has ended.* --replace-model")
    asked.made()
    asked.is_refused(asked.test(2, is_last=True), "the run has ended")
    assert asked.party.files.chosen() == chosen
    assert (asked.party.folder / "kept-training-0").read_bytes() == version
    asked.made(may_replace=True)  # its owner agrees
    assert asked.train(1, base=0).kind == "train"
    assert asked.test(2, is_last=True).kind == "evaluate"
    assert asked.party.files.chosen()["round"] == 2


def test_an_update_of_few_examples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One local step of one example is a gradient that gives the example away."""
    algorithm = replace(small("pfedhn-pc"), local_steps=1)
    simulation = simulation_of(algorithm, rounds=2, cohort=1, batch_size=1)
    group = Group(simulation, tmp_path, Policy(start_with=1, patience=1, aside_seconds=1e9), clients=[0])
    with pytest.raises(Refusal, match="computed from 1 examples, which it would reveal"):
        check_plan(PartyPolicy(), group.plan, None)
    group.server.run(stop_at_refusal(group))
    assert {event["sentence"] for event in group.said("refused")} == {f"party-0 {NEUTRAL}."}
    assert not group.said("accepted")
    party = group.parties["party-0"]
    assert any("min_examples = 8" in event.get("sentence", "") for event in party.heard)


def stop_at_refusal(group: Group) -> threading.Event:
    stop = threading.Event()

    def listen(event: Any) -> None:
        group.events.append(event)
        if event["event"] == "refused":
            stop.set()

    group.server.log = group.server.contacts.log = listen
    return stop


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"min_local_steps": 9}, "local steps of 3; .* 9 or more"),
        ({"min_batch_size": 9}, "a batch size of 5; .* 9 or more"),
        ({"min_examples": 99}, "from 15 examples"),
        ({"privacy": "client"}, "join with --level client"),
        ({"max_epsilon": 2.0}, "join with --epsilon 2"),
    ],
)
def test_a_plan_beyond_the_policy_is_refused(policy: Any, why: str, tmp_path: Path) -> None:
    asked = Asked(tmp_path, **policy)
    with pytest.raises(Refusal, match=why):
        asked.party.guard.check_study()
    asked.is_refused(asked.train(0), why)


def test_privacy_within_the_policy_is_enough(tmp_path: Path) -> None:
    plan = Asked(tmp_path).group.plan
    policy = PartyPolicy(privacy="example", max_epsilon=4.0)
    check_plan(policy, plan, Privacy(1.0, 1.0, epsilon=4.0, level="example"))
    for wrong in (Privacy(1.0, 1.0, epsilon=5.0, level="example"), Privacy(1.0, 1.0, epsilon=4.0)):
        with pytest.raises(Refusal, match="policy of this party"):
            check_plan(policy, plan, wrong)


def test_methods_and_columns_beyond_the_policy_are_refused() -> None:
    spec = read_spec(SPEC, Path("mine.toml"))
    check_spec(PartyPolicy(methods=(spec.cell.method, "ditto"), columns=("dose", "age", "outcome", "sex")), spec)
    with pytest.raises(Refusal, match="the method pfedhn; the policy of this party allows ditto, fedavg"):
        check_spec(PartyPolicy(methods=("ditto", "fedavg")), spec)
    with pytest.raises(Refusal, match="reads the column 'outcome'"):
        check_spec(PartyPolicy(columns=("age", "dose")), spec)


def test_large_messages_and_many_of_them_are_refused(tmp_path: Path) -> None:
    asked = Asked(tmp_path, max_message_bytes=300)
    asked.is_refused(asked.train(0), "allows 300")
    asked.made(max_messages_per_hour=2)
    now = 1e9
    asked.party.guard.clock = lambda: now
    assert [asked.train(number).kind for number in (0, 1)] == ["train"] * 2
    asked.is_refused(asked.train(2), "max_messages_per_hour")
    assert asked.party.guard.seconds_to_wait() == guards.SECONDS_OF_AN_HOUR
    now += guards.SECONDS_OF_AN_HOUR
    assert asked.party.guard.seconds_to_wait() == 0
    assert asked.train(2).kind == "train"


@pytest.mark.parametrize(
    ("hours", "clock", "seconds"),
    [
        (None, "03:00:00", 0), ("20:00-06:00", "19:59:30", 30), ("20:00-06:00", "20:00:00", 0),
        ("20:00-06:00", "05:59:59", 0), ("20:00-06:00", "06:00:00", 14 * 3600), ("08:30-17:00", "08:29:00", 60),
        ("08:30-17:00", "17:00:00", 15.5 * 3600), ("08:00-08:00", "03:00:00", 0),
    ],
)  # fmt: skip
def test_a_party_has_hours(hours: str | None, clock: str, seconds: float) -> None:
    now = datetime.datetime.fromisoformat(f"2026-11-19T{clock}")
    assert seconds_to_wait(hours, now) == seconds


def test_outside_of_its_hours_a_party_answers_nothing(tmp_path: Path) -> None:
    asked = Asked(tmp_path, hours="20:00-06:00")
    asked.party.guard.clock = lambda: datetime.datetime(2026, 11, 19, 12).timestamp()
    asked.is_refused(asked.train(0), "hours or max_messages_per_hour")
    asked.is_refused(asked.ask("hello", plan=""), "hours")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_round = 3", "did you mean 'max_rounds'"),
        ("max_rounds = 0", "max_rounds must be at least 1, got 0"),
        ('hours = "8-17"', "must look like \"20:00-06:00\", got '8-17'"),
        ("max_epsilon = 0.0", "above 0"),
        ('privacy = "all"', "privacy"),
        ("min_examples = 0", "at least 1"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_party_policy(text, Path("policy.toml"))


def test_a_policy_file_says_what_it_bounds() -> None:
    text = 'max_rounds = 30\nmethods = ["pfedhn-pc"]\nhours = "20:00-06:00"\nprivacy = "client"\nmax_epsilon = 8.0\n'
    assert read_party_policy(text, Path("policy.toml")) == PartyPolicy(
        max_rounds=30, methods=("pfedhn-pc",), hours="20:00-06:00", privacy="client", max_epsilon=8.0
    )


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*given: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("kind", ["user", "disk", "defect"])
def test_a_server_hears_no_path_of_a_party(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.home()
    place = f"{home}/My Clinic/visits of Mrs. Miller.csv"
    errors: dict[str, Exception] = {
        "user": UserError(f"{place} is missing or damaged; restore it from a backup."),
        "defect": FileNotFoundError(2, "No such file or directory", place),
    }
    asked = Asked(tmp_path)
    if kind == "disk":
        errors["disk"] = UserError(f"{place}: no space left on device; make room.")
        errors["disk"].__cause__ = OSError(errno.ENOSPC, "No space left on device", place)
    monkeypatch.setattr(asked.party.local, "train", raising(errors[kind]))
    answer = asked.train(0)
    told = str(answer.values["sentence"])
    for word in ("/", "Clinic", "Miller", home.name if home.name else "/", str(tmp_path)):
        assert word not in told, told
    expected = {
        "user": "cannot answer; its owner can read why",
        "disk": "cannot use its disk (no space left on device); its owner has to make room",
        "defect": "has an error inside pfedhn (FileNotFoundError)",
    }
    assert told == expected[kind]
    assert "Mrs. Miller" in asked.party.heard[-1]["sentence"]


def test_every_field_of_a_policy_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    table = page.split("| policy of a party |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [item.name for item in fields(PartyPolicy)]
