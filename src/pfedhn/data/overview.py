"""A federation seen from outside: who has which examples, and which are left to nobody."""

import numpy
import torch

from pfedhn.data.federation import SPLITS, Federation
from pfedhn.data.partition import Assignment, Labels


def assignment_of(federation: Federation) -> tuple[Assignment, dict[str, Labels]]:
    """A federation as `partition.describe` takes it.

    Examples that nobody has are counted in the splits they come from.
    """
    owned = {name: federation.splits[name] for name in SPLITS}
    taken = torch.zeros(len(federation.y), dtype=torch.bool)
    for examples in owned.values():
        taken[examples.index] = True
    left = federation.y[~taken].numpy()
    splits, clients, unused = {}, {}, {}
    for name, examples in owned.items():
        number = federation.unused.get(name, 0)
        start = len(examples.index)
        splits[name] = Labels(numpy.concatenate([federation.y[examples.index].numpy(), left[:number]]))
        left = left[number:]
        offsets, sizes = examples.offset.tolist(), examples.size.tolist()
        clients[name] = [numpy.arange(a, a + b) for a, b in zip(offsets, sizes, strict=True)]
        unused[name] = numpy.arange(start, start + number)
    shares = numpy.zeros((federation.num_clients, int(federation.y.max()) + 1))
    for name, lists in clients.items():
        for client, numbers in enumerate(lists):
            shares[client, splits[name].y[numbers]] = 1.0
    return Assignment(clients, unused, shares), splits
