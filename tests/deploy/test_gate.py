"""The server's door: who has enrolled reaches Flower, and nothing but what a node needs."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from parties import KEYS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pfedhn.deploy import gate
from pfedhn.deploy.certificates import AUTHORITY, make_certificates
from pfedhn.deploy.gate import Gate, make_app
from pfedhn.deploy.invitations import Invitations
from pfedhn.deploy.programs import free_port
from pfedhn.deploy.signing import KEY_HEADER, key_text, proof, public_text


class Door:
    """A door; with nothing behind it, unless that is said: what gets through then finds no Flower."""

    def __init__(self, folder: Path, engine: str = "127.0.0.1:9") -> None:
        make_certificates(folder, ["localhost", "127.0.0.1"])
        self.invitations, self.events = Invitations(folder / "parties"), list[Any]()
        self.authority = (folder / AUTHORITY).read_text()
        self.app = make_app(
            self.invitations, engine, folder / AUTHORITY, self.authority, lambda name, key: {"name": name},
            lambda: {"is_up": True}, self.events.append, 20_000,
        )  # fmt: skip

    def post(self, path: str, content: bytes = b"", in_pieces: bool = False, **headers: str) -> httpx.Response:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 100):
                yield content[start : start + 100]

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="https://door") as client:
                return await client.post(path, content=pieces() if in_pieces else content, headers=headers)

        return asyncio.run(ask())

    def enroll(self, name: str, token: str, key: Any, signer: Any = None, authority: str = "") -> int:
        signature = proof(signer or key, name, authority or self.authority)
        table = {"name": name, "token": token, "key": public_text(key.public_key()), "proof": signature.hex()}
        return self.post("/enroll", json.dumps(table).encode()).status_code


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


def test_who_enrolls_holds_the_key_that_it_hands_in(door: Door) -> None:
    """A public key is no secret: it is worth nothing without its private half, nor a proof at another server."""
    one, other = KEYS[:2]
    token = door.invitations.invite("lyon", "server:1", door.authority).token
    assert door.enroll("lyon", token, one, signer=other) == 403
    assert door.enroll("lyon", token, one, authority="another") == 403
    assert not door.invitations.enrolled()
    assert [event["event"] for event in door.events] == ["stranger"]  # mentioned once a minute
    assert door.enroll("lyon", token, one) == 200
    door.invitations.invite("paris", "server:1", door.authority, key=public_text(other.public_key()))
    assert door.enroll("paris", "", other) == 200
    assert door.enroll("paris", "", other, signer=one) == 403


def test_nothing_but_what_a_node_needs_gets_through(door: Door) -> None:
    one, other = KEYS[:2]
    door.invitations.invite("lyon", "server:1", door.authority, key=public_text(one.public_key()))
    mine, stranger = (base64.b64encode(key_text(key.public_key())).decode() for key in (one, other))
    assert door.post("/v1/fleet/pull-messages", **{KEY_HEADER: mine}).status_code == 503  # no Flower is behind it
    for header in (stranger, "no base64", ""):
        assert door.post("/v1/fleet/pull-messages", **{KEY_HEADER: header}).status_code == 401
    for path in ("/v1/control/start-run", "/v1/runtime/push-messages", "/v1/fleet/../control/start-run", "/"):
        assert door.post(path, **{KEY_HEADER: mine}).status_code == 404
    for content in (b"", b"[]", b"{}", b"x", b'{"name": "lyon", "token": "", "key": "", "proof": "zz"}', b"[" * 9_999):
        assert door.post("/enroll", content).status_code in (401, 403)
    door.invitations.revoke("lyon")
    assert door.post("/v1/fleet/pull-messages", **{KEY_HEADER: mine}).status_code == 401


async def echo(request: Request) -> Response:
    return JSONResponse({"call": request.path_params["call"]})


@pytest.mark.slow
def test_what_gets_through_reaches_the_engine_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the proxy that the environment names, and as one name of a call, whatever is in it."""
    for name in ("NO_PROXY", "no_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    ports = [free_port(), free_port()]
    door = Door(tmp_path, f"127.0.0.1:{ports[0]}")
    door.invitations.invite("lyon", "server:1", door.authority, key=public_text(KEYS[0].public_key()))
    mine = {KEY_HEADER: base64.b64encode(key_text(KEYS[0].public_key())).decode()}
    flower = Starlette(routes=[Route("/v1/fleet/{call}", echo, methods=["POST"])])
    gates = [Gate(app, tmp_path, "127.0.0.1", port) for app, port in zip((flower, door.app), ports, strict=True)]
    context = ssl.create_default_context(cafile=str(tmp_path / AUTHORITY))
    try:
        for one in gates:
            one.start()
        with httpx.Client(base_url=f"https://127.0.0.1:{ports[1]}", verify=context, trust_env=False) as client:
            for path, call in (("pull-messages", "pull-messages"), ("a%3Fb%23c", "a?b#c"), ("a%25b", "a%b")):
                answer = client.post(f"/v1/fleet/{path}", headers=mine, timeout=120)
                assert (answer.status_code, answer.json()) == (200, {"call": call})
    finally:
        for one in gates:
            one.stop()


def test_what_is_too_large_is_not_read(door: Door) -> None:
    """Nor is what comes in pieces and does not say how long it is."""
    door.invitations.invite("lyon", "server:1", door.authority, key=public_text(KEYS[0].public_key()))
    mine = {KEY_HEADER: base64.b64encode(key_text(KEYS[0].public_key())).decode()}
    for in_pieces in (False, True):
        assert door.post("/enroll", b"x" * 9_000, in_pieces).status_code == 401
        assert door.post("/enroll", b"x" * 11_000, in_pieces).status_code == 413
        assert door.post("/v1/fleet/push-messages", b"x" * 19_000, in_pieces, **mine).status_code == 503
        assert door.post("/v1/fleet/push-messages", b"x" * 21_000, in_pieces, **mine).status_code == 413


def test_strangers_fill_neither_log_nor_memory(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        assert door.post(f"/v1/fleet/{number}").status_code == 401
    assert [event["path"] for event in door.events] == ["/v1/fleet/0"]
    strangers, now = gate.Strangers(), 0.0
    monkeypatch.setattr(gate.time, "monotonic", lambda: now)
    assert sum(strangers.is_news(f"host-{number}", "fleet") for number in range(1_000)) == gate.MAX_STRANGERS
    assert len(strangers._mentioned) == gate.MAX_STRANGERS
    now = 2 * gate.SECONDS_OF_STRANGERS
    assert strangers.is_news("host-0", "fleet")
    assert len(strangers._mentioned) == 1
