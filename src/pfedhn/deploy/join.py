"""`pfedhn join`: a party's own process. It has the data, the key and what the party keeps; it comes back for ever."""

import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pfedhn.data.summaries import Noise
from pfedhn.deploy.examples import read_examples
from pfedhn.deploy.invitations import Bundle, check_name
from pfedhn.deploy.line import Followed, Line, Trouble
from pfedhn.deploy.party import Party
from pfedhn.deploy.party_policy import PartyPolicy, read_party_policy
from pfedhn.deploy.record import RECORD, Record
from pfedhn.deploy.signing import load_or_make_key, proof, public_key, public_text, session_proof, write_private
from pfedhn.deploy.spec import FederationSpec, read_spec, to_plan
from pfedhn.deploy.study import Study
from pfedhn.deploy.survey import MIN_GROUP, Surveyed, is_settled, settle, settled
from pfedhn.deploy.wire import WireError
from pfedhn.engine.plan import Plan
from pfedhn.errors import RunError, UserError
from pfedhn.privacy import Privacy
from pfedhn.runs.export import Portable, check_ending, model_card, write_model
from pfedhn.storage.files import digest
from pfedhn.system.files import given_path, make_folder, read_bytes, read_text, write_atomically

ENROLLED = "enrolled.json"  # what the server told the party when it let it in
POLICY = "policy.toml"  # of the party's owner

SECONDS_BETWEEN_TRIES = 3.0  # of a party that waits to be let in
MAX_SECONDS_BETWEEN_TRIES = 5.0  # of one that has lost its server; the first comes at once
SECONDS_OF_THE_OTHER = 30.0  # that a process leaves the place to another one with the same key
SECONDS_AFTER_THE_END = 1.0  # in which nothing more comes
SECONDS_TO_HEAR_AGAIN = 30.0  # for a server to ask a party that has come back with a model
MAX_SECONDS_OF_REST = 30.0  # between two looks at the clock, of a party that rests by its policy
MAX_TRIES = 3  # to hand in an answer before the server is asked for its messages again
MAX_WAITING = 8  # messages that wait while one is answered; an honest server has one of each kind
MAX_ANSWERS = 4  # that are kept in case the server asks again
SMALL_BODY = 4 << 20  # bytes


Say = Callable[[Mapping[str, Any]], None]


def find_study(
    bundle: Bundle, folder: Path, stop: threading.Event, say: Say, own_key: Path | None = None, is_patient: bool = True
) -> Study | None:
    """What the party is invited to: of one that has enrolled, its own copy; else what the server says.

    Nothing is enrolled or written. A patient party waits for the server as long as it takes, or until it is stopped.
    """
    check_name(bundle.name)
    if (folder / ENROLLED).exists():
        known = json.loads(read_text(folder / ENROLLED))
        if known["invitation"] == digest(asdict(bundle)):
            return Study.told(known)

    def ask(line: Line) -> dict[str, Any]:
        if bundle.token:
            return line.ask("/study", {"name": bundle.name, "token": bundle.token})
        key = load_or_make_key(_own_key(folder, own_key))
        nonce = str(line.ask("/challenge", {})["nonce"])
        signature = session_proof(key, bundle.name, nonce, bundle.authority).hex()
        return line.ask("/study", {"name": bundle.name, "nonce": nonce, "signature": signature})

    told = _patiently(bundle, ask, stop, say, is_patient)
    return None if told is None else Study.told(told)


