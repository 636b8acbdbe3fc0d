"""`pfedhn join`: a party's own process. It has the data, the key and what the party keeps; it comes back for ever."""

import base64
import json
import socket
import socketserver
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pfedhn.deploy import programs
from pfedhn.deploy.examples import read_examples
from pfedhn.deploy.invitations import Bundle, check_name
from pfedhn.deploy.party import Party
from pfedhn.deploy.relay import read_message, write_message
from pfedhn.deploy.signing import KEY_HEADER, key_text, load_or_make_key, proof, public_key, public_text, write_private
from pfedhn.deploy.spec import FederationSpec, read_spec, to_plan
from pfedhn.deploy.wire import WireError
from pfedhn.errors import RunError, UserError, first_line
from pfedhn.privacy import Privacy
from pfedhn.runs.export import Portable, check_ending, model_card, write_model
from pfedhn.storage.files import digest
from pfedhn.system.files import given_path, make_folder, read_bytes, read_text, write_atomically

MAX_ANSWER = 1 << 24  # bytes
ENROLLED = "enrolled.json"  # what the server told the party when it let it in

SECONDS_BETWEEN_TRIES = 3.0
SECONDS_OF_SILENCE = 20.0  # after which the server is asked what is wrong
SECONDS_AFTER_THE_END = 10.0  # for the last answer to be carried away
SECONDS_TO_HEAR_AGAIN = 30.0  # for a server to ask a party that has come back with a model


def enroll(
    bundle: Bundle,
    folder: Path,
    stop: threading.Event,
    say: Callable[[Mapping[str, Any]], None],
    own_key: Path | None = None,
) -> None:
    """Make the party's key and hand in its public half; waits for the server as long as it takes.

    A new invitation gets a new key, and one that was used already is not used again.
    """
    check_name(bundle.name)
    make_folder(folder, mode=0o700)
    write_atomically(folder / "ca.crt", bundle.authority.encode())
    invitation = digest(asdict(bundle))
    file = _key_file(bundle, folder, own_key)
    key = load_or_make_key(folder / file)
    if (folder / ENROLLED).exists():
        known = json.loads(read_text(folder / ENROLLED))
        if (known["invitation"], known["key"]) == (invitation, file):
            return
    table = {
        "name": bundle.name,
        "token": bundle.token,
        "key": public_text(key.public_key()),
        "proof": proof(key, bundle.name, bundle.authority).hex(),
    }
    is_said = False
    while not stop.is_set():
        try:
            told = json.loads(_ask(bundle, "/enroll", json.dumps(table).encode()))
            content = json.dumps({**told, "invitation": invitation, "key": file}).encode()
            write_atomically(folder / ENROLLED, content, mode=0o600)
            say({"event": "enrolled", "party": bundle.name})
            return
        except urllib.error.HTTPError as error:
            if error.code == 403:
                raise UserError(json.loads(error.read())["error"]) from None
            trouble = f"it answers with code {error.code}"
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise RunError(
                    f"{bundle.address} is not the server of this invitation (its certificate is of another authority); "
                    "ask for a new invitation."
                ) from None
            trouble = str(error.reason)
        except (OSError, ValueError) as error:
            trouble = first_line(error)
        if not is_said:
            say({"event": "waiting", "for": bundle.address, "why": trouble})
            is_said = True
        stop.wait(SECONDS_BETWEEN_TRIES)


