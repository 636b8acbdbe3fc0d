"""Tuning: which points, chosen by what, stopped and gone on with, and where the chosen rates go."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from pfedhn.algorithms import ALGORITHMS, LEARNING_RATES
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.method import Method
from pfedhn.cli import app as cli
from pfedhn.cli.endings import LEARNED_NOTHING
from pfedhn.errors import UserError
from pfedhn.experiments import directory as directory_module
from pfedhn.experiments import tune
from pfedhn.experiments.directory import Directory
from pfedhn.experiments.grid import from_toml, grids_from_toml, with_assignments
from pfedhn.experiments.queue import Outcome
from pfedhn.experiments.rates import apply_rates, rates_for, read_rates, save_rates
from pfedhn.experiments.spec import Cell, Experiment
from pfedhn.experiments.tune import Tuning, TuningResults, plan, read_record, write_record
from pfedhn.paper import experiments as paper
from pfedhn.paper.experiments import BEYOND_THE_PAPER, EXPERIMENTS
from pfedhn.runs import execute as execution
from pfedhn.runs.load import load
from pfedhn.storage.schema import Scores

MINE = """
method = ["fedavg", "lg-fedavg", "pfedhn"]
clients = [4, 6, 8]
split = [0.5, 0.25, 0.25]
model = "mlp-4"
steps = 50
batch_size = 8
evaluate_every = 10
seeds = [0]
settings = {local_steps = 1}
[methods.lg-fedavg]
pretrain = "fedavg"
steps = 5
"""
TABLE1 = EXPERIMENTS["table1-cifar10"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the sources and on one core: tests run side by side."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directory_module, "num_cores", lambda: 1)
    monkeypatch.setenv("COLUMNS", "100")
    Path("mine.toml").write_text(MINE)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def succeed(*arguments: str) -> Result:
    result = invoke(*arguments)
    assert result.exit_code in (0, LEARNED_NOTHING), result.output  # so short a run may learn nothing
    return result


def refused(sentence: str, *arguments: str) -> None:
    result = invoke(*arguments)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2, result.output
    assert len(errors) == 1, result.stderr
    assert sentence in errors[0]


# Which points


GRID = """
[tune.fedavg]
local_lr = [0.3, 0.1]
local_steps = [1, 2, 3]
"""


def test_the_grid_of_an_experiment_file_is_tried_instead() -> None:
    Path("mine.toml").write_text(MINE + GRID)
    tuning = plan(from_toml(Path("mine.toml")), ["method=fedavg"], own_grids=grids_from_toml(Path("mine.toml")))
    points = [dict(point.rates) for point in tuning.points_of("fedavg")]
    assert points == [{"local_lr": lr, "local_steps": steps} for lr in (0.3, 0.1) for steps in (1, 2, 3)]
    assert dict(tuning.points_of("pfedhn")[0].rates) == {"lr": 0.1, "local_lr": 0.05}  # ours


def test_a_method_of_ones_own_is_tuned_on_the_grid_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "mine", Method("Mine", FedAvg, is_tuned=False))  # it brings no grid
    Path("mine.toml").write_text('method = ["mine"]\nclients = 4\nsteps = 10\n[tune.mine]\nlocal_lr = [0.3, 0.1]\n')
    tuning = plan(from_toml(Path("mine.toml")), own_grids=grids_from_toml(Path("mine.toml")))
    assert tuning.methods == ("mine",)  # though nobody named it
    assert [point.cell.settings["local_lr"] for point in tuning.points] == [0.3, 0.1]


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ("[tune.fedavgg]\nlocal_lr = [0.1]", "[tune.fedavgg] names no method; did you mean 'fedavg'?"),
        ("[tune.fedavg]\nlocal_lt = [0.1]", "fedavg has no field 'local_lt'; did you mean 'local_lr'?"),
        ("[tune.fedavg]\nlocal_lr = 0.1", "[tune.fedavg] local_lr = 0.1 does not fit; it must be a list of values."),
        ("[tune.lg-fedavg]\nlocal_lr = [0.1]", "lg-fedavg takes the rates of fedavg; tune that instead."),
        ("[tune.fedavg]", "tune does not fit; write lines such as"),
    ],
)
def test_a_grid_that_cannot_be_tried_is_refused(grid: str, sentence: str) -> None:
    Path("mine.toml").write_text(f"{MINE}\n{grid}\n")
    refused(sentence, "tune", "mine.toml")


def test_each_method_has_its_settings_on_the_grids_of_the_paper() -> None:
    rates, personal = {0.1, 0.05, 0.01, 0.005}, {0.05, 0.01, 0.005, 0.001}
    expected = {
        "local": {"local_lr": rates},
        "fedavg": {"local_lr": rates},
        "fedper": {"local_lr": rates},
        "per-fedavg": {"local_lr": rates, "personal_lr": personal},
        "per-fedavg-hf": {"local_lr": rates, "personal_lr": personal},
        "pfedme": {"lr": rates, "personal_lr": personal},
        "pfedhn": {"lr": rates, "local_lr": personal},
        "pfedhn-pc": {"lr": rates, "local_lr": personal},
    }
    tuning = plan(TABLE1)
    for method, settings in expected.items():
        points = tuning.points_of(method)
        tried = {tuple(point.cell.settings[name] for name in settings) for point in points}
        assert len(tried) == len(points) == 4 ** len(settings), method
        for place, (name, values) in enumerate(settings.items()):
            assert {point[place] for point in tried} == values, (method, name)
    beyond = {method for method in BEYOND_THE_PAPER if ALGORITHMS[method].rates_from is None}
    assert {point.method for point in tuning.points} == set(expected) | beyond  # lg-fedavg takes fedavg's


def test_the_authors_rates_stay_unless_asked_and_fifty_clients_are_used() -> None:
    tuning = plan(TABLE1)
    of_the_paper = [method for method in tuning.methods if method not in BEYOND_THE_PAPER]
    assert of_the_paper == ["local", "fedavg", "per-fedavg", "pfedme", "fedper"]
    assert {point.cell.clients for point in tuning.points} == {50}
    assert plan(TABLE1, ["method=pfedhn,method=fedavg"]).methods == ("pfedhn", "fedavg")
    assert plan(TABLE1, ["method=fedavg"]).points == tuning.points  # so that one directory holds both
    assert {point.cell.clients for point in plan(TABLE1, ["clients=10"]).points} == {10}
    assert {point.cell.clients for point in plan(from_toml(Path("mine.toml"))).points} == {6}


def test_every_method_of_a_persons_own_file_is_tuned() -> None:
    whole = plan(from_toml(Path("mine.toml")), tunes_all=True)
    assert whole.methods == ("pfedhn", "fedavg")
    assert whole.usual_first("pfedhn")[0].rates == {"lr": 0.01, "local_lr": 0.005}, "its own rates come first"
    with pytest.raises(UserError, match=r"unless it is named; --only method=pfedhn tunes pfedhn\."):
        plan(Experiment("ours", (Cell(),)))


def test_the_first_stage_has_a_fifth_of_every_cells_steps() -> None:
    tuning = plan(TABLE1)
    steps = {
        point.method: (tuning.cell("first", point).steps, tuning.cell("finals", point).steps, point.cell.steps)
        for point in tuning.points
    }
    assert steps["fedavg"] == (1_000, 5_000, 5_000)
    assert steps["local"] == (400, 2_000, 2_000)
    (run,) = tuning.runs("first", tuning.points_of("fedavg")[:1])
    assert (run.name, run.cell.steps) == ("fedavg-cifar10-50-local_lr=0.1-seed0", 1_000)


def test_tuned_settings_of_the_file_do_not_matter_but_others_do() -> None:
    cells = tuple(Cell(method="fedavg", settings={"local_lr": rate}) for rate in (0.3, 0.4))
    tuning = plan(Experiment("mine", cells))
    assert [point.cell.settings for point in tuning.points] == [{"local_lr": rate} for rate in LEARNING_RATES]
    other = replace(cells[0], batch_size=3)
    with pytest.raises(UserError, match=r"'mine' has 2 cells of fedavg with 50 clients.*choose one with --only\."):
        plan(Experiment("mine", (*cells, other)))
    assert len(plan(Experiment("mine", (*cells, other)), ["batch_size=3"]).points) == 4


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("lg-fedavg takes the rates of fedavg; tune that instead.", "--only method=lg-fedavg"),
        ("there is no grid for the method 'fedavgg'; did you mean 'fedavg'?", "--only method=fedavgg"),
        ("'mine' has no such cell of local to tune.", "--only method=local"),
        ("--only clients=5 leaves no run of 'mine', where clients is 4, 6 or 8.", "--only clients=5"),
        ("--set local_lr cannot be given: it is what is to be chosen.", "--set local_lr=0.1"),
        ("--set fedavg.local_lr cannot be given", "--set fedavg.local_lr=0.1"),
        ("fedavg starts from fedavg here; only methods with no pretrain are tuned.", "--set fedavg.pretrain=fedavg"),
        ("--fraction is 0; it must be between 0 and 1.", "--fraction 0"),
        ("--finalists is 0; it must be at least 1.", "--finalists 0"),
        ("--jobs is 0; it must be at least 1.", "--jobs 0"),
        ("full is not empty and holds no tuning; give another --out.", "--out full"),
        ("spoilt.toml is not valid TOML", "--save spoilt.toml"),
        ("full is a folder; the rates need a file.", "--save full"),
        ("thesis.doc/rates.toml cannot be written (not a directory)", "--save full/thesis.doc/rates.toml"),
        ("--precision is 'fp64'; it must be tf32 or fp32.", "--precision fp64"),
    ],
)
def test_bad_input_gets_one_sentence_and_code_2(sentence: str, arguments: str) -> None:
    Path("full").mkdir()
    Path("full/thesis.doc").write_text("years of work")
    Path("spoilt.toml").write_text("[mine")
    refused(sentence, "tune", "mine.toml", *arguments.split())
    assert not Path("runs").exists()


# Chosen by what


def outcome(tuning: Tuning, stage: tune.Stage, scores: dict[float, float | None]) -> Outcome:
    """Results of FedAvg's points by rate; test scores say the opposite of validation."""
    found = Outcome()
    for point in tuning.points_of("fedavg"):
        score = scores.get(point.rates["local_lr"])
        for run in tuning.runs(stage, [point]):
            if score is not None:
                found.results[run.name] = Mock(
                    validation=Scores(0.0, 1, score, score), test=Scores(0.0, 1, 1 - score, 1 - score), score=score
                )
    return found


