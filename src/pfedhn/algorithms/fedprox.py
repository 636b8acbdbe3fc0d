"""FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020): FedAvg whose clients are held to the shared model.

    server   send w                                                                     send
    client   w_i <- K steps of SGD from w on L_i(w_i) + mu/2 |w_i - w|^2                train
             return w - w_i
    server   w <- w - sum_i |T_i| (w - w_i) / sum_i |T_i|                               receive

The gradient of the proximal term, mu (w_i - w), joins that of the loss after clipping, as weight decay does: it is no
function of the examples. Differs: the paper lets slow clients take fewer steps, and draws clients by their size.
"""

from dataclasses import dataclass
from typing import Any

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.model import Model
from pfedhn.params import Params, subtract
from pfedhn.sgd import Batches, Rate


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx; with a strength of 0 it is FedAvg."""

    strength: Rate = 0.1  # mu, how strongly a client is held to the received w

    def train(self, model: Model, received: Params, private: Any, batches: Batches) -> tuple[Params, Any]:
        weights, _ = self.local_sgd.run(model.loss, received, batches, pull=(self.strength, received))
        return subtract(received, weights), private
