"""The server's port: a bounded number of connections, none of which may stay without a reason.

Anybody who reaches the port can open connections. Each costs a file descriptor, so their number is limited, in all and
for each address, and a connection that nobody with a session uses is closed.
"""

import socket
import time
from collections import Counter
from typing import Any

from pfedhn.errors import UserError

SECONDS_OF_A_STRANGER = 30.0  # that a connection may be open before a party has used it: time for TLS and an enrollment
SECONDS_UNUSED = 120.0  # that a party's connection may be idle: longer than it waits for a message
DESCRIPTORS_OF_OURS = 200  # for files, and whatever else is not a connection
MAX_CONNECTIONS = 20_000
SHARE_OF_AN_ADDRESS = 0.5  # of all connections, since many parties may come from one address

Peer = tuple[str, int]  # address and port of the other side


def max_connections() -> int:
    """As many as the system lets this process have, after its limit was raised as far as it goes."""
    try:
        import resource
    except ImportError:  # Windows
        return 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + DESCRIPTORS_OF_OURS
    best = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < best:
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
        soft = best
    limit = wanted if soft == resource.RLIM_INFINITY else soft
    return max(16, min(MAX_CONNECTIONS, limit - DESCRIPTORS_OF_OURS))


class Connection(socket.socket):
    """A connection that its listener counts until it is closed."""

    listener: "Listener | None" = None
    peer: Peer = ("", 0)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.closed(self)
            self.listener = None
        super().close()

    def detach(self) -> int:
        if self.listener is not None:
            self.listener.closed(self)
            self.listener = None
        return super().detach()


class Listener(socket.socket):
    """A listening socket that turns connections away when there are too many."""

    limit = 0
    num_refused = 0
    open: dict[Peer, tuple[Connection, float, bool]]  # the connection, when it was last used, whether by a party
    per_address: "Counter[str]"

    @classmethod
    def on(cls, host: str, port: int, limit: int) -> "Listener":
        made = None
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, proto, _, address = found[0]
            made = cls(family, kind, proto)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError as error:
            if made is not None:
                made.close()
            reason = error.strerror or error
            raise UserError(f"{host}:{port} cannot be listened on ({reason}); give another --port.") from None
        made.limit, made.open, made.per_address = limit, {}, Counter()
        made.listen(128)
        made.setblocking(False)
        return made

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        made = Connection(self.family, self.type, self.proto, fileno=plain.detach())
        peer = (str(address[0]), int(address[1]))
        if (
            peer in self.open
            or len(self.open) >= self.limit
            or self.per_address[peer[0]] >= max(1, int(SHARE_OF_AN_ADDRESS * self.limit))
        ):
            self.num_refused += 1
            made.close()
            raise ConnectionAbortedError  # asyncio goes on with the next one
        made.listener, made.peer = self, peer
        self.open[peer] = made, time.monotonic(), False
        self.per_address[peer[0]] += 1
        return made, address

    def closed(self, connection: Connection) -> None:
        """Count a connection no more."""
        known = self.open.get(connection.peer)
        if known is not None and known[0] is connection:
            del self.open[connection.peer]
            self.per_address[connection.peer[0]] -= 1
            if not self.per_address[connection.peer[0]]:
                del self.per_address[connection.peer[0]]

    def used(self, peer: Peer) -> None:
        """Note that a party with a session uses this connection."""
        if (known := self.open.get(peer)) is not None:
            self.open[peer] = known[0], time.monotonic(), True

    def close_idle(self, at_once: bool = False) -> None:
        """Shut connections that nobody with a session has used for long, or all of them."""
        now = time.monotonic()
        for connection, used, is_of_party in list(self.open.values()):
            if at_once or now - used > (SECONDS_UNUSED if is_of_party else SECONDS_OF_A_STRANGER):
                try:
                    connection.shutdown(socket.SHUT_RDWR)  # its transport sees the end and closes it
                except OSError:
                    connection.close()
