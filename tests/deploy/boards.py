"""Boards of federations that never were, for tests of what is shown of a server."""

import math
import random
from typing import Any

from pfedhn.cli.federation import sentence_of
from pfedhn.deploy.board import Board

HOURS = 3_600.0


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_760_000_000.0

    def __call__(self) -> float:
        return self.now


def results(names: list[str], number: int, generator: random.Random, is_loss: bool = False) -> dict[str, Any]:
    """The scores of an evaluation: parties learn, each to a level of its own."""
    found = {}
    for place, name in enumerate(names):
        count = 40 + 20 * (place % 4)
        share = 1 - math.exp(-number / 12) * 0.6 - 0.05 * (place % 5) + generator.uniform(-0.02, 0.02)
        right = max(0, min(count, round(count * share * 0.95)))
        scores = [3.0 * count * (1.1 - share), None if is_loss else float(right), count]
        found[name] = {"validation": scores, "test": scores}
    return found


def party(**changed: Any) -> dict[str, Any]:
    """What `Server.status` says of a party."""
    usual = {
        "is_present": True, "is_aside": False, "is_spent": False, "architecture": "mlp-32", "size": 240,
        "phase": "training", "last_round": 118, "refused": {},
    }  # fmt: skip
    return usual | changed


def status(parties: dict[str, Any], round: int, **changed: Any) -> dict[str, Any]:
    """What `Service` writes at every event."""
    usual = {
        "run": "4f2a9c01d3e87b65", "round": round, "num_rounds": 300, "has_started": True, "has_ended": False,
        "accepted": round * len(parties), "max_staleness": 0, "evaluated": round, "scores": {}, "chosen": round,
        "bytes_down": 480_000 * round, "bytes_up": 240_000 * round, "wire_down": 700_000 * round,
        "wire_up": 250_000 * round, "parties": parties,
    }  # fmt: skip
    return usual | changed


def board(
    parties: dict[str, Any], rounds: int = 120, is_loss: bool = False, every: int = 2, **changed: Any
) -> tuple[Board, Clock]:
    """The board of a run after these rounds, each a minute long."""
    clock, generator = Clock(), random.Random(0)
    about = {
        "name": "clinics", "run": "4f2a9c01d3e87b65", "address": "server.example.org:9443", "method": "pfedhn-pc",
        "network": "mlp-32", "version": "0.1.0",
    }  # fmt: skip
    made, history = Board(about, sentence_of, clock), list[Any]()
    for name in parties:
        made.hear({"event": "joined", "party": name})
    for number in range(1, rounds + 1):
        clock.now += 60.0
        if number % every == 0:
            history.append({"round": number, "results": results(list(parties), number, generator, is_loss)})
            last = history[-1]["results"]
            mean = sum(scores["test"][0 if is_loss else 1] for scores in last.values()) / sum(
                scores["test"][2] for scores in last.values()
            )
            mean = -mean if is_loss else mean
            changed["scores"] = {"validation": mean, "test": mean}
            made.hear({"event": "evaluated", "round": number, "parties": len(parties), "test": mean})
        made.hear({"event": "accepted", "party": next(iter(parties))})
        made.hear({"event": "round", "round": number, "parties": list(parties)})
        made.publish(status(parties, number, **changed), history)
    clock.now += 12.0
    return made, clock
