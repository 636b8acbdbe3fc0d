"""Stochastic gradient descent as pure functions, over a fixed number of minibatches.

Axes: [K] steps, [B]atch.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from pfedhn.params import Params, clip, take

Rate: TypeAlias = float | Tensor
"""A number that a grid varies; the engine passes it as a 0-d tensor so that a grid compiles once."""

Carry = TypeVar("Carry")
Loss: TypeAlias = Callable[[Params, "Batches"], Tensor]


class Batches(NamedTuple):
    """Minibatches of one client; `mask` is False where a batch was filled up because the client has fewer rows."""

    x: Tensor  # [K, B, ...]
    y: Tensor  # [K, B, ...]
    mask: Tensor  # [K, B]


Step: TypeAlias = Callable[[Any, Any, Any], Any]
Scan: TypeAlias = Callable[[Step, Any, Any, Any], Any]


def _python_loop(step: Step, carry: Any, batches: Any, constants: Any) -> Any:
    num_steps = torch.utils._pytree.tree_leaves(batches)[0].shape[0]
    for k in range(num_steps):
        carry = step(carry, take(batches, k), constants)
    return carry


_scan: ContextVar[Scan] = ContextVar("scan", default=_python_loop)


def scan(step: Callable[[Carry, Any, Any], Carry], carry: Carry, batches: Any, constants: Any = ()) -> Carry:
    """Apply `carry = step(carry, batch, constants)` along the leading axis of `batches`.

    All tensors that `step` uses come through its arguments: an executor may compile it once and run it K times.
    """
    result: Carry = _scan.get()(step, carry, batches, constants)
    return result


@contextmanager
def scanning(implementation: Scan) -> Iterator[None]:
    """Let an executor run the steps its own way inside the block."""
    token = _scan.set(implementation)
    try:
        yield
    finally:
        _scan.reset(token)


def zeros_like(params: Params) -> Params:
    return {name: torch.zeros_like(value) for name, value in params.items()}


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD without Nesterov or dampening: decay joins the gradient, then momentum, then the step."""

    lr: Rate
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def step(self, weights: Params, velocity: Params, gradient: Params) -> tuple[Params, Params]:
        velocity = {
            name: self.momentum * velocity[name] + (gradient[name] + self.weight_decay * weights[name])
            for name in weights
        }
        return {name: weights[name] - self.lr * velocity[name] for name in weights}, velocity

    def run(
        self,
        loss: Loss,
        weights: Params,
        batches: Batches,
        velocity: Params | None = None,
        clipped: Collection[str] | None = None,
    ) -> tuple[Params, Params]:
        """One step per batch; names missing from `velocity` start at rest. Only the `clipped` names (all) are clipped."""
        names = None if clipped is None else frozenset(clipped)

        def step(carry: tuple[Params, Params], batch: Batches, lr: Rate) -> tuple[Params, Params]:
            gradient = clip(torch.func.grad(loss)(carry[0], batch), self.clip, names)
            return SGD(lr, self.momentum, self.weight_decay).step(*carry, gradient)

        return scan(step, (weights, zeros_like(weights) | (velocity or {})), batches, self.lr)
