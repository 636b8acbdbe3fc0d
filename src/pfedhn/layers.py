"""Whose each parameter of a network is: one mechanism, by the names of layers, for all methods that split a network."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pfedhn.errors import UserError
from pfedhn.model import Model

Shapes: TypeAlias = dict[str, torch.Size]
Role: TypeAlias = Literal["personal", "generated", "shared", "frozen"]


class Roles(NamedTuple):
    """The parameters of a network by role, each in the network's own order."""

    personal: Shapes  # stay with their client
    generated: Shapes  # written by a hypernetwork
    shared: Shapes  # one for all clients
    frozen: Shapes  # nobody trains them: they stay at their start


def assign_roles(model: Model, rest: Role, settings: Mapping[str, str] | None = None, **layers: Sequence[str]) -> Roles:
    """Give every parameter a role.

    Args:
        model: The network.
        rest: The role of what is not named.
        settings: What a method calls a role in its settings, for the sentence that refuses a layer.
        layers: Layers by role, e.g. `personal=("fc3",)`. "last" stands for the layer of the last parameter,
            "intercept" for the bias of that layer.
    """
    if unknown := set(layers) - set(Roles._fields):
        raise ValueError(f"{unknown} are no roles; there are {Roles._fields}")
    roles: dict[str, str] = dict.fromkeys(model.shapes, rest)
    for role, names in layers.items():
        for name in _parameters(model, names, (settings or {}).get(role, role)):
            if roles[name] not in (rest, role):
                called = [(settings or {}).get(one, one) for one in (roles[name], role)]
                raise UserError(f"the layer of {name!r} is named as {called[0]} and as {called[1]}; name it once.")
            roles[name] = role
    if not {"generated", "shared"} & set(roles.values()):
        raise UserError(
            f"every layer of {model.name} stays with the client or as it is, so nothing is left to generate or to "
            "share; name fewer personal or fixed layers, or use the method local."
        )
    parts = [{name: shape for name, shape in model.shapes.items() if roles[name] == role} for role in Roles._fields]
    return Roles(*parts)


class LastLinear(NamedTuple):
    """The parameters of a linear last layer, and its form."""

    weight: str
    bias: str | None
    num_outputs: int
    num_features: int

    @property
    def names(self) -> list[str]:
        return [self.weight, *([] if self.bias is None else [self.bias])]


def last_linear(model: Model, method: str) -> LastLinear:
    """The last layer of a network, which the method works on as a linear one; another layer is refused."""
    weight, bias = f"{model.last_layer}.weight", f"{model.last_layer}.bias"
    shape = model.shapes.get(weight)
    if shape is None or len(shape) != 2:
        raise UserError(
            f"{method} works on a linear last layer, and the last layer of {model.name}, {model.last_layer!r}, is "
            "none; use another method, or end the network with nn.Linear."
        )
    return LastLinear(weight, bias if bias in model.shapes else None, *shape)


def batch_norms(model: Model) -> list[str]:
    """The parameters of BatchNorm layers. They are found by type: a layer's name says nothing."""
    layers = {name: part for name, part in model.training_module.named_modules() if isinstance(part, _BatchNorm)}
    owned = {f"{name}.{part}".lstrip(".") for name, layer in layers.items() for part, _ in layer.named_parameters()}
    return [name for name in model.shapes if name in owned]


def _parameters(model: Model, layers: Sequence[str], setting: str) -> list[str]:
    """The parameters that belong to the named layers, e.g. "fc3" -> ["fc3.weight", "fc3.bias"]."""
    if isinstance(layers, str):
        raise UserError(f"{setting} = {layers!r} does not fit; it must be a list of layers, such as [{layers!r}].")
    chosen: list[str] = []
    for layer in layers:
        layer = {"last": model.last_layer, "intercept": f"{model.last_layer}.bias"}.get(layer, layer)
        owned = [name for name in model.shapes if name == layer or name.startswith(layer + ".")]
        if not owned:
            known = ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in model.shapes))
            raise UserError(f"{setting} names the layer {layer!r}, which {model.name} does not have; it has {known}.")
        chosen += owned
    return chosen
