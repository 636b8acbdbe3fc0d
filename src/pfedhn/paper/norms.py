"""What the recipes do inside the server: norms of phi, of the embeddings and of the weights they make, over a run."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.errors import RunError
from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.settings import value_of
from pfedhn.studies import drawing
from pfedhn.studies.finished import Finished
from pfedhn.studies.study import Found, Study, setting, varied
from pfedhn.studies.sweep import mean_curve

NAMES = {
    "shared": "the hypernetwork's weights",
    "embeddings": "a client's embedding",
    "served": "the weights a client is given",
    "apart": "how far these are from the mean over clients",
}
VARIED = {"embedding_scale": "embeddings start at", "weight_decay": "decay"}


def compute(finished: Finished) -> Mapping[str, Any]:
    """The norms at every evaluation."""
    noted = [(moment.step, moment.norms) for moment in finished.run.history if moment.norms is not None]
    if not noted:
        raise RunError(f"{finished.run.origin.name} has noted no norms; run it again with --norms.")
    return {"step": [step for step, _ in noted], **{name: [norms[name] for _, norms in noted] for name in NAMES}}


def draw(found: Found) -> Finding:
    rows = [(entry, analyses) for entry in found.entries if (analyses := found.analyses(entry.cell))]
    lines = [["recipe", "hypernetwork", "embedding", "given weights", "apart", "accuracy", "seeds"]]
    said = []
    for entry, analyses in rows:
        ends = {name: " → ".join(f"{mean(analyses, name)[step]:.3g}" for step in ends_of(analyses)) for name in NAMES}
        lines.append([called(entry), *ends.values(), drawing.text(drawing.accuracy(entry)), drawing.seeds_of(entry)])
        said.append(f"{called(entry)}: {', '.join(ends.values())}")
    return Finding(
        found.study.name,
        found.title,
        "Norms of phi, of an embedding, of the weights that a client is given and of how these differ from the mean "
        f"over clients, from the first evaluation to the last. {'; '.join(said) or 'Nothing is known yet'}.",
        [(lines, drawing.caption([entry for entry, _ in rows], " Norms: Euclidean, means over clients and seeds."))],
        {"": partial(picture, found.title, rows)} if rows else {},
    )


def called(entry: Entry) -> str:
    """The method, and what of the recipe is not as the method has it."""
    usual = ALGORITHMS[entry.cell.method]()
    values = {name: setting(entry.cell, name) for name in VARIED}
    changed = [f"{VARIED[name]} {value:g}" for name, value in values.items() if value != value_of(usual, name)]
    return ", ".join([entry.label, *changed])


def mean(analyses: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, float]:
    """A norm by communication step: the mean over the seeds that have it."""
    curves = [dict(zip(values["step"], values[name], strict=True)) for values in analyses.values()]
    steps = sorted(set.intersection(*map(set, curves)))
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}


def ends_of(analyses: Mapping[int, Mapping[str, Any]]) -> list[int]:
    steps = list(mean(analyses, "shared"))
    return [steps[0], steps[-1]]


def picture(title: str, rows: Sequence[tuple[Entry, Mapping[int, Mapping[str, Any]]]]) -> Any:
    figure, grid = drawing.titled(11.0, 9.0, title, 2, 3, sharex=True)
    accuracy, *others, empty = grid.flat
    empty.set_axis_off()
    for number, (entry, analyses) in enumerate(rows):
        style = {"color": drawing.COLORS[number % 8], "linewidth": 1.7, "label": called(entry)}
        learned = mean_curve(entry)
        accuracy.plot(list(learned), list(learned.values()), **style)
        for axes, name in zip(others, NAMES, strict=True):
            curve = mean(analyses, name)
            axes.plot(list(curve), list(curve.values()), **style)
    drawing.heading(accuracy, "how it learns")
    drawing.finished_axes(accuracy, "", "test accuracy in %", legend=False)
    for axes, called_so in zip(others, NAMES.values(), strict=True):
        drawing.heading(axes, called_so)
        drawing.finished_axes(axes, "communication steps" if axes in (*grid[-1], grid[-2][-1]) else "", "norm", False)
    grid[-2][-1].tick_params(labelbottom=True)  # nothing is drawn below it
    named = drawing.legend_of([accuracy])
    empty.legend(named.values(), named, frameon=False, fontsize=10, loc="upper left")
    return figure


def cells() -> tuple[Cell, ...]:
    """The paper's recipe and ours; small embeddings without the rest of ours, and ours without its decay."""
    paper, ours = (table1_cell("cifar10", method, 50) for method in ("pfedhn", "pfedhn-plus"))
    return paper, varied(paper, embedding_scale=0.1), varied(ours, weight_decay=0.0), ours


STUDY = Study(
    "norms",
    "What the recipes do to the hypernetwork, norms over a run (CIFAR-10, 50 clients)",
    cells(),
    draw,
    compute,
    norms=True,
)
