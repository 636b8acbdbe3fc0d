"""Columns of a table as numbers, and how others are read alike."""

import csv
import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from pyarrow import parquet

from pfedhn.data.cells import read_columns
from pfedhn.data.columns import Encoding, encoded_like, medians
from pfedhn.data.files import read_client, read_federation, read_inputs
from pfedhn.data.reading import Column, Reading, TableReading
from pfedhn.data.tables import from_table
from pfedhn.errors import UserError
from pfedhn.experiments.build import check
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.grid import from_toml, with_assignments
from pfedhn.settings import parse_assignments

ENCODED = Encoding("one-hot", "zero")
AS_IT_IS: dict[str, Any] = {
    "encode": "refuse",
    "missing": "refuse",
    "fitted": "client",
    "scale": "none",
    "select": "all",
}


def test_medians_are_the_ordinary_ones() -> None:
    nan = float("nan")
    values = torch.tensor([[1.0, nan, 7.0, nan], [4.0, 3.0, 5.0, nan], [2.0, nan, 5.0, nan], [9.0, 8.0, nan, nan]])
    assert medians(values, torch.full((4,), -1.0)).tolist() == [3.0, 5.5, 5.0, -1.0]
    assert medians(values[:0], torch.zeros(4)).tolist() == [0.0] * 4


def dated(path: Path) -> Path:
    lines = [f"{'ab'[i % 2]},{1000 + i},2026-01-{i % 28 + 1:02d},{i / 4},{i % 2}" for i in range(200)]
    path.write_text("\n".join(["who,number,day,dose,label", *lines]))
    return path


