"""A party: it has examples, a key, and what it keeps for itself; it answers what its server asks.

What it keeps is versioned by round, on its own disk. Every message names the round of this party that the server last
accepted, and the party starts from that version: a reply that was lost changes nothing. The same message gets the same
reply.
"""

import hashlib
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfedhn import keys
from pfedhn.data.federation import Federation
from pfedhn.deploy.plan import Phase, exchange_of, plan_digest
from pfedhn.deploy.privacy import Budget, BudgetSpent, system_key, system_normal
from pfedhn.deploy.signing import PrivateKey, PublicKey, opened, sealed
from pfedhn.deploy.wire import Message, WireError, from_envelope
from pfedhn.engine.evaluate import sums
from pfedhn.engine.executors import EXECUTORS, Executor
from pfedhn.engine.network import choose_executor
from pfedhn.engine.plan import Plan
from pfedhn.engine.round import Kept, Offer, all_finite
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.errors import RunError, UserError, first_line
from pfedhn.model import Model
from pfedhn.params import Params, in_dtype, take
from pfedhn.privacy import Privacy, Protection, refuse_leaks
from pfedhn.sgd import Batches
from pfedhn.storage.seal import DamagedError, sealed_json, unsealed_json
from pfedhn.storage.trees import SHA256, filled, named, read_tensors, write_tensors
from pfedhn.system.files import make_folder, read_bytes, write_atomically

logger = logging.getLogger("pfedhn")

Scores = dict[str, list[float | int | None]]
"""By split: summed loss, summed metric (None where the task has none), examples."""


SILENCE = "could not answer, and does not say why, since that may tell of its data"


class MissingVersion(RunError):
    """The server starts from a version that this party does not have."""


