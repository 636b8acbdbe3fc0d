"""Where a server's run stands, as JSON can hold it: for `pfedhn status`, the page and metrics."""

from collections.abc import Mapping
from typing import Any

from pfedhn.deploy.contacts import Contacts
from pfedhn.deploy.state import ServerState, split_results
from pfedhn.engine.plan import Plan


def status_of(run: str, plan: Plan, state: ServerState, contacts: Contacts) -> dict[str, Any]:
    """The progress of a run and the state of its parties."""
    parties = {}
    for name, member in sorted(state.members.items()):
        parties[name] = {
            "is_present": name in contacts.present,
            "is_aside": contacts.is_aside(name),
            "is_spent": member.is_spent,
            "architecture": member.architecture,
            "size": member.size,
            "phase": member.phase,
            "last_round": member.base,
            "refused": dict(contacts.standings[name].refused),
        }
    last = state.history[-1] if state.history else None
    return {
        "run": run,
        "round": state.round,
        "num_rounds": plan.num_rounds,
        "has_started": state.has_started,
        "has_ended": state.has_ended,
        "accepted": state.num_accepted,
        "max_staleness": state.max_staleness,
        "evaluated": None if last is None else last["round"],
        "scores": {} if last is None else mean_scores(last["results"]),
        "chosen": state.best and state.best.round,
        "bytes_down": state.bytes_down,
        "bytes_up": state.bytes_up,
        "parties": parties,
    }


def mean_scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The score of each split that has examples."""
    return {split: result.score for split, result in split_results(results).items() if result.count.sum() > 0}
