"""Section 4.1, Proposition 1: a linear hypernetwork finds the principal components of the clients' own solutions.

Client i has y = X_i theta_i + noise with X_i^T X_i = I (times the number of examples), and theta_i in a subspace of few
dimensions. The best W V of rank k is the truncated singular value decomposition of the local solutions, uncentered. A
rank between 1 (one direction for all) and n (everybody alone) also removes noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.data.federation import Federation
from pfedhn.experiments.finished import Finished
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.report.entries import Summary
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, setting
from pfedhn.report.tables import number_text

Floats = NDArray[numpy.float64]

CLIENTS, DIM, SAMPLES, RANK, NOISE = 30, 20, 40, 3, 1.5
RANKS = (1, 2, 3, 4, 6, 10, 15, 20, 30)
ROUNDS = 4_000
NUMBERS = ("angle", "loss", "closed_loss", "error", "closed_error", "local_error")


def truth(clients: int, seed: int, dim: int = DIM, rank: int = RANK) -> Floats:
    """[clients, dim]: what every client would find without noise; not centered."""
    generator = numpy.random.default_rng([seed, 0])
    basis = numpy.linalg.qr(generator.normal(size=(dim, rank)))[0]
    result: Floats = (generator.normal(size=(clients, rank)) + 0.5) @ basis.T
    return result


def federation(
    clients: int, seed: int, dim: int = DIM, samples: int = SAMPLES, rank: int = RANK, noise: float = NOISE
) -> Federation:
    """Linear regression; inputs for training have orthogonal columns, and test examples have no noise."""
    generator = numpy.random.default_rng([seed, 1])
    made = []
    for theta in truth(clients, seed, dim, rank):
        x = numpy.linalg.qr(generator.normal(size=(samples, dim)))[0] * math.sqrt(samples)
        held = [generator.normal(size=(100, dim)) for _ in range(2)]
        parts = {"train": (x, noise), "validation": (held[0], noise), "test": (held[1], 0.0)}
        made.append(
            {
                name: tuple(a.astype(numpy.float32) for a in (x, x @ theta + s * generator.normal(size=len(x))))
                for name, (x, s) in parts.items()
            }
        )
    return Federation.from_clients(made)  # type: ignore[arg-type]


def compute(finished: Finished) -> Mapping[str, Any]:
    """The trained W and V against the closed form: angle between their spaces, loss, and the error of the models."""
    data = finished.federation
    (matrix,) = finished.shared(last=True).phi.values()
    w, v = matrix.double().cpu().numpy(), finished.embeddings(last=True).numpy()  # [dim, k] and [clients, k]
    local = numpy.stack([_solution(data, client) for client in range(data.num_clients)])
    rank = int(finished.cell.partition.get("rank", RANK))
    return compared(w, v, local, truth(data.num_clients, finished.seed, local.shape[1], rank))


def _solution(data: Federation, client: int) -> Floats:
    """A client's own least squares."""
    x, y = (part.double().cpu().numpy() for part in data.examples(data.splits["train"].of(client)))
    result: Floats = numpy.linalg.lstsq(x, y, rcond=None)[0]
    return result


def compared(w: Floats, v: Floats, local: Floats, true: Floats) -> dict[str, float]:
    """W [dim, k] and V [n, k] against the truncated decomposition of local solutions [n, dim]."""
    rank = w.shape[1]
    left, values, right = numpy.linalg.svd(local, full_matrices=False)
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    ours = v @ w.T
    used = min(rank, len(right))
    basis = numpy.linalg.svd(w, full_matrices=False)[0][:, :used]
    cosines = numpy.linalg.svd(basis.T @ right[:used].T, compute_uv=False)
    angle = float(numpy.degrees(numpy.arccos(numpy.clip(cosines.min(), -1, 1)))) if rank < local.shape[1] else 0.0
    return {
        "angle": angle,
        "loss": float(((ours - local) ** 2).sum()),
        "closed_loss": float((values[rank:] ** 2).sum()),
        "error": float(((ours - true) ** 2).sum(1).mean()),
        "closed_error": float(((best - true) ** 2).sum(1).mean()),
        "local_error": float(((local - true) ** 2).sum(1).mean()),
    }


