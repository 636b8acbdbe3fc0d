"""Reports of hand-made run directories: every number is worked out here from what was written there."""

import csv
import io
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from rich.console import Console

from pfedhn.data.description import Description
from pfedhn.engine.state import Schedule
from pfedhn.errors import UserError
from pfedhn.experiments.directory import Directory
from pfedhn.experiments.spec import Cell, Experiment
from pfedhn.report.entries import Entry, Report, collect, compare, summarize, to_reports
from pfedhn.report.figures import (
    draw_curves,
    draw_demo,
    figures_of,
    lowest_shown,
    new_figure,
    plot_clients,
    plot_curves,
    spaced,
    to_svg,
)
from pfedhn.report.page import write
from pfedhn.report.results import read_file
from pfedhn.report.tables import (
    accuracy_text,
    bytes_text,
    caption,
    details,
    grid,
    seconds_text,
    sentence,
    steps_text,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_terminal,
    unfinished,
)
from pfedhn.storage.directory import (
    FORMAT,
    Part,
    StoredSpec,
    history_digest,
    identity,
    write_history,
    write_result,
    write_spec,
)
from pfedhn.storage.schema import Curve, Environment, Measures, Moment, PretrainingCost, Result, Scores
from pfedhn.system.files import claimed

ROWS = [4, 4, 2, 0]  # test rows of each client; the last has none
CELLS = tuple(Cell(method=method, clients=4, steps=20) for method in ("local", "fedavg", "pfedhn"))
EXPERIMENT = Experiment("made", CELLS, (0, 1, 2), "Made by hand", published={"pfedhn/4": (80.0, 1.5)})


def record(correct: Sequence[int]) -> Scores:
    """The test scores of one moment, from each client's number of correct examples."""
    shares = [c / rows for c, rows in zip(correct, ROWS, strict=True) if rows]
    return Scores(
        1.0 - sum(correct) / 10,
        sum(ROWS),
        client_mean=statistics.fmean(shares),
        sample_mean=sum(correct) / sum(ROWS),
        clients=tuple(correct),
        client_examples=tuple(ROWS),
    )


def spec_of(name: str) -> StoredSpec:
    full = Part("full", {})
    return StoredSpec(
        FORMAT,
        name,
        int(name[-1]),
        "auto",
        Part(name.partition("-")[0], {}),
        full,
        full,
        Schedule(steps=20),
        {},
        Description(4, (64,), "float32", (), "int64", 10),
        {},
        Environment("cpu: abacus", 1),
    )


def put_run(directory: Path, name: str, correct: Sequence[int] | None, *, seconds: float = 2.0, **more: Any) -> None:
    """A finished run, or (without `correct`) one that has only begun."""
    folder = directory / name
    folder.mkdir(parents=True)
    scores = [record([1, 1, 0, 0]), record(correct or [2, 1, 0, 0])]
    moments = [Moment(10 * number, number, part, part, 0, 0, 1.0) for number, part in enumerate(scores, 1)]
    spec = spec_of(name)
    write_spec(folder, spec)
    write_history(folder, moments)
    if correct is None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 30, "te')  # killed while it was writing
        return
    sent = 0 if name.startswith("local") else 1
    result = Result(
        name,
        "made",
        cell=asdict(Directory(directory).read()[0].find(name).cell),
        settings={},
        seed=int(name[-1]),
        chosen_step=20,
        steps=20,
        rounds=20,
        validation=record(correct),
        test=record(correct),
        bytes_up=sent * 1_500_000,
        bytes_down=sent * 2_500_000,
        seconds=seconds,
        unused_examples={},
        partition_sha256=name[-1],
        command=f"pfedhn run made --only name={name}",
        environment=Environment("cpu: abacus", 1),
        digests=identity(spec),
        history=history_digest(folder),
    )
    write_result(folder, replace(result, **more))


