"""A server that stays up: one process, whose folder says what it did."""

import json
import shutil
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parties import KEYS
from support import free_port

from pfedhn.deploy import serve
from pfedhn.deploy.certificates import AUTHORITY, SERVER, SERVER_KEY, make_certificates
from pfedhn.deploy.page import Place
from pfedhn.deploy.serve import Service
from pfedhn.deploy.signing import public_text
from pfedhn.deploy.site import Site
from pfedhn.errors import RunError, UserError
from pfedhn.system import files

SPEC = 'model = "mlp-4"\nclients = 2\n[data]\nclasses = 2\nshape = [2]\n'


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Of a server that parties find as localhost, and that has enrolled one."""
    (tmp_path / "spec.toml").write_text(SPEC)
    port = free_port()
    made = Site.make(tmp_path / "state", tmp_path / "spec.toml", f"localhost:{port}", "127.0.0.1", port)
    made.invitations.invite("lyon", made.address, "", public_text(KEYS[0].public_key()))
    return made


class Served:
    """A server at work in a thread."""

    def __init__(self, site: Site, page: Place | None = None) -> None:
        self.site, self.said, self.stop = site, list[Any](), threading.Event()
        self.thread = threading.Thread(target=Service(site, False, self.said.append, page).run, args=[self.stop])

    def __enter__(self) -> "Served":
        self.thread.start()
        while not any(event["event"] == "running" for event in self.said):
            assert self.thread.is_alive()
            time.sleep(0.02)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop.set()
        self.thread.join()

    def ask(self, path: str) -> Any:
        context = ssl.create_default_context(cafile=str(self.site.folder / AUTHORITY))
        with urllib.request.urlopen(f"https://{self.site.address}{path}", timeout=120, context=context) as answer:
            return json.loads(answer.read())


def test_a_server_with_an_authority_of_one_s_own(site: Site) -> None:
    own = site.folder.parent / "own"
    own.mkdir()
    make_certificates(own, ["localhost"])
    for name in (AUTHORITY, SERVER, SERVER_KEY):
        shutil.copy(own / name, site.folder)
    with Served(site) as served:
        assert served.ask("/health") == {"is_up": True, "round": 0, "has_ended": False}
    assert {name: (site.folder / name).read_bytes() for name in (AUTHORITY, SERVER, SERVER_KEY)} == {
        name: (own / name).read_bytes() for name in (AUTHORITY, SERVER, SERVER_KEY)
    }
    assert [event["event"] for event in events(site)] == ["serving", "running", "stopped"]
    assert site.known()["round"] == 0


def test_a_spec_that_waits_for_statistics_is_checked_before_anything_starts(tmp_path: Path) -> None:
    text = SPEC.replace('"mlp-4"', '"linear"').replace("classes = 2", 'classes = "federation"')
    (tmp_path / "spec.toml").write_text(f'method = "pfedhn-intercept"\n{text}')
    made = Site.make(tmp_path / "state", tmp_path / "spec.toml", "localhost:1", "127.0.0.1", free_port())
    with pytest.raises(UserError, match="which linear does not have"):
        Service(made, True, lambda event: None).run(threading.Event())
    assert not made.events.exists()


def raises(error: Exception) -> Callable[..., None]:
    def run(*given: Any, **named: Any) -> None:
        raise error

    return run


def test_a_server_that_gives_up_says_why_and_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "the journal is damaged at byte 7; bring it back from a backup."
    monkeypatch.setattr(serve.Server, "run", raises(RunError(sentence)))
    with pytest.raises(RunError) as caught:
        Service(site, True, lambda event: None).run(threading.Event())
    assert str(caught.value) == sentence
    assert [event["why"] for event in events(site) if event["event"] == "gave up"] == [sentence]
    monkeypatch.undo()
    with Served(site) as served:  # its port is free again
        assert served.ask("/health")["is_up"]


def test_a_port_that_is_taken_is_refused(site: Site) -> None:
    with Served(site), pytest.raises(UserError, match=r"cannot be listened on .*; give another --port"):
        Service(site, True, lambda event: None).run(threading.Event())


def test_what_is_written_at_every_event_does_not_wait_for_the_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def run(server: Any, *given: Any, **named: Any) -> None:
        monkeypatch.setattr(files.os, "fsync", waited.append)
        for number in range(3):
            server.log({"event": "refused", "number": number})

    monkeypatch.setattr(serve.Server, "run", run)
    Service(site, True, lambda event: None).run(threading.Event())
    assert not waited
    assert site.known()["round"] == 0


def events(site: Site) -> list[Any]:
    return [json.loads(line) for line in site.events.read_text().splitlines()]
