"""Ctrl-C and its kin: a run that is asked to stop ends with a round, or leaves one that takes long in the middle."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pfedhn.engine import capture, checkpoint, evaluate, executors, state
from pfedhn.process import STOPS

SECONDS_FOR_A_ROUND = 0.8  # to end in peace once it was asked to stop
SECONDS_BETWEEN_TRIES = 0.05

PURE = {evaluate.__file__, executors.__file__}
"""Code that computes and changes nothing that a checkpoint holds, unless it is called by or calls the following."""
CHANGING = {capture.__file__, checkpoint.__file__, state.__file__}


class Abandoned(BaseException):
    """A round or an evaluation was left in the middle. The state is as it was before that."""


@contextmanager
def stop_requests(handle: Callable[[int], None]) -> Iterator[None]:
    """Inside the block Ctrl-C, SIGTERM and the end of a terminal call `handle` instead of ending the process."""
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
        hurry()

    with stop_requests(handle), leaving_rounds():
        yield stop


@contextmanager
def leaving_rounds() -> Iterator[None]:
    """Inside the block, after `hurry`, a round that does not end by itself is left by `Abandoned`."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        if _is_computing(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise Abandoned

    before = signal.signal(signal.SIGALRM, leave)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def hurry() -> None:
    """Ask for the round that goes on to be left if it takes long; from any thread."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_A_ROUND, SECONDS_BETWEEN_TRIES)


def _is_computing(frame: FrameType | None) -> bool:
    """Whether nothing is changed at this moment that must be whole."""
    found = set()
    while frame is not None:
        found.add(frame.f_code.co_filename)
        frame = frame.f_back
    return bool(found & PURE) and not found & CHANGING
