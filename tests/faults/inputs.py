"""Generated inputs: command lines, experiment files, data files and Python calls that a hasty person might give.

Every input is a function of a seed and its number. It ends in one of four ways: it `ran`, it was refused with a
`sentence`, or, which must not be, it was an `internal error` or a `hang`.
"""

import datetime
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import tomli_w
import torch
from faults.table import Row
from typer.testing import CliRunner

import pfedhn
from pfedhn import datasets
from pfedhn.algorithms import ALGORITHMS
from pfedhn.cli.app import app
from pfedhn.cli.endings import LEARNED_NOTHING
from pfedhn.errors import short
from pfedhn.paper.experiments import EXPERIMENTS

SECONDS = 60  # no input is worth more; on a busy machine a run of two rounds takes a tenth of it
RAN, SENTENCE, INTERNAL, HANG = "ran", "sentence", "internal error", "hang"

Outcome = tuple[str, str]
"""How an input ended, and what was said."""


class Hang(BaseException):
    """An input took too long."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_process(words: list[str]) -> Outcome:
    """A command in this process."""
    try:
        with limited(SECONDS):
            result = CliRunner().invoke(app, words, prog_name="pfedhn")
    except Hang:
        return HANG, ""
    if isinstance(result.exception, Hang):
        return HANG, ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return INTERNAL, repr(result.exception)
    return judged(result.exit_code, result.stdout, result.stderr)


def in_subprocess(words: list[str]) -> Outcome:
    """A command as a person types it."""
    command = [sys.executable, "-m", "pfedhn", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return HANG, ""
    return judged(done.returncode, done.stdout, done.stderr)


def judged(code: int, stdout: str, stderr: str) -> Outcome:
    said = stderr.strip()[-600:]
    if (
        code not in (0, 1, 2, LEARNED_NOTHING)
        or "Traceback" in stderr
        or "inside pfedhn" in stderr
        or "\x1b" in stdout + stderr
    ):
        return INTERNAL, f"code {code}: {said}"
    if code in (0, LEARNED_NOTHING):
        return RAN, said
    is_said = any(line.startswith("error: ") and len(line) > 20 for line in stderr.splitlines())
    return (SENTENCE if is_said else INTERNAL), f"code {code}: {said}"


def called(function: Callable[[], Any]) -> Outcome:
    """A call in Python."""
    try:
        with limited(SECONDS):
            function()
    except Hang:
        return HANG, ""
    except pfedhn.UserError as error:
        is_sentence = len(str(error)) > 15 and "\n" not in str(error)
        return (SENTENCE if is_sentence else INTERNAL), str(error)
    except Exception as error:
        return INTERNAL, f"{type(error).__name__}: {error}"[:300]
    return RAN, ""


# What is given

DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
TEXTS = [
    "",
    "none",
    "a",
    "é",
    "\x1b[31mred",
    "x" * 300,
    "~nobody-at-all/x.csv",
    "../..",
    "/",
    "<b>",
    "$\\frac{$",
    "a\nb",
]
NUMBERS = [-1, 0, 1, 2, 10**15, 10**30, -(10**30), 1.5, -0.5, 1e308, float("nan"), float("inf"), True]
TOML_VALUES = [
    *(*TEXTS, *NUMBERS, [], [1, 2], [[]], ["a"], [1.0, "b"], {}, {"a": 1}, {"a": {"b": []}}, DEEP),
    *(datetime.date(1979, 5, 27), datetime.time(7, 32), datetime.datetime(1979, 5, 27, 7, 32)),
]
FIELDS = [
    *(
        "method",
        "dataset",
        "clients",
        "partition",
        "split",
        "folds",
        "personalize",
        "stratify",
        "data_seed",
        "labels",
        "columns",
        "task",
        "model",
    ),
    *("cohort_size", "batch_size", "evaluate_every", "upload", "download", "pretrain", "settings", "seeds", "name"),
    *("title", "published", "methods", "cells", "setps", "partition.rule", "partition.classes_per_client"),
    *("partition.num_clients", "partition.shares", "partition.alpha", "columns.client", "columns.label"),
    *("settings.lr", "settings.local_lr", "settings.local_steps", "settings.hidden_dim", "settings.embedding_dim"),
    *("settings.rule", "settings.personal", "settings.clip", "settings.num_hidden", "settings.momentum"),
]
MODELS = ["lenet", "omniglot", "mlp", "mlp-0", "mlp-999999999", "mlp-4-999999999-999999999", "mlp--3", "resnet"]
DATA = ["digits", "digit", "visits.csv", "clinics", "nowhere.csv", "pipe.csv", "loop.csv", "x" * 300 + ".csv", "."]


def base() -> dict[str, Any]:
    return {
        "method": "pfedhn",
        "clients": 3,
        "partition": {"rule": "by_classes", "classes_per_client": 5},
        "model": "mlp-4",
        "steps": 2,
        "batch_size": 4,
        "evaluate_every": 2,
        "seeds": [0],
        "settings": {"local_steps": 1},
    }


def changed(draw: random.Random, table: dict[str, Any]) -> dict[str, Any]:
    """The table with one to three of its fields made odd."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        name = draw.choice(FIELDS)
        value = draw.choice(TOML_VALUES)
        if name == "model" and draw.random() < 0.5:
            value = draw.choice(MODELS)
        if draw.random() < 0.3:  # of the right kind, but perhaps out of bounds
            value = draw.choice(NUMBERS[:5]) if draw.random() < 0.6 else round(draw.uniform(-1, 2), 2)
        if name == "dataset" and draw.random() < 0.7:
            value = draw.choice(DATA)
        if name == "method" and draw.random() < 0.7:
            value = draw.choice([*ALGORITHMS, ["local", "fedavg"], ["local", 3]])
        head, _, rest = name.partition(".")
        if rest and isinstance(table.get(head, {}), dict):
            table[head] = {**table.get(head, {}), rest: value}
        elif not rest:
            table[name] = value
    if draw.random() < 0.2:
        settings = fields(ALGORITHMS[draw.choice(list(ALGORITHMS))].algorithm)  # type: ignore[arg-type]
        table["settings"] = {draw.choice(settings).name: draw.choice([*NUMBERS, *TEXTS[:3], ["last"], [1], {}])}
    if draw.random() < 0.1:
        table["steps"] = draw.choice([-1, 0, 1.5, "a", [], {}, True, float("nan"), 10**30])
    return table


