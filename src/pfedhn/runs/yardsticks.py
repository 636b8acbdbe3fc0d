"""Yardsticks: models that are not federated, fitted to the very training rows of a federation's table.

They say what a federated method has to beat: each client's base rate or mean, linear models with and without the
others' rows, and what an analyst fits who has all rows in one place. Their strengths are tuned on the validation rows;
test rows are only scored.

Axes: [E]xamples, [F]eatures, classes [L], [N] clients.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from pfedhn.data.federation import Federation
from pfedhn.runs.detailed import Rows, is_table, mean_loss
from pfedhn.runs.measures import Integers, Numbers, detailed_scores
from pfedhn.storage.schema import Yardstick

SPLITS = ("train", "validation", "test")
FARTHEST = 10.0  # deviations from the mean at which an input is cut off

# Without validation rows the first of each is taken; otherwise it wins where several are as good.
BASE_WEIGHTS = (10.0, 0.0, 1.0, 3.0, 30.0, 100.0)  # of the pooled base rate or mean, as rows of a client
STRENGTHS = (0.1, 0.001, 0.003, 0.01, 0.03, 0.3, 1.0, 3.0)  # C of a logistic regression: 1 / penalty
CLIENT_STRENGTHS = (0.3, 0.03, 0.1, 1.0, 3.0)  # of the intercepts of clients
PENALTIES = (10.0, 0.1, 1.0, 3.0, 30.0, 100.0, 300.0, 1_000.0)  # of a ridge regression
CLIENT_PENALTIES = (3.0, 0.3, 1.0, 10.0, 30.0, 100.0)  # of the intercepts of clients
TREES = ((0.1, 15), (0.05, 5))  # learning rate, and leaves of a tree
STAGE, PATIENCE, MAX_STAGES = 10, 3, 40  # rounds of boosting before validation is asked, worse answers, questions
BLIND_STAGES = 10  # without validation rows
MAX_TREES = 2_400  # of all classes together, each of which has one in a round

MAX_TUNED = 200  # clients whose rows choose the strength of all clients' own models
MAX_DENSE = 300  # clients that are named by columns of a dense matrix
MAX_CATEGORIES = 255  # that scikit-learn's trees take
MAX_ROWS = 100_000  # that logistic regressions and trees of all clients are fitted to
MAX_ITERATIONS = 300

Predicted: TypeAlias = Mapping[str, Numbers]
"""Of each split: probabilities [E, L], or numbers [E]."""


@dataclass(frozen=True)
class Table:
    """A federation's rows in every split, client after client, with inputs scaled over all training rows."""

    x: Mapping[str, Numbers]  # [E, F]
    y: Mapping[str, NDArray[Any]]  # [E]
    clients: Mapping[str, Integers]  # [E]
    num_clients: int
    num_classes: int | None

    @staticmethod
    def of(federation: Federation, like: Federation | None = None) -> "Table":
        """Read a federation's rows.

        Args:
            federation: A table.
            like: Whose training rows give the scale; its own if None.
        """
        rows = {split: Rows.of(federation, split) for split in SPLITS}
        values = {split: federation.x[part.numbers].double().cpu().numpy() for split, part in rows.items()}
        seen = values["train"] if like is None else like.x[Rows.of(like, "train").numbers].double().cpu().numpy()
        mean, deviation = seen.mean(0), seen.std(0)
        deviation[deviation <= 1e-9 * abs(mean)] = numpy.inf  # a constant column becomes 0
        return Table(
            {split: ((part - mean) / deviation).clip(-FARTHEST, FARTHEST) for split, part in values.items()},
            {split: part.y for split, part in rows.items()},
            {split: part.clients for split, part in rows.items()},
            federation.num_clients,
            federation.num_classes,
        )

    @cached_property
    def owned(self) -> list[dict[str, slice]]:
        """The rows of each client in every split."""
        edges = {name: numpy.searchsorted(self.clients[name], range(self.num_clients + 1)) for name in SPLITS}
        return [
            {split: slice(*edges[split][client : client + 2].tolist()) for split in SPLITS}
            for client in range(self.num_clients)
        ]

    def first(self, count: int) -> "Table":
        """The table of the first clients."""
        if count >= self.num_clients:
            return self
        ends = {split: self.owned[count - 1][split].stop for split in SPLITS}
        return replace(
            self,
            x={split: part[: ends[split]] for split, part in self.x.items()},
            y={split: part[: ends[split]] for split, part in self.y.items()},
            clients={split: part[: ends[split]] for split, part in self.clients.items()},
            num_clients=count,
        )

    def drawn(self, seed: int) -> "Table":
        """The table with as many of its training rows, drawn at random, as a model of all clients is fitted to."""
        if (count := len(self.y["train"])) <= MAX_ROWS:
            return self
        rows = numpy.sort(numpy.random.default_rng(seed).choice(count, MAX_ROWS, replace=False))
        return replace(
            self,
            x={**self.x, "train": self.x["train"][rows]},
            y={**self.y, "train": self.y["train"][rows]},
            clients={**self.clients, "train": self.clients["train"][rows]},
        )

    def loss(self, predicted: Predicted) -> float:
        """The loss on validation rows, which chooses settings; 0 without these."""
        return mean_loss(predicted["validation"], self.y["validation"]) or 0.0


