"""The interface between the server and whatever carries its messages."""

from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """A party's answer, or the reason why there will be none."""

    party: str
    kind: str  # of the message that it answers
    content: bytes | None
    fault: str = ""


class Transport(Protocol):
    """Carries messages and promises nothing: they may be lost, late, repeated, altered, or sent by others."""

    def members(self) -> set[str]:
        """The names of invited parties that can be reached now."""

    def post(self, party: str, kind: str, content: bytes) -> None:
        """Send a message."""

    def arrivals(self, seconds: float) -> list[Arrival]:
        """The answers that have arrived; waits at most this long for the first."""
