"""FedPer (Arivazhagan et al., 2019): FedAvg on the base; the last layers stay with each client.

server   send base                                                        send
client   (base_i, head_i) <- K steps of SGD from (base, head_i)           train
server   base <- base - sum_i |T_i| (base - base_i) / sum_i |T_i|         receive
"""

from dataclasses import dataclass

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.layers import Roles, assign_roles
from pfedhn.model import Model


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedPer; all heads start equal, so a client that was never chosen has an untrained one."""

    personal: tuple[str, ...] = ("last",)  # layers that stay with the client; "last" is the last layer

    def roles(self, model: Model) -> Roles:
        return assign_roles(model, rest="shared", personal=self.personal)
