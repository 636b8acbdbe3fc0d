"""Differential privacy of what a client sends: noise on its update, or on every step of its training.

    level = "client"    the update is scaled down to a norm of at most `clip`, and every number of it gets normal noise
                        of deviation `noise * clip`: protects all that the client has
    level = "example"   DP-SGD (Abadi et al., CCS 2016): every training example joins a minibatch by itself with
                        probability q; its gradient is scaled down to a norm of at most `clip`; the sum over the
                        minibatch gets normal noise of deviation `noise * clip` and is divided by the minibatch's
                        expected size: protects any one training example

Whoever trains hands over the normal numbers (`Normal`): the simulator draws them from the seed, a party on a machine of
its own from a secret. Opacus accounts for what has been spent.
Axes: [K] steps, [D] weights.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.errors import UserError, missing_extra
from pfedhn.keys import Key
from pfedhn.params import Params, clip

Normal: TypeAlias = Callable[[int, Tensor], Tensor]
"""(count, like) -> so many standard normal numbers of the type and device of `like`; others with every call."""

MAX_ROUNDS = 1 << 30  # of a client whose budget is never spent


class RoundCost(NamedTuple):
    """What one round of a client costs, as an accountant takes it."""

    noise: float  # deviation, in multiples of how far one example, or all of them, can move what is noised
    sample_rate: float
    steps: int


@dataclass(frozen=True)
class Privacy:
    """How a client protects its data from those who see its updates: differential privacy.

    Args:
        clip: The largest norm of an update, or of one example's gradient.
        noise: The standard deviation of the noise, in multiples of `clip`.
        epsilon: How much privacy may be spent, at `delta`; then the client sends nothing more. None sets no limit.
        delta: The probability that the bound does not hold.
        level: "client" protects a client's whole data set, by noise on its update; "example" protects any single
            training example, by noise in every local step (DP-SGD).

    Examples:
        >>> import numpy, pfedhn
        >>> x, y = numpy.random.default_rng(0).normal(size=(600, 8)), numpy.arange(600) % 6
        >>> federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=12))
        >>> privacy = pfedhn.Privacy(clip=1.0, noise=2.0, level="example")
        >>> network = lambda: pfedhn.MLP(8, 16, 6)
        >>> run = pfedhn.train("fedavg", federation, network, steps=10, privacy=privacy, progress=False)
        >>> run.epsilon.shape
        (12,)
    """

    clip: float
    noise: float
    epsilon: float | None = None
    delta: float = 1e-5
    level: Literal["client", "example"] = "client"

    def __post_init__(self) -> None:
        if self.level not in ("client", "example"):
            raise UserError(f"level is {self.level!r}; it must be 'client' or 'example'.")
        if not self.clip > 0:
            raise UserError(f"clip is {self.clip}; it must be above 0.")
        if not 0 <= self.noise < math.inf:
            raise UserError(f"noise is {self.noise}; it must be at least 0.")
        if self.noise and self.clip == math.inf:
            raise UserError("clip is infinite, and noise is in multiples of it; give a finite clip.")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise UserError(f"epsilon is {self.epsilon}; it must be above 0.")
        if not 0 < self.delta < 1:
            raise UserError(f"delta is {self.delta}; it must be between 0 and 1.")

    def cost(self, size: int, batch_size: int, num_batches: int) -> RoundCost:
        """What one round costs a client.

        Args:
            size: How many training examples it has; this number itself is no secret.
            batch_size: Examples that a minibatch is expected to have.
            num_batches: Minibatches of a round.
        """
        if self.level == "client":
            return RoundCost(self.noise / 2, 1.0, 1)  # halved: the updates of two data sets may be 2 `clip` apart
        return RoundCost(self.noise, min(1.0, batch_size / max(1, size)), num_batches)

    def spent(self, cost: RoundCost, num_rounds: int) -> float:
        """Epsilon after so many rounds."""
        return spent([cost._replace(steps=cost.steps * num_rounds)], self.delta)

    def num_rounds(self, cost: RoundCost) -> int:
        """How many rounds the budget lasts."""
        return MAX_ROUNDS if self.epsilon is None else _num_rounds(cost, self.epsilon, self.delta)


def spent(history: Sequence[RoundCost], delta: float) -> float:
    """Epsilon after all of that, as Opacus' accountant has it (Rényi differential privacy)."""
    try:
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis.rdp import get_privacy_spent
    except ImportError:
        raise missing_extra("accounting for privacy", "privacy") from None
    history = [cost for cost in history if cost.steps]
    if not history:
        return 0.0
    if any(cost.noise == 0 for cost in history):
        return math.inf
    rdp = sum(cost.steps * _step_rdp(cost.noise, cost.sample_rate) for cost in history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says where another order would bound more tightly
        return float(get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=rdp, delta=delta)[0])


