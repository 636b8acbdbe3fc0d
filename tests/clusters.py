"""A Ray cluster of two workers in this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


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


def workers_of(nodes: Any, name: str = "run_set_up") -> list[int]:
    """The processes of a cluster that are at work, by what they run."""
    raylets = {started.process.pid for node in nodes.list_all_nodes() for started in node.all_processes["raylet"]}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, parent = (
                (folder / "cmdline").read_text(),
                (folder / "stat").read_text().rpartition(")")[2].split()[1],
            )
        except OSError:  # it has just ended
            continue
        if int(parent) in raylets and words.startswith(f"ray::{name}"):
            found.append(int(folder.name))
    return found
