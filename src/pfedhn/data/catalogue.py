"""Data sets by name: digits (inside scikit-learn), MNIST, CIFAR-10, CIFAR-100 and Omniglot.

The images of a data set are decoded once, into a cache of one verified file. Examples are in a canonical order that
comes from their content alone, so every copy of a data set gives the same federation from the same seed.
"""

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from pfedhn.data.arrays import Array
from pfedhn.data.originals import Progress, Source, canonical_order, find_originals, read_omniglot, read_photographs
from pfedhn.data.palette import stored
from pfedhn.errors import UserError, closest, short
from pfedhn.system import fingerprint
from pfedhn.system.files import cache_folder, make_folder, reading, write_atomically

CACHE_FORMAT = 1  # a change to the canonical form raises it, and older caches are refused
ANOTHER_CACHE = "set PFEDHN_CACHE to another folder"


DATASETS = {
    "digits": Source("1,797 handwritten digits, 8x8, inside scikit-learn", (64,), 10, (0.0,), (1.0,)),
    "mnist": Source(
        "70,000 handwritten digits, 28x28",
        (1, 28, 28),
        10,
        (0.1307,),
        (0.3081,),
        (60_000, 10_000),
        "ylecun/mnist",
        sha256="08570a0fe4595d8f7bdcf750cb99325e7985aa834c00d139cef1fa4bbfeaf13c",
    ),
    "cifar10": Source(
        "60,000 color photographs of 10 kinds, 32x32",
        (3, 32, 32),
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2023, 0.1994, 0.2010),
        (50_000, 10_000),
        "uoft-cs/cifar10",
        sha256="864be83531f8741f6ab4a364e094c9057385b1d9ea69da1cb156e0e7910ab37e",
        image="img",
    ),
    "cifar100": Source(
        "60,000 color photographs of 100 kinds in 20 groups, 32x32",
        (3, 32, 32),
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        (50_000, 10_000),
        "uoft-cs/cifar100",
        image="img",
        label="fine_label",
        coarse="coarse_label",
    ),
    # The paper does not say how it scales Omniglot; these are close to the mean and deviation of the ink.
    "omniglot": Source(
        "32,460 drawings of 1,623 characters of 50 alphabets", (1, 28, 28), 1623, (0.08,), (0.25,), (32_460,)
    ),
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, normalized, in canonical order."""

    name: str
    x: Tensor  # float32 [examples, channels, height, width]; digits [examples, 64]
    y: Tensor  # class numbers, int64
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    test_x: Tensor | None = None
    test_y: Tensor | None = None
    coarse: Tensor | None = None  # CIFAR-100's coarse class
    test_coarse: Tensor | None = None
    groups: Tensor | None = None  # Omniglot's alphabet
    within: Tensor | None = None  # Omniglot's character counted from 0 in its own alphabet
    group_names: tuple[str, ...] = ()


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """A data set by name: digits, mnist, cifar10, cifar100 or omniglot.

    digits is inside scikit-learn. The others are decoded on first use, from the files in `data_dir` or else from the
    Hugging Face Hub, and read from the cache from then on (see `get`).

    Args:
        name: The data set.
        data_dir: A folder with its files, as `get` takes it.

    Examples:
        >>> import pfedhn.datasets
        >>> digits = pfedhn.datasets.load("digits")
        >>> tuple(digits.x.shape), digits.num_classes
        ((1797, 64), 10)
    """
    source = _source(name)
    if name == "digits":
        return _digits(source)
    path = get(name, data_dir)
    record = json.loads(path.with_suffix(".json").read_text())
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {
        key: _normalized(values, source) if key in ("x", "test_x") else values.long()
        for key, values in load_file(path).items()
    }
    names = tuple(record["group_names"])
    return Dataset(
        name, num_classes=record["num_classes"], mean=source.mean, std=source.std, group_names=names, **tensors
    )


@lru_cache(maxsize=2)
def loaded(name: str, data_dir: Path | None) -> Dataset:
    """`load`, once in a process."""
    return load(name, data_dir)


@lru_cache(maxsize=16)  # two for each of as many GPUs as a machine has
def examples_on(name: str, data_dir: Path | None, device: str) -> tuple[Tensor, Tensor | None]:
    """All examples of a data set on a device, those for testing last; runs side by side share them.

    On a GPU images are bytes, and their palette is returned too.
    """
    data = loaded(name, data_dir)
    x = data.x if data.test_x is None else torch.cat([data.x, data.test_x])
    x, palette = stored(x, device)
    return fingerprint.remember(x), palette


def forget_datasets() -> None:
    """Free the data sets that were read; worker processes read their own."""
    loaded.cache_clear()
    examples_on.cache_clear()


def get(name: str, data_dir: str | Path | None = None, progress: Progress | None = None, again: bool = False) -> Path:
    """Decode a data set into the cache, if it is not there yet, and return the cached file.

    The cache is the folder named by the environment variable PFEDHN_CACHE, or ~/.cache/pfedhn; it can be copied to a
    machine without network.

    Args:
        name: One of mnist, cifar10, cifar100 and omniglot (digits needs no cache).
        data_dir: A folder with the data set's files, or with a folder of its name that has them; default: the
            environment variable PFEDHN_DATA_DIR; without either, the Hugging Face Hub. MNIST and CIFAR are parquet
            files as on the Hub. Omniglot, which the Hub does not have, is the author's images_background.zip and
            images_evaluation.zip, their unpacked folders (alphabet/character01/*.png), or parquet files with the
            columns image, alphabet and character.
        progress: Called with the number of images decoded and the number of all.
        again: Decode even if there is a cached copy.
    """
    source = _source(name)
    if name == "digits":
        return _digits_file()
    path = cache_path(name)
    if _has_record(path) and not again:
        _verify(name, path, data_dir)
        return path
    originals = find_originals(name, data_dir, DATASETS.keys() - {name})
    make_folder(path.parent, ANOTHER_CACHE)  # before a minute's decoding, not after
    if name == "omniglot":
        arrays, group_names = read_omniglot(source, originals, progress)
        num_classes = int(arrays["y"].max()) + 1
    else:
        arrays, group_names = read_photographs(name, source, originals, progress), []
        num_classes = source.num_classes
    _refuse_other(name, source, arrays, num_classes)
    record = {
        "format": CACHE_FORMAT,
        "name": name,
        "num_classes": num_classes,
        "rows": {key: len(arrays[key]) for key in ("x", "test_x") if key in arrays},
        "made_from": "hub" if originals is None else originals.digest,
        "group_names": group_names,
    }
    _write(path, arrays, record)
    return path


def _refuse_other(name: str, source: Source, arrays: dict[str, Array], num_classes: int) -> None:
    """Refuse a part of a data set, or another one."""
    found = tuple(len(arrays[key]) for key in ("x", "test_x") if key in arrays)
    wanted = " and ".join(f"{number:,}" for number in source.num_rows)
    way_out = "use a whole copy, or read yours as your own data"
    if source.num_rows and (found, num_classes) != (source.num_rows, source.num_classes):
        rows = " and ".join(f"{number:,}" for number in found)
        raise UserError(
            f"{name} has {wanted} examples of {source.num_classes:,} classes, and these files hold {rows} of "
            f"{num_classes:,}; {way_out}."
        )
    if source.sha256 is not None and _content_sha256(arrays) != source.sha256:
        raise UserError(f"these files hold {wanted} examples, but not those of {name}; {way_out}.")


def _content_sha256(arrays: dict[str, Array]) -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        digest.update(numpy.ascontiguousarray(arrays[key]).data)
    return digest.hexdigest()


def cache_path(name: str) -> Path:
    """The path of a data set's decoded copy; its checksum is in a .json file beside it."""
    return cache_folder() / f"{name}.safetensors"


def _source(name: str) -> Source:
    if not isinstance(name, str) or name not in DATASETS:
        raise UserError(f"there is no data set {short(name)}; {closest(name, DATASETS)}")
    return DATASETS[name]


def _digits_file() -> Path:
    """The table that scikit-learn brings along, found without importing all of it, which takes a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise UserError("digits come with scikit-learn, which is not installed; pip install scikit-learn.")
    return Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _digits(source: Source) -> Dataset:
    file = _digits_file()
    if file.is_file():
        table = numpy.loadtxt(file, delimiter=",")
    else:  # another version may keep it elsewhere
        from sklearn.datasets import load_digits

        table = numpy.column_stack(load_digits(return_X_y=True))
    pixels, labels = table[:, :-1].astype(numpy.uint8), table[:, -1].astype(numpy.int64)
    order = canonical_order(pixels, labels)
    x = torch.from_numpy(pixels[order]).to(torch.float32) / 16
    return Dataset("digits", x, torch.from_numpy(labels[order]), source.num_classes, source.mean, source.std)


def _normalized(pixels: Tensor, source: Source) -> Tensor:
    """In place after the first copy: a data set of 60,000 images is 740 MB as float32."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


def _write(path: Path, arrays: dict[str, Array], record: dict[str, Any]) -> None:
    """The record goes last: without it there is no cache."""
    from safetensors.numpy import save

    content = save({key: numpy.ascontiguousarray(value) for key, value in arrays.items()})
    write_atomically(path, content, ANOTHER_CACHE)
    record = {**record, "sha256": hashlib.sha256(content).hexdigest()}
    write_atomically(path.with_suffix(".json"), (json.dumps(record, indent=1) + "\n").encode(), ANOTHER_CACHE)


def _has_record(path: Path) -> bool:
    with reading(path):
        return path.with_suffix(".json").exists()


def _whole_record(path: Path) -> dict[str, Any] | None:
    """The record of a cached copy; None if the copy is damaged, incomplete or of another version."""
    num_rows = DATASETS[path.stem].num_rows
    try:
        record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        whole = record["format"] == CACHE_FORMAT and record["sha256"] == _sha256(path) and "made_from" in record
        whole = whole and (not num_rows or tuple(record["rows"].values()) == num_rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if whole else None


def cache_state(name: str) -> Literal["cached", "not cached", "damaged"]:
    """Whether a data set is in the cache; this reads the whole copy."""
    path = cache_path(name)
    if not _has_record(path):
        return "not cached"
    return "damaged" if _whole_record(path) is None else "cached"


def _verify(name: str, path: Path, data_dir: str | Path | None) -> None:
    record = _whole_record(path)
    if record is None:
        where = " --data-dir FOLDER" if data_dir or _source(name).hub is None else ""
        raise UserError(f"the cached copy {path} is damaged or outdated; run `pfedhn data get {name}{where} --again`.")
    # The folder may be gone by now; but where it is there, it is what the user asked for.
    try:
        originals = find_originals(name, data_dir, DATASETS.keys() - {name})
    except UserError:
        return
    if originals is not None and originals.digest != record["made_from"]:
        raise UserError(
            f"the cached copy {path} was not made from the files in {originals.folder}; run `pfedhn data get {name} "
            f"--data-dir {originals.folder} --again` to use those, or leave the data folder out."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
