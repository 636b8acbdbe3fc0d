"""The page of the rest of the paper is what its command makes of the stored results."""

from pathlib import Path

import pytest

from pfedhn.paper import paper_page
from pfedhn.report.findings import Finding

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_pages_are_what_the_command_makes() -> None:
    shown = paper_page.found(ROOT / "results")
    assert (ROOT / "docs" / "paper.md").read_text() == paper_page.page(shown)
    networks = (ROOT / "docs" / "networks.md").read_text()
    assert networks == paper_page.with_sections(networks, shown)
    stems = [finding.stem(figure) for finding in shown for figure in finding.figures]
    named = {f"paper-{stem}{ending}.svg" for stem in stems for ending in ("", "-dark")}
    assert {file.name for file in (ROOT / "docs" / "figures").glob("paper-*.*")} == named


def test_long_tables_are_folded() -> None:
    short, long = [["a", "b"], ["1", "2"]], [["a", "b"], *([[str(n), "long"] for n in range(paper_page.LONG)])]
    finding = Finding("depth", "Depth", "See.", [(short, "Short."), (long, "Long.")], {"": object})
    page, folded = paper_page.page([finding]).split('<details markdown="1">')
    assert "See." in page
    assert "(figures/paper-depth.svg#only-light)\n" in page
    assert "(figures/paper-depth-dark.svg#only-dark)" in page
    assert "| 1 | 2 |" in page
    assert "long" not in page
    assert f"<summary>All numbers ({paper_page.LONG} lines)</summary>" in folded
    assert "| 3 | long |" in folded.split("</details>")[0]
    assert "Short." not in folded
