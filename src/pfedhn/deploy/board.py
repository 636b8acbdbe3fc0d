"""What the server shows of itself: a bounded history, published at each event and read without a lock.

The run's thread replaces whole values and never changes one that it has published, so whoever reads them waits for
nobody and keeps nobody waiting. A curve keeps at most `MAX_POINTS` points, evenly thinned, however long the run is.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pfedhn.deploy.across import matrix, shortened
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.errors import printable

MAX_POINTS = 400  # of a curve
MAX_LINES = 40  # parties whose own scores are kept as curves
MAX_ROWS = 200  # parties that the page lists
MAX_EVENTS = 60
MAX_TEXT = 300  # letters of an event
ROUTINE = ("round", "evaluated")  # events of which only the newest is shown: there may be a hundred a second
SECONDS_BETWEEN_SAMPLES = 1.0  # of rounds and bytes

T = TypeVar("T")


@dataclass
class Thinned(Generic[T]):
    """The points of a curve whose number is bounded: every one at first, later every second, fourth, and so on.

    The newest point is always among them.
    """

    points: tuple[T, ...] = ()
    stride: int = 1
    number: int = 0  # of points that were added
    _kept: tuple[T, ...] = ()

    def add(self, point: T) -> None:
        if self.number % self.stride == 0:
            self._kept = (*self._kept, point)
            if len(self._kept) == MAX_POINTS:
                self._kept, self.stride = self._kept[::2], 2 * self.stride
        is_kept = self.number % self.stride == 0
        self.points = self._kept if is_kept else (*self._kept, point)
        self.number += 1


@dataclass(frozen=True)
class Evaluation:
    """The scores of one evaluation: over all examples, their range over parties, and those of single parties."""

    round: int
    mean: Mapping[str, float | None]  # by split, as all others
    low: Mapping[str, float | None]
    high: Mapping[str, float | None]
    parties: Mapping[str, Mapping[str, float | None]]  # by party, then by split


@dataclass(frozen=True)
class Sample:
    """The progress at one time."""

    time: float
    round: int
    down: int  # bytes, as all messages
    up: int


@dataclass(frozen=True)
class Event:
    time: float
    kind: str
    text: str
    count: int = 1  # times in a row


@dataclass(frozen=True)
class Shown:
    """What was published last."""

    status: Mapping[str, Any] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    samples: tuple[Sample, ...] = ()
    latest: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # known scores, by party and split
    num_evaluations: int = 0  # before any were thinned out; a page asks for curves again if it has grown
    is_loss: bool = False
    updated: float | None = None  # when the last update was accepted


class Board:
    """The server's state for whoever looks at it.

    Args:
        about: What does not change: the federation's name, its address, method and model.
        describe: Gives the sentence of an event; None for one that is not shown.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        about: Mapping[str, str] | None = None,
        describe: Callable[[Mapping[str, Any]], str | None] = lambda event: str(event["event"]),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.about, self.describe, self.clock = dict(about or {}), describe, clock
        self.began = clock()
        self.shown = Shown()
        self.events: tuple[Event, ...] = ()
        self.across: Mapping[str, Any] | None = None  # the result of a comparison (`deploy.across`)
        self.counts: Callable[[], Mapping[str, int]] = dict  # of strangers and connections
        self._evaluations, self._samples = Thinned[Evaluation](), Thinned[Sample]()
        self._num_seen = 0  # evaluations
        self._drawn: dict[str, None] = {}  # parties with their own curves, in the order in which they came
        self._latest: dict[str, dict[str, float | None]] = {}
        self._is_loss = False
        self._updated: float | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        """Note an event. The caller sees to it that no other thread does so at the same time."""
        if event["event"] == "accepted":
            self._updated = self.clock()
        try:
            text = self.describe(event)
        except Exception:  # an event of a form that is not known here
            text = str(event["event"])
        if text is None:
            return
        kind, text, before, count = str(event["event"]), printable(text)[:MAX_TEXT], self.events, 1
        if kind in ROUTINE:
            before = tuple(one for one in before if one.kind != kind)
        elif before and (before[-1].kind, before[-1].text) == (kind, text):
            before, count = before[:-1], before[-1].count + 1
        self.events = (*before[1 - MAX_EVENTS :], Event(round(self.clock(), 1), kind, text, count))

    def publish(
        self, status: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = (), removed: Collection[str] = ()
    ) -> None:
        """Show the state of the run: a table that nobody changes any more, and all evaluations so far.

        Parties that were removed from the federation are left out.
        """
        if removed:
            there = {name: party for name, party in status["parties"].items() if name not in removed}
            status = {**status, "parties": there}
        if len(history) < self._num_seen:  # brought back from a copy
            self._evaluations, self._latest, self._num_seen = Thinned(), {}, 0
        for one in history[self._num_seen :]:
            self._evaluations.add(self._evaluation(one))
        self._num_seen = len(history)
        self._sample(status)
        self.shown = Shown(
            status,
            self._evaluations.points,
            self._samples.points,
            self._latest,
            self._num_seen,
            self._is_loss,
            self._updated,
        )

    def _sample(self, status: Mapping[str, Any]) -> None:
        now, points = self.clock(), self._samples.points
        if not points or now - points[-1].time >= SECONDS_BETWEEN_SAMPLES:
            down, up = (int(status.get(name, 0)) for name in ("wire_down", "wire_up"))
            self._samples.add(Sample(round(now, 1), int(status.get("round", 0)), down, up))

    def _evaluation(self, one: Mapping[str, Any]) -> Evaluation:
        results: Mapping[str, Any] = one["results"]
        for name in sorted(results):
            if len(self._drawn) < MAX_LINES:
                self._drawn.setdefault(name)
        self._is_loss = any(part[1] is None for parts in results.values() for part in parts.values())
        scores = {name: {split: score(parts[split]) for split in EVALUATED_SPLITS} for name, parts in results.items()}
        mean, low, high = {}, {}, {}
        for split in EVALUATED_SPLITS:
            known = [value for parts in scores.values() if (value := parts[split]) is not None]
            low[split], high[split] = min(known, default=None), max(known, default=None)
            total, count = map(
                sum, zip((0.0, 0.0), *(_numbers(parts[split]) for parts in results.values()), strict=True)
            )
            mean[split] = _rounded(total / count) if count else None
        self._latest = {**self._latest, **scores}
        parties = {name: scores[name] for name in self._drawn if name in scores}
        return Evaluation(int(one["round"]), mean, low, high, parties)

    # What the page and programs are given. Called by any thread.

    def state(self) -> dict[str, Any]:
        """The present state, as JSON can hold it; of many parties, those that need attention."""
        shown, events, status = self.shown, self.events, dict(self.shown.status)
        parties: Mapping[str, Any] = status.pop("parties", {})
        listed = sorted(parties, key=lambda name: (not _needs_attention(parties[name]), name))[:MAX_ROWS]
        return {
            "about": self.about,
            "began": round(self.began, 1),
            "now": round(self.clock(), 1),
            "updated": None if shown.updated is None else round(shown.updated, 1),
            "status": status,
            "num_evaluations": shown.num_evaluations,
            "refused": dict(refused_by_reason(parties)),
            "counts": dict(self.counts()),
            "num_parties": len(parties),
            "num_present": sum(bool(one["is_present"]) for one in parties.values()),
            "parties": [{"name": name, **parties[name], "scores": shown.latest.get(name)} for name in sorted(listed)],
            "across": None if self.across is None else shortened(matrix(self.across)),
            "events": [vars(event) for event in reversed(events)],
        }

    def curves(self) -> dict[str, Any]:
        """The history, by columns: evaluations by round, and rounds and bytes by time."""
        shown = self.shown
        evaluations, samples = shown.evaluations, shown.samples
        names = list(dict.fromkeys(name for one in evaluations for name in one.parties))
        splits = {
            split: {
                "mean": [one.mean[split] for one in evaluations],
                "low": [one.low[split] for one in evaluations],
                "high": [one.high[split] for one in evaluations],
                "parties": {name: [one.parties.get(name, {}).get(split) for one in evaluations] for name in names},
            }
            for split in EVALUATED_SPLITS
        }
        return {
            "num_evaluations": shown.num_evaluations,
            "is_loss": shown.is_loss,
            "rounds": [one.round for one in evaluations],
            "splits": splits,
            "samples": {name: [getattr(one, name) for one in samples] for name in ("time", "round", "down", "up")},
        }


def score(scores: Sequence[Any]) -> float | None:
    """A party's accuracy of one split, or its loss if the task has no accuracy; None without examples."""
    value, count = _numbers(scores)
    return _rounded(value / count) if count else None


def _numbers(scores: Sequence[Any]) -> tuple[float, float]:
    """What is divided by what to get a score."""
    loss, metric, count = scores
    return float(loss if metric is None else metric), float(count)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def refused_by_reason(parties: Mapping[str, Any]) -> Counter[str]:
    """The number of answers that were refused, over all parties."""
    counts = Counter[str]()
    for party in parties.values():
        counts.update(party["refused"])
    return counts


def _needs_attention(party: Mapping[str, Any]) -> bool:
    return bool(party["is_aside"] or party["refused"] or not party["is_present"])
