"""How a server and its parties use the plan that they have in common."""

from dataclasses import asdict, replace
from typing import Any, Literal, TypeAlias

from pfedhn import keys
from pfedhn.algorithm import NO_EXTRAS
from pfedhn.engine.plan import Plan
from pfedhn.engine.round import Exchange
from pfedhn.storage.files import digest
from pfedhn.storage.identity import constants_digest, method_name, robust_name, settings_of, transform_name

Phase: TypeAlias = Literal["training", "joining"]
"""Of a party: it takes part in training, or joins when that has ended and the server's memory is frozen."""


def exchange_of(plan: Plan, phase: Phase) -> Exchange:
    """The two halves of every round of a phase."""
    if phase == "training":
        return plan.exchange
    return replace(plan.exchange, seed=int(keys.fold(plan.seed, "new client", 0)), is_frozen=True)


def plan_digest(plan: Plan) -> str:
    """A name for the whole plan: two sides whose names differ would not compute the same."""
    networks = {
        name: [str(model.dtype), {part: list(shape) for part, shape in model.shapes.items()}]
        for name, model in plan.models.items()
    }
    wire = [[transform_name(transform), settings_of(transform)] for transform in (plan.upload, plan.download)]
    method = [method_name(plan.algorithm), settings_of(plan.algorithm)]
    younger = {"select": "metric", "patience": None}  # left out, since earlier versions did not have them
    schedule = {
        name: value for name, value in asdict(plan.schedule).items() if name not in younger or value != younger[name]
    }
    parts = [method, networks, schedule, plan.seed, plan.num_clients, wire, plan.joining_rounds]
    constants = constants_digest(plan.models)  # a base that the parties must have in common
    parts += [] if constants is None else [constants]
    extras = {name: asdict(one) for name, one in plan.extras.items() if one != NO_EXTRAS}
    more: dict[str, Any] = {"extras": extras} if extras else {}
    if plan.robust is not None:
        more["robust"] = [robust_name(plan.robust), settings_of(plan.robust)]
    return digest([*parts, more] if more else parts)
