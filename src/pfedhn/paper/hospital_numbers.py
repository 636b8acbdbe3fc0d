"""What is computed from a run on hospitals: calibration, hospitals that join later, and what embeddings say.

Class 1 is the event, such as "dead or dependent". New hospitals are too small to train with the others. Their examples
are read exactly as the run read its own, and only what is personal is learned.
Axes: [E]xamples, [N] hospitals.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.data.cells import Columns
from pfedhn.data.columns import encoded_like, new_clients
from pfedhn.data.federation import Federation
from pfedhn.data.files import read_federation
from pfedhn.data.silos import SILOS, silo_columns
from pfedhn.experiments.finished import Finished
from pfedhn.runs.detailed import Rows, all_predictions
from pfedhn.runs.joining import NewClients
from pfedhn.runs.measures import BINS, Integers, Numbers, detailed_scores
from pfedhn.runs.run import Run
from pfedhn.runs.yardsticks import (
    CLIENT_STRENGTHS,
    Predicted,
    Table,
    fitting,
    own_base_rate,
    own_logistic,
    pooled_model,
)

LEAST, MOST = 20, 49  # patients of a new hospital; with 50 it trains with the others
SPLIT = (0.7, 0.15, 0.15)
ROUNDS, SMALL_ROUNDS = 20, 3
NEWTON_STEPS = 25
MAPPED = "pfedhn-intercept"  # what its embeddings make is one number of each hospital

YARDSTICKS = {
    "own base rate": False,
    "logistic regression of the new hospital alone": False,
    "pooled logistic regression": True,
    "pooled logistic regression with an own intercept": True,
}
"""Whether a yardstick for new hospitals needs the rows of all training hospitals in one place."""


def compute(finished: Finished) -> Mapping[str, Any]:
    """Calibration on test examples; scores of new hospitals, if there are any; what embeddings generate."""
    run, federation = finished.run, finished.federation
    predicted = all_predictions(run.simulation, run.memories(), run.chosen.round, run.adapts)
    assert predicted is not None
    rows, table = Rows.of(federation, "test"), Table.of(federation)
    with fitting():
        base_rate = own_base_rate(table, finished.seed)["test"]
    assert federation.class_names is not None
    found: dict[str, Any] = {
        "event": federation.class_names[1],
        "calibration": {
            "model": bins(predicted[rows.numbers.cpu()], rows.y),
            "base rate": bins(base_rate, table.y["test"]),
        },
    }
    new = new_hospitals(finished)
    joined = None if new is None else _joined(finished, new)
    if new is not None and joined is not None:
        found["new"] = {
            "hospitals": new.num_clients,
            "patients": len(new.y),
            "before": _scores_of(run.add_clients(new, rounds=0), False),
            "after": _scores_of(joined, joined.adapts),
            "round": joined.round,
            "rate": joined.settings.get("embedding_lr"),
            "yardsticks": yardsticks_for(new, federation, finished.seed),
        }
    if finished.cell.method == MAPPED:
        found["map"] = mapped(finished.run, federation)
        if joined is not None:
            found["map"]["new"] = mapped(joined, joined.simulation.federation)
    return found


def new_hospitals(finished: Finished) -> Federation | None:
    """The hospitals that are too small to train, read and scaled as the run's own; None if there are none."""
    federation = finished.federation
    assert federation.reading is not None
    assert federation.class_names is not None
    table = federation.reading.table
    assert table is not None
    columns = _columns(finished)
    names, groups, counts = numpy.unique(columns[table.client].astype(str), return_inverse=True, return_counts=True)
    trained = [federation.name_of(client) for client in range(federation.num_clients)]
    is_new = (counts >= LEAST) & (counts <= MOST) & ~numpy.isin(names, trained)
    if not is_new.any():
        return None
    x = encoded_like(columns, table)
    y = numpy.array([federation.class_names.index(str(label)) for label in columns[table.label]])
    clients = {str(names[group]): (x[groups == group], y[groups == group]) for group in numpy.flatnonzero(is_new)}
    return new_clients(clients, SPLIT, finished.seed, table)[0]


def _columns(finished: Finished) -> Columns:
    """The table that a run was trained on, with the rows of hospitals that did not train."""
    if finished.cell.dataset in SILOS:
        return silo_columns(finished.cell.dataset, finished.options.data_dir)
    return made_up_columns(finished.cell.clients)


def _joined(finished: Finished, new: Federation) -> NewClients:
    """The new hospitals after they have learned what is personal; FedAvg's model has nothing personal."""
    rounds = ROUNDS if finished.cell.dataset in SILOS else SMALL_ROUNDS
    return finished.run.add_clients(new, rounds=0 if finished.cell.method == "fedavg" else rounds)


def _scores_of(joined: NewClients, is_adapted: bool) -> dict[str, float | None]:
    predicted = all_predictions(joined.simulation, joined.memories, joined.round, is_adapted)
    assert predicted is not None
    rows = Rows.of(joined.simulation.federation, "test")
    return _scores(predicted[rows.numbers.cpu()], rows.y, rows.clients)


def _scores(predicted: Numbers, y: NDArray[Any], clients: Integers) -> dict[str, float | None]:
    """Accuracy over hospitals, AUC and log loss over patients."""
    found = detailed_scores(predicted, y, clients, int(clients.max()) + 1)
    return {
        "accuracy": found.clients.get("accuracy"),
        **{name: found.examples.get(name) for name in ("auc", "log_loss")},
    }