def garbled(draw: random.Random, content: bytes) -> bytes:
    """Some bytes changed, cut off, doubled or put in."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[place:]
            case 2:
                data[place:place] = data[: draw.randrange(60)]
            case 3:
                data[place:place] = draw.choice(
                    [b"\0", b"\xff\xfe", b"[" * 3000, b'"""', b"\r", b"=", b"{", b"9" * 5000]
                )
            case 4:
                del data[place : place + draw.randrange(40)]
    return bytes(data)


def experiment_file(draw: random.Random, place: Path) -> Outcome:
    file = place / draw.choice(["mine.toml", "mine.toml", "other.toml"])
    content = tomli_w.dumps(changed(draw, base())).encode()
    if draw.random() < 0.15:
        content = garbled(draw, content)
    file.write_bytes(content if draw.random() < 0.98 else b"")
    words = ["run", str(file), "--out", str(place / "out"), "--jobs", "1", "--threads", "1", "--executor", "loop"]
    if b"steps = 2" not in content:  # the default is a real run
        words += ["--set", "steps=2"]
    return in_process(words)


def option_values(place: Path) -> dict[str, list[str]]:
    paths = [
        "nowhere",
        "visits.csv",
        "clinics",
        "pipe.csv",
        "loop.csv",
        "~nobody-at-all",
        "x" * 300,
        "mine.toml",
        "",
        "/",
    ]
    numbers = ["-1", "0", "1", "1.5", "a", "", "9" * 30, "1e9"]
    return {
        "--set": [
            *(f"{name}={value}" for name in (*FIELDS, "pfedhn.lr", "local.lr", "lr", "") for value in TOML_WORDS),
            *("steps", "=", "steps={a=1}", "steps=[1,2]", "=3", "partition.rule=[1]", "a.b.c=1", f"lr={'[' * 3000}"),
        ],
        "--only": ["method=pfedhn", "method=x", "a", "=", "clients=3", ",", "name=", "lr=1", "method=pfedhn,"],
        "--seeds": ["0", "0,1", "a", "", ",", "-1", "9" * 30, "1.5", "0,0"],
        "--out": [str(place / "out"), str(place / "visits.csv"), str(place / "x" / "y"), "/proc/nowhere", "x" * 300],
        "--jobs": ["-1", "0", "1", "a", "1.5"],
        "--rates": [str(place / path) for path in paths],
        "--data-dir": [str(place / path) for path in paths],
        "--device": ["cpu", "auto", "tpu", "cuda:99", "", "meta", "cpu:7"],
        "--executor": ["loop", "fast", "", "captured"],
        "--checkpoint-every": numbers,
        "--threads": ["1", "2", "-1", "0", "a", "100000", "9" * 30],
        "--precision": ["tf32", "fp32", "fp8", ""],
        "--resume": [str(place / path) for path in paths],
        "--format": ["md", "md,csv", "pdf", "", ","],
        "--average": ["clients", "samples", "rows", ""],
        "--export": [str(place / "e.jsonl"), str(place), str(place / "pipe.csv"), "x" * 300],
        "--plot": [str(place / "p.png"), str(place / "p.xyz"), str(place), "", "x" * 300 + ".png"],
        "--seed": ["0", "-1", "a", "9" * 30],
        "--fraction": ["0.5", "0", "-1", "nan", "2", "a"],
        "--finalists": ["1", "0", "-1", "a"],
        "--save": [str(place / "rates.toml"), str(place), "x" * 300],
        "--nonsense": ["1"],
    }


