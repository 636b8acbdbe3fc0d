"""What a person can fix: one kind of error, whose message is a sentence that says what to do."""

import difflib
import reprlib
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any


class UserError(ValueError):
    """An error that the user can fix; its message is one sentence that says how.

    The command line shows it without a traceback. Every other exception is a bug in pfedhn and keeps its traceback.
    """

    exit_code = 2  # the input was wrong; 1 where the input was right and something happened on the way


class RunError(UserError):
    """The input was right, and something happened on the way: a full disk, a damaged file, training that diverged."""

    exit_code = 1


def closest(name: object, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the known one that looks most like it, then the others."""
    names = list(known)
    asked = str(name).lower()
    # Of those that look alike, the one that has most letters in their places.
    near = sorted(
        difflib.get_close_matches(asked, names, n=3),
        key=lambda other: (
            -difflib.SequenceMatcher(None, other, asked).ratio(),
            -sum(one == another for one, another in zip(asked, other, strict=False)),
        ),
    )
    listed = some(names, 20)
    return f"did you mean {near[0]!r}? There are {listed}." if near else f"there are {listed}."


def some(items: Sequence[Any], limit: int = 5) -> str:
    """The first of a long list and how many more there are, to stand inside a sentence."""
    return ", ".join(map(str, items[:limit])) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def short(value: Any) -> str:
    """A value that does not fit, on one line however large it is."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # of the value's own repr
        return f"a {type(value).__name__}"


def printable(text: str) -> str:
    """The text with its control characters shown as escapes: a terminal would obey them, and a reader not see them.

    Lines and tabs stay. So do letters of every script; marks that turn the direction of writing do not.
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs" else _escaped(letter)
        for letter in text
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode() if unicodedata.category(letter) != "Cs" else "?"


def first_line(error: BaseException) -> str:
    """An exception of another library in one line, to stand inside a sentence."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(".: ")[:200]


def place_in_own_code(error: BaseException) -> str | None:
    """Where code that is neither ours nor a library's raised an error, or called what did; None if there is none."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).partition(".")[0]
        is_installed = "site-packages" in file or "dist-packages" in file or file.startswith("<")
        if not is_installed and package not in ("pfedhn", "__main__") and package not in sys.stdlib_module_names:
            place = f"{file}, line {line}"
    return place


def missing_extra(purpose: str, extra: str) -> UserError:
    """The error for a library that is not installed because it belongs to an extra."""
    return UserError(f"{purpose} needs an optional part of pfedhn; install it with: pip install 'pfedhn[{extra}]'.")
