"""A Ray cluster of two workers in this machine."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pfedhn.system.files import LOCK

MANY = 10  # processes of one run; a run that survives as many would go on for ever


@contextmanager
def cluster_of(**second: Any) -> Iterator[Any]:
    """A cluster of two nodes with a core each, the second of which is started in another environment."""
    pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster as Nodes

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=node)
    try:
        nodes.add_node(**node, **second)
        yield nodes
    finally:
        nodes.shutdown()


@contextmanager
def killing(folder: Path, since: str, hold: Path) -> Iterator[None]:
    """Inside the block, whatever process has a run is killed once the run's folder has a file of this kind.

    The process that has a run is the one that has the file of its lock open.

    Args:
        folder: Of the run.
        since: The name of the file.
        hold: Nothing is killed any more once this file is gone; after many processes it is taken away.
    """
    is_over = threading.Event()

    def kill() -> None:
        killed: set[int] = set()
        while not is_over.wait(0.02):
            is_time = hold.exists() and any(folder.glob(since))
            for process in processes_with(folder / LOCK) if is_time else ():
                if hold.exists():
                    killed.add(process)
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(process, signal.SIGKILL)
            if len(killed) >= MANY:
                hold.unlink(missing_ok=True)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        is_over.set()
        killer.join()


def processes_with(file: Path) -> list[int]:
    """The processes that have a file open."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            opened = Path("/proc", process, "fd")
            if str(file) in [os.path.realpath(opened / number) for number in os.listdir(opened)]:
                found.append(int(process))
    return found