def test_the_best_three_and_the_winner_are_those_of_validation() -> None:
    tuning = plan(TABLE1, ["method=fedavg"])
    found = TuningResults(tuning, outcome(tuning, "first", {0.1: 0.2, 0.05: 0.6, 0.01: 0.7, 0.005: 0.5}))
    assert [point.rates["local_lr"] for point in found.finalists("fedavg")] == [0.01, 0.05, 0.005]
    found = replace(found, finals=outcome(tuning, "finals", {0.05: 0.8, 0.01: 0.75, 0.005: 0.9}))
    assert found.rates() == {"fedavg": {"local_lr": 0.005}, "lg-fedavg": {"local_lr": 0.005}}


def test_a_point_that_diverged_is_worse_than_any_other() -> None:
    tuning = plan(TABLE1, ["method=fedavg"])
    found = TuningResults(tuning, outcome(tuning, "first", {0.1: None, 0.05: 0.0, 0.01: None, 0.005: 0.5}))
    assert [point.rates["local_lr"] for point in found.finalists("fedavg")] == [0.005, 0.05]
    found = replace(found, finals=outcome(tuning, "finals", {0.05: 0.1, 0.005: None}))
    assert found.rates()["fedavg"] == {"local_lr": 0.05}
    runs = tuning.runs("finals", tuning.points_of("fedavg"))
    all_diverged = replace(found, finals=Outcome(failures=dict.fromkeys((run.name for run in runs), Mock())))
    assert all_diverged.rates() == {}


