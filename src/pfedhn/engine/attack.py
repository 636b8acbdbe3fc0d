"""Hostile clients of a simulation, to measure what a defense is worth.

A hostile client trains as it should and sends something else, within the bound that a deployed server sets on norms
(`max_update`). It reports no scores: it has no validation and test examples, so results are those of the others.
Axes: [C]lients.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from pfedhn import keys
from pfedhn.errors import UserError
from pfedhn.params import Params, take

AttackKind: TypeAlias = Literal["flip", "scale", "random", "none"]


@dataclass(frozen=True)
class Attack:
    """What hostile clients send instead of their updates.

    Args:
        kind: "flip" sends the update with its sign turned; "scale" the same, as large as the bound allows; "random"
            normal numbers, as large as the bound allows; "none" what it should, to have the same scores without an
            attack.
        clients: The numbers of the hostile clients.
        bound: Largest norm of an update, in multiples of (1 + the norm of the weights that were sent); 100 is what a
            deployed server allows by default.
    """

    kind: AttackKind = "flip"
    clients: tuple[int, ...] = (0,)
    bound: float = 100.0

    def honest(self, num_clients: int) -> list[int]:
        """The clients that are not hostile."""
        others = [client for client in range(num_clients) if client not in self.clients]
        if not self.clients or not all(0 <= client < num_clients for client in self.clients) or not others:
            raise UserError(
                f"the hostile clients are {list(self.clients)}; give numbers from 0 to {num_clients - 1}, not all."
            )
        return others

    def sent(self, update: Params, weights: Params, key: keys.Key) -> Params:
        """What ONE hostile client sends.

        Args:
            update: Its honest update.
            weights: The weights that it received.
            key: For random numbers.
        """
        if self.kind == "none":
            return update
        if self.kind == "flip":
            return {name: -value for name, value in update.items()}
        if self.kind == "random":
            made = {name: _normal(value, keys.fold(key, name)) for name, value in update.items()}
        else:
            made = {name: -value for name, value in update.items()}
        # A little less than the bound: a float32 may round up.
        scale = 0.999 * self.bound * (1 + _norm(weights)) / max(_norm(made), 1e-30)
        return {name: value * scale for name, value in made.items()}

    def replace_in(self, updates: Params, weights: Params, clients: list[int], key: keys.Key) -> Params:
        """The updates [C] of a cohort with those of hostile clients replaced."""
        changed = {name: value.clone() for name, value in updates.items()}
        for place, client in enumerate(clients):
            if client in self.clients:
                for name, value in self.sent(
                    take(updates, place), take(weights, place), keys.fold(key, client)
                ).items():
                    changed[name][place] = value
        return changed


def _norm(values: Params) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values.values()))


def _normal(like: Tensor, key: keys.Key) -> Tensor:
    return keys.normal(key, like.numel(), like.device).to(like.dtype).reshape(like.shape)
