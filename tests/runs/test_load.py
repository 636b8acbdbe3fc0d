"""A run is loaded from its directory alone: in another process, without data, to the bit."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import SMALL, assert_same_bits, resealed, resealed_json, run_many
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

import pfedhn
from pfedhn import models
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.engine.transform import Transform, find_transform
from pfedhn.errors import RunError, UserError
from pfedhn.experiments.directory import Directory, Options
from pfedhn.report.entries import collect
from pfedhn.report.figures import figures_of
from pfedhn.report.results import export
from pfedhn.report.tables import details, to_markdown
from pfedhn.storage import directory as run_directory
from pfedhn.storage import identity as storage_identity
from pfedhn.storage.checkpoint import CheckpointError, checkpoints

MODULE = '''
from dataclasses import dataclass

import torch
from pfedhn.algorithms.fedavg import FedAvg
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, classes))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self.body(x * self.scale)


class One(Net):
    def __init__(self):
        super().__init__(5, 1)


def deep():
    return Net(7)


@dataclass(frozen=True)
class Slower(FedAvg):
    """A method of one's own."""

    factor: float = 0.5

    def receive(self, shared, groups):
        new, rows = super().receive(shared, groups)
        return {name: shared[name] + self.factor * (new[name] - shared[name]) for name in shared}, rows


def absolute_error(outputs, y):
    return (outputs.squeeze(-1) - y).abs()
