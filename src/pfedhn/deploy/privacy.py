"""Noise on a party's updates, drawn from the system's own randomness, and the privacy that they have cost so far.

An update is scaled down to a norm of at most `clip`, and every number of it gets normal noise of deviation
`noise * clip`. Two data sets of the party, however different, then give updates that are at most 2 `clip` apart: what
is protected is all that the party has, from everybody, the server included (local, client-level privacy).
"""

import json
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from pfedhn import params
from pfedhn.errors import RunError, UserError, missing_extra
from pfedhn.files import read_text, write_atomically
from pfedhn.params import Params


@dataclass(frozen=True)
class Privacy:
    """What a party asks for.

    Args:
        clip: The largest norm of an update that is sent.
        noise: The deviation of the noise, in multiples of `clip`.
        epsilon: How much privacy may be spent, at `delta`; then the party sends nothing more.
        delta: The probability that the bound does not hold.
    """

    clip: float
    noise: float
    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("clip", "noise", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0.")
        if not 0 < self.delta < 1:
            raise UserError(f"delta is {self.delta}; it must be between 0 and 1.")

    def spent(self, num_updates: int) -> float:
        """Epsilon after so many updates, as Opacus accounts for them; every round may see all of the party's data."""
        try:
            from opacus.accountants import RDPAccountant
        except ImportError:
            raise missing_extra("accounting for privacy", "privacy") from None
        if not num_updates:
            return 0.0
        accountant = RDPAccountant()
        accountant.history = [(self.noise / 2, 1.0, num_updates)]  # halved: updates may be 2 `clip` apart
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says where another order would bound more tightly
            return float(accountant.get_epsilon(self.delta))

    def noised(self, update: Params) -> Params:
        """The update as it may leave."""
        clipped = params.clip(update, self.clip)
        return {name: value + self.noise * self.clip * system_normal(value) for name, value in clipped.items()}


def system_normal(like: Tensor) -> Tensor:
    """Normal numbers that nobody can know or repeat: the seed of a run, which all know, has no part in them."""
    count = like.numel()
    bits = numpy.frombuffer(os.urandom(16 * count), dtype=numpy.uint64).reshape(2, count) >> numpy.uint64(11)
    radius, angle = (bits + 0.5) / 2.0**53
    values = numpy.sqrt(-2 * numpy.log(radius)) * numpy.cos(2 * numpy.pi * angle)
    return torch.from_numpy(values).to(like.dtype).reshape(like.shape)


class Budget:
    """What a party has spent, on its own disk: an update counts before it leaves."""

    def __init__(self, privacy: Privacy, file: Path) -> None:
        self.privacy, self.file = privacy, file
        self.num_updates = 0
        if file.exists():
            before = json.loads(read_text(file))
            if before["noise"] != privacy.noise or before["delta"] != privacy.delta:
                raise UserError(
                    f"this party has sent updates with noise {before['noise']} at delta {before['delta']}; go on with "
                    "these, so that what was spent can be added up."
                )
            self.num_updates = before["updates"]

    @property
    def spent(self) -> float:
        return self.privacy.spent(self.num_updates)

    def released(self, update: Params) -> Params:
        """The update as it may leave, if there is budget for one more."""
        if self.privacy.spent(self.num_updates + 1) > self.privacy.epsilon:
            raise RunError(
                f"the privacy budget of this party is spent (epsilon {self.spent:.3f} of {self.privacy.epsilon:g}); it "
                "sends no more updates."
            )
        self.num_updates += 1
        table = {"noise": self.privacy.noise, "delta": self.privacy.delta, "updates": self.num_updates}
        write_atomically(self.file, json.dumps(table).encode())
        return self.privacy.noised(update)
