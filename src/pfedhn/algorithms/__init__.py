"""Every method, by the name users give it: the only table of them."""

from collections.abc import Callable
from typing import Any

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.fedper import FedPer
from pfedhn.algorithms.lg_fedavg import LGFedAvg
from pfedhn.algorithms.local import Local
from pfedhn.algorithms.per_fedavg import PerFedAvg
from pfedhn.algorithms.pfedhn import PFedHN, pfedhn_pc
from pfedhn.algorithms.pfedme import PFedMe

ALGORITHMS: dict[str, Callable[..., Any]] = {
    "pfedhn": PFedHN,
    "pfedhn-pc": pfedhn_pc,
    "local": Local,
    "fedavg": FedAvg,
    "per-fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "lg-fedavg": LGFedAvg,
    "fedper": FedPer,
}
