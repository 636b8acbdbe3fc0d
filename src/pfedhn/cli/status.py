"""`pfedhn status`: where a federation stands."""

import json
from pathlib import Path

from pfedhn.cli.federation import StateOption, need_the_extra, standing
from pfedhn.cli.options import JsonOption
from pfedhn.system.screen import Screen, say


def status(state: StateOption = Path("federation"), as_json: JsonOption = False) -> None:
    """Show the state of a federation: rounds, scores, bytes, who is connected, what was refused.

    \b
    [bold]Example[/]
      pfedhn status --state clinics
    """
    need_the_extra()
    from pfedhn.deploy.site import Site
    from pfedhn.system.files import is_claimed

    site = Site(state)
    known, invited = site.known(), site.invitations.names()
    is_served = is_claimed(state)
    if as_json:
        say(json.dumps({**known, "invited": invited, "revoked": site.invitations.revoked(), "is_served": is_served}))
        return
    screen = Screen()
    for part in standing(known, invited, site.invitations.revoked(), is_served):
        screen.print(part, highlight=False, soft_wrap=isinstance(part, str))
