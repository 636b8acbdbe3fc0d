"""What README and docs say is what the code does: their code runs, their links resolve, their tables are complete.

Code blocks run as they stand, but for the number of steps: what they show does not depend on it, and time does. Of a
table that leaves its steps out, each client takes part twice: too little for a verdict that nothing was learned.
Tutorials are followed from top to bottom: files are written, Python runs, commands run.
"""

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import typer
from browser import CHROMIUM, Browser
from support import free_port, mostly_slow, run_many
from typer.testing import CliRunner

import pfedhn
from pfedhn.algorithm import Rule
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.method import Method
from pfedhn.cli.app import app
from pfedhn.data.partition import Labels, by_classes
from pfedhn.deploy.site import Site
from pfedhn.experiments.build import cell_algorithm, check
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.grid import from_table, from_toml
from pfedhn.experiments.spec import Cell, Experiment
from pfedhn.experiments.tables import with_table_defaults
from pfedhn.paper import methods_page
from pfedhn.paper.experiments import DEMO, EXPERIMENTS
from pfedhn.paper.studies import STUDIES
from pfedhn.runs import tables
from pfedhn.settings import kinds_of, names_to_set, settings_in, values_of

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "results" / "log.md"]
TUTORIALS = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "adapters.md"]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, _, body in FENCE.findall(page.read_text()) if name == language]


def fewer_steps(code: str) -> str:
    return re.sub(r"\b(steps|rounds)( ?= ?)[\d_]+", r"\1\g<2>4", code)


@pytest.fixture
def fewer_participations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PARTICIPATIONS", 2)
    monkeypatch.setattr(tables, "STEPS", (1, 20_000))


def rows_after(text: str, mark: str) -> list[list[str]]:
    """The cells of the table that follows a mark, less its heading."""
    lines = text[text.index(mark) :].splitlines()[1:]
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return table


def code(cell: str) -> str:
    assert re.fullmatch(r"`[^`]+`", cell), cell
    return cell[1:-1]


