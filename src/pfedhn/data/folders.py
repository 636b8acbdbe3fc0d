"""Your own arrays: a folder per client, each with x.npy and y.npy."""

from pathlib import Path
from typing import NamedTuple

import numpy

from pfedhn.data.arrays import Array
from pfedhn.data.labels import Task, as_labels
from pfedhn.errors import UserError, first_line
from pfedhn.system.files import given_path, reading


class Folders(NamedTuple):
    """The examples in every client's folder."""

    clients: dict[str, tuple[Array, Array]]  # (x, y) by the folder's name
    class_names: tuple[str, ...] | None  # of classes 0, 1, ... where the labels were text


def from_folders(path: str | Path, task: Task = "auto") -> Folders:
    """Your own data: a folder per client, each with x.npy and y.npy.

    Text labels become class numbers 0, 1, ... in the sorted order of all clients' labels.

    Args:
        path: The folder that holds the clients' folders; their names, sorted, are the clients'.
        task: What the labels are, as in `from_table`; with "auto", floating-point labels are numbers to predict.

    Examples:
        >>> import numpy, pathlib, tempfile
        >>> from pfedhn.datasets import from_folders
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for client in ("paris", "lyon"):
        ...     (root / client).mkdir()
        ...     numpy.save(root / client / "x.npy", numpy.zeros((4, 3)))
        ...     numpy.save(root / client / "y.npy", numpy.array(["cat", "dog", "cat", "dog"]))
        >>> clients, class_names = from_folders(root)
        >>> list(clients), clients["lyon"][1], class_names
        (['lyon', 'paris'], array([0, 1, 0, 1]), ('cat', 'dog'))
    """
    root = given_path(path)
    with reading(root):
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give one that holds a folder per client.")
    folders = client_folders(root)
    if not folders:
        raise UserError(
            f"{root} holds no folders; make one per client, with x.npy and y.npy or a folder of images per class."
        )
    clients = []
    for folder in folders:
        x, y = load_array(folder / "x.npy", "biuf"), load_array(folder / "y.npy", "biufUS")
        if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
            raise UserError(f"{folder} has x of shape {x.shape} and y of shape {y.shape}; give one label per example.")
        clients.append((x, y))
    is_text = {folder: y.dtype.kind in "US" for folder, (_, y) in zip(folders, clients, strict=True) if len(y)}
    if len(set(is_text.values())) > 1:
        text, numbers = (next(folder for folder in is_text if is_text[folder] == wanted) for wanted in (True, False))
        raise UserError(f"{text} has text labels and {numbers} has numbers; give all clients one kind.")
    labels, class_names = as_labels([y for _, y in clients], task, str(root))
    named = {folder.name: (x, y) for folder, (x, _), y in zip(folders, clients, labels, strict=True)}
    return Folders(named, class_names)


def client_folders(root: Path) -> list[Path]:
    with reading(root):
        return sorted(folder for folder in root.iterdir() if is_client_folder(folder))


def is_client_folder(place: Path) -> bool:
    return place.is_dir() and not place.name.startswith(".")


def load_array(path: Path, kinds: str) -> Array:
    """An array of one of these kinds of numbers or text (as `numpy.dtype.kind` calls them)."""
    with reading(path):
        if not path.exists():
            raise UserError(f"{path} is missing; every client's folder needs x.npy and y.npy.")
        if not path.is_file():
            raise UserError(f"{path} is not a file; write it with numpy.save.")
    try:
        # Mapped first: a header that promises more than the file holds is refused before room is made for it.
        mapped = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); make it readable.") from error
    except Exception as error:  # whatever a damaged file makes of NumPy's reader
        raise UserError(f"{path} is not an array of numbers or text; write it with numpy.save.") from error
    if not isinstance(mapped, numpy.ndarray):
        mapped.close()
        raise UserError(f"{path} holds several arrays (.npz); write one with numpy.save.")
    if mapped.dtype.kind not in kinds:
        allowed = "numbers or texts" if "U" in kinds else "numbers"
        raise UserError(f"{path} holds {mapped.dtype} and not {allowed}; convert it before numpy.save.")
    return numpy.array(mapped)
