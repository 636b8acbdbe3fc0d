"""The original files of a data set, from a folder or the Hugging Face Hub, decoded into arrays of pixels.

Examples are put in a canonical order that comes from their content alone.
"""

import hashlib
import io
import json
import logging
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from pfedhn.data.arrays import Array
from pfedhn.errors import UserError, first_line
from pfedhn.system.files import cache_folder, given_path, read_bytes, reading

Pixels: TypeAlias = NDArray[numpy.uint8]
Progress: TypeAlias = Callable[[int, int], None]
"""It is called with the number of images decoded so far and the number of all."""

CHUNK = 512  # images that a thread decodes at a time
OMNIGLOT_ARCHIVES = ("images_background.zip", "images_evaluation.zip")
OMNIGLOT_WIDTH = 105  # pixels, and as many high
IMAGE_FORMATS = ("PNG", "WEBP")  # without loss, as the data sets are stored; no other decoder is given a file
MAX_DRAWING_BYTES = 1_000_000  # a drawing of Omniglot has a few hundred


@dataclass(frozen=True)
class Source:
    """The origin of a data set and its preparation."""

    description: str
    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]  # of each channel, its pixels scaled to 0..1
    std: tuple[float, ...]
    num_rows: tuple[int, ...] = ()  # training examples, and test examples where it has its own; () is not checked
    hub: str | None = None  # its id on the Hugging Face Hub
    sha256: str | None = None  # of its images and labels in canonical order, if known
    image: str = "image"  # columns there
    label: str = "label"
    coarse: str | None = None


class Originals(NamedTuple):
    """A folder of a data set's files, as downloaded."""

    folder: Path
    files: list[Path]

    @property
    def digest(self) -> str:
        """A checksum of the files' names and sizes; a moved folder keeps it."""
        listing = [f"{file.relative_to(self.folder).as_posix()} {file.stat().st_size}" for file in self.files]
        return hashlib.sha256("\n".join(listing).encode()).hexdigest()


def find_originals(name: str, data_dir: str | Path | None, others: Collection[str]) -> Originals | None:
    """The folder that holds a data set's files; None means the Hub.

    Args:
        name: The data set.
        data_dir: The folder, or its parent; default: the environment variable PFEDHN_DATA_DIR.
        others: Names of other data sets, whose folders are skipped.
    """
    given = data_dir or os.environ.get("PFEDHN_DATA_DIR")
    if not given:
        return None
    root = given_path(given)
    with reading(root):
        if not root.is_dir():
            raise UserError(f"the data folder {root} does not exist; make it, or leave it out to fetch from the Hub.")
    for folder in (root / name, root):
        if files := _data_files(name, folder, others):
            return Originals(folder, files)
    wanted = " and ".join(OMNIGLOT_ARCHIVES) if name == "omniglot" else "parquet files, named as on the Hub,"
    way_out = "" if name == "omniglot" else ", or leave the data folder out to fetch them"
    raise UserError(f"neither {root / name} nor {root} holds {name}; put its {wanted} there{way_out}.")


def _data_files(name: str, folder: Path, others: Collection[str]) -> list[Path]:
    """Parquet files if there are any, else Omniglot's archives, else its images."""
    if not folder.is_dir():
        return []
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


def read_photographs(
    name: str, source: Source, originals: Originals | None, progress: Progress | None
) -> dict[str, Array]:
    """The train and test examples of MNIST or CIFAR."""
    originals = originals or _from_hub(name, source)
    tables = _tables(originals, _split_of)
    if not tables:
        raise UserError(
            f"the parquet files in {originals.folder} are named neither train nor test; name them as on the Hub."
        )
    for split in ("train", "test"):
        if split not in tables:
            raise UserError(
                f"{name} needs train and test files, and {originals.folder} has no {split} file; copy it there."
            )
    arrays: dict[str, Array] = {}
    total = sum(map(len, tables.values()))
    for split, prefix, done in (("train", "", 0), ("test", "test_", len(tables["train"]))):
        table = tables[split]
        _check_columns(name, table, [source.image, source.label, *filter(None, [source.coarse])])
        labels = _labels(name, table, source.label, source.num_classes)
        pixels = _decoded(name, _blobs(table, source), source, _image_pixels, _shifted(progress, done, total))
        order = canonical_order(pixels, labels)
        arrays[f"{prefix}x"], arrays[f"{prefix}y"] = pixels[order], labels[order]
        if source.coarse:
            arrays[f"{prefix}coarse"] = _labels(name, table, source.coarse, source.num_classes)[order]
    return arrays


