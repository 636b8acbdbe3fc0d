"""A server and parties that share nothing but messages are the simulator, whatever is lost on the way."""

import itertools
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import (
    KEYS,
    RUN,
    Group,
    Killed,
    Virtual,
    alone,
    assert_simulated,
    named_federation,
    received_by,
    simulated,
    simulation_of,
    small,
)
from support import BATCH_SIZE, TRAIN_SIZES, assert_close, assert_same_bits, model, mostly_slow

from pfedhn import keys
from pfedhn.algorithm import FineTuning
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.embeddings import Embeddings
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.fedper import FedPer
from pfedhn.cli.federation import sayer
from pfedhn.combinators import fine_tuned, with_statistics
from pfedhn.data.federation import Federation
from pfedhn.deploy import checks
from pfedhn.deploy import privacy as secrets
from pfedhn.deploy import server as serving
from pfedhn.deploy.backup import back_up
from pfedhn.deploy.checks import check_scores
from pfedhn.deploy.contacts import Arrival
from pfedhn.deploy.database import DATABASE, Database
from pfedhn.deploy.party import SILENCE, Party
from pfedhn.deploy.party_policy import PartyPolicy
from pfedhn.deploy.plan import plan_digest
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.privacy import BudgetSpent, system_normal
from pfedhn.deploy.signing import new_key, opened, sealed
from pfedhn.deploy.state import Rules
from pfedhn.deploy.store import Store
from pfedhn.deploy.wire import TYPES, Message, WireError, from_envelope, is_finite, unpacked
from pfedhn.engine.rounds import scores_of_adapted
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.engine.transform import TRANSFORMS
from pfedhn.errors import RunError, UserError
from pfedhn.params import stack, take
from pfedhn.privacy import Privacy, Protection, RoundCost
from pfedhn.sgd import SGD

SEED = 5


@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedhn-pc"))
def test_every_method_over_the_wire_is_the_simulator(method: str, tmp_path: Path) -> None:
    simulation = simulation_of(small(method), rounds=4, cohort=2)
    expected = simulated(simulation)
    group = Group(replace(simulation, executor="auto"), tmp_path)
    group.server.run()
    assert_simulated(group, expected)
    for client, weights in enumerate(personal_at_best(simulation, expected)):
        party = group.parties[f"party-{client}"]
        mine = party.personal_model().state_dict()
        assert_close({name: mine[name] for name in weights}, weights)
        assert party.local.executors["training"].scans  # its steps run from graphs, as the simulator's do
    assert not group.said("refused")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["pfedhn-pc", "pfedhn-shared"])
def test_parties_on_a_gpu_are_the_simulator(method: str, tmp_path: Path) -> None:
    """The server and what parties store are on a CPU, whatever the parties compute with."""
    simulation = simulation_of(small(method), rounds=4, cohort=2)
    expected = simulated(simulation)
    group = Group(replace(simulation, executor="auto"), tmp_path)
    for name, party in group.parties.items():
        plan = replace(group.simulation.on("cuda"), executor="auto", joining_rounds=group.plan.joining_rounds)
        there = replace(party, plan=plan, data=party.data.to("cuda"))
        group.answers[name] = there.answer
    group.server.run()
    assert_simulated(group, expected)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [with_statistics(FedAvg(local_steps=3), "shared"), FedPer(local_steps=3)])
def test_batch_statistics_travel_or_stay(algorithm: Any, tmp_path: Path) -> None:
    simulation = simulation_of(algorithm, models="batchnorm", rounds=4, cohort=2)
    expected = simulated(simulation)
    group = Group(simulation, tmp_path)
    group.server.run()
    assert_simulated(group, expected)
    for client, weights in enumerate(personal_at_best(simulation, expected)):
        mine = group.parties[f"party-{client}"].personal_model().state_dict()
        assert_close({name: mine[name] for name in weights}, weights)


def personal_at_best(simulation: Simulation, state: State) -> list[Any]:
    assert state.best is not None
    best, federation, is_adapted = state.best, simulation.federation, False
    if simulation.fine_tunes:
        after = scores_of_adapted(simulation, best)["validation"].score
        is_adapted = after >= best.evaluation.splits["validation"].score
    return [
        simulation.personal_weights(
            best.memories, simulation.model_of(client), client, best.evaluation.round, is_adapted
        )
        for client in range(federation.num_clients)
    ]


