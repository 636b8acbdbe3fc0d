"""Taking models away and predicting, from the command line."""

import csv
import io
import json
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from support import encoded
from typer.testing import CliRunner, Result

import pfedhn
from pfedhn.cli.app import app

CLINICS = """
dataset = "visits.csv"
columns = {client = "clinic", label = "outcome"}
clients = 3
model = "mlp-4"
steps = 6
seeds = [0]
method = "pfedhn"
settings = {local_steps = 2}
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="pfedhn")


@pytest.fixture(scope="module")
def clinics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table, as a person makes one."""
    folder = tmp_path_factory.mktemp("clinics")
    random = numpy.random.default_rng(0)
    lines = [
        f"{('Berlin', 'Lyon', 'Rome')[i % 3]},{random.normal():.3f},{random.normal():.3f},{'ill' if i % 2 else 'well'}"
        for i in range(120)
    ]
    (folder / "visits.csv").write_text("\n".join(["clinic,age,dose,outcome", *lines]))
    (folder / "mine.toml").write_text(CLINICS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert invoke("run", "mine.toml", "--out", "runs", "--device", "cpu").exit_code == 0
    return folder


@pytest.fixture(autouse=True)
def there(clinics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clinics)


def test_a_client_takes_its_model_away() -> None:
    result = invoke("export", "runs", "--client", "Berlin", "--to", "berlin.safetensors")
    assert result.exit_code == 0, result.output
    weights = pfedhn.load("runs", device="cpu").personal_weights("Berlin")
    with safe_open("berlin.safetensors", "pt") as stored:
        assert json.loads(stored.metadata()["card"])["client"] == "Berlin"
        torch.testing.assert_close(stored.get_tensor("layers.0.weight"), weights["layers.0.weight"])
    assert "3 clients" in Path("berlin.md").read_text()


def test_all_take_theirs() -> None:
    result = invoke("export", "runs", "--all", "--to", "models", "--format", "safetensors")
    assert result.exit_code == 0, result.output
    assert sorted(file.stem for file in Path("models").glob("*.safetensors")) == ["Berlin", "Lyon", "Rome"]


def test_predictions_are_the_personal_models() -> None:
    result = invoke("predict", "runs", "--client", "Lyon", "--data", "visits.csv", "--label", "outcome")
    assert result.exit_code == 0, result.output
    table = list(csv.DictReader(Path("visits.csv").read_text().splitlines()))
    x = torch.tensor([[float(row["age"]), float(row["dose"])] for row in table])
    with torch.no_grad():
        best = pfedhn.load("runs", device="cpu").personal_model("Lyon")(x).softmax(-1).max(-1)
    said = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["prediction"] for row in said] == [("ill", "well")[place] for place in best.indices.tolist()]
    assert [float(row["probability"]) for row in said] == pytest.approx(best.values.tolist(), abs=1e-4)
    right = sum(row["prediction"] == truth["outcome"] for row, truth in zip(said, table, strict=True))
    assert f"{right} of {len(table)}." in result.stderr


def test_predictions_of_features_alone_go_to_a_file() -> None:
    Path("new.csv").write_text("age,dose\n0.1,0.2\n")
    result = invoke("predict", "runs", "--client", "Lyon", "--data", "new.csv", "--out", "said.csv")
    assert result.exit_code == 0, result.output
    assert len(Path("said.csv").read_text().splitlines()) == 2
    before = Path("new.csv").read_text()
    result = invoke("predict", "runs", "--client", "Lyon", "--data", "new.csv", "--out", "./new.csv")
    assert result.exit_code == 2
    assert "--out new.csv would replace the examples; give another name." in result.output
    assert Path("new.csv").read_text() == before


