"""The results of runs in a terminal: tables, and the findings of a study."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pfedhn.cli.endings import Stopped
from pfedhn.cli.find import find_study
from pfedhn.experiments.directory import Options
from pfedhn.experiments.finished import compute_missing
from pfedhn.experiments.spec import RunSpec
from pfedhn.experiments.yardsticks import compute_yardsticks
from pfedhn.report.entries import asked_for, collect
from pfedhn.report.findings import to_terminal as finding_to_terminal
from pfedhn.report.results import read
from pfedhn.report.study import findings
from pfedhn.report.tables import to_terminal
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


def show_results(path: Path, runs: Sequence[RunSpec], options: Options, quiet: bool) -> None:
    """Print the tables of the runs that were asked for; for a study, compute what its findings need and print them."""
    tables = [to_terminal(asked_for(found)) for found in collect([path])]
    study = find_study(options.source)
    if not quiet:
        for table in tables:
            table_screen().print(table)
    if study is not None and study.compute is not None:
        compute_missing(study.name, study.compute, path, runs, options, _teller(quiet))
    if study is not None and not quiet:
        for finding in findings(read(path), [study]):
            Screen().print(finding_to_terminal(finding))
