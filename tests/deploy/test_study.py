"""What a party agrees to: it reads the study first, and enrolls for that one and no other."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import typer
from support import free_port

from pfedhn.cli import agree as agreeing
from pfedhn.cli.agree import need_consent, print_study
from pfedhn.cli.invite import invite as invite_command
from pfedhn.cli.join import join as join_command
from pfedhn.deploy import join
from pfedhn.deploy.certificates import AUTHORITY, make_certificates
from pfedhn.deploy.door import Door, OpenDoor
from pfedhn.deploy.invitations import Bundle
from pfedhn.deploy.join import ENROLLED, POLICY, Joined, enroll, find_study, keep_policy, load_party, remember
from pfedhn.deploy.mailroom import Mailroom
from pfedhn.deploy.party_policy import PartyPolicy, Refusal
from pfedhn.deploy.record import RECORD, read_record
from pfedhn.deploy.signing import is_proven, load_or_make_key, public_key, public_text
from pfedhn.deploy.site import Site
from pfedhn.deploy.spec import read_spec
from pfedhn.deploy.study import AGREED, Study, has_agreed, message_bytes
from pfedhn.errors import RunError, UserError
from pfedhn.privacy import Privacy

SPEC = """
method = "pfedhn-pc"
model = "mlp-4"
clients = 3
steps = 30
cohort_size = 2
batch_size = 16
[settings]
local_steps = 5
[study]
operator = "University Hospital of Lyon"
purpose = "predict the outcome"
[data]
classes = ["ill", "well"]
label = "outcome"
features = ["age", "dose"]
"""


class World:
    """A server that lets parties in, and a party's folder."""

    def __init__(self, folder: Path, text: str = SPEC) -> None:
        (folder / "spec.toml").write_text(text)
        self.port, self.own = free_port(), folder / "own"
        self.site = Site.make(folder / "state", folder / "spec.toml", f"127.0.0.1:{self.port}", "127.0.0.1", self.port)
        make_certificates(self.site.folder, ["127.0.0.1"])
        self.events: list[Any] = []
        self.door = Door(
            Mailroom(), self.site.invitations, (self.site.folder / AUTHORITY).read_text(), self.enrolled,
            lambda: {"is_up": True}, self.events.append, study=self.site.study, agreed=self.site.note_agreed,
        )  # fmt: skip
        self.opened = OpenDoor(self.door, self.site.folder, "127.0.0.1", self.port)
        self.opened.start()
        self.told: dict[str, str] = self.site.study.table()

    def enrolled(self, name: str) -> dict[str, str]:
        return self.told

    def invite(self, name: str = "lyon", key: str | None = None) -> Bundle:
        return self.site.invite(name, key)

    def find(self, bundle: Bundle, key: Path | None = None) -> Study:
        found = find_study(bundle, self.own, threading.Event(), self.events.append, key, is_patient=False)
        assert found is not None
        return found

    def enroll(self, bundle: Bundle, study: Study | None, key: Path | None = None) -> None:
        enroll(bundle, self.own, threading.Event(), self.events.append, key, study)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.opened.stop()


def test_a_study_is_read_without_using_up_the_invitation(world: World) -> None:
    bundle = world.invite()
    study = world.find(bundle)
    assert study == world.find(bundle) == world.site.study
    assert not world.own.exists()
    assert not world.site.invitations.enrolled()
    world.enroll(bundle, study)
    assert set(world.site.invitations.enrolled()) == {"lyon"}
    world.opened.stop()
    assert world.find(bundle) == study  # its own copy, which nobody can change


def test_a_study_is_for_those_who_are_invited(world: World, tmp_path: Path) -> None:
    bundle = world.invite()
    for name, token in (("lyon", "guessed"), ("paris", bundle.token), ("../lyon", bundle.token)):
        line = join.Line(Bundle(name, bundle.address, bundle.authority, token))
        with pytest.raises(UserError, match="is not invited, or its invitation has run out"):
            line.ask("/study", {"name": name, "token": token})
        line.close()
    own, other = tmp_path / "mine", tmp_path / "other"
    invited = world.invite("oslo", public_text(load_or_make_key(own).public_key()))
    load_or_make_key(other)
    with pytest.raises(UserError, match="--key FILE"):
        world.find(invited)
    with pytest.raises(UserError, match="is not invited"):
        world.find(invited, other)
    assert world.find(invited, own) == world.site.study
    assert not world.own.exists()
    world.site.revoke("lyon")
    with pytest.raises(UserError, match="is not invited"):
        world.find(bundle)
    line = join.Line(bundle)
    for table in ({}, {"name": "lyon"}, {"name": "oslo", "signature": "zz", "nonce": "a"}):
        with pytest.raises((UserError, join.Trouble)):
            line.ask("/study", table)
    line.close()


