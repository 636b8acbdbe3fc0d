"""The state of a server as a value, and the rules by which records change it.

The rules draw no random numbers and ask nobody: the same records always give the same state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.deploy.plan import Phase, exchange_of, plan_digest
from pfedhn.deploy.wire import Message, from_envelope, unpacked
from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.plan import Plan
from pfedhn.engine.robust import Past
from pfedhn.engine.round import Reply, Returned
from pfedhn.engine.state import EVALUATED_SPLITS, Schedule
from pfedhn.params import copy, num_bytes, stack, take
from pfedhn.storage.schema import Scores, is_worse


@dataclass
class Member:
    """What the server knows of a party, besides its row."""

    name: str
    architecture: str
    size: int  # training examples
    examples: dict[str, int]  # of the splits that its models are tested on
    place: int  # in the order of the cohorts' draws
    phase: Phase = "training"
    base: int | None = None  # the last of its rounds that was accepted; what the party kept then is its version
    best_base: int | None = None  # that of the chosen round
    is_told: bool = False  # that the run has ended, and which round was chosen
    is_spent: bool = False  # its privacy budget, when it last came: it trains no more, and is tested and told as ever
    # Of a party that joins when training has ended:
    round: int = 0
    evaluated: int = -1
    best_round: int | None = None
    best_score: float | None = None
    has_joined: bool = False

    @property
    def identity(self) -> int:
        return keys.hash_text(self.name)


@dataclass
class Chosen:
    """An evaluation, and the server's memories of its round: the best one so far, or one whose scores are to come."""

    round: int
    shared: Any
    rows: dict[str, Any]
    bases: dict[str, int | None]  # each party's version that was tested
    score: float = float("-inf")
    results: dict[str, Any] = field(default_factory=dict)  # scores by party, of one that was away its last known


@dataclass
class ServerState:
    """The state of a federation."""

    shared: Any
    rows: dict[str, Any] = field(default_factory=dict)  # the server's memory of each party, by its name
    members: dict[str, Member] = field(default_factory=dict)
    round: int = 0  # steps that the server has taken
    num_sent: int = 0  # numbers of messages that were given away, in a run that does not wait
    cohort: list[str] = field(default_factory=list)  # of the round that is open
    attempt: int = 0  # how often that round was drawn anew, because nobody of its cohort answered
    is_open: bool = False
    has_started: bool = False
    has_ended: bool = False
    replies: dict[str, Reply] = field(default_factory=dict)  # accepted, and not in a step yet
    evaluated: int = -1  # the last round that was
    tested: Chosen | None = None  # whose models are being tested, while training may go on
    best: Chosen | None = None
    is_adapted: bool | None = None  # whether parties adapt their models of it before use; None until that is decided
    final: dict[str, Any] | None = None  # scores by party of the chosen round, as its model is used
    history: list[dict[str, Any]] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    num_accepted: int = 0
    max_staleness: int = 0
    robust: Past = field(default_factory=dict)  # what a defense against hostile updates remembers


def split_results(results: Mapping[str, Any]) -> dict[str, SplitResult]:
    """The scores that parties sent, in the order of their names."""
    names = sorted(results)

    def column(split: str, place: int) -> Tensor:
        return torch.tensor([results[name][split][place] for name in names], dtype=torch.float64)

    found = {}
    for split in EVALUATED_SPLITS:
        has_metric = all(results[name][split][1] is not None for name in names)
        found[split] = SplitResult(column(split, 0), column(split, 1) if has_metric else None, column(split, 2))
    return found


def score_of(results: Mapping[str, Any], schedule: Schedule) -> float | None:
    """What a round is chosen by; None if nobody has validation examples."""
    validation = split_results(results)["validation"]
    return schedule.score(validation) if int(validation.count.sum()) else None


