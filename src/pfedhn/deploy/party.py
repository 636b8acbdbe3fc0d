"""A party: it has examples, a key and private state, and it answers its server.

Its private state is stored by round, on its own disk. Every message names the last round of this party that the server
accepted, and the party starts from the state of that round: a lost reply changes nothing. The same message gets the
same reply. What the policy of the party's owner does not allow is refused before anything is computed (`deploy.guard`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from pfedhn.data.federation import Federation
from pfedhn.deploy.across import TEST
from pfedhn.deploy.guard import Guard
from pfedhn.deploy.local import LocalClient, Scores
from pfedhn.deploy.party_folder import MissingVersion, PartyFolder
from pfedhn.deploy.party_policy import PartyPolicy, Refusal
from pfedhn.deploy.plan import Phase, plan_digest
from pfedhn.deploy.privacy import Budget, BudgetSpent, system_normal
from pfedhn.deploy.record import Record
from pfedhn.deploy.signing import PrivateKey, PublicKey, evidence, opened, sealed
from pfedhn.deploy.spec import FederationSpec
from pfedhn.deploy.wire import HEAD, Message, WireError, from_envelope, head_of, identity
from pfedhn.engine.plan import Plan
from pfedhn.engine.round import Kept, Offer
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.errors import RunError, UserError, first_line, names_place
from pfedhn.params import Params
from pfedhn.privacy import Privacy, Protection, refuse_leaks
from pfedhn.system.files import NO_ROOM

logger = logging.getLogger("pfedhn")


class NoConsent(RunError):
    """The server asks for what this party has not consented to."""


REASONS: dict[type[UserError], str] = {MissingVersion: "version", BudgetSpent: "budget", NoConsent: "consent"}
SILENCE = "could not answer, and does not say why, since that may tell of its data"
NEUTRAL = "refuses, by the policy of its owner"
MAX_ROUND = 1 << 40
ANSWERS = ("hello", "train", "evaluate", "compare")


@dataclass
class Party:
    """One party of a run.

    Args:
        plan: Of the run, on the device where this party computes.
        run: The run's name, in every message.
        name: The party's; its random draws depend on its identity in `data`.
        data: A federation of this party alone, on that device.
        folder: For its private state.
        key: Signs its replies.
        server_key: Of the only server that is answered.
        architecture: The plan's network that it trains; the first by default.
        privacy: How it protects its data from everybody who sees its updates, and its budget. Such a party also keeps
            its scores to itself, and the reason why it cannot answer.
        consents: What it does beside training (`deploy.across.CONSENTS`); nothing by default.
        ledger: The file that counts the spent budget. Runs on the same data share it; in `folder` by default.
        policy: What its owner lets it take part in.
        spec: The study's file, which the policy is held against too.
        record: What it was asked and what it sent, to show later.
        may_replace: Whether its owner lets the server replace the model of a run that has ended.
    """

    plan: Plan
    run: str
    name: str
    data: Federation
    folder: Path
    key: PrivateKey
    server_key: PublicKey
    architecture: str = ""
    privacy: Privacy | None = None
    ledger: Path | None = None
    policy: PartyPolicy = field(default_factory=PartyPolicy)
    spec: FederationSpec | None = None
    record: Record | None = None
    may_replace: bool = False
    consents: frozenset[str] = frozenset()
    heard: list[Mapping[str, Any]] = field(default_factory=list)  # events for the party's owner, newest last

    def __post_init__(self) -> None:
        self.files = PartyFolder(self.folder, self.plan.device)
        self.local = LocalClient(self.plan, self.data, self.architecture, self.privacy)
        self.architecture = self.local.architecture
        has_statistics, unprotected = bool(self.local.model.statistics), self.plan.extras[self.architecture].unprotected
        refuse_leaks(self.privacy, has_statistics, self.plan.algorithm.needs.descriptors, unprotected)
        if self.privacy is not None and self.privacy.level == "example":
            self.local.try_private_steps(self.privacy)
        self.ledger = self.ledger or self.folder / "privacy.json"
        self.budget = None if self.privacy is None else Budget(self.privacy, self.ledger)
        self.guard = Guard(
            self.policy, self.plan, self.files, int(self.local.size), self.privacy, self.spec, self.may_replace
        )

    def refuse_forgotten_privacy(self) -> None:
        """Refuse to take part without noise after updates with noise: the options may have been forgotten."""
        if self.privacy is None and self.ledger is not None and self.ledger.exists():
            raise UserError(
                f"this party has sent updates with noise; give --clip, --noise, --epsilon and --level again, or remove "
                f"{self.ledger.name} from its folder to go on without noise."
            )

    def answer(self, envelope: bytes) -> bytes:
        """The signed answer to a message of the server; a message of anybody else raises a WireError.

        If the party cannot do what it is asked, its answer says so.
        """
        message = opened(envelope, self.server_key)
        message = replace(message, tensors=tree_map(lambda leaf: leaf.to(self.plan.device), message.tensors))
        if (message.run, message.party) != (self.run, self.name):
            raise WireError("run", f"asks {message.party!r:.80} of the run {message.run!r:.80}, who is somebody else")
        if message.kind not in ANSWERS:
            raise WireError("kind", f"asks for {message.kind!r:.80}, which is unknown")
        digest, signature = evidence(envelope)
        try:
            self._write("asked", message, digest=digest, signed=signature, theirs=head_of(message))
            reply = self._answer(message, identity(from_envelope(envelope)[1]), len(envelope))
            self._write("sent", message, of=digest, digest=evidence(reply)[0])
        except Refusal as error:
            return self._refusal(message, "party", str(error), digest, NEUTRAL)
        except UserError as error:
            return self._refusal(message, REASONS.get(type(error), "party"), str(error), digest, _told(error))
        except Exception as error:  # a defect of ours must not end the party's process, nor pass unheard
            logger.exception("an error inside pfedhn")
            sentence = f"has an error inside pfedhn ({first_line(error)})"
            return self._refusal(
                message, "party", sentence, digest, f"has an error inside pfedhn ({type(error).__name__})"
            )
        return reply

    def _answer(self, message: Message, asked: bytes, num_bytes: int) -> bytes:
        """The answer to a message with the identity `asked`; an update that was sent before is sent again."""
        self.guard.admit(num_bytes)
        if message.kind == "hello":
            return self._sealed(self._hello(message))
        if message.kind == "compare":
            return self._sealed(self._compare(message))
        number, phase = message.values.get("round"), str(message.values.get("phase"))
        if message.kind == "evaluate":
            self.guard.admit_test(message, asked)
            result = self._sealed(self._evaluate(message, asked))
            self.files.note_answered("tests", int(number or 0), asked)
            return result
        if (before := self.files.reply_to(asked)) is not None:
            return before
        self.guard.admit_train(message, asked)
        result = self._sealed(self._train(message))
        self.guard.check_bytes(len(result))
        self.files.note_answered(phase, int(number or 0), asked)
        self.files.write_reply(asked, result)
        return result

    def _sealed(self, message: Message) -> bytes:
        """A signed message with the head of this party's record."""
        if self.record is not None:
            message = replace(message, values={**message.values, HEAD: self.record.head})
        return sealed(message, self.key)

    def _write(self, event: str, message: Message, **details: Any) -> None:
        """Add a line on a message of the server to the party's record."""
        if self.record is not None:
            about: dict[str, Any] = {"run": self.run, "kind": message.kind, "round": _number(message)}
            self.record.add(event, **about, **details)

    def _refusal(self, message: Message, reason: str, sentence: str, digest: str, told: str) -> bytes:
        """An answer that is none: the owner reads the `sentence`, and the server is `told` less."""
        self._note({"kind": "refusal", "of": message.kind, "sentence": sentence})
        if self.budget is not None and reason == "party" and message.kind != "hello" and told != NEUTRAL:
            told = SILENCE
        held = self.files.versions("joining" if message.values.get("phase") == "joining" else "training")
        values: dict[str, Any] = {"of": message.kind, "round": _number(message), "reason": reason}
        values |= {"sentence": told, "held": held}
        answer = Message("refusal", self.run, self.name, values)
        try:
            self._write("refused", message, of=digest, sentence=sentence)
            result = self._sealed(answer)
            self._write("sent", message, of=digest, digest=evidence(result)[0])
        except UserError:  # the disk may be what is full; the owner has been told
            return sealed(answer, self.key)
        return result

    def _hello(self, message: Message) -> Message:
        if message.values.get("plan") != plan_digest(self.plan):
            raise UserError(
                "the server has another plan than this party; install the same version of pfedhn and of the network at "
                "both, with the same frozen weights, and join anew."
            )
        values = {
            "challenge": message.values.get("challenge"),
            "architecture": self.architecture,
            "size": int(self.local.size),
            "examples": {split: int(self.data.splits[split].size[0]) for split in EVALUATED_SPLITS},
        }
        if self.consents:
            values["consents"] = sorted(self.consents)
        return Message("hello", self.run, self.name, values, self.local.descriptor)

    def _train(self, message: Message) -> Message:
        number, base, phase = message.values["round"], message.values["base"], message.values["phase"]
        offer = Offer(message.tensors, *torch.tensor([number, message.values["version"]], device=self.plan.device))
        received = self.plan.download.decode(offer.weights, self.local.model.dtype)
        kept = self.kept(phase, base, received)
        protection = self._paid_protection()
        scores = self._scores(phase, number, received, kept, ("validation",))
        reply, kept = self.local.train(phase, offer, kept, protection)
        self.files.write_kept(phase, number, kept, wanted={base, *message.values["keep"]})
        values = {part: message.values[part] for part in ("round", "version", "base", "phase")}
        values |= {"size": int(reply.size), "scores": self._shown(scores)}
        spent = None if self.budget is None else round(self.budget.spent, 4)
        self._note({"kind": "train", "round": number, "phase": phase, "scores": scores, "epsilon": spent})
        return Message("train", self.run, self.name, values, reply.update)

    def _paid_protection(self) -> Protection | None:
        """Pay for one more round; its protection, if the budget allows the round."""
        self.refuse_forgotten_privacy()
        if self.budget is None:
            return None
        privacy, size, batch_size = self.budget.privacy, int(self.local.size), self.plan.schedule.batch_size
        self.budget.pay(privacy.cost(size, batch_size, self.plan.algorithm.num_batches))
        return Protection(privacy, min(size, batch_size), system_normal, is_stepwise=True)

    def _evaluate(self, message: Message, asked: bytes) -> Message:
        """Score the weights that the server publishes for this party, and store them in case they are chosen."""
        number, base, phase = message.values["round"], message.values["base"], message.values["phase"]
        is_adapted, is_last = bool(message.values["is_adapted"]), bool(message.values["is_last"])
        received = message.tensors
        kept = self.kept(phase, base, received)
        is_used = is_adapted
        try:
            scores = self._scores(phase, number, received, kept, EVALUATED_SPLITS, is_adapted)
        except RunError:  # adaptation diverges: the party uses the model without it
            if not is_adapted:
                raise
            is_used, scores = False, self._scores(phase, number, received, kept, EVALUATED_SPLITS)
        self.files.write_tested(phase, number, received, kept, chosen=message.values["best"])
        if is_last:
            chosen = {"phase": phase, "round": number, "architecture": self.architecture, "is_adapted": is_used}
            self.files.write_chosen(chosen | {"scores": scores, "asked": asked.hex()})
        self._note({"kind": "evaluate", "round": number, "phase": phase, "scores": scores, "is_last": is_last})
        values = {part: message.values[part] for part in ("round", "base", "phase", "is_adapted", "is_last")}
        return Message("evaluate", self.run, self.name, {**values, "scores": self._shown(scores)})

    def _compare(self, message: Message) -> Message:
        """Test the model of another party, which is not stored."""
        if TEST not in self.consents:
            raise NoConsent("does not test models of other parties.")
        values = {part: message.values[part] for part in ("round", "model", "architecture")}
        scores = self.local.scores_of_other(values["architecture"], message.tensors, EVALUATED_SPLITS)
        self._note({"kind": "compare", "round": values["round"], "scores": scores})
        return Message("compare", self.run, self.name, {**values, "scores": self._shown(scores)})

    def _shown(self, scores: Scores) -> Scores:
        """The scores that the server gets: none of a party with a privacy budget, since they come from its data."""
        return scores if self.budget is None else self.local.no_scores(scores)

    def _scores(
        self,
        phase: Phase,
        number: int,
        received: Params,
        kept: Kept,
        splits: Sequence[str],
        is_adapted: bool = False,
    ) -> Scores:
        try:
            return self.local.scores(self.local.personal_weights(phase, number, received, kept, is_adapted), splits)
        except Exception as error:
            if self.budget is None:
                raise
            sentence = str(error) if isinstance(error, UserError) else first_line(error)
            self._note({"kind": "refusal", "of": "scores", "sentence": sentence})
            return self.local.no_scores(splits)  # the answer must not reveal how this party's examples did

    def personal_model(self) -> nn.Module:
        """The party's own model of the chosen round, a plain module."""
        chosen = self.files.chosen()
        phase, number = chosen["phase"], chosen["round"]
        received, kept = self.files.tested(phase, number, lambda received: self.local.first_contact(phase, received))
        is_adapted = chosen.get("is_adapted", self.plan.fine_tunes)  # earlier versions did not say
        weights = self.local.personal_weights(phase, number, received, kept, is_adapted)
        return self.local.model.with_weights(weights)

    def kept(self, phase: Phase, version: int | None, received: Params) -> Kept:
        """This party's private state after one of its rounds; None is before the first."""
        first = self.local.first_contact(phase, received)
        return first if version is None else self.files.kept(phase, version, first)

    def _note(self, event: Mapping[str, Any]) -> None:
        self.heard[:-100] = []
        self.heard.append(event)


def _told(error: UserError) -> str:
    """What the server is told of an error: no path of this machine, which names its users and folders."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        sentence = str(error)
        return "cannot answer; its owner can read why" if names_place(sentence) else sentence
    is_full = cause.errno in NO_ROOM
    reason = (cause.strerror or type(cause).__name__).lower()
    return f"cannot use its disk ({reason}); its owner has to {'make room' if is_full else 'look at it'}"


def _number(message: Message) -> int | None:
    """The round that a server names, which may be anything."""
    number = message.values.get("round")
    return number if type(number) is int and 0 <= number < MAX_ROUND else None
