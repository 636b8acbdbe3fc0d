"""Keyed randomness: exact permutations, the same numbers however a key is held, and no visible pattern."""

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedhn import keys

SIGNED = st.integers(-(1 << 63), (1 << 63) - 1)


def signed(value: int) -> int:
    return ((value + (1 << 63)) % (1 << 64)) - (1 << 63)


def splitmix_finalizer(value: int) -> int:
    """As published, on unsigned numbers."""
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


@given(SIGNED)
@settings(max_examples=200)
def test_mix_is_the_published_finalizer_on_every_kind_of_number(value: int) -> None:
    expected = signed(splitmix_finalizer(value))
    assert keys.mix(value) == expected
    assert int(keys.mix(torch.tensor([value]))) == expected
    assert int(keys.mix(numpy.array([value]))[0]) == expected


@given(SIGNED, st.lists(st.one_of(SIGNED, st.text(max_size=5)), min_size=1, max_size=4))
@settings(max_examples=200)
def test_folding_is_the_same_for_numbers_and_tensors(key: int, parts: list[int | str]) -> None:
    held = [torch.tensor(part) if isinstance(part, int) else part for part in parts]
    on_host = keys.fold(key, *parts)
    assert isinstance(on_host, int)
    assert -(1 << 63) <= on_host < 1 << 63
    assert int(keys.fold(torch.tensor(key), *held)) == on_host
    assert int(keys.fold(key, *held)) == on_host
    step_by_step: keys.Key = key
    for part in parts:
        step_by_step = keys.fold(step_by_step, part)
    assert step_by_step == on_host


def test_folding_maps_over_shapes() -> None:
    clients, rounds = torch.arange(5), torch.arange(3)
    table = keys.fold(keys.fold(9, rounds)[:, None], clients)
    assert table.shape == (3, 5)
    for r in range(3):
        for c in range(5):
            assert int(table[r, c]) == keys.fold(9, r, c)


def test_every_part_and_its_place_count() -> None:
    drawn = {
        keys.fold(seed, *parts) for seed in range(50) for parts in ((), ("a",), ("b",), (0,), (1,), (0, 1), (1, 0))
    }
    assert len(drawn) == 50 * 7
    assert keys.fold(1, 2) != keys.fold(2, 1)
    assert keys.fold(0, "12") != keys.fold(0, 12)


@pytest.mark.parametrize("size", [*range(1, 70), 99, 100, 101, 255, 256, 257, 1_000, 4_096, 50_000])
def test_a_whole_permutation_is_exact(size: int) -> None:
    for key in (0, -1, 12345):
        places = keys.permutation_head(key, size, size)
        assert torch.equal(places.sort().values, torch.arange(size))


@given(SIGNED, st.integers(1, 3_000), st.integers(0, 80))
@settings(max_examples=100)
def test_a_head_is_the_beginning_of_the_permutation(key: int, size: int, count: int) -> None:
    """So a party that knows only its own number of rows draws the same batch; what is past the end reads 0."""
    head, whole = keys.permutation_head(key, size, count), keys.permutation_head(key, size, size)
    kept = min(count, size)
    assert torch.equal(head[:kept], whole[:kept])
    assert head[kept:].tolist() == [0] * (count - kept)


def test_permutations_map_over_keys_and_sizes() -> None:
    many = keys.fold(3, torch.arange(12)).reshape(4, 3)
    sizes = torch.tensor([1, 2, 7, 50])[:, None]
    heads = keys.permutation_head(many, sizes, 6)
    assert heads.shape == (4, 3, 6)
    for i in range(4):
        for j in range(3):
            alone = keys.permutation_head(int(many[i, j]), int(sizes[i, 0]), 6)
            assert torch.equal(heads[i, j], alone)


