"""Networks on the package's kernels, and whether all code of a run is known to keep no tensor."""

from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfedhn.combinators import layers
from pfedhn.engine.executors import without_numbers
from pfedhn.engine.network import convolves
from pfedhn.engine.simulate import Simulation
from pfedhn.kernels.fuse import Fused


def on_blocks(simulation: Simulation) -> Simulation:
    """The simulation with ordinary layers on the package's kernels, where that gives the same outputs."""
    x = simulation.federation.first(2)
    models = {}
    for name, model in simulation.models.items():
        other, weights = replace(model, factory=Fused(model.factory)), model.fresh(0)
        if is_known(simulation):
            with without_numbers():
                other.outputs(weights, x)
        with torch.no_grad():
            outputs = pytree.tree_leaves([one.outputs(weights, x) for one in (model, other)])
        middle = len(outputs) // 2
        is_same = all(map(_are_near, outputs[:middle], outputs[middle:]))
        models[name] = other if is_same else model
    return replace(simulation, models=models)


def has_convolutions(simulation: Simulation) -> bool:
    """Whether a network takes PyTorch's convolutions, so that clients are trained and tested one by one."""
    return any(convolves(model, simulation.federation) for model in simulation.models.values())


def is_known(simulation: Simulation) -> bool:
    """Whether all that a round runs is code of this package or of PyTorch, which keeps no tensor that it makes."""
    # Nobody can be asked instead: a class that vouches for itself would vouch for what extends it too, and a tensor in
    # an attribute shows only once it is there, which is too late for a graph that others share.
    exchange, models = simulation.exchange, simulation.models.values()
    modules = [module for model in models for module in model.training_module.modules()]
    functions = [function for model in models for function in (model.per_example_loss, model.per_example_metric)]
    functions += [value for module in modules for value in vars(module).values() if isinstance(value, FUNCTIONS)]
    classes = [
        kind
        for part in (*layers(exchange.algorithm), exchange.upload, exchange.download, *modules)
        for kind in type(part).__mro__
    ]
    return (
        not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        and all(function is None or isinstance(function, FunctionType) for function in functions)
        and all(_origin(part) in KNOWN for part in (*classes, *functions) if part is not None)
    )


FUNCTIONS = (FunctionType, MethodType, partial)
KNOWN = {"pfedhn", "torch", "builtins", "typing", "abc"}


def _origin(part: Any) -> str:
    return str(part.__module__).partition(".")[0]


def _are_near(one: Any, other: Any) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-3, equal_nan=True)
