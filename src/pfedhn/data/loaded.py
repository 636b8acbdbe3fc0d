"""Data sets in memory: read once in a process, and copied once to each device."""

from functools import lru_cache
from pathlib import Path

import torch

from pfedhn.data import catalogue
from pfedhn.data.palette import stored
from pfedhn.system import fingerprint


@lru_cache(maxsize=2)
def loaded(name: str, data_dir: Path | None) -> catalogue.Dataset:
    return catalogue.load(name, data_dir)


@lru_cache(maxsize=16)  # two for each of as many GPUs as a machine has
def examples_on(name: str, data_dir: Path | None, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All examples of a data set on a device, those for testing last; runs side by side share them.

    On a GPU images are bytes, and their palette is returned too.
    """
    data = loaded(name, data_dir)
    x = data.x if data.test_x is None else torch.cat([data.x, data.test_x])
    x, palette = stored(x, device)
    return fingerprint.remember(x), palette


def forget_datasets() -> None:
    """Free the data sets that were read; worker processes read their own."""
    loaded.cache_clear()
    examples_on.cache_clear()
