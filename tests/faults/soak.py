"""`make soak`: a real federation whose processes are killed at random and started again, for a set time.

At the end every update that was said to be accepted must be in the server's count, the server's memories and what the
parties keep must be those of the simulator, and none of the server's processes (`pfedhn serve`, Flower, the run)
may have grown by more than 100 MB of memory in one life of it.
"""

import argparse
import json
import random
import signal
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
    """Megabytes of the server's processes, by process: each restart begins anew."""

    def __init__(self, world: Federation) -> None:
        self.world, self.lives = world, dict[tuple[str, int], list[float]]()

    def look(self) -> float:
        """Note what each has now: when its life has begun, and before anything is killed. What they have together."""
        engine, run = (self.world.last(event)["pid"] for event in ("engine", "running"))
        found = {("serve", self.world.server.pid): 0.0, ("engine", engine): 0.0, ("run", run): 0.0}
        for life in found:
            if value := resident(life[1]):
                self.lives.setdefault(life, []).append(value)
                found[life] = value
        return sum(found.values())

    def has_grown(self) -> bool:
        return any(values[-1] - values[0] > 100 for values in self.lives.values())

    def __str__(self) -> str:
        return "; ".join(
            f"{kind} {values[0]:.0f} to {values[-1]:.0f} MB ({len(values)} looks)"
            for (kind, _), values in self.lives.items()
        )


def soak(minutes: float, seed: int) -> int:
    draws = random.Random(seed)
    network.ROUNDS = 1_000_000  # it ends by the clock
    kills = {"party": 0, "run": 0, "engine": 0}
    with tempfile.TemporaryDirectory() as folder:
        world = Federation(Path(folder))
        try:
            world.begin()
            world.rounds(2)
            memory = Memory(world)
            memory.look()
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                kind = draws.choices(["party", "run", "engine"], [6, 1, 1])[0]
                kills[kind] += 1
                memory.look()
                print(f"{kind} killed", flush=True)
                if kind == "party":
                    name = draws.choice(list(world.parties))
                    world.started.remove(world.parties[name])
                    world.parties[name].kill()
                    world.parties[name].wait()
                    time.sleep(draws.uniform(0, 10))
                    world.parties[name] = world.join(name)
                    world.rounds(2)
                else:
                    (network.kill_run if kind == "run" else network.kill_engine)(world)
                    world.rounds(1)
                print(f"  {world.count('accepted')} updates accepted, {memory.look():.0f} MB", flush=True)
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
    print(f"{sum(kills.values())} kills: {kills}; {counted}; {difference:.0e} from the simulator")
    print(f"memory of the server's processes: {memory}")
    is_right = status["accepted"] >= len(said) and difference < network.MAX_DIFFERENCE
    return 0 if is_right and not memory.has_grown() else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(soak(given.minutes, given.seed))
