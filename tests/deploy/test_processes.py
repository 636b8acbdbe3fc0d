"""A real server and real parties, each a process of its own, with TLS and keys, are the simulator."""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
import torch
from safetensors.torch import load_file
from support import free_port

import pfedhn
from pfedhn import models
from pfedhn.algorithms.find import build_algorithm
from pfedhn.data.files import read_federation
from pfedhn.deploy.certificates import make_certificates
from pfedhn.deploy.signing import new_key, proof, public_text, session_proof
from pfedhn.deploy.site import Site
from pfedhn.deploy.spec import read_spec, to_plan

PARTIES = ("lyon", "nice", "paris")
SPEC = """
method = "pfedhn-pc"
model = "mlp-8"
clients = 3
steps = 6
cohort_size = 3
evaluate_every = 6
batch_size = 16
seeds = [0]
upload = "half"

[settings]
local_steps = 5

[data]
classes = 4
shape = [5]

[policy]
reply_seconds = 600.0
"""

WITNESS = '''
"""Notes every address that this process speaks to, or asks for, outside of its own machine."""
import os, socket

def note(address):
    host = address[0] if isinstance(address, tuple) else ""
    if host not in ("", "127.0.0.1", "localhost", "::1"):
        with open(os.environ["PFEDHN_WITNESS"], "a") as file:
            file.write(f"{host}\\n")

connect, look_up = socket.socket.connect, socket.getaddrinfo

def watched_connect(self, address):
    note(address)
    return connect(self, address)

def watched_look_up(host, *arguments, **named):
    note((host.decode() if isinstance(host, bytes) else host or "",))
    return look_up(host, *arguments, **named)

socket.socket.connect, socket.getaddrinfo = watched_connect, watched_look_up
'''


def write_data(folder: Path) -> None:
    """Clients that see different classes of a simple kind."""
    generator = numpy.random.default_rng(0)
    for number, name in enumerate(PARTIES):
        y = (generator.integers(0, 2, 60 + 10 * number) + number) % 4
        x = generator.normal(size=(len(y), 5)) + numpy.eye(5)[y] * 2
        (folder / name).mkdir(parents=True)
        numpy.save(folder / name / "x.npy", x.astype(numpy.float32))
        numpy.save(folder / name / "y.npy", y)