def test_with_several_seeds_the_mean_decides_and_one_that_diverged_spoils_it() -> None:
    tuning = plan(TABLE1, ["method=fedavg"], [0, 1])
    first = outcome(tuning, "first", {0.1: 0.5, 0.05: 0.6, 0.01: 0.7, 0.005: 0.1})
    assert len(tuning.runs("first", tuning.points_of("fedavg"))) == 8
    first.results["fedavg-cifar10-50-local_lr=0.1-seed1"] = Mock(validation=Scores(0.0, 1, 0.8, 0.8), score=0.8)
    del first.results["fedavg-cifar10-50-local_lr=0.01-seed1"]
    found = TuningResults(tuning, first)
    assert found.score("first", tuning.points_of("fedavg")[0]) == pytest.approx(0.65)
    assert [point.rates["local_lr"] for point in found.finalists("fedavg")] == [0.1, 0.05, 0.005]


def test_when_the_time_is_over_the_first_stage_decides() -> None:
    tuning = plan(TABLE1, ["method=fedavg"])
    found = TuningResults(tuning, outcome(tuning, "first", {0.1: 0.2, 0.05: 0.6}))  # two points of four, no finals
    assert found.rates()["fedavg"] == {"local_lr": 0.05}
    assert found.num_left_out() == 2 + 2
    assert not TuningResults(tuning, Outcome()).has_diverged("fedavg")