TOML_WORDS = [
    "-1",
    "0",
    "1",
    "1.5",
    "a",
    "",
    "[]",
    "[1,2]",
    "{a=1}",
    "1e308",
    "nan",
    "none",
    "true",
    "1979-05-27",
    "9" * 30,
]
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": (
        *("--set", "--set", "--set", "--only", "--seeds", "--out", "--jobs", "--rates", "--data-dir", "--device"),
        *("--executor", "--checkpoint-every", "--threads", "--precision", "--nonsense"),
    ),
    "tune": ("--set", "--only", "--seeds", "--fraction", "--finalists", "--save", "--device", "--nonsense"),
    "report": ("--out", "--format", "--average", "--export"),
    "data show": ("--set", "--seed", "--plot", "--data-dir"),
    "data get": ("--data-dir",),
}


def command_line(draw: random.Random, place: Path, run: Callable[[list[str]], Outcome] = in_process) -> Outcome:
    """A command with odd options; what is right of it is small."""
    (place / "mine.toml").write_text(tomli_w.dumps(base()))
    command = draw.choice([*COMMANDS, "run", "run", "run", "run", "lst"])
    values = option_values(place)
    files = [
        "mine.toml",
        "visits.csv",
        "clinics",
        "pipe.csv",
        "loop.csv",
        "nowhere.toml",
        "~nobody-at-all/x",
        "x" * 300,
        "",
    ]
    names = [str(place / file) if file not in ("", "~nobody-at-all/x") else file for file in files]
    name = str(place / "mine.toml") if draw.random() < 0.6 else draw.choice(names)
    if command == "run" and draw.random() < 0.1:
        return run(["run", "--resume", draw.choice(values["--resume"])])
    if command == "data get":
        name = draw.choice(["digits", "mnist", "omniglot", "mnits", ""])
    if command == "data show" and draw.random() < 0.5:
        name = draw.choice(["digits", "demo", *EXPERIMENTS][:2])
    words = [*command.split(), *([name] if draw.random() < 0.95 else [])]
    for option in draw.sample(
        COMMANDS.get(command, ("--nonsense",)), k=min(draw.choice([0, 1, 1, 1, 2, 3]), len(COMMANDS.get(command, ())))
    ):
        words += [option, draw.choice(values[option])]
    if command in ("run", "tune") and "--resume" not in words:
        words += [] if "--out" in words else ["--out", str(place / "out")]
        words += [] if "--jobs" in words else ["--jobs", "1"]
    if command == "tune":
        words += ["--only", "method=pfedhn,lr=0"]  # a grid of many points takes long
    if command == "data get" and "--data-dir" not in words:
        words += ["--data-dir", str(place)]
    if command == "report" and "--out" not in words and "--export" not in words:
        words += ["--out", str(place / "report")]
    return run(words)


