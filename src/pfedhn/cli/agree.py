"""How a person agrees to a study: it is shown before anything is enrolled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pfedhn.errors import UserError
from pfedhn.system.screen import say

if TYPE_CHECKING:  # the help of the command line needs none of it
    from pfedhn.deploy.study import Study
    from pfedhn.privacy import Privacy


def print_study(study: Study, privacy: Privacy | None, as_json: bool = False) -> None:
    """Print a study and the digest by which it can be accepted."""
    told = study.description(privacy)
    if as_json:
        say(json.dumps({**told, "spec": study.spec_text, "digest": study.digest}))
        return
    for name, text in told.items():
        say(f"{name:<11} {' '.join(text.split())}")  # a name with a line break could look like a line of ours
    say(f"{'digest':<11} {study.digest}")


def need_consent(folder: Path, study: Study, privacy: Privacy | None, accept: str | None, how: str) -> None:
    """Go on only if the party's owner agrees to just this study, now or before.

    Args:
        folder: The party's, which remembers what was agreed.
        study: What the server offers.
        privacy: The party's own.
        accept: The digest that was given on the command line.
        how: The command that shows the study.
    """
    from pfedhn.deploy.study import agree, has_agreed, has_agreed_before

    if accept is not None and accept != study.digest:
        raise UserError(
            f"the digest of this study is {study.digest}, and {accept!r:.80} was accepted; read it with `{how}`."
        )
    if has_agreed(folder, study):
        return
    if accept is None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            changed = "this is another study than was agreed to here" if has_agreed_before(folder) else (
                "nobody has agreed to this study here"
            )  # fmt: skip
            raise UserError(f"{changed}; read it with `{how}`, and join with --accept {study.digest}.")
        print_study(study, privacy)
        if has_agreed_before(folder):
            say("It is another study than you agreed to before.")
        if not typer.confirm("Take part in it?", default=False):
            raise UserError("you did not agree, and nothing was enrolled.")
    agree(folder, study)
