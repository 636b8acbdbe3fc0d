"""Faults of a real federation, processes and TLS and all: one run in which everything is killed, one after the other.

Whatever happens, the run must come to its end with `nothing lost`: every update that was said to be accepted is in the
server's count, every party can take its model home, and the server's memories and what every party keeps are those of
the simulator when just the parties take part whose updates were accepted.
"""

import json
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.parties import with_cohorts
from deploy.test_processes import PARTIES, SPEC, STRANGERS, World, write_data
from faults.table import Row, row_of
from torch.utils import _pytree as pytree

from pfedhn import models
from pfedhn.algorithms.find import build_algorithm
from pfedhn.data.files import read_federation
from pfedhn.deploy.join import load_party
from pfedhn.deploy.site import Site
from pfedhn.deploy.state import Rules
from pfedhn.deploy.store import Store
from pfedhn.params import take
from pfedhn.runs.assemble import assemble

SECONDS = 300.0  # that a fault may cost at most
ROUNDS = 3_000  # more than all faults together take
MAX_DIFFERENCE = 1e-2  # float32, over many rounds


class Federation(World):
    """A federation whose server and parties can be killed and started again."""

    def begin(self) -> None:
        write_data(self.folder / "data")
        text = SPEC.replace("steps = 6", f"steps = {3 * ROUNDS}").replace("evaluate_every = 6", "evaluate_every = 60")
        text = text.replace('upload = "half"\n', "")  # rounding is drawn, so that a difference of one bit would grow
        (self.folder / "spec.toml").write_text(
            text.replace("reply_seconds = 600.0", "reply_seconds = 45.0\naside_seconds = 5.0")
        )
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


def takes_part_again(world: Federation, name: str) -> float:
    """Wait until another update of a party is accepted; the seconds that took."""

    def count() -> int:
        return sum(one["event"] == "accepted" and one["party"] == name for one in world.events())

    began, before = time.monotonic(), count()
    while count() == before:
        if time.monotonic() - began > SECONDS:
            raise TimeoutError(world.logs()[-2_000:])
        time.sleep(0.3)
    return time.monotonic() - began


def kill(world: Federation, process: Any) -> None:
    world.started.remove(process)
    process.kill()
    process.wait()


def kill_party(world: Federation) -> str:
    """In the middle of a round; the others go on without it."""
    world.rounds(1)
    kill(world, world.parties["lyon"])
    world.rounds(2)
    world.parties["lyon"] = world.join("lyon")
    return f"the others went on; it took part again after {takes_part_again(world, 'lyon'):.0f} s"


def stop_party(world: Federation) -> str:
    """It is there and answers nothing until the round is over."""
    before = world.count("refused")
    world.parties["nice"].send_signal(signal.SIGSTOP)
    try:
        world.rounds(2)
    finally:
        world.parties["nice"].send_signal(signal.SIGCONT)
    seconds = takes_part_again(world, "nice")
    return (
        f"the others went on, {world.count('refused') - before} times refused; it took part again after {seconds:.0f} s"
    )


def copy_party(world: Federation) -> str:
    """A second process with the folder, and so the key, of a party: who of them answers does not matter."""
    shutil.copytree(world.folder / "pfedhn-paris", world.folder / "copy")
    copy = world.start("copy.log", "join", "paris.invite", "--data", "data/paris", "--folder", "copy")
    try:
        world.rounds(3)
    finally:
        world.started.remove(copy)
        copy.terminate()
        copy.wait(60)
    return f"the party went on; it took part again after {takes_part_again(world, 'paris'):.0f} s"


def kill_server(world: Federation) -> str:
    kill(world, world.server)
    world.serve()
    return f"went on after {world.rounds(1):.0f} s"


def kill_all(world: Federation) -> str:
    for process in (world.server, *world.parties.values()):
        kill(world, process)
    world.serve()
    world.parties = {name: world.join(name) for name in PARTIES}
    return f"went on after {world.rounds(1):.0f} s"


