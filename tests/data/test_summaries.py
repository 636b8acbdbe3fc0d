"""Statistics from summaries: those of all rows together, and no number of a small group."""

import copy
import json
import math
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray

from pfedhn.data.federation import Federation
from pfedhn.data.federation_summary import client_summary, federation_statistics, scaled_with
from pfedhn.data.files import read_federation
from pfedhn.data.summaries import (
    Asked,
    Noise,
    Summary,
    SummaryError,
    checked,
    merged,
    summary_of,
    with_small_withheld,
)
from pfedhn.errors import UserError

ASKED = Asked(("age", "dose"), classes=True, edges={"age": (40.0, 50.0, 60.0)})


def party(seed: int, count: int, offset: float = 0.0) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    draw = numpy.random.default_rng(seed)
    columns = {"age": offset + draw.normal(50, 10, count), "dose": draw.exponential(1, count)}
    columns["age"][draw.random(count) < 0.1] = math.nan
    return columns, draw.choice(["ill", "well", "dead"], count, p=[0.3, 0.6, 0.1])


def summary(seed: int, count: int, min_group: int = 1, **more: Any) -> Summary:
    columns, labels = party(seed, count, more.pop("offset", 0.0))
    return summary_of(columns, more.pop("asked", ASKED), min_group=min_group, labels=labels, **more)


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_merged_summaries_are_the_statistics_of_all_rows(offset: float) -> None:
    sizes = {1: 40, 2: 300, 3: 7}
    parts = [checked(json.loads(json.dumps(summary(s, n, offset=offset))), ASKED) for s, n in sizes.items()]
    found = merged(parts)
    pooled = [party(seed, count, offset) for seed, count in sizes.items()]
    for name in ASKED.columns:
        values = numpy.concatenate([columns[name] for columns, _ in pooled])
        one, known = found.columns[name], values[~numpy.isnan(values)]
        assert one.mean == pytest.approx(known.mean(), rel=1e-12)
        assert one.std == pytest.approx(known.std(), rel=1e-12 if not offset else 1e-9)  # of 1e7, 9 digits are left
        assert one.count == len(known)
        assert one.missing == pytest.approx(numpy.isnan(values).mean(), rel=1e-12)
    ages = numpy.concatenate([columns["age"] for columns, _ in pooled])
    cells = numpy.histogram(ages[~numpy.isnan(ages)], [-math.inf, 40, 50, 60, math.inf])[0]
    assert found.columns["age"].histogram == tuple(cells)
    labels = numpy.concatenate([labels for _, labels in pooled])
    assert found.classes == {name: int((labels == name).sum()) for name in ("dead", "ill", "well")}
    assert (found.rows, found.num_parties, found.withheld_classes) == (347, 3, 0)


def test_channels_are_counted_by_the_value_and_groups_by_the_row() -> None:
    images = numpy.random.default_rng(0).normal(3, 2, (9, 2, 5))
    parts = [
        summary_of({"0": images[rows, 0], "1": images[rows, 1]}, Asked(("0", "1")), min_group=4)
        for rows in (slice(0, 4), slice(4, 9))
    ]
    assert [part["rows"] for part in parts] == [4, 5]
    widths = {"0": 5, "1": 5}
    found = merged([checked(part, Asked(("0", "1")), widths) for part in parts], widths)
    for channel in (0, 1):
        one = found.columns[str(channel)]
        assert one.mean == pytest.approx(images[:, channel].mean(), rel=1e-12)
        assert one.std == pytest.approx(images[:, channel].std(), rel=1e-12)
        assert one.count == 9


def test_small_groups_are_withheld() -> None:
    columns = {"age": numpy.array([41.0] * 6 + [55.0] * 10 + [70.0, math.nan]), "dose": numpy.ones(18)}
    columns["dose"][:15] = math.nan
    labels = numpy.array(["ill"] * 10 + ["well"] * 7 + ["dead"])
    told = summary_of(columns, ASKED, min_group=5, labels=labels)
    assert told["columns"]["dose"] is None  # three rows have a value
    age = told["columns"]["age"]
    assert (age["count"], age["missing"]) == (18, None)  # not 17, which would tell that one is missing
    assert age["center"] + age["sum"] / age["count"] == pytest.approx(numpy.nanmean(columns["age"]), rel=1e-12)
    assert age["histogram"] == [0, None, 10, None]  # 70 alone, and another cell, or the rest would tell it
    assert told["classes"] == {"ill": 10}
    assert told["withheld_classes"] == 2
    assert checked(told, ASKED) == told
    nobody = summary_of({"age": columns["age"][:4], "dose": columns["dose"][:4]}, ASKED, min_group=5, labels=labels[:4])
    assert nobody["rows"] is nobody["classes"] is nobody["columns"]["age"] is None
    assert "41" not in json.dumps(nobody)
    assert merged([checked(nobody, ASKED)]).rows == 0


