"""The command line as a person meets it: what it prints, what it refuses, its exit codes, and killing it."""

import errno
import importlib.util
import inspect
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import typer.main
from safetensors import safe_open
from typer.testing import CliRunner, Result

import pfedhn
from pfedhn.algorithms import ALGORITHMS
from pfedhn.cli import find
from pfedhn.cli.app import app
from pfedhn.cli.tune import tune
from pfedhn.data import catalogue as datasets
from pfedhn.engine.executors import EXECUTORS
from pfedhn.experiments import directory as directory_module
from pfedhn.experiments import runner
from pfedhn.experiments.grid import with_assignments
from pfedhn.experiments.tune import plan
from pfedhn.paper import experiments as paper
from pfedhn.paper.experiments import DEMO, EXPERIMENTS
from pfedhn.report.page import FORMATS
from pfedhn.storage import checkpoint

MINE = """
clients = 6
partition = {rule = "by_classes", classes_per_client = 5}
split = [0.5, 0.25, 0.25]
model = "mlp-4"
steps = 40
batch_size = 8
evaluate_every = 10
seeds = [0]
settings = {local_steps = 4, local_lr = 0.1}
[methods.pfedhn-pc]
[methods.fedavg]
steps = 60
"""
METHODS = ("pfedhn-pc", "fedavg")
LONG = "x" * 300


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the sources, from this machine's own cache and data, and on one core: tests run side by side."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directory_module, "num_cores", lambda: 1)
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "cache"))
    for name in ("PFEDHN_DATA_DIR", "PFEDHN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    Path("mine.toml").write_text(MINE)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="pfedhn")


def refused(code: int, sentence: str, *arguments: str) -> Result:
    """One line on stderr, no traceback, the right exit code."""
    result = invoke(*arguments)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == code, result.output
    assert len(errors) == 1, result.stderr
    assert sentence in errors[0]
    assert "Traceback" not in result.output
    return result


def scores(path: Path) -> Any:
    """Everything a run found, less what depends on the clock and the place."""
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((path / "result.json").read_text())
    for record in metrics:
        del record["seconds"]
    kept = {name: result[name] for name in ("validation", "test", "chosen_step", "steps", "bytes_up", "bytes_down")}
    return metrics, kept, last_tensors(path)


def last_tensors(path: Path) -> dict[str, bytes]:
    newest = checkpoint.checkpoints(path)[0].with_suffix(".safetensors")
    with safe_open(newest, framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


# What there is to see


def test_the_package_is_installed_whole() -> None:
    """`make test-newest` runs this against a wheel, which holds no file that was not put there."""
    source = Path(__file__).parents[2] / "src" / "pfedhn"
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {Path("paper/rates.toml"), Path("kernels/kernel_configs.json"), Path("report/page.html")} <= files
    assert not [name for name in files if not (Path(pfedhn.__file__).parent / name).is_file()]


@pytest.mark.parametrize("words", [[], ["run"], ["data", "get"]])
def test_flags_are_not_shown_with_a_value(words: list[str]) -> None:
    """Newer versions of Typer show <bool> where nothing is given in its place."""
    command = typer.main.get_command(app)
    context = command.make_context("pfedhn", ["list"])
    for word in words:
        command = command.get_command(context, word)  # type: ignore[attr-defined]
    flags = [option for option in command.get_params(context) if getattr(option, "is_flag", False)]
    assert flags
    assert [option.metavar for option in flags] == [""] * len(flags)


def test_the_version() -> None:
    assert invoke("--version").output.strip() == f"pfedhn {pfedhn.__version__}"


@pytest.mark.parametrize(
    "command",
    [
        *([], ["demo"], ["list"], ["run"], ["tune"], ["report"], ["doctor"]),
        *(["data"], ["data", "list"], ["data", "get"], ["data", "show"]),
    ],
)
def test_every_help_page_has_an_example_or_the_commands(command: list[str]) -> None:
    page = invoke(*command, "--help").output
    assert "Example" in page if command not in ([], ["data"]) else "Commands" in page
    for line in page.splitlines():
        assert len(line) <= 100


def test_help_and_version_come_without_pytorch() -> None:
    code = """
import sys
import pfedhn.cli
try:
    pfedhn.cli.main()
finally:
    assert not {"torch", "numpy", "matplotlib"} & set(sys.modules)
"""
    for words in ("--help", "--version", "run --help", "data show --help"):
        subprocess.run([sys.executable, "-c", code, *words.split()], check=True, stdout=subprocess.DEVNULL)


def test_list_and_doctor_speak_to_programs() -> None:
    assert list(json.loads(invoke("list", "--json").stdout)["methods"]) == list(ALGORITHMS)
    assert json.loads(invoke("doctor", "--json").stdout)["data digits"] == "always there"


def test_a_data_set_with_a_slip_of_the_pen_is_suggested() -> None:
    refused(2, "there is no data set and no experiment 'digitz'; did you mean 'digits'?", "data", "show", "digitz")


def test_a_data_set_of_ones_own_is_shown_as_the_digits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(datasets.DATASETS, "mine", datasets.DATASETS["digits"])
    assert paper.usual_cell("mine") == replace(DEMO.cells[0], dataset="mine")


def test_an_empty_cell_is_to_be_filled() -> None:
    Path("visits.csv").write_text("clinic,age,outcome\na,1,x\na,,y\nb,2,x\n")
    Path("own.toml").write_text(
        'dataset = "visits.csv"\nclients = 2\nmodel = "linear"\ncolumns = {client = "clinic", label = "outcome"}\n'
        'read = {missing = "refuse", min_examples = 1}\n'
    )
    refused(
        2,
        "'age' in line 3 of visits.csv is empty; fill it, drop the example, or have such cells filled in with read =",
        "run",
        "own.toml",
    )


def test_data_alone_shows_its_help() -> None:
    shown = invoke("data")
    assert "Commands" in shown.output
    assert "error:" not in shown.output


def test_help_names_what_there_is() -> None:
    """Help comes without the modules that know it, so it is written there a second time."""
    pages = {name: " ".join(invoke(name, "--help").output.replace("│", "").split()) for name in ("run", "report")}
    assert f"auto, {', '.join(EXECUTORS)}, captured." in pages["run"]
    assert f"Some of {', '.join(FORMATS)}." in pages["report"]
    asked = inspect.signature(tune).parameters
    chosen = inspect.signature(plan).parameters
    for name in ("fraction", "finalists"):
        assert asked[name].default == chosen[name].default


@pytest.mark.slow
def test_the_help_of_run_is_right_about_files(tmp_path: Path) -> None:
    """The file that the help shows can be run as it stands, in fewer steps."""
    lines = [line.strip() for line in invoke("run", "--help").output.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("mine.toml ("))
    end = lines.index("", start)
    Path("shown.toml").write_text("\n".join(lines[start + 1 : end]))
    assert "[methods.pfedhn]" in lines[start:end]
    only = ["--only", "clients=20", "--seeds", "0", "--set", "steps=20", "--set", "local_steps=1"]
    result = invoke("run", "shown.toml", *only)
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("runs/shown").iterdir() if path.is_dir()} == {
        *("pfedhn-digits-20-lr=0.01-seed0", "pfedhn-digits-20-lr=0.05-seed0", "local-digits-20-seed0")
    }


def test_list_names_everything() -> None:
    output = invoke("list").output
    for name in (*ALGORITHMS, *datasets.DATASETS, *EXPERIMENTS):
        assert re.search(rf"^{re.escape(name)}\s+\S", output, re.MULTILINE), name
    assert not re.search(r"\b1\s+(cells|seeds)\b", output)


def test_doctor_says_what_is_there_and_how_to_get_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = invoke("doctor")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "extra report missing (draws figures): pip install 'pfedhn[report]'" in words
    assert "data digits always there" in words
    assert "data mnist not cached: pfedhn data get mnist" in words
    assert "can be written" in words


def test_doctor_says_that_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("PFEDHN_CACHE", "file/cache")
    words = " ".join(invoke("doctor").output.split())
    assert "file/cache: cannot be written (not a directory); set PFEDHN_CACHE to another folder" in words


@pytest.mark.slow
def test_data_show_counts_every_row_once() -> None:
    result = invoke("data", "show", "demo", "--seed", "1", "--plot", "split.png")
    assert result.exit_code == 0
    total, unused = (
        [int(word) for word in line.split()[1:]]
        for line in result.output.splitlines()
        if line.split()[0] in ("total", "unused")
    )
    assert sum(total) + sum(unused) == len(datasets.load("digits").y)
    assert Path("split.png").read_bytes()[:4] == b"\x89PNG"


def test_data_show_names_classes_that_nobody_has() -> None:
    output = invoke("data", "show", "digits", "--set", "clients=3", "--set", "partition.classes_per_client=2").output
    (line,) = [line for line in output.splitlines() if line.startswith("classes without a client: ")]
    assert len(line.split(": ")[1].split(", ")) == 10 - 3 * 2


def test_data_show_names_clients_and_labels_as_the_table_does() -> None:
    sites = [("north", "sick" if row < 10 else "well") for row in range(40)] + [("south", "well")] * 20
    lines = [f"{number % 9},{site},{outcome}" for number, (site, outcome) in enumerate(sites)]
    Path("visits.csv").write_text("\n".join(["age,site,outcome", *lines]))
    text = "dataset = 'visits.csv'\nclients = 2\ncolumns = {client = 'site', label = 'outcome'}\nmodel = 'mlp-4'"
    Path("table.toml").write_text(text)
    result = invoke("data", "show", "table.toml")
    assert result.exit_code == 0, result.output
    shown = [line.split() for line in result.output.splitlines()]
    assert shown[0][:3] == ["client", "name", "train"]
    assert shown[1][:2] == ["0", "north"]
    assert shown[1][5:] == ["well", "(75),", "sick", "(25)"]
    assert shown[2][:2] == ["1", "south"]
    assert shown[2][5:] == ["well", "(100)"]


def test_data_show_names_the_folders_of_clients() -> None:
    for client in ("north", "south"):
        Path("clinics", client).mkdir(parents=True)
        numpy.save(Path("clinics", client, "x.npy"), numpy.ones((20, 4)))
        numpy.save(Path("clinics", client, "y.npy"), numpy.arange(20) % 2)
    Path("folders.toml").write_text("dataset = 'clinics'\nclients = 2\nmodel = 'mlp-4'")
    shown = [line.split() for line in invoke("data", "show", "folders.toml").output.splitlines()]
    assert [line[:2] for line in shown[1:3]] == [["0", "north"], ["1", "south"]]


def test_data_get_and_list() -> None:
    assert "digits.csv.gz" in invoke("data", "get", "digits").output
    output = invoke("data", "list").output
    assert re.search(r"^mnist .*not cached", output, re.MULTILINE)
    refused(2, "there is no data set 'mnits'; did you mean 'mnist'?", "data", "get", "mnits")
    Path("empty").mkdir()
    refused(2, "neither empty/mnist nor empty holds mnist", "data", "get", "mnist", "--data-dir", "empty")


# Running


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine.toml` run to its end in one process."""
    path = tmp_path_factory.mktemp("finished")
    (path / "mine.toml").write_text(MINE)
    result = invoke("run", str(path / "mine.toml"), "--out", str(path / "runs"), "--jobs", "1", "--threads", "1")
    assert result.exit_code == 0, result.output
    return path


def test_a_run_prints_a_line_for_each_and_the_table(finished: Path) -> None:
    again = invoke("run", str(finished / "mine.toml"), "--out", str(finished / "runs"))
    assert again.exit_code == 0
    assert "2 of 2 runs are finished already." in again.stderr
    for method in METHODS:
        test = json.loads((finished / "runs" / f"{method}-digits-6-seed0" / "result.json").read_text())["test"]
        assert re.search(rf"^ {method} +{100 * test['client_mean']:.2f} ", again.stdout, re.MULTILINE)


def test_the_command_in_a_result_makes_it_again(finished: Path) -> None:
    before = finished / "runs" / "fedavg-digits-6-seed0"
    words = shlex.split(json.loads((before / "result.json").read_text())["command"])
    assert words[:3] == ["pfedhn", "run", str(finished / "mine.toml")]
    result = invoke(*words[1:], "--out", "again")
    assert result.exit_code == 0, result.output
    assert [path.name for path in Path("again").iterdir() if path.is_dir()] == ["fedavg-digits-6-seed0"]
    assert scores(Path("again/fedavg-digits-6-seed0")) == scores(before)


def test_seeds_can_be_given_both_ways_and_only_and_set_choose() -> None:
    options = ["--set", "steps=5", "--only", "method=fedavg"]
    assert invoke("run", "mine.toml", "--seeds", "3,4", *options).exit_code == 0
    assert invoke("run", "mine.toml", "--seeds", "4", "--seeds", "5", *options).exit_code == 0
    assert sorted(path.name for path in Path("runs/mine").iterdir() if path.is_dir()) == [
        f"fedavg-digits-6-seed{seed}" for seed in (3, 4, 5)
    ]
    specs = Path("runs/mine/fedavg-digits-6-seed4/spec.toml").read_text()
    assert "steps = 5" in specs


@pytest.mark.slow
def test_runs_that_are_left_keep_the_threads_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs on two cores have one each; one that is left over must not get both, or its bits would differ."""
    monkeypatch.setattr(directory_module, "num_cores", lambda: 2)
    short = ["run", "mine.toml", "--set", "steps=5", "--out", "some"]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_side_by_side", interrupt)
        result = invoke(*short)
        assert result.exit_code == 130
        assert result.stderr.strip() == "stopped; `pfedhn run --resume some` continues."
    assert invoke(*short, "--only", "method=fedavg").exit_code == 0
    assert invoke("run", "--resume", "some").exit_code == 0
    for method in METHODS:
        result_file = Path("some", f"{method}-digits-6-seed0", "result.json")
        assert json.loads(result_file.read_text())["environment"]["threads"] == 1


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_report_writes_beside_the_runs(finished: Path) -> None:
    result = invoke("report", str(finished / "runs"), "--out", "out", "--format", "md,csv", "--format", "tex")
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("out").iterdir()} == {"report.md", "report.csv", "report.tex"}
    refused(2, "holds no experiment", "report", "out")
    refused(2, "there is no file or folder nope; give a directory that `pfedhn run` made.", "report", "nope")
    Path("mine.toml").write_text("steps = 3")
    refused(2, "mine.toml holds no results; give the directory that `pfedhn run` made.", "report", "mine.toml")
    Path("runs/mine").mkdir(parents=True)
    refused(2, "made, such as runs/mine.", "report", "mine.toml", "--export", "mine.jsonl")
    refused(2, "there is no format 'pdf'", "report", str(finished / "runs"), "--format", "pdf")
    refused(
        2, "--average must be clients or samples, got 'rows'.", "report", str(finished / "runs"), "--average", "rows"
    )


@pytest.mark.slow
def test_without_test_rows_there_is_a_table_and_a_report_all_the_same() -> None:
    said = invoke("run", "mine.toml", "--seeds", "0,1", "--set", "steps=10", "--set", "split=[0.7,0.3,0.0]")
    assert said.exit_code == 0, said.output
    assert said.stderr.count(": no test examples, ") == 2 * len(METHODS)
    assert "nan" not in said.output
    assert invoke("report", "runs/mine").exit_code == 0


def test_the_demo_ends_with_a_table_a_sentence_and_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    short = with_assignments(replace(DEMO, seeds=(0, 1)), {"steps": 60, "local_steps": 1, "evaluate_every": 60})
    monkeypatch.setattr(paper, "DEMO", short)
    result = invoke("demo", "--jobs", "1", "--out", "shown")
    assert result.exit_code == 0, result.output
    assert re.search(r"^ pfedhn-plus +\d\d\.\d\d ± ", result.stdout, re.MULTILINE)
    assert "On average, a client's own test accuracy is " in result.stdout
    assert "of 100 clients (2 seeds together), " in result.stdout
    assert "The figure: shown/demo.png" in result.stdout
    assert "The page: shown/report/report.html" in result.stdout
    assert "</html>" in Path("shown/report/report.html").read_text()
    assert Path("shown/demo.png").read_bytes()[:4] == b"\x89PNG"
    for command in re.findall(r"`pfedhn ([^`]*)`", result.stdout):  # what to try next can be tried
        assert command.split()[0] in ("run", "report", "list")


def test_the_demo_compares_methods_at_one_number_of_steps() -> None:
    assert len({cell.steps for cell in DEMO.cells}) == 1
    assert len(DEMO.seeds) == 3
    assert {"pfedhn-plus", "local", "fedavg"} <= {cell.method for cell in DEMO.cells}


# Refusing


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("there is no experiment 'dmeo'; did you mean 'demo'?", "run dmeo"),
        ("No such command 'lst'. Did you mean 'list'? (`pfedhn --help` says more.)", "lst"),
        ("there is no file nowhere.toml.", "run nowhere.toml"),
        ("give the name or the file of an experiment, or --resume DIR", "run"),
        ("there is no method 'pfedn'; did you mean 'pfedhn'?", "run demo --set method=pfedn"),
        ("there is no data set 'digit'; did you mean 'digits'?", "run demo --set dataset=digit"),
        ("--set: no cell has a field 'setps'; did you mean 'steps'?", "run demo --set setps=3"),
        (
            "--set momentum=0 changes none of the chosen runs (fedavg); did you mean 'local_momentum'?",
            "run demo --only method=fedavg --set momentum=0",
        ),
        (
            "--set pfedhn-plus.lr=1 changes none of the chosen runs (fedavg);",
            "run demo --only method=fedavg --set pfedhn-plus.lr=1",
        ),
        (
            "--set momentum=0 changes none of the chosen runs (fedavg); did you mean 'local_momentum'?",
            "tune demo --only method=fedavg --set momentum=0",
        ),
        ("steps = 'ten' does not fit; it must be a whole number.", "run demo --set steps=ten"),
        ("'steps' is not of the form field=value.", "run demo --set steps"),
        ("the seeds are given as --seeds 0,1,2.", "run demo --set seeds=3"),
        ("fedavg: local_lr = -0.1 does not fit; it must be at least 0.", "run demo --set fedavg.local_lr=-0.1"),
        ("fedper: local_steps = 0 does not fit; it must be at least 1.", "run demo --set fedper.local_steps=0"),
        ("where method is local, fedavg, fedper or pfedhn-plus; clients is 50.", "run demo --only method=x,clients=5"),
        ("--only: there is no field 'metod'", "run demo --only metod=local"),
        ("--seeds must be whole numbers such as 0,1,2, got '0,x'.", "run demo --seeds 0,x"),
        ("there is no device 'gpu'; did you mean 'cpu'?", "run demo --device gpu"),
        ("there is no executor 'lop'; did you mean 'loop'?", "run demo --executor lop"),
        ("--jobs is 0; it must be at least 1.", "run demo --jobs 0"),
        ("--checkpoint-every is 0; it must be at least 1.", "run mine.toml --checkpoint-every=0"),
        ("--checkpoint-every is -5; it must be at least 1.", "run demo --checkpoint-every=-5"),
        ("leaves every client without examples; use fewer clients", "run demo --set clients=2000"),
        ("a cohort of 7 cannot be drawn from 6 clients.", "run mine.toml --set cohort_size=7"),
        ("11 classes per client were asked for", "run demo --set partition.classes_per_client=11"),
        ("does not take examples of shape (64,)", "run demo --set model=lenet"),
        ("omniglot; put images_background.zip", "run demo --set dataset=omniglot"),
        ("nowhere holds no experiment to go on with", "run --resume nowhere"),
        ("so --set cannot be given with it.", "run --resume nowhere --set steps=3"),
        ("No such command 'lst'.", "lst"),
        ("(`pfedhn --help` says more.)", "lst"),
        ("No such option", "--bug"),
        ("--stes", "run demo --stes 3"),
        ("(`pfedhn run --help` says more.)", "run demo --stes 3"),
        ("(`pfedhn data get --help` says more.)", "data get"),
        ("Invalid value for '--jobs'", "run demo --jobs many"),
    ],
)
def test_bad_input_gets_one_sentence_code_2_and_leaves_nothing(sentence: str, arguments: str) -> None:
    refused(2, sentence, *arguments.split())
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps = 1.5", "mine: steps = 1.5 does not fit; it must be a whole number."),
        ("split = 'half'", "mine: split = 'half' does not fit; it must be a list of 3, each a number."),
        ("split = [0.5, 0.5, 0.5]", "must be three fractions (train, validation, test) that sum to 1."),
        ("method = 'pfedhn'\nlr = 0.1", "mine has no field 'lr', which is a setting of a method; write lr = 0.1"),
        ("steps == 3", "mine.toml is not valid TOML"),
    ],
)
def test_a_wrong_file_gets_one_sentence_and_code_2(text: str, sentence: str) -> None:
    Path("mine.toml").write_text(text)
    refused(2, sentence, "run", "mine.toml")
    assert not Path("runs").exists()


