"""A party's folder: its private state by round, the models that were tested, its last reply, the chosen round."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pfedhn.deploy.plan import Phase
from pfedhn.engine.round import Kept
from pfedhn.errors import RunError, UserError
from pfedhn.params import Params
from pfedhn.storage.files import (
    SHA256,
    DamagedError,
    filled,
    named,
    read_tensors,
    sealed_json,
    unsealed_json,
    write_tensors,
)
from pfedhn.system.files import append, make_folder, read_bytes, write_atomically

RECEIVED = "received['"  # begins the names of received weights in a file
ANSWERED = "answered"  # what the party has answered: lines with a phase, a round and the identity of the message


class MissingVersion(RunError):
    """The server starts from a version that this party does not have."""


class PartyFolder:
    """The folder in which a party keeps what no other machine knows; it is read to the device that computes."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device
        make_folder(path, mode=0o700)
        self._answered = self._read_answered()

    def reply_to(self, asked: bytes) -> bytes | None:
        """The last reply, if it answered the message with this digest."""
        file = self.path / "reply"
        content = read_bytes(file) if file.exists() else b""
        return content[SHA256:] if content[:SHA256] == asked else None

    def write_reply(self, asked: bytes, reply: bytes) -> None:
        write_atomically(self.path / "reply", asked + reply, mode=0o600)

    def answered(self, what: str) -> Mapping[int, set[bytes]]:
        """The messages that were answered by their rounds: those of a phase of training, or the tests."""
        return self._answered.setdefault(what, {})

    def note_answered(self, what: str, number: int, asked: bytes) -> None:
        """Remember an answered message; it may be forgotten in a power cut."""
        known = self._answered.setdefault(what, {}).setdefault(number, set())
        if asked not in known:
            append(self.path / ANSWERED, f"{what} {number} {asked.hex()}\n", mode=0o600)
            known.add(asked)

    def _read_answered(self) -> dict[str, dict[int, set[bytes]]]:
        found: dict[str, dict[int, set[bytes]]] = {}
        file = self.path / ANSWERED
        for line in read_bytes(file).splitlines() if file.exists() else ():
            if match := re.fullmatch(rb"(\w+) (\d+) ([0-9a-f]{64})", line):  # else it was half written
                found.setdefault(match[1].decode(), {}).setdefault(int(match[2]), set()).add(
                    bytes.fromhex(match[3].decode())
                )
        return found

    def versions(self, phase: Phase) -> list[int]:
        """The rounds whose private state is stored, oldest first."""
        found = (re.fullmatch(r"kept-\w+-(\d+)", file.name) for file in self.path.glob(f"kept-{phase}-*"))
        return sorted(int(match[1]) for match in found if match)

    def kept(self, phase: Phase, version: int, form: Kept) -> Kept:
        """The private state after a round, a tree of the given form."""
        tensors = read_tensors(self._kept(phase, version))
        if tensors is None:
            raise MissingVersion(f"this party's private state after round {version} is missing or damaged.")
        kept: Kept = filled("", form, tensors, self.device)
        return kept

    def write_kept(self, phase: Phase, version: int, kept: Kept, wanted: Iterable[int | None]) -> None:
        """Store the private state after a round, and remove older versions that are not wanted.

        Newer ones stay in any case: the server may repeat an old message.
        """
        write_tensors(self._kept(phase, version), named("", kept))
        for old in self.versions(phase):
            if old < version and old not in wanted:
                self._kept(phase, old).unlink(missing_ok=True)

    def write_tested(self, phase: Phase, number: int, received: Params, kept: Kept, chosen: int | None) -> None:
        """Store the parts of a tested model; besides it, only those of the chosen round stay."""
        write_tensors(self._tested(phase, number), named("received", received) | named("kept", kept))
        for file in self.path.glob(f"evaluated-{phase}-*"):
            if file not in (self._tested(phase, number), self._tested(phase, -1 if chosen is None else chosen)):
                file.unlink(missing_ok=True)

    def tested(self, phase: Phase, number: int, form: Callable[[Params], Kept]) -> tuple[Params, Kept]:
        """The received weights and the private state of a model that was tested."""
        file = self._tested(phase, number)
        tensors = read_tensors(file)
        if tensors is None:
            raise RunError(f"{file} is missing or damaged; restore it from a backup.")
        received = {
            name[len(RECEIVED) : -2]: value.to(self.device)
            for name, value in tensors.items()
            if name.startswith(RECEIVED)
        }
        return received, filled("kept", form(received), tensors, self.device)

    @property
    def has_chosen(self) -> bool:
        return (self.path / "chosen.json").exists()

    def write_chosen(self, table: Mapping[str, Any]) -> None:
        write_atomically(self.path / "chosen.json", sealed_json(table), mode=0o600)

    def chosen(self) -> dict[str, Any]:
        """The chosen round of a run that has ended, and this party's scores there."""
        if not self.has_chosen:
            raise UserError(f"{self.path} holds no model yet; the run has not ended, or this party has not heard so.")
        try:
            return unsealed_json(read_bytes(self.path / "chosen.json"))
        except DamagedError as error:
            raise RunError(f"{self.path / 'chosen.json'} {error}; restore it from a backup.") from None

    def _kept(self, phase: Phase, version: int) -> Path:
        return self.path / f"kept-{phase}-{version}"

    def _tested(self, phase: Phase, number: int) -> Path:
        return self.path / f"evaluated-{phase}-{number}"
