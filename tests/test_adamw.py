"""AdamW against PyTorch's, and its corrections at the first and at late steps."""

import pytest
import torch

from pfedhn.sgd import AdamW, part_so_far


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_pytorch(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    weights = start.clone().requires_grad_()
    reference = torch.optim.AdamW([weights], lr=0.01, betas=(momentum, 0.999), weight_decay=0.1)
    ours = AdamW(0.01, momentum, weight_decay=0.1)
    state = (start, torch.zeros_like(start), torch.zeros_like(start))
    for number, gradient in enumerate(gradients, 1):
        weights.grad = gradient
        reference.step()
        state = ours.step(*state, gradient, torch.tensor(number))
    torch.testing.assert_close(state[0], weights.detach(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_corrections_in_single_precision(beta: float) -> None:
    """Where 1 - 0.999 is one rounding of 0.999."""
    for number in (1, 2, 10, 1_000, 100_000):
        count = torch.tensor(float(number))
        assert float(part_so_far(beta, count)) == pytest.approx(1 - beta**number, rel=3e-7)
