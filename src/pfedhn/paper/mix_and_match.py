"""Section 5.4: each client's own classifier on the features that the hypernetwork makes for every other client."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.experiments.finished import Finished
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.params import take
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, on_digits

Floats = NDArray[numpy.float64]

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
    for i, j in numpy.ndindex(accuracy.shape):
        _, correct, count = finished.scores(model, whole[j] | heads[i], i)
        if count:
            accuracy[i, j] = correct / count
    names = CLASS_NAMES.get(finished.cell.dataset)
    held = [[c for c, share in enumerate(row) if share > 0] for row in federation.class_shares.tolist()]
    return {"accuracy": accuracy, "classes": [[names[c] if names else str(c) for c in row] for row in held]}


def normalized(accuracy: Floats) -> Floats:
    """Each row from 0 (its worst features) to 1 (its best); a row that is all alike is all 1."""
    low, high = accuracy.min(1, keepdims=True), accuracy.max(1, keepdims=True)
    span = numpy.where(high > low, high - low, 1.0)
    return numpy.where(high > low, (accuracy - low) / span, 1.0)


def draw(found: Found) -> Finding:
    lines = [["method", "seed", "own features", "others'", "same classes", "no common class", "own is best"]]
    figures: dict[str, Callable[[], Any]] = {}
    said = []
    for entry, numbers in found.computed:
        for seed, values in numbers.items():
            accuracy = numpy.array(values["accuracy"], dtype=numpy.float64)
            own, others, same, foreign, best = summary(accuracy, values["classes"])
            changes = ["" if numpy.isnan(part) else f"{part:+.1f}" for part in (others, same, foreign)]
            lines.append([entry.label, str(seed), f"{own:.1f}", *changes, f"{best} of {len(accuracy)}"])
            if entry.cell.method not in figures:  # the first seed is drawn
                title = f"{found.title}: {entry.label}"
                figures[entry.cell.method] = partial(picture, title, accuracy, values["classes"])
                spans = 100 * (accuracy.max(1) - accuracy.min(1))
                alike = "" if numpy.isnan(same) else f", {same:+.1f} with those of a client with the same classes"
                said.append(
                    f"{entry.label} {own:.1f} % with its own features, {others:+.1f} points with another's{alike}; a "
                    f"row spans {spans.min():.1f} to {spans.max():.1f} points, which the colors stretch (seed {seed})"
                )
    return found.finding(
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


def summary(accuracy: Floats, classes: Sequence[Sequence[str]]) -> tuple[float, float, float, float, int]:
    """The columns of the table: accuracy with one's own features, and what changes with others'."""
    held = list(map(set, classes))
    own = numpy.diag(accuracy)
    pairs = [(i, j) for i, j in numpy.ndindex(accuracy.shape) if i != j]

    def change(chosen: Sequence[tuple[int, int]]) -> float:
        return 100 * float(numpy.mean([accuracy[i, j] - own[i] for i, j in chosen])) if chosen else float("nan")

    same = change([(i, j) for i, j in pairs if held[i] == held[j]])
    foreign = change([(i, j) for i, j in pairs if not held[i] & held[j]])
    return 100 * float(own.mean()), change(pairs), same, foreign, int((own >= accuracy.max(1)).sum())


def picture(title: str, accuracy: Floats, classes: Sequence[Sequence[str]]) -> Any:
    figure, axes = drawing.titled(8.2, 6.6, title)
    shown = normalized(accuracy)
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, vmax=1)
    names = [f"{i}: {', '.join(row)}" for i, row in enumerate(classes)]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8.5)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    for i, j in numpy.ndindex(shown.shape):
        color = "white" if shown[i, j] > 0.55 else "black"
        style = {"fontsize": 8, "color": color, "weight": "bold" if i == j else "normal"}
        axes.text(j, i, f"{100 * accuracy[i, j]:.0f}", ha="center", va="center", **style)
    axes.set(xlabel="features of client", ylabel="classifier and test examples of client")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    heading = "numbers: accuracy in %; color: from the row's worst to its best"
    axes.set_title(heading, loc="left", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.75, label="accuracy within the row: 0 worst, 1 best")
    return figure


STUDY = Study(
    "mix-and-match",
    "Section 5.4: classifier of one client, features of another (CIFAR-10, 10 clients)",
    tuple(table1_cell("cifar10", method, 10) for method in ("pfedhn-pc", "pfedhn-plus-pc")),
    draw,
    compute,
    partial(on_digits, clients=10, steps=120, partition={"rule": "by_classes", "classes_per_client": 2}),
)
