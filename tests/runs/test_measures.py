"""Measures against scikit-learn's, and what they say where they are not defined."""

import numpy
import pytest
from scipy.stats import binomtest
from sklearn import metrics

from pfedhn.runs import measures


@pytest.mark.parametrize("num_classes", [2, 4])
def test_measures_of_classes_are_scikit_learns(num_classes: int) -> None:
    draw = numpy.random.default_rng(num_classes)
    y = draw.integers(num_classes, size=200)
    p = numpy.round(draw.dirichlet(numpy.ones(num_classes), size=200), 2) + 1e-3  # with equal scores among them
    p /= p.sum(1, keepdims=True)
    chosen, average = p.argmax(1), "binary" if num_classes == 2 else "macro"
    assert measures.accuracy(p, y) == pytest.approx(metrics.accuracy_score(y, chosen))
    assert measures.balanced_accuracy(p, y) == pytest.approx(metrics.balanced_accuracy_score(y, chosen))
    assert measures.f1(p, y) == pytest.approx(metrics.f1_score(y, chosen, average=average))
    assert measures.log_loss(p, y) == pytest.approx(metrics.log_loss(y, p))
    expected = metrics.roc_auc_score(y, p[:, 1] if num_classes == 2 else p, multi_class="ovr")
    assert measures.auc(p, y) == pytest.approx(expected)
    if num_classes == 2:
        assert measures.brier(p, y) == pytest.approx(metrics.brier_score_loss(y, p[:, 1]))


def test_measures_of_numbers_are_scikit_learns() -> None:
    draw = numpy.random.default_rng(0)
    y, predicted = draw.normal(size=50), draw.normal(size=50)
    assert measures.rmse(predicted, y) == pytest.approx(metrics.root_mean_squared_error(y, predicted))
    assert measures.mae(predicted, y) == pytest.approx(metrics.mean_absolute_error(y, predicted))
    assert measures.r2(predicted, y) == pytest.approx(metrics.r2_score(y, predicted))


def test_perfectly_calibrated_probabilities_have_no_calibration_error() -> None:
    p = numpy.repeat([[0.75, 0.25]], 8, axis=0)
    assert measures.calibration_error(p, numpy.array([1, 1, 0, 0, 0, 0, 0, 0])) == pytest.approx(0)
    assert measures.calibration_error(p, numpy.array([1, 0, 0, 0, 0, 0, 0, 0])) == pytest.approx(0.125)


def test_a_measure_that_is_not_defined_is_left_out() -> None:
    """A client whose examples have one class has no AUC; one without examples has no loss."""
    p = numpy.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    scores = measures.detailed_scores(p, numpy.array([0, 1, 0]), numpy.array([0, 0, 2]), num_clients=3)
    assert scores.clients["auc"] == 1.0  # of client 0 alone
    assert scores.clients["accuracy"] == 1.0
    assert scores.client_loss[1] is None
    assert scores.client_loss[2] == pytest.approx(-numpy.log(0.6))
    alone = measures.detailed_scores(p[:1], numpy.array([0]), numpy.array([0]), num_clients=1)
    assert "auc" not in alone.examples


@pytest.mark.parametrize(("right", "count"), [(10, 12), (0, 3), (7, 7)])
def test_the_interval_of_an_accuracy_is_wilsons(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert measures.accuracy_interval(right / count, count) == pytest.approx((expected.low, expected.high))
