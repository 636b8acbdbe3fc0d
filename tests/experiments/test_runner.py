"""Run directories, the command that repeats a run, and runs side by side."""

import json
import multiprocessing
import os
import shlex
import shutil
import signal
import threading
import tomllib
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import SMALL, mlp, mostly_slow, resealed, run_many, scores
from typer.testing import CliRunner

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.cli.app import app
from pfedhn.data.federation import Federation
from pfedhn.errors import UserError
from pfedhn.experiments import directory as directory_module
from pfedhn.experiments import preflight
from pfedhn.experiments import runner as module
from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.directory import Directory, Options, rerun_command
from pfedhn.experiments.grid import from_table, from_toml, select, with_assignments
from pfedhn.experiments.preflight import Preflight, build_each_cell, survey
from pfedhn.experiments.queue import Queue
from pfedhn.experiments.spec import Experiment, RunSpec, pretraining_run, with_pretraining
from pfedhn.experiments.workers import run_side_by_side
from pfedhn.paper.experiments import DEMO, EXPERIMENTS
from pfedhn.paper.studies import STUDIES
from pfedhn.report.entries import collect
from pfedhn.runs import assemble as assembly
from pfedhn.runs import execute as execution
from pfedhn.runs import train as training
from pfedhn.runs.load import load
from pfedhn.runs.progress import Event, RunFailed, RunFinished, Said, Update
from pfedhn.runs.train import train
from pfedhn.storage import directory as run_directory
from pfedhn.storage import identity as storage_identity
from pfedhn.storage.checkpoint import checkpoints
from pfedhn.storage.files import sealed_text
from pfedhn.storage.schema import to_json

WITH_LG = replace(
    SMALL,
    cells=(
        replace(SMALL.cells[0], method="lg-fedavg", steps=10, pretrain="fedavg"),
        SMALL.cells[0],
    ),
    seeds=(0,),
)