@pytest.mark.parametrize(
    "page",
    mostly_slow(
        [page for page in PAGES if page not in TUTORIALS and blocks(page, "python")],
        *(ROOT / "README.md", ROOT / "docs" / "how-it-works.md"),
    ),
    ids=lambda page: page.name,
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    exec(compile(fewer_steps(code), page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_participations")
@pytest.mark.parametrize("page", [page for page in TUTORIALS if page.stem != "federation"], ids=lambda page: page.name)
def test_tutorials_can_be_followed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Titled blocks are files, Python runs in one session, lines of a shell that call pfedhn run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in re.findall(r"^from (peft|transformers) import", page.read_text(), re.MULTILINE):
        pytest.importorskip(module)
    if ".onnx" in page.read_text():
        pytest.importorskip("onnxscript")
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, title, body in FENCE.findall(page.read_text()):
        if title:
            (file,) = re.findall(r'title="([^"]+)"', title)
            Path(file).write_text(fewer_steps(body))
        elif language == "python":
            exec(compile(fewer_steps(body), page.name, "exec"), names)
        elif language == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                program, *words = shlex.split(line, comments=True) or [""]
                if program == "pfedhn":
                    said = CliRunner().invoke(app, words, prog_name="pfedhn")
                    assert said.exit_code == 0, f"{line}\n{said.output}"


def test_the_own_method_is_compared_with_the_same_local_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "tutorials" / "own-method.md"
    for _, title, body in FENCE.findall(page.read_text()):
        if title:
            Path(re.findall(r'title="([^"]+)"', title)[0]).write_text(body)
    first, second = (cell_algorithm(cell) for cell in from_toml(Path("mine.toml")).cells)
    assert isinstance(first, pfedhn.FedAvg)
    assert type(second).__name__ == "FedProx"
    assert (first.local_sgd, first.local_steps) == (second.local_sgd, second.local_steps)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_tutorial_on_a_real_federation(tmp_path: Path) -> None:
    """Servers and parties are processes, as in several terminals; another port, since 9443 may be taken."""
    page, port = ROOT / "docs" / "tutorials" / "federation.md", str(free_port())
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []

    def command(line: str) -> None:
        words = shlex.split(line.replace("9443", port))[1:]
        words += ["--port", port] if words[0] == "serve" else []
        if words[0] == "join":  # where nobody can be asked
            words += ["--accept", Site(tmp_path / "clinics").study.digest]
        with (tmp_path / f"{len(started)}-{words[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pfedhn", *words], cwd=tmp_path, env=environment, stdout=log, stderr=log
            )
        if words[0] in ("serve", "join"):
            started.append(process)
            while words[0] == "serve" and not (tmp_path / "clinics" / "ca.crt").exists():  # until it is up
                assert process.poll() is None, logs()
                time.sleep(0.3)
        else:
            assert process.wait(300) == 0, logs()

    def logs() -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in sorted(tmp_path.glob("*.log")))

    try:
        for language, title, body in FENCE.findall(page.read_text()):
            if title:
                (tmp_path / re.findall(r'title="([^"]+)"', title)[0]).write_text(fewer_steps(body))
            elif language == "python":
                subprocess.run([sys.executable, "-c", body], cwd=tmp_path, env=environment, check=True)
            elif language == "sh":
                for line in body.splitlines():
                    if line.startswith("pfedhn export"):
                        for process in started:
                            assert process.wait(600) == 0, logs()
                    if line.startswith("pfedhn"):
                        command(line)
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait(120)
    assert (tmp_path / "lyon.safetensors").exists()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells in order, in one session, as Jupyter would; no library of Jupyter is needed for that."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "tutorials" / "quickstart.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]) == (4, {"name": "python"})
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells), "outputs of somebody's machine do not belong in it"
    for number, cell in enumerate(cells):
        exec(compile(fewer_steps("".join(cell["source"])), f"cell {number}", "exec"), names)
    assert set(names["runs"]) == {"local", "fedavg", "pfedhn"}


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_participations")
def test_the_readme_can_be_followed_with_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "README.md").read_text().split("## Your own data, without Python")[1].split("\n## ")[0]
    (toml, shell) = (body for _, _, body in FENCE.findall(section))
    Path("clinics.toml").write_text(fewer_steps(toml))
    random, names = numpy.random.default_rng(0), ("Berlin", "Lyon", "Metz", "Oslo", "Porto", "Riga")
    rows = [f"{random.normal(50, 15):.0f},{random.normal():.2f}" for _ in range(240)]
    lines = [f"{names[i % 6]},{row},{('ill', 'well')[i // 6 % 2]}" for i, row in enumerate(rows)]
    Path("visits.csv").write_text("\n".join(["clinic,age,dose,outcome", *lines]))
    Path("new.csv").write_text("\n".join(["age,dose", *rows[:3]]))
    for line in shell.splitlines():
        if "--to" in line:
            pytest.importorskip("onnxscript")
        said = CliRunner().invoke(app, shlex.split(line, comments=True)[1:], prog_name="pfedhn")
        assert said.exit_code == 0, f"{line}\n{said.output}"
        assert "is not scaled" not in said.output
    assert Path("berlin.onnx").exists()


def test_readme_code_is_short() -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "quickstart.md"], ids=lambda page: page.name)
def test_the_demo_is_told_as_it_is(page: Path) -> None:
    text = " ".join(page.read_text().split())
    (cell, *_) = DEMO.cells
    mean = build_federation(cell, DEMO.seeds[0]).splits["train"].size.double().mean()
    held = f"each has {cell.partition['classes_per_client']} of the 10 digits and about {mean:.0f} training examples"
    assert held in text
    assert f"{cell.clients} clients" in text
    assert f"{cell.steps:,} communication steps" in text
    assert {other.steps for other in DEMO.cells} == {cell.steps}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each_page
def test_relative_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert ROOT in file.resolve().parents
        if anchor in ("only-light", "only-dark"):  # which color scheme a figure is for
            assert file.suffix == ".svg"
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text()), re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}


@pytest.mark.parametrize("method", ["pfedhn", "local"])
def test_accuracies_on_the_way_are_those_of_the_stored_runs(method: str) -> None:
    text = (ROOT / "docs" / "how-others-ran-pfedhn.md").read_text()
    mark = f"<!-- curves: {method} -->"
    heading = next(line for line in text[text.index(mark) :].splitlines() if line.startswith("|"))
    steps = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) steps", heading)]
    for name, *cells in rows_after(text, mark):
        dataset, clients = name.split(", ")
        lines = (ROOT / "results" / f"table1-{dataset}.jsonl").read_text().splitlines()
        runs = [run for run in map(json.loads, lines) if run["kind"] == "run"]
        wanted = {"method": method, "clients": int(clients)}
        curves = [
            dict(zip(run["curve"]["step"], run["curve"]["test"]["client_mean"], strict=True))
            for run in runs
            if run["seed"] in (0, 1, 2) and wanted.items() <= run["cell"].items()
        ]
        assert len(curves) == 3
        for step, cell in zip(steps, cells, strict=True):
            accuracies = 100 * numpy.array([curve[step] for curve in curves])
            assert cell == f"{accuracies.mean():.2f} ± {accuracies.std(ddof=1):.2f}", (name, step)


