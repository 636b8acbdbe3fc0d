"""What Triton makes of the kernels for a Hopper GPU, read without one: no product may lose a factor it still reads, and
no block may want more shared memory than small GPUs have.

There, tiles of 64 rows are multiplied asynchronously. Triton (seen in 3.6 and 3.9) keeps a single buffer for a factor
that the loop also sums up, and copies the next one over it while the product still reads. Numbers were wrong once in
some 200,000 steps, which no comparison of results notices; that runs of the same seed were not always alike, did.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support import mostly_slow
from torch import Tensor, nn

from pfedhn.kernels import conv, launch, linear
from pfedhn.models import MLP, LeNet, OmniglotNet

pytest.importorskip("triton")

SHARED_BYTES = 99 * 1024  # what a block may have on small GPUs; what it takes on Hopper stands for what it takes there

TARGETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "LeNet, ten classes": ((3, 32, 32), LeNet),
    "LeNet, hundred classes": ((3, 32, 32), lambda: LeNet(100)),
    "LeNet S": ((3, 32, 32), lambda: LeNet(10, 8)),
    "LeNet L": ((3, 32, 32), lambda: LeNet(10, 32)),
    "Omniglot, all characters": ((1, 28, 28), OmniglotNet),
    "Omniglot, an alphabet": ((1, 28, 28), lambda: OmniglotNet(47)),
    "MLP": ((1, 28, 28), lambda: MLP(784, 100, 10)),
    "wide MLP": ((1, 28, 28), lambda: MLP(784, 1024, 1024)),
}


class Launch(NamedTuple):
    """A kernel with everything it is compiled for."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int


def launches(monkeypatch: pytest.MonkeyPatch, target: str, num_runs: int, precision: str = "tf32") -> set[Launch]:
    """What a step of training launches; nothing is computed."""
    found: set[Launch] = set()
    jitted = launch.compiled

    class Recorder:
        def __init__(self, kernel: Callable[..., None]) -> None:
            self.kernel = jitted(kernel)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return self.launch

        def launch(self, *tensors: Tensor, num_warps: int, num_stages: int = 3, **values: Any) -> None:
            names = [parameter.name for parameter in self.kernel.params]
            types = {name: f"*{TYPES[tensor.dtype]}" for name, tensor in zip(names, tensors, strict=False)}
            constants = {p.name: values[p.name] for p in self.kernel.params if p.is_constexpr}
            types |= dict.fromkeys(values.keys() - constants.keys(), "i32")
            found.add(
                Launch(self.kernel, tuple(types.items()), tuple(sorted(constants.items())), num_warps, num_stages)
            )

    monkeypatch.setattr(launch, "compiled", Recorder)
    monkeypatch.setattr(launch, "INTERPRETED", True)  # so that tensors of a CPU are taken
    monkeypatch.setattr(conv, "dot_precision", lambda: precision)
    monkeypatch.setattr(linear, "dot_precision", lambda: precision)
    monkeypatch.setattr(launch.SharedGPU, "runs", num_runs)
    shape, factory = TARGETS[target]
    factory()(torch.zeros(64, *shape)).sum().backward()
    return found


TYPES = {torch.float32: "fp32", torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}


def compiled(launch: Launch) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = [parameter.name for parameter in launch.kernel.params]
    constants, types = dict(launch.constants), dict(launch.types)
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(launch.kernel, signature, constants, aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def overwritten_factors(code: str) -> Iterator[str]:
    """Buffers that have room for one factor only, are filled by copies and read by products nobody has waited for."""
    single = set(re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x", code))
    buffer_of = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", code))
    filled = {buffer_of.get(view) for view in re.findall(r"async_copy_global_to_local %\w+, (%\w+)", code)}
    products = re.findall(r"(%\w+) = ttng\.warp_group_dot (%\w+), (%\w+), [^\n]*isAsync = true", code)
    waits = dict(re.findall(r"ttng\.warp_group_dot_wait (%\w+)[^\n]*pendings = (\d+)", code))
    for product, *factors in products:
        if int(waits.get(product, 1)) > 0:
            yield from (f for f in factors if buffer_of.get(f) in single & filled)


@pytest.mark.parametrize(
    ("target", "num_runs", "precision"),
    mostly_slow(
        itertools.product(TARGETS, (1, 24), ("tf32", "tf32x3")),
        ("Omniglot, an alphabet", 1, "tf32"),
        ("MLP", 24, "tf32"),
        ("MLP", 24, "tf32x3"),
    ),
)
def test_no_factor_is_overwritten_while_it_is_read_and_all_have_room(
    target: str, num_runs: int, precision: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    found = launches(monkeypatch, target, num_runs, precision)
    assert len(found) >= 2
    for kernel in found:
        binary = compiled(kernel)
        code = binary.asm["ttgir"]
        assert not list(overwritten_factors(code)), kernel
        if precision == "tf32x3":  # factors are made in registers and cannot be followed, so products must be awaited
            assert not re.search(r"warp_group_dot_wait [^\n]*pendings = [1-9]", code), kernel
        assert binary.metadata.shared <= SHARED_BYTES, kernel


@pytest.mark.slow
def test_the_race_would_be_seen(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    blocks = launch.Blocks(64, 64, 32, warps=4, stages=2)
    monkeypatch.setattr(linear, "blocks_for", lambda kind, *sizes: blocks)
    found = launches(monkeypatch, "LeNet, hundred classes", 24)
    codes = [compiled(launch).asm["ttgir"] for launch in found if launch.kernel.__name__ == "linear_backward_kernel"]
    assert any(list(overwritten_factors(code)) for code in codes)
