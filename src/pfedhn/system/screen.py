"""What reaches a terminal: words from files are shown, never obeyed; letters that it does not know become plainer."""

import codecs
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from pfedhn.errors import printable

PLAINER = {"±": "+-", "…": "...", "─": "-", "━": "-", "╸": "-", "╺": "-", "│": "|", "\N{NO-BREAK SPACE}": " "}
"""Letters that we write ourselves, for terminals that know ASCII alone."""

ENDLESS = 10_000  # letters in a line


class Screen(Console):
    """A console that shows control characters of titles, names and devices instead of sending them to the terminal."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_ours = segment.control is not None  # such as moving up to draw a progress bar anew
            yield segment if is_ours else Segment(printable(segment.text), segment.style)


def table_screen() -> Screen:
    """Where tables are printed: in a file or a pipe they are as wide as they need, since nothing there is cut."""
    return Screen() if sys.stdout.isatty() else Screen(width=ENDLESS)


def say(text: str = "", is_error: bool = False) -> None:
    """Print a line as it is, but for control characters."""
    print(printable(text), file=sys.stderr if is_error else sys.stdout)


def never_fail_to_write() -> None:
    """Let letters that stdout and stderr cannot encode become plainer ones instead of an error."""
    codecs.register_error("pfedhn.plainer", _plainer)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="pfedhn.plainer")


def _plainer(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(PLAINER.get(letter, "?") for letter in wrong), error.end
