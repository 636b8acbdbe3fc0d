"""What came of faults: one table of kinds, tries and outcomes."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

GOOD = ("same", "refused", "mended", "ran", "sentence", "same bits", "nothing lost")
"""How a try may end. Everything else is a defect."""


class Row(NamedTuple):
    """What came of all tries of one kind."""

    kind: str
    tries: int
    outcomes: Counter[str]
    bad: list[str]  # the tries that ended as none may, with what was said


def row_of(kind: str, endings: Iterable[tuple[str, str]]) -> Row:
    """A row from pairs of an outcome and what was said."""
    pairs = list(endings)
    bad = [f"{kind}: {outcome}: {said}" for outcome, said in pairs if outcome not in GOOD]
    return Row(kind, len(pairs), Counter(outcome for outcome, _ in pairs), bad)


def to_text(rows: Iterable[Row]) -> str:
    """The table, in Markdown."""
    lines = ["| kind | tries | outcomes |", "|---|---:|---|"]
    for row in rows:
        found = ", ".join(f"{number} {outcome}" for outcome, number in sorted(row.outcomes.items()))
        lines.append(f"| {row.kind} | {row.tries:,} | {found} |")
    return "\n".join(lines)