class Kind(NamedTuple):
    """How a yardstick is called and fitted."""

    name: str
    title: str
    predict: Callable[[Table, int], Predicted]

    def fitted(self, table: Table, seed: int) -> Yardstick:
        predicted = self.predict(table, seed)
        loss = mean_loss(predicted["validation"], table.y["validation"])
        scores = detailed_scores(predicted["test"], table.y["test"], table.clients["test"], table.num_clients, loss)
        return Yardstick(self.name, self.title, not self.name.startswith("own-"), loss, scores)


def yardsticks(federation: Federation, seed: int) -> tuple[Yardstick, ...]:
    """Fit all yardsticks to a table's training rows and score them on its test rows; none without a table.

    Args:
        federation: Its rows and splits are used as they are; inputs are scaled over all training rows.
        seed: Of what draws at random.
    """
    if not is_table(federation):
        return ()
    table = Table.of(federation)
    with fitting():
        return tuple(kind.fitted(table, seed) for kind in (NUMBERS if table.num_classes is None else CLASSES))


@contextmanager
def fitting() -> Iterator[None]:
    """Use one thread, whose sums are the same on every machine, and tell nobody that an iteration was the last."""
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        yield


def _best(table: Table, candidates: Iterable[Predicted]) -> Predicted:
    """The first of the candidates with the lowest loss on validation rows."""
    return min(candidates, key=table.loss)


def own_base_rate(table: Table, seed: int) -> Predicted:
    """Predict each client's class frequencies, or its mean, shrunk toward those of all clients."""
    y = table.y["train"] if table.num_classes is None else numpy.eye(table.num_classes)[table.y["train"]]
    sums = numpy.zeros((table.num_clients, *y.shape[1:]))
    numpy.add.at(sums, table.clients["train"], y)
    sizes = numpy.bincount(table.clients["train"], minlength=table.num_clients).reshape(-1, *[1] * (y.ndim - 1))
    rates = [(sums + weight * y.mean(0)) / (sizes + weight) for weight in BASE_WEIGHTS]
    return _best(table, ({split: rate[table.clients[split]] for split in SPLITS} for rate in rates))


def own_logistic(table: Table, seed: int) -> Predicted:
    """Fit a logistic regression for each client, all of one strength; classes that it lacks get its base rate."""
    base, tuned = own_base_rate(table, seed), table.first(MAX_TUNED)
    strength = min(STRENGTHS, key=lambda strength: tuned.loss(_own_logistic(tuned, base, strength)))
    return _own_logistic(table, base, strength)


def _own_logistic(table: Table, base: Predicted, strength: float) -> Predicted:
    found = {split: base[split][: len(table.y[split])].copy() for split in SPLITS}
    for own in table.owned:
        x, y = table.x["train"][own["train"]], table.y["train"][own["train"]]
        if len(numpy.unique(y)) < 2:
            continue
        model = _logistic(x, y, strength)
        for split in SPLITS[1:]:
            if own[split].stop > own[split].start:
                shares = found[split][own[split]]
                shares[:, model.classes_] = model.predict_proba(table.x[split][own[split]]) * shares[
                    :, model.classes_
                ].sum(1, keepdims=True)
    return found


