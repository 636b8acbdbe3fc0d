"""Parties in this process, whose time is counted and not waited for: a federation of any delays within seconds."""

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pfedhn.deploy.server import Arrival
from pfedhn.deploy.wire import WireError


@dataclass
class Virtual:
    """A transport whose clock moves when somebody waits. Every party does one thing after the other.

    Args:
        parties: What each makes of a message, by name; a mapping that may change on the way.
        seconds: How long a message and its answer take, by the party's name; no time by default.
    """

    parties: Mapping[str, Callable[[bytes], bytes]]
    seconds: Callable[[str], float] = lambda party: 0.0
    now: float = 0.0
    num_posted: int = 0
    _waiting: list[tuple[float, int, str, str, bytes]] = field(default_factory=list)
    _free: dict[str, float] = field(default_factory=dict)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)

    def clock(self) -> float:
        return self.now

    def members(self) -> set[str]:
        return set(self.parties)

    def post(self, party: str, kind: str, content: bytes) -> None:
        self.num_posted += 1
        ready = max(self.now, self._free.get(party, 0.0)) + self.seconds(party)
        self._free[party] = ready
        heapq.heappush(self._waiting, (ready, next(self._order), party, kind, content))

    def arrivals(self, seconds: float) -> list[Arrival]:
        if not self._waiting or self._waiting[0][0] > self.now + seconds:
            self.now += seconds
            return []
        ready, _, party, kind, content = heapq.heappop(self._waiting)
        self.now = max(self.now, ready)
        return self.delivered(party, kind, content)

    def delivered(self, party: str, kind: str, content: bytes) -> list[Arrival]:
        """What becomes of a message that has reached its party."""
        if party not in self.parties:
            return [Arrival(party, kind, None, "has left")]
        try:
            return [Arrival(party, kind, self.parties[party](content))]
        except WireError as error:
            return [Arrival(party, kind, None, f"refused a message: the sender {error}")]
