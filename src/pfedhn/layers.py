"""Whose each parameter of a network is, by the names of its layers."""

from collections.abc import Sequence

from pfedhn.errors import UserError
from pfedhn.model import Model


def layer_names(model: Model, layers: Sequence[str], setting: str) -> frozenset[str]:
    """The parameters that belong to the named layers, e.g. "fc3" -> {"fc3.weight", "fc3.bias"}."""
    chosen = set()
    for layer in layers:
        if layer == "last":
            layer = last_layer(model)
        owned = {name for name in model.shapes if name == layer or name.startswith(layer + ".")}
        if not owned:
            known = ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in model.shapes))
            raise UserError(f"{setting} names the layer {layer!r}, which {model.name} does not have; it has {known}.")
        chosen |= owned
    return frozenset(chosen)


def last_layer(model: Model) -> str:
    """The layer that holds the last parameter: the classifier of an ordinary network."""
    return list(model.shapes)[-1].rpartition(".")[0] or list(model.shapes)[-1]