CORRECT: Mapping[str, Sequence[Sequence[int]]] = {
    "local": ([2, 2, 1, 0], [1, 3, 1, 0], [2, 1, 2, 0]),
    "pfedhn": ([4, 2, 1, 0], [3, 4, 1, 0], [1, 3, 2, 0]),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """local: three seeds; pfedhn: two finished and one begun; fedavg: planned, not begun."""
    path = tmp_path / "made"
    Directory(path).open(EXPERIMENT, EXPERIMENT.runs())
    for seed in range(3):
        put_run(path, f"local-digits-4-seed{seed}", CORRECT["local"][seed], seconds=1.0 + seed)
    for seed in range(2):
        put_run(path, f"pfedhn-digits-4-seed{seed}", CORRECT["pfedhn"][seed])
    put_run(path, "pfedhn-digits-4-seed2", None)
    return path


@pytest.fixture
def found(directory: Path) -> Report:
    (report,) = collect([directory])
    return report


def client_means(method: str, seeds: int) -> list[float]:
    return [100 * (record(correct).client_mean or 0.0) for correct in CORRECT[method][:seeds]]


def test_mean_and_sample_deviation_over_finished_seeds(found: Report) -> None:
    local, fedavg, pfedhn = found.entries
    values = client_means("local", 3)
    assert values[0] == pytest.approx(100 * (2 / 4 + 2 / 4 + 1 / 2) / 3)  # the client without examples does not count
    mean = sum(values) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (3 - 1))
    summary = local.test()
    assert summary is not None
    assert summary == pytest.approx((mean, deviation, 3))
    samples = local.test("samples")
    assert samples is not None
    assert samples.mean == pytest.approx(100 * sum(sum(correct) for correct in CORRECT["local"]) / 30)
    assert fedavg.test() is None
    assert (local.seeds_text, fedavg.seeds_text, pfedhn.seeds_text) == ("3 seeds", "0 of 3 seeds", "2 of 3 seeds")


def test_the_published_number_and_the_difference(found: Report) -> None:
    pfedhn = found.entries[2]
    assert pfedhn.published == (80.0, 1.5)
    assert pfedhn.difference() == pytest.approx(statistics.fmean(client_means("pfedhn", 2)) - 80.0)
    assert found.entries[0].difference() is None


def test_a_single_seed_is_marked_and_has_no_deviation(tmp_path: Path) -> None:
    path = tmp_path / "one"
    Directory(path).open(EXPERIMENT, [EXPERIMENT.find("pfedhn-digits-4-seed7")])
    put_run(path, "pfedhn-digits-4-seed7", [4, 2, 1, 0])
    (report,) = collect([path])
    entry = report.entries[2]
    assert accuracy_text(entry) == f"{100 * (1 + 1 / 2 + 1 / 2) / 3:.2f} (1 seed)"
    assert "A number without ± comes from a single seed." in caption(report)


def test_a_row_per_method_with_what_it_cost(found: Report) -> None:
    table = details(found)
    assert table[0] == [
        *("method", "over clients", "over samples", "paper", "difference", "seeds", "steps", "up", "down", "time")
    ]
    local, fedavg, pfedhn = table[1:]
    assert local[0] == "local"
    assert local[-5:] == ["3", "20", "0 B", "0 B", "2.0 s"]  # seconds 1, 2 and 3
    assert fedavg == ["fedavg", "", "", "", "", "0 of 3", "", "", "", ""]
    values = client_means("pfedhn", 2)
    assert pfedhn[1] == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert pfedhn[3:6] == ["80.00 ± 1.50", f"{statistics.fmean(values) - 80:+.2f}", "2 of 3"]


def test_columns_are_data_sets_and_numbers_of_clients(tmp_path: Path) -> None:
    cells = (*CELLS, replace(CELLS[2], clients=8), replace(CELLS[2], dataset="mnist", clients=8))
    experiment = replace(EXPERIMENT, cells=cells)
    Directory(tmp_path / "wide").open(experiment, [])
    (report,) = collect([tmp_path / "wide"])
    table = grid(report)
    assert table[0] == ["method", "digits, 4 clients", "digits, 8 clients", "mnist, 8 clients"]
    assert [line[0] for line in table[1:]] == ["local", "fedavg", "pfedhn"]
    assert table[3][1] == "\npaper 80.00 ± 1.50\n"
    assert details(report)[0][1:3] == ["data set", "clients"]
    stream = io.StringIO()
    Console(file=stream, width=80).print(to_terminal(report))
    headings = [" ".join(line.split()) for line in stream.getvalue().splitlines() if line.startswith(" method")]
    assert headings == ["method digits, 4 clients digits, 8 clients", "method mnist, 8 clients"]
    assert stream.getvalue().count(" fedavg ") == 1  # it has no cell on mnist


def test_cells_of_one_method_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    cells = tuple(replace(CELLS[2], settings={"lr": lr}) for lr in (0.1, 0.2))
    experiment = Experiment("grid", cells, (0,))
    Directory(tmp_path / "grid").open(experiment, experiment.runs())
    for run in experiment.runs():
        put_run(tmp_path / "grid", run.name, [4, 4, 2, 0] if run.cell.settings["lr"] == 0.2 else [0, 0, 0, 0])
    (report,) = collect([tmp_path / "grid"])
    assert report.labels == ["pfedhn lr=0.1", "pfedhn lr=0.2"]
    assert [accuracy_text(entry) for entry in report.entries] == ["0.00 (1 seed)", "100.00 (1 seed)"]


