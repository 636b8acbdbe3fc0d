"""Taking models away and predicting, from the command line."""

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from support import encoded
from typer.testing import CliRunner, Result

import pfedhn
from pfedhn.cli.app import app
from pfedhn.cli.endings import LEARNED_NOTHING
from pfedhn.engine.simulate import Simulation
from pfedhn.runs.export import to_markdown
from pfedhn.storage.directory import read_spec, write_spec

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
AS_IT_IS = 'read = {encode = "refuse", missing = "refuse", fitted = "client", scale = "none", select = "all"}'


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
    (folder / "mine.toml").write_text(CLINICS + AS_IT_IS)
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
    card = Path("berlin.md").read_text()
    assert "3 clients" in card
    (result_file,) = Path("runs").glob("*/result.json")
    counts = json.loads(result_file.read_text())["clients"]["classes"][0].values()
    share = 100 * max(counts) / sum(counts)
    assert f"For comparison: the commonest class is {share:.1f} % of its training examples." in card


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


def test_examples_without_a_label_are_not_counted_as_wrong() -> None:
    Path("some.csv").write_text("age,dose,outcome\n0.1,0.2,ill\n0.3,0.1,\n0.2,0.4,well\n")
    said = invoke("predict", "runs", "--client", "Lyon", "--data", "some.csv", "--label", "outcome")
    assert said.exit_code == 0, said.output
    assert "of 2. (1 have no label.)" in said.stderr


def test_no_class_is_predicted_of_numbers_that_are_missing() -> None:
    numpy.save("new.npy", numpy.array([[0.1, 0.2], [numpy.nan, 0.3]], dtype=numpy.float32))
    refused = invoke("predict", "runs", "--client", "Lyon", "--data", "new.npy")
    assert refused.exit_code == 2
    assert "example 1 of new.npy has a number that is not finite; fix it." in refused.stderr


def test_columns_are_found_by_their_names() -> None:
    rows = [row.split(",") for row in Path("visits.csv").read_text().splitlines()]
    Path("other.csv").write_text("\n".join(f"{dose},x,{age}" for _, age, dose, _ in rows).replace("x", "note", 1))
    usual, other = (
        invoke("predict", "runs", "--client", "Lyon", "--data", f"{file}.csv") for file in ("visits", "other")
    )
    assert usual.exit_code == other.exit_code == 0, other.output
    assert usual.stdout == other.stdout
    Path("other.csv").write_text("Alter,dose\n0.1,0.2\n")
    refused = invoke("predict", "runs", "--client", "Lyon", "--data", "other.csv")
    assert refused.exit_code == 2
    assert "other.csv has no column 'age', which the run was trained on; there are Alter, dose." in refused.stderr


