"""The form of an ablation: one setting takes several values, and accuracy is drawn against it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.study import Found, setting

LEAST_HEIGHT = 5.0  # points that the right scale spans, so that differences among seeds do not look like effects


def sweep(
    found: Found, name: str, called: str, sentence: str, paper: Mapping[Any, tuple[float, float | None]] | None = None
) -> Finding:
    """What a setting does to the accuracy.

    Args:
        found: Runs of the study.
        name: The setting.
        called: What it is called on an axis.
        sentence: What to see, before the numbers.
        paper: The paper's numbers for pFedHN, by value.
    """
    paper = {} if paper is None or found.is_small else paper
    by_method: dict[str, list[Entry]] = {}
    for entry in sorted(found.entries, key=lambda entry: setting(entry.cell, name) or 0):
        by_method.setdefault(entry.cell.method, []).append(entry)
    by_method = {method: drawing.on_common_seeds(entries) for method, entries in by_method.items()}
    lines = [["method", called, "accuracy", *(["paper"] if paper else []), "seeds"]]
    for method, entries in by_method.items():
        for entry in entries:
            value = setting(entry.cell, name)
            known = paper.get(value) if method == "pfedhn" else None
            published = [drawing.paper_text(known)] if paper else []
            ours = drawing.text(drawing.accuracy(entry))
            lines.append([entry.label, str(value), ours, *published, drawing.seeds_of(entry)])
    said = [
        f"{entries[0].label} here: "
        + drawing.listed({str(setting(e.cell, name)): f"{drawing.text(drawing.accuracy(e), 1)} %" for e in entries})
        for entries in by_method.values()
    ]
    return Finding(
        found.study.name,
        found.title,
        f"{sentence} {'; '.join(said)}.",
        [(lines, drawing.caption([entry for entries in by_method.values() for entry in entries]))],
        {"": partial(picture, found.title, by_method, name, called, paper)},
    )


def picture(
    title: str,
    by_method: Mapping[str, Sequence[Entry]],
    name: str,
    called: str,
    paper: Mapping[Any, tuple[float, float | None]],
) -> Any:
    """Left how the first method learns with each value, right where all of them end."""
    figure, (left, right) = drawing.titled(11.0, 4.4, title, 2)
    first = next(iter(by_method.values()))
    for number, entry in enumerate(first):
        curve = mean_curve(entry)
        style = {"color": drawing.COLORS[number % 8], "linewidth": 1.7, "label": str(setting(entry.cell, name))}
        left.plot(list(curve), list(curve.values()), **style)
    drawing.heading(left, f"{first[0].label}: how it learns, by {called}")
    drawing.finished_axes(left, "communication steps", "test accuracy in %")
    values = sorted({setting(entry.cell, name) for entries in by_method.values() for entry in entries})
    for number, (method, entries) in enumerate(by_method.items()):
        means = [summary for entry in entries if (summary := drawing.accuracy(entry)) is not None]
        places = [values.index(setting(entry.cell, name)) for entry in entries]
        label, marker = entries[0].label, drawing.MARKERS[number]
        drawing.errorbar(right, places, means, drawing.color_of(method, number), label, marker=marker)
    shown = {values.index(value): mean for value, (mean, _) in paper.items() if value in values}
    if shown:
        style = {"color": drawing.PAPER, "linestyle": "none", "marker": "x", "markersize": 8}
        right.plot(list(shown), list(shown.values()), label=drawing.PAPER_LABEL, **style)
    right.set_xticks(range(len(values)), list(map(str, values)))
    low, high = right.get_ylim()
    right.set_ylim(min(low, (low + high - LEAST_HEIGHT) / 2), max(high, (low + high + LEAST_HEIGHT) / 2))
    seeds = max(len(entry.results) for entries in by_method.values() for entry in entries)
    bar = "; bar: deviation over seeds" if seeds > 1 else ", one seed"
    drawing.heading(right, f"at the round chosen on validation{bar}")
    drawing.finished_axes(right, called, "test accuracy in %")
    return figure


def mean_curve(entry: Entry) -> dict[int, float]:
    """Accuracy by communication step: the mean over the seeds that have it."""
    curves = [entry.curve(seed) for seed in entry.curves]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}