def test_data_in_the_place_of_an_experiment_are_said_to_be_data() -> None:
    Path("visits.csv").write_text("clinic,age,outcome")
    columns = 'and columns = {client = "...", label = "..."}, and give that.'
    refused(
        2,
        f"visits.csv is a table and not an experiment; write a file mine.toml with the lines "
        f"dataset = 'visits.csv' {columns}",
        "run",
        "visits.csv",
    )
    Path("photos").mkdir()
    refused(2, "photos is a folder and not an experiment; ", "run", "photos")
    Path("photos/experiment.toml").touch()
    refused(2, "photos holds runs; to go on with them, use `pfedhn run --resume photos`.", "run", "photos")
    refused(2, "there is no file other.csv.", "run", "other.csv")


@pytest.mark.parametrize(
    ("row", "value", "sentence"),
    [
        (3, numpy.nan, "example 3 of x holds NaN or infinity; clean the data before federating it."),
        (None, -1, "example 5 has the label -1; class labels start at 0."),
    ],
)
def test_own_data_with_faults_gets_one_sentence_and_code_2(row: int | None, value: float, sentence: str) -> None:
    for client in ("a", "b"):
        Path("clinics", client).mkdir(parents=True)
        x, y = numpy.ones((20, 4), dtype=numpy.float32), numpy.arange(20) % 2
        if row is not None:
            x[row] = value
        else:
            y[5] = value
        numpy.save(Path("clinics", client, "x.npy"), x)
        numpy.save(Path("clinics", client, "y.npy"), y)
    Path("mine.toml").write_text("dataset = 'clinics'\nclients = 2\nmodel = 'mlp-4'")
    refused(2, sentence, "run", "mine.toml")
    assert not Path("runs").exists()


