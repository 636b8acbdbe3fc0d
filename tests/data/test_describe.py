"""What a person is shown of a federation is what the federation is."""

import sys
from pathlib import Path

import numpy
import pytest

from pfedhn import Federation, by_classes, by_coarse_class, dirichlet
from pfedhn.data.arrays import SPLITS
from pfedhn.data.describe import describe, plot
from pfedhn.data.partition import Partition
from pfedhn.errors import UserError


def federate(rule: Partition, count: int = 1_200, num_classes: int = 10) -> Federation:
    y = numpy.arange(count) % num_classes
    return Federation.from_arrays(numpy.zeros((count, 2)), y, rule, coarse=y // 5, split=(0.6, 0.2, 0.2), stratify=True)


def test_the_table_counts_examples_and_leaves_out_the_middle() -> None:
    federation = federate(by_classes(2, num_clients=30))
    lines = describe(federation).splitlines()
    assert lines[0].split()[:4] == ["client", *SPLITS]
    assert len(lines) == 1 + 15 + 1 + 5 + 2
    assert lines[16].endswith("10 more clients")
    assert lines[17].split()[0] == "25"
    assert [int(cell) for cell in lines[1].split()[1:4]] == [int(federation.splits[name].size[0]) for name in SPLITS]
    assert [int(cell) for cell in lines[-2].split()[1:]] == [int(federation.splits[name].size.sum()) for name in SPLITS]
    assert [int(cell) for cell in lines[-1].split()[1:]] == [federation.unused[name] for name in SPLITS]
    shown = {int(cell.split()[0]) for cell in lines[1].split("  ")[-1].split(",")}
    assert shown == set(federation.class_shares[0].nonzero().flatten().tolist())
    assert "more clients" not in describe(federate(by_classes(2, num_clients=20)))


def test_classes_without_a_client_are_named() -> None:
    federation = federate(by_classes(2, num_clients=3))
    orphans = (federation.class_shares.sum(0) == 0).nonzero().flatten().tolist()
    assert len(orphans) == 4
    assert describe(federation).splitlines()[-1] == f"classes without a client: {', '.join(map(str, orphans))}"


def test_clients_that_join_later_are_shown_as_such() -> None:
    federation = federate(dirichlet(5.0, num_clients=4, novel_clients=2))
    assert federation.joining is not None
    lines = describe(federation).splitlines()
    assert lines[-1] == "joining after training: clients 4 to 5"
    shown = [int(line.split()[1]) for line in lines[1:7]]
    assert shown == [*federation.splits["train"].size.tolist(), *federation.joining.splits["train"].size.tolist()]
    assert int(lines[7].split()[1]) == sum(shown) == 720 - federation.unused["train"]


def test_clients_and_classes_are_called_by_their_names() -> None:
    x, y = numpy.zeros((20, 2)), numpy.arange(20) % 2
    federation = Federation.from_clients({"lyon": (x, y), "paris": (x, y * 0)}, class_names=["ill", "well"])
    lines = describe(federation).splitlines()
    assert lines[0].split()[:2] == ["client", "name"]
    assert [line.split()[1] for line in lines[1:3]] == ["lyon", "paris"]
    assert lines[1].endswith("ill (50), well (50)")
    assert lines[2].endswith("ill (100)")


def test_numbers_to_predict_have_no_classes_to_show(tmp_path: Path) -> None:
    federation = Federation.from_clients([(numpy.zeros((20, 2)), numpy.arange(20) / 2)])
    lines = describe(federation).splitlines()
    assert lines[0].split() == ["client", *SPLITS]
    assert [line.split() for line in lines[1:]] == [["0", *sizes] for sizes in [["14", "3", "3"]]] + [
        ["total", "14", "3", "3"],
        ["unused", "0", "0", "0"],
    ]
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="no classes to draw"):
        plot(federation, tmp_path / "figure.png")


@pytest.mark.parametrize(
    "rule", [by_classes(2, 10), by_classes(2, 100), dirichlet(5.0, 4, novel_clients=2), by_coarse_class(1)]
)
def test_the_figure_is_drawn(rule: Partition, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(federate(rule), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"drawing needs .* pip install 'pfedhn\[report\]'"):
        plot(federate(by_classes(2, 5)), tmp_path / "figure.png")
