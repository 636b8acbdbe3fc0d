"""Runs on a Ray cluster of two workers: the same bits, whatever becomes of a worker or of the head."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clusters import cluster_of, killing
from support import SMALL, run_many, scores

import pfedhn
from pfedhn.errors import UserError
from pfedhn.experiments.directory import Directory, Options
from pfedhn.experiments.grid import with_assignments
from pfedhn.experiments.preflight import survey
from pfedhn.experiments.queue import Outcome
from pfedhn.experiments.spec import Experiment, RunSpec
from pfedhn.experiments.tasks import MAX_LOSSES, Cluster, connected
from pfedhn.runs.progress import Event, RunFailed, RunFinished, Said, Update
from pfedhn.system.files import LOCK

pytestmark = pytest.mark.filterwarnings(  # Ray leaves files open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

ONE_THREAD = Options(threads=1, checkpoint_every=40)
IN_TURN = replace(ONE_THREAD, executor="loop")  # which calls a network as it is written, every time
LONG = with_assignments(SMALL, {"pfedhn.steps": 600, "evaluate_every": 50})

WITH_LG = replace(
    SMALL,
    cells=(
        replace(SMALL.cells[0], method="lg-fedavg", steps=10, pretrain="fedavg"),
        *SMALL.cells,
        replace(SMALL.cells[1], method="pfedhn-pc", settings={"local_lr": 1e30}),
    ),
    seeds=(0,),
)


@pytest.mark.parametrize("on", ["slurm", "ray:", "rays", ":"])
def test_a_place_that_is_none_is_refused(on: str) -> None:
    with pytest.raises(UserError, match="there is no cluster "), connected(on):
        pass


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UserError, match=re.escape("running on a cluster needs Ray: pip install 'pfedhn[ray]'.")),
        connected("ray"),
    ):
        pass


def test_this_machine_alone_needs_no_cluster() -> None:
    with connected(None) as cluster:
        assert cluster is None


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with cluster_of() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def cluster(nodes: Any) -> Iterator[Cluster]:
    with connected(f"ray:{nodes.address}") as cluster:
        assert cluster is not None
        yield cluster


def run_there(
    path: Path,
    experiment: Experiment,
    runs: list[RunSpec],
    cluster: Cluster,
    listen: Any = lambda event: None,
    options: Options = ONE_THREAD,
) -> Outcome:
    Directory(path).open(experiment, runs, options)
    return run_many(path, experiment, runs, options=options, listen=listen, cluster=cluster)


@pytest.mark.slow
def test_a_cluster_gives_the_bits_of_one_machine(tmp_path: Path, cluster: Cluster) -> None:
    runs = [run for run in WITH_LG.runs() if run.cell.method != "fedavg"]  # it comes by itself
    heard: list[Event] = []
    there = run_there(tmp_path / "there", WITH_LG, runs, cluster, heard.append)
    here = run_many(tmp_path / "here", WITH_LG, runs, jobs=1, options=ONE_THREAD)
    assert set(there.results) == set(here.results)
    assert set(there.results) == {f"{name}-digits-6-seed0" for name in ("fedavg", "lg-fedavg", "pfedhn")}
    for name in here.results:
        assert scores(tmp_path / "there", name) == scores(tmp_path / "here", name)
    assert there.failures == here.failures
    assert [failure.has_diverged for failure in there.failures.values()] == [True]
    files = [sorted(file.name for file in (tmp_path / place).glob("*/*")) for place in ("there", "here")]
    assert files[0] == files[1]
    assert {event.run for event in heard if isinstance(event, RunFinished)} == set(there.results)
    assert {event.run for event in heard if isinstance(event, RunFailed)} == set(there.failures)
    assert any(isinstance(event, Update) and event.score.startswith("validation ") for event in heard)


def held_runs(folder: Path, *, since: str) -> Experiment:
    """Runs that do not get past a moment while there is a file `hold`, so that they cannot end before they are killed.

    Args:
        folder: For the code of their network, and for `hold`.
        since: The file that tells the moment, among those of a run in `folder / "there"`.
    """
    (folder / "hold").touch()
    code = folder / "held.py"
    code.write_text(
        "import os, pathlib, time, pfedhn\n"
        "HERE = pathlib.Path(__file__).parent\n"
        "def is_held():\n"
        "    opened = {pathlib.Path(os.path.realpath(one)) for one in pathlib.Path('/proc/self/fd').iterdir()}\n"
        f"    is_made = opened.intersection(HERE.glob('there/*/{LOCK}'))  # else a run is only being made\n"
        f"    return is_made and (HERE / 'hold').exists() and any(HERE.glob('there/*/{since}'))\n"
        "class Held(pfedhn.MLP):\n"
        "    def __init__(self): super().__init__(64, 4, 10)\n"
        "    def forward(self, x):\n"
        "        begun = time.monotonic()\n"
        "        while is_held():\n"
        "            assert time.monotonic() - begun < 120, 'nobody killed it'\n"
        "            time.sleep(0.01)\n"
        "        return super().forward(x)\n"
    )
    cells = tuple(replace(cell, model=f"{code}:Held") for cell in SMALL.cells)
    return with_assignments(replace(SMALL, cells=cells), {"pfedhn.steps": 200, "evaluate_every": 50})


@pytest.mark.slow
def test_the_run_of_a_killed_worker_goes_on_from_its_checkpoint(tmp_path: Path, cluster: Cluster) -> None:
    held = held_runs(tmp_path, since="checkpoint-*40.json")
    run = held.find("pfedhn-digits-6-seed0")
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Said):
            (tmp_path / "hold").unlink(missing_ok=True)

    with killing(tmp_path / "there" / run.name, since="checkpoint-*40.json", hold=tmp_path / "hold"):
        outcome = run_there(tmp_path / "there", held, [run], cluster, listen, IN_TURN)
    assert set(outcome.results) == {run.name}
    (said,) = (event for event in heard if isinstance(event, Said))
    assert said.sentence == "its worker was lost; it continues elsewhere from its last checkpoint."
    afterwards = [event.step for event in heard[heard.index(said) :] if isinstance(event, Update)]
    assert afterwards[1] >= 40, "it went on from a checkpoint, not from its start"
    run_many(tmp_path / "here", held, [run], jobs=1, options=IN_TURN)
    assert scores(tmp_path / "there", run.name) == scores(tmp_path / "here", run.name)


@pytest.mark.slow
def test_a_run_that_ends_its_workers_fails_in_the_end(tmp_path: Path, cluster: Cluster) -> None:
    held = held_runs(tmp_path, since="spec.toml")
    run = held.find("pfedhn-digits-6-seed1")
    with killing(tmp_path / "there" / run.name, since="spec.toml", hold=tmp_path / "hold"):
        (failure,) = run_there(tmp_path / "there", held, [run], cluster, options=IN_TURN).failures.values()
    assert failure.sentence.startswith(f"its worker was lost {MAX_LOSSES} times before it moved on")
    assert not failure.is_bad_input


@pytest.mark.slow
def test_stopping_leaves_checkpoints_that_another_machine_goes_on_from(tmp_path: Path, cluster: Cluster) -> None:
    runs = [LONG.find(f"pfedhn-digits-6-seed{seed}") for seed in (0, 1, 2)]  # more than there are cores
    pressed: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, Update) and event.step >= 100 and not pressed:
            pressed.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_there(tmp_path / "there", LONG, runs, cluster, listen)
    (stopped,) = pressed
    assert any((tmp_path / "there" / stopped.run).glob("checkpoint-*.json"))
    assert not (tmp_path / "there" / stopped.run / "result.json").exists()
    run_many(tmp_path / "there", LONG, runs[:1], jobs=1, options=ONE_THREAD)
    run_many(tmp_path / "here", LONG, runs[:1], jobs=1, options=ONE_THREAD)
    assert scores(tmp_path / "there", runs[0].name) == scores(tmp_path / "here", runs[0].name)


@pytest.mark.slow
def test_what_no_machine_could_run_is_refused(tmp_path: Path, cluster: Cluster) -> None:
    Directory(tmp_path).open(SMALL, [])
    with pytest.raises(UserError, match="no machine of the Ray cluster has 64 cores, which a run needs"):
        cluster.check(survey(tmp_path, SMALL, SMALL.runs(), Options(threads=64)))
    with pytest.raises(UserError, match=r"no machine of the Ray cluster has 1 cores and 0\.25 of a GPU"):
        cluster.check(survey(tmp_path, SMALL, SMALL.runs(), Options(device="cuda")))


@pytest.mark.slow
def test_a_machine_without_the_data_is_refused(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "import os, numpy, pfedhn\n"
        "def clinics(clients, seed=0):\n"
        "    x = numpy.loadtxt(os.environ['CLINICS'])\n"
        "    return pfedhn.Federation.from_clients([(x, numpy.arange(len(x)) % 2)] * clients)\n"
    )
    (tmp_path / "clinics.txt").write_text("1 2\n" * 12)
    monkeypatch.setenv("CLINICS", str(tmp_path / "clinics.txt"))  # here, and not where the workers were started
    cell = replace(SMALL.cells[0], dataset=f"{code}:clinics", split=(0.7, 0.15, 0.15))
    experiment = replace(SMALL, cells=(cell,))
    with pytest.raises(UserError, match=r"the Ray worker \S+ cannot be used: .*CLINICS"):
        run_there(tmp_path / "runs", experiment, experiment.runs()[:1], cluster)


@pytest.mark.slow
def test_a_machine_with_another_version_is_refused(tmp_path: Path) -> None:
    source = Path(pfedhn.__file__).parent
    shutil.copytree(source, tmp_path / "other" / "pfedhn", ignore=shutil.ignore_patterns("__pycache__"))
    init = tmp_path / "other" / "pfedhn" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{pfedhn.__version__}"', '"9.9.9"'))
    refusal = run_command(
        tmp_path, "run", "demo", "--only", "method=local", "--seeds", "0", "--out", str(tmp_path / "runs"),
        env_vars={"PYTHONPATH": str(tmp_path / "other")},
    )  # fmt: skip
    assert re.search(r"error: the Ray worker \S+ cannot be used: it has pfedhn 9\.9\.9, and the machine that", refusal)


def run_command(folder: Path, *words: str, **second: Any) -> str:
    """What `pfedhn` says on a cluster whose second node is started otherwise; in a process, which starts clean."""
    with cluster_of(**second) as nodes:
        done = subprocess.run(
            [sys.executable, "-m", "pfedhn", *words, "--on", f"ray:{nodes.address}"],
            cwd=folder, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    return done.stderr


@pytest.mark.slow
def test_after_the_head_was_killed_another_cluster_goes_on(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pfedhn", "run"]
    wanted = ["demo", "--only", "method=pfedhn-plus", "--seeds", "0", "--set", "steps=1500"]
    path = tmp_path / "there"
    with cluster_of() as nodes:
        command = [*words, *wanted, "--out", path, "--on", f"ray:{nodes.address}", "--checkpoint-every", "50"]
        begun = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not list(path.glob("*/checkpoint-*.json")) and begun.poll() is None:
            time.sleep(0.1)
        for started in [one for kind in nodes.head_node.all_processes.values() for one in kind]:
            started.process.kill()
        _, said = begun.communicate(timeout=900)
        assert begun.returncode == 1, said
        assert "does not answer any more" in said
        assert not list(path.glob("*/result.json"))
    with cluster_of() as nodes:
        subprocess.run([*words, "--resume", path, "--on", f"ray:{nodes.address}"], check=True, timeout=900)
    subprocess.run([*words, *wanted, "--out", tmp_path / "here", "--threads", "1"], check=True, timeout=900)
    name = "pfedhn-plus-digits-50-seed0"
    assert scores(path, name) == scores(tmp_path / "here", name)