@pytest.mark.slow
def test_folds_are_runs_that_test_every_row_once() -> None:
    """From a table to the report: the same parts for all methods, and clients over all folds."""
    lines = [f"{i % 7},{'lyon' if i % 3 else 'metz'},{'yes' if i % 2 else 'no'}" for i in range(33)]
    Path("visits.csv").write_text("\n".join(["age,site,outcome", *lines]))
    Path("folds.toml").write_text(
        "dataset = 'visits.csv'\ncolumns = {client = 'site', label = 'outcome'}\nmethod = ['local', 'fedavg']\n"
        "folds = 3\nsteps = 4\nevaluate_every = 2\n"
    )
    result = invoke("run", "folds.toml")
    assert "3-fold cross-validation" in " ".join(result.output.split())
    found = {path.name: json.loads((path / "result.json").read_text()) for path in Path("runs/folds").glob("*-seed?")}
    assert len(found) == 6
    for method in ("local", "fedavg"):
        tested = [found[f"{method}-visits-2-seed{fold}"]["test"]["client_examples"] for fold in range(3)]
        assert numpy.sum(tested, axis=0).tolist() == [22, 11]
    digests = {name[-1]: found[name]["partition_sha256"] for name in found}
    assert len(set(digests.values())) == 3
    assert all(digests[name[-1]] == one["partition_sha256"] for name, one in found.items())
    (report,) = json.loads(invoke("report", "runs/folds", "--json").stdout)["reports"]
    assert [cell["folds"] for cell in report["cells"]] == [3, 3]
    assert all(len(cell["client_accuracy"]) == 2 for cell in report["cells"])
    invoke("report", "runs/folds", "--format", "html")
    page = Path("runs/folds/report/report.html").read_text()
    assert '"holds":{' in page
    assert '"all folds":[[[0,11],[1,11]],[[0,6],[1,5]]]' in page