def _ask(bundle: Bundle, path: str, data: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The answer of the server's gateway."""
    context = ssl.create_default_context(cadata=bundle.authority)
    request = urllib.request.Request(f"https://{bundle.address}{path}", data=data, headers=dict(headers or {}))
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:  # noqa: S310 - https alone
        return bytes(answer.read(MAX_ANSWER))


def _key_file(bundle: Bundle, folder: Path, own_key: Path | None) -> str:
    """The name of the file in the party's folder that has its key; named after the token that the key is for."""
    if own_key is not None:
        if not own_key.exists():
            raise UserError(f"{own_key} does not exist; give the file of your private key.")
        load_or_make_key(own_key)
        write_private(folder / "key", read_bytes(own_key))
        return "key"
    if bundle.token:
        return f"key-{digest(bundle.token)[:16]}"
    if not (folder / "key").exists():
        raise UserError("the server has a public key of yours; say where its private half is: --key FILE.")
    return "key"


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
    return table, read_spec(table["spec"], folder / "spec.toml")


def load_party(folder: Path, data: Path | None = None, privacy: Privacy | None = None, device: str = "cpu") -> Party:
    """A party that has enrolled, with its data, whose place is given if they have moved."""
    (enrolled, spec), own = _enrolled(folder), json.loads(read_text(folder / "party.json"))
    plan, name, size = to_plan(spec, device), own["name"], own["size"]
    if size and size not in plan.models:
        raise UserError(f"there is no size {size!r}; there are {', '.join(plan.models)}.")
    federation = read_examples(data or own["data"], name, spec, plan, size)
    key, server, run = load_or_make_key(folder / enrolled["key"]), public_key(enrolled["server"]), enrolled["run"]
    kept, ledger = folder / "kept" / run, folder / "privacy.json"
    return Party(plan, run, name, federation, kept, key, server, size, privacy, ledger)


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
    return party.name


class Joined:
    """A party at work: its process waits at a socket, and Flower's node carries messages to it.

    `say` is called with every event that a person should see.
    """

    def __init__(self, party: Party, bundle: Bundle, folder: Path, say: Callable[[Mapping[str, Any]], None]) -> None:
        party.refuse_forgotten_privacy()
        self.party, self.bundle, self.folder, self.say = party, bundle, folder, say
        self.node: subprocess.Popen[bytes] | None = None
        self.place = Path()  # of the socket, while it is at work
        self.last_heard = time.monotonic()
        self.is_told = False  # in this life: that the run is over, and which round was chosen
        self.key_file = folder / json.loads(read_text(folder / ENROLLED))["key"]
        self._trouble = ""  # that was said last
        self._asked = self.last_heard  # whether the run has ended
        self._lock = threading.Lock()

    def run(self, stop: threading.Event, is_staying: bool = False) -> None:
        """Take part until it is asked to stop, or until the server has said that the run is over."""
        answer = self._answer

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                answer(self.request)

        # Short, as the path of a socket must be, and ours alone.
        with tempfile.TemporaryDirectory(prefix="pfedhn-", ignore_cleanup_errors=True) as place:
            self.place = Path(place)
            with socketserver.ThreadingUnixStreamServer(str(self.place / "socket"), Handler) as listener:
                listener.daemon_threads = True  # a round that is being computed does not hold up the end
                threading.Thread(target=listener.serve_forever, daemon=True).start()
                try:
                    self._take_part(stop, is_staying)
                finally:
                    programs.stop(self.node)
                    listener.shutdown()

    def _take_part(self, stop: threading.Event, is_staying: bool) -> None:
        looked = time.monotonic()
        while not stop.is_set():
            self._keep_node()
            if time.monotonic() - max(looked, self.last_heard) > SECONDS_OF_SILENCE:
                self._tell(self._trouble_there())
                looked = time.monotonic()
            if not is_staying and self._is_over():
                self.say({"event": "over", "party": self.party.name})
                break
            stop.wait(0.5)

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
            return bool(json.loads(_ask(self.bundle, "/health"))["has_ended"])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _keep_node(self) -> None:
        """Flower's node, started again whenever it ends: the server may be away for a while."""
        if self.node is not None and self.node.poll() is None:
            return
        if self.node is not None:
            programs.stop(self.node)
            self._tell(self._trouble_there() or "the server takes a minute to let go of the last connection")
            time.sleep(SECONDS_BETWEEN_TRIES)
        home = self.folder / "engine"
        make_folder(home, mode=0o700)
        command = [
            programs.path_of("flower-supernode"), "--superlink", self.bundle.address,
            "--root-certificates", str(self.folder / "ca.crt"),
            "--auth-supernode-private-key", str(self.key_file),
            "--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(programs.free_port()),
            "--node-config", f'socket="{self.place / "socket"}"',
        ]  # fmt: skip
        self.node = programs.start(command, home)

    def _tell(self, trouble: str) -> None:
        """Say once why nothing comes, and that it comes again; an empty text is no trouble."""
        if trouble != self._trouble:
            self._trouble = trouble
            self.say({"event": "away", "why": f"{trouble}; it tries again"} if trouble else {"event": "connected"})

    def _trouble_there(self) -> str:
        """What is wrong at the server: it cannot be reached, or does not take this party's key; empty if nothing is."""
        key = base64.b64encode(key_text(self.party.key.public_key())).decode()
        try:
            _ask(self.bundle, "/v1/fleet/known", b"", {KEY_HEADER: key})
        except urllib.error.HTTPError as error:
            if error.code == 401:
                return "the server does not take this party's key: ask for a new invitation"
        except OSError as error:
            return f"the server cannot be reached ({first_line(error)})"
        return ""

    def _answer(self, stream: socket.socket) -> None:
        with stream, self._lock:  # one after the other
            try:
                asked = read_message(stream)
                answer = self.party.answer(asked)
            except WireError as error:
                self.say({"event": "refused", "sentence": f"somebody {error}."})
                return
            except OSError:
                return
            finally:
                self.last_heard, self._trouble = time.monotonic(), ""
            while self.party.heard:
                event = self.party.heard.pop(0)
                if event["kind"] != "refusal":
                    self.is_told = bool(event.get("is_last"))
                self.say({"event": "heard", **event})
            try:
                write_message(stream, answer)
            except OSError as error:
                self.say({"event": "lost", "why": first_line(error)})
