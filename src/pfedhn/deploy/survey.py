"""Statistics before training, over the wire: what a SPEC leaves to the federation is asked of its parties first.

    server   survey(...)   asks the parties that are there, and writes what their summaries give: mean, std, classes
    party    settle(...)   answers once, and learns what was found from the server's first greeting

A party says the same however often it is asked, so that noise cannot be averaged away, and answers one question only.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pfedhn.data.summaries import Asked, Noise, SummaryError
from pfedhn.deploy.line import Line, Trouble
from pfedhn.deploy.mailroom import Mailroom
from pfedhn.deploy.record import Record, Records
from pfedhn.deploy.signing import PrivateKey, PublicKey, evidence, opened, sealed
from pfedhn.deploy.spec import FederationSpec, to_plan, unresolved
from pfedhn.deploy.statistics import asked_of, party_summary, received, resolved_data, statistics_of, with_data
from pfedhn.deploy.wire import HEAD, Message, WireError, head_of
from pfedhn.errors import UserError, first_line, names_place
from pfedhn.storage.files import digest
from pfedhn.system.files import read_text, write_atomically

SETTLED = "settled.json"  # of a server's and a party's folder: what was found
SUMMARY = "summary.json"  # of a party's folder: what it has said
MAX_SUMMARY = 16 << 20  # bytes
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_TRIES = 3.0
SECONDS_TO_ASK_AGAIN = 30.0  # of a party whose answer could not be used
MIN_GROUP = 5  # rows: numbers of fewer are withheld

Say = Callable[[Mapping[str, Any]], None]


def settled(folder: Path, run: str, spec: FederationSpec) -> FederationSpec:
    """The SPEC of a run with what its parties' statistics gave, as far as that is known in this folder."""
    file = folder / SETTLED
    if not unresolved(spec.data) or not file.exists():
        return spec
    table = json.loads(read_text(file))
    return with_data(spec, table["values"]) if table["run"] == run else spec


def is_settled(spec: FederationSpec) -> bool:
    """Whether a SPEC leaves nothing open."""
    return not unresolved(spec.data)


class Survey:
    """The server's side.

    Args:
        spec: Which leaves something open.
        run: The run's name.
        folder: For what was found.
        key: The server's private key.
        roster: Gives the public keys of enrolled parties by name.
        mailroom: Carries messages.
        log: Called with every event.
        records: What was asked of each party and what it sent, to show later.
    """

    def __init__(
        self,
        spec: FederationSpec,
        run: str,
        folder: Path,
        key: PrivateKey,
        roster: Callable[[], Mapping[str, PublicKey]],
        mailroom: Mailroom,
        log: Say,
        records: Records | None = None,
    ) -> None:
        self.records = records
        self.spec, self.run_name, self.folder, self.key = spec, run, folder, key
        self.roster, self.mailroom, self.log = roster, mailroom, log
        self.asked = asked_of(spec)
        self.summaries: dict[str, Any] = {}
        self._questions: dict[str, str] = {}  # the digest of the message to each party
        self._again: dict[str, float] = {}  # when a party may be asked again

    def run(self, stop: threading.Event) -> None:
        """Ask until as many parties have answered as training waits for; what they said is then written."""
        wanted = self.spec.policy.start_with or self.spec.cell.clients
        waiting: dict[str, float] = {}  # until when an answer may come
        while not stop.is_set() and len(self.summaries) < wanted:
            now = time.monotonic()
            for name in self.mailroom.members() & self.roster().keys() - self.summaries.keys() - waiting.keys():
                if self._again.get(name, 0.0) <= now:
                    self._ask(name)
                    waiting[name] = now + self.spec.policy.reply_seconds
            for arrival in self.mailroom.arrivals(SECONDS_BETWEEN_LOOKS):
                waiting.pop(arrival.party, None)
                self._take(arrival.party, arrival.content, arrival.fault)
            for name in [name for name, end in waiting.items() if end <= now]:
                del waiting[name]
                self.mailroom.withdraw(name, "statistics")
                self._take(name, None, "has not answered in time")
        if len(self.summaries) >= wanted:
            self._settle()

    def _ask(self, name: str) -> None:
        values: dict[str, Any] = {"asked": self.asked.to_json()}
        values |= {} if self.records is None else {HEAD: self.records.of(name).head}
        content = sealed(Message("statistics", self.run_name, name, values), self.key)
        self._questions[name] = evidence(content)[0]
        if self.records is not None:
            self.records.of(name).add("asked", kind="statistics", round=None, digest=self._questions[name])
        self.mailroom.post(name, "statistics", content, MAX_SUMMARY)

    def _take(self, name: str, content: bytes | None, fault: str) -> None:
        try:
            key = self.roster().get(name)
            if content is None or key is None:
                raise WireError("lost", fault or "is not enrolled")
            message = opened(content, key, MAX_SUMMARY)
            if self.records is not None:
                digest, signature = evidence(content)
                about: dict[str, Any] = {"kind": message.kind, "round": None, "of": self._questions.get(name)}
                heard: dict[str, Any] = {"digest": digest, "signed": signature, "theirs": head_of(message)}
                self.records.of(name).add("received", **about, **heard)
            if (message.kind, message.run, message.party) != ("statistics", self.run_name, name):
                raise WireError("statistics", str(message.values.get("sentence", "sent no statistics"))[:300])
            self.summaries[name] = received(message.values.get("summary"), self.spec, self.asked)
        except (WireError, SummaryError) as error:
            self._again[name] = time.monotonic() + SECONDS_TO_ASK_AGAIN
            self.log({"event": "refused", "party": name, "reason": "statistics", "sentence": f"{name} {error}."})
            return
        self.log({"event": "statistics", "party": name, "rows": self.summaries[name]["rows"]})

    def _settle(self) -> None:
        found = statistics_of(self.spec, [self.summaries[name] for name in sorted(self.summaries)])
        values = resolved_data(self.spec, found)
        to_plan(with_data(self.spec, values))  # what cannot be used is said before it is written
        table = {"run": self.run_name, "values": values, "statistics": asdict(found), "parties": sorted(self.summaries)}
        write_atomically(self.folder / SETTLED, json.dumps(table, indent=1).encode(), mode=0o600)
        self.log({"event": "settled", "rows": found.rows, **values})


