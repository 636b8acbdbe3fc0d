"""Who is let in: a token counts once and for one name, a key for one party, and who is taken out stays out."""

import json
import ssl
import time
from pathlib import Path

import pytest
from parties import KEYS

from pfedhn.deploy import invitations
from pfedhn.deploy.certificates import AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, make_certificates
from pfedhn.deploy.invitations import Invitations, read_bundle
from pfedhn.deploy.signing import public_text
from pfedhn.errors import UserError

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
    (tmp_path / SERVER).unlink()
    with pytest.raises(UserError, match=r"no server\.crt"):
        make_certificates(tmp_path, ["localhost"])