def read_omniglot(
    source: Source, originals: Originals | None, progress: Progress | None
) -> tuple[dict[str, Array], list[str]]:
    """The drawings of Omniglot, and the names of its alphabets."""
    if originals is None:
        raise UserError(
            "the Hugging Face Hub has no omniglot; put images_background.zip and images_evaluation.zip from "
            "github.com/brendenlake/omniglot (folder python) in a folder and give it as --data-dir."
        )
    if originals.files[0].suffix == ".parquet":
        table = _tables(originals, lambda path: "train")["train"]
        _check_columns("omniglot", table, [source.image, "alphabet", "character"])
        names = _class_names(table, "alphabet")
        alphabets = [names[cell] if names else cell for cell in table["alphabet"].to_pylist()]
        if not all(isinstance(alphabet, str) for alphabet in alphabets):
            raise UserError("omniglot's column 'alphabet' holds numbers without names; store the alphabets' names.")
        characters, blobs = _column_of_numbers("omniglot", table, "character").tolist(), _blobs(table, source)
    else:
        alphabets, characters, blobs = map(list, zip(*_omniglot_drawings(originals.files), strict=True))
    pixels = _decoded("omniglot", blobs, source, _ink, _shifted(progress, 0, len(blobs)))
    pairs = sorted(set(zip(alphabets, characters, strict=True)))
    number = {pair: place for place, pair in enumerate(pairs)}
    names = sorted(set(alphabets))
    first = {name: min(number[pair] for pair in pairs if pair[0] == name) for name in names}
    y = numpy.array([number[pair] for pair in zip(alphabets, characters, strict=True)], dtype=numpy.int16)
    groups = numpy.array([names.index(alphabet) for alphabet in alphabets], dtype=numpy.int16)
    within = numpy.array([label - first[name] for label, name in zip(y, alphabets, strict=True)], dtype=numpy.int16)
    order = canonical_order(pixels, y)
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


def _from_hub(name: str, source: Source) -> Originals:
    """The parquet files of a data set, fetched from the Hugging Face Hub."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(f"fetching {name} needs the Hugging Face library: pip install 'pfedhn[data]'") from error
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries say nothing that helps
    try:
        folder = Path(snapshot_download(str(source.hub), repo_type="dataset", allow_patterns="*.parquet"))
    except Exception as error:  # the library's failures have no common type, and all mean: not from there
        raise UserError(
            f"{name} is not cached and the Hugging Face Hub gave no copy ({first_line(error)}); connect to the "
            f"network, give a folder of its parquet files as --data-dir, or copy {cache_folder()} from "
            "a machine that has it."
        ) from error
    return Originals(folder, sorted(folder.rglob("*.parquet")))


def _tables(originals: Originals, split_of: Callable[[Path], str | None]) -> dict[str, Any]:
    """The tables of a data set by split."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("reading parquet needs pyarrow: pip install 'pfedhn[data]'") from error
    parts: dict[str, list[Any]] = {}
    for file in originals.files:
        if (split := split_of(file.relative_to(originals.folder))) is not None:
            try:
                parts.setdefault(split, []).append(parquet.read_table(file))
            except (OSError, pyarrow.ArrowException) as error:
                raise UserError(f"{file} cannot be read ({first_line(error)}); copy it again.") from error
    return {split: pyarrow.concat_tables(shards) for split, shards in parts.items()}


def _blobs(table: Any, source: Source) -> list[Any]:
    """The bytes of a table's images, which the Hugging Face library stores beside their file's name."""
    cells = table[source.image].to_pylist()
    return [cell["bytes"] if isinstance(cell, dict) else cell for cell in cells]


def _class_names(table: Any, column: str) -> list[str]:
    """The names that the Hugging Face library stores for the numbers in a column; empty if there are none."""
    described = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names: list[str] = described.get("info", {}).get("features", {}).get(column, {}).get("names", [])
    return names


def _split_of(path: Path) -> str | None:
    match = re.search(r"(?<![a-z])(train|test)(?![a-z])", path.as_posix())
    return match[1] if match else None


def _check_columns(name: str, table: Any, wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in table.column_names:
            raise UserError(
                f"the files of {name} have the columns {', '.join(table.column_names)} but not {column!r}; "
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
    numbers: Array = table[column].to_numpy()
    if numbers.dtype.kind not in "iu":
        raise UserError(
            f"the column {column!r} of {name} holds {table[column].type} and not integers; use a copy laid out as on "
            "the Hub."
        )
    return numbers.astype(numpy.int64)


def _shifted(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return lambda count: progress(done + count, total) if progress else None


def _decoded(
    name: str, blobs: list[Any], source: Source, decode: Callable[[bytes, Source], Pixels], tick: Callable[[int], None]
) -> Pixels:
    """All images [N, C, H, W]; threads, because Pillow lets go of the interpreter while it decodes."""
    import PIL.Image

    PIL.Image.init()  # it registers formats on first use, which two threads must not do at once
    starts = range(0, len(blobs), CHUNK)

    def decode_chunk(start: int) -> list[Pixels]:
        chunk = []
        for place, blob in enumerate(blobs[start : start + CHUNK], start):
            try:
                chunk.append(decode(blob, source))
            except UserError as error:
                raise UserError(f"image {place} of {name} {error}; use another copy of the data.") from error
            except Exception as error:
                raise UserError(
                    f"image {place} of {name} cannot be decoded ({first_line(error)}); use another copy."
                ) from error
        return chunk

    pixels = numpy.empty((len(blobs), *source.shape), dtype=numpy.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start, chunk in zip(starts, pool.map(decode_chunk, starts), strict=True):
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


def canonical_order(pixels: Pixels, labels: Array) -> NDArray[numpy.int64]:
    """By label, then by a hash of the pixels: images that tie are equal."""
    hashes = [hashlib.blake2b(numpy.ascontiguousarray(image).data, digest_size=16).digest() for image in pixels]
    order = sorted(range(len(labels)), key=lambda number: (labels[number], hashes[number]))
    return numpy.array(order, dtype=numpy.int64)