def test_the_citation_is_that_of_the_readme() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["cff-version"], citation["type"], citation["license"]) == ("1.2.0", "software", "Apache-2.0")
    paper, readme = citation["preferred-citation"], (ROOT / "README.md").read_text()
    assert f"= {{{paper['title']}}}" in readme
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    assert f"= {{{names}}}" in readme
    assert f"= {{{paper['start']}--{paper['end']}}}" in readme


def test_figures_are_whole() -> None:
    for figure in (ROOT / "docs" / "figures").glob("*.svg"):
        assert xml.etree.ElementTree.parse(figure).getroot().tag.endswith("svg")


def test_figures_fit_light_and_dark_pages() -> None:
    """A drawing follows the color scheme by itself; a plot is there twice, and a page shows the one that fits."""
    text = "".join(page.read_text() for page in PAGES)
    for figure in (ROOT / "docs" / "figures").iterdir():
        if "prefers-color-scheme" in figure.read_text():
            continue
        name = figure.stem.removesuffix("-dark")
        on_the_site = f"figures/{name}.svg#only-light)" in text and f"figures/{name}-dark.svg#only-dark)" in text
        in_a_picture = f'figures/{name}.svg">' in text and f'figures/{name}-dark.svg">' in text
        assert on_the_site or in_a_picture, figure.name


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium on this machine; `apt install chromium` installs one."
)
def test_the_site_can_be_searched_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("material")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with Browser(tmp_path / "home") as browser:
        browser.open(site / "tutorials" / "sizes.html")
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        for letter in "aggregation":
            browser.ask("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            browser.ask("Input.dispatchKeyEvent", type="keyUp", key=letter)
        links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        browser.until(lambda: any("privacy.html" in link for link in browser.evaluate(links)))
        assert not browser.complaints
        assert all(address.startswith(("file:", "data:")) for address in browser.requests)


def toml_value(text: str) -> Any:
    value = tomllib.loads(f"value = {text}")["value"]
    return None if value == "none" else tuple(value) if isinstance(value, list) else value


def documented(text: str, mark: str) -> dict[str, Any]:
    return {code(name): toml_value(code(default)) for name, default, _ in rows_after(text, mark)}


def defaults(spec: type[Any]) -> dict[str, Any]:
    return {
        item.name: item.default if item.default_factory is MISSING else item.default_factory() for item in fields(spec)
    }


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_takes_version_and_repository_from_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = load_tool("docs_hook")
    config = hook.on_config(SimpleNamespace(copyright=None, repo_url="somewhere"))
    assert config.copyright.startswith(f"pfedhn {pfedhn.__version__} ")
    metadata = tmp_path / "pyproject.toml"
    metadata.write_text('[project]\nversion = "7"\nlicense = "X"\n')
    monkeypatch.setattr(hook, "PROJECT", metadata)
    assert hook.on_config(config).repo_url is None
    metadata.write_text(metadata.read_text() + 'urls.Repository = "https://example.org/repository"\n')
    assert hook.on_config(config).repo_url == "https://example.org/repository"


@pytest.mark.parametrize("page", mostly_slow(methods_page.TABLES, *(set(methods_page.TABLES) - {"methods.md"})))
def test_tables_are_what_the_command_makes(page: str) -> None:
    assert methods_page.made(page) == (ROOT / "docs" / page).read_text(), "make docs writes it"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_tables_are_the_dataclasses(name: str) -> None:
    text = methods_page.PAGE.read_text()
    algorithm = ALGORITHMS[name]()
    usual = {key: setting.default for key, setting in settings_in(kinds_of(algorithm)).items()}
    given = usual | values_of(algorithm)
    if methods_page.is_variant(ALGORITHMS[name]):  # only what it sets
        given = {key: value for key, value in given.items() if value != usual[key]}
    assert documented(text, f"\n`{name}`: ") == given
    assert name in [code(row[0]) for row in rows_after(text, "## What each moves")]


def test_a_setting_without_a_meaning_is_named() -> None:
    @dataclass(frozen=True)
    class Silent(pfedhn.FedAvg):
        strength: float = 0.1

    with pytest.raises(SystemExit, match=r"Silent\.strength needs a comment"):
        methods_page.settings_table(Method("Silent", Silent))


def test_meanings_are_the_comments_and_may_hold_anything() -> None:
    @dataclass(frozen=True)
    class Talkative(pfedhn.FedAvg):
        name: str = "a # b"  # é: #1 | #2
        rule: Rule = "mean"  # another meaning than its parent's
        cohort = 3  # no field

    said = methods_page.meanings(Talkative)
    assert said["name"] == "é: #1 | #2"
    assert said["rule"] == "another meaning than its parent's"
    assert said["local_clip"] == methods_page.meanings(pfedhn.FedAvg)["local_clip"] != ""
    assert set(said) == {item.name for item in fields(Talkative)}
    assert '| `name` | `"a # b"` | é: #1 \\| #2 |' in methods_page.settings_table(Method("Talkative", Talkative))


def test_the_tested_model_of_every_method_in_table_1_is_named() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text()
    rows = page.split("## Which model is tested")[1].split("\n## ")[0].splitlines()
    named = {name.strip() for row in rows if row.startswith("|") for name in row.split("|")[1].split(",")}
    for dataset in ("cifar10", "cifar100", "omniglot"):
        for cell in EXPERIMENTS[f"table1-{dataset}"].cells:
            assert ALGORITHMS[cell.method].name.replace(" (HF)", "") in named


def test_fields_table_is_the_cell() -> None:
    text = (ROOT / "docs" / "experiments.md").read_text()
    assert list(documented(text, "<!-- fields: Cell -->").items()) == list(defaults(Cell).items())


def test_what_a_table_does_not_need_to_say_is_what_the_code_fills_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page against the constants, and the constants against a filled file: 10 clients of 1,000 examples."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{client},{row % 7},{('ill', 'well')[row % 2]}" for client in range(10) for row in range(1000)]
    Path("visits.csv").write_text("\n".join(["clinic,age,outcome", *rows]))
    text = (ROOT / "docs" / "experiments.md").read_text()
    said = {code(name): value for name, value, _ in rows_after(text, "<!-- defaults: tables -->")}
    cell = Cell(dataset="visits.csv", columns={"client": "clinic", "label": "outcome"})
    filled = with_table_defaults({"model": "auto", "steps": "auto"}, cell)
    assert set(filled) - {"methods"} == set(said) - {"local_steps", "local_lr", "local_clip"}
    for name in ("method", "model", "select", "batch_size", "read"):
        value = toml_value(code(said[name]))
        assert (list(value) if name == "method" else value) == filled[name]
    least, most = tables.STEPS
    assert said["steps"] == f"`{tables.PARTICIPATIONS}` times the clients, at least `{least}` and at most `{most}`"
    assert said["patience"].startswith(f"`{tables.PATIENCE}` times the clients, at least `{tables.LEAST_PATIENCE}`;")
    rarely = tables.LEAST_PATIENCE // tables.EVALUATIONS
    assert said["evaluate_every"] == f"the number of clients, at least `{rarely}`"
    assert [filled[name] for name in ("clients", "steps", "patience")] == [10, least, tables.LEAST_PATIENCE]
    assert filled["evaluate_every"] == rarely
    least, most = tables.LOCAL_STEPS
    assert said["local_steps"].startswith(f"`{least}` to `{most}`; one pass")
    common = {name: toml_value(code(said[name])) for name in ("local_lr", "local_clip")}
    common["local_steps"] = 700 // tables.BATCH_SIZE
    own = {
        code(name): tomllib.loads(code(setting)) for name, setting, _ in rows_after(text, "<!-- defaults: methods -->")
    }
    assert filled["methods"] == {name: {**common, **own.get(name, {})} for name in tables.TABLE_METHODS}
    assert own == {name: dict(settings) for name, settings in tables.TABLE_SETTINGS.items() if name}


