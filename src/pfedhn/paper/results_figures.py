"""The figures of the results page."""

from collections.abc import Sequence

from pfedhn.paper.comparison import NAMES, column_name, compared, finished_entries
from pfedhn.report.entries import Column, Report, display_name
from pfedhn.report.figures import draw_curves, to_svg
from pfedhn.report.traffic import accuracy_at, best_of, draw_traffic, mean_line, megabytes_to


def pictured(report: Report) -> dict[Column, str]:
    """The data sets and numbers of clients that a run is stored of, with the names of their figures' files."""
    columns = dict.fromkeys(entry.column for entry in finished_entries(report))
    return {(dataset, clients): f"results-{dataset}-{clients}" for dataset, clients in columns}


def draw(every: Sequence[Report]) -> dict[str, bytes]:
    """Figures for light and for dark pages: accuracy against steps for every method, against bytes for the best."""
    figures = {}
    for ending, is_dark in (("", False), ("-dark", True)):
        for report in every:
            for column, name in pictured(report).items():
                figure = draw_curves(compared(report), column)
                assert figure is not None
                figures[f"{name}{ending}.svg"] = to_svg(figure, is_dark)
        if places := raced(every):
            figures[f"{TRAFFIC}{ending}.svg"] = to_svg(draw_traffic(places, said_of_bytes(every)), is_dark)
    return figures


TRAFFIC = "results-bytes"
RACED: tuple[Column, ...] = (("cifar10", 50), ("cifar100", 50))  # where all methods are run


def raced(every: Sequence[Report]) -> list[tuple[Report, Column, str]]:
    """The columns of the figure of accuracy against bytes that have several methods, with their names."""
    return [
        (compared(report), column, f"{column_name(column)} clients")
        for report in every
        for column in report.columns
        if column in RACED and len(best_of(compared(report), column)) > 1
    ]


def said_of_bytes(every: Sequence[Report]) -> str:
    """What to see in the figure of accuracy against bytes."""
    early, needed = [], []
    for report, column, _ in raced(every):
        name = NAMES[column[0]]
        lines = best_of(report, column)
        whole = max(max(mean_line(entry)) for entry in lines)
        first = max(lines, key=lambda entry: accuracy_at(entry, whole / 10))
        early.append(f"{display_name(first.label)} ({accuracy_at(first, whole / 10):.1f} % on {name})")
        stronger, paper = report.entry("pfedhn-plus", column), report.entry("pfedhn", column)
        if stronger is None or paper is None or not stronger.results or (goal := paper.test()) is None:
            continue
        size = megabytes_to(stronger, goal.mean)
        if size is not None:
            needed.append(f"{size:.0f} of {max(mean_line(paper)):.0f} MB on {name}")
    text = f"With a tenth of the bytes, before any fine-tuning, ahead of all are {' and '.join(early)}."
    if needed:
        mine, theirs = display_name("pfedhn-plus"), display_name("pfedhn")
        text += f" {mine}, our recipe (thick), is where the paper's {theirs} ends after {' and '.join(needed)}."
    return text
