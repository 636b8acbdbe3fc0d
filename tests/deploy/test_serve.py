"""A server that stays up: what it starts, and what it believes of Flower."""

import base64
import itertools
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parties import KEYS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pfedhn.deploy import flower, programs, serve
from pfedhn.deploy.certificates import AUTHORITY, SERVER, SERVER_KEY, make_certificates
from pfedhn.deploy.gate import Gate
from pfedhn.deploy.questions import SMALL_MESSAGE
from pfedhn.deploy.serve import IN_USE, Service, max_body
from pfedhn.deploy.signing import KEY_HEADER, key_text, public_text
from pfedhn.deploy.site import RUN, Site
from pfedhn.deploy.spec import read_spec, to_plan
from pfedhn.errors import RunError, UserError
from pfedhn.params import num_bytes
from pfedhn.system import files
from pfedhn.system.files import claimed

SPEC = 'model = "mlp-4"\nclients = 2\n[data]\nclasses = 2\nshape = [2]\n'
LINE = public_text(KEYS[0].public_key())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Of a server that parties find as localhost, and that has enrolled one."""
    (tmp_path / "spec.toml").write_text(SPEC)
    port = programs.free_port()
    made = Site.make(tmp_path / "state", tmp_path / "spec.toml", f"localhost:{port}", "127.0.0.1", port)
    made.invitations.invite("lyon", made.address, "", LINE)
    return made


async def echo(request: Request) -> Response:
    return JSONResponse({"call": request.path_params["call"], "content": (await request.body()).decode()})


def test_a_server_with_an_authority_of_one_s_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate names the server and not the address of Flower; parties reach Flower all the same."""
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

    monkeypatch.setattr(programs, "start", start)
    monkeypatch.setattr(programs, "path_of", str)
    monkeypatch.setattr(programs, "stop", lambda process: engines[-1].stop())
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
            with urllib.request.urlopen(request, timeout=120, context=context) as answer:
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
    answers = [(1, "Flower does not answer"), (1, f'{{"success": false,\n"message": "Public key {IN_USE}."}}')]

    def run(command: Sequence[str], home: Path) -> subprocess.CompletedProcess[str]:
        code, said = answers.pop(0)
        return subprocess.CompletedProcess(command, code, said, "")

    monkeypatch.setattr(programs, "path_of", str)
    monkeypatch.setattr(programs, "run", run)
    service._register()
    assert not service.registered
    service._register()
    assert set(service.registered) == {LINE}
    service._register()  # it is not asked for again
    service.registered.clear()
    answers.append((0, '{"success": true, "node-id": 7}'))
    service._register()
    assert set(service.registered) == {LINE}


