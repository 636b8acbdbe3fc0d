"""Data sets by name: digits (inside scikit-learn), MNIST, CIFAR-10, CIFAR-100 and Omniglot.

The images of a data set are decoded once, into a cache of one verified file. Examples are in a canonical order that
comes from their content alone, so every copy of a data set gives the same federation from the same seed.
"""

import hashlib
import importlib.util
import io
import json
import logging
import lzma
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedhn.errors import UserError, closest, first_line, short
from pfedhn.system.files import cache_folder, given_path, make_folder, read_bytes, reading, write_atomically

Array: TypeAlias = NDArray[Any]
Pixels: TypeAlias = NDArray[numpy.uint8]
Progress: TypeAlias = Callable[[int, int], None]
"""It is called with the number of images decoded so far and the number of all."""

CACHE_FORMAT = 1  # a change to the canonical form raises it, and older caches are refused
ANOTHER_CACHE = "set PFEDHN_CACHE to another folder"
CHUNK = 512  # images that a thread decodes at a time
OMNIGLOT_ARCHIVES = ("images_background.zip", "images_evaluation.zip")
OMNIGLOT_WIDTH = 105  # pixels, and as many high
IMAGE_FORMATS = ("PNG", "WEBP")  # without loss, as the data sets are stored; no other decoder is given a file
MAX_DRAWING_BYTES = 1_000_000  # a drawing of Omniglot has a few hundred


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and how it is prepared."""

    description: str
    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]  # of each channel, its pixels scaled to 0..1
    std: tuple[float, ...]
    num_rows: tuple[int, ...] = ()  # training examples, and test examples where it has its own; () is not checked
    hub: str | None = None  # its id on the Hugging Face Hub
    sha256: str | None = None  # of its images and labels in canonical order, where that is known
    image: str = "image"  # columns there
    label: str = "label"
    coarse: str | None = None


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
    test_x: Tensor | None
    test_y: Tensor | None
    groups: Tensor | None  # Omniglot's alphabet
    coarse: Tensor | None  # CIFAR-100's coarse class
    test_coarse: Tensor | None
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
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

    tensors = load_file(path)
    optional = {key: tensors[key].long() if key in tensors else None for key in ("groups", "coarse", "within")}
    return Dataset(
        name,
        _normalized(tensors["x"], source),
        tensors["y"].long(),
        _normalized(tensors["test_x"], source) if "test_x" in tensors else None,
        tensors["test_y"].long() if "test_y" in tensors else None,
        test_coarse=tensors["test_coarse"].long() if "test_coarse" in tensors else None,
        num_classes=record["num_classes"],
        mean=source.mean,
        std=source.std,
        group_names=tuple(record["group_names"]),
        **optional,
    )


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
    folder = _folder(name, data_dir)
    make_folder(path.parent, ANOTHER_CACHE)  # before a minute's decoding, not after
    if name == "omniglot":
        arrays, group_names = _read_omniglot(source, folder, progress)
        num_classes = int(arrays["y"].max()) + 1
    else:
        arrays, group_names = _read_images(name, source, folder, progress), []
        num_classes = source.num_classes
    _refuse_other(name, source, arrays, num_classes)
    record = {
        "format": CACHE_FORMAT,
        "name": name,
        "num_classes": num_classes,
        "rows": {key: len(arrays[key]) for key in ("x", "test_x") if key in arrays},
        "made_from": _made_from(name, folder),
        "group_names": group_names,
    }
    _write(path, arrays, record)
    return path


def _refuse_other(name: str, source: Source, arrays: dict[str, Array], num_classes: int) -> None:
    """A part of a data set, or another one, must not pass for it: its results would."""
    found = tuple(len(arrays[key]) for key in ("x", "test_x") if key in arrays)
    wanted = " and ".join(f"{number:,}" for number in source.num_rows)
    way_out = "use a whole copy, or give yours a name of its own as your own data"
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
    """Where a data set's decoded copy is or would be; next to it lies a .json with its checksum."""
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
    order = _canonical_order(pixels, labels)
    x = torch.from_numpy(pixels[order]).to(torch.float32) / 16
    y = torch.from_numpy(labels[order])
    return Dataset("digits", x, y, None, None, None, None, None, source.num_classes, source.mean, source.std)


