"""Target networks: the paper's, a ResNet, and those that a person's own code makes; losses and metrics."""

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedhn import keys
from pfedhn.errors import UserError, closest
from pfedhn.kernels.conv import ConvBlock
from pfedhn.kernels.linear import Linear
from pfedhn.model import Factory
from pfedhn.statistics import MAX_DEVIATIONS
from pfedhn.system.process import check_memory
from pfedhn.system.reference import find_code

LENET_SIZES = {"lenet": 16, "lenet-s": 8, "lenet-m": 16, "lenet-l": 32}
IMAGE_SIDES = {**dict.fromkeys(LENET_SIZES, 32), "omniglot": 28}  # of networks that take images of one size alone
RESNETS: dict[str, Literal["batch", "group"]] = {"resnet18": "batch", "resnet18-gn": "group"}


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


class TabularMLP(MLP):
    """An MLP for the columns of a table, as they are: each is first scaled by its mean and standard deviation.

    These are running statistics of the client's own minibatches (`nn.BatchNorm1d`), so that they stay with the client
    and go along with its model: raw rows go in, in training, prediction and export alike. A column in which a client's
    training rows are all alike is only centered, and no scaled value is more than 10 deviations from the mean: a new
    value in such a column, or a rare category at a small client, must not outweigh all other columns.

    Args:
        sizes: Columns, units of each hidden layer, outputs: `TabularMLP(10, 32, 2)` has one hidden layer of 32.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.BatchNorm1d(sizes[0], affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        scaled = self.scale(x)
        if not self.training:
            mean, variance = self.scale.running_mean, self.scale.running_var
            assert mean is not None
            assert variance is not None
            # What varies less is lost already, below `eps` or in the rounding of 32 bits.
            has_spread = variance > self.scale.eps**2 + (2e-7 * mean) ** 2
            scaled = torch.where(has_spread, scaled, x - mean)
        # A minibatch of up to 100 rows has no value further away, so that ordinary training does not notice.
        return super().forward(scaled.clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS))


class WideMLP(nn.Module):
    """A linear model and one hidden layer beside it: the outputs are linear in the inputs and in the hidden units.

    The last layer starts at zero, so that everybody starts from the same guess.

    Args:
        num_inputs: Columns of a table.
        num_hidden: Units of the hidden layer.
        num_outputs: Numbers that come out.
    """

    def __init__(self, num_inputs: int, num_hidden: int, num_outputs: int = 1) -> None:
        super().__init__()
        self.hidden = Linear(num_inputs, num_hidden, relu=True)
        self.out = Linear(num_inputs + num_hidden, num_outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        output: Tensor = self.out(torch.cat([x, self.hidden(x)], 1))
        return output


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


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, with the names that torchvision gives its parts."""

    def __init__(self, in_channels: int, channels: int, stride: int, normalize: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = normalize(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = normalize(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), normalize(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        output: Tensor = (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + shortcut).relu()
        return output


class ResNet(nn.Module):
    """ResNet-18 (He et al., CVPR 2016) in the form for images of 32 pixels: a 3x3 stem and no first max-pooling.

    Its layers have torchvision's names (conv1, bn1, layer1 to layer4, fc), so that weights and lists of layers carry
    over.

    Args:
        num_classes: Outputs of the last layer.
        width: Channels of the first layers, 64 in the paper; later ones have 2, 4 and 8 times as many.
        norm: "batch" is BatchNorm, "group" GroupNorm in groups of 16 channels.
        blocks: In each of the four layers; (3, 4, 6, 3) is ResNet-34.
        in_channels: Channels of the images.
        stem_stride: Of the first convolution; 2 halves what all layers after it see, which takes a quarter of the time.
    """

    def __init__(
        self,
        num_classes: int = 10,
        width: int = 64,
        norm: Literal["batch", "group"] = "batch",
        blocks: Sequence[int] = (2, 2, 2, 2),
        in_channels: int = 3,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()

        def normalize(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(max(1, channels // 16), channels)

        self.conv1 = nn.Conv2d(in_channels, width, 3, stem_stride, 1, bias=False)
        self.bn1 = normalize(width)
        channels = width
        for number, count in enumerate(blocks):
            parts = []
            for place in range(count):
                stride = 2 if number > 0 and place == 0 else 1
                parts.append(ResidualBlock(channels, width * 2**number, stride, normalize))
                channels = width * 2**number
            self.add_module(f"layer{number + 1}", nn.Sequential(*parts))
        self.fc = nn.Linear(channels, num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        for name, part in self.named_children():
            x = part(x) if name.startswith("layer") else x
        output: Tensor = self.fc(x.mean((2, 3)))
        return output


def resnet(
    num_classes: int,
    shape: Sequence[int],
    width: int = 64,
    norm: Literal["batch", "group"] = "batch",
    blocks: Sequence[int] = (2, 2, 2, 2),
    stem_stride: int = 1,
) -> nn.Module:
    """A `ResNet` for an experiment file: `model = "pfedhn.models:resnet"`, `network = {width = 32}`."""
    return ResNet(num_classes, width, norm, blocks, shape[0], stem_stride)


FILLED_IN = ("num_classes", "shape")  # what a function that makes a network is told of the data, if it asks


def check_name(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Refuse a name that is none of ours, or settings that the function which it names does not take.

    Ours are lenet-s, lenet (m), lenet-l, resnet18, resnet18-gn, omniglot, linear, linear-bias, mlp-32-16 for two hidden
    layers, tabular-32-16 for the same on raw columns of a table, and wide-32 for a hidden layer beside a linear model.
    """
    if ":" in name:
        _check_settings(name, settings or {})
        return
    if settings:
        key = next(iter(settings))
        raise UserError(
            f"network.{key} is an argument of a function that makes the network, and model = {name!r} is not one."
        )
    names = [*LENET_SIZES, *RESNETS, "omniglot", "linear", "linear-bias"]
    if name not in names and not re.fullmatch(r"((mlp|tabular)(-[1-9][0-9]{0,8})*|wide-[1-9][0-9]{0,8})", name):
        raise UserError(
            f"there is no target network {name!r}; {closest(name, [*names, 'mlp-32', 'tabular-32', 'wide-32'])}"
        )


def _check_settings(name: str, settings: Mapping[str, Any]) -> None:
    known = inspect.signature(find_code(name)).parameters
    is_open = any(item.kind is item.VAR_KEYWORD for item in known.values())
    for key in settings:
        if key not in known and not is_open:
            raise UserError(f"{name} has no setting {key!r}; {closest(key, known)}")
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [key for key, item in known.items() if item.default is item.empty and item.kind in kinds]
    if missing := [key for key in needed if key not in settings and key not in FILLED_IN]:
        raise UserError(f"{name} needs {', '.join(missing)}; give network.{missing[0]} = ...")


def network_name(name: str) -> str:
    """What a network is called in a run: its name, or that of the function which makes it."""
    return name.rpartition(":")[2]


def name_of(factory: Factory) -> str:
    """The name that a file would give this network: a hypernetwork's initial weights depend on it.

    It is one of ours, such as "mlp-32", or else the name of the function or class that makes the network.
    """
    maker: Any = factory
    while isinstance(maker, partial):
        maker = maker.func
    if inspect.isfunction(maker) and maker.__name__.isidentifier() and maker is not build:
        return maker.__name__
    try:
        with keys.seeded(0):
            module = factory()
    except Exception:
        return "model"  # `check_factory` says what is wrong with it
    return _name_of_ours(module) or type(module).__name__


def _name_of_ours(module: Any) -> str | None:
    kind = type(module)
    if kind in (MLP, TabularMLP):
        return "-".join(["mlp" if kind is MLP else "tabular", *(str(part.out_features) for part in module.layers[:-1])])
    if kind is WideMLP:
        return f"wide-{module.hidden.out_features}"
    if kind is LeNet:
        return {size: name for name, size in LENET_SIZES.items() if name != "lenet-m"}.get(module.fc1.in_features // 50)
    if kind is ResNet:
        with torch.device("meta"):
            ours = {name: ResNet(norm=norm) for name, norm in RESNETS.items()}
        return next((name for name, one in ours.items() if _layers(one) == _layers(module)), None)
    return {OmniglotNet: "omniglot", LinearModel: "linear"}.get(kind)


def _layers(module: nn.Module) -> list[str]:
    """What tells networks of one class apart, whatever their inputs and outputs."""
    return [repr(part) for part in list(module.modules())[2:-1] if not list(part.children())]


def build(name: str, num_classes: int, shape: Sequence[int]) -> nn.Module:
    """A target network by its name, for examples of this shape."""
    check_name(name)
    if name in RESNETS:
        return ResNet(num_classes, norm=RESNETS[name], in_channels=shape[0] if shape else 1)
    if name in LENET_SIZES:
        return LeNet(num_classes, LENET_SIZES[name], shape[0] if shape else 1)
    if name == "omniglot":
        return OmniglotNet(num_classes)
    if name == "linear":
        return LinearModel(math.prod(shape), num_classes)
    hidden = [] if name == "linear-bias" else map(int, name.split("-")[1:])
    sizes = [math.prod(shape), *hidden, num_classes]
    check_memory(4 * sum((a + 1) * b for a, b in pairwise(sizes)), f"the network {name!r}")
    kinds: dict[str, Callable[..., nn.Module]] = {"tabular": TabularMLP, "wide": WideMLP}
    return kinds.get(name.partition("-")[0], MLP)(*sizes)


def factory(name: str, num_classes: int, shape: tuple[int, ...], settings: Mapping[str, Any] | None = None) -> Factory:
    """What makes the network; the same object for the same network, so that equal runs share what is compiled.

    Args:
        name: One of ours, or "module:function" or "file.py:function".
        num_classes: For one of ours, and for a function that has a parameter of this name.
        shape: Of an example, likewise.
        settings: What such a function is called with.
    """
    return _factory(name, num_classes, shape, json.dumps(dict(settings or {}), sort_keys=True))


@lru_cache
def _factory(name: str, num_classes: int, shape: tuple[int, ...], settings: str) -> Factory:
    if ":" not in name:
        return partial(build, name, num_classes, shape)
    function = find_code(name)
    known, told = inspect.signature(function).parameters, {"num_classes": num_classes, "shape": list(shape)}
    given = {key: value for key, value in told.items() if key in known} | json.loads(settings)
    return partial(function, **given) if given else function


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, y, reduction="none")


def is_correct(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.argmax(-1) == y


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each example, over however many numbers it predicts."""
    return ((outputs.reshape(y.shape) - y) ** 2).reshape(len(y), -1).mean(-1)