@pytest.fixture(autouse=True, scope="module")
def one_core() -> Iterator[None]:
    """Tests run side by side; and the bits are those of one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory_module, "num_cores", lambda: 1)
        yield


def named(*names: str, experiment: Experiment = SMALL) -> Any:
    """Runs by their names; one alone where one is named."""
    found = [experiment.find(name) for name in names]
    return found if len(found) > 1 else found[0]


# The command in a result


GRID = "method=['pfedhn', 'local']\nclients=[6, 8]\nsteps=[10, 20]\n[methods.pfedhn]\nlr=[0.1, 1e-05]"


NAMED = {**EXPERIMENTS, "ablation-cifar10": STUDIES["ablation-cifar10"].experiment()}


@pytest.mark.parametrize("name", mostly_slow(["grid", *NAMED], "grid", "demo", "ablation-cifar10"))
def test_the_command_in_a_result_selects_that_run_alone(name: str) -> None:
    experiment = NAMED[name] if name in NAMED else from_table(tomllib.loads(GRID), "grid")
    for one in experiment.runs():
        words = shlex.split(rerun_command(experiment, one, Options()))
        assert words[:3] == ["pfedhn", "run", experiment.name]
        given = dict(zip(words[3::2], words[4::2], strict=True))
        assert select(experiment, [given["--only"]], [int(given["--seeds"])]) == [one]


def test_the_command_in_a_result_carries_everything_that_matters() -> None:
    options = Options("my file.toml", ("steps=3", "model=mlp-4"), Path("/data"), "cpu", "loop", 5, threads=3)
    command = rerun_command(SMALL, named("pfedhn-digits-6-seed1"), options)
    assert command == (
        "pfedhn run 'my file.toml' --only method=pfedhn --seeds 1 --set steps=3 --set model=mlp-4 "
        "--device cpu --executor loop --threads 3 --data-dir /data"
    )
    exact = Options("demo", device="cuda", precision="fp32", deterministic=True)
    mixed = Options(assignments=("pfedhn.lr=0.5", "fedavg.local_lr=0.1", "steps=7"))
    assert "--set fedavg.local_lr=0.1 --set steps=7 --device" in rerun_command(SMALL, SMALL.runs()[0], mixed)
    assert rerun_command(DEMO, DEMO.runs()[0], exact).endswith("--device cuda --precision fp32 --deterministic")


# Directories


def test_a_directory_keeps_the_experiment_what_was_asked_for_and_how(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "runs")
    options = Options("small.toml", ("steps=30",), Path("/data"), checkpoint_every=5)
    odd = replace(SMALL.cells[1], settings={"personal": ("last",), "clip": None}, data_seed=3)
    experiment = replace(SMALL, cells=(*SMALL.cells, odd), published={"pfedhn/6": (1.0, 2.0)})
    first, second, *_ = runs = experiment.runs()
    directory.open(experiment, [first], options)
    directory.open(experiment, [second, first], options)
    stored, planned = directory.read()
    assert [one.name for one in planned] == [one.name for one in runs[:2]]
    assert planned[0].cell == SMALL.cells[0]
    assert directory.options() == options
    assert stored.cells[:2] == SMALL.cells
    assert cell_algorithm(stored.cells[2]) == cell_algorithm(odd)
    assert from_toml(directory.path / "experiment.toml") == stored


def test_a_directory_refuses_another_experiment(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    directory.open(SMALL, [])
    directory.refuse_other(SMALL)
    with pytest.raises(UserError, match=r"or other settings of it: steps is .* there and 31 here; give another"):
        directory.open(with_assignments(SMALL, {"steps": 31}), [])
    other_rates = with_assignments(SMALL, {"local_lr": 0.3})
    refusal = (
        r"holds 'small' with other method settings \(local_lr is None there and 0\.3 .*run --resume .* keeps those"
    )
    with pytest.raises(UserError, match=refusal):
        directory.open(other_rates, [])
    with pytest.raises(UserError, match=r"other method settings \(local_steps is .*give another --out"):
        directory.refuse_other(with_assignments(SMALL, {"local_steps": 3}), named=tmp_path.parent)
    with pytest.raises(UserError, match="or other settings of it: steps is 30 there"):
        directory.open(with_assignments(other_rates, {"steps": 31}), [])
    assert directory.read()[0] == SMALL


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and holds no experiment; give another --out"):
        Directory(tmp_path).open(SMALL, [])
    with pytest.raises(UserError, match="holds no experiment to go on with"):
        Directory(tmp_path).read()


@pytest.mark.parametrize("content", ["name = ", "name = 'x'\nplanned = []\n[[cells]]\nstepz = 3", "name = 'x'"])
def test_a_damaged_directory_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "experiment.toml").write_bytes(sealed_text(content))
    with pytest.raises(UserError, match=r"experiment\.toml is damaged"):
        Directory(tmp_path).read()


def test_runs_without_their_experiment_file_continue_by_the_same_command(tmp_path: Path, in_turn: Path) -> None:
    one = SMALL.runs()[0]
    shutil.copytree(in_turn / one.name, tmp_path / one.name)
    with pytest.raises(UserError, match=r"experiment\.toml is missing; repeat the command that started"):
        Directory(tmp_path).read()
    Directory(tmp_path).open(SMALL, [one])
    assert Directory(tmp_path).read() == (SMALL, [one])


@pytest.mark.parametrize("content", ["{", "{}", "null", "\0", "[[[[" * 100_000])
def test_a_damaged_result_is_said_and_written_anew(tmp_path: Path, in_turn: Path, content: str) -> None:
    one = SMALL.runs()[0]
    shutil.copytree(in_turn / one.name, tmp_path / one.name)
    Directory(tmp_path).open(SMALL, [one])
    file = tmp_path / one.name / "result.json"
    before = run_directory.read_result(tmp_path / one.name)
    file.write_text(content)
    with pytest.raises(UserError, match=r"result\.json (is damaged|was changed after it was written); start the run"):
        collect([tmp_path])
    said: list[Event] = []
    outcome = run_many(tmp_path, SMALL, [one], jobs=1, listen=said.append)
    assert before is not None
    found = outcome.results[one.name]
    assert replace(found, seconds=before.seconds, environment=before.environment) == before
    assert any(isinstance(event, Said) and "result.json" in event.sentence for event in said)
    collect([tmp_path])


def test_an_executor_is_read_as_it_was_spelled_before(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    directory.open(SMALL, [], Options(executor="vectorized"))
    file = tmp_path / "experiment.toml"
    resealed(file, lambda text: text.replace('"vectorized"', '"vectorised"'))
    assert directory.options().executor == "vectorized"


def test_a_run_keeps_a_second_process_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "SECONDS_FOR_A_LOCK", 0.0)
    with (
        run_directory.held(tmp_path / "run"),
        pytest.raises(UserError, match="is being run by another process"),
        run_directory.held(tmp_path / "run"),
    ):
        pass
    with run_directory.held(tmp_path / "run"):
        pass


def stopping_at(step: int) -> Callable[[Event], None]:
    """Ctrl-C, once a run has come so far."""
    pressed: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, Update) and event.step >= step and not pressed:
            pressed.append(event)
            signal.raise_signal(signal.SIGINT)

    return listen


def test_a_run_that_has_begun_keeps_its_threads(tmp_path: Path) -> None:
    before, runs = torch.get_num_threads(), SMALL.runs()[:1]
    with pytest.raises(KeyboardInterrupt):
        run_many(tmp_path, SMALL, runs, jobs=1, options=Options(threads=before + 1), listen=stopping_at(10))
    outcome = run_many(tmp_path, SMALL, runs, jobs=1, options=Options(threads=before + 2))
    assert outcome.results[runs[0].name].environment.threads == before + 1
    assert torch.get_num_threads() == before


def test_the_spec_of_a_run_shows_the_settings_that_nobody_gave(in_turn: Path) -> None:
    settings = tomllib.loads((in_turn / "pfedhn-digits-6-seed0" / "spec.toml").read_text())["method"]["settings"]
    assert settings.items() >= {"local_steps": 2, "lr": 0.01, "local_lr": 0.005, "embedding_dim": 2}.items()
    assert settings["embedding_lr"] == "none"


def test_a_run_whose_data_changed_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = SMALL.runs()[:1]
    with pytest.raises(KeyboardInterrupt):
        run_many(tmp_path, SMALL, runs, jobs=1, listen=stopping_at(10))
    monkeypatch.setattr(storage_identity, "partition_digest", lambda federation: "another")
    (failure,) = run_many(tmp_path, SMALL, runs, jobs=1).failures.values()
    assert "holds another run: the clients have other examples in training, validation or test" in failure.sentence
    assert failure.is_bad_input


ON_A_BASE = """
import pathlib

