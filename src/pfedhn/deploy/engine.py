"""The engine's own programs, started so that nothing leaves this machine but what a federation needs."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from pfedhn.errors import missing_extra

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
}
"""What the engine's programs find in their environment: they tell nobody anything, and install nothing."""
SECONDS_TO_STOP = 10.0


def environment(home: Path) -> dict[str, str]:
    """The environment of the engine's programs; they find each other beside this Python."""
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": os.pathsep.join(filter(None, paths))}


def program(name: str) -> str:
    """The path of one of the engine's programs."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise missing_extra("a federation", "federation")
    return str(path)


def start(command: Sequence[str], home: Path, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a program that lasts; it is a group of its own, so that Ctrl-C reaches it through us alone."""
    return subprocess.Popen(  # noqa: S603 - our own words, and no shell
        command, env=environment(home), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
    )


def run(command: Sequence[str], home: Path, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(  # noqa: S603 - our own words, and no shell
        command,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=seconds,
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


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
