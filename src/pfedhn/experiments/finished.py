"""A finished run with its clients' data, and what a study computes from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pfedhn.data.federation import Federation
from pfedhn.engine.evaluate import sums
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import RunError
from pfedhn.experiments.analysis import Analysis, read_analysis, write_analysis
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import Cell, RunSpec
from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.runs.execute import computing_on
from pfedhn.runs.load import load
from pfedhn.runs.run import Run
from pfedhn.storage.directory import read_result
from pfedhn.storage.identity import partition_digest


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
        """Build the federation of a cell that differs in some fields, such as its partition."""
        return _federation(replace(self.cell, **changes), self.seed, self.options)

    def shared(self, last: bool = False) -> Any:
        """The server's memory for all as clients use it, at the chosen round or after the last one."""
        return self.run.plan.exchange.used(self.run.memories(last).shared)

    def embeddings(self, last: bool = False) -> Tensor:
        """[N, D]: the clients' embeddings at the chosen round, or after the last one."""
        return self.run.embeddings(last)

    def scores(self, model: Model, weights: Params, client: int, split: str = "test") -> tuple[float, float, int]:
        """Summed loss and metric of some weights on a client's examples of a split, and the number of those."""
        numbers = self.federation.splits[split].of(client)
        loss, metric = sums(model, weights, self.federation, numbers)
        return loss, metric or 0.0, len(numbers)


def compute_missing(
    study: str,
    compute: Callable[[Finished], Mapping[str, Any]],
    directory: Path,
    runs: Sequence[RunSpec],
    options: Options,
    say: Callable[[str], None],
) -> None:
    """Compute a study's numbers from every finished run that lacks them, and write them beside its result."""
    with computing_on(options.device, options.precision, options.deterministic):
        for run in runs:
            folder = directory / run.name
            result = read_result(folder)
            if result is None or read_analysis(folder, result) is not None:
                continue
            say(f"Computing {study} from {run.name}.")
            loaded = load(folder, device=options.device)
            federation = _federation(run.cell, run.seed, options)
            if loaded.result is None or partition_digest(federation) != loaded.result.partition_sha256:
                raise RunError(f"{folder} was made with other data than {run.cell.dataset} is now; run it again.")
            loaded.plan = Simulation.of(loaded.plan, federation)
            values = compute(Finished(loaded, run.cell, run.seed, options))
            write_analysis(folder, Analysis.of(study, result, values))


def _federation(cell: Cell, seed: int, options: Options) -> Federation:
    return build_federation(cell, seed, options.data_dir, options.device).to(options.device)
