"""A Ray cluster: the connection to it, the software its machines must have, and workers that share a round.

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
    """Connect this process to a cluster inside the block; None connects to none.

    Args:
        on: "ray" for a cluster of this machine alone, which ends with the block; "ray:ADDRESS" for a running one. If
            the program has a connection already, that one is used.
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
    """The versions that must agree on all machines, or numbers would depend on the machine."""

    pfedhn: str
    torch: str

    @staticmethod
    def here() -> "Software":
        import torch

        return Software(sys.modules["pfedhn"].__version__, torch.__version__)  # not imported: it stands above this

    def trouble_here(self) -> str | None:
        """Why this machine must not work for one with this software; None if it may."""
        for name, theirs, ours in zip(Software._fields, self, Software.here(), strict=True):
            if theirs != ours:
                return f"it has {name} {ours}, and the machine that asks {theirs}; install the same version on both"
        return None


def submit(function: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], **placement: Any) -> Any:
    """Run a generator function on a machine of the cluster and stream what it yields."""
    import ray

    # Ray would start a lost task from its beginning and take its first words for those already heard.
    remote = ray.remote(num_returns="streaming", max_retries=0, **placement)(run_set_up)
    return remote.remote(pickle.dumps((function, arguments)))


def why_it_failed(error: Exception) -> str:
    """Ray's reason for a failed task, in a few words."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ImportError | AttributeError):
        return f"it has no pfedhn, or another version than this machine ({first_line(cause)})"
    return first_line(error if cause is None else cause)


class Worker:
    """A copy of a run on a machine of the cluster, which trains shards of its rounds."""

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

    What a worker does depends on its arguments alone, so that Ray may repeat it if a worker is lost.
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
    """The workers' answers; an error there is raised here."""
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
    """Share the rounds of a simulation among several devices or the workers of a cluster, if there are any."""
    from pfedhn.engine.crew import Devices

    if len(devices) > 1:
        return replace(simulation, make_crew=lambda run: Devices(run, [str(device) for device in devices]))
    return simulation if on is None else replace(simulation, make_crew=Workers)
