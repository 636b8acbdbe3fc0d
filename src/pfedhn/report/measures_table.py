"""The measures of methods and yardsticks on the test examples of a table, side by side."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pfedhn.report.entries import Column, Entry, Report, Summary, column_text, display_name, summarize
from pfedhn.storage.schema import DetailedScores, Yardstick, to_json

CLASSES = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "log_loss": "log loss",
    "brier": "Brier",
    "calibration_error": "calibration",
    "balanced_accuracy": "balanced",
    "f1": "F1",
}
NUMBERS = {"rmse": "RMSE", "mae": "MAE", "r2": "R2"}
IN_PERCENT = ("accuracy", "balanced_accuracy")
NEEDS_ALL = " *"  # behind the name of a yardstick


class Measured(NamedTuple):
    """A method or a yardstick, with its detailed scores of every seed."""

    label: str
    scores: Sequence[DetailedScores]

    def over(self, where: str) -> dict[str, Summary]:
        """Each measure over "examples" or "clients", summarized over seeds."""
        names = CLASSES | NUMBERS
        found = {
            name: [getattr(one, where)[name] for one in self.scores if name in getattr(one, where)] for name in names
        }
        return {name: value for name, values in found.items() if (value := summarize(values)) is not None}


def measured(report: Report, column: Column) -> list[Measured]:
    """The methods of a column that have detailed scores, in the report's order, then the yardsticks on their rows."""
    entries = [entry for entry in report.in_column(column) if _detailed(entry)]
    methods = [Measured(display_name(entry.label), _detailed(entry)) for entry in entries]
    found: dict[str, list[DetailedScores]] = {}
    for one in _yardsticks(report, entries).values():
        for yardstick in one:
            label = yardstick.title + (NEEDS_ALL if yardstick.needs_all_data else "")
            found.setdefault(label, []).append(yardstick.detailed)
    return [*methods, *(Measured(label, scores) for label, scores in found.items())]


def _detailed(entry: Entry) -> list[DetailedScores]:
    return [result.detailed for result in entry.results.values() if result.detailed is not None]


def _yardsticks(report: Report, entries: Iterable[Entry]) -> Mapping[str, tuple[Yardstick, ...]]:
    """The yardsticks on the rows of some entries, by these rows."""
    rows = dict.fromkeys(result.rows for entry in entries for result in entry.results.values())
    return {key: report.yardsticks[key] for key in rows if key in report.yardsticks}


def measures_table(report: Report, column: Column) -> list[list[str]]:
    """A line for each method and yardstick of a column, a column for each measure; empty without detailed scores."""
    found = measured(report, column)
    if not found:
        return []
    first, *others = NUMBERS if _is_regression(found) else CLASSES
    both = ["examples", "clients"] if _is_regression(found) else ["clients", "examples"]
    heading = ["RMSE", "over clients"] if _is_regression(found) else ["over clients", "over samples"]
    table = [["method", *heading, *((NUMBERS | CLASSES)[name] for name in others)]]
    for one in found:
        values = one.over("examples")
        cells = [_text(first, one.over(where).get(first)) for where in both]
        table.append([one.label, *cells, *(_text(name, values.get(name)) for name in others)])
    return table


def _is_regression(found: Iterable[Measured]) -> bool:
    return any("rmse" in one.over("examples") for one in found)


def _text(name: str, value: Summary | None) -> str:
    if value is None:
        return ""
    if name in IN_PERCENT:
        return f"{100 * value.mean:.1f}"
    return f"{value.mean:.4g}" if name in ("rmse", "mae") else f"{value.mean:.3f}"


def caption(report: Report, column: Column) -> str:
    """What the measures of a column are."""
    found = measured(report, column)
    if _is_regression(found):
        text = "errors are in the units of the label"
    else:
        text = "the first two columns are accuracy in %, and balanced accuracy is in %, too"
    text = f"{column_text(column)}: measures on test examples, over samples unless said, the mean over seeds; {text}."
    if any(one.label.endswith(NEEDS_ALL) for one in found):
        text += " Lines with * need the examples of all clients in one place."
    return text


def measure_numbers(entry: Entry) -> dict[str, Any]:
    """The measures of a cell as numbers for programs; empty without detailed scores."""
    mine = Measured(entry.label, _detailed(entry))
    table: dict[str, float | None] = {}
    for where, over in (("clients", "clients"), ("examples", "samples")):
        for name, value in mine.over(where).items():
            table |= {f"{name}_over_{over}_mean": value.mean, f"{name}_over_{over}_deviation": value.deviation}
    return table


def yardstick_numbers(report: Report) -> list[dict[str, Any]]:
    """The yardsticks of a report for programs, each with the seeds whose runs have its rows."""
    found = []
    for column in report.columns:
        entries = report.in_column(column)
        for rows, yardsticks in _yardsticks(report, entries).items():
            seeds = {seed for entry in entries for seed, result in entry.results.items() if result.rows == rows}
            place = {"dataset": column[0], "clients": column[1], "seeds": sorted(seeds)}
            found += [place | to_json(yardstick) for yardstick in yardsticks]
    return found
