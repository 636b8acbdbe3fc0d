"""FedBABU (Oh, Kim, Yun, ICLR 2022): clients train a shared body under one random head, and tune the model afterward.

    before   every client makes the same random head                                     init_private
    server   send body                                                                   send
    client   body_i <- K steps of SGD from body, with the head frozen                    train
             return body - body_i
    server   body <- body - sum_i |T_i| (body - body_i) / sum_i |T_i|                    receive
    client   tested with (body, head) after s steps of SGD on its training data          fine_tuning

The steps before a test move all layers, as in the authors' experiments; `adapted="head"` moves the head alone, as their
abstract has it. Differs: the authors choose the round, unadapted as here, on test data.
"""

from dataclasses import dataclass
from typing import Literal

from pfedhn.algorithm import FineTuning
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.layers import Roles, assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, subtract
from pfedhn.settings import ZeroOrMore
from pfedhn.sgd import Batches


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """FedBABU; no head is ever sent, since all clients make it from the same key."""

    head: tuple[str, ...] = ("last",)  # layers that keep their common random initialization; "last" is the last layer
    adapted: Literal["all", "head"] = "all"  # what the steps before a test move
    adaptation_steps: ZeroOrMore = 50  # s, SGD steps that a client takes from its chosen model before using it

    def roles(self, model: Model) -> Roles:
        return assign_roles(model, rest="shared", settings={"personal": "head"}, personal=self.head)

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        weights, _ = self.local_sgd.run(model.loss, received | private, batches, frozen=private)
        return subtract(received, weights), private

    @property
    def fine_tuning(self) -> FineTuning:
        tuning = FineTuning(self.local_sgd, self.adaptation_steps)
        return tuning if self.adapted == "all" else tuning._replace(frozen=lambda model: self.roles(model).shared)
