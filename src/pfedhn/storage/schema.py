"""The schema of result.json, of metrics.jsonl and of the lines of exported results.

Every class here is written by `to_json` and read by `from_json`, which also knows the words of earlier versions.
"""

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.state import Select
from pfedhn.errors import UserError
from pfedhn.system.environment import Environment

Value = TypeVar("Value")

OLD_WORDS = {"rows": "examples", "client_rows": "client_examples", "unused_rows": "unused_examples"}
"""Keys of files that earlier versions wrote, and what they are called now."""


class SchemaError(UserError):
    """A table does not fit the schema; the caller, who knows its file, says so."""


def from_json(kind: type[Value], table: Mapping[str, Any]) -> Value:
    """Make a dataclass from a table of JSON or TOML; unknown keys are ignored."""
    hints = get_type_hints(kind)
    table = {OLD_WORDS.get(name, name): value for name, value in table.items()}
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name in table:
            values[item.name] = _value(item.name, hints[item.name], table[item.name])
        elif item.default is MISSING and item.default_factory is MISSING:
            raise SchemaError(f"{item.name!r} is missing or of the wrong kind")
    return kind(**values)


def _value(name: str, hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (option for option in arguments if option is not type(None))
        return _value(name, hint, value)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        try:
            return from_json(hint, value)
        except SchemaError:
            raise SchemaError(f"{name!r} is not whole") from None
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(name, arguments[0], part) for part in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _value(name, arguments[1], part) for key, part in value.items()}
    kinds = {float: (int, float), int: (int,), str: (str,), bool: (bool,), Any: (object,)}.get(hint, ())
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint in (int, float)):
        raise SchemaError(f"{name!r} is missing or of the wrong kind")
    return value


