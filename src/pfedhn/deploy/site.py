"""A server's folder: what the federation is, its keys and certificates, who is invited, what happened."""

import json
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from pfedhn.deploy.certificates import AUTHORITY
from pfedhn.deploy.invitations import Bundle, Invitations
from pfedhn.deploy.record import RECORDS, Records
from pfedhn.deploy.signing import PrivateKey, load_or_make_key, public_text
from pfedhn.deploy.spec import FederationSpec, read_spec, to_plan
from pfedhn.deploy.study import Study
from pfedhn.deploy.survey import SETTLED, is_settled, settled
from pfedhn.engine.plan import Plan
from pfedhn.errors import UserError
from pfedhn.system.files import append, make_folder, read_text, write_atomically

SETTINGS = "serve.json"
DEFAULTS = {"host": "0.0.0.0", "port": 9443}  # noqa: S104 - parties come from other machines


class Site:
    """The folder of a federation's server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.absolute()
        self.events = folder / "events.jsonl"
        self.status = folder / "status.json"
        self.invitations = Invitations(folder / "parties")
        if not (folder / SETTINGS).exists():
            raise UserError(f"{folder} holds no federation; make one with: pfedhn serve SPEC --state DIR.")

    @staticmethod
    def make(
        folder: Path, spec: Path | None, address: str | None = None, host: str | None = None, port: int | None = None
    ) -> "Site":
        """The folder of a new federation, or of one that goes on: its SPEC, if given, must then be the same.

        Parties find the server at `address`; it listens on `host` and `port`. What is not given stays as it was.
        """
        make_folder(folder, mode=0o700)
        kept = folder / "spec.toml"
        if spec is None and not kept.exists():
            raise UserError(f"{folder} holds no federation yet; give its SPEC.")
        if spec is not None:
            text = read_text(spec)
            read_spec(text, spec)
            if not kept.exists():
                write_atomically(kept, text.encode(), mode=0o600)
            if read_text(kept) != text:
                raise UserError(f"{folder} serves another SPEC; give the same, or another --state.")
        settings = folder / SETTINGS
        table: dict[str, Any] = json.loads(read_text(settings)) if settings.exists() else {}
        given = {"address": address, "host": host, "port": port}
        table = {"run": secrets.token_hex(8), **DEFAULTS, **table, **{k: v for k, v in given.items() if v is not None}}
        table.setdefault("address", f"{socket.getfqdn()}:{table['port']}")
        write_atomically(settings, json.dumps(table).encode(), mode=0o600)
        return Site(folder)

    @cached_property
    def settings(self) -> dict[str, Any]:
        table: dict[str, Any] = json.loads(read_text(self.folder / SETTINGS))
        return table

    @property
    def run(self) -> str:
        return str(self.settings["run"])

    @property
    def address(self) -> str:
        """host:port at which parties find the server."""
        return str(self.settings["address"])

    @cached_property
    def spec_text(self) -> str:
        return read_text(self.folder / "spec.toml")

    @property
    def spec(self) -> FederationSpec:
        """The federation's file, with the statistics of its parties once they are known."""
        return settled(self.folder, self.run, self._written_spec)

    @cached_property
    def _written_spec(self) -> FederationSpec:
        return read_spec(self.spec_text, self.folder / "spec.toml")

    @property
    def settled(self) -> dict[str, Any] | None:
        """What the parties' statistics gave; None if the file leaves nothing to them."""
        if is_settled(self._written_spec):
            return None
        values: dict[str, Any] = json.loads(read_text(self.folder / SETTLED))["values"]
        return values

    @cached_property
    def plan(self) -> Plan:
        return to_plan(self.spec)

    @cached_property
    def key(self) -> PrivateKey:
        """The server's own, which signs what it sends."""
        return load_or_make_key(self.folder / "key")

    @cached_property
    def records(self) -> Records:
        """What happened with each party, to show later."""
        return Records(self.folder / RECORDS, self.key)

    @cached_property
    def study(self) -> Study:
        """What parties have to agree to."""
        return Study(self.run, self.spec_text, public_text(self.key.public_key()))

    def log(self, event: Mapping[str, Any]) -> None:
        """Add a line to what has happened."""
        append(self.events, json.dumps({"time": round(time.time(), 3), **event}) + "\n", mode=0o600)

    def known(self) -> dict[str, Any]:
        """The run's progress, as its server last wrote it; empty before that, or if a power cut cut it short."""
        table: dict[str, Any] = {}
        with suppress(ValueError):
            table = json.loads(read_text(self.status)) if self.status.exists() else {}
        return table

    def invite(self, name: str, key: str | None = None) -> Bundle:
        bundle = self.invitations.invite(name, self.address, read_text(self.folder / AUTHORITY), key)
        self.records.of(name).add("invited", is_lasting=True, study=self.study.digest)
        return bundle

    def revoke(self, name: str) -> None:
        """Remove a party."""
        self.invitations.revoke(name)
        self.records.of(name).add("revoked", is_lasting=True)

    def note_agreed(self, name: str, key: str, digest: str, proof: str) -> None:
        """Record that a party has agreed to the study; `proof` is its signature over name, authority and digest."""
        self.records.of(name).add("agreed", is_lasting=True, study=digest, party_key=key, proof=proof)