def test_keys_are_registered_one_at_a_time_and_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Flower that is started again is asked whom it knows; one that fails is not in the way of others."""
    lines = {"lyon": LINE}
    for name, key in (("nice", KEYS[1]), ("paris", KEYS[2])):
        lines[name] = public_text(key.public_key())
        site.invitations.invite(name, site.address, "", lines[name])
    nodes, asked, refused, numbers = dict[str, int](), list[str](), {"lyon"}, itertools.count(100)
    gone: set[str] = set()

    def run(command: Sequence[str], home: Path) -> subprocess.CompletedProcess[str]:
        asked.append(command[2])
        if command[2] == "list":
            status = {name: "unregistered" if name in gone else "offline" for name in nodes}
            listed = [{"node-id": str(node), "status": status[name]} for name, node in nodes.items()]
            return subprocess.CompletedProcess(command, 0, json.dumps({"nodes": listed}), "")
        name = command[command.index("--name") + 1]
        if name in refused:
            return subprocess.CompletedProcess(command, 1, "Flower does not answer", "")
        nodes[name] = next(numbers)
        return subprocess.CompletedProcess(command, 0, json.dumps({"success": True, "node-id": nodes[name]}), "")

    monkeypatch.setattr(programs, "path_of", str)
    monkeypatch.setattr(programs, "run", run)

    def start(turns: int) -> Service:
        asked.clear()
        service = Service(site, False, lambda event: None)
        service._recall()
        for turn in range(turns):
            before = len(asked)
            service._register()
            assert len(asked) <= before + 1, turn
        return service

    assert set(start(6).registered) == {lines["nice"], lines["paris"]}
    refused.clear()
    assert set(start(3).registered) == set(lines.values())
    assert asked == ["list", "register"]
    assert set(start(3).registered) == set(lines.values())
    assert asked == ["list"]
    del nodes["nice"]  # by a Flower that was brought back from an older copy
    assert set(start(0).registered) == {LINE, lines["paris"]}
    start(2)
    assert asked == ["list", "register"]
    gone.add("paris")
    assert set(start(0).registered) == {LINE, lines["nice"]}
    (site.folder / "engine" / serve.REGISTERED).write_text("{")
    assert set(start(0).registered) == set()


def test_the_engine_s_programs_find_each_other_past_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.delenv("no_proxy", raising=False)
    found = programs.environment(tmp_path)
    assert found["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert found["no_proxy"] == "127.0.0.1,localhost"


class Engines:
    """A Flower that starts, and whose runs do what they are told to; each run is the next of `runs`."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch, *runs: Callable[[], None]) -> None:
        self.site, self.runs, self.begun = site, list(runs), list[float]()
        self.clock = partial(next, itertools.count(1.0))  # it moves when somebody looks at it
        monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=self.clock))
        process = SimpleNamespace(poll=lambda: None, pid=0)
        monkeypatch.setattr(programs, "start", lambda command, home: process)
        monkeypatch.setattr(programs, "path_of", str)
        monkeypatch.setattr(programs, "stop", lambda process: None)
        monkeypatch.setattr(programs, "is_listening", lambda address: True)
        monkeypatch.setattr(programs, "is_alive", lambda pid, name: False)
        monkeypatch.setattr(programs, "run", self.run)
        monkeypatch.setattr(serve, "SECONDS_BETWEEN_CHECKS", 0.001)
        monkeypatch.setattr(serve, "SECONDS_BETWEEN_QUESTIONS", 0.0)

    def run(self, command: Sequence[str], home: Path) -> subprocess.CompletedProcess[str]:
        answer: dict[str, Any] = {"runs": [{"status": "finished:failed"}]}
        if command[1] == "run":
            self.begun.append(self.clock())
            answer = {"run-id": len(self.begun)}
            self.runs.pop(0)()
        return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")


def lives(site: Site, error: type[Exception]) -> Callable[[], None]:
    """The program of a run, to its end by an error."""
    config = {"served": True, "state": str(site.folder), "leave": True}

    def run() -> None:
        grid: Any = SimpleNamespace()
        with pytest.raises(error):
            flower.main(grid, SimpleNamespace(run_config=config, run_id=1))  # type: ignore[arg-type]

    return run


def raises(error: Exception) -> Callable[..., None]:
    def serve(*given: Any) -> None:
        raise error

    return serve


