"""`pfedhn audit`: verify the records of a server or a party, and compare both sides."""

import json
import time
from pathlib import Path
from typing import Annotated

from typer import Argument

from pfedhn.cli.federation import need_the_extra
from pfedhn.cli.options import JsonOption
from pfedhn.system.screen import say


def audit(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder of a server or of a party.")],
    other: Annotated[
        Path | None, Argument(metavar="[DIR]", help="The folder of the other side, to compare the two.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify records: who was invited and agreed, what was asked, sent and refused.

    Server and party each keep a record of signed lines. The command ends with an
    error that names the first line that was changed, removed or added. With both
    folders, it also finds lines that one side has and the other denies.

    \b
    [bold]Examples[/]
      pfedhn audit pfedhn-lyon
      pfedhn audit clinics pfedhn-lyon
    """
    need_the_extra()
    from pfedhn.deploy.audit import compare, is_server, sides_of
    from pfedhn.errors import UserError

    folders = [folder] if other is None else [folder, other]
    if other is not None and is_server(folder) == is_server(other):
        raise UserError("give the folder of a server and that of a party; these two are of one kind.")
    sides = {is_server(one): sides_of(one) for one in folders}
    told = [
        {"party": side.party, "file": str(side.path), "lines": len(side.lines), "head": side.lines[-1]["hash"]}
        | {"until": side.lines[-1]["time"]}
        for found in sides.values()
        for side in found
        if side.lines
    ]
    found = compare(sides[True], sides[False][0]) if other is not None else None
    if as_json:
        say(json.dumps({"records": told, "comparison": None if found is None else vars(found)}))
        return
    for one in told:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(one["until"])))
        say(f"{one['file']}: {one['lines']} lines until {until} are sound; head {one['head'][:16]}.")
    if found is not None:
        say(
            f"Both sides have {found.num_asked} messages and {found.num_received} answers; "
            f"{found.num_undelivered} messages never arrived, and {found.num_unreceived} answers were not taken."
        )
