"""Who is let in: a token counts once and for one name, a key for one party, and who is taken out stays out."""

import json
import os
import ssl
import threading
import time
from pathlib import Path

import pytest
from parties import KEYS

from pfedhn.deploy import invitations
from pfedhn.deploy.certificates import AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, make_certificates
from pfedhn.deploy.invitations import Invitations, read_bundle
from pfedhn.deploy.signing import public_text
from pfedhn.errors import UserError
from pfedhn.system.files import one_at_a_time

ONE, OTHER = (public_text(key.public_key()) for key in KEYS[:2])


def test_a_token_lets_one_key_in(tmp_path: Path) -> None:
    known = Invitations(tmp_path)
    bundle = known.invite("lyon", "server:1", "ca")
    assert not known.enrolled()
    assert bundle.token not in (tmp_path / "lyon.json").read_text()
    for name, token in (("lyon", "guessed"), ("paris", bundle.token), ("../lyon", bundle.token), ("lyon", "")):
        with pytest.raises(UserError, match="not invited"):
            known.enroll(name, token, ONE)
    assert known.enroll("lyon", bundle.token, ONE) == ONE
    assert known.enroll("lyon", bundle.token, ONE) == ONE  # its answer was lost
    with pytest.raises(UserError, match="not invited"):
        known.enroll("lyon", bundle.token, OTHER)
    assert {name: public_text(key) for name, key in known.enrolled().items()} == {"lyon": ONE}


def test_an_invitation_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Invitations(tmp_path)
    bundle = known.invite("lyon", "server:1", "ca")
    now = time.time()
    monkeypatch.setattr(invitations.time, "time", lambda: now + (invitations.DAYS + 1) * 86_400)
    with pytest.raises(UserError, match="run out"):
        known.enroll("lyon", bundle.token, ONE)


def test_who_is_taken_out_or_invited_anew_has_no_key(tmp_path: Path) -> None:
    known, same = Invitations(tmp_path), Invitations(tmp_path)  # of `serve` and of `invite`
    token = known.invite("lyon", "server:1", "ca").token
    known.enroll("lyon", token, ONE)
    known.invite("paris", "server:1", "ca", key=OTHER)
    assert set(known.enrolled()) == {"lyon", "paris"}
    same.revoke("lyon")
    assert set(known.enrolled()) == {"paris"}
    with pytest.raises(UserError, match="not invited"):
        known.enroll("lyon", token, ONE)
    again = same.invite("lyon", "server:1", "ca").token
    assert set(known.enrolled()) == {"paris"}
    known.enroll("lyon", again, ONE)
    assert set(known.enrolled()) == {"lyon", "paris"}
    with pytest.raises(UserError, match="there is no party 'nice'"):
        known.revoke("nice")


def test_a_key_is_of_one_party(tmp_path: Path) -> None:
    """Who hands in the key of another does not knock that one out."""
    known = Invitations(tmp_path)
    known.invite("lyon", "server:1", "ca", key=ONE)
    known.invite("lyon", "server:1", "ca", key=ONE)
    with pytest.raises(UserError, match="is that of lyon"):
        known.invite("paris", "server:1", "ca", key=ONE)
    token = known.invite("paris", "server:1", "ca").token
    with pytest.raises(UserError, match="not invited"):
        known.enroll("paris", token, ONE)
    known.enroll("paris", token, OTHER)
    assert {name: public_text(key) for name, key in known.enrolled().items()} == {"lyon": ONE, "paris": OTHER}
    known.revoke("lyon")
    known.invite("nice", "server:1", "ca", key=ONE)
    assert set(known.enrolled()) == {"nice", "paris"}


def test_files_that_give_two_parties_one_key_give_neither_any(tmp_path: Path) -> None:
    known = Invitations(tmp_path)
    known.invite("lyon", "server:1", "ca", key=ONE)
    table = json.loads((tmp_path / "lyon.json").read_text())
    (tmp_path / "paris.json").write_text(json.dumps({**table, "name": "paris"}))
    known.invite("nice", "server:1", "ca", key=OTHER)
    assert set(known.enrolled()) == {"nice"}


