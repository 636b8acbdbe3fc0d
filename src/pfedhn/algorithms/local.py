"""Local training: every client trains a model of its own and sends nothing. What a federated method has to beat.

client   theta_i <- K steps of SGD from theta_i     train
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pfedhn.algorithm import Group
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, zeros_like
from pfedhn.sgd import SGD, Batches, Rate


class Private(NamedTuple):
    weights: Params
    velocity: Params  # survives between rounds: cutting one long training into rounds must not change it


@dataclass(frozen=True)
class Local:
    """Local training, from one common start."""

    local_lr: Rate = 1e-2
    local_steps: int = 50
    local_momentum: float = 0.9
    local_weight_decay: float = 5e-5
    local_clip: float | None = None

    usual_cohort_size = 5
    communicates = False
    num_personalize_batches = 0

    @property
    def num_batches(self) -> int:
        return self.local_steps

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> "Local":
        return self

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> tuple[()]:
        return ()

    def init_row(self, key: Key, descriptor: Tensor | None) -> tuple[()]:
        return ()

    def join_row(self, shared: tuple[()], rows: tuple[()], descriptor: Tensor | None) -> tuple[()]:
        return ()

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        return Private(start, zeros_like(start))

    def send(self, model: Model, shared: tuple[()], row: tuple[()]) -> Params:
        return {}

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        sgd = SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)
        return {}, Private(*sgd.run(model.loss, private.weights, batches, velocity=private.velocity))

    def receive(self, shared: tuple[()], groups: Sequence[Group]) -> tuple[tuple[()], list[tuple[()]]]:
        return shared, [group.rows for group in groups]

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return private.weights
