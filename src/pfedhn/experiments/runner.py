"""The runs of an experiment side by side: in processes on a CPU, taking turns on a GPU, or on a cluster."""

import gc
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from pfedhn.experiments.directory import num_jobs
from pfedhn.experiments.execute import start
from pfedhn.experiments.preflight import Preflight
from pfedhn.experiments.queue import Listener, Outcome, Queue, failure
from pfedhn.experiments.tasks import Cluster
from pfedhn.experiments.workers import run_side_by_side
from pfedhn.runs.execute import computing_on
from pfedhn.runs.progress import RunFinished
from pfedhn.runs.run import Run
from pfedhn.system.process import stop_on_signal

MAX_RUNS_ON_DEVICE = 24  # a GPU is busy long before; more only wait longer for their first result


def run_ready(
    ready: Preflight,
    listen: Listener = lambda event: None,
    cluster: Cluster | None = None,
    until: float | None = None,
) -> Outcome:
    """Run side by side: on a CPU each run in its own process, on a GPU in turns in this one, or on a cluster.

    A run that fails does not stop the others. Ctrl-C lets every run write a checkpoint, then raises KeyboardInterrupt.

    Args:
        ready: The runs, each of which gets a folder of its name in the experiment's directory.
        listen: Told of everything that happens.
        cluster: The machines that run them; this machine if None.
        until: When to stop starting runs, by the monotonic clock.
    """
    if cluster is not None:  # whose machines have other working directories
        ready = replace(ready, directory=ready.directory.resolve())
    queue, options, jobs = Queue(ready, listen, until), ready.options, ready.jobs
    if cluster is not None:
        cluster.check(ready)
        cluster.run(queue)
        return queue.outcome
    if options.device == "cpu":
        jobs = num_jobs(len(queue.waiting), jobs)
        if jobs > 1:
            run_side_by_side(queue, jobs)
            return queue.outcome
    devices = gpus_of(options.device)
    limit = jobs or MAX_RUNS_ON_DEVICE * len(devices)
    num_runs = -(-min(len(queue.waiting), limit) // len(devices))
    going: dict[str, Generator[bool, None, Run]] = {}
    waiting: set[str] = set()
    device_of: dict[str, str] = {}
    with computing_on(options.device, options.precision, options.deterministic, num_runs), stop_on_signal() as stop:
        while queue.waiting or going:
            # One at a time: its first round shows how much room a run takes.
            device = min(devices, key=[device_of[name] for name in going].count)  # where the fewest runs are
            is_seen = not waiting and (device not in map(device_of.get, going) or _has_memory(device))
            has_room = len(going) < limit and (jobs or is_seen)
            run = queue.take() if has_room and not stop.is_set() else None
            turns = list(going) if run is None else [run.name]
            if not turns:
                break
            for name in turns:
                try:
                    if run is not None:
                        device_of[name] = device
                    with _using(device_of[name]):
                        if run is not None:
                            going[name] = start(ready, run, listen, stop, device)
                        is_waiting = next(going[name])  # a round, queued on the run's stream
                    (waiting.add if is_waiting else waiting.discard)(name)
                    continue
                except StopIteration as end:
                    queue.hear(RunFinished(name, end.value.result))
                except KeyboardInterrupt:  # it wrote its checkpoint; the others have yet to write theirs
                    _wait_for(device_of[name])
                    if not stop.is_set():
                        raise
                except Exception as error:
                    _wait_for(device_of[name])
                    queue.hear(failure(error, ready.directory / name))
                going.pop(name, None)
                waiting.discard(name)
                _give_memory_back(options.device)
        if stop.is_set():
            raise KeyboardInterrupt
    return queue.outcome


def gpus_of(device: str) -> list[str]:
    """The devices that runs are spread over: every GPU of this machine, unless one is named."""
    if device != "cuda" or torch.cuda.device_count() < 2:
        return [device]
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def _using(device: str) -> AbstractContextManager[Any]:
    """Make this GPU the default inside the block."""
    return torch.cuda.device(device) if device.startswith("cuda:") else nullcontext()


def _wait_for(device: str) -> None:
    """Wait for the rounds that a failed run has queued on a GPU: they may use memory that is freed with its error."""
    if device.startswith("cuda"):
        with suppress(RuntimeError):  # of the two errors, the run's own says more
            torch.cuda.synchronize(device)


def _give_memory_back(device: str) -> None:
    """Free the memory of finished runs: PyTorch keeps it for their streams, and the next run would find none."""
    if device == "cpu":
        return
    gc.collect()  # a run and its captured round refer to each other
    torch.cuda.empty_cache()


def _has_memory(device: str) -> bool:
    """Whether one more run fits on the device."""
    if not device.startswith("cuda"):
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free > total / 8