def yardsticks_for(new: Federation, trained: Federation, seed: int) -> dict[str, dict[str, float | None]]:
    """Score models that are not federated on the test examples of new hospitals.

    Strengths are tuned on the validation examples of all new hospitals together, as the round and the learning rate of
    those that join are; that of the pooled regression on the hospitals that trained.
    """
    with fitting():
        own = Table.of(new)
        model, table = pooled_model(Table.of(trained)), Table.of(new, like=trained)
        logits = {split: model.decision_function(x) for split, x in table.x.items()}
        with_intercept = min((own_intercepts(table, logits, one) for one in CLIENT_STRENGTHS), key=table.loss)
        found = (
            own_base_rate(own, seed),
            own_logistic(own, seed),
            own_intercepts(table, logits, 0.0),
            with_intercept,
        )
    return {
        name: _scores(predicted["test"], table.y["test"], table.clients["test"])
        for name, predicted in zip(YARDSTICKS, found, strict=True)
    }


def own_intercepts(table: Table, logits: Mapping[str, Numbers], strength: float) -> Predicted:
    """Add an intercept for each hospital to given logits, fitted to its training examples.

    Args:
        table: Of the hospitals.
        logits: Of the event, in each split.
        strength: 1 / penalty of the intercepts; 0 leaves them out.
    """
    intercepts, clients = numpy.zeros(table.num_clients), table.clients["train"]
    for _ in range(NEWTON_STEPS if strength else 0):
        chance = _chance(logits["train"] + intercepts[clients])
        slope = numpy.bincount(clients, table.y["train"] - chance, table.num_clients) - intercepts / strength
        intercepts += slope / (numpy.bincount(clients, chance * (1 - chance), table.num_clients) + 1 / strength)
    chances = {split: _chance(logits[split] + intercepts[table.clients[split]]) for split in ("validation", "test")}
    return {split: numpy.stack([1 - chance, chance], 1) for split, chance in chances.items()}


def _chance(logits: Numbers) -> Numbers:
    chance: Numbers = 1 / (1 + numpy.exp(-logits))
    return chance


def bins(predicted: Numbers, y: NDArray[Any]) -> dict[str, list[float]]:
    """Sums over examples in ten bins of the event's probability: how many, predicted events, observed events."""
    chance = predicted[:, 1]
    places = numpy.minimum((chance * BINS).astype(int), BINS - 1)
    summed = partial(numpy.bincount, places, minlength=BINS)
    return {"patients": summed().tolist(), "predicted": summed(chance).tolist(), "observed": summed(y == 1).tolist()}


def rates(federation: Federation) -> Numbers:
    """[N]: the event's share of each hospital's training examples."""
    found: Numbers = federation.class_shares[:, 1].double().cpu().numpy()
    return found


def mapped(run: Run | NewClients, federation: Federation) -> dict[str, Numbers]:
    """The intercept that each hospital's embedding generates, in log odds of the event, beside its outcome rate."""
    model = run.simulation.model_of(0)
    bias = [name for name in model.shapes if name.endswith("bias")][-1]
    weights = [run.personal_weights(client)[bias].double().cpu() for client in range(federation.num_clients)]
    return {"intercept": numpy.array([float(one[1] - one[0]) for one in weights]), "rate": rates(federation)}


# Made-up hospitals, for `--small`


def made_up(clients: int, seed: int) -> Federation:
    """A federation of made-up hospitals, read as the stroke trial is."""
    columns = made_up_columns(clients)
    return read_federation(columns, "hospital", "outcome", task="classification", seed=seed, min_examples=MOST + 1)


def made_up_columns(clients: int) -> Columns:
    """Made-up patients of hospitals that train, with 50 to 79 each, and of a few small ones.

    Hospitals differ in their intercept. Some blood pressures are missing, as in real tables.
    """
    generator = numpy.random.default_rng(0)
    sizes = [*generator.integers(MOST + 1, 80, clients), *generator.integers(LEAST, MOST + 1, max(0, clients // 2 - 2))]
    hospital = numpy.repeat(numpy.arange(len(sizes)), sizes)
    count = len(hospital)
    age, pressure = generator.normal(72, 11, count), generator.normal(160, 27, count)
    sex, symptom = generator.choice(["F", "M"], count), generator.choice(["drowsy", "alert", "unconscious"], count)
    logit = 0.07 * (age - 72) + 1.5 * (symptom == "unconscious") - (symptom == "alert")
    is_event = generator.random(count) < _chance(logit + generator.normal(0, 1, len(sizes))[hospital])
    is_missing = generator.random(count) < 0.1
    cells = {
        "hospital": [f"hospital-{number:02d}" for number in hospital],
        "age": [f"{value:.1f}" for value in age],
        "pressure": ["" if gone else f"{value:.1f}" for value, gone in zip(pressure, is_missing, strict=True)],
        "sex": sex.tolist(),
        "consciousness": symptom.tolist(),
        "outcome": ["dead or dependent" if one else "alive and independent" for one in is_event],
    }
    columns = Columns(Path("made-up"))
    columns.update({name: numpy.array(column, dtype=object) for name, column in cells.items()})
    return columns