@pytest.mark.parametrize("is_killed", [False, True])
def test_steps_that_make_parties_worse_on_validation_are_not_used(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulation = simulation_of(spoiling(monkeypatch, 0.0), rounds=4, cohort=2)
    expected = simulated(simulation)
    group = Group(simulation, tmp_path)
    whole, killed = Store.commit, []

    def commit(store: Store, state: Any, table: Any, message: bytes = b"") -> None:
        if is_killed and table["kind"] == "judge" and not killed:
            killed.append(table)
            raise Killed
        whole(store, state, table, message)

    monkeypatch.setattr(Store, "commit", commit)
    try:
        group.server.run()
    except Killed:
        group.transport._waiting.clear()
        group.new_server().run()
    assert len(killed) == is_killed
    assert_simulated(group, expected)
    assert [event["is_adapted"] for event in group.said("judged")] == [False]
    for client, weights in enumerate(personal_at_best(simulation, expected)):
        party = group.parties[f"party-{client}"]
        mine = party.personal_model().state_dict()
        assert any(bool(value.any()) for value in weights.values())
        assert_close({name: mine[name] for name in weights}, weights)
        assert group.server.state.best is not None
        assert group.server.state.final is not None
        assert group.server.state.final[party.name] == group.server.state.best.results[party.name]
    assert not group.said("refused")
    sayer(as_json=False)(group.said("judged")[0])
    assert (
        "the parties' own steps from the chosen round made validation worse, and are left out"
        in capsys.readouterr().out
    )
    late = group.new_server()  # what was decided is on the disk
    assert late.state.is_adapted is False


def spoiling(monkeypatch: pytest.MonkeyPatch, factor: float) -> Any:
    """FedAvg whose clients' fine-tuning steps keep this share of their weights, and add their gradient."""
    monkeypatch.setattr(FedAvg, "fine_tuning", FineTuning(SGD(1 - factor, weight_decay=1.0)))
    return fine_tuned(FedAvg(local_steps=3, local_lr=0.1), 2)


def test_after_a_restart_those_who_are_to_come_are_waited_for_before_it_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(simulation_of(spoiling(monkeypatch, 0.0), rounds=4, cohort=2), tmp_path)
    whole, judged = Store.commit, []

    def commit(store: Store, state: Any, table: Any, message: bytes = b"") -> None:
        if table["kind"] == "judge":
            judged.append(sorted(table["results"]))
            if len(judged) == 1:
                raise Killed
        whole(store, state, table, message)

    monkeypatch.setattr(Store, "commit", commit)
    with pytest.raises(Killed):
        group.server.run()
    group.transport._waiting.clear()
    group.transport.seconds = lambda party: 0.0 if party == "party-0" else 2.0
    group.new_server().run()
    assert judged == [sorted(group.parties)] * 2


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_steps_that_change_nothing_are_used_and_those_that_diverge_leave_the_model_that_was_given(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulation_of(spoiling(monkeypatch, factor), rounds=4, cohort=2)
    group = Group(simulation, tmp_path)
    group.server.run()
    assert [event["is_adapted"] for event in group.said("judged")] == [True]
    assert not group.said("refused")
    best = simulated(simulation).best
    assert best is not None
    for client in range(simulation.federation.num_clients):
        model, number = simulation.model_of(client), best.evaluation.round
        given = simulation.personal_weights(best.memories, model, client, number, is_adapted=False)
        mine = group.parties[f"party-{client}"].personal_model().state_dict()
        assert_close({name: mine[name] for name in given}, given)


def test_who_joins_does_as_was_decided_and_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulation_of(spoiling(monkeypatch, 0.0), rounds=4, cohort=2)
    group = Group(simulation, tmp_path, Policy(start_with=5), clients=[0, 1, 2, 3, 4])
    group.server.run()
    assert group.server.state.is_adapted is False
    party = group.add(5)
    group.server.run()
    assert group.server.state.members["party-5"].is_told
    assert any(bool(value.any()) for value in party.personal_model().state_dict().values())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),  # a tie
        ({"party-0": 0.0}, False),
        ({"party-0": None, "party-1": None, "party-2": None, "party-3": None, "party-4": None, "party-5": None}, True),
        ({"party-0": 0.0, "away": "party-0"}, True),
    ],
)
def test_steps_are_judged_by_who_has_scores_of_the_chosen_round(
    changes: dict[str, Any], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(simulation_of(spoiling(monkeypatch, 1.0), rounds=4, cohort=2), tmp_path)
    group.server.run()
    state, rules = group.server.state, group.server.store.rules
    assert state.best is not None
    (tested,) = (one["results"] for one in state.history if one["round"] == state.best.round)
    after = {name: dict(scores) for name, scores in tested.items()}
    for name, metric in changes.items():
        if name == "away":  # when the round was tested: the server has older scores of it
            del tested[metric]
        elif metric is None:
            after[name]["validation"] = [0.0, 0.0, 0]
        else:
            loss, before, count = after[name]["validation"]
            assert before > metric
            after[name]["validation"] = [loss, metric, count]
    state.is_adapted = None
    rules.apply(state, {"kind": "judge", "results": after})
    assert state.is_adapted is expected


@pytest.mark.slow
def test_half_the_bytes_and_several_networks_over_the_wire(tmp_path: Path) -> None:
    federation = named_federation().with_architectures(["mlp", "wide", "mlp", "wide", "wide", "mlp"])
    models = {name: model(name) for name in ("mlp", "wide")}
    wire = {"upload": TRANSFORMS["8-bit"], "download": TRANSFORMS["half"]}
    simulation = simulation_of(small("pfedhn"), federation, models=models, rounds=3, cohort=3, **wire)
    group = Group(simulation, tmp_path)
    group.server.run()
    assert_simulated(group, simulated(simulation))


@pytest.fixture(scope="module")
def expected() -> tuple[Simulation, State]:
    simulation = simulation_of(small("pfedhn-pc"), rounds=4, cohort=2)
    return simulation, simulated(simulation)


@pytest.mark.parametrize("is_written", mostly_slow([False, True], True))
@pytest.mark.slow
def test_a_server_that_is_killed_at_any_record_loses_nothing(
    is_written: bool, expected: tuple[Simulation, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every third record, each time a new server goes on from the folder: the same run in the end."""
    whole = Store.commit
    count = 0

    def commit(store: Store, state: Any, table: Any, message: bytes = b"") -> None:
        nonlocal count
        count += 1
        if count % 3 == 0 and not is_written:
            raise Killed
        whole(store, state, table, message)
        if count % 3 == 0:
            raise Killed

    monkeypatch.setattr(Store, "commit", commit)
    group = Group(expected[0], tmp_path)
    for _ in range(100):
        try:
            group.server.run()
            break
        except Killed:
            group.transport._waiting.clear()
            group.new_server()
    assert count > 20
    assert_simulated(group, expected[1])


def stop_after(group: Group, event: str, times: int) -> None:
    """Kill the server when it has said something so many times."""
    log, left = group.server.log, times

    def listen(said: Any) -> None:
        nonlocal left
        log(said)
        left -= said["event"] == event
        if not left:
            raise Killed

    group.server.log = listen
    with pytest.raises(Killed):
        group.server.run()
    group.transport._waiting.clear()


def change(folder: Path, *statements: str) -> None:
    """Do something to a server's database."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_made_up_for_by_the_one_before(
    expected: tuple[Simulation, State], tmp_path: Path
) -> None:
    group = Group(expected[0], tmp_path, Policy(checkpoint_seconds=0.0))
    stop_after(group, "round", 3)
    newest = "(select max(number) from checkpoints)"
    change(
        tmp_path / "server",
        f"update tensors set content = cast(substr(content, 1, length(content) - 1) || x'07' as blob) "
        f"where checkpoint = {newest}",
    )
    group.new_server()
    assert group.server.state.round == 3
    group.server.run()
    assert_simulated(group, expected[1])
    change(tmp_path / "server", "update checkpoints set record = replace(record, 'round', 'ruond')")
    with pytest.raises(RunError, match=r"no checkpoint in .* is sound"):
        group.new_server()


@pytest.mark.parametrize(
    "damage",
    [
        "delete from checkpoints",
        "delete from tensors",
        "delete from journal where number = (select max(number) from journal) - 1",
        "update journal set record = replace(record, 'party-1', 'party-2') where kind = 'accept'",
        "update journal set message = x'00' where kind = 'accept'",
    ],
)
def test_what_is_damaged_is_said_and_nothing_is_left_out(damage: str, tmp_path: Path) -> None:
    simulation = simulation_of(small("fedavg"), rounds=6, cohort=6, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy(checkpoint_seconds=0.0))
    stop_after(group, "round", 3)
    group.policy = replace(group.policy, checkpoint_seconds=1e9)
    group.new_server()
    stop_after(group, "accepted", 4)
    change(tmp_path / "server", damage)
    with pytest.raises(RunError, match="restore the folder from a backup"):
        group.new_server()


def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"x" * 5_000)
    with pytest.raises(RunError, match="restore the folder from a backup"):
        Database(tmp_path)
    (tmp_path / "other").mkdir()
    Database(tmp_path / "other")
    change(tmp_path / "other", "pragma user_version = 99")
    with pytest.raises(RunError, match="another version of pfedhn"):
        Database(tmp_path / "other")


def test_a_backup_that_was_made_at_work_goes_on(expected: tuple[Simulation, State], tmp_path: Path) -> None:
    group = Group(expected[0], tmp_path, Policy(checkpoint_seconds=0.0))
    stop_after(group, "round", 2)
    (tmp_path / "server" / "parties").mkdir()
    (tmp_path / "server" / "parties" / "lyon.json").write_text("{}")
    assert back_up(tmp_path / "server", tmp_path / "copy") == 2  # the server has its database open
    with pytest.raises(UserError, match="is not empty"):
        back_up(tmp_path / "server", tmp_path / "copy")
    stop_after(group, "accepted", 1)
    shutil.rmtree(tmp_path / "server")
    (tmp_path / "copy").rename(tmp_path / "server")
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "server").rglob("*"))
    group.new_server().run()
    assert_simulated(group, expected[1])


def test_a_folder_of_version_0_1_is_refused(tmp_path: Path) -> None:
    group = Group(simulation_of(small("fedavg"), rounds=1, cohort=6), tmp_path)
    (tmp_path / "server" / "journal-000000000").touch()
    with pytest.raises(RunError, match=r"of version 0\.1"):
        group.new_server()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 4, 9])
