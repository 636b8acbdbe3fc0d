"""The server's read-only page, and its metrics: a listener of its own, in its own thread and event loop.

It reads what the board (`deploy.board`) has published, so neither the run nor the door waits for it. On loopback it
speaks plain HTTP. Elsewhere it speaks HTTPS with the server's certificate and asks for a token. A web page of somebody
else cannot read it: the Host header must name this server, and no other origin is allowed to see an answer.
"""

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pfedhn.deploy.board import Board
from pfedhn.deploy.certificates import SERVER, SERVER_KEY
from pfedhn.deploy.listener import Listener
from pfedhn.deploy.prometheus import CONTENT_TYPE, to_text
from pfedhn.errors import UserError
from pfedhn.system.files import read_text, write_atomically

LOOPBACK, PORT = "127.0.0.1", 9480
MAX_CONNECTIONS = 64  # half of them from one address
SECONDS_BETWEEN_LOOKS = 5.0  # at idle connections
SECONDS_BETWEEN_RENDERINGS = 0.5  # of one answer, however many people look
TOKEN_FILE = "page-token"  # noqa: S105 - the name of a file
FILES = {"page.css": "text/css", "page.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Of every answer: nothing is loaded from elsewhere, framed by others or kept."""


@dataclass(frozen=True)
class Place:
    """The address of the page."""

    host: str = LOOPBACK
    port: int = PORT
    is_chosen: bool = False  # by the operator; a port that was not may be replaced by a free one
    has_metrics: bool = False

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        literal = _literal(self.host)
        return literal is not None and literal.is_loopback


def read_place(text: str | None, has_metrics: bool = False) -> Place:
    """The place that `--page` names: PORT or HOST:PORT."""
    if text is None:
        return Place(has_metrics=has_metrics)
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"`--page` must be PORT or HOST:PORT, got {text!r}; give --page {PORT}, for example.")
    return Place(host.strip("[]") or LOOPBACK, int(port), True, has_metrics)


def load_or_make_token(folder: Path) -> str:
    """The token of a page that is not on loopback; it stays the same, so that open pages survive a restart."""
    file = folder / TOKEN_FILE
    if not file.exists():
        write_atomically(file, secrets.token_urlsafe(32).encode(), mode=0o600)
    return read_text(file).strip()


@dataclass
class Rendered:
    """An answer that is made anew at most every `SECONDS_BETWEEN_RENDERINGS`."""

    make: Callable[[], Any]
    content: bytes = b""
    made: float = field(default=float("-inf"))

    def __call__(self) -> bytes:
        now = time.monotonic()
        if now - self.made >= SECONDS_BETWEEN_RENDERINGS:
            self.content, self.made = json.dumps(self.make(), allow_nan=False).encode(), now
        return self.content


class Page:
    """The page as an application.

    Args:
        board: Has the state that is shown.
        hosts: Names under which the page may be asked for, beside every IP address if there is a token.
        token: Who looks must know it; empty on loopback.
        has_metrics: Whether /metrics is there.
        is_secure: Whether it is served over HTTPS.
        used: Called with the other side of a connection that has asked for something it may see.
    """

    def __init__(
        self,
        board: Board,
        hosts: frozenset[str],
        token: str = "",
        has_metrics: bool = False,
        is_secure: bool = False,
        used: Callable[[tuple[str, int]], None] = lambda peer: None,
    ) -> None:
        self.board, self.hosts, self.token, self.is_secure, self.used = board, hosts, token, is_secure, used
        folder = Path(__file__).parent
        self._files = {name: (folder / name).read_bytes() for name in ("page.html", *FILES)}
        self._state, self._curves = Rendered(board.state), Rendered(board.curves)
        # Cookies know no ports: two federations on one machine must not overwrite each other's.
        self._cookie = f"pfedhn-{re.sub('[^A-Za-z0-9]', '', str(board.about.get('run', 'page')))}"
        routes = [
            Route("/", self._page),
            *(Route(f"/{name}", self._file) for name in FILES),
            Route("/state", self._json(self._state)),
            Route("/curves", self._json(self._curves)),
        ]
        if has_metrics:
            routes.append(Route("/metrics", self._metrics))
        self.app: ASGIApp = Guarded(Starlette(routes=routes), self)

    async def _page(self, request: Request) -> Response:
        return Response(self._files["page.html"], media_type="text/html; charset=utf-8")

    async def _file(self, request: Request) -> Response:
        name = request.url.path[1:]
        return Response(self._files[name], media_type=f"{FILES[name]}; charset=utf-8")

    def _json(self, rendered: Rendered) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return Response(rendered(), media_type="application/json")

        return answer

    async def _metrics(self, request: Request) -> Response:
        return Response(to_text(self.board).encode(), headers={"Content-Type": CONTENT_TYPE})

    def refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not see anything; None for one that may."""
        if not self._is_host(request.headers.get("host", "")):
            return PlainTextResponse("This server has another name; use the address that it printed.\n", 421)
        if not self.token:
            return None
        if (given := request.query_params.get("token")) is not None and self._is_token(given):
            answer = RedirectResponse(request.url.path, 303)  # the token does not stay in the address bar
            answer.set_cookie(self._cookie, self.token, httponly=True, samesite="lax", secure=self.is_secure)
            return answer
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(self._cookie, "")) or (kind == "Bearer" and self._is_token(bearer)):
            return None
        return HTMLResponse(ENTRANCE, 401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _is_host(self, header: str) -> bool:
        """Whether the Host header names this server; a name of somebody else's that leads here does not."""
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(:\d+)?", header)
        if found is None:
            return False
        host = found[1].strip("[]").rstrip(".").lower()
        return host in self.hosts or (bool(self.token) and _literal(host) is not None)


