"""Federations: who is called what, who draws what, and what is refused before anything is trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray

from pfedhn import Federation, by_coarse_class, dirichlet, keys
from pfedhn.data.batches import draw_batches
from pfedhn.data.files import read_federation
from pfedhn.data.partition import Assignment, Labels
from pfedhn.errors import UserError

SIZES = {"paris": 40, "lyon": 25, "metz": 7}
Client = tuple[NDArray[numpy.float64], NDArray[numpy.int64]]


def clients() -> dict[str, Client]:
    """Every example is a number of its own, so that a draw can be recognized."""
    parts = numpy.split(numpy.arange(sum(SIZES.values())), numpy.cumsum(list(SIZES.values())))[:-1]
    return {name: (part[:, None].astype(float), part % 3) for name, part in zip(SIZES, parts, strict=True)}


def owned(federation: Federation, client: int) -> dict[str, list[int]]:
    return {name: federation.x[rows.of(client)].flatten().int().tolist() for name, rows in federation.splits.items()}


@pytest.mark.parametrize("stratify", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_a_party_alone_draws_what_it_draws_among_all(name: str, stratify: bool) -> None:
    everybody = Federation.from_clients(clients(), seed=3, stratify=stratify)
    alone = Federation.from_clients({name: clients()[name]}, seed=3, stratify=stratify)
    place = everybody.number_of(name)
    assert owned(alone, 0) == owned(everybody, place)
    key = keys.fold(5, "batches", 2)
    among, own = (
        federation.batches(torch.tensor([number]), key, 4, 8) for federation, number in ((everybody, place), (alone, 0))
    )
    # A party that has fewer examples than a batch fills up to its own size, not to the largest party's.
    for step in range(4):
        for left, right in ((among.x, own.x), (among.y, own.y)):
            assert torch.equal(left[0, step][among.mask[0, step]], right[0, step][own.mask[0, step]])


def test_a_clients_draws_follow_its_name_and_not_its_place() -> None:
    forward = Federation.from_clients(clients())
    backward = Federation.from_clients(dict(reversed(clients().items())))
    for name in SIZES:
        assert owned(forward, forward.number_of(name)) == owned(backward, backward.number_of(name))
    renamed = Federation.from_clients({name.upper(): client for name, client in clients().items()})
    assert owned(renamed, 0) != owned(forward, 0)


def test_without_names_a_client_draws_by_its_number() -> None:
    listed = Federation.from_clients(list(clients().values()))
    assert listed.names is None
    assert listed.identities is None
    members = torch.tensor([2, 0])
    assert listed.identity(members) is members
    named = Federation.from_clients(clients())
    expected = [keys.hash_text(name) for name in ("metz", "paris")]
    assert named.identity(members).tolist() == expected
    assert [keys.fold(1, name) for name in ("metz", "paris")] == [keys.fold(1, number) for number in expected]


def test_bare_tensors_are_drawn_by_identity_too() -> None:
    federation, members, steps = Federation.from_clients(clients()), torch.tensor([1, 0]), torch.arange(3)
    wanted = federation.batches(members, 9, 3, 5)
    data = federation.x, federation.y, federation.splits["train"]
    drawn = draw_batches(*data, members, 9, steps, 5, federation.identity(members))
    assert all(torch.equal(a, b) for a, b in zip(wanted, drawn, strict=True))
    by_number = Federation(federation.x, federation.y, federation.splits).batches(members, 9, 3, 5)
    assert all(torch.equal(a, b) for a, b in zip(by_number, draw_batches(*data, members, 9, steps, 5), strict=True))
    assert not torch.equal(wanted.x, by_number.x)


def test_names_lead_to_places_and_back() -> None:
    federation = Federation.from_clients(clients()).to("cpu").evaluating([1])
    assert [federation.number_of(name) for name in SIZES] == [0, 1, 2]
    assert [federation.name_of(number) for number in range(3)] == list(SIZES)
    assert federation.number_of(2) == federation.number_of(numpy.int64(2)) == federation.number_of("2") == 2
    unnamed = Federation.from_clients(list(clients().values()))
    assert [unnamed.number_of(unnamed.name_of(number)) for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            "pari",
            r"there is no client 'pari'; did you mean 'paris'\? There are paris, lyon, metz\. One that did not train",
        ),
        ("3", "there is no client '3'; they are numbered from 0 to 2"),
        (3, "there is no client 3; they are numbered from 0 to 2"),
        (-1, "there is no client -1"),
        (True, "there is no client True"),
        (0.5, r"there is no client 0\.5"),
        (None, "there is no client None"),
        ([1], r"there is no client \[1\]"),
    ],
)
def test_clients_that_there_are_not(asked: object, sentence: str) -> None:
    federation = Federation.from_clients(clients())
    with pytest.raises(UserError, match=sentence):
        federation.number_of(asked)  # type: ignore[arg-type]


def test_a_number_that_is_no_clients_name_is_not_a_place_where_names_are_numbers() -> None:
    federation = Federation.from_clients(dict(zip(("1", "2", "3"), clients().values(), strict=True)))
    assert federation.number_of("3") == 2
    with pytest.raises(UserError, match="there is no client '0'; there are 1, 2, 3"):
        federation.number_of("0")


def test_clients_that_there_are_not_where_nobody_has_a_name() -> None:
    federation = Federation.from_clients(list(clients().values()))
    for asked in ("paris", "3", 3):
        with pytest.raises(UserError, match=f"there is no client {asked!r}; they are numbered from 0 to 2"):
            federation.number_of(asked)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("paris", "lyon"), "2 names were given for 3 clients"),
        (("paris", "lyon", "paris"), "two clients are called 'paris'"),
        (("paris", "", "metz"), "a client is called ''"),
        (("paris", " ", "metz"), "a client is called ' '"),
        (("paris", 3, "metz"), "a client is called 3"),
    ],
)
def test_names_that_are_none(names: tuple[str, ...], sentence: str) -> None:
    whole = Federation.from_clients(clients())
    with pytest.raises(UserError, match=sentence):
        Federation(whole.x, whole.y, whole.splits, names=names)
    if len(set(names)) == 3:
        with pytest.raises(UserError, match=sentence):
            Federation.from_clients(dict(zip(names, clients().values(), strict=True)))


def test_one_clients_splits_are_not_taken_for_clients() -> None:
    with pytest.raises(UserError, match="train, test are splits of one client; give a list of clients"):
        Federation.from_clients({"train": clients()["paris"], "test": clients()["lyon"]})


def test_sentences_call_a_client_by_its_name() -> None:
    with pytest.raises(UserError, match="client metz would have no training"):
        Federation.from_clients({**clients(), "metz": {"test": clients()["metz"]}})
    with pytest.raises(UserError, match="client 'metz' has a split 'trian'"):
        Federation.from_clients({**clients(), "metz": {"trian": clients()["metz"]}})


def test_class_names_count_the_classes() -> None:
    """A party may have examples of a few classes only; its network has outputs for all of them."""
    names = ["ant", "bee", "cat", "dog"]
    federation = Federation.from_clients(clients(), class_names=names)
    assert federation.class_names == tuple(names)
    assert federation.num_classes == 4
    assert federation.class_shares.shape == (3, 4)
    with pytest.raises(UserError, match="y holds the class 2, and class_names has 2; name every class"):
        Federation.from_clients(clients(), class_names=names[:2])
    numbers = {name: (x, y.astype(float)) for name, (x, y) in clients().items()}
    with pytest.raises(UserError, match="class_names have nothing to name"):
        Federation.from_clients(numbers, class_names=names)


def test_own_files_name_clients_and_classes(tmp_path: Path) -> None:
    words = numpy.array(["cat", "ant", "bee"])
    for name, (x, y) in clients().items():
        (tmp_path / "folders" / name).mkdir(parents=True)
        numpy.save(tmp_path / "folders" / name / "x.npy", x)
        numpy.save(tmp_path / "folders" / name / "y.npy", words[y])
    lines = [
        f"{name},{words[label]},{x[0]}" for name, (xs, y) in clients().items() for x, label in zip(xs, y, strict=True)
    ]
    (tmp_path / "table.csv").write_text("\n".join(["city,animal,size", *lines]))
    folders = read_federation(tmp_path / "folders", seed=4)
    as_it_is: dict[str, Any] = {"scale": "none", "select": "all", "min_examples": 1}
    table = read_federation(tmp_path / "table.csv", "city", "animal", seed=4, **as_it_is)
    for federation in (folders, table):
        assert federation.names == ("lyon", "metz", "paris")
        assert federation.class_names == ("ant", "bee", "cat")
        assert federation.num_classes == 3
    for client in range(3):
        assert owned(folders, client) == owned(table, client)
    with pytest.raises(UserError, match="say which column names the client and which holds the label"):
        read_federation(tmp_path / "table.csv", "city")


def with_novel_clients(novel: int = 3, **settings: Any) -> Federation:
    x, y = numpy.arange(600.0)[:, None], numpy.arange(600) % 4
    rule = dirichlet(2.0, num_clients=9, novel_clients=novel, **settings)
    return Federation.from_arrays(x, y, rule, split=(0.5, 0.25, 0.25), seed=2)


@pytest.mark.parametrize("normalize", ["apart", "jointly"])
def test_novel_clients_are_known_as_such_and_have_examples_of_their_own(normalize: str) -> None:
    federation = with_novel_clients(normalize=normalize)
    assert (federation.num_clients, federation.num_joining) == (9, 3)
    assert federation.joining is not None
    assert federation.joining.x is federation.x
    assert federation.joining.y is federation.y
    assert federation.joining.joining is None
    everything = [
        number
        for part in (federation, federation.joining)
        for rows in part.splits.values()
        for client in range(part.num_clients)
        for number in rows.of(client).tolist()
    ]
    assert len(set(everything)) == len(everything) == 600 - sum(federation.unused.values())
    assert repr(federation).startswith("Federation(9 clients and 3 that join later; examples: ")
    without = with_novel_clients(0)
    assert (without.joining, without.num_joining) == (None, 0)
    assert repr(without).startswith("Federation(9 clients; examples: ")


def test_a_client_that_joins_later_draws_by_the_number_after_the_others() -> None:
    federation = with_novel_clients()
    joining = federation.joining
    assert joining is not None
    assert [joining.name_of(place) for place in range(3)] == ["9", "10", "11"]
    assert [joining.number_of(client) for client in (1, "10")] == [1, 1]
    with pytest.raises(UserError, match="there is no client '1'; they are numbered from 9 to 11"):
        joining.number_of("1")
    train = joining.splits["train"]
    numbers = torch.tensor([10])
    drawn = joining.batches(torch.tensor([1]), 7, 3, 4)
    size = int(train.size[1])
    for step in range(3):
        key = keys.fold(keys.fold(7, numbers), step)
        places = keys.permutation_head(key, size, drawn.x.shape[2])[0]
        assert torch.equal(drawn.x[0, step], federation.x[train.of(1)[places]])


def test_what_is_done_to_a_federation_is_done_to_those_who_join_later() -> None:
    federation = with_novel_clients()
    moved = federation.to("cpu", torch.float64)
    assert moved.joining is not None
    assert moved.joining.x is moved.x
    assert moved.x.dtype == torch.float64
    values = numpy.arange(24.0).reshape(12, 2)
    described = federation.with_descriptors(values).with_architectures([*["small"] * 9, *["large"] * 3])
    assert described.descriptors is not None
    assert described.joining is not None
    assert described.joining.descriptors is not None
    assert described.descriptors.tolist() == values[:9].tolist()
    assert described.joining.descriptors.tolist() == values[9:].tolist()
    assert described.joining.architectures == ("large",) * 3
    assert described.architectures == ("small",) * 9
    with pytest.raises(UserError, match="each of the 9 clients and 3 that join later, not"):
        federation.with_descriptors(values[:9])
    with pytest.raises(UserError, match="9 architectures were given for 9 clients and 3 that join later"):
        federation.with_architectures(["small"] * 9)
    some = federation.evaluating([2])
    assert some.joining is federation.joining
    assert int((some.splits["test"].size > 0).sum()) == 1
    with pytest.raises(UserError, match="numbers from 0 to 8"):
        federation.evaluating([9])


def test_a_client_that_joins_later_must_have_something_to_train_on() -> None:
    x, y = numpy.arange(60.0)[:, None], numpy.zeros(60, dtype=int)
    with pytest.raises(UserError, match="client 3 would have no training"):
        Federation.from_arrays(x, y, LastGetsNothing())


def test_a_rule_that_leaves_everybody_empty_is_refused() -> None:
    x, y = numpy.arange(60.0)[:, None], numpy.arange(60) % 3
    with pytest.raises(
        UserError, match=r"by_coarse_class\(clients_per_class=21\) leaves every client without examples"
    ):
        Federation.from_arrays(x, y, by_coarse_class(21), coarse=y)


class LastGetsNothing:
    def assign(self, splits: Mapping[str, Labels], key: keys.Key) -> Assignment:
        parts = {name: numpy.array_split(numpy.arange(len(labels.y)), 3) for name, labels in splits.items()}
        nothing = numpy.empty(0, dtype=numpy.int64)
        clients = {name: [*part, nothing] for name, part in parts.items()}
        return Assignment(clients, dict.fromkeys(splits, nothing), numpy.ones((4, 1)) / 3, num_novel=1)
