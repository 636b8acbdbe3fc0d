"""What a run needs of memory, worked out before anything is made or written."""

from collections import Counter
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithms.find import method_of
from pfedhn.combinators import innermost
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.settings import values_of
from pfedhn.system.process import check_memory

LARGE_SETTING = 2_000  # no method makes much of less
LARGE_TARGET = 500_000  # weights, of which no server makes much of less
LARGE_CROWD = 50_000_000  # weights of all clients together, who may keep some


COPIES_ON_GPU = 4
COPIES_OF_KEPT = 2  # what clients keep: as it is, and as it was at the chosen round


def refuse_too_large(simulation: Simulation) -> None:
    """Refuse minibatches and memories of server and clients that this machine could never hold."""
    federation, algorithm = simulation.federation, simulation.algorithm
    width = min(simulation.schedule.batch_size, federation.largest_train_size)
    numbers = algorithm.num_batches * width * simulation.clients_per_round
    example = federation.first(1).nbytes + federation.y[:1].nbytes + 8  # and its number
    check_memory(numbers * example, "the minibatches of a round (clients x local steps x batch size)")
    settings: dict[str, Any] = values_of(algorithm) if is_dataclass(algorithm) else {}
    is_large = any(isinstance(value, int) and value > LARGE_SETTING for value in settings.values())
    num_weights = _num_weights(simulation)
    server = bytes_needed(simulation) if is_large or num_weights > LARGE_TARGET else 0
    kept = bytes_of_kept(simulation) if num_weights * federation.num_clients > LARGE_CROWD else 0
    if federation.x.is_cuda:  # the chosen round is kept in the memory of the machine
        _check(simulation, server, kept, torch.cuda.get_device_properties(federation.x.device).total_memory)
        _check(simulation, 0, kept, None)
    else:
        _check(simulation, server, COPIES_OF_KEPT * kept, None)


def _check(simulation: Simulation, server: int, kept: int, there: int | None) -> None:
    if kept > server:
        what = "what the clients keep for themselves, such as personal layers,"
        check_memory(server + kept, what, "make the network smaller, or take fewer clients", there)
    else:
        check_memory(server + kept, "the server's model, with these settings,", lambda: _way_out(simulation), there)


def _num_weights(simulation: Simulation) -> int:
    return sum(shape.numel() for model in simulation.models.values() for shape in model.shapes.values())


def bytes_needed(simulation: Simulation) -> int:
    """What a run needs at least at its peak, besides what clients keep and what their training itself takes."""
    shared = bytes_of_shared(simulation)
    if simulation.federation.x.is_cuda:
        return COPIES_ON_GPU * shared
    copies = method_of(simulation.algorithm).copies(innermost(simulation.algorithm))
    target = next(iter(simulation.models.values())).dtype.itemsize * _num_weights(simulation) / len(simulation.models)
    num_members = simulation.clients_per_round if simulation.algorithm.needs.communication else 0
    return int(copies.shared * shared + (copies.target + copies.member * num_members) * target)


def bytes_of_kept(simulation: Simulation) -> int:
    """How much the clients keep for themselves, all of whom are evaluated; a table of them has room to grow."""
    sizes = torch.stack([simulation.federation.splits[split].size for split in EVALUATED_SPLITS]).sum(0)
    if simulation.federation.architectures is None:
        counts = {next(iter(simulation.models)): int(sizes.count_nonzero())}
    else:
        counts = Counter(simulation.model_of(client).name for client in sizes.nonzero().flatten().tolist())
    starts, total = simulation.initial_models(), 0
    for name, count in counts.items():
        kept = simulation.exchange.first_contact(simulation.models[name], starts[name], starts[name], 0)
        of_one = sum(leaf.nbytes for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor))
        total += of_one * (1 << (count - 1).bit_length() if count else 0)
    return total


def _way_out(simulation: Simulation) -> str:
    """What would fit, of the settings that the method knows to be smaller."""
    algorithm, method = innermost(simulation.algorithm), method_of(simulation.algorithm)
    before: dict[str, Any] = values_of(simulation.algorithm) if is_dataclass(algorithm) else {}
    needed = {}
    for settings in method.smaller(algorithm):
        other = method.made({**before, **settings}, method.name)
        needed[", ".join(f"{name} = {value!r}" for name, value in settings.items())] = bytes_needed(
            replace(simulation, algorithm=other)
        )
    best = min(needed, key=needed.__getitem__, default=None)
    if best is not None and needed[best] < bytes_needed(simulation):
        return f"make it smaller, or take {best} ({needed[best] / 1e9:,.1f} GB)"
    return (
        "make it smaller, or take fewer clients at a time; other settings would help little"
        if needed
        else "make it smaller"
    )


def bytes_of_shared(simulation: Simulation) -> int:
    """How much the server remembers for all, worked out on tensors that have a shape and no content."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: it takes a second, and is rarely asked

    starts = simulation.initial_models()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shared = simulation.algorithm.init_shared(simulation.models, starts, keys.fold(simulation.seed, "shared"))
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(shared) if isinstance(leaf, torch.Tensor))
