"""Damaged files: every file of a run and of results, spoiled in every way, under every command that reads it.

A try is a function of a seed and its number. It ends in one of these ways: the outcome is the `same` as without the
damage, it was `refused` with a sentence, it was `mended`, or, which must not be, it was a `silent difference` or an
`internal error`.
"""

import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from faults.table import Row, row_of
from support import SMALL, run_many
from typer.testing import CliRunner

import pfedhn
from pfedhn.cli.app import app
from pfedhn.cli.endings import LEARNED_NOTHING
from pfedhn.errors import UserError
from pfedhn.experiments.directory import Directory, Options
from pfedhn.experiments.execute import start
from pfedhn.experiments.preflight import survey
from pfedhn.report.results import export, read
from pfedhn.runs.execute import drain
from pfedhn.storage.schema import to_json

EXPERIMENT = replace(
    SMALL,
    cells=(
        *(replace(cell, steps=12, evaluate_every=4) for cell in SMALL.cells),
        replace(SMALL.cells[0], method="lg-fedavg", steps=4, evaluate_every=2, pretrain="fedavg"),
    ),
    seeds=(0,),
)
UNFINISHED = "pfedhn-digits-6-seed0"
OPTIONS = Options(threads=1, checkpoint_every=2)

Damage = Callable[[bytes, random.Random, bytes], bytes]


def flipped(content: bytes, dice: random.Random, other: bytes) -> bytes:
    place = dice.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << dice.randrange(8))]) + content[place + 1 :]


def zeroed(content: bytes, dice: random.Random, other: bytes) -> bytes:
    start = dice.randrange(len(content))
    length = min(dice.choice([1, 16, 512, 4096]), len(content) - start)
    return content[:start] + b"\0" * length + content[start + length :]


def line_lost(content: bytes, dice: random.Random, other: bytes) -> bytes:
    lines = content.split(b"\n")
    del lines[dice.randrange(len(lines))]
    return b"\n".join(lines)


DAMAGES: dict[str, Damage] = {
    "cut": lambda content, dice, other: content[: dice.randrange(len(content))],
    "zeroed": zeroed,
    "flipped": flipped,
    "a line lost": line_lost,
    "{}": lambda content, dice, other: dice.choice([b"{}", b"null", b"[]", b"{}\n", b"\xff\xfe"]),
    "another's": lambda content, dice, other: other,
}


class Base:
    """A sound experiment: two finished runs, one that was stopped, and an exported file; and what they say."""

    def __init__(self, folder: Path) -> None:
        self.path, self.whole, self.results = folder / "runs", folder / "whole", folder / "small.jsonl"
        for path, names in ((self.whole, None), (self.path, UNFINISHED)):
            runs = [run for run in EXPERIMENT.runs() if run.name != names]
            Directory(path).open(EXPERIMENT, EXPERIMENT.runs(), OPTIONS)
            assert not run_many(path, EXPERIMENT, runs, jobs=1, options=OPTIONS).failures
        stop, told = threading.Event(), []

        def listen(event: Any) -> None:
            told.append(event)
            if getattr(event, "step", 0) >= 8:
                stop.set()

        run = EXPERIMENT.find(UNFINISHED)
        with suppress(KeyboardInterrupt):
            drain(start(survey(self.path, EXPERIMENT, [run], OPTIONS), run, listen, stop))
        assert not (self.path / UNFINISHED / "result.json").exists()
        export([self.whole], self.results)
        self.files = [
            *sorted(file for file in self.path.rglob("*") if file.is_file() and file.name != ".lock"),
            self.results,
        ]
        self.known = values_of(self.path)
        self.exported = values_of(self.results)
        self.found = {run.name: found(self.whole / run.name) for run in EXPERIMENT.runs()}


def values_of(path: Path) -> Any:
    """Everything that a report of a directory or file is made of."""
    return [
        (
            to_json(runs.experiment),
            sorted(run.name for run in runs.planned),
            {name: to_json(result) for name, result in runs.results.items()},
            {name: to_json(curve) for name, curve in runs.curves.items()},
        )
        for runs in read(path)
    ]


