"""The client half of the round on a party's own examples, computed as in a simulation of this client."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pfedhn import keys
from pfedhn.data.federation import Federation
from pfedhn.deploy.plan import Phase, exchange_of
from pfedhn.deploy.privacy import system_key
from pfedhn.engine.evaluate import sums
from pfedhn.engine.executors import EXECUTORS, Executor
from pfedhn.engine.network import choose_executor
from pfedhn.engine.plan import Plan
from pfedhn.engine.round import Kept, Offer, Reply, all_finite
from pfedhn.errors import RunError
from pfedhn.model import Model
from pfedhn.params import Params, take
from pfedhn.privacy import Privacy, Protection
from pfedhn.sgd import Batches

Scores = dict[str, list[float | int | None]]
"""By split: summed loss, summed metric (None if the task has none), number of examples."""


class LocalClient:
    """A client with its own examples, a federation of this client alone.

    `architecture` is the plan's network that it trains, the first by default.
    """

    def __init__(self, plan: Plan, data: Federation, architecture: str = "", privacy: Privacy | None = None) -> None:
        self.plan, self.data, self.privacy = plan, data, privacy
        self.architecture = architecture or next(iter(plan.models))

    @property
    def model(self) -> Model:
        return self.plan.models[self.architecture]

    @property
    def identity(self) -> Tensor:
        return self.data.identity(self._client[0])

    @property
    def _client(self) -> Tensor:
        """[1]: this client's place in its data, where it computes."""
        return torch.zeros(1, dtype=torch.int64, device=self.plan.device)

    @property
    def size(self) -> Tensor:
        return self.data.splits["train"].size[0]

    @property
    def descriptor(self) -> Any:
        """What describes this client to a method that asks for it; else nothing."""
        if not self.plan.algorithm.needs.descriptors:
            return ()
        return self.plan.descriptors_of(self.data)[0]

    def first_contact(self, phase: Phase, received: Params) -> Kept:
        """The client's private state before its first round."""
        start, num_labels = (
            self.plan.initial_models()[self.architecture],
            self.plan.extras[self.architecture].num_labels,
        )
        counts = None if num_labels is None else self.data.label_counts(0, num_labels)
        return exchange_of(self.plan, phase).first_contact(self.model, start, received, int(self.identity), counts)

    def train(self, phase: Phase, offer: Offer, kept: Kept, protection: Protection | None) -> tuple[Reply, Kept]:
        """One round: the reply and the client's private state after it."""
        exchange, number = exchange_of(self.plan, phase), int(offer.round)
        batches = self._batches(keys.fold(exchange.seed, "batches", number))
        noise = torch.as_tensor(keys.fold(exchange.seed, "noise", number, self.identity))
        given = offer, kept, batches
        with self._seeded(phase, noise), self.executors[phase].running(self.architecture, "train", given):
            update, after = exchange.train(self.model, offer, kept, batches, protection)
        if protection is not None and not bool(all_finite(after, self.size.device)):
            after = kept  # a refusal would reveal that the personal layers diverged on these data
        reply, kept = exchange.reply(offer, update, after, self.size, self.identity)
        if not bool(reply.metrics["is_finite"]):
            raise RunError(f"training diverged in round {number}; lower the learning rates.")
        return reply, kept

    def try_private_steps(self, privacy: Privacy) -> None:
        """Train once on zeros, so that a method without private steps is refused before a round costs budget."""
        exchange, start = self.plan.exchange, self.plan.initial_models()[self.architecture]
        shared = exchange.init_shared({self.architecture: self.model}, {self.architecture: start}, 0)
        row = self.plan.first_row(shared, self._client[0], None)
        offer = exchange.offer(self.model, shared, row, self._client[0], self.identity)
        kept = self.first_contact("training", self.plan.download.decode(offer.weights, self.model.dtype))
        shape = self.plan.algorithm.num_batches, 2
        x, y = (values.new_zeros(*shape, *values.shape[1:]) for values in self.data.examples(self._client))
        protection = Protection(privacy, 2.0, lambda count, like: like.new_zeros(count), is_stepwise=True)
        mask = torch.ones(shape, dtype=torch.bool, device=self.plan.device)
        exchange.train(self.model, offer, kept, Batches(x, y, mask), protection)

    def _batches(self, key: keys.Key) -> Batches:
        """The minibatches of a round; those of private steps must stay as secret as the noise."""
        is_secret = self.privacy is not None and self.privacy.level == "example"
        draw, key = (self.data.sampled_batches, system_key()) if is_secret else (self.data.batches, key)
        return take(draw(self._client, key, self.plan.algorithm.num_batches, self.plan.schedule.batch_size), 0)

    def personal_weights(self, phase: Phase, number: int, received: Params, kept: Kept, is_adapted: bool) -> Params:
        """The weights that this client would use after a round."""
        exchange = exchange_of(self.plan, phase)
        key = exchange.personalize_key(number)
        num_batches = exchange.num_personal_batches(self.model, is_adapted)
        batches = take(self.data.batches(self._client, key, num_batches, self.plan.schedule.batch_size), 0)
        noise = torch.as_tensor(keys.fold(key, "noise", self.identity))
        given = received, kept, batches
        with self._seeded(phase, noise), self.executors[phase].running(self.architecture, "personalize", given):
            return exchange.personalize(self.model, received, kept, batches, is_adapted)

    def scores(self, weights: Params, splits: Iterable[str]) -> Scores:
        """The scores of these weights on this client's examples."""
        found: Scores = {}
        for split in splits:
            examples = self.data.splits[split].of(0)
            loss, metric = sums(self.model, weights, self.data, examples)
            if not math.isfinite(loss):
                raise RunError("the received weights give no finite loss on this party's examples.")
            found[split] = [loss, metric, len(examples)]
        return found

    def scores_of_other(self, architecture: str, received: Params, splits: Iterable[str]) -> Scores:
        """The scores of another client's model, made of nothing but what the server publishes for it."""
        other = LocalClient(self.plan, self.data, architecture)
        kept = other.first_contact("training", received)
        return other.scores(other.personal_weights("training", 0, received, kept, False), splits)

    def no_scores(self, splits: Iterable[str]) -> Scores:
        """The scores of a client that keeps them to itself."""
        return {split: [0.0, None if self.model.per_example_metric is None else 0.0, 0] for split in splits}

    def _seeded(self, phase: Phase, noise: Tensor) -> AbstractContextManager[None]:
        """Draw the network's random numbers from this key, as a simulation of this client does."""
        return self.model.seeded(noise, self.executors[phase].name == "loop")

    @cached_property
    def executors(self) -> dict[str, Executor]:
        # Noise that protects data comes from the operating system and must be drawn anew in every step, which a graph
        # that is traced once would not do.
        asked = self.plan.executor if self.privacy is None else "loop"
        name = choose_executor(asked, self.model, self.data, clients_per_round=1)
        return {phase: EXECUTORS[name]() for phase in ("training", "joining")}
