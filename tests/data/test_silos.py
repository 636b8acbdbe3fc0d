"""Natural federations from made-up files in the forms of the original ones."""

import hashlib
import importlib
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from scipy.io import savemat
from typer.testing import CliRunner

from pfedhn.cli.app import app
from pfedhn.data.cells import Columns
from pfedhn.data.silo_catalogue import SiloFile
from pfedhn.data.silo_files import SCHOOL_COLUMNS
from pfedhn.data.silos import SILOS, find_silo_files, load_silo, silo_columns
from pfedhn.data.tables import columns_digest
from pfedhn.errors import UserError
from pfedhn.experiments.build import check
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.grid import from_toml, with_assignments

LATER = ("DDEAD", "EXPD6", "EXPD14", "DIED", "RXASP", "FRECOVER")  # columns of the stroke trial that tell the outcome
HEART = {
    "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n",
    "hungarian": "28,1,2,130,132,0,2,185,0,0,?,?,?,0\n",
    "switzerland": "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n",
    "va": "60,1,4,0,218,0,1,140,1,1.5,3,?,?,4\n",
}
EXAM = "rownames,school,normexam,schgend,schavg,vr,intake,standLRT,sex,type,student\n" + "".join(
    f"{i},{i % 3},{i / 7:.7f},mixed,{(i % 3) / 9},mid 50%,top 25%,{i / 11},{'FM'[i % 2]},Mxd,{i}\n"
    for i in range(1, 31)
)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a data folder nor the package that carries two tables."""
    monkeypatch.delenv("PFEDHN_DATA_DIR", raising=False)
    monkeypatch.setattr("pfedhn.data.silo_files.PACKAGE", "pfedhn_no_tables")


def write_all(folder: Path) -> None:
    """Files of a few made-up rows."""
    for hospital, line in HEART.items():
        (folder / f"processed.{hospital}.data").write_text(line * 8)
    header = ["HOSPNUM", *SILOS["stroke"].features, "RDATE", "OCCODE", *LATER]
    patients = [
        f"{1 + i % 2} 17 d M {50 + i} Y {'-' if i < 9 else 'n'} Y Y - - 140 N Y C N Y N N Y PACS".split()
        for i in range(25)
    ]
    later = [["pa\x9f-91", str(i % 5), *["LEAK"] * len(LATER)] for i in range(25)]
    lines = [
        header,
        *([cell.strip("-") for cell in patient] + rest for patient, rest in zip(patients, later, strict=True)),
    ]
    trial = "".join(",".join(cells) + "\r\n" for cells in lines)
    (folder / "ist-train.csv").write_bytes(trial.encode("latin-1"))
    features = SILOS["wisdm"].features
    names = ['"UNIQUE_ID" numeric', '"user" ', '"XAVG" numeric', *(f'"{name}" numeric' for name in features), "class"]
    record = ",".join(["1", "33", "0", "?", *["0.5"] * (len(features) - 1), "Jogging"])
    arff = ["@relation activity", "", *(f"@attribute {name}" for name in names), "", "@data", *[record] * 3]
    (folder / "wisdm_ar_v1.1_transformed.arff").write_text("\n".join(arff) + "\n")
    x, y = numpy.empty((1, 2), dtype=object), numpy.empty((1, 2), dtype=object)
    for school, size in enumerate((3, 5)):
        x[0, school] = numpy.full((size, len(SCHOOL_COLUMNS)), school + 1, dtype=numpy.uint8)
        y[0, school] = numpy.arange(size, dtype=numpy.uint8)[:, None]
    savemat(folder / "school.mat", {"X": x, "Y": y})
    (folder / "rdatasets-Exam.csv").write_text(EXAM)
    visits = ["subject#", "total_UPDRS", "motor_UPDRS", *SILOS["parkinsons"].features]
    (folder / "parkinsons_updrs.tsv").write_text("\t".join(visits) + "\n" + "\t".join(["7"] * len(visits)) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of made-up files, which are taken for the known ones."""

    def as_here(file: SiloFile) -> SiloFile:
        found = [tmp_path / name for name in (file.name, *file.others) if (tmp_path / name).is_file()]
        if not found:
            return file
        content = found[0].read_bytes()
        return replace(file, size=len(content), sha256=hashlib.sha256(content).hexdigest())

    write_all(tmp_path)
    for name, silo in list(SILOS.items()):
        files = tuple(tuple(map(as_here, part)) for part in silo.files)
        monkeypatch.setitem(SILOS, name, replace(silo, files=files))
    return tmp_path


