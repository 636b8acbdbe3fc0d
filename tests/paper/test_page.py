"""The pages of the rest of the paper are what their command makes of the stored results."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pfedhn.report.findings import Finding

ROOT = Path(__file__).parents[2]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_page", ROOT / "tools" / "paper_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_page"] = module
    spec.loader.exec_module(module)
    return module


generator = load_generator()


@pytest.mark.slow
def test_the_pages_are_what_the_command_makes() -> None:
    shown = generator.found(ROOT / "results")
    assert (ROOT / "docs" / "paper.md").read_text() == generator.page(shown)
    assert (ROOT / "docs" / "paper-numbers.md").read_text() == generator.numbers(shown)
    networks = (ROOT / "docs" / "networks.md").read_text()
    assert networks == generator.with_sections(networks, shown)
    stems = [finding.stem(figure) for finding in shown for figure in finding.figures]
    named = {f"paper-{stem}{ending}.svg" for stem in stems for ending in ("", "-dark")}
    assert {file.name for file in (ROOT / "docs" / "figures").glob("paper-*.*")} == named


def test_long_tables_stand_on_the_second_page() -> None:
    short, long = [["a", "b"], ["1", "2"]], [["a", "b"], *([[str(n), "long"] for n in range(generator.LONG)])]
    finding = Finding("depth", "Depth", "See.", [(short, "Short."), (long, "Long.")], {"": object})
    page, numbers = generator.page([finding]), generator.numbers([finding])
    assert "See." in page
    assert "(figures/paper-depth.svg#only-light)\n" in page
    assert "(figures/paper-depth-dark.svg#only-dark)" in page
    assert "| 1 | 2 |" in page
    assert "long" not in page
    assert "paper-numbers.md#depth" in page
    assert "| 3 | long |" in numbers
    assert "Short." not in numbers
