"""The results of runs in a terminal: tables, and the findings of a study."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pfedhn.cli.endings import Stopped
from pfedhn.cli.find import find_study
from pfedhn.experiments.directory import Options
from pfedhn.experiments.finished import compute_missing
from pfedhn.experiments.registry import experiments
from pfedhn.experiments.spec import RunSpec
from pfedhn.experiments.yardsticks import compute_yardsticks
from pfedhn.report.entries import asked_for, collect
from pfedhn.report.findings import to_terminal as finding_to_terminal
from pfedhn.report.results import read
from pfedhn.report.study import findings
from pfedhn.report.tables import to_terminal
from pfedhn.report.verdict import complaint, verdicts
from pfedhn.report.verdict import to_terminal as verdict_to_terminal
from pfedhn.system.screen import Screen, say, table_screen


def add_yardsticks(path: Path, runs: Sequence[RunSpec], options: Options, quiet: bool) -> None:
    """Fit the yardsticks that finished runs on tables lack; Ctrl-C leaves the others for another time."""
    try:
        compute_yardsticks(path, runs, options, _teller(quiet))
    except KeyboardInterrupt:
        raise Stopped(
            f"stopped; the runs are finished, and `pfedhn run --resume {path}` fits the yardsticks."
        ) from None


def _teller(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else (lambda text: say(text, is_error=True))


def show_results(path: Path, runs: Sequence[RunSpec], options: Options, quiet: bool) -> str | None:
    """Print tables and verdicts of the runs that were asked for; for a study, compute and print its findings.

    Returns what to complain of if no method learned anything. A named experiment or a study is fixed: what its runs
    found is the result, whatever it is, and nothing is complained of.
    """
    reports = [asked_for(found) for found in collect([path])]
    judged = [(to_terminal(report), verdicts(report)) for report in reports]
    study = find_study(options.source)
    if not quiet:
        for table, found in judged:
            table_screen().print(table)
            table_screen().print(verdict_to_terminal(found))
    if study is not None and study.compute is not None:
        compute_missing(study.name, study.compute, path, runs, options, _teller(quiet))
    if study is not None and not quiet:
        for finding in findings(read(path), [study]):
            Screen().print(finding_to_terminal(finding))
    is_own = study is None and options.source not in experiments()
    lost = [verdict for _, found in judged for verdict in found if verdict.learned_nothing]
    return complaint(lost[0]) if is_own and lost else None
