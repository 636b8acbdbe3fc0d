"""What a run needs of memory, worked out before anything is made or written."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.engine.simulate import Simulation
from pfedhn.process import check_room

LARGE_SETTING = 2_000  # no method makes much of less
LARGE_TARGET = 500_000  # weights, of which no server makes much of less
COPIES = 4  # of what a server remembers: as it is, as it was at the chosen round, a step's gradient and its result


def refuse_too_large(simulation: Simulation) -> None:
    """Refuse minibatches and a server's model that this machine could never hold."""
    federation, algorithm = simulation.federation, simulation.algorithm
    width = min(simulation.schedule.batch_size, federation.largest_train_size)
    numbers = algorithm.num_batches * width * simulation.clients_per_round
    example = federation.x[:1].nbytes + federation.y[:1].nbytes + 8  # and its number
    check_room(numbers * example, "the minibatches of a round (clients x local steps x batch size)")
    settings: list[Any] = (
        [getattr(algorithm, item.name) for item in fields(algorithm)] if is_dataclass(algorithm) else []
    )
    is_large = any(isinstance(value, int) and value > LARGE_SETTING for value in settings)
    if is_large or _num_weights(simulation) > LARGE_TARGET:
        device = federation.x.device
        there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        needed = COPIES * bytes_of_shared(simulation)
        what = "the server's model, with these settings,"
        check_room(needed, what, _way_out(simulation), there)


def _num_weights(simulation: Simulation) -> int:
    return sum(shape.numel() for model in simulation.models.values() for shape in model.shapes.values())


def _way_out(simulation: Simulation) -> str:
    """What would fit, for a method whose heads are a choice."""
    algorithm: Any = simulation.algorithm
    if getattr(algorithm, "head", None) != "dense" or algorithm.linear or algorithm.spectral_norm:
        return "make it smaller"
    other = replace(simulation, algorithm=replace(algorithm, head="low-rank"))
    return f"make it smaller, or take head = 'low-rank' ({COPIES * bytes_of_shared(other) / 1e9:,.1f} GB)"


def bytes_of_shared(simulation: Simulation) -> int:
    """How much the server remembers for all, worked out on tensors that have a shape and no content."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: it takes a second, and is rarely asked

    starts = simulation.initial_models()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shared = simulation.algorithm.init_shared(simulation.models, starts, keys.fold(simulation.seed, "shared"))
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(shared) if isinstance(leaf, torch.Tensor))
