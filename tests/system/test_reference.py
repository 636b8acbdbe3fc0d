"""Functions and classes by name: found again where they have one, and why not where they have none."""

import functools
import os
from typing import Any

import pytest
from torch import nn

import pfedhn
from pfedhn import models
from pfedhn.errors import UserError
from pfedhn.system.reference import Code, find


class Nets:
    @classmethod
    def small(cls) -> nn.Module:
        return pfedhn.MLP(8, 4)


@pytest.mark.parametrize(
    ("thing", "kept"),
    [
        (pfedhn.MLP, Code("pfedhn.models:MLP")),
        (functools.partial(pfedhn.MLP, 8, 4), Code("pfedhn.models:MLP", (8, 4))),
        (
            functools.partial(models.build, "mlp-3", 4, shape=(8,)),
            Code("pfedhn.models:build", ("mlp-3", 4), {"shape": [8]}),
        ),
        (Nets.small, Code(f"{__name__}:Nets.small")),
        (nn.Linear, Code("torch.nn.modules.linear:Linear")),
    ],
)
def test_code_is_found_again(thing: Any, kept: Code) -> None:
    assert Code.of(thing) == kept
    found, wanted = kept.load(), thing
    if isinstance(thing, functools.partial):
        assert isinstance(found, functools.partial)
        found, wanted = found.func, thing.func
    assert found == wanted
    assert find(kept.name) == wanted


def inside() -> Any:
    class Inner(nn.Module):
        pass

    return Inner


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (lambda: None, "is a lambda"),
        (inside(), "is defined inside a function"),
        (functools.partial(pfedhn.MLP, 8, object()), "has arguments that a file cannot hold"),
        (functools.partial(pfedhn.MLP, 8, None), "has an argument None"),
        (nn.CrossEntropyLoss(), "is an object, of which only the class is known"),
        (os.system, "cannot be imported: .* is not code that a run can be made with"),
    ],
)
def test_code_that_has_no_name_says_why(thing: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Code.of(thing).load()
