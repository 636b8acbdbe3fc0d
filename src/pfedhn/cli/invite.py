"""`pfedhn invite`: let a party take part, or take it out."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from pfedhn.cli.federation import StateOption, need_the_extra
from pfedhn.errors import UserError
from pfedhn.system.screen import say


def invite(
    name: Annotated[str, Argument(metavar="NAME", help="The party's name.")],
    state: StateOption = Path("federation"),
    out: Annotated[Path | None, Option(metavar="FILE", help="The bundle; NAME.invite.")] = None,
    key: Annotated[
        Path | None, Option("--public-key", metavar="FILE", help="The public key of a party that has its own.")
    ] = None,
    replace: Annotated[bool, Option("--replace", help="Replace the key of a party without asking.")] = False,
    revoke: Annotated[bool, Option("--revoke", help="Remove the party: its key is no longer accepted.")] = False,
) -> None:
    """Invite a party: write a bundle that lets it join once.

    The bundle is a secret until it is used: send it over a secure channel.
    Inviting a party again replaces its key, so the command asks first.

    \b
    [bold]Examples[/]
      pfedhn invite lyon --state clinics
      pfedhn invite lyon --state clinics --revoke
    """
    need_the_extra()
    from pfedhn.deploy.certificates import AUTHORITY
    from pfedhn.deploy.signing import write_private
    from pfedhn.deploy.site import Site
    from pfedhn.system.files import given_path, read_text

    site = Site(state)
    if revoke:
        site.revoke(name)
        say(f"{name} is taken out.")
        return
    if not (state / AUTHORITY).exists():
        raise UserError(f"{state} has no certificates yet; start `pfedhn serve` first.")
    if site.invitations.has_key(name) and not replace:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UserError(f"{name} has enrolled a key, which a new invitation replaces; add --replace to do so.")
        if not typer.confirm(f"{name} has enrolled a key. Replace it?", default=False):
            raise UserError(f"{name} keeps its key.")
    bundle = site.invite(name, None if key is None else read_text(given_path(key)))
    file = out or Path(f"{name}.invite")
    write_private(file, json.dumps(asdict(bundle), indent=1).encode())
    say(f"Give {file} to {name}, who runs: pfedhn join {file} --data PATH")
