"""What reaches a terminal: control characters in words from files are shown, never obeyed."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from pfedhn.errors import printable

ENDLESS = 10_000  # letters in a line


class Screen(Console):
    """A console that shows control characters of titles, names and devices instead of sending them to the terminal."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_ours = segment.control is not None  # such as moving up to draw a progress bar anew
            yield segment if is_ours else Segment(printable(segment.text), segment.style)


def table_screen() -> Screen:
    """A console for tables, which are not cut in a file or a pipe."""
    return Screen() if sys.stdout.isatty() else Screen(width=ENDLESS)


def say(text: str = "", is_error: bool = False) -> None:
    """Print a line, with control characters as escapes."""
    print(printable(text), file=sys.stderr if is_error else sys.stdout)


def never_fail_to_write() -> None:
    """Let letters that stdout and stderr cannot encode become question marks instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
