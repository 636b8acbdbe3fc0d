"""Names for tensors and code."""

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfedhn import models
from pfedhn.system import fingerprint

FACTOR = 2.0


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    return helper(outputs - y)


def test_a_tensor_is_named_by_its_values_shape_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(24.0).reshape(2, 3, 2, 2)
    name = fingerprint.of_tensor(x)
    assert name == fingerprint.of_tensor(x.contiguous(memory_format=torch.channels_last))
    others = [x.reshape(3, 2, 2, 2), x.double(), x + 0.5, x[:1], x.flip(0)]
    assert len({name, *map(fingerprint.of_tensor, others)}) == 6
    monkeypatch.setattr(fingerprint, "BYTES_AT_ONCE", 16)
    assert fingerprint.of_tensor(x) != fingerprint.of_tensor(x.flip(0))
    for odd in (torch.tensor(3), torch.empty(0, 4), torch.tensor([True]), torch.zeros(2, dtype=torch.bfloat16)):
        fingerprint.of_tensor(odd)


def test_a_tensor_that_was_said_not_to_change_is_looked_at_once() -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    fingerprint.remember(x)
    before = fingerprint.of_tensor(x), fingerprint.of_tensor(y)
    x[0] = y[0] = 1.0
    assert (fingerprint.of_tensor(x) == before[0], fingerprint.of_tensor(y) == before[1]) == (True, False)


def test_code_is_named_by_what_it_does_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    name = fingerprint.of_code(loss)
    assert name == fingerprint.of_code(loss)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert fingerprint.of_code(loss) != name, "a value that a function it calls refers to"


@pytest.mark.parametrize(
    "values", [({"a": 1}, {"a": 2}), ([1, {"a": 1}], [1, {"a": 2}]), ({1}, {2}), (np.zeros(2), np.ones(2))]
)
def test_what_a_value_holds_counts(values: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for value in (*values, copy.deepcopy(values[0])):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", value)
        names.add(fingerprint.of_code(loss))
    assert len(names) == 2


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def test_closures_defaults_and_arguments_count() -> None:
    things: list[Any] = [scaled(1.0), scaled(2.0), functools.partial(helper, 1), functools.partial(helper, 2)]
    things += [lambda x: x + 1, lambda x: x - 1, models.cross_entropy, models.is_correct, None]
    assert len(set(map(fingerprint.of_code, things))) == len(things)
    assert fingerprint.of_code(scaled(1.0)) == fingerprint.of_code(scaled(1.0))


def test_names_by_different_versions_of_python_say_nothing() -> None:
    name = fingerprint.of_code(loss)
    assert not fingerprint.differ(name, name)
    assert fingerprint.differ(name, name[:-1] + "x")
    assert not fingerprint.differ(name, "python 3.99 " + name.split(" ")[2])
    assert fingerprint.differ("a", "b")
    assert fingerprint.differ(name, "")


class Net(nn.Module):
    def __init__(self, scale: float = 1.0, frozen: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor(scale))
        self.constant = nn.Parameter(torch.tensor(frozen), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - self.scale


def test_a_network_is_named_by_all_that_is_not_trained() -> None:
    names = [fingerprint.of_module(net) for net in (Net(), Net(), Net(2.0), Net(frozen=2.0), Other(), nn.Linear(3, 2))]
    assert names[0] == names[1]
    assert len(set(names)) == 5


@pytest.mark.slow
def test_another_process_gives_the_same_names() -> None:
    code = "from pfedhn.system import fingerprint as f; import test_fingerprint as t; "
    code += "print(f.of_code(t.loss), f.of_module(t.Net()))"
    paths = [entry for entry in sys.path if entry]
    setup = f"import sys; sys.path[:0] = {paths!r}; "
    found = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, check=True).stdout
    assert found.split("\n")[0] == f"{fingerprint.of_code(loss)} {fingerprint.of_module(Net())}"
