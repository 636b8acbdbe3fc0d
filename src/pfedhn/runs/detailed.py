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
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS, Memories
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
    federation = run.simulation.federation
    predicted = all_predictions(run.simulation, run.memories(), run.chosen.round, is_adapted)
    if predicted is None:
        return None
    validation, test = (Rows.of(federation, split) for split in EVALUATED_SPLITS)
    loss = mean_loss(predicted[validation.numbers.cpu()], validation.y)
    return detailed_scores(predicted[test.numbers.cpu()], test.y, test.clients, federation.num_clients, loss)


def all_predictions(simulation: Simulation, memories: Memories, number: int, is_adapted: bool) -> Numbers | None:
    """Predict every validation and test example with its client's own model; None if the data are no table.

    Args:
        simulation: Of the run, or of clients that join it.
        memories: At the round to predict with.
        number: Of that round.
        is_adapted: Whether clients use their models after fine-tuning.

    Returns:
        Probabilities [E, L] or numbers [E] of all examples of the federation, NaN for training examples.
    """
    federation = simulation.federation
    if not is_table(federation) or simulation.resize_every is not None or not simulation.chunks:
        return None
    shape = (len(federation.y),) if federation.num_classes is None else (len(federation.y), federation.num_classes)
    predicted = numpy.full(shape, numpy.nan)
    for chunk, outputs in simulation.outputs(memories, number, is_adapted):
        counts = chunk.masks.any(1)
        if not isinstance(outputs, Tensor) or outputs.shape[:2] != counts.shape:  # a person's own network and loss
            return None
        if (some := predictions(federation, outputs[counts])) is None:
            return None
        predicted[chunk.index[counts].cpu().numpy()] = some
    return predicted


def predictions(federation: Federation, outputs: Tensor) -> Numbers | None:
    """Probabilities [E, L] or numbers [E] from a network's outputs [E, ...]; None if they are neither."""
    if federation.num_classes is None:
        return unscaled(federation, outputs.flatten()) if outputs.numel() == len(outputs) else None
    if outputs.shape[1:] != (federation.num_classes,):
        return None
    probabilities: Numbers = outputs.double().softmax(1).cpu().numpy()
    return probabilities


def mean_loss(predicted: Numbers, y: NDArray[numpy.int64] | Numbers) -> float | None:
    """Mean log loss or squared error; infinite for predictions that are not finite, None without examples."""
    if not len(y):
        return None
    loss = float((log_losses(predicted, y) if predicted.ndim == 2 else (predicted - y) ** 2).mean())
    return math.inf if math.isnan(loss) else loss
