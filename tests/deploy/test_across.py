"""Every model at every site: who consents is asked, the scores are those of the models, and nothing private travels."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deploy.test_processes import PARTIES, World, world, write_data
from deploy.test_processes import SPEC as PROCESSES
from deploy.test_serve import SPEC
from parties import Group, Virtual, named_federation, simulation_of, small
from support import model
from typer.testing import CliRunner

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.cli.app import app
from pfedhn.combinators import fine_tuned
from pfedhn.deploy import across
from pfedhn.deploy.across import SHARE, TEST, Across, matrix, shortened, why_not
from pfedhn.deploy.signing import opened
from pfedhn.deploy.site import Site
from pfedhn.privacy import Privacy

__all__ = ["world"]
BOTH = frozenset({SHARE, TEST})


def ended(folder: Path, method: Any = "pfedhn", consents: dict[str, frozenset[str]] | None = None) -> Group:
    """A federation whose training has ended; all parties consent to both, unless told otherwise."""
    algorithm = small(method) if isinstance(method, str) else method
    group = Group(simulation_of(algorithm, rounds=2, cohort=2), folder)
    for name, party in group.parties.items():
        party.consents = BOTH if consents is None else consents.get(name, frozenset())
    group.server.run()
    return group


def compared(group: Group) -> dict[str, Any]:
    attach(group)
    across.request(group.folder)
    group.server.run()
    found = across.found(group.folder)
    assert found is not None
    assert not across.is_requested(group.folder)
    return found


def attach(group: Group) -> None:
    server = group.server
    server.across = Across(group.plan, server.questions, server.contacts, group.folder, group.events.append)


def test_every_model_is_tested_at_every_site(tmp_path: Path) -> None:
    group = ended(tmp_path)
    found = compared(group)
    best = group.server.state.best
    assert best is not None
    assert found["round"] == best.round
    assert sorted(found["scores"]) == sorted(group.parties)
    for site, party in group.parties.items():
        for author, parts in found["scores"][site].items():
            network = group.plan.models[group.parties[author].architecture]
            weights = group.plan.exchange.publish(network, best.shared, best.rows[author])
            for split, scores in party.local.scores(weights, ("validation", "test")).items():
                assert parts[split] == pytest.approx(scores)
        assert found["scores"][site][site]["test"] == pytest.approx(best.results[site]["test"])  # the diagonal
        assert sorted(found["scores"][site]) == sorted(group.parties)
    assert not group.said("refused")


def test_nobody_is_told_whose_model_it_tests(tmp_path: Path) -> None:
    group = ended(tmp_path)
    seen = []
    for name, answer in list(group.answers.items()):

        def watched(content: bytes, name: str = name, answer: Any = answer) -> bytes:
            seen.append((name, opened(content, group.server_key.public_key())))
            result: bytes = answer(content)
            return result

        group.answers[name] = watched
    compared(group)
    sent = [(name, message) for name, message in seen if message.kind == "compare"]
    assert len(sent) == len(group.parties) ** 2
    for name, message in sent:
        assert message.values.keys() == {"round", "model", "architecture"}
        assert not [other for other in group.parties if other != name and other in json.dumps(dict(message.values))]


def test_only_who_consents_shares_or_tests(tmp_path: Path) -> None:
    consents = {"party-0": frozenset({SHARE}), "party-1": frozenset({TEST}), "party-2": BOTH}
    found = compared(ended(tmp_path, consents=consents))
    tested = {site: sorted(models) for site, models in found["scores"].items()}
    assert tested == {"party-1": ["party-0", "party-1", "party-2"], "party-2": ["party-0", "party-2"]}


def test_without_consent_nothing_is_sent(tmp_path: Path) -> None:
    group = ended(tmp_path, consents={})
    assert compared(group)["scores"] == {}
    assert matrix({"round": 1, "scores": {}})["sites"] == []


def test_a_consent_that_is_taken_back_counts_no_more(tmp_path: Path) -> None:
    """Consents are asked for anew, since a party that was started again may not be greeted again."""
    group = ended(tmp_path)
    group.parties["party-0"].consents = frozenset({TEST})
    group.parties["party-1"].consents = frozenset({SHARE})
    found = compared(group)
    assert "party-1" not in found["scores"]
    assert "party-0" in found["scores"]["party-0"]
    assert all("party-0" not in models for site, models in found["scores"].items() if site != "party-0")


def test_a_party_refuses_what_it_has_not_consented_to(tmp_path: Path) -> None:
    """As by a server that asks all the same."""
    group = ended(tmp_path)
    party = group.parties["party-0"]
    hello = party._hello

    def lying(message: Any) -> Any:
        answer = hello(message)
        party.consents = frozenset()
        return answer

    party._hello = lying  # type: ignore[method-assign]
    found = compared(group)
    assert found["scores"]["party-0"] == {}
    (refused,) = group.said("refused")
    assert (refused["party"], refused["reason"]) == ("party-0", "consent")
    assert not group.said("set aside")


@pytest.mark.parametrize("method", ["pfedhn-pc", "fedper", "ditto", "local", "pfedme"])
def test_private_layers_do_not_travel(method: str, tmp_path: Path) -> None:
    group = ended(tmp_path, method)
    assert "keeps private layers at each party, which cannot travel" in str(why_not(group.plan))
    found = compared(group)
    assert "scores" not in found
    assert "cannot travel" in matrix(found)["why"]


@pytest.mark.parametrize("method", ["pfedhn", "fedavg", "pfedhn-shared"])
def test_models_that_the_server_makes_do(method: str) -> None:
    assert why_not(simulation_of(small(method), rounds=2, cohort=2)) is None


def test_private_statistics_and_fine_tuning_do_not_travel_either() -> None:
    plan = simulation_of(FedAvg(local_steps=3), models="batchnorm", rounds=2, cohort=2)
    assert "cannot travel" in str(why_not(plan))
    tuned = simulation_of(fine_tuned(FedAvg(local_steps=3), 2), rounds=2, cohort=2)
    assert why_not(tuned, False) is None  # its steps were found to be of no use
    assert "fine-tune" in str(why_not(tuned, True))


def test_a_party_that_leaves_on_the_way_leaves_its_cells_empty(tmp_path: Path) -> None:
    group = ended(tmp_path)
    answer = group.answers["party-1"]

    def leaving(content: bytes) -> bytes:
        if opened(content, group.server_key.public_key()).kind == "compare":
            del group.answers["party-1"]
        return answer(content)

    group.answers["party-1"] = leaving
    found = compared(group)
    assert sorted(found["scores"]["party-0"]) == sorted(group.parties)
    assert len(found["scores"]["party-1"]) <= 1


@pytest.mark.parametrize("answers", [0, 3, 7])
def test_a_killed_server_asks_again(answers: int, tmp_path: Path) -> None:
    group = ended(tmp_path)
    attach(group)
    across.request(group.folder)

    class Killed(BaseException):
        pass

    taken, take = list[Any](), Across.take

    def counted(self: Across, *given: Any) -> None:
        if len(taken) == answers:
            raise Killed
        taken.append(given)
        take(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Across, "take", counted)
        with pytest.raises(Killed):
            group.server.run()
    assert across.found(group.folder) is None
    group.transport._waiting.clear()
    group.new_server()
    found = compared(group)
    assert {len(models) for models in found["scores"].values()} == {len(group.parties)}


def test_a_request_that_is_withdrawn_is_forgotten(tmp_path: Path) -> None:
    group = ended(tmp_path)
    attach(group)
    assert group.server.across is not None
    assert not group.server.across.is_wanted()
    group.server.run()  # and the server leaves
    assert across.found(group.folder) is None


def test_a_lie_about_scores_is_refused(tmp_path: Path) -> None:
    group = ended(tmp_path)
    party = group.parties["party-0"]
    party.local.scores_of_other = lambda *given: {"validation": [0.0, 9e9, 9], "test": [0.0, 9e9, 9]}  # type: ignore
    found = compared(group)
    assert found["scores"]["party-0"] == {}
    assert {event["reason"] for event in group.said("refused")} == {"scores"}


def test_a_party_with_a_budget_keeps_its_scores(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    group = ended(tmp_path)
    party = group.parties["party-0"]
    private = replace(party, privacy=Privacy(clip=1.0, noise=8.0, epsilon=50.0), consents=BOTH)
    group.answers["party-0"] = private.answer
    found = compared(group)
    assert {parts["test"][2] for parts in found["scores"]["party-0"].values()} == {0}
    assert matrix(found)["findings"][0] == "party-0: no validation scores, so no model is chosen."


def table(*rows: tuple[str, str, int, int]) -> dict[str, Any]:
    """A result with so many right of a hundred on validation and of a hundred on test."""
    scores: dict[str, Any] = {}
    for site, author, validation, test in rows:
        parts = {"validation": [1.0, float(validation), 100], "test": [1.0, float(test), 100]}
        scores.setdefault(site, {})[author] = parts
    return {"round": 7, "time": 0.0, "scores": scores}


def test_validation_chooses_and_test_says() -> None:
    rows = [("a", "a", 50, 50), ("a", "b", 90, 95), ("b", "b", 80, 10), ("b", "a", 70, 99), ("c", "c", 70, 70)]
    found = matrix(table(*rows, ("c", "a", 71, 72)))
    assert found["best"] == ["b", "b", "a"]
    assert found["findings"] == [
        "a: better served by the model of b (test accuracy 95.0 %, its own 50.0 %, 100 examples).",
        "b: its own model has the best validation score.",
        "c: validation prefers the model of a, but the difference may be chance (test accuracy 72.0 %, its own 70.0 %, "
        "100 examples).",
    ]
    assert found["scores"][0] == [0.5, 0.95, None]


def test_a_loss_is_better_the_lower_it_is() -> None:
    parts = {
        model: {"validation": [loss, None, 10], "test": [loss, None, 10]} for model, loss in (("a", 9.0), ("b", 5.0))
    }
    found = matrix({"round": 1, "scores": {"a": parts}})
    assert found["findings"] == ["a: validation prefers the model of b; test loss 0.5, its own 0.9."]
    assert shortened(found)["scores"] == found["scores"]


def test_it_waits_for_the_parties_of_a_restarted_server(tmp_path: Path) -> None:
    group = ended(tmp_path)
    late = group.answers.pop("party-1")
    group.new_server()
    arrivals = Virtual.arrivals

    def joining(self: Virtual, seconds: float) -> Any:
        if self.now > group.server._began + 5:
            group.answers["party-1"] = late
        return arrivals(self, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Virtual, "arrivals", joining)
        found = compared(group)
    assert len(found["scores"]) == len(group.parties)


def test_models_of_several_sizes_meet(tmp_path: Path) -> None:
    """A party tests a network that is not its own."""
    federation = named_federation()
    sizes = [("mlp", "wide")[client % 2] for client in range(federation.num_clients)]
    models = {name: model(name) for name in ("mlp", "wide")}
    settings = {"rounds": 2, "cohort": 2, "models": models}
    group = Group(simulation_of(small("pfedhn"), federation.with_architectures(sizes), **settings), tmp_path)
    for party in group.parties.values():
        party.consents = BOTH
    group.server.run()
    found = compared(group)
    assert {len(scores) for scores in found["scores"].values()} == {federation.num_clients}
    assert not group.said("refused")


# The command.


def invoked(*words: str) -> Any:
    return CliRunner().invoke(app, ["evaluate", *words], prog_name="pfedhn")


def state_of(folder: Path, method: str) -> str:
    """A server's folder, before its run."""
    (folder / "spec.toml").write_text(f'method = "{method}"\n{SPEC}')
    Site.make(folder / "state", folder / "spec.toml")
    return str(folder / "state")


