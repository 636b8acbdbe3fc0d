"""The paper's target networks, by name too; losses and metrics."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from pfedhn.errors import UserError, closest
from pfedhn.kernels.conv import ConvBlock
from pfedhn.kernels.linear import Linear
from pfedhn.model import Factory
from pfedhn.process import check_room

LENET_SIZES = {"lenet": 16, "lenet-s": 8, "lenet-m": 16, "lenet-l": 32}


class LeNet(nn.Module):
    """The paper's CIFAR network: two 5x5 convolutions and three linear layers.

    Args:
        num_classes: Outputs of the last layer.
        num_kernels: Kernels of the first convolution; the second has twice as many. 8, 16 and 32 are the paper's sizes
            S, M and L: 62,958, 121,182 and 256,830 weights for ten classes.
        in_channels: Channels of the images, which are 32 pixels wide and high.
    """

    def __init__(self, num_classes: int = 10, num_kernels: int = 16, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = ConvBlock(in_channels, num_kernels, 5)
        self.conv2 = ConvBlock(num_kernels, 2 * num_kernels, 5)
        self.fc1 = Linear(2 * num_kernels * 5 * 5, 120, relu=True)
        self.fc2 = Linear(120, 84, relu=True)
        self.fc3 = Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv2(self.conv1(x)).flatten(1)
        output: Tensor = self.fc3(self.fc2(self.fc1(features)))
        return output


class OmniglotNet(nn.Module):
    """Omniglot's network: four 3x3 convolutions (16, 32, 64, 128 kernels) and two linear layers.

    Max-pooling follows the first three convolutions; images are 28 pixels wide and high, with one channel.

    Args:
        num_classes: Outputs of the last layer: all characters, or those of the largest alphabet.
    """

    def __init__(self, num_classes: int = 1623) -> None:
        super().__init__()
        self.conv1 = ConvBlock(1, 16, 3, padding=1)
        self.conv2 = ConvBlock(16, 32, 3, padding=1)
        self.conv3 = ConvBlock(32, 64, 3, padding=1)
        self.conv4 = ConvBlock(64, 128, 3, padding=1, pool=False)
        self.fc1 = Linear(1152, 120, relu=True)
        self.fc2 = Linear(120, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv4(self.conv3(self.conv2(self.conv1(x)))).flatten(1)
        output: Tensor = self.fc2(self.fc1(features))
        return output


class MLP(nn.Module):
    """Linear layers with ReLU between them; images are flattened.

    Args:
        sizes: Numbers that go in, units of each hidden layer, outputs: `MLP(64, 32, 10)` has one hidden layer of 32.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        last = len(sizes) - 2
        self.layers = nn.ModuleList(Linear(a, b, relu=n < last) for n, (a, b) in enumerate(pairwise(sizes)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x


class LinearModel(nn.Module):
    """One linear map without a bias: linear regression, or softmax regression for several classes.

    Args:
        num_inputs: Numbers that go in.
        num_outputs: Numbers that come out.
    """

    def __init__(self, num_inputs: int, num_outputs: int = 1) -> None:
        super().__init__()
        self.map = nn.Linear(num_inputs, num_outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.map(x.flatten(1))
        return output


def check_name(name: str) -> None:
    """Refuse what is none of lenet-s, lenet (m), lenet-l, omniglot, linear, or mlp-32-16 for two hidden layers."""
    names = [*LENET_SIZES, "omniglot", "linear"]
    if name not in names and not re.fullmatch(r"mlp(-[1-9][0-9]{0,8})*", name):
        raise UserError(f"there is no target network {name!r}; {closest(name, [*names, 'mlp-32'])}")


def build(name: str, num_classes: int, shape: Sequence[int]) -> nn.Module:
    """A target network by its name, for examples of this shape."""
    check_name(name)
    if name in LENET_SIZES:
        return LeNet(num_classes, LENET_SIZES[name], shape[0] if shape else 1)
    if name == "omniglot":
        return OmniglotNet(num_classes)
    if name == "linear":
        return LinearModel(math.prod(shape), num_classes)
    sizes = [math.prod(shape), *map(int, name.split("-")[1:]), num_classes]
    check_room(4 * sum((a + 1) * b for a, b in pairwise(sizes)), f"the network {name!r}")
    return MLP(*sizes)


@lru_cache
def factory(name: str, num_classes: int, shape: tuple[int, ...]) -> Factory:
    """What makes the network; the same object for the same network, so that equal runs share what is compiled."""
    return partial(build, name, num_classes, shape)


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, y, reduction="none")


def is_correct(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.argmax(-1) == y


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each example, over however many numbers it predicts."""
    return ((outputs.reshape(y.shape) - y) ** 2).reshape(len(y), -1).mean(-1)
