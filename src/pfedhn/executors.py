"""From a function of one client to a cohort: `loop` is the reference, every other executor must agree with it.

Axes: [C]lients of a cohort.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pfedhn.params import stack, take

Function: TypeAlias = Callable[..., Any]
Executor: TypeAlias = Callable[[Function], Function]
"""Turns a function of one client into a function of stacks: every argument and result gains a leading [C] axis."""


def loop(function: Function) -> Function:
    """One client after the other."""

    def mapped(*stacks: Any) -> Any:
        num_clients = pytree.tree_leaves(stacks)[0].shape[0]
        return stack([function(*take(stacks, client)) for client in range(num_clients)])

    return mapped


def vectorised(function: Function) -> Function:
    """All clients in one batched computation."""

    def mapped(*stacks: Any) -> Any:
        return torch.vmap(function)(*stacks)

    return mapped


EXECUTORS: dict[str, Executor] = {"loop": loop, "vectorised": vectorised}