@dataclass
class Party:
    """One party of a run.

    Args:
        plan: What everybody knows.
        run: The run's name.
        name: The party's; what it draws is keyed by its identity in `data`.
        data: A federation of this party alone.
        folder: Where it keeps what is its own.
        key: The party's own, which signs its replies.
        server_key: The server's: nobody else is answered.
        architecture: Which of the plan's networks it runs; the first by default.
        privacy: What it does to keep its data from whoever sees its updates, and how much it may spend; then the party
            also keeps its scores to itself, and why it cannot answer.
        ledger: The file that counts what privacy has cost. Runs on the same data share it; in `folder` by default.
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
    heard: list[Mapping[str, Any]] = field(default_factory=list)  # what its owner may want to see, newest last

    def __post_init__(self) -> None:
        make_folder(self.folder, mode=0o700)
        self.architecture = self.architecture or next(iter(self.plan.models))
        if self.architecture not in self.plan.models:
            raise UserError(f"there is no size {self.architecture!r}; there are {', '.join(self.plan.models)}.")

        refuse_leaks(self.privacy, bool(self.model.statistics), self.plan.algorithm.needs_descriptors)
        if self.privacy is not None and self.privacy.level == "example":
            self._try_private_steps(self.privacy)
        self.ledger = self.ledger or self.folder / "privacy.json"
        self.budget = None if self.privacy is None else Budget(self.privacy, self.ledger)

    def _try_private_steps(self, privacy: Privacy) -> None:
        """Train once on zeros: a method without private steps is refused now, and not in rounds that cost budget."""
        exchange, start = self.plan.exchange, self.plan.initial_models()[self.architecture]
        shared = exchange.init_shared({self.architecture: self.model}, {self.architecture: start}, 0)
        row = in_dtype(self.plan.algorithm.init_row(torch.tensor(0), None), self.plan.dtype)
        offer = exchange.offer(self.model, shared, row, torch.tensor(0), self.identity)
        kept = self._first_contact("training", self.plan.download.decode(offer.weights, self.model.dtype))
        shape = self.plan.algorithm.num_batches, 2
        x, y = (values.new_zeros(*shape, *values.shape[1:]) for values in self.data.examples(torch.tensor([0])))
        protection = Protection(privacy, 2.0, lambda count, like: like.new_zeros(count), is_stepwise=True)
        exchange.train(self.model, offer, kept, Batches(x, y, torch.ones(shape, dtype=torch.bool)), protection)

    def refuse_forgotten_privacy(self) -> None:
        """Refuse to take part without noise after updates with noise, which would end without a word."""
        if self.privacy is None and self.ledger is not None and self.ledger.exists():
            raise UserError(
                f"this party has sent updates with noise; give --clip, --noise, --epsilon and --level again, or remove "
                f"{self.ledger.name} from its folder to go on without noise."
            )

    @property
    def model(self) -> Model:
        return self.plan.models[self.architecture]

    @property
    def identity(self) -> Tensor:
        return self.data.identity(torch.tensor(0))

    @property
    def size(self) -> Tensor:
        return self.data.splits["train"].size[0]

    def answer(self, envelope: bytes) -> bytes:
        """The signed answer to a message. Who is not the server gets none: a WireError.

        What the party cannot do it says in its answer.
        """
        message = opened(envelope, self.server_key)
        if (message.run, message.party) != (self.run, self.name):
            raise WireError("run", f"asks {message.party!r:.80} of the run {message.run!r:.80}, who is somebody else")
        answers = {"hello": self._hello, "train": self._train, "evaluate": self._evaluate}
        if message.kind not in answers:
            raise WireError("kind", f"asks for {message.kind!r:.80}, which is unknown")
        asked = hashlib.sha256(from_envelope(envelope)[1]).digest()
        try:
            if message.kind == "train" and (before := self._reply_to(asked)) is not None:
                return before
            result = sealed(answers[message.kind](message), self.key)
            if message.kind == "train":
                write_atomically(self.folder / "reply", asked + result, mode=0o600)
            return result
        except MissingVersion as error:
            return self._refusal(message, "version", str(error))
        except BudgetSpent as error:
            return self._refusal(message, "budget", str(error))
        except UserError as error:
            return self._refusal(message, "party", str(error))
        except Exception as error:  # a defect of ours must not end the party's process, nor pass unheard
            logger.exception("an error inside pfedhn")
            return self._refusal(message, "party", f"has an error inside pfedhn ({first_line(error)})")

    def _refusal(self, message: Message, reason: str, sentence: str) -> bytes:
        self._note({"kind": "refusal", "of": message.kind, "sentence": sentence})
        if self.budget is not None and reason == "party" and message.kind != "hello":
            sentence = SILENCE
        values = {
            "of": message.kind,
            "round": message.values.get("round"),
            "reason": reason,
            "sentence": sentence,
            "held": self.versions("joining" if message.values.get("phase") == "joining" else "training"),
        }
        return sealed(Message("refusal", self.run, self.name, values), self.key)

    def _reply_to(self, asked: bytes) -> bytes | None:
        """The reply to the last message, if this is the same."""
        file = self.folder / "reply"
        content = read_bytes(file) if file.exists() else b""
        return content[SHA256:] if content[:SHA256] == asked else None

    def _hello(self, message: Message) -> Message:
        if message.values.get("plan") != plan_digest(self.plan):
            raise UserError(
                "the server has another plan than this party; install the same version of pfedhn and of the network at "
                "both, with the same frozen weights, and join anew."
            )
        values = {
            "challenge": message.values.get("challenge"),
            "architecture": self.architecture,
            "size": int(self.size),
            "examples": {split: int(self.data.splits[split].size[0]) for split in EVALUATED_SPLITS},
        }
        return Message("hello", self.run, self.name, values, self._descriptor())

    def _descriptor(self) -> Any:
        if not self.plan.algorithm.needs_descriptors:
            return ()
        given = self.data.descriptors
        return (self.data.class_shares if given is None else given)[0].to(self.plan.dtype)

    def _train(self, message: Message) -> Message:
        number, base, phase = message.values["round"], message.values["base"], message.values["phase"]
        exchange = exchange_of(self.plan, phase)
        offer = Offer(message.tensors, torch.tensor(number), torch.tensor(message.values["version"]))
        received = self.plan.download.decode(offer.weights, self.model.dtype)
        kept = self._kept(phase, base, received)
        protection = self._paid_protection()
        scores = self._scores(phase, number, received, kept, ("validation",))
        batches = self._batches(keys.fold(exchange.seed, "batches", number))
        noise = torch.as_tensor(keys.fold(exchange.seed, "noise", number, self.identity))
        with self._computing(phase, "train", noise, (offer, kept, batches)):
            update, after = exchange.train(self.model, offer, kept, batches, protection)
        if protection is not None and not bool(all_finite(after, self.size.device)):
            after = kept  # a refusal would tell that the personal layers diverged on these data
        reply, kept = exchange.reply(offer, update, after, self.size, self.identity)
        if not bool(reply.metrics["is_finite"]):
            raise RunError(f"training diverged in round {number}; the learning rates are too high for these data.")
        write_tensors(self._file(phase, number), named("", kept))
        self._forget(phase, number, {base, *message.values["keep"]})
        values = {
            "round": number,
            "version": message.values["version"],
            "base": base,
            "phase": phase,
            "size": int(reply.size),
            "scores": self._shown(scores),
        }
        spent = None if self.budget is None else round(self.budget.spent, 4)
        self._note({"kind": "train", "round": number, "phase": phase, "scores": scores, "epsilon": spent})
        return Message("train", self.run, self.name, values, reply.update)

    def _paid_protection(self) -> Protection | None:
        """What protects the data in one more round, if the budget allows one."""
        self.refuse_forgotten_privacy()
        if self.budget is None:
            return None
        privacy, size = self.budget.privacy, self.plan.schedule.batch_size
        self.budget.pay(privacy.cost(int(self.size), size, self.plan.algorithm.num_batches))
        return Protection(privacy, min(int(self.size), size), system_normal, is_stepwise=True)

    def _batches(self, key: keys.Key) -> Batches:
        """The minibatches of a round; those of private steps are as secret as the noise."""
        is_secret = self.privacy is not None and self.privacy.level == "example"
        draw = self.data.sampled_batches if is_secret else self.data.batches
        key = system_key() if is_secret else key
        return take(draw(torch.tensor([0]), key, self.plan.algorithm.num_batches, self.plan.schedule.batch_size), 0)

    def _evaluate(self, message: Message) -> Message:
        """Score the weights that the server would have this party use, and remember them in case they are chosen."""
        number, base, phase = message.values["round"], message.values["base"], message.values["phase"]
        is_adapted, is_last = bool(message.values["is_adapted"]), bool(message.values["is_last"])
        received = message.tensors
        kept = self._kept(phase, base, received)
        is_used = is_adapted
        try:
            scores = self._scores(phase, number, received, kept, EVALUATED_SPLITS, is_adapted)
        except RunError:  # its own steps diverge: it has the model that it was given, as if it took none
            if not is_adapted:
                raise
            is_used, scores = False, self._scores(phase, number, received, kept, EVALUATED_SPLITS)
        write_tensors(self._evaluated(phase, number), named("received", received) | named("kept", kept))
        chosen = message.values["best"]
        for file in self.folder.glob(f"evaluated-{phase}-*"):
            if file not in (self._evaluated(phase, number), self._evaluated(phase, -1 if chosen is None else chosen)):
                file.unlink(missing_ok=True)
        if is_last:
            table = {"phase": phase, "round": number, "architecture": self.architecture, "is_adapted": is_used}
            table |= {"scores": scores}
            write_atomically(self.folder / "chosen.json", sealed_json(table), mode=0o600)
        self._note({"kind": "evaluate", "round": number, "phase": phase, "scores": scores, "is_last": is_last})
        values = {"round": number, "base": base, "phase": phase, "is_adapted": is_adapted, "is_last": is_last}
        values["scores"] = self._shown(scores)
        return Message("evaluate", self.run, self.name, values)

    def _shown(self, scores: Scores) -> Scores:
        """The scores that the server gets: none of a party whose updates are noised, since they come from its data."""
        return scores if self.budget is None else self._no_scores(scores)

    def _no_scores(self, splits: Iterable[str]) -> Scores:
        return {split: [0.0, None if self.model.per_example_metric is None else 0.0, 0] for split in splits}

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
            weights = self._personal_weights(phase, number, received, kept, is_adapted)
            return {split: self._score(weights, self.data.splits[split].of(0)) for split in splits}
        except Exception as error:
            if self.budget is None:
                raise
            sentence = str(error) if isinstance(error, UserError) else first_line(error)
            self._note({"kind": "refusal", "of": "scores", "sentence": sentence})
            return self._no_scores(splits)  # for the party's eyes: its answer must not tell how its examples did

    def _score(self, weights: Params, examples: Tensor) -> list[float | int | None]:
        loss, metric = sums(self.model, weights, self.data, examples)
        if not math.isfinite(loss):
            raise RunError("the weights that came give no finite loss on this party's examples.")
        return [loss, metric, len(examples)]

    def _personal_weights(self, phase: Phase, number: int, received: Params, kept: Kept, is_adapted: bool) -> Params:
        exchange = exchange_of(self.plan, phase)
        key = exchange.personalize_key(number)
        batches = self.data.batches(
            torch.tensor([0]), key, exchange.num_personal_batches(self.model, is_adapted), self.plan.schedule.batch_size
        )
        mine, noise = take(batches, 0), torch.as_tensor(keys.fold(key, "noise", self.identity))
        with self._computing(phase, "personalize", noise, (received, kept, mine)):
            return exchange.personalize(self.model, received, kept, mine, is_adapted)

    @contextmanager
    def _computing(self, phase: Phase, purpose: str, noise: Tensor, given: Any) -> Iterator[None]:
        """Inside the block, the party's local steps run as in a simulation of it alone.

        Args:
            phase: Of the round.
            purpose: "train" or "personalize".
            noise: The key of the random numbers that the network draws by itself.
            given: All tensors that the steps are given.
        """
        executor = self._executors[phase]
        is_alone = executor.name == "loop"
        with self.model.seeded(noise, is_alone), executor.running(self.architecture, purpose, given):
            yield

    @cached_property
    def _executors(self) -> dict[str, Executor]:
        # Noise that protects data comes from the operating system and must be drawn anew in every step, which a graph
        # that is traced once would not do.
        is_plain = self.plan.executor == "loop" or self.privacy is not None
        name = choose_executor("loop" if is_plain else "auto", self.model, self.data, clients_per_round=1)
        return {phase: EXECUTORS[name]() for phase in ("training", "joining")}

    def chosen(self) -> dict[str, Any]:
        """Which round was chosen when the run ended, and how good this party's model of it is."""
        file = self.folder / "chosen.json"
        if not file.exists():
            raise UserError(f"{self.folder} holds no model yet; the run has not ended, or this party has not heard so.")
        try:
            return unsealed_json(read_bytes(file))
        except DamagedError as error:
            raise RunError(f"{file} {error}; bring it back from a backup.") from None

    def personal_model(self) -> nn.Module:
        """The party's own model of the chosen round, a plain module."""
        chosen = self.chosen()
        phase, number = chosen["phase"], chosen["round"]
        tensors = read_tensors(self._evaluated(phase, number))
        if tensors is None:
            raise RunError(f"{self._evaluated(phase, number)} is missing or damaged; bring it back from a backup.")
        prefix = "received['"
        received = {name[len(prefix) : -2]: value for name, value in tensors.items() if name.startswith(prefix)}
        kept = filled("kept", self._first_contact(phase, received), tensors)
        is_adapted = chosen.get("is_adapted", self.plan.algorithm.adaptation_steps > 0)  # earlier versions did not say
        return self.model.with_weights(self._personal_weights(phase, number, received, kept, is_adapted))

    def _kept(self, phase: Phase, version: int | None, received: Params) -> Kept:
        """What this party kept after one of its rounds; before the first one, what it starts with."""
        first = self._first_contact(phase, received)
        if version is None:
            return first
        tensors = read_tensors(self._file(phase, version))
        if tensors is None:
            raise MissingVersion(f"what this party kept after round {version} is not on its disk any more.")
        kept: Kept = filled("", first, tensors)
        return kept

    def _first_contact(self, phase: Phase, received: Params) -> Kept:
        exchange, start = exchange_of(self.plan, phase), self.plan.initial_models()[self.architecture]
        return exchange.first_contact(self.model, start, received, int(self.identity))

    def versions(self, phase: Phase) -> list[int]:
        """The rounds after which it has what it kept, oldest first."""
        found = (re.fullmatch(r"kept-\w+-(\d+)", file.name) for file in self.folder.glob(f"kept-{phase}-*"))
        return sorted(int(match[1]) for match in found if match)

    def _forget(self, phase: Phase, number: int, wanted: Iterable[int | None]) -> None:
        """Remove versions that the server has no more use for.

        Newer ones than the message's own stay, whatever it says: it may be an old message that comes again.
        """
        for version in self.versions(phase):
            if version < number and version not in wanted:
                self._file(phase, version).unlink(missing_ok=True)

    def _file(self, phase: Phase, version: int) -> Path:
        return self.folder / f"kept-{phase}-{version}"

    def _evaluated(self, phase: Phase, number: int) -> Path:
        return self.folder / f"evaluated-{phase}-{number}"

    def _note(self, event: Mapping[str, Any]) -> None:
        self.heard[:-100] = []
        self.heard.append(event)