def test_a_server_whose_run_gives_up_says_why_and_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that is damaged is not read again and again."""
    sentence = "the journal is damaged at byte 7; bring it back from a backup."
    (site.folder / "server").mkdir()
    monkeypatch.setattr(flower, "serve", raises(RunError(sentence)))
    engines = Engines(site, monkeypatch, lives(site, RunError))
    with pytest.raises(RunError) as caught:
        Service(site, True, lambda event: None).run(threading.Event())
    assert str(caught.value) == sentence
    assert site.run_note.read_text() == str(os.getpid())
    assert [event["why"] for event in events(site) if event["event"] == "gave up"] == [sentence]
    assert len(engines.begun) == 1


def test_a_run_that_dies_for_another_reason_is_started_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and where it has got nothing done in between after a time that grows; each time it is said why."""
    (site.folder / "server").mkdir()
    monkeypatch.setattr(flower, "serve", raises(ZeroDivisionError("a defect of ours")))
    monkeypatch.setattr(flower, "SECONDS_FOR_THE_LAST_ONE", 0.0)
    monkeypatch.setattr(serve, "MOST_SECONDS_BETWEEN_RUNS", 20.0)

    def waits() -> None:
        with claimed(site.folder / "server", 1.0):  # by a run that an earlier server left behind
            lives(site, UserError)()

    fails = lives(site, ZeroDivisionError)
    accepts, leaves = (partial(site.log, {"event": kind}) for kind in ("accepted", "left"))
    engines = Engines(site, monkeypatch, fails, waits, fails, fails, fails, accepts, leaves)
    Service(site, True, lambda event: None).run(threading.Event())
    pauses = [event["again_in"] for event in events(site) if event["event"] == "run died"]
    assert pauses == [0.0, 5.0, 15.0, 20.0, 20.0, 0.0]
    gaps = [after - before for before, after in itertools.pairwise(engines.begun)]
    assert all(gap > pause for gap, pause in zip(gaps, pauses, strict=True))
    reasons = [event["why"] for event in events(site) if event["event"] == "failed"]
    assert [reasons[0], *reasons[2:]] == 4 * ["ZeroDivisionError: a defect of ours"]
    assert "is being run by another process" in reasons[1]


def test_a_run_that_was_left_behind_is_ended_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed alone leaves one, which holds the folder. A run of another federation stays."""
    Engines(site, monkeypatch)
    home = site.folder / "engine"
    command = [sys.executable, "-c", "input()", RUN]
    processes = []
    for place in (home, site.folder.parent / "another"):
        given = {**os.environ, "FLWR_HOME": str(place)}
        processes.append(subprocess.Popen(command, env=given, stdin=subprocess.PIPE))
    stop = threading.Event()
    stop.set()
    try:
        for process in reversed(processes):
            home.mkdir(exist_ok=True)
            site.run_note.write_text(str(process.pid))
            Service(site, False, lambda event: None).run(stop)
        assert processes[0].wait(120) < 0
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.communicate()


def test_what_happened_is_passed_on_past_half_a_line_and_a_cut(site: Site) -> None:
    said: list[Any] = []
    service = Service(site, False, said.append)
    site.log({"event": "one"})
    with site.events.open("ab") as file:
        file.write(b'{"event": "hal\n\0\0\n7\n{}\n')
    site.log({"event": "two"})
    service._show()
    site.events.write_bytes(b"")
    service._show()
    site.log({"event": "three"})
    service._show()
    assert [event["event"] for event in said] == ["one", "two", "three"]


def test_where_a_run_stands_is_read_once_a_second_whoever_asks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now))
    service = Service(site, False, lambda event: None)
    site.status.write_text('{"rou')  # the power went, and nobody waits for the disk
    assert service._health()["round"] is None
    site.status.write_text('{"round": 3}')
    assert service._health()["round"] is None
    now = 2.0
    assert service._health() == {"is_up": False, "round": 3, "has_ended": False}


def test_what_is_written_at_every_event_does_not_wait_for_the_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    (site.folder / "server").mkdir()

    class Talkative(flower.Server):
        def run(self, *given: Any) -> None:
            monkeypatch.setattr(files.os, "fsync", waited.append)
            for number in range(3):
                self.log({"event": "refused", "number": number})

    monkeypatch.setattr(flower, "Server", Talkative)
    grid: Any = SimpleNamespace(get_nodes=list)
    flower.serve(grid, site, flower.Flower, is_lingering=False)
    assert not waited
    assert site.known()["round"] == 0


def events(site: Site) -> list[Any]:
    return [json.loads(line) for line in site.events.read_text().splitlines()]


@pytest.mark.parametrize("model", ["mlp-4", "mlp-200000"])
def test_a_party_can_send_its_update_and_not_much_more(model: str) -> None:
    plan = to_plan(read_spec(SPEC.replace("mlp-4", model), Path("spec.toml")))
    update = num_bytes(plan.initial_models()[model])
    assert 2 * update + SMALL_MESSAGE < max_body(plan) <= 4 * update + (4 << 20)
