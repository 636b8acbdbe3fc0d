"""Models that were taken away give what the personal models give, without this package."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import nn

import pfedhn
from pfedhn import models
from pfedhn.errors import UserError
from pfedhn.runs.export import FORMATS, Portable, file_names, index, to_markdown

TARGETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet-s": (functools.partial(models.build, "lenet-s", 10, (3, 32, 32)), (3, 32, 32)),
    "lenet-m": (functools.partial(models.build, "lenet-m", 10, (3, 32, 32)), (3, 32, 32)),
    "lenet-l": (functools.partial(models.build, "lenet-l", 10, (1, 32, 32)), (1, 32, 32)),
    "omniglot": (functools.partial(models.build, "omniglot", 55, (1, 28, 28)), (1, 28, 28)),
    "mlp": (functools.partial(models.build, "mlp-32-16", 10, (8, 8)), (8, 8)),
    "tabular": (functools.partial(models.build, "tabular-32-16", 10, (7,)), (7,)),
    "linear": (functools.partial(models.build, "linear", 3, (7,)), (7,)),
}

RUN_ALONE = """
import sys
import numpy
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] != "pfedhn", "the model needs pfedhn"
sys.meta_path.insert(0, Refuse())
x = numpy.load("x.npy")
import onnxruntime
import torch
for number in "01":
    session = onnxruntime.InferenceSession(f"{number}.onnx", providers=["CPUExecutionProvider"])
    parts = [session.run(None, {"x": part})[0] for part in (x[:1], x[1:])]
    numpy.save(f"{number}.onnx.npy", numpy.concatenate(parts))
    model = torch.export.load(f"{number}.pt2").module()
    with torch.no_grad():
        parts = [model(torch.from_numpy(part)).numpy() for part in (x[:1], x[1:])]
    numpy.save(f"{number}.pt2.npy", numpy.concatenate(parts))
"""


def small_run(names: tuple[str, ...] = ("Berlin", "Lyon", "Rome/East")) -> pfedhn.Run:
    random = numpy.random.default_rng(0)
    clients = {name: (random.normal(size=(40, 8)).astype("float32"), numpy.arange(40) % 3) for name in names}
    federation = pfedhn.Federation.from_clients(clients, class_names=("ill", "well", "unsure"))
    network = functools.partial(pfedhn.MLP, 8, 6, 3)
    return pfedhn.train("pfedhn", federation, network, steps=6, progress=False, device="cpu")


@pytest.fixture(scope="module")
def run() -> pfedhn.Run:
    return small_run()


def test_safetensors_hold_the_weights_and_what_the_model_is(run: pfedhn.Run, tmp_path: Path) -> None:
    file = run.export("Berlin", tmp_path / "berlin.safetensors")
    weights = run.personal_weights("Berlin")
    with safe_open(file, "pt") as stored:
        card = json.loads(stored.metadata()["card"])
        assert set(stored.keys()) == set(weights)
        for name in stored.keys():  # noqa: SIM118 - it is no dictionary
            torch.testing.assert_close(stored.get_tensor(name), weights[name].cpu(), rtol=0, atol=0)
    assert card == run.card("Berlin")
    assert card["client"] == "Berlin"
    assert card["test"]["accuracy"] == run.accuracy[0]
    text = (tmp_path / "berlin.md").read_text()
    assert f"Test accuracy: {100 * run.accuracy[0]:.1f} %, on 6 examples" in text
    assert "3 classes: ill, well, unsure" in text
    assert "[batch, 8], float32" in text


def test_all_clients_get_a_file_and_a_line(run: pfedhn.Run, tmp_path: Path) -> None:
    files = run.export_all(tmp_path / "models", ".safetensors")
    assert [file.name for file in files.values()] == ["Berlin.safetensors", "Lyon.safetensors", "Rome_East.safetensors"]
    page = (tmp_path / "models" / "README.md").read_text()
    assert f"| [Lyon.safetensors](Lyon.safetensors) | Lyon | {100 * run.accuracy[1]:.1f} % |" in page


def test_names_of_files_differ_and_stay_in_their_folder() -> None:
    assert file_names(["a/b", "a b", "A_B", "..", "", "é"]) == ["a_b", "a_b_2", "A_B_3", "client", "client_2", "é"]


@pytest.mark.slow
def test_a_client_that_joins_is_called_by_its_name(run: pfedhn.Run, tmp_path: Path) -> None:
    random = numpy.random.default_rng(1)
    x, y = random.normal(size=(40, 8)).astype("float32"), numpy.arange(40) % 3
    run = small_run()
    with pytest.raises(UserError, match="there is no client 'Oslo'"):
        run.personal_model("Oslo")
    new = run.add_client(x, y, rounds=2, name="Oslo")
    inputs = torch.from_numpy(x)
    torch.testing.assert_close(run.personal_model("Oslo")(inputs), new.model(inputs), rtol=0, atol=0)
    run.export("Oslo", tmp_path / "oslo.safetensors")
    assert f"Test accuracy: {100 * new.accuracy:.1f} %" in (tmp_path / "oslo.md").read_text()


def test_what_is_no_format_is_refused(run: pfedhn.Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.onx names no format of models; did you mean '\.onnx'"):
        run.export("Berlin", tmp_path / "model.onx")


def test_a_card_with_marks_of_markdown_stays_a_table(run: pfedhn.Run) -> None:
    card = {**run.card("Berlin"), "client": "a|b\n<script>"}
    assert "# The model of client a\\|b &lt;script>" in to_markdown(card)
    assert "| a\\|b &lt;script> |" in index({"a.onnx": card})


class Turning(nn.Module):
    """What it computes depends on the numbers that go in."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x) if x.sum() > 0 else self.map(-x)


