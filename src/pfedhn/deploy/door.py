"""The server's only door: HTTPS, to which parties connect; the server connects to nobody.

    POST /study        a party reads what it is invited to, with the token or the key of its invitation
    POST /enroll       a party hands in its key, with the token of its invitation
    POST /challenge    something new for a party to sign
    POST /session      a party proves that it holds its key, and gets the key of a session
    POST /poll         the next message for the party; waits until there is one
    POST /reply/NAME   the answer to that message
    GET  /health       what anybody may know

Nothing is read from a stranger but a few kilobytes, and from a party only what it was asked for. Requests of a session
carry a counter and a code over the digest of their content, so no request counts twice.
"""

import asyncio
import hashlib
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pfedhn.deploy.certificates import SERVER, SERVER_KEY
from pfedhn.deploy.invitations import Invitations
from pfedhn.deploy.listener import Listener, max_connections
from pfedhn.deploy.mailroom import Lane, Mailroom, Pending, Session, mac
from pfedhn.deploy.signing import holds_key, is_proven, public_key
from pfedhn.deploy.study import Study
from pfedhn.errors import UserError, printable

MAX_WORDS = 10_000  # bytes of a request that carries no model
MAX_STRANGERS = 100  # that are mentioned at most
SECONDS_OF_STRANGERS = 60.0  # in such a time, and each of them once
SECONDS_OF_A_POLL = 20.0  # that a party waits for a message; shorter than any proxy's patience
SECONDS_BETWEEN_LOOKS = 5.0  # at idle connections
SECONDS_BETWEEN_RENEWALS = 3_600.0  # of the certificate, if it is due
SESSION, COUNTER, DIGEST, CODE, NAME = (f"x-pfedhn-{part}" for part in ("session", "counter", "digest", "code", "name"))
"""The headers of requests and answers."""


class Strangers:
    """Whom the log mentions: a host once a minute at each entrance, and never more than a hundred in that time.

    Anybody can knock, as often and under as many paths as it likes: neither log nor memory may grow by that.
    """

    def __init__(self) -> None:
        self.number = 0
        self._mentioned: dict[tuple[str, str], float] = {}  # when each last was, oldest first

    def is_news(self, host: str, entrance: str) -> bool:
        self.number += 1
        now = time.monotonic()
        while self._mentioned and now - next(iter(self._mentioned.values())) > SECONDS_OF_STRANGERS:
            del self._mentioned[next(iter(self._mentioned))]
        if (host, entrance) in self._mentioned or len(self._mentioned) >= MAX_STRANGERS:
            return False
        self._mentioned[host, entrance] = now
        return True


class Gone(Exception):
    """Nobody waits for the answer that is arriving."""


