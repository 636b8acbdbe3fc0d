"""The server's messages to its parties: each waits until its party fetches it and answers it.

The door (`deploy.door`) calls this from its own thread, the server (`deploy.server`) from another. Messages are in
memory only: a server that is started again asks anew, and a party gives the same answer to the same message.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pfedhn.deploy.contacts import Arrival

SECONDS_TO_RETURN = 10.0  # that a party may be without a connection before it counts as gone
SECONDS_OF_A_NONCE = 60.0
Lane = Literal["poll", "reply"]


@dataclass
class Session:
    """One process of a party, from its proof that it holds the party's key until another process gives such a proof."""

    party: str
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    counters: dict[Lane, int] = field(default_factory=lambda: {"poll": 0, "reply": 0})
    polls: int = 0  # that wait for a message now
    heard: float = 0.0  # when the party was last heard of


@dataclass
class Pending:
    """A message that has no answer yet."""

    party: str
    kind: str
    content: bytes
    limit: int  # bytes of an answer
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    given_to: str = ""  # the session that has fetched it
    is_arriving: bool = False  # whether an answer is being read


def mac(key: bytes, path: str, counter: int, digest: str) -> str:
    """What shows that a request comes from the process that holds a session's key."""
    return hmac.new(key, f"{path}\n{counter}\n{digest}".encode(), hashlib.sha256).hexdigest()


class Mailroom:
    """Messages and sessions, by party. It is the server's transport (`deploy.contacts.Transport`).

    Args:
        clock: Seconds, from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.bytes_sent = self.bytes_received = 0
        self._changed = threading.Condition()
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}  # by party: one process of each
        self._names: dict[str, Session] = {}  # the same by their names
        self._followed = deque[str](maxlen=1_000)  # names of sessions that another process has followed
        self._pending: dict[tuple[str, str], Pending] = {}  # by party and kind
        self._arrived: list[Arrival] = []
        self.wake: Callable[[str], None] = lambda party: None  # called when a message waits for a party

    # The server's side.

    def members(self) -> set[str]:
        """The parties that are connected, or were a moment ago."""
        with self._changed:
            return {party for party, session in self._sessions.items() if self._is_there(session)}

    def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
        """Let a message wait for its party; it replaces an older one of its kind."""
        with self._changed:
            self._pending[party, kind] = Pending(party, kind, content, limit)
        self.wake(party)

    def withdraw(self, party: str, kind: str) -> None:
        """Forget a message whose answer nobody waits for any more."""
        with self._changed:
            self._pending.pop((party, kind), None)

    def arrivals(self, seconds: float) -> list[Arrival]:
        """The answers that have arrived, and messages to parties that have left; waits at most this long for one."""
        with self._changed:
            self._give_up_on_absent()
            if not self._arrived:
                self._changed.wait(seconds)
                self._give_up_on_absent()
            found, self._arrived = self._arrived, []
        return found

    def _give_up_on_absent(self) -> None:
        for party, kind in list(self._pending):
            session = self._sessions.get(party)
            if session is None or not self._is_there(session):
                del self._pending[party, kind]
                self._arrived.append(Arrival(party, kind, None, "has left"))

    def _is_there(self, session: Session) -> bool:
        return session.polls > 0 or self.clock() - session.heard < SECONDS_TO_RETURN

    # The door's side.

    def nonce(self) -> str:
        """Something new for a party to sign. It carries its own proof and age, so strangers fill no memory with it."""
        born = f"{secrets.token_hex(16)}-{self.clock():.3f}"
        return f"{born}-{self._sealed(born)}"

    def is_fresh(self, nonce: str) -> bool:
        """Whether this is a nonce of ours that is not too old."""
        born, _, seal = nonce.rpartition("-")
        if not hmac.compare_digest(seal, self._sealed(born)):
            return False
        return self.clock() - float(born.partition("-")[2]) < SECONDS_OF_A_NONCE

    def _sealed(self, born: str) -> str:
        return hmac.new(self._secret, born.encode(), hashlib.sha256).hexdigest()[:32]

    def open_session(self, party: str) -> Session:
        """Begin a party's session; a process that had one before has it no more, and unanswered messages come again."""
        with self._changed:
            self._forget(party)
            session = Session(party, heard=self.clock())
            self._sessions[party] = self._names[session.name] = session
        self.wake(party)
        return session

    def session(self, name: str) -> Session | None:
        """The session of this name, if it is still its party's."""
        with self._changed:
            return self._names.get(name)

    def use(self, session: Session, lane: Lane, counter: int) -> bool:
        """Count a request that the session has proven to be its own; False if the request came before, or late."""
        with self._changed:
            if self._names.get(session.name) is not session or counter <= session.counters[lane]:
                return False
            session.counters[lane] = counter
            session.heard = self.clock()
            return True

    def _forget(self, party: str) -> None:
        if (session := self._sessions.pop(party, None)) is not None:
            del self._names[session.name]
            self._followed.append(session.name)

    def is_followed(self, name: str) -> bool:
        """Whether another process of the same party has taken the place of this session."""
        with self._changed:
            return name in self._followed

    def waits(self, session: Session, by: int) -> None:
        """Count the requests of a session that wait for a message."""
        with self._changed:
            session.polls += by
            session.heard = self.clock()

    def next_for(self, session: Session) -> Pending | None:
        """A message that this session has not fetched yet."""
        with self._changed:
            if self._names.get(session.name) is not session:
                return None
            for (party, _), pending in self._pending.items():
                if party == session.party and pending.given_to != session.name:
                    pending.given_to = session.name
                    self.bytes_sent += len(pending.content)
                    return pending
            return None

    def asked(self, session: Session, name: str) -> Pending | None:
        """The message of this name, if it was to this party and has no answer."""
        with self._changed:
            mine = (one for (party, _), one in self._pending.items() if party == session.party)
            return next((one for one in mine if one.name == name), None)

    def answer(self, pending: Pending, content: bytes | None, fault: str = "") -> bool:
        """Take the answer to a message, or the reason why there is none; False if nobody waits for it any more."""
        with self._changed:
            if self._pending.get((pending.party, pending.kind)) is not pending:
                return False
            del self._pending[pending.party, pending.kind]
            self.bytes_received += len(content or b"")
            self._arrived.append(Arrival(pending.party, pending.kind, content, fault))
            self._changed.notify_all()
            return True
