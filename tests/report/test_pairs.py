"""Paired differences and ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scipy.stats import ttest_rel

from pfedhn.report.entries import Entry, Report
from pfedhn.report.pairs import difference, pairs, ranks


def entry(label: str, values: dict[int, float], splits: str = "same") -> Entry:
    def result(value: float) -> Any:
        test = SimpleNamespace(has_accuracy=True, client_mean=value / 100, sample_mean=value / 100, loss=1.0)
        return SimpleNamespace(test=test, partition_sha256=splits)

    cell: Any = SimpleNamespace(dataset="digits", clients=5)
    return Entry(label, cell, {seed: result(value) for seed, value in values.items()}, {}, len(values))


SPLITS = {0: 91.0, 1: 84.0, 2: 88.0, 3: 79.0}  # the luck of the split is ten times the difference


def shifted(label: str, *by: float) -> Entry:
    return entry(label, {seed: value + step for (seed, value), step in zip(SPLITS.items(), by, strict=True)})


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    first, second = shifted("pfedhn", 0, 0, 0, 0), shifted("fedavg", -0.5, -0.9, -0.7, -0.4)
    found = difference(second, first)
    assert found is not None
    expected = ttest_rel([90.5, 83.1, 87.3, 78.6], list(SPLITS.values())).confidence_interval(0.95)
    assert found.ends == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(-0.625)
    assert not found.holds_zero
    reverse = difference(first, second)
    assert reverse is not None
    assert reverse.mean == pytest.approx(0.625)


def test_only_seeds_with_the_same_splits_count() -> None:
    first = shifted("pfedhn", 0, 0, 0, 0)
    assert difference(replace(entry("fedavg", SPLITS, splits="other")), first) is None
    found = difference(entry("fedavg", {1: 84.5, 2: 87.0, 3: 78.0, 9: 10.0}), first)
    assert found is not None
    assert (found.num_seeds, found.mean) == (3, pytest.approx(-0.5))
    assert found.holds_zero


def test_fewer_than_three_seeds_have_no_interval_and_no_tie() -> None:
    first = shifted("pfedhn", 0, 0, 0, 0)
    for values in ({0: 90.0}, {0: 90.0, 1: 85.0}):
        found = difference(entry("fedavg", values), first)
        assert found is not None
        assert (found.ends, found.num_seeds, found.holds_zero) == (None, len(values), False)
    report = Report("t", [first, entry("fedavg", {1: 83.5, 3: 78.0}), entry("local", {9: 50.0})])
    lines = {line[0]: line[3:] for line in pairs(report, report.columns[0])}
    assert lines["FedAvg"] == ["-0.75", "too few seeds (2)", "2"]
    assert lines["Local"] == ["", "no seed in common", "1"]
    assert lines["pFedHN"] == ["", "", "4"]


def test_who_is_ahead_with_too_few_seeds_is_compared_and_compares_nobody() -> None:
    first, second = shifted("pfedhn", 0, 0, 0, 0), shifted("fedavg", -1, -1, -1, -1.2)
    report = Report("t", [second, entry("local", {0: 95.0}), first])
    lines = pairs(report, report.columns[0])
    assert lines[0][3] == "against pFedHN"
    assert lines[1] == ["Local", "95.00", "", "+4.00", "too few seeds (1)", "1"]
    assert [line[:4] for line in lines[2:]] == [["pFedHN", "85.50", "1.0", ""], ["FedAvg", "84.45", "2.0", "-1.05"]]
    assert lines[3][4].startswith("-1.2")
    alone = Report("t", [entry("fedavg", {0: 80.0, 1: 70.0}), entry("pfedhn", {0: 81.0, 1: 72.0})])
    assert [line[2] for line in pairs(alone, alone.columns[0])[1:]] == ["1.0", "2.0"]  # nobody has three


def test_means_and_ranks_are_of_the_named_seeds_and_differences_of_all() -> None:
    first, second = shifted("pfedhn", 0, 0, 0, 4), shifted("fedavg", 1, 1, 1, 0)
    report = Report("t", [first, second])
    assert [line[:4] for line in pairs(report, report.columns[0])[1:]] == [
        ["pFedHN", "86.50", "1.8", ""],
        ["FedAvg", "86.25", "1.2", "-0.25"],
    ]
    lines = pairs(report, report.columns[0], seeds=(0, 1, 2))
    assert lines[1] == ["FedAvg", f"{(91 + 84 + 88) / 3 + 1:.2f}", "1.0", "", "", "4"]
    assert lines[2][:4] == ["pFedHN", f"{(91 + 84 + 88) / 3:.2f}", "2.0", "+0.25"]
    assert lines[2][5] == "4"


def test_equals_share_a_place() -> None:
    found = ranks([shifted("a", 0, 0, 1, 0), shifted("b", 0, 1, 0, 0), shifted("c", -1, -1, -1, 0)])
    assert {label: summary.mean for label, summary in found.items()} == pytest.approx(
        {"a": (1.5 + 2 + 1 + 2) / 4, "b": (1.5 + 1 + 2 + 2) / 4, "c": (3 + 3 + 3 + 2) / 4}
    )


def test_the_table_of_a_column() -> None:
    report = Report("t", [shifted("fedavg", -1, -1, -1, -1.2), shifted("pfedhn", 0, 0, 0, 0), entry("local", {})])
    (column,) = report.columns
    lines = pairs(report, column)
    assert lines[0][3] == "against pFedHN"
    assert [line[0] for line in lines[1:]] == ["pFedHN", "FedAvg"]
    assert lines[1] == ["pFedHN", "85.50", "1.0", "", "", "4"]
    assert lines[2][:4] == ["FedAvg", "84.45", "2.0", "-1.05"]
    assert lines[2][4].startswith("-1.2")
    assert pairs(Report("t", [shifted("pfedhn", 0, 0, 0, 0)]), column) == []


def test_one_seed_makes_no_table() -> None:
    report = Report("t", [entry("fedavg", {0: 80.0}), entry("pfedhn", {0: 90.0})])
    assert pairs(report, report.columns[0]) == []


def test_losses_are_shown_as_they_are_and_the_least_is_best() -> None:
    def losing(label: str, *losses: float) -> Entry:
        tests = [SimpleNamespace(has_accuracy=False, client_mean=None, loss=loss) for loss in losses]
        results: Any = {s: SimpleNamespace(test=test, partition_sha256="same") for s, test in enumerate(tests)}
        return replace(entry(label, {}), results=results)

    report = Report("t", [losing("fedavg", 3.0, 4.5, 6.0), losing("pfedhn", 1.0, 2.0, 3.0)])
    best, other = pairs(report, report.columns[0])[1:]
    assert best == ["pFedHN", "2.000", "1.0", "", "", "3"]
    assert other[:4] == ["FedAvg", "4.500", "2.0", "+2.500"]
    half = 4.3027 * 0.5 / 3**0.5  # a deviation of 0.5; the quantile of two degrees of freedom
    assert [float(end) for end in other[4].split(" to ")] == pytest.approx([2.5 - half, 2.5 + half], abs=1e-3)
