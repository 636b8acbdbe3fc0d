"""Experiments from files and command lines: grids, `--set` and `--only`."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.find import build_algorithm, find_method
from pfedhn.data.dealing import check_folds
from pfedhn.errors import SYNONYMS, UserError, closest, closest_setting
from pfedhn.experiments.rates import apply_rates, headed, rates_file, rates_for
from pfedhn.experiments.spec import (
    CELL_TABLES,
    NAMED,
    Cell,
    Experiment,
    RunSpec,
    distinct,
    flat_fields,
    is_made,
    is_own_data,
    method_name,
)
from pfedhn.experiments.tables import with_own_clients, with_table_defaults
from pfedhn.settings import build, fits, in_short, names_to_set, parse_assignments, parse_toml, parse_value, to_toml
from pfedhn.system.files import given_path, read_text

FIELDS = "docs/experiments.md"  # which lists the fields of an experiment file
TABLES = Mapping[str, Mapping[str, Any]]


def from_toml(path: Path, data_dir: Path | None = None) -> Experiment:
    """A user's own experiment; lists in scalar fields make a grid, `[methods.NAME]` holds what differs by method.

    If the file does not give the number of clients, a person's own data tell it; of a table, they tell what else it
    leaves out, too. The learning rates that `pfedhn tune`
    chose are read from the file beside it: `mine.rates.toml` for `mine.toml`.
    """
    try:
        table = parse_toml(read_text(path), path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    table.pop("tune", None)  # of `pfedhn tune` alone
    content = _with_own_methods(table, path.parent)
    if "cells" not in content and isinstance(content.get("dataset"), str):
        named = {name: content[name] for name in ("dataset", "columns", "read") if name in content}
        read = build(Cell, named | {"dataset": _absolute("dataset", named["dataset"], path.parent)}, path.stem)
        content = with_table_defaults(content, read, data_dir)
    experiment = from_table(content, path.stem)
    if not table.keys() - {"name", "title", "seeds", "published"}:
        raise UserError(f"{path} does not say what to run; name at least a method or a dataset (`pfedhn run --help`).")
    cells = [
        replace(cell, **{name: _absolute(name, getattr(cell, name), path.parent) for name in PATHS})
        for cell in experiment.cells
    ]
    is_counted = "cells" not in table and not any("clients" in p for p in (table, *table.get("methods", {}).values()))
    cells = [with_own_clients(cell, data_dir) for cell in cells] if is_counted else cells
    experiment = replace(experiment, cells=tuple(cells))
    chosen = rates_file(path)
    return apply_rates(experiment, rates_for(experiment.name, chosen)) if chosen.exists() else experiment


def grids_from_toml(path: Path) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The settings that `pfedhn tune` varies, and their values, from `[tune.METHOD]` of an experiment file."""
    table = _with_own_methods(parse_toml(read_text(path), path), path.parent).get("tune", {})
    if not fits(table, TABLES) or not all(table.values()):
        raise UserError("tune does not fit; write lines such as lr = [0.1, 0.01] under headings such as [tune.pfedhn].")
    grids: dict[str, dict[str, tuple[Any, ...]]] = {}
    for method, grid in table.items():
        known = headed(f"[tune.{method}]", method)
        if (other := known.rates_from) is not None:
            raise UserError(f"[tune.{method}] has no effect: {method} takes the rates of {other}; tune that instead.")
        grid = in_short(known.kinds, grid)
        for setting, values in grid.items():
            if not isinstance(values, list) or not values:
                raise UserError(f"[tune.{method}] {setting} = {values!r} does not fit; it must be a list of values.")
            for value in values:
                build_algorithm(method, {setting: value})
        grids[method] = {setting: tuple(values) for setting, values in grid.items()}
    return grids


