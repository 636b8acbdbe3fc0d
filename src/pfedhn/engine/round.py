"""THE round, once: the server's half, the client's half, and the two values that cross the wire between them.

    server                                    wire                                   client
    offer: send, encode ------------------- Offer -------------------> train: decode, local steps
    step: decode, receive <---------------- Reply -------------------- reply: encode, say how it went

The simulator, the captured round, a client that joins later and a network differ only in how they carry these values.
What is in neither does not cross the wire, and bytes are counted here alone.
Axes: [N] clients, [C]lients of a cohort that share one architecture.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithm import LABEL_COUNTS, Algorithm, Group, client_weights
from pfedhn.combinators import innermost, memory_for_use, newest_memory, num_fine_tuning_steps, used_memory
from pfedhn.engine.transform import FULL, Full, Transform
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, num_bytes, pick, subtract, take, weighted, weighted_sum
from pfedhn.privacy import Protection, protecting
from pfedhn.sgd import Batches
from pfedhn.statistics import COUNT, tracking

BATCHES_TO_JOIN = 10  # from which a client that joins makes its batch statistics


class Offer(NamedTuple):
    """What goes down to ONE client; a leading axis makes a stack."""

    weights: Any  # as the download's transform encoded them
    round: Tensor
    version: Tensor  # of the server: how many steps it had taken when it made the weights


class Reply(NamedTuple):
    """What comes back from ONE client; a leading axis makes a stack."""

    update: Any  # as the upload's transform encoded it
    size: Tensor  # training examples
    metrics: dict[str, Tensor]  # what the client says of its own work: "is_finite"
    round: Tensor  # that it answers
    version: Tensor  # of the server that it answers


class Kept(NamedTuple):
    """What ONE client keeps for itself."""

    private: Any  # the method's
    upload: Any  # its transform's
    statistics: Params  # of its BatchNorm layers


class SharedStatistics(NamedTuple):
    """The server's shared memory, and the batch statistics that clients share."""

    method: Any
    statistics: dict[str, Params]  # by architecture


class Returned(NamedTuple):
    """The replies of the clients of one architecture, and the server's memory of them."""

    model: Model
    rows: Any  # [C, ...]
    replies: Reply  # [C, ...]