class World:
    """A folder in which commands run, and what they started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()
        witness = folder / "witness"
        witness.mkdir()
        (witness / "sitecustomize.py").write_text(WITNESS)
        paths = [str(witness), str(Path(pfedhn.__file__).parents[1])]
        self.environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
            "PFEDHN_WITNESS": str(folder / "seen.txt"),
            "HOME": str(witness / "sitecustomize.py" / "home"),  # as in a container, where nothing can be written there
        }  # fmt: skip
        self.port = free_port()

    def start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command; a party's owner has read the study and agrees."""
        if words[0] == "join":
            words = (*words, "--accept", Site(self.folder / "state").study.digest)
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pfedhn", *words],
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pfedhn", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def events(self) -> list[dict[str, Any]]:
        file = self.folder / "state" / "events.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half there

    def wait_for(self, event: str, seconds: float = 900.0) -> None:
        end = time.monotonic() + seconds
        while not any(said["event"] == event for said in self.events()):
            dead = [process for process in self.started if process.poll()]
            assert not dead, self.logs()
            assert time.monotonic() < end, self.logs()
            time.sleep(0.3)

    def logs(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in self.folder.glob("*.log"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.terminate()
    for process in made.started:
        process.wait(600)


@pytest.mark.slow
def test_three_parties_and_a_server_over_tls_are_the_simulator(world: World) -> None:
    write_data(world.folder / "data")
    (world.folder / "spec.toml").write_text(SPEC)
    address = f"127.0.0.1:{world.port}"
    server = world.start(
        "serve.log", "serve", "spec.toml", "--state", "state", "--host", "127.0.0.1", "--port", str(world.port),
        "--address", address, "--leave",
    )  # fmt: skip
    world.wait_for("serving")
    for name in PARTIES:
        world.run("invite", name, "--state", "state")
    for knock in STRANGERS.values():
        knock(world)
    joined = [world.start(f"{name}.log", "join", f"{name}.invite", "--data", f"data/{name}") for name in PARTIES]
    world.wait_for("left")
    for process in (server, *joined):
        assert process.wait(600) == 0, world.logs()
    expected = simulated(world.folder / "data")
    chosen = expected.chosen
    status = json.loads(world.run("status", "--state", "state", "--json"))
    assert status["has_ended"]
    assert status["round"] == 2
    assert status["chosen"] == chosen.round
    assert (status["bytes_down"], status["bytes_up"]) == (expected.state.bytes_down, expected.state.bytes_up)
    assert status["accepted"] == 6
    assert {event["path"] for event in world.events() if event["event"] == "stranger"} >= {"/enroll", "/poll"}
    assert_same_bytes(status, expected.state.bytes_down, expected.state.bytes_up)
    for number, name in enumerate(PARTIES):
        world.run("export", f"pfedhn-{name}", "--to", f"{name}.safetensors")
        weights = load_file(world.folder / f"{name}.safetensors")
        for part, value in expected.personal_model(number).state_dict().items():
            # In float32, and summed in another order; half-precision updates are rounded by the same draws.
            torch.testing.assert_close(weights[part], value, rtol=1e-3, atol=1e-5)
        assert (world.folder / f"pfedhn-{name}").stat().st_mode & 0o077 == 0
        assert "0 messages never arrived, and 0 answers were not taken" in world.run("audit", "state", f"pfedhn-{name}")
    assert (world.folder / "state").stat().st_mode & 0o077 == 0
    # Nothing spoke to anybody else, neither telemetry nor a check for updates.
    assert not (world.folder / "seen.txt").exists(), (world.folder / "seen.txt").read_text()


def assert_same_bytes(status: dict[str, Any], bytes_down: int, bytes_up: int) -> None:
    """What the door has carried are the weights, those of the evaluations too, and a little around each message."""
    num_weights = len(PARTIES) * 2  # in two rounds
    num_messages = len(PARTIES) * (1 + 2 + 2 + 1)  # a greeting, two rounds, an evaluation at both ends, the choice
    tested = bytes_down // num_weights * len(PARTIES) * 3  # in full precision, as what is sent to train is
    assert 300 < (status["wire_down"] - bytes_down - tested) / num_messages < 1_500, status
    assert 300 < (status["wire_up"] - bytes_up) / num_messages < 1_500, status


def simulated(data: Path, text: str = SPEC) -> Any:
    spec = read_spec(text, Path("spec.toml"))
    cell = spec.cell
    federation = read_federation(data, split=cell.split, seed=spec.seed)
    return pfedhn.train(
        build_algorithm(cell.method, cell.settings), federation,
        {cell.model: models.factory(cell.model, 4, (5,))}, steps=cell.steps,
        cohort_size=cell.cohort_size, batch_size=cell.batch_size, evaluate_every=cell.evaluate_every, seed=spec.seed,
        upload=cell.upload, device="cpu", progress=False,
    )  # fmt: skip


def code(world: World, path: str, data: bytes = b"", **headers: str) -> int:
    """What the door answers to somebody who has the authority's certificate."""
    context = ssl.create_default_context(cafile=str(world.folder / "state" / "ca.crt"))
    request = urllib.request.Request(f"https://127.0.0.1:{world.port}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def guessed_token(world: World) -> None:
    key = new_key()
    table = {"name": "lyon", "token": "guessed", "key": public_text(key.public_key())}
    table["proof"] = proof(key, "lyon", (world.folder / "state" / "ca.crt").read_text()).hex()
    assert code(world, "/enroll", json.dumps(table).encode()) == 403
    assert code(world, "/enroll", b"no JSON") == 401


def unknown_key(world: World) -> None:
    """A party's public key, and its name, are no secrets."""
    with httpx.Client(verify=ssl.create_default_context(cafile=str(world.folder / "state" / "ca.crt"))) as client:
        place = f"https://127.0.0.1:{world.port}"
        nonce = client.post(f"{place}/challenge").json()["nonce"]
        authority = (world.folder / "state" / "ca.crt").read_text()
        signature = session_proof(new_key(), "lyon", nonce, authority).hex()
        table = {"name": "lyon", "nonce": nonce, "signature": signature}
        assert client.post(f"{place}/session", json=table).status_code == 403
        assert client.post(f"{place}/poll").status_code == 401
        assert client.post(f"{place}/reply/{'0' * 32}", content=b"x").status_code == 401


def anything_else(world: World) -> None:
    for path in ("/v1/control/start-run", "/docs", "/openapi.json", "/../key", "/"):
        assert code(world, path) == 404


def plain_http(world: World) -> None:
    with socket.create_connection(("127.0.0.1", world.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP/1.1 200")


def wrong_authority(world: World) -> None:
    other = world.folder / "other"
    other.mkdir()
    make_certificates(other, ["127.0.0.1"])
    bundle = json.loads((world.folder / "lyon.invite").read_text())
    bundle["authority"] = (other / "ca.crt").read_text()
    (other / "wrong.invite").write_text(json.dumps(bundle))
    process = subprocess.run(
        [sys.executable, "-m", "pfedhn", "join", "other/wrong.invite", "--data", "data/lyon", "--folder", "other/own"],
        cwd=world.folder, env=world.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 1
    assert "is not the server of this invitation" in process.stderr


STRANGERS: dict[str, Callable[[World], None]] = {
    "token that was guessed": guessed_token,
    "unknown key": unknown_key,
    "path that does not exist": anything_else,
    "plain HTTP to the TLS port": plain_http,
    "certificate of another authority": wrong_authority,
}
"""Who knocks at the door of a real server, and is turned away."""


@pytest.mark.slow
def test_the_plan_of_a_file_is_that_of_the_simulation(tmp_path: Path) -> None:
    write_data(tmp_path)
    plan = to_plan(read_spec(SPEC, Path("spec.toml")))
    run = simulated(tmp_path)
    assert plan.algorithm == run.simulation.algorithm
    assert plan.schedule == run.simulation.schedule
    assert list(plan.models) == list(run.simulation.models)
