"""Who may take part: parties are invited by name, enroll a key of their own once, and can be taken out again."""

import hashlib
import hmac
import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from pfedhn.deploy.signing import PublicKey, key_text, public_key, public_text
from pfedhn.errors import UserError, closest
from pfedhn.system.files import make_folder, one_at_a_time, read_bytes, read_text, write_atomically

DAYS = 14  # that an invitation is good for
SECONDS_TO_SETTLE = 2.0  # above the tick of any file system's clock


@dataclass(frozen=True)
class Bundle:
    """What a party is given: everything that it needs to find its server and to be let in once."""

    name: str
    address: str  # host:port of the server
    authority: str  # the certificate by which the party knows its server
    token: str  # good once; empty for a party whose key the server has already


@dataclass(frozen=True)
class Invitation:
    """What the server keeps of a party: a digest of its token, and its key once it has enrolled one."""

    name: str
    token: str | None  # SHA-256 of it
    expires: float
    key: str | None = None
    is_revoked: bool = False


def read_bundle(path: Path) -> Bundle:
    try:
        table = json.loads(read_bytes(path))
        return Bundle(**{name: str(table[name]) for name in ("name", "address", "authority", "token")})
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is no invitation; ask the server's owner for one (`pfedhn invite NAME`).") from None


@dataclass(frozen=True)
class Roster:
    """Who may take part now. One that has not changed is the same object."""

    keys: Mapping[str, PublicKey]  # by name
    lines: Mapping[str, str]  # the keys as one line each, by name
    holders: Mapping[bytes, str]  # names by the key as the engine writes it
    revoked: Sequence[str]


class Invitations:
    """The parties of a server, a file each in its folder; `serve` and `invite` look at the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder, mode=0o700)
        self._known: dict[str, _Known] = {}
        self._roster: Roster | None = None
        self._version: tuple[int, int] | None = None  # of the folder that the roster was made from
        self._lock = threading.Lock()  # the door asks in one thread, what keeps the engine in another

    def invite(self, name: str, address: str, authority: str, key: str | None = None) -> Bundle:
        """Invite a party, or invite it anew: then its old key and token count no more.

        Args:
            name: The party's.
            address: Of the server.
            authority: The certificate of its authority.
            key: The party's own public key, where it sent one; else it enrolls one with the token.
        """
        check_name(name)
        token = "" if key is not None else secrets.token_urlsafe(32)
        enrolled = None if key is None else public_text(public_key(key))
        expires = time.time() + DAYS * 86_400
        with one_at_a_time(self.folder):
            if enrolled is not None and (other := self._holder(enrolled)) not in (None, name):
                raise UserError(f"this key is that of {other}; every party needs a key of its own.")
            self._write(Invitation(name, None if key is not None else _digest(token), expires, enrolled))
        return Bundle(name, address, authority, token)

    def enroll(self, name: str, token: str, key: str) -> str:
        """Let a party in that holds its token, with this key from now on; its key as one line.

        The token is good once. Who has lost an answer sends the same again, with the same key. A party whose key the
        server has already needs no token: it has proven to the caller that it holds this one.
        """
        refused = UserError(
            f"{name!r:.80} is not invited, or its invitation was used or has run out; ask for a new one."
        )
        text = public_text(public_key(key))
        if not _is_name(name):
            raise refused
        with one_at_a_time(self.folder):
            invitation = self._read(name)
            if invitation is None or invitation.is_revoked:
                raise refused
            if invitation.token is None and invitation.key == text:
                return text
            if invitation.token is None or not hmac.compare_digest(invitation.token, _digest(token)):
                raise refused
            if invitation.key == text:
                return text
            if invitation.key is not None or invitation.expires < time.time() or self._holder(text) is not None:
                raise refused
            self._write(Invitation(name, invitation.token, invitation.expires, text))
        return text

    def revoke(self, name: str) -> None:
        """Take a party out: nothing is sent to it any more, and nothing of it is believed."""
        with one_at_a_time(self.folder):
            invitation = self._read(name) if _is_name(name) else None
            if invitation is None:
                raise UserError(f"there is no party {name!r}; {closest(name, self.names())}")
            self._write(Invitation(name, None, invitation.expires, invitation.key, is_revoked=True))

    def revoked(self) -> Sequence[str]:
        """Who was taken out."""
        return self.roster().revoked

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.folder.glob("*.json"))

    def enrolled(self) -> Mapping[str, PublicKey]:
        """The keys of all parties that have one, by name."""
        return self.roster().keys

    def roster(self) -> Roster:
        """Who may take part, by the files as they are now.

        It is asked for at every request, so that the files are looked at only when their folder has changed: each of
        them is written by renaming, which changes it.
        """
        with self._lock:
            status = self.folder.stat()
            version = status.st_mtime_ns, status.st_ino
            if self._roster is None or version != self._version:
                self._roster = self._read_all()
                # What changes twice within a tick of the file system's clock would look the same.
                is_settled = time.time() - status.st_mtime > SECONDS_TO_SETTLE
                self._version = version if is_settled else None
            return self._roster

    def _read_all(self) -> Roster:
        """The roster by all files; those that have not changed are not read again."""
        known = {}
        for file in self.folder.glob("*.json"):
            status = file.stat()
            version = status.st_mtime_ns, status.st_ino
            before = self._known.get(file.stem)
            known[file.stem] = before if before and before.version == version else _known(version, file)
        if self._roster is not None and known == self._known:
            return self._roster
        self._known = known
        counts = Counter(one.line for one in known.values())
        # Two parties with one key could speak for each other: neither is believed.
        good = {name: one for name, one in sorted(known.items()) if one.key is not None and counts[one.line] == 1}
        return Roster(
            {name: one.key for name, one in good.items() if one.key is not None},
            {name: one.line for name, one in good.items()},
            {one.text: name for name, one in good.items()},
            [name for name, one in sorted(known.items()) if one.is_revoked],
        )

    def _holder(self, key: str) -> str | None:
        """The party that has this key."""
        invitations = (self._read(name) for name in self.names())
        return next((one.name for one in invitations if one and one.key == key and not one.is_revoked), None)

    def _read(self, name: str) -> Invitation | None:
        file = self.folder / f"{name}.json"
        return _invitation(file) if file.exists() else None

    def _write(self, invitation: Invitation) -> None:
        content = json.dumps(asdict(invitation), indent=1).encode()
        write_atomically(self.folder / f"{invitation.name}.json", content, mode=0o600)


class _Known(NamedTuple):
    """What a party's file says, in a version of it."""

    version: tuple[int, int]
    is_revoked: bool
    key: PublicKey | None = None
    line: str = ""  # the key as one line,
    text: bytes = b""  # and as the engine writes it


def _known(version: tuple[int, int], file: Path) -> _Known:
    invitation = _invitation(file)
    if invitation.key is None or invitation.is_revoked:
        return _Known(version, invitation.is_revoked)
    key = public_key(invitation.key)
    return _Known(version, False, key, public_text(key), key_text(key))


def _invitation(file: Path) -> Invitation:
    return Invitation(**json.loads(read_text(file)))


def check_name(name: str) -> None:
    if not _is_name(name):
        raise UserError(f"{name!r} cannot be a party's name; use letters, digits, - and _, at most 63.")


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name) is not None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
