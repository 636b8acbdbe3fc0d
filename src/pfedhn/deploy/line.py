"""A party's connection to its server: HTTPS outward, through a proxy if the environment names one (HTTPS_PROXY)."""

import hashlib
import json
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from pfedhn.deploy.door import CODE, COUNTER, DIGEST, NAME, SESSION
from pfedhn.deploy.invitations import Bundle
from pfedhn.deploy.mailroom import Lane, mac
from pfedhn.deploy.signing import PrivateKey, session_proof
from pfedhn.errors import RunError, UserError, first_line

MAX_WORDS = 1 << 24  # bytes of an answer that carries no model
SECONDS_TO_CONNECT = 15.0
SECONDS_OF_SLACK = 30.0  # that an answer may take beyond the time for which the server lets a party wait


class Trouble(Exception):
    """Why the server cannot be asked now, as a sentence; the same request may work later."""


class Followed(Trouble):
    """Another process has taken this party's place."""


@dataclass
class Open:
    """A session with the server."""

    name: str
    key: bytes
    seconds: float
    counters: dict[Lane, int] = field(default_factory=lambda: {"poll": 0, "reply": 0})


class Line:
    """The way from a party to its server; it may be used by two threads, one for each lane.

    Args:
        bundle: Has the server's address and the authority of its certificate.
        max_message: Bytes that a message of the server may have.
    """

    def __init__(self, bundle: Bundle, max_message: int = MAX_WORDS) -> None:
        self.bundle, self.max_message = bundle, max_message
        context = ssl.create_default_context(cadata=bundle.authority)
        timeout = httpx.Timeout(SECONDS_OF_SLACK + 30.0, connect=SECONDS_TO_CONNECT)
        self._client = httpx.Client(base_url=f"https://{bundle.address}", verify=context, timeout=timeout)
        self._open: Open | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        self._client.close()

    def ask(self, path: str, table: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the server says to a few words; without any, a page is fetched."""
        content = None if table is None else json.dumps(table).encode()
        code, _, answer = self._send("GET" if table is None else "POST", path, content, {}, MAX_WORDS)
        try:
            said: dict[str, Any] = json.loads(answer)
        except ValueError:
            said = {}
        if code == 403:
            raise UserError(str(said.get("error", "the server refuses this party")))
        if code != 200:
            raise Trouble(f"the server answers with code {code}")
        return said

    def poll(self, name: str, key: PrivateKey) -> tuple[str, bytes] | None:
        """The server's next message to this party and the message's name; None if there is none for a while."""
        code, headers, content = self._in_session(name, key, "poll", "/poll", b"")
        if code == 204:
            return None
        if code != 200:
            raise Trouble(f"the server answers with code {code}")
        return headers.get(NAME, ""), content

    def reply(self, name: str, key: PrivateKey, message: str, content: bytes) -> bool:
        """Hand in the answer to a message; False if the server does not wait for it any more."""
        code, _, _ = self._in_session(name, key, "reply", f"/reply/{message}", content)
        if code in (400, 410, 413):
            return False
        if code != 200:
            raise Trouble(f"the server answers with code {code}")
        return True

    def _in_session(
        self, name: str, key: PrivateKey, lane: Lane, path: str, content: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        for _ in range(2):
            session = self._session(name, key)
            session.counters[lane] += 1
            digest = hashlib.sha256(content).hexdigest()
            headers = {
                SESSION: session.name, COUNTER: str(session.counters[lane]), DIGEST: digest,
                CODE: mac(session.key, path, session.counters[lane], digest),
            }  # fmt: skip
            found = self._send("POST", path, content, headers, self.max_message)
            if found[0] == 409:
                self._forget(session)
                raise Followed("another process takes part with this party's key")
            if found[0] != 401:
                return found
            self._forget(session)  # the server was started again
        raise Trouble("the server does not keep this party's session")

    def _session(self, name: str, key: PrivateKey) -> Open:
        with self._lock:
            if self._open is None:
                nonce = str(self.ask("/challenge", {})["nonce"])
                signature = session_proof(key, name, nonce, self.bundle.authority).hex()
                proof = {"name": name, "nonce": nonce, "signature": signature}
                try:
                    table = self.ask("/session", proof)
                except UserError:
                    raise Trouble("the server does not take this party's key: ask for a new invitation") from None
                self._open = Open(str(table["session"]), bytes.fromhex(table["key"]), float(table["seconds"]))
            return self._open

    def renew(self) -> None:
        """Begin a new session with the next request; the server then sends again what has no answer."""
        with self._lock:
            self._open = None

    def _forget(self, session: Open) -> None:
        with self._lock:
            if self._open is session:
                self._open = None

    def _send(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], limit: int
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            with self._client.stream(method, path, content=content, headers=headers) as answer:
                found = bytearray()
                for part in answer.iter_bytes():
                    found += part
                    if len(found) > limit:
                        raise Trouble(f"the server sends more than the {limit:,} bytes that this party takes")
                return answer.status_code, answer.headers, bytes(found)
        except httpx.HTTPError as error:
            raise _trouble(error, self.bundle.address) from None
        except RuntimeError as error:  # the line was closed
            raise Trouble(first_line(error)) from None


def _trouble(error: httpx.HTTPError, address: str) -> Exception:
    """What a failed request means for a person."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        if isinstance(error, httpx.ProxyError):
            return Trouble(f"the proxy does not let this party through ({first_line(error)})")
        return Trouble(f"the server cannot be reached ({first_line(error) or type(error).__name__})")
    text = cause.verify_message
    if "expired" in text or "not yet valid" in text:
        state = "not valid yet" if "not yet" in text else "out of date"
        return Trouble(
            f"the certificate of {address} is {state}; check the date of this machine, then ask the server's owner to "
            "start the server again"
        )
    if "mismatch" in text or "doesn't match" in text:
        return RunError(
            f"the certificate of {address} is for another host name; ask the server's owner to start it with --address "
            "and the name that this party uses."
        )
    return RunError(
        f"{address} is not the server of this invitation (its certificate is of another authority); ask for a new "
        "invitation."
    )