def found(folder: Path) -> Any:
    """What a finished run found, to the bit."""
    (result,) = (runs.results[name] for runs in read(folder) for name in runs.results)
    kept = (result.validation, result.test, result.chosen_step, result.steps, result.bytes_down, result.bytes_up)
    return kept, sorted(folder.glob("checkpoint-*.safetensors"))[-1].read_bytes()


def is_same_run(folder: Path, expected: Any) -> bool:
    """Whether a run found what it should, and its last state is that or cannot be loaded."""
    mine = found(folder)
    if mine[0] != expected[0]:
        return False
    try:
        pfedhn.load(folder)
    except UserError:  # a finished run is not made again for the sake of its state
        return True
    return bool(mine[1] == expected[1])


def try_damage(tries: int, seed: int) -> list[Row]:
    """Spoil so many files; a row for each command."""
    with tempfile.TemporaryDirectory() as name:
        base = Base(Path(name))
        endings: dict[str, list[tuple[str, str]]] = {}
        for number in range(tries):
            command, ending = _one(base, Path(name) / "copy", random.Random(f"{seed} {number}"))
            endings.setdefault(command, []).append(ending)
        return [row_of(f"damaged files, {command}", pairs) for command, pairs in sorted(endings.items())]


def _one(base: Base, copy: Path, dice: random.Random) -> tuple[str, tuple[str, str]]:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(base.path, copy / "runs")
    shutil.copy(base.results, copy)
    kinds = sorted({_kind(file) for file in base.files})
    kind = dice.choice(kinds)
    file = dice.choice([file for file in base.files if _kind(file) == kind])
    others = [other for other in base.files if _kind(other) == kind and other != file] or base.files
    how = dice.choice(list(DAMAGES))
    target = copy / file.relative_to(base.path.parent)
    target.write_bytes(DAMAGES[how](file.read_bytes(), dice, dice.choice(others).read_bytes()))
    command = "report" if file == base.results else dice.choice(["report", "export", "resume"])
    said = f"{file.relative_to(base.path.parent)} {how}"
    outcome, sentence = _judged(base, copy, command, file == base.results)
    return command, (outcome, f"{said}: {sentence}")


def _kind(file: Path) -> str:
    return "checkpoint" + file.suffix if file.name.startswith("checkpoint") else file.name


def _judged(base: Base, copy: Path, command: str, is_file: bool) -> tuple[str, str]:
    path = copy / ("small.jsonl" if is_file else "runs")
    words = {
        "report": ["report", str(path), "--format", "csv", "--out", str(copy / "report")],
        "export": ["report", str(path), "--export", str(copy / "fresh.jsonl")],
        "resume": ["run", "--resume", str(path), "--jobs", "1"],
    }[command]
    result = CliRunner().invoke(app, words)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    if (
        result.exit_code not in (0, 1, 2, LEARNED_NOTHING)
        or "inside pfedhn" in result.output
        or "Traceback" in result.output
    ):
        return "internal error", result.output[-300:]
    if result.exit_code not in (0, LEARNED_NOTHING):  # so short a run may learn nothing
        return ("refused", errors[0]) if errors else ("internal error", result.output[-300:])
    try:
        if command == "resume":
            is_same = all(is_same_run(path / run.name, base.found[run.name]) for run in EXPERIMENT.runs())
            return ("mended" if is_same else "silent difference"), result.stderr[-300:]
        if command == "export":
            fresh = values_of(copy / "fresh.jsonl")
            names = [name for name in base.exported[0][2] if name != UNFINISHED]
            is_same = fresh[0][2].keys() == set(names) and all(_alike(fresh, base.known, name) for name in names)
        else:
            is_same = values_of(path) == (base.exported if is_file else base.known)
    except Exception as error:
        return "silent difference", f"shown, though {type(error).__name__}: {error}"
    return ("same" if is_same else "silent difference"), result.output[-300:]


def _alike(fresh: Any, known: Any, name: str) -> bool:
    """A line against the directory that it was made of: equal but for the digits that a line leaves out."""
    one, other = fresh[0][2][name], known[0][2][name]
    exact = ("seed", "chosen_step", "steps", "rounds", "bytes_down", "bytes_up", "cell", "digests")
    return all(one[key] == other[key] for key in exact) and one["test"]["clients"] == other["test"]["clients"]
