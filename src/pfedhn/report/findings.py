"""What a study shows: a sentence that says what to see, tables, and figures as PNG and SVG."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.console import Group
from rich.text import Text

from pfedhn.report.figures import to_png, to_svg
from pfedhn.report.tables import markdown_table, rich_table

Lines: TypeAlias = Sequence[Sequence[str]]
"""A table: its heading, then a line for each row."""


@dataclass(frozen=True)
class Finding:
    """What a study shows of the runs that there are.

    Args:
        name: Of the study; files are called by it.
        title: A heading.
        sentence: What to see in the figure, with its numbers.
        tables: Tables, each with a caption.
        figures: What draws each figure, by what tells them apart; one that is alone has the name "". Functions, so that
            a terminal without Matplotlib still has the sentence and the tables.
    """

    name: str
    title: str
    sentence: str
    tables: Sequence[tuple[Lines, str]] = ()
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    def stem(self, figure: str) -> str:
        """The name of a figure's file without its ending."""
        return f"{self.name}-{figure}" if figure else self.name


def pngs(finding: Finding, is_dark: bool = False) -> dict[str, bytes]:
    """Every figure as PNG, by file name."""
    return {f"{finding.stem(name)}.png": to_png(draw(), is_dark) for name, draw in finding.figures.items()}


def svgs(finding: Finding, is_dark: bool = False) -> dict[str, bytes]:
    """Every figure as SVG, by file name, which says if it is for dark pages."""
    ending = "-dark.svg" if is_dark else ".svg"
    return {f"{finding.stem(name)}{ending}": to_svg(draw(), is_dark) for name, draw in finding.figures.items()}


def to_terminal(finding: Finding) -> Group:
    """The sentence and the tables, for a terminal."""
    parts: list[Any] = [Text(finding.title, style="bold"), Text(finding.sentence), ""]
    for lines, caption in finding.tables:
        parts += [rich_table(lines, None), Text(caption, style="dim"), ""]
    return Group(*parts)


def to_markdown(finding: Finding) -> str:
    """A section of a page; its figures lie beside the page."""
    parts = [f"## {finding.title}", finding.sentence]
    parts += [f"![{finding.title}]({finding.stem(name)}.png)" for name in finding.figures]
    for lines, caption in finding.tables:
        parts += [markdown_table(lines), caption]
    return "\n\n".join(part for part in parts if part) + "\n"
