"""The command that makes a result again."""

import shlex

from pfedhn.experiments.directory import Options
from pfedhn.experiments.grid import assignments_for
from pfedhn.experiments.spec import Experiment, RunSpec, pretraining_cell


def rerun_command(experiment: Experiment, run: RunSpec, options: Options) -> str:
    """The command that repeats just this run."""
    cell = run.cell
    words = [
        "pfedhn",
        "run",
        options.source or experiment.name,
        "--only",
        only_this(experiment, run),
        "--seeds",
        str(run.seed),
    ]
    if options.small:
        words.insert(3, "--small")
    earlier = [] if cell.pretrain is None else [pretraining_cell(experiment, cell)]
    for text in assignments_for(options.assignments, [cell, *earlier]):  # others would be refused
        words += ["--set", text]
    if options.rates is not None:
        words += ["--rates", str(options.rates)]
    words += ["--device", options.device]
    if options.executor != "auto":
        words += ["--executor", options.executor]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    if options.precision != Options.precision:
        words += ["--precision", options.precision]
    if options.deterministic:
        words += ["--deterministic"]
    if options.data_dir is not None:
        words += ["--data-dir", str(options.data_dir)]
    return shlex.join(words)


def only_this(experiment: Experiment, run: RunSpec) -> str:
    """What `--only` takes to leave one cell: the fewest of method, data set and clients, or else its name."""
    cell = run.cell
    alike = [other for other in experiment.cells if other.method == cell.method]
    chosen = [f"method={cell.method}"]
    for name in ("dataset", "clients"):
        if len({getattr(other, name) for other in alike}) > 1:
            chosen.append(f"{name}={getattr(cell, name)}")
    fitting = [other for other in alike if (other.dataset, other.clients) == (cell.dataset, cell.clients)]
    if len(fitting) == 1 and "," not in cell.dataset + cell.method:
        return ",".join(chosen)
    return f"name={run.cell_name}"
