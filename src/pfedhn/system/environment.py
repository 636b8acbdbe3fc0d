"""A run's environment: device, precision, versions, and the commit of the source."""

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy
import torch


@dataclass(frozen=True)
class Environment:
    device: str
    threads: int
    precision: str = "tf32"  # of products on a GPU
    deterministic: bool = False
    python: str = ""
    torch: str = ""
    numpy: str = ""
    cuda: str | None = None  # of a GPU's runs
    pfedhn: str = ""
    commit: str | None = None  # where it is known
    finished: str | None = None


def environment(device: str | torch.device) -> Environment:
    """The environment of this process, as it computes now."""
    on_gpu = torch.device(device).type == "cuda"
    return Environment(
        device=f"cuda: {torch.cuda.get_device_name(device)}" if on_gpu else f"cpu: {processor_name()}",
        threads=torch.get_num_threads(),
        precision="tf32" if on_gpu and torch.get_float32_matmul_precision() != "highest" else "fp32",
        deterministic=torch.are_deterministic_algorithms_enabled() if on_gpu else True,
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=numpy.__version__,
        cuda=torch.version.cuda if on_gpu else None,
        pfedhn=sys.modules["pfedhn"].__version__,  # not imported: it stands above this module
        commit=commit(),
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


@lru_cache
def processor_name() -> str:
    """The processor's model name, if the system knows it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()


@lru_cache
def commit() -> str | None:
    """The commit of the source, if it is known; PFEDHN_COMMIT gives it outside a repository."""
    if known := os.environ.get("PFEDHN_COMMIT"):
        return known

    def ask(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603 - our own words
        return done.stdout.strip()

    try:
        # An installed copy may lie in somebody's repository.
        ask("ls-files", "--error-unmatch", "--", Path(__file__).name)
        # A result of source that was changed since must not pass for the commit's own.
        return ask("rev-parse", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