def test_a_party_is_let_in_to_the_study_that_it_agreed_to(world: World) -> None:
    bundle = world.invite()
    study = world.find(bundle)
    other = Study(study.run, study.spec_text.replace("local_steps = 5", "local_steps = 1"), study.server)
    assert other.digest != study.digest
    for wrong in (other, None):
        with pytest.raises(UserError, match="is another one than was agreed to"):
            world.enroll(bundle, wrong)
    assert not world.site.invitations.enrolled()
    world.told = other.table()  # a server that says one thing and then another
    with pytest.raises(RunError, match="another study than was agreed to"):
        world.enroll(bundle, study)
    assert not (world.own / ENROLLED).exists()
    world.told = study.table()
    world.enroll(bundle, study)
    assert Study.told(json.loads((world.own / ENROLLED).read_text())) == study


def test_both_sides_record_the_agreement(world: World) -> None:
    bundle = world.invite()
    world.enroll(bundle, world.find(bundle))
    world.site.revoke("lyon")
    mine, theirs = read_record(world.own / RECORD), read_record(world.site.folder / "record" / "lyon.jsonl")
    assert [line["event"] for line in mine] == ["agreed", "enrolled"]
    assert [line["event"] for line in theirs] == ["invited", "agreed", "revoked"]
    agreed = theirs[1]
    assert agreed["study"] == mine[0]["study"] == world.site.study.digest
    proof, key = bytes.fromhex(agreed["proof"]), public_key(agreed["party_key"])
    assert is_proven(proof, key, "lyon", bundle.authority, agreed["study"])
    assert not is_proven(proof, key, "lyon", bundle.authority, "f" * 32)
    assert not is_proven(proof, key, "lyon", bundle.authority)


def test_a_server_that_is_away_is_waited_for_unless_the_study_is_only_shown(world: World) -> None:
    bundle, stop = world.invite(), threading.Event()
    world.opened.stop()
    with pytest.raises(RunError, match=r"does not answer \(the server cannot be reached"):
        world.find(bundle)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(find_study(bundle, world.own, stop, world.events.append)))
    waiting.start()
    while not world.events:
        waiting.join(0.05)
    stop.set()
    waiting.join(60)
    assert found == [None]
    assert world.events[0]["event"] == "waiting"


def test_a_study_says_what_it_asks_for() -> None:
    study = Study("ab12", SPEC, "ecdsa-sha2-nistp384 AAAA")
    told = study.description()
    assert told["operator"] == "University Hospital of Lyon"
    assert told["columns"] == "age, dose; label outcome"
    assert told["classes"] == "ill, well"
    assert told["training"] == "5 local steps of 16 examples in each round"
    assert told["rounds"] == "15, 2 of 3 parties in each; 20 for a party that joins after training"
    down, up = message_bytes(study.plan)
    assert (down, up) == (48, 48)  # 2 x 4 weights and 4 biases; the last layer stays with the party
    assert told["sent"].startswith("updates of the weights, 48 bytes a message, scores")
    assert told["privacy"].startswith("none")
    private = study.description(Privacy(1.0, 2.0, epsilon=8.0))
    assert "scores" not in private["sent"]
    assert private["privacy"] == "level client, clip 1, noise 2, epsilon at most 8"
    fast = Study("ab12", SPEC.replace("cohort_size = 2", 'cohort_size = 2\nin_flight = 2\nupload = "half"'), "")
    assert "2 parties at a time" in fast.description()["rounds"]
    assert message_bytes(fast.plan) == (48, 24)
    table = SPEC.replace('["ill", "well"]', "2").replace("features", "shape = [2]\n#")
    assert Study("", table, "").description()["columns"] == "arrays of shape 2"


@pytest.mark.parametrize("change", ["run", "spec_text", "server"])
def test_a_digest_is_of_everything(change: str) -> None:
    parts = {"run": "a", "spec_text": SPEC, "server": "key"}
    assert Study(**parts).digest == Study(**parts).digest
    assert Study(**parts).digest != Study(**{**parts, change: "b"}).digest


