"""A party that noises its updates, by every method: it takes part, or is told at the start that it cannot."""

from dataclasses import replace
from pathlib import Path

import pytest
from parties import Group, simulation_of, small

from pfedhn.algorithms import ALGORITHMS
from pfedhn.deploy import privacy as secrets
from pfedhn.deploy.policy import Policy
from pfedhn.errors import UserError
from pfedhn.privacy import Privacy

NOT_OFFERED = {"apfl", "ditto", "fedala", "per-fedavg", "per-fedavg-hf", "pfedme"}


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_method_without_private_steps_is_refused_before_it_costs_anything(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "spent", lambda history, delta: float(sum(cost.steps for cost in history)))
    simulation = simulation_of(small(method), rounds=1, cohort=1, evaluate_every=1_000)
    group = Group(simulation, tmp_path, Policy(start_with=1), clients=[2])
    privacy = Privacy(1.0, 1.0, epsilon=1e9, level="example")
    leaks = simulation.extras["mlp"].unprotected
    if method in NOT_OFFERED or leaks:
        sentence = "noise on gradients does not protect" if leaks else "privacy of single examples is not offered"
        with pytest.raises(UserError, match=sentence):
            replace(group.parties["party-2"], privacy=privacy)
        assert not (group.parties["party-2"].folder / "privacy.json").exists()
        return
    party = replace(group.parties["party-2"], privacy=privacy, heard=[])
    assert party.budget is not None
    assert party.budget.num_updates == 0
    group.answers["party-2"] = party.answer
    group.server.run()
    assert len(group.said("accepted")) == party.budget.num_updates == 1
    assert not group.said("refused")
