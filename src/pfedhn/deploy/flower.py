"""Flower as another transport: the app that `flwr run` starts, in Flower's simulation and on a grid of Flower's nodes.

Server and parties are the same objects as behind our own door (`deploy.door`), and none of Flower's programs is started
here. Flower starts a process for every message, which loads PyTorch and the party's data each time.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from pfedhn.deploy import simulated
from pfedhn.deploy.contacts import Arrival
from pfedhn.deploy.join import load_party
from pfedhn.deploy.server import Server
from pfedhn.deploy.signing import PublicKey
from pfedhn.deploy.site import Site
from pfedhn.deploy.wire import from_envelope, unpacked
from pfedhn.errors import RunError, UserError, first_line
from pfedhn.system.files import claimed, write_atomically
from pfedhn.system.process import stop_requests

SECONDS_BETWEEN_ROLL_CALLS = 2.0
SECONDS_FOR_THE_LAST_ONE = 120.0  # that a server which is being ended may still hold the folder
NODE_GONE = 5  # Flower's code for a node that it does not hear of any more
KINDS = {"hello": MessageType.QUERY, "train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}
PART, CONTENT = "message", "content"  # names of the record that carries bytes, and of its field


class Sent(NamedTuple):
    """A message on its way."""

    party: str
    kind: str
    until: float


def carried(content: bytes) -> RecordDict:
    """Bytes as Flower takes them. One record: each object costs time."""
    return RecordDict({PART: ConfigRecord({CONTENT: content})})


def content_of(message: Message) -> bytes:
    content = message.content[PART][CONTENT]
    assert isinstance(content, bytes)
    return content


def key_text(key: PublicKey) -> bytes:
    """A public key as Flower writes it."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


class Flower:
    """A grid of Flower as a transport. It sends only to nodes with the key of an enrolled party.

    `log` is called with every node that belongs to nobody; an answer may take `seconds`.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Callable[[], Mapping[str, PublicKey]],
        seconds: float,
        log: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.grid, self.roster, self.log = grid, roster, log
        self.seconds_to_live = 2 * seconds + 120.0  # longer than is waited, or a late answer turns into an error
        self.nodes: dict[str, int] = {}
        self.sent: dict[str, Sent] = {}
        self.strangers: set[int] = set()
        self.bytes_sent = self.bytes_received = 0
        self._called = -1e9

    def members(self) -> set[str]:
        if time.monotonic() - self._called > SECONDS_BETWEEN_ROLL_CALLS:
            self._called = time.monotonic()
            names = {key_text(key): name for name, key in self.roster().items()}
            nodes = list(self.grid.get_nodes())
            self.nodes = {names[node.public_key]: node.node_id for node in nodes if node.public_key in names}
            for node in nodes:
                if node.public_key not in names and node.node_id not in self.strangers:
                    self.strangers.add(node.node_id)
                    self.log({"event": "stranger", "node": node.node_id, "why": "no key of an enrolled party"})
        return set(self.nodes)

    def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
        message = Message(carried(content), self.nodes[party], KINDS[kind], ttl=self.seconds_to_live)
        # A message that Flower does not take has no number. It is lost: the server sees that nobody answers.
        for number in filter(None, self.grid.push_messages([message])):
            self.bytes_sent += len(content)
            self.sent[number] = Sent(party, kind, time.monotonic() + self.seconds_to_live)

    def withdraw(self, party: str, kind: str) -> None:
        self.sent = {number: sent for number, sent in self.sent.items() if (sent.party, sent.kind) != (party, kind)}

    def arrivals(self, seconds: float) -> list[Arrival]:
        now = time.monotonic()
        self.sent = {number: sent for number, sent in self.sent.items() if sent.until > now}
        found = []
        for answer in self.grid.pull_messages(list(self.sent)) if self.sent else ():
            sent = self.sent.pop(answer.metadata.reply_to_message_id, None)
            if sent is None:
                continue
            if answer.has_error():
                if answer.error.code == NODE_GONE:
                    self.nodes.pop(sent.party, None)  # until Flower names it again
                reason = f"{answer.error.code}: {answer.error.reason}"
                found.append(Arrival(sent.party, sent.kind, None, f"gave no answer ({reason:.300})"))
                continue
            try:
                content = content_of(answer)
            except (KeyError, AssertionError, TypeError) as error:
                found.append(Arrival(sent.party, sent.kind, None, f"answered without bytes ({first_line(error)})"))
                continue
            self.bytes_received += len(content)
            found.append(Arrival(sent.party, sent.kind, content))
        if not found:
            time.sleep(seconds)
        return found


class Simulated(Flower):
    """The grid of a simulation, whose nodes have no keys: each serves one party."""

    def members(self) -> set[str]:
        self.nodes = self.nodes or dict(zip(self.roster(), self.grid.get_node_ids(), strict=False))
        return set(self.nodes)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Serve the federation of a folder to its end, or simulate one."""
    config = context.run_config
    if config["deployed"]:
        site = Site(Path(str(config["state"])))
    else:
        site = simulated.prepare(config, context.run_id, len(list(grid.get_node_ids())))
    try:
        with claimed(site.folder, SECONDS_FOR_THE_LAST_ONE):
            serve(grid, site, Flower if config["deployed"] else Simulated)
    except Exception as error:
        with suppress(RunError):  # the disk may be what is full
            site.log({"event": "failed", "why": str(error) if isinstance(error, UserError) else first_line(error)})
        raise


def serve(grid: Grid, site: Site, make_transport: type[Flower]) -> None:
    """Run the server of a site over a grid."""
    started = time.monotonic()
    server: Server | None = None

    def log(event: Mapping[str, Any]) -> None:
        site.log(event)
        write_status()

    def write_status() -> None:
        if server is None:
            return
        table = server.status() | {
            "seconds": round(time.monotonic() - started, 1),
            "wire_down": transport.bytes_sent,
            "wire_up": transport.bytes_received,
            "time": round(time.time(), 3),
        }
        write_atomically(site.status, json.dumps(table).encode(), mode=0o600, is_lasting=False)  # at every event

    roster = site.invitations.enrolled
    transport = make_transport(grid, roster, site.spec.policy.reply_seconds, log)
    server = Server(
        site.plan, site.run, site.folder, site.key, roster, transport, site.spec.policy, log,
        records=site.records,
    )  # fmt: skip
    stop = threading.Event()
    with stop_requests(lambda number: stop.set()):
        log({"event": "running", "pid": os.getpid(), "round": server.state.round})
        server.run(stop)
    write_status()
    log({"event": "stopped" if stop.is_set() else "left"})


client_app = ClientApp()
_party = cache(load_party)


def answer(message: Message, context: Context) -> Message:
    """A party's answer: of the party whose folder the node names, or in a simulation of any."""
    content = content_of(message)
    if "party" in context.node_config:
        folder = Path(str(context.node_config["party"]))
    else:
        name = unpacked(from_envelope(content)[1]).party
        folder = simulated.folder_of(context.run_config, context.run_id) / "simulated" / name
    return Message(carried(_party(folder).answer(content)), reply_to=message)


client_app.query()(answer)
client_app.train()(answer)
client_app.evaluate()(answer)
