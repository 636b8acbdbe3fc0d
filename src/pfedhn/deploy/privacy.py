"""A party's privacy budget on its own disk, and the secrets that its noise and its minibatches come from."""

import json
import os
from pathlib import Path

import numpy
import torch
from torch import Tensor

from pfedhn.errors import RunError, UserError
from pfedhn.privacy import Privacy, RoundCost, spent
from pfedhn.system.files import read_text, write_atomically


def system_normal(count: int, like: Tensor) -> Tensor:
    """Normal numbers that nobody can know or repeat: the seed of a run, which all know, has no part in them."""
    bits = numpy.frombuffer(os.urandom(16 * count), dtype=numpy.uint64).reshape(2, count) >> numpy.uint64(11)
    radius, angle = (bits + 0.5) / 2.0**53
    values = numpy.sqrt(-2 * numpy.log(radius)) * numpy.cos(2 * numpy.pi * angle)
    return torch.from_numpy(values).to(like)


def system_key() -> int:
    """A key that nobody knows."""
    return int.from_bytes(os.urandom(8), "little", signed=True)


class BudgetSpent(RunError):
    """There is not enough left for one more update."""


class Budget:
    """What a party has spent in all runs, on its own disk: an update counts before it is made."""

    def __init__(self, privacy: Privacy, file: Path) -> None:
        if privacy.epsilon is None:
            raise UserError("privacy has no budget; say how much epsilon may be spent.")
        self.privacy, self.file, self.epsilon = privacy, file, privacy.epsilon
        self.history: list[RoundCost] = []
        self.num_updates = 0
        if file.exists():
            before = json.loads(read_text(file))
            if before["level"] != privacy.level:
                raise UserError(
                    f"this party has sent updates with level {before['level']!r}, which protects something else; go on "
                    "with it, so that what was spent can be added up."
                )
            self.history = [RoundCost(*cost) for cost in before["history"]]
            self.num_updates = before["updates"]
        spent(self.history, privacy.delta)  # says now if the accountant is missing

    def __str__(self) -> str:
        return f"level {self.privacy.level}, epsilon {self.spent:.3f} of {self.epsilon:g} spent"

    @property
    def spent(self) -> float:
        return spent(self.history, self.privacy.delta)

    def pay(self, cost: RoundCost) -> None:
        """Count one more update, if there is budget for it; costs of other noise or other data add up too."""
        *earlier, last = self.history or [cost._replace(steps=0)]
        history = [*earlier, last._replace(steps=last.steps + cost.steps)]
        if last[:2] != cost[:2]:
            history = [*self.history, cost]
        if spent(history, self.privacy.delta) > self.epsilon:
            raise BudgetSpent(
                f"the privacy budget of this party is spent (epsilon {self.spent:.3f} of {self.epsilon:g}); it sends "
                "no more updates."
            )
        self.history, self.num_updates = history, self.num_updates + 1
        table = {"level": self.privacy.level, "history": history, "updates": self.num_updates}
        write_atomically(self.file, json.dumps(table).encode(), mode=0o600)
