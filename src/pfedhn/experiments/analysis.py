"""Numbers that a study computed from a finished run, for its figures: a small file beside the run's result.

It names the result that it was made from and is sealed, so that a stale or edited file is noticed.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from pfedhn.errors import UserError
from pfedhn.storage.files import DamagedError, sealed_json, unsealed_json
from pfedhn.storage.schema import Result, SchemaError, from_json, to_json
from pfedhn.system.files import read_bytes, write_atomically

FILE = "analysis.json"
DIGITS = 6  # of every number


@dataclass(frozen=True)
class Analysis:
    """Numbers that a study computed from one run."""

    study: str
    run: str
    made_from: str  # which result of that run
    values: Mapping[str, Any]

    @staticmethod
    def of(study: str, result: Result, values: Mapping[str, Any]) -> "Analysis":
        """Keep what a study computed from the run of `result`: arrays as lists, numbers with six digits."""
        return Analysis(study, result.name, identity(result), plain(values))


def identity(result: Result) -> str:
    """A digest that changes when a run is made again. An exported line keeps it."""
    known = [result.experiment, result.name, result.partition_sha256, result.chosen_step, result.environment.finished]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def plain(value: Any) -> Any:
    """Values as JSON. NaN, such as the accuracy of a client without examples, becomes null."""
    if isinstance(value, Tensor | numpy.ndarray | numpy.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def write_analysis(folder: Path, analysis: Analysis) -> None:
    write_atomically(folder / FILE, sealed_json(to_json(analysis)))


def read_analysis(folder: Path, result: Result) -> Analysis | None:
    """The numbers computed from a run; None if there are none, or if the run was made again since."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        analysis = from_json(Analysis, unsealed_json(read_bytes(file)))
    except (DamagedError, SchemaError) as error:
        raise UserError(f"{file} {error}; remove it, and the command that made the run computes it again.") from None
    return analysis if analysis.made_from == identity(result) else None
