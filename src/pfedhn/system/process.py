"""Set up processes for runs, start them and stop them; importing pfedhn changes nothing in a process."""

import atexit
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeAlias

logger = logging.getLogger("pfedhn")

THREAD_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either says how the threads of PyTorch wait for each other
SPIN_COUNT = "1000"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h

# Held by who traces, compiles, captures or seeds. What PyTorch's modules do meanwhile, and what its generator draws
# next, is the whole process's, whichever thread changes it.
WHOLE_PROCESS = threading.RLock()


def set_up_process() -> None:
    """Set up this process for fast runs. A script that trains on a CPU should call it first, before it imports torch.

    It changes how fast a run is, never its numbers:

    - Threads that wait for each other spin only briefly (`GOMP_SPINCOUNT=1000`, unless that variable or
      `OMP_WAIT_POLICY` is set). If another process uses a core, spinning threads slow down the one they wait for, up to
      ten times. PyTorch reads the variable when it is loaded; a call that comes later says so.
    - Freed memory is kept for the next step (glibc's `mallopt`), which saves a third of a round on a CPU.
    - Compiled kernels are kept in the cache of pfedhn, not in a temporary folder (`TORCHINDUCTOR_CACHE_DIR` and
      `TRITON_CACHE_DIR`, unless they are set).

    The command line and its worker processes do this by themselves.

    Examples:
        >>> import pfedhn
        >>> pfedhn.set_up_process()  # doctest: +SKIP
        >>> import torch
    """
    shorten_spinning()
    keep_freed_memory()
    keep_compiled()


def shorten_spinning() -> None:
    """Set GOMP_SPINCOUNT for this process and its children; warn if PyTorch was loaded without it."""
    if sys.platform != "linux" or any(name in os.environ for name in THREAD_VARIABLES):
        return
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    if "torch" in sys.modules:
        logger.warning(
            "pfedhn.set_up_process() came after torch was imported, too late for the threads of this process; call it "
            "first, or set GOMP_SPINCOUNT=%s before Python starts.",
            SPIN_COUNT,
        )


def keep_freed_memory() -> None:
    """Let this process keep the memory it frees for its next step, until it ends.

    glibc gives large blocks back to the system at once. Fetching them again, page by page, is a third of a round on a
    CPU: every step makes the same intermediate results anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def keep_compiled() -> None:
    """Let the compilers write to the cache of pfedhn, instead of /tmp, which does not last."""
    from pfedhn.system.files import cache_folder, write_trouble

    folder = cache_folder() / "compiled"
    if write_trouble(folder) is None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def check_memory(
    num_bytes: int, what: str, way_out: str | Callable[[], str] = "make it smaller", there: int | None = None
) -> None:
    """Reject what would need more memory than there is, before anything is allocated or written.

    Args:
        num_bytes: The memory needed.
        what: The subject of the error sentence.
        way_out: The end of the error sentence, or a function that makes it.
        there: The memory of the device; by default, that of the machine.
    """
    from pfedhn.errors import UserError

    if there is None:
        if not hasattr(os, "sysconf"):
            return
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > there:
        needed, held = (f"{number / 1e9:,.1f} GB" for number in (num_bytes, there))
        advice = way_out if isinstance(way_out, str) else way_out()
        raise UserError(f"{what} would need {needed} of memory, and this machine has {held}; {advice}.")


@cache
def advise_once(device: object) -> None:
    """Warn once that `set_up_process` was not called, if that matters: on a CPU under Linux."""
    is_missing = sys.platform == "linux" and not any(name in os.environ for name in THREAD_VARIABLES)
    if str(device) == "cpu" and is_missing:
        logger.warning(
            "this process is not set up for training on a CPU, which can make it several times slower; call "
            "pfedhn.set_up_process() before torch is imported."
        )


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def stop_requests(handle: Callable[[int], None]) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP call `handle` inside the block instead of ending the process."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread alone
        yield
        return

    def call(number: int, frame: FrameType | None) -> None:
        handle(number)

    # What is ignored stays so: `nohup` lets a run outlive its terminal.
    wanted = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, call) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait for the end of a round, so that a checkpoint can be written."""
    stop = threading.Event()

    def handle(number: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # asked twice: at once
        stop.set()

    with stop_requests(handle):
        yield stop


Worker: TypeAlias = tuple[BaseProcess, Connection]
"""A process, and this end of the pipe to it."""

_ahead: list[Worker] = []  # which nobody has given anything to do yet


def start_ahead(*modules: str) -> None:
    """Start a process that imports modules while this one finds out what there is to do; `start_process` takes it."""
    if not _ahead:
        atexit.register(_end_ahead)
    _ahead.append(_started(modules))


def _end_ahead() -> None:
    """At the end, Python waits for processes, and one that nobody gave anything to do waits for its parent."""
    for process, _ in _ahead:
        process.kill()


def start_process(function: Callable[..., None], *arguments: Any) -> Worker:
    """A process that sets itself up before it imports anything, and then calls the function with its pipe.

    The function and its arguments travel over the pipe: a process that unpickled them as it starts would import PyTorch
    first.
    """
    waiting = [worker for worker in _ahead if worker[0].is_alive()]
    worker = waiting.pop() if waiting else _started(())
    _ahead[:] = waiting
    worker[1].send_bytes(pickle.dumps((function, arguments)))
    return worker


def _started(modules: Sequence[str]) -> Worker:
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_start, args=(theirs, modules), daemon=True)
    # A terminal sends Ctrl-C to every process of a group, and a second one means "at once". A worker therefore never
    # hears a signal, only its parent. Blocked before it starts, since libraries start threads while they are imported.
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # starting it later would lift the block
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    else:
        process.start()
    theirs.close()
    return process, mine


def _start(pipe: Connection, modules: Sequence[str]) -> None:
    set_up_process()
    for name in modules:
        import_module(name)
    try:
        content = pipe.recv_bytes()
    except (EOFError, OSError):  # there was nothing to do
        return
    function, arguments = pickle.loads(content)  # noqa: S301 - of the parent process, over no wire and from no file
    function(pipe, *arguments)


def run_set_up(content: bytes) -> Iterator[Any]:
    """Set up this process, which somebody else started, and yield what a pickled generator function yields."""
    set_up_process()
    function, arguments = pickle.loads(content)  # noqa: S301 - of a cluster that already runs whatever it is told
    yield from function(*arguments)
