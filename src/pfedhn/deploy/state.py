"""Everything a server remembers, as a value: what moves it is a record, and a checkpoint plus its journal is the state.

The rules here draw nothing and ask nobody, so that the same records always give the same state.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.deploy.journal import append_record, records
from pfedhn.deploy.plan import Phase, exchange_of, plan_digest
from pfedhn.deploy.wire import Message, from_envelope, unpacked
from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.plan import Plan
from pfedhn.engine.round import Reply, Returned
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.errors import RunError, first_line
from pfedhn.params import copy, in_dtype, num_bytes, stack, take
from pfedhn.runs.scores import scores_of
from pfedhn.storage.schema import Scores, is_worse
from pfedhn.storage.seal import DamagedError, sealed_json, unsealed_json
from pfedhn.storage.trees import filled, named, read_tensors, write_tensors
from pfedhn.system.files import make_folder, read_bytes, write_atomically

FORMAT = 3
NUM_KEPT = 2  # checkpoints, with their journals


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
class State:
    """Where a federation stands."""

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


def score_of(results: Mapping[str, Any]) -> float | None:
    """What a round is chosen by; None where nobody has validation examples."""
    validation = split_results(results)["validation"]
    return validation.score if int(validation.count.sum()) else None


def _is_better(results: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    """Whether an evaluation beats the best one, judged by the parties whose validation scores are known of both.

    Without such parties it does, unless nobody can judge it and somebody could judge the best one.
    """
    if score_of(results) is None:
        return score_of(best) is None
    new, old = _of_both(results, best)
    return not new or _validation(new).score > _validation(old).score


def _of_both(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two evaluations, of the parties alone that have validation scores in both."""
    names = [name for name in one if name in other and one[name]["validation"][2] and other[name]["validation"][2]]
    return {name: one[name] for name in names}, {name: other[name] for name in names}


def _validation(results: Mapping[str, Any]) -> Scores:
    return scores_of(split_results(results)["validation"], per_client=False)


