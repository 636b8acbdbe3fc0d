"""What the shell offers while a command is typed, from a cache: to import everything would take seconds.

The cache is made anew when a file of the package has changed.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pfedhn.system.files import cache_folder, write_atomically


def _state() -> str:
    """What the names depend on: when the files of the package were written."""
    files = Path(__file__).parent.parent.rglob("*.py")
    return str(max(file.stat().st_mtime_ns for file in files))


def names(kind: str) -> list[str]:
    """The experiments (studies too), methods, data sets, or fields that `--set` takes."""
    with suppress(Exception):  # a shell that completes is no place for an error
        state, file = _state(), cache_folder() / "completion.json"
        with suppress(OSError, ValueError):
            table = json.loads(file.read_text())
            if table["state"] == state:
                return [str(name) for name in table[kind]]
        table = {"state": state, **_generated()}
        with suppress(Exception):  # if nothing can be written, it takes longer
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(table).encode())
        return list(table[kind])
    return []


def _generated() -> dict[str, list[str]]:
    from dataclasses import fields

    from pfedhn.algorithms import ALGORITHMS
    from pfedhn.experiments.registry import experiments
    from pfedhn.experiments.spec import NAMED, Cell
    from pfedhn.report.study import studies
    from pfedhn.settings import names_to_set

    by_method = {name: names_to_set(known.kinds) for name, known in ALGORITHMS.items()}
    settings = dict.fromkeys(setting for names in by_method.values() for setting in names)
    of_methods = [f"{method}.{setting}" for method, names in by_method.items() for setting in names]
    return {
        "experiments": [*experiments(), *studies()],
        "methods": list(ALGORITHMS),
        "datasets": list(NAMED),
        "fields": [*(item.name for item in fields(Cell)), *settings, *of_methods],
    }


def _beginning(incomplete: str, found: Iterable[str]) -> list[str]:
    return [name for name in found if name.startswith(incomplete)]


def files_like(incomplete: str, *endings: str) -> list[str]:
    """Folders, and files with these endings, that begin so."""
    place = Path(incomplete)
    folder = place if incomplete.endswith("/") else place.parent
    found = []
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() or path.suffix in endings:
                found.append(f"{path}/" if path.is_dir() else str(path))
    return _beginning(incomplete, found)


def run_directories(incomplete: str) -> list[str]:
    """Directories of experiments and runs under here and under runs/; else whatever folder begins so."""
    found: list[str] = []
    with suppress(OSError):
        for pattern in ("*", "runs/*", "runs/*/*", "*/*"):
            for path in sorted(Path().glob(pattern)):
                if any((path / name).exists() for name in ("experiment.toml", "spec.toml")):
                    found.append(str(path))
    return _beginning(incomplete, dict.fromkeys(found)) or files_like(incomplete)


def experiments(incomplete: str) -> list[str]:
    return [*_beginning(incomplete, names("experiments")), *files_like(incomplete, ".toml", ".py")]


def datasets_and_experiments(incomplete: str) -> list[str]:
    return [*_beginning(incomplete, names("datasets")), *experiments(incomplete)]


def assignments(incomplete: str) -> list[str]:
    """FIELD= for `--set`; after `method=`, the methods."""
    field, sign, value = incomplete.partition("=")
    if not sign:
        return [f"{name}=" for name in _beginning(incomplete, names("fields"))]
    values = {"method": "methods", "dataset": "datasets", "pretrain": "methods"}
    return [f"{field}={name}" for name in _beginning(value, names(values[field]))] if field in values else []


def one_of(*known: str) -> Callable[[str], list[str]]:
    """A completion of fixed words."""
    return lambda incomplete: _beginning(incomplete, known)