@dataclass(frozen=True)
class Exchange:
    """One method, and what is done to its messages. Every function but `step` sees ONE client.

    Args:
        algorithm: The method.
        seed: Of the run; the draws of transforms are keyed by it, the round and the client.
        upload: What a client does to its update.
        download: What the server does to the weights that it sends.
        is_frozen: Whether the server's shared memory is trained and stays as it is: clients join, and only their rows
            and what they keep learn.
    """

    algorithm: Algorithm[Any, Any, Any]
    seed: Key
    upload: Transform = FULL
    download: Transform = FULL
    is_frozen: bool = False

    @property
    def method_name(self) -> str:
        """The class of the method inside its wrappers."""
        return type(innermost(self.algorithm)).__name__

    @property
    def fine_tunes(self) -> bool:
        """Whether clients fine-tune their models before they use them."""
        return num_fine_tuning_steps(self.algorithm) > 0

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Any:
        """The server's shared memory at round 0."""
        weights = {name: pick(start, models[name].shapes) for name, start in starts.items()}
        shared = self.algorithm.init_shared(models, weights, key)
        if not any(map(self._shares, models.values())):
            return shared
        statistics = {name: shareable(model.statistics | starts[name]) for name, model in models.items()}
        return SharedStatistics(shared, {name: pick(statistics[name], models[name].statistics) for name in models})

    def _shares(self, model: Model) -> bool:
        """Whether the batch statistics of a network travel with its weights."""
        needs = self.algorithm.needs
        return bool(model.statistics) and needs.statistics == "shared" and needs.communication

    def memory_of_method(self, shared: Any) -> Any:
        """The shared memory as the method made it, without batch statistics."""
        return shared.method if isinstance(shared, SharedStatistics) else shared

    def newest(self, shared: Any) -> Any:
        """The innermost method's shared memory as it trains."""
        return newest_memory(self.algorithm, self.memory_of_method(shared))

    def used(self, shared: Any) -> Any:
        """The innermost method's shared memory as clients use it: averaged, if the method is."""
        return used_memory(self.algorithm, self.memory_of_method(shared))

    def for_use(self, shared: Any) -> Any:
        """The shared memory, in the same form, without what is of no use to those who do not train it."""
        method = memory_for_use(self.algorithm, self.memory_of_method(shared))
        return shared._replace(method=method) if isinstance(shared, SharedStatistics) else method

    def offer(self, model: Model, shared: Any, row: Any, number: Tensor, identity: Tensor) -> Offer:
        """The server's half, first part. A server that waits for every reply has taken one step per round."""
        key = self._key(self.download, "download", number, identity)
        return Offer(self.download.encode(self.sent(model, shared, row), key, ())[0], number, number)

    def sent(self, model: Model, shared: Any, row: Any) -> Params:
        """What ONE client receives, before it is encoded: weights, extras, and batch statistics if they are shared."""
        make = self.algorithm.publish if self.is_frozen else self.algorithm.send
        weights = make(model, self.memory_of_method(shared), row)
        refuse_undeclared("send", weights, model, self.algorithm.extras(model).down)
        return weights | shared.statistics[model.name] if self._shares(model) else weights

    def update_form(self, model: Model, received: Params) -> Params:
        """Values of the form in which a client sends its update: the names that it received, and its extras."""
        extras = self.algorithm.extras(model)
        weights = {name: value for name, value in received.items() if name not in extras.down}
        zeros = partial(torch.zeros, dtype=model.dtype, device=model.device)
        return weights | {name: zeros(extra.shape) for name, extra in extras.up.items()}

    def first_contact(
        self, model: Model, start: Params, received: Params, identity: int, label_counts: Tensor | None = None
    ) -> Kept:
        """What a client keeps before its first round.

        Args:
            model: The client's network.
            start: Its initial weights.
            received: What the client receives; only the form counts.
            identity: What the client's draws are keyed by.
            label_counts: The client's, if the method needs them; without them, only the form of the result counts.
        """
        weights, num_labels = pick(start, model.shapes), self.algorithm.extras(model).num_labels
        if num_labels is not None:
            none = torch.zeros(num_labels, dtype=torch.int64, device=model.device)
            weights[LABEL_COUNTS] = none if label_counts is None else label_counts
        private = self.algorithm.init_private(model, weights, keys.fold(self.seed, "private", identity))
        state = self.upload.init_state(self.update_form(model, received))
        return Kept(private, state, pick(model.statistics | start, model.statistics))

    def train(
        self, model: Model, offer: Offer, kept: Kept, batches: Batches, protection: Protection | None = None
    ) -> tuple[Params, Kept]:
        """The client's half, first part: the local steps, and an update that may leave the client."""
        received = self.download.decode(offer.weights, model.dtype)
        extras = self.algorithm.extras(model)
        given, shared = pick(received, {**model.shapes, **extras.down}), pick(received, model.statistics)
        with protecting(protection), tracking(kept.statistics | shared) as tracker:
            update, private = self.algorithm.train(model, given, kept.private, batches)
        refuse_undeclared("train", update, model, {name: extra.shape for name, extra in extras.up.items()})
        weights = {name: value for name, value in update.items() if name not in extras.up}
        update = weights | subtract(shared, tracker.now) | {name: update[name] for name in extras.up}
        kept = kept._replace(private=private, statistics=tracker.now)
        return (update if protection is None else protection.released(update)), kept

    def reply(self, offer: Offer, update: Params, kept: Kept, size: Tensor, identity: Tensor) -> tuple[Reply, Kept]:
        """The client's half, second part: what it sends, and what it keeps."""
        is_finite = all_finite((update, kept.private, kept.statistics), offer.round.device)
        key = self._key(self.upload, "upload", offer.round, identity)
        encoded, state = self.upload.encode(update, key, kept.upload)
        return Reply(encoded, size, {"is_finite": is_finite}, offer.round, offer.version), kept._replace(upload=state)

    def step(self, shared: Any, returned: Sequence[Returned], now: Tensor | None = None) -> tuple[Any, list[Any]]:
        """The server's half, second part: one step from the replies of a cohort; the new rows of each group.

        Args:
            shared: The server's shared memory.
            returned: The replies.
            now: The version of the server, where replies may be for older ones; their updates then count less.
        """
        groups = []
        for one in returned:
            parts = None if now is None else fresh_parts(one.replies, now)
            decoded, up = self.decoded(one), self.algorithm.extras(one.model).up
            updates = {name: value for name, value in decoded.items() if name not in up}
            updates = updates if parts is None else weighted(updates, parts)
            groups.append(Group(one.model, one.rows, updates, one.replies.size, parts, pick(decoded, up)))
        if not isinstance(shared, SharedStatistics):
            return self._stepped(shared, groups)
        moved = shared.statistics | {group.model.name: _mean_statistics(shared.statistics, group) for group in groups}
        weights = [group._replace(updates=pick(group.updates, group.model.shapes)) for group in groups]
        method, rows = self._stepped(shared.method, weights)
        return (shared if self.is_frozen else SharedStatistics(method, moved)), rows

    def _stepped(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[Any]]:
        if self.is_frozen:
            return shared, [self._moved_rows(shared, group) for group in groups]
        return self.algorithm.receive(shared, groups)

    def num_personal_batches(self, model: Model, is_adapted: bool = False) -> int:
        """Minibatches of training data that a client needs to make its own weights."""
        steps = num_fine_tuning_steps(self.algorithm) if is_adapted else 0
        return self.algorithm.num_personalize_batches + steps + self._num_statistics_batches(model)

    def _num_statistics_batches(self, model: Model) -> int:
        """Minibatches for new batch statistics; a client that joins always makes its own anew."""
        if not model.statistics or self._shares(model):
            return 0
        return self.algorithm.needs.statistics_batches or (BATCHES_TO_JOIN if self.is_frozen else 0)

    def personal_weights(
        self, model: Model, shared: Any, row: Any, kept: Kept, batches: Batches, is_adapted: bool = False
    ) -> Params:
        """The weights ONE client would use now, after its fine-tuning steps if they are asked for.

        Its batch statistics are among them.
        """
        return self.personalize(model, self.publish(model, shared, row), kept, batches, is_adapted)

    def publish(self, model: Model, shared: Any, row: Any) -> Params:
        """The server's half of it: what ONE client is given to use. No transform touches it."""
        weights = self.algorithm.publish(model, self.memory_of_method(shared), row)
        return weights | shared.statistics[model.name] if self._shares(model) else weights

    def personalize(
        self, model: Model, received: Params, kept: Kept, batches: Batches, is_adapted: bool = False
    ) -> Params:
        """The client's half of it: what it makes of what it was given."""
        algorithm, first = self.algorithm, self.algorithm.num_personalize_batches
        second = first + (num_fine_tuning_steps(algorithm) if is_adapted else 0)
        down = self.algorithm.extras(model).down
        given = pick(received, {**model.shapes, **down})
        with tracking(kept.statistics | pick(received, model.statistics)) as tracker:
            weights = algorithm.personalize(model, given, kept.private, take(batches, slice(first)))
            weights = {name: value for name, value in weights.items() if name not in down}
            if is_adapted and (tuning := algorithm.fine_tuning) is not None:
                steps = take(batches, slice(first, second))
                weights, _ = tuning.sgd.run(model.loss, weights, steps, frozen=tuning.frozen(model))
        if not model.statistics:
            return weights
        if self._num_statistics_batches(model):
            return weights | model.statistics_from(weights, take(batches, slice(second, None)))
        return weights | tracker.now

    def personalize_key(self, number: int) -> Key:
        """What the draws of an evaluation after round `number` are keyed by."""
        return keys.fold(self.seed, "personalise", number)  # spelled as in every stored result

    def _key(self, transform: Transform, purpose: str, number: Tensor, identity: Tensor) -> Key:
        return 0 if isinstance(transform, Full) else keys.fold(self.seed, purpose, number, identity)

    def decoded(self, returned: Returned) -> Params:
        """The updates of a group [C, ...] as the server takes them, extras among them."""

        def decode(encoded: Any) -> Params:
            return self.upload.decode(encoded, returned.model.dtype)

        update = returned.replies.update
        if isinstance(self.upload, Full) or not pytree.tree_leaves(update):
            return decode(update)
        result: Params = torch.vmap(decode)(update)
        return result

    def _moved_rows(self, shared: Any, group: Group) -> Any:
        if not pytree.tree_leaves(group.rows):
            return group.rows
        return torch.vmap(lambda row, update: self.algorithm.move_row(group.model, shared, row, update))(
            group.rows, group.updates
        )


