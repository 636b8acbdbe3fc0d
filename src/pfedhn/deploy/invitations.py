"""Who may take part: parties are invited by name, enroll their own key once, and can be removed again."""

import hashlib
import hmac
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from pfedhn.deploy.signing import PublicKey, public_key, public_text
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
    """Who may take part now."""

    keys: Mapping[str, PublicKey]  # by name
    revoked: Sequence[str]


class Invitations:
    """The parties of a server, a file each in its folder; `serve` and `invite` look at the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder, mode=0o700)
        # The folder's version, None if it may change unseen, and its roster: one value, since two threads ask.
        self._read_last: tuple[tuple[int, int] | None, Roster] | None = None

    def invite(self, name: str, address: str, authority: str, key: str | None = None) -> Bundle:
        """Invite a party, or invite it anew: then its old key and token count no more.

        Args:
            name: The party's.
            address: Of the server.
            authority: The certificate of its authority.
            key: The party's own public key, if it sent one; else it enrolls one with the token.
        """
        check_name(name)
        token = secrets.token_urlsafe(32) if key is None else ""
        line = None if key is None else public_text(public_key(key))
        with one_at_a_time(self.folder):
            alike = (other for other in self.names() if other != name and other.casefold() == name.casefold())
            if (other := next(alike, None)) is not None:
                raise UserError(f"{name!r} differs from the party {other!r} only in case; choose another name.")
            if line is not None and (other := self._holder(line)) not in (None, name):
                raise UserError(f"this key is that of {other}; every party needs its own.")
            self._write(Invitation(name, _digest(token) if token else None, time.time() + DAYS * 86_400, line))
        return Bundle(name, address, authority, token)

    def enroll(self, name: str, token: str, key: str) -> str:
        """Let a party in that holds its token, with this key from now on; its key as one line.

        The token is good once. A party that lost the answer sends the same again, with the same key. A party whose key
        the server has already needs no token: it has proven to the caller that it holds this one.
        """
        refused = UserError(
            f"{name!r:.80} is not invited, or its invitation was used or has run out; ask for a new one."
        )
        line = public_text(public_key(key))
        with one_at_a_time(self.folder):
            invitation = self._read(name)
            if invitation is None or invitation.is_revoked:
                raise refused
            is_first = invitation.key is None and time.time() <= invitation.expires
            has_token = invitation.token is not None and hmac.compare_digest(invitation.token, _digest(token))
            if invitation.key == line and (has_token or invitation.token is None):
                return line
            if not (has_token and is_first) or self._holder(line) is not None:
                raise refused
            self._write(Invitation(name, invitation.token, invitation.expires, line))
        return line

    def holds_token(self, name: str, token: str) -> bool:
        """Whether somebody who knows this token may read what the party is invited to; the token is not used up."""
        invitation = self._read(name)
        if invitation is None or invitation.is_revoked or invitation.token is None:
            return False
        return hmac.compare_digest(invitation.token, _digest(token)) and time.time() <= invitation.expires

    def has_key(self, name: str) -> bool:
        """Whether a party has enrolled a key that still counts."""
        invitation = self._read(name)
        return invitation is not None and invitation.key is not None and not invitation.is_revoked

    def revoke(self, name: str) -> None:
        """Remove a party: nothing is sent to it any more, and nothing from it is believed."""
        with one_at_a_time(self.folder):
            invitation = self._read(name)
            if invitation is None:
                raise UserError(f"there is no party {name!r}; {closest(name, self.names())}")
            self._write(Invitation(name, None, invitation.expires, invitation.key, is_revoked=True))

    def revoked(self) -> Sequence[str]:
        return self.roster().revoked

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.folder.glob("*.json"))

    def enrolled(self) -> Mapping[str, PublicKey]:
        """The keys of all parties that have one, by name."""
        return self.roster().keys

    def roster(self) -> Roster:
        """Who may take part, by the files as they are now.

        Every request asks for it, so the files are read only when their folder has changed: each of them is written by
        renaming, which changes it.
        """
        status = self.folder.stat()
        version = status.st_mtime_ns, status.st_ino
        if self._read_last is None or self._read_last[0] != version:
            # What changes twice within a tick of the file system's clock would look the same.
            is_settled = time.time() - status.st_mtime > SECONDS_TO_SETTLE
            self._read_last = version if is_settled else None, self._read_all()
        return self._read_last[1]

    def _read_all(self) -> Roster:
        known = {name: one for name in self.names() if (one := self._read(name)) is not None}
        keys = {name: _stored_key(one.key) for name, one in known.items() if one.key and not one.is_revoked}
        lines = {name: public_text(key) for name, key in keys.items()}
        # Two parties with one key could speak for each other: neither is believed.
        counts = Counter(lines.values())
        keys = {name: key for name, key in keys.items() if counts[lines[name]] == 1}
        return Roster(keys, [name for name, one in known.items() if one.is_revoked])

    def _holder(self, line: str) -> str | None:
        """The party that has this key."""
        invitations = (self._read(name) for name in self.names())
        return next((one.name for one in invitations if one and one.key == line and not one.is_revoked), None)

    def _read(self, name: str) -> Invitation | None:
        file = self.folder / f"{name}.json"
        return Invitation(**json.loads(read_text(file))) if _is_name(name) and file.exists() else None

    def _write(self, invitation: Invitation) -> None:
        content = json.dumps(asdict(invitation), indent=1).encode()
        write_atomically(self.folder / f"{invitation.name}.json", content, mode=0o600)


_stored_key = lru_cache(maxsize=10_000)(public_key)  # the roster is read again whenever a party enrolls


def check_name(name: str) -> None:
    if not _is_name(name):
        raise UserError(f"{name!r} cannot be a party's name; use letters, digits, - and _, at most 63.")


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name) is not None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
