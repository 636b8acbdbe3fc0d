"""kill -9 at random moments, and commands that are started at once.

A command that was killed and started again must end with the `same bits` as one that was not, and with nothing left
behind; of runs that were started at once on one folder, `nothing` is `lost`.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
from faults.table import Row, row_of
from support import encoded, write_table

from pfedhn.algorithms import ALGORITHMS
from pfedhn.cli.endings import LEARNED_NOTHING
from pfedhn.experiments.directory import Directory
from pfedhn.report.results import read, read_file

MINE = """
method = {methods}
clients = 6
split = [0.5, 0.25, 0.25]
model = "mlp-4"
steps = 300
batch_size = 8
evaluate_every = 30
seeds = [0]
settings = {{local_steps = 2}}
"""
LG_FEDAVG = """
[methods.lg-fedavg]
pretrain = "fedavg"
"""
WITH_ANY_MNIST = """
from dataclasses import replace
from pfedhn.data.catalogue import DATASETS
DATASETS["mnist"] = replace(DATASETS["mnist"], sha256=None)
from pfedhn.cli import main
main()
"""  # the command line, for which these images may pass for the real ones
SECONDS_TO_START = 2.0  # until a command has imported what it needs
KILLS = 10  # of one command, one after the other
SECONDS = 4.0  # then it is killed within these


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pfedhn", *words]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PFEDHN_CACHE": str(folder / "cache"), "COLUMNS": "200"}


def begin(words: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_within(words: list[str], folder: Path, seconds: float) -> bool:
    """Whether the command, and every process that it started, was still there to be killed."""
    process = begin(words, folder)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=seconds)
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return True


def finished(words: list[str], folder: Path) -> str:
    process = begin(words, folder)
    said, _ = process.communicate(timeout=300)
    if process.returncode not in (0, LEARNED_NOTHING):  # so short a run may learn nothing
        raise AssertionError(f"{shlex.join(words[2:])} ended with {process.returncode}: {said[-300:]}")
    return said


def try_kills(tries: int, seed: int) -> list[Row]:
    """Kill so many commands of every kind."""
    return [killed(kind, max(1, round(tries * share)), seed) for kind, (_, share) in COMMANDS.items()]


def killed(kind: str, tries: int, seed: int) -> Row:
    """Kill so many commands of one kind."""
    make, _ = COMMANDS[kind]
    return row_of(f"kill -9 of {kind}", _killed(make, tries, random.Random(f"{seed} {kind}")))


Case = tuple[list[str], Callable[[], Any]]
"""A command, and what can be seen of it once it has finished."""


def _killed(make: Callable[[Path, random.Random], Case], tries: int, dice: random.Random) -> Iterator[tuple[str, str]]:
    left = tries
    while left:
        with tempfile.TemporaryDirectory() as name:
            expected_folder, folder = Path(name) / "whole", Path(name) / "killed"
            for path in (expected_folder, folder):
                path.mkdir()
            state = dice.getstate()
            words, seen = make(expected_folder, dice)
            began = time.monotonic()
            try:
                finished(words, expected_folder)
                seconds = min(SECONDS_TO_START + SECONDS, time.monotonic() - began)
                expected = seen()
            except Exception as error:  # it does not even work undisturbed
                yield from [("internal error", f"{type(error).__name__}: {error}")] * left
                return
            dice.setstate(state)
            words, seen = make(folder, dice)
            count = 0
            for _ in range(min(left, KILLS)):  # before it may finish
                count += kill_within(words, folder, dice.uniform(0.2 * seconds, 0.9 * seconds))
            try:
                finished(words, folder)
                is_same, rest = seen() == expected, [str(file) for file in folder.rglob("*.part")]
                outcome = "same bits" if is_same and not rest else "other bits" if not is_same else "something left"
                said = f"{shlex.join(words[2:])} {rest}"
            except Exception as error:
                outcome, said = "internal error", f"{type(error).__name__}: {error}"
            left -= min(left, count)
            for _ in range(count):
                yield outcome, said


def _results(folder: Path) -> dict[str, Any]:
    """What runs found."""
    return {
        name: (result.validation, result.test, result.chosen_step, result.bytes_down, result.bytes_up)
        for runs in read(folder)
        for name, result in runs.results.items()
    }


def _last_states(folder: Path) -> dict[str, bytes]:
    """The bits of the last state of every run."""
    return {
        name: sorted((folder / name).glob("checkpoint-*.safetensors"))[-1].read_bytes() for name in _results(folder)
    }


def _run(folder: Path, dice: random.Random) -> Case:
    methods = dice.sample([name for name in ALGORITHMS if name != "lg-fedavg"], 2)
    if dice.random() < 0.3:
        methods = ["fedavg", "lg-fedavg"]
    (folder / "mine.toml").write_text(MINE.format(methods=methods) + (LG_FEDAVG if "lg-fedavg" in methods else ""))
    words = command("run", "mine.toml", "--out", "out", "--jobs", str(dice.choice([1, 2])), "--threads", "1")

    def seen() -> Any:
        return _results(folder / "out"), _last_states(folder / "out")

    return [*words, "--checkpoint-every", "20"], seen


def _tune(folder: Path, dice: random.Random) -> Case:
    (folder / "mine.toml").write_text(MINE.format(methods=["fedavg"]))
    words = command("tune", "mine.toml", "--out", "out", "--jobs", "1", "--finalists", "2")

    def seen() -> Any:  # no state of a point is kept
        return (folder / "mine.rates.toml").read_bytes(), _results(folder / "out" / "finals")

    return words, seen


def _export(folder: Path, dice: random.Random) -> Case:
    (folder / "mine.toml").write_text(MINE.format(methods=["fedavg", "local"]).replace("300", "12"))
    finished(command("run", "mine.toml", "--out", "out", "--jobs", "1", "--threads", "1"), folder)

    def seen() -> Any:
        return [
            (runs.results.keys(), [r.test for r in runs.results.values()]) for runs in read_file(folder / "all.jsonl")
        ]

    return command("report", "out", "--export", "all.jsonl"), seen


def _data(folder: Path, dice: random.Random) -> Case:
    """A whole MNIST, of few different images."""
    generator = numpy.random.default_rng(0)
    images = [encoded(generator.integers(0, 256, (28, 28), dtype=numpy.uint8)) for _ in range(50)]
    for split, count in (("train", 60_000), ("test", 10_000)):
        labels = [number % 10 for number in range(count)]
        file = folder / "data" / "mnist" / "mnist" / f"{split}-00000-of-00001.parquet"
        write_table(file, {"image": [images[number % 50] for number in range(count)], "label": labels})

    def seen() -> Any:
        return {file.name: file.read_bytes() for file in (folder / "cache").glob("mnist.safetensors")}

    return [sys.executable, "-c", WITH_ANY_MNIST, "data", "get", "mnist", "--data-dir", "data"], seen


COMMANDS: dict[str, tuple[Callable[[Path, random.Random], Case], float]] = {
    "run": (_run, 0.6),
    "tune": (_tune, 0.15),
    "export": (_export, 0.15),
    "data get": (_data, 0.1),
}
"""What is killed, and its share of the tries."""


def try_starts(tries: int, seed: int) -> list[Row]:
    """Start so many commands, five at once: four with seeds of their own, and one with the seed of the first."""
    endings = []
    for _ in range(max(1, tries // 5)):
        with tempfile.TemporaryDirectory() as name:
            endings += _started(Path(name), random.Random(f"{seed} {name}"))
    return [row_of("commands started at once on one folder", endings)]


def _started(folder: Path, dice: random.Random) -> list[tuple[str, str]]:
    (folder / "mine.toml").write_text(MINE.format(methods=["fedavg"]).replace("300", "60"))
    seeds = ["0", "1", "2", "3", "0"]
    options = ["--out", "out", "--jobs", "1", "--threads", "1"]
    processes = [begin(command("run", "mine.toml", "--seeds", seed, *options), folder) for seed in seeds]
    said = [process.communicate(timeout=300)[0] for process in processes]
    names = {f"fedavg-digits-6-seed{seed}" for seed in seeds}
    planned = {run.name for run in Directory(folder / "out").read()[1]}
    results = {name for runs in read(folder / "out") for name in runs.results}
    endings = []
    for seed, process, text in zip(seeds, processes, said, strict=True):
        name = f"fedavg-digits-6-seed{seed}"
        is_refused = process.returncode == 2 and "is being run by another process" in text
        if "inside pfedhn" in text or not (process.returncode == 0 or is_refused):
            endings.append(("internal error", text[-300:]))
        elif name not in planned or name not in results or planned != names:
            endings.append(("something lost", f"{sorted(names - planned)} of the plan, {sorted(names - results)}"))
        else:
            endings.append(("nothing lost", ""))
    return endings
