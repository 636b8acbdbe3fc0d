"""Writes the results of docs/tables.md from the stored runs in results/tables/.

`make tables` runs the experiments of benchmarks/tables, stores them, and calls this.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

from pfedhn.report.entries import Report, collect, display_name
from pfedhn.report.measures_table import NUMBERS, Measured, measured
from pfedhn.report.verdict import Difference, Verdict, verdicts

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "tables.md", ROOT / "results" / "tables"
BEGIN, END = "<!-- results: tables -->", "<!-- end of results -->"
ORDER = ("stroke", "heart", "wisdm", "exam", "school", "hsb82", "parkinsons")
CLIENT = "pooled-linear-client"


def summary(found: Iterable[tuple[str, Verdict, int]]) -> list[str]:
    """A line for each data set: the recommended method, and its gain over other models."""
    heading = ["data", "clients", "seeds", "recommended", "its score", "gain over Local", "over FedAvg"]
    heading += ["over linear with the client", "over boosted trees"]
    lines = [f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}"]
    for name, verdict, seeds in found:
        gains = [_gain(verdict, other) for other in ("local", "fedavg", CLIENT, "pooled-boosting-client")]
        recommended = "none" if verdict.recommended is None else display_name(verdict.recommended)
        score = f"{verdict.measure} {verdict.scores[verdict.measure]:.{verdict.digits}f}"
        lines.append(f"| {name} | {verdict.clients} | {seeds} | {recommended} | {score} | {' | '.join(gains)} |")
    return lines


def _gain(verdict: Verdict, other: str) -> str:
    found: Difference | None = verdict.difference(other)
    if found is None:
        return "is recommended" if verdict.recommended == other else ""
    digits = verdict.digits
    ends = "" if found.interval is None else " ({:+.{d}f} to {:+.{d}f})".format(*found.interval, d=digits)
    mark = "**" if found.is_clear else ""
    return f"{mark}{found.gain:+.{digits}f}{mark}{ends}"


def details(name: str, report: Report) -> list[str]:
    """The measures of all methods and yardsticks on one data set."""
    (column,) = report.columns
    models = measured(report, column)
    is_regression = any("rmse" in model.over("examples") for model in models)
    heading = ["RMSE", "R2"] if is_regression else ["accuracy over clients", "AUC", "log loss"]
    lines = ["", f"### {name}", "", f"| model | {' | '.join(heading)} | seconds |", f"|{'---|' * (len(heading) + 2)}"]
    seconds = {
        display_name(entry.label): statistics.fmean(result.seconds for result in entry.results.values())
        for entry in report.in_column(column)
    }
    for model in models:
        values = _numbers(model) if is_regression else _classes(model)
        time = f"{seconds[model.label]:.0f}" if model.label in seconds else ""
        lines.append(f"| {model.label} | {' | '.join(values)} | {time} |")
    return lines


def _numbers(model: Measured) -> list[str]:
    found = model.over("examples")
    return [_text(found.get(name), 1, 4 if name == "rmse" else 3) for name in list(NUMBERS)[::2]]


def _classes(model: Measured) -> list[str]:
    clients, examples = model.over("clients"), model.over("examples")
    return [_text(clients.get("accuracy"), 100, 1), _text(examples.get("auc"), 100, 1), _text(examples.get("log_loss"))]


def _text(value: object, times: float = 1, digits: int = 3) -> str:
    mean, deviation = getattr(value, "mean", None), getattr(value, "deviation", None)
    if mean is None:
        return ""
    spread = "" if deviation is None else f" ± {times * deviation:.{digits}f}"
    return f"{times * mean:.{digits}f}{spread}"


def page() -> str:
    """Everything between the markers."""
    reports = {name: collect([RESULTS / f"{name}.jsonl"])[0] for name in ORDER if (RESULTS / f"{name}.jsonl").exists()}
    found = [
        (name, verdict, max(len(entry.results) for entry in report.entries))
        for name, report in reports.items()
        for verdict in verdicts(report)
    ]
    results = [result for report in reports.values() for entry in report.entries for result in entry.results.values()]
    made = results[0].environment
    lines = [*summary(found), ""]
    lines.append(
        f"Gains are positive if the recommended method is better, with 95 % intervals by a bootstrap over clients and "
        f"seeds; bold ones leave zero out. Seeds count from {min(result.seed for result in results)}; {made.device}, "
        f"torch {made.torch}, one thread for each run, two runs side by side on a busy machine."
    )
    for name, report in reports.items():
        lines += details(name, report)
    return "\n".join(lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{page()}\n\n{END}{rest.partition(END)[2]}")
