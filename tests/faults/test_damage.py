"""A few damaged files; `make test-faults` tries hundreds."""

import pytest
from faults.damage import try_damage
from faults.table import row_of, to_text


@pytest.mark.slow
def test_some_damaged_files() -> None:
    rows = try_damage(6, seed=0)
    assert sum(row.tries for row in rows) == 6
    assert not [line for row in rows for line in row.bad]


@pytest.mark.slow
def test_more_damaged_files() -> None:
    assert not [line for row in try_damage(60, seed=1) for line in row.bad]


def test_the_table_counts_and_the_bad_are_named() -> None:
    row = row_of("damaged files", [("same", ""), ("refused", "x"), ("silent difference", "spec.toml cut")])
    assert row.bad == ["damaged files: silent difference: spec.toml cut"]
    assert to_text([row]).splitlines()[-1] == "| damaged files | 3 | 1 refused, 1 same, 1 silent difference |"
