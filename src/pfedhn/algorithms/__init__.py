"""Every method, by the name users give it: the only table of them."""

from typing import Any

from pfedhn.algorithms import choices
from pfedhn.algorithms.apfl import APFL
from pfedhn.algorithms.ditto import Ditto
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
from pfedhn.algorithms.method import Method
from pfedhn.algorithms.mr_mtl import MRMTL
from pfedhn.algorithms.per_fedavg import PerFedAvg
from pfedhn.algorithms.pfedgraph import PFedGraph
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.algorithms.pfedhn_shared import PFedHNShared
from pfedhn.algorithms.pfedlhn import PFedLHN
from pfedhn.algorithms.pfedme import PFedMe
from pfedhn.algorithms.scaffold import Scaffold

# The paper's grids.
LEARNING_RATES = (1e-1, 5e-2, 1e-2, 5e-3)
PERSONAL_RATES = (5e-2, 1e-2, 5e-3, 1e-3)
LOCAL = {"local_lr": LEARNING_RATES}
TWO_LEVELS = {"lr": LEARNING_RATES, "local_lr": PERSONAL_RATES}
META = {"local_lr": LEARNING_RATES, "personal_lr": PERSONAL_RATES}

# What the paper's settings lack: an adaptive server that decays phi, embeddings that start small, an average of phi.
PLUS = {
    "optimizer": "adamw",
    "lr": 6e-4,
    "weight_decay": 0.25,
    "embedding_scale": 0.1,
    "embedding_lr": 0.03,
    "embedding_momentum": 0.0,
    "embedding_weight_decay": 0.0,
    "averaging": 0.998,
}
FINE_TUNED = {"adaptation_steps": 50}
PLUS_GRID = {"lr": (1e-4, 3e-4, 6e-4, 1e-3), "weight_decay": (0.1, 0.25, 0.5, 1.0)}
# Clients train one shared model; the hypernetwork learns what takes each of them from there to where its training ends.
# One client a round, so that a step of 0.2 is about the mean of five. What clients have in common is in that model, so
# the hypernetwork need only tell them apart: long embeddings that differ from the start, and a shallow trunk.
ON_SHARED = {
    "head": "added",
    "local_start": "shared",
    "shared_lr": 0.2,
    "embedding_scale": 1.0,
    "embedding_dim": 64,
    "num_hidden": 1,
}
SHARED_GRID = PLUS_GRID | {"fixed_layers": ((), ("last",))}

HYPERNETWORK: Any = {
    "algorithm": PFedHN,
    "wider": PFedHNShared,
    "cohort_size": 1,
    "copies": choices.copies,
    "smaller": choices.smaller,
    "joining": choices.joining,
}

