"""The guard of a party: it holds every message against the agreed study and the policy of the party's owner.

A server may repeat a round: its journal was lost, or it was restored from a backup. Messages that are the same but for
the head of the server's record have the same identity, and get the same answer. A repetition with other content is
answered too, but not without end: each further answer about the same examples tells more of them.
"""

import datetime
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pfedhn.deploy.party_folder import PartyFolder
from pfedhn.deploy.party_policy import PartyPolicy, Refusal, seconds_to_wait
from pfedhn.deploy.spec import FederationSpec
from pfedhn.deploy.wire import Message
from pfedhn.engine.plan import Plan
from pfedhn.privacy import Privacy

MAX_PER_ROUND = 3  # different messages that ask for the same round
SECONDS_OF_AN_HOUR = 3_600.0


@dataclass
class Guard:
    """What stands between a server's message and a party's answer.

    Args:
        policy: Of the party's owner.
        plan: Of the run.
        files: The party's folder, which remembers the answered rounds.
        size: Number of the party's training examples.
        privacy: The party's protection.
        spec: The study's file, which names methods and columns; without it, only the plan is checked.
        may_replace: Whether the owner lets the server replace the model of a run that has ended.
        clock: Seconds since 1970.
    """

    policy: PartyPolicy
    plan: Plan
    files: PartyFolder
    size: int
    privacy: Privacy | None = None
    spec: FederationSpec | None = None
    may_replace: bool = False
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._answered = deque[float](maxlen=self.policy.max_messages_per_hour or 1)  # when, the newest last

    def check_study(self) -> None:
        """Refuse a study that the policy does not allow."""
        check_plan(self.policy, self.plan, self.privacy, self.size)
        if self.spec is not None:
            check_spec(self.policy, self.spec)

    def seconds_to_wait(self) -> float:
        """The time until the party may answer again, by its hours and its messages per hour."""
        now, limit = self.clock(), self.policy.max_messages_per_hour
        until_hours = seconds_to_wait(self.policy.hours, datetime.datetime.fromtimestamp(now))
        is_full = limit is not None and len(self._answered) >= limit
        return max(until_hours, self._answered[0] + SECONDS_OF_AN_HOUR - now if is_full else 0.0)

    def admit(self, num_bytes: int) -> None:
        """Refuse any message that is too large, comes too often, or comes outside of the party's hours."""
        if self.seconds_to_wait() > 0:
            raise Refusal("the policy of this party (hours or max_messages_per_hour) lets it answer no message now.")
        self.check_bytes(num_bytes)
        self._answered.append(self.clock())

    def check_bytes(self, num_bytes: int) -> None:
        """Refuse a message or an answer that is too large."""
        most = self.policy.max_message_bytes
        if most is not None and num_bytes > most:
            raise Refusal(f"a message has {num_bytes:,} bytes; the policy of this party allows {most:,}.")

    def admit_train(self, message: Message, asked: bytes) -> None:
        """Refuse to train beyond the study, or for a round that was repeated too often."""
        self.check_study()
        self._refuse_after_the_end()
        number, version, phase = _count(message, "round"), _count(message, "version"), message.values.get("phase")
        rounds = self._num_rounds(phase)
        is_waiting = phase == "joining" or (self.spec is not None and self.spec.policy.in_flight is None)
        if version >= rounds or (is_waiting and number >= rounds):
            raise Refusal(f"the server asks for round {max(number, version)}; the study has {rounds} of them.")
        known = self.files.answered(str(phase))
        if asked in known.get(number, ()):
            return  # the answer was lost
        if len(known.get(number, ())) >= MAX_PER_ROUND:
            raise Refusal(f"the server has asked for round {number} with {MAX_PER_ROUND} other messages before.")
        repeats = rounds if self.policy.max_repeats is None else self.policy.max_repeats
        total = sum(map(len, known.values()))
        if is_waiting and number in known and total - len(known) >= repeats:
            raise Refusal(f"the server asks for round {number} again; the policy of this party allows {repeats} times.")
        if total >= rounds + repeats:
            raise Refusal(
                f"the party has sent {total} updates; the study has {rounds} rounds and {repeats} may repeat."
            )
        phases = ("training", "joining")
        num_sent = sum(len(identities) for one in phases for identities in self.files.answered(one).values())
        if self.policy.max_rounds is not None and num_sent >= self.policy.max_rounds:
            raise Refusal(f"the party has sent {num_sent} updates; its policy allows {self.policy.max_rounds}.")

    def admit_test(self, message: Message, asked: bytes) -> None:
        """Refuse to test a model beyond the study, or to replace the model of a run that has ended."""
        if self.files.has_chosen and self.files.chosen().get("asked") == asked.hex():
            return  # the answer was lost
        self._refuse_after_the_end()
        number, rounds = _count(message, "round"), self._num_rounds(message.values.get("phase"))
        if number > rounds:
            raise Refusal(f"the server has a model of round {number} tested; the study has {rounds} of them.")
        known = self.files.answered("tests")
        is_known = asked in known.get(number, ())
        repeats = rounds if self.policy.max_repeats is None else self.policy.max_repeats
        if not is_known and (total := sum(map(len, known.values()))) >= self._num_tests + repeats:
            raise Refusal(f"the party has tested {total} models; the study has {self._num_tests} tests.")

    def _refuse_after_the_end(self) -> None:
        if self.files.has_chosen and not self.may_replace:
            raise Refusal(
                "the run has ended, and the server asks to go on, which would replace this party's model; join with "
                "--replace-model to allow it."
            )

    def _num_rounds(self, phase: Any) -> int:
        if phase not in ("training", "joining"):
            raise Refusal(f"the server asks for the phase {phase!s:.20}, which the study does not have.")
        return self.plan.num_rounds if phase == "training" else self.plan.joining_rounds

    @cached_property
    def _num_tests(self) -> int:
        """How many models a party may have to test: while training, while joining, before and after the choice."""
        schedule, size = self.plan.schedule, self.plan.clients_per_round
        places = range(1, self.plan.num_rounds + 1)
        during = sum(schedule.is_evaluated((place - 1) * size, place * size) for place in places)
        return during + self.plan.joining_rounds + 4


