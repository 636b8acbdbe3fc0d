"""The figures of the results page."""

from collections.abc import Sequence

from pfedhn.paper.comparison import NAMES, Place, compared, places_of
from pfedhn.report.entries import Column, Report, display_name
from pfedhn.report.figures import draw_curves, to_svg
from pfedhn.report.traffic import accuracy_at, best_of, draw_traffic, mean_line, megabytes_to

TRAFFIC = "results-bytes"
RACED: tuple[Column, ...] = (("cifar10", 50), ("cifar100", 50))  # where all methods are run


def pictured(report: Report) -> dict[Column, str]:
    """The data sets and numbers of clients that a run is stored of, with the names of their figures' files."""
    columns = dict.fromkeys(entry.column for entry in report.entries if entry.results)
    return {(dataset, clients): f"results-{dataset}-{clients}" for dataset, clients in columns}


def draw(every: Sequence[Report]) -> dict[str, bytes]:
    """Figures for light and for dark pages: accuracy against steps for every method, against bytes for the best."""
    figures = {}
    for ending, is_dark in (("", False), ("-dark", True)):
        for report in every:
            for column, name in pictured(report).items():
                figures[f"{name}{ending}.svg"] = to_svg(draw_curves(compared(report), column), is_dark)
        if places := raced(every):
            shown = [(place.report, place.column, f"{place.name} clients") for place in places]
            figures[f"{TRAFFIC}{ending}.svg"] = to_svg(draw_traffic(shown, said_of_bytes(every)), is_dark)
    return figures


def raced(every: Sequence[Report]) -> list[Place]:
    """The columns of the figure of accuracy against bytes that have several methods."""
    places = [place for place in places_of(every) if place.column in RACED]
    return [place for place in places if len(best_of(place.report, place.column)) > 1]


def said_of_bytes(every: Sequence[Report]) -> str:
    """Say what the figure of accuracy against bytes shows."""
    early, needed = [], []
    for place in raced(every):
        name, lines = NAMES[place.column[0]], best_of(place.report, place.column)
        tenth = max(max(mean_line(entry)) for entry in lines) / 10
        first = max(lines, key=lambda entry: accuracy_at(entry, tenth))
        early.append(f"{display_name(first.label)} ({accuracy_at(first, tenth):.1f} % on {name})")
        stronger, paper = place.entry("pfedhn-plus"), place.entry("pfedhn")
        if stronger is None or paper is None or not stronger.results or (goal := paper.test()) is None:
            continue
        if (size := megabytes_to(stronger, goal.mean)) is not None:
            needed.append(f"{size:.0f} of {max(mean_line(paper)):.0f} MB on {name}")
    text = f"With a tenth of the bytes, before any fine-tuning, the best methods are {' and '.join(early)}."
    if needed:
        mine, theirs = display_name("pfedhn-plus"), display_name("pfedhn")
        text += f" {mine} (thick line) reaches the final accuracy of the paper's {theirs} after {' and '.join(needed)}."
    return text
