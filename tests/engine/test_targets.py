"""Every executor agrees on the networks that people have, or refuses them with a sentence."""

import re
from pathlib import Path

import pytest
from support import mostly_slow
from targets import COLUMNS, TARGETS, outcome, road

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "networks.md"


def documented() -> dict[str, dict[str, str]]:
    """The table of the page: network -> executor -> what becomes of it."""
    lines = PAGE.read_text().split("<!-- networks -->\n")[1].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header, _, *body = rows
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in body}


@pytest.mark.parametrize(
    ("target", "executor"),
    mostly_slow(
        [(target, executor) for target in TARGETS for executor in COLUMNS],
        ("LSTM", "vectorized"),
        ("tied weights", "traced"),
        ("dropout", "captured"),
    ),
)
@pytest.mark.slow
def test_the_table_of_networks_is_what_the_executors_do(target: str, executor: str) -> None:
    if target == "transformer with LoRA":
        pytest.importorskip("peft")
        pytest.importorskip("transformers")
    assert documented()[target][executor] == outcome(target, executor), "tools/networks_page.py writes it"


def test_a_refusal_says_what_to_use() -> None:
    assert list(documented()) == list(TARGETS)
    assert re.search(r"cannot run the network 'net': .* use 'traced' or 'loop'\.", road("LSTM", "vectorized"))
    freely = road("dropout inside attention", "vectorized")
    assert re.search(r"cannot run the network 'net': it draws in ways of its own, .* use 'loop', or", freely)
