"""What the recipes do inside the server: norms of phi, of the embeddings and of the weights they make, over a run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.errors import RunError
from pfedhn.experiments.finished import Finished
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, setting, varied
from pfedhn.settings import value_of

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


Curves = Mapping[str, Mapping[int, float]]
"""Each norm by communication step: the mean over the seeds."""


def draw(found: Found) -> Finding:
    shown = [(replace(entry, label=called(entry)), curves_of(numbers)) for entry, numbers in found.computed]
    lines = [["recipe", "hypernetwork", "embedding", "given weights", "apart", "accuracy", "seeds"]]
    said = []
    for entry, curves in shown:
        values = [list(curve.values()) for curve in curves.values()]
        ends = [f"{norms[0]:.3g} → {norms[-1]:.3g}" for norms in values]
        lines.append([entry.label, *ends, drawing.accuracy_text(entry), str(len(entry.results))])
        said.append(f"{entry.label}: {', '.join(ends)}")
    about = drawing.caption([entry for entry, _ in shown], " Norms: Euclidean, means over clients and seeds.")
    return found.finding(
        "Norms of phi, of an embedding, of the weights that a client is given and of how these differ from the mean "
        f"over clients, from the first evaluation to the last. {'; '.join(said) or 'Nothing is known yet'}.",
        [(lines, about)],
        {"": partial(picture, found.title, shown)} if shown else {},
    )


def called(entry: Entry) -> str:
    """The method, and what of the recipe is not as the method has it."""
    usual = ALGORITHMS[entry.cell.method]()
    values = {name: setting(entry.cell, name) for name in VARIED}
    changed = [f"{VARIED[name]} {value:g}" for name, value in values.items() if value != value_of(usual, name)]
    return ", ".join([entry.label, *changed])


def curves_of(numbers: Mapping[int, Mapping[str, Any]]) -> Curves:
    return {
        name: drawing.mean_of([dict(zip(part["step"], part[name], strict=True)) for part in numbers.values()])
        for name in NAMES
    }


def picture(title: str, shown: Sequence[tuple[Entry, Curves]]) -> Any:
    figure, grid = drawing.titled(11.0, 9.0, title, 2, 3, sharex=True)
    accuracy, *others, empty = grid.flat
    empty.set_axis_off()
    for number, (entry, curves) in enumerate(shown):
        color = drawing.COLORS[number % 8]
        drawing.curve(accuracy, drawing.mean_curve(entry), color, entry.label)
        for axes, curve in zip(others, curves.values(), strict=True):
            drawing.curve(axes, curve, color, entry.label)
    drawing.finish(accuracy, "", drawing.ACCURACY, "how it learns", legend=False)
    for axes, name in zip(others, NAMES.values(), strict=True):
        xlabel = "communication steps" if axes in (*grid[-1], grid[-2][-1]) else ""
        drawing.finish(axes, xlabel, "norm", name, legend=False)
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