def test_two_directories_of_one_experiment_are_put_together(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-machine"
    Directory(other).open(EXPERIMENT, list(map(EXPERIMENT.find, ("pfedhn-digits-4-seed2", "fedavg-digits-4-seed0"))))
    put_run(other, "pfedhn-digits-4-seed2", CORRECT["pfedhn"][2])
    put_run(other, "fedavg-digits-4-seed0", [4, 4, 2, 0])
    (report,) = collect([directory, other])
    pfedhn = report.entries[2].test()
    assert pfedhn is not None
    assert pfedhn.mean == pytest.approx(statistics.fmean(client_means("pfedhn", 3)))
    assert accuracy_text(report.entries[1]) == "100.00 (1 of 3 seeds)"


def test_different_experiments_share_a_table_and_say_in_what_they_differ(directory: Path, tmp_path: Path) -> None:
    elsewhere = replace(EXPERIMENT, name="mnist", cells=tuple(replace(cell, dataset="mnist") for cell in CELLS))
    longer = replace(EXPERIMENT, name="longer", cells=tuple(replace(cell, steps=30) for cell in CELLS))
    for experiment in (elsewhere, longer):
        Directory(tmp_path / experiment.name).open(experiment, [])
    (report,) = collect([directory, tmp_path / "mnist", tmp_path / "longer"])
    assert report.title == "Made by hand"  # all three are called so
    assert [entry.label for entry in report.in_column(("digits", 4))] == [
        *("local steps=20", "fedavg steps=20", "pfedhn steps=20"),
        *("local steps=30", "fedavg steps=30", "pfedhn steps=30"),
    ]
    assert [entry.label for entry in report.in_column(("mnist", 4))] == ["local", "fedavg", "pfedhn"]


def test_experiments_that_differ_in_nothing_a_table_shows_stand_apart(directory: Path, tmp_path: Path) -> None:
    Directory(tmp_path / "again").open(replace(EXPERIMENT, name="again"), [])
    assert [len(report.entries) for report in collect([directory, tmp_path / "again"])] == [3, 3]


def test_a_run_that_starts_from_another_counts_both(tmp_path: Path) -> None:
    cells = (replace(CELLS[1], steps=5_000), replace(CELLS[1], method="lg-fedavg", pretrain="fedavg"))
    experiment = Experiment("lg", cells, (0,))
    Directory(tmp_path / "lg").open(experiment, experiment.runs())
    before = PretrainingCost("fedavg-digits-4-seed0", 5_000, bytes_down=0, bytes_up=500_000, seconds=60.0)
    put_run(tmp_path / "lg", "lg-fedavg-digits-4-seed0", [4, 4, 2, 0], seconds=2.0, pretrain=before)
    (report,) = collect([tmp_path / "lg"])
    entry = report.entries[1]
    assert steps_text(entry) == "5,000 + 20"
    assert bytes_text(entry.total("bytes_up")) == "2.0 MB"
    assert seconds_text(entry.total("seconds")) == "62.0 s"
    assert list(entry.curve(0)) == [5_010, 5_020]


def test_clients_are_compared_on_the_same_rows_only(found: Report) -> None:
    local, _, pfedhn = found.entries
    counts = compare(pfedhn, local)
    assert counts is not None
    # Seed 0: (4, 2, 1) against (2, 2, 1): 1 better, 2 the same. Seed 1: (3, 4, 1) against (1, 3, 1): 2 better, 1 same.
    assert counts == (3, 3, 0, 2)
    changed = {seed: replace(result, partition_sha256="other") for seed, result in local.results.items()}
    assert compare(pfedhn, replace(local, results=changed)) is None


def test_the_sentence_says_what_the_numbers_say(found: Report) -> None:
    ours, alone = (statistics.fmean(client_means(method, seeds)) for method, seeds in (("pfedhn", 2), ("local", 3)))
    assert sentence(found) == (
        f"On average, a client's own test accuracy is {ours:.1f} % with pFedHN and {alone:.1f} % with a model trained "
        "alone; of 6 clients (2 seeds together), 3 do better with pFedHN than alone, 3 the same and 0 worse."
    )
    wide = Report("wide", [*found.entries, replace(found.entries[0], cell=replace(CELLS[0], clients=8))])
    assert sentence(wide).startswith("With digits, 4 clients, on average, a client's own test accuracy is ")
    assert sentence(Report("empty", found.entries[:2])) == ""
    first = [replace(entry, results={0: entry.results[0]}) for entry in found.entries if entry.results]
    assert sentence(Report("single", first)).startswith("One seed, 10 test examples: on average, a client's own ")
    assert sentence(Report("single", first)).endswith(". A single seed cannot rank methods.")
    assert sentence(Report("alone", found.entries[2:])) == (
        f"On average, a client's own test accuracy is {ours:.1f} % with pFedHN."
    )
    plus = [replace(entry, label="pfedhn-plus") if entry.label == "pfedhn" else entry for entry in found.entries]
    assert sentence(Report("plus", plus)) == sentence(found).replace("pFedHN", "pFedHN+")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (999_400, "999 kB"), (999_600, "1.0 MB"), (12_345_678, "12.3 MB")],
)
def test_bytes_are_readable(number: int, text: str) -> None:
    assert bytes_text(summarize([number])) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.04, "0.0 s"), (99.4, "99.4 s"), (100, "2 min"), (5_400, "90 min"), (8_040, "2 h 14 min")]
)
def test_times_are_readable(number: float, text: str) -> None:
    assert seconds_text(summarize([number])) == text


