"""The bench compares equals, and measures what it says."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from pfedhn.bench import measure as bench
from pfedhn.bench.measure import Images, Variant, Worker, Workload, is_equal, rounds_of

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
def test_worker_measures_a_variant() -> None:
    worker = Worker.start(Variant("traced"), SMALL, "cpu")
    assert is_equal(worker.first(), numbers(Variant("textbook")))
    assert worker.turn() > 0
    peak, kernels = worker.end()
    assert 100 < peak < 2_000
    assert 10 < kernels < 200


FAULTS = """
import resource, sys, torch
from pfedhn.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(min(faults() for _ in range(5)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept() -> None:
    """Pages of a large block are fetched once, not at every use; in a process that has no other memory in its way."""
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "given back")
    )
    assert kept < given_back / 10


def test_what_is_timed_against_a_graph_by_hand_is_the_same_work() -> None:
    spec = importlib.util.spec_from_file_location("gpu", Path(__file__).parents[2] / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    by_engine, by_hand = gpu.roads(torch.device("cpu"), Workload(num_clients=2, examples_per_client=80, local_steps=5))
    torch.testing.assert_close(by_engine(), by_hand(), rtol=1e-4, atol=1e-6)
