"""The server's door: who has enrolled gets its messages, nobody else gets anything, and nothing fills memory or log."""

import asyncio
import hashlib
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from parties import KEYS
from support import free_port

from pfedhn.deploy import door as doors
from pfedhn.deploy import line as lines
from pfedhn.deploy import listener, mailroom
from pfedhn.deploy.certificates import AUTHORITY, make_certificates
from pfedhn.deploy.door import CODE, COUNTER, DIGEST, NAME, SESSION, Door, OpenDoor
from pfedhn.deploy.invitations import Bundle, Invitations
from pfedhn.deploy.line import Followed, Line, Trouble
from pfedhn.deploy.mailroom import Mailroom, mac
from pfedhn.deploy.signing import proof, public_text, session_proof
from pfedhn.errors import RunError, UserError


class Knocking:
    """A door without a network, and what somebody says at it."""

    def __init__(self, folder: Path) -> None:
        make_certificates(folder, ["localhost", "127.0.0.1"])
        self.folder, self.mailroom = folder, Mailroom()
        self.invitations, self.events = Invitations(folder / "parties"), list[Any]()
        self.authority = (folder / AUTHORITY).read_text()
        self.door = Door(
            self.mailroom, self.invitations, self.authority, lambda name: {"name": name}, lambda: {"is_up": True},
            self.events.append,
        )  # fmt: skip
        self.invitations.invite("lyon", "server:1", self.authority, key=public_text(KEYS[0].public_key()))
        self.invitations.invite("nice", "server:1", self.authority, key=public_text(KEYS[1].public_key()))

    def post(self, path: str, content: bytes = b"", in_pieces: bool = False, **headers: str) -> httpx.Response:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 100):
                yield content[start : start + 100]

        async def ask() -> httpx.Response:
            way = httpx.ASGITransport(self.door.app)
            async with httpx.AsyncClient(transport=way, base_url="https://door") as client:
                given = pieces() if in_pieces else content
                return await client.post(
                    path, content=given, headers={k.replace("_", "-"): v for k, v in headers.items()}
                )

        return asyncio.run(ask())

    def enroll(self, name: str, token: str, key: Any, signer: Any = None, authority: str = "") -> int:
        signature = proof(signer or key, name, authority or self.authority)
        table = {"name": name, "token": token, "key": public_text(key.public_key()), "proof": signature.hex()}
        return self.post("/enroll", json.dumps(table).encode()).status_code

    def session(self, name: str, key: Any, signed: str = "", nonce: str = "", authority: str = "") -> httpx.Response:
        nonce = nonce or self.post("/challenge").json()["nonce"]
        signature = session_proof(key, signed or name, nonce, authority or self.authority).hex()
        return self.post("/session", json.dumps({"name": name, "nonce": nonce, "signature": signature}).encode())

    def say(self, session: Any, path: str, counter: int, content: bytes = b"", **changed: Any) -> httpx.Response:
        """Something in a session; parts of it may be changed after it was proven."""
        digest = hashlib.sha256(content).hexdigest()
        code = mac(bytes.fromhex(session["key"]), path, counter, digest)
        headers = {SESSION: session["session"], COUNTER: str(counter), DIGEST: digest, CODE: code}
        where, what = changed.pop("to", path), changed.pop("brings", content)
        headers |= {name.replace("_", "-"): str(value) for name, value in changed.items()}
        return self.post(where, what, **headers)


@pytest.fixture
def knocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Knocking:
    monkeypatch.setattr(doors, "SECONDS_OF_A_POLL", 0.05)
    return Knocking(tmp_path)


def test_who_enrolls_holds_the_key_that_it_hands_in(knocking: Knocking) -> None:
    """A public key is no secret: it is worth nothing without its private half, nor a proof at another server."""
    one, other = KEYS[2:4]
    token = knocking.invitations.invite("oslo", "server:1", knocking.authority).token
    assert knocking.enroll("oslo", token, one, signer=other) == 403
    assert knocking.enroll("oslo", token, one, authority="another") == 403
    assert "oslo" not in knocking.invitations.enrolled()
    assert [event["event"] for event in knocking.events] == ["stranger"]  # mentioned once a minute
    assert knocking.enroll("oslo", token, one) == 200
    assert knocking.enroll("lyon", "", KEYS[0]) == 200
    assert knocking.enroll("lyon", "", KEYS[0], signer=one) == 403
    for content in (b"", b"[]", b"{}", b"x", b'{"name": "lyon", "token": "", "key": "", "proof": "zz"}', b"[" * 9_999):
        assert knocking.post("/enroll", content).status_code in (401, 403)