def test_the_terminal_shows_it_within_eighty_columns(found: Report) -> None:
    stream = io.StringIO()
    Console(file=stream, width=80).print(to_terminal(Report(found.title, found.entries[:1])))
    lines = stream.getvalue().splitlines()
    assert lines[0].strip() == "Made by hand (digits, 4 clients)"
    values = client_means("local", 3)
    assert any(f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}" in line for line in lines)
    assert "Hardware: cpu: abacus, 1 thread." in " ".join(lines)


def test_the_terminal_keeps_numbers_whole_beside_two_stages(tmp_path: Path) -> None:
    cells = (replace(CELLS[1], steps=5_000), replace(CELLS[1], method="lg-fedavg", pretrain="fedavg"))
    experiment = Experiment("lg", cells, (0, 1), published={"fedavg/4": (50.0, 1.0)})
    Directory(tmp_path / "lg").open(experiment, experiment.runs())
    before = PretrainingCost("fedavg-digits-4-seed0", 5_000, bytes_down=0, bytes_up=500_000, seconds=60.0)
    for seed in (0, 1):
        name = f"lg-fedavg-digits-4-seed{seed}"
        put_run(tmp_path / "lg", name, [4, 4, 2 - seed, 0], pretrain=before, steps=1_000)
    (report,) = collect([tmp_path / "lg"])
    stream = io.StringIO()
    Console(file=stream, width=77).print(to_terminal(report))
    text = stream.getvalue()
    assert "paper 50.00 ± 1.00" in text
    (line,) = (line for line in text.splitlines() if line.startswith(" lg-fedavg") and "MB" in line)
    assert "1,000" not in line  # it is on the next
    assert re.findall(r"\d+\.\d+ ± \d+\.\d+|[\d.]+ MB|[\d.]+ s\b", line) == [
        *("91.67 ± 11.79", "95.00 ± 7.07", "2.0 MB", "2.5 MB", "62.0 s")
    ]


def test_the_terminal_breaks_a_long_method_before_its_settings_and_no_heading(tmp_path: Path) -> None:
    cells = tuple(replace(CELLS[1], method="pfedhn", settings={"lr": rate}) for rate in (0.01, 0.05))
    experiment = Experiment("rates", cells, (0, 1))
    Directory(tmp_path / "rates").open(experiment, experiment.runs())
    for run in experiment.runs():
        put_run(tmp_path / "rates", run.name, [4, 4, 2, 0])
    (report,) = collect([tmp_path / "rates"])
    stream = io.StringIO()
    Console(file=stream, width=80).print(to_terminal(report))
    lines = stream.getvalue().splitlines()
    headings = ["method", "over clients", "over samples", "seeds", "steps", "up", "down", "time"]
    assert any(re.split(r"\s{2,}", line.strip()) == headings for line in lines)
    assert any(line.strip() == "lr=0.01" for line in lines)


def test_a_method_that_ends_early_is_drawn_across(found: Report) -> None:
    local, _, pfedhn = found.entries
    early = {seed: Curve.of(history[:1]) for seed, history in local.histories.items()}
    axes = new_figure(8.0, 5.0).subplots()
    plot_curves(axes, [replace(local, curves=early), pfedhn])
    first = 100 * (record([1, 1, 0, 0]).client_mean or 0.0)
    (across,) = (line for line in axes.get_lines() if line.get_linestyle() == ":" and len(line.get_xdata()) == 2)
    assert list(across.get_xdata()) == [10, 20]
    assert list(across.get_ydata()) == [pytest.approx(first)] * 2
    assert any(text.get_text() == f"Local {first:.1f}" for text in axes.texts)


