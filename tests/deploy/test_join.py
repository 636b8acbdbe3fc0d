"""A party gets in with its invitation, over TLS, and every invitation has a key of its own."""

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from parties import Group, simulation_of, small
from support import free_port

from pfedhn.cli import join as join_command
from pfedhn.cli.federation import standing
from pfedhn.deploy import join, party_folder
from pfedhn.deploy import privacy as secrets
from pfedhn.deploy.certificates import AUTHORITY, make_certificates
from pfedhn.deploy.door import Door, OpenDoor
from pfedhn.deploy.invitations import Bundle, Invitations
from pfedhn.deploy.join import ENROLLED, Joined, enroll, load_party, remember
from pfedhn.deploy.mailroom import Mailroom
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.serve import Service
from pfedhn.deploy.signing import load_or_make_key, public_text, write_private
from pfedhn.deploy.site import Site
from pfedhn.deploy.study import Study
from pfedhn.errors import RunError, UserError
from pfedhn.privacy import Privacy
from pfedhn.storage.files import digest
from pfedhn.system.files import claimed, is_claimed, writing

SPEC = 'model = "mlp-4"\nclients = 2\n[data]\nclasses = 2\nshape = [2]\n'


class Server:
    """The door of a server, on loopback."""

    def __init__(self, folder: Path) -> None:
        make_certificates(folder, ["127.0.0.1"])
        self.invitations, self.told = Invitations(folder / "parties"), list[str]()
        self.authority, self.port = (folder / AUTHORITY).read_text(), free_port()
        self.health = {"is_up": True, "has_ended": False}
        self.mailroom = Mailroom()
        door = Door(
            self.mailroom, self.invitations, self.authority, self.enrolled, lambda: self.health, lambda event: None
        )
        self.gate = OpenDoor(door, folder, "127.0.0.1", self.port)

    def enrolled(self, name: str) -> dict[str, Any]:
        self.told.append(self.key_of(name))
        return {"run": "one", "spec": "", "server": ""}

    def invite(self, name: str, key: str | None = None) -> Bundle:
        return self.invitations.invite(name, f"127.0.0.1:{self.port}", self.authority, key)

    def key_of(self, name: str) -> str:
        return public_text(self.invitations.enrolled()[name])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.gate.start()
    yield made
    made.gate.stop()


def come(bundle: Bundle, folder: Path, key: Path | None = None) -> str:
    """Enroll; the party's key as its folder has it then."""
    enroll(bundle, folder, threading.Event(), lambda event: None, key)
    file = json.loads((folder / ENROLLED).read_text())["key"]
    return public_text(load_or_make_key(folder / file).public_key())


def test_a_new_invitation_is_a_new_key(server: Server, tmp_path: Path) -> None:
    own, first = tmp_path / "own", server.invite("lyon")
    key = come(first, own)
    assert server.key_of("lyon") == key
    assert come(first, own) == key  # started again: it has enrolled already
    assert server.told == [key]
    (own / ENROLLED).unlink()  # killed before it could note what it was told
    assert come(first, own) == key
    second = server.invite("lyon")
    other = come(second, own)
    assert other != key
    assert server.key_of("lyon") == other
    with pytest.raises(UserError, match="not invited"):
        come(first, tmp_path / "thief")
    assert all(file.stat().st_mode & 0o077 == 0 for file in own.glob("key-*"))


def test_a_party_may_bring_its_own_key(server: Server, tmp_path: Path) -> None:
    own, file = tmp_path / "own", tmp_path / "mine"
    key = public_text(load_or_make_key(file).public_key())
    bundle = server.invite("lyon", key)
    with pytest.raises(UserError, match="--key FILE"):
        come(bundle, own)
    with pytest.raises(UserError, match="does not exist"):
        come(bundle, own, tmp_path / "nothing")
    load_or_make_key(tmp_path / "another")
    with pytest.raises(UserError, match="not invited"):
        come(bundle, own, tmp_path / "another")
    assert come(bundle, own, file) == key
    assert come(bundle, own) == key  # its folder has it now