def command_line_of_its_own(draw: random.Random, place: Path) -> Outcome:
    return command_line(draw, place, in_subprocess)


def table_file(draw: random.Random, place: Path) -> Outcome:
    file = place / draw.choice(["table.csv", "table.tsv", "table.parquet"])
    between = "\t" if file.suffix == ".tsv" else ","
    cells = [
        "1",
        "0.5",
        "",
        "nan",
        "inf",
        "x",
        "é",
        "-3",
        "9" * 400,
        "1e400",
        '"',
        "a,b",
        "\0",
        "007",
        "2**3",
        "x" * 2000,
    ]
    lines = [[draw.choice(["lyon", "paris"]), str(draw.randrange(3)), str(draw.random())] for _ in range(40)]
    for _ in range(draw.randint(0, 2)):
        lines[draw.randrange(40)][draw.randrange(3)] = draw.choice(cells)
    if draw.random() < 0.1:
        lines[draw.randrange(40)].append("1")
    header = draw.choice([["who", "what", "a"]] * 6 + [["who", "what", "what"], ["who", "what"], ["", "", ""], []])
    text = "\n".join(between.join(line) for line in [header, *lines])
    if file.suffix == ".parquet":
        write_parquet(draw, file)
    else:
        file.write_bytes(text.encode(draw.choice(["utf-8"] * 5 + ["utf-16", "latin-1"]), "replace"))
    if draw.random() < 0.3:
        file.write_bytes(garbled(draw, file.read_bytes()))
    if draw.random() < 0.03:
        file.unlink()
        os.mkfifo(file)
    task = draw.choice(["auto", "auto", "classification", "regression"])
    return called(lambda: datasets.read_federation(file, "who", "what", task=task))