def test_a_loss_that_falls_far_is_drawn_on_a_logarithmic_scale(found: Report) -> None:
    local, _, pfedhn = found.entries

    def losing(entry: Entry, *losses: float) -> Entry:
        measures = Measures(loss=losses)
        return replace(entry, results={}, curves={0: Curve(tuple(range(len(losses))), measures, measures)})

    axes = new_figure(8.0, 5.0).subplots()
    plot_curves(axes, [losing(local, 2e6), losing(pfedhn, 2e6, 8e5, 7e3, 6e3)])
    assert axes.get_yscale() == "log"
    assert [line.get_marker() for line in axes.get_lines()[:2]] == ["o", "None"]  # a curve of one point is seen
    assert {"10,000", "30,000", "1,000,000"} <= {text.get_text() for text in axes.get_yticklabels()}
    low, high = axes.get_ylim()
    assert all(low <= text.xyann[1] <= high for text in axes.texts)
    axes = new_figure(8.0, 5.0).subplots()
    plot_curves(axes, [losing(pfedhn, 0.9, 0.7, 0.5)])
    assert axes.get_yscale() == "linear"


def test_markdown_has_a_table_that_renders(found: Report) -> None:
    lines = to_markdown([found]).splitlines()
    first, second, *_ = "\n".join(lines).split("\n\n|")[1:]  # what each method found, then how far they are apart
    for table, num_methods in ((first, len(CELLS)), (second, 2)):  # one method has no run
        rows = [line for line in f"|{table}".splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) == 1
        assert len(rows) == 2 + num_methods
    assert "pfedhn run made --only name=pfedhn-digits-4-seed1" in lines


def test_csv_holds_the_numbers_unrounded(found: Report) -> None:
    local, fedavg, pfedhn = csv.DictReader(io.StringIO(to_csv([found])))
    values = client_means("local", 3)
    assert float(local["over_clients_mean"]) == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert float(local["over_clients_deviation"]) == pytest.approx(statistics.stdev(values), rel=1e-12)
    assert (local["dataset"], local["clients"], local["seeds"], local["planned_seeds"]) == ("digits", "4", "3", "3")
    assert (fedavg["over_clients_mean"], fedavg["seconds"]) == ("", "")
    assert float(pfedhn["published_mean"]) == 80.0
    assert float(pfedhn["bytes_down"]) == 2_500_000


def test_latex_escapes_and_gives_every_row_its_columns(found: Report) -> None:
    text = to_latex([Report("50 % of A&B_1", found.entries)])
    assert r"50 \% of A\&B\_1" in text
    tables = re.findall(r"\\begin\{tabular\}\{(\w+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert len(tables) == 2
    for columns, body in tables:
        lines = [line for line in body.splitlines() if not re.fullmatch(r"\\(top|mid|bottom)rule", line)]
        assert all(line.endswith(r" \\") and line.count(" & ") == len(columns) - 1 for line in lines)
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert re.sub(r"\\\$", "", text).count("$") % 2 == 0
    assert re.findall(r"\\begin\{(\w+)\}", text) == ["table", "tabular"] * 2
    assert re.findall(r"\\end\{(\w+)\}", text) == ["tabular", "table"] * 2
    assert not re.search(r"(?<!\\)[%#]", text)  # would begin a comment, or end the compiler's patience
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    values = client_means("pfedhn", 2)
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    assert rf"pFedHN & ${mean:.2f} \pm {deviation:.2f}$ (2 of 3 seeds) \\" in rows
    assert rf"\quad difference & ${mean - 80:+.2f}$ \\" in rows
    assert any(row.startswith("Local & ") and row.endswith(r"& 3 & 20 & 0 B & 0 B & 2.0 s \\") for row in rows)
    assert r"\quad published & $80.00 \pm 1.50$ \\" in rows
    assert "FedAvg &  \\\\" in rows


def test_a_task_without_accuracy_is_reported_by_its_loss(tmp_path: Path) -> None:
    experiment = Experiment("regression", CELLS[2:], (0, 1))
    path = tmp_path / "regression"
    Directory(path).open(experiment, experiment.runs())
    for seed, loss in ((0, 0.5), (1, 0.7)):
        scores = Scores(loss, 10, clients=(loss,) * 4, client_examples=tuple(ROWS))
        put_run(path, f"pfedhn-digits-4-seed{seed}", [1, 1, 1, 0], test=scores)
    (report,) = collect([path])
    assert report.measure == "squared error on test examples"
    assert details(report)[0][1:4] == ["RMSE", "squared error", "over clients"]
    assert details(report)[1][2] == f"0.6000 ± {statistics.stdev([0.5, 0.7]):.4f}"
    assert list(figures_of([report])) == ["curves-digits-4"]
    roots = statistics.fmean(map(math.sqrt, [0.5, 0.7]))
    assert sentence(report) == f"The root mean squared error on test examples is {roots:.4g} with pFedHN."


def test_the_report_is_written_in_every_format(found: Report, tmp_path: Path) -> None:
    files = write([found], tmp_path / "out")
    assert {file.name for file in files} == {
        *("report.md", "report.csv", "report.tex", "report.html", "curves-digits-4.png", "clients-digits-4.png"),
        *("curves-digits-4.svg", "clients-digits-4.svg"),
    }
    assert all(file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for file in files if file.suffix == ".png")
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)  # nothing is loaded from elsewhere
    assert draw_demo(found)[:4] == b"\x89PNG"


