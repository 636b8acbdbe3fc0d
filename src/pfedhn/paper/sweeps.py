"""Appendix C: one setting takes several values, and accuracy is drawn against it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, on_digits, setting, varied

LEAST_HEIGHT = 5.0  # points that the right scale spans, so that differences among seeds do not look like effects
Published = Mapping[Any, tuple[float, float | None]]
"""The paper's numbers for pFedHN, by value."""


def sweep(found: Found, name: str, called: str, sentence: str, paper: Published) -> Finding:
    """Show what a setting does to the accuracy.

    Args:
        found: Runs of the study.
        name: The setting.
        called: Its name on an axis.
        sentence: What to see, before the numbers.
        paper: The paper's numbers.
    """
    paper = {} if found.is_small else paper

    def value(entry: Entry) -> Any:
        return setting(entry.cell, name)

    def published(entry: Entry) -> str:
        return drawing.paper_text(paper.get(value(entry)) if entry.cell.method == "pfedhn" else None)

    methods = drawing.by_method(sorted(found.entries, key=lambda entry: value(entry) or 0))
    columns: dict[str, Callable[[Entry], str]] = {called: lambda e: str(value(e)), "accuracy": drawing.accuracy_text}
    if paper:
        columns["paper"] = published
    said = [
        f"{entries[0].label} here: "
        + drawing.listed({str(value(entry)): f"{drawing.accuracy_text(entry, 1)} %" for entry in entries})
        for entries in methods.values()
    ]
    table = drawing.table([entry for entries in methods.values() for entry in entries], columns)
    figure = partial(picture, found.title, methods, value, called, paper)
    return found.finding(f"{sentence} {'; '.join(said)}.", [table], {"": figure})


def picture(
    title: str,
    methods: Mapping[str, Sequence[Entry]],
    value: Callable[[Entry], Any],
    called: str,
    paper: Published,
) -> Any:
    """Left how the first method learns with each value, right where all of them end."""
    figure, (left, right) = drawing.titled(11.0, 4.4, title, 2)
    first = next(iter(methods.values()))
    for number, entry in enumerate(first):
        drawing.curve(left, drawing.mean_curve(entry), drawing.COLORS[number % 8], str(value(entry)))
    drawing.finish(left, "communication steps", drawing.ACCURACY, f"{first[0].label}: how it learns, by {called}")
    every = [entry for entries in methods.values() for entry in entries]
    values = sorted({value(entry) for entry in every})
    for number, (method, entries) in enumerate(methods.items()):
        places = [values.index(value(entry)) for entry in entries]
        color, marker = drawing.color_of(method, number), drawing.MARKERS[number]
        drawing.accuracies(right, places, entries, color, entries[0].label, marker=marker)
    if shown := {values.index(known): mean for known, (mean, _) in paper.items() if known in values}:
        style = {"color": drawing.PAPER, "linestyle": "none", "marker": "x", "markersize": 8}
        right.plot(list(shown), list(shown.values()), label=drawing.PAPER_LABEL, **style)
    right.set_xticks(range(len(values)), list(map(str, values)))
    low, high = right.get_ylim()
    right.set_ylim(min(low, (low + high - LEAST_HEIGHT) / 2), max(high, (low + high + LEAST_HEIGHT) / 2))
    bar = "; bar: deviation over seeds" if max(len(entry.results) for entry in every) > 1 else ", one seed"
    drawing.finish(right, called, drawing.ACCURACY, f"at the round chosen on validation{bar}")
    return figure


def study(
    name: str,
    title: str,
    setting: str,
    values: Sequence[int],
    called: str,
    sentence: str,
    paper: Published,
    **more: Any,
) -> Study:
    """A study of a setting on CIFAR-10, for the paper's pFedHN and ours."""
    cells = tuple(
        varied(table1_cell("cifar10", method, 50), **{setting: value})
        for method in ("pfedhn", "pfedhn-plus")
        for value in values
    )
    draw = partial(sweep, name=setting, called=called, sentence=sentence, paper=paper)
    return Study(name, f"Appendix C: accuracy against {title} (CIFAR-10, 50 clients)", cells, draw, **more)


def fewer_local_steps(cell: Cell) -> Cell:
    steps = max(1, setting(cell, "local_steps") // 10)
    return on_digits(cell, settings={**cell.settings, "local_steps": steps})


LOCAL_STEPS = study(
    "local-steps",
    "local steps",
    "local_steps",
    (1, 25, 50, 100, 200),
    "local steps in a round",
    "One local step is the plain chain rule. In the paper, several of them learn faster and end higher, and how many "
    "matters little.",
    {50: (88.38, 0.29)},
    small=fewer_local_steps,
)
EMBEDDING_SIZE = study(
    "embedding-size",
    "the length of the embedding",
    "embedding_dim",
    (5, 15, 25, 35),
    "length of an embedding",
    "In the paper, the length of an embedding matters little.",
    {},
)
DEPTH = study(
    "depth",
    "the depth of the hypernetwork",
    "num_hidden",
    (1, 2, 3, 4, 5),
    "hidden layers of the hypernetwork",
    "Three or four hidden layers do best in the paper.",
    {3: (88.38, None), 4: (88.42, None)},
)