'''

TRAIN = """
import functools, sys
import numpy, torch, pfedhn
from safetensors.torch import save_file
import mynet

torch.set_num_threads(1)
generator = numpy.random.default_rng(0)
x, y = generator.normal(size=(240, 8)), numpy.arange(240) % 4
plain = pfedhn.Federation.from_arrays(x, y, pfedhn.by_classes(2, num_clients=6))
parts = [(x[i::6], y[i::6].astype(numpy.float32)) for i in range(6)]
small = functools.partial(mynet.Net, 5)
both = plain.with_architectures(["small", "deep"] * 3)
cases = {
    "class": (pfedhn.PFedHN(local_steps=3), plain, small, {}),
    "pc": ("pfedhn-pc", plain, mynet.deep, {}),
    "local": (pfedhn.Local(local_steps=3), plain, functools.partial(mynet.Net, hidden=3), {}),
    "own-method": (mynet.Slower(local_steps=3, factor=0.25), plain, small, {}),
    "adapting": (pfedhn.PerFedAvg(local_steps=3), plain, small, {}),
    "several": (pfedhn.PFedHN(local_steps=3), both, {"small": small, "deep": mynet.deep}, {}),
    "fixed": (pfedhn.ALGORITHMS["pfedhn"](embedding="fixed", local_steps=3), plain, small, {}),
    "regression": (
        pfedhn.FedPer(local_steps=3), pfedhn.Federation.from_clients(parts), mynet.One, {"loss": mynet.absolute_error}
    ),
}
tensors = {}
for name, (method, federation, model, more) in cases.items():
    run = pfedhn.train(
        method, federation, model, steps=12, evaluate_every=4, progress=False, directory=name, device="cpu", **more
    )
    for client in range(6):
        for part, value in run.personal_weights(client).items():
            tensors[f"{name}/{client}/{part}"] = value.clone()
        for part, value in run.personal_model(client, last=True).state_dict().items():
            tensors[f"{name}/{client}/last/{part}"] = value.clone()
        own = federation.examples(federation.splits["train"].of(client))
        for split, part in zip("xy", own):
            tensors[f"{name}/{client}/data/{split}"] = part.clone()
    new = run.add_client(x[:60], (y if name != "regression" else y.astype(numpy.float32))[:60], rounds=3)
    for part, value in new.weights.items():
        tensors[f"{name}/new/{part}"] = value.clone()
    tensors[f"{name}/accuracy"] = torch.from_numpy(run.accuracy).clone()
    tensors[f"{name}/losses"] = torch.tensor([moment.test.loss for moment in run.history], dtype=torch.float64)
save_file(tensors, "trained.safetensors")
"""

LOAD = """
import sys
import numpy, torch, pfedhn
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
assert "mynet" not in sys.modules
trained = load_file("trained.safetensors")
generator = numpy.random.default_rng(0)
x, y = generator.normal(size=(240, 8)), numpy.arange(240) % 4
tensors = {}
for name in ("class", "pc", "local", "own-method", "adapting", "several", "fixed", "regression"):
    run = pfedhn.load(name, device="cpu")
    for client in range(6):
        data = [trained[f"{name}/{client}/data/{part}"] for part in "xy"] if name == "adapting" else None
        for part, value in run.personal_weights(client, data=data).items():
            tensors[f"{name}/{client}/{part}"] = value.clone()
        for part, value in run.personal_model(client, last=True, data=data).state_dict().items():
            tensors[f"{name}/{client}/last/{part}"] = value.clone()
    new = run.add_client(x[:60], (y if name != "regression" else y.astype(numpy.float32))[:60], rounds=3)
    for part, value in new.weights.items():
        tensors[f"{name}/new/{part}"] = value.clone()
    tensors[f"{name}/accuracy"] = torch.from_numpy(run.accuracy).clone()
    tensors[f"{name}/losses"] = torch.tensor([moment.test.loss for moment in run.history], dtype=torch.float64)
save_file(tensors, "loaded.safetensors")
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by one process, loaded by another, both gone."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "mynet.py").write_text(MODULE)
    for program in (TRAIN, LOAD):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", ["class", "pc", "local", "own-method", "adapting", "several", "fixed", "regression"])
def test_another_process_gets_the_same_bits(elsewhere: Path, case: str) -> None:
    trained, loaded = (load_file(elsewhere / f"{name}.safetensors") for name in ("trained", "loaded"))
    wanted = {name: value for name, value in trained.items() if name.startswith(f"{case}/") and "/data/" not in name}
    assert {name.split("/")[1] for name in wanted} >= {"0", "5", "new", "accuracy", "losses"}
    assert_same_bits({name: loaded[name] for name in wanted}, wanted)


# In one process


def made_federation() -> pfedhn.Federation:
    generator = numpy.random.default_rng(0)
    x, y = generator.normal(size=(240, 8)), numpy.arange(240) % 4
    return pfedhn.Federation.from_arrays(x, y, pfedhn.by_classes(2, num_clients=6))


MLP = functools.partial(pfedhn.MLP, 8, 5, 4)


FEW_STEPS = pfedhn.PFedHN(local_steps=2)


def train(directory: Path, method: Any = FEW_STEPS, model: Any = MLP, **settings: Any) -> pfedhn.Run:
    settings = {"steps": 8, "evaluate_every": 4, "progress": False, **settings}
    return pfedhn.train(method, made_federation(), model, directory=directory, **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[pfedhn.Run, Path]:
    path = tmp_path_factory.mktemp("runs") / "mine"
    return train(path), path


@pytest.fixture
def copied(trained: tuple[pfedhn.Run, Path], tmp_path: Path) -> Path:
    """The directory of that run, to be spoiled."""
    return shutil.copytree(trained[1], tmp_path / "copy")


def test_what_a_loaded_run_knows(trained: tuple[pfedhn.Run, Path]) -> None:
    run, path = trained
    loaded = pfedhn.load(path)
    assert loaded.history == run.history
    assert loaded.result == run.result
    assert loaded.chosen.step == run.chosen.step
    assert (loaded.accuracy == run.accuracy).all()
    assert loaded.plan.algorithm == run.simulation.algorithm
    assert loaded.plan.schedule == run.simulation.schedule


def test_a_loaded_run_says_that_it_has_no_examples(trained: tuple[pfedhn.Run, Path]) -> None:
    loaded = pfedhn.load(trained[1])
    assert loaded.plan.num_clients == 6
    with pytest.raises(UserError, match="does not have its clients' examples"):
        _ = loaded.simulation


def test_loading_draws_no_hypernetwork(trained: tuple[pfedhn.Run, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    method, made = type(trained[0].plan.algorithm), []
    init_shared = method.init_shared

    def watched(*given: Any) -> Any:
        made.append(init_shared(*given))
        return made[-1]

    monkeypatch.setattr(method, "init_shared", watched)
    pfedhn.load(trained[1])
    (shared,) = made
    assert all(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(shared))


def test_a_method_that_adapts_asks_for_the_clients_examples(tmp_path: Path) -> None:
    run = train(tmp_path, pfedhn.PerFedAvg(local_steps=2))
    loaded = pfedhn.load(tmp_path)
    with pytest.raises(UserError, match=r"personal_model\(client, data=\(x, y\)\)"):
        loaded.personal_model(0)
    federation = run.simulation.federation
    own = federation.examples(federation.splits["train"].of(2))
    assert_same_bits(loaded.personal_model(2, data=own).state_dict(), run.personal_model(2).state_dict())
    with pytest.raises(UserError, match=r"have the shape \(3,\); this run's have \(8,\)"):
        loaded.personal_model(2, data=(numpy.zeros((4, 3)), numpy.zeros(4, dtype=int)))


def test_a_lambda_needs_the_network(tmp_path: Path) -> None:
    run = train(tmp_path, model=lambda: pfedhn.MLP(8, 5, 4))
    with pytest.raises(
        UserError, match=r"network 'mlp-5' .* is a lambda, .*; give what makes it as load\(\.\.\., model=\.\.\.\)"
    ):
        pfedhn.load(tmp_path)
    for model in (MLP, {"mlp-5": MLP}):
        loaded = pfedhn.load(tmp_path, model=model)  # type: ignore[arg-type]
        assert_same_bits(loaded.personal_weights(3), run.personal_weights(3))
    with pytest.raises(UserError, match="has other weights than the one"):
        pfedhn.load(tmp_path, model=functools.partial(pfedhn.MLP, 8, 6, 4))


class Half(FedAvg):
    """A method of one's own."""


def test_what_a_directory_cannot_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return models.cross_entropy(outputs, y) / 2

    method = Half
    run = train(tmp_path, method(local_steps=2), loss=loss)
    monkeypatch.delattr(sys.modules[__name__], "Half")  # as if the module were another one by now
    with pytest.raises(
        UserError, match=r"the method cannot be made .* give its class as load\(\.\.\., method=\.\.\.\)"
    ):
        pfedhn.load(tmp_path)
    loaded = pfedhn.load(tmp_path, method=method)
    assert loaded.plan.algorithm == run.simulation.algorithm
    assert_same_bits(loaded.personal_weights(1), run.personal_weights(1))  # which needs no loss
    federation = run.simulation.federation
    with pytest.raises(UserError, match=r"the loss .* defined inside a function, .* load\(\.\.\., loss=\.\.\.\)"):
        loaded.add_client(federation.x[:40], federation.y[:40], rounds=1)
    loaded = pfedhn.load(tmp_path, method=method, loss=loss)
    expected = run.add_client(federation.x[:40], federation.y[:40], rounds=1)
    assert_same_bits(loaded.add_client(federation.x[:40], federation.y[:40], rounds=1).weights, expected.weights)


@dataclass(frozen=True)
class Bold(pfedhn.PFedHN):
    """pFedHN with one more setting."""

    boldness: float = 1.0


def test_a_method_that_extends_pfedhn_is_loaded_with_its_own_settings(tmp_path: Path) -> None:
    run = train(tmp_path, pfedhn.averaged(Bold(local_steps=2, boldness=2.0), 0.9))
    assert pfedhn.load(tmp_path).plan.algorithm == run.simulation.algorithm


@dataclass(frozen=True)
class Rounded(Transform):
    """A transform of one's own."""

    digits: int = 2

    def encode(self, values: Any, key: Any, state: Any) -> Any:
        return {name: value.round(decimals=self.digits) for name, value in values.items()}, state


@pytest.mark.parametrize("upload", ["8-bit", Rounded(3)])
def test_what_is_done_to_updates_is_kept(tmp_path: Path, upload: Any) -> None:
    run = train(tmp_path, upload=upload)
    loaded = pfedhn.load(tmp_path)
    assert loaded.plan.upload == run.simulation.upload == find_transform(upload)
    assert loaded.plan.download == find_transform("full")
    assert_same_bits(loaded.personal_weights(1), run.personal_weights(1))
    with pytest.raises(UserError, match=r"holds another run: upload is '.*' there and 'full' here"):
        train(tmp_path)


def test_clients_are_known_by_their_names(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(0)
    clients = {name: (generator.normal(size=(40, 8)), numpy.arange(40) % 4) for name in ("Berlin", "Lyon", "Metz")}
    federation = pfedhn.Federation.from_clients(clients, class_names=["a", "b", "c", "d"])
    run = pfedhn.train(pfedhn.PerFedAvg(local_steps=2), federation, MLP, steps=6, progress=False, directory=tmp_path)
    loaded = pfedhn.load(tmp_path)
    known = loaded.plan.clients
    assert (known.client_names, known.class_names) == (("Berlin", "Lyon", "Metz"), ("a", "b", "c", "d"))
    own = federation.examples(federation.splits["train"].of(1))
    assert_same_bits(loaded.personal_weights("Lyon", data=own), run.personal_weights("Lyon"))
    with pytest.raises(UserError, match="there is no client 'Leon'; there are Berlin, Lyon, Metz"):
        loaded.personal_model("Leon")


# Experiments


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experiment")
    Directory(path).open(SMALL, SMALL.runs())
    assert not run_many(path, SMALL, SMALL.runs(), jobs=1, options=Options(threads=1)).failures
    return path


def test_a_run_of_an_experiment_is_chosen_by_a_beginning_that_no_other_has(experiment: Path, tmp_path: Path) -> None:
    for name in ("fedavg-digits-6-seed0", "fedavg-digits-6-seed1", "pfedhn-digits-6-seed1"):
        shutil.copytree(experiment / name, tmp_path / name)
    assert pfedhn.load(tmp_path, run="pf").origin.method == "pfedhn"
    with pytest.raises(
        UserError, match=r"'fed' begins the names of several runs in .*; say which: fedavg-digits-6-seed0, fedavg-.*1\."
    ):
        pfedhn.load(tmp_path, run="fed")


def test_a_run_of_an_experiment_is_chosen_by_its_name(experiment: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"holds several runs; say which by run=NAME \(in a command, --run NAME\); there are fedavg-digits-6",
    ):
        pfedhn.load(experiment)
    with pytest.raises(UserError, match=r"there is no run 'pfedhn-digits-6-seed3' in .*; did you mean"):
        pfedhn.load(experiment, run="pfedhn-digits-6-seed3")
    run = pfedhn.load(experiment, run="pfedhn-digits-6-seed1")
    assert run.plan.seed == 1
    assert run.personal_model(5)(torch.zeros(1, 64)).shape == (1, 10)
    again = pfedhn.load(experiment / "pfedhn-digits-6-seed1")
    assert_same_bits(run.personal_weights(2), again.personal_weights(2))
    spec = run_directory.read_spec(experiment / "pfedhn-digits-6-seed1")
    assert spec is not None
    assert spec.data.preprocessing == {"scale": 16.0, "mean": [0.0], "std": [1.0]}
    assert (spec.data.name, spec.data.shape, spec.data.classes) == ("digits", (64,), 10)


def test_models_of_equal_runs_are_equal(experiment: Path) -> None:
    """So that they share what was traced and compiled."""
    first, second = (pfedhn.load(experiment, run=f"pfedhn-digits-6-seed{seed}") for seed in (0, 1))
    assert models.factory("mlp-4", 10, (64,)) is models.factory("mlp-4", 10, (64,))
    assert first.plan.models["mlp-4"].shapes == second.plan.models["mlp-4"].shapes


def test_a_run_that_started_from_another_is_loaded_without_it(tmp_path: Path) -> None:
    both = replace(
        SMALL,
        cells=(SMALL.cells[0], replace(SMALL.cells[0], method="lg-fedavg", steps=5, pretrain="fedavg")),
        seeds=(0,),
    )
    assert not run_many(tmp_path, both, both.runs(), jobs=1, options=Options(threads=1)).failures
    first, second = both.runs()
    start = pfedhn.load(tmp_path, run=first.name).personal_weights(0, last=True)
    (tmp_path / first.name).rename(tmp_path.parent / "gone")
    loaded = pfedhn.load(tmp_path / second.name)
    assert_same_bits(loaded.plan.initial_models()["mlp-4"], start)
    file = tmp_path / second.name / "start.safetensors"
    tensors = load_file(file)
    for other in ({name: value + 1 for name, value in tensors.items()}, {"another": torch.zeros(1)}):
        save_file(other, file)
        with pytest.raises(RunError, match="is not what this run started from; bring that back, or run it again"):
            pfedhn.load(tmp_path / second.name)


# What is refused


def test_a_directory_that_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run; give the directory that"):
        pfedhn.load(tmp_path)
    with pytest.raises(UserError, match="holds no run"):
        pfedhn.load(tmp_path / "nowhere")


def test_a_damaged_checkpoint_is_passed_over_or_said(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    (only,) = checkpoints(copied)
    tensors = only.with_suffix(".safetensors")
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="is truncated or was changed"):
        pfedhn.load(copied)
    older = only.with_name("checkpoint-000000004")
    older.with_suffix(".safetensors").write_bytes(whole)
    older.with_suffix(".json").write_bytes(only.read_bytes())
    with pytest.raises(CheckpointError, match="is truncated or was changed"):  # another step than its name says
        pfedhn.load(copied)
    resealed_json(older.with_suffix(".json"), lambda record: record.update(step=4))
    pfedhn.load(copied)
    assert "was not used" in caplog.text


def test_a_run_that_has_not_got_far_enough(copied: Path) -> None:
    for file in copied.glob("checkpoint-*"):
        file.unlink()
    with pytest.raises(UserError, match="holds a result and no model"):
        pfedhn.load(copied)
    (copied / "result.json").unlink()
    with pytest.raises(UserError, match="holds no checkpoint yet; wait until"):
        pfedhn.load(copied)


def before_train(path: Path) -> None:
    (path / "spec.toml").unlink()
    (path / "run.json").write_text(json.dumps({"algorithm": "PFedHN()", "seed": 0}))


def before_experiments(path: Path) -> None:
    (path / "spec.toml").write_text('name = "pfedhn-digits-6-seed0"\nseed = 0\nthreads = 1\nmethod = "pfedhn"\n')


@pytest.mark.parametrize("made_by", [before_train, before_experiments])
def test_directories_of_the_version_before(copied: Path, made_by: Callable[[Path], None]) -> None:
    made_by(copied)
    for ask in (lambda: pfedhn.load(copied), lambda: train(copied)):
        with pytest.raises(UserError, match="was made by another version of pfedhn, which this one can neither load"):
            ask()


def test_a_damaged_spec(copied: Path) -> None:
    file = copied / "spec.toml"
    text = file.read_text()
    for damaged, reason in (
        (text[:-40], "was changed after it was written"),
        (text.replace("steps = ", "steps = 1"), "was changed after it was written"),
        (text.partition("\n")[2], "is damaged: its first line, which vouches for the others, is missing"),
        ("", "made by another version"),
    ):
        file.write_text(damaged)
        with pytest.raises(UserError, match=reason):
            pfedhn.load(copied)
    file.write_text(text)
    resealed(file, lambda text: text.replace("[schedule]", "[timetable]"))
    with pytest.raises(UserError, match=r"spec\.toml is damaged \('schedule' is missing"):
        pfedhn.load(copied)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("os:system", "is not code that a run can be made with"),
        ("subprocess:Popen", "is not code that a run can be made with"),
        ("torch.hub:load", "is not code that a run can be made with"),
        ("torch.serialization:load", "is not code that a run can be made with"),
        ("pfedhn.system.environment:subprocess.run", "is not code that a run can be made with"),
        ("pfedhn.models:LENET_SIZES", "is not code that a run can be made with"),
        ("pfedhn.models", "is not code that a run can be made with"),
        ("pfedhn.models:VGG", "pfedhn.models has nothing of that name"),
        ("nowhere.models:VGG", "cannot be imported here"),
        ("__main__:OfAScript", "__main__ has nothing of that name; give what makes it"),
        ("pfedhn.errors:UserError", "is no nn.Module"),
    ],
)
def test_only_code_that_makes_a_network_is_called(copied: Path, name: str, reason: str) -> None:
    file = copied / "spec.toml"
    assert '"pfedhn.models:MLP"' in file.read_text()
    resealed(file, lambda text: text.replace('"pfedhn.models:MLP"', f'"{name}"'))
    with pytest.raises(UserError, match=reason):
        pfedhn.load(copied)


# Going on, and reports


@pytest.mark.slow
def test_train_goes_on_and_refuses_another_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", steps=16)

    class Killed(BaseException):
        pass

    with pytest.MonkeyPatch.context() as patch:
        really = run_directory.RunDirectory.append

        def killed(directory: run_directory.RunDirectory, moment: Any) -> None:
            really(directory, moment)
            if moment.step >= 8:
                raise Killed

        patch.setattr(run_directory.RunDirectory, "append", killed)
        with pytest.raises(Killed):
            train(tmp_path / "stopped", steps=16, checkpoint_every=2)
    assert run_directory.read_result(tmp_path / "stopped") is None
    run = train(tmp_path / "stopped", steps=16)
    assert_same_bits(run.personal_weights(3), whole.personal_weights(3))
    assert [moment.test for moment in run.history] == [moment.test for moment in whole.history]
    written = (tmp_path / "whole" / "result.json").read_bytes()
    again = train(tmp_path / "whole", steps=16)
    assert again.result == whole.result
    assert (tmp_path / "whole" / "result.json").read_bytes() == written, "a finished run is only read"
    for difference, changes in (
        ("steps is 16 there and 17 here", {"steps": 17}),
        ("seed is 0 there and 1 here", {"seed": 1}),
        ("method is 'pfedhn' there and 'fedavg' here", {"method": "fedavg"}),
        ("the network has other weights", {"model": functools.partial(pfedhn.MLP, 8, 6, 4)}),
        ("the network computes otherwise", {"model": lambda: AbsoluteFirst(8, 5, 4)}),
        ("the loss is another", {"loss": lambda outputs, y: 2 * models.cross_entropy(outputs, y)}),
        ("the metric is another", {"metric": lambda outputs, y: models.is_correct(outputs, y) * 0.5}),
        ("executor is 'auto' there and 'loop' here", {"executor": "loop"}),
    ):
        with pytest.raises(UserError, match=f"holds another run: .*{difference}.*; give another directory, or what"):
            train(tmp_path / "whole", **{"steps": 16, **changes})


BASES = {"scale": 1.0, "shift": 0.0}


class OnABase(pfedhn.MLP):
    """A network with a frozen parameter and a buffer, which come from elsewhere."""

    def __init__(self) -> None:
        super().__init__(8, 5, 4)
        self.scale = torch.nn.Parameter(torch.full((8,), BASES["scale"]), requires_grad=False)
        self.register_buffer("shift", torch.full((8,), BASES["shift"]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale + self.shift)


def without_frozen(path: Path) -> None:
    """As an older version wrote it, which did not keep a name for what is frozen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_identity, "constants_digest", lambda models: None)
        train(path, model=OnABase)


@pytest.mark.parametrize("part", ["scale", "shift"])
@pytest.mark.slow
def test_a_run_is_not_loaded_on_another_frozen_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    train(tmp_path / "run", model=OnABase)
    without_frozen(tmp_path / "older")
    for name in ("run", "older"):
        pfedhn.load(tmp_path / name, model=OnABase)
        train(tmp_path / name, model=OnABase)
    monkeypatch.setitem(BASES, part, 2.0)
    sentence = "was trained on other frozen weights than the network has now .* bring back those it was trained on"
    with pytest.raises(UserError, match=sentence):
        pfedhn.load(tmp_path / "run", model=OnABase)
    with pytest.raises(UserError, match=sentence):
        train(tmp_path / "run", model=OnABase)
    pfedhn.load(tmp_path / "older", model=OnABase)


class AbsoluteFirst(pfedhn.MLP):
    """The same weights, another network."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.abs())


def test_train_keeps_a_second_process_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "SECONDS_FOR_A_LOCK", 0.0)
    with run_directory.held(tmp_path), pytest.raises(UserError, match="is being run by another process"):
        train(tmp_path)


def test_a_report_of_one_run_whoever_made_it(
    trained: tuple[pfedhn.Run, Path], experiment: Path, tmp_path: Path
) -> None:
    run, path = trained
    (report,) = collect([path])
    (entry,) = report.entries
    assert run.result is not None
    assert report.title == "mine"
    assert (entry.label, entry.column) == ("pfedhn", ("own-data", 6))
    assert details(report)[1][1] == f"{100 * (run.result.test.client_mean or 0):.2f}"
    assert list(figures_of([report])) == ["curves-own-data-6", "clients-own-data-6"]
    (report,) = collect([experiment / "fedavg-digits-6-seed1"])
    assert [entry.column for entry in report.entries] == [("digits", 6)]
    assert list(report.entries[0].results) == [1]
    file = tmp_path / "mine.jsonl"
    assert export([path, experiment / "fedavg-digits-6-seed1"], file) == (2, 0, 2)
    assert "own-data, 6 clients" in to_markdown(collect([file]))


def test_a_report_of_a_method_of_ones_own(tmp_path: Path) -> None:
    train(tmp_path / "mine", Half(local_steps=2), model=lambda: pfedhn.MLP(8, 5, 4))
    (report,) = collect([tmp_path / "mine"])
    assert report.labels == ["Half"]
    assert figures_of([report])