ENTRANCE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Federation</title><link rel="icon" href="data:,">
<p>This page needs its token. The server keeps it in the file <code>page-token</code> of its state folder.</p>
<form action="/" method="get"><input name="token" type="password" aria-label="token" autocomplete="off">
<button>Open</button></form></html>
"""


class Guarded:
    """Lets no request through to an application that the page refuses, and adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp, page: Page) -> None:
        self.app, self.page = app, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        request = Request(scope)
        refusal = self.page.refusal(request)
        if request.client is not None and refusal is None:
            self.page.used((request.client.host, request.client.port))
        await (refusal or self.app)(scope, receive, send_guarded)


class OpenPage:
    """The page at work.

    Args:
        board: Has the state that is shown.
        place: The address.
        folder: The server's, with its certificate and the token.
        address: The address of the server, whose host name the page may be asked for by.
    """

    def __init__(self, board: Board, place: Place, folder: Path, address: str) -> None:
        self.place, self.folder = place, folder
        self.listener = self._listener()
        is_secure = not place.is_loopback
        hosts = {"localhost", "127.0.0.1", "::1", place.host.lower()}
        if is_secure:
            hosts |= {address.rpartition(":")[0].strip("[]").lower(), socket.gethostname().lower()}
        token = load_or_make_token(folder) if is_secure else ""
        page = Page(board, frozenset(hosts), token, place.has_metrics, is_secure, self.listener.used)
        certificate = {"ssl_certfile": str(folder / SERVER), "ssl_keyfile": str(folder / SERVER_KEY)}
        self.config = uvicorn.Config(
            page.app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="critical", access_log=False,
            server_header=False, timeout_keep_alive=60, timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=32_768, **(certificate if is_secure else {}),  # type: ignore[arg-type]
        )  # fmt: skip
        self.server = uvicorn.Server(self.config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="page")
        shown = place.host if place.host not in ("0.0.0.0", "::") else address.rpartition(":")[0]  # noqa: S104
        shown = f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown
        self.address = f"http{'s' * is_secure}://{shown}:{self.listener.getsockname()[1]}/"

    def _listener(self) -> Listener:
        try:
            return Listener.on(self.place.host, self.place.port, MAX_CONNECTIONS)
        except UserError as error:
            if not self.place.is_chosen:
                return Listener.on(self.place.host, 0, MAX_CONNECTIONS)
            raise UserError(str(error).replace("give another --port", "give another --page or --no-page")) from None

    async def _serve(self) -> None:
        watch = asyncio.ensure_future(self._watch())
        try:
            await self.server.serve(sockets=[self.listener])
        finally:
            watch.cancel()
            while self.listener.open:
                self.listener.close_idle(at_once=True)
                await asyncio.sleep(0.01)

    async def _watch(self) -> None:
        certificate = self.folder / SERVER
        known = certificate.stat().st_mtime if self.config.ssl is not None else 0.0
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            self.listener.close_idle()
            if self.config.ssl is not None and (now := certificate.stat().st_mtime) != known:
                self.config.ssl.load_cert_chain(certificate, self.folder / SERVER_KEY)
                known = now

    def __enter__(self) -> "OpenPage":
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join(5)
        self.listener.close()


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
