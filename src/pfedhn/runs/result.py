"""What a run writes of an evaluation and of its end."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from pfedhn.engine.rounds import scores_of_adapted
from pfedhn.engine.state import EVALUATED_SPLITS, Evaluation, State
from pfedhn.runs.run import Run
from pfedhn.runs.scores import scores_of
from pfedhn.storage.identity import partition_digest, settings_of
from pfedhn.storage.schema import Clients, Moment, Result, SplitScores, to_json
from pfedhn.system.environment import environment

NUM_CLIENTS_IN_METRICS = 1_000  # larger federations keep per-client scores of the chosen round only
NUM_CLIENTS_DESCRIBED = 2_000  # of more, a result does not say who holds what


def moment_of(evaluation: Evaluation, state: State, seconds: float) -> Moment:
    """A line of metrics.jsonl."""
    splits = {}
    for name, result in evaluation.splits.items():
        scores = scores_of(result, len(result.count) <= NUM_CLIENTS_IN_METRICS)
        splits[name] = replace(scores, client_examples=None)  # the same in every line; the result has them
    return Moment(
        evaluation.step,
        evaluation.round,
        splits["validation"],
        splits["test"],
        state.bytes_down,
        state.bytes_up,
        round(seconds, 3),
    )


def result_of(run: Run, digests: Mapping[str, str] | None = None, history: str | None = None) -> Result:
    """The result of a run that has finished."""
    simulation, origin, chosen, state = run.simulation, run.origin, run.chosen, run.state
    validation, test = (scores_of(chosen.splits[split]) for split in EVALUATED_SPLITS)
    unadapted = None
    if simulation.fine_tunes:
        assert state.best is not None
        unadapted, adapted = SplitScores(validation, test), scores_of_adapted(simulation, state.best)
        validation, test = (scores_of(adapted[split]) for split in EVALUATED_SPLITS)
    result = Result(
        origin.name,
        origin.experiment,
        to_json(origin.cell),
        to_json(settings_of(simulation.algorithm)),
        simulation.seed,
        chosen.step,
        state.round * simulation.clients_per_round,
        state.round,
        validation,
        test,
        state.bytes_down,
        state.bytes_up,
        round(run.seconds, 3),
        dict(simulation.federation.unused),
        partition_digest(simulation.federation),
        origin.command,
        environment(simulation.federation.x.device),
        origin.pretrain,
        unadapted,
        digests=digests,
        history=history,
        clients=_clients(run),
    )
    return result.without_harmful_adaptation()


def _clients(run: Run) -> Clients | None:
    """Who the clients are, what they hold, and where their embeddings lie; of very many clients nothing."""
    federation = run.simulation.federation
    if federation.num_clients > NUM_CLIENTS_DESCRIBED:
        return None
    classes = place = share = None
    if federation.num_classes is not None and len(federation.y):
        counts = federation.class_counts.tolist()
        classes = tuple({str(label): count for label, count in enumerate(row) if count} for row in counts)
    if run.plan.embeddings(run.memories()) is not None:
        place, share = _plane(run.embeddings())
    return Clients(federation.names, federation.class_names, classes, place, share)


def _plane(embeddings: Tensor) -> tuple[tuple[tuple[float, ...], ...] | None, float | None]:
    """[N, D] in the plane in which they differ most (principal components), and the share of the variance there."""
    centered = nn.functional.pad(embeddings - embeddings.mean(0), (0, 1))  # one axis alone is a line in the plane
    total = float(centered.square().sum())
    if not 0 < total < math.inf:
        return None, None
    _, axes = torch.linalg.eigh(centered.T @ centered)  # rising: the last two are the widest
    axes = axes[:, -2:].flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # an axis has no direction of its own
    plane = centered @ axes
    return tuple(tuple(round(part, 5) for part in row) for row in plane.tolist()), float(plane.square().sum()) / total