def test_the_command_says_what_cannot_be_done(tmp_path: Path) -> None:
    state = state_of(tmp_path, "pfedhn")
    assert "give --across" in " ".join(invoked("--state", state).output.split())
    assert "training has not ended" in " ".join(invoked("--across", "--state", state).output.split())
    assert "no models were compared yet" in " ".join(invoked("--across", "--last", "--state", state).output.split())
    assert not across.is_requested(Path(state))
    private = state_of(tmp_path / "state", "pfedhn-pc")
    assert "cannot travel" in " ".join(invoked("--across", "--state", private).output.split())


def test_the_command_prints_the_last_result(tmp_path: Path) -> None:
    state = state_of(tmp_path, "pfedhn")
    result = table(("lyon", "lyon", 50, 50), ("lyon", "nice", 90, 95))
    (Path(state) / across.FOUND).write_text(json.dumps(result))
    said = invoked("--across", "--last", "--state", state)
    assert said.exit_code == 0, said.output
    assert "50.0%" in said.stdout
    assert "95.0%*" in said.stdout
    assert "lyon: better served by the model of nice" in said.stdout
    assert json.loads(invoked("--across", "--last", "--json", "--state", state).stdout) == result


@pytest.mark.slow
def test_processes_test_each_others_models_with_and_without_a_server_at_work(world: World) -> None:
    write_data(world.folder / "data")
    (world.folder / "spec.toml").write_text(PROCESSES.replace("pfedhn-pc", "pfedhn"))
    address = f"127.0.0.1:{world.port}"
    words = ("serve", "spec.toml", "--state", "state", "--port", str(world.port), "--address", address)
    server = world.start("serve.log", *words)
    world.wait_for("serving")
    for name in PARTIES:
        world.run("invite", name, "--state", "state")
        world.start(f"{name}.log", "join", f"{name}.invite", "--data", f"data/{name}", "--share-model", "--test-others")
    world.wait_for("ended")
    first = json.loads(world.run("evaluate", "--across", "--state", "state", "--json"))
    assert {site: sorted(scores) for site, scores in first["scores"].items()} == {
        site: list(PARTIES) for site in PARTIES
    }
    server.kill()
    server.wait()
    world.started.remove(server)
    second = json.loads(world.run("evaluate", "--across", "--state", "state", "--json"))
    assert second["scores"] == first["scores"]
