"""Every study of the package runs by its command at reduced size, and its figures come again from the exported file."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner, Result

from pfedhn.cli.app import app
from pfedhn.errors import UserError
from pfedhn.experiments import directory as directory_module
from pfedhn.experiments.analysis import Analysis, identity, read_analysis, write_analysis
from pfedhn.experiments.build import check
from pfedhn.experiments.spec import cell_digest
from pfedhn.paper import client_map, norms, novel_clients, table2
from pfedhn.paper.experiments import EXPERIMENTS
from pfedhn.paper.studies import STUDIES
from pfedhn.report.results import Runs, read_file
from pfedhn.report.study import Found, Study, findings
from pfedhn.storage.directory import read_result

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directory_module, "num_cores", lambda: 1)
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "cache"))


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments), prog_name="pfedhn")
    assert result.exit_code == 0, result.output
    return result


def run_small(name: str, *more: str) -> Path:
    invoke("run", name, "--small", "--set", "steps=6", "--set", "evaluate_every=3", "--out", "runs", *more)
    return Path("runs")


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_by_its_command_and_again_from_the_exported_file(name: str) -> None:
    study = STUDIES[name]
    changes = [] if name in ("linear", "generalization") else ["--set", "local_steps=1"]
    if name == "linear":
        changes = ["--set", "steps=60", "--set", "evaluate_every=60"]
    elif name == "local-steps":
        changes = []
    run_small(name, *changes)
    invoke("report", "runs", "--export", "kept.jsonl")
    (stored,) = read_file(Path("kept.jsonl"))
    assert len(stored.results) == len(stored.experiment.cells)
    assert set(stored.analyses) == (set(stored.results) if study.compute else set())
    invoke("report", "kept.jsonl", "--out", "again", "--format", "md,png,svg,html")
    (finding,) = findings([stored])
    pictures = [finding.stem(figure) for figure in finding.figures]
    assert pictures
    for picture in pictures:
        assert (Path("again") / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"
        assert (Path("again") / f"{picture}.svg").read_text().startswith("<?xml")
    assert finding.sentence in Path("again/report.md").read_text()
    assert "None" not in finding.sentence
    assert "nan" not in finding.sentence


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_cells_of_a_study_can_be_run(study: Study) -> None:
    for small in (False, True):
        check(study.experiment(small))
    table1 = {cell_digest(cell) for experiment in EXPERIMENTS.values() for cell in experiment.cells}
    planned = {cell_digest(cell) for cell in study.experiment().cells}
    if study.compute is None:
        assert not planned & table1  # nothing that Table 1 has is run again
    assert len(planned) + len(study.borrowed) == len(study.cells)


def test_points_of_table_1_come_from_its_results() -> None:
    (runs,) = read_file(RESULTS / "table1-cifar10.jsonl")
    study = STUDIES["depth"]
    empty = Runs(study.experiment(), [], {}, {})
    found = Found(study, [empty], [runs])
    assert [entry.label for entry in found.entries] == ["pFedHN", "pFedHN+"]
    for entry in found.entries:
        assert entry.cell in study.borrowed
        assert sorted(entry.results) == [0, 1, 2]
    assert "paper" in study.draw(found).tables[0][0][0]


def test_a_point_that_another_study_has_run_too_still_comes_from_table_1() -> None:
    (table1,) = read_file(RESULTS / "table1-cifar10.jsonl")
    (communication,) = read_file(RESULTS / "communication.jsonl")
    study = STUDIES["depth"]
    found = Found(study, [Runs(study.experiment(), [], {}, {})], [communication, table1])
    entry, *_ = found.entries
    assert entry.results[0] == table1.results["pfedhn-cifar10-50-seed0"]
    assert entry.results[0] != communication.results["pfedhn-cifar10-50-seed0"]


def test_a_study_that_computes_takes_no_seeds_from_table_1() -> None:
    (table1,) = read_file(RESULTS / "table1-cifar10.jsonl")
    (communication,) = read_file(RESULTS / "communication.jsonl")
    first = {name: result for name, result in communication.results.items() if name.endswith("-seed0")}
    alone = replace(communication, results=first)
    found = Found(STUDIES["communication"], [alone], [table1])
    assert [sorted(entry.results) for entry in found.entries] == [[0]] * 9


def stored(name: str) -> Found:
    """A stored study, and the results of Table 1 beside it."""
    (mine,) = read_file(RESULTS / f"{name}.jsonl")
    return Found(STUDIES[name], [mine], read_file(RESULTS / "table1-cifar10.jsonl"))


def test_numbers_on_logarithmic_axes_are_written_out() -> None:
    finding = STUDIES["communication"].draw(stored("communication"))
    (figure,) = (draw() for draw in finding.figures.values())
    figure.draw_without_rendering()
    labels = [text.get_text() for axes in figure.axes for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]]
    assert {"10", "100", "1,000"} <= set(labels)
    assert not [label for label in labels if "$" in label]


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ([0.5, 0.6, 0.55], "0.1"),
        ([0.5, 0.6, None], "0.1"),  # the largest diverged
        ([0.5, 0.55, 0.6], "0.1 ↑"),
        ([0.5, 0.5, 0.5], "0.1 ="),
    ],
)
def test_the_rate_of_new_clients_says_whether_another_might_be_better(scores: list[float | None], text: str) -> None:
    assert novel_clients.rate_text({"rate": 0.1, "validation": scores}) == text


def test_small_differences_do_not_fill_the_scale_of_a_sweep() -> None:
    found = stored("embedding-size")
    (draw,) = STUDIES["embedding-size"].draw(found).figures.values()
    low, high = draw().axes[1].get_ylim()
    means = [100 * (entry.results[0].test.client_mean or 0) for entry in found.entries]
    assert high - low >= 5 > 10 * (max(means) - min(means))
    assert low < min(means) <= max(means) < high


def test_clients_per_round_are_compared_on_the_same_seeds_and_the_best_step_is_named() -> None:
    found = stored("cohort-size")
    finding = STUDIES["cohort-size"].draw(found)
    (lines, caption), *_ = finding.tables
    assert [line[-1] for line in lines[1:] if line[0] == "pFedHN"] == ["1"] * 10
    assert "(1 seed or 3 seeds)" in caption  # the stronger recipe has those of Table 1
    assert 'Best for every number is `rule = "sum"`.' in finding.sentence


def test_the_caption_tells_of_all_rows_of_its_table() -> None:
    (lines, caption), *_ = STUDIES["cohort-size"].draw(stored("cohort-size")).tables
    assert {line[-1] for line in lines[1:]} == {"1", "3"}
    assert "(1 seed or 3 seeds)" in caption


@pytest.mark.slow
def test_embeddings_that_do_not_move_keep_their_neighbors() -> None:
    kept = {}
    for rate in ("1e-9", "10"):
        changes = ["--set", f"embedding_lr={rate}", "--only", "method=pfedhn-pc"]
        invoke("run", "client-map", "--small", "--set", "steps=60", "--out", rate, *changes)
        invoke("report", rate, "--export", f"{rate}.jsonl")
        (stored,) = read_file(Path(f"{rate}.jsonl"))
        (analysis,) = stored.analyses.values()
        kept[rate] = analysis.values["kept"]
        ((lines, _),) = findings([stored])[0].tables
        assert lines[1][lines[0].index("kept")] == f"{100 * kept[rate]:.0f} %"
    assert kept["1e-9"] == 1 > kept["10"]


def test_rates_of_embeddings_are_told_apart() -> None:
    cells = [cell for cell in STUDIES["client-map"].cells if cell.method == "pfedhn"]
    found = Found(STUDIES["client-map"], [Runs(STUDIES["client-map"].experiment(), [], {}, {})])
    assert len({client_map.called(found, found.entry(cell)) for cell in cells}) == len(cells) == 3


@pytest.mark.slow
def test_norms_are_noted_by_the_runs_and_shown_from_the_first_to_the_last() -> None:
    run_small("norms", "--set", "local_steps=1", "--only", "method=pfedhn,embedding_scale=0.1")
    invoke("report", "runs", "--export", "kept.jsonl")
    (stored,) = read_file(Path("kept.jsonl"))
    (analysis,) = stored.analyses.values()
    assert analysis.values["step"] == [0, 3, 6]
    (finding,) = findings([stored])
    ((lines, _),) = finding.tables
    first, last = (analysis.values["served"][place] for place in (0, -1))
    assert lines[1][0] == "pFedHN, embeddings start at 0.1"
    assert lines[1][3] == f"{first:.3g} → {last:.3g}"
    _, *others, _ = finding.figures[""]().axes
    assert [list(axes.lines[0].get_ydata()) for axes in others] == [analysis.values[name] for name in norms.NAMES]


def test_table_2_names_the_methods_that_are_missing() -> None:
    (whole,) = read_file(RESULTS / "table2.jsonl")
    results = {name: result for name, result in whole.results.items() if not name.startswith("per-fedavg")}
    text = STUDIES["table2"].draw(Found(STUDIES["table2"], [replace(whole, results=results)])).sentence
    assert text.count("; without a number for every size: Per-FedAvg") == 2


def finished() -> tuple[Path, Any]:
    folder = run_small("mix-and-match", "--set", "local_steps=1", "--only", "method=pfedhn-pc")
    (run,) = (file.parent for file in folder.glob("*/result.json"))
    result = read_result(run)
    assert result is not None
    return run, result


def test_numbers_that_were_edited_are_noticed(tmp_path: Path) -> None:
    (runs,) = read_file(RESULTS / "compression.jsonl")
    result, other = list(runs.results.values())[:2]
    analysis = Analysis.of("mine", result, {"plane": numpy.array([[1.23456789, math.nan]]), "count": 3})
    assert analysis.values == {"plane": [[1.23457, None]], "count": 3}
    write_analysis(tmp_path, analysis)
    assert read_analysis(tmp_path, result) == analysis
    assert read_analysis(tmp_path, other) is None
    file = tmp_path / "analysis.json"
    file.write_text(file.read_text().replace('"count": 3', '"count": 4'))
    with pytest.raises(UserError, match="was changed after it was written; remove it"):
        read_analysis(tmp_path, result)


@pytest.mark.slow
def test_what_was_computed_is_checked() -> None:
    run, result = finished()
    analysis = read_analysis(run, result)
    assert analysis is not None
    assert analysis.made_from == identity(result)
    accuracy = analysis.values["accuracy"]
    assert len(accuracy) == 10
    correct, examples = result.test.clients, result.test.client_examples
    for client in range(10):  # with its own features a classifier is the client's own model
        if examples[client]:
            assert accuracy[client][client] == pytest.approx(correct[client] / examples[client], abs=1e-5)

    (run / "analysis.json").unlink()
    assert "Computing" in invoke("run", "--resume", "runs").output  # only that: the run itself is finished
    assert read_analysis(run, result) == analysis
    (run / "analysis.json").unlink()
    assert invoke("run", "--resume", "runs", "--quiet").output == ""  # it prints nothing, and computes all the same
    assert read_analysis(run, result) == analysis

    invoke("report", "runs", "--export", "kept.jsonl")
    invoke("report", "runs", "--export", "kept.jsonl")
    lines = Path("kept.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["experiment", "run", "analysis"]
    Path("kept.jsonl").write_text("\n".join([*lines[:2], lines[2].replace("mix-and-match", "depth", 1)]))
    with pytest.raises(UserError, match="line 3: it was changed after it was written"):
        read_file(Path("kept.jsonl"))
    alone = "\n".join([lines[0], lines[2]])
    Path("kept.jsonl").write_text(alone)
    with pytest.raises(UserError, match="line 2: no line has the run"):
        read_file(Path("kept.jsonl"))


OWN = '''
"""Does it matter how many clients there are?"""

from dataclasses import replace

from pfedhn.experiments.spec import Cell
from pfedhn.studies import Finding, Finished, Found, Study


def compute(finished: Finished):
    return {"length": finished.embeddings().norm(dim=1).mean()}


def draw(found: Found) -> Finding:
    lines = [["clients", "length"]]
    for cell in found.cells:
        for values in found.analyses(cell).values():
            lines.append([str(cell.clients), f"{values['length']:.3f}"])
    return Finding("mine", "Clients", "More clients, other lengths.", [(lines, "Mean length.")])


CELL = Cell(split=(0.5, 0.25, 0.25), model="mlp-4", steps=4, evaluate_every=2, settings={"local_steps": 1})
STUDY = Study("mine", "Clients", tuple(replace(CELL, clients=n) for n in (4, 8)), draw, compute, small=lambda c: c)
'''


@pytest.mark.slow
def test_a_study_of_ones_own_is_one_file() -> None:
    Path("mine.py").write_text(OWN)
    said = invoke("run", "mine.py", "--seeds", "0", "--set", "batch_size=8").output
    assert "More clients, other lengths." in said
    invoke("report", "runs/mine", "--export", "mine.jsonl")
    again = invoke("report", "mine.jsonl", "--study", "mine.py", "--format", "md").output
    assert "More clients, other lengths." in again
    assert "| 8 | " in Path("report/report.md").read_text()
    wrong = CliRunner().invoke(app, ["run", "demo", "--small"], prog_name="pfedhn")
    assert wrong.exit_code == 2
    assert "--small is for studies" in wrong.output


def test_a_client_that_changes_its_size_counts_for_the_one_it_has() -> None:
    cell = next(cell for cell in table2.cells() if cell.resize_every is not None)
    first = [table2.group(cell, size) for size in table2.SIZES]
    assert [len(members) for members in first] == [25, 25, 25]
    small, _, large = first
    every = table2.RESIZE_EVERY
    assert table2.group(cell, "lenet-s", every) == small, "the step that ends a stage belongs to it"
    assert table2.group(cell, "lenet-m", every + 1) == small
    assert table2.group(cell, "lenet-s", 2 * every) == large
    assert table2.group(cell, "lenet-s", 10 * every) == small