def flood(world: Federation) -> str:
    """More connections than the system allows a process, of which none says a word."""
    idle = []
    try:
        for _ in range(2_000):
            with suppress(OSError):
                idle.append(socket.create_connection(("127.0.0.1", world.port), timeout=5.0))
        seconds = world.rounds(2)
    finally:
        for one in idle:
            one.close()
    return f"{len(idle)} connections; it went on after {seconds:.0f} s"


def dribble(world: Federation) -> str:
    """Requests that come a byte at a time, and replies that are announced and do not come."""
    context = ssl.create_default_context(cafile=str(world.folder / "state" / "ca.crt"))
    slow = []
    try:
        for path in ("/enroll", "/session", "/poll", f"/reply/{'0' * 32}") * 10:
            one = context.wrap_socket(
                socket.create_connection(("127.0.0.1", world.port), timeout=60.0), server_hostname="127.0.0.1"
            )
            one.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n{{".encode())
            slow.append(one)
        seconds = world.rounds(2)
    finally:
        for one in slow:
            one.close()
    return f"it went on after {seconds:.0f} s"


def turned_away(knock: Callable[[World], None]) -> Callable[[Federation], str]:
    def fault(world: Federation) -> str:
        knock(world)
        return "it was turned away"

    return fault


FAULTS: dict[str, Callable[[Federation], str]] = {
    **{kind: turned_away(knock) for kind, knock in STRANGERS.items()},
    "party killed -9 in a round and started again": kill_party,
    "party slower than the round": stop_party,
    "two processes with the key of one party": copy_party,
    "server killed -9 and started again": kill_server,
    "server and all parties killed -9 and started again": kill_all,
    "2,000 connections that say nothing": flood,
    "requests that never end": dribble,
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
            outcome, said = ending(world)
            print(f"the end: {said}", flush=True)
            rows.append(row_of("federation: the end", [(outcome, said)]))
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
    # A server that is killed after it has written an update did not say so: there may be more than was said.
    if status["accepted"] < len(accepted) or status["round"] != ROUNDS:
        return "lost", f"{len(accepted)} updates were accepted, and {status['accepted']} are counted"
    for name in PARTIES:
        world.parties[name].wait(120)
        world.run("export", f"pfedhn-{name}", "--to", f"{name}.safetensors")
    difference = largest_difference(world)
    outcome = "nothing lost" if difference < MAX_DIFFERENCE else "other weights"
    return outcome, f"{len(accepted)} updates in {status['round']} rounds; {difference:.0e} from the simulator"


def largest_difference(world: World) -> float:
    """Between all that server and parties remember and the simulator, in multiples of the largest number there."""
    site = Site(world.folder / "state")
    state, cell = Store(site.folder, Rules(site.plan)).load(), site.spec.cell
    steps: dict[int, list[str]] = {}
    for one in world.events():
        if one["event"] == "accepted":
            steps[one["round"]] = sorted({*steps.get(one["round"], ()), one["party"]})
    steps |= {one["round"] - 1: one["parties"] for one in world.events() if one["event"] == "round"}
    simulation = assemble(
        build_algorithm(cell.method, cell.settings),
        read_federation(world.folder / "data", split=cell.split, seed=site.spec.seed),
        {cell.model: models.factory(cell.model, 4, (5,))}, steps=cell.steps, cohort_size=cell.cohort_size,
        batch_size=cell.batch_size, evaluate_every=cell.steps, seed=site.spec.seed, device="cpu", executor="loop",
    )  # fmt: skip
    expected = with_cohorts(simulation, [steps[number] for number in range(state.round)]).memories
    pairs = [(state.shared, expected.shared)]
    table = expected.private[cell.model]
    for client, name in enumerate(PARTIES):
        pairs.append((state.rows[name], take(expected.rows, client)))
        member, party = state.members[name], load_party(world.folder / f"pfedhn-{name}")
        if member.base is not None and member.base < state.round:  # else it has answered in the round that is open
            received = site.plan.exchange.publish(party.local.model, state.shared, state.rows[name])
            pairs.append((party.kept("training", member.base, received), take(table.tree, table.slots[client])))
    worst = 0.0
    for mine, theirs in pairs:
        for one, other in zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True):
            if one.numel() and one.is_floating_point():
                worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1e-3)))
    return worst
