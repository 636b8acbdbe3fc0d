"""Gains of one model over another on the same test examples: client by client, with their uncertainty.

Axes: [S]eeds, [N] clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from pfedhn.report.entries import Entry, is_squared, seeds_alike
from pfedhn.storage.schema import DetailedScores, Result

Numbers: TypeAlias = NDArray[numpy.float64]
MeasureName: TypeAlias = Literal["accuracy", "log loss", "RMSE", "loss"]

DRAWS = 2_000  # of the bootstrap
CONFIDENCE = 0.95
NUMBERS_AT_ONCE = 4_000_000  # of a block of draws


@dataclass(frozen=True)
class Measure:
    """What the methods of a group are compared by."""

    name: MeasureName
    is_detailed: bool = False

    @staticmethod
    def of(entries: Sequence[Entry]) -> "Measure":
        results = [result for entry in entries for result in entry.results.values()]
        detailed = [result.detailed for result in results if result.detailed is not None]
        if results and len(detailed) == len(results):
            is_number = any("rmse" in scores.examples for scores in detailed)
            return Measure("RMSE" if is_number or not entries[0].has_accuracy else "log loss", is_detailed=True)
        if all(entry.has_accuracy for entry in entries):
            return Measure("accuracy")
        return Measure("RMSE" if is_squared(entries) else "loss")

    @property
    def sign(self) -> int:
        return 1 if self.name == "accuracy" else -1

    def root(self, means: Any) -> Any:
        """Means of squared errors are shown by their root."""
        return numpy.sqrt(means) if self.name == "RMSE" else means

    def of_clients(self, result: Result) -> Numbers:
        """[N]: each client's test score; NaN without test examples."""
        if self.is_detailed:
            assert result.detailed is not None
            return losses_of(result.detailed)
        examples = _examples(result)
        means: Numbers = numpy.array(result.test.clients) / numpy.where(examples > 0, examples, numpy.nan)
        return 100 * means if self.name == "accuracy" else means

    def weights(self, result: Result) -> Numbers:
        """[N]: 1 for an accuracy, which is a mean over clients; a loss is one over examples."""
        examples = _examples(result)
        return (examples > 0).astype(numpy.float64) if self.name == "accuracy" else examples

    def on_validation(self, result: Result) -> float:
        """The validation score; NaN without validation examples, and more is better."""
        if self.is_detailed:
            assert result.detailed is not None
            loss = result.detailed.validation_loss
            return math.nan if loss is None else -float(self.root(loss))
        validation = result.validation
        if not validation.examples:
            return math.nan
        if self.name != "accuracy":
            return -float(self.root(validation.loss))
        return 100 * (math.nan if validation.client_mean is None else validation.client_mean)


def losses_of(scores: DetailedScores) -> Numbers:
    return numpy.array([math.nan if loss is None else loss for loss in scores.client_loss], dtype=numpy.float64)


def _examples(result: Result) -> Numbers:
    return numpy.array(result.test.client_examples, dtype=numpy.float64)


