"""A captured round but for its local steps: who takes part, and what comes before and after, as traced functions.

Axes: [C]lients of a cohort.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.combinators import with_settings
from pfedhn.data.batches import Examples, cohort, draw_batches
from pfedhn.engine.executors import Function
from pfedhn.engine.round import Exchange, Offer, Returned, bytes_down, bytes_up
from pfedhn.engine.simulate import Simulation
from pfedhn.kernels import launch as kernels
from pfedhn.model import Model
from pfedhn.params import Params, take
from pfedhn.settings import kinds_of, settings_in, values_of
from pfedhn.sgd import Batches, is_rate

MIN_ROUNDS = 8192  # the schedule's length: runs of other lengths, as in tuning, are not compiled for anew

Signature: TypeAlias = tuple[tuple[str, int], ...]
"""The make-up of a cohort: how many clients of each architecture."""


def rates(algorithm: Any, dtype: torch.dtype, device: torch.device) -> Params:
    """The settings that a grid varies, as tensors: graphs take them as data, so that a grid compiles once."""
    values, settings = values_of(algorithm), settings_in(kinds_of(algorithm))
    given = {name: value for name, value in values.items() if is_rate(settings[name].hint) and value is not None}
    return {name: torch.as_tensor(value, dtype=dtype, device=device) for name, value in given.items()}


def exchange_with_rates(exchange: Exchange, rates: Mapping[str, Any]) -> Exchange:
    return replace(exchange, algorithm=with_settings(exchange.algorithm, rates))


def offers_to_all(
    exchange: Exchange, model: Model, shared: Any, rows: Any, number: Tensor, identities: Tensor
) -> Offer:
    """What [C] clients are offered, stacked; a method without rows sends one thing to all of them."""
    if pytree.tree_leaves(rows) or exchange.download.draws:
        stacked: Offer = torch.vmap(lambda row, identity: exchange.offer(model, shared, row, number, identity))(
            rows, identities
        )
        return stacked
    one = exchange.offer(model, shared, rows, number, identities[0])
    offers: Offer = pytree.tree_map(lambda leaf: leaf.expand(len(identities), *leaf.shape), one)
    return offers


def before_training(exchange: Exchange, models: Mapping[str, Model], signature: Signature) -> Function:
    """The members of the cohort, their offers and the memory that they keep."""

    def before(rates: Params, counter: Tensor, schedule: Tensor, memories: Any, slots: Any, identities: Tensor) -> Any:
        shared, rows_table, private_tables = memories
        # schedule[counter] would ask the host. Where everybody takes part in every round, the schedule has one line.
        everybody = schedule.index_select(0, counter.remainder(len(schedule)).reshape(1)).squeeze(0)
        number = counter.clone()  # a copy: the counter moves on at the end of the round
        results = []
        start = 0
        for name, count in signature:
            members = everybody[start : start + count]
            start += count
            rows = take(rows_table, members)
            kept = take(private_tables[name], slots[name][members])
            at_rates = exchange_with_rates(exchange, rates)
            offers = offers_to_all(at_rates, models[name], shared, rows, number, identities[members])
            results.append((members, rows, offers, kept))
        return results

    return before


def drawing(width: int) -> Function:
    """The rows that some clients train on in a round."""

    def draw(counter: Tensor, batch_key: Tensor, members: Tensor, data: Any) -> Batches:
        x, y, palette, index, offset, size, identities, steps = data  # a palette, or nothing
        examples, key = Examples(index, offset, size), keys.fold(batch_key, counter)
        return draw_batches(x, y, examples, members, key, steps, width, identities[members], *palette)

    return draw


def after_training(exchange: Exchange, models: Mapping[str, Model], signature: Signature) -> Function:
    """Collect the replies, take the server step and write the memories back, unless a number is not finite."""

    def after(
        rates: Params,
        counter: Tensor,
        bad: Tensor,
        memories: Any,
        slots: Any,
        sizes: Tensor,
        identities: Tensor,
        trained: Any,
    ) -> None:
        shared, rows_table, private_tables = memories
        at_rates = exchange_with_rates(exchange, rates)
        returned, remembered = [], []
        for (name, _), (members, rows, offers, updates, kept) in zip(signature, trained, strict=True):
            replies, kept = torch.vmap(at_rates.reply)(offers, updates, kept, sizes[members], identities[members])
            returned.append(Returned(models[name], rows, replies))
            remembered.append(kept)
        finite = torch.cat([part.replies.metrics["is_finite"] for part in returned])
        everybody = torch.cat([members for members, *_ in trained])
        is_good = finite.all() & (bad[0] < 0)
        new_shared, new_rows = at_rates.step(shared, returned)
        for old, new in zip(pytree.tree_leaves(shared), pytree.tree_leaves(new_shared), strict=True):
            old.copy_(torch.where(is_good, new, old))
        for (name, _), (members, rows, *_), kept, rows_after in zip(
            signature, trained, remembered, new_rows, strict=True
        ):
            _write(rows_table, members, rows, rows_after, is_good)
            places = slots[name][members]
            _write(private_tables[name], places, take(private_tables[name], places), kept, is_good)
        first_bad = torch.stack(
            [counter, everybody.index_select(0, (~finite).to(torch.int8).argmax().reshape(1)).squeeze(0)]
        )
        bad.copy_(torch.where(is_good | (bad[0] >= 0), bad, first_bad))
        counter.add_(1)

    return after


def _write(table: Any, index: Tensor, old: Any, new: Any, is_good: Tensor) -> None:
    for leaf, before, after in zip(
        pytree.tree_leaves(table), pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True
    ):
        leaf.index_copy_(0, index, torch.where(is_good, after, before))


def cohort_schedule(simulation: Simulation) -> tuple[Tensor, list[Signature]]:
    """Who takes part in every round [rounds, C], clients of one architecture side by side; and its make-up."""
    is_everybody = simulation.clients_per_round == simulation.federation.num_clients
    members = cohort(
        keys.fold(simulation.seed, "rounds"),
        torch.arange(1 if is_everybody else simulation.num_rounds),
        simulation.federation.num_clients,
        simulation.clients_per_round,
    ).reshape(-1, simulation.clients_per_round)
    order = {name: number for number, name in enumerate(simulation.models)}
    signatures: list[Signature] = []
    if len(order) > 1:  # one graph per make-up of the cohort: clients of one architecture side by side
        names = [[simulation.model_of(client).name for client in row] for row in members.tolist()]
        ranks = torch.tensor([[order[name] for name in row] for row in names])
        members = members.gather(1, ranks.argsort(dim=1, stable=True))
        counts = [Counter(row) for row in names]
        signatures = [tuple((name, count[name]) for name in order if count[name]) for count in counts]
    else:
        signatures = [((next(iter(order)), simulation.clients_per_round),)] * simulation.num_rounds
    if is_everybody:
        signatures = signatures[:1] * simulation.num_rounds
    spare = 0 if is_everybody else max(MIN_ROUNDS, kernels.power_of_two(len(members))) - len(members)
    return functional.pad(members, (0, 0, 0, spare)).to(simulation.device), signatures


class RoundBytes(NamedTuple):
    """Bytes of one round."""

    down: int
    up: int


def bytes_of_rounds(
    simulation: Simulation, memories: Any, one: Tensor, signatures: list[Signature]
) -> dict[Signature, RoundBytes]:
    """What a round of each make-up weighs on the wire, from one client of each architecture."""
    exchange, number = simulation.exchange, torch.zeros((), dtype=torch.int64, device=simulation.device)
    shared, rows, private = memories
    each = {}
    for name, tree in private.items():
        model = simulation.models[name]
        offer = exchange.offer(model, shared, take(rows, 0), number, one)
        update = exchange.update_form(model, exchange.download.decode(offer.weights, model.dtype))
        reply, _ = exchange.reply(offer, update, take(tree, 0), number, one)
        each[name] = RoundBytes(bytes_down([offer]), bytes_up([reply]))
    return {
        s: RoundBytes(*(sum(count * each[name][way] for name, count in s) for way in range(2))) for s in set(signatures)
    }
