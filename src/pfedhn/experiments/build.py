"""A cell as a simulation: its data, network and method."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pfedhn import models
from pfedhn.algorithms.find import AnyAlgorithm, build_algorithm, find_method
from pfedhn.engine.attack import Attack
from pfedhn.engine.robust import find_robust
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.transform import find_transform
from pfedhn.errors import UserError, closest
from pfedhn.experiments.data import build_federation, build_partition, made, network_names
from pfedhn.experiments.spec import (
    NAMED,
    OTHER_TABLES,
    Cell,
    Experiment,
    RunSpec,
    is_made,
    is_own_data,
    is_table,
    pretraining_cell,
)
from pfedhn.experiments.tables import reading_options, table_columns
from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.privacy import Privacy
from pfedhn.runs.assemble import assemble
from pfedhn.settings import build

if TYPE_CHECKING:
    from pfedhn.experiments.directory import Options


def check(experiment: Experiment) -> None:
    """Refuse what could not run before anything is written."""
    if not experiment.cells:
        raise UserError(f"the experiment {experiment.name!r} has no cells.")
    if not re.fullmatch(r"[\w.=+-]+", experiment.name) or set(experiment.name) == {"."}:
        raise UserError(f"name = {experiment.name!r} does not fit; it names a folder, so use letters, digits, - and _.")
    for cell in experiment.cells:
        cell_algorithm(cell)
        for name in (
            "steps",
            "batch_size",
            "evaluate_every",
            "clients",
            "cohort_size",
            "resize_every",
            "in_flight",
            "patience",
        ):
            if (value := getattr(cell, name)) is not None and value < 1:
                raise UserError(f"{name} = {value} does not fit; it must be at least 1.")
        if is_made(cell.dataset):
            made(cell)
        else:
            if cell.dataset.lower().endswith(OTHER_TABLES):
                raise UserError(f"{cell.dataset} is a table of a kind that is not read; save it as CSV.")
            if cell.dataset not in NAMED and not is_own_data(cell.dataset):
                raise UserError(f"there is no data set {cell.dataset!r}; {closest(cell.dataset, NAMED)}")
            build_partition(cell)
        table_columns(cell)
        if reading_options(cell) and not is_table(cell.dataset) and not is_own_data(cell.dataset):
            raise UserError(
                f"read is for your own data, and {cell.dataset} is a data set of the package; leave it out."
            )
        _check_sizes(cell)
        for transform in (cell.upload, cell.download):
            find_transform(transform)
        find_robust(cell.robust)
        cell_privacy(cell)
        cell_attack(cell)
        if cell.pretrain is not None:
            find_method(cell.pretrain)
            pretraining_cell(experiment, cell)


def _check_sizes(cell: Cell) -> None:
    models.check_name(cell.model, cell.network)
    for name in cell.sizes or ():
        models.check_name(name, cell.network if ":" in name else None)
    if cell.sizes is None:
        if cell.part is not None or cell.resize_every is not None:
            raise UserError("part and resize_every are of clients of several sizes; give sizes too.")
        return
    if not 1 <= len(set(cell.sizes)) == len(cell.sizes) <= cell.clients:
        raise UserError(
            f"sizes = {list(cell.sizes)} does not fit; name different networks, at most one for each client."
        )
    if cell.part is not None:
        if cell.part not in cell.sizes:
            raise UserError(f"part = {cell.part!r} is none of the sizes; {closest(cell.part, cell.sizes)}")
        if cell.resize_every is not None:
            raise UserError("clients of one size cannot go on to the next; give part or resize_every.")


def cell_algorithm(cell: Cell) -> AnyAlgorithm:
    return build_algorithm(cell.method, cell.settings)


def cell_privacy(cell: Cell) -> Privacy | None:
    """How the clients of a cell keep their data private, if they do."""
    if not cell.privacy:
        return None
    for name in ("clip", "noise"):
        if name not in cell.privacy:
            raise UserError(f"privacy needs {name}; write privacy = {{clip = 1.0, noise = 1.0}}, say.")
    return build(Privacy, cell.privacy, "privacy")


def cell_attack(cell: Cell) -> Attack | None:
    """What the hostile clients of a cell send, if there are any."""
    if not cell.attack:
        return None
    attack = build(Attack, cell.attack, "attack")
    attack.honest(cell.clients)
    return attack


def refuse_unused_start(simulation: Simulation, cell: Cell) -> None:
    """A run whose method makes nothing of the weights it starts from would only pay for them."""

    def begun(value: float) -> list[torch.Tensor]:
        starts = {
            name: {part: torch.full_like(weights, value) for part, weights in model.fresh(0).items()}
            for name, model in simulation.models.items()
        }
        memories = replace(simulation, starts=starts).initial_state().memories
        first = memories.private[simulation.model_of(0).name].make(0)
        return pytree.tree_leaves((memories.shared, memories.rows, first))

    if all(torch.equal(one, other) for one, other in zip(begun(0.0), begun(1.0), strict=True)):
        raise UserError(
            f"{cell.method} makes nothing of the model that pretrain = {cell.pretrain!r} would give it; leave pretrain "
            "out, or use a method whose clients start from it, such as lg-fedavg."
        )


CheckedNetworks: TypeAlias = dict[tuple[str, str], Model]
"""Networks that were tried on examples already, by their name and all else that decides whether they fit."""


def build_simulation(
    run: RunSpec,
    options: "Options",
    starts: Mapping[str, Params] | None = None,
    checked: CheckedNetworks | None = None,
) -> Simulation:
    """Build a run as its experiment describes it.

    Args:
        run: The run.
        options: How to run it.
        starts: The weights that it starts from, if another run trained them.
        checked: Networks that need not be tried again; those that are new are added.
    """
    cell = run.cell
    federation = build_federation(cell, run.seed, options.data_dir, options.device)
    shape, num_outputs = tuple(federation.x.shape[1:]), federation.num_classes or 1
    data = (cell.dataset, cell.partition, cell.columns, cell.read, cell.task, cell.labels, federation.y.dtype)
    fits = repr((cell.network, shape, num_outputs, *data))
    checked = {} if checked is None else checked
    networks = {
        models.network_name(name): checked.get((name, fits))
        or models.factory(name, num_outputs, shape, cell.network if ":" in name else None)
        for name in network_names(cell)
    }
    simulation = assemble(
        cell_algorithm(cell),
        federation,
        networks,
        steps=cell.steps,
        cohort_size=cell.cohort_size,
        batch_size=cell.batch_size,
        evaluate_every=cell.evaluate_every,
        select=cell.select,
        patience=cell.patience,
        seed=run.seed,
        device=options.device,
        executor=options.executor,
        upload=cell.upload,
        download=cell.download,
        starts=starts,
        resize_every=cell.resize_every,
        privacy=cell_privacy(cell),
        in_flight=cell.in_flight,
        robust=cell.robust,
        attack=cell_attack(cell),
    )
    for name in network_names(cell):
        model = simulation.models[models.network_name(name)]
        if not model.frozen:  # a method and a seed freeze others
            checked[name, fits] = model
    return simulation
