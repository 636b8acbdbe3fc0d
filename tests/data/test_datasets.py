"""Data sets: tiny copies in the Hub's layout, decoded, cached, verified, refused. Nothing here needs the network."""

import io
import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import huggingface_hub
import numpy
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from support import allow_parts, encoded, images, write_table

from pfedhn.data import catalogue as datasets
from pfedhn.data import originals
from pfedhn.data.catalogue import DATASETS, cache_state, get, load
from pfedhn.data.files import read_federation
from pfedhn.data.folders import from_folders
from pfedhn.data.labels import Task
from pfedhn.data.tables import from_table
from pfedhn.errors import UserError

CHARACTERS = {
    ("Greek", 1): 2,
    ("Greek", 3): 2,
    ("Angelic", 2): 3,
    ("Angelic", 10): 1,
}  # (alphabet, character): drawings


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PFEDHN_DATA_DIR", raising=False)
    allow_parts(monkeypatch)
    return tmp_path / "cache"


def expect(patch: pytest.MonkeyPatch, name: str, **fields: Any) -> None:
    patch.setitem(DATASETS, name, replace(DATASETS[name], **fields))


def write_hub_folder(folder: Path, name: str, order: int = 0, train: int = 12, test: int = 6) -> None:
    """A tiny data set as on the Hub: two train shards and one test shard, images in the order that `order` seeds."""
    source = DATASETS[name]
    for split, count, num_shards in (("train", train, 2), ("test", test, 1)):
        pictures, labels = images(name, count, seed=len(split)), numpy.arange(count) % 4
        shuffled = numpy.random.default_rng(order).permutation(count)
        for shard, part in enumerate(numpy.array_split(shuffled, num_shards)):
            columns = {
                source.image: [encoded(pictures[number]) for number in part],
                source.label: labels[part].tolist(),
            }
            if source.coarse:
                columns[source.coarse] = (labels[part] // 2).tolist()
            write_table(folder / f"{split}-{shard:05d}-of-{num_shards:05d}.parquet", columns)


def drawings() -> list[tuple[str, int, int, bytes]]:
    """(alphabet, character, drawer, PNG): one bit, a black square on white, its place and size from the numbers."""
    result = []
    for (alphabet, character), count in CHARACTERS.items():
        for drawer in range(1, count + 1):
            paper = numpy.ones((105, 105), dtype=bool)
            start = 10 + 3 * character + len(alphabet)
            paper[start : start + 15 * drawer, start : start + 30] = False
            result.append((alphabet, character, drawer, encoded(paper)))
    return result


def write_omniglot(folder: Path, form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if form in ("parquet", "numbered"):
        names = ["alphabet", "character", "drawer", "image"]
        columns: dict[str, Any] = dict(zip(names, zip(*drawings(), strict=True), strict=True))
        if form == "numbered":
            columns["alphabet"] = [["Greek", "Angelic"].index(name) for name in columns["alphabet"]]
        file = folder / "train-00000-of-00001.parquet"
        write_table(file, columns)
        if form == "numbered":  # as the Hugging Face library stores class labels
            known = {"info": {"features": {"alphabet": {"names": ["Greek", "Angelic"]}}}}
            table = parquet.read_table(file).replace_schema_metadata({"huggingface": json.dumps(known)})
            parquet.write_table(table, file)
        return
    for alphabet, character, drawer, blob in reversed(drawings()):
        part = "images_background" if alphabet == "Greek" else "images_evaluation"
        member = f"{part}/{alphabet}/character{character:02d}/0001_{drawer:02d}.png"
        if form == "folders":
            (folder / member).parent.mkdir(parents=True, exist_ok=True)
            (folder / member).write_bytes(blob)
        else:
            with zipfile.ZipFile(folder / f"{part}.zip", "a") as archive:
                archive.writestr(member, blob)


def as_pairs(x: torch.Tensor, y: torch.Tensor) -> set[tuple[int, bytes]]:
    return {(int(label), image.numpy().tobytes()) for image, label in zip(x, y, strict=True)}


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_a_folder_as_on_the_hub_loads_normalized(name: str, tmp_path: Path) -> None:
    write_hub_folder(tmp_path / "data" / name, name)
    data, source = load(name, tmp_path / "data"), DATASETS[name]
    assert data.test_x is not None
    assert data.test_y is not None
    for x, y, count, split in ((data.x, data.y, 12, "train"), (data.test_x, data.test_y, 6, "test")):
        pictures = images(name, count, seed=len(split)).reshape(count, *source.shape[1:], -1).transpose(0, 3, 1, 2)
        mean, std = (numpy.array(values).reshape(-1, 1, 1) for values in (source.mean, source.std))
        expected = torch.from_numpy((pictures / 255 - mean) / std).to(torch.float32)
        assert x.shape == (count, *source.shape)
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert y.tolist() == sorted(y.tolist())
        for image, label in zip(expected, numpy.arange(count) % 4, strict=True):
            distance = (x - image).abs().flatten(1).amax(1)
            assert distance.min() < 1e-5
            assert y[distance.argmin()] == label
    assert (data.num_classes, data.mean, data.std) == (source.num_classes, source.mean, source.std)
    if name == "cifar100":
        assert data.coarse is not None
        assert data.test_coarse is not None
        assert torch.equal(data.coarse, data.y // 2)
        assert torch.equal(data.test_coarse, data.test_y // 2)
    else:
        assert data.coarse is None
    assert data.groups is None


def test_order_comes_from_content_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    for order in (0, 1):
        write_hub_folder(tmp_path / f"copy{order}", "mnist", order=order)
        monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / f"cache{order}"))
        copies.append(get("mnist", tmp_path / f"copy{order}").read_bytes())
    assert copies[0] == copies[1]


def test_data_folder_may_come_from_the_environment_or_be_the_files_folder_itself(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hub_folder(tmp_path / "clone" / "plain_text", "cifar10")
    write_hub_folder(tmp_path / "clone" / "mnist", "mnist")  # another data set next to it is passed by
    monkeypatch.setenv("PFEDHN_DATA_DIR", str(tmp_path / "clone"))
    assert get("cifar10") == cache / "cifar10.safetensors"
    assert len(load("cifar10").x) == 12
    assert load("mnist").x.shape == (12, 1, 28, 28)


def test_the_cache_serves_without_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub_folder(tmp_path / "data" / "mnist", "mnist")
    first = load("mnist", tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for second in (load("mnist"), load("mnist", tmp_path / "data"), load("mnist", tmp_path / "gone")):
        assert torch.equal(first.x, second.x)
        assert torch.equal(first.y, second.y)


def test_the_cache_is_two_files_of_bytes_and_leaves_no_scraps(tmp_path: Path, cache: Path) -> None:
    write_hub_folder(tmp_path / "data", "mnist", train=100, test=100)
    path = get("mnist", tmp_path / "data")
    assert sorted(file.name for file in cache.iterdir()) == ["mnist.json", "mnist.safetensors"]
    assert path.stat().st_size < 200 * (28 * 28 + 2) + 1000
    assert json.loads((cache / "mnist.json").read_text())["rows"] == {"x": 100, "test_x": 100}


@pytest.mark.parametrize("damage", ["bytes", "length", "record", "format", "gone"])
def test_a_damaged_cache_is_refused_until_made_again(damage: str, tmp_path: Path, cache: Path) -> None:
    write_hub_folder(tmp_path / "data", "mnist")
    assert cache_state("mnist") == "not cached"
    path = get("mnist", tmp_path / "data")
    assert cache_state("mnist") == "cached"
    whole = path.read_bytes()
    if damage == "bytes":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "length":
        path.write_bytes(whole[:-10])
    elif damage == "gone":
        path.unlink()
    else:
        record = json.loads((cache / "mnist.json").read_text())
        text = "{" if damage == "record" else json.dumps(record | {"format": 0})
        (cache / "mnist.json").write_text(text)
    assert cache_state("mnist") == "damaged"
    for use in (load, get):
        with pytest.raises(UserError, match="run `pfedhn data get mnist --data-dir FOLDER --again`"):
            use("mnist", tmp_path / "data")
    get("mnist", tmp_path / "data", again=True)
    assert path.read_bytes() == whole
    assert len(load("mnist").x) == 12


def test_a_cache_made_from_other_files_is_not_passed_off_as_these(tmp_path: Path) -> None:
    write_hub_folder(tmp_path / "one", "mnist")
    write_hub_folder(tmp_path / "two", "mnist", train=20)
    get("mnist", tmp_path / "one")
    with pytest.raises(UserError, match=r"was not made from the files in .*two; run `pfedhn data get mnist --data-dir"):
        load("mnist", tmp_path / "two")
    get("mnist", tmp_path / "two", again=True)
    assert len(load("mnist", tmp_path / "two").x) == 20


def test_a_part_of_a_data_set_does_not_pass_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub_folder(tmp_path / "data", "mnist")
    get("mnist", tmp_path / "data")  # as an earlier version let it pass
    expect(monkeypatch, "mnist", num_rows=(60_000, 10_000))
    assert cache_state("mnist") == "damaged"
    with pytest.raises(UserError, match=r"run `pfedhn data get mnist"):
        load("mnist")
    with pytest.raises(UserError, match=r"mnist has 60,000 and 10,000 examples of 10 classes, and these files hold 12"):
        get("mnist", tmp_path / "data", again=True)


def test_other_images_do_not_pass_for_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub_folder(tmp_path / "data", "mnist")
    expect(monkeypatch, "mnist", num_rows=(12, 6), sha256="0" * 64)
    with pytest.raises(UserError, match="these files hold 12 and 6 examples, but not those of mnist"):
        get("mnist", tmp_path / "data")
    found: list[str] = []
    whole = datasets._content_sha256
    monkeypatch.setattr(datasets, "_content_sha256", lambda arrays: found.append(whole(arrays)) or found[-1])
    with pytest.raises(UserError):
        get("mnist", tmp_path / "data")
    expect(monkeypatch, "mnist", sha256=found[0])
    assert len(load("mnist", tmp_path / "data").x) == 12


def test_progress_counts_all_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(originals, "CHUNK", 5)
    write_hub_folder(tmp_path / "data", "mnist", train=12, test=6)
    calls: list[tuple[int, int]] = []
    get("mnist", tmp_path / "data", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(5, 18), (10, 18), (12, 18), (17, 18), (18, 18)]


@pytest.mark.parametrize("form", ["parquet", "archives", "folders"])
def test_omniglot_from_each_of_its_forms(form: str, tmp_path: Path) -> None:
    write_omniglot(tmp_path / "data" / "omniglot", form)
    data = load("omniglot", tmp_path / "data")
    numbers = {pair: place for place, pair in enumerate(sorted(CHARACTERS))}
    expected = sorted((numbers[alphabet, character], blob) for alphabet, character, _, blob in drawings())
    assert data.y.tolist() == [label for label, _ in expected]
    assert data.num_classes == 4
    assert data.group_names == ("Angelic", "Greek")
    assert data.groups is not None
    assert data.within is not None
    assert data.groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert data.within.tolist() == [0, 0, 0, 1, 0, 0, 1, 1]
    assert data.test_x is None
    # Ink is 1 and the reduction is bilinear with antialiasing, whatever program does it.
    inks = []
    for label, blob in expected:
        paper = torch.from_numpy(numpy.asarray(Image.open(io.BytesIO(blob)), dtype=numpy.float32))
        small = torch.nn.functional.interpolate(1 - paper[None, None], (28, 28), mode="bilinear", antialias=True)
        inks.append((label, (small[0] - 0.08) / 0.25))
    for label, ink in inks:
        distance = (data.x - ink).abs().flatten(1).amax(1)
        assert distance.min() < 0.02
        assert data.y[distance.argmin()] == label


def test_omniglots_forms_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = set()
    for form in ("parquet", "numbered", "archives", "folders"):
        write_omniglot(tmp_path / form, form)
        monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / f"cache-{form}"))
        copies.add(get("omniglot", tmp_path / form).read_bytes())
    assert len(copies) == 1


def test_digits_are_embedded_and_in_canonical_order() -> None:
    from sklearn.datasets import load_digits

    data = load("digits")
    assert data.x.shape == (1797, 64)
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == sorted(data.y.tolist())
    assert data.test_x is None
    original = load_digits()
    x = torch.from_numpy(original.data / 16).to(torch.float32)
    assert as_pairs(data.x, data.y) == as_pairs(x, torch.from_numpy(original.target))
    assert get("digits").exists()


def test_digits_are_read_without_importing_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sklearn.datasets", None)  # an import of it would fail
        quick = load("digits")
    monkeypatch.setattr(datasets, "_digits_file", lambda: tmp_path / "digits.csv.gz")  # as if it were kept elsewhere
    slow = load("digits")
    assert torch.equal(quick.x, slow.x)
    assert torch.equal(quick.y, slow.y)


class Refusals:
    """Each writes what is wrong and returns the arguments of `get`; the docstring is part of the sentence."""

    @staticmethod
    def unknown_name(root: Path) -> tuple[Any, ...]:
        """no data set 'cifar-10'; did you mean 'cifar10'?"""
        return ("cifar-10",)

    @staticmethod
    def nothing_like_it(root: Path) -> tuple[Any, ...]:
        """no data set 'imagenet'; there are digits, mnist, cifar10, cifar100, omniglot"""
        return ("imagenet",)

    @staticmethod
    def no_folder(root: Path) -> tuple[Any, ...]:
        """does not exist; make it, or leave it out"""
        return "mnist", root / "nowhere"

    @staticmethod
    def empty_folder(root: Path) -> tuple[Any, ...]:
        """holds mnist; put its parquet files, named as on the Hub, there"""
        return "mnist", root

    @staticmethod
    def empty_omniglot(root: Path) -> tuple[Any, ...]:
        """put its images_background.zip and images_evaluation.zip there."""
        return "omniglot", root

    @staticmethod
    def omniglot_from_the_hub(root: Path) -> tuple[Any, ...]:
        """the Hugging Face Hub has no omniglot"""
        return ("omniglot",)

    @staticmethod
    def half_of_omniglot(root: Path) -> tuple[Any, ...]:
        """images_evaluation.zip is missing"""
        write_omniglot(root, "archives")
        (root / "images_evaluation.zip").unlink()
        return "omniglot", root

    @staticmethod
    def broken_archive(root: Path) -> tuple[Any, ...]:
        """not a whole zip archive"""
        write_omniglot(root, "archives")
        (root / "images_evaluation.zip").write_bytes(b"PK")
        return "omniglot", root

    @staticmethod
    def damaged_member(root: Path) -> tuple[Any, ...]:
        """images_evaluation.zip is not a whole zip archive"""
        write_omniglot(root, "archives")
        content = bytearray((root / "images_evaluation.zip").read_bytes())
        content[100] ^= 255
        (root / "images_evaluation.zip").write_bytes(content)
        return "omniglot", root

    @staticmethod
    def encrypted_member(root: Path) -> tuple[Any, ...]:
        """images_background.zip is not a whole zip archive (RuntimeError: File"""
        write_omniglot(root, "archives")
        content = bytearray((root / "images_background.zip").read_bytes())
        for sign, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the first bit of the flags: encrypted
            content[content.index(sign) + place] |= 1
        (root / "images_background.zip").write_bytes(content)
        return "omniglot", root

    @staticmethod
    def exploding_member(root: Path) -> tuple[Any, ...]:
        """would unpack to 50,000,000 bytes"""
        write_omniglot(root, "archives")
        with zipfile.ZipFile(root / "images_background.zip", "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("images_background/Greek/character01/big.png", bytes(50_000_000))
        return "omniglot", root

    @staticmethod
    def huge_drawing(root: Path) -> tuple[Any, ...]:
        """is 5000x5000 and not 105x105"""
        write_omniglot(root, "folders")
        file = next(root.rglob("*.png"))
        file.write_bytes(encoded(numpy.ones((5000, 5000), dtype=bool)))
        return "omniglot", root

    @staticmethod
    def another_format(root: Path) -> tuple[Any, ...]:
        """cannot be decoded (UnidentifiedImageError"""
        write_hub_folder(root, "mnist")
        stream = io.BytesIO()
        Image.fromarray(images("mnist", 1, 0)[0]).save(stream, "BMP")
        write_table(root / "test-00000-of-00001.parquet", {"image": [stream.getvalue()], "label": [0]})
        return "mnist", root

    @staticmethod
    def labels_of_text(root: Path) -> tuple[Any, ...]:
        """the column 'label' of mnist holds string and not integers"""
        write_hub_folder(root, "mnist")
        for file in root.glob("*.parquet"):
            write_table(file, {"image": [encoded(images("mnist", 1, 0)[0])], "label": ["seven"]})
        return "mnist", root

    @staticmethod
    def images_that_are_none(root: Path) -> tuple[Any, ...]:
        """image 0 of mnist cannot be decoded (TypeError"""
        for split in ("train", "test"):
            write_table(root / f"{split}.parquet", {"image": [3, 4], "label": [0, 1]})
        return "mnist", root

    @staticmethod
    def a_home_of_nobody(root: Path) -> tuple[Any, ...]:
        """~nobody-at-all/data leads nowhere"""
        return "mnist", "~nobody-at-all/data"

    @staticmethod
    def alphabets_without_names(root: Path) -> tuple[Any, ...]:
        """store the alphabets' names"""
        write_table(root / "all.parquet", {"image": [drawings()[0][3]], "alphabet": [3], "character": [1]})
        return "omniglot", root

    @staticmethod
    def missing_shard(root: Path) -> tuple[Any, ...]:
        """train-00001-of-00002.parquet is missing"""
        write_hub_folder(root, "mnist")
        (root / "train-00001-of-00002.parquet").unlink()
        return "mnist", root

    @staticmethod
    def missing_split(root: Path) -> tuple[Any, ...]:
        """has no test file"""
        write_hub_folder(root, "mnist")
        (root / "test-00000-of-00001.parquet").unlink()
        return "mnist", root

    @staticmethod
    def unnamed_split(root: Path) -> tuple[Any, ...]:
        """are named neither train nor test"""
        write_table(root / "table.parquet", {"image": [b""], "label": [0]})
        return "mnist", root

    @staticmethod
    def broken_parquet(root: Path) -> tuple[Any, ...]:
        """cannot be read"""
        write_hub_folder(root, "mnist")
        (root / "test-00000-of-00001.parquet").write_bytes(b"PAR1 nothing")
        return "mnist", root

    @staticmethod
    def another_data_set(root: Path) -> tuple[Any, ...]:
        """have the columns image, label but not 'img'"""
        write_hub_folder(root, "mnist")
        return "cifar10", root

    @staticmethod
    def wrong_size(root: Path) -> tuple[Any, ...]:
        """image 1 of mnist is 5x4 and not 28x28"""
        small = [encoded(numpy.zeros(size, dtype=numpy.uint8)) for size in ((28, 28), (4, 5))]
        for split in ("train", "test"):
            write_table(root / f"{split}.parquet", {"image": small, "label": [0, 1]})
        return "mnist", root

    @staticmethod
    def not_an_image(root: Path) -> tuple[Any, ...]:
        """image 0 of mnist cannot be decoded"""
        for split in ("train", "test"):
            write_table(root / f"{split}.parquet", {"image": [b"hello"], "label": [0]})
        return "mnist", root

    @staticmethod
    def label_out_of_range(root: Path) -> tuple[Any, ...]:
        """labels from -1 to 3"""
        write_hub_folder(root, "mnist")
        blank = encoded(numpy.zeros((28, 28), dtype=numpy.uint8))
        write_table(root / "test-00000-of-00001.parquet", {"image": [blank, blank], "label": [-1, 3]})
        return "mnist", root


@pytest.mark.parametrize("case", [case for case in vars(Refusals) if not case.startswith("_")])
def test_bad_data_is_refused_with_a_sentence(case: str, tmp_path: Path, cache: Path) -> None:
    prepare = getattr(Refusals, case)
    (tmp_path / "data").mkdir()
    arguments = prepare(tmp_path / "data")
    with pytest.raises(UserError) as caught:
        get(*arguments)
    assert prepare.__doc__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_without_network_the_sentence_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **options: str) -> None:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"Couldn't reach 'uoft-cs/cifar10' on the Hub.*--data-dir.*copy") as caught:
        load("cifar10")
    assert "\n" not in str(caught.value)


def test_the_hub_is_asked_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Hub returns is read as the folder is: here it is one."""
    write_hub_folder(tmp_path / "hub" / "cifar100", "cifar100")

    def snapshot(name: str, repo_type: str, allow_patterns: str) -> str:
        assert (name, repo_type, allow_patterns) == ("uoft-cs/cifar100", "dataset", "*.parquet")
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("cifar100").x.shape == (12, 3, 32, 32)


def test_without_the_library_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub_folder(tmp_path / "data", "mnist")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for folder in (tmp_path / "data", None):
        with pytest.raises(UserError, match=r"pip install 'pfedhn\[data\]'"):
            load("mnist", folder)


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub_folder(tmp_path / "data", "mnist")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set PFEDHN_CACHE to another folder"):
        get("mnist", tmp_path / "data")


def test_a_full_disk_says_so_and_leaves_no_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub_folder(tmp_path / "data", "mnist")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="no space left on device; make room"):
        get("mnist", tmp_path / "data")
    assert not list(cache.iterdir())


def test_from_folders_reads_a_client_per_folder(tmp_path: Path) -> None:
    for client, labels in (("b", ["cat", "ant"]), ("a", ["bee", "cat"])):
        (tmp_path / client).mkdir()
        numpy.save(tmp_path / client / "x.npy", numpy.full((2, 3), ord(client)))
        numpy.save(tmp_path / client / "y.npy", numpy.array(labels))
    (tmp_path / ".hidden").mkdir()
    clients, class_names = from_folders(tmp_path)
    assert class_names == ("ant", "bee", "cat")
    assert {name: y.tolist() for name, (_, y) in clients.items()} == {"a": [1, 2], "b": [2, 0]}
    assert {name: x[0, 0] for name, (x, _) in clients.items()} == {"a": ord("a"), "b": ord("b")}


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (numpy.zeros((2, 3)), None, r"y\.npy is missing"),
        (
            numpy.zeros((2, 3)),
            numpy.zeros(3, int),
            r"x of shape \(2, 3\) and y of shape \(3,\); give one label per example",
        ),
        (numpy.zeros((2, 3)), numpy.array([1, "a"], dtype=object), "not an array of numbers or text"),
        (numpy.full((2, 3), "a"), numpy.zeros(2, int), r"x\.npy holds <U1 and not numbers"),
        (numpy.zeros((2, 3), "datetime64[s]"), numpy.zeros(2, int), r"x\.npy holds datetime64\[s\] and not numbers"),
        (numpy.zeros((2, 3), complex), numpy.zeros(2, int), r"x\.npy holds complex128 and not numbers"),
        (numpy.zeros((2, 3)), numpy.zeros(2, "datetime64[s]"), r"y\.npy holds .* and not numbers or texts"),
        (numpy.zeros((2, 3)), numpy.array([b"\xe4", b"a"]), "bytes that are no text"),
    ],
)
def test_from_folders_refuses(x: numpy.ndarray, y: numpy.ndarray | None, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    numpy.save(tmp_path / "client" / "x.npy", x)
    if y is not None:
        numpy.save(tmp_path / "client" / "y.npy", y, allow_pickle=True)
    with pytest.raises(UserError, match=sentence):
        from_folders(tmp_path)


def damaged_array(path: Path, damage: str) -> None:
    if damage == "several":
        numpy.savez(path.with_suffix(".npz"), numpy.zeros(3))
        path.with_suffix(".npz").replace(path)
    elif damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "promise":  # a header for more than any machine holds
        header = io.BytesIO()
        description = {"descr": "<f8", "fortran_order": False, "shape": (10**15,)}
        numpy.lib.format.write_array_header_1_0(header, description)
        path.write_bytes(header.getvalue() + bytes(80))
    elif damage == "nesting":
        text = b"(" * 60_000
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    else:
        path.write_bytes({"empty": b"", "text": b"1,2,3\n", "cut": path.read_bytes()[:-5]}[damage])


@pytest.mark.parametrize("damage", ["several", "pipe", "promise", "nesting", "empty", "text", "cut"])
def test_a_file_that_is_no_array_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    for name in ("x", "y"):
        numpy.save(tmp_path / "client" / f"{name}.npy", numpy.arange(4))
    damaged_array(tmp_path / "client" / "x.npy", damage)
    with pytest.raises(UserError, match=r"x\.npy (is not an array|holds several arrays|is not a file)"):
        from_folders(tmp_path)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (numpy.array([0.0, 1.0]), r"'second' has floating-point labels.*'first' has class numbers; .* task = "),
        (numpy.array(["a", "b"]), r"second has text labels and .*first has numbers; give all clients one kind"),
        (numpy.zeros((2, 2), int), r"'second' has labels of shape \(2,\), and client 'first' of shape \(\)"),
    ],
)
def test_one_folder_does_not_change_the_kind_of_all_labels(
    labels: numpy.ndarray, sentence: str, tmp_path: Path
) -> None:
    for client, y in (("first", numpy.array([0, 1])), ("second", labels)):
        (tmp_path / client).mkdir()
        numpy.save(tmp_path / client / "x.npy", numpy.zeros((2, 3)))
        numpy.save(tmp_path / client / "y.npy", y)
    with pytest.raises(UserError, match=sentence):
        read_federation(tmp_path)
    if labels.dtype.kind == "f":
        assert {y.dtype.kind for _, y in from_folders(tmp_path, task="classification").clients.values()} == {"i"}
        assert {y.dtype.kind for _, y in from_folders(tmp_path, task="regression").clients.values()} == {"f"}


def test_from_folders_needs_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no folders"):
        from_folders(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        from_folders(tmp_path / "nowhere")


COLUMNS = {
    "height": [1.5, 2.0, 0.25, 3.0],
    "site": ["10", "2", "10", "3"],
    "label": ["pear", "fig", "fig", "pear"],
    "ripe": [1, 0, 0, 1],
}


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_from_table_reads_every_form_alike(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"fruit.{ending}"
    if ending == "parquet":
        parquet.write_table(pyarrow.table(COLUMNS), path)
    else:
        between = "," if ending == "csv" else "\t"
        lines = [COLUMNS, *zip(*COLUMNS.values(), strict=True)]
        path.write_text("\ufeff" + "\n".join(between.join(map(str, line)) for line in lines) + "\n\n", encoding="utf-8")
    table = from_table(path, "site", "label")
    assert table.x.dtype == numpy.float32
    assert table.x.tolist() == [[1.5, 1], [2, 0], [0.25, 0], [3, 1]]
    assert table.feature_names == ("height", "ripe")
    assert table.y.tolist() == [1, 0, 0, 1]
    assert table.class_names == ("fig", "pear")
    assert table.client_names == ("2", "3", "10")
    assert table.groups.tolist() == [2, 0, 2, 1]
    assert {name: y.tolist() for name, (_, y) in table.clients.items()} == {"2": [0], "3": [1], "10": [1, 0]}
    assert table.clients["10"][0].tolist() == [[1.5, 1], [0.25, 0]]


@pytest.mark.parametrize(
    ("labels", "expected", "kind"),
    [
        (["3", "0", "1"], [3, 0, 1], "i"),
        (["3.0", "0.0", "1"], [3, 0, 1], "i"),
        (["0.5", "2", "1"], [0.5, 2, 1], "f"),
        (["1", "x", "2"], [0, 2, 1], "i"),
    ],
)
def test_labels_of_a_table(labels: list[str], expected: list[float], kind: str, tmp_path: Path) -> None:
    lines = "\n".join(f"007,{label},1" if number else f"7,{label},1" for number, label in enumerate(labels))
    (tmp_path / "table.csv").write_text(f"who,what,feature\n{lines}")
    table = from_table(tmp_path / "table.csv", "who", "what")
    assert table.y.tolist() == expected
    assert table.y.dtype.kind == kind
    assert table.client_names == ("007", "7")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("who,what,a\n1,2,3\n1,2\n", "line 3 of table.csv has 2 cells and the header 3"),
        (
            "who,what,a\n1,2,3\n1,2,x\n",
            "'a' in line 3 of table.csv is 'x' and not a number; .*encode = \"one-hot\".*columns.ignore = .\"a\".",
        ),
        ("who,what,a\n1,2,\n", "'a' in line 2 of table.csv is empty; fill it, .* read = .missing = \"median\""),
        ("who,what,a\n1,2,3\n1,2,nan\n", "'a' in line 3 of table.csv is 'nan'; fill it"),
        (
            "who,what,a\n1,2,3\n1,2,1e999\n",
            "'a' in line 3 of table.csv is '1e999' and not a finite number; fix the cell",
        ),
        ("who,what,a\n1,2,3\n\n1,,3\n", "line 4 of table.csv has no 'what'; fill the cell"),
        ("whom,what,a\n1,2,3\n", "no column 'who'; did you mean 'whom'"),
        ("who,what\n1,2\n", "no feature columns"),
        ("who,what,a\n", "table.csv has no examples, only the names of its columns"),
        ("who,what,what\n1,2,3\n", "2 columns of table.csv are called 'what'; give every column another name"),
        ("who,what,,\n1,2,3,4\n", "2 columns of table.csv have no name; name them in the first line"),
        ("", "table.csv is empty; give it a line that names the columns"),
        (",,\n1,2,3\n", "table.csv does not name its columns"),
        ('who,what,a\n1,2,3\n1,2,"3\n', "a quotation mark opens a cell below line 2 of table.csv, and none closes it"),
        ('who,what,a\n"1\n",2,3\n1,2,3,4\n', "line 4 of table.csv has 4 cells and the header 3"),
        ("who,what,a\n1,2,3\n  \n1,2,3\n", "line 3 of table.csv has 1 cells and the header 3"),
        ("who,what,\n1,2,3\n4,1,2,3\n", "line 3 of table.csv has 4 cells and the header 3"),
    ],
)
def test_from_table_refuses(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        from_table(tmp_path / "table.csv", "who", "what")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("who,what,größe\n1,2,3\n".encode("latin-1"), "is not UTF-8 text .* at byte 11.*save the table as UTF-8"),
        ("who,what,a\n1,2,3\n".encode("utf-16"), "is not UTF-8 text"),
        ("who,what,a\n1,2,3\n".encode("utf-16-le"), "is not UTF-8 text"),
        (bytes(range(256)), "is not UTF-8 text"),
        (b"who,what,a\n1,2," + b"3" * 200_000, "field larger than field limit"),
        (b"who,what,a\n1,2," + b"3" * 2_000, "has a cell of 2,000 characters"),
    ],
    ids=["latin-1", "utf-16", "utf-16-le", "binary", "huge cell", "long cell"],
)
def test_a_file_that_is_no_table_of_text_is_refused(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        from_table(tmp_path / "table.csv", "who", "what")


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (pyarrow.array([0, 1], pyarrow.timestamp("s")), r"column 'a' of table\.parquet holds timestamp"),
        (pyarrow.array([[1.0], [2.0]]), r"'a' in row 1 of table\.parquet is .* and not a number"),
        (pyarrow.array([[1.0, 2.0], [2.0]]), r"'a' in row 1 of table\.parquet is .* and not a number"),
        (pyarrow.array([{"b": 1}, {"b": 2}]), r"'a' in row 1 of table\.parquet is .* and not a number"),
    ],
)
def test_columns_of_dates_and_lists_are_refused(column: Any, sentence: str, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"who": [1, 2], "what": [0, 1], "a": column}), tmp_path / "table.parquet")
    with pytest.raises(UserError, match=sentence):
        from_table(tmp_path / "table.parquet", "who", "what")


def test_from_table_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        from_table(tmp_path / "table.csv", "who", "what")
    (tmp_path / "table.xls").write_text("")
    with pytest.raises(UserError, match=r"table\.xls is neither \.csv, \.tsv, \.parquet nor \.xlsx; save it as CSV"):
        from_table(tmp_path / "table.xls", "who", "what")
    (tmp_path / "table.parquet").write_text("")
    with pytest.raises(UserError, match="not a whole parquet file"):
        from_table(tmp_path / "table.parquet", "who", "what")
    parquet.write_table(pyarrow.table({"who": [1, 2], "what": [0, 1], "a": [0.5, None]}), tmp_path / "table.parquet")
    with pytest.raises(UserError, match=r"'a' in row 2 of table\.parquet is empty; fill it"):
        from_table(tmp_path / "table.parquet", "who", "what")


def write_prices(path: Path, count: int, highest: int) -> None:
    prices = numpy.linspace(1_000, highest, count).astype(int)
    lines = [f"shop{i % 5},{i % 7},{price}" for i, price in enumerate(prices.tolist())]
    path.write_text("\n".join(["shop,size,price", *lines]))


def test_prices_are_not_taken_for_classes(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    write_prices(path, 500, 215_000)
    with pytest.raises(UserError, match=r'class number 215000, and 500 examples may .* task = "regression"'):
        read_federation(path, "shop", "price", task="classification")
    federation = read_federation(path, "shop", "price", scale="none")
    assert federation.y.dtype == torch.float32
    assert sorted(federation.y.tolist()) == numpy.linspace(1_000, 215_000, 500).astype(int).tolist()
    assert federation.num_classes is None


def write_folders(root: Path, labels: numpy.ndarray) -> None:
    for client, part in enumerate(numpy.array_split(labels, 3)):
        (root / f"client{client}").mkdir(parents=True)
        numpy.save(root / f"client{client}" / "x.npy", numpy.zeros((len(part), 2)))
        numpy.save(root / f"client{client}" / "y.npy", part)


def test_the_task_says_what_labels_in_folders_are(tmp_path: Path) -> None:
    whole = numpy.arange(60) % 4
    write_folders(tmp_path / "whole", whole)
    write_folders(tmp_path / "floating", whole.astype(float))
    write_folders(tmp_path / "high", whole * 1_000_000)
    write_folders(tmp_path / "fractions", whole + 0.5)
    write_folders(tmp_path / "text", whole.astype(str))
    kinds: dict[str, list[Any]] = {}
    for task in get_args(Task):
        for name in ("whole", "floating", "high", "fractions", "text"):
            try:
                kinds.setdefault(name, []).append(read_federation(tmp_path / name, task=task).y.dtype)
            except UserError as error:
                kinds.setdefault(name, []).append(str(error).split(";")[0].replace(str(tmp_path), "."))
    classes, numbers = torch.int64, torch.float32
    too_high = "y holds the class number 3000000, and 60 examples may have class numbers below 2000"
    assert kinds == {
        "whole": [classes, classes, numbers],
        "floating": [numbers, classes, numbers],
        "high": [too_high, too_high, numbers],
        "fractions": [
            numbers,
            'the labels in ./fractions have fractions, and task = "classification" has classes',
            numbers,
        ],
        "text": [
            classes,
            classes,
            'the labels in ./text are text, and task = "regression" predicts numbers',
        ],
    }
    with pytest.raises(UserError, match="task is 'regresion'; choose 'auto' or 'classification' or 'regression'"):
        read_federation(tmp_path / "whole", task="regresion")  # type: ignore[arg-type]