import torch
from torch import nn


class OnABase(nn.Module):
    def __init__(self, num_classes, base):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(pathlib.Path(base).read_text())), requires_grad=False)
        self.out = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.out(x.flatten(1) * self.scale)
"""


def test_the_runs_of_an_experiment_have_one_frozen_base(tmp_path: Path) -> None:
    code, base, path = tmp_path / "networks.py", tmp_path / "base.txt", tmp_path / "runs"
    code.write_text(ON_A_BASE)
    base.write_text("1.0")
    network = {"model": f"{code}:OnABase", "network": {"base": str(base)}}
    small = replace(SMALL, cells=(replace(SMALL.cells[0], steps=2, **network),))
    runs = small.runs()
    Directory(path).open(small, runs, Options())
    assert not run_many(path, small, runs[:1], jobs=1).failures
    base.write_text("2.0")
    (failure,) = run_many(path, small, runs, jobs=1).failures.values()  # changed while the experiment goes on
    assert f"{runs[0].name} was trained on other frozen weights than the network has now" in failure.sentence
    done = CliRunner().invoke(app, ["run", "--resume", str(path), "--jobs", "1"])
    assert done.exit_code == 2
    assert f"{runs[0].name} was trained on other frozen weights" in " ".join(done.stderr.split())
    assert not (path / runs[1].name / "spec.toml").exists()
    base.write_text("1.0")
    assert CliRunner().invoke(app, ["run", "--resume", str(path), "--jobs", "1"]).exit_code == 0


def test_what_lies_in_the_folder_of_another_run_is_not_shown_as_that_run(tmp_path: Path) -> None:
    one, other = runs = [replace(run, cell=replace(run.cell, steps=2)) for run in SMALL.runs()[:2]]
    small = replace(SMALL, cells=(one.cell,))
    Directory(tmp_path).open(small, runs)
    assert not run_many(tmp_path, small, runs, jobs=1).failures
    sound = (tmp_path / one.name / "result.json").read_bytes()
    for file in ("result.json", "metrics.jsonl"):
        shutil.copy(tmp_path / other.name / file, tmp_path / one.name / file)
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path), "--jobs", "1"])  # its own checkpoint mends it
    assert done.exit_code == 0
    assert "1 of 2 runs are finished already" in done.stderr
    assert json.loads(sound)["test"] == json.loads((tmp_path / one.name / "result.json").read_bytes())["test"]

    shutil.rmtree(tmp_path / one.name)
    shutil.copytree(tmp_path / other.name, tmp_path / one.name)
    for words in (["run", "--resume", str(tmp_path)], ["report", str(tmp_path)]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 1
        assert f"holds another run, {other.name}; move or remove that folder" in done.stderr


def test_why_a_run_cannot_be_mended_is_said(tmp_path: Path) -> None:
    one, other = runs = [replace(run, cell=replace(run.cell, steps=2)) for run in SMALL.runs()[:2]]
    small = replace(SMALL, cells=(one.cell,))
    Directory(tmp_path).open(small, runs)
    assert not run_many(tmp_path, small, runs, jobs=1).failures
    for file in (tmp_path / other.name).iterdir():
        if file.name != "spec.toml":
            shutil.copy(file, tmp_path / one.name / file.name)
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path), "--jobs", "1"])
    assert done.exit_code == 1
    assert "No intact checkpoint is left in" in done.stderr
    assert "the same command runs it anew" in done.stderr
    shutil.rmtree(tmp_path / one.name)
    assert CliRunner().invoke(app, ["run", "--resume", str(tmp_path), "--jobs", "1"]).exit_code == 0


def test_going_on_with_another_executor_is_refused_also_where_all_is_finished(tmp_path: Path) -> None:
    """Else the directory keeps an executor that its runs were not made with."""
    (run,) = [replace(run, cell=replace(run.cell, steps=2)) for run in SMALL.runs()[:1]]
    small = replace(SMALL, cells=(run.cell,))
    Directory(tmp_path).open(small, [run], Options())
    assert not run_many(tmp_path, small, [run], jobs=1).failures
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path), "--executor", "loop"])
    assert done.exit_code == 2
    assert "was begun with the executor auto" in done.stderr
    assert Directory(tmp_path).options().executor == "auto"


def test_before_the_first_run_each_cell_is_built_once_and_each_network_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, tried = Mock(wraps=preflight.build_simulation), Mock(wraps=assembly.build_model)
    monkeypatch.setattr(preflight, "build_simulation", built)
    monkeypatch.setattr(assembly, "build_model", tried)
    build_each_cell(SMALL.runs(), Options())
    assert [call.args[0].name for call in built.call_args_list] == ["fedavg-digits-6-seed0", "pfedhn-digits-6-seed0"]
    assert [call.args[0] for call in tried.call_args_list] == ["mlp-4"]


def test_preparing_refuses_a_client_without_examples() -> None:
    crowded = with_assignments(SMALL, {"clients": 900})
    with pytest.raises(ValueError, match="leaves every client without examples; use fewer clients"):
        build_each_cell(select(crowded, [], None), Options())


# Side by side


def test_a_run_waits_for_the_one_it_starts_from() -> None:
    later, earlier = WITH_LG.runs()
    assert (later.name, earlier.name) == ("lg-fedavg-digits-6-seed0", "fedavg-digits-6-seed0")
    assert pretraining_run(WITH_LG, later) == earlier
    assert with_pretraining(WITH_LG, [later]) == [earlier, later]
    assert pretraining_run(SMALL, named("fedavg-digits-6-seed5")) is None


def test_a_run_is_found_by_its_name_with_any_seed() -> None:
    assert SMALL.find("fedavg-digits-6-seed-5") == RunSpec(SMALL.cells[0], -5, "fedavg-digits-6")
    assert SMALL.find("pfedhn-digits-6-seed1") in SMALL.runs()
    for name in ("fedavg-digits-7-seed0", "fedavg-digits-6", "fedavg-digits-6-seed", "fedavg-digits-6-seed01"):
        with pytest.raises(UserError, match=f"has no run '{name}'"):
            SMALL.find(name)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all experiments here, one after the other in this process."""
    path = tmp_path_factory.mktemp("in-turn")
    for experiment in (SMALL, WITH_LG):
        outcome = run_many(path, experiment, experiment.runs(), jobs=1, options=Options(threads=1))
        assert not outcome.failures
    return path


