"""Personalized federated learning with hypernetworks: a model of its own for every client."""

import os

# Before PyTorch is loaded: its threads wait for each other by spinning, and where another program has taken a core they
# spin at the one they wait for, which made a round ten times as long. A short wait costs nothing on a quiet machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.fedper import FedPer
from pfedhn.algorithms.lg_fedavg import LGFedAvg
from pfedhn.algorithms.local import Local
from pfedhn.algorithms.per_fedavg import PerFedAvg
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.algorithms.pfedme import PFedMe
from pfedhn.data.federation import Federation
from pfedhn.data.partition import by_classes, by_coarse_class, by_group, dirichlet
from pfedhn.kernels.conv import ConvBlock
from pfedhn.kernels.linear import Linear
from pfedhn.models import MLP, LeNet, OmniglotNet
from pfedhn.run import NewClient, Run, load, train

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "ConvBlock",
    "FedAvg",
    "FedPer",
    "Federation",
    "LGFedAvg",
    "LeNet",
    "Linear",
    "Local",
    "MLP",
    "NewClient",
    "OmniglotNet",
    "PFedHN",
    "PFedMe",
    "PerFedAvg",
    "Run",
    "by_classes",
    "by_coarse_class",
    "by_group",
    "dirichlet",
    "load",
    "train",
]
