"""Images as bytes: the same bits in a quarter of the memory, or not at all."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import assert_same_bits, finish, make_federation, memories_of, simulate
from torch import Tensor

from pfedhn import Federation, by_classes
from pfedhn.algorithms import ALGORITHMS
from pfedhn.data import palette
from pfedhn.data.partition import dirichlet
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.storage.identity import clients_digest, data_digest
from pfedhn.system import fingerprint


def pixels(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    codes = torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))
    mean, std = (torch.linspace(*ends, shape[1]).view(-1, 1, 1) for ends in ((0.4, 0.5), (0.2, 0.3)))
    return ((codes / 255 - mean) / std).to(dtype)


def bits(values: Tensor) -> Tensor:
    return values.flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(9, 3, 5, 4), (9, 1, 5, 4), (1, 2, 1, 1)])
def test_every_bit_is_the_same(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = pixels(*shape, dtype=dtype)
    monkeypatch.setattr(palette, "BYTES_AT_ONCE", 4 * x[:1].nbytes)  # a value may come first in any part
    found = palette.compact(x, "cpu")
    assert found is not None
    codes, values = found
    assert codes.dtype == torch.uint8
    assert codes.is_contiguous(memory_format=torch.channels_last)
    assert values.shape == (shape[1], 256)
    decoded = palette.decode(codes.permute(0, 2, 3, 1), values).permute(0, 3, 1, 2)
    assert torch.equal(bits(decoded), bits(x))


def with_one_more_value(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1, -1, -1, -1] = 7.0
    return x


def with_two_zeros(x: Tensor) -> Tensor:
    x = torch.zeros_like(x)
    x[1] = -0.0
    return x


@pytest.mark.parametrize(
    "change",
    [
        with_one_more_value,
        with_two_zeros,
        lambda x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0)),
        lambda x: torch.full_like(x, torch.nan),
        lambda x: x[0],
        lambda x: x[:0],
        lambda x: (100 * x).long(),
    ],
)
def test_what_bytes_cannot_say_stays_as_it_is(
    change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = pixels(200, 2, 4, 4)
    monkeypatch.setattr(palette, "BYTES_AT_ONCE", 50 * x[:1].nbytes)
    assert all(len(channel.unique()) == 256 for channel in x.unbind(1))
    assert palette.compact(x, "cpu") is not None
    assert palette.compact(change(x), "cpu") is None


@pytest.fixture
def with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps images as a GPU does."""
    monkeypatch.setattr(palette, "WITH_BYTES", ("cpu",))


def ended(simulation: Simulation) -> State:
    if simulation.executor != "captured":
        return finish(simulation)
    state = simulation.initial_state()
    list(CapturedRun(simulation, state).rounds())  # not `rounds`, which would run otherwise what cannot be captured
    return state


@pytest.mark.parametrize("executor", ["loop", "traced", "vectorized", "captured"])
@pytest.mark.parametrize(
    "method", [pytest.param("pfedhn", marks=pytest.mark.slow), "fedper", pytest.param("local", marks=pytest.mark.slow)]
)
def test_a_run_is_the_same_to_the_bit(method: str, executor: str, with_bytes: None) -> None:
    federation = make_federation()
    compacted = federation.to("cpu")
    assert compacted.x.dtype == torch.uint8
    assert compacted.dtype == federation.dtype == torch.float64
    plain = replace(federation, x=palette.in_fast_order(federation.x))
    runs = [
        ended(simulate(ALGORITHMS[method](local_steps=3), one, "conv", cohort=2, evaluate_every=4, executor=executor))
        for one in (plain, compacted)
    ]
    assert_same_bits(*map(memories_of, runs))


def test_a_federation_keeps_its_names(with_bytes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was begun on one device is found to be of the same data on another."""
    federation = make_federation()
    compacted = federation.to("cpu")
    fingerprint.remember(compacted.x)
    assert compacted.to("cpu").x is compacted.x
    assert data_digest(compacted) == data_digest(federation)
    assert clients_digest(compacted) == clients_digest(federation)
    assert torch.equal(bits(compacted.first(5)), bits(federation.x[:5]))
    assert data_digest(replace(compacted, palette=-compacted.palette)) != data_digest(federation)
    monkeypatch.setattr(palette, "WITH_BYTES", ())
    assert federation.to("cpu").palette is None
    assert data_digest(compacted.to("cpu", torch.float32)) == data_digest(federation.to("cpu", torch.float32))
    numbers = torch.tensor([[3, 1], [4, 4]])
    for one, other in zip(compacted.examples(numbers), federation.examples(numbers), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_clients_that_join_later_have_the_same_bytes(with_bytes: None) -> None:
    x, y = pixels(300, 3, 4, 4), torch.arange(300) % 5
    rule = dirichlet(1.0, num_clients=6, novel_clients=2)
    federation = Federation.from_arrays(x, y, rule, seed=1)
    compacted = federation.to("cpu")
    assert federation.joining is not None
    assert compacted.joining is not None
    assert compacted.joining.x is compacted.x
    numbers = federation.joining.splits["train"].of(0)
    assert torch.equal(compacted.joining.examples(numbers)[0], federation.joining.examples(numbers)[0])
    assert compacted.to("cpu", torch.float64).examples(numbers)[0].dtype == torch.float64


def test_values_in_the_place_of_bytes_are_not_decoded(with_bytes: None) -> None:
    federation = make_federation()
    compacted, values = federation.to("cpu"), torch.rand_like(federation.x)
    assert compacted.palette is not None
    numbers = torch.arange(3)
    assert torch.equal(replace(compacted, x=values).examples(numbers)[0], values[:3])
    other = replace(compacted, x=compacted.x.contiguous())  # whatever their order in memory
    assert torch.equal(other.examples(numbers)[0], federation.examples(numbers)[0])


def test_data_that_are_loaded_when_needed_are_not_bytes(with_bytes: None) -> None:
    x, y = pixels(8, 1, 2, 2), torch.arange(8) % 2
    lazy = Federation.lazy(3, lambda client: {"train": (x + client, y)}, train=8)
    assert lazy.to("cpu").palette is None


def test_images_that_have_other_values_stay_as_they_are(with_bytes: None) -> None:
    x = torch.randn(60, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    federation = Federation.from_arrays(x, torch.arange(60) % 3, by_classes(2, num_clients=3))
    there = federation.to("cpu")
    assert there.palette is None
    assert torch.equal(there.x, x)
