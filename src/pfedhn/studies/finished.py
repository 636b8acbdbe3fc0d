"""A finished run, with its clients' data: what a study computes from."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pfedhn.data.federation import Federation
from pfedhn.engine.evaluate import sums
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import Cell
from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.runs.run import Run


@dataclass(frozen=True)
class Finished:
    """A finished run, with its clients' data: what `compute` is given."""

    run: Run
    cell: Cell
    seed: int
    options: Options

    @property
    def federation(self) -> Federation:
        return self.run.simulation.federation

    def another_federation(self, **changes: Any) -> Federation:
        """The federation of a cell that differs in some fields, such as its partition."""
        cell = replace(self.cell, **changes)
        federation = build_federation(cell, self.seed, self.options.data_dir, self.options.device)
        return federation.to(self.options.device)

    def shared(self, last: bool = False) -> Any:
        """The server's memory for all as clients use it, at the chosen round or after the last one."""
        return self.run.plan.exchange.used(self.run.memories(last).shared)

    def embeddings(self, last: bool = False) -> Tensor:
        """[N, D]: what the server knows of each client at the chosen round, or after the last one."""
        return self.run.embeddings(last)

    def scores(self, model: Model, weights: Params, client: int, split: str = "test") -> tuple[float, float, int]:
        """Summed loss and metric of some weights on a client's examples of a split, and the number of those."""
        numbers = self.federation.splits[split].of(client)
        loss, metric = sums(model, weights, self.federation, numbers)
        return loss, metric or 0.0, len(numbers)
