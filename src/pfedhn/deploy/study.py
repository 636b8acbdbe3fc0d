"""What a party is asked to agree to: the study's file, its run, and the key of the server that runs it."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pfedhn.deploy.signing import fingerprint
from pfedhn.deploy.spec import FEDERATION, Data, FederationSpec, read_spec, to_plan, unresolved
from pfedhn.engine.plan import Plan
from pfedhn.errors import UserError, some
from pfedhn.params import num_bytes, zeros_like
from pfedhn.privacy import Privacy
from pfedhn.system.files import read_text, write_atomically

AGREED = "agreed.json"  # of a party's folder: the studies that its owner has agreed to
LENGTH = 32  # letters of a digest: 128 bits, so nobody can make two studies with the same one


@dataclass(frozen=True)
class Study:
    """What a server offers: its file, the run and the server's public key as one line."""

    run: str
    spec_text: str
    server: str

    @staticmethod
    def told(table: Mapping[str, Any]) -> "Study":
        """The study that a server tells a party."""
        return Study(str(table["run"]), str(table["spec"]), str(table["server"]))

    def table(self) -> dict[str, str]:
        """What the server tells a party."""
        return {"run": self.run, "spec": self.spec_text, "server": self.server}

    @cached_property
    def digest(self) -> str:
        """What a party accepts."""
        return hashlib.sha256(json.dumps(self.table(), sort_keys=True).encode()).hexdigest()[:LENGTH]

    @cached_property
    def spec(self) -> FederationSpec:
        return read_spec(self.spec_text, Path("spec.toml"))

    @cached_property
    def plan(self) -> Plan:
        """The plan; what is left to the parties' statistics stands in it as if there were two classes."""
        data = self.spec.data
        left: dict[str, Any] = dict.fromkeys(unresolved(data)) | ({"classes": 2} if data.classes == FEDERATION else {})
        return to_plan(replace(self.spec, data=replace(data, **left)))

    def description(self, privacy: Privacy | None = None) -> dict[str, str]:
        """What a person should know before taking part, by headings; `privacy` is the party's own."""
        spec, plan, cell = self.spec, self.plan, self.spec.cell
        networks = (spec.sizes or {"": cell.model}).items()
        local_steps = int(getattr(plan.algorithm, "local_steps", plan.algorithm.num_batches))
        down, up = message_bytes(plan)
        who = f"{plan.clients_per_round} of {plan.num_clients} parties in each"
        if spec.policy.in_flight is not None:
            who = f"{spec.policy.in_flight} parties at a time, each whenever it is idle"
        return {
            "operator": spec.study.operator or "not named",
            "purpose": spec.study.purpose or "not named",
            "server key": fingerprint(self.server),
            "run": self.run,
            "method": cell.method,
            "network": ", ".join(f"{name}: {network}" if name else str(network) for name, network in networks),
            "columns": _columns(spec.data),
            "classes": _classes(spec.data),
            "statistics": _statistics(spec.data),
            "training": f"{local_steps} local steps of {cell.batch_size} examples in each round",
            "rounds": f"{plan.num_rounds}, {who}; {plan.joining_rounds} for a party that joins after training",
            "received": f"weights, {down:,} bytes a message",
            "sent": _sent(plan, privacy, up),
            "how often": f"an update in each of its rounds; a test every {cell.evaluate_every} steps and at the end",
            "privacy": _privacy(privacy),
        }


def _columns(data: Data) -> str:
    if data.features:
        return f"{some(data.features, 50)}; label {data.label}"
    return f"arrays of shape {' x '.join(map(str, data.example_shape))}"


def _classes(data: Data) -> str:
    if data.classes == FEDERATION:
        return "those that the parties have"
    if data.classes is None:
        return f"none; {data.outputs} numbers are predicted"
    return f"{data.classes}" if isinstance(data.classes, int) else some(data.classes, 20)


def _statistics(data: Data) -> str:
    if left := unresolved(data):
        return f"counts, means, deviations and classes, once before training, which give {' and '.join(left)}"
    return "none"


def _sent(plan: Plan, privacy: Privacy | None, num_bytes: int) -> str:
    is_sent = plan.algorithm.needs.communication
    parts = [f"updates of the weights, {num_bytes:,} bytes a message" if is_sent else "no updates"]
    parts += [] if privacy is not None else ["scores on validation and test examples"]
    parts += ["class shares"] if plan.algorithm.needs.descriptors else []
    return ", ".join([*parts, "number of examples"])


def _privacy(privacy: Privacy | None) -> str:
    if privacy is None:
        return "none; updates can reveal training examples (pfedhn join --help)"
    return f"level {privacy.level}, clip {privacy.clip:g}, noise {privacy.noise:g}, epsilon at most {privacy.epsilon:g}"


def message_bytes(plan: Plan) -> tuple[int, int]:
    """The bytes of the weights in a message to a party and in its answer, for the largest network."""
    zero, down, up = torch.zeros((), dtype=torch.int64, device=plan.device), 0, 0
    exchange, starts = plan.exchange, plan.initial_models()
    shared = exchange.init_shared(plan.models, starts, 0)
    descriptor = torch.zeros(plan.descriptor_dim, dtype=plan.dtype, device=plan.device) if plan.descriptor_dim else None
    row = plan.first_row(shared, zero, descriptor)
    for model in plan.models.values():
        offer = exchange.offer(model, shared, row, zero, zero)
        received = plan.download.decode(offer.weights, model.dtype)
        update = zeros_like(exchange.update_form(model, received))
        encoded, _ = plan.upload.encode(update, 0, plan.upload.init_state(update))
        down, up = max(down, num_bytes(offer.weights)), max(up, num_bytes(encoded))
    return down, up


def has_agreed(folder: Path, study: Study) -> bool:
    """Whether the owner of a party's folder has agreed to just this study."""
    return study.digest in _agreed(folder)


def agree(folder: Path, study: Study) -> None:
    """Remember that the owner of a party's folder agrees to a study."""
    table = _agreed(folder) | {study.digest: {**study.table(), "time": round(time.time(), 3)}}
    write_atomically(folder / AGREED, json.dumps(table, indent=1).encode(), mode=0o600)


def has_agreed_before(folder: Path) -> bool:
    """Whether the owner of a party's folder has agreed to any study."""
    return bool(_agreed(folder))


def _agreed(folder: Path) -> dict[str, Any]:
    file = folder / AGREED
    try:
        table: dict[str, Any] = json.loads(read_text(file)) if file.exists() else {}
    except ValueError:
        raise UserError(f"{file} is damaged; remove it, and agree to the study again.") from None
    return table
