"""Ordinary layers that run on the package's blocks."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import CHANNELS, NUM_CLASSES, SIDE, make_federation, simulate
from torch import Tensor, nn
from torch.nn import functional

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.engine.blocks import on_blocks
from pfedhn.kernels.fuse import Fused, fuse
from pfedhn.models import MLP, LeNet, ResNet


class Plain(nn.Module):
    """The paper's LeNet in ordinary layers, in the ways in which people write them, with a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(800, 120), nn.Linear(120, 84), nn.Linear(84, 10)
        self.unused, self.code = nn.Linear(2, 2), nn.Linear(10, 10)  # `code` is also a name of torch.fx

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.conv1(x)))
        x = functional.relu(functional.max_pool2d(self.conv2(x), (2, 2)))
        x = x.view(x.size(0), -1)
        output: Tensor = self.code(self.fc3(self.fc2(torch.relu(self.fc1(x))).relu()))
        return output


class Odd(nn.Module):
    """Layers that look like those of a block and are not; the last has a ReLU, and a pool that is too wide."""

    def __init__(self) -> None:
        super().__init__()
        self.strided, self.grouped = nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(4, 4, 3, groups=2)
        self.bare, self.used_twice = nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.pooled, self.wide = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bare(self.grouped(self.strided(x).relu()).relu()).relu()
        twice = self.used_twice(x)
        x = functional.max_pool2d(self.pooled(twice.relu() + twice), 2)
        return functional.max_pool2d(self.wide(x).relu(), 3)


class WhileTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x).relu()
        return 2 * x if self.training else x


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu() if x.sum() > 0 else x


def code(module: nn.Module) -> str:
    return " ".join(type(module).forward.__code__.co_varnames)


SEQUENCE = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 5))


@pytest.mark.parametrize(
    ("module", "shape", "convolutions", "linears"),
    [
        (Plain(), (3, 32, 32), 2, 4),
        (SEQUENCE, (1, 4, 4), 1, 1),
        (Odd(), (4, 40, 40), 1, 0),
        (ResNet(width=8), (3, 8, 8), 0, 1),
    ],
)
def test_layers_are_replaced_and_give_the_same_numbers(
    module: nn.Module, shape: tuple[int, ...], convolutions: int, linears: int
) -> None:
    fused = fuse(copy.deepcopy(module))
    names = code(fused)
    assert (names.count("conv_block"), names.count("linear_block")) == (convolutions, linears)
    assert list(fused.state_dict()) == list(module.state_dict())
    x = torch.randn(4, *shape)
    results = []
    for network in (module, fused):
        network.zero_grad()
        outputs = network(x)
        outputs.square().sum().backward()
        results.append([outputs, *(value.grad for value in network.parameters() if value.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", [WhileTraining, Asking, LeNet, lambda: MLP(4, 3, 2)])
def test_what_cannot_be_replaced_stays(kind: Any) -> None:
    made = kind()
    before = type(made)
    assert type(fuse(made)) is before
    assert made.training


def test_equal_networks_are_of_one_class() -> None:
    assert type(Fused(Plain)()) is type(Fused(Plain)())
    assert Fused(Plain) == Fused(Plain)


class Counting(nn.Module):
    """Computes something else at every call, which a trace does not show."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(CHANNELS * SIDE * SIDE, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return self.fc(x.flatten(1)).relu() * Counting.calls


def test_a_simulation_has_its_networks_on_blocks_unless_that_changes_what_they_compute() -> None:
    simulation = simulate(FedAvg(), make_federation())
    (model,) = simulation.models.values()
    (fused,) = on_blocks(simulation).models.values()
    assert fused == replace(model, factory=Fused(model.factory))
    assert "linear_block" in code(fused.training_module)
    simulation = replace(simulation, models={model.name: replace(model, factory=Counting)})
    assert on_blocks(simulation).models == simulation.models