def enroll(
    bundle: Bundle,
    folder: Path,
    stop: threading.Event,
    say: Say,
    own_key: Path | None = None,
    study: Study | None = None,
) -> None:
    """Make the party's key and hand in its public half; waits for the server as long as it takes.

    A new invitation gets a new key, and one that was used already is not used again. The server must still offer the
    `study` that the party's owner has agreed to.
    """
    check_name(bundle.name)
    make_folder(folder, mode=0o700)
    write_atomically(folder / "ca.crt", bundle.authority.encode(), mode=0o600)
    invitation = digest(asdict(bundle))
    file = _key_file(bundle, folder, own_key)
    key = load_or_make_key(folder / file)
    if (folder / ENROLLED).exists():
        known = json.loads(read_text(folder / ENROLLED))
        if (known["invitation"], known["key"]) == (invitation, file):
            return
    agreed = "" if study is None else study.digest
    table = {
        "name": bundle.name,
        "token": bundle.token,
        "key": public_text(key.public_key()),
        "agreed": agreed,
        "proof": proof(key, bundle.name, bundle.authority, agreed).hex(),
    }
    record = Record(folder / RECORD, key)
    if study is not None:
        record.add("agreed", is_lasting=True, study=agreed, proof=table["proof"])
    told = _patiently(bundle, lambda line: line.ask("/enroll", table), stop, say)
    if told is None:
        return
    if study is not None and Study.told(told) != study:
        raise RunError("the server has let this party in to another study than was agreed to; tell its owner.")
    content = json.dumps({**told, "invitation": invitation, "key": file}).encode()
    write_atomically(folder / ENROLLED, content, mode=0o600)
    record.add("enrolled", is_lasting=True, name=bundle.name, server_key=told.get("server", ""))
    say({"event": "enrolled", "party": bundle.name})


def _patiently(
    bundle: Bundle, ask: Callable[[Line], dict[str, Any]], stop: threading.Event, say: Say, is_patient: bool = True
) -> dict[str, Any] | None:
    """What the server says, however long it is away; None if the party is stopped before."""
    is_said = False
    line = Line(bundle)
    try:
        while not stop.is_set():
            try:
                return ask(line)
            except Trouble as trouble:
                if not is_patient:
                    raise RunError(f"{bundle.address} does not answer ({trouble}); try again later.") from None
                if not is_said:
                    say({"event": "waiting", "for": bundle.address, "why": str(trouble)})
                    is_said = True
            stop.wait(SECONDS_BETWEEN_TRIES)
    finally:
        line.close()
    return None


def keep_policy(folder: Path, file: Path | None) -> PartyPolicy:
    """The policy of the party's owner: that of a file, which is kept from then on, or the one that was kept."""
    kept = folder / POLICY
    if file is not None:
        text = read_text(file)
        policy = read_party_policy(text, file)
        write_atomically(kept, text.encode(), mode=0o600)
        return policy
    return read_party_policy(read_text(kept), kept) if kept.exists() else PartyPolicy()


def _key_file(bundle: Bundle, folder: Path, own_key: Path | None) -> str:
    """The name of the file in the party's folder that has its key; named after the token that the key is for."""
    if own_key is not None:
        load_or_make_key(_own_key(folder, own_key))
        write_private(folder / "key", read_bytes(own_key))
        return "key"
    return f"key-{digest(bundle.token)[:16]}" if bundle.token else _own_key(folder, None).name


def _own_key(folder: Path, given: Path | None) -> Path:
    """The file with a party's own private key: the given one, or the one that was kept."""
    if given is None and not (folder / "key").exists():
        raise UserError("the server has a public key of yours; say where its private half is: --key FILE.")
    if given is not None and not given.exists():
        raise UserError(f"{given} does not exist; give the file of your private key.")
    return given or folder / "key"


def remember(folder: Path, name: str, data: Path, size: str) -> None:
    """What a party that has enrolled was started with, for the commands that look at its folder later.

    A party that keeps layers of one network cannot go on with another.
    """
    enrolled, spec = _enrolled(folder)
    kept = folder / "kept" / enrolled["run"]
    own, before = size or next(iter(spec.sizes or [spec.cell.model])), kept / "size"
    if any(kept.glob("kept-*")) and before.exists() and read_text(before) != own:
        raise UserError(
            f"{name} has taken part with the size {read_text(before)}, and cannot change it; join with --size "
            f"{read_text(before)}, or as a new party with its own invitation and folder."
        )
    make_folder(kept, mode=0o700)
    write_atomically(before, own.encode(), mode=0o600)
    table = {"name": name, "data": str(data), "size": size}
    write_atomically(folder / "party.json", json.dumps(table).encode(), mode=0o600)


