"""Which parties are present, what each is asked, and how it has behaved; found out anew when the server restarts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pfedhn.deploy.policy import Policy
from pfedhn.deploy.questions import Question
from pfedhn.deploy.record import Records
from pfedhn.deploy.signing import PublicKey, evidence

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_LEAVE = 60.0  # since a question was asked, in which a party that leaves it has not failed
MAX_DOUBLINGS = 6  # of the time that a party is set aside


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

    def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
        """Send a message, whose answer may have so many bytes."""

    def withdraw(self, party: str, kind: str) -> None:
        """Forget a message whose answer nobody waits for any more."""

    def arrivals(self, seconds: float) -> list[Arrival]:
        """The answers that have arrived; waits at most this long for the first."""


@dataclass
class Standing:
    """How a party has behaved since the server started."""

    is_greeted: bool = False
    failures: int = 0  # since its last accepted update
    times_aside: int = 0
    aside_until: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)  # by reason


class Contacts:
    """The server's contacts with parties; it takes what `Server` takes."""

    def __init__(
        self,
        roster: Callable[[], Mapping[str, PublicKey]],
        transport: Transport,
        policy: Policy,
        log: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float],
        records: Records | None = None,
    ) -> None:
        self.roster, self.transport, self.policy, self.log, self.clock = roster, transport, policy, log, clock
        self.records = records
        self.standings: dict[str, Standing] = defaultdict(Standing)
        self.asked: dict[tuple[str, str], Question] = {}  # by party and kind
        self.consents: dict[str, frozenset[str]] = {}  # of parties, when they were greeted last (`deploy.across`)
        self.present: set[str] = set()
        self.failed: set[str] = set()  # parties whose update will not come in the open round

    def look(self, hello: Callable[[str], Question]) -> None:
        """Find out who is present, and greet newcomers."""
        enrolled = self.roster()
        self.present = self.transport.members() & enrolled.keys()
        for name, standing in list(self.standings.items()):  # who is told may look at others
            if name not in self.present and standing.is_greeted:
                standing.is_greeted = False
                self.log({"event": "gone", "party": name})
        for name in sorted(self.present):
            if not self.standings[name].is_greeted and not self.is_aside(name) and not self.is_asked(name, "hello"):
                self.ask(hello(name))

    def is_aside(self, name: str) -> bool:
        return self.standings[name].aside_until > self.clock()

    def is_ready(self, name: str) -> bool:
        """Whether a party is present, has been greeted and is not set aside."""
        return name in self.present and self.standings[name].is_greeted and not self.is_aside(name)

    def ask(self, question: Question) -> None:
        num_before = sum(party == question.party for party, _ in self.asked)  # a party does one thing after the other
        question.asked_at = self.clock()
        question.deadline = question.asked_at + (1 + num_before) * self.policy.reply_seconds
        self.asked[question.party, question.kind] = question
        if self.records is not None:
            about = {"kind": question.kind, "round": question.values.get("round")}
            self.record(question.party, "asked", **about, digest=question.digest)
        self.transport.post(question.party, question.kind, question.content, question.limit)

    def received(self, question: Question, content: bytes, head: str, kind: str) -> None:
        """Record an answer that its party has signed, whether or not it is accepted then."""
        if self.records is not None:
            digest, signature = evidence(content)
            about = {"kind": kind, "round": question.values.get("round"), "of": question.digest}
            self.record(question.party, "received", **about, digest=digest, signed=signature, theirs=head)

    def record(self, name: str, event: str, **details: Any) -> None:
        """Add a line to a party's record, if there are records."""
        if self.records is not None:
            self.records.of(name).add(event, **details)

    def is_asked(self, name: str, kind: str) -> bool:
        return (name, kind) in self.asked

    def num_asked(self, *kinds: str) -> int:
        """The number of open questions of these kinds."""
        return sum(kind in kinds for _, kind in self.asked)

    def arrivals(self) -> Iterator[Arrival]:
        """The answers that have arrived; overdue questions are given up afterwards."""
        for arrival in self.transport.arrivals(SECONDS_BETWEEN_LOOKS):
            if arrival.content is None:
                self._lost(arrival)
            else:
                yield arrival
        now = self.clock()
        for question in [question for question in self.asked.values() if question.deadline <= now]:
            self.give_up(question, "silent", "has not answered in time")

    def _lost(self, arrival: Arrival) -> None:
        """Send a message a second time; a party that has answered gives the same answer again."""
        name, question = arrival.party, self.asked.get((arrival.party, arrival.kind))
        if question is None:
            return
        sentence = arrival.fault or "cannot be reached"
        if question.has_been_repeated or name not in self.transport.members():
            self.give_up(question, "lost", sentence)
            return
        question.has_been_repeated = True
        self.refuse(name, "lost", sentence)
        self.transport.post(name, question.kind, question.content, question.limit)

    def give_up(self, question: Question, reason: str, sentence: str) -> None:
        """Close a question without an answer, and count that as a failure of the party."""
        self.asked.pop((question.party, question.kind), None)
        self.transport.withdraw(question.party, question.kind)
        if question.kind == "train":
            self.failed.add(question.party)
        # To leave is no failure, since it may come back at once; but a round that it has held up for long is.
        is_free = self.clock() - question.asked_at < SECONDS_TO_LEAVE
        self.count_failure(question.party, reason, sentence, is_free)

    def count_failure(self, name: str, reason: str, sentence: str, is_free: bool = False) -> None:
        """Set a party aside for a while if it fails too often; `is_free` if it does not count for one that has left."""
        self.refuse(name, reason, sentence)
        if is_free and name not in self.transport.members():
            return
        standing = self.standings[name]
        standing.failures += 1
        if standing.failures >= self.policy.patience:
            seconds = self.policy.aside_seconds * 2 ** min(standing.times_aside, MAX_DOUBLINGS)
            standing.aside_until = self.clock() + seconds
            standing.times_aside += 1
            standing.failures = self.policy.patience - 1  # after its return, one failure sets it aside again
            standing.is_greeted = False
            self.log({"event": "set aside", "party": name, "seconds": seconds})

    def refuse(self, name: str, reason: str, sentence: str) -> None:
        """Count and log something that is not accepted."""
        self.standings[name].refused[reason] += 1
        self.record(name, "refused", reason=reason)
        self.log({"event": "refused", "party": name, "reason": reason, "sentence": f"{name} {sentence}."})
