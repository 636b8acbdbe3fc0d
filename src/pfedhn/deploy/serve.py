"""`pfedhn serve`: a server that stays up. It keeps Flower and the run alive, whatever dies."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from pfedhn.deploy import programs
from pfedhn.deploy.certificates import AUTHORITY, SERVER, SERVER_KEY, make_certificates
from pfedhn.deploy.gate import Gate, make_app
from pfedhn.deploy.signing import public_text
from pfedhn.deploy.site import GAVE_UP, RUN, Site
from pfedhn.engine.plan import Plan
from pfedhn.errors import RunError
from pfedhn.system.files import make_folder, read_text, write_atomically

CONNECTION = "pfedhn"
REGISTERED = "registered.json"
AT_HAND = ("registered", "online", "offline")  # what Flower says of a node whose key it knows
IN_USE = "already in use"  # in what Flower says of a key that it knows
SMALL_BODY = 4 << 20  # bytes
SECONDS_BETWEEN_CHECKS = 1.0  # whether everything is at work
SECONDS_TO_START = 120.0
SECONDS_BETWEEN_QUESTIONS = 10.0  # to Flower, about the run; each starts a program
SECONDS_BETWEEN_RUNS = 5.0  # where one has died twice; twice as many each time
MOST_SECONDS_BETWEEN_RUNS = 300.0
SECONDS_TO_REGISTER = 30.0  # that a party waits until Flower knows its key, before it is told to come
SECONDS_TO_LEAVE = 20.0  # that a run may take to write what it knows


def max_body(plan: Plan) -> int:
    """Bytes that a party may send at once: far above its update, which Flower sends whole, and its own messages."""
    largest = max(
        sum(shape.numel() for shape in model.shapes.values()) + plan.extras[name].num_values[1]
        for name, model in plan.models.items()
    )
    return 4 * largest * plan.dtype.itemsize + SMALL_BODY


class Service:
    """A federation's server: the door, Flower behind it, and the run.

    If `is_leaving`, it ends when training has and every party that is there knows; else it stays for others. `say` is
    called with every event.
    """

    def __init__(self, site: Site, is_leaving: bool, say: Callable[[Mapping[str, Any]], None]) -> None:
        self.site, self.is_leaving, self.say = site, is_leaving, say
        self.home = site.folder / "engine"  # Flower's; the folder and the events keep the names of earlier versions
        make_folder(self.home, mode=0o700)
        # Found anew each time: only the door knows it, and parties know only the door.
        self.flower_address = f"127.0.0.1:{programs.free_port()}"
        self.superlink: subprocess.Popen[bytes] | None = None
        self.run_number: str | None = None
        self.registered: dict[str, str] = {}  # the keys that Flower knows; its names of them, if it has told them
        self._turn = 0
        self._status, self._looked = dict[str, Any](), -1e9  # where the run stands, and when that was read
        self._place = self.site.events.stat().st_size if self.site.events.exists() else 0
        self._asked = 0.0
        self._run_pid: int | None = None  # of the run's process
        self._is_at_work = False  # the run, by its own word
        self._has_left = False  # the run has said that it is over
        self._trouble = ""  # a sentence of the run that gave up
        self._num_deaths = 0  # of runs, since one has got anything done
        self._begin_at = 0.0  # when the next run may begin

    def run(self, stop: threading.Event) -> None:
        """Serve until it is asked to stop, or until the run has ended if it leaves then."""
        own = self.site.address.rpartition(":")[0].strip("[]")
        make_certificates(self.site.folder, list(dict.fromkeys([own, "localhost", "127.0.0.1"])))
        # Flower has its own authority: a certificate that a person brings does not name this address.
        make_certificates(self.home, ["127.0.0.1", "localhost"])
        _ = self.site.plan, self.site.key  # what is wrong with SPEC is said before anything starts
        app = make_app(
            self.site.invitations, self.flower_address, self.home / AUTHORITY, read_text(self.site.folder / AUTHORITY),
            self._enrolled, self._health, self.site.log, max_body(self.site.plan),
        )  # fmt: skip
        gate = Gate(app, self.site.folder, self.site.settings["host"], self.site.settings["port"])
        gate.start()
        self.site.log({"event": "serving", "address": self.site.address, "run": self.site.run})
        # The run of a server that was killed alone holds the folder, and would look for its Flower for ever.
        programs.end_orphan(self.site.run_note, str(self.home))
        try:
            while not stop.is_set():
                self._keep_flower()
                self._keep_run()
                self._register()
                self._show()
                if self._trouble:
                    raise RunError(self._trouble)
                if self.is_leaving and self._has_left:
                    self._count_traffic()
                    break
                stop.wait(SECONDS_BETWEEN_CHECKS)
        finally:
            gate.stop()
            self._stop_run()
            programs.stop(self.superlink)
            self._show()

    def _keep_flower(self) -> None:
        if self.superlink is not None:
            if self.superlink.poll() is None:
                return
            self.site.log({"event": "engine died", "code": self.superlink.returncode})
            programs.stop(self.superlink)
            self._show()
            self._end_run()
        self.run_number = None
        port = self.flower_address.rpartition(":")[2]
        command = [
            programs.path_of("flower-superlink"), "--host", "127.0.0.1", "--port", port,
            "--ssl-ca-certfile", str(self.home / AUTHORITY), "--ssl-certfile", str(self.home / SERVER),
            "--ssl-keyfile", str(self.home / SERVER_KEY), "--enable-supernode-auth", "--isolation", "subprocess",
            "--database", str(self.home / "engine.db"), "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        connection = {"address": self.flower_address, "root-certificates": str(self.home / AUTHORITY)}
        table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        write_atomically(self.home / "config.toml", tomli_w.dumps(table).encode())
        self.superlink = programs.start(command, self.home)
        self.site.log({"event": "engine", "pid": self.superlink.pid})
        began = time.monotonic()
        while not programs.is_listening(self.flower_address):
            if self.superlink.poll() is not None or time.monotonic() - began > SECONDS_TO_START:
                raise RunError(f"Flower does not start; {self.home / 'flower-superlink.log'} says why.")
            time.sleep(SECONDS_BETWEEN_CHECKS)
        self._recall()

    def _ask(self, *words: str) -> tuple[dict[str, Any] | None, str]:
        """What Flower says to a command, None if it fails; and all that was printed."""
        try:
            done = programs.run([programs.path_of("flwr"), *words], self.home)
        except subprocess.TimeoutExpired:
            return None, ""
        answer: dict[str, Any] | None = None
        said = done.stdout + done.stderr
        with suppress(ValueError):
            answer = json.loads(done.stdout[max(0, done.stdout.find("{")) :])
        if done.returncode or answer is None or not answer.get("success", True):
            write_atomically(self.home / "failed-command.log", f"{words}\n{said}\n".encode())  # the last one
            return None, said
        return answer, said

    def _recall(self) -> None:
        """Find out whose keys a Flower that was started again still has: one question, and not one for each party."""
        file, known = self.home / REGISTERED, dict[str, str]()
        with suppress(RunError, ValueError):
            known = json.loads(read_text(file))
        answer = self._ask("supernode", "list", CONNECTION, "--format", "json")[0] if known else None
        found = {str(node["node-id"]) for node in (answer or {}).get("nodes", ()) if node["status"] in AT_HAND}
        self.registered = {line: node for line, node in known.items() if node in found}

    def _register(self) -> None:
        """Tell Flower the key of a party that has enrolled: one at a time, since each takes seconds."""
        waiting = [one for one in self.site.invitations.roster().lines.items() if one[1] not in self.registered]
        if not waiting:
            return
        self._turn += 1
        name, line = waiting[self._turn % len(waiting)]  # in turns: one that fails is not in the way of others
        file = self.home / f"{name}.pub"
        write_atomically(file, line.encode())
        words = "supernode", "register", str(file), CONNECTION, "--name", name, "--format", "json"
        answer, said = self._ask(*words)
        if answer is not None or IN_USE in " ".join(said.split()):  # else it is tried again
            self.registered[line] = str((answer or {}).get("node-id", ""))
            write_atomically(self.home / REGISTERED, json.dumps(self.registered).encode())

    def _keep_run(self) -> None:
        """Start the run, and start it again if it has died: it goes on from its checkpoint and journal.

        One that dies again before it has got anything done waits longer each time.
        """
        if self.run_number is not None:
            trouble = self._trouble_of_run()
            self._show()
            if not trouble or self._has_left or self._trouble:
                return
            pause = min(MOST_SECONDS_BETWEEN_RUNS, SECONDS_BETWEEN_RUNS * (2**self._num_deaths - 1))
            self.site.log({"event": "run died", "status": trouble, "again_in": pause})
            self._num_deaths, self._begin_at, self.run_number = self._num_deaths + 1, time.monotonic() + pause, None
        if time.monotonic() < self._begin_at:
            return
        self._asked, self._run_pid = time.monotonic(), None
        copied = self.home / "app"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(Path(__file__).parent / "app", copied, ignore=shutil.ignore_patterns("__pycache__"))
        folder, leave = (json.dumps(value) for value in (str(self.site.folder.resolve()), self.is_leaving))
        settings = f"served=true state={folder} leave={leave}"
        answer, _ = self._ask("run", str(copied), CONNECTION, "-c", settings, "--format", "json")
        self.run_number = None if answer is None else str(answer["run-id"])

    def _trouble_of_run(self) -> str:
        """Why the run is not at work; empty if it is. Flower is asked only where its process is not known."""
        is_alive = None if self._run_pid is None else programs.is_alive(self._run_pid, RUN)
        if is_alive is not None:
            return "" if is_alive else "its process is gone"
        now = time.monotonic()
        if now - self._asked < SECONDS_BETWEEN_QUESTIONS:
            return ""
        self._asked = now
        status = str(self._known_of_run().get("status", ""))
        return status if status.startswith("finished") else ""

    def _known_of_run(self) -> dict[str, Any]:
        """Flower's entry for the run; empty if it does not answer."""
        answer, _ = self._ask("list", CONNECTION, "--run-id", str(self.run_number), "--format", "json")
        entry: dict[str, Any] = ((answer or {}).get("runs") or [{}])[0]
        return entry

    def _end_run(self) -> None:
        """End the process of a run whose Flower is gone: what it has decided is on the disk, and another follows."""
        if self._run_pid is not None and programs.is_alive(self._run_pid, RUN):
            with suppress(ProcessLookupError):
                os.kill(self._run_pid, signal.SIGKILL)
        self._run_pid, self._is_at_work = None, False

    def _count_traffic(self) -> None:
        """Log the bytes that Flower has carried for this run, beside those that the run itself has counted."""
        traffic, status = self._known_of_run().get("network-traffic") or {}, self.site.known()
        ours = {name: status.get(name) for name in ("wire_down", "wire_up")}
        carried = {"engine_down": traffic.get("outbound-bytes"), "engine_up": traffic.get("inbound-bytes")}
        self.site.log({"event": "traffic", **ours, **carried})

    def _stop_run(self) -> None:
        """Ask the run to write what it knows and to leave."""
        self._show()
        if self._run_pid is None:
            return
        if self._is_at_work:
            with suppress(ProcessLookupError):
                os.kill(self._run_pid, signal.SIGTERM)
        end = time.monotonic() + SECONDS_TO_LEAVE
        while self._is_at_work and time.monotonic() < end:
            time.sleep(0.1)
            self._show()
        self._end_run()

    def _show(self) -> None:
        """Pass on what has happened."""
        if not self.site.events.exists():
            return
        if self.site.events.stat().st_size < self._place:
            self._place = 0  # somebody has cut the file off, as programs do that keep logs short
        with self.site.events.open("rb") as file:
            file.seek(self._place)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, TypeError, KeyError):  # half a line: the disk was full, or the power went
                continue
            self._has_left = self._has_left or kind == "left"
            if kind == "running":
                self._run_pid, self._is_at_work = event["pid"], True
            elif kind in ("left", "stopped", "failed", "run died"):
                self._is_at_work = False
            elif kind in ("accepted", "round", "evaluated"):
                self._num_deaths = 0
            elif kind == GAVE_UP:
                self._trouble, self._is_at_work = str(event["why"]), False
            self.say(event)

    def _enrolled(self, name: str, key: str) -> dict[str, Any]:
        """What a party is told that may come; when Flower knows its key, or it would be sent away once more."""
        self.site.log({"event": "enrolled", "party": name})
        end = time.monotonic() + SECONDS_TO_REGISTER
        while key not in self.registered and time.monotonic() < end:
            time.sleep(0.1)
        return {"run": self.site.run, "spec": self.site.spec_text, "server": public_text(self.site.key.public_key())}

    def _health(self) -> dict[str, Any]:
        is_up = self.superlink is not None and self.superlink.poll() is None
        now = time.monotonic()
        if now - self._looked > SECONDS_BETWEEN_CHECKS:  # anybody may ask, as often as it likes
            self._status, self._looked = self.site.known(), now
        status = self._status
        return {"is_up": is_up, "round": status.get("round"), "has_ended": status.get("has_ended", False)}