@lru_cache(maxsize=4096)  # the slow part of the accountant; as many as there are sizes of clients
def _step_rdp(noise: float, sample_rate: float) -> Any:
    """What one step costs, at each of the accountant's orders; the cost of several is the sum."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    return compute_rdp(q=sample_rate, noise_multiplier=noise, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)


@lru_cache(maxsize=4096)
def _num_rounds(cost: RoundCost, epsilon: float, delta: float) -> int:
    def is_within(count: int) -> bool:
        return spent([cost._replace(steps=cost.steps * count)], delta) <= epsilon

    if not is_within(1):
        return 0
    few = 1
    while few < MAX_ROUNDS and is_within(2 * few):
        few *= 2
    many = 2 * few
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if is_within(middle) else (few, middle)
    return few


@dataclass
class Protection:
    """Privacy at work in ONE client's round.

    Args:
        privacy: What is done.
        expected: How many examples a minibatch is expected to have; a number, or a tensor where clients are mapped.
        normal: Where the noise comes from.
        is_stepwise: Whether every step draws its own noise, which takes the memory of one step; all of it is drawn
            beforehand where steps are traced.
    """

    privacy: Privacy
    expected: Tensor | float
    normal: Normal
    is_stepwise: bool = False

    def step_noise(self, num_steps: int, vector: Tensor) -> Tensor:
        """[K, D]: what is added to the sum of clipped gradients in every step."""
        if self.privacy.noise == 0:
            return vector.new_zeros(num_steps, len(vector))
        noise = self.normal(num_steps * len(vector), vector).reshape(num_steps, len(vector))
        return self.privacy.noise * self.privacy.clip * noise

    def released(self, update: Params) -> Params:
        """The update as it may leave: clipped and noised, unless its training was.

        One that is not finite has no norm to scale down, and that training diverged tells of the data: it becomes 0.
        """
        if self.privacy.level == "example" or not update:
            return update
        is_finite = torch.stack([x.isfinite().all() for x in update.values()]).all()
        clipped = clip({name: torch.where(is_finite, x, 0.0) for name, x in update.items()}, self.privacy.clip)
        if self.privacy.noise == 0:
            return clipped
        scale = self.privacy.noise * self.privacy.clip
        return {name: x + scale * self.normal(math.prod(x.shape), x).reshape(x.shape) for name, x in clipped.items()}


_protection: ContextVar[Protection | None] = ContextVar("protection", default=None)


@contextmanager
def protecting(protection: Protection | None) -> Iterator[None]:
    """Inside the block, which is ONE client's training, its gradients are private if that is asked for."""
    token = _protection.set(protection)
    try:
        yield
    finally:
        _protection.reset(token)


def protected() -> Protection | None:
    """How the gradients of the client that is at work are to be protected; None if they are not."""
    protection = _protection.get()
    return protection if protection is not None and protection.privacy.level == "example" else None


def keyed_normal(key: Key) -> Normal:
    """Normal numbers that follow from a key."""
    number = 0

    def normal(count: int, like: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return keys.normal(keys.fold(key, number), count, like.device).to(like.dtype)

    return normal


def refuse_leaks(
    privacy: Privacy | None, has_statistics: bool, needs_descriptors: bool, unprotected: Sequence[str] = ()
) -> None:
    """Refuse what would tell of the data beside what is noised.

    Args:
        privacy: What the client does.
        has_statistics: Whether its network has batch statistics.
        needs_descriptors: Whether the server needs a description of it.
        unprotected: What the method computes from its examples besides gradients, by name.
    """
    if privacy is None:
        return
    if needs_descriptors:
        raise UserError("embedding = 'fixed' tells the server which classes a client has, and noise does not hide it.")
    if privacy.level == "example" and has_statistics:
        raise UserError(
            "BatchNorm mixes the examples of a minibatch, so that no example has a gradient of its own to clip; use "
            "GroupNorm or LayerNorm, or level = 'client'."
        )
    if privacy.level == "example" and unprotected:
        raise UserError(
            f"this method uses {', '.join(unprotected)} of a client's examples, which noise on gradients does not "
            "protect; use level = 'client'."
        )


NO_GRADIENT = (
    "this method takes several gradients of one minibatch, or gradients by something other than the weights, for which "
    "privacy of single examples is not offered; use level = 'client', or a method whose clients train by plain SGD: "
    "pfedhn, fedavg, fedprox, mr-mtl, fedper, fedrep, fedbabu, lg-fedavg, local."
)


def num_places(batch_size: int) -> int:
    """Room for a minibatch that examples join by themselves.

    More would join with a probability below exp(-30) = 1e-13 (Bernstein's inequality), and those are left out.
    """
    slack = 10 + math.sqrt(100 + 60 * batch_size)
    return batch_size + math.ceil(slack)