# On the command line


def test_a_dry_run_says_how_much_would_run_and_runs_nothing() -> None:
    said = succeed("tune", "mine.toml", "--dry-run").stdout
    assert "Tuning pfedhn, fedavg: 20 points, 20 short runs and up to 6 full runs, 500 steps in all." in said
    assert f"would be written to runs/mine-tuning/rates.toml and {Path('mine.rates.toml').resolve()}." in said
    assert succeed("run", "mine.toml", "--tune", "--dry-run").stdout.startswith(said)
    assert sorted(map(str, Path().iterdir())) == ["mine.toml"]


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("--tune is for your own experiment file, and demo is none; use `pfedhn tune demo`", "demo --tune"),
        ("--tune-minutes is 0; it must be above 0.", "mine.toml --tune --tune-minutes 0"),
        ("so --rates cannot be given with it.", "mine.toml --tune --rates mine.rates.toml"),
    ],
)
def test_a_run_that_cannot_be_tuned_first_is_refused(sentence: str, arguments: str) -> None:
    Path("mine.rates.toml").write_text("[mine.fedavg]\nlocal_lr = 0.3")
    refused(sentence, "run", *arguments.split())
    assert not Path("runs").exists()


@pytest.mark.slow
def test_run_tunes_first_and_uses_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    set_grid(monkeypatch, "fedavg", {"local_lr": (0.3, 0.2)})
    run = ["run", "mine.toml", "--only", "method=fedavg,clients=6", "--tune", "--jobs", "1"]
    late = succeed(*run, "--tune-minutes", "1e-9", "--out", "late")
    assert "2 points were left out when the time was over, so that no rate was chosen" in late.stdout
    assert not Path("mine.rates.toml").exists()
    said = succeed(*run)
    assert "Tuning fedavg: 2 points, 2 short runs and up to 2 full runs, 120 steps in all." in said.stderr
    (chosen,) = read_rates(Path("mine.rates.toml"))["mine"]["fedavg"].values()
    result = json.loads(Path("runs/mine/fedavg-digits-6-seed0/result.json").read_text())
    assert result["cell"]["settings"]["local_lr"] == chosen
    assert "runs/mine holds this experiment already, so nothing is tuned again." in succeed(*run).stderr