@dataclass
class Door:
    """The door as an application.

    Args:
        mailroom: Has the messages.
        invitations: Who may take part.
        authority: The certificate of the authority by which parties know the server.
        enrolled: Called with a party's name when it has enrolled; returns what it is told.
        health: What anybody may know of the server.
        log: Called with every event.
        used: Called with the other side of a connection that a party uses.
        study: What a party has to agree to before it enrolls; without it, nothing.
        agreed: Called with a party's name, its public key as one line, the digest that it has agreed to and its
            signature.
    """

    mailroom: Mailroom
    invitations: Invitations
    authority: str
    enrolled: Callable[[str], Mapping[str, Any]]
    health: Callable[[], Mapping[str, Any]]
    log: Callable[[Mapping[str, Any]], None]
    used: Callable[[tuple[str, int]], None] = lambda peer: None
    study: Study | None = None
    agreed: Callable[[str, str, str, str], None] = lambda name, key, digest, signature: None

    def __post_init__(self) -> None:
        self.strangers = Strangers()
        self._waiting: dict[str, asyncio.Event] = {}  # by party
        self._is_closing = False

    @property
    def app(self) -> Starlette:
        words = {
            "/study": self._study,
            "/enroll": self._enroll,
            "/challenge": self._challenge,
            "/session": self._session,
        }
        return Starlette(
            lifespan=self._life,
            routes=[
                *(Route(path, answer, methods=["POST"]) for path, answer in words.items()),
                Route("/poll", self._poll, methods=["POST"]),
                Route("/reply/{name}", self._reply, methods=["POST"]),
                Route("/health", self._healthy, methods=["GET"]),
            ],
        )

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def wake(party: str) -> None:
            with suppress(RuntimeError):  # the door has closed
                loop.call_soon_threadsafe(self._wake, party)

        self.mailroom.wake = wake
        yield

    def _wake(self, party: str) -> None:
        if (event := self._waiting.get(party)) is not None:
            event.set()

    def close(self) -> None:
        """Send home everybody who waits for a message."""
        self._is_closing = True
        for party in list(self._waiting):
            self.mailroom.wake(party)

    # Strangers.

    def _turn_away(self, request: Request, why: str, code: int = 401) -> Response:
        host = request.client.host if request.client else "somebody"
        if self.strangers.is_news(host, request.url.path.split("/")[1]):
            self.log({"event": "stranger", "host": host, "path": printable(request.url.path[:80]), "why": why})
        return JSONResponse({"error": why}, code, headers={"Connection": "close"})

    async def _study(self, request: Request) -> Response:
        try:
            table = json.loads(await _body(request, MAX_WORDS))
            name, token = str(table["name"]), str(table.get("token", ""))
            is_invited = await run_in_threadpool(self.invitations.holds_token, name, token) if token else False
            is_invited = is_invited or ("signature" in table and self._is_proven(table))
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            return self._turn_away(request, "no invitation")
        if not is_invited:
            sentence = f"{name!r:.80} is not invited, or its invitation has run out; ask for a new one."
            return self._turn_away(request, sentence, 403)
        return JSONResponse({} if self.study is None else self.study.table())

    async def _enroll(self, request: Request) -> Response:
        try:
            table = json.loads(await _body(request, MAX_WORDS))
            name, token, key, proof = (str(table[part]) for part in ("name", "token", "key", "proof"))
            agreed = str(table.get("agreed", ""))
            if not is_proven(bytes.fromhex(proof), public_key(key), name, self.authority, agreed):
                raise UserError(f"{name!r:.80} does not hold the key that it hands in; join with the key's own owner.")
            if self.study is not None and agreed != self.study.digest:
                raise UserError("the study of this server is another one than was agreed to; read it and join again.")
            line = await run_in_threadpool(self.invitations.enroll, name, token, key)  # it may wait for a lock
        except UserError as error:
            return self._turn_away(request, str(error), 403)
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):  # RecursionError: lists within lists
            return self._turn_away(request, "no enrollment")
        if agreed:
            await run_in_threadpool(self.agreed, name, line, agreed, proof)
        return JSONResponse(dict(await run_in_threadpool(self.enrolled, name)))

    async def _challenge(self, request: Request) -> Response:
        return JSONResponse({"nonce": self.mailroom.nonce()})

    async def _session(self, request: Request) -> Response:
        try:
            table = json.loads(await _body(request, MAX_WORDS))
            name = str(table["name"])
            is_proven = self._is_proven(table)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_proven = False
        if not is_proven:
            return self._turn_away(request, "no key of an enrolled party", 403)
        session = self.mailroom.open_session(name)
        return JSONResponse({"session": session.name, "key": session.key.hex(), "seconds": SECONDS_OF_A_POLL})

    def _is_proven(self, table: Mapping[str, Any]) -> bool:
        """Whether somebody has just signed something new with the key of the party that is named."""
        name, nonce, signature = (str(table[part]) for part in ("name", "nonce", "signature"))
        key = self.invitations.enrolled().get(name)
        if key is None or not self.mailroom.is_fresh(nonce):
            return False
        return holds_key(bytes.fromhex(signature), key, name, nonce, self.authority)

    async def _healthy(self, request: Request) -> Response:
        return JSONResponse(dict(self.health()))

    # Parties.

    async def _poll(self, request: Request) -> Response:
        session = await self._opened(request, "poll", 0)
        if isinstance(session, Response):
            return session
        self.mailroom.waits(session, 1)
        try:
            pending = await self._next(request, session)
        finally:
            self.mailroom.waits(session, -1)
        if pending is None:
            return Response(status_code=204)
        return Response(pending.content, headers={NAME: pending.name}, media_type="application/octet-stream")

    async def _next(self, request: Request, session: Session) -> Pending | None:
        """The next message for a party; None if there is none for a while, or the party has hung up."""
        event = self._waiting.setdefault(session.party, asyncio.Event())
        hung_up = asyncio.ensure_future(request.receive())
        loop = asyncio.get_running_loop()
        end = loop.time() + SECONDS_OF_A_POLL
        try:
            while True:
                event.clear()
                pending = self.mailroom.next_for(session)
                is_over = pending is not None or self.mailroom.session(session.name) is None
                if (
                    is_over
                    or self._is_closing
                    or loop.time() >= end
                    or session.party not in self.invitations.enrolled()
                ):
                    return pending
                waiting = asyncio.ensure_future(event.wait())
                both = {waiting, hung_up}
                done, _ = await asyncio.wait(both, timeout=end - loop.time(), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if hung_up in done:
                    return None
        finally:
            hung_up.cancel()

    async def _reply(self, request: Request) -> Response:
        opened = await self._opened(request, "reply", None)
        if isinstance(opened, Response):
            return opened
        pending = self.mailroom.asked(opened, request.path_params["name"])
        if pending is None:
            return Response(status_code=410, headers={"Connection": "close"})  # nobody asks that any more
        if pending.is_arriving:  # one answer at a time is held in memory
            return Response(status_code=503, headers={"Connection": "close"})

        def note() -> None:
            self._note(request)
            if self.mailroom.asked(opened, pending.name) is not pending:
                raise Gone

        pending.is_arriving = True
        try:
            content = await _body(request, pending.limit, note)
        except Gone:
            return Response(status_code=410, headers={"Connection": "close"})
        except HTTPException:
            self.mailroom.answer(pending, None, f"sends more than the {pending.limit:,} bytes that were asked for")
            raise
        finally:
            pending.is_arriving = False
        if hashlib.sha256(content).hexdigest() != request.headers[DIGEST]:
            return Response(status_code=400)
        is_taken = self.mailroom.answer(pending, content)
        return Response(status_code=200 if is_taken else 410)

    async def _opened(self, request: Request, lane: Lane, limit: int | None) -> Session | Response:
        """The session that a request has proven to be of, before anything of its content is read."""
        try:
            name = request.headers[SESSION]
            session = self.mailroom.session(name)
            counter, digest, code = int(request.headers[COUNTER]), request.headers[DIGEST], request.headers[CODE]
        except (KeyError, ValueError):
            return self._turn_away(request, "no session")
        if session is None or session.party not in self.invitations.enrolled():
            # The server was started again, or the party was removed; or another process has the party's key.
            is_followed = session is None and self.mailroom.is_followed(name)
            return Response(status_code=409 if is_followed else 401, headers={"Connection": "close"})
        expected = mac(session.key, request.url.path, counter, digest)
        if not hmac.compare_digest(code.encode(), expected.encode()):
            return self._turn_away(request, "no session")
        if not self.mailroom.use(session, lane, counter):
            return self._turn_away(request, "a request that came before")
        self._note(request)
        if limit is not None:
            await _body(request, limit)
        return session

    def _note(self, request: Request) -> None:
        if request.client is not None:
            self.used((request.client.host, request.client.port))


async def _body(request: Request, limit: int, note: Callable[[], None] = lambda: None) -> bytes:
    """What a request brings. It is counted while it comes: one that is sent in pieces does not say how long it is."""
    content = bytearray()
    too_much = HTTPException(413, headers={"Connection": "close"})  # the rest is not read
    try:
        announced = int(request.headers.get("content-length", 0))
    except ValueError:
        raise HTTPException(400) from None
    if announced > limit:
        raise too_much
    async for part in request.stream():
        content += part
        note()
        if len(content) > limit:
            raise too_much
    return bytes(content)


class OpenDoor:
    """The door at work, in its own thread.

    Args:
        door: The application.
        folder: Has the server's certificate and its key.
        host: The address to listen on.
        port: The port.
        renew: Called now and then; returns whether there is a new certificate.
    """

    def __init__(
        self, door: Door, folder: Path, host: str, port: int, renew: Callable[[], bool] = lambda: False
    ) -> None:
        self.door, self.folder, self.renew = door, folder, renew
        self.listener = Listener.on(host, port, max_connections())
        door.used = self.listener.used
        self.config = uvicorn.Config(
            door.app, ssl_certfile=str(folder / SERVER), ssl_keyfile=str(folder / SERVER_KEY), loop="asyncio",
            http="h11", ws="none", lifespan="on", log_level="critical", access_log=False, server_header=False,
            timeout_keep_alive=75, timeout_graceful_shutdown=1, h11_max_incomplete_event_size=32_768,
        )  # fmt: skip
        self.server = uvicorn.Server(self.config)
        self.thread = threading.Thread(target=self._run, daemon=True, name="door")

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        watch = asyncio.ensure_future(self._watch())
        try:
            await self.server.serve(sockets=[self.listener])
        finally:
            watch.cancel()
            while self.listener.open:  # what was open without a request
                self.listener.close_idle(at_once=True)
                await asyncio.sleep(0.01)

    async def _watch(self) -> None:
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            self.listener.close_idle()
            if time.monotonic() - renewed > SECONDS_BETWEEN_RENEWALS:
                renewed = time.monotonic()
                if self.renew() and self.config.ssl is not None:
                    self.config.ssl.load_cert_chain(self.folder / SERVER, self.folder / SERVER_KEY)

    def start(self) -> None:
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                raise UserError("the server's certificate or key cannot be used; put back the files of its folder.")
            time.sleep(0.01)

    def stop(self) -> None:
        self.door.close()
        self.server.should_exit = True
        self.thread.join(5)
        self.listener.close()
