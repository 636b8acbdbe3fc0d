"""Experiments by name. Those of the paper are imported when a name is looked up, so that nothing depends on them."""

import importlib
from collections.abc import Mapping
from functools import cache

from pfedhn.experiments.spec import Cell, Experiment

PAPER = "pfedhn.paper.experiments"


@cache
def experiments() -> Mapping[str, Experiment]:
    """Every named experiment of the package."""
    found: Mapping[str, Experiment] = importlib.import_module(PAPER).EXPERIMENTS
    return found


def usual_cell(dataset: str) -> Cell:
    """The cell that `pfedhn data` shows as an example for a data set."""
    found: Cell = importlib.import_module(PAPER).usual_cell(dataset)
    return found
