"""Accuracy against bytes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pfedhn.report.entries import Entry, Report
from pfedhn.report.figures import draw_curves, new_figure
from pfedhn.report.traffic import (
    NUM_BEST,
    accuracy_at,
    best_of,
    chosen_so_far,
    draw_traffic,
    mean_line,
    megabytes,
    megabytes_to,
    plot_traffic,
)
from pfedhn.storage.schema import Curve, Measures

COLUMN = ("digits", 5)


def curve(validation: list[float], test: list[float]) -> Curve:
    """Evaluations at steps 0, 10, 20, ..."""
    steps = tuple(range(0, 10 * len(test), 10))
    return Curve(steps, Measures(tuple(validation), tuple(validation)), Measures(tuple(test), tuple(test)))


def entry(label: str, *tests: list[float], megabytes: float = 60.0, unadapted: Any = None) -> Entry:
    """A curve for each seed, of which the last round is chosen; a run's bytes are those of all five clients."""
    curves = {seed: curve(test, test) for seed, test in enumerate(tests)}
    half = int(megabytes * 1e6 / 2)
    results: Any = {
        seed: SimpleNamespace(
            test=SimpleNamespace(has_accuracy=True, client_mean=test[-1]),
            steps=10 * (len(test) - 1),
            bytes_up=half,
            bytes_down=half,
            pretrain=None,
            unadapted=unadapted,
        )
        for seed, test in enumerate(tests)
    }
    cell: Any = SimpleNamespace(method=label, dataset="digits", clients=5)
    return Entry(label, cell, results, curves, len(tests))


def test_a_round_counts_only_once_validation_has_chosen_it() -> None:
    found = chosen_so_far(curve([0.2, 0.5, 0.4, 0.5, 0.6], [0.1, 0.3, 0.9, 0.8, 0.2]))
    assert found == pytest.approx([10, 30, 30, 30, 20])  # the later one of two equals is not chosen


def test_bytes_are_those_of_a_client_both_ways_and_of_the_run_before() -> None:
    mine = entry("fedavg", [0.1, 0.2, 0.3])
    assert [megabytes(mine, 0, step) for step in (0, 10, 20)] == [0, 6, 12]
    before = SimpleNamespace(bytes_up=10_000_000, bytes_down=40_000_000)
    later = replace(mine, results={0: SimpleNamespace(**{**vars(mine.results[0]), "pretrain": before})})
    assert [megabytes(later, 0, step) for step in (0, 20)] == [10, 22]


def test_the_line_is_the_mean_over_seeds() -> None:
    mine = entry("fedavg", [0.1, 0.4, 0.5], [0.3, 0.6, 0.9])
    assert mean_line(mine) == pytest.approx({0.0: 20, 6.0: 50, 12.0: 70})
    assert megabytes_to(mine, 50) == 6
    assert megabytes_to(mine, 71) is None
    assert accuracy_at(mine, 11.9) == pytest.approx(50)


def test_the_best_that_communicate_are_drawn_and_who_adapts_is_a_mark() -> None:
    methods = ["fedper", "pfedme", "pfedhn", "pfedhn-pc", "pfedhn-plus", "ditto", "fedrep", "fedala", "apfl", "fedbabu"]
    entries = [entry(name, [0.1, 0.7, 0.8 + number / 100]) for number, name in enumerate(methods)]
    entries[-1] = entry("fedbabu", [0.1, 0.3, 0.9], unadapted=SimpleNamespace())
    entries[-1] = replace(entries[-1], curves={0: curve([0.1, 0.3, 0.4], [0.1, 0.3, 0.4])})
    worst, alone = entry("fedavg", [0.1, 0.2, 0.3]), entry("local", [0.1, 0.7, 0.95], megabytes=0)
    report = Report("t", [worst, alone, *entries])
    best = [other.label for other in best_of(report, COLUMN)]
    assert (len(best), best[0]) == (NUM_BEST, "fedbabu")
    assert not {"local", "fedavg"} & set(best)
    axes = new_figure(6, 5).subplots()
    plot_traffic(axes, report, COLUMN)
    marks = [line for line in axes.lines if line.get_marker() == "D"]
    assert [(list(mark.get_xdata()), list(mark.get_ydata())) for mark in marks] == [([12.0], [90.0])]
    ends = [list(line.get_ydata())[-1] for line in axes.lines if line not in marks and len(line.get_xdata()) > 1]
    assert 40.0 in ends  # it has a line too: of what it is before
    assert 90.0 not in ends
    widths = sorted(line.get_linewidth() for line in axes.lines if line not in marks)
    assert widths[-2:] == [1.6, 3.0]  # one is emphasized
    texts = [text.get_text() for text in axes.texts]
    assert "FedBABU 90.0 \N{BLACK DIAMOND}" in texts
    assert "Local 95.0, 0 MB" in texts
    figure = draw_traffic([(report, COLUMN, "Digits")], "See.")
    assert "known at the end only" in figure.get_supxlabel()
    assert figure.axes[0].get_title(loc="left") == "Digits: the 10 best of 12"


def test_learning_curves_mark_what_clients_reach_by_steps_of_their_own() -> None:
    """The line of FedBABU, whose clients adapt at the chosen round, is far below what it ends with."""
    adapting = entry("fedbabu", [0.1, 0.3, 0.9], unadapted=SimpleNamespace())
    adapting = replace(adapting, curves={0: curve([0.1, 0.3, 0.4], [0.1, 0.3, 0.4])})
    report = Report("t", [adapting, entry("pfedhn", [0.1, 0.7, 0.8])])
    (axes,) = draw_curves(report, COLUMN).axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["pFedHN 80.0", "FedBABU 90.0 \N{BLACK DIAMOND}"]
    (mark,) = (line for line in axes.lines if line.get_marker() == "D")
    assert list(mark.get_ydata()) == [90.0]
    assert "after the clients' own steps" in axes.get_title(loc="left")
    (axes,) = draw_curves(Report("t", report.entries[1:]), COLUMN).axes
    assert "own steps" not in axes.get_title(loc="left")
