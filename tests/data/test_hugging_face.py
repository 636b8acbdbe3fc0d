"""Hugging Face's data sets in which a column names the client."""

import gc
import io
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

import pfedhn
from pfedhn.data.describe import describe
from pfedhn.data.hugging_face import from_hugging_face
from pfedhn.errors import UserError

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")


def table() -> object:
    rows = range(60)
    return datasets.Dataset.from_dict(
        {
            "office": ["b", "a", "c"] * 20,
            "mood": ["glad" if i % 2 else "sad" for i in rows],
            "values": [[float(i), -float(i)] for i in rows],
        }
    )


def test_clients_and_classes_keep_their_names() -> None:
    federation = from_hugging_face(table(), "office", "mood", "values", split=(0.5, 0.25, 0.25))
    assert federation.names == ("a", "b", "c")
    assert federation.class_names == ("glad", "sad")
    for client, first in enumerate((1, 0, 2)):
        rows = torch.cat([federation.splits[split].of(client) for split in federation.splits])
        assert sorted(federation.x[rows][:, 0].tolist()) == list(range(first, 60, 3))
        assert torch.equal(federation.y[rows] == 0, federation.x[rows][:, 0] % 2 == 1)


def test_clients_that_are_numbers_come_in_their_order() -> None:
    rows = {"who": [10, 2, 1] * 4, "what": [0, 1] * 6, "x": [[1.0]] * 12}
    assert from_hugging_face(datasets.Dataset.from_dict(rows), "who", "what", "x").names == ("1", "2", "10")


def test_examples_are_read_when_needed() -> None:
    federation = from_hugging_face(table(), "office", "mood", "values", split=(0.5, 0.25, 0.25), when_needed=True)
    assert federation.num_clients == 3
    assert [federation.splits[split].size.tolist() for split in federation.splits] == [[10] * 3, [5] * 3, [5] * 3]
    x, _ = federation.examples(torch.arange(20, 40))  # all of client 1's
    assert sorted(x[:, 0].tolist()) == list(range(0, 60, 3))


def test_images_are_brought_to_one_size() -> None:
    pictures = [Image.fromarray(numpy.full((4 + i % 2, 5, 3), 10 * i, dtype=numpy.uint8)) for i in range(8)]
    rows = {"who": [1, 2] * 4, "what": [0, 1] * 4, "photo": pictures}
    features = datasets.Features(
        {"who": datasets.Value("int64"), "what": datasets.ClassLabel(names=["no", "yes"]), "photo": datasets.Image()}
    )
    data = datasets.Dataset.from_dict(rows, features=features)
    federation = from_hugging_face(
        data, "who", "what", "photo", resize=(3, 3), channels="gray", split=(0.5, 0.25, 0.25)
    )
    assert federation.x.shape == (8, 1, 3, 3)
    assert federation.class_names == ("no", "yes")
    with pytest.raises(UserError, match=r"do not make one array .* images of one size or with a resize"):
        from_hugging_face(data.add_column("all", [0] * 8), "all", "what", "photo")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="no column 'ofice'; did you mean 'office'"):
        from_hugging_face(table(), "ofice", "mood", "values")
    with pytest.raises(UserError, match="give one split of a data set"):
        from_hugging_face(iter([{}]), "office", "mood", "values")


