"""The model card: how a client's model was trained and how good it is, as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pfedhn.algorithm import Algorithm
from pfedhn.data.description import Description
from pfedhn.data.reading import reading_card
from pfedhn.model import Model
from pfedhn.runs.portable import Card
from pfedhn.storage.identity import settings_of
from pfedhn.storage.schema import to_json
from pfedhn.system.environment import environment
from pfedhn.system.reference import Code


def test_scores(mean: float | None, count: int, has_accuracy: bool) -> dict[str, Any]:
    """What a card says of test examples: their number, and the mean accuracy or else the mean loss."""
    return {"examples": count, "accuracy": mean if has_accuracy else None, "loss": None if has_accuracy else mean}


def model_card(
    client: str,
    model: Model,
    described: Description,
    test: Mapping[str, Any],
    *,
    run: str,
    method: str,
    algorithm: Algorithm[Any, Any, Any],
    chosen_step: int,
    steps: int,
    seed: int,
    fill: Sequence[float] | None = None,
) -> Card:
    """The card of a client's model.

    Args:
        client: Its name.
        model: Its target network.
        described: The clients of its run and their examples.
        test: Its scores, as `test_scores` gives them.
        run: The name of its run.
        method: As it is registered, or "module:qualname".
        algorithm: The method itself.
        chosen_step: Communication steps before the chosen round.
        steps: Communication steps of the whole run.
        seed: Of the run.
        fill: What the client's empty cells are filled with.
    """
    made, code = environment("cpu"), Code.of(model.factory)
    return {
        "client": client,
        "run": run,
        "method": method,
        "settings": to_json(settings_of(algorithm)),
        "data": described.name,
        "clients": described.clients,
        "input": {
            "shape": list(described.shape),
            "dtype": str(model.dtype).removeprefix("torch.")
            if getattr(torch, described.dtype).is_floating_point
            else described.dtype,
            "preprocessing": None if described.preprocessing is None else to_json(dict(described.preprocessing)),
            **reading_card(described.reading, described.shape, fill),
        },
        "classes": described.classes,
        "class_names": None if described.class_names is None else list(described.class_names),
        "network": {
            "name": model.name,
            "factory": code.name,
            "arguments": to_json(code.arguments),
            "keywords": to_json(code.keywords),
            "parameters": sum(shape.numel() for shape in model.shapes.values()),
            "layers": str(model.testing_module),
        },
        "test": dict(test),
        "chosen_step": chosen_step,
        "steps": steps,
        "seed": seed,
        "versions": {"pfedhn": made.pfedhn, "torch": made.torch},
    }
