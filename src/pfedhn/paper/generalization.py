"""Section 4.2, Theorem 1 in shape: the gap between training and test loss.

The bound says gap^2 ~ (k + N / n) / m: it falls with the root of the m examples of a client, falls with the number n of
clients to a floor, and rises with the length k of an embedding. Made data, so that m, n and k are free. The gap is that
of the error rate, a loss between 0 and 1 as the theorem wants it; cross-entropy, which has no bound, is in the table.

The theorem is about how far training may go, not about how it goes, so the server takes steps of Adam: those of SGD
leave long embeddings far from what they could fit, and with it the gap small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.data.federation import Federation
from pfedhn.experiments.spec import Cell
from pfedhn.report.entries import Summary, summarize
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.finished import Finished
from pfedhn.studies.study import Found, Study, setting

Floats = NDArray[numpy.float64]

SAMPLES, CLIENTS, LENGTH = 256, 20, 4  # where the other two vary; fewer samples can be learned by heart
ALL_SAMPLES = (32, 64, 128, 256, 512, 1024)
ALL_CLIENTS = (5, 10, 20, 40, 80)
ALL_LENGTHS = (1, 2, 4, 8, 16)
PARTS_IN_TRAINING = 150  # of every client
ADAM = {
    "optimizer": "adamw",
    "lr": 3e-3,
    "weight_decay": 0.0,
    "embedding_optimizer": "adam",
    "embedding_lr": 1e-2,
}
AXES = {"samples": "examples per client, m", "clients": "clients, n", "length": "length of an embedding, k"}


def federation(clients: int, seed: int, samples: int = SAMPLES, dim: int = 10, num_held: int = 400) -> Federation:
    """Two classes by a line of each client's own, from a plane that all share; one label in ten is wrong."""
    generator = numpy.random.default_rng([seed, 2])
    basis = generator.normal(size=(4, dim))
    made = []
    for _ in range(clients):
        line = generator.normal(size=4) @ basis
        parts = {}
        for name, number in (("train", samples), ("validation", 50), ("test", num_held)):
            x = generator.normal(size=(number, dim)).astype(numpy.float32)
            y = (x @ line > 0) ^ (generator.random(number) < 0.1)
            parts[name] = (x, y.astype(numpy.int64))
        made.append(parts)
    return Federation.from_clients(made)


def compute(finished: Finished) -> Mapping[str, Any]:
    """Loss and error rate after the last round, over clients, on what was trained on and on what was not."""
    run = finished.run
    found: dict[str, float] = {}
    for split in ("train", "test"):
        scores = [
            finished.scores(run.plan.model_of(client), run.personal_weights(client, last=True), client, split)
            for client in range(finished.federation.num_clients)
        ]
        found[f"{split}_loss"] = float(numpy.mean([loss / count for loss, _, count in scores]))
        found[f"{split}_error"] = float(numpy.mean([1 - correct / count for _, correct, count in scores]))
    return {**found, **{f"{kind}_gap": found[f"test_{kind}"] - found[f"train_{kind}"] for kind in ("loss", "error")}}


@dataclass(frozen=True)
class Fit:
    """A line through points, and the standard errors of its two numbers."""

    slope: float
    slope_error: float
    height: float
    height_error: float

    @property
    def per_step(self) -> str:
        return f"({self.slope:.3g} ± {self.slope_error:.2g})"

    @property
    def at_zero(self) -> str:
        return f"({self.height:.3g} ± {self.height_error:.2g})"


