"""The bench compares equals, and measures what it says."""

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from pfedhn.bench import measure as bench
from pfedhn.bench.measure import Images, Variant, Worker, Workload, is_equal, rounds_of
from pfedhn.system.process import keep_freed_memory

SMALL = Workload("mlp", num_clients=4, examples_per_client=20, local_steps=2, batch_size=8)


def numbers(variant: Variant) -> dict[str, numpy.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in next(rounds_of(variant, SMALL, "cpu"))().items()}


@pytest.mark.parametrize("variant", [Variant(name) for name in ("textbook-images", "loop", "traced", "captured")])
def test_variants_compute_the_same(variant: Variant) -> None:
    assert is_equal(numbers(variant), numbers(Variant("textbook")))


def test_difference_is_noticed() -> None:
    right = numbers(Variant("textbook"))
    wrong = {name: value * 1.01 for name, value in right.items()}
    assert not is_equal(wrong, right)


def test_plain_layers_are_the_engine_s() -> None:
    for workload in (Workload(), SMALL):
        shapes = [{n: p.shape for n, p in workload.target(plain)().named_parameters()} for plain in (True, False)]
        assert shapes[0] == shapes[1]
    x = torch.randn(2, 3, 32, 32)
    plain, ours = Workload().target(True)(), Workload().target(False)()
    ours.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(x), ours(x))


@pytest.mark.parametrize("open_image", [Image.fromarray, numpy.asarray])
def test_images_are_converted_one_by_one(open_image: object) -> None:
    workload = Workload(num_clients=1, examples_per_client=3)
    images, y = workload.images()
    data = Images(images, y, *workload.scale(), open_image)  # type: ignore[arg-type]
    x = torch.stack([data[row][0] for row in range(3)])
    assert torch.equal(x, workload.federation().x)
    assert [data[row][1] for row in range(3)] == y.tolist()


def test_operators_are_counted_without_views() -> None:
    a = torch.randn(3, 4)
    assert bench.count_kernels(lambda: (a.t() @ a.view(3, 4)).relu().sum(), "cpu") == 3


@pytest.mark.slow
def test_rounds_among_many_clients_are_measured() -> None:
    lines = bench.measure_clients((10, 30), lambda sentence: None)
    assert [line["clients"] for line in lines] == [10, 30, 30]  # the last ones' data are made when needed
    assert {line["bytes_per_client"] for line in lines} == {4 * (13 + 13 + 1)}  # embedding, velocity, last step
    assert all(line["ms_per_round"] > 0 for line in lines)


@pytest.mark.slow
def test_worker_measures_a_variant() -> None:
    worker = Worker.start(Variant("traced"), SMALL, "cpu")
    assert is_equal(worker.first(), numbers(Variant("textbook")))
    assert worker.turn() > 0
    peak, kernels = worker.end()
    assert 100 < peak < 2_000
    assert 10 < kernels < 200


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_glibc_is_told_to_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that saves depends on where the system puts a process's heap, so that it is measured and not tested."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *words: told.append(words)))
    keep_freed_memory()
    assert told == [(-4, 0), (-1, 2**31 - 1)]  # M_MMAP_MAX: no block of its own mapping; M_TRIM_THRESHOLD: keep 2 GB


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The program benchmarks/gpu.py, as a module."""
    spec = importlib.util.spec_from_file_location("gpu", Path(__file__).parents[2] / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_it_is_told_whether_something_is_compiled_already(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert not gpu.has_compiled()
    (tmp_path / "TRITON_CACHE_DIR").mkdir()
    assert not gpu.has_compiled()
    (tmp_path / "TRITON_CACHE_DIR" / "kernel").touch()
    assert gpu.has_compiled()


def test_what_is_timed_against_a_graph_by_hand_is_the_same_work(gpu: Any) -> None:
    by_engine, by_hand = gpu.roads(torch.device("cpu"), Workload(num_clients=2, examples_per_client=80, local_steps=5))
    torch.testing.assert_close(by_engine(), by_hand(), rtol=1e-4, atol=1e-6)
