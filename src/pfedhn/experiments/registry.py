"""Experiments by name. Those of the paper are imported when a name is looked up, so that nothing depends on them."""

import importlib
from collections.abc import Mapping
from functools import cache

from pfedhn.experiments.spec import Experiment


@cache
def experiments() -> Mapping[str, Experiment]:
    """Every named experiment of the package."""
    found: Mapping[str, Experiment] = importlib.import_module("pfedhn.paper.experiments").EXPERIMENTS
    return found
