"""`make soak`: a real federation whose processes are killed at random and started again, for a set time or number.

At the end every update that was said to be accepted must be in the server's count, the server's memories and what the
parties keep must be those of the simulator, and no process may have grown by more than 100 MB in one life of it.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from faults import network
from faults.network import Federation


def resident(pid: int) -> float:
    """Megabytes that a process has in memory."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
    return 0.0


class Memory:
    """Megabytes of the processes of server and parties: each restart begins anew."""

    def __init__(self, world: Federation) -> None:
        self.world, self.lives = world, dict[tuple[str, int], list[float]]()

    def look(self) -> None:
        """Note what each has now."""
        found = {"server": self.world.server, **self.world.parties}
        for kind, process in found.items():
            if value := resident(process.pid):
                self.lives.setdefault((kind, process.pid), []).append(value)

    def has_grown(self) -> bool:
        return any(values[-1] - values[0] > 100 for values in self.lives.values() if len(values) > 1)

    def __str__(self) -> str:
        ends = [(kind == "server", max(values)) for (kind, _), values in self.lives.items()]
        server, party = (max(value for is_server, value in ends if is_server == which) for which in (True, False))
        return f"server at most {server:.0f} MB, a party at most {party:.0f} MB"


def soak(minutes: float, most: int, seed: int) -> int:
    draws = random.Random(seed)
    network.ROUNDS = 1_000_000  # it ends by the clock, or by the number of kills
    kills = {"party": 0, "server": 0}
    seconds: dict[str, list[float]] = {kind: [] for kind in kills}
    with tempfile.TemporaryDirectory() as folder:
        world = Federation(Path(folder))
        try:
            world.begin()
            world.rounds(2)
            memory = Memory(world)
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end and sum(kills.values()) < most:
                kind = draws.choices(["party", "server"], [2, 1])[0]
                kills[kind] += 1
                memory.look()
                began = time.monotonic()
                if kind == "party":
                    name = draws.choice(list(world.parties))
                    network.kill(world, world.parties[name])
                    world.parties[name] = world.join(name)
                    network.takes_part_again(world, name)
                else:
                    network.kill_server(world)
                seconds[kind].append(time.monotonic() - began)
                print(f"{kind} killed; {seconds[kind][-1]:.1f} s; {world.count('accepted')} updates", flush=True)
                memory.look()
                time.sleep(draws.uniform(0.0, 2.0))
            world.server.send_signal(signal.SIGTERM)
            world.server.wait(120)
            status = json.loads(world.run("status", "--state", "state", "--json"))
            difference = network.largest_difference(world)
            said = {(one["party"], one["round"]) for one in world.events() if one["event"] == "accepted"}
        finally:
            for process in world.started:
                process.terminate()
            for process in world.started:
                process.wait(120)
    counted = f"{len(said)} updates in {status['round']} rounds, {status['accepted']} counted"
    medians = {kind: f"{statistics.median(times):.1f} s" for kind, times in seconds.items() if times}
    print(f"{sum(kills.values())} kills: {kills}; {counted}; {difference:.0e} from the simulator")
    print(f"median time until the next update: {medians}; memory: {memory}")
    is_right = status["accepted"] >= len(said) and difference < network.MAX_DIFFERENCE
    return 0 if is_right and not memory.has_grown() else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=1_000_000, help="the most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(soak(given.minutes, given.kills, given.seed))