def test_a_server_that_is_killed_in_a_checkpoint_goes_on(
    number: int, expected: tuple[Simulation, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first two checkpoints: in their middle, which undoes all of it, and at their end."""
    left, whole = number, Database.changing

    @contextmanager
    def dying(database: Database) -> Iterator[Any]:
        nonlocal left
        with whole(database) as cursor:
            yield cursor
            is_checkpoint = sys._getframe(2).f_code.co_name == "save"
            left -= is_checkpoint
            if is_checkpoint and left == 0:
                raise Killed
        if is_checkpoint and left < 0:
            raise Killed

    group = Group(expected[0], tmp_path, Policy(checkpoint_seconds=0.0))
    with monkeypatch.context() as patch:
        patch.setattr(Database, "changing", dying)
        with pytest.raises(Killed):
            group.server.run()
    group.transport._waiting.clear()
    group.new_server()
    group.server.run()
    assert_simulated(group, expected[1])


def test_a_folder_serves_one_plan(expected: tuple[Simulation, State], tmp_path: Path) -> None:
    group = Group(expected[0], tmp_path, Policy(checkpoint_seconds=0.0))
    stop_after(group, "round", 1)
    group.plan = replace(expected[0], seed=6)
    with pytest.raises(RunError, match="another plan"):
        group.new_server()


def test_a_party_that_holds_rounds_up_and_leaves_is_set_aside(tmp_path: Path) -> None:
    """To leave at once is no failure; to leave when everybody has waited for long is."""
    group = Group(simulation_of(small("fedavg"), rounds=2, cohort=6), tmp_path, Policy(patience=2, aside_seconds=1e9))
    contacts = group.server.contacts
    for seconds, expected in ((1.0, 0), (599.0, 1), (2.0, 1), (300.0, 2)):
        contacts.ask(group.server.questions.hello("party-1"))
        group.transport.now += seconds
        members = group.transport.parties
        group.transport.parties = {name: answer for name, answer in members.items() if name != "party-1"}
        contacts.give_up(contacts.asked["party-1", "hello"], "lost", "has left")
        group.transport.parties = members
        standing = contacts.standings["party-1"]
        assert standing.failures + standing.times_aside == expected
    assert contacts.is_aside("party-1")


class Faulty(Virtual):
    """A transport that does something to what one party answers, once."""

    fault: Callable[[Arrival], list[Arrival]]
    party, place = "party-2", 1  # its first training message
    seen = 0

    def delivered(self, party: str, kind: str, content: bytes) -> list[Arrival]:
        arrivals = super().delivered(party, kind, content)
        if party == self.party and kind == "train":
            self.seen += 1
            if self.seen == self.place:
                return type(self).fault(arrivals[0])
        return arrivals


def faulty(change: Callable[[Arrival], list[Arrival]], times: int = 1) -> type[Faulty]:
    return type("OneFault", (Faulty,), {"fault": staticmethod(change), "place": times})


@pytest.mark.slow
def test_a_reply_that_is_lost_on_the_way_is_asked_for_again(expected: tuple[Simulation, State], tmp_path: Path) -> None:
    """The party has advanced what it keeps, the server has not heard of it: the same reply comes again."""
    lost = faulty(lambda arrival: [Arrival(arrival.party, arrival.kind, None, "was lost")])
    group = Group(expected[0], tmp_path, make_transport=lost)
    group.server.run()
    assert group.transport.seen > 1
    assert [event["reason"] for event in group.said("refused")] == ["lost"]
    assert_simulated(group, expected[1])


@pytest.mark.slow
def test_a_reply_that_comes_twice_counts_once(expected: tuple[Simulation, State], tmp_path: Path) -> None:
    group = Group(expected[0], tmp_path, make_transport=faulty(lambda arrival: [arrival, arrival]))
    group.server.run()
    assert [event["reason"] for event in group.said("refused")] == ["late"]
    assert_simulated(group, expected[1])


@pytest.mark.slow
def test_an_old_reply_in_place_of_a_new_one_is_refused(expected: tuple[Simulation, State], tmp_path: Path) -> None:
    """A reply of an earlier round, with a sound signature, comes before the true one."""
    replies: list[bytes] = []

    class Replaying(Virtual):
        def delivered(self, party: str, kind: str, content: bytes) -> list[Arrival]:
            arrivals = super().delivered(party, kind, content)
            if kind != "train":
                return arrivals
            old = [Arrival(party, kind, reply) for reply in replies if party_of(reply) == party]
            replies.append(arrivals[0].content or b"")
            return old + arrivals

    def party_of(reply: bytes) -> str:
        name = next(name for name, key in group.keys.items() if is_signed(reply, key))
        return str(name)

    def is_signed(reply: bytes, key: Any) -> bool:
        try:
            opened(reply, key.public_key())
        except WireError:
            return False
        return True

    group = Group(expected[0], tmp_path, make_transport=Replaying)
    group.server.run()
    assert {event["reason"] for event in group.said("refused")} == {"round"}
    assert_simulated(group, expected[1])


@pytest.mark.slow
def test_a_party_that_never_answers_costs_the_others_nothing(tmp_path: Path) -> None:
    """Its rounds go on without it, it is set aside, and what it keeps stays where the server last heard of it."""
    simulation = simulation_of(small("pfedhn-pc"), rounds=12, cohort=6)
    silent = faulty(lambda arrival: [])

    class Silent(silent):  # type: ignore[misc, valid-type]
        def delivered(self, party: str, kind: str, content: bytes) -> list[Arrival]:
            arrivals: list[Arrival] = super().delivered(party, kind, content)
            return [] if party == "party-2" and kind == "train" and self.seen <= 3 else arrivals

    policy = Policy(reply_seconds=3.0, patience=2, aside_seconds=3.0)
    group = Group(simulation, tmp_path, policy, make_transport=Silent, seconds=lambda party: 1.0)
    group.server.run()
    state = group.server.state
    assert state.has_ended
    assert state.round == 12
    assert len(group.said("set aside")) == 2  # after two failures, then after a single one
    assert [event["party"] for event in group.said("set aside")] == ["party-2"] * 2
    # Let back in, it took part from where it stood: nothing of what was lost is in what it keeps.
    accepted = [event["round"] for event in group.said("accepted") if event["party"] == "party-2"]
    assert accepted
    assert state.members["party-2"].base == accepted[-1]
    assert group.parties["party-2"].files.versions("training")[-1] == accepted[-1]


@pytest.mark.slow
def test_a_lost_reply_changes_nothing(tmp_path: Path) -> None:
    """A round that a party missed is, for everybody, as if it had not been drawn: PC's head goes back."""
    algorithm = small("pfedhn-pc")
    group = Group(
        simulation_of(algorithm, rounds=3, cohort=6), tmp_path / "lost", Policy(reply_seconds=3.0),
        make_transport=faulty(lambda arrival: [], times=2),
    )  # fmt: skip
    group.server.run()
    absent = Group(simulation_of(algorithm, rounds=3, cohort=6), tmp_path / "absent", Policy(reply_seconds=3.0))
    answers, name = absent.answers, "party-2"

    def listen(event: Any) -> None:
        absent.events.append(event)
        if event["event"] == "round" and event["round"] == 1:
            answers.pop(name)
        if event["event"] == "round" and event["round"] == 2:
            answers[name] = absent.parties[name].answer

    absent.server.log = listen
    absent.server.run()
    assert [event["reason"] for event in group.said("refused")] == ["silent"]
    assert not absent.said("refused")
    assert_same_bits(group.server.state.shared, absent.server.state.shared)
    for party in group.parties:
        assert_same_bits(group.server.state.rows[party], absent.server.state.rows[party])
        assert group.server.state.members[party].base == 2
        assert_same_bits(*(g.parties[party].kept("training", 2, received_by(g, party)) for g in (group, absent)))


@pytest.mark.slow
def test_a_party_that_is_killed_and_comes_again_gives_the_same_reply(
    expected: tuple[Simulation, State], tmp_path: Path
) -> None:
    """Killed between what it keeps and its reply, and again after its reply: made anew from its folder each time."""
    group = Group(expected[0], tmp_path)
    party = group.parties["party-2"]
    deaths = iter([True, True, False])

    def dying(content: bytes) -> bytes:
        answer = group.parties["party-2"].answer(content)
        if opened(content, KEYS[0].public_key()).kind == "train" and next(deaths, False):
            (party.folder / "reply").unlink()  # it was killed before it could write this
            group.add(2)
            group.answers["party-2"] = dying
            raise WireError("died", "died")
        return answer

    group.answers["party-2"] = dying
    group.server.run()
    assert group.said("refused")
    with_lost = [event["reason"] for event in group.said("refused")]
    assert set(with_lost) == {"lost"}
    assert group.server.state.has_ended


def altered(**changes: Any) -> Callable[[Message], Message]:
    def alter(message: Message) -> Message:
        return replace(message, **{name: change(getattr(message, name)) for name, change in changes.items()})

    return alter


def filled_with(value: float) -> Callable[[Any], Any]:
    return lambda update: {name: torch.full_like(leaf, value) for name, leaf in update.items()}


def with_value(**values: Any) -> Callable[[Any], Any]:
    return lambda before: {**before, **values}


BAD = {
    "finite": [altered(tensors=filled_with(float("nan"))), altered(tensors=filled_with(float("inf")))],
    "norm": [altered(tensors=filled_with(1e9))],
    "layout": [
        altered(tensors=lambda update: {name: leaf[..., :-1] for name, leaf in update.items()}),
        altered(tensors=lambda update: {name: leaf.float() for name, leaf in update.items()}),
        altered(tensors=lambda update: dict(list(update.items())[:-1])),
        altered(tensors=lambda update: {}),
        altered(tensors=lambda update: torch.zeros(3)),
    ],
    "round": [
        altered(values=with_value(round=99)), altered(values=with_value(version=77)),
        altered(values=with_value(base=7)), altered(values=with_value(phase="joining")),
    ],
    "size": [altered(values=with_value(size=10**6)), altered(values=with_value(size=True))],
    "run": [altered(run=lambda run: "other"), altered(party=lambda party: "party-1" + "x" * 9_999)],
    "kind": [altered(kind=lambda kind: "evaluate"), altered(kind=lambda kind: "x" * 9_999)],
    "form": [altered(tensors=lambda update: {name: leaf.to(torch.uint16) for name, leaf in update.items()})],
    "scores": [altered(values=with_value(scores={})), altered(values=with_value(scores={"validation": [1.0, 9.0, 1]}))],
}  # fmt: skip


def scored(*values: Any) -> Callable[[Message], Message]:
    return altered(values=with_value(scores={"validation": list(values), "test": [1.0, 1.0, 1]}))


BAD_SCORES = [
    scored(1.0, 1.0, 10**400), scored(1.0, 1.0, 1 << 40), scored(1.0, 1.0, 2), scored(1.0, 1.0, -1),
    scored(1.0, 1.0, True), scored(1.0, 1e300, 1), scored(1.0, 1.5, 1), scored(1.0, -1.0, 1), scored(1.0, None, 1),
    scored(1.0, 1, 1), scored(-1.0, 1.0, 1), scored(1e301, 1.0, 1), scored(1.0, 0.0, 0), scored(None, 1.0, 1),
    scored(1.0, 1.0), altered(values=with_value(scores=None)),
    altered(values=with_value(scores={"validation": [1.0, 1.0, 1]})),
]  # fmt: skip
BAD_HELLOS = [
    altered(values=with_value(**wrong))
    for wrong in (
        {"architecture": []},
        {"architecture": "none"},
        {"size": 0},
        {"size": 10**400},
        {"size": True},
        {"size": None},
        {"examples": None},
        {"examples": {"test": 1}},
        {"examples": {"validation": 1, "test": -1}},
        {"examples": {"validation": 10**400, "test": 1}},
        {"examples": {"validation": [], "test": 1}},
    )
]


@pytest.mark.slow
def test_nothing_bad_gets_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed by the party itself, and wrong: refused under its name, and the run is as if it had not answered."""
    wrong = [(reason, change) for reason, changes in BAD.items() for change in changes]
    settings = {"rounds": len(wrong), "cohort": 3, "evaluate_every": 1_000}  # models are tested twice
    federation = simulation_of(small("fedavg")).federation
    group = Group(simulation_of(small("fedavg"), federation, **settings), tmp_path, Policy(reply_seconds=3.0))
    group.policy = replace(group.policy, patience=1_000, start_with=3)
    for name in ("party-3", "party-4", "party-5"):
        del group.answers[name]
    party, sent = group.parties["party-2"], list[str]()
    left = {
        "train": iter(wrong),
        "evaluate": iter([("scores", change) for change in BAD_SCORES[:2]]),
        "hello": iter([("hello", change) for change in BAD_HELLOS]),
    }

    def bad(content: bytes) -> bytes:
        answer = party.answer(content)
        message = opened(answer, party.key.public_key())
        reason, change = next(left[message.kind], ("", lambda message: message))
        sent.extend([reason] if reason else [])
        with monkeypatch.context() as patched:  # its program sends numbers of any type
            patched.setitem(TYPES, "uint16", torch.uint16)
            return sealed(change(message), party.key)

    group.answers["party-2"] = bad
    group.new_server().run()
    refused = [event for event in group.said("refused") if event["reason"] != "silent"]
    assert {event["party"] for event in refused} == {"party-2"}
    assert [event["reason"] for event in refused] == sent
    assert len(sent) == len(wrong) + 2 + len(BAD_HELLOS)
    assert max(len(event["sentence"]) for event in refused) < 400
    without = Group(simulation_of(small("fedavg"), federation, **settings), tmp_path / "without", Policy(start_with=2))
    for name in ("party-2", "party-3", "party-4", "party-5"):
        del without.answers[name]
    without.server.run()
    assert_same_bits(group.server.state.shared, without.server.state.shared)
    histories = [[(one["round"], one["results"]) for one in g.server.state.history] for g in (group, without)]
    assert histories[0] == histories[1]
    assert all("party-2" not in results for _, results in histories[0])


def test_no_party_chooses_the_round_alone(tmp_path: Path) -> None:
    """Scores count by their examples, and a party's are of as many as it said when it came."""
    simulation = simulation_of(small("pfedhn"), rounds=2, cohort=6, evaluate_every=6)
    group = Group(simulation, tmp_path)
    party = group.parties["party-2"]

    def answer(content: bytes) -> bytes:
        message = opened(party.answer(content), party.key.public_key())
        if message.kind == "evaluate":
            count = 2**39
            right = float(count if message.values["round"] == 1 else 0)
            scores = {split: [1.0, right, count] for split in ("validation", "test")}
            message = replace(message, values={**message.values, "scores": scores})
        return sealed(message, party.key)

    group.answers["party-2"] = answer
    group.server.policy = Policy(aside_seconds=1e9)
    group.server.run()
    refused = [event for event in group.said("refused") if event["reason"] == "scores"]
    assert "sent scores of 549755813888 examples and has" in refused[0]["sentence"]
    assert all("party-2" not in one["results"] for one in group.server.state.history)
    joined = {event["party"]: (event["size"], event["examples"]) for event in group.said("joined")}
    splits = {split: simulation.federation.splits[split].size.tolist() for split in ("train", "validation", "test")}
    for place, name in enumerate(group.parties):
        of = {split: sizes[place] for split, sizes in splits.items()}
        assert joined[name] == (of.pop("train"), of)


@pytest.mark.parametrize("change", BAD_SCORES)
def test_scores_that_no_examples_can_give_are_refused(change: Callable[[Message], Message]) -> None:
    good = scored(1.0, 1.0, 1)(Message("evaluate", RUN, "party-2"))
    examples = {"validation": 1, "test": 1}
    check_scores(good, examples, has_metric=True)
    check_scores(scored(0.0, 0.0, 0)(good), examples, has_metric=True)  # it keeps them to itself
    with pytest.raises(WireError) as refused:
        check_scores(change(good), examples, has_metric=True)
    assert refused.value.reason == "scores"


def test_an_error_while_an_answer_is_checked_is_that_partys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was not thought of: who sent it is named and counted, and the others go on."""
    whole = checks.check_update

    def check(message: Message, *rest: Any) -> None:
        if message.party == "party-2":
            raise ZeroDivisionError("what nobody thought of")
        whole(message, *rest)

    monkeypatch.setattr(checks, "check_update", check)
    group = Group(simulation_of(small("fedavg"), rounds=1, cohort=6, evaluate_every=1_000), tmp_path)
    group.server.run()
    assert [(event["party"], event["reason"]) for event in group.said("refused")] == [("party-2", "form")]
    assert "ZeroDivisionError" in group.said("refused")[0]["sentence"]
    assert group.server.state.num_accepted == 5


def test_what_cannot_be_applied_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update passes every check and the state still cannot take it: no server dies of it, now or later."""
    whole, fails = Rules._accept, iter([True])

    def accept(rules: Rules, state: Any, table: Any, message: bytes) -> None:
        if table["party"] == "party-2" and next(fails, False):
            state.num_accepted += 99  # it has moved the state in part
            raise OverflowError("too large")
        whole(rules, state, table, message)

    monkeypatch.setattr(Rules, "_accept", accept)
    group = Group(simulation_of(small("fedavg"), rounds=2, cohort=6, evaluate_every=1_000), tmp_path)
    group.server.run()
    assert [(event["party"], event["reason"]) for event in group.said("refused")] == [("party-2", "unfit")]
    assert group.server.state.num_accepted == 11
    assert group.new_server().state.num_accepted == 11


@pytest.mark.parametrize("in_flight", mostly_slow([None, 6], None))
def test_a_party_cannot_change_its_size(in_flight: int | None, tmp_path: Path) -> None:
    """Its row and an update that was accepted are of the size that it began with: no step could take them together."""
    size = "mlp"

    class Restless(Virtual):
        def members(self) -> set[str]:
            nonlocal size
            found = super().members()
            if size != "gone":
                return found
            size = "wide"
            return found - {"party-2"}  # away for one look

    federation = named_federation().with_architectures(["mlp"] * 6)
    models = {name: model(name) for name in ("mlp", "wide")}
    simulation = simulation_of(small("pfedhn"), federation, models=models, rounds=3, cohort=6, evaluate_every=1_000)
    group = Group(
        simulation, tmp_path, Policy(in_flight=in_flight, aside_seconds=1e9), make_transport=Restless,
        seconds=lambda party: 20.0 if party == "party-5" else 0.0,
    )  # fmt: skip
    party = group.parties["party-2"]

    def answer(content: bytes) -> bytes:
        message = opened(party.answer(content), party.key.public_key())
        if message.kind == "hello":
            message = replace(message, values={**message.values, "architecture": size})
        return sealed(message, party.key)

    def listen(event: Any) -> None:
        nonlocal size
        group.events.append(event)
        if event["event"] == "accepted" and event["party"] == "party-2" and size == "mlp":
            size = "gone"

    group.answers["party-2"], group.server.log = answer, listen
    group.server.run()
    assert group.server.state.has_ended
    assert {event["sentence"] for event in group.said("refused")} == {
        "party-2 says the size 'wide' and takes part with 'mlp'."
    }
    assert group.new_server().state.members["party-2"].architecture == "mlp"


@pytest.mark.parametrize("is_found", mostly_slow([True, False], True))
def test_updates_that_a_step_cannot_take_are_dropped(
    is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on without the one that is at fault; without all of them where each is sound alone."""
    whole = Rules._move_all

    def move_all(rules: Rules, state: Any) -> None:
        if state.attempt == 0 and "party-2" in state.replies and (is_found or len(state.replies) > 1):
            state.round += 99  # it has moved the state in part
            raise RuntimeError("shapes do not fit")
        whole(rules, state)

    monkeypatch.setattr(Rules, "_move_all", move_all)
    group = Group(simulation_of(small("fedavg"), rounds=1, cohort=6, evaluate_every=1_000), tmp_path)
    stop_after(group, "round", 1)
    refused = [event["party"] for event in group.said("refused") if event["reason"] == "unfit"]
    (stepped,) = (event["parties"] for event in group.said("round"))
    assert sorted(refused) == (["party-2"] if is_found else sorted(group.parties))
    assert sorted(stepped) == sorted(group.parties.keys() - ({"party-2"} if is_found else set()))
    before = group.server.state
    assert before.round == 1
    assert_same_bits(group.new_server().state.shared, before.shared)


@pytest.mark.slow
def test_keys_of_others_and_bytes_that_were_changed_are_refused(tmp_path: Path) -> None:
    simulation = simulation_of(small("fedavg"), rounds=2, cohort=6)
    group = Group(simulation, tmp_path)
    parties = group.parties

    def forged(content: bytes) -> bytes:
        return sealed(opened(parties["party-1"].answer(content), KEYS[2].public_key()), new_key())

    def changed(content: bytes) -> bytes:
        answer = bytearray(parties["party-3"].answer(content))
        answer[-3] ^= 1
        return bytes(answer)

    def anothers(content: bytes) -> bytes:
        return sealed(opened(parties["party-4"].answer(content), KEYS[5].public_key()), parties["party-0"].key)

    group.answers |= {"party-1": forged, "party-3": changed, "party-4": anothers}
    group.policy = Policy(start_with=3, aside_seconds=1e9)
    group.new_server().run()
    assert group.server.state.has_ended
    assert set(group.server.state.members) == {"party-0", "party-2", "party-5"}
    assert {(event["party"], event["reason"]) for event in group.said("refused")} == {
        (name, "signature") for name in ("party-1", "party-3", "party-4")
    }


def test_what_a_party_says_of_its_own_is_counted_under_one_name(tmp_path: Path) -> None:
    """Else the server's status could be filled with words."""
    group = Group(simulation_of(small("fedavg"), rounds=1, cohort=6), tmp_path, Policy(aside_seconds=1e9))
    party, number = group.parties["party-2"], itertools.count()

    def refuse(content: bytes) -> bytes:
        asked = opened(content, group.server_key.public_key())
        if asked.kind == "hello":
            return party.answer(content)
        values = {"of": asked.kind, "round": asked.values["round"], "reason": f"r{next(number)}", "sentence": "x" * 999}
        return sealed(Message("refusal", RUN, party.name, values), party.key)

    group.answers[party.name] = refuse
    group.new_server().run()
    assert next(number) > 1
    assert set(group.server.status()["parties"][party.name]["refused"]) == {"party"}
    assert max(len(event["sentence"]) for event in group.said("refused")) < 400


def test_what_nobody_asks_for_is_not_read(tmp_path: Path) -> None:
    """There is no limit to how large it may be."""
    group = Group(simulation_of(small("fedavg"), rounds=1, cohort=6), tmp_path)
    group.server._settle(Arrival("party-2", "train", b"\0" * 100))
    assert [event["reason"] for event in group.said("refused")] == ["late"]


def test_who_is_not_enrolled_is_sent_nothing(tmp_path: Path) -> None:
    group = Group(simulation_of(small("fedavg"), rounds=2, cohort=2), tmp_path, Policy(start_with=5))
    heard: list[bytes] = []

    def stranger(content: bytes) -> bytes:
        heard.append(content)
        return content

    group.answers["stranger"] = stranger
    del group.keys["party-5"]
    group.server.run()
    assert not heard
    assert set(group.server.state.members) == {f"party-{number}" for number in range(5)}


def test_a_party_answers_its_server_alone(expected: tuple[Simulation, State], tmp_path: Path) -> None:
    party = Group(expected[0], tmp_path).parties["party-0"]
    hello = Message("hello", RUN, "party-0", {"challenge": "", "plan": plan_digest(party.plan)})
    assert opened(party.answer(sealed(hello, KEYS[0])), party.key.public_key()).kind == "hello"
    for message, key in (
        (hello, KEYS[1]), (replace(hello, run="other"), KEYS[0]), (replace(hello, party="party-1"), KEYS[0]),
        (replace(hello, kind="open"), KEYS[0]),
    ):  # fmt: skip
        with pytest.raises(WireError):
            party.answer(sealed(message, key))
    other = replace(hello, values={"challenge": "", "plan": "other"})
    answer = opened(party.answer(sealed(other, KEYS[0])), party.key.public_key())
    assert answer.kind == "refusal"
    assert "another plan" in answer.values["sentence"]


@pytest.mark.slow
def test_a_party_that_lost_its_disk_begins_again(tmp_path: Path) -> None:
    group = Group(simulation_of(small("pfedhn-pc"), rounds=4, cohort=6), tmp_path)
    lost = group.parties["party-2"].folder

    def listen(event: Any) -> None:
        group.events.append(event)
        if event["event"] == "round" and event["round"] == 2:
            for file in lost.iterdir():
                file.unlink()

    group.server.log = listen
    group.server.run()
    assert [event["reason"] for event in group.said("refused")].count("version") >= 1
    assert [event["base"] for event in group.said("rebased")] == [None]
    assert group.server.state.members["party-2"].base == 3


@pytest.mark.slow
def test_without_waiting_one_at_a_time_is_the_simulator(tmp_path: Path) -> None:
    simulation = simulation_of(small("pfedhn-pc"), rounds=8, cohort=1)
    group = Group(simulation, tmp_path, Policy(in_flight=1))
    group.server.run()
    assert_simulated(group, simulated(simulation))
    assert group.server.state.max_staleness == 0


class Timed(Virtual):
    """Training takes the time that the simulator draws for its message; everything else takes none."""

    def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
        number = unpacked(from_envelope(content)[1]).values.get("round", 0)
        drawn = 0.5 + float(keys.uniform(keys.fold(SEED, "duration", number), 1))
        self.seconds = lambda name: drawn if kind == "train" else 0.0
        super().post(party, kind, content, limit)


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [1, 2])
def test_without_waiting_many_at_a_time_are_the_simulator(cohort: int, tmp_path: Path) -> None:
    """Who is asked when, for which weights, when the server steps, and which round is chosen: all as in the simulator.

    Models are tested while parties are at work, and what is chosen is what was tested: weights, rows and heads.
    """
    algorithm = replace(small("pfedhn-pc"), local_lr=1.0)  # so large that the last round is not the best one
    simulation = simulation_of(algorithm, rounds=18, cohort=cohort, evaluate_every=6 * cohort, seed=SEED)
    group = Group(simulation, tmp_path, Policy(in_flight=4), make_transport=Timed)
    group.server.run()
    expected = simulated(replace(simulation, in_flight=4))
    assert_simulated(group, expected)
    assert group.server.state.max_staleness == expected.flight.max_staleness > 0
    assert group.server.state.best.round == 12  # type: ignore[union-attr]
    for client, weights in enumerate(personal_at_best(simulation, expected)):
        mine = group.parties[f"party-{client}"].personal_model().state_dict()
        assert_close({name: mine[name] for name in weights}, weights)


@pytest.mark.slow
def test_without_waiting_a_slow_party_holds_up_nobody(tmp_path: Path) -> None:
    """Many at work at once: the time is that of the fast ones, and updates come late by a few steps.

    Nor does it hold up the others when models are tested.
    """

    def seconds(party: str) -> float:
        return 100.0 if party == "party-2" else 1.0

    times = {}
    for name, in_flight in (("waiting", None), ("not waiting", 6)):
        policy = Policy(in_flight=in_flight, return_seconds=0.0)
        simulation = simulation_of(small("pfedhn-pc"), rounds=30, cohort=1, evaluate_every=5)
        group = Group(simulation, tmp_path / name, policy, seconds=seconds)
        started = 0.0

        def listen(event: Any, group: Group = group) -> None:
            nonlocal started
            started = group.transport.now if event["event"] == "started" else started
            group.events.append(event)

        group.server.log = listen
        while not group.server.state.has_ended and group.server.state.round < 30:
            stop_after(group, "round", 30)
        times[name] = group.transport.now - started
        assert group.server.state.round == 30
        assert (group.server.state.max_staleness > 0) == (in_flight is not None)
    assert times["not waiting"] < times["waiting"] / 5


@pytest.mark.slow
def test_a_server_that_does_not_wait_survives_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(
        simulation_of(small("pfedhn-pc"), rounds=20, cohort=2), tmp_path, Policy(in_flight=4, checkpoint_seconds=0.0),
        seconds=lambda party: 1.0,
    )  # fmt: skip
    for _ in range(4):
        stop_after(group, "accepted", 5)
        before = group.server.state
        group.new_server()
        assert_same_bits(group.server.state.shared, before.shared)
        assert group.server.state.num_accepted == before.num_accepted
        assert list(group.server.state.replies) == list(before.replies)
        assert before.tested is not None  # killed while models were tested
        tested = group.server.state.tested
        assert tested is not None
        assert (tested.round, tested.bases) == (before.tested.round, before.tested.bases)
        assert_same_bits([tested.shared, tested.rows], [before.tested.shared, before.tested.rows])
    group.server.run()
    assert group.server.state.round == 20
    assert group.server.state.evaluated == 20


@pytest.mark.slow
def test_a_party_that_comes_during_the_run_takes_part(tmp_path: Path) -> None:
    simulation = simulation_of(small("pfedhn-pc"), rounds=6, cohort=6)
    group = Group(simulation, tmp_path, Policy(start_with=5), clients=[0, 1, 2, 3, 4])

    def listen(event: Any) -> None:
        group.events.append(event)
        if event["event"] == "round" and event["round"] == 3:
            group.add(5)

    group.server.log = listen
    group.server.run()
    state = group.server.state
    assert [event["round"] for event in group.said("accepted") if event["party"] == "party-5"] == [3, 4, 5]
    assert state.rows.keys() == group.parties.keys()
    assert group.parties["party-5"].personal_model() is not None


@pytest.mark.slow
def test_a_party_that_comes_after_the_end_learns_what_is_its_own(tmp_path: Path) -> None:
    """Over the wire as in the simulator: the hypernetwork is frozen, and the embedding and the head learn."""
    simulation = simulation_of(small("pfedhn-pc"), rounds=6, cohort=6)
    group = Group(simulation, tmp_path, Policy(start_with=4), clients=[0, 1, 2, 3])
    group.server.run()
    best = group.server.state.best
    assert best is not None
    before = [leaf.clone() for leaf in (*best.shared.phi.values(),)]
    for client in (4, 5):  # who came after the end before has no part in where this one starts
        group.add(client)
        group.server.run()
    member = group.server.state.members["party-5"]
    assert member.is_told
    assert member.round == 3
    assert_same_bits(before, [*best.shared.phi.values()])
    # The same party joins the same memories in the simulator.
    data = alone(simulation.federation, 5)
    trained = [best.rows[f"party-{number}"] for number in range(4)]
    memories = simulation.initial_state().memories._replace(shared=best.shared, rows=stack(trained))
    plan = simulation.joining(data.description, memories, 3, int(keys.fold(simulation.seed, "new client", 0)))
    joining = Simulation.of(plan, data)
    joined = simulated(joining)
    assert_close(group.server.state.rows["party-5"], take(joined.memories.rows, 0))
    assert joined.best is not None
    assert member.best_round == joined.best.evaluation.round
    expected = joining.personal_weights(joined.best.memories, joining.model_of(0), 0, member.best_round)
    mine = group.parties["party-5"].personal_model().state_dict()
    assert_close({name: mine[name] for name in expected}, expected)


def test_models_are_tested_a_few_at_a_time(
    expected: tuple[Simulation, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that not all messages of a large federation are in memory at once; it is the same run."""
    monkeypatch.setattr(serving, "TESTED_AT_ONCE", 2)
    most = {True: 0, False: 0}

    class Counting(Virtual):
        def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
            has_ended = group.server.state.has_ended
            most[has_ended] = max(most[has_ended], sum(kind == "evaluate" for _, kind in group.server.contacts.asked))
            super().post(party, kind, content, limit)

    group = Group(expected[0], tmp_path, make_transport=Counting, seconds=lambda party: 1.0)
    group.server.run()
    assert most == {True: 2, False: 2}
    assert_simulated(group, expected[1])


def test_a_party_that_comes_while_models_are_tested_is_greeted(tmp_path: Path) -> None:
    simulation = simulation_of(small("fedavg"), rounds=1, cohort=5)
    group = Group(
        simulation, tmp_path, Policy(start_with=5), clients=[0, 1, 2, 3, 4],
        seconds=lambda party: 50.0 if party == "party-2" else 0.0,
    )  # fmt: skip

    def listen(event: Any) -> None:
        group.events.append(event)
        if event["event"] == "started":
            group.add(5)

    group.server.log = listen
    group.server.run()
    told = [
        event["event"] for event in group.events if event["event"] == "evaluated" or event.get("party") == "party-5"
    ]
    assert told[:2] == ["joined", "evaluated"]


def test_a_late_answer_to_a_test_does_not_say_that_a_party_knows_the_end(tmp_path: Path) -> None:
    """It answers the last test when it is told that the run has ended: of the same round, and it has not heard that."""
    num_asked = 0

    class Late(Virtual):
        def post(self, party: str, kind: str, content: bytes, limit: int) -> None:
            nonlocal num_asked
            is_it = (party, kind) == ("party-2", "evaluate")
            num_asked += is_it
            self.seconds = lambda party: {2: 31.0, 3: 20.0}.get(num_asked, 0.0) if is_it else 0.0
            super().post(party, kind, content, limit)

    simulation = simulation_of(small("pfedhn-pc"), rounds=2, cohort=6, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy(reply_seconds=30.0), make_transport=Late)
    group.server.run()
    assert [event["reason"] for event in group.said("refused")] == ["silent", "round"]
    assert group.server.state.members["party-2"].is_told
    assert group.parties["party-2"].personal_model() is not None


def test_models_are_tested_again_when_all_who_were_asked_have_left(tmp_path: Path) -> None:
    group = Group(
        simulation_of(small("fedavg"), rounds=1, cohort=1), tmp_path, Policy(start_with=1), clients=[0],
        seconds=lambda party: 50.0 if party == "party-0" else 0.0,
    )  # fmt: skip

    def listen(event: Any) -> None:
        group.events.append(event)
        if event["event"] == "started":
            group.add(1)
        if event["event"] == "joined" and event["party"] == "party-1":
            del group.answers["party-0"]

    group.server.log = listen
    group.server.run()
    assert group.server.state.has_ended
    assert {tuple(one["results"]) for one in group.server.state.history} == {("party-1",)}


def test_fixed_descriptions_travel(tmp_path: Path) -> None:
    """Of the length that the method needs: one of another length is refused before it becomes a row."""
    simulation = simulation_of(replace(small("pfedhn"), embeddings=Embeddings("fixed", dim=None)), rounds=2, cohort=2)
    group = Group(simulation, tmp_path)
    party = group.parties["party-2"]
    wrong = iter([torch.zeros(99), torch.zeros(99).double(), torch.full((4,), torch.inf).double(), ()])

    def bad(content: bytes) -> bytes:
        message = opened(party.answer(content), party.key.public_key())
        if message.kind == "hello":
            message = replace(message, tensors=next(wrong, message.tensors))
        return sealed(message, party.key)

    group.answers["party-2"] = bad
    group.server.policy = replace(group.policy, patience=9)
    group.server.run()
    assert [event["reason"] for event in group.said("refused")] == ["hello"] * 4
    assert_simulated(group, simulated(simulation))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["client", "example"])
def test_a_party_with_noise_stops_when_its_budget_is_spent(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its updates are bounded and differ from what it trained, it sends no scores, and its last update is within."""
    if level == "client":
        privacy = Privacy(clip=0.5, noise=4.0, epsilon=6.0)
    else:
        privacy = Privacy(clip=0.5, noise=1.5, epsilon=4.0, level="example")
    cost = privacy.cost(TRAIN_SIZES[2], BATCH_SIZE, 3)
    allowed = next(count for count in range(100) if privacy.spent(cost, count + 1) > privacy.epsilon)
    assert 0 < allowed < 8
    simulation = simulation_of(small("pfedhn"), rounds=8, cohort=6, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy(patience=2, aside_seconds=1e9))
    name = "party-2"
    party = replace(group.parties[name], privacy=privacy, heard=[])
    group.answers[name] = party.answer
    group.server.run()
    accepted = [event for event in group.said("accepted") if event["party"] == name]
    assert len(accepted) == allowed
    assert {tuple(event["scores"]["validation"]) for event in accepted} == {(0.0, 0.0, 0)}
    (spent,) = group.said("spent")
    assert "privacy budget of this party is spent" in spent["sentence"]
    assert not group.said("set aside")
    assert party.files.chosen()["round"] == group.server.state.best.round  # type: ignore[union-attr]
    trained = [event for event in party.heard if event["kind"] == "train"]
    assert [event["epsilon"] for event in trained][-1] == pytest.approx(privacy.spent(cost, allowed), abs=1e-4)
    sayer(as_json=False)({"event": "heard", **trained[-1]})
    assert f"epsilon {privacy.spent(cost, allowed):.3f} spent" in capsys.readouterr().out
    again = replace(party, heard=[])  # after a restart it remembers
    assert again.budget is not None
    assert again.budget.num_updates == allowed
    assert privacy.spent(cost, allowed) == again.budget.spent <= privacy.epsilon
    more = replace(party, privacy=replace(privacy, noise=2 * privacy.noise, epsilon=20.0), heard=[]).budget
    assert more is not None
    before = more.spent
    more.pay(more.privacy.cost(TRAIN_SIZES[2], BATCH_SIZE, 3))  # other noise adds up
    assert [cost.noise for cost in more.history] == [cost.noise, 2 * cost.noise]
    assert before == again.budget.spent < more.spent < 20.0
    other = {"client": "example", "example": "client"}[level]
    with pytest.raises(UserError, match="so that what was spent can be added up"):
        replace(party, privacy=replace(privacy, level=other))


@pytest.mark.slow
def test_a_party_without_noise_on_whole_batches_trains_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private way through a party is the ordinary one, but for what it clips, noises and draws."""
    monkeypatch.setattr(secrets, "spent", lambda history, delta: 0.0)
    simulation = simulation_of(small("pfedhn-pc"), rounds=2, cohort=6, batch_size=20)
    group = Group(simulation, tmp_path)
    privacy = Privacy(clip=float("inf"), noise=0.0, epsilon=1.0, level="example")
    for name, party in group.parties.items():
        group.answers[name] = replace(party, privacy=privacy, heard=[]).answer
    group.server.run()
    expected = simulated(simulation)
    assert_close(group.server.state.shared, expected.memories.shared)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon is the number of updates."""
    monkeypatch.setattr(secrets, "spent", lambda history, delta: float(sum(cost.steps for cost in history)))


def make_private(group: Group, name: str, epsilon: float) -> Party:
    """Let a party send so many updates; without noise, so that they are those of the simulator."""
    privacy = Privacy(clip=float("inf"), noise=0.0, epsilon=epsilon)
    group.parties[name] = replace(group.parties[name], privacy=privacy, heard=[])
    group.answers[name] = group.parties[name].answer
    return group.parties[name]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("in_flight", mostly_slow([None, 6], None))
def test_a_run_ends_when_everybodys_budget_is_spent(in_flight: int | None, tmp_path: Path) -> None:
    """As in the simulator: rounds pass in which nobody sends anything, and everybody gets a model."""
    simulation = simulation_of(small("pfedhn-pc"), rounds=5, cohort=6, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy(in_flight=in_flight))
    for name in group.parties:
        make_private(group, name, 2.0)
    group.server.run()
    state = group.server.state
    assert (state.round, state.has_ended, state.num_accepted) == (5, True, 12)
    if in_flight is None:
        expected = simulated(simulation_of(small("pfedhn-pc"), rounds=2, cohort=6, evaluate_every=1_000))
        assert_close(state.shared, expected.memories.shared)
    assert sorted(event["party"] for event in group.said("spent")) == sorted(group.parties)
    assert all(party["is_spent"] for party in group.server.status()["parties"].values())
    assert not group.said("set aside")
    assert not group.said("refused")
    assert all(party.personal_model() is not None for party in group.parties.values())
    assert_same_bits(group.new_server().state.shared, state.shared)


@pytest.mark.usefixtures("counted")
def test_a_server_that_is_started_again_knows_whose_budget_is_spent(tmp_path: Path) -> None:
    """One of them has gone home for good: nobody waits for it. One that comes again may have a new budget."""
    simulation = simulation_of(small("fedavg"), rounds=5, cohort=6, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy())
    for name in group.parties:
        make_private(group, name, 1.0)
    stop_after(group, "round", 2)
    del group.answers["party-2"]
    more = replace(group.parties["party-3"].privacy, epsilon=2.0)  # type: ignore[type-var]
    group.parties["party-3"] = replace(group.parties["party-3"], privacy=more, heard=[])
    group.answers["party-3"] = group.parties["party-3"].answer
    stop = threading.Event()

    def clock() -> float:
        if group.transport.now > 10_000.0:
            stop.set()
        return group.transport.now

    server = group.new_server()
    server.clock = clock
    server.run(stop)
    assert server.state.has_ended
    assert [event["parties"] for event in group.said("round")][1:] == [[], ["party-3"], [], []]
    assert server.state.num_accepted == 7


@pytest.mark.usefixtures("counted")
def test_rounds_do_not_pass_while_who_has_budget_is_away(tmp_path: Path) -> None:
    class Returning(Virtual):
        def arrivals(self, seconds: float) -> list[Arrival]:
            if self.now > 60.0:
                group.answers["party-0"] = group.parties["party-0"].answer
            return super().arrivals(seconds)

    simulation = simulation_of(small("fedavg"), rounds=5, cohort=6, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy(), make_transport=Returning, clients=[0, 1, 2])
    for name in ("party-1", "party-2"):
        make_private(group, name, 1.0)

    def listen(event: Any) -> None:
        group.events.append(event)
        if event["event"] == "round" and event["round"] == 2:
            del group.answers["party-0"]

    group.server.policy, group.server.log = Policy(start_with=3), listen
    group.server.run()
    assert len(group.said("gone")) == 1
    assert [event["parties"] for event in group.said("round")][1:] == [["party-0"]] * 4
    assert group.transport.now > 60.0


@pytest.mark.usefixtures("counted")
def test_who_joins_after_the_end_has_the_model_that_its_budget_lasts_for(tmp_path: Path) -> None:
    simulation = simulation_of(small("pfedhn-pc"), rounds=1, cohort=5)
    group = Group(simulation, tmp_path, Policy(start_with=5), clients=[0, 1, 2, 3, 4])
    group.server.run()
    group.add(5)
    party = make_private(group, "party-5", 2.0)
    group.server.run()
    member = group.server.state.members["party-5"]
    assert (member.round, member.has_joined, member.is_told) == (2, True, True)
    assert party.personal_model() is not None


@pytest.mark.usefixtures("counted")
def test_a_party_with_noise_does_not_tell_how_its_examples_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the weights do to its examples, the answer is the same; its owner reads why."""
    group = Group(simulation_of(small("pfedhn-pc"), rounds=1, cohort=6, evaluate_every=1_000), tmp_path)
    party = make_private(group, "party-2", 9.0)
    protected, again = replace(party.privacy, clip=1.0), PartyPolicy(max_repeats=9)  # type: ignore[type-var]
    party = replace(party, privacy=protected, policy=again, heard=[])
    group.server.run()
    (party.folder / "chosen.json").unlink()  # as if the run went on
    sound = received_by(group, "party-2")
    wild = {name: torch.full_like(value, 1e308) for name, value in sound.items()}

    def ask(kind: str, weights: Any, **values: Any) -> Message:
        values = {"round": 0, "base": 0, "phase": "training", **values}
        message = Message(kind, RUN, "party-2", values, weights)
        return opened(party.answer(sealed(message, KEYS[0])), party.key.public_key())

    looks = {"is_adapted": False, "best": None, "is_last": False}
    assert ask("evaluate", sound, **looks).values == ask("evaluate", wild, **looks).values
    sayer(as_json=False)({"event": "heard", **party.heard[-2]})
    assert "could not test its model: the received weights give no finite loss" in capsys.readouterr().out
    trains = {"version": 0, "keep": []}
    answers = [ask("train", weights, **trains) for weights in (sound, wild)]
    assert answers[0].kind == answers[1].kind == "train"
    assert answers[0].values == answers[1].values
    assert is_finite(answers[1].tensors)
    assert is_finite(party.kept("training", 0, sound))  # what diverged is not kept

    def raising(*_: Any) -> None:
        raise ValueError("the example of Mrs. Miller does not fit")

    monkeypatch.setattr(Federation, "batches", raising)
    answer = ask("train", sound, **trains, base=None)
    assert (answer.kind, answer.values["sentence"]) == ("refusal", SILENCE)
    assert "Mrs. Miller" in party.heard[-1]["sentence"]


@pytest.mark.usefixtures("counted")
def test_noise_is_not_forgotten_and_its_cost_is_of_all_runs(tmp_path: Path) -> None:
    group = Group(simulation_of(small("fedavg"), rounds=1, cohort=6, evaluate_every=1_000), tmp_path / "first")
    group.parties["party-2"] = replace(group.parties["party-2"], ledger=tmp_path / "privacy.json", heard=[])
    first = make_private(group, "party-2", 2.0)
    first.refuse_forgotten_privacy()
    group.server.run()
    again = replace(first, folder=tmp_path / "another run", heard=[])
    assert again.budget is not None
    assert again.budget.spent == 1.0
    again.budget.pay(RoundCost(0.0, 1.0, 1))
    with pytest.raises(BudgetSpent, match="is spent"):
        replace(first, heard=[]).budget.pay(RoundCost(0.0, 1.0, 1))  # type: ignore[union-attr]
    forgetful = replace(again, privacy=None, heard=[])
    with pytest.raises(UserError, match=r"--clip, --noise, --epsilon and --level again, or remove privacy\.json"):
        forgetful.refuse_forgotten_privacy()
    values = {"round": 0, "base": None, "phase": "training", "version": 0, "keep": []}
    train = sealed(Message("train", RUN, "party-2", values, received_by(group, "party-2")), KEYS[0])
    assert opened(forgetful.answer(train), first.key.public_key()).kind == "refusal"


def test_privacy_refuses_what_leaks_beside_it(tmp_path: Path) -> None:
    privacy = Privacy(clip=1.0, noise=1.0, epsilon=1.0, level="example")
    group = Group(simulation_of(replace(small("pfedhn"), embeddings=Embeddings("fixed", dim=None))), tmp_path)
    with pytest.raises(UserError, match="which classes a client has"):
        replace(group.parties["party-0"], privacy=privacy)
    with pytest.raises(UserError, match="say how much epsilon"):
        replace(Group(simulation_of(small("fedavg")), tmp_path / "other").parties["party-0"], privacy=Privacy(1.0, 1.0))


def test_noise_has_the_deviation_it_says() -> None:
    privacy = Privacy(clip=2.0, noise=3.0, epsilon=1.0)
    given = {"a": torch.full((300, 100), 5.0), "b": torch.zeros(7, dtype=torch.float64)}
    one, other = (Protection(privacy, 1.0, system_normal).released(given) for _ in range(2))
    assert not torch.equal(one["a"], other["a"])
    noise = one["a"] - 2.0 / given["a"].numel() ** 0.5  # the clipped update has a norm of 2
    # 30,000 numbers: mean and deviation are known to within five of their own deviations.
    assert abs(float(noise.mean())) < 5 * 6 / 30_000**0.5
    assert abs(float(noise.std()) - 6) < 5 * 6 / 60_000**0.5
    assert one["b"].dtype == torch.float64
    for wrong in ({"clip": 0.0}, {"noise": -1.0}, {"epsilon": float("inf")}, {"delta": 1.0}, {"level": "all"}):
        with pytest.raises(UserError, match="must be"):
            replace(privacy, **wrong)
    with pytest.raises(UserError, match="finite clip"):
        replace(privacy, clip=float("inf"))


@pytest.mark.slow
def test_a_server_from_an_older_copy_goes_on_with_what_parties_have(tmp_path: Path) -> None:
    """It asks for versions that parties have left behind: they go on from their newest one."""
    group = Group(simulation_of(small("pfedhn-pc"), rounds=6, cohort=6), tmp_path)
    stop_after(group, "round", 2)
    shutil.copytree(tmp_path / "server", tmp_path / "copy")
    group.new_server()
    stop_after(group, "round", 3)
    shutil.rmtree(tmp_path / "server")
    (tmp_path / "copy").rename(tmp_path / "server")
    group.new_server()
    assert group.server.state.round == 2
    group.server.run()
    assert group.server.state.round == 6
    assert {(event["party"], event["base"]) for event in group.said("rebased")} == {(name, 4) for name in group.parties}
    assert not group.said("set aside")


def test_rounds_are_compared_by_the_parties_that_were_there_both_times(tmp_path: Path) -> None:
    """A round is not chosen because a party that does badly was away."""
    group = Group(simulation_of(small("fedavg")), tmp_path)
    rules, state = group.server.store.rules, group.server.store.rules.initial()

    def score(number: int, **correct: float) -> int:
        splits = {
            name: {split: [1.0, value, 10] if value else [0.0, 0.0, 0] for split in ("validation", "test")}
            for name, value in correct.items()
        }
        state.round = number
        rules.apply(state, {"kind": "test"})
        rules.apply(state, {"kind": "score", "round": number, "results": splits, "time": 0.0})
        assert state.best is not None
        return state.best.round

    assert score(0, lyon=3.0, paris=6.0) == 0
    assert score(1, lyon=4.0, paris=6.0) == 1
    assert score(2, paris=6.0) == 1  # better on average, and not for those who are there
    assert score(3, paris=7.0, nice=1.0) == 3
    assert score(4, lyon=3.5) == 3  # it was away in round 3, and had a better model before that
    assert score(5, lyon=4.5) == 5
    assert score(6, paris=6.5, nice=1.0) == 5  # that round 5 was chosen without them does not make theirs forgotten
    assert score(7, rome=0.0) == 5  # it keeps its scores to itself, and cannot judge
    assert score(8, oslo=1.0, rome=0.0) == 8  # nobody whose scores are known of both: the newer one


def test_a_party_that_goes_is_not_set_aside_when_it_comes_again(tmp_path: Path) -> None:
    """It left while it was asked: that is no failing of the kind that patience is for."""
    simulation = simulation_of(small("fedavg"), rounds=6, cohort=6, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy(patience=1), seconds=lambda party: 1.0)
    name = "party-2"

    def listen(event: Any) -> None:
        group.events.append(event)
        if event["event"] == "accepted" and (event["party"], event["round"]) == ("party-0", 1):
            del group.answers[name]
        if event["event"] == "round" and event["round"] == 3:
            group.answers[name] = group.parties[name].answer

    group.server.log = listen
    group.server.run()
    assert [event["reason"] for event in group.said("refused")] == ["lost"]
    assert [event["party"] for event in group.said("gone")] == [name]
    assert not group.said("set aside")
    assert [event["round"] for event in group.said("accepted") if event["party"] == name] == [0, 4, 5]