def refuse_undeclared(function: str, values: Params, model: Model, declared: Mapping[str, Sequence[int]]) -> None:
    """Refuse what a method adds to weights or an update, unless `extras` declares it."""
    known = {*model.shapes, *model.statistics}
    found = {name: tuple(value.shape) for name, value in values.items() if name not in known}
    wanted = {name: tuple(shape) for name, shape in declared.items()}
    if found != wanted:
        raise UserError(
            f"`{function}` returns {_listed(found)} beside weights, and `extras` declares {_listed(wanted)}; declare "
            "there what the function returns."
        )


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name!r} of shape {shape}" for name, shape in shapes.items()) or "nothing"


def fresh_parts(replies: Reply, now: Tensor) -> Tensor:
    """How much each of [C] updates counts: one for weights that are s steps old, 1 / (1 + s).

    Until an update arrives, s others have been made that may say the same; all of them in full would overshoot.
    """
    return 1.0 / (1 + now - replies.version)


def shareable(statistics: Params) -> Params:
    """Batch statistics that can be averaged; how many batches a client saw is its own."""
    return {name: value for name, value in statistics.items() if not name.endswith(COUNT)}


def _mean_statistics(before: Mapping[str, Params], group: Group) -> Params:
    """The statistics that clients share after a round: a mean by training examples, as FedAvg's of weights."""
    old = before[group.model.name]
    return subtract(old, weighted_sum(pick(group.updates, old), client_weights("size", group.sizes)))


def all_finite(tree: Any, device: torch.device) -> Tensor:
    """Whether every number of a tree is finite."""
    # Put together first: a check for each tensor was an eighth of the server step's graph, which has to be compiled.
    numbers = [leaf.flatten() for leaf in pytree.tree_leaves(tree) if leaf.is_floating_point()]
    return torch.cat(numbers).isfinite().all() if numbers else torch.ones((), dtype=torch.bool, device=device)


def bytes_down(offers: Iterable[Offer]) -> int:
    """What offers, each a stack, weigh on the wire: the weights as encoded."""
    return sum(num_bytes(offer.weights) for offer in offers)


def bytes_up(replies: Iterable[Reply]) -> int:
    """What replies, each a stack, weigh on the wire: the updates as encoded."""
    return sum(num_bytes(reply.update) for reply in replies)


def bytes_of_starts(starts: Mapping[str, Params], num_clients: Mapping[str, int]) -> int:
    """What it weighs to give every client the model that an earlier run made; a fresh start travels as its key."""
    return sum(count * num_bytes(starts[name]) for name, count in num_clients.items())