def set_grid(monkeypatch: pytest.MonkeyPatch, method: str, grid: dict[str, tuple[float, ...]]) -> None:
    monkeypatch.setitem(ALGORITHMS, method, replace(ALGORITHMS[method], grid=grid))


@pytest.fixture
def with_a_bad_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    set_grid(monkeypatch, "fedavg", {"local_lr": (1e30, 0.1, 0.05)})
    set_grid(monkeypatch, "pfedhn", {"lr": (0.05, 0.01), "local_lr": (0.05,)})  # few, for the time they take


def test_rates_and_the_record_of_a_tuning_vouch_for_themselves(tmp_path: Path) -> None:
    file, record = tmp_path / "mine.rates.toml", tmp_path / "tuning.json"
    save_rates(file, "mine", {"fedavg": {"local_lr": 0.05}})
    file.write_text(file.read_text().replace("0.05", "0.07"))
    with pytest.raises(UserError, match=r"was changed after it was written; if that was you, take its first line out"):
        read_rates(file)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match="was changed after it was written"):
        read_rates(file)
    file.write_text("".join(lines[1:]))
    assert read_rates(file) == {"mine": {"fedavg": {"local_lr": 0.07}}}
    write_record(record, EXPERIMENTS["demo"], {"fedavg": {"score": 0.5}})
    assert read_record(record)["methods"] == {"fedavg": {"score": 0.5}}
    for damaged in (record.read_text().replace("0.5", "0.9"), "[]", "{}"):
        record.write_text(damaged)
        with pytest.raises(UserError, match="remove it and tune again: the runs are still there"):
            read_record(record)