def _enrolled(folder: Path) -> tuple[dict[str, Any], FederationSpec]:
    """What the server told a party when it let it in, and the federation's file."""
    table: dict[str, Any] = json.loads(read_text(folder / ENROLLED))
    return table, settled(folder, table["run"], read_spec(table["spec"], folder / "spec.toml"))


def settle_first(
    bundle: Bundle,
    folder: Path,
    data: Path,
    stop: threading.Event,
    say: Callable[[Mapping[str, Any]], None],
    min_group: int = MIN_GROUP,
    noise: Noise | None = None,
) -> bool:
    """Take part in the statistics before training, if the federation has any; False if the party is stopped."""
    enrolled, spec = _enrolled(folder)
    if is_settled(spec):
        return True
    key, server = load_or_make_key(folder / enrolled["key"]), public_key(enrolled["server"])
    record = Record(folder / RECORD, key)
    party = Surveyed(spec, enrolled["run"], bundle.name, data, folder, key, server, min_group, noise, record)
    line = Line(bundle)
    try:
        return settle(party, line, stop, say)
    finally:
        line.close()


def load_party(
    folder: Path,
    data: Path | None = None,
    privacy: Privacy | None = None,
    device: str = "cpu",
    may_replace: bool = False,
) -> Party:
    """A party that has enrolled, with its data, whose place is given if they have moved.

    `may_replace` lets the server replace the model of a run that has ended.
    """
    (enrolled, spec), own = _enrolled(folder), json.loads(read_text(folder / "party.json"))
    plan, name, size = to_plan(spec, device), own["name"], own["size"]
    if size and size not in plan.models:
        raise UserError(f"there is no size {size!r}; there are {', '.join(plan.models)}.")
    federation = read_examples(data or own["data"], name, spec, plan, size)
    key, server, run = load_or_make_key(folder / enrolled["key"]), public_key(enrolled["server"]), enrolled["run"]
    kept, ledger = folder / "kept" / run, folder / "privacy.json"
    return Party(
        plan, run, name, federation, kept, key, server, size, privacy, ledger, keep_policy(folder, None), spec,
        Record(folder / RECORD, key), may_replace,
    )  # fmt: skip


def export_model(folder: Path, path: Path, data: Path | None = None) -> str:
    """Write a party's own model of the chosen round, in the format of the path's ending, and a card beside it.

    Returns the party's name. A method may adapt on the party's data, whose place is given if they have moved.
    """
    file = given_path(path)
    check_ending(file)
    party = load_party(folder, data)
    module, chosen = party.personal_model(), party.files.chosen()
    loss, correct, count = chosen["scores"]["test"]
    model, total = party.local.model, loss if correct is None else correct
    card = model_card(
        party.name,
        model,
        party.plan,
        (total, count),
        run=party.run,
        method=_enrolled(folder)[1].cell.method,
        chosen_step=chosen["round"] * party.plan.clients_per_round,
        steps=party.plan.num_rounds * party.plan.clients_per_round,
    )
    write_model(file, Portable.of(model, party.plan.clients), module, card)
    if party.record is not None:
        party.record.add("exported", is_lasting=True, run=party.run, round=chosen["round"], file=file.name)
    return party.name


def max_message(plan: Plan) -> int:
    """Bytes that an honest message of the server may have."""
    largest = max(
        sum(shape.numel() for shape in model.shapes.values()) + plan.extras[name].num_values[0]
        for name, model in plan.models.items()
    )
    return 2 * largest * plan.dtype.itemsize + SMALL_BODY


