"""The server of a federation, whatever carries its messages: whom it asks, what it believes, when it steps.

Every decision that moves the hypernetwork is a record in the journal before anybody hears of it (`deploy.state`), so
that a server that is killed at any moment goes on as if nothing had happened. Who is present, who failed and who is set
aside is not: that is found out anew.
"""

import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pfedhn import keys
from pfedhn.data.batches import cohort
from pfedhn.deploy.plan import Phase, exchange_of
from pfedhn.deploy.signing import PrivateKey, PublicKey, opened, sealed
from pfedhn.deploy.state import Member, Rules, State, Store, Unfit, split_results, step_order
from pfedhn.deploy.wire import REFUSALS, Message, WireError, is_finite, layout, norm, packed
from pfedhn.engine.in_flight import next_of
from pfedhn.engine.plan import Plan
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.errors import first_line
from pfedhn.params import Params, num_bytes, zeros_like

SECONDS_BETWEEN_LOOKS = 0.2
TESTED_AT_ONCE = 64  # parties: the message to each, with its weights, is in memory until it is answered
SMALL_MESSAGE = 1 << 16  # bytes that an answer without tensors may have
MAX_COUNT = 1 << 40  # of examples, rounds and the like
MAX_LOSS = 1e300  # summed; no number of parties makes it infinite


class Arrival(NamedTuple):
    """What came from a party: an answer, or why there will be none."""

    party: str
    kind: str  # of the message that it answers
    content: bytes | None
    fault: str = ""


class Transport(Protocol):
    """What carries messages. It promises nothing: they may be lost, late, repeated, altered, or come from others."""

    def members(self) -> set[str]:
        """The names of invited parties that can be reached now."""

    def post(self, party: str, kind: str, content: bytes) -> None:
        """Send a message on its way."""

    def arrivals(self, seconds: float) -> list[Arrival]:
        """What has come; waits for something to come, but not longer than this."""


@dataclass(frozen=True)
class Policy:
    """How a server deals with its parties.

    Args:
        start_with: How many parties must be there before the first round; all that are expected by default.
        reply_seconds: How long a party may take to answer.
        patience: How often a party may fail between updates that are accepted before it is set aside.
        aside_seconds: How long it is set aside; twice as long each time it fails again.
        max_update: The largest norm of an update, in multiples of (1 + the norm of the weights that were sent).
        in_flight: How many parties work at the same time in a run that does not wait for its cohort; None waits.
        max_staleness: How many steps the server may have taken since it sent the weights that an update is for.
        return_seconds: How long a server that was restarted in the middle of a round waits for those that it knows.
        checkpoint_seconds: How often the whole state is written; the journal keeps what comes between.
    """

    start_with: int | None = None
    reply_seconds: float = 600.0
    patience: int = 3
    aside_seconds: float = 60.0
    max_update: float = 100.0
    in_flight: int | None = None
    max_staleness: int | None = None
    return_seconds: float = 90.0
    checkpoint_seconds: float = 60.0


@dataclass
class Asked:
    """A message that has not been answered."""

    party: str
    kind: str
    values: Mapping[str, Any]  # what the answer must repeat
    deadline: float
    limit: int  # bytes of an answer
    layout: str = ""  # of the tensors of an answer
    max_norm: float = math.inf
    bytes_down: int = 0
    content: bytes = b""  # the message itself
    has_been_repeated: bool = False


@dataclass
class Standing:
    """How a party has behaved in this session; forgotten when the server starts anew."""

    is_greeted: bool = False
    failures: int = 0  # since its last update that was accepted
    times_aside: int = 0
    aside_until: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)  # by reason


