"""What a table is trained with if nobody says it; chosen on validation examples (docs/tables.md)."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.find import AnyAlgorithm, find_method
from pfedhn.data.federation import Federation
from pfedhn.errors import UserError
from pfedhn.settings import names_to_set

TABLE_METHODS = ("local", "fedavg", "fedper-intercept", "pfedhn-intercept", "pfedhn-last", "pfedhn-shared")
TABLE_MODEL = "wide-32"
PARTICIPATIONS = 100  # of each client, at most
PATIENCE = 10  # participations of each client without a better validation loss, after which training stops
STEPS = (2_000, 20_000)  # at least and at most, however many clients there are
LEAST_PATIENCE = 500  # steps, of which a hypernetwork needs many
EVALUATIONS = 20  # within that patience, at most
BATCH_SIZE = 64
LOCAL_STEPS = (5, 50)  # at least and at most; one pass over the examples of a usual client in between
TABLE_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "": {"local_lr": 0.01, "local_clip": 1.0},  # of every method
    "local": {"local_weight_decay": 0.01},
    "fedavg-ft": {"adaptation_steps": 10},
    "pfedhn-shared": {"adaptation_steps": 10},
}


def usual_schedule(num_clients: int, steps: Any = None) -> dict[str, Any]:
    """How long a run is and how often it is looked at; with steps of a person, it takes all of them."""
    usual: dict[str, Any] = {"select": "loss", "evaluate_every": max(num_clients, LEAST_PATIENCE // EVALUATIONS)}
    if steps is not None:
        return usual
    least, most = STEPS
    steps = max(least, min(PARTICIPATIONS * num_clients, max(most, PATIENCE * num_clients)))
    return usual | {"steps": steps, "patience": max(PATIENCE * num_clients, LEAST_PATIENCE)}


def usual_settings(method: str, num_train: int) -> dict[str, Any]:
    """The settings of a method.

    Args:
        method: One of `ALGORITHMS`.
        num_train: The training examples of a client of median size.
    """
    least, most = LOCAL_STEPS
    usual = {"local_steps": max(least, min(most, num_train // BATCH_SIZE)), **TABLE_SETTINGS[""]}
    usual |= TABLE_SETTINGS.get(method, {})
    known = names_to_set(ALGORITHMS[method].kinds)
    return {name: value for name, value in usual.items() if name in known}


def with_usual_settings(method: str | AnyAlgorithm, federation: Federation) -> str | AnyAlgorithm:
    """A method that is given by name with the settings for a federation's table; any other as it is.

    A federation that is no table is refused.
    """
    if federation.reading is None or federation.reading.table is None:
        raise UserError(
            "model is left out, and only a federation of a table has a usual one; give a function that makes the "
            'network, or a name such as "lenet-s".'
        )
    if not isinstance(method, str) or method not in ALGORITHMS:
        return method
    sizes: Sequence[int] = federation.splits["train"].size.tolist()
    algorithm: AnyAlgorithm = find_method(method)(**usual_settings(method, round(median(sizes))))
    return algorithm
