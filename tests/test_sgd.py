"""SGD as pure functions: equal to torch.optim.SGD, blind to masked rows, and the same whatever runs the steps."""

import math
from typing import Any

import pytest
import torch
from support import Conv, assert_close, model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from pfedhn import keys
from pfedhn.data.federation import Federation
from pfedhn.engine.executors import EXECUTORS, TogetherScan, TracedScan
from pfedhn.params import Params, clip, pick, stack, take
from pfedhn.sgd import SGD, Batches, scan, scanning

NUM_STEPS, BATCH_SIZE = 7, 6


def batches(num_steps: int = NUM_STEPS, batch_size: int = BATCH_SIZE) -> Batches:
    x = keys.normal(1, num_steps * batch_size * 72).reshape(num_steps, batch_size, 2, 6, 6)
    y = keys.permutation_head(keys.fold(2, torch.arange(num_steps * batch_size)), 4, 1).reshape(num_steps, batch_size)
    return Batches(x, y, torch.ones(num_steps, batch_size, dtype=torch.bool))


def plain(
    start: Params, data: Batches, sgd: SGD, clipped: list[str] | None = None, velocity: Params | None = None
) -> tuple[Params, Params, list[float]]:
    net = Conv().double()
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), float(sgd.lr), sgd.momentum, weight_decay=sgd.weight_decay)
    for name, value in net.named_parameters():
        if velocity and name in velocity:
            optimizer.state[value]["momentum_buffer"] = velocity[name].clone()
    norms = []
    for x, y, mask in zip(*data, strict=True):
        optimizer.zero_grad()
        cross_entropy(net(x[mask]), y[mask]).backward()
        chosen = [value for name, value in net.named_parameters() if clipped is None or name in clipped]
        norms.append(float(clip_grad_norm_(chosen, math.inf if sgd.clip is None else sgd.clip)))
        optimizer.step()
    weights = {name: value.detach() for name, value in net.named_parameters()}
    buffers = {
        name: optimizer.state[value].get("momentum_buffer", torch.zeros_like(value))
        for name, value in net.named_parameters()
    }
    return weights, buffers, norms


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("clipped", [None, ["conv.weight", "conv.bias"], []])
@pytest.mark.parametrize("restart", [True, False])
def test_run(momentum: float, weight_decay: float, limit: float | None, clipped: Any, restart: bool) -> None:
    sgd = SGD(0.1, momentum, weight_decay, limit)
    start = model("conv").fresh(3)
    velocity = None if restart else {name: torch.ones_like(value) for name, value in pick(start, ["out.bias"]).items()}
    expected, buffers, norms = plain(start, batches(), sgd, clipped, velocity if momentum else None)
    assert limit is None or clipped == [] or max(norms) > limit
    weights, pace = sgd.run(model("conv").loss, start, batches(), velocity, clipped)
    assert list(weights) == list(start) or set(weights) == set(start)
    assert_close(weights, {name: expected[name] for name in weights})
    if momentum:
        assert_close(pace, {name: buffers[name] for name in pace})


def test_rates_may_be_tensors() -> None:
    start, loss = model("conv").fresh(3), model("conv").loss
    number = SGD(0.1, 0.9).run(loss, start, batches())
    assert_close(SGD(torch.tensor(0.1, dtype=torch.float64), 0.9).run(loss, start, batches()), number)


def test_one_step() -> None:
    sgd = SGD(0.5, 0.9, 0.1)
    weight, velocity = sgd.step(*torch.tensor([2.0, 3.0, 7.0], dtype=torch.float64))
    expected = 0.9 * 3 + (7 + 0.1 * 2)
    assert_close(velocity.item(), expected)
    assert_close(weight.item(), 2 - 0.5 * expected)


def test_masked_batches_are_smaller_batches() -> None:
    """The rows that fill a batch up may hold anything finite."""
    full = batches()
    kept = 4
    mask = torch.arange(BATCH_SIZE).expand(NUM_STEPS, -1) < kept
    filled = Batches(torch.where(mask[..., None, None, None], full.x, 1e3), torch.where(mask, full.y, 0), mask)
    small = Batches(*(leaf[:, :kept] for leaf in full))
    start, loss = model("conv").fresh(3), model("conv").loss
    sgd = SGD(0.1, 0.9, 0.01, 0.5)
    assert_close(sgd.run(loss, start, filled), sgd.run(loss, start, small))
    expected, _, _ = plain(start, filled, sgd)
    assert_close(sgd.run(loss, start, filled)[0], expected)


def test_the_mask_may_pick_any_rows() -> None:
    full = batches()
    mask = keys.uniform(4, NUM_STEPS * BATCH_SIZE).reshape(NUM_STEPS, BATCH_SIZE) < 0.5
    mask[:, 2] = True
    start = model("conv").fresh(3)
    some = full._replace(mask=mask)
    expected, _, _ = plain(start, some, SGD(0.1))
    assert_close(SGD(0.1).run(model("conv").loss, start, some)[0], expected)


def test_no_batches_leave_the_weights_alone() -> None:
    start = model("conv").fresh(3)
    nothing = Batches(*(leaf[:0] for leaf in batches()))
    for make in EXECUTORS.values():
        with make().running("conv", "train", ()):
            weights, velocity = SGD(0.1, 0.9).run(model("conv").loss, start, nothing)
        assert_close({name: weights[name] for name in start}, start)
        assert all(bool((value == 0).all()) for value in velocity.values())


