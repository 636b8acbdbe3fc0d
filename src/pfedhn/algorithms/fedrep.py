"""FedRep (Collins, Hassani, Mokhtari, Shakkottai, ICML 2021): a shared body; each client first fits its head to it.

    server   send body                                                                       send
    client   head_i <- K_h steps of SGD from head_i, with the received body frozen           train
             body_i <- K - K_h steps of SGD from body, with the new head_i frozen
             keep head_i; return body - body_i
    server   body <- body - mean_i (body - body_i)                                           receive
    client   tested with body and head_i                                                     personalize

Both phases together are the K steps of every other method. Differs: the authors count epochs, ten for the head to one
or five for the body, and let all clients fit their heads once more, for ten epochs, before the last test.
"""

from dataclasses import dataclass

from pfedhn.algorithm import Rule
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.layers import Roles, assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, pick, subtract, take
from pfedhn.settings import Fraction
from pfedhn.sgd import Batches


@dataclass(frozen=True)
class FedRep(FedAvg):
    """FedRep; all heads start equal, so a client that was never chosen has an untrained one."""

    personal: tuple[str, ...] = ("last",)  # layers of the head, which stays with the client; "last" is the last layer
    head_share: Fraction = 0.8  # of the local steps, taken first, that train the head; the others train the body
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    def roles(self, model: Model) -> Roles:
        return assign_roles(model, rest="shared", personal=self.personal)

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        head_steps = round(self.head_share * self.local_steps)
        first, second = take(batches, slice(head_steps)), take(batches, slice(head_steps, None))
        weights, _ = self.local_sgd.run(model.loss, received | private, first, frozen=received)
        weights, _ = self.local_sgd.run(model.loss, weights, second, frozen=private)
        return subtract(received, weights), pick(weights, private)
