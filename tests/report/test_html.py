"""The page of a report: what it holds, and that it is closed to everything else."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest

import pfedhn
from pfedhn.experiments.grid import from_toml
from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import EXPERIMENTS
from pfedhn.report import page as page_module
from pfedhn.report.entries import Entry, Report, collect
from pfedhn.report.page import best_cells, differing_settings, spec_text, to_html
from pfedhn.report.tables import details
from pfedhn.storage.schema import Clients, Curve, Environment, Measures, Result, Scores

VOID = {"meta", "img", "br", "input", "link", "source"}


class Reader(HTMLParser):
    """Refuses elements that are not closed in order, and keeps what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")], attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def entry(method: str, num_clients: int, num_seeds: int = 1, num_evaluations: int = 4, **settings: Any) -> Entry:
    """A cell whose clients have one example more right than the one before, up to ten."""
    right = tuple(number % 11 for number in range(num_clients))
    mean = sum(right) / (10 * num_clients)
    scores = Scores(0.5, 10 * num_clients, mean, mean, right, (10,) * num_clients)
    steps = tuple(range(num_evaluations))
    means = Measures((mean,) * num_evaluations, (mean,) * num_evaluations)
    cell = Cell(method=method, clients=num_clients, settings=settings)
    result = Result(
        method, "made", {}, {}, 0, 1, 100, 100, scores, scores, 400, 600, 1.0, {}, "split", "pfedhn run made",
        Environment("cpu: fast", 2, pfedhn="0.2.0", torch="2.0"),
    )  # fmt: skip
    label = " ".join([method, *(f"{name}={value}" for name, value in settings.items())])
    seeds = range(num_seeds)
    return Entry(label, cell, dict.fromkeys(seeds, result), dict.fromkeys(seeds, Curve(steps, means, means)), num_seeds)


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_page_is_whole_and_loads_nothing() -> None:
    page = to_html([Report("made", [entry("pfedhn", 5), entry("local", 5)])])
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert all(re.match(r"#|data:", place) for place in reader.loaded), reader.loaded
    assert not re.findall(r"fetch\(|XMLHttpRequest|import\(|@import|url\((?!#)", page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert "default-src 'none'" in policy
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "prefers-color-scheme: dark" in page


def test_every_client_is_there_by_name() -> None:
    made = entry("pfedhn", 3)
    named = replace(made, client_names=("Berlin", "Lyon", "Rome"))
    ((column,),) = data_of(to_html([Report("made", [named])]))
    (series,) = column["series"]
    assert column["names"] == ["Berlin", "Lyon", "Rome"]
    assert series["clients"]["0"]["score"] == [0.0, 10.0, 20.0]
    assert series["curves"]["score"]["step"] == [0, 1, 2, 3]
    assert series["bytesPerStep"] == 10.0


def test_runs_of_a_directory_bring_names_and_losses(tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    clients = {name: (random.normal(size=(20, 3)), numpy.arange(20) % 2) for name in ("Berlin", "Lyon")}
    federation = pfedhn.Federation.from_clients(clients)
    run = pfedhn.train(
        "fedavg", federation, lambda: pfedhn.MLP(3, 2), steps=4, evaluate_every=2, progress=False,
        directory=tmp_path / "mine", device="cpu",
    )  # fmt: skip
    ((column,),) = data_of(to_html(collect([tmp_path / "mine"])))
    (series,) = column["series"]
    assert column["names"] == ["Berlin", "Lyon"]
    losses = [round(moment.validation.loss, 4) for moment in run.history]
    assert series["curves"]["loss"]["mean"] == losses
    assert series["clients"]["0"]["score"] == pytest.approx((100 * run.accuracy).round(4).tolist())


def test_the_settings_in_which_runs_differ_are_named() -> None:
    entries = [entry("pfedhn", 5, lr=0.01), entry("pfedhn", 5, lr=0.05)]
    assert differing_settings(entries)[1:] == [["lr", "0.01", "0.05"]]
    assert "Settings in which these runs differ" in to_html([Report("made", entries)])
    assert differing_settings(entries[:1]) == []


def test_the_best_of_each_column_is_marked() -> None:
    lines = [["method", "over clients", "digits, 4 clients", "seeds"]]
    lines += [["a", "90.10 ± 1.00", "71.00 ± 0.10\npaper 80.00", "3"], ["b", "91.00 ± 0.20", "", "3"]]
    lines += [["c", "91.00 ± 0.10", "72.00 ± 0.10", "3"]]
    assert best_cells(lines) == {(1, 1), (2, 1), (2, 2)}
    losses = [["method", "RMSE", "squared error", "over clients"], ["a", "2.0 ± 0.1", "4.0 ± 0.4", "6.0 ± 0.4"]]
    losses += [["b", "3.0 ± 0.1", "9.0 ± 0.6", "5.0 ± 0.6"]]
    assert best_cells(losses, is_loss=True) == {(0, 1), (0, 2), (1, 3)}


def test_nothing_is_best_where_a_number_comes_from_a_single_seed() -> None:
    lines = [["method", "over clients", "over samples"], ["a", "90.00", "90.00 ± 1.00\npaper 80.00 ± 1.00"]]
    lines += [["b", "91.00", "95.00\npaper 80.00 ± 1.00"]]
    assert best_cells(lines) == set()
    single = to_html([Report("made", [entry("pfedhn", 5), entry("local", 6), entry("local", 5)])])
    assert 'class="best"' not in single
    assert "Paired differences" not in single
    several = to_html([Report("made", [entry("pfedhn", 5, 2), entry("local", 5, 2)])])
    assert 'class="best"' in several
    assert "Paired differences" in several


def test_a_thousand_clients_and_ten_thousand_points_stay_small() -> None:
    methods = ("pfedhn", "local", "fedavg", "fedper", "pfedme", "lg-fedavg", "per-fedavg", "ditto", "fedrep", "fedbabu")
    page = to_html([Report("large", [entry(method, 1_000, num_evaluations=1_000) for method in methods])])
    assert len(page) < 1_000_000
    ((column,),) = data_of(page)
    assert sum(len(series["clients"]["0"]["score"]) for series in column["series"]) == 10_000


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here to check the page's script with")
def test_the_script_is_javascript() -> None:
    script = Path(page_module.__file__).with_name("page.js")
    subprocess.run(["node", "--check", str(script)], check=True)


def test_the_experiment_on_the_page_is_one_that_can_be_run(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["table1-cifar10"]
    (tmp_path / "again.toml").write_text(spec_text(experiment))
    assert from_toml(tmp_path / "again.toml") == experiment


def test_who_holds_what_and_where_clients_lie() -> None:
    made = entry("pfedhn", 2)
    who = Clients(("Berlin", "Lyon"), ("cat", "dog"), ({"0": 3}, {"0": 1, "1": 4}), ((0.0, 1.0), (2.0, 3.0)), 0.75)
    known = replace(made, results={0: replace(made.results[0], clients=who)})
    ((column,),) = data_of(to_html([Report("made", [known, entry("local", 2)])]))
    assert (column["names"], column["classNames"]) == (["Berlin", "Lyon"], ["cat", "dog"])
    assert column["numClasses"] == 2
    assert column["holds"] == {"split": [[[0, 3]], [[0, 1], [1, 4]]]}
    assert column["series"][0]["maps"] == {"0": {"places": [[0.0, 1.0], [2.0, 3.0]], "variance": 0.75}}
    assert column["series"][1]["maps"] == {}


def test_a_setting_that_only_some_methods_have_is_no_difference() -> None:
    entries = [entry("pfedhn", 5, clip=50), entry("pfedhn-pc", 5, clip=50), entry("local", 5)]
    assert differing_settings(entries) == []


def test_each_number_of_clients_has_a_best_of_its_own() -> None:
    lines = [["method", "clients", "over clients"], ["a", "10", "90.00 ± 1.00"], ["b", "10", "91.00 ± 1.00"]]
    lines += [["a", "50", "70.00 ± 1.00"], ["b", "50", "60.00 ± 1.00"]]
    assert best_cells(lines) == {(1, 2), (2, 2)}


def test_a_page_of_runs_that_have_not_finished() -> None:
    begun = replace(entry("pfedhn", 5), results={}, running=frozenset({0}))
    halted = replace(entry("fedavg", 5, num_seeds=2), results={})
    page = to_html([Report("made", [begun, halted, replace(entry("local", 5), results={}, curves={})])])
    assert "No run is finished yet." in page
    assert "Running now: pFedHN (step 3 of 5,000)." in page
    assert "stopped before the end: FedAvg, seed 0 (step 3 of 5,000); FedAvg, seed 1 (step 3 of 5,000);" in page
    assert "Not run yet: Local." in page
    assert not re.findall(r"<tbody>\s*</tbody>", page)  # no table without a line
    assert "Communication and time" not in page
    ((column,),) = data_of(page)
    assert [series["label"] for series in column["series"]] == ["pFedHN", "FedAvg"]


def test_a_regression_that_has_not_finished_shows_a_loss() -> None:
    losses = Measures(loss=(0.9, 0.7))
    begun = replace(entry("pfedhn", 5), results={}, curves={0: Curve((0, 1), losses, losses)})
    ((column,),) = data_of(to_html([Report("made", [begun])]))
    assert (column["isAccuracy"], column["isSquared"]) == (False, False)  # whatever its loss is


def test_a_page_of_a_task_without_accuracy() -> None:
    made = entry("pfedhn", 5)
    scores = Scores(0.5, 50, clients=(5.0,) * 5, client_examples=(10,) * 5)
    losses = Measures(loss=(0.9, 0.7, 0.6, 0.5))
    curve = Curve((0, 1, 2, 3), losses, losses)
    plain = replace(made, results={0: replace(made.results[0], test=scores)}, curves={0: curve})
    page = to_html([Report("made", [plain])])
    assert "test loss" in page
    ((column,),) = data_of(page)
    assert column["isAccuracy"] is False
    assert column["series"][0]["curves"]["score"]["mean"] == [0.9, 0.7, 0.6, 0.5]
    assert column["series"][0]["clients"]["0"]["score"] == [0.5] * 5  # a client's loss on its own examples


def test_the_page_of_a_regression_says_what_its_numbers_are() -> None:
    made = entry("pfedhn", 2)
    scores = Scores(6922.04, 40, clients=(10 * 10_000.0, 30 * 5_896.0533), client_examples=(10, 30))
    losses = Measures(loss=(2e6, 6922.04))
    squared = replace(
        made, results={0: replace(made.results[0], test=scores)}, curves={0: Curve((0, 1), losses, losses)},
        is_squared=True,
    )  # fmt: skip
    page = to_html([Report("made", [squared])])
    assert "One seed, 40 test examples: the root mean squared error on test examples is 83.2 with pFedHN." in page
    heading, line = details(Report("made", [squared]))
    assert heading[1:4] == ["RMSE", "squared error", "over clients"]
    assert line[1:4] == ["83.2", "6922", "7948"]  # the second: every example once; the third: every client once
    assert "RMSE is its root, in the unit of the labels. Every test example counts once; over clients: " in page
    ((column,),) = data_of(page)
    assert column["isSquared"] is True
