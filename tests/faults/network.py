"""Faults of a real federation, processes and TLS and all: one run in which everything is killed, one after the other.

Whatever happens, the run must come to its end with `nothing lost`: every update that was said to be accepted is in the
server's count, and every party can take its model home.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.test_flower import PARTIES, SPEC, World, write_data
from faults.table import Row, row_of

from pfedhn.deploy import engine
from pfedhn.deploy.serve import CONNECTION
from pfedhn.deploy.signing import load_or_make_key, public_text

SECONDS = 300.0  # that a fault may cost at most
ROUNDS = 40


class Federation(World):
    """A federation whose server and parties can be killed and started again."""

    def begin(self) -> None:
        write_data(self.folder / "data")
        text = SPEC.replace("steps = 6", f"steps = {3 * ROUNDS}").replace("evaluate_every = 6", "evaluate_every = 60")
        (self.folder / "spec.toml").write_text(text.replace("reply_seconds = 100.0", "reply_seconds = 60.0"))
        self.serve()
        self.wait_for("serving")
        for name in PARTIES:
            self.run("invite", name, "--state", "state")
        self.parties = {name: self.join(name) for name in PARTIES}

    def serve(self) -> None:
        port = str(self.port)
        self.server = self.start(
            "serve.log", "serve", "spec.toml", "--state", "state", "--host", "127.0.0.1", "--port", port,
            "--address", f"127.0.0.1:{port}", "--leave",
        )  # fmt: skip

    def join(self, name: str) -> Any:
        return self.start(f"{name}.log", "join", f"{name}.invite", "--data", f"data/{name}")

    def count(self, event: str) -> int:
        return sum(said["event"] == event for said in self.events())

    def last(self, event: str) -> dict[str, Any]:
        return [said for said in self.events() if said["event"] == event][-1]

    def rounds(self, more: int) -> float:
        """Wait until the run has taken so many more steps; the seconds that took."""
        began, wanted = time.monotonic(), self.count("round") + more
        while self.count("round") < wanted:
            if time.monotonic() - began > SECONDS:
                raise TimeoutError(self.logs()[-2_000:])
            time.sleep(0.3)
        return time.monotonic() - began


def kill_party(world: Federation) -> str:
    """Its process, and with it the socket that the engine's node speaks to."""
    world.started.remove(world.parties["lyon"])
    world.parties["lyon"].kill()
    world.parties["lyon"].wait()
    world.rounds(2)
    world.parties["lyon"] = world.join("lyon")
    accepted = len([one for one in world.events() if one["event"] == "accepted" and one["party"] == "lyon"])
    began = time.monotonic()
    while len([one for one in world.events() if one["event"] == "accepted" and one["party"] == "lyon"]) == accepted:
        if time.monotonic() - began > SECONDS:
            raise TimeoutError(world.logs()[-2_000:])
        time.sleep(0.3)
    return f"the others went on; it took part again after {time.monotonic() - began:.0f} s"


def kill_run(world: Federation) -> str:
    os.kill(world.last("running")["pid"], signal.SIGKILL)
    return f"went on after {world.rounds(1):.0f} s"


def kill_engine(world: Federation) -> str:
    os.kill(world.last("engine")["pid"], signal.SIGKILL)
    return f"went on after {world.rounds(1):.0f} s"


def kill_everything_of_the_server(world: Federation) -> str:
    for pid in (world.server.pid, world.last("engine")["pid"], world.last("running")["pid"]):
        os.kill(pid, signal.SIGKILL)
    world.server.wait()
    world.started.remove(world.server)
    world.serve()
    return f"went on after {world.rounds(1):.0f} s"


def register_a_stranger(world: Federation) -> str:
    """On the server's own machine, where the engine can be reached, a key of its own becomes a node."""
    home, own = world.folder / "state" / "engine", world.folder / "stranger"
    (own / "engine").mkdir(parents=True)
    key = load_or_make_key(own / "key")
    (own / "key.pub").write_text(public_text(key.public_key()))
    done = engine.run([engine.program("flwr"), "supernode", "register", str(own / "key.pub"), CONNECTION], home)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    address = (home / "config.toml").read_text().split('address = "')[1].split('"')[0]
    node = engine.start(
        [
            engine.program("flower-supernode"), "--superlink", address, "--root-certificates",
            str(world.folder / "state" / "ca.crt"), "--auth-supernode-private-key", str(own / "key"),
            "--port", str(engine.free_port()), "--node-config", 'socket="/nowhere"',
        ],
        own / "engine",
    )  # fmt: skip
    try:
        began = time.monotonic()
        while not any(one["event"] == "stranger" and "node" in one for one in world.events()):
            if time.monotonic() - began > SECONDS:
                raise TimeoutError("nobody noticed")
            time.sleep(0.3)
        world.rounds(1)
        if "message" in (own / "engine" / "flower-supernode.log").read_text().lower():
            raise RuntimeError("something was sent to it")
    finally:
        engine.stop(node)
    return "it was seen, and sent nothing"


FAULTS: dict[str, Callable[[Federation], str]] = {
    "party killed -9 and started again": kill_party,
    "run killed -9": kill_run,
    "engine killed -9": kill_engine,
    "server killed -9, with its engine and run": kill_everything_of_the_server,
    "a stranger becomes a node of the engine": register_a_stranger,
}


def try_network() -> list[Row]:
    """Every fault once, in one run; then the run ends, and what it says is counted."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        world = Federation(Path(folder))
        try:
            world.begin()
            world.rounds(1)
            for kind, fault in FAULTS.items():
                print(f"{kind} ...", flush=True)
                try:
                    said = fault(world)
                    outcome = "nothing lost"
                except Exception as error:
                    outcome, said = "broken", repr(error)
                print(f"  {said}", flush=True)
                rows.append(row_of(f"federation: {kind}", [(outcome, said)]))
            rows.append(row_of("federation: the end", [ending(world)]))
        finally:
            for process in world.started:
                process.terminate()
            for process in world.started:
                process.wait(60)
    return rows


def ending(world: Federation) -> tuple[str, str]:
    world.wait_for("left", 4 * SECONDS)
    status = json.loads(world.run("status", "--state", "state", "--json"))
    accepted = {(one["party"], one["round"]) for one in world.events() if one["event"] == "accepted"}
    if status["accepted"] != len(accepted) or status["round"] != ROUNDS:
        return "lost", f"{len(accepted)} updates were accepted, and {status['accepted']} are counted"
    for name in PARTIES:
        world.parties[name].wait(120)
        world.run("export", f"pfedhn-{name}", "--to", f"{name}.safetensors")
    return "nothing lost", f"{len(accepted)} updates in {status['round']} rounds"
