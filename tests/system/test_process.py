"""Importing pfedhn changes nothing in a process; `set_up_process` does what it says; signals stop a run soon."""

import importlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pfedhn
from pfedhn.system import process
from pfedhn.system.process import STOPS, stop_on_signal

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's threads and glibc's allocator are Linux's")

HEADING = """
import ctypes, os, sys

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

def gives_back():
    "Whether the system maps a large block apart from the others, and takes it back as soon as it is freed."
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = libc.mallinfo2().hblks
    block = libc.malloc(64 * 2**20)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after > before

before = dict(os.environ)
"""


def in_fresh_process(code: str, **environment: str) -> str:
    """What the code writes to stderr."""
    inherited = {n: v for n, v in os.environ.items() if n not in process.THREAD_VARIABLES and "CACHE_DIR" not in n}
    done = subprocess.run(
        [sys.executable, "-c", HEADING + code], env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_every_public_name_has_a_home() -> None:
    assert set(pfedhn._HOMES) == set(pfedhn.__all__)
    assert set(pfedhn.__all__) <= set(dir(pfedhn))
    for name in pfedhn.__all__:
        assert getattr(pfedhn, name) is not None
    assert importlib.import_module("pfedhn.datasets").load is pfedhn.datasets.load
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = pfedhn.trian


@LINUX
@pytest.mark.slow
def test_import_and_training_change_nothing_in_the_process() -> None:
    said = in_fresh_process("""
import pfedhn
assert pfedhn.__version__
assert not {"torch", "numpy", "rich", "typer"} & set(sys.modules)
assert dict(os.environ) == before
import numpy, sklearn, torch
import torch._inductor.config as inductor
before = dict(os.environ)  # with what these libraries set themselves
compiler = inductor.get_config_copy()
assert pfedhn.datasets.DATASETS
for name in pfedhn.__all__:
    getattr(pfedhn, name)
x, y = numpy.random.default_rng(0).normal(size=(60, 4)), numpy.arange(60) % 2
federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(1, num_clients=4))
for executor in ("traced", "captured", "traced"):
    pfedhn.train("fedavg", federation, lambda: pfedhn.MLP(4, 4, 2), steps=2, executor=executor, progress=False)
from pfedhn.engine import gpu
torch._inductor.compile = lambda graph, shapes: graph  # on a CPU it would leave a variable of its own behind
sine = torch.fx.experimental.proxy_tensor.make_fx(torch.sin)(torch.ones(1))
part = gpu.BackgroundCompiledGraph(sine, [torch.ones(1)])
part(torch.ones(1))
gpu.COMPILER.wait()
assert part.best != part.graph.forward
assert inductor.get_config_copy() == compiler
assert dict(os.environ) == before
assert gives_back()
""")
    assert said.count("pfedhn.set_up_process()") == 1  # however many runs


@LINUX
def test_one_call_sets_a_process_up(tmp_path: Path) -> None:
    said = in_fresh_process(
        """
import pfedhn
pfedhn.set_up_process()
assert "torch" not in sys.modules
changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
cache = before["PFEDHN_CACHE"]
assert changed == {
    "GOMP_SPINCOUNT": "1000",
    "TORCHINDUCTOR_CACHE_DIR": f"{cache}/compiled/inductor",
    "TRITON_CACHE_DIR": f"{cache}/compiled/triton",
}
assert not gives_back()
pfedhn.system.process.advise_once("cpu")
pfedhn.set_up_process()
""",
        PFEDHN_CACHE=str(tmp_path / "cache"),
    )
    assert said == ""
    assert not (tmp_path / "cache").exists()  # whoever compiles makes it


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_what_a_person_has_set_stays(name: str, value: str, tmp_path: Path) -> None:
    said = in_fresh_process(
        f"""
import pfedhn, torch
pfedhn.set_up_process()
assert os.environ["{name}"] == "{value}"
assert len({{"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}} & set(os.environ)) == 1
assert os.environ["TRITON_CACHE_DIR"] == "mine"
pfedhn.system.process.advise_once("cpu")
""",
        **{name: value, "TRITON_CACHE_DIR": "mine", "PFEDHN_CACHE": str(tmp_path)},
    )
    assert said == ""


@LINUX
@pytest.mark.slow
def test_a_call_after_torch_says_that_it_is_too_late() -> None:
    said = in_fresh_process("import torch, pfedhn; pfedhn.set_up_process(); pfedhn.set_up_process()")
    assert said.count("came after torch was imported, too late") == 1


def test_a_gpu_needs_no_advice(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in process.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, "pfedhn"):
        process.advise_once("cuda:0")
    assert not caplog.records


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PFEDHN_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    process.keep_compiled()
    assert "TRITON_CACHE_DIR" not in os.environ


@LINUX
@pytest.mark.slow
def test_a_worker_is_set_up_before_it_imports_anything() -> None:
    """It would say that it is too late if its arguments, which import torch, were read first."""
    said = in_fresh_process("""
from multiprocessing.connection import Connection
from pfedhn.system.process import start_ahead, start_process
start_ahead()
from pfedhn.experiments.directory import Options
for _ in range(2):  # the one that was started ahead, and another
    worker, pipe = start_process(Connection.send, Options("demo"))
    assert pipe.recv() == Options("demo")
    worker.join()
assert dict(os.environ) == before
""")
    assert said == ""


@LINUX
def test_a_process_started_ahead_is_the_next_that_works_or_ends_with_its_parent() -> None:
    said = in_fresh_process("""
import signal
from multiprocessing.connection import Connection
from pfedhn.system import process
signal.alarm(60)  # or it would wait for ever
for _ in range(2):
    process.start_ahead("wave")
(_, last) = [worker for worker, _ in process._ahead]
worker, pipe = process.start_process(Connection.send, "done")
assert worker is last
assert pipe.recv() == "done"
assert [worker.is_alive() for worker, _ in process._ahead] == [True]
""")
    assert said == ""


@pytest.mark.parametrize("number", STOPS)
def test_every_request_to_stop_is_heard_and_a_second_one_at_once(number: signal.Signals) -> None:
    with stop_on_signal() as stop:
        signal.raise_signal(number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)
