"""A cell whose data are a table: its columns, how it is read, and what is right for it if its file does not say."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.cells import Columns
from pfedhn.data.folders import is_client_folder
from pfedhn.data.silos import SILOS, read_table
from pfedhn.data.tables import MIN_EXAMPLES, client_sizes, table_task
from pfedhn.errors import UserError, closest, short
from pfedhn.experiments.spec import Cell, is_made, is_own_data, is_table
from pfedhn.runs.tables import BATCH_SIZE, TABLE_METHODS, TABLE_MODEL, usual_schedule, usual_settings
from pfedhn.settings import whole_number
from pfedhn.system.files import given_path, reading

COLUMNS = {"client": "client_column", "label": "label_column", "ignore": "ignore_columns"}
READ = ("resize", "channels", "corrupt", "encode", "missing", "fitted", "scale", "select", "min_examples")

TABLE_READ: Mapping[str, Any] = {
    **{"encode": "one-hot", "missing": "flag", "fitted": "all", "scale": "all", "select": "auto"},
    "min_examples": MIN_EXAMPLES,
}
"""How a table is read if an experiment file does not say it."""

EARLIER_READ: Mapping[str, Any] = {
    **{"encode": "refuse", "missing": "refuse", "fitted": "client", "scale": "none", "select": "all"},
    "min_examples": 1,
}
"""The same of a cell that does not say it: in runs of earlier versions, this is what was done."""

PERSONALIZED = {"intercept": "pfedhn-intercept", "last": "pfedhn-last", "all": "pfedhn-shared"}


def table_columns(cell: Cell) -> dict[str, Any]:
    """The columns of a cell's table, as arguments of `read_federation`."""
    named: dict[str, Any] = {}
    refuse_unknown(cell.columns, COLUMNS, "columns")
    for name, value in cell.columns.items():
        listed = [value] if name != "ignore" or isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(part, str) for part in listed):
            form = 'a list of columns, as in ["visit_date"]' if name == "ignore" else "a column's name"
            raise UserError(f"columns.{name} = {short(value)} does not fit; give {form}.")
        named[COLUMNS[name]] = tuple(listed) if name == "ignore" else value
    return named | _silo_columns(cell)


def _silo_columns(cell: Cell) -> dict[str, Any]:
    """The columns of the client and the label of a natural federation, which a cell cannot change."""
    if cell.dataset not in SILOS:
        return {}
    fixed = {"client": SILOS[cell.dataset].client, "label": SILOS[cell.dataset].label}
    for name, column in fixed.items():
        if cell.columns.get(name, column) != column:
            raise UserError(
                f"columns.{name} = {short(cell.columns[name])} does not fit: the {name} of {cell.dataset} is "
                f"{column!r}; leave it out."
            )
    return {COLUMNS[name]: column for name, column in fixed.items()}


def reading_options(cell: Cell) -> dict[str, Any]:
    """How a cell's own data are read; `read_federation` checks the values."""
    refuse_unknown(cell.read, READ, "read")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in cell.read.items()}


