"""Handle Ctrl-C, SIGTERM and SIGHUP: the run ends after its current round; a second signal ends it at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pfedhn.system.process import STOPS


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

    with stop_requests(handle):
        yield stop
