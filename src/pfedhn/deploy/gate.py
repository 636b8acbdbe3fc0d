"""The server's only door to the outside, with TLS: parties enroll here, and reach Flower behind it.

Flower has one port for everything, and on it anybody could start programs at the server and at every party: its own
keys protect nodes, not that. So it listens on this machine alone, and what passes here is what a node needs
(`/v1/fleet/`), from nodes whose key belongs to a party that has enrolled.
"""

import base64
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pfedhn.deploy.certificates import SERVER, SERVER_KEY
from pfedhn.deploy.invitations import Invitations
from pfedhn.deploy.signing import KEY_HEADER, is_proven, public_key
from pfedhn.errors import UserError, printable

MAX_ENROLLMENT = 10_000  # bytes
MAX_STRANGERS = 100  # that are mentioned at most
SECONDS_OF_STRANGERS = 60.0  # in such a time, and each of them once
SECONDS_TO_FLOWER = 300.0


class Strangers:
    """Whom the log mentions: a host once a minute at each entrance, and never more than a hundred in that time.

    Anybody can knock, as often and under as many paths as it likes: neither log nor memory may grow by that.
    """

    def __init__(self) -> None:
        self._mentioned: dict[tuple[str, str], float] = {}  # when each last was, oldest first

    def is_news(self, host: str, entrance: str) -> bool:
        now = time.monotonic()
        while self._mentioned and now - next(iter(self._mentioned.values())) > SECONDS_OF_STRANGERS:
            del self._mentioned[next(iter(self._mentioned))]
        if (host, entrance) in self._mentioned or len(self._mentioned) >= MAX_STRANGERS:
            return False
        self._mentioned[host, entrance] = now
        return True


async def body(request: Request, limit: int) -> bytes:
    """What a request brings. It is counted while it comes: one that is sent in pieces does not say how long it is."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > limit:
            raise HTTPException(413, headers={"Connection": "close"})  # the rest is not read
    return bytes(content)


def make_app(
    invitations: Invitations,
    flower: str,
    flower_authority: Path,
    authority: str,
    enrolled: Callable[[str, str], Mapping[str, Any]],
    health: Callable[[], Mapping[str, Any]],
    log: Callable[[Mapping[str, Any]], None],
    max_body: int,
) -> Starlette:
    """The door as an application.

    Args:
        invitations: Who may take part.
        flower: host:port of Flower, on this machine.
        flower_authority: The file of the authority of Flower's certificate.
        authority: The certificate of the authority by which parties know the server.
        enrolled: Called with a party's name and key when it has enrolled; what it is told.
        health: What anybody may know of the server.
        log: Told of who was turned away.
        max_body: Bytes that a node may send at once. Each request is held in memory, and a party's public key, which is
            no secret, is all that it takes to send one.
    """
    context = ssl.create_default_context(cafile=str(flower_authority))
    # Flower is on this machine: a proxy that the environment names is for what is elsewhere.
    client = httpx.AsyncClient(base_url=f"https://{flower}", verify=context, timeout=SECONDS_TO_FLOWER, trust_env=False)
    strangers = Strangers()

    def turn_away(request: Request, why: str, code: int = 401) -> Response:
        host = request.client.host if request.client else "somebody"
        entrance = "enroll" if request.url.path == "/enroll" else "fleet"
        if strangers.is_news(host, entrance):
            log({"event": "stranger", "host": host, "path": printable(request.url.path[:80]), "why": why})
        return JSONResponse({"error": why}, code)

    async def enroll(request: Request) -> Response:
        try:
            table = json.loads(await body(request, MAX_ENROLLMENT))
            name, token, key, proof = (str(table[part]) for part in ("name", "token", "key", "proof"))
            if not is_proven(bytes.fromhex(proof), public_key(key), name, authority):
                raise UserError(f"{name!r:.80} does not hold the key that it hands in; join with the key's own owner.")
            text = await run_in_threadpool(invitations.enroll, name, token, key)  # it may wait for a lock
        except UserError as error:
            return turn_away(request, str(error), 403)
        except (ValueError, KeyError, TypeError, RecursionError):  # the last: lists within lists
            return turn_away(request, "no enrollment")
        return JSONResponse(dict(await run_in_threadpool(enrolled, name, text)))  # it may wait for Flower

    async def fleet(request: Request) -> Response:
        try:
            key = base64.b64decode(request.headers.get(KEY_HEADER, ""), validate=True)
            is_known = key in invitations.roster().holders
        except ValueError:
            is_known = False
        if not is_known:
            return turn_away(request, "no key of an enrolled party")
        content = await body(request, max_body)
        mine = ("host", "connection", "content-length", "transfer-encoding")
        kept = {name: value for name, value in request.headers.items() if name not in mine}
        try:
            call = quote(request.path_params["call"], safe="")  # one name, whatever is in it
            answer = await client.post(f"/v1/fleet/{call}", content=content, headers=kept)
        except httpx.HTTPError:
            return JSONResponse({"error": "Flower does not answer; try again"}, 503)
        dropped = ("content-length", "content-encoding", "transfer-encoding", "connection", "date", "server")
        headers = {name: value for name, value in answer.headers.items() if name not in dropped}
        return Response(answer.content, answer.status_code, headers)

    async def healthy(request: Request) -> Response:
        return JSONResponse(dict(health()))

    @asynccontextmanager
    async def closing(app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    return Starlette(
        lifespan=closing,
        routes=[
            Route("/enroll", enroll, methods=["POST"]),
            Route("/v1/fleet/{call}", fleet, methods=["POST"]),
            Route("/health", healthy, methods=["GET"]),
        ],
    )


class Gate:
    """The door at work, in its own thread."""

    def __init__(self, app: Starlette, folder: Path, host: str, port: int) -> None:
        config = uvicorn.Config(
            app, host=host, port=port, ssl_certfile=str(folder / SERVER), ssl_keyfile=str(folder / SERVER_KEY),
            log_level="error", access_log=False, server_header=False, lifespan="on", ws="none",
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True, name="gate")

    def start(self) -> None:
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                host, port = self.server.config.host, self.server.config.port
                raise UserError(f"{host}:{port} cannot be listened on; give another --port.")
            time.sleep(0.05)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(5)
