"""Where and with what a result was made, and the command that makes it again."""

import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch

from pfedhn.experiments.directory import Options
from pfedhn.experiments.grid import assignments_for
from pfedhn.experiments.spec import Cell, Experiment, cell_names, pretraining_cell


def environment(device: str) -> dict[str, Any]:
    """Where and with what a result was made."""
    import pfedhn

    on_gpu = device.startswith("cuda")
    return {
        "device": f"cuda: {torch.cuda.get_device_name(device)}" if on_gpu else f"cpu: {processor_name()}",
        "threads": torch.get_num_threads(),
        "precision": "tf32" if on_gpu and torch.get_float32_matmul_precision() != "highest" else "fp32",
        "deterministic": torch.are_deterministic_algorithms_enabled() if on_gpu else True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "pfedhn": pfedhn.__version__,
        "commit": commit(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@lru_cache
def processor_name() -> str:
    """The processor as its maker calls it, where the system says."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()


@lru_cache
def commit() -> str | None:
    """The commit of the source, if it is known; PFEDHN_COMMIT says it where there is no repository."""
    if known := os.environ.get("PFEDHN_COMMIT"):
        return known

    def ask(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        # A result of source that was changed since must not pass for the commit's own.
        return ask("rev-parse", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def rerun_command(experiment: Experiment, cell: Cell, seed: int, options: Options) -> str:
    """The command that repeats just this run."""
    words = [
        "pfedhn",
        "run",
        options.source or experiment.name,
        "--only",
        only_this(experiment, cell),
        "--seeds",
        str(seed),
    ]
    earlier = [] if cell.pretrain is None else [pretraining_cell(experiment, cell)]
    for text in assignments_for(options.assignments, [cell, *earlier]):  # others would be refused
        words += ["--set", text]
    if options.rates is not None:
        words += ["--rates", str(options.rates)]
    words += ["--device", options.device]
    if options.executor != "auto":
        words += ["--executor", options.executor]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    if options.precision != Options.precision:
        words += ["--precision", options.precision]
    if options.deterministic:
        words += ["--deterministic"]
    if options.data_dir is not None:
        words += ["--data-dir", str(options.data_dir)]
    return shlex.join(words)


def only_this(experiment: Experiment, cell: Cell) -> str:
    """What `--only` takes to leave one cell: the fewest of method, data set and clients, or else its name."""
    alike: Collection[Cell] = [other for other in experiment.cells if other.method == cell.method]
    chosen = [f"method={cell.method}"]
    for name in ("dataset", "clients"):
        if len({getattr(other, name) for other in alike}) > 1:
            chosen.append(f"{name}={getattr(cell, name)}")
    fitting = [other for other in alike if (other.dataset, other.clients) == (cell.dataset, cell.clients)]
    if len(fitting) == 1 and "," not in cell.dataset:
        return ",".join(chosen)
    place = next(number for number, other in enumerate(experiment.cells) if other == cell)
    return f"name={cell_names(experiment.cells)[place]}"
