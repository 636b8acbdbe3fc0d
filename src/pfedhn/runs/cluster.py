"""A Ray cluster: how this process gets to it, what its machines must have, and workers there that share a round.

Nothing here imports PyTorch when it is loaded: a worker of Ray loads this module before it can be set up.
"""

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pfedhn.errors import RunError, UserError, first_line
from pfedhn.system.process import run_set_up, set_up_process

if TYPE_CHECKING:
    from pfedhn.engine.crew import CohortShard, Trained
    from pfedhn.engine.simulate import Simulation

OBJECT_STORE = 200 * 2**20  # bytes on this machine, of a cluster that it is alone: little passes through at a time


@contextmanager
def connection(on: str | None) -> Iterator[None]:
    """Inside the block this process is connected to a cluster; None stands for none.

    Args:
        on: "ray" for a cluster of this machine alone, which ends with the block; "ray:ADDRESS" for one that is there.
            Where a program has connected itself before, that cluster is used.
    """
    if on is None:
        yield
        return
    kind, _, address = on.partition(":")
    if kind != "ray" or (address == "") != (on == "ray"):
        raise UserError(f"there is no cluster {on!r}; give ray, or ray:ADDRESS, say ray:10.0.0.1:6379.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody unless a person wants it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the default from some version on; else a warning
    try:
        import ray
    except ImportError as error:
        raise UserError("running on a cluster needs Ray: pip install 'pfedhn[ray]'.") from error
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "pfedhn"}
    try:
        if address:
            ray.init(address, **quiet)
        else:
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"no Ray cluster answers at {address or 'this machine'} ({first_line(error)}); give the address that `ray "
            "start --head` printed, on a machine of that cluster."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


class Software(NamedTuple):
    """What must be the same on all machines, lest numbers differ by where they were made."""

    pfedhn: str
    torch: str

    @staticmethod
    def here() -> "Software":
        import torch

        return Software(sys.modules["pfedhn"].__version__, torch.__version__)  # not imported: it stands above this

    def trouble_here(self) -> str | None:
        """Why this machine must not work for the one that has this software."""
        for name, theirs, ours in zip(Software._fields, self, Software.here(), strict=True):
            if theirs != ours:
                return f"it has {name} {ours}, and the machine that asks {theirs}; install the same version on both"
        return None


def submit(function: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], **placement: Any) -> Any:
    """What a function yields on a machine of the cluster, as it comes."""
    import ray

    # Ray would start a lost task from its beginning and take its first words for those already heard.
    remote = ray.remote(num_returns="streaming", max_retries=0, **placement)(run_set_up)
    return remote.remote(pickle.dumps((function, arguments)))


def why_it_failed(error: Exception) -> str:
    """What Ray says of a task that could not be run, in a few words."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ImportError | AttributeError):
        return f"it has no pfedhn, or another version than this machine ({first_line(cause)})"
    return first_line(error if cause is None else cause)


class Worker:
    """On a machine of the cluster: a copy of a run, which trains shards of its rounds."""

    def __init__(self, content: bytes, device: str, software: Software) -> None:
        set_up_process()
        self.trouble = software.trouble_here()
        if self.trouble is None:
            import torch

            torch.set_num_threads(1)
            try:
                run: Simulation = pickle.loads(content)  # noqa: S301 - of a cluster that already runs whatever it is told
                self.run = run if device == "cpu" else run.on(device)
            except Exception as error:  # of what a person's own module does when it is imported
                self.trouble = f"it cannot make the run ({first_line(error)}); give every machine your own modules too"

    def is_refused(self) -> str | None:
        return self.trouble

    def train(self, shard: "CohortShard", shared: Any) -> "Trained":
        from pfedhn.engine.crew import to_device

        shard = to_device(shard._replace(shared=shared), self.run.device)
        trained: Trained = to_device(self.run.train(shard), "cpu")
        return trained


class Workers:
    """One worker for every core of the cluster, or every GPU: together they train the clients of every round.

    What a worker does depends on what it is given alone, so that Ray may do it again where a worker is lost.
    """

    def __init__(self, run: "Simulation", num_workers: int | None = None) -> None:
        import ray

        self.home = run.device
        resource = "GPU" if self.home.type == "cuda" else "CPU"
        num_workers = num_workers or int(ray.cluster_resources().get(resource, 0))
        if not num_workers:
            raise UserError(f"the Ray cluster has no {resource} for a worker.")
        needs: dict[str, Any] = {"num_gpus": 1} if resource == "GPU" else {"num_cpus": 1}
        self.content = ray.put(ray.cloudpickle.dumps(run.on("cpu")))  # kept: who replaces a lost worker needs it too
        kind = ray.remote(max_restarts=-1, max_task_retries=-1, **needs)(Worker)
        self.workers = [kind.remote(self.content, self.home.type, Software.here()) for _ in range(num_workers)]
        for trouble in _heard([worker.is_refused.remote() for worker in self.workers]):
            if trouble is not None:
                raise UserError(f"a Ray worker cannot be used: {trouble}.")

    def train(self, shard: "CohortShard") -> "Trained":
        import ray

        from pfedhn.engine.crew import to_device, together

        shared = ray.put(to_device(shard.shared, "cpu"))
        parts = [to_device(part._replace(shared=None), "cpu") for part in shard.split(len(self.workers))]
        answers = [worker.train.remote(part, shared) for worker, part in zip(self.workers, parts, strict=False)]
        trained: Trained = to_device(together(_heard(answers)), self.home)
        return trained


def _heard(answers: list[Any]) -> list[Any]:
    """What workers answer; an error of theirs is raised as it was raised there."""
    import ray

    try:
        found: list[Any] = ray.get(answers)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise RunError(f"a Ray worker failed: {why_it_failed(error)}.") from error
    except ray.exceptions.RayError as error:
        raise RunError(f"the Ray workers were lost ({first_line(error)}); the same call goes on.") from error
    return found


def shared_out(simulation: "Simulation", devices: Sequence[object], on: str | None) -> "Simulation":
    """The simulation whose rounds are shared by several devices, or by the workers of a cluster; else as it is."""
    from pfedhn.engine.crew import Devices

    if len(devices) > 1:
        return replace(simulation, make_crew=lambda run: Devices(run, [str(device) for device in devices]))
    return simulation if on is None else replace(simulation, make_crew=Workers)