def test_a_server_of_another_authority_is_not_spoken_to(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other, ["127.0.0.1"])
    bundle = server.invite("lyon")
    with pytest.raises(RunError, match="is not the server of this invitation"):
        come(Bundle(bundle.name, bundle.address, (other / AUTHORITY).read_text(), bundle.token), tmp_path / "own")
    assert not server.told


def test_a_party_leaves_when_the_run_is_over_and_not_before(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was brought back from a copy does rounds again, with parties that have a model already."""
    monkeypatch.setattr(join, "SECONDS_TO_HEAR_AGAIN", 0.0)
    monkeypatch.setattr(join, "SECONDS_AFTER_THE_END", 0.0)
    bundle = server.invite("lyon")
    come(bundle, tmp_path / "own")
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(join, "max_message", lambda plan: 1_000)
    party = Mock(folder=tmp_path, heard=heard, answer=lambda asked: b"answer")
    party.name, party.key = "lyon", load_or_make_key(tmp_path / "own" / f"key-{digest(bundle.token)[:16]}")
    party.files.has_chosen = False
    joined = Joined(party, bundle, tmp_path / "own", lambda event: None)

    def ask(**event: Any) -> None:
        heard.append(event)
        joined._answer(f"message-{event}", b"asked", threading.Event())

    assert not joined._is_over()  # it has no model
    party.files.has_chosen = True
    assert not joined._is_over()
    server.health["has_ended"] = True
    assert joined._is_over()
    server.health["has_ended"] = False
    ask(kind="evaluate", is_last=True)
    assert joined._is_over()
    ask(kind="refusal")
    assert joined._is_over()
    ask(kind="train")
    assert not joined._is_over()
    server.gate.stop()
    assert not joined._is_over()  # it may come back
    joined.line.close()


def test_what_is_kept_is_its_owner_s_alone(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody else had made the folder, open to all."""
    before = os.umask(0o022)
    try:
        simulation = simulation_of(small("pfedhn-pc"), rounds=1, cohort=1)
        group = Group(simulation, tmp_path / "group", Policy(start_with=1), clients=[0])
        group.server.run()
        assert group.parties["party-0"].heard[-1]["is_last"]
        spec = tmp_path / "spec.toml"
        spec.write_text(SPEC)
        Site.make(tmp_path / "state", spec)
        (tmp_path / "own").mkdir()
        come(server.invite("lyon"), tmp_path / "own")
        write_enrolled(tmp_path / "own", SPEC)
        remember(tmp_path / "own", "lyon", tmp_path, "")
        service = Service(Site(tmp_path / "state"), True, lambda event: None)
        service.site.log({"event": "serving"})
        private = Privacy(1.0, 1.0, 100.0)
        monkeypatch.setattr(secrets, "spent", lambda history, delta: 0.0)  # the accountant takes time to load
        secrets.Budget(private, tmp_path / "privacy.json").pay(private.cost(10, 5, 1))
    finally:
        os.umask(before)
    closed = ["group/server", "group/party-0", "state", "state/parties", "own/kept/one", "privacy.json"]
    closed += ["own/party.json", "own/enrolled.json", "group/party-0/chosen.json", "state/events.jsonl"]
    closed += [str(file.relative_to(tmp_path)) for file in (tmp_path / "group" / "server").iterdir()]
    assert {name for name in closed if (tmp_path / name).stat().st_mode & 0o077} == set()


@pytest.mark.slow
def test_a_card_counts_steps_as_a_simulation_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that sends nothing trains everybody in every round, whatever the size of a cohort."""
    simulation = simulation_of(small("local"), rounds=8, cohort=1, evaluate_every=1)
    group = Group(simulation, tmp_path / "group")
    group.server.run()
    party = group.parties["party-0"]
    write_enrolled(tmp_path, SPEC)
    monkeypatch.setattr(join, "load_party", lambda *given: party)
    write_model = Mock()
    monkeypatch.setattr(join, "write_model", write_model)
    join.export_model(tmp_path, tmp_path / "model.safetensors")
    card = write_model.call_args.args[3]
    assert party.files.chosen()["round"] > 0
    assert card["chosen_step"] == party.files.chosen()["round"] * len(group.parties)
    assert card["steps"] == simulation.num_rounds * len(group.parties)


def write_enrolled(folder: Path, spec: str) -> None:
    """What a party is told when it is let in."""
    key = json.loads((folder / ENROLLED).read_text())["key"] if (folder / ENROLLED).exists() else "key"
    table = {"run": "one", "spec": spec, "server": "", "invitation": "", "key": key}
    write_private(folder / ENROLLED, json.dumps(table).encode())


def test_a_party_keeps_the_size_that_it_has_trained(tmp_path: Path) -> None:
    write_enrolled(tmp_path, SPEC + '[sizes]\nS = "mlp-4"\nL = "mlp-8"\n')
    remember(tmp_path, "lyon", tmp_path, "S")
    remember(tmp_path, "lyon", tmp_path, "L")  # nothing has come of it yet
    remember(tmp_path, "lyon", tmp_path, "")
    (tmp_path / "kept" / "one" / "kept-training-0").touch()
    remember(tmp_path, "lyon", tmp_path, "S")
    with pytest.raises(UserError, match="with the size S, and cannot change it; join with --size S"):
        remember(tmp_path, "lyon", tmp_path, "L")
    assert json.loads((tmp_path / "party.json").read_text())["size"] == "S"


def test_noise_is_not_forgotten_in_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was spent stands in the party's folder, whichever run it was for; without the options nothing is sent."""
    monkeypatch.setattr(secrets, "spent", lambda history, delta: float(sum(cost.steps for cost in history)))
    numpy.save(tmp_path / "x.npy", numpy.zeros((20, 2), dtype=numpy.float32))
    numpy.save(tmp_path / "y.npy", numpy.arange(20) % 2)
    key = public_text(load_or_make_key(tmp_path / "key").public_key())
    privacy = Privacy(1.0, 1.0, epsilon=5.0)
    for number in range(2):
        told = {"run": f"run-{number}", "spec": SPEC, "server": key, "key": "key"}
        (tmp_path / ENROLLED).write_text(json.dumps(told))
        remember(tmp_path, "lyon", tmp_path, "")
        budget = load_party(tmp_path, privacy=privacy).budget
        assert budget is not None
        assert budget.spent == number
        assert str(budget) == f"level client, epsilon {number}.000 of 5 spent"
        budget.pay(privacy.cost(9, 9, 1))
    forgetful = load_party(tmp_path)  # as `pfedhn export` reads it, which needs no options
    with pytest.raises(UserError, match="has sent updates with noise"):
        Joined(forgetful, Bundle("lyon", "", "", ""), tmp_path, lambda event: None)


def test_a_party_says_how_private_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def enrolled(bundle: Bundle, folder: Path, *rest: Any) -> None:
        key = public_text(load_or_make_key(folder / "key").public_key())
        (folder / ENROLLED).write_text(json.dumps({"run": "one", "spec": SPEC, "server": key, "key": "key"}))

    monkeypatch.setattr(secrets, "spent", lambda history, delta: 0.25)
    study = Study("one", SPEC, "")
    monkeypatch.setattr(join, "enroll", enrolled)
    monkeypatch.setattr(join, "find_study", lambda *given: study)
    monkeypatch.setattr(Joined, "run", lambda *given: None)
    numpy.save(tmp_path / "x.npy", numpy.zeros((20, 2), dtype=numpy.float32))
    numpy.save(tmp_path / "y.npy", numpy.arange(20) % 2)
    invitation = tmp_path / "lyon.invite"
    invitation.write_text(json.dumps({"name": "lyon", "address": "", "authority": "", "token": ""}))
    given: Any = {"bundle": invitation, "data": tmp_path, "folder": tmp_path / "own", "as_json": True}
    join_command.join(**given, accept=study.digest)
    join_command.join(**given, clip=1.0, noise=2.0, epsilon=8.0, level="client")
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["privacy"] for event in said] == ["none", "level client, epsilon 0.250 of 8 spent"]
    assert {event["device"] for event in said} == {"cuda" if torch.cuda.is_available() else "cpu"}
    with pytest.raises(UserError, match="there is no device 'gpu'"):
        join_command.join(**given, device="gpu")