@pytest.mark.slow
def test_side_by_side_gives_the_bits_of_one_after_the_other(tmp_path: Path, in_turn: Path) -> None:
    broken = replace(SMALL.cells[1], method="pfedhn-pc", settings={"local_lr": 1e30})
    experiment = replace(WITH_LG, cells=(*WITH_LG.cells, SMALL.cells[1], broken))
    runs = [one for one in experiment.runs() if one.cell.method != "fedavg"]  # it comes by itself
    heard: list[Event] = []
    outcome = run_many(tmp_path, experiment, runs, jobs=2, listen=heard.append)
    good = {"fedavg-digits-6-seed0", "lg-fedavg-digits-6-seed0", "pfedhn-digits-6-seed0"}
    assert set(outcome.results) == good
    for name in good:
        assert scores(tmp_path, name) == scores(in_turn, name)
    ((name, failure),) = outcome.failures.items()
    assert name == "pfedhn-pc-digits-6-seed0"
    assert failure.sentence.startswith("training diverged in round 0 at client ")
    assert not failure.is_bad_input
    assert {event.run for event in heard if isinstance(event, RunFinished)} == good
    assert {event.run for event in heard if isinstance(event, RunFailed)} == {name}
    assert any(isinstance(event, Update) and event.score.startswith("validation ") for event in heard)
    ends = [event.run for event in heard if isinstance(event, RunFinished)]
    assert ends.index("fedavg-digits-6-seed0") < ends.index("lg-fedavg-digits-6-seed0")
    starts = [e.run for e in heard if isinstance(e, Update) and e.score == "starting"]
    assert starts.count("fedavg-digits-6-seed0") == 1
    again = run_many(tmp_path, experiment, named(*good, experiment=experiment), jobs=2, listen=heard.append)
    assert set(again.results) == good


