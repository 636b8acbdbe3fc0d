"""Write the tables of docs/methods.md, privacy.md, robustness.md, deployment.md and hospitals.md.

What each method moves and keeps, what fewer bits cost, and all settings; accuracy against epsilon, attacks and
clients in flight. `make docs` runs it. A table stands between two markers and is made from a method's file and its row
of `ALGORITHMS`, so that a new method appears by itself, or from the stored runs of an experiment. What a setting means
is the comment behind it in the dataclass.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch.utils import _pytree as pytree

from pfedhn.algorithm import LABEL_COUNTS
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.method import Method
from pfedhn.combinators import WRAPPERS, innermost
from pfedhn.model import Model
from pfedhn.models import LeNet, cross_entropy
from pfedhn.paper import hospitals_page
from pfedhn.paper.pages import between, markdown
from pfedhn.paper.robustness import ATTACKS, ROBUSTNESS
from pfedhn.report.entries import Entry, to_reports
from pfedhn.report.results import read_file
from pfedhn.report.tables import bytes_text, number_text
from pfedhn.settings import CHOICE, settings_in, values_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "methods.md"
NUM_CLIENTS, NUM_CLASSES = 50, 10


def meanings(algorithm: type[Any]) -> dict[str, str]:
    """The comment behind each field of a dataclass, its parents' fields included."""
    found: dict[str, str] = {}
    for parent in reversed(algorithm.__mro__):
        if "__dataclass_fields__" not in vars(parent):
            continue
        source = textwrap.dedent(inspect.getsource(parent))
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                line = source.splitlines()[(node.end_lineno or node.lineno) - 1]
                found[node.target.id] = line.encode()[node.end_col_offset :].decode().partition("#")[2].strip()
    return found


def meaning_of(algorithm: type[Any], name: str) -> str:
    """What a setting means; "server.lr" is one of a value, by whose class it is explained."""
    owner, _, inner = name.partition(".")
    if not inner or (inner == CHOICE and owner == "server"):
        return meanings(algorithm).get(owner, "")
    hint = get_type_hints(algorithm)[owner]
    found = [meanings(kind).get(inner, "") for kind in (get_args(hint) or (hint,))]
    return "; AdamW: ".join(dict.fromkeys(part for part in found if part))


def is_variant(method: Method) -> bool:
    """Whether an earlier row of the table has the same class."""
    return next((row for row in ALGORITHMS.values() if row.algorithm is method.algorithm), method) is not method


def as_toml(value: Any) -> str:
    """A default as it is written in an experiment file."""
    return f"`{json.dumps('none' if value is None else value)}`"


def settings_table(method: Method) -> str:
    """All settings of a method, or, of a variant of another one, those that it changes."""
    values, lines = values_of(method()), [["setting", "default", "meaning"]]
    around = {name: kind for kind in WRAPPERS for name in settings_in(kind)}
    for name, setting in settings_in((*WRAPPERS, method.algorithm)).items():
        is_around = name in around and name not in settings_in(method.algorithm)
        value = values.get(name, setting.default)
        if (is_variant(method) or is_around) and value == setting.default:
            continue
        meaning = meaning_of(around[name] if is_around else method.algorithm, name).replace("|", r"\|")
        if not meaning:
            raise SystemExit(
                f"{method.algorithm.__name__}.{name} needs a comment behind it that says what it means: "
                "docs/methods.md is made from it."
            )
        lines.append([f"`{name}`", as_toml(value), meaning])
    return markdown(lines, left=3, breaks=True)


def pseudo_code(method: Method) -> str:
    """The docstring of a method's file, its aligned lines as a block."""
    module = inspect.getmodule(method.algorithm)
    first, *paragraphs = (inspect.getdoc(module) or "").split("\n\n")
    blocks = [
        f"```text\n{textwrap.dedent(paragraph)}\n```" if re.search(r"\S {2,}\S", paragraph) else paragraph
        for paragraph in paragraphs
    ]
    return "\n\n".join([first, *blocks])


def section(name: str, method: Method) -> str:
    title = f"### {method.name}\n\n"
    place = f"`{name}`: `{method.algorithm.__module__}.{method.algorithm.__qualname__}`"
    if is_variant(method):
        return f"{title}{place} with other defaults.\n\n{method.description}\n\n{settings_table(method)}"
    use = f"**When to use it.** {method.use}\n\n" if method.use else ""
    return f"{title}{place}\n\n{pseudo_code(method)}\n\n{use}{settings_table(method)}"


def wrappers_table() -> str:
    """The settings of the combinators, which every method has."""
    lines = [["setting", "default", "meaning", "in Python"]]
    for kind, function in zip(WRAPPERS, ("fine_tuned", "with_statistics", "averaged"), strict=True):
        for name, setting in settings_in(kind).items():
            lines.append([f"`{name}`", as_toml(setting.default), meanings(kind)[name], f"`pfedhn.{function}`"])
    return markdown(lines, left=4, breaks=True)


def settings_sections() -> str:
    return "\n\n".join(section(name, method) for name, method in ALGORITHMS.items())


def count(tree: Any) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(tree))


