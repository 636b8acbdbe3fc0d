"""How many updates a federation's server takes in, against parties that work at the same time.

Parties wait a set time instead of training, each message another time around the mean, so that the server's own
concurrency is measured and not this machine: signatures, checks, journal, checkpoints and steps are all real.

    python benchmarks/federation.py --seconds 2 --in-flight 1 4 16
"""

import argparse
import queue
import random
import resource
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.deploy.party import Party
from pfedhn.deploy.server import Arrival, Policy, Server
from pfedhn.deploy.signing import new_key
from pfedhn.deploy.state import Rules
from pfedhn.models import factory
from pfedhn.runs.assemble import assemble


class Waiting:
    """Parties in threads, each of which takes its time."""

    def __init__(self, parties: dict[str, Party], seconds: float) -> None:
        self.parties, self.seconds = parties, seconds
        self.pool = ThreadPoolExecutor(len(parties))
        self.ready: queue.Queue[Arrival] = queue.Queue()
        self.lock = threading.Lock()
        self.draws = random.Random(0)

    def members(self) -> set[str]:
        return set(self.parties)

    def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
        self.pool.submit(self.answer, party, kind, content)

    def answer(self, party: str, kind: str, content: bytes) -> None:
        with self.lock:  # one computes at a time, as if each had a machine of its own and this one were not in the way
            answer = self.parties[party].answer(content)
            wait = self.seconds * self.draws.uniform(0.5, 1.5) if kind == "train" else 0.0
        time.sleep(wait)
        self.ready.put(Arrival(party, kind, answer))

    def arrivals(self, seconds: float) -> list[Arrival]:
        try:
            found = [self.ready.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self.ready.empty():
            found.append(self.ready.get())
        return found


def measure(num_parties: int, is_waiting: bool, seconds: float, steps: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    data = {}
    for number in range(num_parties):
        y = torch.randint(0, 10, (60,), generator=generator)
        data[f"party-{number:02d}"] = torch.randn(60, 64, generator=generator), y
    federation = Federation.from_clients(data, class_names=tuple(map(str, range(10))))
    network = {"mlp-32": factory("mlp-32", 10, (64,))}
    algorithm = ALGORITHMS["pfedhn-pc"](local_steps=1)
    cohort = num_parties if is_waiting else 1
    run = assemble(
        algorithm, federation, network, steps=steps, cohort_size=cohort, batch_size=16, evaluate_every=10**9,
        device="cpu",
    )  # fmt: skip
    plan, server_key = run, new_key()
    keys = {name: new_key() for name in data}
    policy = Policy(in_flight=None if is_waiting else num_parties, checkpoint_seconds=10.0)
    with tempfile.TemporaryDirectory() as folder:
        parties = {
            name: Party(
                plan, "run", name, Federation.from_clients({name: data[name]}, class_names=federation.class_names),
                Path(folder) / name, keys[name], server_key.public_key(),
            )
            for name in data
        }  # fmt: skip
        times: list[float] = []

        def log(event: object) -> None:
            if isinstance(event, dict) and event["event"] == "accepted":
                times.append(time.monotonic())

        roster = {name: key.public_key() for name, key in keys.items()}
        transport = Waiting(parties, seconds)
        server = Server(plan, "run", Path(folder) / "server", server_key, lambda: roster, transport, policy, log)
        server.run()
        transport.pool.shutdown()
        span = times[-1] - times[0]
        return {"updates/s": (len(times) - 1) / span, "staleness": float(server.state.max_staleness)}


def resident() -> float:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * float(resource.getpagesize())


def bytes_per_party(num_parties: int) -> float:
    """What a server's memory grows by when it gets to know a party."""
    x, y = torch.randn(200, 64), torch.arange(200) % 10
    federation = Federation.from_clients({"one": (x, y), "two": (x, y)}, class_names=tuple(map(str, range(10))))
    algorithm = ALGORITHMS["pfedhn-pc"](embedding_dim=64)  # the widest that the number of clients would choose
    rules = Rules(assemble(algorithm, federation, {"mlp-32": factory("mlp-32", 10, (64,))}, device="cpu"))
    state = rules.initial()
    before = resident()
    for number in range(num_parties):
        brought = {"architecture": "mlp-32", "size": 100, "examples": {"validation": 20, "test": 20}}
        rules.apply(state, {"kind": "join", "party": f"party-{number:06d}", **brought})
    return (resident() - before) / num_parties


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a party takes, on average")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--parties", type=int, default=5_000, help="that a server knows, for its memory")
    given = parser.parse_args()
    print(f"A server's memory grows by {bytes_per_party(given.parties) / 1e3:.1f} kB for each party that it knows.\n")
    print("| parties at work | mode | updates a second | of the most possible | largest staleness |")
    print("|---:|---|---:|---:|---:|")
    for number in given.in_flight:
        for is_waiting in (True, False):
            found = measure(number, is_waiting, given.seconds, steps=12 * number)
            part = found["updates/s"] / (number / given.seconds)
            mode = "cohorts" if is_waiting else "without waiting"
            print(
                f"| {number} | {mode} | {found['updates/s']:.2f} | {part:.0%} | {found['staleness']:.0f} |", flush=True
            )
    print(
        f"\nPeak memory of server and parties together: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB"
    )


if __name__ == "__main__":
    main()