@pytest.mark.slow
@pytest.mark.usefixtures("with_a_bad_rate")
def test_tune_writes_the_table_the_record_and_rates_that_run_then_uses() -> None:
    only = ["--only", "method=fedavg"]
    said = succeed("tune", "mine.toml", *only, "--finalists", "2", "--jobs", "1", "--precision", "fp32")
    shown = said.stdout
    assert ": validation " in said.stderr  # a test score that is seen is a test score that chooses
    assert ": test " not in said.stderr
    assert shown.endswith("Next: `pfedhn run mine.toml` uses them.\n")
    record = json.loads(Path("runs/mine-tuning/tuning.json").read_text())
    assert record["experiment"] == "mine"
    fedavg = record["methods"]["fedavg"]
    assert fedavg["command"].endswith("--finalists 2 --precision fp32")
    bad, *good = fedavg["points"]
    assert bad["first"]["runs"] == {"fedavg-digits-6-local_lr=1e_30-seed0": "diverged"}
    assert bad["finals"] is None
    assert [(point["first"]["steps"], point["finals"]["steps"]) for point in good] == [(10, 50)] * 2
    best = max(good, key=lambda point: point["finals"]["score"])
    assert fedavg["chosen"] == best["rates"]
    assert [point["chosen"] for point in fedavg["points"]] == [point is best for point in fedavg["points"]]
    assert fedavg["environment"]["device"].startswith("cpu: ")
    assert (fedavg["seeds"], fedavg["fraction"], fedavg["finalists"]) == ([0], 0.2, 2)
    rows = [line.split() for line in shown.splitlines() if "%" in line or "diverged" in line]
    assert rows[0] == ["1e+30", "diverged"]
    for row, point in zip(rows[1:], good, strict=True):
        expected = [f"{100 * point[stage]['score']:.2f}" for stage in ("first", "finals")]
        assert [row[1], row[3]] == expected
        assert (row[-1] == "chosen") == point["chosen"]
    result_file = Path("runs/mine-tuning/finals/fedavg-digits-6-local_lr=0.1-seed0/result.json")
    result = json.loads(result_file.read_text())
    assert result["validation"]["sample_mean"] == good[0]["finals"]["score"]
    with_models = {file.parent.name for file in Path("runs/mine-tuning").glob("*/*/checkpoint-*")}
    assert with_models == {"fedavg-digits-6-local_lr=1e_30-seed0"}  # what diverged may go on; of others none is used
    with pytest.raises(UserError, match="holds a result and no model, as every run of a tuning does"):
        load(result_file.parent)

    chosen = {"fedavg": best["rates"], "lg-fedavg": best["rates"]}
    assert read_rates(Path("runs/mine-tuning/rates.toml")) == read_rates(Path("mine.rates.toml")) == {"mine": chosen}
    used = succeed("run", "mine.toml", "--only", "method=lg-fedavg,clients=4")
    assert f"Learning rates: {Path('mine.rates.toml').resolve()}" in used.stderr
    for method in ("fedavg", "lg-fedavg"):
        result = json.loads(Path(f"runs/mine/{method}-digits-4-seed0/result.json").read_text())
        assert result["cell"]["settings"] == {"local_steps": 1, **best["rates"]}

    # The command in a result repeats a point of the grid, which no cell of mine.toml is.
    words = shlex.split(json.loads(result_file.read_text())["command"])
    succeed(*words[1:], "--out", "again")
    again = json.loads(Path("again", result_file.parent.name, "result.json").read_text())
    assert again["test"] == json.loads(result_file.read_text())["test"]

    # Another method later, in the same directory.
    monkey = succeed("tune", "mine.toml", "--only", "method=pfedhn", "--finalists", "1", "--jobs", "1")
    assert "pfedhn, 6 clients" in monkey.stdout
    record = json.loads(Path("runs/mine-tuning/tuning.json").read_text())
    assert list(record["methods"]) == ["fedavg", "pfedhn"]
    assert record["methods"]["fedavg"] == fedavg
    assert {name: rates_for("mine", Path("mine.rates.toml"))[name] for name in chosen} == chosen
    assert set(rates_for("mine", Path("mine.rates.toml"))["pfedhn"]) == {"lr", "local_lr"}


def test_when_every_point_diverges_nothing_is_chosen_and_the_code_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    set_grid(monkeypatch, "fedavg", {"local_lr": (1e30, 1e31)})
    result = invoke("tune", "mine.toml", "--only", "method=fedavg", "--jobs", "1")
    assert result.exit_code == 1
    assert "error: every point of fedavg diverged; no rate was chosen for it." in result.stderr
    assert not Path("mine.rates.toml").exists()


def test_a_failure_that_is_no_divergence_ends_the_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "rounds", Mock(side_effect=TypeError("unsupported operand")))
    result = invoke("tune", "mine.toml", "--only", "method=fedavg", "--jobs", "1")
    assert result.exit_code == 1
    assert result.stderr.count("TypeError: unsupported operand (an error inside pfedhn;") == 4
    assert not Path("runs/mine-tuning/finals").exists()
    assert not Path("runs/mine-tuning/tuning.json").exists()


