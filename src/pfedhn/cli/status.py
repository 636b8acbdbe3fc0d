"""`pfedhn status`: where a federation stands."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pfedhn.cli.federation import StateOption, need_the_extra
from pfedhn.screen import Screen, say


def status(
    state: StateOption = Path("federation"),
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
) -> None:
    """Show the state of a federation: rounds, scores, bytes, who is connected, what was refused.

    \b
    [bold]Example[/]
      pfedhn status --state clinics
    """
    need_the_extra()
    from pfedhn.deploy.site import Site
    from pfedhn.files import read_text

    site = Site(state)
    known = json.loads(read_text(site.status)) if site.status.exists() else {}
    invited = site.invitations.names()
    if as_json:
        say(json.dumps({**known, "invited": invited}))
        return
    if not known:
        say(f"Invited: {', '.join(invited) or 'nobody'}. The run has not begun.")
        return
    scores = ", ".join(f"{split} {value:.4f}" for split, value in known["scores"].items())
    ended = f"; it has ended, and round {known['chosen']} was chosen" if known["has_ended"] else ""
    say(f"Round {known['round']} of {known['num_rounds']}, {known['accepted']} updates accepted{ended}.")
    if scores:
        say(f"At round {known['evaluated']}: {scores}.")
    say(f"Weights down {known['bytes_down']:,} bytes, updates up {known['bytes_up']:,}.")
    table = Table("party", "there", "examples", "network", "last round", "refused", box=None)
    for name in invited:
        party = known["parties"].get(name)
        if party is None:
            table.add_row(name, "invited")
            continue
        there = "set aside" if party["is_aside"] else "yes" if party["is_present"] else "no"
        refused = ", ".join(f"{reason} {count}" for reason, count in party["refused"].items())
        last = "" if party["last_round"] is None else str(party["last_round"])
        table.add_row(name, there, str(party["size"]), party["architecture"], last, refused)
    Screen().print(table)