def test_scan_folds_along_the_leading_axis() -> None:
    data = {"x": torch.arange(5.0), "y": torch.arange(10.0).reshape(5, 2)}

    def step(carry: Tensor, piece: Any, constants: tuple[float, float]) -> Tensor:
        a, b = constants
        return a * carry + b * piece["x"] + piece["y"].sum()

    carry = torch.tensor(1.0)
    for k in range(5):
        carry = step(carry, {"x": torch.tensor(float(k)), "y": torch.tensor([2.0 * k, 2.0 * k + 1])}, (0.5, 3.0))
    assert_close(scan(step, torch.tensor(1.0), data, (0.5, 3.0)), carry)


def test_an_executor_can_run_the_steps_its_own_way() -> None:
    seen = []

    def counting(step: Any, carry: Any, data: Any, constants: Any) -> Any:
        seen.append(len(data))
        return carry

    def never(carry: Any, piece: Any, constants: Any) -> Any:
        raise AssertionError("the executor's scan was not used")

    with scanning(counting):
        assert scan(never, "start", torch.zeros(3)) == "start"
    assert seen == [3]
    assert scan(lambda carry, piece, constants: carry + piece, torch.zeros(()), torch.ones(3)) == 3


@pytest.mark.parametrize("executor", EXECUTORS)
def test_carries_that_start_as_one_tensor_are_two(executor: str) -> None:
    """(w, w) is one tensor twice; a tracer that takes it for one input would compute something else."""

    def step(carry: tuple[Tensor, Tensor], piece: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        x, theta = carry
        theta = theta - rate * (theta - 2 * x) * piece
        return x + theta, theta

    w = torch.tensor([1.0, 2.0])
    expected = w, w
    for piece in (1.0, 2.0, 3.0):
        expected = step(expected, torch.tensor(piece), 0.1)
    with EXECUTORS[executor]().running("any", "train", ()):
        assert_close(scan(step, (w, w), torch.tensor([1.0, 2.0, 3.0]), 0.1), expected)


@pytest.mark.parametrize("kind", [TracedScan, TogetherScan])
def test_a_carry_may_begin_with_a_count(kind: type[TracedScan]) -> None:
    """A rate takes the type of the weights, not of the steps counted: 0.1 as a whole number is 0."""

    def step(carry: tuple[Tensor, Tensor], piece: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        count, w = carry
        return count + 1, w - rate * piece * w / (count + 1)

    start = torch.zeros((), dtype=torch.int64), torch.tensor([1.0, 2.0])
    pieces = torch.tensor([1.0, 2.0, 3.0])
    expected = scan(step, start, pieces, 0.1)
    with kind().running(()):
        assert_close(scan(step, start, pieces, 0.1), expected)


@pytest.mark.parametrize("kind", [TracedScan, TogetherScan])
def test_a_constant_may_be_none(kind: type[TracedScan]) -> None:
    """One that is there later is not taken for one that was None when the step was traced."""

    def step(w: Tensor, piece: Tensor, constants: tuple[float | None, float]) -> Tensor:
        decay, rate = constants
        return w - rate * piece - (0 if decay is None else decay * w)

    w, pieces = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])
    traced = kind()
    for constants in 2 * ((None, 0.1), (0.5, 0.1), (None, 0.3)):
        expected = scan(step, w, pieces, constants)
        with traced.running(()):
            assert_close(scan(step, w, pieces, constants), expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("names", [None, ["a", "c"]])
def test_clip(scale: float, names: list[str] | None) -> None:
    gradient = {name: scale * keys.normal(keys.fold(0, name), 4) for name in "abc"}
    parameters = {name: nn.Parameter(torch.zeros(4, dtype=torch.float64)) for name in "abc"}
    for name, value in parameters.items():
        value.grad = gradient[name].clone()
    clip_grad_norm_([parameters[name] for name in names or "abc"], 2.0)
    expected = {name: value.grad for name, value in parameters.items()}
    assert_close(clip(gradient, 2.0, names), expected)
    assert_close(clip(gradient, None, names), gradient)


@pytest.mark.parametrize("executor", ["loop", "traced", "vectorized"])
def test_layers_trained_in_phases(federation: Federation, executor: str) -> None:
    """Head first, then body, as FedRep does: what is frozen stays, and the rest moves as torch.optim moves it."""
    target = model("mlp")
    start = target.fresh(3)
    head = [name for name in start if name.startswith("3.")]
    body = [name for name in start if name not in head]
    batches = federation.batches(torch.tensor([0, 2]), 7, 4, 5)

    def phases(start: Params, batches: Batches) -> Params:
        sgd = SGD(0.1, momentum=0.9, weight_decay=0.01, clip=0.5)
        first, _ = sgd.run(target.loss, start, take(batches, slice(0, 2)), frozen=body)
        return sgd.run(target.loss, first, take(batches, slice(2, 4)), frozen=head)[0]

    run = EXECUTORS[executor]()
    starts = stack([start, start])

    def one_client(start: Params, batches: Batches) -> Params:
        with run.running("mlp", "train", (start, batches)):
            return phases(start, batches)

    trained = run.map(one_client)(starts, batches)
    for client in range(2):
        module = target.with_weights(start).train()
        for names, part in ((head, slice(0, 2)), (body, slice(2, 4))):
            moving = [value for name, value in module.named_parameters() if name in names]
            optimizer = torch.optim.SGD(moving, 0.1, momentum=0.9, weight_decay=0.01)
            for k in range(part.start, part.stop):
                x, y, mask = take(take(batches, client), k)
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x[mask]), y[mask]).backward()
                nn.utils.clip_grad_norm_(moving, 0.5)
                optimizer.step()
        assert_close(take(trained, client), {name: value.detach() for name, value in module.named_parameters()})
