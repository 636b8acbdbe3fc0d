"""How good is each client's own model, on its own examples: the one evaluation path of every method.

Axes: [N] clients, [C]lients of a chunk, [E]xamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.data.federation import Federation
from pfedhn.engine.executors import Executor
from pfedhn.engine.round import Exchange
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, take
from pfedhn.sgd import Batches

EXAMPLES_PER_CHUNK = 3072  # padded examples evaluated at once: bounds memory, whatever the federation
NUM_SPLITS = 2  # that are evaluated: validation and test


@dataclass(frozen=True)
class SplitResult:
    """What clients scored on one split; sums over each client's examples."""

    loss: Tensor  # [N]
    metric: Tensor | None  # [N], number of correct examples, or the sum of the user's metric
    count: Tensor  # [N]

    @property
    def client_metric(self) -> Tensor:
        """[N]: each client's accuracy; NaN for a client without examples in this split."""
        assert self.metric is not None
        return self.metric / self.count

    @property
    def client_mean(self) -> float:
        """Accuracy averaged over the clients that have examples."""
        return float(self.client_metric[self.count > 0].mean())

    @property
    def sample_mean(self) -> float:
        """Accuracy averaged over examples."""
        assert self.metric is not None
        return float(self.metric.sum() / self.count.sum())

    @property
    def mean_loss(self) -> float:
        return float(self.loss.sum() / self.count.sum())

    @property
    def score(self) -> float:
        """The score that chooses a round: accuracy over all examples, or minus the loss if the task has none."""
        return self.sample_mean if self.metric is not None else -self.mean_loss


@dataclass(frozen=True)
class Chunk:
    """Clients of one architecture and like size that are evaluated together, or one client's examples in part."""

    model: Model
    clients: list[int]
    members: Tensor  # [C], the clients again
    index: Tensor  # [C, E], their examples of all splits one after the other
    masks: Tensor  # [C, splits, E], which examples belong to which split


def chunks_of(
    federation: Federation, model_of: Callable[[int], Model], splits: Sequence[str], one_by_one: bool
) -> list[Chunk]:
    """Chunks of every client that has examples; filling up costs little among clients of like size."""
    num_rows = sum(
        (federation.splits[split].size for split in splits), torch.zeros_like(federation.splits["train"].size)
    )
    counts: list[int] = num_rows.tolist()
    ordered = sorted(
        (client for client in range(federation.num_clients) if counts[client]),
        key=lambda client: (model_of(client).name, counts[client]),
    )
    groups: list[list[int]] = []
    for client in ordered:
        last = groups[-1] if groups and not one_by_one else None
        if last and model_of(last[0]) is model_of(client) and (len(last) + 1) * counts[client] <= EXAMPLES_PER_CHUNK:
            last.append(client)
        else:
            groups.append([client])
    return [chunk for group in groups for chunk in _chunks_of_group(federation, model_of(group[0]), group, splits)]


def _chunks_of_group(federation: Federation, model: Model, clients: list[int], splits: Sequence[str]) -> list[Chunk]:
    lists = [[federation.splits[split].of(client).cpu() for split in splits] for client in clients]
    width = max(sum(len(part) for part in parts) for parts in lists)
    index = torch.zeros(len(clients), width, dtype=torch.int64)
    masks = torch.zeros(len(clients), len(splits), width, dtype=torch.bool)
    for number, parts in enumerate(lists):
        start = 0
        for split, part in enumerate(parts):
            index[number, start : start + len(part)] = part
            masks[number, split, start : start + len(part)] = True
            start += len(part)
    members, index, masks = (value.to(federation.x.device) for value in (torch.tensor(clients), index, masks))
    # Only a client that is alone has more examples than this.
    pieces = zip(index.split(EXAMPLES_PER_CHUNK, -1), masks.split(EXAMPLES_PER_CHUNK, -1), strict=True)
    return [Chunk(model, clients, members, *part) for part in pieces]


