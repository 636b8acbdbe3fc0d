"""Your own images: PNG or JPEG files in a folder per class, in a folder per client."""

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy

from pfedhn.data.arrays import Array
from pfedhn.data.folders import Folders
from pfedhn.data.reading import ImageReading
from pfedhn.errors import UserError, first_line, short
from pfedhn.system.files import reading

logger = logging.getLogger("pfedhn")

ENDINGS = (".png", ".jpg", ".jpeg")
OTHER_ENDINGS = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".tif", ".tiff", ".webp")  # not read
MAX_SIDE = 4096  # of an image, in pixels
_warned: set[str] = set()  # of which files
Channels: TypeAlias = Literal["rgb", "gray"]
Corrupt: TypeAlias = Literal["refuse", "skip"]


def image_size(resize: Any) -> tuple[int, int] | None:
    """Height and width that all images are brought to: a pair, or one number for both."""
    if resize is None:
        return None
    sides = [resize, resize] if isinstance(resize, int) else list(resize) if isinstance(resize, Sequence) else []
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= MAX_SIDE for side in sides):
        raise UserError(
            f"resize is {short(resize)}; give a height and a width of 1 to {MAX_SIDE} pixels, as in [32, 32], or one "
            "number for both."
        )
    return sides[0], sides[1]


def image_files(folder: Path) -> list[tuple[str, Path]]:
    """(class, file) of every image below one client's folder, in sorted order."""
    with reading(folder):
        classes = sorted(part for part in folder.iterdir() if part.is_dir() and not part.name.startswith("."))
        found = [file for part in classes for file in sorted(part.iterdir())]
    return [(file.parent.name, file) for file in _readable(folder, found)]


def _readable(place: Path, files: Sequence[Path]) -> list[Path]:
    """The images among these files. Those of other kinds are named in a warning, and refused if they are alone."""
    images, others = (_ending_in(endings, files) for endings in (ENDINGS, OTHER_ENDINGS))
    way_out = "save such images as PNG or JPEG files"
    if others and not images:
        raise UserError(f"{others[0]} is neither PNG nor JPEG, as images must be; {way_out}.")
    if others:
        _warn_once(
            place,
            f"images in {place} that are neither PNG nor JPEG are left out ({len(others)}, such as {others[0].name}); "
            f"{way_out}.",
        )
    return images


def _warn_once(place: Path, sentence: str) -> None:
    """Warn in one process: files are read several times."""
    if str(place) not in _warned and multiprocessing.parent_process() is None:
        _warned.add(str(place))
        logger.warning(sentence)


def _ending_in(endings: Sequence[str], files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.suffix.lower() in endings and not file.name.startswith(".")]


def refuse_other_layout(root: Path) -> None:
    """Refuse images that lie elsewhere than in a folder per class in a folder per client."""
    with reading(root):
        found = [file for depth in ("*", "*/*") for file in sorted(root.glob(depth))]
    images = _ending_in(ENDINGS, found)
    if images:
        where = "by themselves" if images[0].parent == root else "one folder deep, and they belong two deep"
        raise UserError(
            f"{root} has {len(images):,} images {where}; every image goes into a folder of its class in a folder of "
            f"its client, as in {root.name}/CLIENT/CLASS/{images[0].name}."
        )


def read_images(
    folders: list[Path],
    resize: tuple[int, int] | None = None,
    channels: Channels = "rgb",
    corrupt: Corrupt = "refuse",
) -> Folders:
    """The images (x, y) of each client by its name, x [N, C, H, W] in float32 from 0 to 1; and what classes are called.

    Args:
        folders: One for each client, with a folder per class.
        resize: Height and width that all images are brought to; None if all have one size.
        channels: "rgb" has three, "gray" one.
        corrupt: Whether an incomplete image is refused, or skipped with a warning.
    """
    files = {folder.name: image_files(folder) for folder in folders}
    for folder in folders:
        if not files[folder.name]:
            raise UserError(
                f"{folder} has neither x.npy nor images; give it a folder per class, with PNG or JPEG files."
            )
    names = tuple(sorted({label for listed in files.values() for label, _ in listed}))
    size = resize
    clients = {}
    for client, listed in files.items():
        images, labels = [], []
        for label, file, image in _decoded(listed, resize, channels, corrupt):
            size = size or image.shape[1:]
            if image.shape[1:] != tuple(size):
                raise UserError(
                    f"{file} is an image of {image.shape[1]} x {image.shape[2]} pixels and others have {size[0]} x "
                    f"{size[1]}; bring all to one size with read = {{resize = [32, 32]}} (in Python, resize=(32, 32))."
                )
            images.append(image)
            labels.append(names.index(label))
        if not images:
            raise UserError(f"no image of client {client!r} can be read; bring its files back.")
        clients[client] = (numpy.stack(images), numpy.array(labels, dtype=numpy.int64))
    return Folders(clients, names)


