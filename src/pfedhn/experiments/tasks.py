"""Runs on the machines of a Ray cluster: each is a task there, which is heard and stopped from here.

Ray places a task where there are cores or a share of a GPU, and says when a machine is lost. The rest is as on one
machine: a run's folder, which all machines see, holds its checkpoints, and a run that was lost goes on from there.
"""

import platform
import socket
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from pfedhn.errors import RunError, UserError, first_line
from pfedhn.experiments.build import build_simulation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.execute import start
from pfedhn.experiments.preflight import Preflight
from pfedhn.experiments.queue import Queue, Stopped, failure, run_all
from pfedhn.experiments.spec import RunSpec
from pfedhn.runs.cluster import Software, connection, submit, why_it_failed
from pfedhn.runs.execute import computing_on
from pfedhn.runs.progress import Event, RunFailed, RunFinished, Said, Update
from pfedhn.system.files import read_bytes
from pfedhn.system.process import stop_on_signal

GPU_SHARE = 0.25  # of a GPU for each run: processes on one GPU take slices of its time, so that more gain little
MAX_LOSSES = 3  # of a run that did not move on in between: it may be what ends its workers
SECONDS_BETWEEN_LOOKS = 2.0  # for the head of the cluster
MAX_MISSES = 5  # in a row; then it is gone
SECONDS_TO_CHECK = 120  # that a machine may take to load PyTorch and look for the data


@contextmanager
def connected(on: str | None) -> "Iterator[Cluster | None]":
    """Inside the block this process is connected to the cluster that `--on` names; None stands for this machine alone.

    Args:
        on: "ray" for a cluster of this machine alone, which ends with the block; "ray:ADDRESS" for one that is there.
    """
    with connection(on):
        yield None if on is None else Cluster(on)


@dataclass
class _Task:
    """A run that was given to the cluster."""

    run: RunSpec
    events: Any  # what it says, as it comes
    step: int = -1  # how far it came


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to."""

    on: str  # as `--on` named it

    @property
    def has_gpu(self) -> bool:
        import ray

        return bool(ray.cluster_resources().get("GPU"))

    def check(self, ready: Preflight) -> None:
        """Refuse machines that could not run these runs: other versions, another folder, no data; and too small ones.

        One run of each kind of data is tried. All machines must see the experiment's directory.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        needed = _needs(ready.options)
        asked = {"CPU": needed["num_cpus"], "GPU": needed.get("num_gpus", 0)}
        if not any(all(node["Resources"].get(name, 0) >= number for name, number in asked.items()) for node in nodes):
            wanted = f"{asked['CPU']} cores" + (f" and {asked['GPU']:g} of a GPU" if asked["GPU"] else "")
            raise UserError(f"no machine of the Ray cluster has {wanted}, which a run needs; give fewer --threads.")
        kinds = list({(run.cell.dataset, str(run.cell.partition)): run for run in ready.waiting}.values())
        given = (ready, read_bytes(ready.directory / "experiment.toml"), kinds, Software.here())
        answers = {}
        for node in nodes:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answers[node["NodeManagerHostname"], node["NodeID"]] = submit(
                _look_around, given, num_cpus=0, scheduling_strategy=place
            )
        for (host, _), answer in answers.items():
            try:
                trouble = ray.get(next(answer), timeout=SECONDS_TO_CHECK)
            except ray.exceptions.GetTimeoutError:
                trouble = f"it did not answer within {SECONDS_TO_CHECK} s"
            except (ray.exceptions.RayError, StopIteration) as error:
                trouble = why_it_failed(error)
            if trouble is not None:
                raise UserError(f"the Ray worker {host} cannot be used: {trouble.rstrip('.')}.")

    def run(self, queue: Queue) -> None:
        """Give runs to the cluster, as many at a time as it has room for or `--jobs` allows."""
        import ray

        run_all(_Tasks(queue, _Watch(self.on, ray.get_runtime_context().gcs_address)))


