"""Measures of predictions that people report: accuracy, AUC, log loss, calibration; RMSE, MAE, R2.

Axes: [E]xamples, classes [L].
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.storage.schema import DetailedScores

Numbers = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]

BINS = 10  # of the calibration error
SMALLEST = 1e-7  # probability that a log loss takes a logarithm of


def detailed_scores(
    predicted: Numbers,
    y: Numbers | Integers,
    clients: Integers,
    num_clients: int,
    validation_loss: float | None = None,
) -> DetailedScores:
    """Score predictions over all examples and client by client.

    Args:
        predicted: Probabilities [E, L], or predicted numbers [E].
        y: The right classes or numbers [E].
        clients: The client of each example [E].
        num_clients: Of the federation; some may have no examples.
        validation_loss: Of the same model, for a choice among methods.
    """
    measures = CLASS_MEASURES if predicted.ndim == 2 else NUMBER_MEASURES
    error = log_losses(predicted, y) if predicted.ndim == 2 else (predicted - y) ** 2
    owned = [clients == client for client in range(num_clients)]
    by_client = [_defined(measures, predicted[own], y[own]) for own in owned if own.any()]
    means = {
        name: float(numpy.mean(values))
        for name in measures
        if (values := [scores[name] for scores in by_client if name in scores])
    }
    losses = tuple(float(error[own].mean()) if own.any() else None for own in owned)
    return DetailedScores(_defined(measures, predicted, y), means, losses, validation_loss)


def _defined(
    measures: Mapping[str, Callable[..., float]], predicted: Numbers, y: Numbers | Integers
) -> dict[str, float]:
    values = {name: measure(predicted, y) for name, measure in measures.items()} if len(y) else {}
    return {name: value for name, value in values.items() if numpy.isfinite(value)}


def accuracy_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of an accuracy that was measured on `count` examples."""
    z2 = 1.959964**2 / count
    middle, width = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    return (middle - width) / (1 + z2), (middle + width) / (1 + z2)


def log_losses(probabilities: Numbers, y: NDArray[Any]) -> Numbers:
    """[E]: minus the logarithm of the right class's probability."""
    losses: Numbers = -numpy.log(probabilities[numpy.arange(len(y)), y].clip(SMALLEST, 1))
    return losses


def log_loss(probabilities: Numbers, y: Integers) -> float:
    return float(log_losses(probabilities, y).mean())


def accuracy(probabilities: Numbers, y: Integers) -> float:
    return float((probabilities.argmax(1) == y).mean())


def balanced_accuracy(probabilities: Numbers, y: Integers) -> float:
    """The mean over classes of the share of their examples that is found."""
    is_right = probabilities.argmax(1) == y
    return float(numpy.mean([is_right[y == label].mean() for label in numpy.unique(y)]))


def f1(probabilities: Numbers, y: Integers) -> float:
    """The F1 score of class 1 if there are two classes, else the mean over classes."""
    chosen, labels = probabilities.argmax(1), [1] if probabilities.shape[1] == 2 else numpy.unique(y).tolist()
    hits = [(chosen == label) & (y == label) for label in labels]
    named = [(chosen == label).sum() + (y == label).sum() for label in labels]
    return float(
        numpy.mean([2 * hit.sum() / total if total else numpy.nan for hit, total in zip(hits, named, strict=True)])
    )


def auc(probabilities: Numbers, y: Integers) -> float:
    """Area under the ROC curve; the mean of one class against the rest for more than two. NaN if a class is absent."""
    labels = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    return float(numpy.mean([_auc(probabilities[:, label], y == label) for label in labels]))


def _auc(score: Numbers, is_positive: NDArray[numpy.bool_]) -> float:
    positive, negative = int(is_positive.sum()), int((~is_positive).sum())
    if not positive or not negative:
        return numpy.nan
    _, place, count = numpy.unique(score, return_inverse=True, return_counts=True)
    ranks = (count.cumsum() - (count - 1) / 2)[place]  # equal scores share their mean rank
    return float((ranks[is_positive].sum() - positive * (positive + 1) / 2) / (positive * negative))


def brier(probabilities: Numbers, y: Integers) -> float:
    """Mean squared error of the probabilities; of class 1's alone if there are two classes."""
    if probabilities.shape[1] == 2:
        return float(((probabilities[:, 1] - y) ** 2).mean())
    right = numpy.eye(probabilities.shape[1])[y]
    return float(((probabilities - right) ** 2).sum(1).mean())


def calibration_error(probabilities: Numbers, y: Integers) -> float:
    """Mean distance between predicted and observed frequency, over ten bins of predicted probability.

    The probability is that of class 1 if there are two classes, and else that of the predicted class.
    """
    is_binary = probabilities.shape[1] == 2
    score = probabilities[:, 1] if is_binary else probabilities.max(1)
    happened = y == 1 if is_binary else probabilities.argmax(1) == y
    bins = numpy.minimum((score * BINS).astype(int), BINS - 1)
    gaps = [abs(score[bins == number].sum() - happened[bins == number].sum()) for number in range(BINS)]
    return float(sum(gaps) / len(y))


def rmse(predicted: Numbers, y: Numbers) -> float:
    return float(numpy.sqrt(((predicted - y) ** 2).mean()))


def mae(predicted: Numbers, y: Numbers) -> float:
    return float(numpy.abs(predicted - y).mean())


def r2(predicted: Numbers, y: Numbers) -> float:
    """The share of the variance that is predicted; NaN where all numbers are equal."""
    variance = y.var()
    return float(1 - ((predicted - y) ** 2).mean() / variance) if variance > 0 else numpy.nan


CLASS_MEASURES: dict[str, Callable[[Numbers, Integers], float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "auc": auc,
    "log_loss": log_loss,
    "brier": brier,
    "calibration_error": calibration_error,
}
NUMBER_MEASURES: dict[str, Callable[[Numbers, Numbers], float]] = {"rmse": rmse, "mae": mae, "r2": r2}
