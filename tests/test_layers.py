"""Whose each parameter of a network is, by the names of its layers."""

import pytest
from support import model

from pfedhn.errors import UserError
from pfedhn.layers import Roles, assign_roles


def names(roles: Roles) -> dict[str, list[str]]:
    return {role: list(part) for role, part in roles._asdict().items()}


def test_every_parameter_has_one_role_and_keeps_its_place() -> None:
    target = model("conv")
    roles = assign_roles(target, rest="generated", personal=("last",), frozen=("conv.bias",))
    assert names(roles) == {
        "personal": ["out.weight", "out.bias"],
        "generated": ["conv.weight"],
        "shared": [],
        "frozen": ["conv.bias"],
    }


def test_what_is_not_named_is_the_rest() -> None:
    target = model("conv")
    assert target.last_layer == "out"
    roles = assign_roles(target, rest="shared", personal=("out.bias",))
    assert names(roles)["shared"] == ["conv.weight", "conv.bias", "out.weight"]
    assert sum(len(part) for part in roles) == len(target.shapes)
    assert all(part[name] == target.shapes[name] for part in roles for name in part)


def test_layers_that_cannot_be_are_refused() -> None:
    target = model("conv")
    with pytest.raises(UserError, match="global_layers names the layer 'fc9', which conv does not have"):
        assign_roles(target, rest="personal", settings={"shared": "global_layers"}, shared=("fc9",))
    with pytest.raises(UserError, match=r"fixed_layers = 'last' does not fit; .* such as \['last'\]"):
        assign_roles(target, rest="shared", settings={"frozen": "fixed_layers"}, frozen="last")
    with pytest.raises(UserError, match="is named as personal and as frozen"):
        assign_roles(target, rest="shared", personal=("out",), frozen=("out",))
    with pytest.raises(UserError, match="nothing is left to generate or to share"):
        assign_roles(target, rest="personal")
    with pytest.raises(ValueError, match="personel"):
        assign_roles(target, rest="shared", personel=("out",))