def test_a_session_needs_a_fresh_signature_of_the_party_s_key(
    knocking: Knocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonce = knocking.post("/challenge").json()["nonce"]
    assert knocking.session("lyon", KEYS[0], nonce=nonce).status_code == 200
    assert knocking.session("lyon", KEYS[1]).status_code == 403
    assert knocking.session("lyon", KEYS[0], signed="nice").status_code == 403
    assert knocking.session("oslo", KEYS[0]).status_code == 403
    assert knocking.session("lyon", KEYS[0], authority="another").status_code == 403  # signed for another server
    born, _, seal = nonce.rpartition("-")
    for made_up in ("", "a", "a-b-c", f"{born}-{seal[::-1]}", f"{born}9-{seal}"):
        assert knocking.session("lyon", KEYS[0], nonce=made_up or "-").status_code == 403
    later = knocking.mailroom.clock() + 2 * mailroom.SECONDS_OF_A_NONCE
    monkeypatch.setattr(knocking.mailroom, "clock", lambda: later)
    assert knocking.session("lyon", KEYS[0], nonce=nonce).status_code == 403
    for content in (b"", b"[]", b"{}", b"[" * 9_999, b'{"name": "lyon", "nonce": "", "signature": "zz"}'):
        assert knocking.post("/session", content).status_code == 403
    knocking.invitations.revoke("lyon")
    assert knocking.session("lyon", KEYS[0]).status_code == 403


def test_a_request_is_of_its_session_and_counts_once(knocking: Knocking) -> None:
    mine = knocking.session("lyon", KEYS[0]).json()
    knocking.mailroom.post("lyon", "train", b"work", 10)
    knocking.mailroom.post("nice", "train", b"other work", 10)
    for changed in (
        {COUNTER: 2}, {SESSION: "0" * 32}, {CODE: "0" * 64}, {CODE: "x"}, {DIGEST: "1"}, {"to": "/reply/x"},
    ):  # fmt: skip
        assert knocking.say(mine, "/poll", 1, **changed).status_code == 401, changed
    assert knocking.post("/poll").status_code == 401
    answer = knocking.say(mine, "/poll", 1)
    assert (answer.status_code, answer.content) == (200, b"work")
    name = answer.headers[NAME]
    assert knocking.say(mine, "/poll", 1).status_code == 401  # once more
    assert knocking.say(mine, "/poll", 2).status_code == 204  # it has it already
    reply = f"/reply/{name}"
    assert knocking.say(mine, reply, 1, b"done", brings=b"gone").status_code == 400
    assert knocking.say(mine, reply, 2, b"x" * 11).status_code == 413
    absent, lost = sorted(knocking.mailroom.arrivals(0.0), key=lambda arrival: arrival.fault)
    assert (absent.party, absent.fault) == ("nice", "has left")
    assert (lost.party, lost.content) == ("lyon", None)
    assert "more than the 10 bytes" in lost.fault
    knocking.mailroom.post("lyon", "train", b"work", 10)
    theirs = knocking.session("nice", KEYS[1]).json()
    name = knocking.say(mine, "/poll", 3).headers[NAME]
    assert knocking.say(theirs, f"/reply/{name}", 1, b"mine").status_code == 410  # asked of another party
    assert knocking.say(mine, f"/reply/{name}", 3, b"done").status_code == 200
    assert knocking.say(mine, f"/reply/{name}", 4, b"done").status_code == 410
    (arrival,) = knocking.mailroom.arrivals(0.0)
    assert (arrival.party, arrival.kind, arrival.content) == ("lyon", "train", b"done")
    knocking.invitations.revoke("lyon")
    assert knocking.say(mine, "/poll", 4).status_code == 401


def test_a_later_process_of_a_party_takes_its_place_and_its_messages(knocking: Knocking) -> None:
    first = knocking.session("lyon", KEYS[0]).json()
    knocking.mailroom.post("lyon", "train", b"work", 10)
    assert knocking.say(first, "/poll", 1).content == b"work"
    second = knocking.session("lyon", KEYS[0]).json()
    assert knocking.say(first, "/poll", 2).status_code == 409
    assert knocking.say(second, "/poll", 1).content == b"work"
    knocking.mailroom.withdraw("lyon", "train")
    assert knocking.session("lyon", KEYS[0]).status_code == 200
    assert knocking.mailroom.arrivals(0.0) == []


def test_a_party_that_stays_away_has_left(knocking: Knocking, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(knocking.mailroom, "clock", lambda: now)
    knocking.session("lyon", KEYS[0])
    knocking.mailroom.post("lyon", "train", b"work", 10)
    assert knocking.mailroom.members() == {"lyon"}
    assert knocking.mailroom.arrivals(0.0) == []
    now += 2 * mailroom.SECONDS_TO_RETURN
    assert knocking.mailroom.members() == set()
    (arrival,) = knocking.mailroom.arrivals(0.0)
    assert (arrival.content, arrival.fault) == (None, "has left")


def test_what_is_too_large_is_not_read(knocking: Knocking) -> None:
    """Nor is what comes in pieces and does not say how long it is."""
    for in_pieces in (False, True):
        assert knocking.post("/enroll", b"x" * 9_000, in_pieces).status_code == 401
        assert knocking.post("/enroll", b"x" * 11_000, in_pieces).status_code == 413
    mine = knocking.session("lyon", KEYS[0]).json()
    assert knocking.say(mine, "/poll", 1, b"x").status_code == 413


def test_strangers_fill_neither_log_nor_memory(knocking: Knocking, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        assert knocking.post(f"/reply/{number}").status_code == 401
    assert [event["path"] for event in knocking.events] == ["/reply/0"]
    strangers, now = doors.Strangers(), 0.0
    monkeypatch.setattr(doors.time, "monotonic", lambda: now)
    assert sum(strangers.is_news(f"host-{number}", "reply") for number in range(1_000)) == doors.MAX_STRANGERS
    assert len(strangers._mentioned) == doors.MAX_STRANGERS
    now = 2 * doors.SECONDS_OF_STRANGERS
    assert strangers.is_news("host-0", "reply")
    assert len(strangers._mentioned) == 1


# With a network.


class Opened(Knocking):
    """A door at work on loopback."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.opened = OpenDoor(self.door, folder, "127.0.0.1", self.port)
        if limit is not None:
            self.opened.listener.limit = limit
        self.opened.start()
        self.lines: list[Line] = []

    def line(self, authority: str = "", host: str = "127.0.0.1") -> Line:
        self.lines.append(Line(Bundle("lyon", f"{host}:{self.port}", authority or self.authority, "")))
        return self.lines[-1]

    def close(self) -> None:
        self.opened.stop()
        for line in self.lines:
            line.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    made = Opened(tmp_path)
    yield made
    made.close()


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_message_and_its_answer_cross_the_line(opened: Opened) -> None:
    line = opened.line()
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(line.poll("lyon", KEYS[0])))
    waiting.start()
    until(lambda: opened.mailroom.members() == {"lyon"})
    content = bytes(range(256)) * 4_000
    opened.mailroom.post("lyon", "train", content, len(content))
    waiting.join(120)
    ((name, message),) = got
    assert message == content
    assert line.reply("lyon", KEYS[0], name, content[::-1])
    (arrival,) = opened.mailroom.arrivals(60.0)
    assert (arrival.party, arrival.kind, arrival.content) == ("lyon", "train", content[::-1])
    assert not line.reply("lyon", KEYS[0], name, content)
    other = opened.line()  # another process with the same key
    opened.mailroom.post("lyon", "train", b"more", 10)
    assert other.poll("lyon", KEYS[0]) is not None
    with pytest.raises(Followed, match="another process"):
        line.reply("lyon", KEYS[0], name, content)
    with pytest.raises(Trouble, match="does not take this party's key"):
        opened.line().poll("lyon", KEYS[1])
    with pytest.raises(UserError, match="not invited"):
        line.ask("/enroll", {
            "name": "oslo", "token": "", "key": public_text(KEYS[2].public_key()),
            "proof": proof(KEYS[2], "oslo", opened.authority).hex(),
        })  # fmt: skip
    line.max_message = 3
    opened.mailroom.post("lyon", "train", b"much", 10)
    with pytest.raises(Trouble, match="more than the 3 bytes"):
        line.poll("lyon", KEYS[0])


def test_a_party_that_hangs_up_is_gone_at_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed closes its connections, and no message is given to one that is not there."""
    monkeypatch.setattr(mailroom, "SECONDS_TO_RETURN", 0.0)
    line = opened.line()

    def poll() -> None:
        with pytest.raises(Trouble):
            line.poll("lyon", KEYS[0])

    waiting = threading.Thread(target=poll)
    waiting.start()
    until(lambda: opened.mailroom.members() == {"lyon"})
    for connection in list(opened.opened.listener.open.values()):
        connection[0].shutdown(socket.SHUT_RDWR)
    until(lambda: opened.mailroom.members() == set())
    line.close()
    waiting.join(120)


def test_a_server_that_cannot_be_trusted_is_told_from_one_that_is_away(opened: Opened, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other, ["127.0.0.1"])
    with pytest.raises(RunError, match="is not the server of this invitation"):
        opened.line((other / AUTHORITY).read_text()).ask("/health")
    assert opened.line(host="localhost").ask("/health") == {"is_up": True}
    opened.opened.stop()
    with pytest.raises(Trouble, match="cannot be reached"):
        opened.line().ask("/health")


def test_a_certificate_for_another_name_or_time_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, sentence in (
        ("certificate has expired", "out of date; check the date of this machine"),
        ("certificate is not yet valid", "not valid yet; check the date of this machine"),
        ("Hostname mismatch, certificate is not valid for 'a'", "for another host name"),
    ):
        error = ssl.SSLCertVerificationError(1, "failed")
        error.verify_message = text
        found = httpx.ConnectError("failed")
        found.__cause__ = error
        assert sentence in str(lines._trouble(found, "server:1"))


def test_connections_of_strangers_are_bounded_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who connect and say nothing take no place for long, and never all places; who has a session stays."""
    monkeypatch.setattr(listener, "SHARE_OF_AN_ADDRESS", 1.0)
    monkeypatch.setattr(listener, "SECONDS_OF_A_STRANGER", 0.2)
    monkeypatch.setattr(doors, "SECONDS_BETWEEN_LOOKS", 0.05)
    world = Opened(tmp_path, limit=20)
    idle = []
    try:
        line = world.line()
        waiting = threading.Thread(target=lambda: line.poll("lyon", KEYS[0]))
        waiting.start()
        until(lambda: world.mailroom.members() == {"lyon"})
        for _ in range(60):
            idle.append(socket.create_connection(("127.0.0.1", world.port)))
        until(lambda: world.opened.listener.num_refused >= 30)
        until(lambda: len(world.opened.listener.open) <= 1)  # all but the party's
        assert world.line().ask("/health") == {"is_up": True}
        world.mailroom.post("lyon", "train", b"work", 10)
        waiting.join(120)
        assert world.mailroom.members() == {"lyon"}
    finally:
        for one in idle:
            one.close()
        world.close()
    assert world.opened.listener.per_address.total() == 0


def test_one_address_leaves_places_for_others(tmp_path: Path) -> None:
    world = Opened(tmp_path, limit=10)
    try:
        idle = [socket.create_connection(("127.0.0.1", world.port)) for _ in range(20)]
        until(lambda: world.opened.listener.num_refused >= 15)
        assert len(world.opened.listener.open) == 5
        for one in idle:
            one.close()
        until(lambda: not world.opened.listener.open)
    finally:
        world.close()