def to_json(value: Any) -> Any:
    """A dataclass as tables and lists; None is left out if it is the default."""
    if is_dataclass(value):
        given = {item.name: (getattr(value, item.name), item.default) for item in fields(value)}
        return {
            name: to_json(part) for name, (part, default) in given.items() if not (part is None and default is None)
        }
    if isinstance(value, Mapping):
        return {name: to_json(part) for name, part in value.items()}
    return [to_json(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Scores:
    """The clients' scores on one split, each with its own model."""

    loss: float  # mean over examples
    examples: int
    client_mean: float | None = None  # accuracy over the clients that have examples; a task without accuracy has none
    sample_mean: float | None = None  # accuracy over examples
    clients: tuple[float, ...] | None = None  # each one's number of correct examples, or its summed metric or loss
    client_examples: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (self.client_mean is None) != (self.sample_mean is None):
            raise SchemaError("one mean is missing")
        if self.clients and self.client_examples is not None and len(self.clients) != len(self.client_examples):
            raise SchemaError("'clients' and 'client_examples' differ in length")

    @staticmethod
    def of(result: SplitResult, per_client: bool = True, loss_unit: float = 1.0) -> "Scores":
        """A split's scores as plain numbers; losses are multiplied by `loss_unit`."""
        sums = (loss_unit * result.loss if result.metric is None else result.metric).tolist()
        values = tuple(int(value) if float(value).is_integer() else float(value) for value in sums)
        return Scores(
            loss_unit * result.mean_loss,
            int(result.count.sum()),
            None if result.metric is None else result.client_mean,
            None if result.metric is None else result.sample_mean,
            tuple(int(value) if float(value).is_integer() else float(value) for value in values)
            if per_client
            else None,
            tuple(result.count.tolist()) if per_client else None,
        )

    @property
    def has_accuracy(self) -> bool:
        return self.client_mean is not None

    @property
    def score(self) -> float:
        """The score to choose rounds and learning rates by: accuracy over all examples, or else minus the loss."""
        return self.score_by("metric")

    def score_by(self, select: Select) -> float:
        """As `score`; with "loss", minus the loss in any case."""
        return -self.loss if self.sample_mean is None or select == "loss" else self.sample_mean


@dataclass(frozen=True)
class Moment:
    """One evaluation of a run: a line of metrics.jsonl."""

    step: int
    round: int
    validation: Scores
    test: Scores
    bytes_down: int
    bytes_up: int
    seconds: float
    norms: Mapping[str, float] | None = None  # of the server's memories, where they were asked for

    def numbers(self) -> dict[str, float]:
        """The evaluation as a flat table of numbers."""
        table: dict[str, float] = {"round": self.round, "seconds": self.seconds}
        table |= {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up}
        for split, scores in (("validation", self.validation), ("test", self.test)):
            if scores.examples == 0:
                continue
            table[f"{split}_loss"] = scores.loss
            if scores.client_mean is not None and scores.sample_mean is not None:
                table[f"{split}_client_accuracy"] = scores.client_mean
                table[f"{split}_sample_accuracy"] = scores.sample_mean
        return table | {f"{name}_norm": value for name, value in (self.norms or {}).items()}


@dataclass(frozen=True)
class Measures:
    """One split's scores at every evaluation of a run: both accuracies, or the loss for a task without accuracy."""

    client_mean: tuple[float, ...] | None = None
    sample_mean: tuple[float, ...] | None = None
    loss: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Curve:
    """The learning curve of a run in a file of results."""

    step: tuple[int, ...]
    validation: Measures
    test: Measures

    def __post_init__(self) -> None:
        for split in (self.validation, self.test):
            columns = [split.loss] if split.client_mean is None else [split.client_mean, split.sample_mean]
            if any(column is None or len(column) != len(self.step) for column in columns):
                raise SchemaError("a column is missing or too short")

    @staticmethod
    def of(history: Sequence[Moment]) -> "Curve":
        return Curve(
            tuple(moment.step for moment in history),
            _measures([moment.validation for moment in history]),
            _measures([moment.test for moment in history]),
        )


def _measures(scores: Sequence[Scores]) -> Measures:
    if all(part.has_accuracy for part in scores):
        return Measures(tuple(part.client_mean for part in scores), tuple(part.sample_mean for part in scores))  # type: ignore[misc]
    return Measures(loss=tuple(part.loss for part in scores))


@dataclass(frozen=True)
class DetailedScores:
    """The measures of a task on test examples at the chosen round, by name.

    Of classes: accuracy, balanced_accuracy, f1, auc, log_loss, brier, calibration_error. Of numbers: rmse, mae, r2.
    A measure that is not defined, such as the AUC of examples of one class, is left out.
    """

    examples: Mapping[str, float]  # over all examples
    clients: Mapping[str, float]  # the mean over the clients for which it is defined
    client_loss: tuple[float | None, ...]  # each client's mean log loss or squared error; None without examples
    validation_loss: float | None = None  # mean log loss or squared error over validation examples, for a choice


@dataclass(frozen=True)
class Yardstick:
    """A model that is not federated, scored on the test examples of a run of the same split."""

    name: str
    title: str
    needs_all_data: bool  # whether it needs the rows of all clients in one place
    validation_loss: float | None  # mean over examples: log loss, or squared error in the units of the label
    detailed: DetailedScores


@dataclass(frozen=True)
class PretrainingCost:
    """The cost of a run that another one starts from."""

    name: str
    steps: int
    bytes_down: int
    bytes_up: int
    seconds: float


@dataclass(frozen=True)
class SplitScores:
    """What clients scored at the chosen round, before or after their own adaptation steps."""

    validation: Scores
    test: Scores


@dataclass(frozen=True)
class Clients:
    """The clients, for reports; a run with very many, or over a network, has only a part."""

    names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    classes: tuple[Mapping[str, int], ...] | None = None  # each one's training examples of each class that it has
    map: tuple[tuple[float, ...], ...] | None = None  # each one's embedding in the plane
    map_variance: float | None = None  # the share of the embeddings' variance that the plane shows

    def __post_init__(self) -> None:
        sizes = {len(part) for part in (self.names, self.classes, self.map) if part is not None}
        if len(sizes) > 1 or any(len(place) != 2 for place in self.map or ()):
            raise SchemaError("'clients' is not whole")


@dataclass(frozen=True)
class Result:
    """The scores of a finished run at the round chosen on validation, its cost, and how to repeat it."""

    name: str
    experiment: str
    cell: Mapping[str, Any]  # of an experiment's run: every field; else empty
    settings: Mapping[str, Any]  # of the method, also those that were left at their defaults
    seed: int
    chosen_step: int
    steps: int
    rounds: int
    validation: Scores
    test: Scores
    bytes_down: int
    bytes_up: int
    seconds: float
    unused_examples: Mapping[str, int]
    partition_sha256: str
    command: str
    environment: Environment
    pretrain: PretrainingCost | None = None
    unadapted: SplitScores | None = None  # where clients adapt: before their steps
    adapted: SplitScores | None = None  # after them, where these are not used, since they did not help on validation
    digests: Mapping[str, str] | None = None  # names for all that the run was made of
    history: str | None = None  # SHA-256 of metrics.jsonl
    clients: Clients | None = None  # earlier versions did not say who they are
    detailed: DetailedScores | None = None  # of the test examples of a table
    select: Select = "metric"  # what chose the round on validation

    @property
    def score(self) -> float:
        """The validation score that chose the round."""
        return self.validation.score_by(self.select)

    def __post_init__(self) -> None:
        if self.test.clients is None or self.test.client_examples is None:
            raise SchemaError("'test' is not whole")

    @property
    def rows(self) -> str:
        """The checksums of the split and, if it is known, of the data: yardsticks on the same rows are found by it."""
        data = (self.digests or {}).get("data")
        return self.partition_sha256 if data is None else f"{self.partition_sha256} {data}"

    def without_harmful_adaptation(self) -> "Result":
        """With the clients' models before their own steps, if these made them worse on validation.

        Runs of earlier versions have those after the steps in any case.
        """
        before = self.unadapted
        if before is None or self.adapted is not None or not is_worse(self.validation, before.validation, self.select):
            return self
        after = SplitScores(self.validation, self.test)
        return replace(self, validation=before.validation, test=before.test, adapted=after)


def is_worse(after: Scores, before: Scores, select: Select) -> bool:
    """Whether steps made a score worse, or diverged; scores of no examples are NaN, and never worse."""
    return before.score_by(select) > after.score_by(select) or (
        math.isfinite(before.loss) and not math.isfinite(after.loss)
    )