class Server:
    """A server at work.

    Args:
        plan: What everybody knows.
        run: The run's name, in every message.
        folder: Of its checkpoints and journals.
        key: The server's own, which signs what it sends.
        roster: The public keys of the parties that are invited and enrolled, by name; asked again and again, so that
            parties can come and be taken out while it runs.
        transport: What carries messages.
        policy: How it deals with parties.
        log: Told of everything that happens, a table each.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self,
        plan: Plan,
        run: str,
        folder: Path,
        key: PrivateKey,
        roster: Callable[[], Mapping[str, PublicKey]],
        transport: Transport,
        policy: Policy | None = None,
        log: Callable[[Mapping[str, Any]], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.run_name, self.key, self.roster, self.transport = plan, run, key, roster, transport
        self.policy, self.log, self.clock = policy or Policy(), log, clock
        self.store = Store(folder, Rules(plan))
        self.state: State = self.store.load()
        self.standings: dict[str, Standing] = {}
        self.asked: dict[tuple[str, str], Asked] = {}
        self.scores: dict[str, Any] = {}  # of the evaluation that goes on
        self._to_test: list[str] = []  # who has not been asked yet in that evaluation
        self._is_judging = False  # whether it is the one that decides on adaptation
        self.present: set[str] = set()
        self._layouts: dict[tuple[str, Phase], tuple[str, int]] = {}
        self.failed: set[str] = set()  # who will not answer in the round that is open
        self._saved = self._began = clock()
        self._has_gathered = False
        if self.state.num_accepted:
            self._say("recovered", round=self.state.round, accepted=self.state.num_accepted)

    def run(self, stop: threading.Event | None = None, is_lingering: bool = False) -> None:
        """Run to the end, or until `stop` is set.

        Args:
            stop: Asks it to leave; what it has decided is on the disk.
            is_lingering: Whether it stays when training has ended, for parties that join then.
        """
        stop = stop or threading.Event()
        while not stop.is_set():
            self._look()
            if self.state.has_ended:
                if self.state.is_adapted is None and self._is_gathering_again():
                    self._collect()
                elif not self._serve_the_ended() and not is_lingering:
                    break
            elif not self.state.has_started:
                self._gather()
            elif self._is_gathering_again():
                self._collect()
            elif self._is_evaluation_due():
                self._begin_evaluation()
            elif self.state.tested is not None and self._is_waiting_for_scores():
                self._collect()
                self._end_evaluation()
            elif self.state.round >= self.plan.num_rounds:
                self._commit({"kind": "end"})
                self._say("ended", round=self.state.round, chosen=self.state.best and self.state.best.round)
            elif self.policy.in_flight is None:
                self._round(stop)
            else:
                self._continue(self.policy.in_flight)
                self._end_evaluation()
            self._checkpoint()
        self._checkpoint(is_wanted=True)

    def status(self) -> dict[str, Any]:
        """Where it stands, as JSON can hold it."""
        state = self.state
        parties = {}
        for name, member in sorted(state.members.items()):
            standing = self.standings.get(name, Standing())
            parties[name] = {
                "is_present": name in self.present,
                "is_aside": standing.aside_until > self.clock(),
                "is_spent": member.is_spent,
                "architecture": member.architecture,
                "size": member.size,
                "phase": member.phase,
                "last_round": member.base,
                "refused": dict(standing.refused),
            }
        last = state.history[-1] if state.history else None
        means = {}
        if last is not None:
            found = split_results(last["results"])
            means = {split: result.score for split, result in found.items() if result.count.sum() > 0}
        return {
            "run": self.run_name,
            "round": state.round,
            "num_rounds": self.plan.num_rounds,
            "has_started": state.has_started,
            "has_ended": state.has_ended,
            "accepted": state.num_accepted,
            "max_staleness": state.max_staleness,
            "evaluated": None if last is None else last["round"],
            "scores": means,
            "chosen": state.best and state.best.round,
            "bytes_down": state.bytes_down,
            "bytes_up": state.bytes_up,
            "parties": parties,
        }

    # Who is there.

    def _look(self) -> None:
        """See who is present, and ask those who were not what they bring."""
        enrolled = self.roster()
        self.present = self.transport.members() & enrolled.keys()
        for name, standing in self.standings.items():
            if name not in self.present and standing.is_greeted:
                standing.is_greeted = False
                self._say("gone", party=name)
        for name in sorted(self.present):
            standing = self.standings.setdefault(name, Standing())
            is_aside = standing.aside_until > self.clock()
            if not standing.is_greeted and not is_aside and (name, "hello") not in self.asked:
                values = {"challenge": secrets.token_hex(16), "plan": self.store.rules.plan_digest}
                self._ask(Message("hello", self.run_name, name, values), {"challenge": values["challenge"]})

    def _is_ready(self, name: str) -> bool:
        standing = self.standings.get(name)
        return (
            name in self.state.members
            and name in self.present
            and standing is not None
            and standing.is_greeted
            and standing.aside_until <= self.clock()
        )

    def _ready(self, phase: Phase = "training") -> list[Member]:
        """Parties that can be asked, in the order of their places."""
        members = sorted(self.state.members.values(), key=lambda member: member.place)
        return [member for member in members if member.phase == phase and self._is_ready(member.name)]

    def _is_spent(self, name: str) -> bool:
        return self.state.members[name].is_spent

    def _are_all_spent(self) -> bool:
        """Whether nobody has budget left, of those who are here and of those who may come back."""
        enrolled = self.roster()
        known = [one for one in self.state.members.values() if one.phase == "training" and one.name in enrolled]
        return bool(known) and all(one.is_spent for one in known)

    def _gather(self) -> None:
        wanted = self.plan.num_clients if self.policy.start_with is None else self.policy.start_with
        if len(self._ready()) >= wanted:
            self._commit({"kind": "start"})
            self._say("started", parties=sorted(self.state.members))
        else:
            self._collect()

    def _is_gathering_again(self) -> bool:
        """Whether this server was restarted, and parties that know it get time to come back."""
        if self.clock() >= self._began + self.policy.return_seconds or self._has_gathered:
            return False
        known = [name for name, member in self.state.members.items() if member.phase == "training"]
        enrolled = self.roster()
        self._has_gathered = all(self._is_ready(name) for name in known if name in enrolled)
        return not self._has_gathered

    # A round that waits for its cohort.

    def _round(self, stop: threading.Event) -> None:
        is_going_on = self.state.is_open and self._is_waiting()
        if not is_going_on and not self.state.replies and not self._open():
            self._collect()
            return
        while not stop.is_set() and self._is_waiting():
            for name in self._missing():
                if self._is_ready(name) and (name, "train") not in self.asked:
                    self._offer(self.state.members[name], self.state.round)
            self._collect()
            self._look()
        if not stop.is_set() and (self.state.replies or all(map(self._is_spent, self.state.cohort))):
            self._step()

    def _missing(self) -> list[str]:
        """Who of the cohort has neither answered nor failed in this round."""
        return [name for name in self.state.cohort if name not in self.state.replies and name not in self.failed]

    def _is_waiting(self) -> bool:
        """Whether somebody of the cohort may still answer."""
        return any((name, "train") in self.asked or self._is_ready(name) for name in self._missing())

    def _open(self) -> bool:
        """Draw the cohort of a round among those who are there; drawn anew if nobody of it is left.

        Who has no budget left is drawn too and not asked, as in the simulator: a round may pass without an update. That
        does not happen while all who could make one are away.
        """
        ready, state = self._ready(), self.state
        if not ready or (all(one.is_spent for one in ready) and not self._are_all_spent()):
            return False
        attempt = state.attempt + 1 if state.is_open else 0
        key = keys.fold(self.plan.seed, "rounds")
        if attempt:
            key = keys.fold(key, "again", attempt)
        wanted = self.plan.schedule.clients_per_round(len(ready), self.plan.algorithm.communicates)
        places = cohort(key, state.round, len(ready), min(wanted, len(ready))).tolist()
        names = [ready[place].name for place in places]
        self.failed = set(filter(self._is_spent, names))
        self._commit({"kind": "open", "cohort": names, "attempt": attempt})
        return True

    # A run that does not wait.

    def _continue(self, in_flight: int) -> None:
        """Keep many parties at work, and step whenever enough of them have answered."""
        state = self.state
        working = [party for party, kind in self.asked if kind == "train"]
        while len(working) < in_flight:
            idle = [one for one in self._able() if one.name not in working and one.name not in state.replies]
            if not idle:
                break
            place = next_of(self.plan.seed, state.num_sent, len(idle))
            self._offer(idle[place], state.num_sent)
            state.num_sent += 1
            working.append(idle[place].name)
        self._collect()
        wanted = self.plan.schedule.clients_per_round(self.plan.num_clients, self.plan.algorithm.communicates)
        replies = self.state.replies
        has_enough = len(replies) >= wanted or all(one.name in replies for one in self._able())
        if has_enough if replies else self._are_all_spent():
            self._step()

    def _able(self) -> list[Member]:
        """Parties that can be asked to train."""
        return [one for one in self._ready() if not one.is_spent]

    def _step(self) -> None:
        names = step_order(self.state)
        try:
            self._commit({"kind": "step"})
        except Unfit as error:
            self._drop(error)
            return
        self._say("round", round=self.state.round, parties=names)

    def _drop(self, error: Unfit) -> None:
        """Go on without the updates that a step cannot take: those that cannot be taken alone, else all of them."""
        self._reload()
        names = list(self.state.replies)
        names = [name for name in names if not self.store.can_step(name)] or names
        self._commit({"kind": "drop", "parties": names})
        for name in names:
            self.failed.add(name)
            self._has_failed(name, "unfit", f"sent what the server cannot take ({error})")

    # What is asked.

    def _offer(self, member: Member, number: int) -> None:
        state, phase = self.state, member.phase
        exchange, model = exchange_of(self.plan, phase), self.plan.models[member.architecture]
        shared = state.shared
        if phase == "joining":
            assert state.best is not None
            shared = state.best.shared
        identity = torch.tensor(member.identity)
        offer = exchange.offer(model, shared, state.rows[member.name], torch.tensor(number), identity)
        version = number if phase == "joining" else state.round
        weights = self.plan.download.decode(offer.weights, model.dtype)
        form, size = self._expected(member, weights)
        repeated = {"round": number, "version": version, "base": member.base, "phase": phase}
        tested_base = None if state.tested is None else state.tested.bases.get(member.name)
        keep = [base for base in (member.best_base, tested_base) if base is not None]
        self._ask(
            Message("train", self.run_name, member.name, {**repeated, "keep": keep}, offer.weights),
            {**repeated, "size": member.size},
            limit=2 * size + SMALL_MESSAGE,
            layout=form,
            max_norm=self.policy.max_update * (1.0 + norm(weights)),
            bytes_down=num_bytes(offer.weights),
        )

    def _expected(self, member: Member, weights: Params) -> tuple[str, int]:
        """The layout of an update of these weights, and its bytes on the wire."""
        key = member.architecture, member.phase
        if key not in self._layouts:
            update = zeros_like(weights)
            encoded, _ = self.plan.upload.encode(update, 0, self.plan.upload.init_state(update))
            self._layouts[key] = layout(encoded), len(packed(Message("train", "", "", {}, encoded)))
        return self._layouts[key]

    def _ask_to_evaluate(self, member: Member, is_last: bool = False) -> None:
        state, model = self.state, self.plan.models[member.architecture]
        row, base, best = state.rows[member.name], member.base, state.best and state.best.round
        if member.phase == "joining":
            assert state.best is not None
            shared, number, best = state.best.shared, member.round, member.best_round
            if is_last:
                assert member.best_round is not None
                row, number, base = state.best.rows[member.name], member.best_round, member.best_base
        elif is_last:
            assert state.best is not None
            shared, number = state.best.shared, state.best.round
            if member.name in state.best.rows:  # else it came after the chosen round, and has what it has
                row, base = state.best.rows[member.name], member.best_base
        else:
            assert state.tested is not None
            shared, number = state.tested.shared, state.tested.round
            row, base = state.tested.rows[member.name], state.tested.bases[member.name]
        weights = exchange_of(self.plan, member.phase).publish(model, shared, row)
        is_judged = is_last and self._is_judging and member.phase == "training"
        repeated = {
            "round": number, "base": base, "phase": member.phase,
            "is_adapted": is_last and state.is_adapted is not False, "is_last": is_last and not is_judged,
        }  # fmt: skip
        message = Message("evaluate", self.run_name, member.name, {**repeated, "best": best}, weights)
        self._ask(message, repeated)

    def _ask(
        self,
        message: Message,
        repeated: Mapping[str, Any],
        *,
        limit: int = SMALL_MESSAGE,
        layout: str = "",
        max_norm: float = math.inf,
        bytes_down: int = 0,
    ) -> None:
        num_before = sum(party == message.party for party, _ in self.asked)  # a party does one thing after the other
        deadline = self.clock() + (1 + num_before) * self.policy.reply_seconds
        content = sealed(message, self.key)
        asked = Asked(message.party, message.kind, repeated, deadline, limit, layout, max_norm, bytes_down, content)
        self.asked[message.party, message.kind] = asked
        self.transport.post(message.party, message.kind, content)

    # What comes.

    def _collect(self) -> None:
        """Take in what has come, and give up what is overdue."""
        for arrival in self.transport.arrivals(SECONDS_BETWEEN_LOOKS):
            self._settle(arrival)
        now = self.clock()
        for asked in [asked for asked in self.asked.values() if asked.deadline <= now]:
            self._failed(asked, "silent", "has not answered in time")

    def _settle(self, arrival: Arrival) -> None:
        name = arrival.party
        asked = self.asked.get((name, arrival.kind))
        if arrival.content is None:
            if asked is not None and not asked.has_been_repeated and name in self.transport.members():
                asked.has_been_repeated = True  # a party that has answered already gives the same answer again
                self._refuse(name, "lost", arrival.fault or "cannot be reached")
                self.transport.post(name, asked.kind, asked.content)
            elif asked is not None:
                self._failed(asked, "lost", arrival.fault or "cannot be reached")
            return
        key = self.roster().get(name)
        try:
            message = self._verified(name, key, arrival.content, asked)
        except Exception as error:  # nothing that a party sends may end the server
            wrong = f"sent what cannot be checked ({first_line(error)})"
            refusal = error if isinstance(error, WireError) else WireError("form", wrong)
            # What answers something else leaves the question open: the answer may still come.
            if asked is None or refusal.reason in ("round", "late"):
                self._refuse(name, refusal.reason, str(refusal))
            else:
                self._failed(asked, refusal.reason, str(refusal))
            return
        assert asked is not None
        if message.kind == "refusal" and message.values.get("reason") == "budget" and asked.kind == "train":
            self._spent(asked, str(message.values.get("sentence")))
            return
        if message.kind == "refusal":
            given = message.values.get("reason")
            reason = str(given) if given in REFUSALS else "party"  # a party's own words would be counted without end
            self._failed(asked, reason, f"{message.values.get('sentence')!s:.300}")
            if reason == "version" and asked.kind in ("train", "evaluate"):
                self._rebase(self.state.members[name], message.values.get("held"))
            return
        del self.asked[name, asked.kind]
        try:
            self._take_in(name, message, arrival.content, asked)
        except Unfit as error:  # nor end it when it starts again
            self._reload()
            self._failed(asked, "unfit", f"sent what the server cannot take ({error})")

    def _take_in(self, name: str, message: Message, content: bytes, asked: Asked) -> None:
        if message.kind == "hello":
            self._greeted(name, message, content)
        elif message.kind == "train":
            self.standings[name].failures = 0
            if asked.values["phase"] == "training" and self.state.round >= self.plan.num_rounds:
                return  # the last step has been taken while it was at work
            self._commit(
                {"kind": "accept", "party": name, "round": asked.values["round"], "bytes_down": asked.bytes_down},
                content,
            )
            self._say("accepted", party=name, round=asked.values["round"], scores=message.values["scores"])
        else:
            self._scored(name, message, asked)

    def _verified(self, name: str, key: PublicKey | None, content: bytes, asked: Asked | None) -> Message:
        """A party's message, if there is nothing wrong with it; the cheap checks and the signature come first."""
        if key is None:
            raise WireError("stranger", "is not enrolled")
        if asked is None:  # not even read: there is no limit to how large it may be
            raise WireError("late", "answered what nobody asks any more")
        message = opened(content, key, asked.limit)
        if message.run != self.run_name or message.party != name:
            raise WireError("run", f"sent a message of {message.party!r:.80} in the run {message.run!r:.80}")
        if message.kind == "refusal" and message.values.get("of") == asked.kind:
            if message.values.get("round") not in (None, asked.values.get("round")):
                raise WireError("round", "refuses what is not asked")
            return message
        if message.kind != asked.kind:
            raise WireError("kind", f"answered with {message.kind!r:.80} what asked for {asked.kind!r}")
        for part, value in asked.values.items():
            found = message.values.get(part)
            if found != value or type(found) is not type(value):
                reason = part if part == "size" else "round"  # all else says which message it answers
                raise WireError(reason, f"answered with the {part} {found!s:.40} where {value} was asked")
        if message.kind == "hello":
            self._check_hello(message)
            return message
        member = self.state.members[name]
        splits = EVALUATED_SPLITS if message.kind == "evaluate" else ("validation",)
        examples = {split: member.examples[split] for split in splits}
        _check_scores(message, examples, self.plan.models[member.architecture].per_example_metric is not None)
        if message.kind == "train":
            self._check_update(message, asked)
        return message

    def _check_hello(self, message: Message) -> None:
        architecture, size, examples = (message.values.get(part) for part in ("architecture", "size", "examples"))
        is_known = isinstance(architecture, str) and architecture in self.plan.models
        are_counted = isinstance(examples, dict) and examples.keys() == set(EVALUATED_SPLITS)
        counts = [size, *examples.values()] if isinstance(examples, dict) else []
        is_possible = all(type(count) is int and 0 <= count < MAX_COUNT for count in counts) and size != 0
        if not is_known or not are_counted or not is_possible:
            raise WireError("hello", "says what it brings in a way that cannot be read")
        known = self.state.members.get(message.party)
        if known is not None and known.architecture != architecture:  # its row and its updates are of that size
            raise WireError("hello", f"says the size {architecture!r} and takes part with {known.architecture!r}")
        if self.plan.algorithm.needs_descriptors and not self._is_description(message.tensors, str(architecture)):
            raise WireError("hello", "does not describe itself as this method needs it")

    def _is_description(self, descriptor: Any, architecture: str) -> bool:
        """Whether the method makes a party's weights from how it describes itself."""
        if not isinstance(descriptor, torch.Tensor) or (descriptor.dim(), descriptor.dtype) != (1, self.plan.dtype):
            return False
        try:
            row = self.plan.algorithm.init_row(torch.tensor(0), descriptor)
            self.plan.exchange.sent(self.plan.models[architecture], self.state.shared, row)
        except RuntimeError:  # of another length
            return False
        return is_finite(descriptor)

    def _check_update(self, message: Message, asked: Asked) -> None:
        if layout(message.tensors) != asked.layout:
            raise WireError("layout", "sent an update of other shapes or types than the network has")
        if not is_finite(message.tensors):
            raise WireError("finite", "sent an update that is not finite")
        model = self.plan.models[self.state.members[message.party].architecture]
        update = self.plan.upload.decode(message.tensors, model.dtype)
        if not (length := norm(update)) <= asked.max_norm:
            raise WireError("norm", f"sent an update of norm {length:.3g} where {asked.max_norm:.3g} is the most")
        stale = self.state.round - asked.values["version"]
        if self.policy.max_staleness is not None and stale > self.policy.max_staleness:
            raise WireError("stale", f"answered weights that are {stale} steps old")

    def _greeted(self, name: str, message: Message, content: bytes) -> None:
        known = self.state.members.get(name)
        brought = {part: message.values[part] for part in ("architecture", "size", "examples")}
        is_new = known is None or brought != {part: getattr(known, part) for part in brought}
        if known is None or is_new or known.is_spent:
            table = {"kind": "join", "party": name, **brought}
            self._commit(table, content if self.plan.algorithm.needs_descriptors else b"")
        if is_new:
            self._say("joined", party=name, **brought)
        else:
            self._say("back", party=name)
        self.standings[name].is_greeted = True

    def _scored(self, name: str, message: Message, asked: Asked) -> None:
        scores, member = message.values["scores"], self.state.members[name]
        if not self.state.has_ended or (self._is_judging and member.phase == "training"):
            self.scores[name] = scores
        elif member.phase == "training" or member.has_joined:
            self._commit({"kind": "tell", "party": name, "scores": scores})
        else:
            self._commit({"kind": "try", "party": name, "scores": scores})

    def _rebase(self, member: Member, held: Any) -> None:
        """A party that lost what it kept goes on from its newest version, or begins again."""
        values = held if isinstance(held, list) else []
        versions = [value for value in values if type(value) is int and 0 <= value < MAX_COUNT]
        base = max(versions, default=None)  # it may be of a round to come, if this server was brought back from a copy
        tested = self.state.tested
        older = {
            "best_base": member.best_base,
            "tested_base": None if tested is None else tested.bases.get(member.name),
        }
        bases = {name: value if value in (None, *versions) else base for name, value in older.items()}
        self._commit({"kind": "rebase", "party": member.name, "base": base, **bases})
        self._say("rebased", party=member.name, base=base)

    def _failed(self, asked: Asked, reason: str, sentence: str) -> None:
        """A question that will not be answered; who fails too often is set aside for a while."""
        self.asked.pop((asked.party, asked.kind), None)
        if asked.kind == "train":
            self.failed.add(asked.party)
        self._has_failed(asked.party, reason, sentence)

    def _has_failed(self, name: str, reason: str, sentence: str) -> None:
        self._refuse(name, reason, sentence)
        if name not in self.transport.members():  # it has gone, which is no failing: it may come again at once
            return
        standing = self.standings.setdefault(name, Standing())
        standing.failures += 1
        if standing.failures >= self.policy.patience:
            seconds = self.policy.aside_seconds * 2 ** min(standing.times_aside, 6)
            standing.aside_until = self.clock() + seconds
            standing.times_aside += 1
            standing.failures = self.policy.patience - 1  # back, it has one try
            standing.is_greeted = False
            self._say("set aside", party=name, seconds=seconds)

    def _spent(self, asked: Asked, sentence: str) -> None:
        """A party has no budget left: it is asked to train no more until it comes again, and has not failed."""
        del self.asked[asked.party, asked.kind]
        self.failed.add(asked.party)
        self._commit({"kind": "spend", "party": asked.party})
        self._say("spent", party=asked.party, sentence=sentence[:500])

    def _refuse(self, name: str, reason: str, sentence: str) -> None:
        self.standings.setdefault(name, Standing()).refused[reason] += 1
        self._say("refused", party=name, reason=reason, sentence=f"{name} {sentence}.")

    # How good the models are.

    def _is_evaluation_due(self) -> bool:
        """Whether models are to be tested; what falls due during an evaluation that goes on waits for its end."""
        state, schedule = self.state, self.plan.schedule
        if state.tested is not None or state.evaluated == state.round:
            return False
        size = schedule.clients_per_round(self.plan.num_clients, self.plan.algorithm.communicates)
        return state.evaluated < 0 or schedule.is_evaluated(state.evaluated * size, state.round * size)

    def _is_waiting_for_scores(self) -> bool:
        """Whether training stands still while models are tested: with cohorts, and when it has come to its end."""
        return self.policy.in_flight is None or self.state.round >= self.plan.num_rounds

    def _begin_evaluation(self) -> None:
        reachable = self.transport.members()  # somebody may have gone since the last look
        ready = [member for member in self._ready() if member.name in reachable]
        if not ready:
            self._collect()
            return
        self._commit({"kind": "test"})
        self.scores, self._to_test = {}, [member.name for member in ready]
        self._test_more()

    def _test_more(self) -> None:
        while self._to_test and self._has_room("evaluate"):
            if self._is_ready(name := self._to_test.pop(0)):
                self._ask_to_evaluate(self.state.members[name], is_last=self.state.has_ended)

    def _has_room(self, *kinds: str) -> bool:
        """Whether one more message of such kinds can be in memory."""
        return sum(kind in kinds for _, kind in self.asked) < TESTED_AT_ONCE

    def _end_evaluation(self) -> None:
        """Choose, if nobody is waited for any more; begin anew if nobody answered, or the server was started again."""
        tested, scores = self.state.tested, self.scores
        if tested is not None:
            self._test_more()
        if tested is None or any(kind == "evaluate" for _, kind in self.asked):
            return
        if not scores:
            self._begin_evaluation()
            return
        self._commit({"kind": "score", "round": tested.round, "results": scores, "time": round(time.time(), 3)})
        self.scores = {}
        means = {split: result.score for split, result in split_results(scores).items() if result.count.sum() > 0}
        self._say("evaluated", round=tested.round, parties=len(scores), **means)

    def _serve_the_ended(self) -> bool:
        """Tell parties which round was chosen, and let others join; whether anybody is waited for."""
        if self.state.is_adapted is None and (ready := self._ready("training")):
            self._judge_adaptation(ready)
            return True
        for member in self._ready("training"):
            is_asked = member.is_told or (member.name, "evaluate") in self.asked
            if not is_asked and self._has_room("evaluate"):
                self._ask_to_evaluate(member, is_last=True)
        for member in self._ready("joining"):
            is_asked = member.is_told or any(party == member.name for party, _ in self.asked)
            if is_asked or not self._has_room("train", "evaluate"):
                continue
            if member.has_joined:
                self._ask_to_evaluate(member, is_last=True)
            elif member.evaluated < member.round or member.evaluated < 0:
                self._ask_to_evaluate(member)
            else:
                self._offer(member, member.round)
        self._collect()
        return any(self._is_ready(name) and not one.is_told for name, one in self.state.members.items())

    def _judge_adaptation(self, ready: Sequence[Member]) -> None:
        """Have parties test their models of the chosen round after adaptation, and decide once nobody is waited for."""
        if not self._is_judging:
            self.scores, self._to_test, self._is_judging = {}, [member.name for member in ready], True
        self._test_more()
        self._collect()
        if self._to_test or any(kind == "evaluate" for _, kind in self.asked):
            return
        if self.scores:
            self._commit({"kind": "judge", "results": self.scores})
            self._say("judged", is_adapted=self.state.is_adapted)
        self.scores, self._is_judging = {}, False

    # What is kept.

    def _commit(self, table: Mapping[str, Any], message: bytes = b"") -> None:
        self.store.commit(self.state, table, message)

    def _reload(self) -> None:
        """Go back to what is on the disk, after a record that may have moved the state in part."""
        before, self.state = self.state, self.store.load()
        self.state.num_sent = max(self.state.num_sent, before.num_sent)  # who is at work has a number already

    def _checkpoint(self, is_wanted: bool = False) -> None:
        is_due = self.clock() - self._saved >= self.policy.checkpoint_seconds
        if (is_due or is_wanted) and not self.state.replies and not self.state.is_open:
            self.store.save(self.state)
            self._saved = self.clock()

    def _say(self, event: str, **details: Any) -> None:
        self.log({"event": event, **details})


def _check_scores(message: Message, examples: Mapping[str, int], has_metric: bool) -> None:
    """Refuse what no examples can give: the round is chosen by these numbers, and they are kept for good.

    Args:
        message: The party's.
        examples: How many the party said that it has, by split. Its scores are of all of them, or of none where it
            keeps them to itself: else it could make its own count for more than those of all others.
        has_metric: Whether examples are right or wrong.
    """
    scores = message.values.get("scores")
    if not isinstance(scores, dict) or scores.keys() != examples.keys():
        raise WireError("scores", "sent scores that cannot be read")
    for split, values in scores.items():
        if not isinstance(values, list) or [type(value) for value in values] != [
            float, float if has_metric else type(None), int,
        ]:  # fmt: skip
            raise WireError("scores", "sent scores that cannot be read")
        loss, metric, count = values
        if count not in (0, examples[split]):
            raise WireError("scores", f"sent scores of {count!s:.20} examples and has {examples[split]}")
        if not (0 <= loss <= (MAX_LOSS if count else 0) and 0 <= (metric or 0) <= count):
            raise WireError("scores", f"sent scores that {count} examples cannot have")
