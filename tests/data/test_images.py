"""A person's own images and tables as they lie: several sizes, corrupt files, texts and empty cells."""

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import encoded

from pfedhn.data.files import read_client, read_federation, read_inputs
from pfedhn.data.images import decode
from pfedhn.errors import UserError
from pfedhn.experiments.build import check
from pfedhn.experiments.data import build_federation
from pfedhn.experiments.grid import from_toml, with_assignments
from pfedhn.experiments.spec import Experiment
from pfedhn.settings import parse_assignments


def photos(root: Path, sizes: tuple[int, ...] = (6, 9)) -> Path:
    """Two clients with two classes each, one of them in common; images of several sizes, all of one color a class."""
    for client, classes in (("lyon", ("cat", "dog")), ("paris", ("dog", "eel"))):
        for place, name in enumerate(classes):
            folder = root / client / name
            folder.mkdir(parents=True)
            for number in range(4):
                side = sizes[number % len(sizes)]
                pixels = numpy.full((side, side + 1, 3), 50 * (place + 1), dtype=numpy.uint8)
                (folder / f"{number}.png").write_bytes(encoded(pixels))
    return root


def test_an_image_of_another_format_than_its_name_is_refused(tmp_path: Path) -> None:
    """Pillow knows many formats, and few of their readers are hardened."""
    from PIL import Image

    root = photos(tmp_path, sizes=(6,))
    Image.new("RGB", (7, 6)).save(root / "lyon" / "cat" / "0.png", format="TIFF")
    with pytest.raises(UserError, match=r"0\.png is not a complete image"):
        read_federation(root)