def _normalized(pixels: Tensor, source: Source) -> Tensor:
    """In place after the first copy: a data set of 60,000 images is 740 MB as float32."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


def _read_images(name: str, source: Source, folder: Path | None, progress: Progress | None) -> dict[str, Array]:
    """The train and test examples of MNIST or CIFAR."""
    arrays: dict[str, Array] = {}
    with _hub_tables(name, source, folder) as tables:
        missing = [split for split in ("train", "test") if split not in tables]
        if missing:
            raise UserError(f"{name} needs train and test files, and {folder} has no {missing[0]} file; copy it there.")
        total = sum(len(tables[split]) for split in ("train", "test"))
        for split, prefix, done in (("train", "", 0), ("test", "test_", len(tables["train"]))):
            table = tables[split]
            _check_columns(name, table.column_names, [source.image, source.label, *filter(None, [source.coarse])])
            labels = _labels(name, table, source.label, source.num_classes)
            pixels = _decoded(name, table, source, _image_pixels, _shifted(progress, done, total))
            order = _canonical_order(pixels, labels)
            arrays[f"{prefix}x"], arrays[f"{prefix}y"] = pixels[order], labels[order]
            if source.coarse:
                arrays[f"{prefix}coarse"] = _labels(name, table, source.coarse, source.num_classes)[order]
    return arrays


def _read_omniglot(
    source: Source, folder: Path | None, progress: Progress | None
) -> tuple[dict[str, Array], list[str]]:
    if folder is None:
        raise UserError(
            "the Hugging Face Hub has no omniglot; put images_background.zip and images_evaluation.zip from "
            "github.com/brendenlake/omniglot (folder python) in a folder and give it as --data-dir."
        )
    files = _data_files("omniglot", folder)
    if files[0].suffix == ".parquet":
        with _hub_tables("omniglot", source, folder) as tables:
            table = tables["train"]
            _check_columns("omniglot", table.column_names, [source.image, "alphabet", "character"])
            feature = table.features["alphabet"]
            column = table["alphabet"]
            alphabets = [feature.names[value] for value in column] if hasattr(feature, "names") else list(column)
            if not all(isinstance(alphabet, str) for alphabet in alphabets):
                raise UserError("omniglot's column 'alphabet' holds numbers without names; store the alphabets' names.")
            characters = _column_of_numbers("omniglot", table, "character").tolist()
            pixels = _decoded("omniglot", table, source, _ink, _shifted(progress, 0, len(table)))
    else:
        drawings = list(_omniglot_drawings(files))
        alphabets, characters = [item[0] for item in drawings], [item[1] for item in drawings]
        blobs = _Blobs([item[2] for item in drawings])
        pixels = _decoded("omniglot", blobs, source, _ink, _shifted(progress, 0, len(blobs)))
    pairs = sorted(set(zip(alphabets, characters, strict=True)))
    number = {pair: place for place, pair in enumerate(pairs)}
    names = sorted(set(alphabets))
    first = {name: min(number[pair] for pair in pairs if pair[0] == name) for name in names}
    y = numpy.array([number[pair] for pair in zip(alphabets, characters, strict=True)], dtype=numpy.int16)
    groups = numpy.array([names.index(alphabet) for alphabet in alphabets], dtype=numpy.int16)
    within = numpy.array([label - first[name] for label, name in zip(y, alphabets, strict=True)], dtype=numpy.int16)
    order = _canonical_order(pixels, y)
    return {"x": pixels[order], "y": y[order], "groups": groups[order], "within": within[order]}, names


def _omniglot_drawings(files: Sequence[Path]) -> Iterator[tuple[str, int, bytes]]:
    """(alphabet, character, image bytes) from .../Greek/character07/0395_01.png, on disk or in the archives."""
    pattern = re.compile(r"([^/]+)/character(\d+)/[^/]+\.png$")
    for file in files:
        if file.suffix == ".zip":
            with reading(file), _whole_archive(file), zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    if match := pattern.search(member.filename):
                        if member.file_size > MAX_DRAWING_BYTES:
                            raise UserError(
                                f"{member.filename} in {file} would unpack to {member.file_size:,} bytes, and no "
                                "drawing of Omniglot is so large; download the archive again."
                            )
                        yield match[1], int(match[2]), archive.read(member)
        elif match := pattern.search(file.as_posix()):
            yield match[1], int(match[2]), read_bytes(file)


@contextmanager
def _whole_archive(file: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError) as error:
        # In this order: not an archive, damaged, damaged, cut off, packed in an unknown way, encrypted.
        raise UserError(f"{file} is not a whole zip archive ({first_line(error)}); download it again.") from error


class _Blobs:
    """Image bytes under the two operations that are used of a Hugging Face table."""

    def __init__(self, blobs: list[bytes]) -> None:
        self.blobs = blobs

    def __len__(self) -> int:
        return len(self.blobs)

    def __getitem__(self, numbers: slice) -> dict[str, list[dict[str, Any]]]:
        return {"image": [{"bytes": blob} for blob in self.blobs[numbers]]}


@contextmanager
def _hub_tables(name: str, source: Source, folder: Path | None) -> Iterator[Any]:
    """The tables of a data set by split, image columns as bytes: from a folder of parquet files or from the Hub."""
    try:
        import datasets  # the Hugging Face library, not this module
    except ImportError as error:
        raise UserError(f"reading {name} needs the Hugging Face library: pip install 'pfedhn[data]'") from error
    if folder is None:
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries say nothing that helps
        try:
            tables = datasets.load_dataset(source.hub)
        except Exception as error:  # the library's failures have no common type, and all mean: not from there
            raise UserError(
                f"{name} is not cached and the Hugging Face Hub gave no copy ({first_line(error)}); connect to the "
                f"network, give a folder of its parquet files as --data-dir, or copy {cache_path(name).parent} from "
                "a machine that has it."
            ) from error
        yield _with_bytes(tables, source)
        return
    files: dict[str, list[str]] = {}
    for file in _data_files(name, folder):
        split = _split_of(file.relative_to(folder)) if name != "omniglot" else "train"
        if split:
            files.setdefault(split, []).append(str(file))
    if not files:
        raise UserError(f"the parquet files in {folder} are named neither train nor test; name them as on the Hub.")
    # The library converts to Arrow files first; these are of no use afterwards. Its progress bars would hide ours.
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    library = logging.getLogger("datasets")  # of a file that it cannot read we say more
    level = library.level
    library.setLevel(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(dir=cache_path(name).parent, ignore_cleanup_errors=True) as scratch:
            try:
                tables = _with_bytes(datasets.load_dataset("parquet", data_files=files, cache_dir=scratch), source)
            except Exception as error:
                raise UserError(
                    f"the parquet files in {folder} cannot be read ({first_line(error)}); copy them again."
                ) from error
            yield tables
    finally:
        library.setLevel(level)
        if shown:
            datasets.enable_progress_bars()


def _with_bytes(tables: Any, source: Source) -> Any:
    import datasets

    plain = datasets.Image(decode=False)  # Pillow decodes below, in threads
    return {
        split: table.cast_column(source.image, plain) if source.image in table.column_names else table
        for split, table in tables.items()
    }


def _split_of(path: Path) -> str | None:
    match = re.search(r"(?<![a-z])(train|test)(?![a-z])", path.as_posix())
    return match[1] if match else None


def _folder(name: str, data_dir: str | Path | None) -> Path | None:
    """The folder that holds a data set's files; None means the Hub."""
    given = data_dir or os.environ.get("PFEDHN_DATA_DIR")
    if not given:
        return None
    root = given_path(given)
    with reading(root):
        if not root.is_dir():
            raise UserError(f"the data folder {root} does not exist; make it, or leave it out to fetch from the Hub.")
    for folder in (root / name, root):
        if _data_files(name, folder):
            return folder
    wanted = " and ".join(OMNIGLOT_ARCHIVES) if name == "omniglot" else "parquet files, named as on the Hub,"
    way_out = "" if name == "omniglot" else ", or leave the data folder out to fetch them"
    raise UserError(f"neither {root / name} nor {root} holds {name}; put its {wanted} there{way_out}.")


