"""Local training: every client trains its own model and sends nothing. A federated method has to beat it.

client   theta_i <- K steps of SGD from theta_i     train
"""

from dataclasses import dataclass
from typing import NamedTuple

from pfedhn.algorithm import Algorithm, FineTuning, Needs, Uses
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, zeros_like
from pfedhn.settings import Fraction
from pfedhn.sgd import SGD, Batches, Rate


class Private(NamedTuple):
    weights: Params
    velocity: Params  # survives between rounds: cutting one long training into rounds must not change it


@dataclass(frozen=True)
class Local(Algorithm[tuple[()], tuple[()], Private]):
    """Local training, from one common start."""

    local_lr: Rate = 1e-2  # learning rate
    local_steps: int = 50  # K, SGD steps in one round, each on a fresh minibatch
    local_momentum: Fraction = 0.9  # momentum, which is kept between rounds
    local_weight_decay: float = 5e-5  # weight decay
    local_clip: float | None = None  # largest norm of the gradient

    @property
    def needs(self) -> Needs:
        return Needs(communication=False)

    @property
    def uses(self) -> Uses:
        return Uses(personal=("weights",))

    @property
    def num_batches(self) -> int:
        return self.local_steps

    @property
    def local_sgd(self) -> SGD:
        return SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.local_sgd)

    def init_private(self, model: Model, start: Params, key: Key) -> Private:
        return Private(start, zeros_like(start))

    def train(self, model: Model, received: Params, private: Private, batches: Batches) -> tuple[Params, Private]:
        return {}, Private(*self.local_sgd.run(model.loss, private.weights, batches, velocity=private.velocity))

    def personalize(self, model: Model, received: Params, private: Private, batches: Batches) -> Params:
        return private.weights