def write_parquet(draw: random.Random, file: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {"who": [1, 2] * 20, "what": [0, 1] * 20, "a": [0.5] * 40}
    odd: list[Any] = [
        *([1, None] * 20, [[1.0]] * 40, [{"b": 1}] * 40, ["x"] * 40, [b"\xff"] * 40, [True] * 40, [2**63 - 1] * 40),
        *([datetime.date(2020, 1, 1)] * 40, [datetime.datetime(2020, 1, 1)] * 40, [float("nan")] * 40, [[]] * 40),
    ]
    columns[draw.choice(list(columns))] = draw.choice(odd)
    parquet.write_table(pyarrow.table(columns), file)


def array_files(draw: random.Random, place: Path) -> Outcome:
    shapes = [(20, 4), (20, 4), (20,), (), (0, 4), (20, 1, 4, 4), (3, 4)]
    kinds = [
        "f4",
        "f8",
        "i8",
        "u1",
        "?",
        "c8",
        "U3",
        "S3",
        "M8[s]",
        "m8[s]",
        ">f4",
        "f2",
        "u8",
        [("a", "f4"), ("b", "i4")],
    ]
    root = place / "clients"
    for client in ("one", "two"):
        (root / client).mkdir(parents=True, exist_ok=True)
        x, y = numpy.zeros((20, 4), "f4"), numpy.arange(20) % 2
        if draw.random() < 0.5:
            x = numpy.zeros(draw.choice(shapes), draw.choice(kinds))
        if draw.random() < 0.5:
            y = numpy.zeros(draw.choice([(20,), (20,), (20, 2), (), (0,), (19,)]), draw.choice(kinds))
        for name, array in (("x.npy", x), ("y.npy", y)):
            file = root / client / name
            numpy.save(file, array)
            if draw.random() < 0.15:
                file.write_bytes(garbled(draw, file.read_bytes()))
            if draw.random() < 0.03:
                with zipfile.ZipFile(file, "w") as archive:
                    archive.writestr("x.npy", b"")
            if draw.random() < 0.02:
                file.unlink()
    task = draw.choice(["auto", "auto", "classification", "regression"])
    return called(lambda: datasets.read_federation(root, task=task, stratify=draw.random() < 0.2))


def image(draw: random.Random, form: str | None = None) -> bytes:
    from PIL import Image

    size = draw.choice([(105, 105)] * 8 + [(1, 1), (3000, 3000), (28, 28)])
    stream = io.BytesIO()
    mode = draw.choice(["1", "L", "RGB", "P"])
    Image.new(mode, size).save(stream, form or draw.choice(["PNG"] * 8 + ["BMP", "GIF", "WEBP", "TIFF"]))
    return stream.getvalue()


def archives(draw: random.Random, place: Path) -> Outcome:
    """Omniglot as its author's archives: a few drawings, so that at best it is refused as a part."""
    for name in ("images_background", "images_evaluation"):
        file = place / f"{name}.zip"
        with zipfile.ZipFile(
            file, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
        ) as archive:
            for drawer in range(3):
                member = draw.choice(
                    [f"{name}/Greek/character01/{drawer}.png"] * 5 + ["../../x.png", "é/character01/a.png"]
                )
                content = image(draw) if draw.random() < 0.9 else bytes(draw.choice([0, 10, 5_000_000]))
                archive.writestr(member, garbled(draw, content) if draw.random() < 0.1 else content)
        if draw.random() < 0.5:
            file.write_bytes(garbled(draw, file.read_bytes()))
    return called(lambda: datasets.load("omniglot", place))


def image_tables(draw: random.Random, place: Path) -> Outcome:
    """MNIST as on the Hub, but for what is wrong with it."""
    import pyarrow
    from pyarrow import parquet

    for split in ("train", "test"):
        blobs: list[Any] = [{"bytes": image(draw), "path": None} for _ in range(3)]
        odd: list[Any] = [None, {"bytes": None, "path": None}, {"bytes": b"", "path": None}]
        if draw.random() < 0.3:
            blobs[draw.randrange(3)] = draw.choice(odd)
        labels = draw.choice(
            [[0, 1, 2]] * 4 + [[0, 1, 99], [0, None, 1], ["a", "b", "c"], [0.5, 1.5, 2.5], [[1], [2], [3]]]
        )
        names = draw.choice([("image", "label")] * 5 + [("img", "label"), ("image", "lable")])
        file = place / f"{split}-00000-of-00001.parquet"
        parquet.write_table(pyarrow.table(dict(zip(names, (blobs, labels), strict=True))), file)
        if draw.random() < 0.2:
            file.write_bytes(garbled(draw, file.read_bytes()))
    return called(lambda: datasets.load("mnist", place))


X = numpy.random.default_rng(0).normal(size=(60, 4)).astype(numpy.float32)
Y = numpy.arange(60) % 3
OBJECTS: list[Any] = [
    *(None, -1, 0, 1.5, float("nan"), float("inf"), 10**30, True, "", "a", "~nobody-at-all", "a\0b", b"x", [], {}, ()),
    *(object(), int, lambda: None, lambda *given: given, X, Y, X[:0], X.astype(complex), numpy.array("a"), Y / 2),
    *(
        numpy.int64(3),
        numpy.array(["a", "b"]),
        torch.zeros(3),
        torch.zeros(60, 4, dtype=torch.complex64),
        torch.tensor(2),
    ),
    *(
        [1, 2, 3],
        [[1], [2, 3]],
        {"train": (X, Y)},
        {"train": None},
        {"a": 3},
        (X, Y),
        [(X, Y)],
        [None],
        range(3),
        Path("a"),
    ),
    *(numpy.zeros(60, "M8[s]"), [numpy.nan] * 60, torch.nn.Linear(4, 3), torch.nn.Linear, numpy.ma.masked_all(60)),
]


def lazily(client: int) -> dict[str, Any]:
    return {"train": (X[:5], Y[:5]), "validation": (X[:5], Y[:5])}


class Calls:
    """Every function that a person calls, with arguments that are right; one or two are then made wrong."""

    def __init__(self, place: Path) -> None:
        federation = pfedhn.Federation.from_arrays(X, Y, pfedhn.by_classes(2, 3))
        small = {"method": "pfedhn", "federation": federation, "model": lambda: pfedhn.MLP(4, 3), "steps": 1}
        small |= {"batch_size": 4, "evaluate_every": 1, "executor": "loop", "device": "cpu", "progress": False}
        method = pfedhn.PFedHN(local_steps=1)
        run = pfedhn.train(**{**small, "method": method}, directory=place / "kept")
        self.known: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "train": (
                pfedhn.train,
                small
                | {"method": method, "cohort_size": 1, "seed": 0, "loss": None, "metric": None, "directory": None}
                | {"upload": "full", "download": "full", "precision": "tf32", "checkpoint_every": None},
            ),
            "method": (
                lambda **settings: pfedhn.train(**{**small, "method": pfedhn.ALGORITHMS["pfedhn"](**settings)}),
                {
                    "lr": 0.1,
                    "local_lr": 0.1,
                    "local_steps": 1,
                    "personal": (),
                    "embedding": "trained",
                    "embedding_dim": 3,
                }
                | {"hidden_dim": 5, "num_hidden": 1, "linear": False, "momentum": 0.9, "clip": 50.0, "rule": "mean"},
            ),
            "from_arrays": (
                pfedhn.Federation.from_arrays,
                {
                    "x": X,
                    "y": Y,
                    "partition": pfedhn.by_classes(2, 3),
                    "split": (0.6, 0.2, 0.2),
                    "seed": 0,
                    "test": None,
                }
                | {"groups": None, "coarse": None, "stratify": False, "class_names": None},
            ),
            "by_group": (
                pfedhn.Federation.from_arrays,
                {"x": X, "y": Y, "partition": pfedhn.by_group(), "groups": Y, "stratify": True},
            ),
            "from_clients": (
                pfedhn.Federation.from_clients,
                {
                    "clients": [(X, Y), (X, Y)],
                    "split": (0.6, 0.2, 0.2),
                    "stratify": False,
                    "seed": 0,
                    "class_names": None,
                },
            ),
            "one_client": (
                lambda **given: pfedhn.Federation.from_clients([(X, Y), {"train": (given["x"], given["y"])}]),
                {"x": X, "y": Y},
            ),
            "lazy": (
                pfedhn.Federation.lazy,
                {"num_clients": 3, "load": lazily, "train": 5, "validation": 5, "test": 0, "num_cached": 5},
            ),
            "by_classes": (pfedhn.by_classes, {"classes_per_client": 2, "num_clients": 3, "shares": "paper"}),
            "dirichlet": (
                pfedhn.dirichlet,
                {
                    "alpha": 0.1,
                    "num_clients": 3,
                    "form": "paper",
                    "novel_clients": 1,
                    "novel_alpha": None,
                    "normalize": "apart",
                },
            ),
            "by_coarse_class": (pfedhn.by_coarse_class, {"clients_per_class": 2}),
            "with_descriptors": (federation.with_descriptors, {"descriptors": numpy.zeros((3, 2))}),
            "with_architectures": (federation.with_architectures, {"architectures": ["a", "b", "a"]}),
            "evaluating": (federation.evaluating, {"clients": [0, 1], "seed": 0}),
            "number_of": (federation.number_of, {"client": 1}),
            "add_client": (
                run.add_client,
                {
                    "x": X,
                    "y": Y,
                    "rounds": 1,
                    "split": (0.6, 0.2, 0.2),
                    "architecture": None,
                    "descriptor": None,
                    "settings": {"local_lr": 0.01},
                    "seed": 0,
                },
            ),
            "personal_model": (run.personal_model, {"client": 1, "last": False, "architecture": None, "data": None}),
            "load": (
                pfedhn.load,
                {"directory": place / "kept", "run": None, "model": lambda: pfedhn.MLP(4, 3), "device": "cpu"},
            ),
            "dataset": (datasets.load, {"name": "digits", "data_dir": None}),
            "from_table": (
                datasets.from_table,
                {"path": place / "visits.csv", "client_column": "who", "label_column": "what", "task": "auto"},
            ),
            "from_folders": (datasets.from_folders, {"path": place / "clinics", "task": "auto"}),
        }

    def __call__(self, draw: random.Random, place: Path) -> Outcome:
        function, arguments = self.known[draw.choice(list(self.known))]
        arguments = dict(arguments)
        for name in draw.sample(list(arguments), k=min(draw.choice([1, 1, 2]), len(arguments))):
            arguments[name] = draw.choice(OBJECTS)
            if name == "steps" and isinstance(arguments[name], int) and arguments[name] > 5:
                arguments[name] = 1.5  # a large number is right, and takes long
        status, said = called(lambda: function(**arguments))
        given = ", ".join(f"{key}={short(value)}" for key, value in arguments.items())
        return status, f"{getattr(function, '__name__', function)}({given}): {said}"