EVIL = "<script>alert(1)</script> [a](b) `c` $\\frac{$ \x1b[31m\n# d |"


def strange(report: Report) -> Report:
    """The report of a stranger's file: every word in it is what the stranger wrote."""
    entries = []
    for entry in report.entries:
        place = Environment(EVIL, 1)
        results = {
            seed: replace(result, environment=place, command=f"{EVIL}\n```") for seed, result in entry.results.items()
        }
        cell = replace(entry.cell, dataset=f"{EVIL}.csv")
        entries.append(replace(entry, label=f"{entry.label} {EVIL}", title=EVIL, results=results, cell=cell))
    return Report(EVIL, entries)


def test_pages_and_tables_take_a_strangers_words_as_words(found: Report, tmp_path: Path) -> None:
    files = write([strange(found)], tmp_path / "out")
    for file in files:
        assert file.parent == tmp_path / "out"
        if file.suffix not in (".png", ".csv"):
            text = file.read_text()
            assert "\x1b" not in text
            assert "alert(1)" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<script") == 2  # the numbers, which no browser runs, and our own, which it knows by its digest
    assert "alert(1)" not in re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]
    assert "\\u003cscript>alert(1)" in page
    markdown = (tmp_path / "out" / "report.md").read_text()
    fenced = re.findall(r"^(`{3,})sh\n(.*?)\n\1$", markdown, re.DOTALL | re.MULTILINE)
    assert len(fenced) == 1
    outside = markdown.replace(fenced[0][1], "")
    assert "<script" not in outside
    assert "[a](b)" not in outside
    assert not re.search("^# d", markdown, re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", outside, re.MULTILINE):
        assert len({line.replace(r"\|", "").count("|") for line in table.splitlines()}) == 1


def test_without_test_examples_a_report_says_no_sentence(tmp_path: Path) -> None:
    nobody = Scores(math.nan, 0, math.nan, math.nan, clients=(0,) * 4, client_examples=(0,) * 4)
    Directory(tmp_path / "made").open(EXPERIMENT, EXPERIMENT.runs())
    for method in ("local", "pfedhn"):
        put_run(tmp_path / "made", f"{method}-digits-4-seed0", [1, 1, 1, 0], test=nobody)
    reports = collect([tmp_path / "made"])
    assert sentence(reports[0]) == ""
    write(reports, tmp_path / "out")


def test_only_the_formats_asked_for_and_no_unknown_one(found: Report, tmp_path: Path) -> None:
    assert [file.name for file in write([found], tmp_path, ["csv"])] == ["report.csv"]
    with pytest.raises(UserError, match=r"there is no format 'pmg'; did you mean 'png'\?"):
        write([found], tmp_path, ["pmg"])


def test_without_matplotlib_a_sentence_says_what_to_install(
    found: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"drawing needs .* pip install 'pfedhn\[report\]'"):
        figures_of([found])
    write([found], tmp_path, ["md", "csv", "tex"])


def test_runs_that_have_not_begun_make_tables_but_no_figures(tmp_path: Path) -> None:
    Directory(tmp_path / "new").open(EXPERIMENT, EXPERIMENT.runs())
    reports = collect([tmp_path / "new"])
    assert figures_of(reports) == {}
    assert "No run is finished yet." in to_markdown(reports)


def test_a_run_that_goes_on_is_told_from_one_that_stopped(tmp_path: Path) -> None:
    Directory(tmp_path / "new").open(EXPERIMENT, EXPERIMENT.runs())
    folder = tmp_path / "new" / "pfedhn-digits-4-seed0"
    put_run(tmp_path / "new", folder.name, None)
    with claimed(folder, 0.0):
        (report,) = collect([tmp_path / "new"])
    assert unfinished(report) == "Running now: pFedHN, seed 0 (step 20 of 20)."
    (report,) = collect([tmp_path / "new"])
    assert unfinished(report).startswith(
        "Begun, but stopped before the end: pFedHN, seed 0 (step 20 of 20); started again, "
    )
    stream = io.StringIO()
    Console(file=stream, width=200).print(to_terminal(report))
    assert unfinished(report) in stream.getvalue()
    put_run(tmp_path / "new", "local-digits-4-seed0", [1, 1, 1, 0])
    (report,) = collect([tmp_path / "new"])
    assert "Local" not in unfinished(report)


def test_a_run_that_diverged_is_told_from_one_that_stopped(tmp_path: Path) -> None:
    Directory(tmp_path / "new").open(EXPERIMENT, EXPERIMENT.runs())
    folder = tmp_path / "new" / "pfedhn-digits-4-seed0"
    put_run(tmp_path / "new", folder.name, None)
    (folder / "diverged.txt").write_text("training diverged in round 19.\n")
    (report,) = collect([tmp_path / "new"])
    assert unfinished(report) == (
        "Diverged, so without a score: pFedHN, seed 0; diverged.txt in a run's folder says in which round."
    )
    (line,) = (line for line in csv.DictReader(io.StringIO(to_csv([report]))) if line["method"] == "pfedhn")
    assert (line["seeds"], line["planned_seeds"], line["diverged_seeds"]) == ("0", "3", "1")
    heading, *lines = details(report)
    (shown,) = (dict(zip(heading, line, strict=True)) for line in lines if line[0] == "pfedhn")
    assert (shown["seeds"], shown["diverged"]) == ("0 of 3", "1")
    (entry,) = (entry for entry in report.entries if entry.label == "pfedhn")
    assert accuracy_text(entry) == "1 diverged"
    with claimed(folder, 0.0):  # it was started again
        (report,) = collect([tmp_path / "new"])
    assert unfinished(report) == "Running now: pFedHN, seed 0 (step 20 of 20)."
    put_run(tmp_path / "new", "pfedhn-digits-4-seed1", [1, 1, 1, 0])
    (report,) = collect([tmp_path / "new"])
    (entry,) = (entry for entry in report.entries if entry.label == "pfedhn")
    assert accuracy_text(entry).endswith(" (1 of 3 seeds, 1 diverged)")


def test_a_run_that_diverged_in_one_directory_and_ended_in_another_has_ended(tmp_path: Path) -> None:
    for place, correct in (("one", None), ("other", [1, 1, 1, 0])):
        Directory(tmp_path / place).open(EXPERIMENT, EXPERIMENT.runs())
        put_run(tmp_path / place, "pfedhn-digits-4-seed0", correct)
    (tmp_path / "one" / "pfedhn-digits-4-seed0" / "diverged.txt").write_text("training diverged in round 19.\n")
    (report,) = collect([tmp_path / "one", tmp_path / "other"])
    assert "iverged" not in unfinished(report)
    assert "diverged" not in details(report)[0]


def test_a_folder_that_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no experiment, no run"):
        collect([tmp_path])
    with pytest.raises(UserError, match="there is nothing to report"):
        write([], tmp_path)


def test_names_beside_curves_are_moved_as_little_as_possible() -> None:
    assert spaced([1.0, 5.0], 1.0, 0.0, 10.0) == [1.0, 5.0]
    assert spaced([4.0, 4.0, 4.0], 1.0, 0.0, 10.0) == [3.0, 4.0, 5.0]  # to both sides
    assert spaced([9.9, 10.0], 1.0, 0.0, 10.0) == [9.0, 10.0]  # what would leave the figure comes back
    assert spaced([0.0, 0.0, 5.0], 1.0, 0.0, 10.0) == [0.0, 1.0, 5.0]


def test_the_scale_follows_the_methods_that_compete() -> None:
    assert lowest_shown([90.0, 89.0, 88.0, 60.0], least=10.0) == 89.0 - 2 * 1.0 - 5
    assert lowest_shown([90.0, 60.0], least=10.0) == 10.0  # nobody can say which of two is the odd one
    assert lowest_shown([90.0, 89.0, 88.0], least=86.0) == 86.0


def test_a_client_stands_at_its_own_accuracy(found: Report) -> None:
    axes = new_figure(5.0, 5.0).subplots()
    plot_clients(axes, found.in_column(found.columns[0]))
    heights = [float(y) for dots in axes.collections for _, y in dots.get_offsets()]
    known = [found.entry(label, found.columns[0]) for label in ("local", "pfedhn")]
    wanted = [value for entry in known if entry for seed in entry.results for value in entry.client_accuracy(seed)]
    assert sorted(heights) == sorted(value for value in wanted if value == value)
    assert axes.get_ylim()[1] == 100


def test_numbers_in_the_words_of_an_svg_stay_whole() -> None:
    figure = new_figure(5.0, 5.0)
    figure.subplots().set_title("lr=0.00125")
    assert b">lr=0.00125</text>" in to_svg(figure)


def test_figures_as_svg_and_for_dark_pages(found: Report, tmp_path: Path) -> None:
    files = write([found], tmp_path, ["svg"])
    assert {file.name for file in files} == {"curves-digits-4.svg", "clients-digits-4.svg"}
    assert all(b"<svg" in file.read_bytes() for file in files)
    light, dark = (to_svg(figures_of([found])["curves-digits-4"], is_dark) for is_dark in (False, True))
    assert light != dark
    assert b"fill: #ffffff" not in light  # the ground is transparent


@pytest.mark.slow
def test_a_figure_of_many_runs_has_room_for_their_names() -> None:
    names = ("cohort-size", "communication", "depth", "fixed-representation", "local-steps", "privacy-cifar10")
    runs = [part for name in names for part in read_file(Path(__file__).parents[2] / "results" / f"{name}.jsonl")]
    (report,) = to_reports(runs)
    figure = draw_curves(report, ("cifar10", 50))
    figure.draw_without_rendering()  # Matplotlib warns, and fails here, where the axes would have no room
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) > 30
    assert min(box.y0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


def test_marks_turn_light_on_a_dark_page_as_lines_do() -> None:
    figure = new_figure(5.0, 5.0)
    axes = figure.subplots()
    (line,) = axes.plot([0, 1], [0, 1], color="#4D4D4D", marker="x")
    marks = axes.scatter([0, 1], [1, 0], color="#4D4D4D", marker="_")
    to_svg(figure, is_dark=True)
    for color in (line.get_color(), line.get_markeredgecolor(), marks.get_edgecolor()):
        assert numpy.ravel(color)[0] > 0.6


def test_words_on_an_image_keep_their_color_on_a_dark_page() -> None:
    figure = new_figure(5.0, 5.0)
    axes = figure.subplots()
    axes.imshow([[0.0, 1.0]])
    inside, title = axes.text(0, 0, "92", color="white"), axes.set_title("accuracy")
    to_svg(figure, is_dark=True)
    assert inside.get_color() == "white"
    assert numpy.ravel(title.get_color())[0] > 0.6


def test_every_number_for_scripts(found: Report) -> None:
    (table,) = to_json([found])
    local, fedavg, pfedhn = table["cells"]
    assert local["over_clients_mean"] == pytest.approx(statistics.fmean(client_means("local", 3)))
    assert [run["client_accuracy"] for run in local["runs"]] == [
        [right / rows if rows else None for right, rows in zip(correct, ROWS, strict=True)]
        for correct in CORRECT["local"]
    ]
    assert (fedavg["seeds"], fedavg["over_clients_mean"], fedavg["runs"]) == (0, None, [])
    assert pfedhn["published_mean"] == 80.0
    json.dumps(table, allow_nan=False)


def test_a_setting_left_at_its_default_is_named_where_others_change_it(tmp_path: Path) -> None:
    cells = (CELLS[2], replace(CELLS[2], settings={"lr": 0.5}))
    experiment = Experiment("rates", cells, (0,))
    Directory(tmp_path / "rates").open(experiment, experiment.runs())
    for run, lr in zip(experiment.runs(), (0.01, 0.5), strict=True):
        put_run(tmp_path / "rates", run.name, [4, 4, 2, 0], settings={"lr": lr, "clip": 50.0})
    (report,) = collect([tmp_path / "rates"])
    assert report.labels == ["pfedhn lr=0.01", "pfedhn lr=0.5"]
    axes = new_figure(5.0, 5.0).subplots()
    plot_clients(axes, report.entries)
    assert [text.get_text().split("\n")[:2] for text in axes.get_xticklabels()] == [
        ["pFedHN", "lr=0.01"],
        ["pFedHN", "lr=0.5"],
    ]
