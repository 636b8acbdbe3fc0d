"""What experiments know of pFedHN: what its heads hold in memory, what is smaller, what to try while a client joins."""

from typing import Any

from pfedhn.algorithms.method import Copies
from pfedhn.algorithms.pfedhn import PFedHN

COPIES = {
    "dense": Copies(shared=4.5),
    "added": Copies(shared=4.5),
    "low-rank": Copies(target=3.5, member=3.5),
    "chunked": Copies(target=1.5, member=5.9),
}
CHUNK_SIZES = (500, 2_000, 10_000, 50_000)  # that a chunked head might have instead


def copies(algorithm: PFedHN) -> Copies:
    """What a run with this head holds in memory."""
    hypernetwork = algorithm.hypernetwork
    found = COPIES[hypernetwork.head]
    if hypernetwork.head != "chunked":
        return found
    hidden = hypernetwork.hidden_dim * (1 + hypernetwork.num_hidden)  # all pieces go through the trunk at once
    return found._replace(member=found.member + hidden / hypernetwork.chunk_size)


def smaller(algorithm: PFedHN) -> list[dict[str, Any]]:
    """Heads that may need less memory."""
    hypernetwork = algorithm.hypernetwork
    if hypernetwork.head == "chunked":
        return [{"chunk_size": size} for size in CHUNK_SIZES]
    is_plain = not (hypernetwork.linear or hypernetwork.spectral_norm)
    return [{"head": "low-rank"}] if hypernetwork.head != "low-rank" and is_plain else []


def joining(algorithm: PFedHN) -> list[dict[str, Any]]:
    """Learning rates of the embedding to try while a client joins."""
    return [{"embeddings.lr": lr} for lr in algorithm.rows.rates_for_joining()]
