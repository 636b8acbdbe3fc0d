"""A server that stays up: what it starts, and what it believes of the engine."""

import base64
import itertools
import json
import shutil
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parties import KEYS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pfedhn.deploy import engine, serve
from pfedhn.deploy.certificates import AUTHORITY, SERVER, SERVER_KEY, make_certificates
from pfedhn.deploy.gate import Gate
from pfedhn.deploy.serve import IN_USE, Service, max_body
from pfedhn.deploy.server import SMALL_MESSAGE
from pfedhn.deploy.signing import KEY_HEADER, key_text, public_text
from pfedhn.deploy.site import Site
from pfedhn.deploy.spec import read_spec, to_plan
from pfedhn.params import num_bytes

SPEC = 'model = "mlp-4"\nclients = 2\n[data]\nclasses = 2\nshape = [2]\n'
LINE = public_text(KEYS[0].public_key())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Of a server that parties find as localhost, and that has enrolled one."""
    (tmp_path / "spec.toml").write_text(SPEC)
    port = engine.free_port()
    made = Site.make(tmp_path / "state", tmp_path / "spec.toml", f"localhost:{port}", "127.0.0.1", port)
    made.invitations.invite("lyon", made.address, "", LINE)
    return made


async def echo(request: Request) -> Response:
    return JSONResponse({"call": request.path_params["call"], "content": (await request.body()).decode()})


def test_a_server_with_an_authority_of_one_s_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate names the server and not the address of the engine; parties reach the engine all the same."""
    own = site.folder.parent / "own"
    own.mkdir()
    make_certificates(own, ["localhost"])
    for name in (AUTHORITY, SERVER, SERVER_KEY):
        shutil.copy(own / name, site.folder)
    engines: list[Gate] = []

    def start(command: Sequence[str], home: Path) -> Any:
        given = dict(itertools.pairwise(command))
        certificate, key = Path(given["--ssl-certfile"]), Path(given["--ssl-keyfile"])
        assert (certificate.name, key) == (SERVER, certificate.parent / SERVER_KEY)
        app = Starlette(routes=[Route("/v1/fleet/{call}", echo, methods=["POST"])])
        engines.append(Gate(app, certificate.parent, given["--host"], int(given["--port"])))
        engines[-1].start()
        return SimpleNamespace(poll=lambda: None, pid=0)

    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setattr(engine, "program", str)
    monkeypatch.setattr(engine, "stop", lambda process: engines[-1].stop())
    monkeypatch.setattr(Service, "_ask", lambda self, *words: ({"run-id": 1}, ""))
    monkeypatch.setattr(serve, "SECONDS_BETWEEN_CHECKS", 0.05)
    said, stop = list[Any](), threading.Event()
    thread = threading.Thread(target=Service(site, False, said.append).run, args=[stop])
    thread.start()
    try:
        while not any(event["event"] == "engine" for event in said):
            assert thread.is_alive()
            time.sleep(0.02)
        context = ssl.create_default_context(cafile=str(own / AUTHORITY))

        def ask(path: str, data: bytes | None = None) -> Any:
            key = base64.b64encode(key_text(KEYS[0].public_key())).decode()
            request = urllib.request.Request(f"https://{site.address}{path}", data, {KEY_HEADER: key})
            with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                return json.loads(answer.read())

        assert ask("/v1/fleet/pull-messages", b"hello") == {"call": "pull-messages", "content": "hello"}
        assert ask("/health") == {"is_up": True, "round": None, "has_ended": False}
    finally:
        stop.set()
        thread.join()
    assert {name: (site.folder / name).read_bytes() for name in (AUTHORITY, SERVER, SERVER_KEY)} == {
        name: (own / name).read_bytes() for name in (AUTHORITY, SERVER, SERVER_KEY)
    }


def test_a_key_is_registered_when_the_engine_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said of another key, some time ago, says nothing of this one."""
    service = Service(site, False, lambda event: None)
    (service.home / "failed-command.log").write_text(f"Public key {IN_USE}.")
    answers = [(1, "the engine does not answer"), (1, f'{{"success": false,\n"message": "Public key {IN_USE}."}}')]

    def run(command: Sequence[str], home: Path) -> subprocess.CompletedProcess[str]:
        code, said = answers.pop(0)
        return subprocess.CompletedProcess(command, code, said, "")

    monkeypatch.setattr(engine, "program", str)
    monkeypatch.setattr(engine, "run", run)
    service._register()
    assert not service.registered
    service._register()
    assert service.registered == {LINE}
    service._register()  # it is not asked for again
    service.registered.clear()
    answers.append((0, '{"success": true}'))
    service._register()
    assert service.registered == {LINE}


def test_the_engine_s_programs_find_each_other_past_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.delenv("no_proxy", raising=False)
    found = engine.environment(tmp_path)
    assert found["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert found["no_proxy"] == "127.0.0.1,localhost"


@pytest.mark.parametrize("model", ["mlp-4", "mlp-200000"])
def test_a_party_can_send_its_update_and_not_much_more(model: str) -> None:
    plan = to_plan(read_spec(SPEC.replace("mlp-4", model), Path("spec.toml")))
    update = num_bytes(plan.start(model))
    assert 2 * update + SMALL_MESSAGE < max_body(plan) <= 4 * update + (4 << 20)