def pooled_logistic(table: Table, seed: int) -> Predicted:
    """Fit one logistic regression for all clients."""
    return _predicted(table, pooled_model(table.drawn(seed)), table.x)


def pooled_model(table: Table) -> Any:
    """One logistic regression for all clients, of the best strength."""
    models = [_logistic(table.x["train"], table.y["train"], strength) for strength in STRENGTHS]
    return min(models, key=lambda model: table.loss(_predicted(table, model, table.x)))


def pooled_logistic_client(table: Table, seed: int) -> Predicted:
    """Fit one logistic regression whose inputs name the client; its intercepts have their own strength."""
    table = table.drawn(seed)
    shared = pooled_model(table).C
    tried: dict[tuple[float, float], Predicted] = {}

    def predicted(strength: float, of_clients: float) -> Predicted:
        if (strength, of_clients) not in tried:
            x = {split: _with_clients(table, split, (of_clients / strength) ** 0.5) for split in SPLITS}
            model = _logistic(x["train"], table.y["train"], strength)
            tried[strength, of_clients] = _predicted(table, model, x)
        return tried[strength, of_clients]

    of_clients = min(CLIENT_STRENGTHS, key=lambda strength: table.loss(predicted(shared, strength)))
    ordered = sorted(STRENGTHS)
    place = ordered.index(shared)
    near = (shared, *ordered[max(place - 1, 0) : place], *ordered[place + 1 : place + 2])
    return predicted(min(near, key=lambda strength: table.loss(predicted(strength, of_clients))), of_clients)


def _with_clients(table: Table, split: str, scale: float) -> Any:
    """[E, F + N]: the inputs, and a column for each client."""
    clients = table.clients[split]
    if table.num_clients <= MAX_DENSE:
        return numpy.hstack([table.x[split], scale * numpy.eye(table.num_clients)[clients]])
    from scipy import sparse

    shape = (len(clients), table.num_clients)
    named = sparse.csr_matrix((numpy.full(len(clients), scale), (numpy.arange(len(clients)), clients)), shape=shape)
    return sparse.hstack([sparse.csr_matrix(table.x[split]), named]).tocsr()


def _logistic(x: Any, y: Integers, strength: float) -> Any:
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression

    num_classes = len(numpy.unique(y))
    if num_classes < 2:
        model = DummyClassifier()
        model.C = strength
        return model.fit(x, y)
    is_small = num_classes == 2 and isinstance(x, numpy.ndarray) and x.shape[1] <= 2 * MAX_DENSE
    solver = "newton-cholesky" if is_small else "lbfgs"
    return LogisticRegression(C=strength, solver=solver, max_iter=MAX_ITERATIONS).fit(x, y)


def _predicted(table: Table, model: Any, x: Mapping[str, Any]) -> Predicted:
    """The probabilities of all classes, of which the training rows may lack some."""
    found = {}
    for split in SPLITS[1:]:
        found[split] = numpy.zeros((len(table.y[split]), table.num_classes or 0))
        if len(found[split]):
            found[split][:, model.classes_] = model.predict_proba(x[split])
    return found


def own_ridge(table: Table, seed: int) -> Predicted:
    """Fit a ridge regression for each client, all of one penalty."""
    parts: dict[float, list[dict[str, Numbers]]] = {penalty: [] for penalty in PENALTIES}
    for own in table.owned:
        x, y = table.x["train"][own["train"]], table.y["train"][own["train"]]
        left, sizes, right = numpy.linalg.svd(x - x.mean(0), full_matrices=False)
        inside = left.T @ (y - y.mean())
        for penalty in PENALTIES:
            slopes = right.T @ (sizes / (sizes**2 + penalty) * inside)
            parts[penalty].append(
                {split: y.mean() + (table.x[split][own[split]] - x.mean(0)) @ slopes for split in SPLITS}
            )
    return _best(
        table,
        ({split: numpy.concatenate([part[split] for part in own]) for split in SPLITS} for own in parts.values()),
    )


