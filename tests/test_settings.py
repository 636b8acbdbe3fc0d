"""Settings from outside: every wrong one is refused with a sentence that says what fits, and TOML loses nothing."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.errors import UserError, closest
from pfedhn.settings import build, checked, fits, in_short, parse_assignments, to_toml
from pfedhn.sgd import SGD, AdamW


@dataclass(frozen=True)
class Spec:
    steps: int = 1
    lr: float | Tensor = 0.1
    clip: float | None = 50.0
    form: Literal["first", "second"] = "first"
    layers: tuple[str, ...] = ()
    split: tuple[float, float, float] = (0.5, 0.25, 0.25)
    linear: bool = False
    table: Mapping[str, Any] = field(default_factory=dict)


def test_values_that_fit_are_taken_as_the_spec_wants_them() -> None:
    built = build(Spec, {"steps": 3, "lr": 1, "layers": ["a", "b"], "split": [0.8, 0.1, 0.1], "linear": True}, "it")
    assert built == Spec(3, 1, layers=("a", "b"), split=(0.8, 0.1, 0.1), linear=True)


def test_none_has_a_word_where_it_fits_and_only_there() -> None:
    assert checked(Spec, {"clip": "none"}, "it") == {"clip": None}
    with pytest.raises(UserError, match="steps = 'none' does not fit"):
        build(Spec, {"steps": "none"}, "it")


@pytest.mark.parametrize(
    ("name", "value", "must_be"),
    [
        ("steps", 1.5, "a whole number"),
        ("steps", True, "a whole number"),
        ("steps", "10", "a whole number"),
        ("lr", "fast", "a number"),
        ("lr", float("nan"), "a number"),
        ("lr", [0.1, 0.2], "a number"),
        ("clip", "no", 'a number or "none"'),
        ("form", "third", "one of first, second"),
        ("layers", "last", "a list, each a text"),
        ("layers", [1], "a list, each a text"),
        ("split", [0.5, 0.5], "a list of 3, each a number"),
        ("linear", 1, "true or false"),
        ("table", 3, "a table"),
    ],
)
def test_a_wrong_type_is_named_with_what_would_fit(name: str, value: Any, must_be: str) -> None:
    with pytest.raises(UserError) as caught:
        build(Spec, {name: value}, "the cell")
    assert f"the cell: {name} = " in str(caught.value)
    assert str(caught.value).endswith(f"does not fit; it must be {must_be}.")


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"the cell has no field 'step'; did you mean 'steps'\? There are steps, lr,"):
        build(Spec, {"step": 1}, "the cell")


def test_closest_prefers_letters_in_their_places() -> None:
    assert closest("pfedhm", ["pfedme", "pfedhn", "local"]).startswith("did you mean 'pfedhn'?")
    assert closest("pfedmn", ["pfedhn", "pfedme", "local"]).startswith("did you mean 'pfedme'?")


def test_closest_does_not_guess_wildly() -> None:
    assert closest("xyz", ["pfedhn", "local"]) == "there are pfedhn, local."


def test_a_table_that_names_its_class_is_that_class() -> None:
    """As in Python, and unlike the short names of stored runs, which change one setting each."""
    pfedhn = ALGORITHMS["pfedhn"]
    table = {"optimizer": "adamw", "lr": 6e-4}
    assert pfedhn(server=table) == PFedHN(server=AdamW(6e-4))
    assert ALGORITHMS["pfedhn-plus"](server=table) == ALGORITHMS["pfedhn-plus"](server=AdamW(6e-4))
    assert pfedhn(server={"lr": 0.1}) == PFedHN(server=SGD(0.1, 0.9, 1e-3, clip=50.0))
    assert pfedhn(**table) == PFedHN(server=AdamW(6e-4, 0.9, weight_decay=1e-3, clip=50.0))
    short = in_short(pfedhn.kinds, {"server": table})
    assert pfedhn(**tomllib.loads(to_toml(short))) == PFedHN(server=AdamW(6e-4))


def test_assignments_are_toml_values_or_bare_words() -> None:
    texts = ["steps=20", "partition.alpha = 0.1", "linear=true", "split=[0.5, 0.25, 0.25]", "model=mlp-32", 'a="b=c"']
    assert parse_assignments(texts) == {
        "steps": 20,
        "partition.alpha": 0.1,
        "linear": True,
        "split": [0.5, 0.25, 0.25],
        "model": "mlp-32",
        "a": "b=c",
    }


@pytest.mark.parametrize("text", ["steps", "=3", ""])
def test_an_assignment_needs_a_name_and_a_value(text: str) -> None:
    with pytest.raises(UserError, match="is not of the form field=value"):
        parse_assignments([text])


def test_fits_sees_through_unions_and_literals() -> None:
    assert fits(None, float | None)
    assert not fits(None, float)
    assert fits("a", Literal["a"])
    assert fits((1, 2.5), tuple[float, ...])


names = some.text(min_size=1, max_size=8)
scalars = some.booleans() | some.integers(-(2**63), 2**63 - 1) | some.floats(allow_nan=False) | some.text(max_size=12)
lists = some.lists(scalars, max_size=3)
tables = some.recursive(
    some.dictionaries(names, scalars | lists, max_size=3),
    lambda inner: some.dictionaries(names, scalars | lists | inner | some.lists(inner, max_size=2), max_size=3),
    max_leaves=8,
)


@given(tables)
def test_whatever_is_written_as_toml_is_read_back_equal(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_toml_of_numpy_numbers_and_missing_values() -> None:
    table = {"a": numpy.float64(0.1), "b": None, "c": (1, 2)}
    assert tomllib.loads(to_toml(table)) == {"a": 0.1, "c": [1, 2]}


def test_what_toml_cannot_hold_is_not_written_as_something_else() -> None:
    with pytest.raises(TypeError, match="not TOML serializable"):
        to_toml({"a": object()})