class Pairs(NamedTuple):
    """Two models on the same test examples: scores and weights of clients [S, N] in the seeds that both have."""

    ours: Numbers
    theirs: Numbers
    weights: Numbers
    measure: Measure
    shares: Numbers | None = None  # what the seeds count in a client's own gain; all the same if None

    def gain(self) -> float:
        """The mean gain over seeds."""
        once = numpy.ones((1, self.weights.shape[1])), numpy.ones((1, len(self.weights)))
        return float(self._gains(*once)[0])

    def client_gains(self) -> Numbers:
        """[clients with test examples]: each one's mean gain over seeds; over the test examples of all folds."""
        gains = self.measure.sign * (self.ours - self.theirs)
        shares = numpy.where(self.weights > 0, 1.0 if self.shares is None else self.shares, 0.0)
        counts = shares.sum(0)
        means: Numbers = (shares * gains).sum(0)[counts > 0] / counts[counts > 0]
        return means

    def draws(self) -> Numbers:
        """Gains for clients and seeds that are drawn with replacement, the same clients in every seed.

        Folds are not drawn: each tests other examples of a client, so a draw without one would count the luck of
        examples twice. What the folds' models have in common is added instead, as a draw from a t distribution.
        """
        random, (num_seeds, num_clients) = numpy.random.default_rng(0), self.weights.shape
        found, size, has_folds = [], max(1, NUMBERS_AT_ONCE // num_clients), self.shares is not None
        for start in range(0, DRAWS, size):
            count = min(size, DRAWS - start)
            clients = _counts(random, count, num_clients)
            seeds = numpy.ones((count, num_seeds)) if has_folds else _counts(random, count, num_seeds)
            found.append(self._gains(clients, seeds))
        gains = numpy.concatenate(found)
        if has_folds and num_seeds > 1 and num_clients > 1:
            gains += self._deviation_of_folds() / math.sqrt(num_seeds) * random.standard_t(num_seeds - 1, len(gains))
        return gains[numpy.isfinite(gains)]  # a draw may hold no test example

    def _deviation_of_folds(self) -> float:
        """The standard deviation of gains over folds that examples do not explain, by an analysis of variance."""
        total = self.weights.sum()
        ours, theirs = (
            values / (2 * max(float(self.measure.root((self.weights * values).sum() / total)), 1e-12))
            if self.measure.name == "RMSE"  # whose root is linear in the neighborhood of its mean
            else values
            for values in (self.ours, self.theirs)
        )
        gains, is_used = self.measure.sign * (ours - theirs), self.weights.sum(1) > 0
        gains, weights = gains[is_used], self.weights[is_used]
        folds, clients = ((weights * gains).sum(axis) / weights.sum(axis) for axis in (1, 0))
        rest = gains - clients - (folds - folds.mean())[:, None]
        freedom = max(1, (weights > 0).sum() - len(folds) - len(clients) + 1)
        by_examples = (weights * rest**2).sum() / freedom * (1 / weights.sum(1)).mean()
        return math.sqrt(max(0.0, float(folds.var(ddof=1) - by_examples))) if len(folds) > 1 else 0.0

    def interval(self) -> tuple[float, float] | None:
        """The expanded percentile interval (Hesterberg, 2015), which few clients make wider; None for a single one."""
        from scipy.special import stdtrit

        num_clients = self.weights.shape[1]
        if num_clients < 2 or not len(draws := self.draws()):
            return None
        quantile = float(stdtrit(num_clients - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(num_clients / (num_clients - 1))
        tail = NormalDist().cdf(-quantile)
        low, high = numpy.quantile(draws, [tail, 1 - tail]).tolist()
        return low, high

    def standard_error(self) -> float:
        return float(self.draws().std()) if self.weights.size > 1 else 0.0

    def _gains(self, clients: Numbers, seeds: Numbers) -> Numbers:
        """[draws]: the mean gain, if clients [draws, N] and seeds [draws, S] count as often as these say."""
        with numpy.errstate(invalid="ignore", divide="ignore"):
            sums = clients @ self.weights.T
            mine, others = (
                self.measure.root((clients @ (self.weights * values).T) / sums) for values in (self.ours, self.theirs)
            )
            counts = numpy.where(sums > 0, seeds, 0.0)
            gains = numpy.where(counts > 0, self.measure.sign * (mine - others), 0.0)
            means: Numbers = (counts * gains).sum(1) / counts.sum(1)
        return means


def _counts(random: numpy.random.Generator, num_draws: int, size: int) -> Numbers:
    """[draws, size]: how often each of `size` is among as many that are drawn with replacement."""
    drawn = random.integers(size, size=(num_draws, size)) + size * numpy.arange(num_draws)[:, None]
    return numpy.bincount(drawn.ravel(), minlength=num_draws * size).reshape(num_draws, size).astype(numpy.float64)


def paired(measure: Measure, entry: Entry, theirs: Mapping[int, Numbers]) -> Pairs | None:
    """Pair an entry with another model's scores of clients by seed; None if no client has both."""
    ours = {seed: measure.of_clients(entry.results[seed]) for seed in theirs if seed in entry.results}
    sizes = {len(values) for values in [*ours.values(), *theirs.values()]}
    sizes |= {len(_examples(entry.results[seed])) for seed in ours}
    if not ours or len(sizes) > 1:
        return None
    mine, others = numpy.stack([*ours.values()]), numpy.stack([theirs[seed] for seed in ours])
    weights = numpy.stack([measure.weights(entry.results[seed]) for seed in ours])
    weights = numpy.where(numpy.isfinite(mine) & numpy.isfinite(others), weights, 0.0)
    kept = (weights > 0).any(0)
    shares = None
    if entry.cell.folds is not None:
        shares = numpy.stack([_examples(entry.results[seed]) for seed in ours])[:, kept]
    mine, others, weights = (numpy.where(weights > 0, part, 0.0)[:, kept] for part in (mine, others, weights))
    return Pairs(mine, others, weights, measure, shares) if kept.any() else None


def scores_beside(measure: Measure, entry: Entry, beside: Entry) -> dict[int, Numbers]:
    """An entry's scores of clients in the seeds in which it shares the split with another one."""
    return {seed: measure.of_clients(entry.results[seed]) for seed in seeds_alike(entry, beside)}