def test_only_prints_what_it_chose() -> None:
    Path("mine.toml").write_text(MINE.replace("clients = 6", "clients = [4, 6]"))
    chosen = ["--only", "method=fedavg,clients=4", "--set", "steps=5", "--out", "runs"]
    printed = invoke("run", "mine.toml", *chosen).stdout
    assert "fedavg" in printed
    assert "pfedhn-pc" not in printed
    assert "6 clients" not in printed
    everything = invoke("report", "runs", "--format", "md").stdout
    assert "pfedhn-pc" in everything
    assert "6 clients" in everything


def test_another_experiment_in_the_directory_is_refused(finished: Path) -> None:
    arguments = ["--out", str(finished / "runs")]
    sentence = "of it: steps is 40 there and 41 here; give another --out"
    refused(2, sentence, "run", str(finished / "mine.toml"), "--set", "steps=41", *arguments)
    refused(2, "of it: name is mine there and demo here; give another --out", "run", "demo", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", LONG],
        ["run", "demo", "--out", LONG],
        ["run", "demo", "--rates", LONG],
        ["run", "--resume", LONG],
        ["tune", "demo", "--save", LONG],
        ["report", LONG],
        ["data", "show", LONG],
    ],
    ids=lambda arguments: "-".join(arguments[:-1]),
)
def test_what_the_system_refuses_is_said_with_code_1(arguments: list[str]) -> None:
    """Whatever it is: here a name that no file can have."""
    refused(1, "file name too long", *arguments)