def row(columns: Columns, number: int) -> dict[str, str]:
    return {name: cells[number] for name, cells in columns.items()}


def test_columns_are_the_client_the_label_and_what_a_prediction_may_use(folder: Path) -> None:
    for name in ("stroke", "heart", "wisdm", "school", "exam", "parkinsons"):
        silo = SILOS[name]
        assert list(silo_columns(name, folder)) == [silo.client, silo.label, *silo.features]
    leaks = {"OCCODE", *LATER, "num", "UNIQUE_ID", "XAVG", "constant", "student", "cses", "motor_UPDRS"}
    assert not leaks & {name for silo in SILOS.values() for name in (silo.client, silo.label, *silo.features)}


def test_a_leak_of_the_stroke_trial_never_becomes_a_feature(folder: Path) -> None:
    federation = load_silo("stroke", folder, select="all", min_examples=1)
    assert federation.reading is not None
    assert federation.reading.table is not None
    table = federation.reading.table
    assert {column.name for column in table.columns} == set(SILOS["stroke"].features)
    assert not any("LEAK" in feature for feature in table.features)
    with pytest.raises(UserError, match=r"stroke has no column 'EXPD6'"):
        load_silo("stroke", folder, ignore_columns=["EXPD6"])


def test_patients_without_an_outcome_are_dropped(folder: Path) -> None:
    columns = silo_columns("stroke", folder)
    assert columns["outcome"].tolist() == [*["dead or dependent"] * 2, *["alive and independent"] * 2] * 5
    assert (columns["AGE"][0], columns["RCONSC"][0], columns["RATRIAL"][0], columns["RATRIAL"][-1]) == (
        *("51", "D", "", "N"),
    )
    assert load_silo("stroke", folder).class_names == ("alive and independent", "dead or dependent")


def test_hidden_missing_cells_and_codes_of_the_hospitals_are_read(folder: Path) -> None:
    columns = silo_columns("heart", folder)
    first, swiss, veteran = row(columns, 0), row(columns, 16), row(columns, 24)
    assert (first["hospital"], first["sex"], first["cp"], first["thal"]) == (
        *("cleveland", "1", "typical angina", "fixed defect"),
    )
    assert (swiss["hospital"], swiss["chol"], swiss["fbs"], swiss["oldpeak"]) == ("switzerland", "", "", "0.7")
    assert (veteran["trestbps"], veteran["slope"], veteran["ca"]) == ("", "downsloping", "")
    assert [row(columns, 8 * part)["diagnosis"] for part in range(4)] == ["healthy", "healthy", "sick", "sick"]


def test_other_forms_are_read(folder: Path) -> None:
    person = row(silo_columns("wisdm", folder), 2)
    assert (person["user"], person["class"], person["X0"], person["X1"]) == ("33", "Jogging", "", "0.5")
    students = silo_columns("school", folder)
    assert students["school"].tolist() == [*["1"] * 3, *["2"] * 5]
    assert students["score"].tolist() == [*"012", *"01234"]
    assert row(silo_columns("parkinsons", folder), 0)["PPE"] == "7"


def test_a_changed_file_is_refused(folder: Path) -> None:
    place = folder / "heart"
    place.mkdir()
    for file in folder.glob("processed.*"):
        file.rename(place / f"heart-{file.name}")  # another name, in a folder of the federation's name
    assert len(find_silo_files("heart", folder)) == 4
    changed = place / "heart-processed.va.data"
    changed.write_text(HEART["va"] * 9)
    size, was = len(HEART["va"]) * 9, len(HEART["va"]) * 8
    with pytest.raises(
        UserError, match=rf"va.data is not the processed.va.data of heart: it has {size} bytes .* and not {was} bytes"
    ):
        load_silo("heart", folder)


