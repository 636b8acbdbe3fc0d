"""`pfedhn backup`: copy a federation's folder while it is at work."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from pfedhn.cli.federation import StateOption, need_the_extra
from pfedhn.system.screen import say


def backup(
    copy: Annotated[Path, Argument(metavar="COPY", help="A new folder for the backup.")],
    state: StateOption = Path("federation"),
) -> None:
    """Copy a server's or a party's folder, also while it runs.

    The copy holds private keys: keep it as safe as the folder itself.

    \b
    [bold]Examples[/]
      pfedhn backup /backup/monday --state clinics
      pfedhn serve --state /backup/monday
    """
    need_the_extra()
    from pfedhn.deploy.backup import back_up
    from pfedhn.errors import UserError
    from pfedhn.system.files import given_path

    if not state.is_dir():
        raise UserError(f"{state} is no folder; give the folder of a server or a party.")
    count = back_up(state, given_path(copy))
    say(f"{count} files are in {copy}.")
