"""A party's policy file: what its owner lets it take part in, whatever the server asks for."""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pfedhn.errors import RunError, UserError
from pfedhn.settings import build, parse_toml

PAGE = "docs/deployment.md"
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class Refusal(RunError):
    """What the owner's policy does not allow. The owner reads why, the server only that it is refused."""


@dataclass(frozen=True)
class PartyPolicy:
    """What a party takes part in; it refuses everything beyond.

    Args:
        max_rounds: Most updates that the party sends; by default one for each round of the study and each repetition.
        max_repeats: Most repetitions of rounds that the party has answered, as after a server was restored from a
            backup; by default as many as the study has rounds.
        min_local_steps: Fewest local steps of a round.
        min_batch_size: Smallest batch size.
        min_examples: Fewest examples that an update is computed from: local steps times examples of a batch.
        methods: Allowed methods; all by default.
        columns: Allowed columns of a table, the label among them; all by default.
        privacy: Level of privacy that must be on, "client" or "example"; none by default.
        max_epsilon: Largest privacy budget.
        hours: Hours of the day in which the party takes part, in local time: "20:00-06:00".
        max_message_bytes: Largest message, in either direction.
        max_messages_per_hour: Most messages that the party answers within an hour.
    """

    max_rounds: int | None = None
    max_repeats: int | None = None
    min_local_steps: int = 1
    min_batch_size: int = 1
    min_examples: int = 8
    methods: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    privacy: Literal["client", "example"] | None = None
    max_epsilon: float | None = None
    hours: str | None = None
    max_message_bytes: int | None = None
    max_messages_per_hour: int | None = None


def read_party_policy(text: str, path: Path) -> PartyPolicy:
    """The policy of such a file, or a sentence that says what is wrong with it."""
    policy = build(PartyPolicy, parse_toml(text, path), path.name, PAGE)
    least = {"max_repeats": 0, "min_local_steps": 1, "min_batch_size": 1, "min_examples": 1}
    for name in ("max_rounds", "max_message_bytes", "max_messages_per_hour"):
        least[name] = 1
    for name, bound in least.items():
        if (value := getattr(policy, name)) is not None and value < bound:
            raise UserError(f"{path.name}: {name} must be at least {bound}, got {value}.")
    if policy.max_epsilon is not None and not policy.max_epsilon > 0:
        raise UserError(f"{path.name}: max_epsilon must be above 0, got {policy.max_epsilon}.")
    if policy.hours is not None and HOURS.fullmatch(policy.hours) is None:
        raise UserError(f'{path.name}: hours must look like "20:00-06:00", got {policy.hours!r}.')
    return policy


def seconds_to_wait(hours: str | None, now: datetime.datetime) -> float:
    """The time until the party's hours begin; 0 within them, or if there are none."""
    found = None if hours is None else HOURS.fullmatch(hours)
    if found is None:
        return 0.0
    begin, end = 60 * int(found[1]) + int(found[2]), 60 * int(found[3]) + int(found[4])
    minute = 60 * now.hour + now.minute
    is_open = begin <= minute < end if begin <= end else minute >= begin or minute < end
    return 0.0 if is_open or begin == end else 60.0 * ((begin - minute) % 1440) - now.second
