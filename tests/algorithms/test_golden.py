"""Ten rounds of each method in float64 on a CPU: the validation loss after every round, as it was when last reviewed.

A file changes only by the command `PYTHONPATH=tests python tests/algorithms/test_golden.py --write METHOD`; without a
method it writes those that are missing. Look at the diff before you commit it.
"""

import json
import sys
from pathlib import Path

import pytest
from support import changed, make_federation, simulate

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_ROUNDS = 10
SMALLER = {"local_steps": 5, "outer_steps": 5, "mixture_steps": 3, "hidden_dim": 20}


def validation_losses(method: str, federation: Federation) -> list[float]:
    spec = changed(ALGORITHMS[method](), SMALLER)
    simulation = simulate(spec, federation, "conv", rounds=NUM_ROUNDS, cohort=2, evaluate_every=1, executor="loop")
    progress = simulation.rounds(simulation.initial_state())
    return [each.evaluation.splits["validation"].mean_loss for each in progress if each.evaluation is not None]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_golden(federation: Federation, method: str) -> None:
    expected = json.loads((GOLDEN / f"{method}.json").read_text())
    assert len(expected) == 1 + NUM_ROUNDS
    assert validation_losses(method, federation) == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize("method", ["fedavg", "pfedhn-plus", "pfedhn-plus-pc"])
def test_fine_tuning_does_not_touch_training(method: str) -> None:
    before, after = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in (method, f"{method}-ft"))
    assert after == pytest.approx(before, rel=1e-9, abs=0)


def test_every_golden_file_has_its_method() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(ALGORITHMS)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(f"usage: PYTHONPATH=tests python {sys.argv[0]} --write [METHOD ...]")
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[2:] or [name for name in ALGORITHMS if not (GOLDEN / f"{name}.json").exists()]:
        losses = validation_losses(name, make_federation())
        (GOLDEN / f"{name}.json").write_text(json.dumps(losses, indent=1) + "\n")
        print(f"{name}: {losses[0]:.4f} -> {losses[-1]:.4f}")