def mixed() -> object:
    """Three offices of several sizes that hold several classes."""
    generator = numpy.random.default_rng(0)
    moods = [("glad", "sad", "calm")[i] for i in generator.integers(3, size=90)]
    return datasets.Dataset.from_dict(
        {
            "office": ["bca"[i] for i in generator.integers(3, size=90)],
            "mood": moods,
            "values": generator.normal(size=(90, 4)).tolist(),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("stratify", [False, True])
def test_what_is_read_when_needed_is_the_same_federation(stratify: bool) -> None:
    held, lazy = (
        from_hugging_face(mixed(), "office", "mood", "values", seed=3, stratify=stratify, when_needed=when_needed)
        for when_needed in (False, True)
    )
    assert lazy.names == held.names == ("a", "b", "c")
    assert lazy.class_names == held.class_names == ("calm", "glad", "sad")
    assert lazy.num_classes == 3
    assert torch.equal(lazy.class_shares, held.class_shares)
    assert describe(lazy) == describe(held)
    for name in held.splits:
        for client in range(3):
            left, right = (federation.examples(federation.splits[name].of(client)) for federation in (held, lazy))
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    runs = [
        pfedhn.train("pfedhn", data, "mlp-4", steps=4, evaluate_every=2, batch_size=8, executor="loop", progress=False)
        for data in (held, lazy)
    ]
    assert [moment.test for moment in runs[0].history] == [moment.test for moment in runs[1].history]
    assert runs[1].personal_model("b") is not None


@pytest.mark.parametrize("when_needed", [False, True])
def test_a_stream_is_the_federation_of_its_rows(
    when_needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "cache"))
    pixels = numpy.random.default_rng(0).integers(256, size=(8, 9, 9, 3), dtype=numpy.uint8)
    blobs = []
    for part in pixels:  # JPEG: to decode and encode again would change it
        with io.BytesIO() as file:
            Image.fromarray(part).save(file, "jpeg")
            blobs.append({"bytes": file.getvalue(), "path": None})
    features = datasets.Features(
        {"who": datasets.Value("string"), "what": datasets.Value("int64"), "photo": datasets.Image()}
    )
    rows = {"who": ["a", "b"] * 4, "what": [0, 1] * 4, "photo": blobs}
    data = datasets.Dataset.from_dict(rows, features=features).add_column("more", [0] * 8)
    held = from_hugging_face(data, "who", "what", "photo")
    streamed = from_hugging_face(data.to_iterable_dataset(), "who", "what", "photo", when_needed=when_needed)
    assert streamed.names == held.names
    for name in held.splits:
        for client in range(2):
            left, right = (data.examples(data.splits[name].of(client)) for data in (held, streamed))
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert len(list((tmp_path / "cache").glob("stream-*"))) == when_needed  # for as long as it is needed
    del streamed
    gc.collect()
    assert not list((tmp_path / "cache").glob("stream-*"))


def test_a_stream_that_ends_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "cache"))

    def broken() -> Iterator[dict[str, object]]:
        yield {"who": "a", "what": 0, "x": [1.0]}
        raise OSError("connection lost")

    stream = datasets.IterableDataset.from_generator(broken)
    with pytest.raises(UserError, match=r"could not be read to its end .*connection lost.*try again, make room"):
        from_hugging_face(stream, "who", "what", "x")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("when_needed", [False, True])
@pytest.mark.parametrize("empty", [None, " "])
def test_an_example_of_nobody_is_refused(empty: str | None, when_needed: bool) -> None:
    rows = {"who": ["a", "b", empty, "b"], "what": [0, 1, 0, 1], "x": [[1.0], [2.0], [3.0], [4.0]]}
    with pytest.raises(UserError, match="row 2 of the data set has no 'who'; fill the cell or drop the row"):
        from_hugging_face(datasets.Dataset.from_dict(rows), "who", "what", "x", when_needed=when_needed)


@pytest.mark.parametrize("when_needed", [False, True])
@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([0, 1, None, 1], "row 2 of the data set has no 'what'; fill the cell"),
        (["x", "y", None, "y"], "row 2 of the data set has no 'what'; fill the cell"),
        ([0, 1, 0, -1], "example 3 has the label -1; class labels start at 0"),  # of one that nobody has labeled
    ],
)
def test_labels_are_refused_before_a_run_begins(labels: list[object], sentence: str, when_needed: bool) -> None:
    rows = {"who": ["a", "b", "a", "b"], "what": labels, "x": [[1.0], [2.0], [3.0], [4.0]]}
    with pytest.raises(UserError, match=sentence):
        from_hugging_face(datasets.Dataset.from_dict(rows), "who", "what", "x", when_needed=when_needed)


def test_spaces_around_a_name_make_no_other_client_or_class() -> None:
    rows = {"who": ["a", "a ", "b", " b"], "what": ["x", " x", "y", "y"], "x": [[1.0], [2.0], [3.0], [4.0]]}
    federation = from_hugging_face(datasets.Dataset.from_dict(rows), "who", "what", "x", split=(1.0, 0.0, 0.0))
    assert (federation.names, federation.class_names) == (("a", "b"), ("x", "y"))


def test_clients_of_unlike_examples_are_told_of_a_resize() -> None:
    rows = {"who": ["a", "b"], "what": [0, 1], "x": [[1.0], [2.0, 3.0]]}
    with pytest.raises(UserError, match=r"one has the shape \(1,\) and one \(2,\).; give lists of one length"):
        from_hugging_face(datasets.Dataset.from_dict(rows), "who", "what", "x")
