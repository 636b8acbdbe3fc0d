"""What generated pages are made of: templates, tables, figures."""

import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from pfedhn.system.files import write_atomically

TEMPLATES = Path(__file__).with_name("templates")


def filled(name: str, **parts: str) -> str:
    """A page from its template; a part that is empty leaves no gap."""
    text = Template((TEMPLATES / f"{name}.md").read_text()).substitute(parts)
    return re.sub(r"\n{3,}", "\n\n", text)


def between(page: str, begin: str, end: str, content: str) -> str:
    """A page with new content between two marks."""
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"A generated part of a page needs the marks {begin.strip()} and {end.strip()} around it.")
    return f"{before}{begin}{content}{end}{after}"


def wrapped(text: str) -> str:
    """A line of a list, as wide as the other lines of a page."""
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


def shown_figure(name: str, alt: str) -> str:
    """A figure of a page, of which the site shows the one for light or the one for dark."""
    return f"![{alt}](figures/{name}.svg#only-light)\n![{alt}](figures/{name}-dark.svg#only-dark)"


def picture(name: str, alt: str, docs: str) -> str:
    """Show a figure on a page that does not know `#only-dark`, such as a README."""
    words = html.escape(alt, quote=False).replace('"', "&quot;")
    return f"""\
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="{docs}/figures/{name}-dark.svg">
  <img alt="{words}" src="{docs}/figures/{name}.svg">
</picture>"""


def markdown(lines: Sequence[Sequence[str]], left: int = 1, breaks: bool = False) -> str:
    """A table; all but the first columns are numbers, which stay on one line with their deviation and unit."""
    rule = "|" + "|".join("---" if number < left else "---:" for number in range(len(lines[0]))) + "|"
    first, *rest = ["| " + " | ".join(line if breaks else map(_unbroken, line)) + " |" for line in lines]
    return "\n".join([first, rule, *rest])


def _unbroken(cell: str) -> str:
    return re.sub(r" (?=±)|(?<=±) |(?<=\d) (?=[kMGT]?B$|min$|s$)", "\N{NO-BREAK SPACE}", cell)


def write_figures(docs: Path, pattern: str, figures: Mapping[str, bytes]) -> None:
    """Write all figures of a page, and remove those that it has no more."""
    for file in (docs / "figures").glob(pattern):
        if file.name not in figures:
            file.unlink()
    for name, content in figures.items():
        write_atomically(docs / "figures" / name, content)
