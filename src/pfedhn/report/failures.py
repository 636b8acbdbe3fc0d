"""Methods that learned nothing: untrained, exploded, or no better than a guess."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pfedhn.report.entries import Entry, display_name
from pfedhn.storage.schema import Result, Yardstick

Reason: TypeAlias = Literal["diverged", "exploded", "untrained", "guess"]

LEAST_EVALUATIONS = 3  # after the untrained one; with fewer, a run was too short to learn
EXPLODED = 100  # times the cross-entropy of a uniform guess
GUESSES = ("own-base-rate", "own-mean")

REASONS: dict[Reason, str] = {
    "diverged": "weights stopped being finite",
    "exploded": "the loss exploded",
    "untrained": "the best round on validation is the untrained one",
    "guess": "on validation, a guess from each client's labels is as good",
}


@dataclass(frozen=True)
class Failure:
    """A method that learned nothing, with at least half of its seeds.

    Args:
        label: The method.
        reason: Its weights or its loss are not finite (diverged, exploded), validation chose the untrained round, or it
            is no better than a guess.
        seeds: The seeds with which this happened; all of them for a comparison with a guess.
        num_seeds: How many seeds there are.
    """

    label: str
    reason: Reason
    seeds: tuple[int, ...]
    num_seeds: int


def failure_texts(failures: Iterable[Failure]) -> list[str]:
    """A sentence for each reason, which names the methods that it holds for."""
    groups: dict[str, list[str]] = {}
    for failure in failures:
        count, total = len(failure.seeds), failure.num_seeds
        part = "" if count == total else f", with {count} of {total} seeds"
        groups.setdefault(f"{REASONS[failure.reason]}{part}", []).append(display_name(failure.label))
    return [
        f"{' and '.join(filter(None, [', '.join(names), last]))} learned nothing: {reason}."
        for reason, (*names, last) in groups.items()
    ]


def num_evaluations(entry: Entry) -> int:
    """How often the longest run was evaluated after it began to train."""
    return max((sum(step > 0 for step in curve.step) for curve in entry.curves.values()), default=0)


def failure_of(entry: Entry, yardsticks: Mapping[str, tuple[Yardstick, ...]]) -> Failure | None:
    if not entry.results:
        return Failure(entry.label, "diverged", tuple(sorted(entry.diverged)), len(entry.diverged))
    seeds: dict[Reason, list[int]] = {"exploded": [], "untrained": []}
    for seed, result in entry.results.items():
        if _has_exploded(result):
            seeds["exploded"].append(seed)
        elif result.chosen_step == 0 and result.pretrain is None and result.validation.examples:
            seeds["untrained"].append(seed)
    total = len(entry.results)
    for reason, found in seeds.items():
        if 2 * len(found) >= total:
            return Failure(entry.label, reason, tuple(sorted(found)), total)
    if _is_no_better_than_a_guess(entry, yardsticks):
        return Failure(entry.label, "guess", tuple(sorted(entry.results)), total)
    return None


def _has_exploded(result: Result) -> bool:
    losses = [scores.loss for scores in (result.validation, result.test) if scores.examples]
    classes = None if result.clients is None else result.clients.classes
    limit = math.inf
    if classes and result.test.has_accuracy:
        limit = EXPLODED * math.log(max(2, len({label for held in classes for label in held})))
    return any(not loss < limit for loss in losses)


def _is_no_better_than_a_guess(entry: Entry, yardsticks: Mapping[str, tuple[Yardstick, ...]]) -> bool:
    """Whether validation shows nothing beyond each client's base rate or mean; if no guess is known, it is not judged.

    The yardstick of that name is the guess if there is one, unless accuracy chose the round. Otherwise it is each
    client's commonest class in training, which accuracy has to exceed by a standard error; or its class frequencies,
    whose entropy the loss has to stay below. Either is enough. Test examples stand in where there is no validation.
    """
    by_loss = not entry.has_accuracy or all(result.select == "loss" for result in entry.results.values())
    if by_loss and (both := _losses_beside_guess(entry, yardsticks)) is not None:
        return both[0] >= both[1]
    if not entry.has_accuracy or not entry.cell.partition:  # a run by `pfedhn.train` may have a metric of any kind
        return False
    shares, entropies, accuracies, losses, examples = [], [], [], [], 0
    for result in entry.results.values():
        scores = result.validation if result.validation.examples else result.test
        held = [] if result.clients is None else [counts for counts in result.clients.classes or () if counts]
        if not held or not scores.examples or scores.client_mean is None:
            return False
        shares.append(statistics.fmean(max(counts.values()) / sum(counts.values()) for counts in held))
        entropies.append(_entropy(held))
        accuracies.append(scores.client_mean)
        losses.append(scores.loss)
        examples += scores.examples
    share = statistics.fmean(shares)
    is_accurate = statistics.fmean(accuracies) > share + math.sqrt(share * (1 - share) / examples)
    return not is_accurate and not statistics.fmean(losses) < statistics.fmean(entropies)


def _losses_beside_guess(entry: Entry, yardsticks: Mapping[str, tuple[Yardstick, ...]]) -> tuple[float, float] | None:
    """Mean validation losses of an entry and of the yardstick that guesses."""
    found = []
    for result in entry.results.values():
        for guess in yardsticks.get(result.rows, ()):
            loss = None if result.detailed is None else result.detailed.validation_loss
            if guess.name in GUESSES and loss is not None and guess.validation_loss is not None:
                found.append((loss, guess.validation_loss))
    return (statistics.fmean(loss for loss, _ in found), statistics.fmean(loss for _, loss in found)) if found else None


def _entropy(held: Iterable[Mapping[str, int]]) -> float:
    """The mean loss over examples of predicting each client's class frequencies."""
    total, count = 0.0, 0
    for counts in held:
        size = sum(counts.values())
        total -= sum(number * math.log(number / size) for number in counts.values() if number)
        count += size
    return total / count
