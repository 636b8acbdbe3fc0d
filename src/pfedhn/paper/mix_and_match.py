"""Section 5.4: each client's own classifier on the features that the hypernetwork makes for every other client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.params import take
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.finished import Finished
from pfedhn.studies.study import Found, Study, known, on_digits

CLASS_NAMES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}


def compute(finished: Finished) -> Mapping[str, Any]:
    """accuracy[i][j]: classifier of client i on features of client j, on the test examples of client i."""
    run, federation = finished.run, finished.federation
    number = federation.num_clients
    memories, model = run.memories(), run.plan.model_of(0)
    whole = [run.personal_weights(client) for client in range(number)]
    heads = [take(memories.private[model.name].take([client]), 0).private.head for client in range(number)]
    accuracy = numpy.full((number, number), numpy.nan)
    for i in range(number):
        for j in range(number):
            _, correct, count = finished.scores(model, whole[j] | heads[i], i)
            if count:
                accuracy[i, j] = correct / count
    names = CLASS_NAMES.get(finished.cell.dataset)
    held = [[c for c, share in enumerate(row) if share > 0] for row in federation.class_shares.tolist()]
    return {"accuracy": accuracy, "classes": [[names[c] if names else str(c) for c in row] for row in held]}


def normalized(accuracy: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Each row from 0 (its worst features) to 1 (its best); a row that is all alike is all 1."""
    low, high = accuracy.min(1, keepdims=True), accuracy.max(1, keepdims=True)
    span = numpy.where(high > low, high - low, 1.0)
    return numpy.where(high > low, (accuracy - low) / span, 1.0)


def draw(found: Found) -> Finding:
    lines = [["method", "seed", "own features", "others'", "same classes", "no common class", "own is best"]]
    figures: dict[str, Callable[[], Any]] = {}
    said = []
    for cell in found.cells:
        label = found.entry(cell).label
        for seed, values in found.analyses(cell).items():
            accuracy = numpy.array(values["accuracy"], dtype=numpy.float64)
            own, others, same, foreign, best = summary(accuracy, values["classes"])
            numbers = ["" if numpy.isnan(part) else f"{part:+.1f}" for part in (others, same, foreign)]
            lines.append([label, str(seed), f"{own:.1f}", *numbers, f"{best} of {len(accuracy)}"])
            if cell.method not in figures:  # the first seed is drawn
                figures[cell.method] = partial(picture, found.title, label, accuracy, values["classes"])
                spans = 100 * (accuracy.max(1) - accuracy.min(1))
                alike = "" if numpy.isnan(same) else f", {same:+.1f} with those of a client with the same classes"
                said.append(
                    f"{label} {own:.1f} % with its own features, {others:+.1f} points with another's{alike}; a row "
                    f"spans {spans.min():.1f} to {spans.max():.1f} points, which the colors stretch (seed {seed})"
                )
    return Finding(
        found.study.name,
        found.title,
        "Rows are clients' classifiers, columns the features made for another client: dark on the diagonal alone means "
        "that features are personal, dark elsewhere that two clients could share theirs. On average a client has, with "
        f"{'; with '.join(said) or 'no run looked at yet'}.",
        [(lines, CAPTION)],
        figures,
    )


CAPTION = (
    "Accuracy in % of a client's classifier on its own test examples with its own features, and the points that it "
    "gains or loses with the features of all others, of clients with the same classes, with no class in common. Last: "
    "how many do best with their own."
)


def summary(
    accuracy: NDArray[numpy.float64], classes: Sequence[Sequence[str]]
) -> tuple[float, float, float, float, int]:
    """The columns of the table: accuracy with one's own features, and what changes with others'."""
    number = len(accuracy)
    pairs = [(i, j) for i in range(number) for j in range(number) if i != j]
    shared = {pair: len(set(classes[pair[0]]) & set(classes[pair[1]])) for pair in pairs}

    def change(chosen: Sequence[tuple[int, int]]) -> float:
        return 100 * float(numpy.mean([accuracy[i, j] - accuracy[i, i] for i, j in chosen])) if chosen else float("nan")

    same = [pair for pair in pairs if set(classes[pair[0]]) == set(classes[pair[1]])]
    best = sum(bool(accuracy[i, i] >= accuracy[i].max()) for i in range(number))
    own = 100 * float(numpy.mean(numpy.diag(accuracy)))
    return own, change(pairs), change(same), change([pair for pair in pairs if not shared[pair]]), best


def picture(title: str, label: str, accuracy: NDArray[numpy.float64], classes: Sequence[Sequence[str]]) -> Any:
    figure, axes = drawing.titled(8.2, 6.6, f"{title}: {label}")
    shown = normalized(accuracy)
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, vmax=1)
    names = [f"{i}: {', '.join(row)}" for i, row in enumerate(classes)]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8.5)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    for i in range(len(names)):
        for j in range(len(names)):
            color = "white" if shown[i, j] > 0.55 else "black"
            weight = "bold" if i == j else "normal"
            text = f"{100 * accuracy[i, j]:.0f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=color, weight=weight)
    axes.set(xlabel="features of client", ylabel="classifier and test examples of client")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    drawing.heading(axes, "numbers: accuracy in %; color: from the row's worst to its best")
    figure.colorbar(image, ax=axes, shrink=0.75, label="accuracy within the row: 0 worst, 1 best")
    return figure


def small(cell: Cell) -> Cell:
    return replace(on_digits(cell), clients=10, steps=120, partition={"rule": "by_classes", "classes_per_client": 2})


STUDY = Study(
    "mix-and-match",
    "Section 5.4: classifier of one client, features of another (CIFAR-10, 10 clients)",
    tuple(table1_cell("cifar10", method, 10) for method in known("pfedhn-pc", "pfedhn-plus-pc")),
    draw,
    compute,
    small,
)
