"""A run's directory is of one run, and no file of it can be changed, lost or mixed up unnoticed."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import mostly_slow, resealed, resealed_json

import pfedhn
from pfedhn.data.reading import Column, Reading, TableReading
from pfedhn.errors import RunError, UserError
from pfedhn.report.results import read_run
from pfedhn.storage import directory as run_directory
from pfedhn.storage.checkpoint import CheckpointError, checkpoints
from pfedhn.storage.files import digest

MLP = functools.partial(pfedhn.MLP, 4, 3, 2)


def arrays(seed: int = 0) -> tuple[Any, Any]:
    generator = numpy.random.default_rng(seed)
    return generator.normal(size=(90, 4)).astype("float32"), numpy.arange(90) % 2


def named(names: tuple[str, ...] = ("a", "b", "c"), seed: int = 0) -> pfedhn.Federation:
    x, y = arrays(seed)
    return pfedhn.Federation.from_clients({name: (x[i::3], y[i::3]) for i, name in enumerate(names)})


def train(directory: Path, federation: pfedhn.Federation | None = None, **changes: Any) -> pfedhn.Run:
    given: dict[str, Any] = {"steps": 4, "evaluate_every": 1, "checkpoint_every": 2, "progress": False, **changes}
    method = given.pop("method", pfedhn.FedAvg(local_steps=1))
    return pfedhn.train(method, federation or named(), MLP, cohort_size=1, directory=directory, device="cpu", **given)


def test_a_table_whose_columns_changed_places_is_another(tmp_path: Path) -> None:
    """The numbers are the same, but predictions go by the names."""

    def of(*names: str) -> pfedhn.Federation:
        return replace(named(), reading=Reading(TableReading("clinic", "outcome", tuple(map(Column, names)))))

    train(tmp_path, of("age", "dose", "size", "time"))
    with pytest.raises(UserError, match="holds another run: the columns of its table are others;"):
        train(tmp_path, of("dose", "age", "size", "time"))
    train(tmp_path, of("age", "dose", "size", "time"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "run"
    train(path)
    return path


@pytest.fixture
def finished(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def unfinished(finished: Path) -> Path:
    (finished / "result.json").unlink()
    return finished


def with_labels_turned() -> pfedhn.Federation:
    x, y = arrays()
    return pfedhn.Federation.from_clients({name: (x[i::3], 1 - y[i::3]) for i, name in enumerate("abc")})


OTHER_DATA: list[tuple[Callable[[], pfedhn.Federation], str]] = [
    (lambda: named(seed=1), "the examples or labels are others"),
    (with_labels_turned, "the examples or labels are others"),
    (lambda: replace(named(), names=("x", "y", "z"), identities=named().identities), "the clients' names"),
    (lambda: named().evaluating([0]), "the clients have other examples in training, validation or test"),
    (lambda: named().with_descriptors(numpy.eye(3)), "the clients' names, descriptors or networks are others"),
]


@pytest.mark.parametrize(("federation", "sentence"), OTHER_DATA)
def test_other_data_of_the_same_shape_are_another_run(
    finished: Path, federation: Callable[[], pfedhn.Federation], sentence: str
) -> None:
    with pytest.raises(UserError, match=f"holds another run: .*{sentence}"):
        train(finished, federation())


def test_data_that_are_loaded_when_needed_are_looked_at_in_part(tmp_path: Path) -> None:
    x, y = arrays()

    def lazy(changed: int | None = None) -> pfedhn.Federation:
        def load(client: int) -> dict[str, Any]:
            shift = 1.0 if client == changed else 0.0
            return {"train": (x[:6] + client + shift, y[:6]), "test": (x[6:9] + client, y[6:9])}

        return pfedhn.Federation.lazy(20, load, train=6, test=3)

    train(tmp_path, lazy())
    train(tmp_path, lazy())
    for client in (0, 19):
        with pytest.raises(UserError, match="the examples or labels are others"):
            train(tmp_path, lazy(client))


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    """As when that of seed 1 is copied into the folder of seed 0."""
    for seed in (0, 1):
        train(tmp_path / str(seed), seed=seed)
    (tmp_path / "0" / "result.json").unlink()
    for file in (tmp_path / "1").glob("checkpoint-*"):
        shutil.copy(file, tmp_path / "0")
    with pytest.raises(CheckpointError, match=r"is of another run \(its seed differ\) and was not used"):
        train(tmp_path / "0", seed=0)
    with pytest.raises(CheckpointError, match="is of another run"):
        pfedhn.load(tmp_path / "0")


@pytest.mark.slow
def test_the_files_of_another_run_are_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        train(tmp_path / str(seed), seed=seed)
    for name, sentence in (
        ("result.json", r"result\.json is of another run \(its seed differ\)"),
        ("metrics.jsonl", "was changed or has lost lines; start the run again, which mends it"),
    ):
        whole = (tmp_path / "0" / name).read_bytes()
        shutil.copy(tmp_path / "1" / name, tmp_path / "0")
        with pytest.raises(RunError, match=sentence):
            read_run(tmp_path / "0")
        train(tmp_path / "0", seed=0)
        read_run(tmp_path / "0")
        if name == "metrics.jsonl":
            assert (tmp_path / "0" / name).read_bytes() == whole


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[bytes], bytes]:
    return lambda content: b"\n".join(change(content.split(b"\n")))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a line lost": lines(lambda parts: parts[:1] + parts[2:]),
    "lines in another order": lines(lambda parts: [parts[1], parts[0], *parts[2:]]),
    "a digit": lambda content: content.replace(b'"step": 2', b'"step": 9'),
    "zeroed": lambda content: content[:200] + b"\0" * 50 + content[250:],
    "an empty table": lambda content: b"{}\n" + content,
    "null": lines(lambda parts: [b"null", *parts[1:]]),
    "the end": lines(lambda parts: [*parts[:-2], b""]),
    "all": lambda content: b"",
}


@pytest.mark.parametrize("how", mostly_slow(DAMAGE, "a line lost", "a digit"))
@pytest.mark.parametrize("is_finished", mostly_slow([True, False], True))
def test_damaged_metrics_are_refused_and_mended(finished: Path, how: str, is_finished: bool) -> None:
    if not is_finished:
        (finished / "result.json").unlink()
    file = finished / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[how](whole))
    assert file.read_bytes() != whole
    with pytest.raises(RunError, match=r"metrics\.jsonl (is damaged|was changed or has lost lines)"):
        read_run(finished)
    run = train(finished)
    assert file.read_bytes() == whole
    assert [moment.step for moment in run.history] == [0, 1, 2, 3, 4]
    read_run(finished)


def chain(folder: Path) -> None:
    """Write the metrics as earlier versions did: each line with a digest of itself and all lines before it."""
    file, lines, before = folder / "metrics.jsonl", [], ""
    for table in map(json.loads, file.read_text().splitlines()):
        before = digest([before, table])
        lines.append(json.dumps({**table, "sha256": before}) + "\n")
    file.write_text("".join(lines))
    if (folder / "result.json").exists():
        resealed_json(folder / "result.json", lambda table: table.update(history=before))


def test_a_finished_run_with_chained_metrics_is_read_and_left_as_it_is(finished: Path) -> None:
    chain(finished)
    before = {file.name: file.read_bytes() for file in finished.iterdir()}
    read_run(finished)
    assert [moment.step for moment in train(finished).history] == [0, 1, 2, 3, 4]
    assert {file.name: file.read_bytes() for file in finished.iterdir()} == before
    lines = before["metrics.jsonl"].splitlines(keepends=True)
    (finished / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RunError, match="was changed or has lost lines"):
        read_run(finished)


def test_a_run_with_chained_metrics_goes_on(unfinished: Path) -> None:
    chain(unfinished)
    assert len(run_directory.read_history(unfinished)) == 5
    assert [moment.step for moment in train(unfinished).history] == [0, 1, 2, 3, 4]
    read_run(unfinished)


def test_half_a_last_line_of_a_run_that_goes_on_does_not_count(unfinished: Path) -> None:
    file = unfinished / "metrics.jsonl"
    with file.open("a") as stream:
        stream.write('{"step": 5, "rou')
    assert len(run_directory.read_history(unfinished)) == 5


def test_a_lost_spec_is_said(finished: Path) -> None:
    (finished / "spec.toml").unlink()
    with pytest.raises(RunError, match=r"has lost its spec\.toml, which says what its run is"):
        train(finished)


def test_a_result_is_written_anew_where_it_was_made(finished: Path) -> None:
    """Not where it happens to be mended: the environment is part of the result."""
    before = run_directory.read_result(finished)
    resealed(finished / "spec.toml", lambda text: text.replace("threads = ", "threads = 1"))
    (finished / "result.json").write_text("{}")
    again = train(finished).result
    assert again is not None
    assert before is not None
    assert again.environment.threads != before.environment.threads
    assert again.test == before.test


def test_a_changed_checkpoint_that_was_sealed_again_is_still_of_its_step(unfinished: Path) -> None:
    (newest,) = checkpoints(unfinished)
    resealed_json(newest, lambda table: table.update(step=3))
    with pytest.raises(CheckpointError, match="is the checkpoint of step 3 and was not used"):
        train(unfinished)
