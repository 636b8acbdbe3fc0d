"""The messages that a server sends to parties, each with what its answer must look like."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pfedhn.deploy.plan import Phase, exchange_of, plan_digest
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.record import Records
from pfedhn.deploy.signing import PrivateKey, evidence, sealed
from pfedhn.deploy.state import Member, ServerState
from pfedhn.deploy.wire import HEAD, Message, layout, norm, packed
from pfedhn.engine.plan import Plan
from pfedhn.params import Params, num_bytes, zeros_like

SMALL_MESSAGE = 1 << 16  # bytes that an answer without tensors may have


@dataclass
class Question:
    """A message that waits for its answer."""

    party: str
    kind: str
    content: bytes  # the signed message
    values: Mapping[str, Any]  # what the answer must repeat
    limit: int = SMALL_MESSAGE  # bytes of an answer
    layout: str = ""  # of the tensors of an answer
    max_norm: float = math.inf
    bytes_down: int = 0
    deadline: float = math.inf
    asked_at: float = -math.inf
    has_been_repeated: bool = False

    @cached_property
    def digest(self) -> str:
        """What records name the message by."""
        return evidence(self.content)[0]


class Questions:
    """Writes and signs messages; it takes what `Server` takes."""

    def __init__(
        self,
        plan: Plan,
        run: str,
        key: PrivateKey,
        policy: Policy,
        settled: Mapping[str, Any] | None = None,
        records: Records | None = None,
    ) -> None:
        self.plan, self.run, self.key, self.policy = plan, run, key, policy
        self.settled, self.records = settled, records
        self._plan_digest = plan_digest(plan)
        self._layouts: dict[tuple[str, Phase], tuple[str, int]] = {}

    def _sealed(self, message: Message) -> bytes:
        """A signed message with the head of the party's record."""
        if self.records is not None:
            head = self.records.of(message.party).head
            message = replace(message, values={**message.values, HEAD: head})
        return sealed(message, self.key)

    def hello(self, name: str) -> Question:
        """Ask a party what it brings."""
        values: dict[str, Any] = {"challenge": secrets.token_hex(16), "plan": self._plan_digest}
        values |= {} if self.settled is None else {"settled": self.settled}
        message = Message("hello", self.run, name, values)
        return Question(name, "hello", self._sealed(message), {"challenge": values["challenge"]})

    def train(self, state: ServerState, member: Member, number: int) -> Question:
        """Ask a party for the update of a round."""
        phase, model = member.phase, self.plan.models[member.architecture]
        shared = state.shared
        if phase == "joining":
            assert state.best is not None
            shared = state.best.shared
        identity = torch.tensor(member.identity)
        exchange = exchange_of(self.plan, phase)
        offer = exchange.offer(model, shared, state.rows[member.name], torch.tensor(number), identity)
        received = self.plan.download.decode(offer.weights, model.dtype)
        weights = {name: value for name, value in received.items() if name not in self.plan.extras[model.name].down}
        form, size = self._update_form(member, received)
        version = number if phase == "joining" else state.round
        repeated = {"round": number, "version": version, "base": member.base, "phase": phase}
        tested_base = None if state.tested is None else state.tested.bases.get(member.name)
        keep = [base for base in (member.best_base, tested_base) if base is not None]
        message = Message("train", self.run, member.name, {**repeated, "keep": keep}, offer.weights)
        return Question(
            member.name,
            "train",
            self._sealed(message),
            {**repeated, "size": member.size},
            limit=2 * size + SMALL_MESSAGE,
            layout=form,
            max_norm=self.policy.max_update * (1.0 + norm(weights)),
            bytes_down=num_bytes(offer.weights),
        )

    def written(self, kind: str, name: str, values: Mapping[str, Any], tensors: Any = ()) -> Question:
        """A question of this kind, whose answer repeats the values."""
        message = Message(kind, self.run, name, values, tensors)
        return Question(name, kind, self._sealed(message), values)

    def _update_form(self, member: Member, received: Params) -> tuple[str, int]:
        """The layout of an update of what was sent, and its bytes on the wire."""
        key = member.architecture, member.phase
        if key not in self._layouts:
            update = zeros_like(self.plan.exchange.update_form(self.plan.models[member.architecture], received))
            encoded, _ = self.plan.upload.encode(update, 0, self.plan.upload.init_state(update))
            self._layouts[key] = layout(encoded), len(packed(Message("train", "", "", {}, encoded)))
        return self._layouts[key]

    def evaluate(self, state: ServerState, member: Member, is_last: bool, is_judging: bool) -> Question:
        """Ask a party to test its newest model, or with `is_last` that of the chosen round.

        With `is_judging` the scores decide on adaptation, so the party does not store the model yet.
        """
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
            if member.name in state.best.rows:  # a party that came after the chosen round has its current row
                row, base = state.best.rows[member.name], member.best_base
        else:
            assert state.tested is not None
            shared, number = state.tested.shared, state.tested.round
            row, base = state.tested.rows[member.name], state.tested.bases[member.name]
        weights = exchange_of(self.plan, member.phase).publish(self.plan.models[member.architecture], shared, row)
        is_judged = is_last and is_judging and member.phase == "training"
        repeated = {
            "round": number, "base": base, "phase": member.phase,
            "is_adapted": is_last and state.is_adapted is not False, "is_last": is_last and not is_judged,
        }  # fmt: skip
        message = Message("evaluate", self.run, member.name, {**repeated, "best": best}, weights)
        return Question(member.name, "evaluate", self._sealed(message), repeated)