def test_a_directory_that_cannot_be_written_is_said_with_code_1() -> None:
    Path("file").write_text("")
    refused(1, "file/runs: not a directory; give a place that can be written", "run", "demo", "--out", "file/runs")


def test_a_file_that_cannot_be_written_is_said_with_its_own_option(finished: Path) -> None:
    Path("file").write_text("")
    sentence = "give a place that can be written (--out for a folder; --export, --save or --plot for a file)"
    refused(1, sentence, "report", str(finished / "runs"), "--export", "file/mine.jsonl")


def test_a_full_disk_is_said_with_code_1_and_the_run_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", "mine.toml", "--only", "method=fedavg", "--jobs", "1", "--checkpoint-every", "5"]
    replace_file = os.replace

    def full(source: Path, target: Path) -> None:
        if "checkpoint-000000020" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        refused(1, "no space left on device; make room, and the same command resumes", *arguments)
    assert checkpoint.checkpoints(Path("runs/mine/fedavg-digits-6-seed0"))
    assert invoke(*arguments).exit_code == 0


@pytest.mark.slow
def test_a_loss_that_diverges_stops_the_run_and_keeps_the_last_good_checkpoint() -> None:
    result = invoke("run", "mine.toml", "--set", "pfedhn-pc.lr=1e3", "--checkpoint-every", "1")
    assert result.exit_code == 1
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    found = re.search(r"pfedhn-pc-digits-6-seed0: training diverged in round (\d+) at client \d+:", error)
    assert found
    last = checkpoint.checkpoints(Path("runs/mine/pfedhn-pc-digits-6-seed0"))[0]
    assert json.loads(last.read_text())["round"] == int(found[1]) > 0
    assert all(numpy.isfinite(value).all() for value in arrays(last))
    assert Path("runs/mine/fedavg-digits-6-seed0/result.json").exists()  # the other run went on


