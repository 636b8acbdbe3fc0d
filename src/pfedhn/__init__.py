"""Personalized federated learning: every client gets its own model."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "ALGORITHMS": "pfedhn.algorithms",
    "APFL": "pfedhn.algorithms.apfl",
    "AdamW": "pfedhn.sgd",
    "AdaptiveNorm": "pfedhn.engine.robust",
    "Attack": "pfedhn.engine.attack",
    "ConvBlock": "pfedhn.kernels.conv",
    "CoordinateMedian": "pfedhn.engine.robust",
    "Ditto": "pfedhn.algorithms.ditto",
    "Embeddings": "pfedhn.algorithms.embeddings",
    "FedALA": "pfedhn.algorithms.fedala",
    "FedAMP": "pfedhn.algorithms.fedamp",
    "FedAvg": "pfedhn.algorithms.fedavg",
    "FedBABU": "pfedhn.algorithms.fedbabu",
    "FedBN": "pfedhn.algorithms.fedbn",
    "FedDBE": "pfedhn.algorithms.feddbe",
    "FedPAC": "pfedhn.algorithms.fedpac",
    "FedPer": "pfedhn.algorithms.fedper",
    "FedProto": "pfedhn.algorithms.fedproto",
    "FedProx": "pfedhn.algorithms.fedprox",
    "FedRep": "pfedhn.algorithms.fedrep",
    "FedRoD": "pfedhn.algorithms.fedrod",
    "Federation": "pfedhn.data.federation",
    "Fold": "pfedhn.data.dealing",
    "LGFedAvg": "pfedhn.algorithms.lg_fedavg",
    "LeNet": "pfedhn.models",
    "Linear": "pfedhn.kernels.linear",
    "Local": "pfedhn.algorithms.local",
    "MLP": "pfedhn.models",
    "MRMTL": "pfedhn.algorithms.mr_mtl",
    "NewClient": "pfedhn.runs.joining",
    "NewClients": "pfedhn.runs.joining",
    "OmniglotNet": "pfedhn.models",
    "PFedGraph": "pfedhn.algorithms.pfedgraph",
    "PFedHN": "pfedhn.algorithms.pfedhn",
    "PFedHNShared": "pfedhn.algorithms.pfedhn_shared",
    "PFedLHN": "pfedhn.algorithms.pfedlhn",
    "PFedMe": "pfedhn.algorithms.pfedme",
    "PerFedAvg": "pfedhn.algorithms.per_fedavg",
    "PerParty": "pfedhn.engine.robust",
    "Privacy": "pfedhn.privacy",
    "Run": "pfedhn.runs.run",
    "SGD": "pfedhn.sgd",
    "Scaffold": "pfedhn.algorithms.scaffold",
    "TabularMLP": "pfedhn.models",
    "TrimmedMean": "pfedhn.engine.robust",
    "UserError": "pfedhn.errors",
    "averaged": "pfedhn.combinators",
    "by_classes": "pfedhn.data.partition",
    "by_coarse_class": "pfedhn.data.partition",
    "by_group": "pfedhn.data.partition",
    "datasets": "pfedhn.datasets",
    "dirichlet": "pfedhn.data.partition",
    "fine_tuned": "pfedhn.combinators",
    "load": "pfedhn.runs.load",
    "set_up_process": "pfedhn.system.process",
    "train": "pfedhn.runs.train",
    "with_statistics": "pfedhn.combinators",
}
"""Where each public name lives. It is imported when it is asked for: `set_up_process` must come before PyTorch."""

if TYPE_CHECKING:
    from pfedhn import datasets
    from pfedhn.algorithms import ALGORITHMS
    from pfedhn.algorithms.apfl import APFL
    from pfedhn.algorithms.ditto import Ditto
    from pfedhn.algorithms.embeddings import Embeddings
    from pfedhn.algorithms.fedala import FedALA
    from pfedhn.algorithms.fedamp import FedAMP
    from pfedhn.algorithms.fedavg import FedAvg
    from pfedhn.algorithms.fedbabu import FedBABU
    from pfedhn.algorithms.fedbn import FedBN
    from pfedhn.algorithms.feddbe import FedDBE
    from pfedhn.algorithms.fedpac import FedPAC
    from pfedhn.algorithms.fedper import FedPer
    from pfedhn.algorithms.fedproto import FedProto
    from pfedhn.algorithms.fedprox import FedProx
    from pfedhn.algorithms.fedrep import FedRep
    from pfedhn.algorithms.fedrod import FedRoD
    from pfedhn.algorithms.lg_fedavg import LGFedAvg
    from pfedhn.algorithms.local import Local
    from pfedhn.algorithms.mr_mtl import MRMTL
    from pfedhn.algorithms.per_fedavg import PerFedAvg
    from pfedhn.algorithms.pfedgraph import PFedGraph
    from pfedhn.algorithms.pfedhn import PFedHN
    from pfedhn.algorithms.pfedhn_shared import PFedHNShared
    from pfedhn.algorithms.pfedlhn import PFedLHN
    from pfedhn.algorithms.pfedme import PFedMe
    from pfedhn.algorithms.scaffold import Scaffold
    from pfedhn.combinators import averaged, fine_tuned, with_statistics
    from pfedhn.data.dealing import Fold
    from pfedhn.data.federation import Federation
    from pfedhn.data.partition import by_classes, by_coarse_class, by_group, dirichlet
    from pfedhn.engine.attack import Attack
    from pfedhn.engine.robust import AdaptiveNorm, CoordinateMedian, PerParty, TrimmedMean
    from pfedhn.errors import UserError
    from pfedhn.kernels.conv import ConvBlock
    from pfedhn.kernels.linear import Linear
    from pfedhn.models import MLP, LeNet, OmniglotNet, TabularMLP
    from pfedhn.privacy import Privacy
    from pfedhn.runs.joining import NewClient, NewClients
    from pfedhn.runs.load import load
    from pfedhn.runs.run import Run
    from pfedhn.runs.train import train
    from pfedhn.sgd import SGD, AdamW
    from pfedhn.system.process import set_up_process

__all__ = [
    "ALGORITHMS",
    "APFL",
    "AdamW",
    "AdaptiveNorm",
    "Attack",
    "ConvBlock",
    "CoordinateMedian",
    "Ditto",
    "Embeddings",
    "FedALA",
    "FedAMP",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedDBE",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "Federation",
    "Fold",
    "LGFedAvg",
    "LeNet",
    "Linear",
    "Local",
    "MLP",
    "MRMTL",
    "NewClient",
    "NewClients",
    "OmniglotNet",
    "PFedGraph",
    "PFedHN",
    "PFedHNShared",
    "PFedLHN",
    "PFedMe",
    "PerFedAvg",
    "PerParty",
    "Privacy",
    "Run",
    "SGD",
    "Scaffold",
    "TabularMLP",
    "TrimmedMean",
    "UserError",
    "averaged",
    "by_classes",
    "by_coarse_class",
    "by_group",
    "datasets",
    "dirichlet",
    "fine_tuned",
    "load",
    "set_up_process",
    "train",
    "with_statistics",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pfedhn' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if name == "datasets" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