def per_example(model: Model, weights: Params, x: Tensor, y: Tensor) -> Tensor:
    """[2, E]: loss and metric of every example; the metric of a task without one is 0."""
    outputs = model.outputs(weights, x)
    loss = model.per_example_loss(outputs, y)
    metric = torch.zeros_like(loss) if model.per_example_metric is None else model.per_example_metric(outputs, y)
    return torch.stack([loss, metric.to(loss)])


def sums(model: Model, weights: Params, federation: Federation, numbers: Tensor) -> tuple[float, float | None]:
    """Summed loss and metric of one client's weights on some examples; None for a task without a metric."""
    total = torch.zeros(2, dtype=torch.float64)
    for part in numbers.split(EXAMPLES_PER_CHUNK):
        if len(part):
            total += per_example(model, weights, *federation.examples(part)).double().sum(-1).cpu()
    loss, metric = total.tolist()
    return loss, None if model.per_example_metric is None else metric


def summed(model: Model, weights: Params, x: Tensor, y: Tensor, masks: Tensor) -> Tensor:
    """[splits, 2]: summed loss and metric of ONE client's weights on its examples of each split."""
    return torch.where(masks[:, None], per_example(model, weights, x, y), 0.0).sum(-1)


def score(
    exchange: Exchange,
    chunk: Chunk,
    federation: Federation,
    shared: Any,
    rows: Any,
    kept: Any,
    executor: Executor,
    key: Key,
    batch_size: int,
    is_adapted: bool = False,
    of_one: Callable[[Model, Params, Tensor, Tensor, Tensor], Tensor] = summed,
) -> Tensor:
    """[C, ...]: each client's `of_one`, which is given its personal model; `rows` and `kept` are [C, ...]."""
    model = chunk.model

    def one_client(noise: Tensor, row: Any, kept: Any, batches: Batches, x: Tensor, y: Tensor, masks: Tensor) -> Tensor:
        given = (shared, row, kept, batches)
        with model.seeded(noise, is_alone=executor.name == "loop"), executor.running(model.name, "personalize", given):
            weights = exchange.personal_weights(model, *given, is_adapted)
        return of_one(model, weights, x, y, masks)

    batches = federation.batches(chunk.members, key, exchange.num_personal_batches(model, is_adapted), batch_size)
    noise = keys.fold(key, "noise", federation.identity(chunk.members))
    x, y = federation.examples(chunk.index)
    result: Tensor = executor.map(one_client)(noise, rows, kept, batches, x, y, chunk.masks)
    return result


def evaluate(
    exchange: Exchange,
    chunks: Sequence[Chunk],
    federation: Federation,
    shared: Any,
    rows: Any,
    kept: Callable[[Chunk], Any],
    executor: Callable[[Model], Executor],
    key: Key,
    batch_size: int,
    is_adapted: bool = False,
) -> Tensor:
    """[N, splits, 2]: summed loss and metric of every client's personal model on its examples of each split."""
    num_splits = chunks[0].masks.shape[1] if chunks else NUM_SPLITS  # no chunk if nobody has such examples
    device = federation.x.device
    results = torch.zeros(federation.num_clients, num_splits, 2, dtype=torch.float64, device=device)
    for chunk in chunks:
        # Added: a client may stand in several chunks, though never twice in one.
        results[chunk.members] += score(
            exchange,
            chunk,
            federation,
            shared,
            take(rows, chunk.members),
            kept(chunk),
            executor(chunk.model),
            key,
            batch_size,
            is_adapted,
        ).to(results)
    return results


def to_splits(
    results: Tensor, federation: Federation, splits: Sequence[str], has_metric: bool
) -> dict[str, SplitResult]:
    values = results.double().cpu()
    return {
        split: SplitResult(
            values[:, number, 0], values[:, number, 1] if has_metric else None, federation.splits[split].size.cpu()
        )
        for number, split in enumerate(splits)
    }
