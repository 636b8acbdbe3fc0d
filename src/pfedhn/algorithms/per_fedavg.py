"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020): a shared start from which one step makes a personal model.

    server   send w                                                                       send
    client   tau times, on independent batches B1, B2 (and B3):                           train
                 u   = w_i - alpha grad L(w_i; B1)
                 g   = grad L(u; B2)
                 g  -= alpha (grad L(w_i + d g; B3) - grad L(w_i - d g; B3)) / (2 d)      Hessian-free form only
                 w_i = w_i - beta g
    server   w <- w - mean_i (w - w_i)                                                    receive
    client   tested with w - alpha grad L(w; a batch of its TRAINING data)                personalize

Differs: the code that papers of 2020-21 used adapts on test batches, with two steps; this adapts on training data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.algorithm import (
    Algorithm,
    FineTuning,
    Group,
    Needs,
    Rule,
    client_weights,
    only_group,
)
from pfedhn.algorithms.fedavg import after_mean_update, only_start
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pack, take
from pfedhn.settings import ZeroOrMore
from pfedhn.sgd import SGD, Batches, Rate, gradient, scan


@dataclass(frozen=True)
class PerFedAvg(Algorithm[Params, tuple[()], tuple[()]]):
    """Per-FedAvg, first-order or Hessian-free; `local_lr` is beta, `personal_lr` alpha."""

    local_lr: Rate = 1e-2  # beta, the size of the outer step
    personal_lr: Rate = 5e-3  # alpha, the size of the inner step and of the adaptation before a test
    local_steps: int = 50  # tau, local iterations in one round; each takes two minibatches, or three if Hessian-free
    form: Literal["first-order", "hessian-free"] = "first-order"  # Hessian-free estimates the second-order term too
    difference: float = 1e-3  # d, the step of that estimate; tf32 would round it away
    personal_steps: ZeroOrMore = 1  # steps of size alpha on training minibatches before every test
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    @property
    def num_batches(self) -> int:
        return self.local_steps * self.batches_per_step

    @property
    def batches_per_step(self) -> int:
        return 2 if self.form == "first-order" else 3

    @property
    def needs(self) -> Needs:
        return Needs(
            float32=self.form == "hessian-free"
        )  # w + d g and w - d g differ by about as much as tf32 rounds w

    @property
    def num_personalize_batches(self) -> int:
        return self.personal_steps

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(SGD(self.personal_lr))

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        return only_start("Per-FedAvg", models, starts)

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared

    def train(self, model: Model, received: Params, private: tuple[()], batches: Batches) -> tuple[Params, tuple[()]]:
        start, unpack = pack(received)
        gradient_of, adapted_gradient = gradient(model.loss, unpack, is_tested=False), gradient(model.loss, unpack)

        def step(w: Tensor, batch: Batches, rates: tuple[Rate, Rate]) -> Tensor:
            alpha, beta = rates
            first, second, *third = (take(batch, i) for i in range(self.batches_per_step))
            u = w - alpha * gradient_of(w, first)
            g = adapted_gradient(u, second)
            if self.form == "hessian-free":
                d = self.difference
                change = gradient_of(w + d * g, third[0]) - gradient_of(w - d * g, third[0])
                g = g - alpha * change / (2 * d)
            return w - beta * g

        groups: Any = pytree.tree_map(
            lambda leaf: leaf.unflatten(0, (self.local_steps, self.batches_per_step)), batches
        )
        trained = scan(step, start, groups, (self.personal_lr, self.local_lr))
        return unpack(start - trained), private

    def receive(self, shared: Params, groups: Sequence[Group]) -> tuple[Params, list[tuple[()]]]:
        group = only_group(groups, "Per-FedAvg")
        return after_mean_update(shared, group, client_weights(self.rule, group.sizes)), [group.rows]

    def personalize(self, model: Model, received: Params, private: tuple[()], batches: Batches) -> Params:
        return SGD(self.personal_lr).run(model.loss, received, batches)[0]
