"""What the commands of a real federation share."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from typer import Option

from pfedhn.errors import missing_extra, printable
from pfedhn.system.screen import Screen, say

StateOption = Annotated[
    Path, Option("--state", metavar="DIR", help="The server's folder: keys, invitations, checkpoints, log.")
]
JsonOption = Annotated[bool, Option("--json", help="Print what happens as JSON, an object per line.")]


def need_the_extra() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("cryptography", "httpx", "starlette", "uvicorn")):
        raise missing_extra("a federation of real parties", "federation")


def sayer(as_json: bool) -> Callable[[Mapping[str, Any]], None]:
    """What shows events to a person."""

    def show(event: Mapping[str, Any]) -> None:
        if as_json:
            say(json.dumps(dict(event)))
        elif (sentence := sentence_of(event)) is not None:
            say(f"{time.strftime('%H:%M:%S')}  {printable(sentence)}")
        sys.stdout.flush()

    return show


@contextmanager
def watched(
    as_json: bool, look: Callable[[], Sequence[RenderableType]]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """As `sayer`; at a terminal, what `look` gives stays below the events and is brought up to date."""
    if as_json or not sys.stdout.isatty():
        yield sayer(as_json)
        return
    live = Live(get_renderable=lambda: Group(*look()), console=Screen(), refresh_per_second=1)
    with live:
        yield sayer(as_json)  # its lines go above


def standing(
    known: Mapping[str, Any], invited: Sequence[str], revoked: Sequence[str] = (), is_served: bool = True
) -> list[RenderableType]:
    """Where a federation stands by what its server last wrote, line by line, and its parties as a table."""
    if not known:
        return [f"Invited: {', '.join(invited) or 'nobody'}. The run has not begun."]
    ended = f"; it has ended, and round {known['chosen']} was chosen" if known["has_ended"] else ""
    lines: list[RenderableType] = [
        f"Round {known['round']} of {known['num_rounds']}, {known['accepted']} updates accepted{ended}."
    ]
    if not is_served and not known["has_ended"]:
        lines.insert(0, "No server is at work; `pfedhn serve --state DIR` goes on.")
    if known["scores"]:
        scores = ", ".join(f"{split} {value:.4f}" for split, value in known["scores"].items())
        lines.append(f"At round {known['evaluated']}: {scores}.")
    lines.append(f"Weights down {known['bytes_down']:,} bytes, updates up {known['bytes_up']:,}.")
    table = Table("party", "there", "examples", "network", "last round", "refused", box=None)
    for name in invited:
        party = known["parties"].get(name)
        if party is None:
            table.add_row(name, "taken out" if name in revoked else "invited")
            continue
        there = "set aside" if party["is_aside"] else "yes" if party["is_present"] and is_served else "no"
        there = "taken out" if name in revoked else f"{there}, budget spent" if party.get("is_spent") else there
        refused = ", ".join(f"{reason} {count}" for reason, count in party["refused"].items())
        last = "" if party["last_round"] is None else str(party["last_round"])
        table.add_row(name, there, str(party["size"]), party["architecture"], last, refused)
    return [*lines, table]


def sentence_of(event: Mapping[str, Any]) -> str | None:
    """The event as a person reads it; None if it is not worth a line."""
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
    if kind == "alert":
        return f"alert: {event['sentence']}"
    if kind == "round":
        return f"round {event['round']}: {', '.join(event['parties'])}"
    if kind == "judged":
        found = "are used" if event["is_adapted"] else "made validation worse, and are left out"
        return f"the parties' own steps from the chosen round {found}"
    if kind == "away":
        return str(event["why"])
    if kind == "page":
        token = f"?token=..., with the token in {event['token']}" if "token" in event else ""
        return f"a page to look at: {event['address']}{token}"
    if kind in ("joined", "back", "gone", "enrolled"):
        details = f" ({event['size']} training examples, {event['architecture']})" if "size" in event else ""
        return f"{kind}: {event['party']}{details}"
    if kind == "started":
        return f"started with {', '.join(event['parties'])}"
    if kind == "comparing":
        return f"testing {event['models']} shared models at {event['sites']} sites"
    if kind == "compared":
        return event.get("why") or f"every model was tested at every site that consents, round {event['round']}"
    rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "time"))
    return f"{kind}: {rest}" if rest else str(kind)


def _heard(event: Mapping[str, Any]) -> str:
    if event["kind"] == "refusal":
        done = "test its model" if event["of"] == "scores" else "answer"
        return f"could not {done}: {event['sentence']}"
    done = {"train": "trained", "evaluate": "tested", "compare": "tested another party's model"}[event["kind"]]
    parts = []
    for split, (loss, correct, count) in event["scores"].items():
        if count:
            parts.append(f"{split} {loss / count:.4f}" if correct is None else f"{split} {correct / count:.4f}")
    if event.get("epsilon") is not None:
        parts.append(f"epsilon {event['epsilon']:.3f} spent")
    return f"round {event['round']}: {done}; {', '.join(parts)}"