def test_a_head_of_nothing() -> None:
    assert keys.permutation_head(keys.fold(1, torch.zeros(2, 0, dtype=torch.int64)), 5, 4).shape == (2, 0, 4)


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 10, 13])
def test_first_two_places_take_every_pair_equally_often(size: int) -> None:
    """The statistic has size (size - 1) - 1 degrees of freedom; five standard deviations over its mean is the bound."""
    num_draws = 400 * size * (size - 1)
    heads = keys.permutation_head(keys.fold(17, torch.arange(num_draws)), size, 2)
    pairs = torch.bincount(heads[:, 0] * size + heads[:, 1], minlength=size * size).reshape(size, size).double()
    assert pairs.diagonal().sum() == 0
    observed = pairs[~torch.eye(size, dtype=torch.bool)]
    freedom = observed.numel() - 1
    assert chi_square(observed) < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("size", "count"), [(3, 3), (4, 4), (5, 2), (6, 3), (7, 5), (8, 5), (9, 4)])
def test_every_cohort_comes_equally_often(size: int, count: int) -> None:
    """As a set, which is what a cohort or a batch is; for heads as long as the whole, as an order."""
    is_order = size == count
    num_outcomes = math.factorial(size) if is_order else math.comb(size, count)
    drawn = keys.permutation_head(keys.fold(23, torch.arange(400 * num_outcomes)), size, count)
    codes = (drawn * size ** torch.arange(count)).sum(-1) if is_order else (1 << drawn).sum(-1)
    counts = codes.unique(return_counts=True)[1].double()
    assert len(counts) == num_outcomes
    freedom = num_outcomes - 1
    assert chi_square(counts) < freedom + 5 * math.sqrt(2 * freedom)


def test_consecutive_rounds_are_independent() -> None:
    """First places of rounds r and r + 1: a weak mixing of the round number would show here."""
    size = 8
    first = keys.permutation_head(keys.fold(5, "cohort", torch.arange(20_001)), size, 1).flatten()
    counts = torch.bincount(first[:-1] * size + first[1:], minlength=size * size).double()
    freedom = size * size - 1
    assert chi_square(counts) < freedom + 5 * math.sqrt(2 * freedom)


def test_uniform() -> None:
    values = keys.uniform(7, 100_000)
    assert values.dtype == torch.float64
    assert 0 <= values.min() < 1e-3
    assert 1 - 1e-3 < values.max() < 1
    error = 5 / math.sqrt(12 * len(values))  # five standard errors of the mean
    assert abs(values.mean() - 0.5) < error
    counts = torch.histc(values, 100, 0, 1)
    assert chi_square(counts) < 99 + 5 * math.sqrt(2 * 99)
    lagged = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
    assert abs(lagged) < 5 / math.sqrt(len(values))


def test_normal() -> None:
    values = keys.normal(7, 100_000)
    assert values.dtype == torch.float64
    assert torch.isfinite(values).all()
    n = len(values)
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((values**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / n)
    inside = (values.abs() < 1).double().mean()
    expected = math.erf(1 / math.sqrt(2))
    assert abs(inside - expected) < 5 * math.sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize("draw", [keys.uniform, keys.normal])
def test_draws_map_over_keys(draw: object) -> None:
    many = keys.fold(2, torch.arange(4))
    drawn, mapped = draw(many, 6), torch.vmap(lambda key: draw(key, 6))(many)  # type: ignore[operator]
    assert drawn.shape == (4, 6)
    assert torch.equal(drawn, mapped)
    for i in range(4):
        assert torch.equal(drawn[i], draw(int(many[i]), 6))  # type: ignore[operator]


def test_generators_are_functions_of_their_key() -> None:
    for key in (0, -5, (1 << 63) - 1):
        a, b = (torch.rand(3, generator=keys.torch_generator(key)) for _ in range(2))
        assert torch.equal(a, b)
        assert keys.numpy_generator(key).random() == keys.numpy_generator(key).random()
    assert keys.numpy_generator(1).random() != keys.numpy_generator(-1).random()
