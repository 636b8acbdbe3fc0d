"""Verify records, and compare the server's record of a party with the party's own.

A record by itself shows that no line was changed, added or removed, except at its end. Both together show more. Each
side notes the newest hash of the other with every message, so that a record which was begun again, cut or forked after
that message no longer holds this hash. And each message carries its sender's signature, which the receiver keeps.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedhn.deploy.join import ENROLLED
from pfedhn.deploy.record import NO_HEAD, RECORD, RECORDS, Line, keys_of, read_record
from pfedhn.deploy.signing import is_evidence, load_or_make_key, public_key, public_text
from pfedhn.deploy.site import SETTINGS
from pfedhn.errors import RunError, UserError, closest
from pfedhn.system.files import read_text

ASKED, RECEIVED, SENT = "asked", "received", "sent"


@dataclass(frozen=True)
class Side:
    """A sound record."""

    party: str
    path: Path
    lines: list[Line]

    def of(self, event: str) -> dict[str, tuple[int, Line]]:
        """The lines of an event with their numbers, by the digests of the messages."""
        return {str(line["digest"]): (line["number"], line) for line in self.lines if line["event"] == event}

    @property
    def heads(self) -> set[str]:
        return {NO_HEAD, *(str(line["hash"]) for line in self.lines)}


@dataclass(frozen=True)
class Comparison:
    """What two sound records of the same messages say together."""

    num_asked: int  # messages that both sides have
    num_received: int  # answers that both sides have
    num_undelivered: int  # messages of the server that the party does not have
    num_unreceived: int  # answers of the party that the server does not have


def is_server(folder: Path) -> bool:
    """Whether a folder is that of a server, or a copy of its records; else it must be that of a party."""
    if (folder / SETTINGS).exists() or (folder / RECORDS).is_dir():
        return True
    if not (folder / ENROLLED).exists() and not (folder / RECORD).exists():
        raise UserError(f"{folder} is neither the folder of a server nor that of a party; give one of them.")
    return False


def sides_of(folder: Path) -> list[Side]:
    """Every record of a folder, verified: all parties' of a server, or a party's own."""
    if is_server(folder):
        key, files = folder / "key", sorted((folder / RECORDS).glob("*.jsonl"))
    else:
        file = folder / ENROLLED
        key = folder / (json.loads(read_text(file))["key"] if file.exists() else "key")
        files = [folder / RECORD] if (folder / RECORD).exists() else []
    if not files:
        raise UserError(f"{folder} has no record; earlier versions of pfedhn kept none.")
    sides = []
    for file in files:
        lines = read_record(file)
        if key.exists() and lines and list(keys_of(lines))[-1] != public_text(load_or_make_key(key).public_key()):
            raise RunError(f"the last line of {file} is signed by another key than that of {folder}.")
        names = [str(line["name"]) for line in lines if line["event"] == "enrolled" and "name" in line]
        sides.append(Side(names[-1] if names else file.stem, file, lines))
    return sides


def compare(server: list[Side], party: Side) -> Comparison:
    """Compare a server's records with a party's own; an error names the first line that the other side contradicts."""
    found = next((side for side in server if side.party == party.party), None)
    if found is None:
        raise UserError(f"the server has no record of {party.party}; {closest(party.party, [s.party for s in server])}")
    _check_keys(found, party)
    for one, other in ((found, party), (party, found)):
        _check_heads(one, other)
    asked, received, sent = found.of(ASKED), found.of(RECEIVED), party.of(SENT)
    heard = party.of(ASKED)
    for digest, (number, line) in heard.items():
        if digest not in asked:
            signed = " and has signed" if _is_signed(line, found) else ""
            raise RunError(f"line {number} of {party.path} is a message that {found.path} does not have{signed}.")
    for digest, (number, line) in received.items():
        if digest not in sent and line.get("kind") == "refusal":
            continue  # of a party that could not write to its disk
        if digest not in sent:
            signed = " and has signed" if _is_signed(line, party) else ""
            raise RunError(f"line {number} of {found.path} is an answer that {party.path} does not have{signed}.")
        if line.get("of") != sent[digest][1].get("of"):
            raise RunError(f"line {number} of {found.path} is an answer to another message than in {party.path}.")
    _check_agreement(found, party)
    return Comparison(len(heard), len(received), len(asked.keys() - heard.keys()), len(sent.keys() - received.keys()))


def _check_heads(one: Side, other: Side) -> None:
    """Refuse a record that lacks a line which the other side has heard of."""
    known = other.heads
    for line in one.lines:
        if (head := line.get("theirs")) and head not in known:
            raise RunError(
                f"{other.path} was cut or begun anew: it lacks a line that line {line['number']} of {one.path} has "
                "heard of."
            )


def _check_keys(server: Side, party: Side) -> None:
    """Refuse a side whose record is not signed by the key that the other side knows it by."""
    for one, part, other in ((server, "party_key", party), (party, "server_key", server)):
        named = [line for line in one.lines if line["event"] == "enrolled" and line.get(part)]
        if named and named[-1][part] not in set(keys_of(other.lines)):
            raise RunError(
                f"{other.path} is not signed by the key that line {named[-1]['number']} of {one.path} names."
            )


def _check_agreement(server: Side, party: Side) -> None:
    """Refuse an agreement in the server's record that the party's own lacks."""
    own = {line.get("study") for line in party.lines if line["event"] == "agreed"}
    for line in server.lines:
        if line["event"] == "agreed" and line.get("study") not in own:
            raise RunError(f"line {line['number']} of {server.path} is an agreement that {party.path} does not have.")


def _is_signed(line: Mapping[str, Any], sender: Side) -> bool:
    """Whether the sender of a message has signed it, as the receiver's line shows."""
    digest, signature = str(line.get("digest")), str(line.get("signed"))
    return any(is_evidence(digest, signature, public_key(key)) for key in keys_of(sender.lines))
