"""The local steps of a captured round: clients of one architecture together, their minibatches in bounded memory.

Axes: [C]lients of a cohort.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.combinators import with_settings
from pfedhn.engine.captured_round import drawing, exchange_with_rates
from pfedhn.engine.executors import TogetherScan, Traced, TracedScan
from pfedhn.engine.gpu import compile_graph, compile_once, content, form, shared_by_equal_runs
from pfedhn.engine.round import Kept, Offer
from pfedhn.engine.simulate import Simulation
from pfedhn.kernels import launch as kernels
from pfedhn.model import Model
from pfedhn.params import Params, stack, take
from pfedhn.settings import kinds_of
from pfedhn.sgd import Batches
from pfedhn.system import fingerprint

MAX_TOGETHER = 32  # clients whose minibatches are in memory at a time; they fill a GPU

ClientResult: TypeAlias = tuple[Params, Kept]
"""A client's update and what it keeps, [C, ...]."""


def trace_key(simulation: Simulation, rates: Params, *parts: Any) -> Any:
    """Runs with equal keys trace alike: rates, seeds and data are arguments of what is traced."""
    settings = with_settings(simulation.algorithm, dict.fromkeys(rates))
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    how = (str(simulation.device), kernels.dot_precision(), kernels.SharedGPU.runs, is_deterministic)
    models = tuple(
        (model, form(model.training_module), content((model.per_example_loss, model.per_example_metric)))
        for model in simulation.models.values()
    )
    exchange = simulation.exchange
    draws = exchange.upload.draws or exchange.download.draws
    wire = (exchange.upload, exchange.download, exchange.is_frozen, exchange.seed if draws else None)
    code = tuple(map(fingerprint.of_code, kinds_of(settings)))
    return (*parts, code, content(settings), tuple(rates), models, how, wire)


@dataclass(eq=False)
class LocalSteps:
    """Draws minibatches and trains on them; the round's number is read from `counter` on the device."""

    simulation: Simulation
    rates: Params
    counter: Tensor
    identities: Tensor  # [N]
    scans: dict[tuple[str, int], TracedScan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        simulation, device = self.simulation, self.counter.device
        self.batch_key = torch.tensor(keys.fold(simulation.seed, "batches"), device=device)
        self.noise_key = torch.tensor(keys.fold(simulation.seed, "noise"), device=device)
        # Made here: the compiler takes an arange inside a graph for 32-bit indices, and keys need 64 bits.
        self.steps = torch.arange(simulation.algorithm.num_batches, device=device)
        index = simulation.federation.splits["train"].index
        # As long as the data: seeds leave a few rows more or less to nobody, and must not be compiled for one by one.
        self.index = functional.pad(index, (0, max(0, len(simulation.federation.x) - len(index))))
        width = min(simulation.schedule.batch_size, simulation.federation.largest_train_size)
        self.draw = shared_by_equal_runs(
            trace_key(simulation, self.rates, "draw", width, simulation.federation.palette is None),
            lambda: Traced(drawing(width), compile_once, needs_numbers=False),
        )

    def train_all(self, groups: Sequence[tuple[Model, Tensor, Offer, Kept]]) -> list[ClientResult]:
        """Every group's local steps, on branches of the graph that do not wait for one another."""
        if not self.counter.is_cuda or len(groups) == 1:
            return [self.train_group(*group) for group in groups]
        main = torch.cuda.current_stream()
        results = []
        branches = [torch.cuda.Stream() for _ in groups]
        for branch, group in zip(branches, groups, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                results.append(self.train_group(*group))
        for branch in branches:
            main.wait_stream(branch)
        return results

    def train_group(self, model: Model, members: Tensor, offers: Offer, kept: Kept) -> ClientResult:
        """The clients [C, ...] of one architecture, so many at a time that their minibatches take bounded memory."""
        federation = self.simulation.federation
        train = federation.splits["train"]
        tables = (self.index, train.offset, train.size, self.identities, self.steps)
        palette = () if federation.palette is None else (federation.palette,)
        data = (federation.x, federation.y, palette, *tables)
        results = []
        count = kernels.ceil_divide(len(members), MAX_TOGETHER)
        for number in range(count):
            part = slice(len(members) * number // count, len(members) * (number + 1) // count)
            batches = self.draw(self.counter, self.batch_key, members[part], data)
            noise = members[part]  # of no use without dropout, and no kernel more
            if model.has_dropout:
                noise = torch.as_tensor(keys.fold(self.noise_key, self.counter, self.identities[noise]))
            results.append(self._train(model, *take((offers, kept), part), batches, noise))
        return results[0] if len(results) == 1 else pytree.tree_map(lambda *parts: torch.cat(parts), *results)

    def _train(self, model: Model, offers: Offer, kept: Kept, batches: Batches, noise: Tensor) -> ClientResult:
        """The clients of one architecture, all arguments [C, ...]: together, so that a kernel serves all of them."""
        count = batches.mask.shape[0]
        kind = TracedScan if count == 1 else TogetherScan
        if (model.name, count) not in self.scans:
            make = partial(kind, compile_graph, is_always_watched=True, hoists=True)
            self.scans[model.name, count] = shared_by_equal_runs(
                trace_key(self.simulation, self.rates, "steps", model.name, count), make
            )
        exchange = exchange_with_rates(self.simulation.exchange, self.rates)

        def train(offer: Offer, kept: Kept, batches: Batches, noise: Tensor) -> ClientResult:
            with model.seeded(noise, is_alone=False):
                return exchange.train(model, offer, kept, batches)

        given = (offers, kept, batches, noise)
        with self.scans[model.name, count].running(given):
            if count == 1:
                return stack([train(*take(given, 0))])
            result: ClientResult = torch.vmap(train)(*given)
            return result
