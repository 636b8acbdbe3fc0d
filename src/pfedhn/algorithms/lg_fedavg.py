"""LG-FedAvg (Liang et al., 2020): lower layers stay with each client, the top layers are averaged.

    before   FedAvg to w; every client copies the whole of w                   the run named by `pretrain`; init_private
    server   send the global part                                              send
    client   (local_i, global_i) <- K steps of SGD from (local_i, global)      train
    server   global <- global - mean_i (global - global_i)                     receive

Differs: the authors' CIFAR-10 script shares the convolutions and keeps the fully connected layers, the reverse of
their definition, and chooses rounds on test data. This is the definition; `global_layers` can run the other form.
"""

from dataclasses import dataclass

from pfedhn.algorithm import Rule
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.layers import Roles, assign_roles
from pfedhn.model import Model


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """LG-FedAvg; the personal model is the client's own lower layers under the current global top."""

    global_layers: tuple[str, ...] = ("last",)  # layers that are shared; all others stay with the client
    rule: Rule = "mean"  # how a cohort's updates combine: "mean", "sum" or "size" (weighted by training examples)

    def roles(self, model: Model) -> Roles:
        return assign_roles(model, rest="personal", settings={"shared": "global_layers"}, shared=self.global_layers)
