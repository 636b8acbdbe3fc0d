"""`pfedhn evaluate`: whose model serves which party best."""

import json
import time
from pathlib import Path
from typing import Annotated

from typer import Option

from pfedhn.cli.federation import JsonOption, StateOption, need_the_extra, sayer
from pfedhn.errors import RunError, UserError
from pfedhn.system.screen import say, table_screen

SECONDS_BETWEEN_LOOKS = 0.3


def evaluate(
    across: Annotated[bool, Option("--across", help="Test every party's model at every other party.")] = False,
    state: StateOption = Path("federation"),
    last: Annotated[bool, Option("--last", help="Print the last result, and ask nobody.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the parties' models after training: a table of sites and models.

    Only parties that were started with `pfedhn join --share-model` or
    `--test-others` take part. A server that is at work does it; otherwise this
    command serves until it is done. Methods with private layers are refused.

    \b
    [bold]Example[/]
      pfedhn evaluate --across --state clinics
    """
    need_the_extra()
    import threading

    from rich.table import Table

    from pfedhn.deploy import across as comparing
    from pfedhn.deploy.serve import Service
    from pfedhn.deploy.site import Site
    from pfedhn.system.files import claimed, is_claimed
    from pfedhn.system.process import stop_requests

    if not across:
        raise UserError("say what is evaluated; give --across.")
    site, stop = Site(state), threading.Event()
    if not last:
        if (why := comparing.why_not(site.plan)) is not None:
            raise UserError(why)
        is_served, has_ended = is_claimed(state), bool(site.known().get("has_ended"))
        if not has_ended and not is_served:
            raise UserError(f"training has not ended; continue it first: pfedhn serve --state {state}.")
        if not has_ended and not as_json:
            say("Training has not ended; the models are compared when it has.")
        comparing.request(site.folder)
        try:
            with stop_requests(lambda number: stop.set()):
                if is_served:
                    while comparing.is_requested(site.folder) and not stop.is_set():
                        stop.wait(SECONDS_BETWEEN_LOOKS)
                        if not is_claimed(state):
                            time.sleep(SECONDS_BETWEEN_LOOKS)
                            if comparing.is_requested(site.folder):
                                raise RunError("the server has stopped; run this command again.")
                else:
                    with claimed(state, 5.0):
                        Service(site, True, (lambda event: None) if as_json else sayer(False)).run(stop)
        finally:
            comparing.withdraw(site.folder)
        if stop.is_set():
            return
    result = comparing.found(site.folder)
    if result is None:
        raise UserError("no models were compared yet; leave --last out.")
    if as_json:
        say(json.dumps(result))
        return
    found = comparing.matrix(result)
    if "why" in found:
        raise RunError(found["why"])
    if not found["sites"]:
        raise RunError("no connected party consents; start parties with pfedhn join --share-model --test-others.")
    table = Table("site \\ model", box=None)
    for name in found["models"]:
        table.add_column(name, justify="right")
    digits = "{:.4g}" if found["is_loss"] else "{:.1%}"
    for site_name, line, best in zip(found["sites"], found["scores"], found["best"], strict=True):
        cells = ["" if value is None else digits.format(value) for value in line]
        marked = [f"{cell}*" if name == best else cell for name, cell in zip(found["models"], cells, strict=True)]
        table.add_row(site_name, *marked)
    screen = table_screen()
    screen.print(table, highlight=False)
    for sentence in [*found["findings"], found["note"].replace("Marked:", "With a star:")]:
        screen.print(sentence, highlight=False, soft_wrap=True)
