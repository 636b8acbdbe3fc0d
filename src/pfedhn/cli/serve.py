"""`pfedhn serve`: the server of a federation of real parties."""

from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from typer import Argument, Option

from pfedhn.cli.federation import JsonOption, StateOption, need_the_extra, sentence_of, standing, watched
from pfedhn.errors import UserError
from pfedhn.system.screen import say


def serve(
    spec: Annotated[
        Path | None, Argument(metavar="[SPEC]", help="The federation's file; not needed to resume one.")
    ] = None,
    state: StateOption = Path("federation"),
    host: Annotated[str | None, Option(help="The network address to listen on.", show_default="all")] = None,
    port: Annotated[
        int | None, Option(help="The port; it is the only one that parties need.", show_default="9443")
    ] = None,
    address: Annotated[
        str | None, Option(metavar="HOST:PORT", help="The address that parties connect to; this machine's name.")
    ] = None,
    leave: Annotated[
        bool, Option("--leave", help="Exit when training has ended; without it, others can still join.")
    ] = False,
    page: Annotated[
        str | None,
        Option(
            metavar="[HOST:]PORT",
            help="Where the page is that shows the run; with another host than localhost it needs a token.",
            show_default="127.0.0.1:9480",
        ),
    ] = None,
    no_page: Annotated[bool, Option("--no-page", help="Serve no page.")] = False,
    metrics: Annotated[bool, Option("--metrics", help="Add /metrics to the page, for Prometheus.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a federation of real parties, each with its own data.

    Creates certificates and keys at the first start. After any interruption, the
    same command continues from the last update that was accepted; host, port and
    address stay as they were unless others are given.

    \b
    [bold]Examples[/]
      pfedhn serve clinics.toml --state clinics
      pfedhn serve --state clinics
      pfedhn serve --state clinics --page 8080 --metrics
    """
    need_the_extra()
    import threading

    from pfedhn.deploy.page import read_place
    from pfedhn.deploy.serve import Service
    from pfedhn.deploy.site import Site
    from pfedhn.system.files import claimed, make_folder
    from pfedhn.system.process import stop_requests

    if no_page and (page is not None or metrics):
        raise UserError("--no-page serves neither a page nor metrics; leave it out, or --page and --metrics.")
    place = None if no_page else read_place(page, metrics)
    make_folder(state, mode=0o700)
    stop = threading.Event()
    with claimed(state, 5.0), stop_requests(lambda number: stop.set()):
        site = Site.make(state, spec, address, host, port)  # here: a server that is at work keeps its settings
        if not as_json:
            say(f"Invite parties with: pfedhn invite NAME --state {state}")

        def look() -> list[RenderableType]:
            return standing(site.known(), site.invitations.names(), site.invitations.revoked())

        with watched(as_json, look) as show:
            Service(site, leave, show, place, sentence_of).run(stop)
    if not as_json:
        say(f"Where it stands: pfedhn status --state {state}")
