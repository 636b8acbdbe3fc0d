"""`pfedhn serve`: the server of a federation, one process: the door in a thread, the run in the caller's."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from pfedhn import __version__
from pfedhn.deploy import across
from pfedhn.deploy.board import Board
from pfedhn.deploy.certificates import AUTHORITY, make_certificates
from pfedhn.deploy.door import Door, OpenDoor
from pfedhn.deploy.mailroom import Mailroom
from pfedhn.deploy.page import TOKEN_FILE, OpenPage, Place
from pfedhn.deploy.server import Server
from pfedhn.deploy.signing import public_text
from pfedhn.deploy.site import Site
from pfedhn.deploy.survey import Survey, is_settled
from pfedhn.errors import UserError
from pfedhn.system.files import read_text, write_atomically


class Service:
    """A federation's server.

    Args:
        site: Its folder.
        is_leaving: Whether it ends when training has and every party that is there knows; else it stays for others.
        say: Called with every event.
        page: The address of the page that shows the run; None for no page.
        describe: Gives the sentence of an event for that page; None for an event that is not shown.
    """

    def __init__(
        self,
        site: Site,
        is_leaving: bool,
        say: Callable[[Mapping[str, Any]], None],
        page: Place | None = None,
        describe: Callable[[Mapping[str, Any]], str | None] = lambda event: str(event["event"]),
    ) -> None:
        self.site, self.is_leaving, self.say, self.page = site, is_leaving, say, page
        self.mailroom, self.board = Mailroom(), Board(describe=describe)
        self.server: Server | None = None
        self._began = time.monotonic()
        self._lock = threading.Lock()  # the door's thread logs too

    def run(self, stop: threading.Event) -> None:
        """Serve until it is asked to stop, or until the run has ended if it leaves then."""
        site = self.site
        self._renew()
        spec, key = site.spec, site.key
        _ = site.plan if is_settled(spec) else site.study.plan  # what is wrong is said before anything starts
        authority = read_text(site.folder / AUTHORITY)
        door = Door(
            self.mailroom, site.invitations, authority, self._enrolled, self._health, self._log,
            study=site.study, agreed=site.note_agreed,
        )  # fmt: skip
        opened = OpenDoor(door, site.folder, site.settings["host"], site.settings["port"], self._renew)
        opened.start()
        stack = ExitStack()
        try:
            if self.page is not None:
                self._open_page(self.page, opened, stack)
            self._log({"event": "serving", "address": site.address, "run": site.run})
            roster, policy = site.invitations.enrolled, spec.policy
            if not is_settled(spec):
                Survey(spec, site.run, site.folder, key, roster, self.mailroom, self._log, site.records).run(stop)
                if stop.is_set():
                    self._log({"event": "stopped"})
                    return
            server = Server(
                site.plan, site.run, site.folder, key, roster, self.mailroom, policy, self._note,
                settled=site.settled, records=site.records,
            )  # fmt: skip
            server.across = across.Across(site.plan, server.questions, server.contacts, site.folder, self._note)
            self.server = server
            self.board.across = across.found(site.folder)
            self._note({"event": "running", "pid": os.getpid(), "round": server.state.round})
            server.run(stop, is_lingering=not self.is_leaving)
            self._note({"event": "stopped" if stop.is_set() else "left"})
        except UserError as error:
            with suppress(UserError):  # the disk may be what is full
                self._log({"event": "gave up", "why": str(error)})
            raise
        finally:
            stack.close()
            opened.stop()

    def _open_page(self, place: Place, door: OpenDoor, stack: ExitStack) -> None:
        site = self.site
        self.board.about = {
            "name": site.folder.name, "run": site.run, "address": site.address, "method": site.spec.cell.method,
            "network": ", ".join(site.spec.sizes) or str(site.spec.cell.model), "version": __version__,
        }  # fmt: skip
        self.board.counts = lambda: {
            "strangers": door.door.strangers.number,
            "connections_refused": door.listener.num_refused,
        }
        page = stack.enter_context(OpenPage(self.board, place, site.folder, site.address))
        token = {} if place.is_loopback else {"token": str(site.folder / TOKEN_FILE)}
        self._log({"event": "page", "address": page.address, **token})

    def _renew(self) -> bool:
        """Make the server's certificate anew if it runs out soon; True if it was."""
        host = self.site.address.rpartition(":")[0].strip("[]")
        return make_certificates(self.site.folder, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))

    def _log(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self.site.log(event)
            self.board.hear(event)
            self.say({"time": round(time.time(), 3), **event})

    def _note(self, event: Mapping[str, Any]) -> None:
        """Log an event of the run, and write where the run stands."""
        self._log(event)
        if self.server is None:
            return
        if event["event"] == "compared":
            self.board.across = across.found(self.site.folder)
        table = self.server.status() | {
            "seconds": round(time.monotonic() - self._began, 1),
            "wire_down": self.mailroom.bytes_sent,
            "wire_up": self.mailroom.bytes_received,
            "time": round(time.time(), 3),
            "record_head": self.site.records.head_of_all(self.server.state.members),
        }
        write_atomically(self.site.status, json.dumps(table).encode(), mode=0o600, is_lasting=False)  # at every event
        self.board.publish(table, self.server.state.history, self.site.invitations.revoked())

    def _enrolled(self, name: str) -> dict[str, Any]:
        """What a party is told that may come."""
        self._log({"event": "enrolled", "party": name})
        key = public_text(self.site.invitations.enrolled()[name])
        self.site.records.of(name).add("enrolled", is_lasting=True, party_key=key)
        return self.site.study.table()

    def _health(self) -> dict[str, Any]:
        state = None if self.server is None else self.server.state
        return {
            "is_up": state is not None,
            "round": None if state is None else state.round,
            "has_ended": state is not None and state.has_ended,
        }
