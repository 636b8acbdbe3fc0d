"""Shows docstrings on the site as they are written: `name: meaning` paragraphs as parameters, `>>>` as examples."""

import re
from typing import Any

import griffe

ENTRY = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): (.+)")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        names = {parameter.name for parameter in obj.parameters} if isinstance(obj, griffe.Function) else set()
        paragraphs = obj.docstring.value.split("\n\n")
        obj.docstring.value = "\n\n".join(as_section(paragraph, names) for paragraph in paragraphs)


def as_section(paragraph: str, names: set[str]) -> str:
    """A paragraph under the heading that the site's parser knows it by; any other paragraph as it is."""
    lines = paragraph.split("\n")
    if lines[0].startswith(">>> "):
        return "\n".join(["Examples:", *(f"    {line}" for line in lines)])
    heads = [ENTRY.fullmatch(line) for line in lines if not line.startswith(" ")]
    if not heads or not all(head and set(head[1].split(", ")) <= names for head in heads):
        return paragraph
    section, others = ["Args:"], []
    for line in lines:
        if head := ENTRY.fullmatch(line):
            section += others
            first, *rest = head[1].split(", ")
            others = [f"    {name}: See `{first}`." for name in rest]  # "x, y: ..." are two parameters
            line = f"{first}: {head[2]}"
        section.append(f"    {line}")
    return "\n".join([*section, *others])