def prepare(place: Path) -> None:
    """What the inputs name: a table, a folder of clients, a pipe, a link to itself."""
    lines = "".join(f"{'lyon' if number % 2 else 'paris'},{number % 3},{number / 7}\n" for number in range(60))
    (place / "visits.csv").write_text("who,what,a\n" + lines)
    for client in ("north", "south"):
        (place / "clinics" / client).mkdir(parents=True)
        numpy.save(place / "clinics" / client / "x.npy", X)
        numpy.save(place / "clinics" / client / "y.npy", Y)
    os.mkfifo(place / "pipe.csv")
    (place / "loop.csv").symlink_to(place / "loop.csv")


KINDS: dict[str, Callable[[random.Random, Path], Outcome]] = {
    "command lines": command_line,
    "command lines, a process each": command_line_of_its_own,
    "experiment files": experiment_file,
    "tables": table_file,
    "folders of arrays": array_files,
    "archives of images": archives,
    "tables of images": image_tables,
}
FULL = {
    "command lines": 500,
    "command lines, a process each": 40,
    "experiment files": 500,
    "tables": 250,
    "folders of arrays": 250,
    "archives of images": 150,
    "tables of images": 60,
    "Python calls": 600,
}
"""How many inputs of each kind `make test-faults` tries."""


