"""`pfedhn.load`: a run from its directory."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pfedhn.engine.network import check_factory
from pfedhn.errors import UserError, closest, some
from pfedhn.model import Factory, PerExample
from pfedhn.runs.assemble import choose_device
from pfedhn.runs.run import Run
from pfedhn.storage.checkpoint import load_state
from pfedhn.storage.directory import DIVERGED, Origin, identity, read_result, read_spec
from pfedhn.storage.restore import to_plan
from pfedhn.system.files import given_path

logger = logging.getLogger("pfedhn")


def load(
    directory: str | Path,
    *,
    run: str | None = None,
    model: Factory | Mapping[str, Factory] | None = None,
    method: type[Any] | None = None,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    device: str | torch.device = "auto",
) -> Run:
    """A run from its directory, whether `pfedhn.train` or `pfedhn run` made it, without its clients' data.

    It has the history and accuracies, every client's model (`personal_model`), and lets new clients join
    (`add_client`). It holds no examples; what needs some says so. If the run is not finished, a warning says at which
    step it stands.

    Loading a directory imports the code that it names (the module of your network, say), so load only what you trust.
    Code of the standard library is refused.

    Args:
        directory: The directory of one run, or of an experiment.
        run: Which run of an experiment that has several, by the name of its folder or a beginning that no other has.
        model: The function that makes the network, if the directory cannot name it: a lambda, or a function inside
            another. Several by name if the run has several.
        method: The class of the algorithm, if the directory cannot name it.
        loss: The loss, if the directory cannot name it; needed only to train.
        metric: The metric, likewise.
        device: Where the weights go; "auto" is the GPU if PyTorch finds one, else the CPU.

    Examples:
        >>> import functools, numpy, pfedhn, tempfile, torch
        >>> x, y = numpy.random.default_rng(0).normal(size=(600, 8)), numpy.arange(600) % 6
        >>> federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=12))
        >>> network = functools.partial(pfedhn.MLP, 8, 16, 6)
        >>> folder = tempfile.mkdtemp()
        >>> run = pfedhn.train("pfedhn", federation, network, steps=10, progress=False, directory=folder)
        >>> model = pfedhn.load(folder).personal_model(7)
        >>> model(torch.zeros(1, 8)).shape
        torch.Size([1, 6])
    """
    path = _run_directory(given_path(directory), run)
    given = model if isinstance(model, Mapping) else {} if model is None else {"model": model}
    for name, factory in given.items():
        check_factory(name, factory)
    spec = read_spec(path)
    assert spec is not None
    plan = to_plan(path, spec, model=model, method=method, loss=loss, metric=metric, device=choose_device(device))
    stored = load_state(path, plan, identity(spec))
    for sentence in stored.refused:
        logger.warning(sentence)
    if stored.state is None or stored.state.best is None:
        if read_result(path, spec) is not None:
            raise UserError(
                f"{path} holds a result and no model, as every run of a tuning does; train it again in another folder."
            )
        raise UserError(f"{path} holds no checkpoint yet; wait until its run has written one.")
    result = read_result(path, spec)
    if result is None:
        step = min(stored.state.round * plan.clients_per_round, plan.schedule.steps)
        why = "diverged" if (path / DIVERGED).exists() else "is not finished"
        logger.warning(f"{path} {why}: it stands at step {step:,} of {plan.schedule.steps:,}.")
    origin = Origin(spec.name, spec.method.name, cell=spec.cell or {}, dataset=spec.data.name)
    seconds = stored.history[-1].seconds if stored.history else 0.0
    return Run(plan, stored.state, origin, stored.history, seconds, result)


def _run_directory(path: Path, name: str | None) -> Path:
    if name is None and read_spec(path) is not None:
        return path
    names = sorted(file.parent.name for file in path.glob("*/spec.toml"))
    if not names:
        raise UserError(f"{path} holds no run; give the directory that `pfedhn.train` or `pfedhn run` wrote.")
    if name is None and len(names) > 1:
        which = closest("", names)
        raise UserError(f"{path} holds several runs; say which by run=NAME (in a command, --run NAME); {which}")
    found = [name] if name is not None and name in names else [other for other in names if other.startswith(name or "")]
    if not found:
        raise UserError(f"there is no run {name!r} in {path}; {closest(name or '', names)}")
    if len(found) > 1:
        raise UserError(f"{name!r} begins the names of several runs in {path}; say which: {some(found, 20)}.")
    return path / found[0]