@pytest.mark.slow
def test_images_are_predicted_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a person has them: a folder per client and class, of several sizes; then new ones, and a client that joins."""
    monkeypatch.chdir(tmp_path)
    random = numpy.random.default_rng(0)
    for client in ("Berlin", "Lyon"):
        for place, kind in enumerate(("cat", "dog")):
            folder = Path("photos", client, kind)
            folder.mkdir(parents=True)
            for number in range(10):
                pixels = random.integers(100 * place, 100 * place + 80, size=(6 + number % 2, 6, 3)).astype(numpy.uint8)
                (folder / f"{number}.png").write_bytes(encoded(pixels))
    Path("photos.toml").write_text(
        CLINICS.replace('"visits.csv"', '"photos"')
        .replace('columns = {client = "clinic", label = "outcome"}', "read = {resize = [4, 4]}")
        .replace("clients = 3", "clients = 2")
    )
    assert invoke("run", "photos.toml", "--out", "runs", "--device", "cpu").exit_code == 0
    result = invoke("predict", "runs", "--client", "Lyon", "--data", "photos/Lyon")
    assert result.exit_code == 0, result.output
    said = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["file"] for row in said[8:12]] == ["cat/8.png", "cat/9.png", "dog/0.png", "dog/1.png"]
    federation = pfedhn.datasets.read_federation("photos", resize=(4, 4))
    own = [federation.splits[part].of(1) for part in federation.splits]
    x = federation.x[torch.cat(own).sort().values]  # as the files come
    with torch.no_grad():
        best = pfedhn.load("runs", device="cpu").personal_model("Lyon")(x).argmax(-1)
    assert [row["prediction"] for row in said] == [("cat", "dog")[place] for place in best.tolist()]
    alone = invoke("predict", "runs", "--client", "Lyon", "--data", "photos/Lyon/dog/3.png")
    assert list(csv.DictReader(io.StringIO(alone.stdout))) == [{**said[13], "file": "3.png"}]
    joined = invoke("add-client", "runs", "--data", "photos/Berlin", "--rounds", "1", "--device", "cpu")
    assert joined.exit_code == 0, joined.output
    assert "of 20 examples" in joined.output


@pytest.mark.slow
def test_texts_are_encoded_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = numpy.random.default_rng(0)
    rows = [f"{('Berlin', 'Rome')[i % 2]},{random.normal():.3f},{'xyz'[i % 3]},{i % 2}" for i in range(60)]
    Path("visits.csv").write_text("\n".join(["clinic,dose,kind,outcome", *rows]))
    Path("kinds.toml").write_text(CLINICS.replace("clients = 3", 'clients = 2\nread = {encode = "one-hot"}'))
    assert invoke("run", "kinds.toml", "--out", "runs", "--device", "cpu").exit_code == 0
    Path("new.csv").write_text("kind,dose\nz,0.5\nx,-1\n")  # found by name, in any order
    said = invoke("predict", "runs", "--client", "Rome", "--data", "new.csv")
    assert said.exit_code == 0, said.output
    x = torch.tensor([[0.5, 0.0, 0.0, 1.0], [-1.0, 1.0, 0.0, 0.0]])
    with torch.no_grad():
        best = pfedhn.load("runs", device="cpu").personal_model("Rome")(x).softmax(-1).max(-1)
    found = [row["probability"] for row in csv.DictReader(io.StringIO(said.stdout))]
    assert [float(value) for value in found] == pytest.approx(best.values.tolist(), abs=1e-4)
    for table, sentence in (
        ("kind,dose\nq,0.5\n", "which the run was not trained on"),
        ("dose\n1\n", "no column 'kind'"),
    ):
        Path("new.csv").write_text(table)
        refused = invoke("predict", "runs", "--client", "Rome", "--data", "new.csv")
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("say whose model is wanted", "export runs --to x.onnx"),
        ("say whose model is wanted", "export runs --all --client Lyon --to x.onnx"),
        ("did you mean 'Lyon'", "export runs --client Lyons --to x.safetensors"),
        ("names no format", "export runs --client Lyon --to x.zip"),
        ("names no format", "export runs --all --to models --format zip"),
        ("--format is for --all", "export runs --client Lyon --to x.onnx --format pt2"),
        ("there is no file nothing.csv", "predict runs --client Lyon --data nothing.csv"),
        (
            "has no column 'outcom'; did you mean 'outcome'",
            "predict runs --client Lyon --data visits.csv --label outcom",
        ),
        ("this run's have (2,)", "predict runs --client Lyon --data wide.csv"),
        ("cat.png is an image, and this run's examples have shape (2,)", "predict runs --client Lyon --data cat.png"),
    ],
)
def test_what_cannot_be_is_one_sentence(sentence: str, arguments: str) -> None:
    Path("wide.csv").write_text("a,b,c\n1,2,3\n")
    Path("cat.png").write_bytes(encoded(numpy.zeros((4, 4, 3), numpy.uint8)))
    result = invoke(*arguments.split())
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split())


def test_a_dry_run_says_what_it_would_do_and_writes_nothing() -> None:
    before = sorted(Path().rglob("*"))
    result = invoke(
        "run", "mine.toml", "--seeds", "0,1", "--out", "other", "--dry-run", "--device", "cpu", "--jobs", "2"
    )
    assert result.exit_code == 0, result.output
    assert sorted(Path().rglob("*")) == before
    words = " ".join(result.output.split())
    weights = 2 * 4 + 4 + 4 * 2 + 2
    assert f"pfedhn-visits-3 2 6 {weights} " in words
    assert "2 runs in other, 2 side by side (0 are finished already)." in words


def test_a_plan_is_whole_where_it_is_piped_and_json_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # of a terminal; a pipe has no width
    command = ["run", "mine.toml", "--dry-run", "--device", "cpu", "--jobs", "1", "--out", "other"]
    header = next(line for line in invoke(*command).stdout.splitlines() if line.startswith("cell"))
    assert header.split() == ["cell", "seeds", "rounds", "parameters", "memory", "time"]
    plan = json.loads(invoke(*command, "--json").stdout)
    (cell,) = plan["cells"]
    assert (plan["directory"], plan["finished"], plan["jobs"]) == ("other", [], 1)
    assert (cell["name"], cell["rounds"], cell["parameters"]) == ("pfedhn-visits-3", 6, 2 * 4 + 4 + 4 * 2 + 2)
    assert cell["runs"] == ["pfedhn-visits-3-seed0"]
    assert cell["megabytes"] > 0
    assert cell["seconds"] >= 0
    refused = invoke("run", "mine.toml", "--json")
    assert refused.exit_code == 2
    assert "--json is for --dry-run" in refused.output
