"""What a person can fix: one kind of error, whose message is a sentence that says what to do."""

import difflib
import reprlib
import sys
import traceback
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any


class UserError(ValueError):
    """An error that the user can fix; its message is one sentence that says how.

    The command line shows it without a traceback. Every other exception is a bug in pfedhn and keeps its traceback.
    """

    exit_code = 2  # the input was wrong; 1 where the input was right and something happened on the way


class RunError(UserError):
    """The input was right, and something happened on the way: a full disk, a damaged file, training that diverged."""

    exit_code = 1


FEW = 12  # names that a sentence may list

RATES, DECAYS = ("lr", "local_lr"), ("weight_decay", "local_weight_decay")
LOCAL_STEPS = ("local_steps",)
SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "learningrate", "lr", "eta", "step_size"), RATES),
    **dict.fromkeys(("local_learning_rate", "client_lr"), ("local_lr",)),
    **dict.fromkeys(("server_lr", "server_learning_rate"), ("lr",)),
    **dict.fromkeys(("weight_decay", "wd", "decay", "l2", "regularization"), DECAYS),
    "momentum": ("momentum", "local_momentum"),
    **dict.fromkeys(("epochs", "local_epochs", "num_epochs", "num_local_steps"), LOCAL_STEPS),
    **dict.fromkeys(("rounds", "num_rounds", "num_steps", "iterations", "max_steps"), ("steps",)),
    **dict.fromkeys(("num_clients", "n_clients"), ("clients",)),
    **dict.fromkeys(("hidden", "hidden_size", "hidden_units", "width"), ("hidden_dim",)),
    **dict.fromkeys(("embedding_size", "embed_dim"), ("embedding_dim", "embeddings.dim")),
    **dict.fromkeys(("batch", "bs", "minibatch_size"), ("batch_size",)),
    **dict.fromkeys(("seed", "random_state"), ("seeds", "seed")),
    **dict.fromkeys(("data", "csv", "table"), ("dataset", "federation")),
    **dict.fromkeys(("algorithm", "algorithms", "strategy"), ("method",)),
    **dict.fromkeys(("net", "architecture"), ("model",)),
    **dict.fromkeys(("out", "folder", "output_dir"), ("directory",)),
}
"""What people call settings elsewhere, and how they are called here: the first that there is."""


def closest(name: object, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the known one that looks most like it, then the others."""
    names = list(known)
    found, listed = nearest(name, names), some(names, 20)
    return f"there are {listed}." if found is None else f"did you mean {found!r}? There are {listed}."


def closest_setting(name: object, known: Iterable[str], where: str) -> str:
    """As `closest`, for settings, which have synonyms; the page `where` stands for a list that is too long to read."""
    names = list(known)
    found = nearest_setting(name, names)
    if len(names) <= FEW:
        return (
            f"there are {some(names, FEW)}."
            if found is None
            else f"did you mean {found!r}? There are {some(names, FEW)}."
        )
    return f"see {where} for those there are." if found is None else f"did you mean {found!r}? See {where} for all."


def nearest_setting(name: object, names: Collection[str]) -> str | None:
    """What a setting is called here; None if no name is like it."""
    synonyms = (other for other in SYNONYMS.get(str(name).lower(), ()) if other in names)
    return next(synonyms, None) or nearest(name, names)


def nearest(name: object, names: Iterable[str]) -> str | None:
    """The name that looks most like one that does not exist; None if all look different."""
    asked = str(name).lower()
    # Of those that look alike, the one that has most letters in their places.
    near = sorted(
        difflib.get_close_matches(asked, list(names), n=3),
        key=lambda other: (
            -difflib.SequenceMatcher(None, other, asked).ratio(),
            -sum(one == another for one, another in zip(asked, other, strict=False)),
        ),
    )
    return near[0] if near else None


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


def names_place(sentence: str) -> bool:
    """Whether a sentence may have a path of this machine, which is nobody else's business."""
    return any(sign in sentence for sign in "/\\~")


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