@pytest.mark.slow
def test_a_network_that_cannot_be_traced_is_refused() -> None:
    module = Turning()
    with pytest.raises(UserError, match=r"cannot be traced.* take \.safetensors"):
        Portable(module, (8,), torch.float32).content(module, ".pt2", {})


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_gives_the_same_outputs_without_this_package(target: str, tmp_path: Path) -> None:
    """Two models of one trace: each has its own weights. Batches of one and of four."""
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    factory, shape = TARGETS[target]
    x = torch.randn(5, *shape)
    numpy.save(tmp_path / "x.npy", x.numpy())
    portable = Portable(factory().eval(), shape, torch.float32)
    trained = [factory().eval() for _ in range(2)]
    for number, model in enumerate(trained):
        for name, value in model.named_buffers():
            if name.endswith("running_var"):
                value[number] = 0.0  # a column that is the same in all of a client's rows
        for ending in (".onnx", ".pt2"):
            (tmp_path / f"{number}{ending}").write_bytes(portable.content(model, ending, {"client": target}))
    subprocess.run([sys.executable, "-W", "ignore", "-c", RUN_ALONE], check=True, cwd=tmp_path)
    for number, model in enumerate(trained):
        with torch.no_grad():
            wanted = model(x).numpy()
        for ending in (".onnx", ".pt2"):
            outputs = numpy.load(tmp_path / f"{number}{ending}.npy")
            numpy.testing.assert_allclose(outputs, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_personal_models_are_exported_as_they_are(run: pfedhn.Run, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    files = run.export_all(tmp_path / "models")
    x = torch.randn(3, 8)
    for client, file in files.items():
        session = onnxruntime.InferenceSession(file)
        (axis, _) = session.get_inputs()[0].shape
        assert axis == "batch"
        assert json.loads(session.get_modelmeta().custom_metadata_map["card"])["client"] == client
        with torch.no_grad():
            wanted = run.personal_model(client)(x).numpy()
        numpy.testing.assert_allclose(session.run(["outputs"], {"x": x.numpy()})[0], wanted, rtol=1e-5, atol=1e-5)


def test_every_format_is_tested() -> None:
    assert set(FORMATS) == {".safetensors", ".onnx", ".pt2"}
