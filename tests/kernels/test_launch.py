"""How kernels are chosen, compiled and launched; all of them in Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support import ON_GPU
from torch._subclasses.fake_tensor import FakeTensorMode

from pfedhn.kernels import conv, launch


@pytest.mark.skipif(ON_GPU or launch.INTERPRETED, reason="the kernels are tested directly")
@pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton is not installed")
@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    arguments = ["-m", "pytest", "-q", *plugins, "-k", "on_triton", str(Path(__file__).parent)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, *arguments], env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout


@pytest.mark.slow
def test_import_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from pfedhn.kernels import conv, launch; "
        "conv.ConvBlock(3, 8, 5)(torch.randn(1, 3, 8, 8)).sum().backward(); assert not launch.HAS_TRITON"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_precision_follows_torch() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert launch.dot_precision() == "tf32x3"
        torch.set_float32_matmul_precision("high")
        assert launch.dot_precision() == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = False
        assert launch.dot_precision() == "tf32x3"
    finally:
        torch.set_float32_matmul_precision(before)


def test_configs_survive_the_file(tmp_path: Path) -> None:
    launch.write_configs(tmp_path / "configs.json", launch.CONFIGS)
    assert launch.read_configs(tmp_path / "configs.json") == launch.CONFIGS
    assert launch.read_configs(tmp_path / "none.json") == {}


def test_where_float32_was_not_tuned_its_blocks_are_those_of_tf32_half_as_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ("forward", 16, 32, 5, 16, "many")
    tuned = launch.Blocks(64, 16, 64, warps=4, stages=2)
    monkeypatch.setattr(launch, "CONFIGS", {(*size, "tf32"): tuned})
    assert launch.tuned_blocks((*size, "tf32")) == tuned
    assert launch.tuned_blocks((*size, "tf32x3")) == tuned._replace(depth=32)
    monkeypatch.setitem(launch.CONFIGS, (*size[:-1], "one", "tf32"), tuned._replace(depth=16))
    assert launch.tuned_blocks((*size[:-1], "one", "tf32x3")) == tuned._replace(depth=16)
    assert launch.tuned_blocks(("forward", 16, 32, 3, 16, "many", "tf32x3")) is None
    own = tuned._replace(rows=16)
    monkeypatch.setitem(launch.CONFIGS, (*size, "tf32x3"), own)
    assert launch.tuned_blocks((*size, "tf32x3")) == own


def test_what_has_no_numbers_announces_its_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    announced = []
    monkeypatch.setattr(launch, "_announced", {})
    monkeypatch.setattr(launch, "compiled", lambda function: function)
    monkeypatch.setattr(launch, "_compile", lambda future, kernel, *_: future.set_result(announced.append(kernel)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode():
        for batch, device in ((64, "cuda"), (2, "cuda"), (64, "cpu")):
            x, weight, bias = (
                torch.empty(1, batch, 32, 32, 4, device=device),
                torch.empty(1, 5, 5, 4, 16, device=device),
                torch.empty(1, 16, device=device),
            )
            out, argmax = conv.conv_block_op(x, weight, bias, 0, True, "tf32")
            assert out.shape == argmax.shape == (1, batch, 14, 14, 16)
            assert (out.device.type, argmax.dtype) == (device, torch.int8)
    for future in launch._announced.values():
        future.result()
    assert announced == [conv.forward_kernel]


def test_nobody_waits_for_a_kernel_that_could_not_be_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_announced", {})
    monkeypatch.setattr(launch, "compiled", Mock(side_effect=RuntimeError("a broken Triton")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="a broken Triton"):
        launch.launch(conv.forward_kernel, (1,), (torch.empty(1, device="cuda"),))
    assert not launch._announced