def test_columns_that_are_no_features_are_left_out(tmp_path: Path) -> None:
    path = dated(tmp_path / "visits.csv")
    with pytest.raises(UserError, match=r"columns\.ignore = \[\"day\"\] \(in Python, ignore_columns=\[\"day\"\]\)"):
        read_federation(path, "who", "label", **AS_IT_IS)
    federation = read_federation(path, "who", "label", ignore_columns=["day", "number"], **AS_IT_IS)
    assert federation.x.shape == (200, 1)
    assert sorted(federation.x[:, 0].tolist()) == [i / 4 for i in range(200)]
    assert from_table(path, "who", "label", ignore_columns=("number", "day")).feature_names == ("dose",)
    for ignored, sentence in (
        (["dat"], "no column 'dat'; did you mean 'day'"),
        (["who"], "'who' cannot be ignored"),
        ("day", "ignore_columns is 'day'; give a list"),
        (["day", "number", "dose"], "no feature columns"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_federation(path, "who", "label", ignore_columns=ignored)  # type: ignore[arg-type]


def test_an_experiment_ignores_columns(tmp_path: Path) -> None:
    dated(tmp_path / "visits.csv")
    toml = tmp_path / "mine.toml"
    text = 'method = "local"\ndataset = "visits.csv"\nclients = 2\nmodel = "tabular-4"\nread = {select = "all"}\n'
    toml.write_text(text + 'columns = {client = "who", label = "label", ignore = ["day", "number"]}\n')
    experiment = from_toml(toml)
    check(experiment)
    (cell,) = experiment.cells
    assert build_federation(cell, seed=0).x.shape == (200, 1)
    toml.write_text(text + 'columns = {client = "who", label = "label"}\n')
    for given, width in (("columns.ignore=day", 2), ('columns.ignore=["day", "number"]', 1)):
        (cell,) = with_assignments(from_toml(toml), parse_assignments([given])).cells
        assert build_federation(cell, seed=0).x.shape == (200, width)
    for given, sentence in (
        ("columns.ignore=3", "columns.ignore = 3 does not fit; give a list of columns"),
        ("columns.client=3", "columns.client = 3 does not fit; give a column's name"),
        ("columns.ignor=day", "columns has no setting 'ignor'; did you mean 'ignore'"),
    ):
        with pytest.raises(UserError, match=sentence):
            check(with_assignments(from_toml(toml), parse_assignments([given])))


def test_a_parquet_column_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    days = [datetime.datetime(2026, 1, 1), None] * 20
    columns = {"who": ["a", "b"] * 20, "day": days, "dose": [0.5 * i for i in range(40)], "label": [0, 0, 1, 1] * 10}
    parquet.write_table(pyarrow.table(columns), tmp_path / "visits.parquet")
    federation = read_federation(tmp_path / "visits.parquet", "who", "label", ignore_columns=["day"])
    assert federation.x.shape == (40, 1)
    assert read_inputs(tmp_path / "visits.parquet", how=federation.reading).x[:, 0].tolist() == columns["dose"]


def test_parquet_keeps_whole_numbers_beside_empty_cells(tmp_path: Path) -> None:
    kinds = pyarrow.array(["x", "y", "x"]).dictionary_encode()
    columns = {"who": ["a"] * 3, "is_old": [True, False, True], "kind": kinds, "label": [1, None, 0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "visits.parquet")
    how = Reading(TableReading("who", "label", (Column("is_old"), Column("kind", ("x", "y")))))
    given = read_inputs(tmp_path / "visits.parquet", "label", how=how)
    assert given.x.tolist() == [[1, 1, 0], [0, 0, 1], [1, 1, 0]]
    assert given.answers is not None
    assert given.answers.tolist() == ["1", "", "0"]


def test_what_became_of_a_table_is_kept(tmp_path: Path) -> None:
    lines = [f"{'ab'[i % 2]},{i if i % 3 else ''},{'xy'[i % 2]},{i % 2}" for i in range(20)]
    (tmp_path / "visits.csv").write_text("\n".join(["who,dose,kind,label", *lines]))
    options = {**AS_IT_IS, "encode": "one-hot", "missing": "median"}
    federation = read_federation(tmp_path / "visits.csv", "who", "label", **options)
    assert federation.reading is not None
    table = federation.reading.table
    assert table is not None
    assert table.columns == (Column("dose"), Column("kind", ("x", "y")))
    assert table.features == ["dose", "kind=x", "kind=y"]
    for client, name in enumerate("ab"):
        train = federation.splits["train"].of(client).tolist()
        mine = [i for i in range(20) if i % 2 == client]  # the rows of a client stand together in the federation
        known = [mine[place - 10 * client] for place in train if mine[place - 10 * client] % 3]
        fill = table.fill_of(name)
        assert fill is not None
        assert fill[0] == numpy.median(known)
    assert table.fill_of("somebody new") == table.common


def test_a_table_of_numbers_alone_refuses_empty_cells_later(tmp_path: Path) -> None:
    how = Reading(TableReading("who", "label", (Column("a"), Column("b"))))
    (tmp_path / "new.csv").write_text("b,label,a\n1,0,2\n3,1,4\n")
    x, y = read_client(tmp_path / "new.csv", None, None, (2,), how)
    assert x.tolist() == [[2, 1], [4, 3]]
    assert y.tolist() == [0, 1]
    (tmp_path / "new.csv").write_text("b,a\n1,2\n,4\n")
    with pytest.raises(UserError, match=r"'b' in line 3 of new\.csv is empty; fill the cell or drop the example\."):
        read_inputs(tmp_path / "new.csv", how=how)


def test_an_empty_text_is_refused_where_the_run_refused_it(tmp_path: Path) -> None:
    columns = (Column("sex", ("f", "m")),)
    file = tmp_path / "new.csv"
    file.write_text("sex,age\nf,1\n,2\n")
    table = TableReading("clinic", "outcome", columns)
    with pytest.raises(UserError, match=r"'sex' in line 3 .* is empty; fill the cell"):
        encoded_like(read_columns(file), table)
    assert encoded_like(read_columns(file), replace(table, missing="zero")).tolist() == [[1, 0], [0, 0]]


def test_a_text_among_numbers_is_named_and_not_the_empty_cell_before_it(tmp_path: Path) -> None:
    file = tmp_path / "new.csv"
    file.write_text("age,dose\n1,\n2,abc\n")
    table = TableReading("clinic", "outcome", (Column("age"), Column("dose")), missing="median")
    with pytest.raises(UserError, match=r"'dose' in line 3 .* is 'abc' and not a number; fix the cell"):
        encoded_like(read_columns(file), table)


def test_lines_without_a_cell_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("who,what,a\n1,2,3\n\n,,\n1,2,x\n,,\n")
    with pytest.raises(UserError, match=r"'a' in line 5 of table\.csv is 'x'"):
        from_table(tmp_path / "table.csv", "who", "what")
    assert read_columns(tmp_path / "table.csv")["a"].tolist() == ["3", "x"]


@pytest.mark.parametrize("number", ["1.234,5", "1 234,50", "-12.345.678,9"])
def test_signs_between_thousands_are_refused(number: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.csv"
    file.write_text(f"age;costs\n1;2,5\n2;{number}\n")
    with pytest.raises(UserError, match=rf"'costs' of costs.csv has numbers such as '{number}'; write them without"):
        read_columns(file)


def test_semicolons_and_decimal_commas_are_understood(tmp_path: Path) -> None:
    """As a spreadsheet writes them where numbers have decimal commas."""
    rows = [("ab"[i % 2], i / 4, i if i % 7 else "", ("x", "u,v", "y")[i % 3], i % 2) for i in range(20)]
    for name, separator, point in (("comma", ",", "."), ("semicolon", ";", ",")):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=separator)
            writer.writerow(["who", "dose", "count", "kind", "label"])
            writer.writerows([who, str(dose).replace(".", point), *rest] for who, dose, *rest in rows)
    assert "a;0,5;2;y;0" in (tmp_path / "semicolon.csv").read_text()
    both = [from_table(tmp_path / f"{name}.csv", "who", "label", encoding=ENCODED) for name in ("comma", "semicolon")]
    assert both[0].columns == both[1].columns
    assert numpy.array_equal(both[0].x, both[1].x, equal_nan=True)
    assert both[0].x[:, 0].tolist() == [i / 4 for i in range(20)]


def test_what_is_no_number_with_a_decimal_comma_stays_text(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("who;what;a\n1;2;a,b\n1;2;1,5")
    with pytest.raises(UserError, match=r"'a' in line 2 of table.csv is 'a,b' and not a number"):
        from_table(tmp_path / "table.csv", "who", "what")


def test_a_header_with_both_signs_is_taken_at_its_commas(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("who;x,what;a\n1;2;3\n")
    with pytest.raises(UserError, match=r"has 1 cells and the header 2; .* if they are separated by semicolons"):
        from_table(tmp_path / "table.csv", "who", "what")


def test_decimal_commas_and_points_in_one_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("who;what;a;b\n1;2;0,5;1.234\n1;2;1,5;2.345\n")
    with pytest.raises(UserError, match="with commas in column 'a' and with points in column 'b'; write them all"):
        from_table(tmp_path / "table.csv", "who", "what")


def test_all_columns_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    lines = [f"a,{i or ''},{'xy'[i % 2]},2026-01-{i % 28 + 1},{i},{i % 2}" for i in range(20)]
    (tmp_path / "table.csv").write_text("\n".join(["who,dose,kind,day,age,label", *lines]))
    with pytest.raises(UserError, match=r"^'dose' in line 2 .* is empty; .* Nor can 'kind', 'day' be read as they are"):
        from_table(tmp_path / "table.csv", "who", "label")
    with pytest.raises(UserError, match=r"^'kind' in line 2 .* is 'x' and not a number; .* Nor can 'day' be read"):
        from_table(tmp_path / "table.csv", "who", "label", encoding=Encoding(missing="zero"))


def test_an_empty_cell_among_texts_is_none_of_them_and_has_no_median(tmp_path: Path) -> None:
    lines = [f"{'ab'[i % 2]},{i},{('x', 'y', '')[i % 3]},{i % 4}" for i in range(30)]
    (tmp_path / "table.csv").write_text("\n".join(["who,dose,kind,label", *lines]))
    options = {**AS_IT_IS, "encode": "one-hot", "missing": "median"}
    federation = read_federation(tmp_path / "table.csv", "who", "label", **options)
    assert federation.reading is not None
    assert federation.reading.table is not None
    assert federation.reading.table.fill_of("a") == (federation.reading.table.own["a"][0], 0.0, 0.0)
    assert int((federation.x[:, 1:].sum(1) == 0).sum()) == 10


def test_a_column_that_nobody_reads_may_be_long_texts(tmp_path: Path) -> None:
    lines = [f"{'ab'[i % 2]},{'long ' * 300},{i},{i % 2}" for i in range(20)]
    (tmp_path / "visits.csv").write_text("\n".join(["who,notes,dose,label", *lines]))
    with pytest.raises(UserError, match=r"line 2 .* cell of 1,500 characters; .*columns\.ignore = \[\"notes\"\]"):
        read_federation(tmp_path / "visits.csv", "who", "label")
    federation = read_federation(tmp_path / "visits.csv", "who", "label", ignore_columns=["notes"], **AS_IT_IS)
    assert read_inputs(tmp_path / "visits.csv", how=federation.reading).x[:, 0].tolist() == list(range(20))


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("who;what;a\n1;2;0,5\n", encoding="utf-8-sig")
    assert from_table(tmp_path / "table.csv", "who", "what").x.tolist() == [[0.5]]


@pytest.mark.parametrize("mark", ["NA", "n/a", "null", "None", "?", "-", ".", " na "])
@pytest.mark.parametrize("separator", [",", ";"])
def test_the_usual_marks_among_numbers_are_empty_cells(mark: str, separator: str, tmp_path: Path) -> None:
    def written(empty: str) -> Path:
        point = "," if separator == ";" else "."
        file = tmp_path / "table.csv"
        doses = [empty if i == 4 else f"{i}{point}5" for i in range(20)]
        rows = [("ab"[i % 2], dose, i % 2) for i, dose in enumerate(doses)]
        file.write_text("\n".join(separator.join(map(str, row)) for row in [("who", "dose", "label"), *rows]))
        return file

    read = {**AS_IT_IS, "encode": "one-hot", "missing": "median"}
    expected = read_federation(written(""), "who", "label", **read)
    for options in (read, {**AS_IT_IS, "missing": "median"}):
        federation = read_federation(written(mark), "who", "label", **options)
        assert torch.equal(federation.x, expected.x)
    for encode in ("refuse", "one-hot"):
        with pytest.raises(
            UserError, match=r"'dose' in line 6 of table\.csv is .*; fill it, drop the example, or have"
        ):
            read_federation(written(mark), "who", "label", **{**AS_IT_IS, "encode": encode})
    (tmp_path / "new.csv").write_text(f"dose\n{mark}\n")
    assert numpy.isnan(read_inputs(tmp_path / "new.csv", how=expected.reading).x).all()


def test_a_mark_among_texts_is_one_of_them(tmp_path: Path) -> None:
    lines = [f"a,{('none', 'mild', '?')[i % 3]},{('-', 'NA')[i % 2]},{i % 2}" for i in range(30)]
    (tmp_path / "table.csv").write_text("\n".join(["who,pain,other,label", *lines]))
    table = from_table(tmp_path / "table.csv", "who", "label", encoding=Encoding("one-hot"))
    assert table.columns == (Column("pain", ("?", "mild", "none")), Column("other", ("-", "NA")))


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_few_texts_among_numbers_are_named(separator: str, tmp_path: Path) -> None:
    point = "," if separator == ";" else "."
    doses = [{3: "NA", 7: "5 mg", 8: "6 mg"}.get(i, f"{i}{point}5") for i in range(30)]
    rows = [("who", "dose", "label"), *(("a", dose, i % 2) for i, dose in enumerate(doses))]
    (tmp_path / "table.csv").write_text("\n".join(separator.join(map(str, row)) for row in rows))
    for encoding, way_out in (
        (Encoding("one-hot", "median"), "as nearly all of that column are; fix or empty the cell"),
        (Encoding(missing="median"), "make numbers of such columns"),
    ):
        with pytest.raises(
            UserError, match=rf"'dose' in line 9 of table\.csv is '5 mg' and not a number[,;] {way_out}"
        ):
            from_table(tmp_path / "table.csv", "who", "label", encoding=encoding)


def test_a_mark_among_labels_that_are_numbers_is_no_class(tmp_path: Path) -> None:
    lines = [f"a,{i},{'NA' if i == 4 else i / 2}" for i in range(20)]
    (tmp_path / "table.csv").write_text("\n".join(["who,dose,price", *lines]))
    with pytest.raises(UserError, match=r"line 6 of table\.csv has 'NA' for 'price'; fill the cell or drop"):
        from_table(tmp_path / "table.csv", "who", "price")
    (tmp_path / "table.csv").write_text("who,dose,pain\na,1,none\na,2,mild\n")
    assert from_table(tmp_path / "table.csv", "who", "pain").class_names == ("mild", "none")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_spaces_around_a_cell_make_no_other_client_or_class(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"visits.{ending}"
    rows = {"who": ["lyon", "lyon ", " metz", "metz"], "dose": [1, 2, 3, 4], "what": ["ill", " ill", "well", "well "]}
    if ending == "csv":
        lines = [",".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
        path.write_text("\n".join([",".join(rows), *lines]))
    else:
        parquet.write_table(pyarrow.table(rows), path)
    table = from_table(path, "who", "what")
    assert (table.client_names, table.class_names) == (("lyon", "metz"), ("ill", "well"))


@pytest.mark.parametrize("column", ["who", "what"])
@pytest.mark.parametrize("encoding", [Encoding(), ENCODED])
@pytest.mark.parametrize("cells", [[1, None, 2], ["x", None, "y"], [1.0, float("nan"), 2.0]])
def test_a_row_of_nobody_or_without_a_label_is_refused(
    column: str, encoding: Encoding, cells: list[object], tmp_path: Path
) -> None:
    rows = {"who": ["a", "b", "c"], "dose": [1, 2, 3], "what": [0, 1, 0]} | {column: cells}
    parquet.write_table(pyarrow.table(rows), tmp_path / "visits.parquet")
    sentence = f"row 2 of visits.parquet has no '{column}'; fill the cell or drop the example."
    with pytest.raises(UserError, match=sentence):
        from_table(tmp_path / "visits.parquet", "who", "what", encoding=encoding)


def test_how_a_table_is_read_may_come_from_the_command_line_alone(tmp_path: Path) -> None:
    lines = [f"{'ab'[i % 2]},{'red' if i % 3 else 'blue'},{i % 2}" for i in range(40)]
    (tmp_path / "visits.csv").write_text("\n".join(["who,color,label", *lines]))
    file = tmp_path / "mine.toml"
    file.write_text('method = "local"\ndataset = "visits.csv"\ncolumns = {client = "who", label = "label"}\n')
    experiment = from_toml(file)
    assert experiment.cells[0].clients == 2
    assert build_federation(experiment.cells[0], seed=0).x.shape == (40, 2)
    (cell,) = with_assignments(experiment, parse_assignments(["read.encode=refuse"])).cells
    with pytest.raises(UserError, match=r"'color' in line 2 of visits\.csv is 'blue' and not a number"):
        build_federation(cell, seed=0)