# Colors of Okabe and Ito, which color-blind people can tell apart, each with its own dash.
ALGORITHMS: dict[str, Method] = {
    "pfedhn": Method("pFedHN", **HYPERNETWORK, grid=TWO_LEVELS, is_tuned=False, color="#D55E00"),
    "pfedhn-pc": Method(
        "pFedHN-PC",
        **HYPERNETWORK,
        settings={"lr": 5e-2, "personal": ("last",)},
        summary="pFedHN-PC with its authors' rates: the last layer stays with the client.",
        grid=TWO_LEVELS,
        is_tuned=False,
        color="#CC79A7",
    ),
    "pfedhn-plus": Method(
        "pFedHN+",
        **HYPERNETWORK,
        settings=PLUS,
        summary="pFedHN with stronger settings of ours: AdamW on the server, small embeddings, an average of phi.",
        grid=PLUS_GRID,
        color="#8E1B1B",
    ),
    "pfedhn-plus-pc": Method(
        "pFedHN+-PC",
        **HYPERNETWORK,
        settings=PLUS | {"personal": ("last",)},
        summary="pFedHN-PC with the stronger settings of pFedHN+.",
        grid=PLUS_GRID,
        color="#B3478F",
        dash=(0, (6, 1)),
    ),
    # Fine-tuning changes nothing in training, so that its rates are those of what it starts from.
    "pfedhn-plus-ft": Method(
        "pFedHN+-FT",
        **HYPERNETWORK,
        settings=PLUS | FINE_TUNED,
        summary="pFedHN+ with 50 steps of fine-tuning by each client before use.",
        rates_from="pfedhn-plus",
        color="#E3554A",
        dash=(0, (5, 1.5, 1, 1.5)),
    ),
    "pfedhn-plus-pc-ft": Method(
        "pFedHN+-PC-FT",
        **HYPERNETWORK,
        settings=PLUS | FINE_TUNED | {"personal": ("last",)},
        summary="pFedHN+-PC with 50 steps of fine-tuning by each client before use.",
        rates_from="pfedhn-plus-pc",
        color="#D98CC0",
        dash=(0, (6, 1, 1, 1)),
    ),
    "pfedhn-shared": Method(
        "pFedHN-S",
        **HYPERNETWORK | {"algorithm": PFedHNShared},
        settings=PLUS | FINE_TUNED | ON_SHARED,
        summary="pFedHN+-FT on top of a shared model, which is what all clients train from; embeddings are standard "
        "normal at first.",
        grid=SHARED_GRID,
        color="#F2814B",
        dash=(0, (9, 1.5)),
    ),
    # For tables: what clients have in common is one model, and the hypernetwork generates what tells them apart.
    "pfedhn-intercept": Method(
        "pFedHN (intercept)",
        **HYPERNETWORK | {"algorithm": PFedHNShared},
        settings=PLUS | {"generated": ("intercept",), "shared_lr": 0.2},
        summary="pFedHN+ that generates the intercept (the bias of the last layer) of one shared model.",
        grid=PLUS_GRID,
        color="#C44E9B",
        dash=(0, (3, 1)),
    ),
    "pfedhn-last": Method(
        "pFedHN (last layer)",
        **HYPERNETWORK | {"algorithm": PFedHNShared},
        settings=PLUS | {"generated": ("last",), "shared_lr": 0.2},
        summary="pFedHN+ that generates the last layer of one shared model.",
        grid=PLUS_GRID,
        color="#7A5195",
        dash=(0, (3, 1, 1, 1, 1, 1)),
    ),
    "local": Method("Local", Local, grid=LOCAL, color="#4D4D4D", dash=(0, (1, 1.2))),
    "fedavg": Method("FedAvg", FedAvg, grid=LOCAL, color="#0072B2", dash=(0, (5, 1.5))),
    "fedavg-ft": Method(
        "FedAvg + FT",
        FedAvg,
        settings=FINE_TUNED,
        summary="FedAvg with 50 steps of fine-tuning by each client before use.",
        grid=LOCAL,
        color="#1B3A8E",
        dash=(0, (5, 1.5, 1, 1.5)),
    ),
    "per-fedavg": Method(
        "Per-FedAvg",
        PerFedAvg,
        grid=META,
        color="#56B4E9",
        dash=(0, (7, 2)),
    ),
    "per-fedavg-hf": Method(
        "Per-FedAvg (HF)",
        PerFedAvg,
        settings={"form": "hessian-free"},
        summary="Per-FedAvg with the second-order term, by its Hessian-free estimate: four gradients an iteration.",
        grid=META,
        color="#117733",
        dash=(0, (7, 2, 1, 2)),
    ),
    "pfedme": Method(
        "pFedMe",
        PFedMe,
        grid={"lr": LEARNING_RATES, "personal_lr": PERSONAL_RATES},
        color="#E69F00",
        dash=(0, (4, 1, 1, 1, 1, 1)),
    ),
    # It goes on with FedAvg's model, and so with FedAvg's rates.
    "lg-fedavg": Method("LG-FedAvg", LGFedAvg, rates_from="fedavg", color="#8C6D31", dash=(0, (2, 1))),
    "fedper": Method("FedPer", FedPer, grid=LOCAL, color="#009E73", dash=(0, (3, 1, 1, 1))),
    "fedper-intercept": Method(
        "FedPer (intercept)",
        FedPer,
        settings={"personal": ("intercept",), "averaging": 0.95},
        summary="FedPer whose personal part is the intercept, with a moving average of the shared model.",
        grid=LOCAL,
        color="#66A61E",
        dash=(0, (5, 1, 2, 1)),
    ),
    # The strengths that Ditto's authors let a client choose from.
    "ditto": Method(
        "Ditto", Ditto, grid={**LOCAL, "strength": (0.1, 1.0, 2.0)}, color="#332288", dash=(0, (6, 1, 1, 1))
    ),
    # Of eleven epochs on CIFAR-10 and of fifteen on CIFAR-100 its authors give the head ten.
    "fedrep": Method(
        "FedRep", FedRep, grid={**LOCAL, "head_share": (0.9, 0.7, 0.5)}, color="#999933", dash=(0, (2, 1, 1, 1))
    ),
    "fedbabu": Method("FedBABU", FedBABU, grid=LOCAL, color="#882255", dash=(0, (4, 2))),
    "fedala": Method("FedALA", FedALA, grid=LOCAL, color="#DDCC77", dash=(0, (8, 1))),
    # Where alpha starts; the values of the authors' figures.
    "apfl": Method("APFL", APFL, grid={**LOCAL, "alpha": (0.25, 0.5, 0.75)}, color="#AA4499", dash=(0, (1, 1, 3, 1))),
    # The values that its authors tune over.
    "fedprox": Method(
        "FedProx",
        FedProx,
        use="Clients drift apart within a round, or take many steps; otherwise it is close to FedAvg.",
        grid={**LOCAL, "strength": (0.001, 0.01, 0.1, 1.0)},
    ),
    "fedbn": Method(
        "FedBN",
        FedBN,
        use="The network has BatchNorm and clients differ in their inputs: scanners, cameras, sensors.",
        grid=LOCAL,
    ),
    "mr-mtl": Method(
        "MR-MTL",
        MRMTL,
        use="There are few clients with much privacy noise, for which Local or FedAvg alone is worse.",
        grid={**LOCAL, "strength": (0.1, 1.0, 10.0)},
    ),
    "fedrod": Method(
        "FedRoD",
        FedRoD,
        use="Clients have different class shares, and you also want a shared model that knows all classes.",
        grid=LOCAL,
    ),
    "feddbe": Method(
        "FedDBE",
        FedDBE,
        use="Clients have different class shares and a personal model may cost no more than a vector.",
        grid={**LOCAL, "strength": (1.0, 10.0, 50.0)},
    ),
    "scaffold": Method(
        "SCAFFOLD",
        Scaffold,
        use="You want one shared model, clients take part often, and twice the bytes are no matter.",
        grid=LOCAL,
    ),
    "fedproto": Method(
        "FedProto",
        FedProto,
        use="Bytes are scarce, or networks must stay with their clients; classes must overlap.",
        grid={**LOCAL, "strength": (0.1, 1.0, 10.0)},
    ),
    "fedpac": Method(
        "FedPAC",
        FedPAC,
        use="Some clients have alike class shares, many take part in a round, and the server may know the shares.",
        grid={**LOCAL, "strength": (0.1, 1.0, 10.0)},
    ),
    "pfedgraph": Method(
        "pFedGraph",
        PFedGraph,
        use="Clients form groups, there are few of them, and all can take part in every round.",
        grid={**LOCAL, "alpha": (0.2, 0.8, 3.2)},
    ),
    "fedamp": Method(
        "FedAMP",
        FedAMP,
        use="As for pFedGraph, if clients keep their own models and are drawn only to close ones.",
        grid={**LOCAL, "sigma": (0.1, 1.0, 10.0)},
    ),
    "pfedlhn": Method(
        "pFedLHN",
        PFedLHN,
        use="As for pFedHN, if clients should differ more in some layers than in others.",
        grid={"lr": (1e-4, 3e-4, 1e-3), "local_lr": PERSONAL_RATES},
        cohort_size=1,
        joining=choices.joining,
    ),
}