class Joined:
    """A party at work: one thread waits for the server's messages, and the caller's answers them.

    `say` is called with every event that a person should see.
    """

    def __init__(self, party: Party, bundle: Bundle, folder: Path, say: Callable[[Mapping[str, Any]], None]) -> None:
        party.refuse_forgotten_privacy()
        party.guard.check_study()
        self.party, self.bundle, self.folder, self.say = party, bundle, folder, say
        self.line = Line(bundle, max_message(party.plan))
        self.last_heard = time.monotonic()
        self.is_told = False  # in this life: that the run is over, and which round was chosen
        self._asked = self.last_heard  # whether the run has ended
        self._trouble = ""  # that was said last
        self._inbox: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self._fault: Exception | None = None  # that ends this process
        self._answers: OrderedDict[str, bytes] = OrderedDict()  # by message, the last few

    def run(self, stop: threading.Event, is_staying: bool = False) -> None:
        """Take part until it is asked to stop, or until the server has said that the run is over."""
        done = threading.Event()
        fetching = threading.Thread(target=self._fetch, args=(stop, done), daemon=True, name="line")
        fetching.start()
        try:
            while not stop.is_set():
                try:
                    message, asked = self._inbox.get(timeout=0.2)
                except queue.Empty:
                    if self._fault is not None:
                        raise self._fault from None
                    if not is_staying and self._is_over():
                        self.say({"event": "over", "party": self.party.name})
                        break
                else:
                    self._answer(message, asked, stop)
        finally:
            done.set()
            self.line.close()

    def _fetch(self, stop: threading.Event, done: threading.Event) -> None:
        """Wait for messages, and come back for ever: the server may be away for a while."""
        pause = 0.0
        while not (stop.is_set() or done.is_set()):
            if (rest := self.party.guard.seconds_to_wait()) > 0:  # it does not fetch what it would not answer
                self._tell("this party rests, by its policy")
                done.wait(min(rest, MAX_SECONDS_OF_REST))
                continue
            try:
                found = self.line.poll(self.party.name, self.party.key)
                self._tell("")
                pause = 0.0
                if found is not None and self._inbox.qsize() < MAX_WAITING:
                    self._inbox.put(found)
            except Followed as trouble:
                self._tell(str(trouble))
                done.wait(SECONDS_OF_THE_OTHER)
            except Trouble as trouble:
                self._tell(str(trouble))
                self.line.renew()  # a message may have been lost on its way: with a new session it comes again
                done.wait(pause)
                pause = min(MAX_SECONDS_BETWEEN_TRIES, 2 * pause + 0.1)
            except Exception as error:  # the certificate of another authority, or a defect of ours
                if not done.is_set():
                    self._fault = error
                return

    def _is_over(self) -> bool:
        """Whether nothing will come any more.

        A model from before says little: the server may have been brought back from a copy, and do rounds again. So a
        party that has just come asks it.
        """
        now = time.monotonic()
        if self.is_told:
            return now - self.last_heard > SECONDS_AFTER_THE_END
        if not self.party.files.has_chosen or now - max(self._asked, self.last_heard) < SECONDS_TO_HEAR_AGAIN:
            return False
        self._asked = now
        try:
            return bool(self.line.ask("/health").get("has_ended"))
        except (Trouble, UserError):
            return False

    def _tell(self, trouble: str) -> None:
        """Say once why nothing comes, and that it comes again; an empty text is no trouble."""
        if trouble != self._trouble and not self.is_told:  # a server leaves when the run is over
            self._trouble = trouble
            self.say({"event": "away", "why": f"{trouble}; it tries again"} if trouble else {"event": "connected"})

    def _answer(self, message: str, asked: bytes, stop: threading.Event) -> None:
        """Answer a message, once, however often it comes."""
        if message not in self._answers:
            try:
                self._answers[message] = self.party.answer(asked)
            except WireError as error:
                self.say({"event": "refused", "sentence": f"somebody {error}."})
                self._answers[message] = b""  # which the server refuses at once, and does not wait for
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        while self.party.heard:
            event = self.party.heard.pop(0)
            if event["kind"] in ("train", "evaluate"):
                self.is_told = bool(event.get("is_last"))
            self.say({"event": "heard", **event})
        self._hand_in(message, stop)
        self.last_heard = time.monotonic()

    def _hand_in(self, message: str, stop: threading.Event) -> None:
        for number in range(MAX_TRIES):
            try:
                if not self.line.reply(self.party.name, self.party.key, message, self._answers[message]):
                    self.say({"event": "lost", "why": "the server does not wait for this answer any more"})
                return
            except Followed:  # the other process has the message too
                return
            except Trouble as trouble:
                self._tell(str(trouble))
                stop.wait(0.5 * 2**number)
        self.line.renew()  # so that the server sends again what it wants to know