def _data_files(name: str, folder: Path) -> list[Path]:
    """Parquet files first choice, then Omniglot's archives, then its images; other data sets' folders are passed by."""
    if not folder.is_dir():
        return []
    others = DATASETS.keys() - {name}
    with reading(folder):
        found = sorted(
            file
            for file in folder.rglob("*.parquet")
            if file.is_file() and file.relative_to(folder).parts[0] not in others
        )
    for file in found:
        if match := re.search(r"^(.*)-(\d{5})-of-(\d{5})\.parquet$", file.name):
            parts = [file.with_name(f"{match[1]}-{part:05d}-of-{match[3]}.parquet") for part in range(int(match[3]))]
            absent = next((part for part in parts if not part.exists()), None)
            if absent:
                raise UserError(f"{absent} is missing next to {file.name}; copy it there.")
    if found or name != "omniglot":
        return found
    archives = [folder / archive for archive in OMNIGLOT_ARCHIVES if (folder / archive).is_file()]
    if len(archives) == 1:
        absent = next(folder / archive for archive in OMNIGLOT_ARCHIVES if folder / archive not in archives)
        raise UserError(f"{absent} is missing next to {archives[0].name}; copy it there.")
    with reading(folder):
        return archives or sorted(file for file in folder.rglob("character*/*.png") if file.is_file())


def _made_from(name: str, folder: Path | None) -> str:
    """A checksum of the names and sizes of the files a cache was made from; a moved folder keeps it."""
    if folder is None:
        return "hub"
    listing = [f"{file.relative_to(folder).as_posix()} {file.stat().st_size}" for file in _data_files(name, folder)]
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()


