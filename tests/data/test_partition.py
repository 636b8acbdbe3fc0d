"""Partitions: every example has one owner or none, shares are alike in all splits, nothing hangs, the key decides."""

import doctest
from collections.abc import Mapping

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedhn.data import partition
from pfedhn.data.partition import (
    Assignment,
    Labels,
    Partition,
    by_classes,
    by_coarse_class,
    by_group,
    dirichlet,
)
from pfedhn.errors import UserError

Splits = Mapping[str, Labels]


def balanced_splits(num_classes: int, train: int, validation: int, test: int) -> dict[str, Labels]:
    """As CIFAR: train and validation split at random, test balanced; coarse classes of five."""
    y = numpy.random.default_rng(0).permutation(numpy.arange(train + validation) % num_classes)
    parts = {"train": y[:train], "validation": y[train:], "test": numpy.arange(test) % num_classes}
    return {name: Labels(part, groups=part % 7, coarse=part // 5) for name, part in parts.items()}


@st.composite
def any_splits(draw: st.DrawFn) -> dict[str, Labels]:
    """Splits of any size, empty ones too, over classes that may have gaps in their numbers."""
    classes = numpy.array(sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=12))))
    generator = numpy.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [draw(st.integers(1, 300)), draw(st.integers(0, 100)), draw(st.integers(0, 100))]
    splits = {}
    for name, size in zip(("train", "validation", "test"), sizes, strict=True):
        y = generator.choice(classes, size)
        splits[name] = Labels(y, groups=generator.integers(-2, 3, size), coarse=y // 3)
    return splits


rules: st.SearchStrategy[Partition] = st.one_of(
    st.builds(by_classes, st.just(1), st.integers(1, 40), st.sampled_from(["paper", "reference"])),
    st.builds(
        dirichlet,
        st.floats(1e-9, 1e9),
        st.integers(1, 40),
        st.sampled_from(["paper", "per-class"]),
        st.integers(0, 10),
        st.none(),
        st.sampled_from(["apart", "jointly"]),
    ),
    st.just(by_group()),
    st.builds(by_coarse_class, st.integers(1, 6)),
)


def same(left: Assignment, right: Assignment) -> bool:
    return all(
        all(map(numpy.array_equal, left.clients[name], right.clients[name]))
        and numpy.array_equal(left.unused[name], right.unused[name])
        for name in left.clients
    )


def counts(assignment: Assignment, splits: Splits, name: str) -> numpy.ndarray:
    width = assignment.shares.shape[1]
    return numpy.stack([numpy.bincount(splits[name].y[owned], minlength=width) for owned in assignment.clients[name]])


def assert_every_example_once(assignment: Assignment, splits: Splits) -> None:
    assert set(assignment.clients) == set(assignment.unused) == set(splits)
    for name, labels in splits.items():
        assert len(assignment.clients[name]) == assignment.num_clients
        everything = numpy.concatenate([*assignment.clients[name], assignment.unused[name]])
        assert numpy.array_equal(numpy.sort(everything), numpy.arange(len(labels.y)))


def assert_shares_rounded_down(assignment: Assignment, splits: Splits) -> None:
    for name, labels in splits.items():
        exact = assignment.shares * numpy.bincount(labels.y, minlength=assignment.shares.shape[1])
        short = exact - counts(assignment, splits, name)
        assert short.max() < 1
        assert short.min() > -1e-9


@settings(max_examples=150)
@given(any_splits(), rules, st.integers(-(2**63), 2**63 - 1))
def test_every_rule_gives_every_example_one_owner_or_none(splits: Splits, rule: Partition, key: int) -> None:
    assignment = rule.assign(splits, key)
    assert_every_example_once(assignment, splits)
    assert numpy.isfinite(assignment.shares).all()
    assert assignment.shares.min() >= 0
    assert assignment.shares.sum(0).max() <= 1 + 1e-9
    assert same(assignment, rule.assign(splits, key))


@settings(max_examples=150)
@given(any_splits(), st.data(), st.integers(0, 1000))
def test_by_classes_is_balanced_and_distinct(splits: Splits, data: st.DataObject, key: int) -> None:
    present = numpy.unique(numpy.concatenate([labels.y for labels in splits.values()]))
    per_client = data.draw(st.integers(1, len(present)))
    num_clients = data.draw(st.integers(1, 30))
    for shares in ("paper", "reference"):
        assignment = by_classes(per_client, num_clients, shares).assign(splits, key)
        assert_every_example_once(assignment, splits)
        assert_shares_rounded_down(assignment, splits)
        holds = assignment.shares > 0
        assert (holds.sum(1) == per_client).all()
        num_holders = holds.sum(0)[present]
        assert num_holders.sum() == num_clients * per_client
        assert num_holders.max() - num_holders.min() <= 1
        total = assignment.shares.sum(0)[present]
        if shares == "paper":
            assert numpy.allclose(total[num_holders > 0], 1)
        else:
            num_slots = num_clients * per_client // len(present) + 1
            lost = 1 - total[num_holders > 0]
            assert numpy.allclose(lost[num_holders[num_holders > 0] == num_slots], 0)
            assert (lost[num_holders[num_holders > 0] < num_slots] > 0.4 / (0.6 * num_slots) - 1e-9).all()


# Per cent of the 40,000 training examples in use, from a simulation of the reference code's own rule over five seeds.
@pytest.mark.parametrize(
    ("num_classes", "per_client", "num_clients", "reference"),
    [
        (10, 2, 10, 66.6),
        (10, 2, 50, 90.9),
        (10, 2, 75, 93.7),
        (10, 2, 100, 94.9),
        (100, 10, 10, 49.7),
        (100, 10, 50, 82.7),
        (100, 10, 75, 92.9),
        (100, 10, 100, 89.6),
    ],
)
def test_used_fractions_are_those_of_the_reference_code(
    num_classes: int, per_client: int, num_clients: int, reference: float
) -> None:
    splits = balanced_splits(num_classes, 40_000, 10_000, 10_000)

    def used(rule: Partition) -> float:
        unused = [len(rule.assign(splits, key).unused["train"]) for key in range(5)]
        return 100 * (1 - float(numpy.mean(unused)) / 40_000)

    assert used(by_classes(per_client, num_clients, "reference")) == pytest.approx(reference, abs=1)
    # Divided among holders alone, rounding down costs half an example for each class a client holds.
    assert used(by_classes(per_client, num_clients)) == pytest.approx(
        100 * (1 - 0.5 * num_clients * per_client / 40_000), abs=0.15
    )


def test_shares_of_one_class_are_uniform_draws_over_their_sum() -> None:
    splits = balanced_splits(100, 40_000, 10_000, 10_000)
    shares = by_classes(50, 2).assign(splits, 0).shares  # one holder each
    assert set(shares.ravel()) == {0.0, 1.0}
    shares = by_classes(100, 2).assign(splits, 0).shares  # two holders: a / (a + b) with a, b in [.4, .6]
    assert shares.min() >= 0.4
    assert shares.max() <= 0.6
    assert shares.std() == pytest.approx(numpy.std([a / (a + b) for a, b in uniform_pairs()]), rel=0.15)


def uniform_pairs() -> numpy.ndarray:
    return numpy.random.default_rng(0).uniform(0.4, 0.6, (5000, 2))


def test_classes_without_a_holder_are_unused() -> None:
    splits = balanced_splits(10, 400, 100, 100)
    assignment = by_classes(2, num_clients=3).assign(splits, 0)
    holders = (assignment.shares > 0).sum(0)
    assert sorted(holders) == [0] * 4 + [1] * 6
    orphans = numpy.flatnonzero(holders == 0)
    for name, labels in splits.items():
        assert set(labels.y[assignment.unused[name]]) == set(orphans)


def test_another_key_deals_other_examples_and_another_split_its_own() -> None:
    splits = balanced_splits(10, 2000, 500, 500)
    for rule in (by_classes(2, 10), dirichlet(0.5, 10), by_coarse_class(3)):
        assert not same(rule.assign(splits, 0), rule.assign(splits, 1))
        alone = rule.assign({"train": splits["train"]}, 0)
        together = rule.assign(splits, 0)
        assert all(map(numpy.array_equal, alone.clients["train"], together.clients["train"]))


@settings(max_examples=60)
@given(
    any_splits(), st.floats(1e-9, 1e9), st.integers(1, 30), st.sampled_from(["paper", "per-class"]), st.integers(0, 9)
)
def test_dirichlet_shares_sum_to_one_at_any_alpha(
    splits: Splits, alpha: float, num_clients: int, form: partition.Form, key: int
) -> None:
    assignment = dirichlet(alpha, num_clients, form).assign(splits, key)
    assert_shares_rounded_down(assignment, splits)
    present = numpy.unique(numpy.concatenate([labels.y for labels in splits.values()]))
    assert numpy.allclose(assignment.shares[:, present].sum(0), 1)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_dirichlet_has_the_distribution_of_numpys(alpha: float) -> None:
    """The paper: a Dirichlet per client over classes, then each class divided by its sum over clients."""
    num_clients, num_classes = 4000, 10
    generator = numpy.random.default_rng(1)
    drawn = generator.dirichlet(numpy.full(num_classes, alpha), num_clients)
    expected = numpy.quantile(drawn / drawn.sum(0) * num_clients, [0.5, 0.75, 0.9, 0.99])
    splits = {"train": Labels(numpy.arange(num_classes))}
    shares = dirichlet(alpha, num_clients).assign(splits, 0).shares
    assert numpy.allclose(numpy.quantile(shares * num_clients, [0.5, 0.75, 0.9, 0.99]), expected, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_per_class_form_is_a_dirichlet_over_clients(alpha: float) -> None:
    num_clients, num_classes = 8, 4000
    shares = dirichlet(alpha, num_clients, "per-class").assign({"train": Labels(numpy.arange(num_classes))}, 0).shares
    assert numpy.allclose(shares.mean(1), 1 / num_clients, rtol=0.15)
    variance = (num_clients - 1) / (num_clients**2 * (num_clients * alpha + 1))
    assert shares.var(1).mean() == pytest.approx(variance, rel=0.1)


def test_novel_alpha_leaves_training_clients_untouched() -> None:
    splits = balanced_splits(10, 8000, 2000, 2000)
    for form in ("paper", "per-class"):
        rule = {alpha: dirichlet(0.1, 18, form, novel_clients=2, novel_alpha=alpha) for alpha in (0.1, 1.0)}
        mild, strong = rule[1.0].assign(splits, 5), rule[0.1].assign(splits, 5)
        for name in splits:
            assert all(map(numpy.array_equal, mild.clients[name][:18], strong.clients[name][:18]))
            assert not numpy.array_equal(mild.clients[name][18], strong.clients[name][18])
            novel = sum(map(len, mild.clients[name][18:]))
            assert novel == pytest.approx(0.1 * len(splits[name].y), rel=0.05)
        assert_every_example_once(mild, splits)
        assert numpy.allclose(mild.shares.sum(0), 1)
        assert numpy.allclose(mild.shares[:18].sum(0), 0.9)


def test_joint_normalization_lets_novel_clients_take_from_the_others() -> None:
    splits = balanced_splits(10, 8000, 2000, 2000)
    joint = {a: dirichlet(0.1, 18, "paper", 2, a, "jointly").assign(splits, 5) for a in (0.1, 1.0)}
    assert_shares_rounded_down(joint[1.0], splits)
    assert numpy.allclose(joint[1.0].shares.sum(0), 1)
    assert not numpy.allclose(joint[1.0].shares[:18], joint[0.1].shares[:18])


@pytest.mark.parametrize("normalize", ["apart", "jointly"])
def test_novel_clients_have_draws_of_their_own(normalize: partition.Normalize) -> None:
    splits = balanced_splits(10, 800, 200, 200)
    shares = dirichlet(0.5, 9, novel_clients=9, normalize=normalize).assign(splits, 3).shares
    assert not numpy.allclose(shares[:9], shares[9:], atol=0.05)


def test_without_novel_clients_both_normalizations_agree() -> None:
    splits = balanced_splits(10, 800, 200, 200)
    assert same(dirichlet(0.5, 9).assign(splits, 3), dirichlet(0.5, 9, normalize="jointly").assign(splits, 3))


def test_a_client_may_come_out_empty() -> None:
    """One class and a tiny alpha: one client has it all, and nothing is drawn again."""
    assignment = dirichlet(1e-6, 10, "per-class").assign({"train": Labels(numpy.zeros(50, dtype=int))}, 0)
    assert sorted(map(len, assignment.clients["train"])) == [0] * 9 + [50]


@settings(max_examples=50)
@given(any_splits())
def test_by_group_gives_a_client_all_examples_of_its_group(splits: Splits) -> None:
    assignment = by_group().assign(splits, 0)
    groups = numpy.unique(numpy.concatenate([labels.groups for labels in splits.values() if labels.groups is not None]))
    assert assignment.num_clients == len(groups)
    for name, labels in splits.items():
        assert not len(assignment.unused[name])
        for group, owned in zip(groups, assignment.clients[name], strict=True):
            assert numpy.array_equal(owned, numpy.flatnonzero(labels.groups == group))


@settings(max_examples=50)
@given(any_splits(), st.integers(1, 5))
def test_by_coarse_class_splits_each_fine_class_evenly(splits: Splits, per_class: int) -> None:
    assignment = by_coarse_class(per_class).assign(splits, 0)
    assert_shares_rounded_down(assignment, splits)
    coarse = numpy.unique(numpy.concatenate([labels.coarse for labels in splits.values() if labels.coarse is not None]))
    assert assignment.num_clients == len(coarse) * per_class
    for client, owned in enumerate(assignment.clients["train"]):
        assert set(splits["train"].y[owned] // 3) <= {coarse[client // per_class]}
    for mine in counts(assignment, splits, "train").reshape(len(coarse), per_class, -1):
        assert (mine == mine[:1]).all()


def whole_shares(splits: Splits, per_class: int) -> dict[str, list[list[int]]]:
    """How many examples of each class present every client has, by integer division alone."""
    present = numpy.unique(numpy.concatenate([labels.y for labels in splits.values()]))
    coarse = numpy.unique(present // 3)
    return {
        name: [
            [int((labels.y == label).sum()) // per_class if label // 3 == owner else 0 for label in present]
            for owner in coarse
            for _ in range(per_class)
        ]
        for name, labels in splits.items()
    }


@settings(max_examples=60)
@given(any_splits(), st.integers(1, 250))
@pytest.mark.slow
def test_by_coarse_class_rounds_as_whole_numbers_do(splits: Splits, per_class: int) -> None:
    assignment = by_coarse_class(per_class).assign(splits, 0)
    present = numpy.unique(numpy.concatenate([labels.y for labels in splits.values()]))
    for name, expected in whole_shares(splits, per_class).items():
        assert counts(assignment, splits, name)[:, present].tolist() == expected


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(1, 3_000), st.integers(1, 40), st.integers(0, 3_000))
def test_a_kth_of_any_number_is_its_quotient(per_class: int, quotient: int, remainder: int) -> None:
    zeros = numpy.zeros(per_class * quotient + remainder % per_class, dtype=int)
    assignment = by_coarse_class(per_class).assign({"train": Labels(zeros, coarse=zeros)}, 0)
    assert {len(owned) for owned in assignment.clients["train"]} == {quotient}


@pytest.mark.parametrize("per_class", [49, 98, 103, 107, 161, 187, 196, 197])
def test_a_kth_of_k_examples_is_one(per_class: int) -> None:
    """1 / k in floating point is less than a kth for these, and k times it less than 1."""
    assert per_class * (1 / per_class) < 1
    y = numpy.arange(2 * per_class) % 2
    assignment = by_coarse_class(per_class).assign({"train": Labels(y, coarse=y)}, 0)
    assert [len(owned) for owned in assignment.clients["train"]] == [1] * (2 * per_class)
    assert not len(assignment.unused["train"])


def test_rules_are_values_whose_repr_is_their_call() -> None:
    rules = [
        by_classes(2, 50),
        by_classes(2, 50, "reference"),
        dirichlet(0.1, 90, novel_clients=10, novel_alpha=0.25, normalize="jointly"),
        dirichlet(0.3, 20, form="per-class"),
        by_group(),
        by_coarse_class(5),
    ]
    for rule in rules:
        assert eval(repr(rule), vars(partition)) == rule
    assert len({*rules, by_classes(2, num_clients=50)}) == len(rules)
    assert repr(by_classes(2, 50)) == "by_classes(classes_per_client=2, num_clients=50)"


SPLITS = {"train": Labels(numpy.arange(20) % 4)}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: by_classes(5, 3).assign(SPLITS, 0), "ask for at most 4"),
        (lambda: by_classes(0, 3), "classes_per_client is 0; give a whole number of at least 1"),
        (lambda: by_classes(2, 0), "num_clients is 0"),
        (lambda: by_classes(2, 2.5), "num_clients is 2.5"),  # type: ignore[arg-type]
        (lambda: by_classes(True, 5), "classes_per_client is True; give a whole number"),
        (lambda: by_classes(2, True), "num_clients is True"),
        (lambda: dirichlet(0.5, True), "num_clients is True"),
        (lambda: dirichlet(0.5, 5, novel_clients=True), "novel_clients is True"),
        (lambda: dirichlet(True, 5), "alpha is True; give a number above 0"),
        (lambda: dirichlet("0.5", 5), "alpha is '0.5'"),  # type: ignore[arg-type]
        (lambda: by_coarse_class(True), "clients_per_class is True"),
        (lambda: by_classes(2, 3, "papers"), "choose 'paper' or 'reference'"),  # type: ignore[arg-type]
        (lambda: dirichlet(0, 3), "alpha is 0; give a number above 0"),
        (lambda: dirichlet(-1, 3), "alpha is -1"),
        (lambda: dirichlet(float("nan"), 3), "alpha is nan"),
        (lambda: dirichlet(1, -3), "num_clients is -3"),
        (lambda: dirichlet(1, 3, novel_clients=-1), "novel_clients is -1; give a whole number of at least 0"),
        (lambda: dirichlet(1, 3, novel_clients=1, novel_alpha=0), "novel_alpha is 0"),
        (lambda: dirichlet(1, 3, novel_alpha=1), "give novel_clients too"),
        (lambda: dirichlet(1, 3, form="class"), "choose 'paper' or 'per-class'"),  # type: ignore[arg-type]
        (lambda: dirichlet(1, 3, normalize="no"), "choose 'apart' or 'jointly'"),  # type: ignore[arg-type]
        (lambda: by_group().assign(SPLITS, 0), "the train examples have none; give groups"),
        (lambda: by_coarse_class(2).assign(SPLITS, 0), "the train examples have none; give coarse"),
        (lambda: by_coarse_class(0), "clients_per_class is 0"),
        (
            lambda: by_coarse_class(1).assign({"train": Labels(numpy.array([3, 3]), coarse=numpy.arange(2))}, 0),
            "class 3 is in coarse classes 0 and 1",
        ),
        (lambda: by_classes(1, 1).assign({"train": Labels(numpy.arange(0))}, 0), "no examples to share out"),
        (lambda: by_classes(1, 1).assign({}, 0), "no examples to share out"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(call, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_examples_in_the_documentation_run() -> None:
    result = doctest.testmod(partition)
    assert result.attempted > 10
    assert not result.failed


@pytest.mark.parametrize(
    "rule",
    [
        by_classes(2, 10**9),
        dirichlet(0.1, 10**9),
        dirichlet(0.1, 2, novel_clients=10**9),
        by_coarse_class(10**9),
    ],
    ids=repr,
)
def test_more_clients_than_examples_are_refused_at_once(rule: Partition) -> None:
    labels = Labels(numpy.arange(40) % 4, coarse=numpy.arange(40) % 2)
    with pytest.raises(UserError, match="clients cannot share 40 examples; use fewer clients"):
        rule.assign({"train": labels}, key=0)
