"""Write the results pages from results/: docs/results.md, results/log.md, figures and results/results.csv.

`make results` runs this module. No number on the pages is typed in. results/notes.md becomes a part of the log, and the
README gets a finding, a table and a figure.
"""

from pathlib import Path

from pfedhn.errors import UserError
from pfedhn.paper.pages import between, write_figures
from pfedhn.paper.results_figures import draw
from pfedhn.paper.results_log import page, read_tuning
from pfedhn.paper.results_summary import README_MARKS, readme_block, summary
from pfedhn.paper.stored_tables import read_results, table_of_runs
from pfedhn.system.files import write_atomically

ROOT = Path(__file__).resolve().parents[3]


def build(results: Path, docs: Path, readme: Path) -> None:
    reports, notes = read_results(results), (results / "notes.md").read_text()
    write_figures(docs, "results-*.*", draw(reports))
    write_atomically(docs / "results.md", summary(reports).encode())
    write_atomically(results / "log.md", page(reports, notes, read_tuning(results)).encode())
    write_atomically(results / "results.csv", table_of_runs(results).encode())
    block = readme_block(reports)
    write_atomically(readme, between(readme.read_text(), *README_MARKS, block).encode())


if __name__ == "__main__":
    try:
        build(ROOT / "results", ROOT / "docs", ROOT / "README.md")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
