"""Defenses of the server against hostile updates: the seam between a cohort's replies and `receive`.

A defense sees the decoded updates of one step and what it remembers of earlier ones, and says how much of each counts.
Functions are pure, and the memory is a value that JSON can hold, so a deployed server replays it from its journal and
the simulator computes the same. Extras pass unchanged; they have their own bounds.
Axes: [C]lients of a cohort that share one architecture.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from pfedhn.engine.round import Exchange, Returned
from pfedhn.engine.transform import FULL
from pfedhn.errors import UserError, closest, short
from pfedhn.params import Params, weighted
from pfedhn.settings import Bounds, Fraction, build, check_bounds, settings_in

Past: TypeAlias = dict[str, Any]
"""What a defense remembers, as JSON can hold it: "parties", what it knows of each; "count", how many updates it has
seen; "parts", how much of each update of the last step counted."""

MOST_OTHERS = 5  # parties whose norms are known before an update counts
NUM_TIMES = 8  # of a party's last updates, by which its rate is measured


class Seen(NamedTuple):
    """The updates of one step, in a defense's eyes."""

    norms: Mapping[str, float]  # root mean square of each party's update, by its name
    num_clients: int  # that are expected


class Robust(Protocol):
    """A defense against hostile updates; functions are pure."""

    only_sums: bool = False
    """Whether it is for methods alone that sum updates; others take a step for each party."""

    least_cohort: int = 1
    """The fewest updates in a step with which it does anything."""

    def parts(self, past: Past, seen: Seen) -> tuple[dict[str, float], Past]:
        """How much of each party's update counts, from 0 to 1, and what is remembered from now on."""
        return dict.fromkeys(seen.norms, 1.0), past

    def combined(self, updates: Params) -> Params:
        """What stands for each of [C] updates."""
        return updates