def _with_own_methods(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Write own methods of an experiment file in full; a heading may name the class alone, as in [methods.FedProx]."""
    given = table.get("method", [])
    names = [_absolute("method", name, base) for name in _listed(given)]
    by_class = {name.rpartition(":")[2]: name for name in names if isinstance(name, str) and ":" in name}
    changed = dict(table)
    if "method" in table:
        changed["method"] = names if isinstance(given, list) else names[0]
    for heading in ("methods", "tune"):
        if isinstance(by_method := table.get(heading), Mapping):
            changed[heading] = {
                name if name in ALGORITHMS else by_class.get(name, _absolute("method", name, base)): part
                for name, part in by_method.items()
            }
    return changed


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


PATHS = ("method", "dataset", "model", "pretrain")  # fields of a cell that may hold the path of a file


def _absolute(field: str, value: Any, base: Path) -> Any:
    """The value of a field, absolute if it is a path, so that a run can be resumed from anywhere.

    A path is relative to the experiment's file, or to the working directory. Of "file.py:function" the file is a path.
    """
    if field not in PATHS or not isinstance(value, str):
        return value
    if field != "dataset" or is_made(value):
        file, _, name = value.rpartition(":")
        return f"{given_path(base / given_path(file), is_resolved=True)}:{name}" if file.endswith(".py") else value
    path = base / given_path(value)
    is_path = is_own_data(value) or (value not in NAMED and path.is_dir())
    return str(given_path(path, is_resolved=True)) if is_path else value


def from_table(table: Mapping[str, Any], name: str) -> Experiment:
    """An experiment from the content of a TOML file: a grid, or the list of cells that a run directory keeps."""
    table = {key: value for key, value in table.items() if key not in ("planned", "options")}  # a directory's own
    heading = {key: table.pop(key, default) for key, default in (("name", name), ("title", ""))}
    for key, value in heading.items():
        if not isinstance(value, str):
            raise UserError(f"{key} = {value!r} does not fit; it must be a text.")
    if "".join(heading["name"].splitlines()) != heading["name"]:  # it names a folder, and stands inside sentences
        raise UserError(f"`name` must be on one line, got {heading['name']!r}.")
    seeds = table.pop("seeds", None)
    if seeds is not None and (not isinstance(seeds, list) or not seeds or not all(fits(seed, int) for seed in seeds)):
        raise UserError(f"seeds = {seeds!r} does not fit; it must be a list of whole numbers.")
    published = _published(table.pop("published", {}))
    has_split = "split" in table
    if "cells" in table:
        listed = table.pop("cells")
        if not isinstance(listed, list) or not all(isinstance(cell, Mapping) for cell in listed):
            raise UserError("cells does not fit; write each cell under a heading [[cells]].")
        cells = [build(Cell, cell, f"cell {number}", FIELDS) for number, cell in enumerate(listed)]
        if table:
            raise UserError(f"beside `cells` stands {next(iter(table))!r}; a file has either cells or a grid.")
    else:
        cells = list(_cells_of_grid(table, heading["name"]))
    folds = _folds_of(cells, has_split)
    seeds = _usual_seeds(folds) if seeds is None else tuple(dict.fromkeys(seeds))
    return Experiment(heading["name"], distinct(cells), seeds, heading["title"], published)


def _folds_of(cells: Iterable[Cell], has_split: bool = False) -> int | None:
    """The number of folds of an experiment; None without cross-validation.

    Args:
        cells: Of the experiment.
        has_split: Whether its file gives `split`, which is known otherwise only if it is not the usual one.
    """
    given = {cell.folds: cell.split for cell in cells}
    for folds, split in given.items():
        if folds is None:
            continue
        check_folds(folds)
        if has_split or split != Cell.split:
            raise UserError(f"`folds` = {folds} leaves no use for `split` = {list(split)}; leave one of them out.")
        if len(given) > 1:
            numbers = " and ".join("none" if number is None else str(number) for number in given)
            raise UserError(f"`folds` must be the same in all cells, got {numbers}; write a file for each.")
    return next(iter(given), None)


def _usual_seeds(folds: int | None) -> tuple[int, ...]:
    """The seeds of an experiment that does not give them: three, or one for each fold."""
    return Experiment.seeds if folds is None else tuple(range(folds))


def _published(table: Any) -> dict[str, tuple[float, float]]:
    if fits(table, Mapping):
        table = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    if not fits(table, dict[str, tuple[float, float]]):
        raise UserError('published does not fit; write lines such as "pfedhn/50" = [88.38, 0.29].')
    return dict(table)


def _cells_of_grid(table: dict[str, Any], name: str) -> Iterator[Cell]:
    by_method = table.pop("methods", {})
    if not fits(by_method, TABLES):
        raise UserError("methods does not fit; write what differs by method under headings such as [methods.pfedhn].")
    methods = _listed(table.pop("method", list(by_method) or ["pfedhn"]))
    for method in by_method:
        headed(f"[methods.{method}]", method)
        if method not in methods:
            raise UserError(f"[methods.{method}] has no cell to change; add it to method = {methods!r}.")
    named = [method for method in methods if isinstance(method, str)]
    _refuse_unknown(table, named, name)
    _refuse_of_some(table.get("settings"), named)
    for method in methods:
        for point in _grid({"method": method} | table, {item.name: None for item in fields(Cell)}):
            cell = build(Cell, point, name, FIELDS)
            kinds = find_method(method).kinds
            hints = names_to_set(kinds)
            for values in _grid(in_short(kinds, by_method.get(method, {})), hints):
                for settings in _grid(in_short(kinds, cell.settings), hints):
                    yield _with_values(replace(cell, settings=settings), values)


def _refuse_unknown(table: Mapping[str, Any], methods: Iterable[str], name: str) -> None:
    """Refuse what is no field of a cell; a setting of a method stands under the method's heading."""
    known = [*(item.name for item in fields(Cell)), "seeds"]
    settings = {method: names_to_set(find_method(method).kinds) for method in methods}
    for key in (key for key in table if key not in known):
        is_of_cell = any(other in known for other in SYNONYMS.get(key, ()))
        for found, method in itertools.product((key, *SYNONYMS.get(key, ())), settings):
            if found in settings[method] and not is_of_cell:
                raise UserError(
                    f"{name} has no field {key!r}, which is a setting of a method; write "
                    f"{to_toml({found: table[key]}).strip()} under the heading [methods.{method.rpartition(':')[2]}]."
                )
        raise UserError(f"{name} has no field {key!r}; {closest_setting(key, known, FIELDS)}")


def _refuse_of_some(settings: Any, methods: Sequence[str]) -> None:
    """Refuse under `settings`, which is for all methods, what only some of them have."""
    known = {method: names_to_set(find_method(method).kinds) for method in methods}
    for key in settings if isinstance(settings, Mapping) else ():
        having = [method for method in methods if key in known[method]]
        if having and len(having) < len(known):
            lacking = next(method for method in methods if key not in known[method])
            raise UserError(
                f"settings.{key} is for all methods, and {lacking.rpartition(':')[2]} has no {key!r}; write "
                f"{to_toml({key: settings[key]}).strip()} under the heading [methods.{having[0].rpartition(':')[2]}]."
            )


def _grid(table: Mapping[str, Any], hints: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of values, if a field of one value holds a list."""
    cell_hints = get_type_hints(Cell)
    for key, value in table.items():
        hint = hints.get(key) or cell_hints.get(key)
        if isinstance(value, list) and hint is not None and not _takes_list(hint):
            if not value:
                raise UserError(f"{key} = [] does not fit; a list here stands for several runs, so name some.")
            for entry in value:
                yield from _grid({**table, key: entry}, hints)
            return
    yield dict(table)


def _takes_list(hint: Any) -> bool:
    return fits((), hint) or fits((0.0, 0.0, 0.0), hint)  # names of layers; the split


def _with_values(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """A cell with some fields or method settings changed; "partition.alpha" reaches into a table."""
    names = [item.name for item in fields(Cell)]
    table = asdict(cell)
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if name in names:
            is_table = isinstance(value, Mapping) and name in CELL_TABLES
            table[name] = _joined(name, table[name], value) if is_table else value
        elif rest and head in CELL_TABLES:
            table[head] = _joined(head, table[head], {rest: value})
        else:
            table["settings"] = {**table["settings"], name: value}
    if isinstance(table["method"], str) and isinstance(table["settings"], Mapping):
        table["settings"] = in_short(find_method(table["method"]).kinds, table["settings"])
    return build(Cell, table, f"the {cell.method} cell", FIELDS)


def _joined(name: str, before: Any, change: Mapping[str, Any]) -> dict[str, Any]:
    """A table with some entries changed; the settings of one partition rule mean nothing to another."""
    before = {"rule": before} if isinstance(before, str) else before or {}
    other_rule = name in ("partition", "robust") and change.get("rule", before.get("rule")) != before.get("rule")
    return dict(change) if other_rule else {**before, **change}


OWN_DATA = ("dataset", "columns", "read")  # the fields that say what is read, and so how many clients there are


def with_assignments(experiment: Experiment, values: Mapping[str, Any], data_dir: Path | None = None) -> Experiment:
    """`--set`: a field of every cell, a setting of every method that has it, or "method.setting" for one method."""
    cells = list(experiment.cells)
    # A new method, partition rule or network first: it decides which settings there are.
    first = ("partition.rule", "model", "method")
    for name, value in sorted(values.items(), key=lambda item: not item[0].endswith(first)):
        if not any(_aim(name, cell) for cell in cells):
            if name == "seeds":
                raise UserError("--set changes fields of cells; the seeds are given as --seeds 0,1,2.")
            raise UserError(
                f"--set: no cell has a field {name!r}; {closest_setting(name, _names_to_set(cells), FIELDS)}"
            )
        for number, cell in enumerate(cells):
            if (target := _aim(name, cell)) is not None:
                value = _absolute(target, value, Path.cwd())
                if target == "method" and isinstance(value, str):
                    known = _setting_names(value)
                    cell = replace(cell, settings={key: v for key, v in cell.settings.items() if key in known})
                if target == "model" and ":" not in str(value):
                    cell = replace(cell, network={})  # only a function has arguments
                cells[number] = _with_values(cell, {target: value})
    if "clients" not in values and any(name.partition(".")[0] in OWN_DATA for name in values):
        cells = [with_own_clients(cell, data_dir) for cell in cells]
    before, folds = (_folds_of(each) for each in (experiment.cells, cells))
    seeds = _usual_seeds(folds) if experiment.seeds == _usual_seeds(before) else experiment.seeds
    return replace(experiment, cells=distinct(cells), seeds=seeds)


def assignments_for(texts: Iterable[str], cells: Collection[Cell]) -> list[str]:
    """Those of the texts given to `--set` that change one of the cells."""
    return [text for text in texts if any(_aim(name, cell) for name in parse_assignments([text]) for cell in cells)]


def refuse_without_effect(texts: Sequence[str], cells: Collection[Cell]) -> None:
    """Refuse a `--set` that changes no chosen run: it is a slip that nobody would notice."""
    for text in texts:
        if not assignments_for([text], cells):
            methods = ", ".join(dict.fromkeys(map(method_name, cells)))
            name = text.partition("=")[0].strip()
            hint = closest_setting(name, _names_to_set(cells), FIELDS)
            raise UserError(f"--set {text} changes none of the chosen runs ({methods}); {hint}")


def _aim(name: str, cell: Cell) -> str | None:
    """The field of a cell, or the setting of its method, that an assignment changes; None if it changes neither."""
    head, _, rest = name.partition(".")
    if rest and head == method_name(cell):
        name = rest
    elif rest and head in ALGORITHMS:
        return None
    is_field = name in {item.name for item in fields(Cell)} or name.partition(".")[0] in CELL_TABLES
    return name if is_field or name in _setting_names(cell.method) else None


def _names_to_set(cells: Iterable[Cell]) -> list[str]:
    return sorted({item.name for item in fields(Cell)}.union(*(_setting_names(cell.method) for cell in cells)))


def _setting_names(method: str) -> set[str]:
    return set(names_to_set(find_method(method).kinds))


def select(experiment: Experiment, only: Sequence[str], seeds: Sequence[int] | None) -> list[RunSpec]:
    """`--only`: the runs that match every field; a field given several times takes any of its values.

    `name` is the run's folder without its seed.
    """
    wanted: dict[str, list[str]] = {}
    known = list(dict.fromkeys(["name", *(key for cell in experiment.cells for key in flat_fields(cell))]))
    for text in (part for entry in only for part in entry.split(",")):
        name, separator, value = text.strip().partition("=")
        if not separator:
            raise UserError(f"--only takes field=value, not {text!r}.")
        if name not in known:
            raise UserError(f"--only: there is no field {name!r}; {closest(name, known)}")
        wanted.setdefault(name, []).append(value)

    def is_value(run: RunSpec, name: str, text: str) -> bool:
        if name == "method":
            return _absolute("method", text, Path.cwd()) in (run.cell.method, method_name(run.cell))
        value = _fields_of(run).get(name)
        return str(value) == text or value == parse_value(text)

    def matches(run: RunSpec) -> bool:
        return all(any(is_value(run, name, text) for text in texts) for name, texts in wanted.items())

    runs = experiment.runs(seeds or None)
    chosen = [run for run in runs if matches(run)]
    if not chosen:
        there = [f"{name} is {_values_of(name, runs)}" for name in wanted]
        raise UserError(f"--only {' '.join(only)} leaves no run of {experiment.name!r}, where {'; '.join(there)}.")
    return chosen


def _fields_of(run: RunSpec) -> dict[str, Any]:
    return {"name": run.cell_name, **flat_fields(run.cell), "method": method_name(run.cell)}


def _values_of(field: str, runs: Iterable[RunSpec]) -> str:
    """Every value that a field of an experiment has; "pfedhn, local or fedavg"."""
    values = [_fields_of(run).get(field) for run in runs]
    words = list(dict.fromkeys("none" if value is None else str(value) for value in values))
    return " or ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


def only_this(experiment: Experiment, run: RunSpec) -> str:
    """The value of `--only` that selects one cell: as few of method, data set and clients as will do, or its name."""
    cell = run.cell
    alike = [other for other in experiment.cells if other.method == cell.method]
    chosen = [f"method={cell.method}"]
    for name in ("dataset", "clients"):
        if len({getattr(other, name) for other in alike}) > 1:
            chosen.append(f"{name}={getattr(cell, name)}")
    fitting = [other for other in alike if (other.dataset, other.clients) == (cell.dataset, cell.clients)]
    if len(fitting) == 1 and "," not in cell.dataset + cell.method:
        return ",".join(chosen)
    return f"name={run.cell_name}"
