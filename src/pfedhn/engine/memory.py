"""What a run needs of memory, worked out before anything is made or written."""

from collections import Counter
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithms.hypernetwork import Hypernetwork
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.algorithms.pfedhn_shared import PFedHNShared
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.settings import values_of
from pfedhn.system.process import check_memory

LARGE_SETTING = 2_000  # no method makes much of less
LARGE_TARGET = 500_000  # weights, of which no server makes much of less
LARGE_CROWD = 50_000_000  # weights of all clients together, who may keep some
CHUNK_SIZES = (500, 2_000, 10_000, 50_000)  # that a chunked head might have instead


class Copies(NamedTuple):
    """How often something is in memory at the peak of a run on a CPU, as measured for cohorts of 1, 4 and 8 clients."""

    shared: float = 4.0  # what the server remembers: as it is, as it was at the chosen round, a step's
    target: float = 4.0  # the weights of a client that is at work
    member: float = 2.4  # the weights of every client of a cohort


COPIES = {
    "dense": Copies(shared=4.5),
    "added": Copies(shared=4.5),
    "low-rank": Copies(target=3.5, member=3.5),
    "chunked": Copies(target=1.5, member=5.9),
}
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
    algorithm, hypernetwork = simulation.algorithm, _hypernetwork(simulation)
    copies = Copies() if hypernetwork is None else COPIES[hypernetwork.head]
    size = next(iter(simulation.models.values())).dtype.itemsize
    target = size * _num_weights(simulation) / len(simulation.models)
    num_members = simulation.clients_per_round if algorithm.communicates else 0
    needed = copies.shared * shared + (copies.target + copies.member * num_members) * target
    if hypernetwork is not None and hypernetwork.head == "chunked":  # all pieces go through the trunk at once
        num_pieces = target / size / hypernetwork.chunk_size
        needed += num_members * num_pieces * hypernetwork.hidden_dim * (1 + hypernetwork.num_hidden) * size
    return int(needed)


def _hypernetwork(simulation: Simulation) -> Hypernetwork | None:
    return simulation.algorithm.hypernetwork if isinstance(simulation.algorithm, PFedHN) else None


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
    """What would fit, for a method whose heads are a choice."""
    algorithm, hypernetwork = simulation.algorithm, _hypernetwork(simulation)
    if hypernetwork is None or not isinstance(algorithm, PFedHN):
        return "make it smaller"

    def needed(**settings: Any) -> float:
        return bytes_needed(replace(simulation, algorithm=PFedHNShared.like(algorithm, **settings)))

    if hypernetwork.head == "chunked":
        sizes = {size: needed(chunk_size=size) for size in CHUNK_SIZES}
        best = min(sizes, key=sizes.__getitem__)
        if sizes[best] < bytes_needed(simulation):
            return f"make it smaller, or take chunk_size = {best} ({sizes[best] / 1e9:,.1f} GB)"
        return "make it smaller, or take fewer clients at a time; another chunk_size would help little"
    if hypernetwork.head == "low-rank" or hypernetwork.linear or hypernetwork.spectral_norm:
        return "make it smaller"
    return f"make it smaller, or take head = 'low-rank' ({needed(head='low-rank') / 1e9:,.1f} GB)"


def bytes_of_shared(simulation: Simulation) -> int:
    """How much the server remembers for all, worked out on tensors that have a shape and no content."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: it takes a second, and is rarely asked

    starts = simulation.initial_models()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shared = simulation.algorithm.init_shared(simulation.models, starts, keys.fold(simulation.seed, "shared"))
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(shared) if isinstance(leaf, torch.Tensor))