@dataclass(frozen=True)
class AdaptiveNorm(Robust):
    """Scale an update down to at most `factor` times the median of the other parties' norms.

    The median has one norm for each party, as it was sent, so it follows honest updates up and down and a party cannot
    move its own bound. Until enough other norms are known, updates are measured and do not count.
    """

    factor: Annotated[float, Bounds(1.0, 1e6)] = 2.0  # largest norm, in multiples of the median of the others'
    keeps: Fraction = 0.0  # how much of a party's norm stays known at its next, smaller update; 0 for the latest alone

    def parts(self, past: Past, seen: Seen) -> tuple[dict[str, float], Past]:
        before = {name: one["norm"] for name, one in past.get("parties", {}).items()}
        known = before | {name: max(norm, self.keeps * before.get(name, 0.0)) for name, norm in seen.norms.items()}
        parts = {name: self._part(name, norm, known, seen.num_clients) for name, norm in seen.norms.items()}
        return parts, _with_parties(past, {name: {"norm": known[name]} for name in seen.norms})

    def _part(self, name: str, norm: float, known: Mapping[str, float], num_clients: int) -> float:
        others = sorted(value for other, value in known.items() if other != name)
        if len(others) < min(MOST_OTHERS, math.ceil((num_clients - 1) / 2)):
            return 0.0
        # The lower one of two: with two others known, one hostile party does not set the bound.
        bound = self.factor * others[(len(others) - 1) // 2]
        return 1.0 if norm <= bound else bound / norm


@dataclass(frozen=True)
class PerParty(Robust):
    """The adaptive norm, and two limits for methods that take a step for each party.

    A party whose updates are above the bound again and again counts less, by the square of how much of its updates was
    within the bound on average. A party that sends more often than `most_often` times its share counts less by as much.
    """

    factor: Annotated[float, Bounds(1.0, 1e6)] = 2.0  # as of the adaptive norm
    keeps: Fraction = 0.95  # as of it; a bound that falls quickly would silence honest parties that learn more slowly
    memory: Fraction = 0.5  # how much of a party's past the average of what was within the bound keeps at an update
    most_often: Annotated[float, Bounds(1.0, 1e6)] = 3.0  # updates of a party, in multiples of its share of all

    def parts(self, past: Past, seen: Seen) -> tuple[dict[str, float], Past]:
        parts, now = AdaptiveNorm(self.factor, self.keeps).parts(past, seen)
        before, count = past.get("parties", {}), past.get("count", 0)
        found, known = {}, {}
        for name, part in parts.items():
            count += 1
            one = before.get(name, {})
            # What was sent before the others were known tells nothing about the party.
            kept = one.get("kept", 1.0) if part == 0.0 else self._average(one.get("kept", 1.0), part)
            times = [*one.get("times", ()), count][-NUM_TIMES:]
            found[name] = part * kept**2 * self._rate_limit(times, seen.num_clients)
            known[name] = {"kept": kept, "times": times}
        return found, _with_parties(now, known) | {"count": count}

    def _average(self, kept: float, part: float) -> float:
        return self.memory * kept + (1 - self.memory) * part

    def _rate_limit(self, times: Sequence[int], num_clients: int) -> float:
        """How much a party counts for the updates that all parties sent while it sent its last ones."""
        if len(times) < NUM_TIMES:
            return 1.0
        share = (NUM_TIMES - 1) / (times[-1] - times[0])
        return min(1.0, self.most_often / (num_clients * share))


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean of each number over the cohort's updates without the largest and the smallest ones.

    Every update counts alike, whatever size its party says that its data have.
    """

    trim: Annotated[float, Bounds(0.0, 0.49)] = 0.2  # share of the updates that is left out at each end, at least one

    only_sums = True
    least_cohort = 3

    def combined(self, updates: Params) -> Params:
        return {name: self._mean(value).expand_as(value) for name, value in updates.items()}

    def _mean(self, values: Tensor) -> Tensor:
        count = len(values)
        num = max(1, int(self.trim * count)) if count >= self.least_cohort else 0
        return values.sort(0).values[num : count - num].mean(0)


@dataclass(frozen=True)
class CoordinateMedian(Robust):
    """The median of each number over the cohort's updates; each counts alike, as for the trimmed mean."""

    only_sums = True
    least_cohort = 3

    def combined(self, updates: Params) -> Params:
        return {name: self._median(value).expand_as(value) for name, value in updates.items()}

    @staticmethod
    def _median(values: Tensor) -> Tensor:
        ordered, count = values.sort(0).values, len(values)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


ROBUST: dict[str, Robust] = {
    "adaptive-norm": AdaptiveNorm(),
    "per-party": PerParty(),
    "trimmed-mean": TrimmedMean(),
    "median": CoordinateMedian(),
}
"""By the name that `robust` takes."""


def find_robust(given: str | Mapping[str, Any] | Robust | None) -> Robust | None:
    """A defense by its name, or by a table with its name as `rule` and its settings."""
    if given is None or (isinstance(given, str) and given == "none"):
        return None
    if isinstance(given, Mapping):
        values = dict(given)
        rule = values.pop("rule", None)
        if not isinstance(rule, str):
            raise UserError(f'robust needs a rule; write robust = {{rule = "{next(iter(ROBUST))}"}}, say.')
        if rule not in ROBUST:
            raise UserError(f"there is no defense {rule!r} for robust; {closest(rule, ROBUST)}")
        kind = type(ROBUST[rule])
        made: Robust = build(kind, values, "robust")
        for name, setting in settings_in(kind).items():
            check_bounds(setting, getattr(made, name), f"robust: {name}")
        return made
    if not isinstance(given, str):
        if isinstance(given, type) or not all(hasattr(given, name) for name in ("parts", "combined", "only_sums")):
            raise UserError(f"a defense is given as {short(given)}; {closest('', ROBUST)}")
        return given
    if given not in ROBUST:
        raise UserError(f"there is no defense {given!r} for robust; {closest(given, ROBUST)}")
    return ROBUST[given]


def refuse_unfit(robust: Robust, method: str, num_clients: int, cohort_size: int, sends: bool, has_rows: bool) -> None:
    """Refuse a defense that would do nothing, or would break the method."""
    names = (name for name, known in ROBUST.items() if type(known) is type(robust))
    name = next(names, type(robust).__name__)
    if not sends:
        raise UserError(f"robust = {name!r} has no effect: {method} sends no updates; leave it out.")
    if robust.only_sums and has_rows:
        raise UserError(
            f"robust = {name!r} replaces all updates of a step by one, and {method} takes a step for each client; use "
            "'per-party' or 'adaptive-norm'."
        )
    if cohort_size < robust.least_cohort:
        raise UserError(
            f"robust = {name!r} needs at least {robust.least_cohort} updates in a step, got cohort_size = "
            f"{cohort_size}; raise it."
        )
    if num_clients < 3:
        raise UserError(f"robust = {name!r} needs at least 3 clients, got {num_clients}; nobody is in the majority.")


def guarded(
    robust: Robust,
    exchange: Exchange,
    past: Past,
    returned: Sequence[Returned],
    names: Sequence[Sequence[str]],
    num_clients: int,
) -> tuple[list[Returned], Past]:
    """The replies of a step as the defense lets them count, decoded, and what it remembers from now on.

    Args:
        robust: The defense.
        exchange: Of the run.
        past: What the defense remembers.
        returned: The replies.
        names: The parties of each group, in its order.
        num_clients: How many are expected.
    """
    decoded = [exchange.decoded(one) for one in returned]
    extras = [exchange.algorithm.extras(one.model).up for one in returned]
    updates = [
        {name: value for name, value in values.items() if name not in up}
        for values, up in zip(decoded, extras, strict=True)
    ]
    norms: dict[str, float] = {}
    for some, update in zip(names, updates, strict=True):
        norms |= dict(zip(some, _sizes(update), strict=True))
    parts, past = robust.parts(past, Seen(norms, num_clients))
    found = []
    for one, some, values, update in zip(returned, names, decoded, updates, strict=True):
        counting = torch.tensor([parts[name] for name in some], dtype=torch.float64, device=one.replies.size.device)
        combined = robust.combined(weighted(update, counting))
        found.append(one._replace(replies=one.replies._replace(update={**values, **combined})))
    return found, past | {"parts": parts}


def stepping(exchange: Exchange, robust: Robust | None) -> Exchange:
    """The exchange that takes the step; a defense has decoded the replies already."""
    return exchange if robust is None else replace(exchange, upload=FULL)


def _sizes(updates: Params) -> list[float]:
    """[C]: the root mean square of each update, by which those of networks of several sizes can be compared."""
    squares = sum(value.double().flatten(1).square().sum(1) for value in updates.values())
    count = sum(math.prod(value.shape[1:]) for value in updates.values())
    sizes: list[float] = (torch.as_tensor(squares) / max(1, count)).sqrt().tolist()
    return sizes


def _with_parties(past: Past, known: Mapping[str, Mapping[str, Any]]) -> Past:
    before = past.get("parties", {})
    return past | {"parties": before | {name: before.get(name, {}) | dict(one) for name, one in known.items()}}
