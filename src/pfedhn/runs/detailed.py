"""Detailed scores of a run on a table: what every client's own model predicts, in the units of the label.

Axes: [E]xamples, classes [L].
"""

import math
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn.data.federation import Federation
from pfedhn.engine.evaluate import EXAMPLES_PER_CHUNK
from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.runs.measures import Integers, Numbers, detailed_scores, log_losses
from pfedhn.runs.run import Run
from pfedhn.storage.schema import DetailedScores

MAX_CLIENTS = 2_000  # a run of more has no detailed scores


class Rows(NamedTuple):
    """The examples of one split, client after client."""

    numbers: Tensor  # [E], in the federation's x and y
    clients: Integers  # [E], who owns each
    y: NDArray[numpy.int64] | Numbers  # [E], classes, or numbers in the units of the label's column

    @staticmethod
    def of(federation: Federation, split: str) -> "Rows":
        """Collect the examples of a split of a table."""
        examples = federation.splits[split]
        numbers = torch.cat([examples.of(client) for client in range(federation.num_clients)])
        clients = numpy.repeat(numpy.arange(federation.num_clients), examples.size.cpu().numpy())
        return Rows(numbers, clients, labels(federation, numbers))


def labels(federation: Federation, numbers: Tensor) -> NDArray[numpy.int64] | Numbers:
    """The labels of some examples of a table: classes, or numbers in the units of the label's column."""
    y = federation.labels_of(numbers).cpu()
    if federation.num_classes is not None:
        return y.numpy().astype(numpy.int64)
    return unscaled(federation, y)


def unscaled(federation: Federation, values: Tensor) -> Numbers:
    """Numbers that a network predicts, or learns to, in the units of the label's column."""
    assert federation.reading is not None
    assert federation.reading.table is not None
    found: Numbers = federation.reading.table.unscaled(values.double().cpu().numpy())
    return found


def is_table(federation: Federation) -> bool:
    """Whether the examples are rows of a table that detailed scores are computed of."""
    return (
        federation.reading is not None
        and federation.reading.table is not None
        and federation.x.ndim == 2
        and federation.y.ndim == 1
        and federation.num_clients <= MAX_CLIENTS
    )


def detailed(run: Run, is_adapted: bool) -> DetailedScores | None:
    """Score the predictions of every client's own model at the chosen round; None if the run is not on a table.

    Args:
        run: At its end.
        is_adapted: Whether clients use their models after fine-tuning.
    """
    simulation = run.simulation
    federation, memories, number = simulation.federation, run.memories(), run.chosen.round
    if not is_table(federation) or simulation.resize_every is not None:
        return None
    splits = {name: Rows.of(federation, name) for name in ("validation", "test")}
    predicted: dict[str, list[Numbers]] = {name: [] for name in splits}
    for client in range(federation.num_clients):
        model = simulation.model_of(client)
        mine = {name: federation.splits[name].of(client) for name in splits}
        if not any(map(len, mine.values())):
            continue
        weights = simulation.personal_weights(memories, model, client, number, is_adapted)
        for name, numbers in mine.items():
            found = predictions(model, weights, federation, numbers)
            if found is None:
                return None
            predicted[name].append(found)
    if not predicted["test"]:
        return None
    validation, test = (numpy.concatenate(predicted[name]) for name in splits)
    loss = mean_loss(validation, splits["validation"].y)
    rows = splits["test"]
    return detailed_scores(test, rows.y, rows.clients, federation.num_clients, loss)


def predictions(model: Model, weights: Params, federation: Federation, numbers: Tensor) -> Numbers | None:
    """Probabilities [E, L] or numbers [E] for some examples; None if a network's outputs are neither."""
    parts = [numpy.zeros((0, federation.num_classes) if federation.num_classes is not None else 0)]
    for some in numbers.split(EXAMPLES_PER_CHUNK):
        if not len(some):
            continue
        with torch.no_grad():
            outputs = model.outputs(weights, federation.examples(some)[0])
        if not isinstance(outputs, Tensor):
            return None
        if federation.num_classes is None and outputs.numel() == len(some):
            parts.append(unscaled(federation, outputs.flatten()))
        elif federation.num_classes is not None and outputs.shape == (len(some), federation.num_classes):
            parts.append(outputs.double().softmax(1).cpu().numpy())
        else:
            return None
    return numpy.concatenate(parts)


def mean_loss(predicted: Numbers, y: NDArray[numpy.int64] | Numbers) -> float | None:
    """Mean log loss or squared error; infinite for predictions that are not finite, None without examples."""
    if not len(y):
        return None
    loss = float((log_losses(predicted, y) if predicted.ndim == 2 else (predicted - y) ** 2).mean())
    return math.inf if math.isnan(loss) else loss