class Surveyed:
    """A party's side.

    Args:
        spec: Which leaves something open.
        run: The run's name.
        name: The party's.
        data: Its examples.
        folder: Its folder.
        key: Signs its answer.
        server_key: Of the only server that is answered.
        min_group: Numbers of groups with fewer rows are withheld.
        noise: Noise on every number.
        record: What the party was asked and what it sent, to show later.
    """

    def __init__(
        self,
        spec: FederationSpec,
        run: str,
        name: str,
        data: Path,
        folder: Path,
        key: PrivateKey,
        server_key: PublicKey,
        min_group: int = MIN_GROUP,
        noise: Noise | None = None,
        record: Record | None = None,
    ) -> None:
        self.record = record
        self.spec, self.run_name, self.name, self.data, self.folder = spec, run, name, data, folder
        self.key, self.server_key, self.min_group, self.noise = key, server_key, min_group, noise

    def answer(self, envelope: bytes) -> bytes | None:
        """The answer to a question about statistics; None to a greeting, which says what was found."""
        message = opened(envelope, self.server_key)
        if (message.run, message.party) != (self.run_name, self.name):
            raise WireError("run", f"asks {message.party!r:.80} of the run {message.run!r:.80}, who is somebody else")
        if message.kind == "hello" and (values := message.values.get("settled")) is not None:
            if not isinstance(values, dict):
                raise WireError("form", "found statistics that cannot be read")
            with_data(self.spec, values)
            table = {"run": self.run_name, "values": values}
            write_atomically(self.folder / SETTLED, json.dumps(table).encode(), mode=0o600)
            return None
        if message.kind != "statistics":
            raise WireError("kind", f"asks for {message.kind!r:.80} before the statistics are known")
        digest, signature = evidence(envelope)
        self._write("asked", digest=digest, signed=signature, theirs=head_of(message))
        kind, values = "statistics", dict[str, Any]()
        try:
            values["summary"] = self._summary(Asked.of(message.values.get("asked")))
        except (SummaryError, UserError) as error:
            sentence = f"does not answer ({first_line(error)})"
            sentence = "does not answer; its owner can read why" if names_place(sentence) else sentence
            kind, values["sentence"] = "refusal", sentence
        if self.record is not None:
            values[HEAD] = self.record.head
        answer = sealed(Message(kind, self.run_name, self.name, values), self.key)
        self._write("sent", of=digest, digest=evidence(answer)[0])
        return answer

    def _write(self, event: str, **details: Any) -> None:
        """Add a line to the party's record."""
        if self.record is not None:
            self.record.add(event, run=self.run_name, kind="statistics", round=None, **details)

    def _summary(self, asked: Asked) -> Any:
        """What this party says, and has said before if it was asked before."""
        if asked != asked_of(self.spec):
            raise SummaryError("asks for more than the study says")
        question, file = digest([self.run_name, asked.to_json()]), self.folder / SUMMARY
        known = json.loads(read_text(file)) if file.exists() else {}
        if known.get("question") != question:
            given = {"min_group": self.min_group, "noise": self.noise}
            summary = party_summary(self.data, self.name, self.spec, asked, **given)  # type: ignore[arg-type]
            known = {"question": question, "summary": summary}
            write_atomically(file, json.dumps(known).encode(), mode=0o600)
        return known["summary"]


def settle(party: Surveyed, line: Line, stop: threading.Event, say: Say) -> bool:
    """Answer until the server says what was found; False if the party is stopped before."""
    trouble = ""
    while not stop.is_set():
        try:
            found = line.poll(party.name, party.key)
            if found is None:
                continue
            message, asked = found
            answer = party.answer(asked)
            if answer is None:
                say({"event": "settled", "party": party.name})
                return True
            line.reply(party.name, party.key, message, answer)
            say({"event": "statistics", "party": party.name, "min_group": party.min_group})
        except WireError as error:
            say({"event": "refused", "sentence": f"somebody {error}."})
            stop.wait(SECONDS_BETWEEN_TRIES)
            line.renew()
        except Trouble as error:
            line.renew()  # a message may have been lost on its way
            if str(error) != trouble:
                trouble = str(error)
                say({"event": "away", "why": f"{trouble}; it tries again"})
            stop.wait(SECONDS_BETWEEN_TRIES)
    return False