Row = tuple[int, dict[str, Summary]]
"""The length of an embedding, and each number over seeds."""


def draw(found: Found) -> Finding:
    rows: list[Row] = []
    for entry, numbers in found.computed:
        means = {name: drawing.over_seeds(part[name] for part in numbers.values()) for name in NUMBERS}
        rows.append((setting(entry.cell, "embedding_dim"), means))
    rows.sort(key=lambda row: row[0])
    lines = [["k", "angle", "loss", "closed form", "error", "closed form", "seeds"]]
    for rank, means in rows:
        texts = [number_text(means[name], 3) for name in ("loss", "closed_loss", "error", "closed_error")]
        angle = "" if rank >= DIM else f"{number_text(means['angle'])}°"  # both spaces are everything
        lines.append([str(rank), angle, *texts, str(means["angle"].num_seeds)])
    said = "no run has been looked at"
    if rows:
        best, least = min(rows, key=lambda row: row[1]["error"].mean)
        worst = max((means["angle"].mean for rank, means in rows if rank <= RANK), default=0.0)
        said = (
            f"up to the true rank the trained space is within {worst:.2f}° of the principal one; models err "
            f"least with k = {best} ({least['error'].mean:.2f}; clients alone {least['local_error'].mean:.2f})"
        )
    return found.finding(
        "Proposition 1: the best linear hypernetwork is the uncentered principal components of what clients would find "
        f"alone. With as many as there are, they also remove noise. Here {said}.",
        [(lines, CAPTION)],
        {"": partial(picture, found.title, rows)} if rows else {},
    )


CAPTION = (
    "Angle: the largest between the span of W and that of the first k principal components. Loss: sum over clients of "
    "|W v - local solution| squared. Error: mean of |W v - truth| squared. Mean ± standard deviation over seeds."
)


def picture(title: str, rows: Sequence[Row]) -> Any:
    figure, (left, right) = drawing.titled(11.0, 4.3, title, 2)
    ranks = [rank for rank, _ in rows]
    places = list(range(len(ranks)))
    for axes, ours, closed in ((left, "loss", "closed_loss"), (right, "error", "closed_error")):
        axes.plot(places, [means[closed].mean for _, means in rows], color=drawing.PAPER, label="closed form (SVD)")
        values = [means[ours] for _, means in rows]
        drawing.errorbar(axes, places, values, drawing.COLORS[1], "trained hypernetwork", linestyle="none")
        axes.set_xticks(places, list(map(str, ranks)))
    right.axhline(rows[-1][1]["local_error"].mean, color=drawing.COLORS[0], linestyle="--", label="everybody alone")
    if RANK in ranks:
        right.axvline(ranks.index(RANK), color="#BBBBBB", linewidth=1, linestyle=":", label="true rank")
    xlabel = "k, length of an embedding"
    drawing.finish(left, xlabel, "sum of squares", "what it minimizes: distance from the local solutions", legend=False)
    drawing.finish(right, xlabel, "mean of squares", "what it is good for: distance from the truth")
    return figure


def cell(rank: int) -> Cell:
    """Every client in every round, one exact gradient step each: gradient descent on the sum of squares."""
    exact = {"local_steps": 1, "local_lr": 0.25, "local_momentum": 0.0, "local_weight_decay": 0.0, "local_clip": "none"}
    server = {"lr": 0.01, "rule": "sum", "weight_decay": 0.0, "clip": "none", "linear": True, "embedding_dim": rank}
    return Cell(
        dataset="pfedhn.paper.linear:federation",
        clients=CLIENTS,
        partition={"rank": RANK},
        model="linear",
        steps=ROUNDS * CLIENTS,
        cohort_size=CLIENTS,
        batch_size=SAMPLES,
        evaluate_every=100 * CLIENTS,
        settings={**exact, **server},
    )


STUDY = Study(
    "linear",
    "Section 4.1: a linear hypernetwork finds principal components",
    tuple(map(cell, RANKS)),
    draw,
    compute,
    partial(replace, steps=400 * CLIENTS, evaluate_every=400 * CLIENTS),
)