def fit(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Least squares; errors from what is left over."""
    xs, ys = numpy.array(x, dtype=numpy.float64), numpy.array(y, dtype=numpy.float64)
    matrix = numpy.stack([xs, numpy.ones_like(xs)], 1)
    solution = numpy.linalg.lstsq(matrix, ys, rcond=None)[0]
    left = ((ys - matrix @ solution) ** 2).sum() / max(1, len(xs) - 2)
    errors = numpy.sqrt(numpy.diag(left * numpy.linalg.inv(matrix.T @ matrix)))
    return Fit(float(solution[0]), float(errors[0]), float(solution[1]), float(errors[1]))


def value(cell: Cell, axis: str) -> int:
    if axis == "samples":
        return int(cell.partition.get("samples", SAMPLES))
    return cell.clients if axis == "clients" else int(setting(cell, "embedding_dim"))


def axes_of(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells along each axis: those in which the other two are as they are most often."""
    usual = {
        axis: max(numbers, key=numbers.count) for axis in AXES if (numbers := [value(cell, axis) for cell in cells])
    }
    return {
        axis: sorted(
            (cell for cell in cells if all(value(cell, other) == usual[other] for other in AXES if other != axis)),
            key=lambda cell: value(cell, axis),
        )
        for axis in AXES
    }


def points(found: Found, cells: Sequence[Cell], axis: str) -> tuple[list[float], list[float]]:
    """Every seed of every cell as a point."""
    pairs = [(value(cell, axis), part["error_gap"]) for cell in cells for part in found.analyses(cell).values()]
    return [float(x) for x, _ in pairs], [gap for _, gap in pairs]


def fits(found: Found) -> dict[str, str]:
    """What the theorem's shape says and what was measured, by axis."""
    said = {}
    for axis, cells in axes_of([cell for cell in found.cells if found.analyses(cell)]).items():
        x, gap = points(found, cells, axis)
        if len(set(x)) < 3:
            continue
        if axis == "samples":
            positive = [(a, b) for a, b in zip(x, gap, strict=True) if b > 0]
            if len({a for a, _ in positive}) < 3:
                continue
            line = fit([float(numpy.log(a)) for a, _ in positive], [float(numpy.log(b)) for _, b in positive])
            said[axis] = f"gap ~ m^({line.slope:.2f} ± {line.slope_error:.2f}); the bound has m^-0.5"
        elif axis == "clients":
            line = fit([1 / a for a in x], [b**2 for b in gap])
            said[axis] = f"gap² = {line.at_zero} + {line.per_step} / n; the bound falls to a floor above 0"
        else:
            line = fit(x, [b**2 for b in gap])
            said[axis] = f"gap² = {line.at_zero} + {line.per_step} k; the bound rises with k"
    return said


def draw(found: Found) -> Finding:
    lines = [["m", "n", "k", "training error", "test error", "gap", "gap of cross-entropy", "seeds"]]
    for cell in found.cells:
        analyses = found.analyses(cell)
        if analyses:
            names = ("train_error", "test_error", "error_gap", "loss_gap")
            means = [summarize(part[name] for part in analyses.values()) for name in names]
            first = [str(value(cell, axis)) for axis in AXES]
            lines.append([*first, *(drawing.text(mean, 3) for mean in means), str(len(analyses))])
    said = fits(found)
    return Finding(
        found.study.name,
        found.title,
        "Theorem 1 bounds the gap between test and training loss; here that of the error rate is measured along each "
        "of three numbers. "
        f"{'. '.join(f'By {AXES[axis]}: {text}' for axis, text in said.items()) or 'Too few points for a fit yet'}.",
        [
            (
                lines,
                "m examples a client, n clients, embeddings of length k; the mean over clients, after the last round. "
                "Where all examples are learned by heart (training error 0) the gap is the test error itself and bends "
                "the fit; the theorem bounds the worst case, so that a gap may also fall faster.",
            )
        ],
        {"": partial(picture, found, said)},
    )


def picture(found: Found, said: Mapping[str, str]) -> Any:
    figure, all_axes = drawing.titled(13.0, 4.2, found.title, 3)
    groups = axes_of([cell for cell in found.cells if found.analyses(cell)])
    for number, ((axis, cells), axes) in enumerate(zip(groups.items(), all_axes, strict=True)):
        gaps = [summarize(part["error_gap"] for part in found.analyses(cell).values()) for cell in cells]
        x, means = [float(value(cell, axis)) for cell in cells], [gap for gap in gaps if gap is not None]
        drawing.errorbar(axes, x, means, drawing.COLORS[number], "measured", linestyle="none")
        _curve(axes, found, cells, axis)
        axes.set_xscale("log", base=2)
        if axis == "samples" and all(gap.mean > 0 for gap in means):
            axes.set_yscale("log")
            axes.minorticks_off()
            levels = [round(float(level), 3) for level in numpy.geomspace(*_range(means), 4)]
            axes.set_yticks(levels, list(map(str, levels)))
        axes.set_xticks(x, [f"{place:g}" for place in x])
        drawing.heading(axes, said.get(axis, "").partition(";")[0])
        drawing.finished_axes(axes, AXES[axis], "test less training error" if number == 0 else "", legend=False)
    return figure


def _range(means: Sequence[Summary]) -> tuple[float, float]:
    return min(mean.mean for mean in means), max(mean.mean for mean in means)


def _curve(axes: Any, found: Found, cells: Sequence[Cell], axis: str) -> None:
    """The fitted shape through the points."""
    x, gap = points(found, cells, axis)
    if len(set(x)) < 3 or min(gap) <= 0:
        return
    places = numpy.geomspace(min(x), max(x), 50)
    if axis == "samples":
        line = fit([float(part) for part in numpy.log(x)], [float(part) for part in numpy.log(gap)])
        heights = numpy.exp(line.height + line.slope * numpy.log(places))
    else:
        line = fit([1 / part if axis == "clients" else part for part in x], [part**2 for part in gap])
        under = line.height + line.slope * (1 / places if axis == "clients" else places)
        heights = numpy.sqrt(numpy.maximum(under, 0))
    axes.plot(places, heights, color=drawing.PAPER, linewidth=1.4, linestyle="--")


def cell(samples: int, clients: int, length: int) -> Cell:
    return Cell(
        dataset="pfedhn.paper.generalization:federation",
        clients=clients,
        partition={"samples": samples},
        model="mlp-8",
        steps=PARTS_IN_TRAINING * clients,
        batch_size=32,
        evaluate_every=10 * clients,
        settings={
            "embedding_dim": length,
            "hidden_dim": 30,
            "num_hidden": 1,
            "local_steps": 20,
            "local_lr": 0.05,
            **ADAM,
        },
    )


def cells() -> tuple[Cell, ...]:
    found = [cell(samples, CLIENTS, LENGTH) for samples in ALL_SAMPLES]
    found += [cell(SAMPLES, clients, LENGTH) for clients in ALL_CLIENTS if clients != CLIENTS]
    return (*found, *(cell(SAMPLES, CLIENTS, length) for length in ALL_LENGTHS if length != LENGTH))


def small(cell: Cell) -> Cell:
    settings = {**cell.settings, "local_steps": 2}
    clients = min(cell.clients, 8)
    return replace(cell, clients=clients, steps=2 * clients, evaluate_every=clients, settings=settings)


STUDY = Study(
    "generalization",
    "Section 4.2: the gap between training and test error",
    cells(),
    draw,
    compute,
    small,
    seeds=(0, 1, 2, 3, 4),
)
