"""Python calls with wrong values: each is refused with a sentence before anything is trained."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from torch import Tensor, nn

import pfedhn
from pfedhn import ALGORITHMS, MLP, Federation, PFedHN, UserError
from pfedhn.combinators import with_settings
from pfedhn.models import cross_entropy
from pfedhn.settings import kinds_of, short_names, values_of

X = numpy.random.default_rng(0).normal(size=(60, 4)).astype(numpy.float32)
Y = numpy.arange(60) % 3
FEDERATION = Federation.from_arrays(X, Y, pfedhn.by_classes(2, 3))
NETWORK = MLP(4, 3)
NUMBERS = itertools.count()


def train(**changes: Any) -> Any:
    arguments = {"method": PFedHN(local_steps=1), "federation": FEDERATION, "model": lambda: MLP(4, 3), "steps": 2}
    return pfedhn.train(**{**arguments, "batch_size": 4, "device": "cpu", "progress": False, **changes})


def unseeded() -> nn.Module:
    module = MLP(4, 3)
    nn.init.constant_(next(module.parameters()), float(next(NUMBERS)))
    return module


def failing() -> nn.Module:
    raise RuntimeError("no such file of weights")


def without_gradient(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs.detach(), y)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": 3}, "method is 3; give a name"),
        ({"method": "pfedn"}, "did you mean 'pfedhn'"),
        ({"federation": (X, Y)}, r"federation is \(array.*; make one"),
        (
            {"federation": "visits.csv"},
            r"read it with pfedhn\.datasets\.read_federation\('visits\.csv', 'CLIENT', 'LABEL'\)",
        ),
        ({"model": {}}, "model names no target network"),
        ({"model": None}, "model is left out, and only a federation of a table has a usual one"),
        ({"model": lambda: NETWORK}, "the same network twice"),
        ({"model": unseeded}, "gives other weights for the same seed"),
        ({"model": failing}, "fails: RuntimeError: no such file of weights"),
        ({"steps": 1.5}, "steps is 1.5; give a whole number of at least 1"),
        ({"steps": True}, "steps is True"),
        ({"steps": 10**30}, "steps is 1000"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"evaluate_every": float("nan")}, "evaluate_every is nan"),
        ({"cohort_size": "all"}, "cohort_size is 'all'"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1"),
        ({"seed": None}, "seed is None"),
        ({"seed": 2**70}, "seed is 118"),
        ({"loss": "cross entropy"}, "the loss is 'cross entropy'; give a function"),
        ({"loss": without_gradient}, "has no gradient, so nothing would learn"),
        ({"metric": lambda outputs, y: outputs}, r"the metric returned the shape \(4, 3\) for 4 examples"),
        ({"metric": lambda outputs, y: 1 / 0}, "the metric fails .*: ZeroDivisionError"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"progress": 1}, "progress is 1; it must be True or False"),
        ({"deterministic": None}, "deterministic is None"),
        ({"directory": 3}, "directory is 3; give a path"),
        ({"device": "tpu9"}, "no device 'tpu9'"),
        ({"executor": "fast"}, "no executor 'fast'"),
        ({"executor": X}, "executor is array"),
        ({"upload": "zip"}, "no transform 'zip'"),
        ({"rounds": 3}, r"train takes no 'rounds'; did you mean 'steps'\? See docs/api\.md for all\.$"),
        ({"method": "pfedhn", "learning_rate": 0.1}, r"give pfedhn\.ALGORITHMS\['pfedhn'\]\(lr=0\.1\)\.$"),
    ],
)
def test_training_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train(**changes)


def settings_out_of_bounds() -> list[tuple[str, str, float]]:
    """Of every method, every number it has: one below what makes sense."""
    found = []
    for method, known in ALGORITHMS.items():
        for name, value in values_of(known()).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.append((method, name, -1 if isinstance(value, int) else -0.5))
    return found


@pytest.mark.parametrize(("method", "name", "value"), settings_out_of_bounds())
def test_no_method_takes_a_negative_number(method: str, name: str, value: float) -> None:
    algorithm: Any = with_settings(ALGORITHMS[method](), {name: value})
    written = short_names(kinds_of(algorithm))[name]
    with pytest.raises(UserError, match=rf"{written} = {value} does not fit; it must be at least [01]\."):
        train(method=algorithm)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"local_steps": 0}, "local_steps = 0 does not fit; it must be at least 1"),
        ({"hidden_dim": 0}, "hidden_dim = 0 does not fit"),
        ({"embedding_dim": 0}, "embedding_dim = 0 does not fit"),
        ({"lr": 1e300}, r"lr = 1e\+300 does not fit; it must be at most 3.4e\+38"),
        ({"lr": "fast"}, "lr = 'fast' does not fit; it must be a number"),
        ({"local_steps": 1.5}, "local_steps = 1.5 does not fit; it must be a whole number"),
        ({"num_hidden": 10**6}, r"num_hidden = 1e\+06 does not fit; it must be at most 1000"),
        ({"averaging": 1.5}, "averaging = 1.5 does not fit; it must be at most 1"),
        ({"momentum": 1.1}, "momentum = 1.1 does not fit; it must be at most 1"),
        pytest.param(
            {"hidden_dim": 10**8},
            "the server's model, with these settings, would need .* GB of memory",
            marks=pytest.mark.slow,
        ),
        ({"local_steps": 10**9}, "the minibatches of a round .* would need .* GB of memory"),
    ],
)
def test_a_method_built_in_python_has_the_bounds_of_the_command_line(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train(method=ALGORITHMS["pfedhn"](**settings))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PFedHN(learning_rate=0.1), r"PFedHN has no argument 'learning_rate'; give server=SGD\(lr=0\.1, "),  # type: ignore[call-arg]
        (lambda: pfedhn.FedAvg(epochs=2), "FedAvg has no argument 'epochs'; did you mean 'local_steps'"),  # type: ignore[call-arg]
        (
            lambda: ALGORITHMS["fedavg"](learning_rate=0.1),
            "FedAvg has no field 'learning_rate'; did you mean 'local_lr'",
        ),
        (lambda: ALGORITHMS["pfedhn"](hidden=9), r"did you mean 'hidden_dim'\? See docs/methods\.md for all\.$"),
        (lambda: ALGORITHMS["pfedhn"](zzz=9), r"has no field 'zzz'; see docs/methods\.md for those there are\.$"),
    ],
)
def test_an_unknown_setting_gets_one_suggestion(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_weights_that_no_seed_changes_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    train(model=lambda: copy.deepcopy(NETWORK))
    assert "gives the same weights for every seed" in caplog.text


def test_what_may_be_none_at_all_may_be_zero() -> None:
    assert train(method=ALGORITHMS["pfedhn"](local_steps=1, num_hidden=0, weight_decay=0)).result is not None
    assert ALGORITHMS["fedbabu"](adaptation_steps=0)


@pytest.fixture(scope="module")
def run() -> pfedhn.Run:
    result: pfedhn.Run = train()
    return result


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda run: run.add_client(X[:1], Y[:1]), r"split = .* of so few examples \(1\) leaves none for validation"),
        (lambda run: run.add_client(X, Y, rounds=-1), "rounds is -1; give a whole number of at least 0"),
        (lambda run: run.add_client(X, Y, rounds=1.5), "rounds is 1.5"),
        (lambda run: run.add_client(X, Y, split=None), "split None must be three fractions"),
        (lambda run: run.add_client(X, Y, seed="a"), "seed is 'a'"),
        (lambda run: run.add_client(X[:, :2], Y), r"does not take examples of shape \(2,\)"),
        (lambda run: run.add_client(X, Y + 100), "has the label 102"),
        (lambda run: run.add_client(X, Y, architecture="other"), "no architecture 'other'"),
        (lambda run: run.add_client(None, None), "client 0: its data"),
        (lambda run: run.personal_model(99), "there is no client 99"),
        (lambda run: run.personal_model(None), "there is no client None"),
        (lambda run: pfedhn.load(3), "3 is no path"),
        (lambda run: pfedhn.load("~nobody-at-all/run"), "leads nowhere"),
        (lambda run: pfedhn.load("nowhere"), "holds no run"),
    ],
)
def test_a_run_refuses(run: pfedhn.Run, call: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call(run)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "is read as a table; say which column names the client and which holds the label"),
        (
            {"path": pandas.DataFrame({"a": [1]})},
            r"a DataFrame is no path; save it with to_csv\('table\.csv', index=False\)",
        ),
        ({"client_column": "clinik", "label_column": "well"}, "has no column 'clinik'; did you mean 'clinic'"),
        ({"client_column": "clinic", "label_column": "clinic"}, "cannot be both the client and the label"),
        (
            {"client_column": "clinic", "label_column": "well", "ignore_columns": "age"},
            "ignore_columns is 'age'; give a l",
        ),
        ({"client_column": "clinic", "label_column": "well", "encode": "onehot"}, "encode is 'onehot'; choose"),
    ],
)
def test_a_table_is_refused(arguments: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "visits.csv").write_text("clinic,age,well\n" + "a,1,0\nb,2,1\n" * 8)
    with pytest.raises(UserError, match=sentence):
        pfedhn.datasets.read_federation(**{"path": tmp_path / "visits.csv", **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"split": None},
        {"split": "abc"},
        {"partition": None},
        {"partition": pfedhn.by_classes},
        {"test": 3},
        {"test": (X, torch.zeros(60))},
        {"x": 3.0},
        {"y": Y / 2},
        {"y": numpy.zeros((60, 2), dtype=int)},
        {"class_names": ["a"]},
        {"class_names": 3},
        {"coarse": Y / 2},
        {"stratify": "yes"},
    ],
)
def test_a_federation_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r".{20}"):
        Federation.from_arrays(**{"x": X, "y": Y, "partition": pfedhn.by_classes(1, 3), **arguments})
