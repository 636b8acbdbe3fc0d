"""How a kernel is cut into blocks, compiled and launched."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import BoundedSemaphore, Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run on a CPU, slowly
MANY_RUNS = 8  # from here on the GPU is full whatever the blocks


class Blocks(NamedTuple):
    """How one kernel is cut up. All but `groups` (partial sums of a weight gradient, per run) are powers of two."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    groups: int = 1


ConfigKey = tuple[str, int, int, int, int, str, str]


class SharedGPU:
    """What the kernels are told of the GPU they run on."""

    runs = 1  # how many take turns on it


def is_full(runs: int) -> bool:
    """Whether the GPU has enough to do: then blocks are chosen to cost little, else to be done soon."""
    return runs * SharedGPU.runs >= MANY_RUNS


def read_configs(path: Path) -> dict[ConfigKey, Blocks]:
    """Tuned block sizes as benchmarks/tune_kernels.py writes them; none if it never ran."""
    configs: dict[ConfigKey, Blocks] = {}
    for name, values in json.loads(path.read_text()).items() if path.exists() else ():
        kind, channels, out_channels, kernel, side, runs, precision = name.split()
        configs[kind, int(channels), int(out_channels), int(kernel), int(side), runs, precision] = Blocks(*values)
    return configs


def write_configs(path: Path, configs: dict[ConfigKey, Blocks]) -> None:
    lines = (f'  "{" ".join(map(str, key))}": {list(blocks)}' for key, blocks in sorted(configs.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


CONFIGS_FILE = Path(__file__).with_name("kernel_configs.json")

CONFIGS: dict[ConfigKey, Blocks] = read_configs(CONFIGS_FILE)


def tuned_blocks(key: ConfigKey) -> Blocks | None:
    """The tuned block sizes; where float32 has none, those of tf32, half as deep: its factors take twice the memory."""
    blocks = CONFIGS.get(key)
    if blocks is None and (others := CONFIGS.get((*key[:-1], "tf32"))) is not None:
        blocks = others._replace(depth=max(16, others.depth // 2))
    return blocks


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def tile(size: int) -> int:
    """The side of a block that holds `size`: a power of two, and at least what `tl.dot` takes."""
    return max(16, power_of_two(size))


def ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


def dot_precision() -> str:
    """How `tl.dot` multiplies. "tf32x3" splits a float32 factor into two of tf32 and adds three of their products.

    On an H200 that is as exact as Triton's "ieee", and the kernels take half the time.
    """
    # Not torch.get_float32_matmul_precision: that one raises once somebody has used PyTorch's newer settings.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def is_usable(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    if INTERPRETED:
        return True
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return HAS_TRITON and is_nvidia and torch.cuda.get_device_properties(device).major >= 8


UNSPECIALIZED = ("batch", "steps", "groups", "count")  # numbers that one compiled kernel takes any value of


@functools.cache
def compiled(kernel: Callable[..., None]) -> Any:
    """Imports Triton when a kernel is first asked for, which takes 0.4 s."""
    if not HAS_TRITON:
        raise RuntimeError(f"{kernel.__name__} needs Triton: pip install triton")
    import triton
    import triton.language

    kernel.__globals__["tl"] = triton.language  # where the kernel looks it up when it is compiled
    return triton.jit(kernel, do_not_specialize=list(UNSPECIALIZED))


_announced: dict[Any, Future[None]] = {}
_cores = BoundedSemaphore(max(1, min(16, os.cpu_count() or 1)))


def launch(function: Callable[..., None], grid: tuple[int, ...], tensors: Sequence[Tensor], **arguments: Any) -> None:
    """Launch a kernel; one that tensors without numbers are given to is only compiled, on another core meanwhile."""
    device = tensors[0].device
    is_announcement = isinstance(tensors[0], FakeTensor)
    if is_announcement and (device.type != "cuda" or not torch.cuda.is_available()):
        return
    if is_announcement or _announced:
        dtypes = tuple(tensor.dtype for tensor in tensors)
        fixed = tuple(sorted((name, value) for name, value in arguments.items() if name not in UNSPECIALIZED))
        key = (function, device, dtypes, fixed)
        if is_announcement:
            if key not in _announced:
                future: Future[None] = Future()
                # Threads do, since almost all of Triton's time is spent outside of Python; nobody waits for them at
                # the end. The kernel is made here: each of them would make another.
                work = (future, compiled(function), device, dtypes, arguments)
                Thread(target=_compile, args=work, daemon=True).start()
                _announced[key] = future  # last: nobody may wait for a kernel that nobody compiles
            return
        if key in _announced:
            _announced[key].result()
    with torch.cuda.device_of(tensors[0]):
        compiled(function)[grid](*tensors, **arguments)


def _compile(
    future: Future[None], kernel: Any, device: torch.device, dtypes: Sequence[torch.dtype], arguments: dict[str, Any]
) -> None:
    # What goes wrong here goes wrong again where the kernel is launched, and is told there.
    with suppress(Exception), _cores, torch.cuda.device(device):
        kernel.warmup(*dtypes, grid=(1,), **arguments)
    future.set_result(None)


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def operator(name: str) -> Callable[[Callable[Arguments, Value]], Callable[Arguments, Value]]:
    """Make an operator of a function that launches kernels; on tensors without numbers, it announces them."""

    def register(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
        made = torch.library.custom_op(name, function, mutates_args=())
        made.register_fake(function)
        return made

    return register


def launch_blocks(
    function: Callable[..., None], grid: tuple[int, ...], tensors: Sequence[Tensor], blocks: Blocks, **arguments: Any
) -> None:
    launch(
        function,
        grid,
        tensors,
        **arguments,
        rows=blocks.rows,
        columns=blocks.columns,
        depth=blocks.depth,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
