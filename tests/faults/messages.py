"""Faults of messages and of what is written, in one process, where each can be placed exactly.

A server and six parties run a few rounds, and one thing goes wrong at a moment that is drawn. `nothing` is `lost` if
the fault is noticed and named, the run comes to its end, every update that was said to be accepted is in the server's
count, and all memories are those of the simulator when just the parties take part whose updates were accepted.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deploy.parties import KEYS, Group, Killed, Virtual, assert_simulated, simulation_of, small, with_cohorts
from faults.table import Row, row_of

from pfedhn.deploy import store as server_store
from pfedhn.deploy.contacts import Arrival
from pfedhn.deploy.party import logger
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.signing import opened, sealed
from pfedhn.deploy.state import Rules, step_order
from pfedhn.deploy.store import Store
from pfedhn.deploy.wire import Message, WireError

ROUNDS = 4
STRANGER = KEYS[7]
POLICY = Policy(reply_seconds=30.0)


class Case:
    """A federation with a victim, and the place of its fault among the victim's training messages."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.dice, self.victim, self.place = dice, f"party-{dice.randrange(6)}", dice.randint(1, ROUNDS - 1)
        self.group = Group(
            simulation_of(small("pfedhn-pc"), rounds=ROUNDS, cohort=6, evaluate_every=12), folder, POLICY
        )
        self.seen, self.replies = 0, list[bytes]()
        self.accepted, self.steps = set[tuple[str, int]](), dict[int, list[str]]()  # by the records of the journal

    def on_reply(self, change: Callable[[bytes, bytes], bytes]) -> None:
        """Let the victim's reply of that place be another: what was asked and the true reply are given."""

        def answer(content: bytes) -> bytes:
            reply = self.group.parties[self.victim].answer(content)
            if opened(content, self.group.server_key.public_key()).kind != "train":
                return reply
            self.seen += 1
            self.replies.append(reply)
            return change(content, reply) if self.seen == self.place else reply

        self.group.answers[self.victim] = answer

    def run(self) -> None:
        """To the end, with a new server from the folder each time that one is killed."""
        with self.noted():
            self._run()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note whose updates are accepted and stepped on, whether or not the server lives to say so."""
        apply = Rules.apply

        def noting(rules: Rules, state: Any, table: Any, message: bytes = b"") -> None:
            if table["kind"] == "accept":
                self.accepted.add((table["party"], table["round"]))
            if table["kind"] == "step":
                self.steps[state.round] = step_order(state)
            apply(rules, state, table, message)

        Rules.apply = noting  # type: ignore[method-assign]
        try:
            yield
        finally:
            Rules.apply = apply  # type: ignore[method-assign]

    def _run(self) -> None:
        for _ in range(200):
            with suppress(Killed):
                self.group.server.run()
                return
            self.group.transport._waiting.clear()
            self.group.new_server()
        raise AssertionError("it does not come to an end")

    def check(self, reasons: set[str]) -> str:
        group = self.group
        refused = [one["reason"] for one in group.said("refused")]
        assert set(refused) == reasons, f"refused for {refused}, not for {reasons}"
        assert not {one["party"] for one in group.said("refused")} - {self.victim, "stranger"}
        said = {(one["party"], one["round"]) for one in group.said("accepted")}
        assert said <= self.accepted
        assert group.server.state.num_accepted == len(self.accepted), "an accepted update was lost"
        assert_simulated(group, with_cohorts(group.simulation, [self.steps[number] for number in range(ROUNDS)]))
        return f"{len(self.accepted)} updates accepted"


def resealed(change: Callable[[Message], Message]) -> Callable[[Case], set[str]]:
    """The party itself signs something that is wrong."""

    def fault(case: Case) -> set[str]:
        key = case.group.keys[case.victim]
        case.on_reply(lambda asked, reply: sealed(change(opened(reply, key.public_key())), key))
        case.run()
        return set()

    return fault


def update(change: Callable[[Any], Any]) -> Callable[[Case], set[str]]:
    def changed(message: Message) -> Message:
        return replace(message, tensors={name: change(leaf) for name, leaf in message.tensors.items()})

    return resealed(changed)


def bytes_of(change: Callable[[Case, bytes], bytes]) -> Callable[[Case], set[str]]:
    def fault(case: Case) -> set[str]:
        case.on_reply(lambda asked, reply: change(case, reply))
        case.run()
        return set()

    return fault


def signed_by(key: Callable[[Case], Any]) -> Callable[[Case], set[str]]:
    def change(case: Case, reply: bytes) -> bytes:
        return sealed(opened(reply, case.group.keys[case.victim].public_key()), key(case))

    return bytes_of(change)


def flipped(case: Case, reply: bytes) -> bytes:
    content, place = bytearray(reply), case.dice.randrange(2, len(reply))
    content[place] ^= 1 << case.dice.randrange(8)
    return bytes(content)


def another(case: Case) -> Any:
    return next(key for name, key in case.group.keys.items() if name != case.victim)


def raising(case: Case) -> set[str]:
    party = case.group.parties[case.victim]
    whole, count = party._train, 0

    def train(message: Message) -> Message:
        nonlocal count
        count += 1
        if count == case.place:
            raise ZeroDivisionError("in the party's own code")
        return whole(message)

    party._train = train  # type: ignore[method-assign]
    logger.disabled = True  # a defect of ours is logged with all that led to it
    try:
        case.run()
    finally:
        logger.disabled = False
    return {"party"}


def replayed(case: Case) -> set[str]:
    case.place = max(2, case.place)
    case.on_reply(lambda asked, reply: case.replies[0])
    case.run()
    return {"round", "silent"}


def lost(case: Case) -> set[str]:
    def lose(asked: bytes, reply: bytes) -> bytes:
        raise WireError("lost", "was lost")

    case.on_reply(lose)
    case.run()
    return {"lost"}


def killed_party(case: Case) -> set[str]:
    """It has written what it keeps, its reply is on no wire: a new process finds both on the disk."""

    def die(asked: bytes, reply: bytes) -> bytes:
        before = case.group.answers[case.victim]
        case.group.add(int(case.victim[-1]))
        case.group.answers[case.victim] = before
        raise WireError("lost", "was killed")

    case.on_reply(die)
    case.run()
    return {"lost"}


def slow(case: Case) -> set[str]:
    """It answers when the round is over, and what it answers then counts no more."""
    count = 0

    def seconds(party: str) -> float:
        nonlocal count
        count += party == case.victim
        return 40.0 if party == case.victim and count == 3 + case.place else 0.0  # after a greeting and an evaluation

    case.group.transport.seconds = seconds
    case.run()
    return {"silent"} | ({"round", "late"} & {one["reason"] for one in case.group.said("refused")})


def twice(case: Case) -> set[str]:
    class Twice(Virtual):
        def delivered(self, party: str, kind: str, content: bytes) -> list[Arrival]:
            found = super().delivered(party, kind, content)
            return found * 2 if party == case.victim and kind == "train" else found

    case.group.transport.__class__ = Twice
    case.run()
    return {"late"}


def strangers(case: Case) -> set[str]:
    """One whose key nobody knows, and who gets at the wire all the same, answers for itself and for a party."""
    heard: list[bytes] = []

    class Crowded(Virtual):
        def delivered(self, party: str, kind: str, content: bytes) -> list[Arrival]:
            found = super().delivered(party, kind, content)
            if party != case.victim or kind != "train":
                return found
            mine = sealed(Message("train", "run", "stranger", {}), STRANGER)
            return [Arrival("stranger", "train", mine), *found]

    def listen(content: bytes) -> bytes:
        heard.append(content)
        return content

    case.group.answers["stranger"] = listen
    case.group.transport.__class__ = Crowded
    case.run()
    assert not heard, "something was sent to it"
    return {"stranger"}


@contextmanager
def dying(case: Case, owner: Any, name: str) -> Iterator[None]:
    """Kill the server at some of the calls of a function, before it has done anything or after it has done all."""
    whole, count = getattr(owner, name), 0
    moments = {number: case.dice.random() < 0.5 for number in case.dice.sample(range(1, 30), 5)}

    def mortal(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        is_after = moments.get(count)
        if is_after is False:
            raise Killed
        result = whole(*given, **named)
        if is_after:
            raise Killed
        return result

    setattr(owner, name, mortal)
    try:
        yield
    finally:
        setattr(owner, name, whole)
    assert count > min(moments), "nobody was killed"


def killed_server(case: Case) -> set[str]:
    with dying(case, Store, "commit"):
        case.run()
    return set()


def killed_at_checkpoint(case: Case) -> set[str]:
    """Between the parts of a checkpoint, or while what is old is removed."""
    case.group.policy = replace(POLICY, checkpoint_seconds=0.0)
    case.group.new_server()
    with dying(case, server_store, "save"), dying(case, Store, "save"):  # a tensor's bytes, and all of it
        case.run()
    return set()


FAULTS: dict[str, tuple[Callable[[Case], set[str]], set[str]]] = {
    "party raises": (raising, set()),
    "party slower than the round": (slow, set()),
    "party killed -9 before its reply leaves": (killed_party, set()),
    "reply lost": (lost, set()),
    "reply comes twice": (twice, set()),
    "update of NaN": (update(lambda leaf: torch.full_like(leaf, float("nan"))), {"finite"}),
    "update of infinite numbers": (update(lambda leaf: torch.full_like(leaf, float("inf"))), {"finite"}),
    "update of another shape": (update(lambda leaf: leaf[..., :-1]), {"layout"}),
    "update of a huge norm": (update(lambda leaf: torch.full_like(leaf, 1e9)), {"norm"}),
    "reply of an earlier round": (replayed, set()),
    "reply cut short": (bytes_of(lambda case, reply: reply[: case.dice.randrange(200, len(reply))]), {"signature"}),
    "reply altered on the way": (bytes_of(flipped), {"signature"}),
    "reply forged with an unknown key": (signed_by(lambda case: STRANGER), {"signature"}),
    "reply signed by another party": (signed_by(another), {"signature"}),
    "stranger on the wire": (strangers, set()),
    "server killed -9 at a record of its journal": (killed_server, set()),
    "server killed -9 during a checkpoint": (killed_at_checkpoint, set()),
}
"""By kind: what goes wrong, which says why something was refused beside the reasons that stand here."""


def try_one(kind: str, seed: str) -> tuple[str, str]:
    """An outcome, and what was said."""
    fault, reasons = FAULTS[kind]
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), random.Random(seed))
        try:
            return "nothing lost", case.check(fault(case) | reasons)
        except Exception as error:
            return "broken", f"{type(error).__name__}: {str(error)[:500]}"


def try_messages(tries: int, seed: int) -> list[Row]:
    """Every kind so many times."""
    return [row_of(kind, [try_one(kind, f"{seed} {number}") for number in range(tries)]) for kind in FAULTS]