class _Tasks:
    """Runs that were given to the cluster."""

    def __init__(self, queue: Queue, watch: "_Watch") -> None:
        self.queue, self.watch = queue, watch
        self.tasks: dict[str, _Task] = {}
        self.losses: Counter[str] = Counter()

    def hand_out(self) -> None:
        ready = self.queue.ready
        while (ready.jobs is None or len(self.tasks) < ready.jobs) and (run := self.queue.take()) is not None:
            self.tasks[run.name] = _Task(run, submit(_work, (ready, run, Software.here()), **_needs(ready.options)))

    def stop(self) -> None:
        import ray

        for task in self.tasks.values():
            ray.cancel(task.events)  # comes to it as Ctrl-C does

    def hear(self) -> bool:
        import ray

        if not self.tasks:
            return False
        self.watch.look()
        waiting = {task.events: task for task in self.tasks.values()}
        for events in ray.wait(list(waiting), num_returns=len(waiting), timeout=0.1)[0]:
            if not self._is_going_on(waiting[events]):
                del self.tasks[waiting[events].run.name]
        return True

    def _is_going_on(self, task: _Task) -> bool:
        """Take in the next word of a task; False once it has ended."""
        import ray

        name, queue = task.run.name, self.queue
        try:
            said = ray.get(next(task.events))
        except (StopIteration, ray.exceptions.TaskCancelledError):
            return False
        except ray.exceptions.RayTaskError as error:
            return queue.hear(RunFailed(name, f"its Ray worker cannot be used: {why_it_failed(error)}.", True))
        except ray.exceptions.RayError as error:
            self.losses[name] += 1
            if self.losses[name] >= MAX_LOSSES:
                sentence = f"its worker was lost {MAX_LOSSES} times before it moved on, perhaps for want of memory"
                return queue.hear(RunFailed(name, f"{sentence} ({first_line(error)})."))
            queue.hear(Said(name, "its worker was lost; it continues elsewhere from its last checkpoint."))
            queue.waiting.insert(0, task.run)
            return False
        if isinstance(said, Update):
            if 0 <= task.step < said.step:
                self.losses[name] = 0
            task.step = said.step
        return queue.hear(said)

    def kill(self) -> None:
        import ray

        for task in self.tasks.values():
            with suppress(Exception):  # whatever became of the cluster, this must not hide it
                ray.cancel(task.events, force=True)


@dataclass
class _Watch:
    """Notices that the cluster's head is gone. Ray waits a minute for another and then ends the process by itself."""

    on: str
    address: str
    looked: float = 0.0
    misses: int = 0

    def look(self) -> None:
        if time.monotonic() - self.looked < SECONDS_BETWEEN_LOOKS:
            return
        self.looked = time.monotonic()
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_BETWEEN_LOOKS).close()
            self.misses = 0
        except OSError as error:
            self.misses += 1
            if self.misses == MAX_MISSES:
                raise RunError(
                    f"the head of the Ray cluster {self.on} does not answer any more ({first_line(error)}); start a "
                    "cluster and --resume with it: every run goes on from its last checkpoint."
                ) from None


def _needs(options: Options) -> dict[str, Any]:
    """What of a machine a run takes."""
    needs: dict[str, Any] = {"num_cpus": options.threads or 1}
    return needs if options.device == "cpu" else needs | {"num_gpus": GPU_SHARE}


def _look_around(ready: Preflight, content: bytes, runs: Sequence[RunSpec], software: Software) -> Iterator[str | None]:
    """On a machine of the cluster: why it cannot run these runs; None if it can."""
    if (trouble := software.trouble_here()) is not None:
        yield trouble
        return
    file = ready.directory / "experiment.toml"
    if not file.exists() or read_bytes(file) != content:
        yield f"it does not see {file} as the machine that asks does; give an --out that all machines share"
        return
    try:
        for run in runs:
            build_simulation(run, replace(ready.options, device="cpu"))
    except Exception as error:  # also of a person's own code, which makes the data
        yield str(error) if isinstance(error, UserError) else first_line(error)
        return
    yield None


def _work(ready: Preflight, run: RunSpec, software: Software) -> Iterator[Any]:
    """On a machine of the cluster: a run, what it says on the way, and how it ended."""
    if (trouble := software.trouble_here()) is not None:  # it may have joined the cluster after the others were asked
        yield RunFailed(run.name, f"the Ray worker {platform.node()} cannot be used: {trouble}.", True)
        return
    heard: list[Event] = []
    options = ready.options
    with (
        computing_on(options.device, options.precision, options.deterministic, round(1 / GPU_SHARE)),
        stop_on_signal() as stop,  # Ray's cancel comes as Ctrl-C
    ):
        ending: Event | Stopped | None = None
        try:
            going = start(ready, run, heard.append, stop)
            while ending is None:
                try:
                    next(going)
                except StopIteration as end:
                    ending = RunFinished(run.name, end.value.result)
                yield from _taken(heard)
        except KeyboardInterrupt:
            ending = Stopped(run.name)
        except Exception as error:
            ending = failure(error, ready.directory / run.name)
        yield from _taken(heard)
        yield ending


def _taken(heard: list[Event]) -> Generator[Event, None, None]:
    """All that was heard, once; a generator, since Ray talks to what is yielded from."""
    while heard:
        yield heard.pop(0)