def test_an_operator_is_one_line() -> None:
    for text in ("a" * 501, "a\\nb"):
        with pytest.raises(UserError, match="one line of at most 500 letters"):
            read_spec(SPEC.replace("predict the outcome", text), Path("spec.toml"))
    with pytest.raises(UserError, match="did you mean 'operator'"):
        read_spec(SPEC.replace("operator =", "operators ="), Path("spec.toml"))


class Terminal:
    """Where somebody sits and answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(agreeing.sys, "stdin", self)
        monkeypatch.setattr(agreeing.sys.stdout, "isatty", lambda: True)
        monkeypatch.setattr(typer, "confirm", lambda text, default: (self.asked.append(text), answer)[1])

    def isatty(self) -> bool:
        return True


def test_a_person_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    study = Study("ab12", SPEC, "")
    refusing = Terminal(monkeypatch, False)
    with pytest.raises(UserError, match="you did not agree, and nothing was enrolled"):
        need_consent(tmp_path, study, None, None, "show")
    assert refusing.asked == ["Take part in it?"]
    assert not (tmp_path / AGREED).exists()
    agreeing_person = Terminal(monkeypatch, True)
    need_consent(tmp_path, study, None, None, "show")
    need_consent(tmp_path, study, None, None, "show")
    assert len(agreeing_person.asked) == 1
    assert has_agreed(tmp_path, study)
    assert f"digest      {study.digest}" in capsys.readouterr().out
    need_consent(tmp_path, Study("cd34", SPEC, ""), None, None, "show")
    assert len(agreeing_person.asked) == 2
    assert "another study than you agreed to before" in capsys.readouterr().out
    assert (tmp_path / AGREED).stat().st_mode & 0o077 == 0


def test_without_a_terminal_the_digest_is_needed(tmp_path: Path) -> None:
    study, other = Study("ab12", SPEC, ""), Study("cd34", SPEC, "")
    with pytest.raises(UserError, match=f"nobody has agreed .* read it with `show`, .* --accept {study.digest}"):
        need_consent(tmp_path, study, None, None, "show")
    with pytest.raises(UserError, match=f"the digest of this study is {study.digest}, and 'ab' was accepted"):
        need_consent(tmp_path, study, None, "ab", "show")
    need_consent(tmp_path, study, None, study.digest, "show")
    need_consent(tmp_path, study, None, None, "show")
    with pytest.raises(UserError, match="another study than was agreed to here"):
        need_consent(tmp_path, other, None, None, "show")
    with pytest.raises(UserError, match=f"the digest of this study is {other.digest}"):
        need_consent(tmp_path, other, None, study.digest, "show")


def write_table(folder: Path) -> Path:
    rows = "\n".join(f"{20 + n},{n % 7},{'ill' if n % 2 else 'well'}" for n in range(60))
    (folder / "visits.csv").write_text(f"age,dose,outcome\n{rows}\n")
    return folder / "visits.csv"


def test_the_command_shows_and_asks_before_it_enrolls(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Joined, "run", lambda *given: None)
    file = tmp_path / "lyon.invite"
    file.write_text(json.dumps(vars(world.invite())))
    given: Any = {"bundle": file, "folder": world.own, "as_json": True, "device": "cpu"}
    join_command(**given, show=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["digest"] == world.site.study.digest
    assert shown["spec"] == SPEC
    assert not world.own.exists()
    with pytest.raises(UserError, match="give your data"):
        join_command(**given)
    given |= {"data": write_table(tmp_path)}
    with pytest.raises(UserError, match=f"--accept {shown['digest']}"):
        join_command(**given)
    policy = tmp_path / "policy.toml"
    policy.write_text('methods = ["fedavg"]\n')
    with pytest.raises(Refusal, match="allows fedavg"):
        join_command(**given, accept=shown["digest"], policy=policy)
    with pytest.raises(Refusal, match="allows fedavg"):  # the policy is kept
        join_command(**given, accept=shown["digest"])
    assert not world.site.invitations.enrolled()
    policy.write_text('methods = ["fedavg", "pfedhn-pc"]\nmax_rounds = 20\n')
    join_command(**given, accept=shown["digest"], policy=policy)
    assert set(world.site.invitations.enrolled()) == {"lyon"}
    join_command(**given)
    party = load_party(world.own)
    assert (party.policy.max_rounds, party.spec, party.may_replace) == (20, world.site.study.spec, False)
    assert party.record is not None
    capsys.readouterr()
    spoofed = SPEC.replace('"age"', '"age\\nprivacy     level client"')
    print_study(Study("ab12", spoofed, ""), None)
    said = capsys.readouterr().out
    assert "sent        updates of the weights" in said
    assert [line for line in said.splitlines() if line.startswith("privacy")] == [
        "privacy     none; updates can reveal training examples (pfedhn join --help)"
    ]


def test_a_policy_is_kept_for_good(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    assert keep_policy(tmp_path / "own", None) == PartyPolicy()
    (tmp_path / "mine.toml").write_text("max_repeats = 0\n")
    assert keep_policy(tmp_path / "own", tmp_path / "mine.toml") == PartyPolicy(max_repeats=0)
    assert keep_policy(tmp_path / "own", None) == PartyPolicy(max_repeats=0)
    (tmp_path / "mine.toml").write_text("max_repeat = 0\n")
    with pytest.raises(UserError, match="max_repeats"):
        keep_policy(tmp_path / "own", tmp_path / "mine.toml")
    assert (tmp_path / "own" / POLICY).read_text() == "max_repeats = 0\n"


def test_a_key_is_replaced_only_if_that_is_wanted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, file = world.site.folder, tmp_path / "lyon.invite"
    invite_command("lyon", state=state, out=file)
    invite_command("lyon", state=state, out=file)  # nobody has come with the first one
    bundle = join.Bundle(**json.loads(file.read_text()))
    world.enroll(bundle, world.find(bundle))
    with pytest.raises(UserError, match=r"lyon has enrolled a key, .* add --replace"):
        invite_command("lyon", state=state, out=file)
    with pytest.raises(UserError, match="'Lyon' differs from the party 'lyon' only in case"):
        invite_command("Lyon", state=state, out=file)
    Terminal(monkeypatch, False)
    with pytest.raises(UserError, match="keeps its key"):
        invite_command("lyon", state=state, out=file)
    assert world.site.invitations.has_key("lyon")
    Terminal(monkeypatch, True)
    invite_command("lyon", state=state, out=file)
    assert not world.site.invitations.has_key("lyon")
    monkeypatch.undo()
    bundle = join.Bundle(**json.loads(file.read_text()))
    world.enroll(bundle, world.find(bundle))
    invite_command("lyon", state=state, out=file, replace=True)
    assert not world.site.invitations.has_key("lyon")


def test_an_export_is_recorded(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = world.invite()
    world.enroll(bundle, world.find(bundle))
    remember(world.own, "lyon", write_table(tmp_path), "")
    party = load_party(world.own)
    counted = [0.1, 1.0, 2]
    party.files.write_chosen({"phase": "training", "round": 3, "scores": {"test": counted}})
    monkeypatch.setattr(join, "load_party", lambda *given: party)
    monkeypatch.setattr(type(party), "personal_model", lambda self: MagicMock())
    monkeypatch.setattr(join, "write_model", lambda *given: None)
    join.export_model(world.own, tmp_path / "model.safetensors")
    last = read_record(world.own / RECORD)[-1]
    assert (last["event"], last["round"], last["file"]) == ("exported", 3, "model.safetensors")


def test_a_party_rests_outside_of_its_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fetches nothing then, so the server counts nothing against it."""
    monkeypatch.setattr(join, "max_message", lambda plan: 1_000)
    monkeypatch.setattr(join, "Line", Mock())
    party = Mock(heard=[])
    rests = iter([5.0, 5.0, 0.0])
    done, said = threading.Event(), list[Any]()
    waited: list[float] = []
    monkeypatch.setattr(done, "wait", lambda seconds: waited.append(seconds))
    party.guard.seconds_to_wait = lambda: next(rests)
    joined = Joined(party, Bundle("lyon", "", "", ""), tmp_path, said.append)
    joined.line.poll = lambda *given: done.set()  # type: ignore[method-assign, assignment, func-returns-value]
    joined._fetch(threading.Event(), done)
    assert waited == [5.0, 5.0]
    assert [event["event"] for event in said] == ["away", "connected"]
