"""How many messages a federation's server exchanges with its parties, through the door and with everything on.

Parties are in processes of their own, connect over TLS, and answer at once with a signed update that they did not
train: what is measured is the server, its door, its checks and its journal. The network has 131,072 weights, 0.5 MB.

    python benchmarks/door.py --in-flight 1 4 16
    python benchmarks/door.py --in-flight 50 --seconds 600    fifty parties, held for ten minutes
"""

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.deploy.certificates import AUTHORITY, make_certificates
from pfedhn.deploy.door import Door, OpenDoor
from pfedhn.deploy.invitations import Bundle, Invitations
from pfedhn.deploy.line import Line, Trouble
from pfedhn.deploy.mailroom import Mailroom
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.server import Server
from pfedhn.deploy.signing import new_key, opened, public_key, public_text, sealed
from pfedhn.deploy.wire import Message
from pfedhn.engine.plan import Plan
from pfedhn.models import factory
from pfedhn.runs.assemble import assemble
from pfedhn.system.environment import commit, processor_name

FEATURES, HIDDEN, CLASSES = 64, 1_747, 10  # 131,035 weights: 0.5 MB
EXAMPLES = {"validation": 20, "test": 20}


def plan_of(num_parties: int, steps: int) -> Plan:
    generator = torch.Generator().manual_seed(0)
    data = {
        f"party-{number:03d}": (torch.randn(60, FEATURES, generator=generator), torch.arange(60) % CLASSES)
        for number in range(num_parties)
    }
    federation = Federation.from_clients(data, class_names=tuple(map(str, range(CLASSES))))
    network = {"mlp": factory(f"mlp-{HIDDEN}", CLASSES, (FEATURES,))}
    return assemble(
        ALGORITHMS["fedavg"](local_steps=1), federation, network, steps=steps, cohort_size=1, batch_size=16,
        evaluate_every=10**9, device="cpu",
    )  # fmt: skip


def answer(message: Message) -> Message:
    """What an honest party would say, without its work."""
    values = message.values
    if message.kind == "hello":
        brought = {"architecture": "mlp", "size": 60, "examples": EXAMPLES}
        return Message("hello", message.run, message.party, {"challenge": values["challenge"], **brought})
    splits = ("validation", "test") if message.kind == "evaluate" else ("validation",)
    scores = {split: [1.0, 10.0, EXAMPLES[split]] for split in splits}
    if message.kind == "evaluate":
        kept = {part: values[part] for part in ("round", "base", "phase", "is_adapted", "is_last")}
        return Message("evaluate", message.run, message.party, {**kept, "scores": scores})
    kept = {part: values[part] for part in ("round", "version", "base", "phase")}
    update = pytree.tree_map(lambda leaf: 1e-6 * torch.ones_like(leaf), message.tensors)
    return Message("train", message.run, message.party, {**kept, "size": 60, "scores": scores}, update)


def be_parties(address: str, authority: str, keys: Mapping[str, bytes], server: str, stop: Any) -> None:
    """Some parties, a thread each, in a process of their own."""
    from cryptography.hazmat.primitives import serialization

    torch.set_num_threads(1)

    def be(name: str, text: bytes) -> None:
        key: Any = serialization.load_pem_private_key(text, None)
        line, trusted = Line(Bundle(name, address, authority, ""), 1 << 30), public_key(server)
        while not stop.is_set():
            try:
                if (found := line.poll(name, key)) is not None:
                    line.reply(name, key, found[0], sealed(answer(opened(found[1], trusted)), key))
            except Trouble:
                time.sleep(0.1)
        line.close()

    threads = [threading.Thread(target=be, args=one, daemon=True) for one in keys.items()]
    for thread in threads:
        thread.start()
    stop.wait()


class Timed(Mailroom):
    """Notes how long each message to train took, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: dict[str, float] = {}
        self.times: list[tuple[float, float]] = []  # when an answer came, and after how long

    def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
        if kind == "train":
            self.posted[party] = time.perf_counter()
        super().post(party, kind, content, limit)

    def arrivals(self, seconds: float) -> Any:
        found = super().arrivals(seconds)
        now = time.perf_counter()
        self.times += [(now, now - self.posted[one.party]) for one in found if one.kind == "train" and one.content]
        return found


def measure(in_flight: int, num_processes: int, steps: int, seconds: float) -> dict[str, Any]:
    from cryptography.hazmat.primitives import serialization

    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    keys = {f"party-{number:03d}": new_key() for number in range(in_flight)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_certificates(folder, ["127.0.0.1"])
        authority, invitations = (folder / AUTHORITY).read_text(), Invitations(folder / "parties")
        for name, key in keys.items():
            invitations.invite(name, "", authority, public_text(key.public_key()))
        mailroom, server_key, plan = Timed(), new_key(), plan_of(in_flight, steps if not seconds else 10**9)
        door = Door(mailroom, invitations, authority, lambda name: {}, lambda: {}, print)
        opened_door = OpenDoor(door, folder, "127.0.0.1", 0)
        address = f"127.0.0.1:{opened_door.listener.getsockname()[1]}"
        opened_door.start()
        policy = Policy(in_flight=in_flight, reply_seconds=60.0)
        refused: list[Any] = []

        def log(event: Mapping[str, Any]) -> None:
            if event["event"] in ("refused", "set aside", "gone"):
                refused.append(event)

        server = Server(plan, "run", folder / "server", server_key, invitations.enrolled, mailroom, policy, log)
        context, stop = multiprocessing.get_context("spawn"), threading.Event()
        ended = context.Event()
        texts = {name: key.private_bytes(*form) for name, key in keys.items()}
        parties = []
        for number in range(num_processes):
            mine = dict(list(texts.items())[number::num_processes])
            public = public_text(server_key.public_key())
            parties.append(context.Process(target=be_parties, args=(address, authority, mine, public, ended)))
            parties[-1].start()
        if seconds:
            threading.Timer(seconds, stop.set).start()
        server.run(stop)
        ended.set()
        for process in parties:
            process.join()
        opened_door.stop()
        times = mailroom.times[in_flight:]  # the first of each waited for the parties to start
        span = times[-1][0] - times[0][0]
        return {
            "in_flight": in_flight,
            "messages": len(times),
            "median_ms": 1e3 * statistics.median(took for _, took in times),
            "p95_ms": 1e3 * statistics.quantiles([took for _, took in times], n=20)[-1],
            "messages_per_second": (len(times) - 1) / span,
            "seconds": span,
            "refused": len(refused),
            "server_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--processes", type=int, default=1, help="that the parties share")
    parser.add_argument("--steps", type=int, default=400, help="answers that the server takes")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long, instead of a number of answers")
    parser.add_argument("--out", type=Path, help="a file to which a line is added for each measurement")
    given = parser.parse_args()
    torch.set_num_threads(1)
    about = {"device": f"cpu: {processor_name()}", "python": platform.python_version(), "commit": commit()}
    for number in given.in_flight:
        found = measure(number, given.processes, given.steps, given.seconds) | about
        print(json.dumps(found), flush=True)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
