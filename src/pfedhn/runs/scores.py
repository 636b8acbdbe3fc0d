"""Scores of clients as plain numbers and as text."""

from typing import Any

from pfedhn.engine.evaluate import SplitResult
from pfedhn.storage.schema import Scores


def scores_of(result: SplitResult, per_client: bool = True) -> Scores:
    """A split's scores as plain numbers; per client, the number of correct examples (or summed metric) and of all."""
    values = (result.loss if result.metric is None else result.metric).tolist()
    return Scores(
        result.mean_loss,
        int(result.count.sum()),
        None if result.metric is None else result.client_mean,
        None if result.metric is None else result.sample_mean,
        tuple(int(value) if float(value).is_integer() else float(value) for value in values) if per_client else None,
        tuple(result.count.tolist()) if per_client else None,
    )


def score_text(run: Any) -> str:
    """The newest evaluation and the best one, short enough for a line."""
    validation: Scores = run.history[-1].validation
    best = run.state.best.evaluation.splits["validation"].score
    if not validation.has_accuracy:
        return f"validation loss {validation.loss:.4f}, best {-best:.4f}"
    return f"validation {100 * validation.score:.1f} %, best {100 * best:.1f} %"
