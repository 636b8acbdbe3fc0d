"""Flower's own programs, started so that nothing leaves this machine but what a federation needs."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pfedhn.errors import RunError, missing_extra
from pfedhn.system.files import write_atomically

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
}
"""What Flower's programs find in their environment: they tell nobody anything, and install nothing."""
HERE = ("127.0.0.1", "localhost")
SECONDS_TO_STOP = 10.0


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs; they find each other beside this Python, and by no proxy."""
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    names = ("NO_PROXY", "no_proxy")  # both are in use
    direct = {name: ",".join(filter(None, [os.environ.get(name, ""), *HERE])) for name in names}
    return {**os.environ, **QUIET, **direct, "FLWR_HOME": str(home), "PATH": os.pathsep.join(filter(None, paths))}


def path_of(name: str) -> str:
    """The path of one of Flower's programs."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise missing_extra("a federation", "federation")
    return str(path)


def start(command: Sequence[str], home: Path) -> "subprocess.Popen[bytes]":
    """Start a program that lasts; what it says goes into a file beside it.

    It is a group of its own, so that Ctrl-C reaches it through us alone. One that a process before us started in the
    same place, and could not end because it was killed, is ended first: two of them would be in each other's way.
    """
    name = Path(command[0]).name
    note = home / f"{name}.pid"
    end_orphan(note, str(home.parent))
    with (home / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own words, and no shell
            command, env=environment(home), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    write_atomically(note, str(process.pid).encode())
    return process


def end_orphan(note: Path, place: str) -> None:
    """End the process that a file names, if it still is what it was: a program that was given this place.

    The place stands among its words or, where Flower has started it, in its environment.

    It is asked first: a node that says goodbye may come again at once, and one that is killed after a minute.
    """
    try:
        pid = int(note.read_text())
        words, given = (Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("cmdline", "environ"))
    except (OSError, ValueError):  # it has ended; or a system without /proc, where a person has to look
        return
    if note.stem in words and (place in words or f"FLWR_HOME={place}\0" in given):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
            end = time.monotonic() + SECONDS_TO_STOP
            while is_alive(pid, note.stem) and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int, name: str) -> bool | None:
    """Whether a process is there, is at work and was started by this name; None where the system does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and name in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (OSError, IndexError):
        return False if Path("/proc/self/stat").exists() else None


def run(command: Sequence[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(  # noqa: S603 - our own words, and no shell
        command,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120.0,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def stop(process: "subprocess.Popen[bytes] | None") -> None:
    """End a program and what it started in its group."""
    if process is None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_STOP)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port for a program that will listen on it in some seconds.

    The system lends those above 32,767 to connections that go out: such a one may be taken until then.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HERE[0], port))
            return port
    raise RunError("no local port between 20,000 and 32,767 is free for Flower; end what listens there.")


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True