def _is_better(results: Mapping[str, Any], best: Mapping[str, Any], schedule: Schedule) -> bool:
    """Whether an evaluation beats the best one, judged by the parties whose validation scores are known of both.

    Without such parties it does, unless nobody can judge it and somebody could judge the best one.
    """
    if score_of(results, schedule) is None:
        return score_of(best, schedule) is None
    new, old = _of_both(results, best)
    return not new or _validation(new).score_by(schedule.select) > _validation(old).score_by(schedule.select)


def _of_both(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two evaluations, of the parties alone that have validation scores in both."""
    names = [name for name in one if name in other and one[name]["validation"][2] and other[name]["validation"][2]]
    return {name: one[name] for name in names}, {name: other[name] for name in names}


def _validation(results: Mapping[str, Any]) -> Scores:
    return Scores.of(split_results(results)["validation"], per_client=False)


class Rules:
    """How a record moves the state. Each function is named after the kind of its record."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.plan_digest = plan, plan_digest(plan)

    def initial(self) -> ServerState:
        plan = self.plan
        return ServerState(
            copy(plan.exchange.init_shared(plan.models, plan.initial_models(), keys.fold(plan.seed, "shared")))
        )

    def apply(self, state: ServerState, table: Mapping[str, Any], message: bytes = b"") -> None:
        getattr(self, f"_{table['kind']}")(state, table, message)

    def _join(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A party comes for the first time, or comes again with other data, or perhaps with a new budget."""
        name = table["party"]
        known = state.members.get(name)
        if known is not None:
            known.size, known.examples, known.is_spent = table["size"], table["examples"], False
            return
        descriptor = _opened(message).tensors if message else None
        phase: Phase = "joining" if state.has_ended else "training"
        member = Member(name, table["architecture"], table["size"], table["examples"], len(state.members), phase)
        state.members[name] = member
        state.rows[name] = self._first_row(state, member, descriptor)

    def _first_row(self, state: ServerState, member: Member, descriptor: Tensor | None) -> Any:
        known = state.best.rows if state.has_ended and state.best is not None else state.rows
        trained = [row for name, row in known.items() if state.members[name].phase == "training"]
        if state.round == 0 or not trained:
            key = torch.as_tensor(keys.fold(self.plan.seed, "row", member.identity))
            return self.plan.first_row(state.shared, key, descriptor)
        shared = state.best.shared if state.has_ended and state.best is not None else state.shared
        return self.plan.joining_row(shared, stack(trained), descriptor)

    def _start(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """Those who are there stand in the order of their names, as in a simulation of the same parties."""
        for place, name in enumerate(sorted(state.members)):
            state.members[name].place = place
        state.has_started = True

    def _open(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A round begins, or its cohort is drawn anew."""
        state.cohort, state.attempt, state.is_open = list(table["cohort"]), table["attempt"], True

    def _accept(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """An update that passed every check."""
        member, answer = state.members[table["party"]], _opened(message)
        size, number, version = (torch.tensor(answer.values[name]) for name in ("size", "round", "version"))
        reply = Reply(answer.tensors, size, {"is_finite": torch.tensor(True)}, number, version)
        member.base = table["round"]
        state.num_accepted += 1
        state.bytes_down += table["bytes_down"]
        state.bytes_up += num_bytes(reply.update)
        if member.phase == "joining":
            self._move(state, member, reply)
            return
        state.num_sent = max(state.num_sent, table["round"] + 1)
        state.max_staleness = max(state.max_staleness, state.round - int(reply.version))
        state.replies[member.name] = reply

    def _move(self, state: ServerState, member: Member, reply: Reply) -> None:
        """One round of a party that joins: the server's memory is frozen, and its row alone moves."""
        assert state.best is not None
        returned = Returned(self.plan.models[member.architecture], stack([state.rows[member.name]]), stack([reply]))
        _, (rows,) = exchange_of(self.plan, "joining").step(state.best.shared, [returned])
        state.rows[member.name] = copy(take(rows, 0))
        member.round += 1

    def _rebase(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A party has lost what it kept: it goes on from what it has."""
        member = state.members[table["party"]]
        member.base, member.best_base = table["base"], table["best_base"]
        if state.tested is not None and member.name in state.tested.bases:
            state.tested.bases[member.name] = table["tested_base"]

    def _step(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A round ends; one that nobody had the budget for leaves the memories as they are."""
        if state.replies:
            self._move_all(state)
        state.round += 1
        state.replies, state.cohort, state.attempt, state.is_open = {}, [], 0, False

    def _move_all(self, state: ServerState) -> None:
        order = step_order(state)
        groups, returned = [], []
        for model in self.plan.models.values():
            if names := [name for name in order if state.members[name].architecture == model.name]:
                rows = stack([state.rows[name] for name in names])
                groups.append(names)
                returned.append(Returned(model, rows, stack([state.replies[name] for name in names])))
        counting, state.robust = self.plan.guarded(state.robust, returned, groups)
        state.shared, moved = self.plan.stepping.step(state.shared, counting, torch.tensor(state.round))
        for names, rows in zip(groups, moved, strict=True):
            for place, name in enumerate(names):
                state.rows[name] = copy(take(rows, place))

    def _drop(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A step cannot take the updates of these parties, though each of them passed every check."""
        for name in table["parties"]:
            del state.replies[name]

    def _test(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """Every party's model of this round is about to be tested."""
        bases = {name: member.base for name, member in state.members.items()}
        state.tested = Chosen(state.round, copy(state.shared), copy(state.rows), bases)

    def _score(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """Every party's model was tested; the first strictly best round is chosen, or the last where none can be."""
        tested, results = state.tested, table["results"]
        assert tested is not None
        state.tested, state.evaluated = None, tested.round
        state.history.append({name: table[name] for name in ("round", "results", "time")})
        before = {} if state.best is None else state.best.results
        if state.best is None or _is_better(results, before, self.plan.schedule):
            score = score_of(results, self.plan.schedule)
            tested.score, tested.results = float("-inf") if score is None else score, {**before, **results}
            state.best = tested
            for name, base in tested.bases.items():
                state.members[name].best_base = base

    def _end(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        state.has_ended = True
        state.final = {}
        state.is_adapted = None if self.plan.fine_tunes else False

    def _judge(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """Models of the chosen round were tested after adaptation, which is used unless it made them worse.

        Those count that were tested before it too; the best round's own results have older ones of who was away.
        """
        assert state.best is not None
        tested = next(one["results"] for one in reversed(state.history) if one["round"] == state.best.round)
        before, after = _of_both(tested, table["results"])
        state.is_adapted = not before or not is_worse(
            _validation(after), _validation(before), self.plan.schedule.select
        )

    def _tell(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A party knows which round was chosen, and has said how good its model of that round is."""
        assert state.final is not None
        member = state.members[table["party"]]
        member.is_told = True
        state.final[table["party"]] = table["scores"]

    def _try(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A party that joins has tested its model."""
        member = state.members[table["party"]]
        member.evaluated = member.round
        score = score_of({member.name: table["scores"]}, self.plan.schedule)
        if member.best_round is None or score is None or (member.best_score or 0.0) < score:
            member.best_round, member.best_score, member.best_base = member.round, score, member.base
            assert state.best is not None
            state.best.rows[member.name] = copy(state.rows[member.name])
        member.has_joined = member.round >= self.plan.joining_rounds

    def _spend(self, state: ServerState, table: Mapping[str, Any], message: bytes) -> None:
        """A party has no budget for more rounds; one that joins has what it has."""
        member = state.members[table["party"]]
        member.is_spent = True
        member.has_joined = member.phase == "joining"


def step_order(state: ServerState) -> list[str]:
    """Whose updates the next step takes, in the order of its cohort."""
    order = [name for name in state.cohort if name in state.replies]
    return order + [name for name in state.replies if name not in order]


def _opened(envelope: bytes) -> Message:
    """What was verified before it was written."""
    return unpacked(from_envelope(envelope)[1])