@pytest.mark.parametrize("averaging", [None, 0.9])
def test_a_run_starts_from_one_that_adapts_before_it_adapts(averaging: float | None, tmp_path: Path) -> None:
    """It is given what the server published after the last round, averaged if the earlier run averages."""
    earlier = replace(WITH_LG.cells[1], settings={"averaging": averaging, "adaptation_steps": 2})
    experiment = replace(WITH_LG, cells=(WITH_LG.cells[0], earlier))
    assert not run_many(tmp_path, experiment, experiment.runs(), jobs=1).failures
    started, before = (load(tmp_path / name) for name in ("lg-fedavg-digits-6-seed0", "fedavg-digits-6-seed0"))
    published = before.plan.exchange.used(before.memories(last=True).shared)
    start = started.plan.initial_models()["mlp-4"]
    assert all(torch.equal(start[name], value) for name, value in published.items())


def test_what_starts_from_a_failed_run_fails_too(tmp_path: Path) -> None:
    broken = replace(WITH_LG, cells=(WITH_LG.cells[0], replace(WITH_LG.cells[1], settings={"local_lr": 1e30})))
    outcome = run_many(tmp_path, broken, broken.runs(), jobs=1)
    assert outcome.failures["lg-fedavg-digits-6-seed0"].sentence == (
        "the run it starts from, fedavg-digits-6-seed0, failed."
    )


@pytest.mark.slow
def test_a_killed_worker_costs_its_run_alone(tmp_path: Path) -> None:
    killed: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Update) and event.run == "pfedhn-digits-6-seed0" and not killed:
            killed.append(event.run)
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGKILL)

    long = with_assignments(SMALL, {"pfedhn.steps": 100_000})
    one = long.find("pfedhn-digits-6-seed0")
    # One worker at a time, so that the process to kill is the one that was heard.
    monkey = Queue(survey(tmp_path, long, [one], Options(threads=1)), listen)
    run_side_by_side(monkey, 1)
    assert killed
    assert monkey.outcome.failures[one.name].sentence == (
        "its process was ended by signal 9, perhaps for want of memory (fewer --jobs need less); "
        "the same command resumes from the last checkpoint."
    )


def test_an_error_of_ours_leaves_its_traceback_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "rounds", Mock(side_effect=TypeError("unsupported operand")))
    outcome = run_many(tmp_path, SMALL, SMALL.runs()[:1], jobs=1)
    log = tmp_path / "fedavg-digits-6-seed0" / "error.txt"
    (failure,) = outcome.failures.values()
    assert failure.sentence == (f"TypeError: unsupported operand (an error inside pfedhn; the details are in {log}).")
    assert "Traceback" in log.read_text()


