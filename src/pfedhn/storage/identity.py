"""Names and digests of everything that a run is made of, by which it is told from another run."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from safetensors.torch import save
from torch import Tensor

from pfedhn.algorithm import Algorithm
from pfedhn.algorithms.find import entry_of_class, method_of
from pfedhn.combinators import innermost
from pfedhn.data.federation import Federation
from pfedhn.data.lazy import LazyFederation
from pfedhn.data.palette import decode
from pfedhn.engine.robust import ROBUST, Robust
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.transform import TRANSFORMS, Transform
from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.settings import kinds_of, settings_in, values_in_short
from pfedhn.storage.files import digest
from pfedhn.storage.schema import to_json
from pfedhn.system import fingerprint
from pfedhn.system.reference import name_of

NUM_CLIENTS_LOOKED_AT = 8  # of a federation whose data are loaded when needed, in its digest


def digests_of(simulation: Simulation) -> dict[str, str]:
    """Digests of the parts of a run that no file can hold."""
    models, wire = simulation.models, (simulation.upload, simulation.download)
    own_code = [_registered_class(simulation.algorithm), *map(type, wire)]
    if simulation.robust is not None:
        own_code.append(type(simulation.robust))
    digests = {
        "data": data_digest(simulation.federation),
        "partition": partition_digest(simulation.federation),
        "clients": clients_digest(simulation.federation),
        "networks": networks_digest(models),
        "network code": _of_all(fingerprint.of_module(model.training_module) for model in models.values()),
        "loss": _of_all(fingerprint.of_code(model.per_example_loss) for model in models.values()),
        "metric": _of_all(fingerprint.of_code(model.per_example_metric) for model in models.values()),
        "method code": _of_all(map(fingerprint.of_code, own_code)),
    }
    if (constants := constants_digest(models)) is not None:
        digests["frozen"] = constants
    privacy = None if simulation.privacy is None else settings_of(simulation.privacy)
    robust, attack = simulation.robust, simulation.attack
    options = {
        "resizing": simulation.resize_every,
        "privacy": privacy,
        "in flight": simulation.in_flight,
        "robust": None if robust is None else [robust_name(robust), settings_of(robust)],
        "attack": None if attack is None else settings_of(attack),
    }
    digests |= {name: digest(value) for name, value in options.items() if value is not None}
    if simulation.starts is not None:
        digests["start"] = hashlib.sha256(start_content(simulation.starts)).hexdigest()
    return digests


def _of_all(names: Iterable[str]) -> str:
    """One digest of several pieces of code."""
    found = list(names)
    return f"{fingerprint.VERSION} {digest(found)}"


def settings_of(spec: Any) -> dict[str, Any]:
    """Every setting of a method or transform, defaults too, as a file can hold them."""
    if not is_dataclass(spec) or isinstance(spec, type):
        return {}
    # Settings of a wider class and of combinators stand beside them: earlier versions had one class, and wrote all.
    wider = settings_in(method_of(spec).kinds) if isinstance(spec, Algorithm) else {}
    given = values_in_short(spec)
    absent = {name: setting.default for name, setting in wider.items() if name not in settings_in(kinds_of(spec))}
    values: dict[str, Any] = to_json(absent | given)
    values = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
    plain = (bool, int, float, str, list, dict, type(None))
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}


def method_name(method: str | Algorithm[Any, Any, Any]) -> str:
    """The registered name of a method, or "module:qualname"."""
    if isinstance(method, str):
        return method
    kind = type(innermost(method))
    found = entry_of_class(kind)
    return name_of(kind) if found is None else found[0]


def _registered_class(algorithm: Algorithm[Any, Any, Any]) -> type[Any]:
    """The class whose code names a method: that of its row of the table, or else its own."""
    kind = type(innermost(algorithm))
    found = entry_of_class(kind)
    return kind if found is None else found[1].algorithm


def transform_name(transform: Transform) -> str:
    """The registered name of a transform, or "module:qualname"."""
    registered = (name for name, known in TRANSFORMS.items() if known == transform)
    return next(registered, name_of(type(transform)))


def robust_name(robust: Robust) -> str:
    """The registered name of a defense, or "module:qualname"."""
    registered = (name for name, known in ROBUST.items() if type(known) is type(robust))
    return next(registered, name_of(type(robust)))


def data_digest(federation: Federation) -> str:
    """A digest of the examples and labels; if they are loaded when needed, of those of a few clients."""
    palette = federation.palette
    how = () if palette is None else (partial(decode, palette=palette.cpu()), fingerprint.of_tensor(palette))
    parts = [fingerprint.of_tensor(federation.x, *how), fingerprint.of_tensor(federation.y)]
    if isinstance(federation, LazyFederation):
        last = federation.num_clients - 1
        places = {last * number // (NUM_CLIENTS_LOOKED_AT - 1) for number in range(NUM_CLIENTS_LOOKED_AT)}
        for client in sorted(places):
            parts += [fingerprint.of_tensor(part) for part in federation.examples_of(client)]
    return digest(parts)


def is_data_of(digests: Mapping[str, str], federation: Federation) -> bool:
    """Whether a run with these digests was trained on these clients and their examples."""
    return (digests["data"], digests["clients"]) == (data_digest(federation), clients_digest(federation))


def clients_digest(federation: Federation) -> str:
    """A digest of the clients' names, random identities, descriptors and networks, and of those that join later."""
    descriptors, identities, joining = federation.descriptors, federation.identities, federation.joining
    return digest(
        [
            federation.num_clients,
            federation.names,
            None if identities is None else fingerprint.of_tensor(identities),
            None if descriptors is None else fingerprint.of_tensor(descriptors),
            federation.architectures,
            federation.class_names,
            None if joining is None else [partition_digest(joining), clients_digest(joining)],
        ]
    )


def partition_digest(federation: Federation) -> str:
    """A digest of which client has which examples."""
    digest = hashlib.sha256()
    for examples in federation.splits.values():
        for part in (examples.index, examples.offset, examples.size):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def networks_digest(models: Mapping[str, Model]) -> str:
    """A digest of the names and shapes of the target networks' weights."""
    shapes = {name: {part: list(shape) for part, shape in model.shapes.items()} for name, model in models.items()}
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def constants_digest(models: Mapping[str, Model]) -> str | None:
    """A digest of the values in the target networks that nobody trains; None if there are none."""
    parts = {
        name: {part: fingerprint.of_tensor(value) for part, value in sorted(model.constants.items())}
        for name, model in models.items()
    }
    return digest(parts) if any(parts.values()) else None


def start_content(starts: Mapping[str, Params]) -> bytes:
    """The content of start.safetensors: the weights that a run starts from."""
    tensors = {f"{name}/{part}": value for name, weights in starts.items() for part, value in weights.items()}
    return save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
