"""FedBN (Li, Jiang, Zhang, Kamp, Dou, ICLR 2021): FedAvg; every client keeps its own BatchNorm layers.

    server   send w, all weights but those of BatchNorm                                       send
    client   (w_i, gamma_i, beta_i) <- K steps of SGD from (w, gamma_i, beta_i)               train
             keep gamma_i, beta_i and the running mean and variance; return w - w_i
    server   w <- w - sum_i |T_i| (w - w_i) / sum_i |T_i|                                     receive

BatchNorm layers are found by their type, at any depth and under any name. A network without them is trained as by
FedAvg, and a warning says so. A client that was never chosen has the initial gamma, beta and statistics; one that joins
starts from them, makes statistics of its own batches and trains gamma and beta.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.keys import Key
from pfedhn.layers import Roles, assign_roles, batch_norms
from pfedhn.model import Model
from pfedhn.params import Params

logger = logging.getLogger("pfedhn")


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedBN; running statistics stay with their client too, as for every method by default."""

    def roles(self, model: Model) -> Roles:
        return assign_roles(model, rest="shared", personal=batch_norms(model))

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        for name in (name for name, model in models.items() if not batch_norms(model)):
            logger.warning("%s has no BatchNorm layer with weights, so FedBN trains it as FedAvg does.", name)
        return super().init_shared(models, starts, key)
