"""The server's only door to the outside, with TLS: parties enroll here, and reach the engine behind it.

The engine has one port for everything, and on it anybody could start programs at the server and at every party: its own
keys protect nodes, not that. So it listens on this machine alone, and what passes here is what a node needs
(`/v1/fleet/`), from nodes whose key belongs to a party that has enrolled.
"""

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pfedhn.deploy.certificates import SERVER, SERVER_KEY
from pfedhn.deploy.invitations import Invitations
from pfedhn.deploy.signing import KEY_HEADER, is_proven, key_text, public_key
from pfedhn.errors import UserError, printable
from pfedhn.files import read_text

MAX_ENROLLMENT = 10_000  # bytes
MAX_BODY = 1 << 30  # bytes of what a node sends; the engine sends large things in pieces
SECONDS_TO_ENGINE = 300.0


def make_app(
    invitations: Invitations,
    engine: str,
    authority: Path,
    enrolled: Callable[[str, str], Mapping[str, Any]],
    health: Callable[[], Mapping[str, Any]],
    log: Callable[[Mapping[str, Any]], None],
) -> Starlette:
    """The door as an application.

    Args:
        invitations: Who may take part.
        engine: host:port of the engine, on this machine.
        authority: Of the engine's certificate.
        enrolled: Called with a party's name and key when it has enrolled; what it is told.
        health: What anybody may know of the server.
        log: Told of who was turned away.
    """
    context, authority_text = ssl.create_default_context(cafile=str(authority)), read_text(authority)
    client = httpx.AsyncClient(base_url=f"https://{engine}", verify=context, timeout=SECONDS_TO_ENGINE)
    strangers: dict[tuple[str, str], float] = {}  # when each was last mentioned

    def turn_away(request: Request, why: str) -> Response:
        host = request.client.host if request.client else "somebody"
        if time.monotonic() - strangers.get((host, request.url.path), -1e9) > 60:
            strangers[host, request.url.path] = time.monotonic()
            log({"event": "stranger", "host": host, "path": printable(request.url.path[:80]), "why": why})
        return JSONResponse({"error": why}, 401)

    async def enroll(request: Request) -> Response:
        if int(request.headers.get("content-length", MAX_ENROLLMENT + 1)) > MAX_ENROLLMENT:
            return JSONResponse({"error": "too large"}, 413)
        try:
            table = json.loads(await request.body())
            name, token, key, proof = (str(table[part]) for part in ("name", "token", "key", "proof"))
            if not is_proven(bytes.fromhex(proof), public_key(key), name, authority_text):
                raise UserError(f"{name!r:.80} does not hold the key that it hands in; join with the key's own owner.")
            text = invitations.enroll(name, token, key)
        except UserError as error:
            turn_away(request, str(error))
            return JSONResponse({"error": str(error)}, 403)
        except (ValueError, KeyError, TypeError):
            return turn_away(request, "no enrollment")
        return JSONResponse(dict(await run_in_threadpool(enrolled, name, text)))  # it may wait for the engine

    async def fleet(request: Request) -> Response:
        known = {key_text(key) for key in invitations.enrolled().values()}
        try:
            is_known = base64.b64decode(request.headers.get(KEY_HEADER, ""), validate=True) in known
        except ValueError:
            is_known = False
        if not is_known:
            return turn_away(request, "no key of an enrolled party")
        if int(request.headers.get("content-length", "0")) > MAX_BODY:
            return JSONResponse({"error": "too large"}, 413)
        kept = {name: value for name, value in request.headers.items() if name not in ("host", "connection")}
        try:
            answer = await client.post(request.url.path, content=await request.body(), headers=kept)
        except httpx.HTTPError:
            return JSONResponse({"error": "the engine does not answer; try again"}, 503)
        dropped = ("content-length", "content-encoding", "transfer-encoding", "connection", "date", "server")
        headers = {name: value for name, value in answer.headers.items() if name not in dropped}
        return Response(answer.content, answer.status_code, headers)

    async def healthy(request: Request) -> Response:
        return JSONResponse(dict(health()))

    return Starlette(
        routes=[
            Route("/enroll", enroll, methods=["POST"]),
            Route("/v1/fleet/{call}", fleet, methods=["POST"]),
            Route("/health", healthy, methods=["GET"]),
        ]
    )


class Gate:
    """The door at work, in a thread of its own."""

    def __init__(self, app: Starlette, folder: Path, host: str, port: int) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            ssl_certfile=str(folder / SERVER),
            ssl_keyfile=str(folder / SERVER_KEY),
            log_level="error",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
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