def test_a_party_whose_disk_is_full_says_so_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process goes on, its owner and the server are told, and with room on the disk it takes part."""
    group = Group(simulation_of(small("pfedhn-pc"), rounds=2, cohort=1), tmp_path, Policy(start_with=1), clients=[0])
    party, num_full = group.parties["party-0"], 0
    whole = party_folder.write_atomically

    def full(path: Path, *given: Any, **named: Any) -> None:
        nonlocal num_full
        if path.name == "reply" and not num_full:
            num_full += 1
            with writing(path):
                raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, *given, **named)

    monkeypatch.setattr(party_folder, "write_atomically", full)
    group.server.run()
    assert num_full == 1
    (said,) = [event for event in party.heard if event["kind"] == "refusal"]
    assert "no space left on device; make room" in said["sentence"]
    (refused,) = group.said("refused")
    assert "make room" in refused["sentence"]
    assert group.server.state.round == 2


@pytest.mark.parametrize("option", [{"level": "example"}, {"delta": 1e-6}, {"clip": 1.0, "noise": 1.0}])
def test_privacy_that_is_asked_for_in_part_is_refused(tmp_path: Path, option: Any) -> None:
    """It must not be taken for none: updates would leave as they are."""
    with pytest.raises(UserError, match="privacy needs all three: --clip, --noise and --epsilon"):
        join_command.join(tmp_path / "lyon.invite", tmp_path, **option)


def test_a_folder_remembers_where_it_is_served(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    first = Site.make(tmp_path / "state", spec, "server.example.org:1", port=9001)
    again = Site.make(tmp_path / "state", None)
    assert again.settings == first.settings
    assert (again.address, again.settings["port"]) == ("server.example.org:1", 9001)
    moved = Site.make(tmp_path / "state", spec, host="127.0.0.1", port=9002)
    assert (moved.settings["host"], moved.settings["port"], moved.run) == ("127.0.0.1", 9002, first.run)
    with claimed(tmp_path / "state", 1.0):
        assert is_claimed(tmp_path / "state")
    assert not is_claimed(tmp_path / "state")


def test_where_a_federation_stands_is_said() -> None:
    assert standing({}, ["lyon"]) == ["Invited: lyon. The run has not begun."]
    party = {
        "is_present": True,
        "is_aside": False,
        "architecture": "S",
        "size": 5,
        "last_round": 1,
        "refused": {"norm": 2},
    }
    known = {
        "round": 2, "num_rounds": 9, "accepted": 4, "has_ended": False, "scores": {"test": 0.5}, "evaluated": 0,
        "bytes_down": 1_000, "bytes_up": 2_000, "parties": {"lyon": party, "paris": {**party, "is_aside": True}},
    }  # fmt: skip
    *lines, table = standing(known, ["lyon", "nice", "oslo", "paris"], ["oslo"], is_served=False)
    assert "No server is at work" in str(lines[0])
    assert lines[1:] == [
        "Round 2 of 9, 4 updates accepted.",
        "At round 0: test 0.5000.",
        "Weights down 1,000 bytes, updates up 2,000.",
    ]
    spent = {**known, "parties": {"lyon": {**party, "is_spent": True}}}
    assert list(standing(spent, ["lyon"])[-1].columns[1].cells) == ["yes, budget spent"]  # type: ignore[union-attr]
    assert list(table.columns[1].cells) == ["no", "invited", "taken out", "set aside"]  # type: ignore[union-attr]
    assert next(iter(table.columns[5].cells)) == "norm 2"  # type: ignore[union-attr]
