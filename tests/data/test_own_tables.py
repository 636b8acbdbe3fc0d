"""A person's own table as it is read by default, and what is said of it."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import pfedhn
from pfedhn.data.cells import read_columns
from pfedhn.data.columns import new_client, prepared
from pfedhn.data.files import read_client, read_federation
from pfedhn.data.labels import task_of
from pfedhn.data.reading import TableReading
from pfedhn.data.tables import client_sizes, table_task
from pfedhn.errors import UserError
from pfedhn.experiments.build import check
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.spec import Cell, Experiment
from pfedhn.experiments.tables import TABLE_READ, with_own_clients

HEADER = "clinic,dose,age,kind,price"


def visits(path: Path) -> Path:
    """Two clinics; every fifth dose is empty, the first age far off, and some kinds are empty."""
    random = numpy.random.default_rng(0)
    lines = [
        f"{'ab'[i % 2]},{'' if i % 5 == 0 else f'{random.normal(100, 20):.2f}'},{10_000 if i == 0 else 30 + i % 40},"
        f"{'' if i % 7 == 0 else 'xyz'[i % 3]},{random.normal(5_000, 900):.2f}"
        for i in range(200)
    ]
    path.write_text("\n".join([HEADER, *lines]))
    return path


def table_of(reading: Any) -> TableReading:
    assert reading is not None
    assert reading.table is not None
    table: TableReading = reading.table
    return table


def test_features_are_filled_flagged_and_scaled_over_all_training_examples(tmp_path: Path) -> None:
    path = visits(tmp_path / "visits.csv")
    federation = read_federation(path, "clinic", "price")
    table = table_of(federation.reading)
    assert table.inputs == ["dose", "age", "kind=x", "kind=y", "kind=z", "dose missing"]
    plain = read_federation(path, "clinic", "price", missing="zero", scale="none")
    train = torch.cat([federation.splits["train"].of(client) for client in range(2)])
    dose, empty = plain.x[:, 0].double(), plain.x[:, 0] == 0
    median = dose[train][~empty[train]].median()  # of an odd number or the lower of two
    assert table.common is not None
    assert abs(table.common[0] - median) < 2
    raw = torch.cat([plain.x, empty[:, None]], 1).double()
    raw[empty, 0] = table.common[0]
    mean, deviation = raw[train].mean(0), raw[train].std(0, correction=0)
    expected = ((raw - mean) / deviation).clamp(-10, 10)
    assert float(expected[:, 1].max()) == 10
    torch.testing.assert_close(federation.x.double(), expected, atol=1e-5, rtol=0)
    assert table.target == pytest.approx((float(plain.y[train].mean()), float(plain.y[train].std(correction=0))))
    torch.testing.assert_close(table.unscaled(federation.y), plain.y)
    later, _ = read_client(path, None, None, federation.x.shape[1:], federation.reading)
    rows = torch.from_numpy(prepared(later, table, table.reading_of("a")))
    assert torch.equal(rows.sort(0).values, federation.x.sort(0).values)


def test_a_client_that_joins_is_scaled_as_the_run_is(tmp_path: Path) -> None:
    path = visits(tmp_path / "visits.csv")
    federation = read_federation(path, "clinic", "price")
    table = table_of(federation.reading)
    x, y = read_client(path, "price", None, federation.x.shape[1:], federation.reading)
    data, reading = new_client(x, y, "new", (0.7, 0.15, 0.15), 0, table)
    assert reading is not None
    assert reading.fill == table.common
    torch.testing.assert_close(data.x, torch.from_numpy(prepared(x, table, reading)))
    torch.testing.assert_close(table.unscaled(data.y).double(), torch.from_numpy(y))


def test_each_client_may_be_scaled_by_its_own_training_examples(tmp_path: Path) -> None:
    """In the federation, in what a stored run reads and exports, and for a client that joins."""
    path, random = tmp_path / "visits.csv", numpy.random.default_rng(0)
    rows = [f"{'ab'[i % 2]},{100 * (i % 2) + random.normal():.3f},{'xy'[i // 2 % 2]},{i % 2}," for i in range(120)]
    path.write_text(
        "\n".join(["clinic,dose,kind,device,outcome", *(f"{row}{i % 3 % 2}" for i, row in enumerate(rows))])
    )
    federation = read_federation(path, "clinic", "outcome", scale="client")
    table, plain = table_of(federation.reading), read_federation(path, "clinic", "outcome", scale="none")
    for client, name in enumerate("ab"):
        train = federation.x[federation.splits["train"].of(client)].double()
        assert train.mean(0).abs().max() < 1e-4
        torch.testing.assert_close(train.std(0, correction=0), torch.tensor([1.0, 1, 1, 0]).double(), atol=1e-4, rtol=0)
        own = prepared(plain.x.numpy(), replace(table, missing="zero"), table.reading_of(name))
        mine = torch.cat([part.of(client) for part in federation.splits.values()])
        assert torch.equal(torch.from_numpy(own)[mine], federation.x[mine])
    run = pfedhn.train("fedavg", federation, steps=4, directory=tmp_path / "run", progress=False, device="cpu")
    path.with_name("new.csv").write_text("dose,kind,device\n101.5,x,1\n99,y,1\n")
    given = pfedhn.load(tmp_path / "run", device="cpu").read(tmp_path / "new.csv", "b")
    assert torch.equal(given, run.read(tmp_path / "new.csv", "b"))
    assert given[:, 0].abs().max() < 5
    program = torch.export.load(run.export("b", tmp_path / "b.pt2")).module()
    raw = torch.tensor([[101.5, 1, 0, 1], [99, 0, 1, 1]])
    torch.testing.assert_close(program(raw), run.personal_model("b")(given).softmax(1))
    assert "over this client's training examples" in (tmp_path / "b.md").read_text()
    shifted = plain.x.numpy() + numpy.array([500, 0, 0, 0])
    data, reading = new_client(shifted, plain.y.numpy(), "new", (0.7, 0.15, 0.15), 0, table)
    assert data.x[data.splits["train"].of(0)].mean(0).abs().max() < 1e-4
    assert reading is not None
    assert table.reading_of("new").scaling != reading.scaling


def test_a_stored_cell_is_read_as_it_was(tmp_path: Path) -> None:
    """It does not say how, and meant numbers as they are; "auto" meant classes for whole numbers."""
    lines = [f"{'ab'[i % 2]},{i},7,{i % 30}" for i in range(200)]
    (tmp_path / "visits.csv").write_text("\n".join(["clinic,number,same,score", *lines]))
    cell = Cell(dataset=str(tmp_path / "visits.csv"), clients=2, columns={"client": "clinic", "label": "score"})
    federation = build_federation(cell, seed=0)
    assert federation.x.unique(dim=0).shape == (200, 2)
    assert federation.num_classes == 30
    assert table_of(federation.reading) == replace(
        TableReading("clinic", "score", table_of(federation.reading).columns),
        sha256=table_of(federation.reading).sha256,
    )
    task = table_task(tmp_path / "visits.csv", "score")
    assert task == "regression"
    now = replace(cell, read=TABLE_READ, task=task)
    with pytest.raises(UserError, match="has no feature columns: each is the same or different in every row"):
        build_federation(now, seed=0)


def test_columns_that_number_rows_or_never_change_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"{i + 5},{'ab'[i % 2]},{i * 37 % 1009},P{i},{i % 11},same,{i % 2}" for i in range(100)]
    (tmp_path / "visits.csv").write_text("\n".join([",clinic,patient,person,dose,country,sick", *lines]))
    for _ in range(2):
        federation = read_federation(tmp_path / "visits.csv", "clinic", "sick")
    assert table_of(federation.reading).inputs == ["dose"]
    (note,) = caplog.messages
    assert note.startswith(
        "visits.csv: 4 columns are no features and are left out: '' (it numbers the rows), 'patient' (different in "
        "every row), 'person' (different in every row), 'country' (the same in every row)."
    )
    with pytest.raises(UserError, match=r"'person' in line 2 .* is 'P0' and not a number"):
        read_federation(tmp_path / "visits.csv", "clinic", "sick", select="all", encode="refuse")


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (
            "2026-01-{:02d}",
            r"column 'a' of table\.csv holds dates, such as '2026-01-00' in line 2; write numbers instead",
        ),
        ("{}/3/24", "holds dates, such as '0/3/24'"),
        ("{} pts", "holds numbers with a unit, such as '0 pts' in line 2; write the numbers alone, or leave it out"),
        ("€{}.50", "holds numbers with a unit, such as '€0.50'"),
    ],
)
def test_columns_that_must_be_mended_are_named(cell: str, sentence: str, tmp_path: Path) -> None:
    lines = [f"{'wv'[i % 2]},{i % 3},{cell.format(i % 20)}" for i in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["who,what,a", *lines]))
    with pytest.raises(UserError, match=sentence):
        read_federation(tmp_path / "table.csv", "who", "what")


@pytest.mark.parametrize("column", ["smoker", "sick"])
def test_texts_that_differ_in_case_alone_are_named(column: str, tmp_path: Path) -> None:
    lines = [f"{'ab'[i % 2]},{'Yes' if i == 9 else ('yes ', 'no')[i % 2]},{i % 2}" for i in range(60)]
    header = "who,smoker,what" if column == "smoker" else "who,sick,dose"
    (tmp_path / "table.csv").write_text("\n".join([header, *lines]))
    with pytest.raises(
        UserError, match=rf"'{column}' of table\.csv has 'yes' \(line 2\) and 'Yes' \(line 11\), .* write them alike"
    ):
        read_federation(tmp_path / "table.csv", "who", "sick" if column == "sick" else "what")


@pytest.mark.parametrize(
    ("labels", "task", "words"),
    [
        ([i % 21 for i in range(2100)], "classification", "are 21 classes (0, 1, 2,"),
        ([i % 21 * 2 for i in range(2100)], "regression", "are 21 different whole numbers"),
        ([i % 21 for i in range(210)], "regression", "are 21 different whole numbers"),  # a tenth of the examples
        ([min(i % 60, 24) for i in range(2100)], "classification", "25 classes"),
        ([int(abs(i % 300 - 150) ** 0.5 * 2) for i in range(2100)], "regression", "whole numbers"),  # some are rare
        ([i % 6 + 1 for i in range(60)], "classification", 'set task = "regression"'),
        ([i % 2 for i in range(60)], "classification", ""),
        ([i / 2 for i in range(60)], "regression", ""),
        (["ill", "well"] * 30, "classification", ""),
    ],
)
def test_many_whole_numbers_are_a_quantity_and_it_is_said(
    labels: list[Any], task: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "table.csv").write_text("\n".join(["label", *map(str, labels)]))
    assert task_of(read_columns(tmp_path / "table.csv"), "label") == task
    assert len(caplog.messages) == (1 if words else 0)
    assert words in caplog.text


def test_small_clients_do_not_train_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        f"{clinic},{i % 7},{i % 2}"
        for clinic, count in (("a", 30), ("b", 1), ("c", 20), ("d", 9))
        for i in range(count)
    ]
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["clinic,dose,sick", *lines]))
    federation = read_federation(path, "clinic", "sick")
    assert federation.names == ("a", "c")
    assert len(federation.x) == 50
    assert (
        "2 of 4 clients have fewer than 10 examples and do not train: b, d. With some examples they can join later"
        in caplog.text
    )
    assert [len(client_sizes(path, "clinic", least)) for least in (1, 2, 10, 25)] == [4, 3, 2, 1]
    cell = Cell(dataset=str(path), columns={"client": "clinic", "label": "sick"})
    assert with_own_clients(replace(cell, read=TABLE_READ)).clients == 2
    assert with_own_clients(cell).clients == 4
    with pytest.raises(UserError, match=r"1 of the 4 clients of visits\.csv have at least 25 examples, .* at least 2"):
        read_federation(path, "clinic", "sick", min_examples=25)
    with pytest.raises(UserError, match="min_examples"):
        read_federation(path, "clinic", "sick", min_examples=0)


@pytest.mark.parametrize("empty", ["", "NA", "?"])
def test_rows_without_a_label_are_left_out_and_counted(
    empty: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{'ab'[i % 2]},{i % 9},{empty if i % 4 == 3 else i / 8}" for i in range(80)]
    path, whole = tmp_path / f"visits{len(empty)}.csv", tmp_path / "whole.csv"
    path.write_text("\n".join(["clinic,dose,score", *rows]))
    whole.write_text("\n".join(["clinic,dose,score", *(row for i, row in enumerate(rows) if i % 4 != 3)]))
    federation = read_federation(path, "clinic", "score")
    assert torch.equal(federation.x, read_federation(whole, "clinic", "score").x)
    assert f"{path.name}: 20 of 80 rows have no label in column 'score' and are left out." in caplog.text
    assert client_sizes(path, "clinic", label_column="score") == [40, 20]
    cell = Cell(dataset=str(path), columns={"client": "clinic", "label": "score"}, read={"min_examples": 30})
    assert with_own_clients(cell).clients == 1
    assert table_task(path, "score") == "regression"
    assert len(read_client(path, "score", None, how=federation.reading)[1]) == 60


def test_a_table_without_any_label_is_refused_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["clinic,dose,state", *(f"{'ab'[i % 2]},{i}," for i in range(40))]))
    with pytest.raises(UserError, match=r"no row of visits\.csv has a label in column 'state'; name another column"):
        read_federation(path, "clinic", "state")
    rows = [f"{'ab'[i % 2]},{'x' if i == 9 else i},{'' if i < 4 else 'up' if i % 3 else 'down'}" for i in range(40)]
    path.write_text("\n".join(["clinic,dose,state", *rows]))
    with pytest.raises(UserError, match=r"'dose' in line 11 of visits\.csv is 'x'"):
        read_federation(path, "clinic", "state")


def test_a_single_client_or_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    lines = [f"{'ab'[i % 2]},{i % 7},lyon,ill" for i in range(40)]
    path.write_text("\n".join(["clinic,dose,city,state", *lines]))
    with pytest.raises(UserError, match=r"all examples of visits\.csv are of one client, 'lyon' in column 'city'"):
        read_federation(path, "city", "clinic")
    with pytest.raises(
        UserError, match=r"every label in column 'state' of visits\.csv is 'ill', so there is nothing to"
    ):
        read_federation(path, "clinic", "state")


def test_a_spreadsheet_is_read_as_a_csv_file_is(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    path = visits(tmp_path / "visits.csv")
    book = openpyxl.Workbook()
    book.active.append(HEADER.split(","))
    for line in path.read_text().splitlines()[1:]:
        cells = enumerate(line.split(","))
        book.active.append([float(cell) if cell and place in (1, 2, 4) else cell or None for place, cell in cells])
    book.save(tmp_path / "visits.xlsx")
    csv, sheet = (read_federation(tmp_path / f"visits.{ending}", "clinic", "price") for ending in ("csv", "xlsx"))
    assert torch.equal(csv.x, sheet.x)
    assert torch.equal(csv.y, sheet.y)
    book.active.cell(row=4, column=2).value = "bad"
    book.save(tmp_path / "visits.xlsx")
    with pytest.raises(UserError, match=r"'dose' in row 4 of visits\.xlsx is 'bad' and not a number"):
        read_federation(tmp_path / "visits.xlsx", "clinic", "price")


def test_spreadsheets_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "visits.xlsx").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"visits\.xlsx is a spreadsheet; save it as CSV, or pip install openpyxl"):
        read_federation(tmp_path / "visits.xlsx", "clinic", "price")
    with pytest.raises(UserError, match=r"visits\.ods is a table of a kind that is not read; save it as CSV"):
        check(Experiment("mine", (Cell(dataset="visits.ods"),)))