def test_what_a_run_says_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, *_) = SMALL.runs()
    name, options = one.name, Options(threads=1, checkpoint_every=10)
    with monkeypatch.context() as patch:  # as if it had ended before it could write its result
        patch.setattr(run_directory, "remove_old", lambda folder, num_kept: None)
        run_many(tmp_path, SMALL, [one], jobs=1, options=options)
    (tmp_path / name / "result.json").unlink()
    (tmp_path / name / "checkpoint-000000030.safetensors").write_bytes(b"half")
    heard: list[Event] = []
    outcome = run_many(tmp_path, SMALL, [one], jobs=1, options=options, listen=heard.append)
    assert set(outcome.results) == {name}
    said = [event.sentence for event in heard if isinstance(event, Said)]
    assert said == ["checkpoint-000000030.safetensors is truncated or was changed, and was not used."]
    assert [file.stem for file in checkpoints(tmp_path / name)] == ["checkpoint-000000030"], "large, and of no more use"


@pytest.mark.slow
def test_stopping_the_runs_side_by_side_leaves_checkpoints_to_go_on_from(tmp_path: Path, in_turn: Path) -> None:
    stopped = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, Update) and event.step >= 10 and not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), signal.SIGINT)

    names = ["pfedhn-digits-6-seed0", "pfedhn-digits-6-seed1"]
    with pytest.raises(KeyboardInterrupt):
        run_many(tmp_path, SMALL, named(*names), jobs=2, listen=listen)
    assert stopped.is_set()
    assert any((tmp_path / name).glob("checkpoint-*.json") for name in names)
    assert not multiprocessing.active_children()
    outcome = run_many(tmp_path, SMALL, named(*names), jobs=1, options=Options(threads=1))
    assert not outcome.failures
    for name in names:
        assert scores(tmp_path, name) == scores(in_turn, name)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs share this process and queue their rounds in turns, on a CPU that is called otherwise."""
    monkeypatch.setattr(module, "run_side_by_side", None)
    monkeypatch.setattr(module, "computing_on", lambda *arguments: nullcontext())
    monkeypatch.setattr(module, "_give_memory_back", lambda device: None)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_a_failed_run_holds_is_kept_until_its_rounds_are_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        pass

    held: list[weakref.ref[Memory]] = []
    waited: list[tuple[str, bool]] = []

    def begin(*arguments: Any) -> Iterator[bool]:
        memory = Memory()
        held.append(weakref.ref(memory))
        yield False
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "start", begin)
    monkeypatch.setattr(module, "_wait_for", lambda card: waited.append((card, held[0]() is not None)))
    outcome = run_many(tmp_path, SMALL, SMALL.runs()[:1], options=Options(device="cpu:0", threads=1))
    assert list(outcome.failures) == [SMALL.runs()[0].name]
    assert waited == [("cpu:0", True)]
    assert held[0]() is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.slow
def test_runs_that_take_turns_on_a_device_are_the_runs_alone(tmp_path: Path, in_turn: Path) -> None:
    outcome = run_many(tmp_path, SMALL, SMALL.runs(), options=Options(device="cpu:0", threads=1))
    assert outcome.failures == {}
    for one in SMALL.runs():
        alone = json.loads((in_turn / one.name / "result.json").read_text())
        assert to_json(outcome.results[one.name].test) == alone["test"]
        assert outcome.results[one.name].chosen_step == alone["chosen_step"]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("moment", [0, 10])
def test_stopping_runs_that_take_turns_leaves_a_checkpoint_of_each(tmp_path: Path, moment: int) -> None:
    """Also of those whose turn was before the signal, and where it comes while another run is starting."""
    names = ["pfedhn-digits-6-seed0", "pfedhn-digits-6-seed1"]
    heard: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, Update) and event.run == names[1] and event.step >= moment and not heard:
            heard.append(event)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_many(tmp_path, SMALL, named(*names), options=Options(device="cpu:0", threads=1), listen=listen)
    assert heard
    for name in names:
        assert any((tmp_path / name).glob("checkpoint-*.json"))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.slow
def test_runs_are_spread_over_the_cards_there_are(
    tmp_path: Path, in_turn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names of the CPU stand in for two GPUs."""
    used: list[str] = []
    work = module.start

    def begin(*given: Any) -> Any:
        used.append(given[-1])
        return work(*given)

    monkeypatch.setattr(module, "gpus_of", lambda device: ["cpu:0", "cpu"])
    monkeypatch.setattr(module, "start", begin)
    outcome = run_many(tmp_path, SMALL, SMALL.runs(), options=Options(device="cpu:0", threads=1))
    assert used == ["cpu:0", "cpu"] * 2
    for one in SMALL.runs():
        assert (
            to_json(outcome.results[one.name].test)
            == json.loads((in_turn / one.name / "result.json").read_text())["test"]
        )
        assert "--device cpu:0" in outcome.results[one.name].command, "as it was asked for"


