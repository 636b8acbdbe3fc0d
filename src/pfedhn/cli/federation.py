"""What the commands of a real federation share."""

import importlib.util
import json
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pfedhn.errors import missing_extra, printable
from pfedhn.screen import say

StateOption = Annotated[
    Path, typer.Option("--state", metavar="DIR", help="The server's folder: keys, invitations, checkpoints, log.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print what happens as JSON, an object per line.")]


def need_the_extra() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise missing_extra("a federation of real parties", "federation")


def own_address(port: int) -> str:
    return f"{socket.getfqdn()}:{port}"


def sayer(as_json: bool) -> Any:
    """What shows events to a person."""

    def show(event: Mapping[str, Any]) -> None:
        if as_json:
            say(json.dumps(dict(event)))
        elif (sentence := _sentence(event)) is not None:
            say(f"{time.strftime('%H:%M:%S')}  {printable(sentence)}")
        sys.stdout.flush()

    return show


def _sentence(event: Mapping[str, Any]) -> str | None:
    kind = event["event"]
    if kind == "accepted":
        return None
    if kind == "heard":
        return _heard(event)
    if kind == "refused":
        return f"refused: {event['sentence']}"
    if kind == "evaluated":
        scores = ", ".join(f"{split} {event[split]:.4f}" for split in ("validation", "test") if split in event)
        return f"round {event['round']}: {event['parties']} parties tested; {scores}"
    rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "time"))
    return f"{kind}: {rest}" if rest else str(kind)


def _heard(event: Mapping[str, Any]) -> str:
    if event["kind"] == "refusal":
        return f"could not answer: {event['sentence']}"
    done = {"train": "trained", "evaluate": "tested"}[event["kind"]]
    parts = []
    for split, (loss, correct, count) in event["scores"].items():
        if count:
            parts.append(f"{split} {loss / count:.4f}" if correct is None else f"{split} {correct / count:.4f}")
    return f"round {event['round']}: {done}; {', '.join(parts)}"