def refuse_unknown(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Refuse a setting that does not exist."""
    for name in names:
        if name not in known:
            raise UserError(f"{what} has no setting {name!r}; {closest(name, known)}")


def with_own_clients(cell: Cell, data_dir: Path | None = None) -> Cell:
    """A cell of clients with their own data with their number; the same cell if that is not known yet."""
    if is_made(cell.dataset) or not (is_own_data(cell.dataset) or cell.dataset in SILOS):
        return cell
    if is_table(cell.dataset):
        number = len(_sizes(cell, data_dir))
    else:
        place = given_path(cell.dataset)
        with reading(place):
            number = sum(map(is_client_folder, place.iterdir())) if place.is_dir() else 0
    return replace(cell, clients=number) if number else cell


def _sizes(cell: Cell, data_dir: Path | None) -> list[int]:
    """The number of examples of each client that trains; [] if that is not known yet.

    Only the columns of clients and labels are read: `--set` may still change how the others are read.
    """
    table, columns = _there(cell, data_dir), table_columns(cell)
    if table is None or "client_column" not in columns:
        return []
    least = whole_number("read.min_examples", {**EARLIER_READ, **cell.read}["min_examples"])
    label = columns.get("label_column")
    return client_sizes(
        table, columns["client_column"], least, None if label in columns.get("ignore_columns", ()) else label
    )


def _there(cell: Cell, data_dir: Path | None) -> str | Columns | None:
    """The table of a cell; None if it is missing, which is said when its data are read."""
    try:
        table = read_table(cell.dataset, data_dir)
    except UserError:
        return None
    if isinstance(table, Columns):
        return table
    with reading(given_path(table)):
        return table if given_path(table).is_file() else None


def with_table_defaults(
    table: Mapping[str, Any], cell: Cell, data_dir: Path | None = None, usual_sizes: Sequence[int] = ()
) -> dict[str, Any]:
    """The content of an experiment file, with what is right for its table in place of what it leaves out.

    Args:
        table: The content. "auto" as `model` or `steps` is the same as leaving it out. `personalize` chooses among
            the hypernetworks.
        cell: One of its cells; only data and columns count.
        data_dir: Where the files of natural federations are.
        usual_sizes: The number of examples of each client that trains, if the table is not there.
    """
    given = {name: value for name, value in table.items() if name not in ("model", "steps") or value != "auto"}
    if "personalize" in given:
        given = _personalized(given, cell)
    if not is_table(cell.dataset):
        for name in table.keys() - given.keys():
            raise UserError(
                f'`{name}` = "auto" is for tables; {cell.dataset} is none, so give its value (docs/experiments.md).'
            )
        return given
    cell = replace(cell, read={**TABLE_READ, **cell.read})
    columns, source = table_columns(cell), _there(cell, data_dir)
    sizes = list(usual_sizes) if source is None else _sizes(cell, data_dir)
    usual: dict[str, Any] = {"read": dict(cell.read), "model": TABLE_MODEL, "batch_size": BATCH_SIZE}
    if "method" not in given and "methods" not in given:
        usual["method"] = list(TABLE_METHODS)
    if cell.dataset in SILOS:
        usual["task"] = SILOS[cell.dataset].task
    elif given.get("task", "auto") == "auto" and source is not None and "label_column" in columns:
        usual["task"] = table_task(source, columns["label_column"])
    if sizes:
        number = given.get("clients", len(sizes))
        number = number if isinstance(number, int) and number > 0 else len(sizes)
        usual |= {"clients": number, **usual_schedule(number, given.get("steps"))}
    usual["select"] = "loss"
    filled = {**usual, **given, "read": usual["read"]}
    filled["methods"] = _method_settings(filled, sizes)
    return filled


def _personalized(given: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    """The content of an experiment file with the hypernetworks that `personalize` stands for."""
    content = dict(given)
    part, headings = content.pop("personalize"), content.get("methods", {})
    if not is_table(cell.dataset):
        raise UserError(f"`personalize` is for tables; {cell.dataset} is none, so name the methods instead.")
    if not isinstance(part, str) or part not in ("auto", *PERSONALIZED):
        raise UserError(f"`personalize` is {short(part)}; {closest(part, ('auto', *PERSONALIZED))}")
    chosen = list(PERSONALIZED.values()) if part == "auto" else [PERSONALIZED[part]]
    if "method" not in content and not headings:
        others = [name for name in TABLE_METHODS if name not in PERSONALIZED.values()]
        return content | {"method": [*others, *chosen]}
    methods = content.get("method", list(headings) if isinstance(headings, Mapping) else [])
    methods = methods if isinstance(methods, list) else [methods]
    if "pfedhn" not in methods:
        raise UserError(f'`personalize` has no effect on method = {short(methods)}; add "pfedhn", or leave it out.')
    content["method"] = [name for method in methods for name in (chosen if method == "pfedhn" else [method])]
    if isinstance(headings, Mapping) and isinstance(headings.get("pfedhn"), Mapping):
        mine = {name: {**headings["pfedhn"], **headings.get(name, {})} for name in chosen}
        content["methods"] = {name: part for name, part in headings.items() if name != "pfedhn"} | mine
    return content


def _method_settings(table: Mapping[str, Any], sizes: Sequence[int]) -> Any:
    """The headings [methods.NAME] of an experiment file, with what is right for a table beneath what they say."""
    headings, everywhere = table.get("methods", {}), table.get("settings", {})
    methods = table.get("method", list(headings) if isinstance(headings, Mapping) else [])
    methods = [name for name in (methods if isinstance(methods, list) else [methods]) if name in ALGORITHMS]
    if not isinstance(headings, Mapping) or not isinstance(everywhere, Mapping):
        return headings  # which is refused where the file is checked
    folds = table.get("folds")
    share = 1 - 2 / folds if isinstance(folds, int) and folds > 2 else (table.get("split") or Cell.split)[0]
    filled = dict(headings)
    for name in methods:
        mine = usual_settings(name, round(share * median(sizes)) if sizes else 0)
        mine = {key: value for key, value in mine.items() if key not in everywhere}
        filled[name] = (
            {**mine, **headings.get(name, {})} if isinstance(headings.get(name, {}), Mapping) else headings[name]
        )
    return filled
