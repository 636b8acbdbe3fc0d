"""Build a run from data, network, method, schedule and seed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from pfedhn import models
from pfedhn.algorithm import Algorithm
from pfedhn.algorithms.find import build_algorithm
from pfedhn.data.federation import Federation
from pfedhn.engine.attack import Attack
from pfedhn.engine.memory import refuse_too_large
from pfedhn.engine.network import build_model, refuse_single_rows, with_num_outputs
from pfedhn.engine.plan import make_plan
from pfedhn.engine.robust import Robust, find_robust
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Select, refuse_without_evaluation
from pfedhn.engine.transform import Transform, find_transform
from pfedhn.errors import UserError, closest, short
from pfedhn.model import Factory, Model, PerExample
from pfedhn.params import Params
from pfedhn.privacy import Privacy
from pfedhn.settings import check_seed, whole_number


def choose_device(name: str | torch.device) -> str:
    """Resolve a device; "auto" is the GPU if PyTorch finds one, else the CPU."""
    if isinstance(name, str) and name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError, ValueError):
        raise UserError(f"there is no device {short(name)}; {closest(str(name), ['auto', 'cpu', 'cuda'])}") from None
    if kind not in ("cpu", "cuda"):
        raise UserError(f"runs need a CPU or a CUDA GPU, not the device {str(name)!r}; take 'auto'.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU here; take the device 'cpu', which works anywhere.")
    return str(name)


def assemble(
    method: str | Algorithm[Any, Any, Any],
    federation: Federation,
    model: str | Factory | Mapping[str, Factory | Model],
    *,
    steps: int = 5_000,
    cohort_size: int | None = None,
    batch_size: int = 64,
    evaluate_every: int = 30,
    select: Select = "metric",
    patience: int | None = None,
    seed: int = 0,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    device: str | torch.device = "auto",
    executor: str = "auto",
    upload: str | Transform = "full",
    download: str | Transform = "full",
    starts: Mapping[str, Params] | None = None,
    resize_every: int | None = None,
    privacy: Privacy | None = None,
    in_flight: int | None = None,
    robust: str | Mapping[str, Any] | Robust | None = None,
    attack: Attack | None = None,
) -> Simulation:
    """Make a run from data, network, method, schedule and seed. Arguments as `train`.

    Args:
        starts: Weights of each network that every client starts from, of a run before this one.
        resize_every: Communication steps after which every client goes on to the next of several target networks.
    """
    if not isinstance(federation, Federation):
        way_out = "make one with pfedhn.Federation.from_arrays, say"
        if isinstance(federation, str | Path):
            way_out = f"read it with pfedhn.datasets.read_federation({str(federation)!r}, 'CLIENT', 'LABEL')"
        raise UserError(f"federation is {short(federation)}; {way_out}.")
    steps, batch_size = whole_number("steps", steps), whole_number("batch_size", batch_size)
    evaluate_every, seed = whole_number("evaluate_every", evaluate_every), check_seed(seed)
    federation = federation.to(choose_device(device))
    if isinstance(model, str):
        shape = tuple(federation.x.shape[1:])
        if federation.num_classes is None and not federation.y.is_floating_point() and federation.y.ndim == 1:
            raise UserError(
                f"{short(model)} needs as many outputs as there are classes, which nobody knows of clients that are "
                "loaded when needed; give a function that makes the network, as lambda: pfedhn.MLP(8, 16, 6)."
            )
        model = {models.network_name(model): models.factory(model, federation.num_classes or 1, shape)}
    factories = dict(model) if isinstance(model, Mapping) else {models.name_of(model): model}
    if not factories:
        raise UserError("model names no target network; give a function that makes one.")
    if any(isinstance(factory, nn.Module) for factory in factories.values()):
        raise UserError(
            "model is a network; give a function that makes it (its class, or lambda: MyNetwork(10)), so that every "
            "seed starts from weights of its own."
        )
    if federation.architectures is None and len(factories) > 1:
        raise UserError(
            "several target networks need federation.with_architectures(...) to say which client runs which."
        )
    unknown = set(federation.architectures or ()) - set(factories)
    if unknown:
        raise UserError(f"there is no target network {sorted(unknown)[0]!r}; {closest(sorted(unknown)[0], factories)}")
    refuse_without_evaluation(federation)
    networks = {
        name: made if isinstance(made, Model) else build_model(name, made, federation, loss, metric)
        for name, made in factories.items()
    }
    federation = with_num_outputs(federation, networks.values())
    algorithm = build_algorithm(method)
    for network in networks.values():
        refuse_single_rows(network, federation, batch_size)
    if select not in get_args(Select):
        raise UserError(f"`select` must be 'metric' or 'loss', got {short(select)}.")
    if not isinstance(executor, str):
        raise UserError(f"executor is {short(executor)}; give its name, such as 'auto'.")
    if attack is not None:
        if not isinstance(attack, Attack):
            raise UserError(f"attack is {short(attack)}; give a pfedhn.Attack('flip'), say.")
        federation = federation.evaluating(attack.honest(federation.num_clients))
    if privacy is not None and not isinstance(privacy, Privacy):
        raise UserError(f"privacy is {short(privacy)}; give a pfedhn.Privacy(clip=..., noise=...).")
    plan = make_plan(
        algorithm,
        networks,
        federation.description,
        steps=steps,
        cohort_size=None if cohort_size is None else whole_number("cohort_size", cohort_size),
        batch_size=batch_size,
        evaluate_every=evaluate_every,
        select=select,
        patience=None if patience is None else whole_number("patience", patience),
        seed=seed,
        executor=executor,
        starts=starts,
        upload=find_transform(upload),
        download=find_transform(download),
        resize_every=resize_every,
        privacy=privacy,
        in_flight=None if in_flight is None else whole_number("in_flight", in_flight),
        robust=find_robust(robust),
    )
    simulation = replace(Simulation.of(plan, federation), attack=attack)
    refuse_too_large(simulation)
    return simulation
