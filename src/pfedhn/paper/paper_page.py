"""Write docs/paper.md, parts of docs/networks.md and their figures from the lines in results/.

The figures of docs/hospitals.md are written, too.

`make results` runs it. Nothing of ours on the pages is typed in: a study without a stored run has no section yet.
"""

from collections.abc import Sequence
from pathlib import Path

from pfedhn.errors import UserError
from pfedhn.paper import hospitals_page
from pfedhn.paper.hospitals import NAME
from pfedhn.paper.pages import between, filled, markdown, shown_figure, write_figures
from pfedhn.paper.studies import DRAWN, OF_PAPER
from pfedhn.report.findings import Finding, svgs
from pfedhn.report.results import read_file
from pfedhn.report.study import findings
from pfedhn.report.tables import markdown_table
from pfedhn.system.files import write_atomically

ROOT = Path(__file__).resolve().parents[3]
LONG = 21  # lines of a table, its heading too; a longer one is folded

SHOWN = """\
Below are the studies that have been run, in the order of the paper, with its values beside ours. `results/log.md` in
the repository says which of our values are below the paper's, and why. To redraw the figures from the stored results:
`pfedhn report results --out report`.
"""
NONE_SHOWN = """\
None of these has a stored result yet, so there is nothing to show here. With `--small`, each runs on the digits in
seconds: `pfedhn run novel-clients --small`.
"""


def found(results: Path) -> list[Finding]:
    """What the stored runs show, in the order of the paper."""
    runs = [part for file in sorted(results.glob("*.jsonl")) for part in read_file(file)]
    shown = {finding.name: finding for finding in findings(runs)}
    return [shown[name] for name in (*OF_PAPER, *DRAWN) if name in shown]


def page(shown: Sequence[Finding]) -> str:
    studies = [finding for finding in shown if finding.name not in DRAWN]
    parts = [SHOWN if studies else NONE_SHOWN]
    for finding in studies:
        parts += [f"## {finding.title}", *section(finding)]
    return filled("paper", commands=commands(), shown="\n\n".join(parts))


def section(finding: Finding) -> list[str]:
    """What a finding says and shows, below its heading."""
    parts = [finding.sentence, f"`pfedhn run {finding.name}`"]
    parts += [shown_figure(f"paper-{finding.stem(figure)}", finding.title) for figure in finding.figures]
    for lines, caption in finding.tables:
        if len(lines) <= LONG:
            parts += [markdown_table(lines), caption]
        else:
            summary = f"<summary>All numbers ({len(lines) - 1} lines)</summary>"
            parts += ['<details markdown="1">', summary, markdown_table(lines), caption, "</details>"]
    return parts


def with_sections(text: str, shown: Sequence[Finding]) -> str:
    """The page of networks with what is known of each experiment between its two markers."""
    by_name = {finding.name: finding for finding in shown}
    for name in DRAWN:
        mark = f"<!-- {name} -->\n"
        parts = section(by_name[name]) if name in by_name else [f"It has no stored result yet: `pfedhn run {name}`."]
        text = between(text, mark, mark, "\n{}\n\n".format("\n\n".join(parts)))
    return text


def commands() -> str:
    lines = [["command", "shows"], *([f"`pfedhn run {name}`", study.title] for name, study in OF_PAPER.items())]
    return markdown(lines, left=2, breaks=True)


def build(results: Path, docs: Path) -> None:
    shown = found(results)
    figures = {
        f"paper-{name}": content
        for finding in shown
        for is_dark in (False, True)
        for name, content in svgs(finding, is_dark).items()
    }
    write_figures(docs, "paper-*.*", figures)
    write_figures(docs, f"{NAME}-*.*", hospitals_page.figures())
    networks = docs / "networks.md"
    write_atomically(networks, with_sections(networks.read_text(), shown).encode())
    write_atomically(docs / "paper.md", page(shown).encode())


if __name__ == "__main__":
    try:
        build(ROOT / "results", ROOT / "docs")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