@pytest.mark.parametrize(
    ("device", "count", "cards"),
    [
        ("cuda", 1, ["cuda"]),
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:1", 3, ["cuda:1"]),
        ("cpu", 3, ["cpu"]),
    ],
)
def test_a_card_that_is_named_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, cards: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert module.gpus_of(device) == cards


@pytest.mark.parametrize(("device", "way"), [("cuda", "start"), ("cpu", "run_side_by_side")])
def test_what_others_wait_for_and_what_takes_longest_starts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, way: str, in_turn: Path
) -> None:
    started: list[str] = []
    result = run_directory.read_result(in_turn / "fedavg-digits-6-seed0")

    def begin(ready: Preflight, one: RunSpec, *arguments: Any) -> Any:
        started.append(one.cell.method)
        return iter(finished())

    def finished() -> Iterator[None]:
        return Mock(result=result)
        yield

    def side_by_side(queue: Queue, *arguments: Any) -> None:
        while (one := queue.take()) is not None:
            started.append(one.cell.method)
            assert result is not None
            queue.hear(RunFinished(one.name, result))

    monkeypatch.setattr(module, "computing_on", lambda *arguments: nullcontext())
    monkeypatch.setattr(module, "_wait_for", lambda card: None)
    monkeypatch.setattr(module, "_give_memory_back", lambda device: None)
    monkeypatch.setattr(module, way, begin if way == "start" else side_by_side)
    cells = [*WITH_LG.cells, SMALL.cells[1], replace(SMALL.cells[1], method="pfedhn-pc", steps=40)]
    experiment = replace(WITH_LG, cells=tuple(cells))
    run_many(tmp_path, experiment, experiment.runs(), jobs=2, options=Options(device=device, threads=1))
    assert started == ["fedavg", "pfedhn-pc", "pfedhn", "lg-fedavg"]  # by rounds: 6 and awaited, 40, 30, 2


@pytest.mark.usefixtures("as_on_a_gpu")
def test_none_begins_before_it_is_seen_what_the_last_one_takes(
    tmp_path: Path, in_turn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that waits for the compiler has not taken its memory yet."""
    said: list[str] = []
    result = json.loads((in_turn / SMALL.runs()[0].name / "result.json").read_text())

    def begin(ready: Preflight, one: RunSpec, *arguments: Any) -> Iterator[bool]:
        number = len([word for word in said if word == "begins"])
        said.append("begins")
        if number == 1:
            yield True
            said.append("waits")
            yield True
        said.append("goes on")
        yield False
        return Mock(result=result)

    monkeypatch.setattr(module, "start", begin)
    monkeypatch.setattr(module.Queue, "hear", lambda *arguments: None)
    run_many(tmp_path, SMALL, SMALL.runs()[:3], options=Options(device="cpu:0", threads=1))
    assert said == ["begins", "goes on", "begins", "waits", "goes on", "begins", "goes on"]


@pytest.mark.parametrize(
    ("method", "name"), [("fedavg", "fedavg"), (PFedHN(), "pfedhn"), (ALGORITHMS["per-fedavg"](), "per-fedavg")]
)
def test_the_bar_names_a_method_as_it_is_registered(
    federation: Federation, method: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def watch_run(name: str, *given: object) -> None:
        names.append(name)

    monkeypatch.setattr(training, "watch_run", watch_run)
    train(method, federation, mlp, steps=1)
    assert names == [name]