def images_below(place: Path) -> list[Path]:
    """The image files of a folder and of the folders in it, in sorted order; or the file itself, if it is an image."""
    with reading(place):
        found = sorted(place.rglob("*")) if place.is_dir() else [place]
    return _readable(place, found)


def read_like(files: list[Path], shape: tuple[int, ...], how: ImageReading | None = None) -> tuple[list[Path], Array]:
    """Images as a run has them, brought to the shape [C, H, W] of its examples; and the files that are images.

    If the run skipped damaged files, they are skipped here.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(f"{files[0]} is an image, and this run's examples have shape {shape}; give arrays or a table.")
    channels: Channels = "rgb" if shape[0] == 3 else "gray"
    skips = how is not None and how.corrupt == "skip"
    parts = [(file.parent.name, file) for file in files]
    found = list(_decoded(parts, (shape[1], shape[2]), channels, "skip" if skips else "remove"))
    if not found:
        raise UserError(f"{files[0]} is not a complete image, nor is any other; bring them back.")
    return [file for _, file, _ in found], numpy.stack([image for *_, image in found])


def _decoded(
    listed: list[tuple[str, Path]],
    resize: tuple[int, int] | None,
    channels: Channels,
    corrupt: Corrupt | Literal["remove"],
) -> Iterator[tuple[str, Path, Array]]:
    for label, file in listed:
        try:
            yield label, file, decode(file, resize, channels)
        except (OSError, SyntaxError, ValueError) as error:  # as Pillow has it
            if corrupt != "skip":
                way_out = "take it out of the folder"
                if corrupt == "refuse":  # where that can be said
                    way_out = 'skip such files with read = {corrupt = "skip"} (in Python, corrupt="skip")'
                raise UserError(
                    f"{file} is not a complete image ({first_line(error)}); bring it back, or {way_out}."
                ) from error
            _warn_once(file, f"{file} is not a complete image and was skipped.")


def decode(image: Any, resize: tuple[int, int] | None, channels: Channels) -> Array:
    """[C, H, W] in float32 from 0 to 1, from a file or an image of Pillow, upright as its camera says."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UserError("reading images needs Pillow: pip install 'pfedhn[data]'") from error
    try:
        picture = Image.open(image, formats=("PNG", "JPEG")) if isinstance(image, Path) else image
        is_16_bit = picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG")
        if picture.mode[0] in "IF" and not is_16_bit:
            raise UserError(
                f"an image has pixels of Pillow's mode {picture.mode!r}, which may be of any size; give images of 8 or "
                "16 bits."
            )
        picture.load()
        with suppress(Exception):  # of a damaged record of the camera, without which the pixels are whole
            picture = ImageOps.exif_transpose(picture)
        if is_16_bit:  # which Pillow would cut at 255
            picture = Image.fromarray(numpy.asarray(picture).astype(numpy.float32) / 257)
        else:
            picture = picture.convert("RGB" if channels == "rgb" else "L")
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    if resize is not None:
        picture = picture.resize((resize[1], resize[0]), Image.Resampling.BILINEAR)
    pixels = numpy.asarray(picture, dtype=numpy.float32) / 255
    if pixels.ndim == 2:
        return numpy.repeat(pixels[None], 3 if channels == "rgb" else 1, axis=0)
    return numpy.ascontiguousarray(pixels.transpose(2, 0, 1))
