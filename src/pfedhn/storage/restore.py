"""Restore a run from its directory: the code that spec.toml names, with the settings it stores."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from pfedhn.algorithm import Algorithm
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.find import method_of_class
from pfedhn.engine.plan import Plan, make_plan
from pfedhn.engine.robust import ROBUST, Robust
from pfedhn.engine.transform import TRANSFORMS, Transform
from pfedhn.errors import RunError, UserError, first_line
from pfedhn.model import Factory, Model, PerExample
from pfedhn.params import Params
from pfedhn.privacy import Privacy
from pfedhn.settings import build
from pfedhn.storage.directory import Part, StoredSpec, refuse_other_base
from pfedhn.storage.identity import constants_digest, networks_digest
from pfedhn.system.reference import Code, find, find_code


def to_plan(
    directory: Path,
    spec: StoredSpec,
    *,
    model: Factory | Mapping[str, Factory] | None = None,
    method: type[Any] | None = None,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    device: str = "cpu",
) -> Plan:
    """The plan of a run from its directory; what is given replaces what the directory names."""
    dtype: torch.dtype = getattr(torch, spec.data.dtype)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    models = {}
    for name, network in spec.networks.items():
        factory = model.get(name) if isinstance(model, Mapping) else model
        factory = factory or _factory(directory, name, network.factory)
        wanted = metric
        if metric is None and network.metric is not None:
            wanted = _function(directory, "metric", network.metric)
        models[name] = Model(name, factory, loss or _function(directory, "loss", network.loss), wanted, device, dtype)
    algorithm = _algorithm(directory, spec.method, method)
    plan = make_plan(
        algorithm,
        models,
        spec.data,
        **asdict(spec.schedule),
        seed=spec.seed,
        executor=spec.executor,
        upload=_transform(directory, "upload", spec.upload),
        download=_transform(directory, "download", spec.download),
        privacy=None if spec.privacy is None else build(Privacy, spec.privacy, "privacy"),
        in_flight=spec.in_flight,
        robust=None if spec.robust is None else _robust(directory, spec.robust),
    )
    if networks_digest(plan.models) != spec.digests["networks"]:
        raise UserError(f"the network has other weights than the one that {directory} was made with; give that one.")
    refuse_other_base(directory, spec, constants_digest(plan.models))
    if "start" not in spec.digests:
        return plan
    starts = _read_start(directory / "start.safetensors", spec.digests["start"], plan.models, device)
    return replace(plan, starts=starts)


def _factory(directory: Path, name: str, code: Code) -> Factory:
    with _naming(f"the network {name!r}", directory, "; give what makes it as load(..., model=...)"):
        factory = code.load()
        made = factory.func if isinstance(factory, partial) else factory
        if isinstance(made, type) and not issubclass(made, nn.Module):
            raise UserError(f"{code.name} is no nn.Module.")
        return factory


def _algorithm(directory: Path, method: Part, given: type[Any] | None) -> Algorithm[Any, Any, Any]:
    with _naming("the method", directory, "; give its class as load(..., method=...)"):
        known = ALGORITHMS.get(method.name)
        kind = given or (find_code(method.name) if known is None else known.algorithm)
        if not isinstance(kind, type) or not is_dataclass(kind):
            raise UserError(f"{method.name} is no method.")
        algorithm = replace(method_of_class(kind), settings={}).made(method.settings, method.name)
        if not isinstance(algorithm, Algorithm):
            raise UserError(f"{method.name} is no method.")
        return algorithm


def _transform(directory: Path, direction: str, part: Part) -> Transform:
    if part.name in TRANSFORMS:
        return TRANSFORMS[part.name]
    with _naming(f"the transform of the {direction}", directory, ""):
        kind = find(part.name)
        if not isinstance(kind, type) or not is_dataclass(kind) or not hasattr(kind, "encode"):
            raise UserError(f"{part.name} is no transform.")
        return cast(Transform, build(kind, part.settings, part.name))


def _robust(directory: Path, part: Part) -> Robust:
    with _naming("the defense", directory, ""):
        kind = type(ROBUST[part.name]) if part.name in ROBUST else find(part.name)
        if not isinstance(kind, type) or not is_dataclass(kind) or not hasattr(kind, "combined"):
            raise UserError(f"{part.name} is no defense.")
        return cast(Robust, build(kind, part.settings, part.name))


def _function(directory: Path, what: str, code: Code) -> PerExample:
    """The loss or the metric; if it cannot be imported, a function that says so when it is called."""
    try:
        with _naming(f"the {what}", directory, f"; give it as load(..., {what}=...)"):
            return code.load()
    except UserError as error:
        sentence = str(error)

    def refuse(outputs: Any, y: Tensor) -> Tensor:
        raise UserError(sentence)

    return refuse


@contextmanager
def _naming(what: str, directory: Path, way_out: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        reason = str(error).removesuffix(".")
        raise UserError(f"{what} cannot be made from {directory} alone: {reason}{way_out}.") from None


def _read_start(file: Path, sha256: str, models: Mapping[str, Model], device: str) -> dict[str, Params]:
    """The weights that a run started from, in the network's order, which a file does not keep."""
    try:
        is_its_own = hashlib.sha256(file.read_bytes()).hexdigest() == sha256
        tensors = load_file(file, device)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} is missing or damaged ({first_line(error)}); run it again.") from None
    if not is_its_own:
        raise RunError(f"{file} is not what this run started from; bring that back, or run it again.")
    return {
        name: {part: tensors[f"{name}/{part}"] for part in model.shapes}
        | {part: tensors[f"{name}/{part}"] for part in model.statistics if f"{name}/{part}" in tensors}
        for name, model in models.items()
    }