def _check_columns(name: str, columns: Sequence[str], wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in columns:
            raise UserError(
                f"the files of {name} have the columns {', '.join(columns)} but not {column!r}; "
                "use a copy laid out as on the Hub."
            )


def _labels(name: str, table: Any, column: str, num_classes: int) -> NDArray[numpy.int16]:
    labels = _column_of_numbers(name, table, column)
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        raise UserError(
            f"{name} has labels from {labels.min()} to {labels.max()} in {column!r} and not 0 to {num_classes - 1}; "
            "use a copy laid out as on the Hub."
        )
    return labels.astype(numpy.int16)


def _column_of_numbers(name: str, table: Any, column: str) -> NDArray[numpy.int64]:
    try:
        return numpy.array(table[column], dtype=numpy.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"the column {column!r} of {name} does not hold integers ({first_line(error)}); use a copy laid out as on "
            "the Hub."
        ) from error


def _shifted(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return lambda count: progress(done + count, total) if progress else None


def _decoded(
    name: str, table: Any, source: Source, decode: Callable[[bytes, Source], Pixels], tick: Callable[[int], None]
) -> Pixels:
    """All images of a table [N, C, H, W]; threads, because Pillow lets go of the interpreter while it decodes."""
    import PIL.Image

    PIL.Image.init()  # it registers formats on first use, which two threads must not do at once
    starts = range(0, len(table), CHUNK)

    def decode_chunk(start_and_blobs: tuple[int, list[dict[str, Any]]]) -> list[Pixels]:
        start, blobs = start_and_blobs
        chunk = []
        for place, blob in enumerate(blobs):
            try:
                chunk.append(decode(blob["bytes"], source))
            except UserError as error:
                raise UserError(f"image {start + place} of {name} {error}; use another copy of the data.") from error
            except Exception as error:
                raise UserError(
                    f"image {start + place} of {name} cannot be decoded ({first_line(error)}); use another copy."
                ) from error
        return chunk

    pixels = numpy.empty((len(table), *source.shape), dtype=numpy.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        chunks = pool.map(decode_chunk, ((start, table[start : start + CHUNK][source.image]) for start in starts))
        for start, chunk in zip(starts, chunks, strict=True):
            pixels[start : start + len(chunk)] = chunk
            tick(start + len(chunk))
    return pixels


def _opened(blob: bytes, width: int, height: int) -> Any:
    """An image of this size, before it is decoded: a small file can hold a huge one."""
    import PIL.Image

    image = PIL.Image.open(io.BytesIO(blob), formats=IMAGE_FORMATS)
    if image.size != (width, height):
        raise UserError(f"is {image.width}x{image.height} and not {width}x{height}")
    return image


def _image_pixels(blob: bytes, source: Source) -> Pixels:
    channels, height, width = source.shape
    image = _opened(blob, width, height)
    pixels = numpy.asarray(image.convert("RGB" if channels == 3 else "L"))
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def _ink(blob: bytes, source: Source) -> Pixels:
    """Omniglot is drawn in 0 on 1 at 105x105; ink becomes 255. Pillow widens the filter when it shrinks."""
    import PIL.Image

    _, height, width = source.shape
    image = _opened(blob, OMNIGLOT_WIDTH, OMNIGLOT_WIDTH).convert("L")
    return 255 - numpy.asarray(image.resize((width, height), PIL.Image.Resampling.BILINEAR))[None]


def _canonical_order(pixels: Pixels, labels: Array) -> NDArray[numpy.int64]:
    """By label, then by a hash of the pixels: images that tie are equal."""
    hashes = [hashlib.blake2b(numpy.ascontiguousarray(image).data, digest_size=16).digest() for image in pixels]
    order = sorted(range(len(labels)), key=lambda number: (labels[number], hashes[number]))
    return numpy.array(order, dtype=numpy.int64)


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
    """What is written down of a cached copy; None if it is not as it was written, by another version, or of a part."""
    num_rows = DATASETS[path.stem].num_rows
    try:
        record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        whole = record["format"] == CACHE_FORMAT and record["sha256"] == _sha256(path) and "made_from" in record
        whole = whole and (not num_rows or tuple(record["rows"].values()) == num_rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if whole else None


def cache_state(name: str) -> Literal["cached", "not cached", "damaged"]:
    """How a data set's copy in the cache is; this reads the whole of it."""
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
        folder = _folder(name, data_dir)
    except UserError:
        return
    if folder is not None and _made_from(name, folder) != record["made_from"]:
        raise UserError(
            f"the cached copy {path} was not made from the files in {folder}; run `pfedhn data get {name} "
            f"--data-dir {folder} --again` to use those, or leave the data folder out."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