@pytest.mark.parametrize("counts", [[1, 0, 9], [4, 4, 4, 9], [1, 5, 6], [3, 20], [0, 5], [2, 2], [7, 8, 0, 1]])
def test_what_is_withheld_is_never_a_small_group_that_the_sum_tells(counts: list[int]) -> None:
    shown = with_small_withheld(counts, 5, exact=True)
    hidden = [count for count, one in zip(counts, shown, strict=True) if one is None]
    assert all(one is None or one == 0 or one >= 5 for one in shown)
    assert not hidden or sum(hidden) >= 5 or not any(one for one in shown if one)


def test_noise_is_keyed_and_of_the_stated_size() -> None:
    asked = Asked(("age",), bounds={"age": (0.0, 100.0)})
    columns = {"age": numpy.full(1_000, 250.0)}  # clipped to 100

    def told(key: int | None, noise: Noise) -> Any:
        return summary_of(columns, asked, min_group=1, noise=noise, key=key)

    for noise in (Noise(1.0), Noise(1.0, "gaussian", 1e-6)):
        assert told(3, noise) == told(3, noise)
        assert told(3, noise) != told(4, noise)
        assert told(None, noise) != told(None, noise)
        counts = [told(key, noise)["columns"]["age"]["count"] - 1_000 for key in range(400)]
        sums = [told(key, noise)["columns"]["age"]["sum"] - 50 * 1_000 for key in range(400)]
        scale = noise.deviations(asked.num_queries()) * (math.sqrt(2) if noise.mechanism == "laplace" else 1)
        assert numpy.std(counts) == pytest.approx(scale, rel=0.2)
        assert numpy.std(sums) == pytest.approx(50 * scale, rel=0.2)
        assert abs(numpy.mean(counts)) < 0.2 * scale
        assert checked(json.loads(json.dumps(told(3, noise))), asked)
    assert Noise(1.0).deviations(4) == 4.0
    found = merged([told(key, Noise(5.0)) for key in range(20)])
    assert found.columns["age"].mean == pytest.approx(100, abs=0.5)


def test_noise_does_not_name_classes() -> None:
    columns, labels = party(0, 100)
    bounds = {"age": (0.0, 100.0), "dose": (0.0, 10.0)}
    told = summary_of(columns, Asked(ASKED.columns, True, {}, bounds), min_group=1, labels=labels, noise=Noise(1.0))
    assert told["classes"] is None
    known = Asked(ASKED.columns, True, {}, bounds, ("ill", "well", "rare"))
    told = summary_of(columns, known, min_group=5, labels=labels, noise=Noise(50.0), key=1)
    assert set(told["classes"]) == {"ill", "well"}


def changed(path: list[Any], value: Any) -> Any:
    told = copy.deepcopy(summary(1, 40, min_group=2))
    part: Any = told
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return told


@pytest.mark.parametrize(
    "told",
    [
        None, [], {}, "x",
        changed(["version"], 2), changed(["version"], True), changed(["more"], 1),
        changed(["rows"], -1), changed(["rows"], 1), changed(["rows"], 40.0), changed(["rows"], 1 << 50),
        changed(["rows"], None), changed(["min_group"], 0), changed(["noise"], {"epsilon": 1}),
        changed(["columns"], []), changed(["columns", "age"], {}), changed(["columns", "weight"], None),
        changed(["columns", "age", "count"], 41), changed(["columns", "age", "count"], True),
        changed(["columns", "age", "missing"], 30), changed(["columns", "age", "sum"], float("nan")),
        changed(["columns", "age", "center"], float("inf")), changed(["columns", "age", "center"], 10**400),
        changed(["columns", "age", "squares"], -1.0), changed(["columns", "age", "sum"], 1e9),
        changed(["columns", "age", "histogram"], [1, 2]), changed(["columns", "age", "histogram", 0], 1),
        changed(["columns", "age", "histogram", 0], 99), changed(["classes"], {"ill": -3}),
        changed(["classes"], {"ill": 41}), changed(["classes"], {"x" * 2_000: 4}), changed(["classes"], ["ill"]),
        changed(["classes"], None), changed(["withheld_classes"], -1), changed(["withheld_classes"], 1.5),
        changed(["classes"], {"999999999999999": 20}), changed(["columns", "age", "center"], 9e99),
    ],
)  # fmt: skip
def test_what_no_party_can_have_is_refused(told: Any) -> None:
    if told == changed(["classes"], None):
        told["withheld_classes"] = 1
    with pytest.raises(SummaryError):
        checked(told, ASKED)


