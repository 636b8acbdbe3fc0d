"""A ResNet that a run trained becomes the frozen base of adapters."""

import shutil
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

import pfedhn
from pfedhn.data.partition import Labels, by_classes
from pfedhn.errors import UserError
from pfedhn.experiments.adapters import adapted
from pfedhn.experiments.build import check
from pfedhn.models import resnet
from pfedhn.paper.experiments import EXPERIMENTS


def images(num_rows: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    draw = numpy.random.default_rng(0)
    return draw.normal(size=(num_rows, 3, 8, 8)).astype("float32"), numpy.arange(num_rows) % 4


def trained_backbone(folder: Path, x: numpy.ndarray, y: numpy.ndarray, seed: int = 0) -> pfedhn.Run:
    return pfedhn.train(
        pfedhn.Local(local_steps=2),
        pfedhn.Federation.from_clients([(x, y)]),
        partial(resnet, 4, [3, 8, 8], width=2, stem_stride=2),
        steps=1,
        batch_size=8,
        seed=seed,
        progress=False,
        device="cpu",
        executor="loop",
        directory=folder,
    )


@pytest.mark.slow
def test_a_backbone_is_frozen_and_its_adapters_start_at_nothing(tmp_path: Path) -> None:
    x, y = images(32)
    folder = tmp_path / "backbone"
    run = trained_backbone(folder, x, y)
    base, network = run.personal_model(0), adapted(4, str(folder), rank=2).eval()
    base.fc.load_state_dict(network.fc.state_dict())
    assert torch.allclose(network(torch.from_numpy(x)), base(torch.from_numpy(x)), atol=1e-6)
    trained = [name for name, value in network.named_parameters() if value.requires_grad]
    assert {name.rpartition(".")[2] for name in trained if not name.startswith("fc.")} == {"left", "right"}
    assert trained[-2:] == ["fc.weight", "fc.bias"]
    federation = pfedhn.Federation.from_clients([(x, y), (x + 1, y)])
    factory = partial(adapted, 4, str(folder), rank=2)
    method = pfedhn.ALGORITHMS["pfedhn"](head="low-rank", local_steps=2, hidden_dim=4)
    adapters = pfedhn.train(method, federation, factory, steps=2, batch_size=8, progress=False, executor="loop")
    mine = adapters.personal_model(1)
    assert torch.equal(mine.layer1[0].conv1.base.weight, base.layer1[0].conv1.weight)
    shutil.rmtree(folder)
    trained_backbone(folder, x, y, seed=1)
    again = adapted(4, str(folder), rank=2)
    assert not torch.equal(again.layer1[0].conv1.base.weight, base.layer1[0].conv1.weight), "not one kept in memory"
    with pytest.raises(UserError, match="holds no backbone; `pfedhn run backbone-cifar100` trains one"):
        adapted(4, str(tmp_path / "nowhere"))


def test_clients_may_have_some_of_the_classes_only() -> None:
    labels = Labels(numpy.arange(1_000) % 10)
    for rule, expected in (
        (by_classes(2, 5, first_class=5), range(5, 10)),
        (by_classes(5, 1, last_class=4), range(5)),
        (by_classes(1, 4, first_class=2, last_class=3), (2, 3)),
    ):
        assignment = rule.assign({"train": labels}, key=0)
        held = numpy.concatenate(assignment.clients["train"])
        assert sorted(set(labels.y[held])) == list(expected)
        assert sorted([*held, *assignment.unused["train"]]) == list(range(1_000))
    with pytest.raises(UserError, match="6 classes per client were asked for, but the labels have 5"):
        by_classes(6, 5, first_class=5).assign({"train": labels}, key=0)


@pytest.mark.parametrize("name", ["resnet-cifar100", "backbone-cifar100", "adapters-cifar100"])
def test_the_experiments_fit(name: str) -> None:
    check(EXPERIMENTS[name])
