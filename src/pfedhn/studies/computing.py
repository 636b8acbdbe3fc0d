"""The first stage of a study: what is computed from finished runs, where their models and data are."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pfedhn.engine.simulate import Simulation
from pfedhn.errors import RunError
from pfedhn.experiments.analysis import Analysis, read_analysis, write_analysis
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import RunSpec
from pfedhn.runs.execute import computing_on
from pfedhn.runs.load import load
from pfedhn.storage.directory import read_result
from pfedhn.storage.identity import partition_digest
from pfedhn.studies.finished import Finished
from pfedhn.studies.study import Study


def compute_missing(
    study: Study, directory: Path, runs: Sequence[RunSpec], options: Options, say: Callable[[str], None]
) -> None:
    """Compute what is not there yet from every finished run, and write it beside its result.

    Args:
        study: What is computed.
        directory: Of the experiment.
        runs: Its runs; those that are not finished are passed over.
        options: Where the data and the device are.
        say: Told which run is looked at.
    """
    if study.compute is None:
        return
    with computing_on(options.device, options.precision, options.deterministic):
        for run in runs:
            folder = directory / run.name
            result = read_result(folder)
            if result is None or read_analysis(folder, result) is not None:
                continue
            say(f"Computing {study.name} from {run.name}.")
            values = study.compute(finished_run(folder, run, options))
            write_analysis(folder, Analysis.of(study.name, result, values))


def finished_run(folder: Path, run: RunSpec, options: Options) -> Finished:
    """A run from its directory, and its clients' data built again from its cell."""
    loaded = load(folder, device=options.device)
    federation = build_federation(run.cell, run.seed, options.data_dir, options.device).to(options.device)
    if loaded.result is None or partition_digest(federation) != loaded.result.partition_sha256:
        raise RunError(f"{folder} was made with other data than {run.cell.dataset} is now; run it again.")
    loaded.plan = Simulation.of(loaded.plan, federation)
    return Finished(loaded, run.cell, run.seed, options)