class Rules:
    """How a record moves the state. Each function is named after the kind of its record."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.plan_digest = plan, plan_digest(plan)

    def initial(self) -> State:
        plan = self.plan
        return State(
            copy(plan.exchange.init_shared(plan.models, plan.initial_models(), keys.fold(plan.seed, "shared")))
        )

    def apply(self, state: State, table: Mapping[str, Any], message: bytes = b"") -> None:
        getattr(self, f"_{table['kind']}")(state, table, message)

    def _join(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
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

    def _first_row(self, state: State, member: Member, descriptor: Tensor | None) -> Any:
        algorithm = self.plan.algorithm
        known = state.best.rows if state.has_ended and state.best is not None else state.rows
        trained = [row for name, row in known.items() if state.members[name].phase == "training"]
        if state.round == 0 or not trained:
            key = torch.as_tensor(keys.fold(self.plan.seed, "row", member.identity))
            return in_dtype(algorithm.init_row(key, descriptor), self.plan.dtype)
        shared = state.best.shared if state.has_ended and state.best is not None else state.shared
        served = self.plan.exchange.served(shared)
        return in_dtype(algorithm.join_row(served, stack(trained), descriptor), self.plan.dtype)

    def _start(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """Those who are there stand in the order of their names, as in a simulation of the same parties."""
        for place, name in enumerate(sorted(state.members)):
            state.members[name].place = place
        state.has_started = True

    def _open(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """A round begins, or its cohort is drawn anew."""
        state.cohort, state.attempt, state.is_open = list(table["cohort"]), table["attempt"], True

    def _accept(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """An update that passed every check."""
        member, reply = state.members[table["party"]], reply_from(_opened(message))
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

    def _move(self, state: State, member: Member, reply: Reply) -> None:
        """One round of a party that joins: the server's memory is frozen, and its row alone moves."""
        assert state.best is not None
        returned = Returned(self.plan.models[member.architecture], stack([state.rows[member.name]]), stack([reply]))
        _, (rows,) = exchange_of(self.plan, "joining").step(state.best.shared, [returned])
        state.rows[member.name] = copy(take(rows, 0))
        member.round += 1

    def _rebase(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """A party has lost what it kept: it goes on from what it has."""
        member = state.members[table["party"]]
        member.base, member.best_base = table["base"], table["best_base"]
        if state.tested is not None and member.name in state.tested.bases:
            state.tested.bases[member.name] = table["tested_base"]

    def _step(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """A round ends; one that nobody had the budget for leaves the memories as they are."""
        if state.replies:
            self._move_all(state)
        state.round += 1
        state.replies, state.cohort, state.attempt, state.is_open = {}, [], 0, False

    def _move_all(self, state: State) -> None:
        order = step_order(state)
        groups = [
            (model, [name for name in order if state.members[name].architecture == model.name])
            for model in self.plan.models.values()
        ]
        groups = [(model, names) for model, names in groups if names]
        returned = [
            Returned(model, stack([state.rows[name] for name in names]), stack([state.replies[name] for name in names]))
            for model, names in groups
        ]
        now = torch.tensor(state.round)
        state.shared, moved = self.plan.exchange.step(state.shared, returned, now)
        for (_, names), rows in zip(groups, moved, strict=True):
            for place, name in enumerate(names):
                state.rows[name] = copy(take(rows, place))

    def _drop(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """A step cannot take the updates of these parties, though each of them passed every check."""
        for name in table["parties"]:
            del state.replies[name]

    def _test(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """Every party's model of this round is about to be tested."""
        bases = {name: member.base for name, member in state.members.items()}
        state.tested = Chosen(state.round, copy(state.shared), copy(state.rows), bases)

    def _score(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """Every party's model was tested; the first strictly best round is chosen, or the last where none can be."""
        tested, results = state.tested, table["results"]
        assert tested is not None
        state.tested, state.evaluated = None, tested.round
        state.history.append({name: table[name] for name in ("round", "results", "time")})
        before = {} if state.best is None else state.best.results
        if state.best is None or _is_better(results, before):
            score = score_of(results)
            tested.score, tested.results = float("-inf") if score is None else score, {**before, **results}
            state.best = tested
            for name, base in tested.bases.items():
                state.members[name].best_base = base

    def _end(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        state.has_ended = True
        state.final = {}
        state.is_adapted = None if self.plan.algorithm.adaptation_steps else False

    def _judge(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """Models of the chosen round were tested after adaptation, which is used unless it made them worse.

        Those count that were tested before it too; the best round's own results have older ones of who was away.
        """
        assert state.best is not None
        tested = next(one["results"] for one in reversed(state.history) if one["round"] == state.best.round)
        before, after = _of_both(tested, table["results"])
        state.is_adapted = not before or not is_worse(_validation(after), _validation(before))

    def _tell(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """A party knows which round was chosen, and has said how good its model of that round is."""
        assert state.final is not None
        member = state.members[table["party"]]
        if state.is_adapted is None and member.phase == "training":  # as earlier versions told them
            state.is_adapted = True
        member.is_told = True
        state.final[table["party"]] = table["scores"]

    def _try(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """A party that joins has tested its model."""
        member = state.members[table["party"]]
        member.evaluated = member.round
        score = score_of({member.name: table["scores"]})
        if member.best_round is None or score is None or (member.best_score or 0.0) < score:
            member.best_round, member.best_score, member.best_base = member.round, score, member.base
            assert state.best is not None
            state.best.rows[member.name] = copy(state.rows[member.name])
        member.has_joined = member.round >= self.plan.joining_rounds

    def _spend(self, state: State, table: Mapping[str, Any], message: bytes) -> None:
        """A party has no budget for more rounds; one that joins has what it has."""
        member = state.members[table["party"]]
        member.is_spent = True
        member.has_joined = member.phase == "joining"


def step_order(state: State) -> list[str]:
    """Whose updates the next step takes, in the order of its cohort."""
    order = [name for name in state.cohort if name in state.replies]
    return order + [name for name in state.replies if name not in order]


def _opened(envelope: bytes) -> Message:
    """What was verified before it was written."""
    return unpacked(from_envelope(envelope)[1])


def reply_from(message: Message) -> Reply:
    """The value that a party's message carries."""
    values = message.values
    return Reply(
        message.tensors,
        torch.tensor(values["size"]),
        {"is_finite": torch.tensor(True)},
        torch.tensor(values["round"]),
        torch.tensor(values["version"]),
    )


class Unfit(Exception):
    """A record that the state cannot take; it is not on the disk."""


@dataclass
class Store:
    """A server's folder: checkpoints, and for each the journal of what came after it."""

    folder: Path
    rules: Rules
    number: int = 0  # of the checkpoint that the journal follows

    def __post_init__(self) -> None:
        make_folder(self.folder, mode=0o700)

    def commit(self, state: State, table: Mapping[str, Any], message: bytes = b"") -> None:
        """Move the state, then write the record; nobody hears of it before it is written.

        In this order, since a record that cannot be applied would stop every server that reads it again. Where it
        cannot, the state may have moved in part: load it again.
        """
        try:
            self.rules.apply(state, table, message)
        except Exception as error:
            raise Unfit(f"the record {table['kind']!r} cannot be applied: {first_line(error)}") from error
        append_record(self._journal(self.number), table, message)

    def can_step(self, name: str) -> bool:
        """Whether the state on the disk can take a step with the update of this party alone."""
        state = self.load()
        state.replies = {name: state.replies[name]}
        try:
            self.rules.apply(state, {"kind": "step"})
        except Exception:
            return False
        return True

    def load(self) -> State:
        """The newest intact checkpoint, with every record since then applied."""
        state = None
        for number in self._numbers():
            state = self._read(number)
            if state is not None:
                self.number = number
                break
        # A checkpoint that is damaged, gone or half written is made up for: journals follow each other without a gap.
        newest = max([self.number, *self._numbers(), *self._numbers("journal-*")])
        missing = [number for number in range(self.number, newest + 1) if not self._journal(number).exists()]
        if newest and missing:
            if state is None:
                raise RunError(f"no checkpoint in {self.folder} is sound; bring the folder back from a backup.")
            raise RunError(f"{self._journal(missing[0])} is missing; bring the folder back from a backup.")
        if state is None:
            state = self.rules.initial()
        for number in range(self.number, newest + 1):
            for table, message in records(self._journal(number), is_last=number == newest):
                self.rules.apply(state, table, message)
            self.number = number
        return state

    def save(self, state: State) -> None:
        """Write a checkpoint; the journal begins anew."""
        assert not state.replies, "a checkpoint is written between rounds"
        tensors = named("shared", state.shared)
        for name, row in state.rows.items():
            tensors |= named(f"row/{name}", row)
        skipped = ("shared", "rows", "members", "replies", "best", "tested", "cohort", "attempt", "is_open")
        table = {name: value for name, value in vars(state).items() if name not in skipped}
        table["members"] = [asdict(member) for member in state.members.values()]
        for part, chosen in (("best", state.best), ("tested", state.tested)):
            table[part] = None
            if chosen is not None:
                tensors |= named(f"{part}/shared", chosen.shared)
                for name, row in chosen.rows.items():
                    tensors |= named(f"{part}/row/{name}", row)
                table[part] = {
                    "round": chosen.round, "score": repr(chosen.score), "results": chosen.results,
                    "rows": list(chosen.rows), "bases": chosen.bases,
                }  # fmt: skip
        number = self.number + 1
        write_tensors(self.folder / f"checkpoint-{number:09d}", tensors)
        # Before the checkpoint counts: what an older server left there did not come after it, and one that is missing
        # is missed, the very first too.
        if not self._journal(self.number).exists():
            write_atomically(self._journal(self.number), b"", mode=0o600)
        write_atomically(self._journal(number), b"", mode=0o600)
        table |= {"format": FORMAT, "plan": self.rules.plan_digest}
        write_atomically(self.folder / f"checkpoint-{number:09d}.json", sealed_json(table), mode=0o600)
        self.number = number
        if len(kept := self._numbers()[:NUM_KEPT]) == NUM_KEPT:
            for old in {*self._numbers(), *self._numbers("journal-*")}:
                if old < kept[-1]:
                    self._remove(old)

    def _remove(self, number: int) -> None:
        for file in (f"checkpoint-{number:09d}.json", f"checkpoint-{number:09d}", self._journal(number).name):
            (self.folder / file).unlink(missing_ok=True)

    def _numbers(self, pattern: str = "checkpoint-*.json") -> list[int]:
        found = (re.fullmatch(r"[a-z]+-(\d+)", file.stem) for file in self.folder.glob(pattern))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _journal(self, number: int) -> Path:
        return self.folder / f"journal-{number:09d}"

    def _read(self, number: int) -> State | None:
        try:
            table = unsealed_json(read_bytes(self.folder / f"checkpoint-{number:09d}.json"))
        except DamagedError:
            return None
        if table.pop("format") != FORMAT or table.pop("plan") != self.rules.plan_digest:
            raise RunError(
                f"{self.folder} holds a run of another plan or version of pfedhn; serve from a folder of its own."
            )
        tensors = read_tensors(self.folder / f"checkpoint-{number:09d}")
        if tensors is None:
            return None
        if table["has_ended"] and "is_adapted" not in table:  # earlier versions decided nothing
            has_steps = self.rules.plan.algorithm.adaptation_steps > 0
            table["is_adapted"] = (True if table["final"] else None) if has_steps else False
        form = self.rules.plan.form
        members = {one["name"]: Member(**one) for one in table.pop("members")}
        chosen = {part: table.pop(part) for part in ("best", "tested")}
        state = State(filled("shared", form.shared, tensors), members=members, **table)
        state.rows = {name: filled(f"row/{name}", form.row, tensors) for name in members}
        for part, known in chosen.items():
            if known is not None:
                rows = {name: filled(f"{part}/row/{name}", form.row, tensors) for name in known["rows"]}
                shared = filled(f"{part}/shared", form.shared, tensors)
                score, results = float(known["score"]), known["results"]
                setattr(state, part, Chosen(known["round"], shared, rows, known["bases"], score, results))
        return state