def arrays(record: Path) -> list[Any]:
    with safe_open(record.with_suffix(".safetensors"), framework="np") as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(invoke("--debug", "run", "dmeo").exception, ValueError)
    monkeypatch.setenv("PFEDHN_DEBUG", "1")
    assert isinstance(invoke("run", "dmeo").exception, ValueError)


def test_an_error_of_ours_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "find_experiment", Mock(side_effect=KeyError("oops")))
    refused(1, "KeyError: 'oops' (an error inside pfedhn; `pfedhn --debug ...` shows where).", "run", "demo")


def test_an_error_of_a_persons_own_code_says_where() -> None:
    Path("mine.py").write_text(
        "import sys\ndef clinics(clients, seed):\n    return 1 / 0\ndef leaves(clients, seed):\n    sys.exit(3)\n"
    )
    Path("leaves.py").write_text("import sys\nsys.exit(3)\n")
    for data, sentence in (
        ("mine.py:clinics", "ZeroDivisionError: division by zero (MINE, line 3; `pfedhn --debug ...` shows the way"),
        ("mine.py:leaves", "SystemExit: 3 (MINE, line 5; `pfedhn --debug ...` shows the way there)."),
        ("leaves.py:clinics", "leaves.py cannot be run (SystemExit: 3)."),
    ):
        Path("own.toml").write_text(f'dataset = "{data}"\n')
        refused(2, sentence.replace("MINE", str(Path("mine.py").resolve())), "run", "own.toml")


