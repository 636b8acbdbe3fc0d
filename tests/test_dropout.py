"""Dropout layers that draw by key."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pfedhn
from pfedhn import keys
from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation
from pfedhn.dropout import KINDS, drawing, keyed
from pfedhn.engine.network import build_model, draws_freely
from pfedhn.sgd import Batches, clipped_sum, scan

KEY = torch.tensor(7)


def made(layer: nn.Module) -> nn.Module:
    network = nn.Sequential(layer).train()
    keyed(network)
    return network


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_layer_drops_its_share_and_scales_the_rest(rate: float) -> None:
    with drawing(KEY):
        found = made(nn.Dropout(rate))(torch.ones(200, 500))
    assert float((found == 0).float().mean()) == pytest.approx(rate, abs=0.01)
    assert torch.allclose(found[found != 0], torch.tensor(1 / (1 - rate)))


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout1d, (9, 40, 5)), (nn.Dropout2d, (9, 40, 3, 5))])
def test_whole_channels_are_dropped(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    with drawing(KEY):
        found = made(layer(0.5))(torch.ones(shape)).flatten(2)
    assert ((found == 0).all(2) | (found == 2).all(2)).all()
    assert 0.4 < float((found[..., 0] == 0).float().mean()) < 0.6


@pytest.mark.filterwarnings("ignore:dropout")
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("ndim", [2, 3, 4, 5])
def test_what_goes_together_is_as_in_pytorch(kind: type[nn.Dropout], ndim: int) -> None:
    ones = torch.ones([12, 11, 5, 4, 3][:ndim])

    with drawing(KEY):
        ours = made(kind(0.5))(ones)
    try:
        theirs = kind(0.5).train()(ones)
    except RuntimeError:
        return  # PyTorch refuses this one
    assert alike(ours) == alike(theirs)


def alike(found: Tensor) -> int:
    """The first dimensions that tell numbers apart."""
    for first in range(found.ndim):
        rest = found.flatten(first)
        if bool((rest == rest[..., :1]).all()):
            return first
    return found.ndim


def test_draws_are_those_of_the_key_alone() -> None:
    network = made(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)))
    found = []
    for key, seed in ((7, 0), (7, 1), (8, 0)):
        torch.manual_seed(seed)
        with drawing(torch.tensor(key)):
            found.append((network(torch.ones(4, 6)), network(torch.ones(4, 6))))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1]), "a second pass draws anew"
    assert not torch.equal(found[0][0], found[2][0])


def test_clients_that_are_mapped_draw_as_one_by_one() -> None:
    network = made(nn.Dropout(0.5))

    def drop(key: Tensor) -> Tensor:
        with drawing(key):
            return network(torch.ones(3, 8))

    all_keys = torch.tensor([3, 4, 5])
    assert torch.equal(torch.vmap(drop)(all_keys), torch.stack([drop(key) for key in all_keys]))


def test_evaluation_drops_nothing() -> None:
    with drawing(KEY):
        assert torch.equal(made(nn.Dropout(0.9)).eval()(torch.ones(5)), torch.ones(5))


def test_steps_and_scans_draw_anew() -> None:
    network, seen = made(nn.Dropout(0.5)), []

    def step(carry: Tensor, batch: Tensor, constants: object) -> Tensor:
        seen.append(tuple(network(torch.ones(40)).tolist()))
        return carry

    with drawing(KEY):
        for _ in range(2):
            scan(step, torch.zeros(()), torch.zeros(3))
    assert len(set(seen)) == 6


def test_private_steps_draw_for_every_example() -> None:
    network = made(nn.Dropout(0.5))
    start = torch.zeros(30)

    def loss(weights: dict[str, Tensor], batch: Batches) -> Tensor:
        return (network(weights["w"]) * batch.x).sum()

    for number in (1, 2):
        batch = Batches(torch.ones(number, 1), torch.zeros(number), torch.ones(number, dtype=torch.bool))
        with drawing(KEY):
            total = clipped_sum(loss, lambda vector: {"w": vector}, 1e9)(start, batch)
        kinds = set(total.tolist())
        assert kinds == {0.0, 2.0} if number == 1 else kinds == {0.0, 2.0, 4.0}, "two examples share no mask"


class Handed(nn.Module):
    """Drops by a rate that its layer hands on, as attention often does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.dropout(x, self.layer.p, self.training))


class Hidden(nn.Module):
    """Drops by a rate that nobody can see."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.dropout(x, 0.5, self.training))


class Own(nn.Dropout):
    pass


def test_what_draws_freely_is_known_or_refused() -> None:
    rows = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(2)]
    clients = [{"train": part, "validation": part, "test": part} for part in rows]
    federation = Federation.from_clients(clients)
    known: dict[str, Callable[[], nn.Module]] = {
        "layers": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)),
        "handed": Handed,
        "own": lambda: nn.Sequential(Own(0.5), nn.Linear(3, 2)),
        "alpha": lambda: nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(3, 2)),
        "in place": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5, inplace=True), nn.Linear(3, 2)),
    }
    free = {name for name, make in known.items() if draws_freely(build_model(name, make, federation), federation)}
    assert free == {"handed", "own", "alpha", "in place"}
    with pytest.raises(pfedhn.UserError, match="outside of a dropout layer"):
        build_model("hidden", Hidden, federation)


def test_keys_of_layers_are_not_those_of_anything_else() -> None:
    """A count is folded in as a number, what else is drawn from the key by a name."""
    assert int(keys.fold(KEY, 1)) != int(keys.fold(KEY, "step"))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("per-fedavg", {"personal_steps": 10, "personal_lr": 0.3}), ("fedavg", {"adaptation_steps": 20, "local_lr": 0.3})],
)
def test_an_exported_model_is_the_one_that_was_scored(method: str, settings: dict[str, float]) -> None:
    """It is personalized again for whoever asks, and must draw what it drew when it was tested."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(2):
        x = torch.randn(60, 6, generator=generator)
        clients.append(dict.fromkeys(("train", "validation", "test"), (x, (x[:, 0] > 0).long())))
    algorithm = ALGORITHMS[method](local_steps=2, **settings)
    network = lambda: nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))  # noqa: E731
    run = pfedhn.train(algorithm, Federation.from_clients(clients), network, steps=4, progress=False)
    losses = []
    for client, splits in enumerate(clients):
        x, y = splits["test"]
        with torch.no_grad():
            losses.append(float(functional.cross_entropy(run.personal_model(client).eval()(x), y)))
    assert sum(losses) / len(losses) == pytest.approx(run.result.test.loss, rel=1e-4)
