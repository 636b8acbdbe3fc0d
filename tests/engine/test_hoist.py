"""A step in two parts is the whole step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from pfedhn.engine.executors import trace
from pfedhn.engine.hoist import Hoisted, for_all_steps, hoist

CARRY, IMAGES, MASK, RATE = torch.randn(4), torch.randn(5, 2, 3), torch.rand(5, 2) > 0.3, torch.tensor(0.1)


def whole(carry: Tensor, images: Tensor, mask: Tensor, rate: Tensor) -> list[Tensor]:
    padded = functional.pad(images, (0, 1))
    share = mask.sum() * (rate + torch.ones(3)).sum() / mask.sum().clamp(min=1)
    return [carry - share * (torch.where(mask.unsqueeze(1), padded * 2, 0.0) @ carry).sum() * padded.sum(0)]


def parts_of(step: Callable[..., list[Tensor]]) -> Hoisted | None:
    return hoist(trace(step, [CARRY, IMAGES[0], MASK[0], RATE]), 1, 2)


def targets(part: GraphModule) -> list[str]:
    return [node.target._schema.name for node in part.graph.nodes if node.op == "call_function"]


def test_both_parts_give_what_the_step_gives() -> None:
    parts = parts_of(whole)
    assert parts is not None
    made = for_all_steps(parts, [0, 0], [IMAGES, MASK], [RATE])
    for k in range(5):
        mine = [value[k] if differs else value for value, differs in zip(made, parts.differs, strict=True)]
        expected = whole(CARRY, IMAGES[k], MASK[k], RATE)
        assert torch.equal(parts.step(CARRY, IMAGES[k], MASK[k], *mine, RATE)[0], expected[0])
    assert "aten::constant_pad_nd" in targets(parts.ahead)
    assert "aten::constant_pad_nd" not in targets(parts.step)
    assert sorted(parts.differs) == [False, True, True, True]  # of the rate alone; padded, its sum, the count


def test_axes_of_the_steps_may_stand_elsewhere() -> None:
    parts = parts_of(whole)
    assert parts is not None
    first = for_all_steps(parts, [0, 0], [IMAGES, MASK], [RATE])
    second = for_all_steps(parts, [1, 1], [IMAGES.movedim(0, 1), MASK.movedim(0, 1)], [RATE])
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    "step",
    [
        lambda carry, images, mask, rate: [carry - rate * (images * 2).relu()[0, 0] * mask[0]],
        lambda carry, images, mask, rate: [carry * functional.pad(images, (0, 50)).sum()],
        lambda carry, images, mask, rate: [carry * torch.bernoulli(images.abs() / 9).sum()],
        lambda carry, images, mask, rate: [functional.pad(carry * mask[0], (0, 1))[:4]],
        lambda carry, images, mask, rate: [functional.pad(rate.expand(4), (0, 0)).clone().add_(carry)],
    ],
    ids=["computed inside of other kernels", "too large for all steps", "drawn", "of the carry", "written to"],
)
def test_what_stays_in_the_step(step: Callable[..., list[Tensor]]) -> None:
    assert parts_of(step) is None