def pooled_ridge(table: Table, seed: int) -> Predicted:
    """Fit one ridge regression for all clients."""
    return _best(table, _ridges(table, numpy.inf))


def pooled_ridge_client(table: Table, seed: int) -> Predicted:
    """Fit one ridge regression in which every client has an intercept, with its own penalty."""
    return _best(table, (found for penalty in CLIENT_PENALTIES for found in _ridges(table, penalty)))


def _ridges(table: Table, of_clients: float) -> Iterator[Predicted]:
    """Ridge regressions of every penalty, given that of the clients' intercepts, which are solved for first."""
    x = {split: numpy.hstack([table.x[split], numpy.ones((len(table.y[split]), 1))]) for split in SPLITS}
    y, clients = table.y["train"], table.clients["train"]
    sums, of_y = numpy.zeros((table.num_clients, x["train"].shape[1])), numpy.zeros(table.num_clients)
    numpy.add.at(sums, clients, x["train"])
    numpy.add.at(of_y, clients, y)
    shares = 1 / (sums[:, -1] + of_clients)  # the last column counts
    products = x["train"].T @ x["train"] - (sums * shares[:, None]).T @ sums
    right = x["train"].T @ y - sums.T @ (shares * of_y)
    is_penalized = numpy.ones(len(right))
    is_penalized[-1] = 0
    for penalty in PENALTIES:
        slopes = numpy.linalg.solve(products + penalty * numpy.diag(is_penalized), right)
        intercepts = shares * (of_y - sums @ slopes)
        yield {split: x[split] @ slopes + intercepts[table.clients[split]] for split in SPLITS}


def pooled_boosting_client(table: Table, seed: int) -> Predicted:
    """Fit boosted trees whose inputs name the client, as many as validation rows want."""
    table = table.drawn(seed)
    if table.num_classes is not None and len(numpy.unique(table.y["train"])) < 2:  # which trees refuse
        return own_base_rate(table, seed)
    return _best(table, (_boosted(table, seed, rate, leaves) for rate, leaves in TREES))


def _boosted(table: Table, seed: int, rate: float, leaves: int) -> Predicted:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    x = {split: numpy.column_stack([table.x[split], table.clients[split]]) for split in SPLITS}
    make = HistGradientBoostingRegressor if table.num_classes is None else HistGradientBoostingClassifier
    model = make(
        learning_rate=rate,
        max_leaf_nodes=leaves,
        categorical_features=[table.x["train"].shape[1]] if table.num_clients <= MAX_CATEGORIES else None,
        early_stopping=False,
        warm_start=True,
        random_state=seed,
    )
    found: list[Predicted] = []
    losses: list[float] = []
    most = min(MAX_STAGES, max(1, MAX_TREES // (STAGE * (table.num_classes or 1))))
    for stage in range(1, most + 1) if len(table.y["validation"]) else (min(most, BLIND_STAGES),):
        model.set_params(max_iter=stage * STAGE).fit(x["train"], table.y["train"])
        if table.num_classes is not None:
            found.append(_predicted(table, model, x))
        else:
            found.append({split: model.predict(x[split]) if len(x[split]) else numpy.zeros(0) for split in SPLITS[1:]})
        losses.append(table.loss(found[-1]))
        if len(losses) - losses.index(min(losses)) > PATIENCE:
            break
    return found[losses.index(min(losses))]


CLASSES = (
    Kind("own-base-rate", "each client's base rate", own_base_rate),
    Kind("own-linear", "logistic regression of each client alone", own_logistic),
    Kind("pooled-linear", "pooled logistic regression", pooled_logistic),
    Kind("pooled-linear-client", "pooled logistic regression with the client", pooled_logistic_client),
    Kind("pooled-boosting-client", "pooled boosted trees with the client", pooled_boosting_client),
)
NUMBERS = (
    Kind("own-mean", "each client's mean", own_base_rate),
    Kind("own-linear", "ridge regression of each client alone", own_ridge),
    Kind("pooled-linear", "pooled ridge regression", pooled_ridge),
    Kind("pooled-linear-client", "pooled ridge regression with the client", pooled_ridge_client),
    Kind("pooled-boosting-client", "pooled boosted trees with the client", pooled_boosting_client),
)
