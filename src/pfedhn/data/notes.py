"""Notes on a person's own data, each of which is said once."""

import logging
import multiprocessing

logger = logging.getLogger("pfedhn")
_said: set[str] = set()


def note(key: str, sentence: str, *values: object) -> None:
    """Log a note once, since an experiment reads its data several times, and not in every worker process again.

    Args:
        key: What the note is of, such as a file and a column.
        sentence: The note, a format for `values` as `logging` takes it.
        *values: What stands in it.
    """
    if key not in _said and multiprocessing.parent_process() is None:
        _said.add(key)
        logger.warning(sentence, *values)