@pytest.mark.slow
def test_after_kill_9_the_finished_points_are_only_read() -> None:
    tune_fedavg = ["tune", "mine.toml", "--only", "method=fedavg", "--jobs", "1", "--out"]
    succeed(*tune_fedavg, "whole")
    Path("mine.rates.toml").unlink()
    for attempt in range(10):  # a busy machine may look away until all have finished
        killed = f"killed-{attempt}"
        process = subprocess.Popen(
            [sys.executable, "-m", "pfedhn", *tune_fedavg, killed],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while not list(Path(killed).glob("*/*/result.json")) and time.monotonic() < deadline:
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not Path(killed, "tuning.json").exists():
            break
        Path("mine.rates.toml").unlink(missing_ok=True)
    else:
        raise AssertionError("too late to be a test")
    before = {file: file.stat().st_mtime_ns for file in Path(killed).glob("*/*/result.json")}
    assert before
    shown = succeed(*tune_fedavg, killed)
    assert " of 4 runs are finished already." in shown.stderr
    assert {file: file.stat().st_mtime_ns for file in before} == before
    scores = [json.loads(Path(out, "tuning.json").read_text())["methods"]["fedavg"] for out in ("whole", killed)]
    for record in scores:
        for point in record["points"]:
            for stage in ("first", "finals"):
                (point[stage] or {}).pop("seconds", None)
    assert scores[0]["points"] == scores[1]["points"]


def test_another_tuning_in_the_folder_is_named_as_it_was_given() -> None:
    arguments = ["tune", "mine.toml", "--only", "method=fedavg", "--set", "steps=10", "--out", "tuning"]
    tuning = plan(with_assignments(from_toml(Path("mine.toml")), {"steps": 10}), ["method=fedavg"])
    for stage, experiment in tuning.stages.items():
        Directory(Path("tuning", stage)).open(experiment, [])
    refused("error: tuning holds another experiment, or other settings of it: ", *arguments, "--set", "steps=20")
    refused("error: tuning holds another experiment, or other settings of it: ", *arguments, "--fraction", "0.5")
    refused("of it: steps is 10 there and 9 here; give another --out", *arguments, "--set", "steps=9")


# The files of rates


def test_saving_keeps_what_else_a_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "rates.toml"
    save_rates(file, "a", {"fedavg": {"local_lr": 0.1}, "pfedme": {"lr": 0.1, "personal_lr": 0.05}})
    save_rates(file, "b.c", {"local": {"local_lr": 0.01}})
    save_rates(file, "a", {"fedavg": {"local_lr": 0.005}})
    assert read_rates(file) == {
        "a": {"fedavg": {"local_lr": 0.005}, "pfedme": {"lr": 0.1, "personal_lr": 0.05}},
        "b.c": {"local": {"local_lr": 0.01}},
    }
    assert "\n# Learning rates that `pfedhn tune` chose" in file.read_text()


def test_rates_reach_the_cells_of_their_methods_alone() -> None:
    changed = apply_rates(TABLE1, {"fedavg": {"local_lr": 0.3}})
    for before, after in zip(TABLE1.cells, changed.cells, strict=True):
        is_tuned = before.method == "fedavg"
        assert after == (replace(before, settings={**before.settings, "local_lr": 0.3}) if is_tuned else before)


def test_the_option_and_set_come_after_and_show_in_the_command() -> None:
    Path("mine.rates.toml").write_text("[mine.fedavg]\nlocal_lr = 0.3")
    Path("other.toml").write_text("[mine.fedavg]\nlocal_lr = 0.2\n[mine.lg-fedavg]\nlocal_lr = 0.25")
    short = ["--only", "method=fedavg,clients=4", "--set", "steps=10"]
    succeed("run", "mine.toml", *short, "--out", "beside")
    succeed("run", "mine.toml", *short, "--rates", "other.toml", "--out", "given")
    succeed("run", "mine.toml", *short, "--rates", "other.toml", "--set", "local_lr=0.1", "--out", "set")
    for out, rate in (("beside", 0.3), ("given", 0.2), ("set", 0.1)):
        folder = Path(out, "fedavg-digits-4-seed0")
        result = json.loads((folder / "result.json").read_text())
        assert result["cell"]["settings"]["local_lr"] == rate
        assert tomllib.loads((folder / "spec.toml").read_text())["method"]["settings"]["local_lr"] == rate
        assert (f"--rates {Path('other.toml').resolve()}" in result["command"]) == (out != "beside")
    assert Directory(Path("given")).options().rates == Path("other.toml").resolve()
    succeed("run", "--resume", "given")
    refused("so --rates cannot be given with it.", "run", "--resume", "given", "--rates", "other.toml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[mine.fedavgg]\nlocal_lr = 0.1", "[mine.fedavgg] names no method; did you mean 'fedavg'?"),
        ("[mine.fedavg]\nlocal_lrr = 0.1", "[mine.fedavg] has no field 'local_lrr'; did you mean 'local_lr'?"),
        ("[mine.fedavg]\nlocal_lr = 'fast'", "[mine.fedavg]: local_lr = 'fast' does not fit; it must be a number."),
        ("[mine.fedavg", "mine.rates.toml is not valid TOML"),
        ("[mine]\nfedavg = 0.1", "'mine' does not fit; write rates under headings [EXPERIMENT.METHOD]."),
        ("[other.fedavg]\nlocal_lr = 0.1", "mine.rates.toml has no rates for 'mine'; it holds 'other'."),
        ("", "mine.rates.toml has no rates for 'mine'; it is empty."),
    ],
)
def test_wrong_rates_get_one_sentence_and_code_2(text: str, sentence: str) -> None:
    Path("mine.rates.toml").write_text(text)
    for command in ("run", "tune"):
        refused(sentence, command, "mine.toml")
    Path("mine.rates.toml").rename("other.rates.toml")
    refused(sentence.replace("mine.rates", "other.rates"), "run", "mine.toml", "--rates", "other.rates.toml")
    refused("nowhere.toml.", "run", "mine.toml", "--rates", "nowhere.toml")
    assert not Path("runs").exists()


