"""AdamW as pure functions (Loshchilov and Hutter, ICLR 2019): decay shrinks the weights apart from the gradient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pfedhn.params import Params, zeros_like
from pfedhn.settings import Fraction
from pfedhn.sgd import Rate


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW without AMSGrad; `weight_decay=0` is Adam."""

    lr: Rate  # learning rate
    momentum: Fraction = 0.9  # beta_1
    square_momentum: Fraction = 0.999  # beta_2
    weight_decay: Rate = 0.0  # weight decay, decoupled from the gradient
    epsilon: float = 1e-8  # added to the root of the second moment
    clip: float | None = None  # largest norm of the gradient, before its moments are taken; none: any

    def step(
        self, weights: Tensor, velocity: Tensor, square: Tensor, gradient: Tensor, number: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The weights and both moments after step `number`, counted from 1."""
        velocity = torch.lerp(velocity, gradient, 1 - self.momentum)
        square = torch.lerp(square, gradient * gradient, 1 - self.square_momentum)
        count = number.to(weights.dtype)
        first, second = (part_so_far(beta, count) for beta in (self.momentum, self.square_momentum))
        step = (velocity / first) / ((square / second).sqrt() + self.epsilon)
        return weights - self.lr * (step + self.weight_decay * weights), velocity, square

    def first_squares(self, weights: Params) -> Params:
        return zeros_like(weights)

    def server_step(
        self, weights: Params, velocity: Params, square: Params, gradient: Params, number: Tensor
    ) -> tuple[Params, Params, Params]:
        """`step` for every name of `weights`."""
        moved = {
            name: self.step(value, velocity[name], square[name], gradient[name], number)
            for name, value in weights.items()
        }
        first, second, third = ({name: parts[place] for name, parts in moved.items()} for place in range(3))
        return first, second, third


def part_so_far(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count, what a moving average from zero has seen of its whole.

    Not as that difference, which needs float64: a compiled server step would take such a power for every weight.
    """
    return -torch.expm1(count * math.log(beta)) if beta > 0 else torch.ones_like(count)