def check_plan(policy: PartyPolicy, plan: Plan, privacy: Privacy | None, size: int | None = None) -> None:
    """Refuse a plan whose updates would tell too much of the examples; the party has `size` of them to train on."""
    if policy.privacy is not None and (privacy is None or privacy.level != policy.privacy):
        raise Refusal(f"the policy of this party asks for privacy; join with --level {policy.privacy}.")
    if policy.max_epsilon is not None and (privacy is None or (privacy.epsilon or 0.0) > policy.max_epsilon):
        raise Refusal(
            f"the policy of this party asks for a privacy budget; join with --epsilon {policy.max_epsilon:g}."
        )
    steps, batch_size = plan.algorithm.num_batches, plan.schedule.batch_size
    local_steps = int(getattr(plan.algorithm, "local_steps", steps))
    if not plan.algorithm.needs.communication:
        return
    for name, value, least in (
        ("local steps", local_steps, policy.min_local_steps),
        ("a batch size", batch_size, policy.min_batch_size),
    ):
        if value < least:
            raise Refusal(f"the study has {name} of {value}; the policy of this party asks for {least} or more.")
    examples = steps * (batch_size if size is None else min(batch_size, size))
    if examples < policy.min_examples:
        raise Refusal(
            f"an update would be computed from {examples} examples, which it would reveal; the policy of this party "
            f"asks for min_examples = {policy.min_examples}, so raise local_steps or batch_size of the study."
        )


def check_spec(policy: PartyPolicy, spec: FederationSpec) -> None:
    """Refuse a study with a method or with columns that the policy does not allow."""
    if policy.methods and spec.cell.method not in policy.methods:
        raise Refusal(
            f"the study has the method {spec.cell.method}; the policy of this party allows {_list(policy.methods)}."
        )
    columns = (*spec.data.features, *([] if spec.data.label is None else [spec.data.label]))
    if policy.columns and (others := [name for name in columns if name not in policy.columns]):
        raise Refusal(
            f"the study reads the column {others[0]!r}; the policy of this party allows {_list(policy.columns)}."
        )


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _count(message: Message, name: str) -> int:
    value = message.values.get(name)
    if type(value) is not int or value < 0:
        raise Refusal(f"the server names no {name}.")
    return value