def test_files_are_looked_at_again_when_their_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roster is asked for at every request."""
    known, other = Invitations(tmp_path), Invitations(tmp_path)
    known.invite("lyon", "server:1", "ca", key=ONE)
    known.invite("paris", "server:1", "ca", key=OTHER)
    os.utime(tmp_path, (1.0, 1.0))  # long ago
    before = known.roster()
    assert {name: public_text(key) for name, key in before.keys.items()} == {"lyon": ONE, "paris": OTHER}
    with monkeypatch.context() as patch:
        patch.setattr(invitations, "read_text", None)
        patch.setattr(Path, "glob", None)
        assert known.roster() is before
    other.revoke("lyon")
    assert (list(known.enrolled()), known.revoked()) == (["paris"], ["lyon"])
    # Within a tick of the clock two changes leave the folder with the same time.
    monkeypatch.setattr(invitations, "SECONDS_TO_SETTLE", 1e9)  # however long the disk takes
    now = time.time_ns()
    for name in ("nice", "oslo"):
        other.invite(name, "server:1", "ca")
        os.utime(tmp_path, ns=(now, now))
        known.roster()
    other.revoke("paris")
    os.utime(tmp_path, ns=(now, now))
    assert not known.enrolled()


def test_who_takes_a_party_out_waits_for_who_lets_it_in(tmp_path: Path) -> None:
    """Else the one who writes last would undo what the other has done."""
    known = Invitations(tmp_path)
    known.invite("lyon", "server:1", "ca", key=ONE)
    out = threading.Thread(target=known.revoke, args=["lyon"])
    with one_at_a_time(tmp_path):
        out.start()
        out.join(0.2)
        assert out.is_alive()
        assert set(known.enrolled()) == {"lyon"}
    out.join()
    assert not known.enrolled()


def test_a_party_whose_key_is_known_needs_no_token(tmp_path: Path) -> None:
    known = Invitations(tmp_path)
    assert known.invite("lyon", "server:1", "ca", key=ONE).token == ""
    assert known.enroll("lyon", "", ONE) == ONE
    with pytest.raises(UserError, match="not invited"):
        known.enroll("lyon", "", OTHER)


def test_names_and_bundles_that_are_none(tmp_path: Path) -> None:
    for name in ("", "a/b", "..", "-x", "a" * 64, "é"):
        with pytest.raises(UserError, match="cannot be a party's name"):
            Invitations(tmp_path).invite(name, "server:1", "ca")
    for content in ("", "{}", "[]", json.dumps({"name": "a"})):
        (tmp_path / "bundle").write_text(content)
        with pytest.raises(UserError, match="is no invitation"):
            read_bundle(tmp_path / "bundle")


def test_certificates_are_made_once_and_renewed_for_another_host(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1", "localhost"])
    before = {name: (tmp_path / name).read_bytes() for name in (AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY)}
    for secret in (AUTHORITY_KEY, SERVER_KEY):
        assert (tmp_path / secret).stat().st_mode & 0o077 == 0
    make_certificates(tmp_path, ["localhost"])
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    make_certificates(tmp_path, ["server.example.org"])
    changed = [name for name, content in before.items() if (tmp_path / name).read_bytes() != content]
    assert changed == [SERVER, SERVER_KEY]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / SERVER, tmp_path / SERVER_KEY)
    (tmp_path / AUTHORITY_KEY).unlink()
    make_certificates(tmp_path, ["another.example.org"])  # a person's own stay
    assert (tmp_path / SERVER).read_bytes() != before[SERVER]
    for name in (SERVER_KEY, SERVER):
        (tmp_path / name).unlink()
        with pytest.raises(UserError, match=r"no server\.crt or no server\.key"):
            make_certificates(tmp_path, ["localhost"])
