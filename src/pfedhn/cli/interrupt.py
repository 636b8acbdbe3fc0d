"""Ctrl-C at any moment: one line and exit code 130, also while modules are being imported."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 130  # the exit code

_can_unwind = False  # whether somebody waits for a KeyboardInterrupt and says what it means


def stop_in_one_line() -> None:
    """Let Ctrl-C end this process without a traceback. Runs take the signal over while they go on."""
    signal.signal(signal.SIGINT, _stop)


@contextmanager
def unwinding() -> Iterator[None]:
    """Inside the block Ctrl-C raises KeyboardInterrupt, so that files and displays are closed on the way out."""
    global _can_unwind
    before, _can_unwind = _can_unwind, True
    try:
        yield
    finally:
        _can_unwind = before


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Inside the block, a command that was stopped ends its process without taking it apart.

    By then everything is written and closed. To free what a run held and every module takes seconds on a busy machine,
    and a person waits.
    """
    try:
        yield
    except SystemExit as leaving:
        if leaving.code != STOPPED:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STOPPED)


def _stop(number: int, frame: FrameType | None) -> None:
    # Raised in the middle of an import it may be swallowed, or come out of a library as another error.
    if _can_unwind and not _is_importing(frame):
        raise KeyboardInterrupt
    try:
        os.write(sys.stderr.fileno(), b"stopped.\n")  # not through a buffer, which the signal may have found locked
    finally:
        os._exit(STOPPED)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