def test_of_the_whole_trial_the_lines_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ist-train.csv").rename(folder / "ist_corrected.csv")
    with pytest.raises(UserError, match=r"it has 25 examples and not 19,435; get it again"):
        silo_columns("stroke", folder)
    monkeypatch.setitem(
        SILOS, "stroke", replace(SILOS["stroke"], files=((SiloFile("ist_corrected.csv", examples=25),),))
    )
    assert len(silo_columns("stroke", folder)["outcome"]) == 20


def test_a_missing_file_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stroke is not here: no data folder .* get ist-train.csv or IST_corrected"):
        load_silo("stroke")
    with pytest.raises(UserError, match=r"neither .*exam nor .* holds Exam.csv; pip install 'pfedhn\[silos\]'"):
        load_silo("exam", tmp_path)
    with pytest.raises(UserError, match=r"there is no natural federation 'strok'; did you mean 'stroke'\?"):
        load_silo("strok")


def test_an_installed_package_brings_the_same_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = silo_columns("exam", folder)
    (folder / "tables_of_r.py").write_text(
        "import pandas\n\n\ndef data(package, item):\n"
        f"    return pandas.read_csv({str(folder / 'rdatasets-Exam.csv')!r}) if package == 'mlmRev' else None\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("pfedhn.data.silo_files.PACKAGE", "tables_of_r")
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"the Exam of the installed package tables_of_r is not the known one"):
        silo_columns("exam")
    digest = columns_digest(from_file)
    monkeypatch.setitem(SILOS, "exam", replace(SILOS["exam"], cells_sha256=digest))
    assert {name: cells.tolist() for name, cells in silo_columns("exam").items()} == {
        name: cells.tolist() for name, cells in from_file.items()
    }
    federation = load_silo("exam", split=(0.5, 0.25, 0.25))
    assert federation.names == ("0", "1", "2")
    assert federation.num_classes is None
    assert federation.reading is not None
    assert federation.reading.table is not None
    assert federation.reading.table.sha256 == digest


def test_an_experiment_names_a_natural_federation(folder: Path) -> None:
    file = folder / "mine.toml"
    file.write_text('dataset = "heart"\nmethod = ["fedavg", "local"]\nread = {min_examples = 1}\n')
    assert {cell.clients for cell in from_toml(file, folder).cells} == {4}
    experiment = from_toml(file)  # the data may come later
    assert {cell.clients for cell in with_assignments(experiment, {"dataset": "heart"}, folder).cells} == {4}
    assert {cell.clients for cell in with_assignments(experiment, {"dataset": "stroke"}, folder).cells} == {2}
    (cell, _) = from_toml(file, folder).cells
    federation = build_federation(cell, 0, folder)
    assert federation.names == ("cleveland", "hungarian", "switzerland", "va")
    assert federation.class_names == ("healthy", "sick")
    with pytest.raises(UserError, match=r"columns.label = 'chol' does not fit: the label of heart is 'diagnosis'"):
        check(with_assignments(experiment, {"columns.label": "chol"}))


def test_the_command_line_shows_natural_federations(folder: Path) -> None:
    def shown(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["data", *arguments], prog_name="pfedhn")
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    assert shown("list").count("not here") == len(SILOS)
    text = shown("show", "heart")
    assert "licence CC BY 4.0" in text
    assert "heart is not here: no data folder is given" in text
    text = shown("show", "heart", "--data-dir", str(folder))
    assert "switzerland" in text
    assert "unused" in text


def test_the_page_of_natural_federations_is_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "silos.md").read_text()
    rows = [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:2] == "| "]
    told = {name: cells for name, *cells in rows if len(cells) == 6 and name in SILOS}
    assert {name: (each, clients, examples, task) for name, (each, clients, examples, _, task, _) in told.items()} == {
        silo.name: (silo.each, str(silo.clients), f"{silo.examples:,}", silo.task) for silo in SILOS.values()
    }
    for silo in SILOS.values():
        assert all(f"`{files[0].name}`" in page for files in silo.files[:1])
