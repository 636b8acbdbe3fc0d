"""Section 4.2, Theorem 1 in shape: the gap between training and test loss.

The bound says gap^2 ~ (k + N / n) / m: it falls with the root of the m examples of a client, falls with the number n of
clients to a floor, and rises with the length k of an embedding. Made data, so that m, n and k are free. The gap is that
of the error rate, a loss between 0 and 1 as the theorem wants it; cross-entropy, which has no bound, is in the table.

The theorem is about how far training may go, not about how it goes, so the server takes steps of Adam: those of SGD
leave long embeddings far from what they could fit, and with it the gap small.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.data.federation import Federation
from pfedhn.experiments.finished import Finished
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, setting
from pfedhn.report.tables import number_text

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
class Shape:
    """How the theorem relates the gap to a number: by a line, once both are transformed."""

    label: str
    of_number: Callable[[Floats], Floats]
    of_gap: Callable[[Floats], Floats]
    to_gap: Callable[[Floats], Floats]
    text: str  # of a fit

    def fit(self, x: Floats, gap: Floats) -> Any:
        """Least squares, with the standard errors of slope and intercept."""
        from scipy.stats import linregress

        return linregress(self.of_number(x), self.of_gap(gap))


def root(squared: Floats) -> Floats:
    result: Floats = numpy.sqrt(numpy.maximum(squared, 0))
    return result


LINE = "gap² = ({0.intercept:.3g} ± {0.intercept_stderr:.2g}) + ({0.slope:.3g} ± {0.stderr:.2g})"
SHAPES = {
    "samples": Shape(
        *("examples per client, m", numpy.log, numpy.log, numpy.exp),
        "gap ~ m^({0.slope:.2f} ± {0.stderr:.2f}); the bound has m^-0.5",
    ),
    "clients": Shape(
        *("clients, n", numpy.reciprocal, numpy.square, root),
        f"{LINE} / n; the bound falls to a floor above 0",
    ),
    "length": Shape(
        *("length of an embedding, k", numpy.positive, numpy.square, root),
        f"{LINE} k; the bound rises with k",
    ),
}


def value(cell: Cell, axis: str) -> int:
    if axis == "samples":
        return int(cell.partition.get("samples", SAMPLES))
    return cell.clients if axis == "clients" else int(setting(cell, "embedding_dim"))


def axes_of(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells along each axis: those in which the other two are as they are most often."""
    usual = {
        axis: max(numbers, key=numbers.count) for axis in SHAPES if (numbers := [value(cell, axis) for cell in cells])
    }
    return {
        axis: sorted(
            (cell for cell in cells if all(value(cell, other) == usual[other] for other in SHAPES if other != axis)),
            key=lambda cell: value(cell, axis),
        )
        for axis in SHAPES
    }


def points(found: Found, cells: Sequence[Cell], axis: str) -> tuple[Floats, Floats]:
    """Every seed of every cell as a point."""
    pairs = [(value(cell, axis), part["error_gap"]) for cell in cells for part in found.analyses(cell).values()]
    x, gap = numpy.array(pairs, dtype=numpy.float64).reshape(-1, 2).T
    return x, gap


def fits(found: Found) -> dict[str, str]:
    """What the theorem's shape says and what was measured, by axis."""
    said = {}
    for axis, cells in axes_of([entry.cell for entry, _ in found.computed]).items():
        x, gap = points(found, cells, axis)
        if axis == "samples":
            x, gap = x[gap > 0], gap[gap > 0]
        if len(set(x)) >= 3:
            said[axis] = SHAPES[axis].text.format(SHAPES[axis].fit(x, gap))
    return said


def draw(found: Found) -> Finding:
    lines = [["m", "n", "k", "training error", "test error", "gap", "gap of cross-entropy", "seeds"]]
    for entry, numbers in found.computed:
        means = [
            drawing.over_seeds(part[name] for part in numbers.values())
            for name in ("train_error", "test_error", "error_gap", "loss_gap")
        ]
        first = [str(value(entry.cell, axis)) for axis in SHAPES]
        lines.append([*first, *(number_text(mean, 3) for mean in means), str(len(numbers))])
    said = fits(found)
    told = ". ".join(f"By {SHAPES[axis].label}: {text}" for axis, text in said.items())
    return found.finding(
        "Theorem 1 bounds the gap between test and training loss; here that of the error rate is measured along each "
        f"of three numbers. {told or 'Too few points for a fit yet'}.",
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
    groups = axes_of([entry.cell for entry, _ in found.computed])
    for number, ((axis, cells), axes) in enumerate(zip(groups.items(), all_axes, strict=True)):
        gaps = [drawing.over_seeds(part["error_gap"] for part in found.analyses(cell).values()) for cell in cells]
        places = [value(cell, axis) for cell in cells]
        drawing.errorbar(axes, places, gaps, drawing.COLORS[number], "measured", linestyle="none")
        x, gap = points(found, cells, axis)
        if len(set(x)) >= 3 and gap.min() > 0:
            shape, line = SHAPES[axis], SHAPES[axis].fit(x, gap)
            ends = numpy.geomspace(x.min(), x.max(), 50)
            heights = shape.to_gap(line.intercept + line.slope * shape.of_number(ends))
            axes.plot(ends, heights, color=drawing.PAPER, linewidth=1.4, linestyle="--")
        axes.set_xscale("log", base=2)
        means = [gap.mean for gap in gaps]
        if axis == "samples" and all(mean > 0 for mean in means):
            axes.set_yscale("log")
            axes.minorticks_off()
            levels = [round(float(level), 3) for level in numpy.geomspace(min(means), max(means), 4)]
            axes.set_yticks(levels, list(map(str, levels)))
        axes.set_xticks(places, list(map(str, places)))
        ylabel = "test less training error" if number == 0 else ""
        drawing.finish(axes, SHAPES[axis].label, ylabel, said.get(axis, "").partition(";")[0], legend=False)
    return figure


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