# Stopping and killing, in real processes


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "pfedhn", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives one
    )


def wait_for(runs: list[Path], num_records: int) -> None:
    """Until each run has begun, and together they have so many records."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        counts = [
            len(path.read_text().splitlines()) if path.exists() else 0 for path in (r / "metrics.jsonl" for r in runs)
        ]
        if min(counts) >= 1 and sum(counts) >= num_records:
            return
        time.sleep(0.005)
    raise AssertionError("the runs did not begin")


@pytest.mark.slow
def test_kill_9_at_any_moment_then_resume_gives_the_same_bits(finished: Path) -> None:
    for attempt in range(10):  # a busy machine may look away until the runs have ended
        out = Path(f"killed-{attempt}")
        runs = [out / f"{method}-digits-6-seed0" for method in METHODS]
        process = start(
            "run", "mine.toml", "--out", str(out), "--checkpoint-every", "7", "--jobs", "2", "--threads", "1"
        )
        wait_for(runs, random.randint(2, 8))
        time.sleep(random.uniform(0, 0.05))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not all((run / "result.json").exists() for run in runs):
            break
    else:
        raise AssertionError("too late to be a test")
    assert process.returncode == -signal.SIGKILL
    result = invoke("run", "--resume", str(out))
    assert result.exit_code == 0, result.output
    for run in runs:
        assert scores(run) == scores(finished / "runs" / run.name)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_ends_with_130(finished: Path) -> None:
    runs = [Path("stopped") / f"{method}-digits-6-seed0" for method in METHODS]
    forever = ["--set", "steps=200000"]
    process = start("run", "mine.toml", "--out", "stopped", "--jobs", "2", "--threads", "1", *forever)
    wait_for(runs, 2)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the parent and every worker
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "stopped; `pfedhn run --resume stopped` continues." in errors
    assert "Traceback" not in errors + output
    for run in runs:  # written at the moment of stopping: by itself there would be one a minute
        records = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert json.loads(checkpoint.checkpoints(run)[0].read_text())["step"] >= max(records)


@pytest.mark.slow
def test_a_person_with_data_joins_a_run(tmp_path: Path) -> None:
    """Whole numbers are pixels and go through what the run's went through; text labels name the run's classes."""
    from sklearn.datasets import load_digits

    run = ["run", "demo", "--only", "method=pfedhn-plus", "--seeds", "0", "--set", "steps=4", "--set", "local_steps=2"]
    assert invoke(*run, "--out", "runs").exit_code == 0
    digits = load_digits()
    (tmp_path / "mine").mkdir()
    numpy.save("mine/x.npy", digits.data[:60].astype("uint8"))
    numpy.save("mine/y.npy", digits.target[:60])
    result = invoke("add-client", "runs", "--data", "mine", "--rounds", "2", "--out", "mine.safetensors")
    assert result.exit_code == 0, result.output
    assert "Held-out accuracy: " in result.output
    assert "on 9 of 60 examples" in " ".join(result.output.split())
    assert re.search(r"It joined with embedding_lr = [\d.]+, the best on validation of 5 settings", result.output)
    with safe_open("mine.safetensors", "np") as file:
        assert file.get_tensor("layers.0.weight").shape == (32, 64)
    numpy.save("mine/x.npy", digits.data[:60] / 16)  # as the run has them
    again = invoke("add-client", "runs", "--data", "mine", "--rounds", "2")
    assert again.output.split("%")[0] == result.output.split("%")[0]
    given = invoke("add-client", "runs", "--data", "mine", "--rounds", "2", "--set", "embedding_lr=0.5")
    assert given.exit_code == 0, given.output
    assert "It joined with" not in given.output
    refused = invoke("add-client", "runs", "--data", "mine", "--set", "hidden_dim=3")
    assert refused.exit_code == 2
    assert "hidden_dim cannot change while a client joins" in " ".join(refused.output.split())
    numpy.save("mine/y.npy", numpy.array(["seven"] * 60))
    wrong = invoke("add-client", "runs", "--data", "mine")
    assert wrong.exit_code == 2
    assert "the label 'seven', which the run does not know" in " ".join(wrong.output.split())