@pytest.mark.slow
def test_the_results_on_tables_are_those_of_the_stored_runs() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "tables_page.py"))["page"]
    assert page() in (ROOT / "docs" / "tables.md").read_text(), "tools/tables_page.py writes it"


def test_toml_examples_are_experiments() -> None:
    grid, *own_data = [tomllib.loads(text) for text in blocks(ROOT / "docs" / "experiments.md", "toml")]
    experiment = from_table(grid, "mine")
    check(experiment)
    methods = [cell.method for cell in experiment.cells]
    assert {name: methods.count(name) for name in methods} == {"local": 2, "fedavg": 2, "lg-fedavg": 2, "pfedhn": 4}
    assert len(own_data) == 5  # with a network of one's own, and grids for tuning
    for table in own_data:
        for method, grid in table.pop("tune", {}).items():
            assert set(grid) <= set(names_to_set(ALGORITHMS[method].kinds))
        from_table(table, "mine")


def test_result_tables_are_the_files(tmp_path: Path) -> None:
    cell = Cell(clients=5, model="mlp", steps=2, settings={"local_steps": 1})
    experiment = Experiment("tiny", (cell,), seeds=(0,))
    (name,) = run_many(tmp_path, experiment, experiment.runs()).results
    result = json.loads((tmp_path / name / "result.json").read_text())
    text = (ROOT / "docs" / "experiments.md").read_text()
    assert [code(row[0]) for row in rows_after(text, "<!-- keys: result.json -->")] == list(result)
    assert [code(row[0]) for row in rows_after(text, "<!-- keys: test -->")] == list(result["test"])
    line = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
    (sentence,) = re.findall(r"Each line of `metrics.jsonl` has (.+?)\. ", text.replace("\n", " "))
    assert re.findall(r"`(\w+)`", sentence.replace("(without `client_examples`)", "")) == list(line)
    (tree,) = (block for block in blocks(ROOT / "docs" / "experiments.md", "text") if "result.json" in block)
    written = {re.sub(r"\d{9}", "N", file.name) for file in (tmp_path / name).iterdir() if file.name[0] != "."}
    assert written == {re.sub(r"\d{9}", "N", file) for file in re.findall(r"^    (\S+)", tree, re.MULTILINE)}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by its words."""
    if hasattr(command, "commands"):
        for name, part in command.commands.items():
            yield from commands(part, (*path, name))
    else:
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def options(command: Any) -> set[str]:
    names = {name for parameter in command.params for name in parameter.opts}
    return {name for name in names if name.startswith("--")}


def find(words: list[str]) -> tuple[str, ...]:
    """The command that a command line names."""
    found = [path for path in COMMANDS if tuple(words[: len(path)]) == path]
    assert found, f"there is no command `pfedhn {' '.join(words)}`"
    return found[0]


@each_page
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:pfedhn|make) [^`\n]+)`", FENCE.sub("", text))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in lines:
        first, *words = shlex.split(line, comments=True) or [""]
        if first == "make":
            assert words[0] in targets, line
        if first != "pfedhn" or words[0] in ("COMMAND", "--help"):
            continue
        if len(words) == 1 and any(path[0] == words[0] for path in COMMANDS):
            continue  # `pfedhn data`, a group
        path = find(words)
        given = {word for word in words if word.startswith("--")}
        assert given <= options(COMMANDS[path]) | {"--help"}, line
        rest = words[len(path) :]
        if path == ("run",) and rest and not rest[0].startswith("--") and rest[0].islower():
            assert rest[0] in EXPERIMENTS or rest[0] in STUDIES or rest[0].endswith((".toml", ".py")), line


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    sections = dict(re.findall(r"^## pfedhn ([a-z -]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == {" ".join(path) for path in COMMANDS}
    for path, command in COMMANDS.items():
        section = FENCE.sub("", sections[" ".join(path)])
        assert set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) == options(command), path


def test_environment_variables_are_those_of_the_code() -> None:
    used = {name for file in (ROOT / "src").rglob("*.py") for name in re.findall(r"\bPFEDHN_[A-Z_]+", file.read_text())}
    table = rows_after((ROOT / "docs" / "cli.md").read_text(), "## Environment variables")
    assert {code(row[0]) for row in table} == used


def test_api_page_has_every_export() -> None:
    named = set(re.findall(r"^::: pfedhn\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert named == set(pfedhn.__all__) - {"ALGORITHMS", "datasets"}


def described_on_the_api_page() -> Iterator[tuple[str, Any]]:
    """Functions and methods; the arguments of a dataclass are its fields, which have comments."""
    page = (ROOT / "docs" / "api.md").read_text()
    for name, options in re.findall(r"^::: pfedhn\.([\w.]+)\n((?:    .*\n)*)", page, re.MULTILINE):
        found: Any = pfedhn
        for part in name.split("."):
            found = getattr(found, part)
        if not isinstance(found, type):
            yield name, found
        for member in re.findall(r"^        - (\w+)$", options, re.MULTILINE):
            part = inspect.getattr_static(found, member)
            if callable(part) or isinstance(part, staticmethod | classmethod):
                yield f"{name}.{member}", getattr(part, "__func__", part)


@pytest.mark.parametrize(("name", "function"), list(described_on_the_api_page()))
def test_every_argument_of_the_api_is_documented(name: str, function: Any) -> None:
    text = inspect.getdoc(function) or ""
    arguments = [argument for argument in inspect.signature(function).parameters if argument not in ("self", "cls")]
    missing = [word for word in arguments if not re.search(rf"^    (\w+, )*{word}(, \w+)*:", text, re.MULTILINE)]
    assert not missing, f"{name} does not say what {missing} mean"


@pytest.mark.parametrize("rule", ["by_classes", "dirichlet", "by_group", "by_coarse_class"])
def test_every_setting_of_a_partition_is_on_the_page_of_splits(rule: str) -> None:
    page = (ROOT / "docs" / "splits.md").read_text()
    settings = set(inspect.signature(getattr(pfedhn, rule)).parameters) - {"num_clients"}
    assert [name for name in sorted(settings) if not re.search(rf"\b{name}\b", page)] == []


def test_the_tree_is_the_source() -> None:
    (tree,) = (block for block in blocks(ROOT / "docs" / "architecture.md", "text") if "keys.py" in block)
    source = ROOT / "src" / "pfedhn"
    modules = {file.name for file in source.glob("*.py") if not file.name.startswith("__")}
    folders = {f"{folder.name}/" for folder in source.iterdir() if (folder / "__init__.py").exists()}
    assert set(re.findall(r"^  (\S+)", tree, re.MULTILINE)) == modules | folders
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    named = {name.removeprefix("pfedhn.") for layer in layers for name in layer.split(" | ")}
    assert named == {re.sub(r"\.py$|/$", "", name) for name in modules | folders}
    for target in re.findall(r"\]\((src/[^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists()


@pytest.mark.slow
def test_used_examples_of_the_two_shares() -> None:
    page = (ROOT / "docs" / "splits.md").read_text()
    for clients, *cells in rows_after(page, "How much of 40,000 training examples"):
        cases = [(10, 2, "paper"), (10, 2, "reference"), (100, 10, "paper"), (100, 10, "reference")]
        for cell, (num_classes, per_client, shares) in zip(cells, cases, strict=True):
            one_each = {"train": Labels(numpy.arange(num_classes))}
            rule = by_classes(per_client, num_clients=int(clients), shares=shares)  # type: ignore[arg-type]
            used = [
                numpy.floor(rule.assign(one_each, key).shares * (40_000 // num_classes)).sum() for key in range(400)
            ]
            # The mean of 400 partitions is good to a tenth of a percent, and the page rounds to a whole one.
            assert float(cell.removesuffix(" %")) == pytest.approx(numpy.mean(used) / 400, abs=0.5), (clients, shares)


@each_page
def test_files_are_where_the_page_says(page: Path) -> None:
    text = re.sub(r"https://\S+", "", page.read_text())  # other projects have a src too
    for name in re.findall(r"\b((?:src|tests|tools|benchmarks)/[\w./-]*\w)", text):
        assert (ROOT / name).exists() or "NAME" in name, name


Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def documented_nodes() -> Iterator[tuple[str, Documented, str]]:
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield f"{file.name}: {getattr(node, 'name', 'module')}", node, text


def names_of(node: Documented) -> set[str]:
    """What a docstring may describe: the parameters of a function, the fields of a class."""
    if isinstance(node, ast.FunctionDef):
        return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    return {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }


@pytest.mark.slow
def test_docstrings_have_one_style() -> None:
    """Google's: parameters stand under `Args:` and examples under `Examples:`, so the site shows them as such."""
    for where, node, text in documented_nodes():
        at_the_margin = re.findall(r"^(\w+(?:, \w+)*): ", text, re.MULTILINE)
        described = {name for names in at_the_margin for name in names.split(", ")}
        assert not described & names_of(node), f"{where}: {described} belong under Args:"
        assert ">>>" not in text or re.search(r"^Examples?:\n", text, re.MULTILINE), f"{where}: examples need a heading"
        assert not re.match(r"Of\b", text), f"{where} does not say what it is"


@pytest.mark.slow
@pytest.mark.parametrize("name", [found.name for found in pkgutil.walk_packages(pfedhn.__path__, "pfedhn.")])
def test_examples_of_docstrings(name: str) -> None:
    if name == "pfedhn.__main__":
        return
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0