def wire_table() -> str:
    """How many numbers each method moves and keeps, counted by calling its functions."""
    model = Model("lenet", LeNet, cross_entropy, dtype=torch.float64)  # the type that rows are drawn in
    start = model.fresh(0)
    columns = ["receives", "sends", "keeps"]
    names = [*(f"the client {what}" for what in columns), "the server keeps for it", "minibatches before a test"]
    lines = [["method", *names]]
    for name, method in ALGORITHMS.items():
        algorithm = innermost(method().for_clients(NUM_CLIENTS))
        shared = algorithm.init_shared({model.name: model}, {model.name: start}, 0)
        extras, classes = algorithm.extras(model), torch.zeros(NUM_CLASSES, dtype=torch.int64)
        given = start if extras.num_labels is None else start | {LABEL_COUNTS: classes}
        row, private = algorithm.init_row(shared, 0, None), algorithm.init_private(model, given, 0)
        received = count(algorithm.send(model, shared, row)) if algorithm.needs.communication else 0
        down, up = extras.num_values
        numbers = (received, received - down + up, count(private), count(row), algorithm.num_personalize_batches)
        lines.append([f"`{name}`", *(f"{number:,}" for number in numbers)])
    return markdown(lines, breaks=True)


def stored(name: str) -> list[Entry]:
    """The stored runs of an experiment."""
    reports = to_reports(read_file(PAGE.parents[1] / "results" / f"{name}.jsonl"))
    return [entry for report in reports for entry in report.entries]


def accuracies(entry: Entry) -> list[str]:
    return [number_text(entry.test("clients")), number_text(entry.test("samples"))]


def compression_table() -> str:
    """Accuracy against bytes."""
    lines = [["method", "upload", "download", "test accuracy, over clients", "over examples", "up", "down"]]
    for entry in stored("compression"):
        sent = [bytes_text(entry.total("bytes_up")), bytes_text(entry.total("bytes_down"))]
        wire = [entry.cell.upload, entry.cell.download]
        lines.append([ALGORITHMS[entry.cell.method].name, *wire, *accuracies(entry), *sent])
    return markdown(lines, left=3, breaks=True)


def privacy_table(name: str = "privacy", without: str | None = None) -> str:
    """Accuracy against epsilon; the runs without privacy may be another experiment's."""
    entries = stored(name)
    if without is not None:
        methods = ["local", *dict.fromkeys(entry.cell.method for entry in entries)]
        entries = [entry for entry in stored(without) if entry.cell.clients == entries[0].cell.clients] + entries
        entries = [entry for method in methods for entry in entries if entry.cell.method == method and entry.results]
    lines = [["method", "epsilon", "noise", "test accuracy, over clients", "over examples", "seeds"]]
    for entry in entries:
        privacy = entry.cell.privacy
        budget = [f"{privacy['epsilon']:g}", f"{privacy['noise']:g}"] if privacy else ["no privacy", ""]
        called = ALGORITHMS[entry.cell.method].name + (" (sends nothing)" if entry.cell.method == "local" else "")
        lines.append([called, *budget, *accuracies(entry), str(len(entry.results))])
    return markdown(lines, breaks=True)


def robustness_table() -> str:
    """Accuracy of the honest clients by method, defense and attack."""
    by_cell: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in stored("robustness"):
        method, robust = ALGORITHMS[entry.cell.method].name, str(entry.cell.robust or "none")
        by_cell.setdefault((method, robust), {})[entry.cell.attack["kind"]] = entry
    lines = [["method", "`robust`", "no attack", *(f"`{attack}`" for attack in ATTACKS[1:])]]
    for (method, robust), found in by_cell.items():
        lines.append([method, robust, *(_of_finished(found.get(attack)) for attack in ATTACKS)])
    return markdown(lines, left=2, breaks=True)


def _of_finished(entry: Entry | None) -> str:
    """Accuracy over clients, and how many runs diverged; those are not stored."""
    num_diverged = len(ROBUSTNESS.seeds) - (0 if entry is None else len(entry.results))
    text = "" if entry is None or not entry.results else number_text(entry.test("clients"))
    if not num_diverged:
        return text
    return f"{text} ({num_diverged} diverged)" if text else "diverged"


def staleness_table() -> str:
    """Accuracy against clients in flight."""
    by_method: dict[str, dict[int, str]] = {}
    for entry in stored("staleness"):
        by_method.setdefault(entry.cell.method, {})[entry.cell.in_flight or 0] = number_text(entry.test("clients"))
    counts = sorted({count for row in by_method.values() for count in row})
    lines = [["method", "replies per step", *(f"{count} in flight" for count in counts)]]
    for method, row in by_method.items():
        known = ALGORITHMS[method]
        lines.append([known.name, str(known.cohort_size), *(row[count] for count in counts)])
    return markdown(lines, breaks=True)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "methods.md": {
        "wire": wire_table,
        "compression": compression_table,
        "wrappers": wrappers_table,
        "settings": settings_sections,
    },
    "privacy.md": {
        "privacy": privacy_table,
        "privacy-cifar10": partial(privacy_table, "privacy-cifar10", "table1-cifar10"),
    },
    "deployment.md": {"staleness": staleness_table},
    "robustness.md": {"robustness": robustness_table},
    "hospitals.md": hospitals_page.PARTS,
}
"""By page and marker."""


def made(name: str) -> str:
    """The text of a page with every table made anew."""
    page = (PAGE.parent / name).read_text()
    for marker, table in TABLES[name].items():
        begin, end = f"<!-- made: {marker} -->\n", f"\n<!-- end: {marker} -->"
        page = between(page, begin, end, f"\n{table()}\n")
    return page


if __name__ == "__main__":
    for page in TABLES:
        (PAGE.parent / page).write_text(made(page))
