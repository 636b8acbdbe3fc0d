"""A step in two parts is the whole step."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from pfedhn.engine.executors import TracedScan, trace
from pfedhn.engine.hoist import Hoisted, fits, for_all_steps, hoist
from pfedhn.sgd import scan

CARRY, IMAGES, MASK, RATE = torch.randn(4), torch.randn(5, 6, 3), torch.rand(5, 6) > 0.3, torch.tensor(0.1)


def whole(carry: Tensor, images: Tensor, mask: Tensor, rate: Tensor) -> list[Tensor]:
    padded = functional.pad(images, (0, 1))
    share = mask.sum() * rate / mask.sum().clamp(min=1)
    return [carry - share * (torch.where(mask.unsqueeze(1), padded * 2, 0.0) @ carry).sum() * padded.sum(0)]


def parts_of(step: Callable[..., list[Tensor]]) -> Hoisted | None:
    return hoist(trace(step, [CARRY, IMAGES[0], MASK[0], RATE]), 1, 2)


def targets(part: GraphModule) -> list[str]:
    return [node.target._schema.name for node in part.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("axis", [0, 1])
def test_both_parts_give_what_the_step_gives(axis: int) -> None:
    parts = parts_of(whole)
    assert parts is not None
    made = for_all_steps(parts, [axis, axis], [IMAGES.movedim(0, axis), MASK.movedim(0, axis)])
    assert fits(parts, made)
    assert len(made) == 3  # padded, its sum, and the count, once
    for k in range(5):
        mine = [value[k] for value in made]
        assert all(value.data_ptr() % 16 == 0 for value in mine)
        expected = whole(CARRY, IMAGES[k], MASK[k], RATE)
        assert torch.equal(parts.step(CARRY, IMAGES[k], MASK[k], *mine, RATE)[0], expected[0])
    assert set(targets(parts.ahead)) == {"aten::constant_pad_nd", "aten::sum"}
    assert "aten::constant_pad_nd" not in targets(parts.step)


@pytest.mark.parametrize(
    "step",
    [
        lambda carry, images, mask, rate: [carry - rate * (images * 2).relu()[0, 0] * mask[0]],
        lambda carry, images, mask, rate: [carry * functional.pad(images, (0, 50)).mean()],
        lambda carry, images, mask, rate: [carry * torch.bernoulli(images.abs() / 9).sum()],
        lambda carry, images, mask, rate: [functional.pad(carry * mask[0], (0, 1))[:4]],
        lambda carry, images, mask, rate: [carry.add(functional.pad(images, (0, 1))[0]).mul_(mask.sum())],
        lambda carry, images, mask, rate: [carry + mask.sum(), functional.pad(images, (0, 1))[0]],
        lambda carry, images, mask, rate: [carry * images.as_strided((2,), (1,)).sum()],
    ],
    ids=["computed inside of other kernels", "too large", "drawn", "of the carry", "in place", "returned", "strides"],
)
def test_what_stays_in_the_step(step: Callable[..., list[Tensor]]) -> None:
    assert parts_of(step) is None


def run(step: Callable[[Tensor, Tensor, object], Tensor], batches: Tensor, scans: Sequence[TracedScan] = ()) -> Tensor:
    carry = torch.zeros(())
    with ExitStack() as stack:
        for one in scans:
            stack.enter_context(one.running((carry, batches)))
        return scan(step, carry, batches)


def test_what_lies_otherwise_with_an_axis_more_stays_in_the_step() -> None:
    """Images with their channels last are padded to such; with an axis more they are not, and a view would not hold."""
    mine, images = TracedScan(hoists=True), torch.randn(4, 3, 6, 6, 2).movedim(-1, -3)

    def step(carry: Tensor, x: Tensor, _: object) -> Tensor:
        padded = functional.pad(x, (1, 1, 1, 1)).permute(0, 2, 3, 1).reshape(-1, 64, 2)
        return carry + (padded * carry.cos()).sum()

    assert hoist(trace(lambda carry, x: [step(carry, x, ())], [torch.zeros(()), images[0]]), 1, 1) is not None
    assert torch.allclose(run(step, images, [mine]), run(step, images), rtol=1e-4)
    assert [steps is not None and steps.ahead is None for steps in mine.graphs.values()] == [True]


def test_numbers_of_steps_and_layouts_may_change() -> None:
    mine, images = TracedScan(hoists=True, is_always_watched=True), torch.randn(8, 3, 4)

    def step(carry: Tensor, x: Tensor, _: object) -> Tensor:
        return carry + (functional.pad(x, (0, 1)).view(-1) * carry.cos()).sum()

    for batches in (images[:4], images[::2], images, images[:1]):
        assert torch.allclose(run(step, batches, [mine]), run(step, batches), rtol=1e-4)
    assert any(steps is not None and steps.ahead is not None for steps in mine.graphs.values())
