"""What a server and its parties know alike before the first message: method, networks, schedule, seed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch

from pfedhn import keys
from pfedhn.algorithm import Algorithm
from pfedhn.engine.round import Exchange
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Schedule
from pfedhn.engine.transform import FULL, Transform
from pfedhn.model import Model
from pfedhn.params import Params
from pfedhn.storage.identity import constants_digest, method_name, settings_of, transform_name
from pfedhn.storage.seal import digest

Phase: TypeAlias = Literal["training", "joining"]
"""Of a party: it takes part in training, or joins when that has ended and the server's memory is frozen."""


@dataclass(frozen=True, eq=False)
class Plan:
    """One method, its networks and a schedule from one seed; a simulation without the data, which nobody has.

    Args:
        algorithm: The method, for as many clients as are expected.
        models: The target networks by name.
        schedule: How long the run is, and how often it is looked at.
        seed: Of the run.
        num_clients: How many parties are expected.
        upload: What a party does to its update.
        download: What the server does to the weights that it sends.
        joining_rounds: How many rounds a party takes part in that joins when training has ended.
    """

    algorithm: Algorithm[Any, Any, Any]
    models: Mapping[str, Model]
    schedule: Schedule
    seed: int
    num_clients: int
    upload: Transform = FULL
    download: Transform = FULL
    joining_rounds: int = 20
    _starts: dict[str, Params] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of(simulation: Simulation, joining_rounds: int = 20) -> "Plan":
        """The plan of a run that could be simulated."""
        return Plan(
            simulation.algorithm,
            simulation.models,
            simulation.schedule,
            simulation.seed,
            simulation.federation.num_clients,
            simulation.upload,
            simulation.download,
            joining_rounds,
        )

    def exchange(self, phase: Phase) -> Exchange:
        """The two halves of every round."""
        is_frozen = phase == "joining"
        seed = keys.fold(self.seed, "new client", 0) if is_frozen else self.seed
        return Exchange(self.algorithm, int(seed), self.upload, self.download, is_frozen)

    def start(self, architecture: str) -> Params:
        """The initial model, which everybody makes from the seed."""
        if architecture not in self._starts:
            self._starts[architecture] = self.models[architecture].fresh(keys.fold(self.seed, "init"))
        return self._starts[architecture]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.models.values())).dtype

    @property
    def num_rounds(self) -> int:
        return self.schedule.num_rounds(self.num_clients, self.algorithm.communicates)

    @cached_property
    def digest(self) -> str:
        """A name for all of it: two sides whose names differ would not compute the same."""
        networks = {
            name: [str(model.dtype), {part: list(shape) for part, shape in model.shapes.items()}]
            for name, model in self.models.items()
        }
        wire = [[transform_name(transform), settings_of(transform)] for transform in (self.upload, self.download)]
        method = [method_name(self.algorithm), settings_of(self.algorithm)]
        parts = [method, networks, asdict(self.schedule), self.seed, self.num_clients, wire, self.joining_rounds]
        constants = constants_digest(self.models)  # a base that the parties must have in common
        return digest(parts if constants is None else [*parts, constants])