def try_inputs(tries: dict[str, int], seed: int = 0) -> list[Row]:
    """Generated inputs of every kind named, each in a folder of its own."""
    rows = []
    here = Path.cwd()
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "200"}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what counts is how an input ends
        shared = Path(folder) / "shared"
        shared.mkdir()
        prepare(shared)
        variables["PFEDHN_CACHE"] = str(Path(folder) / "cache")
        before = {name: os.environ.get(name) for name in (*variables, "PFEDHN_DATA_DIR")}
        os.environ.update(variables)
        os.environ.pop("PFEDHN_DATA_DIR", None)
        try:
            kinds = KINDS | ({"Python calls": Calls(shared)} if "Python calls" in tries else {})
            for kind, count in tries.items():
                outcomes: Counter[str] = Counter()
                bad = []
                for number in range(count):
                    place = Path(folder) / f"{kind}-{number}"
                    place.mkdir()
                    prepare(place)
                    os.chdir(place)
                    status, said = kinds[kind](random.Random(f"{seed} {kind} {number}"), place)
                    outcomes[status] += 1
                    if status in (INTERNAL, HANG):
                        bad.append(f"{kind} {number}: {status}: {said}")
                rows.append(Row(kind, count, outcomes, bad))
        finally:
            os.chdir(here)
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
    return rows