def test_the_packages_own_file_is_sound_and_holds_only_what_is_tuned() -> None:
    for name, rates in read_rates(paper.RATES_FILE).items():
        assert name in EXPERIMENTS
        for method, settings in rates.items():
            tuned = ALGORITHMS[ALGORITHMS[method].rates_from or method]
            assert set(settings) == set(tuned.grid)


def test_mnist_takes_the_rates_of_cifar10_unless_it_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rates.toml"

    def rates_of(name: str, method: str = "fedavg") -> set[Any]:
        monkeypatch.setattr(paper, "PACKAGE_RATES", read_rates(file))
        tuned: Callable[[Experiment], Experiment] = paper._tuned
        return {cell.settings.get("local_lr") for cell in tuned(EXPERIMENTS[name]).cells if cell.method == method}

    file.write_text("")
    plain = rates_of("table1-mnist")
    save_rates(file, "table1-cifar10", {"fedavg": {"local_lr": 0.25}, "per-fedavg": {"local_lr": 0.125}})
    assert rates_of("table1-cifar10") == rates_of("table1-mnist") == {0.25}
    assert rates_of("table1-cifar100") != {0.25}
    assert plain != {0.25}
    save_rates(file, "table1-mnist", {"fedavg": {"local_lr": 0.5}})
    assert rates_of("table1-mnist") == {0.5}
    assert rates_of("table1-mnist", "per-fedavg") == {0.125}  # method by method


def test_nothing_is_chosen_without_validation_examples() -> None:
    blind = with_assignments(from_toml(Path("mine.toml")), {"split": [0.7, 0.0, 0.3]})
    with pytest.raises(UserError, match="fedavg would be tuned on validation examples, and there are none; leave some"):
        plan(blind, ["method=fedavg"])
    tuning = plan(TABLE1, ["method=fedavg"])
    for scores in (Scores(math.nan, 0, math.nan, math.nan), Scores(0.5, 10, math.nan, math.nan)):
        first = outcome(tuning, "first", {0.1: 0.2, 0.05: 0.6})
        blind_result: Any = next(iter(first.results.values()))
        blind_result.validation, blind_result.score = scores, scores.score
        with pytest.raises(UserError, match="has no score on validation examples, so that nothing can be chosen by it"):
            TuningResults(tuning, first).finalists("fedavg")