def test_images_of_several_sizes_are_brought_to_one(tmp_path: Path) -> None:
    root = photos(tmp_path)
    federation = read_federation(root, resize=(5, 4), split=(0.5, 0.25, 0.25))
    assert federation.names == ("lyon", "paris")
    assert federation.class_names == ("cat", "dog", "eel")
    assert federation.x.shape == (16, 3, 5, 4)
    assert federation.x.dtype == torch.float32
    assert torch.allclose(federation.x.unique(), torch.tensor([50 / 255, 100 / 255]))
    assert read_federation(root, resize=(5, 4), channels="gray").x.shape == (16, 1, 5, 4)
    with pytest.raises(UserError, match=r"1\.png is an image of 9 x 10 pixels and .* 6 x 7; .* read = .resize = "):
        read_federation(root)
    for settings, sentence in (
        ({"resize": (0, 4)}, "give a height and a width of 1 to 4096"),
        ({"resize": 0}, "resize is 0; give a height and a width of 1 to 4096"),
        ({"resize": 5.5}, r"resize is 5\.5; give a height and a width of 1 to 4096"),
        ({"resize": "ab"}, "resize is 'ab'; give a height and a width of 1 to 4096"),
        ({"resize": (True, 4)}, "give a height and a width of 1 to 4096"),
        ({"corrupt": "skipp"}, "corrupt is 'skipp'; choose 'refuse' or 'skip'"),
        ({"resize": (5, 4), "missing": "median"}, "are for tables"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_federation(root, **settings)


def test_a_corrupt_image_is_named_and_refused_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = photos(tmp_path, sizes=(6,))
    bad = root / "lyon" / "cat" / "2.png"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(
        UserError, match=r'cat/2\.png is not a complete image .* skip such files with read = .corrupt = "skip"'
    ):
        read_federation(root)
    with caplog.at_level(logging.WARNING):
        assert len(read_federation(root, corrupt="skip").x) == 15
    read_federation(root, corrupt="skip")
    (message,) = caplog.messages  # however often it is read
    assert message.endswith("cat/2.png is not a complete image and was skipped.")
    assert message.count("2.png") == 1


@pytest.mark.parametrize(("place", "words"), [("", "by themselves"), ("cat", "one folder deep")])
def test_images_that_lie_elsewhere_are_seen_and_their_place_is_said(tmp_path: Path, place: str, words: str) -> None:
    root = tmp_path / "photos"
    (root / place).mkdir(parents=True)
    for number in range(3):
        (root / place / f"{number}.png").write_bytes(encoded(numpy.zeros((6, 6, 3), dtype=numpy.uint8)))
    for options in ({}, {"resize": (4, 4)}):
        with pytest.raises(
            UserError, match=rf"photos has 3 images {words}.* goes into .*, as in photos/CLIENT/CLASS/0\.png\."
        ):
            read_federation(root, **options)  # type: ignore[arg-type]


VISITS = "clinic,age,dose,sex,outcome\n"


def visits(path: Path) -> Path:
    lines = [
        f"{clinic},{'' if i % 5 == 0 else base + i},{i},{'' if i == 3 else 'fm'[i % 2]},{i % 2}"
        for clinic, base in (("lyon", 20), ("paris", 60))
        for i in range(20)
    ]
    path.write_text(VISITS + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("fitted", ["client", "all"])
def test_texts_are_encoded_and_empty_cells_filled_from_training_examples(tmp_path: Path, fitted: str) -> None:
    path = visits(tmp_path / "visits.csv")
    options: dict[str, Any] = {"encode": "one-hot", "fitted": fitted, "scale": "none", "select": "all"}
    federation = read_federation(path, "clinic", "outcome", missing="median", **options)
    assert federation.x.shape == (40, 4)  # age, dose, sex=f, sex=m
    assert bool(federation.x.isfinite().all())
    train = [federation.x[federation.splits["train"].of(client)] for client in range(2)]
    for client, base in enumerate((20, 60)):
        mine = torch.cat([federation.splits[split].of(client) for split in federation.splits])
        own = federation.x[mine]
        was_empty = own[:, 1] % 5 == 0
        known = [part[part[:, 1] % 5 != 0][:, 0] for part in train]
        expected = numpy.median((known[client] if fitted == "client" else torch.cat(known)).numpy())
        assert bool((own[was_empty][:, 0] == expected).all())
        assert torch.equal(own[~was_empty][:, 0], base + own[~was_empty][:, 1])
        third = own[own[:, 1] == 3]
        assert bool((third[:, 2:] == 0).all())  # none of the texts
        assert bool((own[own[:, 1] != 3][:, 2:].sum(1) == 1).all())
    plain = read_federation(path, "clinic", "outcome", missing="zero", **options)
    assert torch.equal(plain.splits["train"].of(1), federation.splits["train"].of(1))  # the split is the same


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    path = visits(tmp_path / "visits.csv")
    with pytest.raises(UserError, match="is empty; fill"):
        read_federation(path, "clinic", "outcome", encode="refuse", missing="refuse")
    with pytest.raises(
        UserError, match=r"'sex' in line 2 of visits\.csv is 'f' and not a number; .*encode = \"one-hot\""
    ):
        read_federation(path, "clinic", "outcome", encode="refuse")
    with pytest.raises(UserError, match=r"'age' in line 2 of visits\.csv is empty; .*missing = \"median\""):
        read_federation(path, "clinic", "outcome", missing="refuse")
    with pytest.raises(UserError, match="are for images"):
        read_federation(path, "clinic", "outcome", resize=(4, 4))


def test_an_experiment_file_says_how_data_are_read(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    toml = tmp_path / "mine.toml"
    toml.write_text('dataset = "photos"\nclients = 2\nread = {resize = [4, 4], channels = "gray"}\n')
    experiment = from_toml(toml)
    check(experiment)
    assert build_federation(experiment.cells[0], seed=0).x.shape == (16, 1, 4, 4)
    (square,) = with_assignments(experiment, parse_assignments(["read.resize=3"])).cells
    assert build_federation(square, seed=0).x.shape == (16, 1, 3, 3)
    toml.write_text('dataset = "photos"\nclients = 2\nread = {size = [4, 4]}\n')
    with pytest.raises(UserError, match="read has no setting 'size'; did you mean 'resize'"):
        check(from_toml(toml))
    toml.write_text("clients = 2\nread = {resize = [4, 4]}\n")
    with pytest.raises(UserError, match="read is for your own data, and digits is a data set of the package"):
        check(Experiment("mine", from_toml(toml).cells))


def test_a_corrupt_image_is_skipped_later_where_the_run_skipped_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = photos(tmp_path, sizes=(6,))
    bad = root / "lyon" / "cat" / "2.png"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(UserError, match=r"2\.png is not a complete image .*; bring it back, or take it out of the f"):
        read_inputs(root / "lyon", shape=(3, 6, 6))
    how = read_federation(root, corrupt="skip").reading
    given = read_inputs(root / "lyon", shape=(3, 6, 6), how=how)
    assert given.files is not None
    assert len(given.x) == len(given.files) == 7
    assert "cat/2.png" not in given.files
    x, y = read_client(root / "lyon", None, ("cat", "dog"), (3, 6, 6), how)
    assert len(x) == 7
    assert y.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert "2.png is not a complete image and was skipped" in caplog.text


def test_an_image_of_16_bits_is_scaled_and_not_cut(tmp_path: Path) -> None:
    from PIL import Image

    levels = numpy.array([[0, 1000, 4095], [40000, 65534, 65535]], dtype=numpy.uint16)
    Image.fromarray(levels).save(tmp_path / "scan.png")
    for channels, depth in (("gray", 1), ("rgb", 3)):
        pixels = decode(tmp_path / "scan.png", None, channels)  # type: ignore[arg-type]
        assert pixels.shape == (depth, 2, 3)
        assert numpy.allclose(pixels, levels / 65535, atol=1e-6)
    assert numpy.allclose(decode(tmp_path / "scan.png", (1, 1), "gray"), (levels / 65535).mean(), atol=0.05)
    for mode in ("I", "F"):
        with pytest.raises(UserError, match=f"mode '{mode}', which may be of any size; give images of 8 or 16 bits"):
            decode(Image.new(mode, (2, 2)), None, "gray")


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_photograph_stands_as_its_camera_says(tmp_path: Path, ending: str) -> None:
    from PIL import Image

    picture = Image.new("L", (16, 8))
    picture.paste(255, (0, 0, 8, 8))  # white on the left
    record = Image.Exif()
    record[0x0112] = 6  # orientation: what is on the left belongs on top
    picture.save(tmp_path / f"photo.{ending}", exif=record)
    pixels = decode(tmp_path / f"photo.{ending}", None, "gray")[0]
    assert pixels.shape == (16, 8)
    assert pixels[:8].min() > 0.9
    assert pixels[8:].max() < 0.1


def test_images_of_other_kinds_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from PIL import Image

    root = photos(tmp_path / "photos", sizes=(6,))
    for place in ("lyon/cat/a.bmp", "lyon/dog/b.TIFF", "paris/eel/notes.txt"):
        Image.new("RGB", (7, 6)).save(root / place, format="BMP")
    with caplog.at_level(logging.WARNING):
        assert len(read_federation(root).x) == 16
        read_federation(root)
    (message,) = caplog.messages  # however often it is read
    assert message == (
        f"images in {root / 'lyon'} that are neither PNG nor JPEG are left out (2, such as a.bmp); save such images as "
        "PNG or JPEG files."
    )
    caplog.clear()
    assert len(read_inputs(root / "lyon" / "cat", shape=(3, 6, 6)).x) == 4
    assert "such as a.bmp" in caplog.text
    only = tmp_path / "only" / "lyon" / "cat"
    only.mkdir(parents=True)
    Image.new("RGB", (7, 6)).save(only / "0.bmp")
    for read in (
        lambda: read_federation(tmp_path / "only"),
        lambda: read_client(tmp_path / "only" / "lyon", None, ("cat",), (3, 6, 6)),
        lambda: read_inputs(only, shape=(3, 6, 6)),
        lambda: read_inputs(only / "0.bmp", shape=(3, 6, 6)),
    ):
        with pytest.raises(UserError, match=r"0\.bmp is neither PNG nor JPEG, as images must be; save such images as"):
            read()
