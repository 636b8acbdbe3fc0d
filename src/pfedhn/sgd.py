"""SGD and AdamW as pure functions; SGD over a fixed number of minibatches.

Axes: [K] steps, [B]atch.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from pfedhn.dropout import drawing, drawn
from pfedhn.errors import UserError
from pfedhn.keys import fold
from pfedhn.params import Params, pack, pick, take, zeros_like
from pfedhn.privacy import NO_GRADIENT, protected
from pfedhn.settings import Bounds, Fraction
from pfedhn.statistics import collecting, tracked

Rate: TypeAlias = float | Tensor
"""A number that a grid varies; the engine passes it as a 0-d tensor so that a grid compiles once."""
FractionRate: TypeAlias = Annotated[Rate, Bounds(0, 1)]
"""Such a number that is a part of a whole."""


def is_rate(hint: Any) -> bool:
    """Whether the type of a setting is `Rate` or `FractionRate`, or one of these or None."""
    if get_origin(hint) not in (Annotated, UnionType, Union):
        return False
    return {float, Tensor} <= set(get_args(hint)) or any(map(is_rate, get_args(hint)))


Carry = TypeVar("Carry")
Loss: TypeAlias = Callable[[Params, "Batches"], Tensor]
Center: TypeAlias = tuple[()] | tuple[Rate, Tensor]
"""What weights are pulled toward, and how strongly; empty for nothing."""


class Batches(NamedTuple):
    """Minibatches of one client; `mask` is False where a batch was filled up because the client has fewer examples."""

    x: Tensor  # [K, B, ...]
    y: Tensor  # [K, B, ...]
    mask: Tensor  # [K, B]


Step: TypeAlias = Callable[[Any, Any, Any], Any]
Scan: TypeAlias = Callable[[Step, Any, Any, Any], Any]


def python_loop(step: Step, carry: Any, batches: Any, constants: Any) -> Any:
    num_steps = torch.utils._pytree.tree_leaves(batches)[0].shape[0]
    for k in range(num_steps):
        carry = step(carry, take(batches, k), constants)
    return carry


_scan: ContextVar[Scan] = ContextVar("scan", default=python_loop)


def scan(step: Callable[[Carry, Any, Any], Carry], carry: Carry, batches: Any, constants: Any = ()) -> Carry:
    """Apply `carry = step(carry, batch, constants)` along the leading axis of `batches`.

    An executor may trace `step` once and run it for other steps and clients, so the tensors it uses come through its
    arguments or from local variables of the function around it. Where the network has batch statistics, they are
    carried along; where it has dropout, every step gets a key to draw from.
    """
    tracker, draws = tracked(), drawn()
    if tracker is None and draws is None:
        result: Carry = _scan.get()(step, carry, batches, constants)
        return result

    def whole_step(whole: tuple[Carry, Params], data: Any, constants: Any) -> tuple[Carry, Params]:
        (inner, statistics), (batch, *key) = whole, data
        if tracker is not None:
            tracker.now = statistics
        with drawing(*key) if key else nullcontext():
            moved = step(inner, batch, constants)
        return moved, statistics if tracker is None else tracker.now

    before = {} if tracker is None else tracker.now
    data = [batches]
    if draws is not None:
        like = torch.utils._pytree.tree_leaves(batches)[0]
        data.append(fold(draws.next(), torch.arange(like.shape[0], device=like.device)))
    try:
        result, after = _scan.get()(whole_step, (carry, before), data, constants)
    except BaseException:
        if tracker is not None:
            tracker.now = before
        raise
    if tracker is not None:
        tracker.now = after
    return result


@contextmanager
def scanning(implementation: Scan) -> Iterator[None]:
    """Let an executor run the steps its own way inside the block."""
    token = _scan.set(implementation)
    try:
        yield
    finally:
        _scan.reset(token)


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD without Nesterov or dampening: decay joins the gradient, then momentum, then the step."""

    lr: Rate  # learning rate
    momentum: Fraction = 0.0  # how much of the last step goes on
    weight_decay: Rate = 0.0  # weight decay, which joins the gradient
    clip: float | None = None  # largest norm of the gradient; none: any

    def step(self, weights: Tensor, velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        # Scaled additions: on a CPU the time of a server step is the number of passes over all of phi.
        if isinstance(self.weight_decay, Tensor):
            decayed = gradient + self.weight_decay * weights
        else:
            decayed = gradient.add(weights, alpha=self.weight_decay)
        velocity = decayed.add(velocity, alpha=self.momentum)
        if isinstance(self.lr, Tensor):
            return weights - self.lr * velocity, velocity
        return weights.add(velocity, alpha=-self.lr), velocity

    def step_all(self, weights: Params, velocity: Params, gradient: Params) -> tuple[Params, Params]:
        """`step` for every name of `weights`."""
        moved = {name: self.step(value, velocity[name], gradient[name]) for name, value in weights.items()}
        return {name: pair[0] for name, pair in moved.items()}, {name: pair[1] for name, pair in moved.items()}

    def first_squares(self, weights: Params) -> Params:
        return {}

    def server_step(
        self, weights: Params, velocity: Params, square: Params, gradient: Params, number: Tensor
    ) -> tuple[Params, Params, Params]:
        """`step_all` in the form of AdamW's, which has second moments and counts its steps."""
        return *self.step_all(weights, velocity, gradient), square

    def run(
        self,
        loss: Loss,
        weights: Params,
        batches: Batches,
        velocity: Params | None = None,
        clipped: Collection[str] | None = None,
        frozen: Collection[str] = (),
        pull: tuple[Rate, Params] | None = None,
    ) -> tuple[Params, Params]:
        """Take one step per batch.

        Args:
            loss: The loss of all weights on one batch.
            weights: Where to start.
            batches: [K, B, ...], one for each step.
            velocity: Where momentum starts; names that are missing start at rest.
            clipped: The names whose gradient is clipped together; all of them by default.
            frozen: Names that stay as they are; a method that trains its layers in phases freezes some in each.
            pull: A strength and weights: the gradient of strength / 2 times the squared distance from these weights,
                which joins the gradient after it is clipped, as weight decay does. None for no such term.

        Where the client's examples are protected (`privacy.protecting`), every step takes the private gradient, and
        what follows is as it would be without: `clip`, the pull, weight decay, momentum.

        Returns:
            The weights and the velocity after the last step.
        """
        held, velocity = pick(weights, frozen), velocity or {}
        moving = {name: value for name, value in weights.items() if name not in held}
        names = [name for name in moving if clipped is None or name in clipped]
        moving = pick(moving, names) | moving  # what is clipped comes first in the vector
        vector, unpack = pack(moving)
        speed, _ = pack({name: velocity.get(name, torch.zeros_like(value)) for name, value in moving.items()})
        num_clipped = sum(weights[name].numel() for name in names)
        center = () if pull is None else (pull[0], pack({name: pull[1][name] for name in moving})[0])

        def moved(carry: tuple[Tensor, Tensor], gradient: Tensor, lr: Rate, center: Center) -> tuple[Tensor, Tensor]:
            direction = clip_vector(gradient, self.clip, num_clipped)
            if center:
                direction = direction + center[0] * (carry[0] - center[1])
            return SGD(lr, self.momentum, self.weight_decay).step(*carry, direction)

        def step(
            carry: tuple[Tensor, Tensor], batch: Batches, constants: tuple[Rate, Params, Center]
        ) -> tuple[Tensor, Tensor]:
            lr, held, center = constants
            gradient_of = gradient(lambda weights, batch: loss(weights | held, batch), unpack)
            return moved(carry, gradient_of(carry[0], batch), lr, center)

        def private_step(
            carry: tuple[Tensor, Tensor], data: tuple[Batches, Tensor], constants: tuple[Rate, Params, Center, Rate]
        ) -> tuple[Tensor, Tensor]:
            (batch, noise), (lr, held, center, expected) = data, constants
            total = clipped_sum(lambda weights, batch: loss(weights | held, batch), unpack, limit)(carry[0], batch)
            return moved(carry, (total + noise) / expected, lr, center)

        if (protection := protected()) is None:
            vector, speed = scan(step, (vector, speed), batches, (self.lr, held, center))
            return unpack(vector) | held, unpack(speed) | pick(velocity, held)
        limit, constants = protection.privacy.clip, (self.lr, held, center, protection.expected)
        if protection.is_stepwise:
            draw = protection.step_noise

            def drawing_step(
                carry: tuple[Tensor, Tensor], batch: Batches, constants: tuple[Rate, Params, Center, Rate]
            ) -> tuple[Tensor, Tensor]:
                return private_step(carry, (batch, draw(1, carry[0])[0]), constants)

            vector, speed = scan(drawing_step, (vector, speed), batches, constants)
        else:
            noise = protection.step_noise(batches.mask.shape[0], vector)
            vector, speed = scan(private_step, (vector, speed), (batches, noise), constants)
        return unpack(vector) | held, unpack(speed) | pick(velocity, held)


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW (Loshchilov and Hutter, ICLR 2019) without AMSGrad; `weight_decay=0` is Adam."""

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


def gradient(
    loss: Loss, unpack: Callable[[Tensor], Params], is_tested: bool = True
) -> Callable[[Tensor, Batches], Tensor]:
    """The gradient of a loss by all weights at once, as a vector: local steps are bound by the number of operations.

    Args:
        loss: Of all weights on one batch.
        unpack: From a vector to weights.
        is_tested: Whether the client will use these weights: its batch statistics are then those of these passes. A
            method that trains two models on a client says no for the other one.
    """
    found = gradient_and_more(lambda weights, batch: (loss(weights, batch), ()), unpack, is_tested)
    return lambda vector, batch: found(vector, batch)[0]


def gradient_and_more(
    loss: Callable[[Params, Batches], tuple[Tensor, Any]], unpack: Callable[[Tensor], Params], is_tested: bool = True
) -> Callable[[Tensor, Batches], tuple[Tensor, Any]]:
    """As `gradient`, of a loss that also returns tensors of its pass, such as features; they come with the gradient."""
    if protected() is not None:
        raise UserError(NO_GRADIENT)

    def of_vector(vector: Tensor, batch: Batches) -> tuple[Tensor, Any]:
        return loss(unpack(vector), batch)

    def with_statistics(vector: Tensor, batch: Batches) -> tuple[Tensor, tuple[Any, Params]]:
        with collecting() as after:
            value, more = of_vector(vector, batch)
        return value, (more, after)

    def gradient_of(vector: Tensor, batch: Batches) -> tuple[Tensor, Any]:
        tracker = tracked()
        if tracker is None or not is_tested:
            both: tuple[Tensor, Any] = torch.func.grad(of_vector, has_aux=True)(vector, batch)
            return both
        result, (more, after) = torch.func.grad(with_statistics, has_aux=True)(vector, batch)
        tracker.now = after or tracker.now  # a user's loss may leave the network out
        return result, more

    return gradient_of


def clipped_sum(loss: Loss, unpack: Callable[[Tensor], Params], limit: float) -> Callable[[Tensor, Batches], Tensor]:
    """The sum over a minibatch of every example's own gradient, each scaled down to a norm of at most `limit`.

    A gradient that is not finite counts as none: no factor bounds it, and a NaN in the sum would tell of its example.

    Args:
        loss: Of all weights on one batch; here, on batches of one example.
        unpack: From a vector to weights.
        limit: The largest norm.
    """

    def of_one(vector: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        mask = torch.ones(1, dtype=torch.bool, device=vector.device)
        with nullcontext() if drawn() is None else drawing(key):
            return loss(unpack(vector), Batches(x.unsqueeze(0), y.unsqueeze(0), mask))

    def total(vector: Tensor, batch: Batches) -> Tensor:
        one_by_one = torch.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0, 0), randomness="different")
        each: Tensor = one_by_one(vector, batch.x, batch.y, keys_of_examples(batch))
        counts = batch.mask & each.isfinite().all(1)
        each = torch.where(counts.unsqueeze(1), each, 0.0)
        factors = (limit / torch.linalg.vector_norm(each, dim=1)).clamp(max=1.0)
        # Not a matrix product: on a GPU that would round the factors, and the bound must hold.
        return (torch.where(counts, factors, 0.0).unsqueeze(1) * each).sum(0)

    return total


def keys_of_examples(batch: Batches) -> Tensor:
    """[B]: what dropout draws from for each example of a batch."""
    draws, numbers = drawn(), torch.arange(batch.mask.shape[0], device=batch.mask.device)
    return numbers if draws is None else torch.as_tensor(fold(draws.next(), numbers))


def clip_vector(vector: Tensor, limit: float | None, length: int) -> Tensor:
    """Scale the first `length` numbers down to a norm of `limit`, as `torch.nn.utils.clip_grad_norm_` does."""
    if limit is None or length == 0:
        return vector
    head = vector[:length]
    head = head * (limit / (torch.linalg.vector_norm(head) + 1e-6)).clamp(max=1.0)
    return head if length == len(vector) else torch.cat([head, vector[length:]])
