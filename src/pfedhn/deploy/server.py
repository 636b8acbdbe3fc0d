"""The server of a federation: whom it asks, when it steps, how a round is chosen. Any transport carries its messages.

Every decision that moves the server's memories is in the journal before anybody hears of it (`deploy.state`), so that a
server that is killed at any moment continues as if nothing had happened. Who is present and who has failed is not
stored (`deploy.contacts`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedhn import keys
from pfedhn.data.batches import cohort
from pfedhn.deploy import checks
from pfedhn.deploy.across import Across, consents_of
from pfedhn.deploy.contacts import Arrival, Contacts, Transport
from pfedhn.deploy.plan import Phase
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.questions import Question, Questions
from pfedhn.deploy.record import Records
from pfedhn.deploy.signing import PrivateKey, PublicKey
from pfedhn.deploy.state import Member, Rules, ServerState, step_order
from pfedhn.deploy.status import mean_scores, status_of
from pfedhn.deploy.store import Store, Unfit
from pfedhn.deploy.watch import Watch
from pfedhn.deploy.wire import REFUSALS, Message, WireError, head_of
from pfedhn.engine.in_flight import next_of
from pfedhn.engine.plan import Plan
from pfedhn.errors import first_line
from pfedhn.params import Params

TESTED_AT_ONCE = 64  # parties: the message to each, with its weights, is in memory until it is answered


class Server:
    """The server of a run.

    Args:
        plan: Of the run.
        run: The run's name, in every message.
        folder: For checkpoints and journals.
        key: The server's private key, which signs its messages.
        roster: Gives the public keys of enrolled parties by name; parties may come and go while the server runs.
        transport: Carries messages.
        policy: How the server deals with parties.
        log: Called with every event.
        clock: Seconds, from any beginning.
        settled: What the parties' statistics gave before training (`deploy.survey`); every greeting has it.
        records: What was asked of each party and what it sent, to show later.
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
        settled: Mapping[str, Any] | None = None,
        records: Records | None = None,
    ) -> None:
        self.plan, self.run_name, self.policy, self.log, self.clock = plan, run, policy or Policy(), log, clock
        self.questions = Questions(plan, run, key, self.policy, settled, records)
        self.watch = Watch(self.policy.max_update, self._say)
        self.contacts = Contacts(roster, transport, self.policy, log, clock, records)
        self.store = Store(folder, Rules(plan))
        self.state: ServerState = self.store.load()
        self.across: Across | None = None  # compares the parties' models after training, if it is there
        self.scores: dict[str, Any] = {}  # of the evaluation that goes on
        self._to_test: list[str] = []  # parties that have not been asked yet in that evaluation
        self._is_judging = False  # whether that evaluation decides on adaptation
        self._saved = self._began = clock()
        self._has_gathered = False
        if self.state.num_accepted:
            self._say("recovered", round=self.state.round, accepted=self.state.num_accepted)

    def run(self, stop: threading.Event | None = None, is_lingering: bool = False) -> None:
        """Run to the end, or until `stop` is set.

        Args:
            stop: Ends the server, whose decisions are on the disk.
            is_lingering: Whether it stays when training has ended, for parties that join then.
        """
        stop = stop or threading.Event()
        while not stop.is_set():
            self.contacts.look(self.questions.hello)
            is_done = self.state.round >= self.plan.num_rounds
            if self.state.has_ended:
                if self.state.is_adapted is None and self._is_gathering_again():
                    self._collect()
                elif not self._hand_out_models() and not self._compare() and not is_lingering:
                    break
            elif not self.state.has_started:
                self._gather()
            elif self._is_gathering_again():
                self._collect()
            elif self._is_evaluation_due():
                self._begin_evaluation()
            elif self.state.tested is not None and (self.policy.in_flight is None or is_done):
                self._collect()
                self._end_evaluation()
            elif is_done:
                self._commit({"kind": "end"})
                self._say("ended", round=self.state.round, chosen=self.state.best and self.state.best.round)
            elif self.policy.in_flight is None:
                self._round(stop)
            else:
                self._keep_training(self.policy.in_flight)
                self._end_evaluation()
            self._checkpoint()
        self._checkpoint(is_wanted=True)

    def status(self) -> dict[str, Any]:
        """The progress of the run and the state of its parties, as JSON can hold it."""
        return status_of(self.run_name, self.plan, self.state, self.contacts)

    # Who takes part.

    def _is_ready(self, name: str) -> bool:
        return name in self.state.members and self.contacts.is_ready(name)

    def _ready(self, phase: Phase = "training") -> list[Member]:
        """The parties of a phase that can be asked now, in the order in which cohorts are drawn."""
        members = sorted(self.state.members.values(), key=lambda member: member.place)
        return [member for member in members if member.phase == phase and self._is_ready(member.name)]

    def _is_spent(self, name: str) -> bool:
        return self.state.members[name].is_spent

    def _are_all_spent(self) -> bool:
        """Whether no enrolled party has privacy budget left, present or not."""
        enrolled = self.contacts.roster()
        known = [one for one in self.state.members.values() if one.phase == "training" and one.name in enrolled]
        return bool(known) and all(one.is_spent for one in known)

    def _training(self) -> list[str]:
        """The parties that take part in training, present or not."""
        return [name for name, member in self.state.members.items() if member.phase == "training"]

    def _gather(self) -> None:
        wanted = self.plan.num_clients if self.policy.start_with is None else self.policy.start_with
        if len(self._ready()) >= wanted:
            self._commit({"kind": "start"})
            self._say("started", parties=sorted(self.state.members))
        else:
            self._collect()

    def _is_gathering_again(self) -> bool:
        """Whether a restarted server still waits for the parties that it knows."""
        if self.clock() >= self._began + self.policy.return_seconds or self._has_gathered:
            return False
        known = self._training()
        enrolled = self.contacts.roster()
        self._has_gathered = all(self._is_ready(name) for name in known if name in enrolled)
        return not self._has_gathered

    # A round with a cohort.

    def _round(self, stop: threading.Event) -> None:
        """Draw a cohort, send it the weights, collect its updates, step. A round that was interrupted continues."""
        if not (self.state.is_open and self._is_waiting()) and not self.state.replies and not self._open():
            self._collect()
            return
        while not stop.is_set() and self._is_waiting():
            for name in self._missing():
                if self._is_ready(name) and not self.contacts.is_asked(name, "train"):
                    self._offer(self.state.members[name], self.state.round)
            self._collect()
            self.contacts.look(self.questions.hello)
        if not stop.is_set() and (self.state.replies or all(map(self._is_spent, self.state.cohort))):
            self._step()

    def _missing(self) -> list[str]:
        """The members of the cohort that have neither answered nor failed in this round."""
        done = {*self.state.replies, *self.contacts.failed}
        return [name for name in self.state.cohort if name not in done]

    def _is_waiting(self) -> bool:
        """Whether a member of the cohort may still answer."""
        return any(self.contacts.is_asked(name, "train") or self._is_ready(name) for name in self._missing())

    def _open(self) -> bool:
        """Draw the cohort of a round among the parties that are present; False if none can be drawn.

        Parties without privacy budget are drawn but not asked, as in the simulator, so a round may pass without an
        update. If every party that is present has spent its budget, the server waits for one that has not.
        """
        ready, state = self._ready(), self.state
        if not ready or (all(one.is_spent for one in ready) and not self._are_all_spent()):
            return False
        attempt = state.attempt + 1 if state.is_open else 0
        key = keys.fold(self.plan.seed, "rounds")
        if attempt:
            key = keys.fold(key, "again", attempt)
        wanted = self.plan.schedule.clients_per_round(len(ready), self.plan.algorithm.needs.communication)
        places = cohort(key, state.round, len(ready), min(wanted, len(ready))).tolist()
        names = [ready[place].name for place in places]
        self.contacts.failed = set(filter(self._is_spent, names))
        self._commit({"kind": "open", "cohort": names, "attempt": attempt})
        return True

    # A run without cohorts.

    def _keep_training(self, in_flight: int) -> None:
        """Keep `in_flight` parties training, and step as soon as a cohort's number of updates is there."""
        state = self.state
        working = [party for party, kind in self.contacts.asked if kind == "train"]
        while len(working) < in_flight:
            idle = [one for one in self._trainable() if one.name not in working and one.name not in state.replies]
            if not idle:
                break
            place = next_of(self.plan.seed, state.num_sent, len(idle))
            self._offer(idle[place], state.num_sent)
            state.num_sent += 1
            working.append(idle[place].name)
        self._collect()
        wanted = self.plan.clients_per_round
        replies = self.state.replies
        has_enough = len(replies) >= wanted or all(one.name in replies for one in self._trainable())
        if has_enough if replies else self._are_all_spent():
            self._step()

    def _trainable(self) -> list[Member]:
        """The parties that can be asked to train."""
        return [one for one in self._ready() if not one.is_spent]

    def _step(self) -> None:
        names = step_order(self.state)
        try:
            self._commit({"kind": "step"})
        except Unfit as error:
            self._drop(error)
            return
        self._say("round", round=self.state.round, parties=names)
        if names:
            self.watch.stepped(self.state.robust.get("parts", {}))

    def _drop(self, error: Unfit) -> None:
        """Continue without the updates that make a step fail by themselves, or without any if none does."""
        self._reload()
        names = list(self.state.replies)
        names = [name for name in names if not self.store.can_step(name)] or names
        self._commit({"kind": "drop", "parties": names})
        for name in names:
            self.contacts.failed.add(name)
            self.contacts.count_failure(name, "unfit", f"sent what the server cannot take ({error})")

    # Questions and answers.

    def _offer(self, member: Member, number: int) -> None:
        self.contacts.ask(self.questions.train(self.state, member, number))

    def _ask_to_evaluate(self, member: Member, is_last: bool = False) -> None:
        self.contacts.ask(self.questions.evaluate(self.state, member, is_last, self._is_judging))

    def _collect(self) -> None:
        for arrival in self.contacts.arrivals():
            self._settle(arrival)

    def _settle(self, arrival: Arrival) -> None:
        """Check an answer and let it move the state."""
        assert arrival.content is not None
        name, contacts = arrival.party, self.contacts
        question = contacts.asked.get((name, arrival.kind))
        try:
            key = contacts.roster().get(name)
            message = checks.verified(arrival.content, name, self.run_name, key, question)
            assert question is not None
            contacts.received(question, arrival.content, head_of(message), message.kind)
            checks.check_answer(message, question, self.plan, self.state, self.policy.max_staleness)
        except Exception as error:  # nothing that a party sends may end the server
            if not isinstance(error, WireError):
                error = WireError("form", f"sent what cannot be checked ({first_line(error)})")
            # An answer to something else leaves the question open: the right one may still come.
            if question is None or error.reason in ("round", "late"):
                contacts.refuse(name, error.reason, str(error))
            else:
                contacts.give_up(question, error.reason, str(error))
            if isinstance(error, checks.TooLarge):
                self.watch.refused(name, error.ratio, self._training())
            return
        if message.kind == "refusal":
            self._take_refusal(question, message)
            return
        del contacts.asked[name, question.kind]
        try:
            self._take(question, message, arrival.content)
        except Unfit as error:  # a record that cannot be applied is not written either
            self._reload()
            contacts.give_up(question, "unfit", f"sent what the server cannot take ({error})")

    def _take_refusal(self, question: Question, message: Message) -> None:
        """A party says why it does not answer."""
        given, sentence = message.values.get("reason"), str(message.values.get("sentence"))
        if question.kind == "compare" and self.across is not None:
            del self.contacts.asked[question.party, question.kind]
            self.contacts.refuse(question.party, "consent" if given == "consent" else "party", f"{sentence:.300}")
            self.across.refused(question.party)
            return
        if given == "budget" and question.kind == "train":
            # It is asked to train no more until it comes again; that is no failure.
            del self.contacts.asked[question.party, question.kind]
            self.contacts.failed.add(question.party)
            self._commit({"kind": "spend", "party": question.party})
            self._say("spent", party=question.party, sentence=sentence[:500])
            return
        reason = str(given) if given in REFUSALS else "party"  # a party's own words would be counted without end
        self.contacts.give_up(question, reason, f"{sentence:.300}")
        if reason == "version" and question.kind in ("train", "evaluate"):
            self._rebase(self.state.members[question.party], message.values.get("held"))

    def _take(self, question: Question, message: Message, content: bytes) -> None:
        name = question.party
        if message.kind == "hello":
            self._take_hello(name, message, content)
        elif message.kind == "evaluate":
            self._take_scores(name, message)
        elif message.kind == "compare":
            if self.across is not None:
                self.across.take(question, message.values["scores"])
        else:
            self.contacts.standings[name].failures = 0
            if question.values["phase"] == "training" and self.state.round >= self.plan.num_rounds:
                return  # the last step was taken while the party was training
            number = question.values["round"]
            record = {"kind": "accept", "party": name, "round": number, "bytes_down": question.bytes_down}
            self._commit(record, content)
            self._say("accepted", party=name, round=number, scores=message.values["scores"])
            self.watch.accepted(name, self._decoded(name, message))

    def _decoded(self, name: str, message: Message) -> Params:
        """An update that was checked, without its extras."""
        model = self.plan.models[self.state.members[name].architecture]
        update = self.plan.upload.decode(message.tensors, model.dtype)
        return {part: value for part, value in update.items() if part not in self.plan.extras[model.name].up}

    def _take_hello(self, name: str, message: Message, content: bytes) -> None:
        known = self.state.members.get(name)
        brought = {part: message.values[part] for part in ("architecture", "size", "examples")}
        is_new = known is None or brought != {part: getattr(known, part) for part in brought}
        if known is None or is_new or known.is_spent:
            table = {"kind": "join", "party": name, **brought}
            self._commit(table, content if self.plan.algorithm.needs.descriptors else b"")
        self.contacts.consents[name] = consents_of(message.values)
        self._say("joined" if is_new else "back", party=name, **(brought if is_new else {}))
        self.contacts.standings[name].is_greeted = True

    def _take_scores(self, name: str, message: Message) -> None:
        scores, member = message.values["scores"], self.state.members[name]
        if not self.state.has_ended or (self._is_judging and member.phase == "training"):
            self.scores[name] = scores
        elif member.phase == "training" or member.has_joined:
            self._commit({"kind": "tell", "party": name, "scores": scores})
        else:
            self._commit({"kind": "try", "party": name, "scores": scores})

    def _rebase(self, member: Member, held: Any) -> None:
        """Let a party that lost its private state continue from its newest version, or begin again."""
        values = held if isinstance(held, list) else []
        versions = [value for value in values if type(value) is int and 0 <= value < checks.MAX_COUNT]
        base = max(versions, default=None)  # may be newer than this server, if that was restored from a copy
        tested = self.state.tested
        older = {"best_base": member.best_base, "tested_base": tested and tested.bases.get(member.name)}
        bases = {name: value if value in (None, *versions) else base for name, value in older.items()}
        self._commit({"kind": "rebase", "party": member.name, "base": base, **bases})
        self._say("rebased", party=member.name, base=base)

    # Evaluation and the choice of a round.

    def _is_evaluation_due(self) -> bool:
        """Whether models must be tested now; at most one evaluation runs at a time."""
        state, schedule = self.state, self.plan.schedule
        if state.tested is not None or state.evaluated == state.round:
            return False
        size = self.plan.clients_per_round
        return state.evaluated < 0 or schedule.is_evaluated(state.evaluated * size, state.round * size)

    def _begin_evaluation(self) -> None:
        reachable = self.contacts.transport.members()  # a party may have left since the last look
        ready = [member for member in self._ready() if member.name in reachable]
        if not ready:
            self._collect()
            return
        self._commit({"kind": "test"})
        self.scores, self._to_test = {}, [member.name for member in ready]
        self._test_more()

    def _test_more(self) -> None:
        while self._to_test and self.contacts.num_asked("evaluate") < TESTED_AT_ONCE:
            if self._is_ready(name := self._to_test.pop(0)):
                self._ask_to_evaluate(self.state.members[name], is_last=self.state.has_ended)

    def _end_evaluation(self) -> None:
        """Write the scores once all have arrived; start again if there are none, as after a restart."""
        tested, scores = self.state.tested, self.scores
        if tested is not None:
            self._test_more()
        if tested is None or self.contacts.num_asked("evaluate"):
            return
        if not scores:
            self._begin_evaluation()
            return
        self._commit({"kind": "score", "round": tested.round, "results": scores, "time": round(time.time(), 3)})
        self.scores = {}
        self._say("evaluated", round=tested.round, parties=len(scores), **mean_scores(scores))
        self.watch.scored(self.state.history)

    def _hand_out_models(self) -> bool:
        """Give parties their models of the chosen round, and let others join; False once every party has its model."""
        if self.state.is_adapted is None and (ready := self._ready("training")):
            self._judge_adaptation(ready)
            return True
        for member in self._ready("training"):
            is_asked = member.is_told or self.contacts.is_asked(member.name, "evaluate")
            if not is_asked and self.contacts.num_asked("evaluate") < TESTED_AT_ONCE:
                self._ask_to_evaluate(member, is_last=True)
        for member in self._ready("joining"):
            is_asked = member.is_told or any(party == member.name for party, _ in self.contacts.asked)
            if is_asked or self.contacts.num_asked("train", "evaluate") >= TESTED_AT_ONCE:
                continue
            if member.has_joined:
                self._ask_to_evaluate(member, is_last=True)
            elif member.evaluated < member.round or member.evaluated < 0:
                self._ask_to_evaluate(member)
            else:
                self._offer(member, member.round)
        self._collect()
        return any(self._is_ready(name) and not one.is_told for name, one in self.state.members.items())

    def _compare(self) -> bool:
        """Have parties test each other's models; False if nobody wants that."""
        if self.across is None or not self.across.is_wanted():
            return False
        if self._is_gathering_again():
            self._collect()
        else:
            self.across.step(self.state)
        return True

    def _judge_adaptation(self, ready: Sequence[Member]) -> None:
        """Have parties test their models of the chosen round after adaptation, and decide once all have answered."""
        if not self._is_judging:
            self.scores, self._to_test, self._is_judging = {}, [member.name for member in ready], True
        self._test_more()
        self._collect()
        if self._to_test or self.contacts.num_asked("evaluate"):
            return
        if self.scores:
            self._commit({"kind": "judge", "results": self.scores})
            self._say("judged", is_adapted=self.state.is_adapted)
        self.scores, self._is_judging = {}, False

    # Storage.

    def _commit(self, table: Mapping[str, Any], message: bytes = b"") -> None:
        self.store.commit(self.state, table, message)

    def _reload(self) -> None:
        """Load the state from the disk, after a record that failed midway."""
        before, self.state = self.state, self.store.load()
        self.state.num_sent = max(self.state.num_sent, before.num_sent)  # numbers of messages on their way are taken

    def _checkpoint(self, is_wanted: bool = False) -> None:
        is_due = self.clock() - self._saved >= self.policy.checkpoint_seconds
        if (is_due or is_wanted) and not self.state.replies and not self.state.is_open:
            self.store.save(self.state)
            self._saved = self.clock()

    def _say(self, event: str, **details: Any) -> None:
        self.log({"event": event, **details})