def test_a_run_that_does_not_know_its_columns_takes_them_in_order(tmp_path: Path) -> None:
    """As runs of earlier versions, which kept no names."""
    shutil.copytree("runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "pfedhn-visits-3-seed0"
    spec = read_spec(folder)
    assert spec is not None
    write_spec(folder, replace(spec, data=replace(spec.data, reading=None)))
    Path("other.csv").write_text("a,b\n0.1,0.2\n")
    Path("new.csv").write_text("age,dose\n0.1,0.2\n")
    before = invoke("predict", "runs", "--client", "Lyon", "--data", "new.csv")
    said = invoke("predict", str(folder), "--client", "Lyon", "--data", "other.csv")
    assert said.exit_code == 0, said.output
    assert said.stdout == before.stdout


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
    card = pfedhn.load("runs", device="cpu").card("Lyon")
    assert card["input"]["images"]["channels"] == ["red", "green", "blue"]
    assert (
        "Images of 4 x 4 pixels (height x width), resized with Pillow's Image.resize with Image.Resampling.BILINEAR; "
        "channels red, green, blue, in this order and first; each value from 0 to 1"
    ) in to_markdown(card)
    Path("table.csv").write_text("a,b\n1,2\n")
    refused = invoke("predict", "runs", "--client", "Lyon", "--data", "table.csv")
    assert "table.csv is a table, and this run's examples have shape (3, 4, 4); give arrays" in refused.stderr
    refused = invoke("add-client", "runs", "--data", "table.csv", "--label", "b")
    assert "table.csv is a table, and this run's examples have shape (3, 4, 4)" in refused.stderr
    alone = invoke("predict", "runs", "--client", "Lyon", "--data", "photos/Lyon/dog/3.png")
    assert list(csv.DictReader(io.StringIO(alone.stdout))) == [{**said[13], "file": "3.png"}]
    joined = invoke("add-client", "runs", "--data", "photos/Berlin", "--rounds", "1", "--device", "cpu")
    assert joined.exit_code == 0, joined.output
    assert "of 20 examples" in joined.output

    Path("photos/Berlin/dog/3.png").write_bytes(encoded(pixels)[:40])
    spec = read_spec(next(Path("runs").glob("*-seed0")))
    assert spec is not None
    assert spec.data.reading is not None
    assert spec.data.reading.images is not None
    skipping = replace(spec.data.reading, images=replace(spec.data.reading.images, corrupt="skip"))
    write_spec(next(Path("runs").glob("*-seed0")), replace(spec, data=replace(spec.data, reading=skipping)))
    damaged = invoke("predict", "runs", "--client", "Berlin", "--data", "photos/Berlin")
    assert "No prediction for 1 of 20 images, which are damaged: dog/3.png." in damaged.stderr
    rows = list(csv.DictReader(io.StringIO(damaged.stdout)))
    assert [row["file"] for row in rows if not row["prediction"]] == ["dog/3.png"]
    assert len(rows) == 20


@pytest.mark.parametrize(("file", "why"), [(None, "is not finished"), ("diverged.txt", "diverged")])
def test_a_run_that_is_not_finished_says_where_it_stands(
    file: str | None, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run,) = Path("runs").glob("*-seed0")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    if file is not None:
        (tmp_path / "run" / file).write_text("It diverged.")
    sentence = f"{tmp_path / 'run'} {why}: it stands at step 6 of 6."
    Path("new.csv").write_text("age,dose\n0.1,0.2\n")
    for command in ("predict --client Lyon --data new.csv", "export --client Lyon --to lyon.safetensors"):
        name, *words = command.split()
        assert invoke(name, str(tmp_path / "run"), *words).exit_code == 0
    assert caplog.messages == [sentence] * 2
    pfedhn.load(run)
    assert len(caplog.messages) == 2


def test_the_score_of_a_new_client_says_how_little_it_rests_on() -> None:
    Path("oslo.csv").write_text("age,dose,outcome\n" + "".join(f"{i},1,{('ill', 'well')[i % 2]}\n" for i in range(40)))
    result = invoke("add-client", "runs", "--data", "oslo.csv", "--rounds", "0", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "(95 % interval: " in result.stdout
    assert "6 test examples say little" in result.stdout
    Path("oslo.csv").write_text("age,dose,outcome\n7,1,ill\n")
    refused = invoke("add-client", "runs", "--data", "oslo.csv", "--device", "cpu")
    assert refused.exit_code == 2
    assert "oslo.csv has 1 example, too few to learn from some and judge" in " ".join(refused.output.split())
    untrained = invoke(
        "add-client", "runs", "--data", "oslo.csv", "--rounds", "0", "--device", "cpu", "--out", "oslo.pt2"
    )
    assert "Nothing was learned (--rounds 0)" in untrained.stdout
    assert "It was not measured" in Path("oslo.md").read_text()


KINDS = (
    CLINICS.replace(
        "clients = 3",
        'clients = 2\nevaluate_every = 2\nread = {encode = "one-hot", missing = "median", fitted = "client", '
        'scale = "none", select = "all"}',
    )
    .replace('label = "outcome"', 'label = "outcome", ignore = ["day"]')
    .replace("mlp-4", "tabular-4")
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with texts, empty cells and a date."""
    folder = tmp_path_factory.mktemp("kinds")
    random = numpy.random.default_rng(0)
    rows = [
        f"{('Berlin', 'Rome')[i % 2]},2026-01-{i % 28 + 1},{f'{random.normal(i % 2):.3f}' if i % 5 else ''},"
        f"{'xyz'[i % 3]},{i % 2}"
        for i in range(60)
    ]
    (folder / "visits.csv").write_text("\n".join(["clinic,day,dose,kind,outcome", *rows]))
    (folder / "kinds.toml").write_text(KINDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = invoke("run", "kinds.toml", "--out", "runs", "--device", "cpu")
        assert result.exit_code == LEARNED_NOTHING, result.output  # a client has one class
    return folder


def fill_of(folder: Path, client: int) -> float:
    """The median dose of a client's training examples."""
    federation = pfedhn.datasets.read_federation(
        folder / "visits.csv", "clinic", "outcome", ignore_columns=["day"], missing="zero", scale="none", select="all"
    )
    dose = federation.x[federation.splits["train"].of(client), 0]
    return float(numpy.median(dose[dose != 0].numpy()))


def test_texts_and_empty_cells_are_read_as_in_training_without_the_table(
    kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(kinds / "runs", "moved")
    monkeypatch.setattr("pfedhn.data.files.from_table", None)  # nobody reads the table again
    Path("new.csv").write_text("kind,dose\nz,0.5\nx,\n,-1\n")  # found by name, in any order
    said = invoke("predict", "moved", "--client", "Rome", "--data", "new.csv")
    assert said.exit_code == 0, said.output
    monkeypatch.undo()
    x = torch.tensor([[0.5, 0.0, 0.0, 1.0], [fill_of(kinds, 1), 1.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    with torch.no_grad():
        best = pfedhn.load(tmp_path / "moved", device="cpu").personal_model("Rome")(x).softmax(-1).max(-1)
    found = [row["probability"] for row in csv.DictReader(io.StringIO(said.stdout))]
    assert [float(value) for value in found] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_the_table_of_training_can_be_predicted(kinds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kinds)
    said = invoke("predict", "runs", "--client", "Rome", "--data", "visits.csv", "--label", "outcome")
    assert said.exit_code == 0, said.output
    assert "of 60." in said.stderr


def test_finished_runs_are_not_those_of_a_table_that_changed(
    kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(kinds, tmp_path, dirs_exist_ok=True)
    text = Path("visits.csv").read_text()
    Path("kinds.toml").write_text(KINDS.replace('"visits.csv"', f'"{kinds / "visits.csv"}"'))
    again = invoke("run", "kinds.toml", "--out", "runs", "--device", "cpu")
    assert again.exit_code == LEARNED_NOTHING, again.output
    assert "1 of 1 runs are finished already" in again.stderr
    try:
        (kinds / "visits.csv").write_text(text.replace(",x,", ",xx,"))
        changed = invoke("run", "kinds.toml", "--out", "runs", "--device", "cpu", "--seeds", "1")
        (kinds / "visits.csv").write_text(text + "\n\n")  # the same table, written another way
        same = invoke("run", "kinds.toml", "--out", "runs", "--device", "cpu")
    finally:
        (kinds / "visits.csv").write_text(text)
    assert changed.exit_code == 2
    assert "visits.csv has changed since runs/pfedhn-visits-2-seed0 was finished; give another --out" in " ".join(
        changed.stderr.split()
    )
    assert same.exit_code == LEARNED_NOTHING, same.output


@pytest.mark.slow
def test_other_seeds_are_not_trained_on_a_folder_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for client in ("lyon", "metz"):
        (tmp_path / "clinics" / client).mkdir(parents=True)
        numpy.save(tmp_path / "clinics" / client / "x.npy", numpy.random.default_rng(0).normal(size=(20, 3)))
        numpy.save(tmp_path / "clinics" / client / "y.npy", numpy.arange(20) % 2)
    Path("mine.toml").write_text('method = "local"\ndataset = "clinics"\nmodel = "linear"\nsteps = 2\nseeds = [0]\n')
    command = ("run", "mine.toml", "--out", "runs", "--device", "cpu")
    assert invoke(*command).exit_code == 0
    assert invoke(*command, "--seeds", "0,1").exit_code == 0
    numpy.save(tmp_path / "clinics" / "metz" / "y.npy", numpy.arange(20) % 2 == 0)
    changed = invoke(*command, "--seeds", "0,1,2")
    assert changed.exit_code == 2
    assert "clinics has changed since runs/local-clinics-2-seed0 was finished; give another --out" in " ".join(
        changed.stderr.split()
    )
    assert not Path("runs", "local-clinics-2-seed2").exists()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [("kind,dose\nq,0.5\n", "'q', which the run was not trained on"), ("dose\n1\n", "no column 'kind'")],
)
def test_what_a_run_does_not_know_is_refused(table: str, sentence: str, kinds: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text(table)
    refused = invoke("predict", str(kinds / "runs"), "--client", "Rome", "--data", str(tmp_path / "new.csv"))
    assert refused.exit_code == 2
    assert sentence in " ".join(refused.stderr.split())


def test_an_earlier_run_finds_its_texts_in_its_table(
    kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(kinds / "runs" / "pfedhn-visits-2-seed0", "run")
    spec = read_spec(Path("run"))
    assert spec is not None
    assert spec.cell is not None
    cell = {**spec.cell, "columns": {"client": "clinic", "label": "outcome"}, "dataset": str(tmp_path / "visits.csv")}
    write_spec(Path("run"), replace(spec, data=replace(spec.data, reading=None), cell=cell))
    lines = [line.split(",") for line in (kinds / "visits.csv").read_text().splitlines()]
    Path("visits.csv").write_text("\n".join(",".join([who, *rest]) for who, _, *rest in lines))
    Path("new.csv").write_text("kind,dose\nz,0.5\n")
    said = [invoke("predict", str(run), "--client", "Rome", "--data", "new.csv") for run in ("run", kinds / "runs")]
    assert said[0].exit_code == 0, said[0].output
    assert said[0].stdout == said[1].stdout
    Path("visits.csv").unlink()
    refused = invoke("predict", "run", "--client", "Rome", "--data", "new.csv")
    assert refused.exit_code == 2
    assert "which is not there any more" in " ".join(refused.stderr.split())


@pytest.mark.slow
def test_a_client_that_joins_is_read_as_the_others_were(
    kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, empty cells, the client's own column and the date; its medians are those of its own training examples."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 2},{'xyz'[i % 3]},{'' if i % 4 == 0 else i},Oslo,2026-02-01" for i in range(40)]
    Path("oslo.csv").write_text("\n".join(["outcome,kind,dose,clinic,day", *rows]))
    given = ["add-client", str(kinds / "runs"), "--data", "oslo.csv", "--name", "Oslo", "--rounds", "1"]
    result = invoke(*given, "--device", "cpu", "--out", "oslo.safetensors")
    assert result.exit_code == 0, result.output
    assert "of 40 examples" in " ".join(result.output.split())
    with safe_open("oslo.safetensors", "pt") as stored:
        (dose, kind) = json.loads(stored.metadata()["card"])["input"]["columns"]
    x, y = numpy.arange(40)[:, None], numpy.arange(40) % 2
    train = pfedhn.Federation.from_clients({"Oslo": (x, y)}).splits["train"].of(0)
    assert dose == {"name": "dose", "empty": numpy.median([i for i in train.tolist() if i % 4])}
    assert kind == {"name": "kind", "texts": ["x", "y", "z"]}
    card = Path("oslo.md").read_text()
    assert f"| 1 | dose | as it is; NaN for an empty cell, which becomes {dose['empty']:.6g} |" in card
    assert "| 2 to 4 | kind | 1 in the place of its text, 0 elsewhere: x, y, z |" in card


def test_python_reads_as_the_command_does(kinds: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("note,kind,dose\nlate,z,0.5\n,x,\n")
    run = pfedhn.load(kinds / "runs", device="cpu")
    expected = [[0.5, 0, 0, 1], [fill_of(kinds, 1), 1, 0, 0]]
    assert torch.equal(run.read(tmp_path / "new.csv", "Rome"), torch.tensor(expected))
    x = numpy.array([[numpy.nan if i % 4 == 0 else i, 1, 0, 0] for i in range(40)])
    joined = run.add_client(x, numpy.arange(40) % 2, rounds=0, name="Oslo")
    assert joined.reading is not None
    assert joined.reading.fill is not None
    assert float(run.read(tmp_path / "new.csv", "Oslo")[1, 0]) == joined.reading.fill[0] != fill_of(kinds, 1)


def test_a_card_says_what_goes_in(kinds: Path, tmp_path: Path) -> None:
    run = pfedhn.load(kinds / "runs", device="cpu")
    for place, client in enumerate(("Berlin", "Rome")):
        (dose, _) = run.card(client)["input"]["columns"]
        assert dose == {"name": "dose", "empty": pytest.approx(fill_of(kinds, place))}
    run.export("Rome", tmp_path / "rome.safetensors")
    assert "| 1 | dose | as it is; " in (tmp_path / "rome.md").read_text()


def test_a_card_of_numbers_names_the_columns() -> None:
    card = pfedhn.load("runs", device="cpu").card("Lyon")
    assert card["input"]["columns"] == [{"name": "age"}, {"name": "dose"}]
    assert "| 1 | age | as it is |\n| 2 | dose | as it is |\n" in to_markdown(card)


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
        ("wide.csv has no column 'age', which the run was trained on", "predict runs --client Lyon --data wide.csv"),
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


@pytest.mark.slow
def test_a_plan_is_whole_where_it_is_piped_and_json_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # of a terminal; a pipe has no width
    command = ["run", "mine.toml", "--dry-run", "--device", "cpu", "--jobs", "1", "--out", "other"]
    header = next(line for line in invoke(*command).stdout.splitlines() if line.startswith("cell"))
    assert header.split() == ["cell", "seeds", "rounds", "parameters", "memory"]
    plan = json.loads(invoke(*command, "--json").stdout)
    (cell,) = plan["cells"]
    assert (plan["directory"], plan["finished"], plan["jobs"]) == ("other", [], 1)
    assert (cell["name"], cell["rounds"], cell["parameters"]) == ("pfedhn-visits-3", 6, 2 * 4 + 4 + 4 * 2 + 2)
    assert cell["runs"] == ["pfedhn-visits-3-seed0"]
    assert cell["megabytes"] > 0
    refused = invoke("run", "mine.toml", "--json")
    assert refused.exit_code == 2
    assert "--json is for --dry-run" in refused.output


def test_a_plan_runs_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a round was run")

    monkeypatch.setattr(Simulation, "_round", refuse)
    Path("two.toml").write_text((CLINICS + AS_IT_IS).replace('"pfedhn"', '["pfedhn", "local"]'))
    result = invoke("run", "two.toml", "--dry-run", "--device", "cpu", "--out", "other")
    assert result.exit_code == 0, result.output
    header, first, second = result.stdout.splitlines()[:3]
    assert [line.split()[0] for line in (header, first, second)] == ["cell", "pfedhn-visits-3", "local-visits-3"]
    assert len({len(line.rstrip()) for line in (header, first, second)}) == 1, "all end below each other"