def test_a_question_survives_json_and_a_wrong_one_is_refused() -> None:
    asked = Asked(("a", "b"), True, {"a": (0.0, 1.0)}, {"b": (0.0, 5.0)}, ("x", "y"))
    assert Asked.of(json.loads(json.dumps(asked.to_json()))) == asked
    good = asked.to_json()
    for part, value in (
        ("columns", ["a", "a"]), ("columns", "ab"), ("classes", 1), ("edges", {"c": [0.0]}), ("edges", {"a": [1, 0]}),
        ("bounds", {"a": [0.0]}), ("class_names", ["x", "x"]), ("more", 1),
    ):  # fmt: skip
        with pytest.raises(SummaryError):
            Asked.of(good | {part: value})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"min_group": 0}, "at least 1"),
        ({"columns": {}}, "there is no column 'age'"),
        ({"labels": None}, "there are no labels"),
        ({"noise": Noise(1.0)}, "needs bounds of every column"),
        ({"labels": numpy.array(["ill"])}, "must have one length"),
    ],
)
def test_a_summary_that_cannot_be_made_is_refused(change: dict[str, Any], sentence: str) -> None:
    columns, labels = party(0, 30)
    given: dict[str, Any] = {"columns": columns, "labels": labels, "min_group": 1} | change
    with pytest.raises(UserError, match=sentence):
        summary_of(given.pop("columns"), ASKED, **given)
    with pytest.raises(UserError, match="epsilon must be above 0"):
        Noise(0.0)


def test_a_simulated_table_is_scaled_as_by_all_rows_together(tmp_path: Any) -> None:
    """The same numbers to 1e-12, and after rounding to 32 bits the same inputs."""
    draw = numpy.random.default_rng(0)
    rows = [
        f"{'abc'[row % 3]},{draw.normal(50, 9):.3f},{draw.exponential() * 1e5:.2f},7,{'ill' if row % 4 else 'well'}"
        for row in range(90)
    ]
    file = tmp_path / "visits.csv"
    file.write_text("\n".join(["clinic,age,cost,same,outcome", *rows]))
    plain = read_federation(file, "clinic", "outcome", scale="none", select="all")
    scaled = read_federation(file, "clinic", "outcome", scale="all", select="all")
    statistics = federation_statistics(plain)
    assert plain.reading is not None
    assert scaled.reading is not None
    assert scaled.reading.table is not None
    scaling = scaled.reading.table.scaling
    assert scaling is not None
    names = scaled.reading.table.inputs
    assert statistics.deviations(names) == pytest.approx(scaling.deviation, rel=1e-12)
    assert [statistics.columns[name].mean for name in names] == pytest.approx(scaling.mean, rel=1e-12)
    assert torch.equal(scaled_with(plain, statistics).x, scaled.x)
    assert set(statistics.classes) == {"ill", "well"}


def test_simulated_images_are_scaled_by_channel() -> None:
    x = torch.randn(40, 2, 3, 3) * 4 + 7
    federation = Federation.from_clients([(x[:25], torch.arange(25) % 2), (x[25:], torch.arange(15) % 2)])
    statistics = federation_statistics(federation, min_group=3)
    train = torch.cat([federation.splits["train"].of(client) for client in range(2)])
    scaled = scaled_with(federation, statistics).x[train].double()
    assert scaled.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert scaled.std((0, 2, 3), correction=0).tolist() == pytest.approx([1, 1], rel=1e-6)
    bounds = {"0": (-20.0, 30.0), "1": (-20.0, 30.0)}
    first, second, other = (
        client_summary(federation, client, Asked(("0", "1"), bounds=bounds), 1, Noise(1.0), seed=seed)
        for client, seed in ((0, 4), (0, 4), (1, 4))
    )
    assert first == second
    assert first["rows"] - 18 != other["rows"] - 10  # each client draws its own noise
