"""Files of a table's models take its own values: a script without this package says what the run itself says."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from typer.testing import CliRunner

import pfedhn
from pfedhn.cli.app import app
from pfedhn.cli.endings import LEARNED_NOTHING
from pfedhn.data.reading import ClientReading, Column, Scaling, TableReading
from pfedhn.runs.pipeline import TablePipeline

RUN = """
dataset = "visits.csv"
columns = {{client = "clinic", label = "{label}", ignore = ["{other}"]}}
clients = 3
task = "{task}"
read = {{encode = "one-hot", missing = "flag", fitted = "{fitted}", scale = "all", select = "auto"}}
method = "pfedhn"
model = "mlp-4"
steps = 30
evaluate_every = 3
seeds = [0]
settings = {{local_steps = 2}}
"""


def test_a_pipeline_fills_flags_scales_and_brings_outputs_to_the_units_of_the_label() -> None:
    columns = (Column("kind", ("x", "y")), Column("dose"))
    table = TableReading(
        "clinic",
        "price",
        columns,
        "flag",
        flagged=("dose",),
        scaling=Scaling((0, 0, 5, 0), (1, 1, 2, 1)),
        target=(7, 3),
    )
    x = torch.tensor([[1, 0, torch.nan], [0, 1, 1e9]])
    reading = ClientReading((0, 0, 9), table.scaling)
    pipeline = TablePipeline(torch.nn.Identity(), table, reading, has_classes=False)
    inputs = torch.tensor([[1, 0, (9 - 5) / 2, 1], [0, 1, 10, 0]])
    assert torch.equal(pipeline(x), inputs * 3 + 7)
    assert torch.equal(TablePipeline(torch.nn.Identity(), table, reading, has_classes=True)(x), inputs.softmax(-1))


def visits(path: Path) -> None:
    random = numpy.random.default_rng(0)
    rows = [["", "clinic", "dose", "age", "kind", "price", "outcome"]]
    for i in range(180):
        dose = f"{random.normal(100, 20):.2f}" if i % 5 else ("", "NA")[i % 2]
        kind = "" if i % 7 == 0 else ("x", "y,z", "é")[i % 3]
        price = f"{random.normal(5_000, 900):.2f}"
        clinic, outcome = ("Berlin", "Rome", "Oslo")[i % 3], ("ill", "well")[i % 2]
        rows.append([str(i), clinic, dose, str(20 + i % 50), kind, price, outcome])
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "other", "task", "fitted"),
    [("outcome", "price", "classification", "client"), ("price", "outcome", "regression", "all")],
)
def test_a_script_predicts_as_the_run_does(
    label: str, other: str, task: str, fitted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    monkeypatch.chdir(tmp_path)
    visits(Path("visits.csv"))
    Path("mine.toml").write_text(RUN.format(label=label, other=other, task=task, fitted=fitted))

    def said(command: str) -> str:
        result = CliRunner().invoke(app, command.split(), prog_name="pfedhn")
        assert result.exit_code in (0, LEARNED_NOTHING), result.output
        return result.stdout

    said("run mine.toml --out runs --device cpu")
    said("export runs --client Rome --to rome.onnx")
    said("export runs --client Rome --to rome.pt2")
    done = subprocess.run(
        [sys.executable, "predict_rome.py", "visits.csv"], capture_output=True, text=True, check=True, env={}
    )
    by_script = list(csv.DictReader(io.StringIO(done.stdout)))
    by_command = list(csv.DictReader(io.StringIO(said("predict runs --client Rome --data visits.csv"))))
    assert len(by_script) == len(by_command) == 180
    if task == "classification":
        assert all(float(row["ill"]) + float(row["well"]) == pytest.approx(1) for row in by_script)
        expected = [float(row["probability"]) for row in by_command]
        found = [float(row[other["prediction"]]) for row, other in zip(by_script, by_command, strict=True)]
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        found = [float(row["price"]) for row in by_script]
        assert found == pytest.approx([float(row["prediction"]) for row in by_command], rel=1e-5)
        assert 3_000 < numpy.mean(found) < 7_000
        card = Path("rome.md").read_text()
        assert "Test error (root mean square, in units of price): " in card
    run = pfedhn.load("runs", device="cpu")
    assert run.description.reading is not None
    table = run.description.reading.table
    assert table is not None
    assert table.inputs == ["dose", "age", "kind=x", "kind=y,z", "kind=é", "dose missing"]
    Path("one.csv").write_text("age,kind,dose\n30,,\n")
    with torch.no_grad():
        outputs = run.personal_model("Rome")(run.read("one.csv", "Rome"))
        exported = torch.export.load("rome.pt2").module()(torch.tensor([[torch.nan, 30.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(exported, outputs.softmax(-1) if task == "classification" else table.unscaled(outputs))
    for content, sentence in (
        ("age,kind,dose\n30,w,1\n", "The model does not know ['w'] in column 'kind'."),
        ("age,dose\n30,1\n", "odd.csv has no column 'kind', which the model was trained on."),
    ):
        Path("odd.csv").write_text(content)
        refused = subprocess.run(
            [sys.executable, "predict_rome.py", "odd.csv"], capture_output=True, text=True, check=False, env={}
        )
        assert refused.stderr.strip() == sentence
