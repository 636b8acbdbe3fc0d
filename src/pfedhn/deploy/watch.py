"""What a server notices about its parties' updates and scores, and says. It changes nothing that the server computes.

Everything but the scores is found out anew when the server restarts.
"""

import secrets
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedhn.params import Params

NUM_LOOKED_AT = 4096  # of an update's numbers, drawn in secret so that a party cannot fit its update to them
KEEPS = 0.8  # how much of its past the mean of a party's directions keeps at an update
NUM_BEFORE = 3  # updates of a party before its direction is judged
TURNED = -0.5  # cosine between an update and the party's past
PARTED = 0.2  # how much further apart a party's score and the others' are, besides what chance explains
NUM_EVALUATIONS = 3  # over which scores are compared
LEAST_OTHERS = 3  # with two, a party whose own score jumps would make one of them stand out
WEAK = 0.5  # part of an update that counts


@dataclass
class Direction:
    """The mean direction of a party's updates."""

    mean: Tensor
    num_updates: int = 1


class Watch:
    """What a server notices about its parties; it says each thing once, until it is over.

    Args:
        max_update: The bound on the norm of updates, of the server's policy.
        say: Called with an event and its details.
    """

    def __init__(self, max_update: float, say: Callable[..., None]) -> None:
        self.max_update, self.say = max_update, say
        self._directions: dict[str, Direction] = {}
        self._chosen: dict[int, Tensor] = {}  # places of the numbers that are looked at, by the length of an update
        self._too_large: dict[str, float] = {}  # parties whose last update was refused: its norm over the bound
        self._said: set[tuple[str, str]] = set()  # party and reason

    def accepted(self, name: str, update: Params) -> None:
        """Note an update, and say if it turns against the party's earlier ones."""
        self._too_large.pop(name, None)
        direction = self._direction(update)
        known = self._directions.get(name)
        if known is None or known.mean.shape != direction.shape:
            self._directions[name] = Direction(direction)
            return
        cosine = float(torch.nn.functional.cosine_similarity(known.mean, direction, dim=0))
        is_turned = cosine < TURNED and known.num_updates >= NUM_BEFORE
        sentence = f"the update of {name} points against its own earlier ones (cosine {cosine:.2f})"
        self._alert(name, "turned", sentence, is_turned, is_over=cosine > 0, cosine=round(cosine, 4))
        mean = KEEPS * known.mean + (1 - KEEPS) * direction
        self._directions[name] = Direction(mean, known.num_updates + 1)

    def refused(self, name: str, ratio: float, parties: Collection[str]) -> None:
        """Note an update whose norm was `ratio` times the bound, and say if most parties' updates are too large."""
        self._too_large[name] = ratio
        refused = [value for party, value in self._too_large.items() if party in parties]
        is_most = 2 * len(refused) > len(parties)
        needed = 2 * self.max_update * statistics.median(refused) if refused else self.max_update
        sentence = (
            f"max_update = {self.max_update:g} refuses the updates of {len(refused)} of {len(parties)} parties, so "
            f"training stands still; if these parties are honest, set max_update = {needed:.2g} under [policy]"
        )
        self._alert("", "bound", sentence, is_most, is_over=not is_most)

    def stepped(self, parts: Mapping[str, float]) -> None:
        """Say which parties' updates count little, by the defense of the run."""
        for name, part in parts.items():
            sentence = (
                f"{part:.3g} of the update of {name} counts, since it is larger than the others' or comes too often"
            )
            self._alert(name, "weakened", sentence, part < WEAK, is_over=part >= WEAK, part=part)

    def scored(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Say which parties' scores and the others' part, by the results of all evaluations."""
        for name, (own, others) in changes(history).items():
            is_parted = own * others < 0 and abs(own - others) > PARTED
            sentence = f"the score of {name} has changed by {own:+.3f} and the others' by {others:+.3f}"
            self._alert(name, "parted", sentence, is_parted, is_over=not is_parted)

    def _alert(self, name: str, reason: str, sentence: str, is_so: bool, is_over: bool, **details: Any) -> None:
        if is_so and (name, reason) not in self._said:
            self._said.add((name, reason))
            party = {"party": name} if name else {}
            self.say("alert", **party, reason=reason, sentence=f"{sentence}.", **details)
        elif is_over:
            self._said.discard((name, reason))

    def _direction(self, update: Params) -> Tensor:
        numbers = torch.cat([value.detach().cpu().float().flatten() for value in update.values()] or [torch.zeros(1)])
        if len(numbers) > NUM_LOOKED_AT:
            if len(numbers) not in self._chosen:
                generator = torch.Generator().manual_seed(secrets.randbits(63))
                self._chosen[len(numbers)] = torch.randint(len(numbers), (NUM_LOOKED_AT,), generator=generator)
            numbers = numbers[self._chosen[len(numbers)]]
        return torch.nn.functional.normalize(numbers, dim=0)


def changes(history: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """How each party's share of right validation examples has changed over some evaluations, and the others' median.

    What chance explains of a party's own change is left out: two deviations of a share of so many examples.
    """
    if len(history) <= NUM_EVALUATIONS:
        return {}
    before, after = (shares(history[place]["results"]) for place in (-1 - NUM_EVALUATIONS, -1))
    moved = {name: after[name][0] - before[name][0] for name in after if name in before}
    found = {}
    for name, own in moved.items():
        others = [change for other, change in moved.items() if other != name]
        if len(others) >= LEAST_OTHERS:
            chance = after[name][1] ** -0.5  # two deviations of a share of one half, the largest there are
            own = 0.0 if abs(own) <= chance else own - chance if own > 0 else own + chance
            found[name] = own, statistics.median(others)
    return found


def shares(results: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """The share of right validation examples of each party that says it, and how many examples it has."""
    scores = {name: result["validation"] for name, result in results.items()}
    return {
        name: (metric / count, count) for name, (_, metric, count) in scores.items() if metric is not None and count
    }
