"""How good is each client's own model, on its own rows: the one evaluation path of every method.

Axes: [N] clients, [C]lients of a chunk, [R]ows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedhn.algorithm import Algorithm, Model
from pfedhn.executors import Executor
from pfedhn.federation import Federation
from pfedhn.keys import Key
from pfedhn.params import Params, take
from pfedhn.sgd import Batches

ROWS_PER_CHUNK = 8192  # of padded rows evaluated at once: bounds memory, whatever the federation


@dataclass(frozen=True)
class PoolResult:
    """What clients scored on one pool; sums over each client's rows."""

    loss: Tensor  # [N]
    metric: Tensor | None  # [N], number of correct rows, or the sum of the user's metric
    count: Tensor  # [N]

    @property
    def client_metric(self) -> Tensor:
        """[N]: each client's accuracy; NaN for a client without rows in this pool."""
        assert self.metric is not None
        return self.metric / self.count

    @property
    def client_mean(self) -> float:
        """Accuracy averaged over the clients that have rows."""
        return float(self.client_metric[self.count > 0].mean())

    @property
    def sample_mean(self) -> float:
        """Accuracy averaged over rows."""
        assert self.metric is not None
        return float(self.metric.sum() / self.count.sum())

    @property
    def mean_loss(self) -> float:
        return float(self.loss.sum() / self.count.sum())

    @property
    def score(self) -> float:
        """What a round is chosen by: sample-weighted accuracy, or minus the loss where a task has no accuracy."""
        return self.sample_mean if self.metric is not None else -self.mean_loss


def personal_weights(
    algorithm: Algorithm[Any, Any, Any], model: Model, shared: Any, row: Any, private: Any, batches: Batches
) -> Params:
    """The weights ONE client would use now."""
    return algorithm.personalise(model, algorithm.send(model, shared, row), private, batches)


def evaluate(
    algorithm: Algorithm[Any, Any, Any],
    model_of: Callable[[int], Model],
    federation: Federation,
    shared: Any,
    rows: Any,
    private: Callable[[Sequence[int]], Any],
    executor: Executor,
    key: Key,
    batch_size: int,
    pools: Sequence[str] = ("validation", "test"),
    clients: Sequence[int] | None = None,
) -> dict[str, PoolResult]:
    """Each client's personal model on its rows of each pool.

    Clients of like size are taken together, so that filling up to a rectangle costs little.
    """
    clients = range(federation.num_clients) if clients is None else clients
    num_rows = sum(federation.pools[pool].size for pool in pools)
    assert isinstance(num_rows, Tensor)
    device = federation.x.device
    results = {pool: torch.zeros(2, federation.num_clients, dtype=torch.float64, device=device) for pool in pools}
    has_metric = True
    for chunk in _chunks(clients, num_rows.tolist(), model_of, 1 if executor.__name__ == "loop" else None):
        model = model_of(chunk[0])
        has_metric = has_metric and model.per_example_metric is not None
        members = torch.tensor(chunk, device=device)
        x, y, masks = _gather(federation, chunk, pools)

        def one_client(
            row: Any, private: Any, batches: Batches, x: Tensor, y: Tensor, masks: Tensor, model: Model = model
        ) -> Tensor:
            weights = personal_weights(algorithm, model, shared, row, private, batches)
            outputs = model.outputs(weights, x)
            loss = model.per_example_loss(outputs, y)
            metric = (
                torch.zeros_like(loss) if model.per_example_metric is None else model.per_example_metric(outputs, y)
            )
            both = torch.stack([loss, metric.to(loss)])
            return torch.where(masks[:, None], both, 0.0).sum(-1)  # [pools, 2]

        batches = federation.batches(members, key, algorithm.num_personalise_batches, batch_size)
        scores = executor(one_client)(take(rows, members), private(chunk), batches, x, y, masks)
        for number, pool in enumerate(pools):
            results[pool][:, members] = scores[:, number].T.to(torch.float64)
    return {
        pool: PoolResult(values[0].cpu(), values[1].cpu() if has_metric else None, federation.pools[pool].size.cpu())
        for pool, values in results.items()
    }


def _chunks(
    clients: Sequence[int], num_rows: Sequence[int], model_of: Callable[[int], Model], limit: int | None
) -> list[list[int]]:
    """Clients with rows, one architecture at a time, ordered by size, few enough to fit `ROWS_PER_CHUNK`."""
    ordered = sorted(
        (client for client in clients if num_rows[client]), key=lambda client: (model_of(client).name, num_rows[client])
    )
    chunks: list[list[int]] = []
    for client in ordered:
        last = chunks[-1] if chunks else None
        fits = (
            last is not None
            and model_of(last[0]) is model_of(client)
            and (limit is None or len(last) < limit)
            and (len(last) + 1) * num_rows[client] <= ROWS_PER_CHUNK
        )
        if fits and last is not None:
            last.append(client)
        else:
            chunks.append([client])
    return chunks


def _gather(federation: Federation, clients: Sequence[int], pools: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """x, y [C, R, ...] of the clients' rows of all pools in a row, and masks [C, pools, R] that tell them apart."""
    lists = [[federation.pools[pool].of(client) for pool in pools] for client in clients]
    width = max(sum(len(part) for part in parts) for parts in lists)
    index = torch.zeros(len(clients), width, dtype=torch.int64)
    masks = torch.zeros(len(clients), len(pools), width, dtype=torch.bool)
    for number, parts in enumerate(lists):
        start = 0
        for pool, part in enumerate(parts):
            index[number, start : start + len(part)] = part.cpu()
            masks[number, pool, start : start + len(part)] = True
            start += len(part)
    index, masks = index.to(federation.x.device), masks.to(federation.x.device)
    return federation.x[index], federation.y[index], masks
